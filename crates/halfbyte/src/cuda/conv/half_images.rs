//! Launches of `half_images.cu`: images in half types, the channels of each group filled up to whole pieces.

use crate::conv::Conv2dShape;
use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::matmul::float_type;
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::Act;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "conv/half_images.cu", text: include_str!("half_images.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "half images";

const THREADS: usize = 256;

/// Channels that are written at once.
pub(super) const PIECE: usize = 8;

/// Halfs whose sum is an f32.
pub(super) const PARTS_OF_F32: usize = 3;

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        out: u64,
        pieces: u32,
        of_group: u32,
        channels: u32,
        share: u32,
        lanes: u32,
        runs: u32,
        x_type: u32,
        padding: u32,
    }
}

/// How images are quantised, and the channels that have one scale: all of a group, or a whole number of pieces.
pub(super) type Quantized = Option<(Act, usize)>;

/// What is launched for x of a type.
pub(super) fn instance(x: Float, quantized: Quantized) -> Instance {
    let expression = match (quantized, x) {
        (Some((act, _)), _) => format!("quantized_images<{}>", act == Act::A8Asym),
        (None, Float::F32) => format!("half_images<float, {PARTS_OF_F32}>"),
        (None, _) => "half_images<unsigned short, 1>".into(),
    };
    Instance::new(&SOURCE, expression)
}

/// All that may be launched.
pub(super) fn instances() -> Vec<Instance> {
    let quantized = [Act::A8, Act::A8Asym].map(|act| instance(Float::F32, Some((act, PIECE))));
    [Float::F16, Float::F32].map(|x| instance(x, None)).into_iter().chain(quantized).collect()
}

/// Puts the images of a shape into a stream, whose x lies pixel by pixel in elements of a type: from an address to another, with so
/// many channels of a group. The caller vouches for both addresses.
pub(super) fn make(
    gpu: &Gpu,
    stream: &Stream,
    (shape, channels): (&Conv2dShape, usize),
    (dtype, quantized): (Float, Quantized),
    [x, out]: [u64; 2],
) -> Result<()> {
    let g = shape.geometry();
    let pieces = shape.input_pixels() * g.groups * (channels / PIECE);
    if pieces * PIECE > i32::MAX as usize || shape.x_len() > i32::MAX as usize {
        return Err(Error::invalid(OP, "fewer than 2³¹ elements", (pieces * PIECE).to_string()));
    }
    if pieces == 0 {
        return Ok(());
    }
    let share = quantized.map_or(g.channels(), |(_, share)| share);
    let lanes = share.div_ceil(PIECE).next_power_of_two().min(32);
    let runs = shape.x_len() / share;
    let params = Params {
        x,
        out,
        pieces: pieces as u32,
        of_group: (channels / PIECE) as u32,
        channels: g.channels() as u32,
        share: share as u32,
        lanes: lanes as u32,
        runs: runs as u32,
        x_type: float_type(dtype),
        padding: 0,
    };
    let threads = if quantized.is_some() { runs * lanes } else { pieces };
    let programmatic = gpu.caps().arch.number >= 90;
    let launch = Launch { programmatic, ..Launch::linear(threads.div_ceil(THREADS) as u32, THREADS as u32) };
    let form = quantized.map_or(u32::from(dtype == Float::F32), |(act, _)| 2 + u32::from(act == Act::A8Asym));
    gpu.function_once((OP, [form, 0]), || instance(dtype, quantized))?.launch_typed(stream, &launch, &params, &[])
}
