//! Convolutions on a GPU: the table of kernels, the choice among them, and its explanation.
//!
//! A weight `[co, k]` is packed once, in the layout of the kernel that serves its geometry and format best; for every image the
//! first kernel that reads the layout and supports the problem runs. What [`crate::conv`] and [`crate::ops::Conv2d`] say of
//! orders, padding and quantised activations holds here too.
//!
//! | kernel | processors | what it computes |
//! |---|---|---|
//! | `gemm_1x1` | all from sm_80 on | one position, stride 1: a product of [`crate::cuda::matmul`] |
//! | `implicit_gemm_sm90` | sm_90a | 4 and 8 bits, half images in nhwc, channels of a group a multiple of 64 |
//! | `implicit_gemm_a8_sm90` | sm_90a | the same with activations quantised on the fly, of any float type; of one group any channels |
//! | `implicit_gemm_rows_sm90` | sm_90a | 4 and 8 bits, half images of any number of channels, one group |
//! | `im2col_gemm` | all from sm_80 on | 4 and 8 bits, one group: slabs of patches, each a product of [`crate::cuda::matmul`] |
//! | `simt` | all from sm_75 on | everything |

mod columns;
mod gemm_1x1;
pub(in crate::cuda) mod im2col;
mod im2col_gemm;
pub(in crate::cuda) mod images;
pub mod implicit_gemm_a8_sm90;
pub mod implicit_gemm_rows_sm90;
pub mod implicit_gemm_sm90;
mod launches;
mod quantize_pixels;
mod simt;
mod weights;
mod window_rows;
pub(in crate::cuda) mod windows;

pub use weights::Weights;

use super::driver::{FloatView, FloatViewMut, Stream};
use super::matmul::Epilogue;
use super::sources::{Arch, Instance};
use super::{Caps, Gpu, Workspace};
use crate::conv::{Conv2dShape, Layout2d};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::reference::Bound;
use crate::kernel::{Reason, Rejection};
use crate::tensor::Float;

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
    /// What kernels that need it work in, of at least [`workspace_bytes`].
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
        })
    }
}

/// A way to compute convolutions.
pub struct Kernel {
    /// Name, the stem of its files.
    pub name: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether it is written for a processor.
    pub serves: fn(Arch) -> bool,
    /// Instances of its own that may be launched; of a kernel with very many, enough that nothing in its sources is left out.
    pub instances: fn() -> Vec<Instance>,
    instances_of: fn(&Caps, &Problem, &str) -> Vec<Instance>,
    supports: fn(&Caps, &Problem, &str) -> std::result::Result<(), Reason>,
    bound: fn(&Caps, &Problem, &str) -> Bound,
    workspace_bytes: fn(&Caps, &Problem, &str) -> usize,
    run: fn(&Gpu, &Stream, &Problem, Call<'_>) -> Result<()>,
}

/// All kernels, the preferred first.
pub const KERNELS: &[Kernel] = &[
    gemm_1x1::KERNEL,
    implicit_gemm_sm90::KERNEL,
    implicit_gemm_a8_sm90::KERNEL,
    implicit_gemm_rows_sm90::KERNEL,
    im2col_gemm::KERNEL,
    simt::KERNEL,
];

impl Kernel {
    /// Whether it computes a problem on a device with weights in a layout, or why not.
    pub fn supports(&self, caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
        if !(self.serves)(caps.arch) {
            return Err(Reason(format!("is not written for {}", caps.arch)));
        }
        (self.supports)(caps, problem, layout)
    }

    /// How far its results lie from the reference at most.
    pub fn bound(&self, caps: &Caps, problem: &Problem, layout: &str) -> Bound {
        (self.bound)(caps, problem, layout)
    }

    /// What a problem that it supports is computed by, without an activation.
    pub fn instances_of(&self, caps: &Caps, problem: &Problem, layout: &str) -> Vec<Instance> {
        (self.instances_of)(caps, problem, layout)
    }

