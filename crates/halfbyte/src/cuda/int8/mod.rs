//! Eight bits in and out on a GPU: products and convolutions of bytes, as [`crate::ops::LinearInt8`] and
//! [`crate::ops::Conv2dInt8`] have them, to the bit.
//!
//! A [`Layer`] holds the packed weight with all that depends on it and on the scales and zero points of x and y. For each size of
//! inputs that it meets, the first kernel that supports the problem is bound to a configuration: a [`Plan`], which the layer keeps.
//! All kernels read the same layout, `cuda_int8`.
//!
//! | kernel | processors | what it computes |
//! |---|---|---|
//! | `int8_direct_sm90` | sm_90a | the same of stride 1 and one group, wherever a multiprocessor holds all channels of what it sees; of stride 2 up to 4 channels |
//! | `int8_sm90` | sm_90a | bytes to bytes in nhwc, weights without zero points, channels of a group a multiple of 64 |
//! | `int8_mma` | all from sm_75 on | bytes to bytes or floats in nhwc, channels of a group a multiple of 16 |
//! | `int8_depthwise` | all from sm_75 on | bytes to bytes or floats in nhwc, groups of 1, 2, 4 or 8 channels and as many outputs, channels a multiple of 16 |
//! | `int8_mma_narrow` | all from sm_75 on | bytes to bytes or floats in nhwc, any other number of channels of a group; not where tensor cores would multiply more than 128 times as much as the layer has |
//! | `int8_im2col_gemm` | all from sm_75 on | y in nhwc, one group, x in any layout: slabs of patches, each a product by `int8_sm90` or `int8_mma` |
//! | `int8_planes` | all from sm_75 on | x or y in planes, y in bytes if it is: what the kernels above compute of images pixel by pixel, copied before and after |
//! | `int8_simt` | all from sm_75 on | everything |

mod int8_depthwise;
mod int8_depthwise_rows;
#[doc(hidden)]
pub mod int8_direct_sm90;
mod int8_im2col_gemm;
mod int8_mma;
mod int8_mma_narrow;
mod int8_planes;
mod int8_simt;
#[doc(hidden)]
pub mod int8_sm90;
mod layer;

pub use layer::{Epilogue, Layer};

use super::dispatch::{self, Asked, Operation};
use super::driver::{FloatViewMut, Stream, View, ViewMut};
use super::parameters::parameters;
use super::{Gpu, Workspace};
use crate::conv::{Conv2dShape, Layout2d};
use crate::error::{Error, Result};
use crate::format::int8::Byte;
use crate::kernel::Reason;
use crate::tensor::Float;
use std::sync::Arc;

const OP: &str = "int8";

/// Where results go: codes of y as their bits, or floats.
#[derive(Debug)]
pub enum Target<'a> {
    /// Bytes of the type that the layer was made for.
    Bytes(ViewMut<'a, u8>),
    /// Floats.
    Floats(FloatViewMut<'a>),
}

impl Target<'_> {
    fn len(&self) -> usize {
        match self {
            Target::Bytes(y) => y.len(),
            Target::Floats(y) => y.len(),
        }
    }
}

/// What is to be computed, and how large.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Every size.
    pub shape: Conv2dShape,
    /// Type of the bytes of x.
    pub x: Byte,
    /// Whether the weights, as signed codes, have no zero points.
    pub symmetric: bool,
    /// Whether y is floats.
    pub floats: bool,
    /// Order of the elements of x and of y.
    pub layouts: [Layout2d; 2],
}

impl Problem {
    /// That it is one of those which the kernels for Hopper compute, or why not.
    fn is_bytes_in_nhwc(&self) -> std::result::Result<(), Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        match self {
            Self { floats: true, .. } => refuse("writes bytes, y is floats"),
            Self { symmetric: false, .. } => refuse("multiplies weights without zero points"),
            _ => self.is_in_nhwc(),
        }
    }

    /// That x and y lie pixel by pixel, or that they do not.
    fn is_in_nhwc(&self) -> std::result::Result<(), Reason> {
        if self.layouts == [Layout2d::Nhwc; 2] { Ok(()) } else { Err(Reason("reads and writes images in nhwc".into())) }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (g, [h, w]) = (self.shape.geometry(), self.shape.input());
        let y = if self.floats { "floats" } else { "bytes" };
        write!(f, "int8 with x {} {}, y {y} {}", self.x.name(), self.layouts[0], self.layouts[1])?;
        write!(f, " at {} × {} × {h} × {w}, {} × {} to {}", self.shape.batch(), g.ci, g.kernel[0], g.kernel[1], g.co)?;
        write!(f, ", stride {:?} padding {:?} dilation {:?} groups {}", g.stride, g.padding, g.dilation, g.groups)
    }
}

/// One input of a layer.
#[derive(Debug)]
pub struct Call<'a> {
    /// The layer.
    pub layer: &'a Layer,
    /// Codes of x as their bits: `[batch, ci, h, w]`, or with channels last.
    pub x: View<'a, u8>,
    /// Order of the elements of x.
    pub x_layout: Layout2d,
    /// Images; of a linear layer rows, each an image of one pixel.
    pub batch: usize,
    /// Rows and columns of an input image.
    pub size: [usize; 2],
    /// Output `[batch, co, oh, ow]`, or with channels last.
    pub y: Target<'a>,
    /// Order of the elements of y.
    pub y_layout: Layout2d,
    /// What kernels that need it work in, of at least [`Plan::workspace_bytes`](dispatch::Plan::workspace_bytes).
    pub workspace: Option<&'a mut Workspace>,
}

