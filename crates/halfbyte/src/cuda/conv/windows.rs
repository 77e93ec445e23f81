//! Windows on images, as the copy engine of Hopper brings them and as kernels are told of them.

use crate::conv::{Conv2dShape, Geometry};
use crate::cuda::driver::{Promotion, Swizzle, Windows as Map};
use crate::cuda::parameters::{Pair, parameters};
use crate::kernel::Reason;

/// Positions that a copy can name, counted from the first.
const MOST_OFFSET: usize = 255;

/// Why the copy engine does not bring windows of a geometry in boxes of so many channels, if it does not.
pub(in crate::cuda) fn taken(geometry: &Geometry, channels: usize) -> Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    if !geometry.channels().is_multiple_of(channels) {
        return refuse(format!("brings {channels} channels of a group at a time, a group has {}", geometry.channels()));
    }
    let reach = [0, 1].map(|axis| (geometry.kernel[axis] - 1).saturating_mul(geometry.dilation[axis]));
    if reach.iter().any(|&reach| reach > MOST_OFFSET) {
        return refuse(format!("brings positions at most {MOST_OFFSET} pixels apart"));
    }
    // The size of the images does not matter here: any that there are.
    let shape = Conv2dShape::new(*geometry, 1, reach.map(|reach| reach + 1)).map_err(|why| Reason(why.to_string()))?;
    if !map(&shape, [64, channels], Swizzle::None).are_taken() {
        return refuse("brings windows of strides up to 8 that begin at most 128 pixels outside of an image".into());
    }
    Ok(())
}

/// The same outputs by one image that is a row of pixels, where each sees one pixel of its own: the copy engine then has but one
/// direction to go.
pub(in crate::cuda) fn flat(shape: Conv2dShape) -> Result<Conv2dShape, Reason> {
    if !shape.is_product() || shape.output_pixels() == 0 {
        return Ok(shape);
    }
    Conv2dShape::new(*shape.geometry(), 1, [1, shape.output_pixels()]).map_err(|why| Reason(why.to_string()))
}

/// Windows of so many output pixels and channels on all channels of the images.
pub(in crate::cuda) fn map(shape: &Conv2dShape, [pixels, channels]: [usize; 2], swizzle: Swizzle) -> Map {
    let g = shape.geometry();
    let ([h, w], [top, left, bottom, right]) = (shape.input(), g.padding);
    let reach = [0, 1].map(|axis| (g.kernel[axis] - 1) * g.dilation[axis]);
    Map {
        shape: [shape.batch(), h, w, g.ci],
        pixel: g.ci,
        stride: g.stride,
        padding: [top, left],
        extent: [h + top + bottom - reach[0], w + left + right - reach[1]],
        tile: [pixels as u32, channels as u32],
        swizzle,
        promotion: Promotion::Bytes256,
    }
}

parameters! {
    /// `Windows` of `include/windows.cuh`.
    pub(in crate::cuda) struct Windows {
        channels: i32,
        kernel: Pair,
        output: Pair,
        stride: Pair,
        dilation: Pair,
        padding: Pair,
        pitch: i32,
    }
}

impl Windows {
    /// Of sizes below 2³¹, with so many channels of a position.
    pub(in crate::cuda) fn new(shape: &Conv2dShape, channels: usize) -> Self {
        let g = shape.geometry();
        Self {
            channels: channels as i32,
            kernel: g.kernel.into(),
            output: shape.output().into(),
            stride: g.stride.into(),
            dilation: g.dilation.into(),
            padding: [g.padding[0], g.padding[1]].into(),
            pitch: g.co as i32,
        }
    }
}
