//! GEMM of 4- and 8-bit weights with half floats (w4a16, w8a16) on Hopper: launches of `wna16_sm90.cu`.
//!
//! Weights are converted in registers and multiplied by `wgmma` or, for few rows, `mma.sync`; TMA and bulk copies bring x and
//! weights; tiles are cut among all blocks (stream-K) or shared by a cluster (split-K); blocks start while the kernel before ends
//! (PDL). Products use exact codes and scale the sums of each group; x may be of another type than the scales. Where it is of theirs, and y a
//! half float or the weight allows it, those of more than 128 rows (64 where groups are
//! smaller) use weights that were scaled, or computed in f32, and rounded to the type of x, once.

mod candidates;
mod choice;
pub mod config;
mod cost;

pub use candidates::{candidates, compiles};

use super::folded_norm::{self, Fold};
use super::gemm::{self, Choice, Gemm, Operands, Placed, Products, X};
use super::grouped::{self, grouped_arguments};
use super::kernel::{Answer, Kernel};
use super::sum_groups::SumsOfX;
use super::wna16::{self, Weights};
use crate::cuda::Caps;
use crate::cuda::driver::{Promotion, Swizzle, TensorMap, Tiles};
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::schedule::{Cuts, Schedule};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Tile};
use crate::error::Result;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use bytemuck::Zeroable;
use config::Config;
use cost::Timed;

static SOURCE: Source = Source {
    path: "matmul/wna16_sm90.cu",
    text: include_str!("wna16_sm90.cu"),
    parameters: &[Arguments::LAYOUT, GroupedArguments::LAYOUT],
};

pub(super) const KERNEL: Kernel = gemm::row::<Wna16Sm90>(
    "wgmma or mma.sync on weights converted in registers, copies by the bulk engine",
    |arch| arch.number == 90 && arch.specific,
    instances,
);

