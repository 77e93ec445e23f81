//! Launches of `rms_norm.cu`: RMS norms, with what is added before.

use super::floats::float_type;
use super::{launch, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use bytemuck::{Pod, Zeroable};

static SOURCE: Source = Source { path: "nn/rms_norm.cu", text: include_str!("rms_norm.cu") };

const THREADS: u32 = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "rms_norm")
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    stream: u64,
    update: u64,
    weight: u64,
    out: u64,
    length: u64,
    eps: f32,
    out_type: u32,
}

/// A norm of rows.
#[derive(Debug)]
pub struct Norm<'a> {
    /// The residual stream `[m, d]`.
    pub residual: ViewMut<'a, f32>,
    /// Added to it first, `[m, d]`.
    pub update: Option<View<'a, f32>>,
    /// Factors `[d]`.
    pub weight: View<'a, f32>,
    /// Added to the mean square.
    pub eps: f32,
    /// Output `[m, d]`.
    pub out: FloatViewMut<'a>,
}

/// `residual += update`, if there is one; `out = residual / √(mean(residual²) + eps) · weight`, row by row.
///
/// *Accuracy:* relative error ≤ (d/8 + 16)·2⁻²⁴ before it is rounded to out's type, as long as the squares stay in the
/// range of f32. *Errors:* lengths that do not fit. *Source:* Zhang and Sennrich, "Root Mean Square Layer Normalization",
/// 2019.
pub fn rms_norm(gpu: &Gpu, stream: &Stream, norm: Norm<'_>) -> Result<()> {
    const OP: &str = "rms_norm";
    let d = norm.weight.len();
    let rows = rows_of(OP, norm.residual.len(), d)?;
    same_length(OP, "out", Some(norm.residual.len()), norm.out.len())?;
    if let Some(update) = norm.update {
        same_length(OP, "update", Some(norm.residual.len()), update.len())?;
    }
    if rows == 0 {
        return Ok(());
    }
    let params = Params {
        stream: norm.residual.pointer(),
        update: norm.update.map_or(0, |update| update.pointer()),
        weight: norm.weight.pointer(),
        out: norm.out.pointer(),
        length: d as u64,
        eps: norm.eps,
        out_type: float_type(norm.out.dtype()),
    };
    let form = launch(OP, [rows, 1, 1], THREADS, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
