//! Launches of `mean.cu`: what is left of an image before the head of a network.

use super::{launch, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::int8::{Byte, Mean};
use bytemuck::Pod;

static SOURCE: Source =
    Source { path: "nn/mean.cu", text: include_str!("mean.cu"), parameters: &[Params::LAYOUT, CodeParams::LAYOUT] };

const OP: &str = "mean";

const THREADS: usize = 64;

pub(super) fn instances() -> [Instance; 2] {
    ["mean", "mean_codes"].map(|kernel| Instance::new(&SOURCE, kernel))
}

parameters! {
    /// As in the source.
    struct Shape {
        pixels: u64,
        channels: u64,
        means: u64,
    }

    /// As in the source.
    struct Params {
        x: u64,
        y: u64,
        shape: Shape,
        x_type: u32,
        y_type: u32,
    }

    /// As in the source.
    struct CodeParams {
        x: u64,
        y: u64,
        shape: Shape,
        zeros: i32,
        zero: i32,
        least: i32,
        greatest: i32,
        scale: f32,
        y_scale: f32,
        flip: u32,
        padding: u32,
    }
}

/// The mean over the pixels of each image, channel by channel.
///
/// *Shapes:* x `[images, pixels, channels]`, y `[images, channels]`. *Accuracy:* the elements are added in their order in f32, and
/// their sum divided; then it is rounded to the type of y. *Errors:* lengths that do not fit, images without a pixel.
pub fn mean(gpu: &Gpu, stream: &Stream, x: FloatView<'_>, size: [usize; 3], y: FloatViewMut<'_>) -> Result<()> {
    let shape = shape(size, [x.len(), y.len()])?;
    let (x_type, y_type) = (float_type(x.dtype()), float_type(y.dtype()));
    put(gpu, stream, 0, y.len(), &Params { x: x.pointer(), y: y.pointer(), shape, x_type, y_type })
}

/// The codes of means of codes, shaped as those of [`mean()`]. *Accuracy:* to the bit as [`Mean`] says. *Errors:* lengths that do not
/// fit, a mean of another number of pixels.
pub fn mean_codes(
    gpu: &Gpu,
    stream: &Stream,
    mean: &Mean,
    x: View<'_, u8>,
    size: [usize; 3],
    y: ViewMut<'_, u8>,
) -> Result<()> {
    let shape = shape(size, [x.len(), y.len()])?;
    if mean.count() != size[1] {
        return Err(Error::invalid(OP, format!("images of {} pixels", mean.count()), size[1].to_string()));
    }
    let (zeros, scale) = mean.terms();
    let (least, greatest) = mean.y().byte().codes().into_inner();
    let params = CodeParams {
        x: x.pointer(),
        y: y.pointer(),
        shape,
        zeros,
        zero: mean.y().zero(),
        least,
        greatest,
        scale,
        y_scale: mean.y().scale(),
        flip: if mean.x() == Byte::I8 { 0x80 } else { 0 },
        padding: 0,
    };
    put(gpu, stream, 1, y.len(), &params)
}

fn shape([images, pixels, channels]: [usize; 3], [x, y]: [usize; 2]) -> Result<Shape> {
    let means = images.checked_mul(channels);
    same_length(OP, "x", means.and_then(|means| means.checked_mul(pixels)), x)?;
    same_length(OP, "y", means, y)?;
    if pixels == 0 {
        return Err(Error::invalid(OP, "images of at least one pixel", "none"));
    }
    Ok(Shape { pixels: pixels as u64, channels: channels as u64, means: y as u64 })
}

/// Puts one of the kernels into a stream, with its parameters.
fn put<P: Pod>(gpu: &Gpu, stream: &Stream, kernel: usize, means: usize, params: &P) -> Result<()> {
    if means == 0 {
        return Ok(());
    }
    let form = launch(OP, [means.div_ceil(THREADS), 1, 1], THREADS as u32, 0)?;
    let function = gpu.function(&instances()[kernel])?;
    // SAFETY: the one parameter is the kernel's, whose lengths the callers have checked.
    unsafe { function.launch(stream, &form, &[Arg::new(params)]) }
}
