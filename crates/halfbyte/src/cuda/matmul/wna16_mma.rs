//! GEMM of 4- and 8-bit weights with half floats (w4a16, w8a16) on every processor from sm_75 on: launches of `wna16_mma.cu`.
//!
//! Weights are converted in registers and multiplied by `mma.sync`; `cp.async` brings x and weights; tiles are cut into pieces
//! (split-K) or among all blocks (stream-K). Codes are multiplied as exact integers, and scales multiply the sums of their groups:
//! weights are never rounded, and x may be of another type than the scales: before sm_80 f16, which is all that tensor cores multiply
//! there.

pub mod config;
pub(in crate::cuda) mod cost;

use super::gemm::{self, Choice, Gemm, Operands, Placed, Products};
use super::grouped::{self, clocks_by_mma, grouped_arguments};
use super::kernel::{Answer, Kernel};
use super::wna16::{self, Weights};
use crate::cuda::Caps;
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::schedule::{Cuts, Schedule};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use config::Config;

static SOURCE: Source = Source {
    path: "matmul/wna16_mma.cu",
    text: include_str!("wna16_mma.cu"),
    parameters: &[Arguments::LAYOUT, GroupedArguments::LAYOUT],
};

pub(super) const KERNEL: Kernel = gemm::row::<Wna16Mma>(
    "mma.sync on weights converted in registers, copies by cp.async",
    |arch| arch.number >= 75,
    instances,
);

/// A device of each kind, as far as configurations depend on it, that code for a processor may be chosen for: of sm_75 by itself; of
/// all others those with the shared memory of graphics cards, of sm_80, and of data centres since. That with the least comes first.
pub(in crate::cuda) fn devices(arch: Arch) -> Vec<Caps> {
    let numbers: &[u32] = if arch.number < 80 { &[75] } else { &[86, 80, 90] };
    numbers.iter().map(|&number| Caps::of_arch(Arch { number, specific: false, ptx: false })).collect()
}

/// Every configuration for a form of atoms on a device.
fn instances_on(caps: &Caps, atom: Atom, [x, out]: [Float; 2], activation: Activation) -> Vec<Instance> {
    config::all(atom, out, caps)
        .into_iter()
        .map(|c| c.instance(&Form { x, ..Form::floats(atom, out) }, activation))
        .collect()
}

/// Every configuration for the commonest format, and for the others' forms of conversion with the least shared memory.
fn instances(arch: Arch) -> Vec<Instance> {
    let (atom, devices) = (Atom::W4_G128, devices(arch));
    let all = devices.iter().flat_map(|caps| instances_on(caps, atom, [Float::F16; 2], Activation::None));
    let wide = Atom { scale: Float::F32, ..atom };
    let others = [
        (Atom { scale: Float::BF16, ..atom }, [Float::BF16; 2], Activation::Silu),
        (Atom { bits: 8, zero: true, group: 32, ..atom }, [Float::BF16, Float::F32], Activation::Gelu),
        (
            Atom { bits: 8, group: 0, zero: true, scale: Float::BF16, ..Atom::W4_G128 },
            [Float::F16; 2],
            Activation::GeluTanh,
        ),
        (Atom { zero: true, group: 32, ..atom }, [Float::BF16; 2], Activation::Relu6),
        (Atom { bits: 8, zero: true, group: 64, ..atom }, [Float::F16; 2], Activation::None),
        (Atom { offset: true, group: 32, ..wide }, [Float::F16, Float::F32], Activation::None),
        (Atom { bits: 8, group: 16, ..wide }, [Float::BF16, Float::F32], Activation::Silu),
        (Atom { offset: true, bits: 8, group: 128, ..atom }, [Float::BF16; 2], Activation::None),
        (Atom { zero: true, group: 64, ..wide }, [Float::F16; 2], Activation::None),
        (
            Atom { multiples: true, bits: 5, offset: true, group: 32, ..wide },
            [Float::F16, Float::F32],
            Activation::None,
        ),
        (Atom { multiples: true, bits: 6, group: 16, ..wide }, [Float::F16, Float::F32], Activation::None),
        (Atom { multiples: true, bits: 3, group: 16, ..wide }, [Float::BF16, Float::F32], Activation::None),
        (Atom { multiples: true, bits: 2, offset: true, group: 16, ..wide }, [Float::F16; 2], Activation::None),
        (Atom { bits: 5, offset: true, group: 32, ..atom }, [Float::F16; 2], Activation::None),
        (
            Atom { table: Some(Atom::A_TABLE), group: 32, scale: Float::BF16, ..atom },
            [Float::BF16, Float::F32],
            Activation::None,
        ),
        (Atom { table: Some(Atom::A_TABLE), group: 16, ..atom }, [Float::F16; 2], Activation::None),
        (Atom { bits: 2, zero: true, ..atom }, [Float::BF16; 2], Activation::None),
        (Atom { bits: 3, group: 32, ..atom }, [Float::F16; 2], Activation::None),
    ];
    let least = devices.iter().take(1);
    // Where tensor cores do not multiply bf16, x is f16.
    let types_on = |[x, y]: [Float; 2]| [if arch.multiplies(x) { x } else { Float::F16 }, y];
    let few =
        least.clone().flat_map(|caps| others.map(|(atom, types, act)| instances_on(caps, atom, types_on(types), act)));

    let forms = [
        Form::floats(atom, Float::F16),
        Form::floats(Atom { bits: 8, zero: true, group: 32, ..atom }, Float::F32),
        Form::floats(Atom { bits: 8, group: 0, zero: true, ..atom }, Float::F16),
    ];
    let grouped = least.flat_map(|caps| grouped::samples::<Wna16Mma>(caps, &forms));

    let mut all: Vec<_> = all.chain(few.flatten()).chain(grouped).collect();
    all.sort_by_cached_key(Instance::to_string);
    all.dedup_by_key(|instance| instance.to_string());
    all
}

