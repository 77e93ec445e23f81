//! Norms of the stream, and what ranks add up before: of few rows every rank all of them, of many each its own.

use super::{OnCuda, Projection, Ranks, Run, State};
use crate::arch::spec::NormKind;
use crate::decoder::{Norm, Slot};
use crate::error::Result;
use halfbyte::cuda::nn::{self, QuantizedNorm, Update};
use std::ops::Range;

impl Run<'_> {
    /// The stream, with the update added to it or not, normed for what reads it.
    pub(super) fn norm_rows(&mut self, add: bool, norm: &Norm<OnCuda>, reader: Option<&Projection>) -> Result<()> {
        // A LayerNorm leaves floats.
        self.codes = self.codes_for(reader.filter(|_| norm.kind == NormKind::Rms), Slot::Normed);
        let (m, hidden, as_floats) = (self.on.len(), self.model.decoder.hidden, self.codes.is_none());
        let in_norm = |ranks: &Ranks| as_floats && ranks.in_norm(m, hidden).is_some();
        let sums_itself = add && !self.summed && self.state.ranks.as_ref().is_some_and(in_norm);
        // Of many rows a rank sums and norms its own, and gets the others normed.
        let own = if as_floats { self.sum_own_rows(add)? } else { None };
        if own.is_none() {
            self.whole_stream()?;
        }
        let add = add && (sums_itself || own.is_none() && !self.add_sum()?);
        let rows = own.clone().unwrap_or(0..m);
        let (model, of_stream) = (self.model, self.on.start + rows.start..self.on.start + rows.end);
        let State { residual: stream_of_text, update, normed, codes, mixture, ranks, folding, .. } = &mut *self.state;
        let all_ranks = ranks.as_ref();
        let ranks = all_ranks.filter(|_| sums_itself).and_then(|ranks| ranks.in_norm(m, hidden));
        let in_stream = of_stream.start * hidden..of_stream.end * hidden;
        let residual = stream_of_text.view_mut().slice(in_stream.clone());
        let in_normed = rows.start * hidden..rows.end * hidden;
        let update = add.then(|| update.view().slice(0..m * hidden));
        let (gpu, stream, weight, eps) = (self.cuda.gpu(), self.cuda.stream(), norm.weight.view(), norm.eps);
        // Before a mixture of experts: what no product rounds, for the router.
        let exact = mixture.as_mut().filter(|_| reader.is_none());
        let exact = exact.map(|mixture| mixture.exact.view_mut().slice(0..m * hidden));
        let summed = update.map(|values| Update { values, ranks });
        self.folded.place = None;
        match (self.codes, &norm.bias) {
            (None, None) => {
                let out = normed.view_mut(in_normed);
                let next = if own.is_none() { folding.behind_kernel(m) } else { None };
                let (place, next) = next.unzip();
                self.folded.place = place;
                nn::rms_norm(gpu, stream, nn::Norm { residual, update: summed, weight, eps, out, exact, next })?;
            }
            (None, Some(bias)) => {
                let (out, norm) = (normed.view_mut(in_normed), nn::LayerNorm { weight, bias: bias.view(), eps });
                norm.apply(gpu, stream, residual, summed, out)?;
                if let Some(exact) = exact {
                    let residual = stream_of_text.view_mut().slice(in_stream);
                    norm.apply(gpu, stream, residual, None, exact.into())?;
                }
            }
            (Some(at), _) => {
                let (rounded, out) = (model.activations, codes[at].view_mut(m));
                nn::rms_norm_quantized(gpu, stream, QuantizedNorm { residual, update, weight, eps, rounded, out })?;
            }
        }
        match all_ranks.filter(|_| own.is_some()) {
            Some(ranks) => ranks.gather_rows(self.cuda, normed.view_mut(0..m * hidden), [m, hidden]),
            None => Ok(()),
        }
    }

    /// The update becomes the sum over ranks, if it is not that yet.
    pub(super) fn sum_update(&mut self) -> Result<()> {
        let State { ranks, update, .. } = &mut *self.state;
        if let Some(ranks) = ranks.as_ref().filter(|_| !self.summed) {
            ranks.sum(self.cuda, update.view_mut().slice(0..self.on.len() * self.model.decoder.hidden))?;
        }
        self.summed = true;
        Ok(())
    }

    /// Where ranks divide rows: this rank's, which the update is summed for and added to. None: every rank has all.
    pub(super) fn sum_own_rows(&mut self, add: bool) -> Result<Option<Range<usize>>> {
        let (on, hidden) = (self.on.clone(), self.model.decoder.hidden);
        let State { ranks, update, residual, mixture, .. } = &mut *self.state;
        if !add {
            return Ok(self.own.clone());
        }
        // A router reads all rows as they are before they are rounded.
        let divides = !self.summed && mixture.is_none();
        let Some(ranks) = ranks.as_ref().filter(|_| divides) else { return Ok(None) };
        let Some(own) = ranks.own_rows(on.len(), hidden) else { return Ok(None) };
        let residual = residual.view_mut().slice(on.start * hidden..on.end * hidden);
        let update = update.view().slice(0..on.len() * hidden);
        ranks.sum_own_rows(self.cuda, update, residual, [on.len(), hidden])?;
        (self.summed, self.own) = (true, Some(own.clone()));
        Ok(Some(own))
    }

    /// Brings the rows of the stream that other ranks keep.
    pub(super) fn whole_stream(&mut self) -> Result<()> {
        let (on, hidden) = (&self.on, self.model.decoder.hidden);
        let State { ranks, residual, .. } = &mut *self.state;
        let Some(ranks) = ranks.as_ref().filter(|_| self.own.take().is_some()) else { return Ok(()) };
        let residual = residual.view_mut().slice(on.start * hidden..on.end * hidden);
        ranks.gather_rows(self.cuda, residual.into(), [on.len(), hidden])
    }

    /// Adds the update to the stream where that is summed over ranks first, both at once; whether it was.
    pub(super) fn add_sum(&mut self) -> Result<bool> {
        let (on, hidden) = (self.on.clone(), self.model.decoder.hidden);
        let State { ranks, update, residual, .. } = &mut *self.state;
        let Some(ranks) = ranks.as_ref().filter(|_| !self.summed) else { return Ok(false) };
        let residual = residual.view_mut().slice(on.start * hidden..on.end * hidden);
        ranks.sum_into(self.cuda, update.view_mut().slice(0..on.len() * hidden), residual)?;
        self.summed = true;
        Ok(true)
    }
}