    /// Bytes of workspace that it needs for a problem that it supports.
    pub fn workspace_bytes(&self, caps: &Caps, problem: &Problem, layout: &str) -> usize {
        (self.workspace_bytes)(caps, problem, layout)
    }
}

/// Every kernel with the reason against it; the first without one is chosen.
pub fn explain(caps: &Caps, problem: &Problem, layout: &str) -> Vec<(&'static Kernel, Option<Reason>)> {
    let mut chosen: Option<&str> = None;
    let reason = |kernel: &'static Kernel| match (kernel.supports(caps, problem, layout), chosen) {
        (Err(reason), _) => (kernel, Some(reason)),
        (Ok(()), Some(other)) => (kernel, Some(Reason(format!("{other} comes first")))),
        (Ok(()), None) => {
            chosen = Some(kernel.name);
            (kernel, None)
        }
    };
    KERNELS.iter().map(reason).collect()
}

/// The kernel that serves a problem with weights in a layout.
pub fn select(caps: &Caps, problem: &Problem, layout: &str) -> Result<&'static Kernel> {
    let mut rejections = Vec::new();
    for (kernel, reason) in explain(caps, problem, layout) {
        match reason {
            None => return Ok(kernel),
            Some(reason) => rejections.push(Rejection { kernel: kernel.name, reason }),
        }
    }
    Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections })
}

/// Bytes of workspace that a problem needs with weights in a layout.
pub fn workspace_bytes(caps: &Caps, problem: &Problem, layout: &str) -> Result<usize> {
    Ok(select(caps, problem, layout)?.workspace_bytes(caps, problem, layout))
}

/// Puts a convolution into a stream.
///
/// *Shapes:* x `[batch, ci, h, w]`, y `[batch, co, oh, ow]`, or with channels last, of any float type each. *Accuracy:*
/// [`Kernel::bound`], against [`crate::format::reference::conv2d_linear`]; the same input gives the same bits. NaN and
/// infinity in x reach every y that sees them. *Errors:* those of [`Conv2dShape::new`], a length that does not fit, a problem
/// that no kernel serves, a workspace that is too small, images that do not begin at multiples of 16 bytes where the kernel needs
/// that, a kernel that cannot be compiled.
pub fn run(gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let kernel = select(&gpu.caps(), &call.problem()?, call.w.layout())?;
    run_with(kernel, gpu, stream, call)
}

/// The same by a kernel of the caller's choice. Error also: it does not serve the problem.
pub fn run_with(kernel: &Kernel, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let (problem, caps) = (call.problem()?, gpu.caps());
    let needed = kernel.workspace_bytes(&caps, &problem, call.w.layout());
    check(kernel, gpu, &problem, &call, needed)?;
    if call.y.is_empty() {
        return Ok(());
    }
    (kernel.run)(gpu, stream, &problem, call)
}

/// Lengths that fit, a kernel that serves the problem, and a workspace of so many bytes.
fn check(kernel: &Kernel, gpu: &Gpu, problem: &Problem, call: &Call<'_>, needed: usize) -> Result<()> {
    check_lengths(problem, call)?;
    if let Err(reason) = kernel.supports(&gpu.caps(), problem, call.w.layout()) {
        let rejections = vec![Rejection { kernel: kernel.name, reason }];
        return Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections });
    }
    let given = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
    if given < needed {
        return Err(Error::invalid(OP, format!("a workspace of {needed} bytes"), given.to_string()));
    }
    Ok(())
}

fn check_lengths(problem: &Problem, call: &Call<'_>) -> Result<()> {
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    let fits = |what: &str, expected: usize, [h, w]: [usize; 2], channels: usize, len: usize| {
        if expected == len {
            return Ok(());
        }
        let expected = format!("{what} of {} × {channels} × {h} × {w}", shape.batch());
        Err(Error::invalid(OP, expected, format!("{len} elements")))
    };
    fits("x", shape.x_len(), shape.input(), g.ci, call.x.len())?;
    fits("y", shape.y_len(), shape.output(), g.co, call.y.len())?;
    match call.epilogue.bias {
        Some(bias) if bias.len() != g.co => {
            Err(Error::invalid(OP, format!("a bias of {}", g.co), bias.len().to_string()))
        }
        _ => Ok(()),
    }
}
