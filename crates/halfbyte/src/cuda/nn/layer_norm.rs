//! Launches of `layer_norm.cu`: LayerNorms, with what is added before.

use super::floats::float_type;
use super::{launch, overlapping, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;

static SOURCE: Source =
    Source { path: "nn/layer_norm.cu", text: include_str!("layer_norm.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "layer_norm";

/// Threads of a block: of short rows, and else.
const FEW_THREADS: u32 = 256;
const THREADS: u32 = 1024;

pub(super) fn instances() -> [Instance; 2] {
    [FEW_THREADS, THREADS].map(instance)
}

fn instance(threads: u32) -> Instance {
    Instance::new(&SOURCE, format!("layer_norm<{threads}>"))
}

parameters! {
    /// As in the source.
    struct Params {
        stream: u64,
        update: u64,
        weight: u64,
        bias: u64,
        out: u64,
        length: u64,
        eps: f32,
        out_type: u32,
    }
}

/// A LayerNorm of rows.
#[derive(Debug)]
pub struct LayerNorm<'a> {
    /// Factors `[d]`.
    pub weight: View<'a, f32>,
    /// Added at the end, `[d]`.
    pub bias: View<'a, f32>,
    /// Added to the variance.
    pub eps: f32,
}

impl LayerNorm<'_> {
    /// `residual += update`, if there is one; `out = (residual − mean) / √(variance + eps) · weight + bias`, row by row.
    ///
    /// *Shapes:* residual, update, out `[m, d]`. The bits of a row do not depend on how many rows there are. *Accuracy:* with
    /// `u = 2⁻²⁴` and the row's greatest magnitude `t`, absolute error ≤ (d/256 + 40)·u·(|normed| + t/√(variance + eps))·|weight|,
    /// and one rounding of the sum, before it is rounded to out's type. *Errors:* lengths that do not fit. *Source:* Ba et al.,
    /// "Layer Normalization", 2016.
    pub fn apply(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        residual: ViewMut<'_, f32>,
        update: Option<View<'_, f32>>,
        out: FloatViewMut<'_>,
    ) -> Result<()> {
        same_length(OP, "out", Some(residual.len()), out.len())?;
        self.put(gpu, stream, residual, update, (out.pointer(), float_type(out.dtype())))
    }

    /// The norm of rows in their place.
    ///
    /// *Accuracy, errors:* as [`LayerNorm::apply`].
    pub fn apply_in_place(&self, gpu: &Gpu, stream: &Stream, rows: ViewMut<'_, f32>) -> Result<()> {
        let to = (rows.pointer(), float_type(crate::tensor::Float::F32));
        self.put(gpu, stream, rows, None, to)
    }

    fn put(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        rows: ViewMut<'_, f32>,
        update: Option<View<'_, f32>>,
        (out, out_type): (u64, u32),
    ) -> Result<()> {
        let length = self.weight.len();
        same_length(OP, "bias", Some(length), self.bias.len())?;
        let m = rows_of(OP, rows.len(), length)?;
        if let Some(update) = update {
            same_length(OP, "update", Some(rows.len()), update.len())?;
        }
        if m == 0 {
            return Ok(());
        }
        let params = Params {
            stream: rows.pointer(),
            update: update.map_or(0, |update| update.pointer()),
            weight: self.weight.pointer(),
            bias: self.bias.pointer(),
            out,
            length: length as u64,
            eps: self.eps,
            out_type,
        };
        let threads = if length > 4 * FEW_THREADS as usize { THREADS } else { FEW_THREADS };
        let form = overlapping(gpu, launch(OP, [m, 1, 1], threads, 0)?);
        let function = gpu.function(&instance(threads))?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
