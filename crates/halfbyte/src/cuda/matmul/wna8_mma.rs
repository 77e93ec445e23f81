//! GEMM of 4- and 8-bit weights with quantised activations (w4a8, w8a8) on every processor from sm_75 on: launches of
//! `wna8_mma.cu`.
//!
//! One kernel quantises x, as for [`wna8_sm90`](super::wna8_sm90), the next one multiplies bytes by integer `mma.sync`, which
//! `cp.async` brings; tiles are cut into pieces (split-K) or among all blocks (stream-K). Integers of a group are exact, and a row
//! of y has the same bits wherever tiles are cut alike: rows that do not depend on each other are only a matter of the cuts.

pub mod config;

use super::gemm::{self, Choice, Gemm, Operands, Placed, Products};
use super::grouped::{self, clocks_by_mma, grouped_arguments};
use super::kernel::{Answer, Kernel};
use super::quantize_activations;
use super::wna8::{self, Terms};
use super::wna16::Weights;
use super::wna16_mma::devices;
use crate::cuda::Caps;
use crate::cuda::parameters::{Flat, Parameters, parameters};
use crate::cuda::schedule::{Cuts, Schedule};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::tiled::{Form, Tile};
use crate::kernel::{Activation, Problem};
use crate::layout::cuda_wna16::Atom;
use crate::tensor::Float;
use config::Config;

static SOURCE: Source = Source {
    path: "matmul/wna8_mma.cu",
    text: include_str!("wna8_mma.cu"),
    parameters: &[Arguments::LAYOUT, GroupedArguments::LAYOUT],
};

pub(super) const KERNEL: Kernel = gemm::row::<Wna8Mma>(
    "x quantised on the fly, integer mma.sync on bytes of weights, copies by cp.async",
    |arch| arch.number >= 75,
    instances,
);

/// Every configuration for the commonest formats, and for the other forms of conversion with the least shared memory.
fn instances(arch: Arch) -> Vec<Instance> {
    let of = |caps: &Caps, atom, terms, out, activation| {
        let all = config::all(atom, terms, out, caps).into_iter();
        all.map(move |config| config.instance(&Form::codes(atom, terms, out), activation)).collect::<Vec<_>>()
    };
    let devices = devices(arch);
    let (Some(least), Some(most)) = (devices.first(), devices.last()) else { return Vec::new() };
    let atom = Atom::W4_G128;
    let plain = Terms { sums: false, offsets: false, pixels: false };
    let common =
        [4, 8].into_iter().flat_map(|bits| of(most, Atom { bits, ..atom }, plain, Float::F16, Activation::None));
    let all = Terms { sums: true, offsets: true, pixels: false };
    let others = [
        (Atom { bits: 8, ..atom }, plain, Float::F16, Activation::None),
        (Atom { bits: 8, group: 0, ..atom }, plain, Float::BF16, Activation::Silu),
        (
            Atom { group: 64, scale: Float::BF16, ..atom },
            Terms { offsets: true, ..plain },
            Float::F16,
            Activation::Gelu,
        ),
        (Atom { zero: true, group: 32, ..atom }, all, Float::F32, Activation::GeluTanh),
        (Atom { bits: 8, zero: true, ..atom }, all, Float::F16, Activation::None),
        (Atom { factors: true, ..atom }, plain, Float::F16, Activation::None),
        (
            Atom { factors: true, group: 32, scale: Float::BF16, ..atom },
            Terms { offsets: true, ..plain },
            Float::F32,
            Activation::None,
        ),
        (Atom { bits: 2, group: 32, ..atom }, plain, Float::F16, Activation::None),
        (Atom { bits: 3, zero: true, ..atom }, all, Float::F32, Activation::None),
        (
            Atom { bits: 5, offset: true, group: 32, scale: Float::F32, multiples: true, ..atom },
            all,
            Float::F32,
            Activation::None,
        ),
        (
            Atom { bits: 8, zero: true, group: 0, scale: Float::BF16, ..Atom::W4_G128 },
            all,
            Float::F16,
            Activation::Relu6,
        ),
        (Atom { group: 16, ..atom }, Terms { offsets: true, ..plain }, Float::F32, Activation::None),
        (
            Atom { bits: 2, offset: true, group: 16, scale: Float::F32, multiples: true, ..atom },
            all,
            Float::F32,
            Activation::None,
        ),
        (Atom { bits: 6, group: 16, scale: Float::F32, multiples: true, ..atom }, plain, Float::F32, Activation::None),
    ];
    let few = others.into_iter().flat_map(|(atom, terms, out, activation)| of(least, atom, terms, out, activation));
    let forms = [
        Form::codes(atom, plain, Float::F16),
        Form::codes(Atom { bits: 8, group: 0, ..atom }, plain, Float::F32),
        Form::codes(Atom { zero: true, group: 32, ..atom }, Terms { sums: true, ..plain }, Float::F16),
    ];
    let grouped = grouped::samples::<Wna8Mma>(least, &forms);
    common.chain(few).chain(quantize_activations::instances()).chain(grouped).collect()
}

