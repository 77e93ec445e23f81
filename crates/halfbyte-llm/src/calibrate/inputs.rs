//! What the inputs of a group of layers are like, summed up over all calibration text.

use super::method::Needs;
use halfbyte::Result;
use halfbyte::quantize::{CrossMoment, Drift, Hessian};

/// Statistics of inputs. The same inputs in the same order give the same bits, whatever the number of threads.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// `Σ xᵀx` over the inputs that the quantised model gives.
    pub hessian: Hessian,
    /// `Σ eᵀx`, e being what is missing to the dense model.
    drift: Option<(DriftOf, CrossMoment)>,
    /// `[some rows, k]`.
    sample: Vec<f32>,
    /// One in how many rows is in the sample; 0: none.
    every: usize,
}

/// Where the drift of the dense model from the quantised one is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriftOf {
    /// At the inputs: `e = x' − x`, x' being those of the dense model.
    Inputs,
    /// At the residual stream r after the outputs were added to it: `e = (x' − x) · Wᵀ + (r' − r)`.
    Outputs,
}

impl Inputs {
    /// Of no inputs yet, for `[n, k]` weights; `rows` are going to come. Errors: no memory for the sums.
    pub(super) fn new([n, k]: [usize; 2], rows: usize, needs: Needs, drift: DriftOf) -> Result<Self> {
        let missing = if drift == DriftOf::Inputs { k } else { n };
        let moment = needs.drift.then(|| CrossMoment::new(missing, k)).transpose()?;
        Ok(Self {
            hessian: Hessian::new(k)?,
            drift: moment.map(|moment| (drift, moment)),
            sample: Vec::new(),
            every: if needs.rows == 0 { 0 } else { rows.div_ceil(needs.rows) },
        })
    }

    /// Adds inputs `[rows, k]`, and what is missing to the dense model if that is asked for. Errors: lengths that do not
    /// fit, NaN or infinity.
    pub(super) fn add(&mut self, x: &[f32], missing: Option<&[f32]>) -> Result<()> {
        let k = self.hessian.k();
        let (before, rows) = (self.hessian.rows() as usize, x.len() / k.max(1));
        self.hessian.add(x, rows)?;
        if let Some((_, moment)) = &mut self.drift {
            moment.add(missing.unwrap_or_default(), x, rows)?;
        }
        for (i, row) in x.chunks_exact(k).enumerate() {
            if self.every > 0 && (before + i).is_multiple_of(self.every) {
                self.sample.extend_from_slice(row);
            }
        }
        Ok(())
    }

    /// How far the dense model is from the quantised one, as [`Needs::drift`]: at the outputs of layers that add to the
    /// residual stream, the stream's own drift included, and at the inputs of the others.
    pub fn drift(&self) -> Option<Drift<'_>> {
        self.drift.as_ref().map(|(of, moment)| match of {
            DriftOf::Inputs => Drift::Inputs(moment),
            DriftOf::Outputs => Drift::Outputs(moment),
        })
    }

    /// Some of the inputs, evenly spaced, `[rows, k]`; as many as [`Needs::rows`] or a few less.
    pub fn sample(&self) -> &[f32] {
        &self.sample
    }

    /// Channels that were 0 in every input.
    pub fn dead(&self) -> usize {
        (0..self.hessian.k()).filter(|&j| self.hessian.get(j, j) == 0.0).count()
    }
}
