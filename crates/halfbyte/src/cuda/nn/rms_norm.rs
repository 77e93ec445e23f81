//! Launches of `rms_norm.cu`: RMS norms, with what is added before, and with what products make of them.

use super::collectives::{Collectives, Ranks, Update};
use super::{THREADS_OF_ROW, THREADS_OF_ROW_ALONE, form_of_rows, launch, rows_alone, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Launch, Stream, View, ViewMut};
use crate::cuda::matmul::quantize_activations::{Target, quantizer, quantizers};
use crate::cuda::matmul::{NextNorm, NextOperands, QuantizedForm, QuantizedViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::tensor::Float;

static SOURCE: Source = Source {
    path: "nn/rms_norm.cu",
    text: include_str!("rms_norm.cu"),
    parameters: &[Params::LAYOUT, QuantizedParams::LAYOUT, Ranks::LAYOUT],
};

const OP: &str = "rms_norm";
const QUANTIZED: &str = "rms_norm_quantized";

pub(super) fn instances() -> [Instance; 3] {
    [(false, false), (true, false), (true, true)].map(|(alone, short)| instance(alone, short))
}

/// Of ranks.
pub(super) fn summing_instances() -> [Instance; 2] {
    [false, true].map(summing_instance)
}

fn instance(alone: bool, short: bool) -> Instance {
    Instance::new(&SOURCE, format!("rms_norm<{alone}, {short}>"))
}

fn summing_instance(alone: bool) -> Instance {
    Instance::new(&SOURCE, format!("rms_norm_of_ranks<{alone}>"))
}

pub(super) fn quantized_instance(form: QuantizedForm) -> Instance {
    quantizer(&SOURCE, QUANTIZED, form)
}

pub(super) fn quantized_instances() -> Vec<Instance> {
    quantizers(&SOURCE, QUANTIZED)
}

parameters! {
    /// As in the source.
    struct Rows {
        stream: u64,
        update: u64,
        weight: u64,
        length: u64,
        eps: f32,
        out_type: u32,
        aligned: u32,
        padding: u32,
    }

    /// As in the source.
    struct Params {
        rows: Rows,
        out: u64,
        exact: u64,
        next: NextOperands,
    }

    /// As in the source.
    struct QuantizedParams {
        rows: Rows,
        to: Target,
    }
}

/// A norm of rows.
#[derive(Debug)]
pub struct Norm<'a> {
    /// The residual stream `[m, d]`.
    pub residual: ViewMut<'a, f32>,
    /// Added to it first, `[m, d]`.
    pub update: Option<Update<'a>>,
    /// Factors `[d]`. They are read before the kernel put into the stream just before is done: it must not write them.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// Output `[m, d]`.
    pub out: FloatViewMut<'a>,
    /// The same in f32, `[m, d]`.
    pub exact: Option<ViewMut<'a, f32>>,
    /// What the next norm begins with, if products fold that one.
    pub next: Option<NextNorm<'a>>,
}

/// `residual += update`, if there is one; `out = residual / √(mean(residual²) + eps) · weight`, row by row.
///
/// The bits of a row do not depend on how many rows there are. *Accuracy:* relative error ≤ (d/8 + 16)·2⁻²⁴ before it is rounded
/// to out's type, as long as the squares stay in the range of f32. *Errors:* lengths that do not fit. *Source:* Zhang and Sennrich, "Root Mean Square Layer Normalization",
/// 2019.
pub fn rms_norm(gpu: &Gpu, stream: &Stream, norm: Norm<'_>) -> Result<()> {
    let Norm { residual, update, weight, eps, out, exact, next } = norm;
    same_length(OP, "out", Some(residual.len()), out.len())?;
    if let Some(exact) = &exact {
        same_length(OP, "exact", Some(residual.len()), exact.len())?;
    }
    let exact = exact.map_or(0, |exact| exact.pointer());
    let (m, rows) = rows(&residual, update, weight, eps, out.dtype())?;
    let next = next.map(|next| next.operands(m)).transpose().map_err(|error| error.of(OP))?.unwrap_or_default();
    if m == 0 {
        return Ok(());
    }
    let ranks = update.and_then(|update| update.ranks);
    let aligned = rows.aligned & u32::from(out.pointer().is_multiple_of(16) && exact.is_multiple_of(16));
    put_norm(
        gpu,
        stream,
        [m, weight.len()],
        Params { rows: Rows { aligned, ..rows }, out: out.pointer(), exact, next },
        ranks,
    )
}

