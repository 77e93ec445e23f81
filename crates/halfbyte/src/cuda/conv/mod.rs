//! Convolutions on a GPU: the table of kernels, the choice among them, and its explanation.
//!
//! A weight `[co, k]` is packed once, in the layout of the kernel that serves its geometry and format best. For each size of images
//! that it meets, the first kernel that reads the layout and supports the problem is bound to a configuration: a [`Plan`], which the
//! weight keeps. What [`crate::conv`] and [`crate::ops::Conv2d`] say of orders, padding and quantised activations holds here too.
//!
//! | kernel | processors | what it computes |
//! |---|---|---|
//! | `gemm_1x1` | all from sm_75 on | one position, stride 1: a product of [`crate::cuda::matmul`] |
//! | `implicit_gemm_sm90` | sm_90a | 4 and 8 bits, half images in nhwc, channels of a group a multiple of 64 |
//! | `implicit_gemm_a8_sm90` | sm_90a | the same with activations quantised on the fly, of any float type; of one group any channels |
//! | `implicit_gemm_rows_sm90` | sm_90a | 4 and 8 bits, half images of any number of channels, one group |
//! | `implicit_gemm_mma` | all from sm_75 on | every format of codes, in nhwc, images of every type and number of channels, groups; a16, and of several groups a8 |
//! | `im2col_gemm` | all from sm_75 on | 4 and 8 bits, one group: slabs of patches, each a product of [`crate::cuda::matmul`] |
//! | `depthwise` | all from sm_75 on | images in nhwc, groups of 1, 2, 4 or 8 channels and as many outputs |
//! | `planes` | all from sm_75 on | x or y in planes: what the kernels above compute of images pixel by pixel, copied before and after |
//! | `simt` | all from sm_75 on | everything |

mod columns;
mod depthwise;
mod gemm_1x1;
pub(in crate::cuda) mod im2col;
mod im2col_gemm;
pub(in crate::cuda) mod images;
mod implicit_gemm;
#[doc(hidden)]
pub mod implicit_gemm_a8_sm90;
#[doc(hidden)]
pub mod implicit_gemm_mma;
#[doc(hidden)]
pub mod implicit_gemm_rows_sm90;
#[doc(hidden)]
pub mod implicit_gemm_sm90;
pub(in crate::cuda) mod planes;
mod quantize_pixels;
mod simt;
mod weights;
mod window_rows;
pub(in crate::cuda) mod windows;

pub use weights::{Weights, layout_of};

use super::dispatch::{self, Asked, Operation};
use super::driver::{FloatView, FloatViewMut, Stream, View};
use super::matmul::Epilogue;
use super::{Gpu, Workspace};
use crate::conv::{Conv2dShape, Layout2d};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::reference::Bound;
use crate::kernel::Reason;
use crate::tensor::Float;
use std::sync::Arc;

const OP: &str = "conv2d";

/// One convolution to be computed: what, and how large.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Problem {
    /// Weights and what becomes of the activations; none for dense weights.
    pub format: Option<Format>,
    /// Every size.
    pub shape: Conv2dShape,
    /// Type of the images as handed in.
    pub x: Float,
    /// Type of the result.
    pub y: Float,
    /// Order of the elements of x and of y.
    pub layouts: [Layout2d; 2],
    /// Layout of the weight: [`Weights::layout`], or [`layout_of`] of one that is not packed yet.
    pub packed: &'static str,
}

impl Problem {
    /// That x and y lie pixel by pixel, for kernels to which this matters.
    fn is_in_nhwc(&self) -> std::result::Result<(), Reason> {
        match self.layouts {
            [Layout2d::Nhwc, Layout2d::Nhwc] => Ok(()),
            _ => Err(Reason("reads and writes images in nhwc".into())),
        }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (g, [h, w]) = (self.shape.geometry(), self.shape.input());
        match self.format {
            Some(format) => write!(f, "{format}")?,
            None => f.write_str("dense")?,
        }
        write!(f, " with x {} {}, y {} {}", self.x, self.layouts[0], self.y, self.layouts[1])?;
        write!(f, " at {} × {} × {h} × {w}, {} × {} to {}", self.shape.batch(), g.ci, g.kernel[0], g.kernel[1], g.co)?;
        write!(f, ", stride {:?} padding {:?} dilation {:?} groups {}", g.stride, g.padding, g.dilation, g.groups)
    }
}

