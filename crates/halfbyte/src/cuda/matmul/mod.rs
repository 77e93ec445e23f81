//! Products on a GPU: the table of kernels, the choice among them, and its explanation.
//!
//! When a weight is loaded, the first kernel that supports its format fixes the layout, and it is packed once. When it is
//! multiplied, the first kernel of that layout that supports the problem runs.
//!
//! | kernel | processors | formats |
//! |---|---|---|
//! | `dequantize_cublaslt` | all from sm_80 on | all with exact activations: reads the layouts of the others, where it is faster |
//! | `wna16_sm90` | sm_90a | 4 and 8 bits, groups of a multiple of 32 or whole rows, zero points, x half as the scales |
//! | `wna16_sm80` | all from sm_80 on | the same, x half of either type |
//! | `wna8_sm90` | sm_90a | the same with quantised activations |
//! | `wna8_sm80` | all from sm_80 on | the same |
//! | `plain` | all from sm_75 on | all with exact activations |

pub mod dequantize;
pub mod dequantize_cublaslt;
mod finish;
mod gather;
mod pack;
mod plain;
pub(in crate::cuda) mod quantize_activations;
mod quantized_rows;
mod wna16;
pub mod wna16_sm80;
pub mod wna16_sm90;
pub mod wna8_sm80;
pub mod wna8_sm90;

pub use pack::Packer;
pub use plain::Weights as PlainWeights;
pub(super) use plain::zero_kind;
pub use quantize_activations::{Form as QuantizedForm, quantize_activations};
pub use quantized_rows::{QuantizedCall, QuantizedRows, QuantizedView, QuantizedViewMut, rows_form, run_quantized};
pub use wna16::Weights as Wna16Weights;

use super::driver::{FloatView, FloatViewMut, Stream, View};
use super::sources::{Arch, Instance};
use super::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Act, Format, QTensor};
use crate::kernel::{Activation, Problem, Reason, Rejection};
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;

const OP: &str = "matmul";

/// A weight on a device, in the layout of the kernels that read it.
#[derive(Debug)]
#[non_exhaustive]
pub enum Packed {
    /// Layout `cuda_plain`.
    Plain(PlainWeights),
    /// Layout `cuda_wna16`.
    Wna16(Wna16Weights),
}

impl Packed {
    /// Outputs and length of the reduction.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            Packed::Plain(w) => w.shape(),
            Packed::Wna16(w) => w.shape(),
        }
    }

    /// Format.
    pub fn format(&self) -> Format {
        match self {
            Packed::Plain(w) => w.format(),
            Packed::Wna16(w) => w.format(),
        }
    }

    /// The memory that it lies in, in the order of the layout: codes, scales, zeros, and the groups or the order of columns,
    /// as far as there are such; of `cuda_wna16` atoms, the table of rows, and the order of columns.
    pub fn memory(&self) -> Vec<View<'_, u8>> {
        match self {
            Packed::Plain(w) => w.memory(),
            Packed::Wna16(w) => w.memory(),
        }
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        self.memory().iter().map(View::len).sum()
    }

    /// Another one with the same content in memory of its own, for measurements on cold weights. Error: memory is short.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(match self {
            Packed::Plain(w) => Packed::Plain(w.duplicate(stream)?),
            Packed::Wna16(w) => Packed::Wna16(w.duplicate(stream)?),
        })
    }

    /// Name of its layout.
    pub fn layout(&self) -> &'static str {
        match self {
            Packed::Plain(_) => plain::KERNEL.layout,
            Packed::Wna16(_) => wna16::LAYOUT,
        }
    }
}

/// Bias and activation function of one product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added to every row, `[n]`.
    pub bias: Option<View<'a, f32>>,
    /// Applied last.
    pub activation: Activation,
}

