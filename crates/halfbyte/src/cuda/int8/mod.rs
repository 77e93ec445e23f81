//! Eight bits in and out on a GPU: products and convolutions of bytes, as [`crate::ops::LinearInt8`] and
//! [`crate::ops::Conv2dInt8`] have them, to the bit.
//!
//! A [`Layer`] holds the packed weight with all that depends on it and on the scales and zero points of x and y. For every
//! input the first kernel that supports the problem runs; all of them read the same layout, `cuda_int8`.
//!
//! | kernel | processors | what it computes |
//! |---|---|---|
//! | `int8_direct_sm90` | sm_90a | the same of stride 1 and one group, wherever a multiprocessor holds all channels of what it sees; of stride 2 up to 4 channels |
//! | `int8_sm90` | sm_90a | bytes to bytes in nhwc, weights without zero points, channels of a group a multiple of 64 |
//! | `int8_im2col_gemm` | sm_90a | bytes to bytes, y in nhwc, one group: slabs of patches, each a product by `int8_sm90` |
//! | `int8_simt` | all from sm_75 on | everything |

pub mod int8_direct_sm90;
mod int8_im2col_gemm;
mod int8_simt;
pub mod int8_sm90;
mod layer;

pub use layer::{Epilogue, Layer};

use super::driver::{FloatViewMut, Stream, View, ViewMut};
use super::sources::{Arch, Instance};
use super::{Caps, Gpu, Workspace};
use crate::conv::{Conv2dShape, Layout2d};
use crate::error::{Error, Result};
use crate::format::int8::Byte;
use crate::kernel::{Reason, Rejection};

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
    /// Whether the weights, as signed codes, have no zero points.
    pub symmetric: bool,
    /// Whether y is floats.
    pub floats: bool,
    /// Order of the elements of x and of y.
    pub layouts: [Layout2d; 2],
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (g, [h, w]) = (self.shape.geometry(), self.shape.input());
        let y = if self.floats { "floats" } else { "bytes" };
        write!(f, "int8 with x {}, y {y} {}", self.layouts[0], self.layouts[1])?;
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
    /// What kernels that need it work in, of at least [`workspace_bytes`].
    pub workspace: Option<&'a mut Workspace>,
}

impl Call<'_> {
    /// What it is. *Errors:* those of [`Conv2dShape::new`].
    pub fn problem(&self) -> Result<Problem> {
        Ok(Problem {
            shape: Conv2dShape::new(*self.layer.geometry(), self.batch, self.size)?,
            symmetric: self.layer.is_symmetric(),
            floats: matches!(self.y, Target::Floats(_)),
            layouts: [self.x_layout, self.y_layout],
        })
    }
}

/// A way to compute layers of bytes.
pub struct Kernel {
    /// Name, the stem of its files.
    pub name: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether it is written for a processor.
    pub serves: fn(Arch) -> bool,
    /// Every instance that may be launched.
    pub instances: fn() -> Vec<Instance>,
    supports: fn(&Caps, &Problem) -> std::result::Result<(), Reason>,
    workspace_bytes: fn(&Problem) -> usize,
    run: fn(&Gpu, &Stream, &Problem, Call<'_>) -> Result<()>,
}

/// All kernels, the preferred first.
pub const KERNELS: &[Kernel] =
    &[int8_direct_sm90::KERNEL, int8_sm90::KERNEL, int8_im2col_gemm::KERNEL, int8_simt::KERNEL];

impl Kernel {
    /// Whether it computes a problem on a device, or why not.
    pub fn supports(&self, caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
        if !(self.serves)(caps.arch) {
            return Err(Reason(format!("is not written for {}", caps.arch)));
        }
        (self.supports)(caps, problem)
    }

