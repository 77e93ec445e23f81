//! Products on a GPU: the table of kernels, the choice among them, and its explanation.
//!
//! When a weight is loaded, the first kernel that supports its format fixes the layout, and it is packed once. When it is
//! multiplied, the first kernel of that layout that supports the problem runs: which one that is, and with which configuration, is
//! decided once for all numbers of rows ([`Packed::plans`]).
//!
//! | kernel | processors | formats |
//! |---|---|---|
//! | `dequantize_cublaslt` | all from sm_75 on | all with exact activations: reads the layouts of the others, where it is faster |
//! | `wna16_sm90` | sm_90a | 2, 3, 4 and 8 bits, groups of a multiple of 16 or whole rows, zero points, offsets, x half |
//! | `wna16_mma` | all from sm_75 on | the same, x half of either type, before sm_80 f16 |
//! | `wna16_split` | all from sm_80 on | the same, x in f32 as three bf16 |
//! | `wna8_sm90` | sm_90a | the same with quantised activations, in groups of a multiple of 32 |
//! | `wna8_mma` | all from sm_75 on | the same, and in groups of a multiple of 16 |
//! | `simt` | all from sm_75 on | all |

#[doc(hidden)]
pub mod dequantize;
#[doc(hidden)]
pub mod dequantize_cublaslt;
pub(in crate::cuda) mod finish;
mod folded_norm;
pub mod fpa_intb;
mod gather;
mod gemm;
pub(in crate::cuda) mod grouped;
mod kernel;
mod llm_int8;
mod pack;
mod plans;
pub(in crate::cuda) mod quantize_activations;
mod quantized_rows;
mod round_activations;
mod simt;
mod staged;
mod sum_groups;
mod weight_range;
pub(in crate::cuda) mod wna16;
#[doc(hidden)]
pub mod wna16_mma;
#[doc(hidden)]
pub mod wna16_sm90;
mod wna16_split;
pub(in crate::cuda) mod wna8;
#[doc(hidden)]
pub mod wna8_mma;
#[doc(hidden)]
pub mod wna8_sm90;

pub(in crate::cuda) use folded_norm::NextOperands;
pub use folded_norm::{Fold, FoldedNorm, NextNorm, run_folded};
pub use grouped::{Dealt, Grouped, GroupedCall};
pub use kernel::{Configuration, Kernel};
pub use llm_int8::{LlmInt8, LlmInt8Call};
pub use pack::Packer;
pub use plans::{Plan, Plans};
pub use quantize_activations::{Form as QuantizedForm, quantize_activations};
pub use quantized_rows::{
    QuantizedCall, QuantizedRows, QuantizedView, QuantizedViewMut, rows_form, run_quantized, run_quantized_with,
};
pub use simt::Weights as PlainWeights;
pub(super) use simt::zero_kind;
pub use wna16::Weights as Wna16Weights;
pub(in crate::cuda) use wna16::with_table;

pub(in crate::cuda) use plans::KeptPlans;

use super::driver::{FloatView, FloatViewMut, Stream, View};
use super::nn::Gate;
use super::sources::{Arch, Instance};
use super::{Caps, Gpu, Workspace, halfs};
use crate::error::{Error, Result};
use crate::format::{Act, Format, QTensor};
use crate::kernel::{self as table, Activation, Problem, Reason, Rejection};
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
    /// Rows and length of the reduction.
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

    /// Whether its columns lie in the order of x, as far as the layout may have another.
    pub fn in_order(&self) -> bool {
        match self {
            Packed::Plain(_) => true,
            Packed::Wna16(w) => w.order() == 0,
        }
    }

    /// What becomes of rows of gates and of what they let through, where it is packed of these ([`Packer::pack_gated`]).
    pub fn gate(&self) -> Option<Gate> {
        match self {
            Packed::Plain(_) => None,
            Packed::Wna16(w) => w.gate(),
        }
    }

    /// Outputs: its rows, or half of them where each gate has its other.
    pub fn outputs(&self) -> usize {
        match self {
            Packed::Plain(w) => w.shape()[0],
            Packed::Wna16(w) => w.outputs(),
        }
    }

    /// Allows products with y finer than x to round its weights to the type of x, once, if all lie within the range of f16; says
    /// whether they do. Of many rows such products are faster, above all with small groups. [`Kernel::bound`] says what it costs: with x
    /// in f16 2⁻¹¹ of each term, as much as rounding x to f16 did. Quantised activations round no weights.
    ///
    /// Waits for the stream. *Errors:* memory that is short, a kernel that cannot be compiled.
    pub fn allow_rounded_weights(&mut self, gpu: &Gpu, stream: &Stream) -> Result<bool> {
        let allowed = !self.format().act.is_quantized() && weight_range::is_within_f16(gpu, stream, self)?;
        match self {
            Packed::Plain(w) => w.rounded = allowed,
            Packed::Wna16(w) => w.rounded = allowed,
        }
        Ok(allowed)
    }

    /// What its products are chosen by on a device.
    pub fn caps(&self, gpu: &Gpu) -> Caps {
        match self {
            Packed::Plain(w) => w.caps(gpu),
            Packed::Wna16(w) => w.caps(gpu),
        }
    }

    /// Name of its layout.
    pub fn layout(&self) -> &'static str {
        match self {
            Packed::Plain(_) => simt::LAYOUT,
            Packed::Wna16(_) => wna16::LAYOUT,
        }
    }
}

