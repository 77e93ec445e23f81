//! GEMM of 4- and 8-bit weights with quantised activations (w4a8, w8a8) on Hopper: launches of `wna8_sm90.cu`.
//!
//! One kernel quantises x, group by group as the weights have them, the next one multiplies bytes by integer `wgmma` or, for few
//! rows, `mma.sync`: it fetches its first weights while the other runs (PDL). TMA and bulk copies bring x and weights; tiles are cut
//! among all blocks (stream-K) or shared by a cluster (split-K).

pub mod config;
mod cost;

pub(in crate::cuda) use super::wna8::MOST_K;
pub use super::wna8::form;

use super::gemm::{self, Choice, Gemm, Operands, Placed, Products, X};
use super::grouped::{self, grouped_arguments};
use super::kernel::{Answer, Kernel};
use super::quantize_activations::{self, Form as QuantizedForm};
use super::wna8::{self, Terms};
use super::wna16::Weights;
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
use config::Config;

static SOURCE: Source = Source {
    path: "matmul/wna8_sm90.cu",
    text: include_str!("wna8_sm90.cu"),
    parameters: &[Arguments::LAYOUT, GroupedArguments::LAYOUT],
};

pub(super) const KERNEL: Kernel = gemm::row::<Wna8Sm90>(
    "x quantised on the fly, integer wgmma on bytes of weights, copies by the bulk engine",
    |arch| arch.number == 90 && arch.specific,
    instances,
);

/// Every number of tokens for the commonest formats, and the other forms of conversion.
fn instances(_: Arch) -> Vec<Instance> {
    let atom = Atom::W4_G128;
    let plain = Terms { sums: false, offsets: false, pixels: false };
    let all = [8, 16, 32, 64, 128, 1024].into_iter().flat_map(|m| {
        let forms = [
            (atom, plain, Float::F16),
            (Atom { bits: 8, ..atom }, plain, Float::F16),
            (Atom { factors: true, ..atom }, plain, Float::F16),
            (
                Atom { factors: true, group: 32, scale: Float::BF16, ..atom },
                Terms { sums: false, offsets: true, pixels: false },
                Float::F32,
            ),
            (Atom { bits: 8, group: 0, ..atom }, plain, Float::BF16),
            (Atom { bits: 2, group: 0, ..atom }, plain, Float::F16),
            (Atom { bits: 3, group: 64, ..atom }, plain, Float::F16),
            (
                Atom { offset: true, group: 32, scale: Float::F32, multiples: true, ..atom },
                Terms { sums: true, ..plain },
                Float::F32,
            ),
            (Atom { zero: true, group: 32, ..atom }, Terms { sums: true, offsets: true, pixels: false }, Float::F32),
            (
                Atom { bits: 8, zero: true, group: 0, scale: Float::BF16, ..Atom::W4_G128 },
                Terms { sums: true, offsets: true, pixels: false },
                Float::F16,
            ),
        ];
        forms.into_iter().map(move |(atom, terms, out)| {
            let form = Form::codes(atom, terms, out);
            config::config(&form, [m, 21504, 14336], &Caps::H200).instance(&form, Activation::None)
        })
    });
    let sums = Terms { sums: true, ..plain };
    let forms = [
        Form::codes(atom, plain, Float::F16),
        Form::codes(Atom { bits: 8, group: 0, ..atom }, plain, Float::F32),
        Form::codes(Atom { zero: true, group: 32, ..atom }, sums, Float::F16),
    ];
    let grouped = grouped::samples::<Wna8Sm90>(&Caps::H200, &forms);
    all.chain(quantize_activations::instances()).chain(grouped).collect()
}

/// The kernel as launchers see it.
#[derive(Debug)]
pub(super) struct Wna8Sm90;

impl Gemm for Wna8Sm90 {
    const NAME: &'static str = "wna8_sm90";
    const QUANTIZES: bool = true;
    const MAPS: bool = true;
    const SUMS_X: bool = false;
    const INVARIANT_ROWS: Option<usize> = None;
    type Config = Config;
    type Arguments = Arguments;
    type Grouped = GroupedArguments;

    fn form(held: Option<Atom>, problem: &Problem) -> Answer<Form> {
        let form = wna8::gemm_form(held, problem)?;
        match form.atom.group {
            16 => Err(Reason("multiplies groups of a multiple of 32".into())),
            _ => Ok(form),
        }
    }

