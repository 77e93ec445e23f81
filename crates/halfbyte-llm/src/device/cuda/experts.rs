//! A mixture of experts on a GPU.
//!
//! ```text
//! router ─ route
//! few rows:   up ─ gate ─ down, each one launch for all choices (experts_gemv)
//! others:     the choice comes to the host, which says which rows are whose
//!             for each expert that is chosen:  gather its rows ─ up ─ gate ─ down
//! combine_experts: the sum of what the experts of a row have left
//! ```

use super::projection::{Input, Projection};
use super::run::{State, gate_of};
use super::{CudaModel, OnCuda};
use crate::arch::spec::Routing;
use crate::decoder::{Decoder, Experts, FeedForward, Mlp};
use crate::error::{Error, Result};
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::nn::{self, ExpertWeights, FloatBuffer};
use halfbyte::{Cuda, Float};

/// Choices, rows times experts of a row, up to which each reads its expert's weights for itself.
pub(super) const FEW_CHOICES: usize = 16;

/// Rows up to which products of f32 are fast.
const FEW_ROWS: usize = 16;

/// Up and down of all experts of a layer, for few rows; None: there is no kernel for them.
pub(super) type FewRows = Option<[ExpertWeights; 2]>;

/// Those of each mixture of a model, in order. Error: memory is short.
pub(super) fn few_rows(cuda: &Cuda, decoder: &Decoder<OnCuda>, activations: Float) -> Result<Vec<FewRows>> {
    let of_layer = |of: &dyn Fn(&FeedForward<OnCuda>) -> &Projection, experts: &Experts<OnCuda>| {
        let products = experts.experts.iter().map(|mlp| of(mlp).single()).collect::<Option<Vec<_>>>();
        let made = products.map(|all| ExpertWeights::new(cuda.gpu(), cuda.stream(), &all, activations)).transpose()?;
        Ok::<_, Error>(made.and_then(std::result::Result::ok))
    };
    let mixtures = decoder.layers.iter().filter_map(|layer| match &layer.mlp {
        Mlp::Dense(_) => None,
        Mlp::Experts(experts) => Some(experts),
    });
    mixtures
        .map(|experts| {
            let (up, down) = (of_layer(&|mlp| &mlp.up, experts)?, of_layer(&|mlp| &mlp.down, experts)?);
            Ok(up.zip(down).map(|(up, down)| [up, down]))
        })
        .collect()
}

/// What passes between the steps of a mixture.
#[derive(Debug)]
pub(super) struct Mixture {
    /// What the router reads, `[m, hidden]`: a choice should not turn on how products round their inputs.
    pub(super) exact: Buffer<f32>,
    /// Of the router, `[m, experts]`, and a part of these.
    logits: Buffer<f32>,
    others: Buffer<f32>,
    /// The experts of each row, and their shares, `[m, top_k]`.
    ids: Buffer<u32>,
    shares: Buffer<f32>,
    /// Rows, expert by expert; and where among them each row's are, `[m, top_k]`.
    rows: Buffer<u32>,
    places: Buffer<u32>,
    /// The rows of an expert.
    gathered: FloatBuffer,
    /// What experts leave, expert by expert, `[m · top_k, hidden]`.
    left: Buffer<f32>,
    /// Of few rows: 0, 1, 2 …
    in_order: Buffer<u32>,
    /// Rows up to which the device chooses experts by itself.
    few_rows: usize,
}