/// Bias and activation function of one product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added to every row, `[n]`.
    pub bias: Option<View<'a, f32>>,
    /// Applied last; none where weights have a gate.
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
    /// Output `[m, n]`, of [`Packed::outputs`].
    pub y: FloatViewMut<'a>,
    /// What kernels that need it work in, of at least [`workspace_bytes`].
    pub workspace: Option<&'a mut Workspace>,
    /// Whether a row of y must have the same bits whatever the other rows and their number are, which costs time.
    pub batch_invariant: bool,
}

/// All kernels, the preferred first.
pub static KERNELS: &[Kernel] = &[
    wna8_sm90::KERNEL,
    wna8_mma::KERNEL,
    dequantize_cublaslt::WNA16,
    wna16_sm90::KERNEL,
    wna16_mma::KERNEL,
    wna16_split::KERNEL,
    dequantize_cublaslt::PLAIN,
    simt::KERNEL,
];

/// What is launched before kernels, what packs weights for them, and what reads single rows of these.
#[doc(hidden)]
pub fn auxiliary() -> Vec<Instance> {
    let before = vec![gather::instance(), weight_range::instance(), halfs::instance(Float::F32, None)];
    [before, dequantize::chosen_instances(), pack::instances(), fpa_intb::instances(), llm_int8::instances()].concat()
}

/// Every instance that products with weights of a format are computed by on a processor, with x of any type, y of the same one or f32,
/// and no activation: whatever their sizes and the rest of the device are. None that packs weights is among them.
#[doc(hidden)]
pub fn every_instance(arch: Arch, format: Format) -> Vec<Instance> {
    let served = KERNELS.iter().filter(|kernel| (kernel.serves)(arch));
    let types = |x: Float| [[x, x], [x, Float::F32]];
    let types = move || [Float::F16, Float::BF16, Float::F32].into_iter().flat_map(types);
    let mut all: Vec<_> =
        served.flat_map(|kernel| types().flat_map(|types| (kernel.every_instance)(arch, format, types))).collect();
    all.sort_by_cached_key(Instance::to_string);
    all.dedup_by_key(|instance| instance.to_string());
    all
}

/// The kernel of a name, for weights in a layout if it reads several. Error: the names that there are.
#[doc(hidden)]
pub fn by_name(name: &str, layout: Option<&str>) -> Result<&'static Kernel> {
    let named = |kernel: &&Kernel| kernel.name == name && layout.is_none_or(|layout| kernel.layout == layout);
    KERNELS.iter().find(named).ok_or_else(|| {
        let mut names: Vec<_> = KERNELS.iter().map(|kernel| kernel.name).collect();
        names.sort_unstable();
        names.dedup();
        Error::invalid(OP, format!("a kernel out of {}", names.join(", ")), name)
    })
}

/// The kernel that serves a problem, among those of one layout if the weight is packed already, else of the layout that
/// [`pack`] would choose.
#[doc(hidden)]
pub fn select(caps: &Caps, problem: &Problem, layout: Option<&str>) -> Result<&'static Kernel> {
    let packed = layout_of_pack(caps, problem);
    table::first(OP, problem, KERNELS, |kernel| against(caps, problem, kernel, layout, packed).map_or(Ok(kernel), Err))
}

/// The layout of weights that are not packed yet: that of the first kernel for which they are packed.
fn layout_of_pack(caps: &Caps, problem: &Problem) -> Option<&'static str> {
    let one = Problem { m: 1, y: problem.x, ..*problem };
    KERNELS.iter().find(|kernel| kernel.packs && kernel.supports(caps, &one).is_ok()).map(|kernel| kernel.layout)
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

/// The reason against a kernel: it reads another layout, or does not support the problem.
fn against(
    caps: &Caps,
    problem: &Problem,
    kernel: &Kernel,
    layout: Option<&str>,
    packed: Option<&str>,
) -> Option<Reason> {
    match (layout, packed) {
        (Some(layout), _) if layout != kernel.layout => {
            Some(Reason(format!("reads layout {}, the weights lie in {layout}", kernel.layout)))
        }
        (None, Some(packed)) if packed != kernel.layout => kernel.supports(caps, problem).err().or_else(|| {
            Some(Reason(format!("reads layout {}, the weights would be packed in {packed}", kernel.layout)))
        }),
        _ => kernel.supports(caps, problem).err(),
    }
}