/// Every configuration for the commonest format, and the others' forms of conversion.
fn instances(_: Arch) -> Vec<Instance> {
    let atom = Atom::W4_G128;
    let usual = Form::floats(atom, Float::F16);
    let all = config::all(&usual).into_iter().map(|c| c.instance(&usual, Activation::None));
    let of_halves = Atom { scale: Float::F32, multiples: true, ..atom };
    let others = [
        (Atom { scale: Float::BF16, ..atom }, Float::BF16, Activation::Silu),
        (Atom { bits: 8, scale: Float::BF16, zero: true, group: 32, ..Atom::W4_G128 }, Float::F32, Activation::Gelu),
        (Atom { bits: 8, group: 0, zero: true, ..atom }, Float::F16, Activation::GeluTanh),
        (Atom { zero: true, group: 64, ..atom }, Float::F16, Activation::Relu6),
        (Atom { scale: Float::F32, offset: true, group: 32, ..atom }, Float::F32, Activation::None),
        (Atom { bits: 8, scale: Float::F32, group: 16, ..atom }, Float::F32, Activation::None),
        (Atom { offset: true, group: 64, ..atom }, Float::F16, Activation::Silu),
        (Atom { offset: true, group: 32, ..of_halves }, Float::F32, Activation::None),
        (Atom { bits: 6, group: 16, ..of_halves }, Float::BF16, Activation::None),
        (Atom { bits: 5, offset: true, group: 32, ..of_halves }, Float::F32, Activation::None),
        (Atom { bits: 3, group: 16, ..of_halves }, Float::F32, Activation::None),
        (Atom { bits: 5, group: 32, ..atom }, Float::F16, Activation::None),
        (Atom { table: Some(Atom::A_TABLE), group: 32, scale: Float::BF16, ..atom }, Float::F32, Activation::None),
        (Atom { table: Some(Atom::A_TABLE), group: 16, ..atom }, Float::F16, Activation::None),
        (Atom { bits: 2, group: 64, ..atom }, Float::F16, Activation::None),
        (Atom { bits: 3, zero: true, group: 32, ..atom }, Float::F32, Activation::None),
    ];
    let few = others.into_iter().flat_map(|(atom, out, activation)| {
        let shapes = [[1, 21504, 14336], [64, 4096, 4096], [1024, 21504, 14336]];
        let form = Form::floats(atom, out);
        shapes.map(|shape| config::config(&form, shape, &Caps::H200).instance(&form, activation))
    });
    let f32 = Form::floats(atom, Float::F32);
    let unlike = Form { x: Float::BF16, ..Form::floats(Atom { zero: true, group: 64, ..atom }, Float::F16) };
    let unlike = [[1, 21504, 14336], [64, 4096, 4096], [1024, 21504, 14336]]
        .map(|shape| config::config(&unlike, shape, &Caps::H200).instance(&unlike, Activation::None));
    let rounding = Caps { rounded_weights: true, ..Caps::H200 };
    let rounded = [32, 128].into_iter().flat_map(|group| {
        let form = Form::floats(Atom { group, ..atom }, Float::F32);
        [200, 1024].map(|m| config::config(&form, [m, 21504, 14336], &rounding).instance(&form, Activation::None))
    });
    let forms = [
        Form::floats(atom, Float::F16),
        f32,
        Form::floats(Atom { bits: 8, zero: true, group: 32, ..atom }, Float::F16),
        Form::floats(Atom { table: Some(Atom::A_TABLE), group: 32, ..atom }, Float::F16),
        Form::floats(Atom { bits: 5, group: 32, ..atom }, Float::F16),
    ];
    let others = Form::floats(Atom { bits: 8, group: 0, zero: true, ..atom }, Float::F32);
    let folded = [8, 16, 32].into_iter().flat_map(|m| {
        let of = move |out, fold| {
            let form = Form::floats(atom, out);
            let config = config::config(&form, [m, 4096, 4096], &Caps::H200);
            config.instance(&form, Activation::None).defining("FOLDED_NORM", fold as usize)
        };
        [of(Float::F32, Fold::Leaves), of(Float::F32, Fold::Divides), of(Float::F16, Fold::Divides)]
    });
    all.chain(few)
        .chain(folded)
        .chain(rounded)
        .chain(unlike)
        .chain(grouped::samples::<Wna16Sm90>(&Caps::H200, &[&forms[..], &[others]].concat()))
        .collect()
}

/// Whether a configuration does its product's part of a norm: of few rows, with half scales and no offsets.
pub fn folds_norms(form: &Form, config: Config) -> bool {
    // Two blocks have no registers for it beside 32 sums of codes of 8 bits in groups.
    let registers = config.blocks == 1 || form.atom.field_bits() < 8 || config.strips * config.tokens < 32;
    config.tokens <= folded_norm::ROWS && !form.atom.is_wide() && registers
}

/// The kernel as launchers see it.
#[derive(Debug)]
pub(super) struct Wna16Sm90;

impl Gemm for Wna16Sm90 {
    const NAME: &'static str = "wna16_sm90";
    const QUANTIZES: bool = false;
    const MAPS: bool = true;
    const SUMS_X: bool = true;
    const INVARIANT_ROWS: Option<usize> = Some(usize::MAX);
    type Config = Config;
    type Arguments = Arguments;
    type Grouped = GroupedArguments;

    fn form(held: Option<Atom>, problem: &Problem) -> Answer<Form> {
        let form = wna16::gemm_form(held, problem)?;
        if form.atom.group == 16 && form.atom.offset {
            return Err(Reason("has no registers for offsets of groups of 16".into()));
        }
        if problem.x == Float::F32 {
            return Err(Reason("multiplies x in f16 or bf16; x is f32".into()));
        }
        Ok(form)
    }

    fn config(form: &Form, shape: [usize; 3], caps: &Caps, batch_invariant: bool) -> Config {
        match batch_invariant {
            false => config::config(form, shape, caps),
            true => config::batch_invariant(form, shape, caps),
        }
    }

