//! Norms without kernels of their own: of few rows, a product that ends in the stream leaves what the next product reads, and that divides by
//! the root mean square.

use super::{CudaModel, OnCuda, Projection, Run};
use crate::arch::spec::NormKind;
use crate::decoder::{Behind, Norm, Slot};
use crate::error::Result;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, Context};
use halfbyte::cuda::matmul::{Fold, FoldedNorm, NextNorm};
use halfbyte::cuda::sources::Instance;
use std::collections::BTreeMap;

/// Rows at most.
const ROWS: usize = FoldedNorm::MOST_ROWS;

/// What passes from a norm to the next one, in turns.
#[derive(Debug)]
pub(super) struct Folding([OfNorm; 2]);

/// What a norm finds.
#[derive(Debug)]
struct OfNorm {
    /// Sums of squares.
    squares: Buffer<u64>,
    /// What its numbers are scaled by.
    scales: Buffer<f32>,
}

impl OfNorm {
    fn new(context: &Context) -> halfbyte::Result<Self> {
        Ok(Self { squares: context.allocate(FoldedNorm::squares(ROWS))?, scales: context.allocate(ROWS)? })
    }

    /// For the norm before to fill it, of so many rows.
    fn next(&mut self, rows: usize) -> NextNorm<'_> {
        let (squares, scales) = (self.squares.view_mut(), self.scales.view_mut());
        NextNorm { squares: squares.slice(0..FoldedNorm::squares(rows)), scales: scales.slice(0..rows) }
    }
}

impl Folding {
    pub(super) fn new(cuda: &Cuda) -> Result<Self> {
        let context = cuda.gpu().context();
        Ok(Self([OfNorm::new(context)?, OfNorm::new(context)?]))
    }

    /// What a norm of so many rows that has a kernel leaves for the next one, and in which place; None of many rows.
    pub(super) fn behind_kernel(&mut self, rows: usize) -> Option<(usize, NextNorm<'_>)> {
        (rows <= ROWS).then(|| (0, self.0[0].next(rows)))
    }
}

/// Whether products may share a norm, of whatever rows.
fn is_shared(model: &CudaModel, Behind { norm, .. }: &Behind<'_, OnCuda>) -> bool {
    norm.kind == NormKind::Rms && norm.bias.is_none() && model.comm.size() == 1
}

/// What products are computed by that share norms.
pub(in super::super) fn instances(model: &CudaModel) -> Result<Vec<Instance>> {
    let (cuda, x) = (&model.cuda, model.activations);
    let mut instances = BTreeMap::new();
    for (by, behind) in model.decoder.updates().filter(|(_, behind)| is_shared(model, behind)) {
        let [leaves, divides] = [
            by.folding_instances(cuda, x, ROWS, Fold::Leaves)?,
            behind.reader.folding_instances(cuda, x, ROWS, Fold::Divides)?,
        ];
        if !leaves.is_empty() && !divides.is_empty() {
            instances.extend(leaves.into_iter().chain(divides).map(|instance| (instance.to_string(), instance)));
        }
    }
    Ok(instances.into_values().collect())
}

/// How far the norm is that is next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Folded {
    /// The place of what the next norm finds, if the norm before left some.
    pub(super) place: Option<usize>,
    /// The product before left what the next one reads.
    left: bool,
    /// The next product divides, with this added to the mean square.
    divides: Option<f32>,
}

impl Run<'_> {
    /// Whether a product and the one behind it share the norm between them, for the rows that there are.
    fn folds(&self, by: &Projection, behind: &Behind<'_, OnCuda>) -> Result<bool> {
        let (m, x) = (self.on.len(), self.model.activations);
        let floats = self.codes.is_none() && self.codes_for(Some(behind.reader), Slot::Normed).is_none();
        if m > ROWS || !floats || !is_shared(self.model, behind) {
            return Ok(false);
        }
        Ok(by.folds(self.cuda, x, m, Fold::Leaves)? && behind.reader.folds(self.cuda, x, m, Fold::Divides)?)
    }

    /// Multiplies, adds to the stream and leaves what the next product reads, if both share the norm between them; whether it did.
    pub(super) fn update_folded(&mut self, by: &Projection, from: Slot, behind: &Behind<'_, OnCuda>) -> Result<bool> {
        let Some(place) = self.folded.place else { return Ok(false) };
        if !self.folds(by, behind)? {
            return Ok(false);
        }
        let (m, hidden, first) = (self.on.len(), self.model.decoder.hidden, self.on.start);
        let state = &mut *self.state;
        let OfNorm { squares, scales } = &mut state.folding.0[place];
        let x = match from {
            Slot::Attended => state.attended.view(0..m * by.k()),
            _ => state.inner.view(0..m * by.k()),
        };
        let norm = FoldedNorm::Leaves {
            scaled: state.normed.view_mut(0..m * hidden),
            weight: behind.norm.weight.view(),
            squares: squares.view_mut().slice(0..FoldedNorm::squares(m)),
            scales: scales.view().slice(0..m),
        };
        let stream = state.residual.view_mut().slice(first * hidden..(first + m) * hidden);
        by.run_folded(self.cuda, x, m, stream.into(), &norm)?;
        self.folded.left = true;
        Ok(true)
    }

    /// Takes a norm for done that the product before has begun and the next one ends; whether it is one.
    pub(super) fn norm_folded(&mut self, norm: &Norm<OnCuda>) -> bool {
        let left = std::mem::take(&mut self.folded.left);
        if left {
            (self.folded.divides, self.codes) = (Some(norm.eps), None);
        }
        left
    }

    /// Multiplies what such a product has left; whether there is such.
    pub(super) fn project_folded(&mut self, by: &Projection, to: Slot) -> Result<bool> {
        let Some((eps, place)) = self.folded.divides.take().zip(self.folded.place) else { return Ok(false) };
        let (m, state) = (self.on.len(), &mut *self.state);
        let [first, second] = &mut state.folding.0;
        let (own, next) = if place == 0 { (first, second) } else { (second, first) };
        let norm = FoldedNorm::Divides {
            squares: own.squares.view().slice(0..FoldedNorm::squares(m)),
            scales: own.scales.view().slice(0..m),
            next: next.next(m),
            eps,
        };
        let x = state.normed.view(0..m * by.k());
        let y = match (by.activated_outputs(), to) {
            (Some(width), _) => state.inner.view_mut(0..m * width),
            (None, Slot::Qkv) => state.qkv.view_mut().slice(0..m * by.n()).into(),
            (None, _) => state.up.view_mut().slice(0..m * by.n()).into(),
        };
        by.run_folded(self.cuda, x, m, y, &norm)?;
        self.folded.place = Some(1 - place);
        Ok(true)
    }
}