impl Mixture {
    /// For so many rows; None: the model has no experts.
    pub(super) fn of(model: &CudaModel, cuda: &Cuda, rows: usize) -> Result<Option<Self>> {
        let most = |of: fn(&Experts<OnCuda>) -> usize| model.mixtures().map(of).max();
        let (Some(experts), Some(top_k)) = (most(|mix| mix.experts.len()), most(|mix| mix.top_k)) else {
            return Ok(None);
        };
        let (gpu, context) = (cuda.gpu(), cuda.gpu().context());
        let (hidden, chosen) = (model.decoder.hidden, rows * top_k);
        let mut in_order = context.allocate(FEW_CHOICES)?;
        cuda.stream().upload(&(0..FEW_CHOICES as u32).collect::<Vec<_>>(), in_order.view_mut())?;
        Ok(Some(Self {
            exact: context.allocate(rows * hidden)?,
            logits: context.allocate(rows * experts)?,
            others: context.allocate(rows * experts)?,
            ids: context.allocate(chosen)?,
            shares: context.allocate(chosen)?,
            rows: context.allocate(chosen)?,
            places: context.allocate(chosen)?,
            gathered: FloatBuffer::allocate(gpu, model.activations, rows * hidden)?,
            left: context.allocate(chosen * hidden)?,
            in_order,
            few_rows: if model.few_rows.iter().all(Option::is_some) { FEW_CHOICES / top_k.max(1) } else { 0 },
        }))
    }

    /// Whether a step of so many rows asks the host which experts compute.
    pub(super) fn asks_host(&self, rows: usize) -> bool {
        rows > self.few_rows
    }

    /// Rows of what lies between up and down, of a batch of so many.
    pub(super) fn rows_between(model: &CudaModel, rows: usize) -> usize {
        let chosen = |mix: &Experts<OnCuda>| rows.max((rows * mix.top_k).min(FEW_CHOICES));
        model.mixtures().map(chosen).max().unwrap_or(rows)
    }
}

/// Rows, expert by expert.
struct Assignment {
    /// How many each has.
    counts: Vec<usize>,
    rows: Vec<u32>,
    places: Vec<u32>,
}

impl Assignment {
    /// Of the choice `[m, top_k]` of so many experts. Rows of an expert keep their order.
    fn of(ids: &[u32], experts: usize, top_k: usize) -> Self {
        let mut counts = vec![0; experts];
        ids.iter().for_each(|&id| counts[id as usize] += 1);
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |first, count| {
                *first += count;
                Some(*first - count)
            })
            .collect();
        let (mut rows, mut places) = (vec![0; ids.len()], vec![0; ids.len()]);
        for (i, &id) in ids.iter().enumerate() {
            let place = &mut next[id as usize];
            (rows[*place], places[i]) = ((i / top_k) as u32, *place as u32);
            *place += 1;
        }
        Self { counts, rows, places }
    }
}