/// One convolution.
#[derive(Debug)]
pub struct Call<'a> {
    /// Images `[batch, ci, h, w]`, or with channels last.
    pub x: FloatView<'a>,
    /// Order of the elements of x.
    pub x_layout: Layout2d,
    /// Images.
    pub batch: usize,
    /// Rows and columns of an input image.
    pub size: [usize; 2],
    /// Weight.
    pub w: &'a Weights,
    /// What happens to the sums.
    pub epilogue: Epilogue<'a>,
    /// Output `[batch, co, oh, ow]`, or with channels last.
    pub y: FloatViewMut<'a>,
    /// Order of the elements of y.
    pub y_layout: Layout2d,
    /// What kernels that need it work in, of at least [`Plan::workspace_bytes`](dispatch::Plan::workspace_bytes).
    pub workspace: Option<&'a mut Workspace>,
}

impl Call<'_> {
    /// What it is. *Errors:* those of [`Conv2dShape::new`].
    pub fn problem(&self) -> Result<Problem> {
        Ok(Problem {
            format: self.w.format(),
            shape: Conv2dShape::new(*self.w.geometry(), self.batch, self.size)?,
            x: self.x.dtype(),
            y: self.y.dtype(),
            layouts: [self.x_layout, self.y_layout],
            packed: self.w.layout(),
        })
    }

    /// Address of the result of an output, of images in nhwc.
    fn y_at(&self, output: usize) -> u64 {
        self.y.pointer() + (output * self.y.dtype().size_bytes()) as u64
    }

    /// Address of the bias of an output; 0: there is none.
    fn bias_at(&self, output: usize) -> u64 {
        self.epilogue.bias.map_or(0, |bias| bias.pointer() + 4 * output as u64)
    }

    /// The workspace of a kernel that needs one, and y at a multiple of 16 bytes.
    fn room(&self, kernel: &'static str) -> Result<View<'_, u8>> {
        let y = self.y.pointer();
        if !y.is_multiple_of(16) {
            return Err(Error::invalid(kernel, "y that begins at a multiple of 16 bytes", format!("{y:#x}")));
        }
        let workspace = self.workspace.as_deref().map(Workspace::view);
        workspace.ok_or_else(|| Error::invalid(kernel, "a workspace", "none"))
    }
}

/// The operation whose table this is.
#[derive(Debug)]
pub enum Convolution {}

/// A way to compute convolutions.
pub type Kernel = dispatch::Kernel<Convolution>;

/// How convolutions of one weight and size are computed.
pub type Plan = dispatch::Plan<Convolution>;

/// All kernels, the preferred first.
pub const KERNELS: &[Kernel] = Convolution::KERNELS;

impl Operation for Convolution {
    const NAME: &'static str = OP;
    const KERNELS: &'static [Kernel] = &[
        gemm_1x1::KERNEL,
        implicit_gemm_sm90::KERNEL,
        implicit_gemm_a8_sm90::KERNEL,
        implicit_gemm_rows_sm90::KERNEL,
        implicit_gemm_mma::KERNEL,
        im2col_gemm::KERNEL,
        depthwise::KERNEL,
        planes::KERNEL,
        simt::KERNEL,
    ];

    type Problem = Problem;
    type Call<'a> = Call<'a>;

    fn asked(call: &Call<'_>) -> Result<Asked<Self>> {
        let problem = call.problem()?;
        problem.shape.check_lengths(OP, [call.x.len(), call.y.len()])?;
        let co = problem.shape.geometry().co;
        if let Some(bias) = call.epilogue.bias.filter(|bias| bias.len() != co) {
            return Err(Error::invalid(OP, format!("a bias of {co}"), bias.len().to_string()));
        }
        let workspace_bytes = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
        Ok(Asked { problem, workspace_bytes, nothing: call.y.is_empty() })
    }
}

impl Plan {
    /// How far its results lie from the reference at most.
    pub fn bound(&self) -> Bound {
        let Problem { shape, x, y, .. } = self.problem();
        Bound { rounded_weights: self.rounds_weights().then_some(*x), ..Bound::new(*y, shape.geometry().k()) }
    }
}

/// How a problem is computed with a weight: made when it is first asked for, and kept by the weight. Error: no kernel serves it.
pub fn plan(gpu: &Gpu, w: &Weights, problem: Problem) -> Result<Arc<Plan>> {
    w.plans.get(gpu, problem)
}

/// Puts a convolution into a stream, by the [`plan`] of its weight and size.
///
/// *Shapes:* x `[batch, ci, h, w]`, y `[batch, co, oh, ow]`, or with channels last, of any float type each. *Accuracy:*
/// [`Plan::bound`], against [`crate::format::reference::conv2d_linear`]; the same input gives the same bits. NaN
/// and infinity in x reach every y that sees them. *Errors:* those of [`Conv2dShape::new`], a length that does not fit, a problem
/// that no kernel serves, a workspace that is too small, images that do not begin at multiples of 16 bytes where the kernel needs
/// that, a kernel that cannot be compiled.
pub fn run(gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    plan(gpu, call.w, call.problem()?)?.run(gpu, stream, call)
}