/// The kernel as launchers see it.
#[derive(Debug)]
pub(super) struct Wna16Mma;

impl Gemm for Wna16Mma {
    const NAME: &'static str = "wna16_mma";
    const QUANTIZES: bool = false;
    const MAPS: bool = false;
    const SUMS_X: bool = false;
    const INVARIANT_ROWS: Option<usize> = Some(config::ROWS_AT_ONCE);
    type Config = Config;
    type Arguments = Arguments;
    type Grouped = GroupedArguments;

    fn form(held: Option<Atom>, problem: &Problem) -> Answer<Form> {
        match problem.x {
            Float::F32 => Err(Reason("multiplies x in f16 or bf16; x is f32".into())),
            _ => wna16::gemm_form(held, problem),
        }
    }

    fn config(form: &Form, shape: [usize; 3], caps: &Caps, batch_invariant: bool) -> Config {
        match batch_invariant {
            false => config::config(form.atom, shape, form.out, caps),
            true => config::by_rows(form.atom, shape, form.out, caps),
        }
    }

    fn schedule(form: &Form, (config, batch_invariant): Choice<Config>, shape: [usize; 3], caps: &Caps) -> Schedule {
        match batch_invariant {
            false => config::schedule(config, shape, config.workers(form.atom, form.out, caps)),
            true => config::pieces(config, shape, config::invariant_pieces(shape)),
        }
    }

    fn candidates(form: &Form, _: usize, caps: &Caps) -> Vec<Config> {
        config::all(form.atom, form.out, caps)
    }

    fn allows(form: &Form, config: Config, caps: &Caps) -> bool {
        config::all(form.atom, form.out, caps).contains(&config)
    }

    fn every_config(form: &Form, arch: Arch) -> Vec<Config> {
        devices(arch).iter().flat_map(|caps| config::all(form.atom, form.out, caps)).collect()
    }

    fn grouped_tiles(_: &Form) -> Vec<usize> {
        vec![8, 16, 32, 64]
    }

    fn grouped_config(form: &Form, shape: [usize; 3], caps: &Caps) -> (Config, usize) {
        let config = config::by_rows(form.atom, shape, form.out, caps);
        (config, config.workers(form.atom, form.out, caps))
    }

    fn grouped_microseconds(form: &Form, tokens: usize, shape: [usize; 2], columns: f64, caps: &Caps) -> f64 {
        grouped::microseconds(form.atom, clocks_by_mma(form.atom, tokens), shape, columns, caps)
    }

    fn products(w: &Weights) -> &Products<Self> {
        &w.products.wna16_mma
    }

    fn arguments(w: Placed, _: Config, schedule: &Schedule, operands: &Operands<'_>) -> Arguments {
        let Operands { m, k, pitch, y, bias, workspace, .. } = *operands;
        Arguments {
            weight: Flat(w.at),
            x: operands.x_at(),
            to: Flat(gemm::Output::new([y, bias, workspace], m, w.shape[0])),
            k: k as i32,
            pitch: pitch as i32,
            cuts: Flat((*schedule).into()),
        }
    }
}

impl Arguments {
    /// With windows on images at an address for x, a row for each of so many output pixels; y, bias and the workspace are addresses.
    pub(in crate::cuda) fn of_images(
        w: Placed,
        schedule: &Schedule,
        addresses: [u64; 3],
        pixels: usize,
        x: u64,
    ) -> Self {
        let [n, k] = w.shape;
        let to = Flat(gemm::Output::new(addresses, pixels, n));
        Self { weight: Flat(w.at), x, to, k: k as i32, pitch: 0, cuts: Flat((*schedule).into()) }
    }
}

grouped_arguments!();

parameters! {
    /// `Arguments` of the source.
    pub(in crate::cuda) struct Arguments {
        weight: Flat<gemm::Weight>,
        x: u64,
        to: Flat<gemm::Output>,
        k: i32,
        pitch: i32,
        cuts: Flat<Cuts>,
    }
}