/// Puts the norm of m rows into a stream, whose lengths the callers have checked.
fn put_norm(
    gpu: &Gpu,
    stream: &Stream,
    [m, length]: [usize; 2],
    params: Params,
    ranks: Option<&Collectives>,
) -> Result<()> {
    let alone = rows_alone(gpu, m, length);
    let form = form_of_rows(gpu, OP, m, alone)?;
    match ranks.map(Collectives::params).transpose()? {
        None => {
            // A vector of four for each thread.
            let short = alone && length <= 4 * THREADS_OF_ROW_ALONE as usize;
            put(gpu, stream, &instance(alone, short), &form, &[Arg::new(&params)])
        }
        Some(ranks) => put(gpu, stream, &summing_instance(alone), &form, &[Arg::new(&params), Arg::new(&ranks)]),
    }
}

/// [`rms_norm`] of rows in their place: the same bits.
///
/// *Shapes:* `rows` `[m, d]`, `weight` `[d]`. *Errors:* lengths that do not fit.
pub fn rms_norm_in_place(
    gpu: &Gpu,
    stream: &Stream,
    rows: ViewMut<'_, f32>,
    weight: View<'_, f32>,
    eps: f32,
) -> Result<()> {
    let (m, of_rows) = self::rows(&rows, None, weight, eps, Float::F32)?;
    if m == 0 {
        return Ok(());
    }
    let params = Params { out: of_rows.stream, rows: of_rows, exact: 0, next: NextOperands::default() };
    put_norm(gpu, stream, [m, weight.len()], params, None)
}

/// A norm of rows whose result only products with quantised activations read.
#[derive(Debug)]
pub struct QuantizedNorm<'a> {
    /// The residual stream `[m, d]`.
    pub residual: ViewMut<'a, f32>,
    /// Added to it first, `[m, d]`.
    pub update: Option<View<'a, f32>>,
    /// Factors `[d]`.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// The type that the result is rounded to before it is quantised.
    pub rounded: Float,
    /// Its codes, `[m, d]`.
    pub out: QuantizedViewMut<'a>,
}

/// [`rms_norm`] and the quantising of its result in one launch: the same bits.
///
/// *Errors:* lengths that do not fit.
pub fn rms_norm_quantized(gpu: &Gpu, stream: &Stream, norm: QuantizedNorm<'_>) -> Result<()> {
    let QuantizedNorm { residual, update, weight, eps, rounded, out } = norm;
    let (m, rows) = rows(&residual, update.map(Update::from), weight, eps, rounded)?;
    let params = QuantizedParams { rows, to: out.target(OP, [m, weight.len()])? };
    if m == 0 {
        return Ok(());
    }
    // One block to a row, whose sum it forms first.
    let form = gpu.overlapping(launch(OP, [m, 1, 1], THREADS_OF_ROW, 0)?);
    put(gpu, stream, &quantized_instance(out.form), &form, &[Arg::new(&params)])
}

/// The rows of a norm as kernels are told of them, and their number. Errors: lengths that do not fit.
fn rows(
    residual: &ViewMut<'_, f32>,
    update: Option<Update<'_>>,
    weight: View<'_, f32>,
    eps: f32,
    out: Float,
) -> Result<(usize, Rows)> {
    let m = rows_of(OP, residual.len(), weight.len())?;
    if let Some(update) = update {
        update.checked(OP, [m, weight.len()])?;
    }
    let of_update = update.map_or(0, |update| update.values.pointer());
    let aligned = [residual.pointer(), of_update, weight.pointer()].iter().all(|at| at.is_multiple_of(16));
    let rows = Rows {
        stream: residual.pointer(),
        update: of_update,
        weight: weight.pointer(),
        length: weight.len() as u64,
        eps,
        out_type: float_type(out),
        aligned: (aligned && weight.len().is_multiple_of(4)).into(),
        padding: 0,
    };
    Ok((m, rows))
}

/// Puts a kernel into a stream, with its parameters.
fn put(gpu: &Gpu, stream: &Stream, instance: &Instance, form: &Launch, args: &[Arg<'_>]) -> Result<()> {
    let function = gpu.function(instance)?;
    // SAFETY: the parameters are the source's of their names, whose lengths the callers have checked.
    unsafe { function.launch(stream, form, args) }
}
