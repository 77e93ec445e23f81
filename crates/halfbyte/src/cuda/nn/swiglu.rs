//! Launches of `swiglu.cu`: what a gated MLP does between its products.

use super::floats::float_type;
use super::{launch, overlapping, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Launch, Stream, View};
use crate::cuda::matmul::quantize_activations::{self, Target, quantizer, quantizers};
use crate::cuda::matmul::{QuantizedForm, QuantizedViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::tensor::Float;
use bytemuck::Pod;

static SOURCE: Source = Source {
    path: "nn/swiglu.cu",
    text: include_str!("swiglu.cu"),
    parameters: &[Params::LAYOUT, QuantizedParams::LAYOUT],
};

const OP: &str = "swiglu";
const QUANTIZED: &str = "swiglu_quantized";

/// As in the source: of a block, each of which has four elements.
const THREADS: usize = 128;

/// Blocks along the rows, at most: they take rows in turn.
const MOST_DOWN: usize = 65_535;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "swiglu")
}

pub(super) fn quantized_instance(form: QuantizedForm) -> Instance {
    quantizer(&SOURCE, QUANTIZED, form)
}

pub(super) fn quantized_instances() -> Vec<Instance> {
    quantizers(&SOURCE, QUANTIZED)
}

parameters! {
    /// As in the source.
    struct Params {
        gate_up: u64,
        out: u64,
        inner: u64,
        rows: u64,
        out_type: u32,
        aligned: u32,
    }

    /// As in the source.
    struct QuantizedParams {
        gate_up: u64,
        to: Target,
        out_type: u32,
        aligned: u32,
    }
}

/// `out = silu(gate) · up` with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// *Shapes:* `gate_up` `[m, 2·inner]`, each row the gate first, then up; `out` `[m, inner]`. *Accuracy:* relative error
/// ≤ 2⁻²¹ before it is rounded to out's type, where the gate is above −87; below, the result goes to −0.
/// *Errors:* lengths that do not fit.
pub fn swiglu(gpu: &Gpu, stream: &Stream, gate_up: View<'_, f32>, inner: usize, out: FloatViewMut<'_>) -> Result<()> {
    let rows = rows_of(OP, out.len(), inner)?;
    same_length(OP, "gate_up", out.len().checked_mul(2), gate_up.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let aligned = [gate_up.pointer(), out.pointer()].iter().all(|at| at.is_multiple_of(16));
    let params = Params {
        gate_up: gate_up.pointer(),
        out: out.pointer(),
        inner: inner as u64,
        rows: rows as u64,
        out_type: float_type(out.dtype()),
        aligned: (aligned && inner.is_multiple_of(4)).into(),
    };
    let grid = [inner.div_ceil(4 * THREADS), rows.min(MOST_DOWN), 1];
    let form = overlapping(gpu, launch(OP, grid, THREADS as u32, 0)?);
    put(gpu, stream, &instance(), &form, &params)
}

/// [`swiglu`] and the quantising of its result in one launch: the same bits as if it were rounded to `rounded` and then quantised.
///
/// *Shapes:* `gate_up` `[m, 2·k]` for `out` of `[m, k]`. *Errors:* lengths that do not fit.
pub fn swiglu_quantized(
    gpu: &Gpu,
    stream: &Stream,
    gate_up: View<'_, f32>,
    rounded: Float,
    out: QuantizedViewMut<'_>,
) -> Result<()> {
    let (m, inner) = (out.form.m, out.form.k);
    same_length(OP, "gate_up", m.checked_mul(inner).and_then(|len| len.checked_mul(2)), gate_up.len())?;
    if gate_up.is_empty() {
        return Ok(());
    }
    let to = out.target(OP, [m, inner])?;
    let aligned = gate_up.pointer().is_multiple_of(16) && inner.is_multiple_of(4);
    let params =
        QuantizedParams { gate_up: gate_up.pointer(), to, out_type: float_type(rounded), aligned: aligned.into() };
    let form = params.to.launch(quantize_activations::THREADS)?;
    put(gpu, stream, &quantized_instance(out.form), &form, &params)
}

/// Puts a kernel into a stream that takes these parameters.
fn put<P: Pod>(gpu: &Gpu, stream: &Stream, instance: &Instance, form: &Launch, params: &P) -> Result<()> {
    let function = gpu.function(instance)?;
    // SAFETY: the one parameter is the source's of that name, whose lengths the callers have checked.
    unsafe { function.launch(stream, form, &[Arg::new(params)]) }
}