impl State {
    /// From `m` normed rows to the update.
    pub(super) fn experts(&mut self, model: &CudaModel, cuda: &Cuda, of: &Experts<OnCuda>, m: usize) -> Result<()> {
        let Self { normed, up, inner, part, update, mixture: Some(mixture), .. } = self else {
            return Err(Error::invalid("experts", "room for what passes between their steps", "none"));
        };
        let (gpu, stream, hidden) = (&**cuda.gpu(), cuda.stream(), of.router.k());
        let (count, chosen) = (of.experts.len(), m * of.top_k);
        let Mixture { exact, logits, others, ids, shares, rows, places, gathered, left, in_order, .. } = mixture;
        let read = exact.view().slice(0..m * hidden);
        // A bias would be in both of the two products.
        if m <= FEW_ROWS || normed.dtype() == Float::F32 || of.router.has_bias() {
            of.router.run(cuda, Input::Floats(read.into()), m, (logits, 0), part)?;
        } else {
            // As the sum of two products on tensor cores: of the rounded rows, and of what rounding has taken off.
            of.router.run(cuda, Input::Floats(normed.view(0..m * hidden)), m, (logits, 0), part)?;
            nn::rounding_error(gpu, stream, read, gathered.view_mut(0..m * hidden))?;
            of.router.run(cuda, Input::Floats(gathered.view(0..m * hidden)), m, (others, 0), part)?;
            nn::add_to(gpu, stream, logits.view_mut().slice(0..m * count), others.view().slice(0..m * count))?;
        }
        let of_chosen = of.routing == Routing::SoftmaxOfChosen;
        let to_shares = shares.view_mut().slice(0..chosen);
        let of_rows = logits.view().slice(0..m * count);
        nn::route(gpu, stream, of_rows, [count, of.top_k], of_chosen, ids.view_mut().slice(0..chosen), to_shares)?;
        let few = model.mixtures().zip(&model.few_rows).find(|(mix, _)| std::ptr::eq(*mix, of));
        let few = few.and_then(|(_, few)| few.as_ref()).filter(|_| chosen <= FEW_CHOICES);
        if let (Some([of_up, of_down]), Some(mlp)) = (few, of.experts.first()) {
            let (ids, shares) = (ids.view().slice(0..chosen), shares.view().slice(0..chosen));
            let (x, wide, width) = (normed.view(0..m * hidden), chosen * mlp.up.n(), chosen * mlp.inner);
            of_up.multiply(gpu, stream, ids, (x, of.top_k), up.view_mut().slice(0..wide))?;
            let between = up.view().slice(0..wide);
            nn::gate(gpu, stream, gate_of(mlp), between, mlp.inner, inner.view_mut(0..width))?;
            of_down.multiply(gpu, stream, ids, (inner.view(0..width), 1), left.view_mut().slice(0..chosen * hidden))?;
            let by = (in_order.view().slice(0..chosen), shares);
            let (left, to) = (left.view().slice(0..chosen * hidden), update.view_mut().slice(0..m * hidden));
            return Ok(nn::combine_experts(gpu, stream, left, hidden, by, to)?);
        }
        let mut choice = vec![0; chosen];
        stream.download(ids.view().slice(0..chosen), &mut choice)?;
        let assignment = Assignment::of(&choice, count, of.top_k);
        stream.upload(&assignment.rows, rows.view_mut().slice(0..chosen))?;
        stream.upload(&assignment.places, places.view_mut().slice(0..chosen))?;
        let mut first = 0;
        for (mlp, &of_expert) in of.experts.iter().zip(&assignment.counts) {
            if of_expert == 0 {
                continue;
            }
            // All rows of a batch that one expert has lie in their order already.
            let x = if of_expert == m {
                normed.view(0..m * hidden)
            } else {
                let own = rows.view().slice(first..first + of_expert);
                let to = gathered.view_mut(0..of_expert * hidden);
                nn::gather(gpu, stream, normed.view(0..m * hidden), hidden, own, to)?;
                gathered.view(0..of_expert * hidden)
            };
            mlp.up.run(cuda, Input::Floats(x), of_expert, (up, 0), part)?;
            let between = up.view().slice(0..of_expert * mlp.up.n());
            let width = of_expert * mlp.inner;
            nn::gate(gpu, stream, gate_of(mlp), between, mlp.inner, inner.view_mut(0..width))?;
            mlp.down.run(cuda, Input::Floats(inner.view(0..width)), of_expert, (left, first * hidden), part)?;
            first += of_expert;
        }
        let (left, of_rows) = (left.view().slice(0..chosen * hidden), update.view_mut().slice(0..m * hidden));
        let by = (places.view().slice(0..chosen), shares.view().slice(0..chosen));
        Ok(nn::combine_experts(gpu, stream, left, hidden, by, of_rows)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_found_where_it_is_said_to_be() {
        let ids = [2, 0, 0, 3, 2, 3, 3, 0];
        let Assignment { counts, rows, places } = Assignment::of(&ids, 5, 2);
        assert_eq!(counts, [3, 0, 2, 3, 0]);
        for (i, &id) in ids.iter().enumerate() {
            let place = places[i] as usize;
            assert_eq!(rows[place] as usize, i / 2);
            let first: usize = counts[..id as usize].iter().sum();
            assert!((first..first + counts[id as usize]).contains(&place));
        }
        let mut all = places.clone();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..8));
    }
}