/// One product.
#[derive(Debug)]
pub struct Call<'a> {
    /// Activations `[m, k]`.
    pub x: FloatView<'a>,
    /// Rows of x.
    pub m: usize,
    /// Weight.
    pub w: &'a Packed,
    /// What happens to the sums.
    pub epilogue: Epilogue<'a>,
    /// Output `[m, n]`.
    pub y: FloatViewMut<'a>,
    /// What kernels that need it work in, of at least [`workspace_bytes`].
    pub workspace: Option<&'a mut Workspace>,
    /// Whether a row of y must have the same bits whatever the other rows and their number are, which costs time.
    pub batch_invariant: bool,
}

/// A way to compute products.
pub struct Kernel {
    /// Name, the stem of its files.
    pub name: &'static str,
    /// Layout of the weights that it reads.
    pub layout: &'static str,
    /// What it does, in one line.
    pub what: &'static str,
    /// Whether weights are packed for it; else it reads what was packed for another kernel.
    pub packs: bool,
    /// Whether it can sum in an order that does not depend on the number of rows.
    pub batch_invariant: bool,
    /// Whether it is written for a processor.
    pub serves: fn(Arch) -> bool,
    /// Every instance that may be launched; of a kernel with very many, enough that nothing in its sources is left out.
    pub instances: fn() -> Vec<Instance>,
    /// The instances that a problem which it supports is computed by, without an activation.
    instances_of: fn(&Caps, &Problem) -> Vec<Instance>,
    rounds_weights: fn(&Caps, &Problem) -> bool,
    supports: fn(&Caps, &Problem) -> std::result::Result<(), Reason>,
    workspace_bytes: fn(&Caps, &Problem) -> usize,
    holds: fn(&StoredTensor<'_>) -> std::result::Result<(), Reason>,
    pack: fn(&mut Packer<'_>, pack::Whole, &[&StoredTensor<'_>], Act) -> Result<Packed>,
    run: fn(&Gpu, &Stream, &mut Call<'_>) -> Result<()>,
}

/// All kernels, the preferred first.
pub const KERNELS: &[Kernel] = &[
    wna8_sm90::KERNEL,
    wna8_sm80::KERNEL,
    dequantize_cublaslt::WNA16,
    wna16_sm90::KERNEL,
    wna16_sm80::KERNEL,
    dequantize_cublaslt::PLAIN,
    plain::KERNEL,
];

/// What is launched before kernels, and what packs weights for them.
pub fn auxiliary() -> Vec<Instance> {
    [vec![gather::instance()], pack::instances()].concat()
}

impl Kernel {
    /// Whether it computes a problem on a device, or why not.
    pub fn supports(&self, caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
        if !(self.serves)(caps.arch) {
            return Err(Reason(format!("is not written for {}", caps.arch)));
        }
        (self.supports)(caps, problem)
    }

    /// How far its results lie from the reference at most.
    pub fn bound(&self, caps: &Caps, problem: &Problem) -> Bound {
        let rounded_weights = (self.rounds_weights)(caps, problem).then_some(problem.x);
        Bound { rounded_weights, ..Bound::new(problem.y, problem.k) }
    }

    /// What a problem that it supports is computed by, without an activation.
    pub fn instances_of(&self, caps: &Caps, problem: &Problem) -> Vec<Instance> {
        (self.instances_of)(caps, problem)
    }

    /// Bytes of workspace that it needs for a problem that it supports.
    pub fn workspace_bytes(&self, caps: &Caps, problem: &Problem) -> usize {
        (self.workspace_bytes)(caps, problem)
    }

    /// Whether its layout holds the numbers of a tensor whose format it supports, or why not.
    pub fn holds(&self, w: &StoredTensor<'_>) -> std::result::Result<(), Reason> {
        (self.holds)(w)
    }
}

/// The kernel that serves a problem, among those of one layout if the weight is packed already, else of the layout that
/// [`pack`] would choose.
pub fn select(caps: &Caps, problem: &Problem, layout: Option<&str>) -> Result<&'static Kernel> {
    let mut rejections = Vec::new();
    for (kernel, reason) in explain(caps, problem, layout) {
        match reason {
            None => return Ok(kernel),
            Some(reason) => rejections.push(Rejection { kernel: kernel.name, reason }),
        }
    }
    Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections })
}