/// Every kernel with the reason against it; the first without one is chosen. The layout is as for [`select`].
#[doc(hidden)]
pub fn explain(caps: &Caps, problem: &Problem, layout: Option<&str>) -> Vec<(&'static Kernel, Option<Reason>)> {
    let packed = layout_of_pack(caps, problem);
    table::explain(KERNELS, |kernel| against(caps, problem, kernel, layout, packed))
}

/// What a problem is computed by, to be compiled before it is needed. Error: no kernel of the layout serves it.
#[doc(hidden)]
pub fn instances_of(caps: &Caps, problem: &Problem, layout: &str) -> Result<Vec<Instance>> {
    Ok(select(caps, problem, Some(layout))?.instances_of(caps, problem))
}

/// Bytes of workspace that a problem needs, whichever kernel of the layout serves it, with rows that depend on each other or
/// not.
pub fn workspace_bytes(caps: &Caps, problem: &Problem, layout: &str) -> Result<usize> {
    let (fastest, _) = plans::choose(caps, problem, layout, false)?;
    let bytes = |kernel: &Kernel| kernel.workspace_bytes(caps, problem);
    let batch_invariant = plans::choose(caps, problem, layout, true);
    Ok(bytes(fastest).max(batch_invariant.map_or(0, |(kernel, _)| bytes(kernel))))
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
    check_lengths(&call)?;
    let plans = call.w.plans(gpu, call.x.dtype(), call.y.dtype())?;
    plans.at(call.m, call.batch_invariant)?.configuration().run(gpu, stream, &call)
}

/// The same by a kernel of the caller's choice. Error also: it does not serve the problem.
#[doc(hidden)]
pub fn run_with(kernel: &Kernel, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
    check_lengths(&call)?;
    serving(kernel, gpu, &call)?.run(gpu, stream, &call)
}

/// The same with a configuration of the caller's choice, one of the [`Kernel::candidates`]: for measuring which is best. Those that
/// scale weights early round them to the type of x.
///
/// Errors also: a configuration of another weight, or that does not cover the shape.
#[doc(hidden)]
pub fn run_as(
    kernel: &Kernel,
    configuration: &Configuration,
    gpu: &Gpu,
    stream: &Stream,
    call: &Call<'_>,
) -> Result<()> {
    check_lengths(call)?;
    serving(kernel, gpu, call)?;
    configuration.run(gpu, stream, call)
}

/// The configuration with which a kernel serves a call. Error: it does not.
fn serving(kernel: &Kernel, gpu: &Gpu, call: &Call<'_>) -> Result<Configuration> {
    let problem = problem(call);
    let chosen = match kernel.layout == call.w.layout() {
        true => kernel.choose(&call.w.caps(gpu), &problem, call.batch_invariant),
        false => Err(Reason(format!("reads layout {}, the weights lie in {}", kernel.layout, call.w.layout()))),
    };
    chosen.map_err(|reason| {
        let rejections = vec![Rejection { kernel: kernel.name, reason }];
        Error::NoKernel { op: OP, problem: problem.to_string(), rejections }
    })
}

fn check_lengths(call: &Call<'_>) -> Result<()> {
    let ([n, k], m) = (call.w.shape(), call.m);
    check_gate(call.w, &call.epilogue)?;
    let fits = |what: &str, [rows, columns]: [usize; 2], len: usize| {
        if rows.checked_mul(columns) == Some(len) {
            return Ok(());
        }
        Err(Error::invalid(OP, format!("{what} of {rows} × {columns}"), format!("{len} elements")))
    };
    fits("x", [m, k], call.x.len())?;
    fits("y", [m, call.w.outputs()], call.y.len())?;
    if let Some(bias) = call.epilogue.bias {
        fits("a bias", [1, n], bias.len())?;
    }
    Ok(())
}

/// Error: an activation function besides that of gates.
fn check_gate(w: &Packed, epilogue: &Epilogue<'_>) -> Result<()> {
    if w.gate().is_some() && epilogue.activation != Activation::None {
        return Err(Error::invalid(OP, "no activation after gates", format!("{:?}", epilogue.activation)));
    }
    Ok(())
}

fn problem(call: &Call<'_>) -> Problem {
    let [n, k] = call.w.shape();
    Problem { format: Some(call.w.format()), x: call.x.dtype(), y: call.y.dtype(), m: call.m, n, k }
}