/// The kernel as launchers see it.
#[derive(Debug)]
pub(super) struct Wna8Mma;

impl Gemm for Wna8Mma {
    const NAME: &'static str = "wna8_mma";
    const QUANTIZES: bool = true;
    const MAPS: bool = false;
    const SUMS_X: bool = false;
    const INVARIANT_ROWS: Option<usize> = Some(config::ROWS_AT_ONCE);
    type Config = Config;
    type Arguments = Arguments;
    type Grouped = GroupedArguments;

    fn form(held: Option<Atom>, problem: &Problem) -> Answer<Form> {
        wna8::gemm_form(held, problem)
    }

    fn config(form: &Form, shape: [usize; 3], caps: &Caps, batch_invariant: bool) -> Config {
        match batch_invariant {
            false => config::config(form.atom, form.terms, shape, form.out, caps),
            true => config::by_rows(form.atom, form.terms, shape, form.out, caps),
        }
    }

    fn schedule(form: &Form, (config, batch_invariant): Choice<Config>, shape: [usize; 3], caps: &Caps) -> Schedule {
        match batch_invariant {
            false => config.schedule(shape, config.workers(form.atom, form.terms, form.out, caps)),
            true => config.invariant_schedule(shape),
        }
    }

    fn candidates(form: &Form, _: usize, caps: &Caps) -> Vec<Config> {
        config::all(form.atom, form.terms, form.out, caps)
    }

    fn allows(form: &Form, config: Config, caps: &Caps) -> bool {
        config::all(form.atom, form.terms, form.out, caps).contains(&config)
    }

    fn every_config(form: &Form, arch: Arch) -> Vec<Config> {
        devices(arch).iter().flat_map(|caps| config::all(form.atom, form.terms, form.out, caps)).collect()
    }

    fn grouped_tiles(form: &Form) -> Vec<usize> {
        config::tokens(form.atom, form.terms).collect()
    }

    fn grouped_config(form: &Form, shape: [usize; 3], caps: &Caps) -> (Config, usize) {
        let config = config::by_rows(form.atom, form.terms, shape, form.out, caps);
        (config, config.workers(form.atom, form.terms, form.out, caps))
    }

    fn grouped_microseconds(form: &Form, tokens: usize, shape: [usize; 2], columns: f64, caps: &Caps) -> f64 {
        grouped::microseconds(form.atom, clocks_by_mma(form.atom, tokens), shape, columns, caps)
    }

    fn products(w: &Weights) -> &Products<Self> {
        &w.products.wna8_mma
    }

    fn arguments(w: Placed, _: Config, schedule: &Schedule, operands: &Operands<'_>) -> Arguments {
        let Operands { m, k, pitch, y, bias, workspace, .. } = *operands;
        let x = operands.codes();
        Arguments {
            weight: Flat(w.at),
            x: operands.x_at(),
            terms: operands.terms_at(),
            to: Flat(gemm::Output::new([y, bias, workspace], m, w.shape[0])),
            k: k as i32,
            pitch: pitch as i32,
            cuts: Flat((*schedule).into()),
            ratio: wna8::ratio(x, w.atom),
            groups: x.pieces() as i32,
            m_pitch: x.m_pitch() as i32,
            padding: 0,
        }
    }
}

grouped_arguments!();

parameters! {
    /// `Arguments` of the source.
    pub(super) struct Arguments {
        weight: Flat<gemm::Weight>,
        x: u64,
        terms: u64,
        to: Flat<gemm::Output>,
        k: i32,
        pitch: i32,
        cuts: Flat<Cuts>,
        ratio: u32,
        groups: i32,
        m_pitch: i32,
        padding: i32,
    }
}