/// The kernel that serves a problem with rows that do not depend on each other: the same one whatever their number is.
fn select_batch_invariant(caps: &Caps, problem: &Problem, layout: &str) -> Result<&'static Kernel> {
    let one = Problem { m: 1, ..*problem };
    let mut rejections = Vec::new();
    for kernel in KERNELS.iter().filter(|kernel| kernel.layout == layout) {
        let able = if kernel.batch_invariant { Ok(()) } else { Err(Reason("is not batch-invariant".into())) };
        match able.and_then(|()| kernel.supports(caps, &one)) {
            Ok(()) => return Ok(kernel),
            Err(reason) => rejections.push(Rejection { kernel: kernel.name, reason }),
        }
    }
    Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections })
}

/// The layout of weights that are not packed yet: that of the first kernel for which they are packed.
fn layout_of_pack(caps: &Caps, problem: &Problem) -> Option<&'static str> {
    let one = Problem { m: 1, y: problem.x, ..*problem };
    KERNELS.iter().find(|kernel| kernel.packs && kernel.supports(caps, &one).is_ok()).map(|kernel| kernel.layout)
}

/// Number of a type in the sources.
pub(super) fn float_type(dtype: Float) -> u32 {
    match dtype {
        Float::F16 => 0,
        Float::BF16 => 1,
        Float::F32 => 2,
    }
}

/// Number of a function in the sources, and its limits.
pub(super) fn activation(activation: Activation) -> (u32, f32, f32) {
    match activation {
        Activation::None => (0, 0.0, 0.0),
        Activation::Relu => (1, 0.0, f32::INFINITY),
        Activation::Relu6 => (1, 0.0, 6.0),
        Activation::Clamp(low, high) => (1, low, high),
        Activation::Gelu => (2, 0.0, 0.0),
        Activation::GeluTanh => (3, 0.0, 0.0),
        Activation::Silu => (4, 0.0, 0.0),
    }
}

/// Every kernel with the reason against it; the first without one is chosen. The layout is as for [`select`].
pub fn explain(caps: &Caps, problem: &Problem, layout: Option<&str>) -> Vec<(&'static Kernel, Option<Reason>)> {
    let mut chosen: Option<&str> = None;
    let packed = layout_of_pack(caps, problem);
    let reason = |kernel: &Kernel| match (layout, packed) {
        (Some(layout), _) if layout != kernel.layout => {
            Some(Reason(format!("reads layout {}, the weights lie in {layout}", kernel.layout)))
        }
        (None, Some(packed)) if packed != kernel.layout => kernel.supports(caps, problem).err().or_else(|| {
            Some(Reason(format!("reads layout {}, the weights would be packed in {packed}", kernel.layout)))
        }),
        _ => kernel.supports(caps, problem).err(),
    };
    KERNELS
        .iter()
        .map(|kernel| match (reason(kernel), chosen) {
            (Some(reason), _) => (kernel, Some(reason)),
            (None, Some(other)) => (kernel, Some(Reason(format!("{other} comes first")))),
            (None, None) => {
                chosen = Some(kernel.name);
                (kernel, None)
            }
        })
        .collect()
}

/// What a problem is computed by, to be compiled before it is needed. Error: no kernel of the layout serves it.
pub fn instances_of(caps: &Caps, problem: &Problem, layout: &str) -> Result<Vec<Instance>> {
    Ok(select(caps, problem, Some(layout))?.instances_of(caps, problem))
}

/// Bytes of workspace that a problem needs, whichever kernel of the layout serves it, with rows that depend on each other or
/// not.
pub fn workspace_bytes(caps: &Caps, problem: &Problem, layout: &str) -> Result<usize> {
    let fastest = select(caps, problem, Some(layout))?;
    let batch_invariant = select_batch_invariant(caps, problem, layout);
    let bytes = |kernel: &Kernel| (kernel.workspace_bytes)(caps, problem);
    Ok(bytes(fastest).max(batch_invariant.map_or(0, bytes)))
}