    /// Bytes of workspace that it needs for a problem that it supports.
    pub fn workspace_bytes(&self, problem: &Problem) -> usize {
        (self.workspace_bytes)(problem)
    }
}

/// Bytes of workspace that a problem needs. Error: no kernel serves it.
pub fn workspace_bytes(caps: &Caps, problem: &Problem) -> Result<usize> {
    Ok(select(caps, problem)?.workspace_bytes(problem))
}

/// The kernel that serves a problem: the first that supports it. Error: none does, and why.
pub fn select(caps: &Caps, problem: &Problem) -> Result<&'static Kernel> {
    let mut rejections = Vec::new();
    for kernel in KERNELS {
        match kernel.supports(caps, problem) {
            Ok(()) => return Ok(kernel),
            Err(reason) => rejections.push(Rejection { kernel: kernel.name, reason }),
        }
    }
    Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections })
}

/// Puts a layer's product or convolution into a stream.
///
/// *Shapes:* x `[batch, ci, h, w]`, y `[batch, co, oh, ow]`, or with channels last. *Accuracy:* to the bit as
/// [`crate::format::int8`] says, whatever the kernel. *Errors:* those of [`Conv2dShape::new`], a length that does not fit, floats
/// where the layer has bytes or the other way round, images that do not begin at multiples of 16 bytes where the kernel needs that,
/// a workspace that is too small, a kernel that cannot be compiled.
pub fn run(gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    run_with(select(&gpu.caps(), &call.problem()?)?, gpu, stream, call)
}

/// The same by a kernel of the caller's choice. Error also: it does not serve the problem.
pub fn run_with(kernel: &Kernel, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let problem = call.problem()?;
    check(kernel, gpu, &problem, &call)?;
    if call.y.len() == 0 {
        return Ok(());
    }
    (kernel.run)(gpu, stream, &problem, call)
}

/// A form of a Hopper kernel: for measuring which is best.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Of `int8_direct_sm90`.
    Direct(int8_direct_sm90::config::Config),
    /// Of `int8_sm90`.
    Implicit(int8_sm90::config::Config),
}

impl std::fmt::Display for Form {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Form::Direct(form) => write!(f, "direct, {form}"),
            Form::Implicit(form) => write!(f, "implicit, {form}"),
        }
    }
}

/// The forms of all kernels that support a problem with x of a type.
pub fn forms(caps: &Caps, problem: &Problem, x: Byte) -> Vec<Form> {
    let mut forms = Vec::new();
    if int8_direct_sm90::KERNEL.supports(caps, problem).is_ok() {
        forms.extend(int8_direct_sm90::configs(&problem.shape).into_iter().map(Form::Direct));
    }
    if int8_sm90::KERNEL.supports(caps, problem).is_ok() {
        forms.extend(int8_sm90::config::configs(x == Byte::U8).into_iter().map(Form::Implicit));
    }
    forms
}

/// [`run`] in a form of the caller's choice. Error also: a form that the problem does not have.
pub fn run_as(form: Form, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    match form {
        Form::Direct(form) => int8_direct_sm90::run_as(form, gpu, stream, call),
        Form::Implicit(form) => int8_sm90::run_as(form, gpu, stream, call),
    }
}

/// Lengths and types that fit, and a kernel that serves the problem.
fn check(kernel: &Kernel, gpu: &Gpu, problem: &Problem, call: &Call<'_>) -> Result<()> {
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
    if problem.floats != call.layer.y().is_none() {
        let name = |floats: bool| if floats { "outputs in floats" } else { "outputs in bytes" };
        return Err(Error::invalid(OP, name(!problem.floats), name(problem.floats)));
    }
    if let Err(reason) = kernel.supports(&gpu.caps(), problem) {
        let rejections = vec![Rejection { kernel: kernel.name, reason }];
        return Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections });
    }
    let (needed, given) = (kernel.workspace_bytes(problem), call.workspace.as_ref().map_or(0, |w| w.bytes()));
    if given < needed {
        return Err(Error::invalid(OP, format!("a workspace of {needed} bytes"), given.to_string()));
    }
    Ok(())
}