    fn schedule(_: &Form, (config, batch_invariant): Choice<Config>, shape: [usize; 3], caps: &Caps) -> Schedule {
        match batch_invariant {
            false => Schedule::new(config, shape, caps.multiprocessors.max(1) as usize),
            true => Schedule::whole(config, shape),
        }
    }

    fn sums_of_x(&Form { atom, .. }: &Form, config: Config) -> Option<SumsOfX> {
        config.takes_sums_of_x(atom).then_some(SumsOfX { group: atom.group, tokens: config.tokens })
    }

    fn folds_norms(form: &Form, config: Config) -> bool {
        folds_norms(form, config)
    }

    fn candidates(form: &Form, m: usize, caps: &Caps) -> Vec<Config> {
        candidates(form, m, caps)
    }

    fn allows(form: &Form, config: Config, _: &Caps) -> bool {
        compiles(config, form) || config::every(form).contains(&config)
    }

    fn every_config(form: &Form, _: Arch) -> Vec<Config> {
        config::every(form)
    }

    fn grouped_tiles(form: &Form) -> Vec<usize> {
        choice::grouped_tiles(form)
    }

    fn grouped_config(form: &Form, [tokens, ..]: [usize; 3], caps: &Caps) -> (Config, usize) {
        let config = choice::grouped(form, tokens);
        (config, caps.multiprocessors.max(1) as usize * config.blocks)
    }

    fn grouped_microseconds(form: &Form, tokens: usize, [n, k]: [usize; 2], columns: f64, caps: &Caps) -> f64 {
        // As of one weight with as many outputs.
        let outputs = (n as f64 * columns).ceil() as usize;
        Timed::new(choice::grouped(form, tokens), form).microseconds([tokens, outputs, k], caps)
    }

    fn products(w: &Weights) -> &Products<Self> {
        &w.products.wna16_sm90
    }

    fn map(config: Config, operands: &Operands<'_>) -> Result<Option<TensorMap>> {
        let X::Floats(x) = operands.x else { return Ok(None) };
        let tiles = Tiles {
            shape: [operands.m, operands.k],
            stride: operands.pitch,
            tile: [config.tokens.min(operands.m) as u32, 64],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::Bytes256,
        };
        TensorMap::of_matrix(x, &tiles).map(Some)
    }

    fn arguments(w: Placed, config: Config, schedule: &Schedule, operands: &Operands<'_>) -> Arguments {
        let Operands { y, bias, workspace, m, sums, norm, .. } = *operands;
        let norm = norm.unwrap_or_else(Zeroable::zeroed);
        Arguments { x_sums: sums, norm, ..Arguments::new(w, schedule, [y, bias, workspace], m, config.tokens.min(m)) }
    }
}

grouped_arguments!();

parameters! {
    /// `Arguments` of the source.
    pub(in crate::cuda) struct Arguments {
        weight: Flat<gemm::Weight>,
        to: Flat<gemm::Output>,
        box_bytes: i32,
        cuts: Flat<Cuts>,
        padding: i32,
        x_sums: u64,
        norm: folded_norm::NormOperands,
    }
}

impl Arguments {
    /// Of m rows, in boxes of `box_rows`; y, bias and the workspace are addresses, of the bias 0 if there is none.
    pub(in crate::cuda) fn new(
        w: Placed,
        schedule: &Schedule,
        [y, bias, workspace]: [u64; 3],
        m: usize,
        box_rows: usize,
    ) -> Self {
        Self {
            weight: Flat(w.at),
            to: Flat(gemm::Output::new([y, bias, workspace], m, w.shape[0])),
            box_bytes: (box_rows * 128) as i32,
            cuts: Flat((*schedule).into()),
            padding: 0,
            x_sums: 0,
            norm: Zeroable::zeroed(),
        }
    }
}