/// Packs a weight on the device for the kernel that serves it best; a [`Packer`] packs many, and straight from files.
///
/// `x` is the type that activations will have. Errors: no kernel serves the format, memory is short.
pub fn pack(gpu: &Gpu, stream: &Stream, w: &QTensor, act: Act, x: Float) -> Result<Packed> {
    Packer::new(gpu, stream).pack(&[&w.into()], act, x)
}

/// Packs a weight on the device in the layout of a kernel. Error: the layout does not hold it.
pub fn pack_for(kernel: &Kernel, gpu: &Gpu, stream: &Stream, w: &QTensor, act: Act) -> Result<Packed> {
    Packer::new(gpu, stream).pack_for(kernel, &[&w.into()], act)
}

/// Puts a product into a stream.
///
/// *Shapes:* x `[m, k]`, y `[m, n]`, of any float type each. *Accuracy:* [`Kernel::bound`]; the same
/// input gives the same bits. NaN and infinity in x reach y. *Errors:* a length that does not fit, a problem that no kernel
/// of the weight's layout serves, a workspace that is too small, a kernel that cannot be compiled.
pub fn run(gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    let kernel = match call.batch_invariant {
        false => select(&gpu.caps(), &problem(&call), Some(call.w.layout()))?,
        true => select_batch_invariant(&gpu.caps(), &problem(&call), call.w.layout())?,
    };
    run_with(kernel, gpu, stream, call)
}

/// The same by a kernel of the caller's choice. Error also: it does not serve the problem.
pub fn run_with(kernel: &Kernel, gpu: &Gpu, stream: &Stream, mut call: Call<'_>) -> Result<()> {
    check(kernel, gpu, &call)?;
    let needed = (kernel.workspace_bytes)(&gpu.caps(), &problem(&call));
    let given = call.workspace.as_ref().map_or(0, |workspace| workspace.bytes());
    if given < needed {
        return Err(Error::invalid(OP, format!("a workspace of {needed} bytes"), given.to_string()));
    }
    if call.y.is_empty() {
        return Ok(());
    }
    (kernel.run)(gpu, stream, &mut call)
}

/// Lengths that fit, and a kernel that serves the problem.
fn check(kernel: &Kernel, gpu: &Gpu, call: &Call<'_>) -> Result<()> {
    check_lengths(call)?;
    let problem = problem(call);
    let reason = match kernel.layout == call.w.layout() {
        true if call.batch_invariant && !kernel.batch_invariant => Some(Reason("is not batch-invariant".into())),
        true => kernel.supports(&gpu.caps(), &problem).err(),
        false => Some(Reason(format!("reads layout {}, the weights lie in {}", kernel.layout, call.w.layout()))),
    };
    match reason {
        None => Ok(()),
        Some(reason) => {
            let rejections = vec![Rejection { kernel: kernel.name, reason }];
            Err(Error::NoKernel { op: OP, problem: problem.to_string(), rejections })
        }
    }
}

fn check_lengths(call: &Call<'_>) -> Result<()> {
    let ([n, k], m) = (call.w.shape(), call.m);
    let fits = |what: &str, [rows, columns]: [usize; 2], len: usize| {
        if rows.checked_mul(columns) == Some(len) {
            return Ok(());
        }
        Err(Error::invalid(OP, format!("{what} of {rows} × {columns}"), format!("{len} elements")))
    };
    fits("x", [m, k], call.x.len())?;
    fits("y", [m, n], call.y.len())?;
    if let Some(bias) = call.epilogue.bias {
        fits("a bias", [1, n], bias.len())?;
    }
    Ok(())
}

fn problem(call: &Call<'_>) -> Problem {
    let [n, k] = call.w.shape();
    Problem { format: Some(call.w.format()), x: call.x.dtype(), y: call.y.dtype(), m: call.m, n, k }
}
