//! Launches of `gate.cu`: what an MLP does between its products.

use super::{launch, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Launch, Stream, View};
use crate::cuda::matmul::quantize_activations::{self, Target, quantizer, quantizers};
use crate::cuda::matmul::{QuantizedForm, QuantizedViewMut, activation};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::Activation;
use crate::tensor::Float;
use bytemuck::Pod;

static SOURCE: Source = Source {
    path: "nn/gate.cu",
    text: include_str!("gate.cu"),
    parameters: &[Params::LAYOUT, QuantizedParams::LAYOUT],
};

const OP: &str = "gate";
const QUANTIZED: &str = "gate_quantized";

/// As in the source: of a block, each of which has four elements.
const THREADS: usize = 128;

/// Blocks along the rows, at most: they take rows in turn.
const MOST_DOWN: usize = 65_535;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "gate")
}

pub(super) fn quantized_instance(form: QuantizedForm) -> Instance {
    quantizer(&SOURCE, QUANTIZED, form)
}

pub(super) fn quantized_instances() -> Vec<Instance> {
    quantizers(&SOURCE, QUANTIZED)
}

parameters! {
    /// As in the source.
    struct Function {
        activation: u32,
        gated: u32,
        low: f32,
        high: f32,
        alpha: f32,
        limit: f32,
    }

    /// As in the source.
    struct Params {
        x: u64,
        out: u64,
        inner: u64,
        rows: u64,
        function: Function,
        out_type: u32,
        aligned: u32,
    }

    /// As in the source.
    struct QuantizedParams {
        x: u64,
        to: Target,
        function: Function,
        out_type: u32,
        aligned: u32,
    }
}

/// What an MLP does between its products.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gate {
    /// The function f.
    pub activation: Activation,
    /// `f(gate) · up`, where a row of x has the gate first, then up; else `f(x)`.
    pub gated: bool,
    /// In place of both `gate · σ(alpha · gate) · (up + 1)`, of a gate at most `limit` and up from `−limit` to `limit`: alpha and
    /// limit. Only with a gate.
    pub clamp: Option<[f32; 2]>,
}

impl Gate {
    /// `silu(gate) · up`.
    pub const SWIGLU: Self = Self { activation: Activation::Silu, gated: true, clamp: None };

    /// Elements of a row of x for `inner` of a result. Error: more than memory has.
    fn width(self, op: &'static str, inner: usize) -> Result<usize> {
        let width = inner.checked_mul(1 + usize::from(self.gated));
        width.ok_or_else(|| Error::invalid(op, "rows that fit memory", format!("{inner} elements")))
    }

    fn function(self, op: &'static str) -> Result<Function> {
        let (activation, low, high) = activation(self.activation);
        let [alpha, limit] = match self.clamp {
            None => [0.0; 2],
            Some(clamp @ [_, limit]) if self.gated && limit > 0.0 => clamp,
            Some(clamp) => return Err(Error::invalid(op, "a limit above 0, of a gate", format!("{clamp:?}"))),
        };
        Ok(Function { activation, gated: self.gated.into(), low, high, alpha, limit })
    }
}

/// `out = f(gate) · up`, or `f(x)`, with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// *Shapes:* `x` `[m, 2·inner]`, each row the gate first, then up, or `[m, inner]`; `out` `[m, inner]`. *Accuracy:* before it is
/// rounded to out's type, relative error ≤ 2⁻²¹ of SiLU and what is clamped, where the gate is above −87; below, the result goes
/// to −0; absolute error ≤ 2⁻²⁰ times gate and up of GELUs. *Errors:* lengths that do not fit.
pub fn gate(
    gpu: &Gpu,
    stream: &Stream,
    gate: Gate,
    x: View<'_, f32>,
    inner: usize,
    out: FloatViewMut<'_>,
) -> Result<()> {
    let rows = rows_of(OP, out.len(), inner)?;
    same_length(OP, "x", rows.checked_mul(gate.width(OP, inner)?), x.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let aligned = [x.pointer(), out.pointer()].iter().all(|at| at.is_multiple_of(16));
    let params = Params {
        x: x.pointer(),
        out: out.pointer(),
        inner: inner as u64,
        rows: rows as u64,
        function: gate.function(OP)?,
        out_type: float_type(out.dtype()),
        aligned: (aligned && inner.is_multiple_of(4)).into(),
    };
    let grid = [inner.div_ceil(4 * THREADS), rows.min(MOST_DOWN), 1];
    let form = gpu.overlapping(launch(OP, grid, THREADS as u32, 0)?);
    put(gpu, stream, &instance(), &form, &params)
}

/// [`gate()`] and the quantising of its result in one launch: the same bits as if it were rounded to `rounded` and then quantised.
///
/// *Shapes:* `x` as there, for `out` of `[m, k]`. *Errors:* lengths that do not fit.
pub fn gate_quantized(
    gpu: &Gpu,
    stream: &Stream,
    gate: Gate,
    x: View<'_, f32>,
    rounded: Float,
    out: QuantizedViewMut<'_>,
) -> Result<()> {
    let (m, inner) = (out.form.m, out.form.k);
    same_length(OP, "x", m.checked_mul(gate.width(OP, inner)?), x.len())?;
    if x.is_empty() {
        return Ok(());
    }
    let to = out.target(OP, [m, inner])?;
    let aligned = x.pointer().is_multiple_of(16) && inner.is_multiple_of(4);
    let function = gate.function(OP)?;
    let params =
        QuantizedParams { x: x.pointer(), to, function, out_type: float_type(rounded), aligned: aligned.into() };
    let form = params.to.launch(gpu, quantize_activations::THREADS)?;
    put(gpu, stream, &quantized_instance(out.form), &form, &params)
}

/// Puts a kernel into a stream that takes these parameters.
fn put<P: Pod>(gpu: &Gpu, stream: &Stream, instance: &Instance, form: &Launch, params: &P) -> Result<()> {
    let function = gpu.function(instance)?;
    // SAFETY: the one parameter is the source's of that name, whose lengths the callers have checked.
    unsafe { function.launch(stream, form, &[Arg::new(params)]) }
}
