//! Launches of `layer_norm.cu`: LayerNorms, with what is added before.

use super::collectives::{Collectives, Ranks, Update};
use super::{MOST_BLOCKS_ACROSS, THREADS_OF_ROW, form_of_rows, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::tensor::Float;
use std::ops::Range;

static SOURCE: Source = Source {
    path: "nn/layer_norm.cu",
    text: include_str!("layer_norm.cu"),
    parameters: &[Params::LAYOUT, Ranks::LAYOUT],
};

const OP: &str = "layer_norm";

pub(super) fn instances() -> [Instance; 2] {
    [false, true].map(|alone| instance(alone, false))
}

/// Of ranks.
pub(super) fn summing_instances() -> [Instance; 2] {
    [false, true].map(|alone| instance(alone, true))
}

fn instance(alone: bool, of_ranks: bool) -> Instance {
    let kernel = if of_ranks { "layer_norm_of_ranks" } else { "layer_norm" };
    Instance::new(&SOURCE, format!("{kernel}<{alone}>"))
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
        aligned: u32,
        padding: u32,
    }
}

/// A LayerNorm of rows.
#[derive(Debug)]
pub struct LayerNorm<'a> {
    /// Factors `[d]`. They and `bias` are read before the kernel put into the stream just before is done: it must not write them.
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
        update: Option<Update<'_>>,
        out: FloatViewMut<'_>,
    ) -> Result<()> {
        same_length(OP, "out", Some(residual.len()), out.len())?;
        self.put(gpu, stream, residual, update, (out.pointer(), out.dtype()))
    }

    /// The norm of rows in their place.
    ///
    /// *Accuracy, errors:* as [`LayerNorm::apply`].
    pub fn apply_in_place(&self, gpu: &Gpu, stream: &Stream, rows: ViewMut<'_, f32>) -> Result<()> {
        let to = (rows.pointer(), Float::F32);
        self.put(gpu, stream, rows, None, to)
    }

    fn put(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        rows: ViewMut<'_, f32>,
        update: Option<Update<'_>>,
        (out, out_type): (u64, Float),
    ) -> Result<()> {
        let length = self.weight.len();
        same_length(OP, "bias", Some(length), self.bias.len())?;
        let m = rows_of(OP, rows.len(), length)?;
        if let Some(update) = update {
            update.checked(OP, [m, length])?;
        }
        if m == 0 {
            return Ok(());
        }
        let of_update = update.map_or(0, |update| update.values.pointer());
        let all = [rows.pointer(), of_update, self.weight.pointer(), self.bias.pointer(), out];
        let aligned = length.is_multiple_of(4) && all.iter().all(|at| at.is_multiple_of(16));
        let alone = length > 4 * THREADS_OF_ROW as usize;
        let ranks = update.and_then(|update| update.ranks).map(Collectives::params).transpose()?;
        let function = gpu.function(&instance(alone, ranks.is_some()))?;
        // Rows that ranks add up are so few that they are one launch.
        for part in launches(m, alone) {
            let at = |base: u64, size: usize| if base == 0 { 0 } else { base + (part.start * length * size) as u64 };
            let params = Params {
                stream: at(rows.pointer(), size_of::<f32>()),
                update: at(of_update, size_of::<f32>()),
                weight: self.weight.pointer(),
                bias: self.bias.pointer(),
                out: at(out, out_type.size_bytes()),
                length: length as u64,
                eps: self.eps,
                out_type: float_type(out_type),
                aligned: aligned.into(),
                padding: 0,
            };
            let form = form_of_rows(gpu, OP, part.len(), alone)?;
            let args: Vec<Arg<'_>> = [Arg::new(&params)].into_iter().chain(ranks.as_ref().map(Arg::new)).collect();
            // SAFETY: the parameters are the source's of their names, whose lengths were checked above.
            unsafe { function.launch(stream, &form, &args) }?;
        }
        Ok(())
    }
}

/// The rows of each launch: those that several blocks share are numbered in a direction in which a launch has few.
fn launches(m: usize, alone: bool) -> impl Iterator<Item = Range<usize>> {
    let most = if alone { MOST_BLOCKS_ACROSS } else { m.max(1) };
    (0..m).step_by(most).map(move |first| first..m.min(first + most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_in_one_launch() {
        for (m, alone, parts) in
            [(0, true, 0), (1, true, 1), (65_535, true, 1), (65_536, true, 2), (300_000, true, 5), (300_000, false, 1)]
        {
            let all: Vec<_> = launches(m, alone).collect();
            assert_eq!((all.len(), all.last().map_or(0, |last| last.end)), (parts, m));
            assert!(all.windows(2).all(|two| two[0].end == two[1].start));
            assert!(!alone || all.iter().all(|part| part.len() <= MOST_BLOCKS_ACROSS));
        }
    }
}