impl Call<'_> {
    /// What it is. *Errors:* those of [`Conv2dShape::new`].
    pub fn problem(&self) -> Result<Problem> {
        Ok(Problem {
            shape: Conv2dShape::new(*self.layer.geometry(), self.batch, self.size)?,
            x: self.layer.x().byte(),
            symmetric: self.layer.is_symmetric(),
            floats: matches!(self.y, Target::Floats(_)),
            layouts: [self.x_layout, self.y_layout],
        })
    }
}

/// The operation whose table this is.
#[derive(Debug)]
pub enum Int8 {}

/// A way to compute layers of bytes.
pub type Kernel = dispatch::Kernel<Int8>;

/// How inputs of one size are computed.
pub type Plan = dispatch::Plan<Int8>;

/// All kernels, the preferred first.
pub const KERNELS: &[Kernel] = Int8::KERNELS;

impl Operation for Int8 {
    const NAME: &'static str = OP;
    const KERNELS: &'static [Kernel] = &[
        int8_direct_sm90::KERNEL,
        int8_sm90::KERNEL,
        int8_mma::KERNEL,
        int8_depthwise::KERNEL,
        int8_mma_narrow::KERNEL,
        int8_im2col_gemm::KERNEL,
        int8_planes::KERNEL,
        int8_simt::KERNEL,
    ];

    type Problem = Problem;
    type Call<'a> = Call<'a>;

    fn asked(call: &Call<'_>) -> Result<Asked<Self>> {
        let problem = call.problem()?;
        problem.shape.check_lengths(OP, [call.x.len(), call.y.len()])?;
        if problem.floats != call.layer.y().is_none() {
            let name = |floats: bool| if floats { "outputs in floats" } else { "outputs in bytes" };
            return Err(Error::invalid(OP, name(!problem.floats), name(problem.floats)));
        }
        let workspace_bytes = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
        Ok(Asked { problem, workspace_bytes, nothing: call.y.len() == 0 })
    }
}

/// How a problem is computed with a layer: made when it is first asked for, and kept by the layer. Error: no kernel serves it.
pub fn plan(gpu: &Gpu, layer: &Layer, problem: Problem) -> Result<Arc<Plan>> {
    layer.plans.get(gpu, problem)
}

/// Puts a layer's product or convolution into a stream, by the [`plan`] of its size.
///
/// *Shapes:* x `[batch, ci, h, w]`, y `[batch, co, oh, ow]`, or with channels last. *Accuracy:* to the bit as
/// [`crate::format::int8`] says, whatever the kernel. *Errors:* those of [`Conv2dShape::new`], a length that does not fit, floats
/// where the layer has bytes or the other way round, images that do not begin at multiples of 16 bytes where the kernel needs that,
/// a workspace that is too small, a kernel that cannot be compiled.
pub fn run(gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    plan(gpu, call.layer, call.problem()?)?.run(gpu, stream, call)
}

parameters! {
    /// What the sums of a layer become: codes less their zero points, within limits.
    struct Rounding {
        x_zero: i32,
        y_zero: i32,
        low: f32,
        high: f32,
    }
}

/// Refuses addresses of x and y that are no multiples of 16 bytes.
fn check_addresses(kernel: &'static str, addresses: [u64; 2]) -> Result<()> {
    if addresses.iter().all(|address| address.is_multiple_of(16)) {
        return Ok(());
    }
    let [x, y] = addresses;
    Err(Error::invalid(kernel, "x and y that begin at multiples of 16 bytes", format!("{x:#x} and {y:#x}")))
}

/// Refuses what a kernel of 31-bit numbers cannot count: rows and columns of positions are added to those of pixels.
fn fits_31_bits(shape: &Conv2dShape, tiles: usize) -> std::result::Result<(), Reason> {
    let g = shape.geometry();
    let reach = [0, 1].map(|axis| (g.kernel[axis] - 1).saturating_mul(g.dilation[axis]));
    let padded = [0, 1].map(|axis| shape.input()[axis] + g.padding[axis] + g.padding[axis + 2]);
    let sizes = [shape.output_pixels(), shape.x_len(), g.co, g.k(), tiles, padded[0], padded[1]];
    if sizes.iter().any(|&size| size > i32::MAX as usize) || reach.iter().any(|&reach| reach >= 1 << 29) {
        return Err(Reason("more pixels, columns or tiles than 31 bits count".into()));
    }
    Ok(())
}

/// Where results go: an address, and of floats their type.
#[derive(Clone, Copy, Debug)]
struct Place {
    address: u64,
    floats: Option<Float>,
}

impl Place {
    fn of(y: &Target<'_>) -> Self {
        match y {
            Target::Bytes(y) => Self { address: y.pointer(), floats: None },
            Target::Floats(y) => Self { address: y.pointer(), floats: Some(y.dtype()) },
        }
    }

    /// So many elements on.
    fn at(self, elements: usize) -> Self {
        Self { address: self.address + (elements * self.floats.map_or(1, Float::size_bytes)) as u64, ..self }
    }
}

/// Where bytes go, of a kernel that writes no floats.
fn bytes_of(kernel: &'static str, y: &Target<'_>) -> Result<u64> {
    match y {
        Target::Bytes(y) => Ok(y.pointer()),
        Target::Floats(_) => Err(Error::invalid(kernel, "outputs in bytes", "outputs in floats")),
    }
}