    fn config(form: &Form, shape: [usize; 3], caps: &Caps, _: bool) -> Config {
        config::config(form, shape, caps)
    }

    fn schedule(_: &Form, (config, _): Choice<Config>, shape: [usize; 3], caps: &Caps) -> Schedule {
        config.schedule(shape, caps.multiprocessors.max(1) as usize)
    }

    fn candidates(form: &Form, m: usize, _: &Caps) -> Vec<Config> {
        config::candidates(form.atom, form.terms, m, form.out)
    }

    fn allows(form: &Form, config: Config, _: &Caps) -> bool {
        // Kernels do not know whether tiles are whole.
        config::every(form.atom, form.terms, form.out).contains(&Config { whole: false, ..config })
    }

    fn every_config(form: &Form, _: Arch) -> Vec<Config> {
        config::every(form.atom, form.terms, form.out)
    }

    fn grouped_tiles(form: &Form) -> Vec<usize> {
        // Sums of more tokens leave no registers for the list of weights, nor do those of 128 for the terms of small groups.
        let most = if form.terms.sums && matches!(form.atom.group, 32 | 64) { 64 } else { 128 };
        [8, 16, 32, 64, 128].into_iter().filter(|&tokens| tokens <= most).collect()
    }

    fn grouped_config(form: &Form, shape: [usize; 3], caps: &Caps) -> (Config, usize) {
        let workers = caps.multiprocessors.max(1) as usize;
        (config::grouped(form.atom, form.terms, shape, form.out, workers), workers)
    }

    fn grouped_microseconds(form: &Form, tokens: usize, shape: [usize; 2], columns: f64, caps: &Caps) -> f64 {
        // Clocks of an atom: by `mma.sync`, and by `wgmma` with what promotes the sums of each group.
        let clocks = match tokens {
            ..=16 => 162.0 + 3.0 * tokens as f64,
            _ => 285.0 + tokens as f64 * (1.0 + 2.2 * form.atom.sums() as f64),
        };
        grouped::microseconds(form.atom, clocks, shape, columns, caps)
    }

    fn products(w: &Weights) -> &Products<Self> {
        &w.products.wna8_sm90
    }

    fn map(config: Config, operands: &Operands<'_>) -> Result<Option<TensorMap>> {
        let X::Codes(codes, ..) = operands.x else { return Ok(None) };
        let tiles = Tiles {
            shape: [operands.m, operands.pitch],
            stride: operands.pitch,
            tile: [config.tokens.min(operands.m) as u32, 128],
            swizzle: Swizzle::Bytes128,
            promotion: Promotion::Bytes256,
        };
        TensorMap::of_bytes(codes, &tiles).map(Some)
    }

    fn arguments(w: Placed, config: Config, schedule: &Schedule, operands: &Operands<'_>) -> Arguments {
        let Operands { m, y, bias, workspace, .. } = *operands;
        let addresses = [operands.terms_at(), y, bias, workspace];
        Arguments::new(w, schedule, addresses, (m, config.tokens.min(m)), &operands.codes())
    }
}

grouped_arguments!();

parameters! {
    /// `Arguments` of the source.
    pub(in crate::cuda) struct Arguments {
        weight: Flat<gemm::Weight>,
        terms: u64,
        to: Flat<gemm::Output>,
        k: i32,
        box_bytes: i32,
        m_pitch: i32,
        cuts: Flat<Cuts>,
        ratio: u32,
        groups: i32,
        padding: i32,
    }
}

impl Arguments {
    /// Of m rows in boxes of `box_rows`, with x in a form; terms, y, bias and the workspace are addresses, of the bias 0 if there is
    /// none.
    pub(in crate::cuda) fn new(
        w: Placed,
        schedule: &Schedule,
        [terms, y, bias, workspace]: [u64; 4],
        (m, box_rows): (usize, usize),
        x: &QuantizedForm,
    ) -> Self {
        Self {
            weight: Flat(w.at),
            terms,
            to: Flat(gemm::Output::new([y, bias, workspace], m, w.shape[0])),
            k: w.shape[1] as i32,
            box_bytes: (box_rows * 128) as i32,
            m_pitch: x.m_pitch() as i32,
            cuts: Flat((*schedule).into()),
            ratio: wna8::ratio(*x, w.atom),
            groups: x.pieces() as i32,
            padding: 0,
        }
    }
}
