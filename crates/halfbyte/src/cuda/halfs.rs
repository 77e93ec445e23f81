//! Launches of `halfs.cu`: floats as halfs that tensor cores multiply, in runs that are filled up to whole pieces.

use super::Gpu;
use super::driver::{Launch, Stream};
use super::parameters::{Parameters, float_type, parameters};
use super::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::Act;
use crate::tensor::Float;

static SOURCE: Source = Source { path: "halfs.cu", text: include_str!("halfs.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "halfs";

const THREADS: usize = 256;

/// Numbers that are written at once: runs are filled up to multiples of it.
pub(super) const PIECE: usize = 8;

/// Halfs (bf16) whose sum is an f32.
pub(super) const PARTS_OF_F32: usize = 3;

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        out: u64,
        pieces: u32,
        of_run: u32,
        length: u32,
        share: u32,
        lanes: u32,
        scales: u32,
        x_type: u32,
        padding: u32,
    }
}

/// How numbers are quantised first, and how many of a run have one scale: all of it, or a whole number of pieces.
pub(super) type Quantized = Option<(Act, usize)>;

/// What is launched for x of a type.
pub(super) fn instance(x: Float, quantized: Quantized) -> Instance {
    let expression = match (quantized, x) {
        (Some((act, _)), _) => format!("quantized_halfs<{}>", act == Act::A8Asym),
        (None, Float::F32) => format!("halfs<float, {PARTS_OF_F32}>"),
        (None, _) => "halfs<unsigned short, 1>".into(),
    };
    Instance::new(&SOURCE, expression)
}

/// All that may be launched.
pub(super) fn instances() -> Vec<Instance> {
    let quantized = [Act::A8, Act::A8Asym].map(|act| instance(Float::F32, Some((act, PIECE))));
    [Float::F16, Float::F32].map(|x| instance(x, None)).into_iter().chain(quantized).collect()
}

/// Runs of floats.
#[derive(Clone, Copy, Debug)]
pub(super) struct Runs {
    pub runs: usize,
    /// Numbers of each in x, and in the halfs: a multiple of [`PIECE`].
    pub length: usize,
    pub filled: usize,
}

impl Runs {
    /// Puts their halfs into a stream: of one part in the type of x, of f32 and of quantised numbers of [`PARTS_OF_F32`] parts in
    /// bf16, one behind the other, the smallest first: sums that go over all lose nothing of these. From an address to another, for which the caller vouches.
    pub fn split(
        self,
        gpu: &Gpu,
        stream: &Stream,
        (dtype, quantized): (Float, Quantized),
        [x, out]: [u64; 2],
    ) -> Result<()> {
        let Self { runs, length, filled } = self;
        let elements = runs.saturating_mul(filled);
        if elements > i32::MAX as usize {
            return Err(Error::invalid(OP, "fewer than 2³¹ elements", elements.to_string()));
        }
        if elements == 0 {
            return Ok(());
        }
        let share = quantized.map_or(length, |(_, share)| share);
        let lanes = share.div_ceil(PIECE).next_power_of_two().min(32);
        let (pieces, scales) = (elements / PIECE, runs * (length / share));
        let params = Params {
            x,
            out,
            pieces: pieces as u32,
            of_run: (filled / PIECE) as u32,
            length: length as u32,
            share: share as u32,
            lanes: lanes as u32,
            scales: scales as u32,
            x_type: float_type(dtype),
            padding: 0,
        };
        let threads = if quantized.is_some() { scales * lanes } else { pieces };
        let launch = gpu.overlapping(Launch::linear(threads.div_ceil(THREADS) as u32, THREADS as u32));
        let form = quantized.map_or(u32::from(dtype == Float::F32), |(act, _)| 2 + u32::from(act == Act::A8Asym));
        gpu.function_once((OP, [form, 0]), || instance(dtype, quantized))?.launch_typed(stream, &launch, &params, &[])
    }
}
