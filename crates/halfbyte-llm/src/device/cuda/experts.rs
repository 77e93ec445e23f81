//! A mixture of experts on a GPU.
//!
//! ```text
//! router ─ route ─ the experts of a layer together (nn::ExpertLayer)
//! experts whose weights have no such kernels (floats, K types, act-order):
//!             the choice comes to the host, which says which rows are whose
//!             for each expert that is chosen:  gather its rows ─ up ─ gate ─ down;  then combine_experts
//! ```

use super::projection::{Input, Projection};
use super::run::{State, gate_of};
use super::{CudaModel, OnCuda};
use crate::arch::spec::Routing;
use crate::decoder::{Decoder, Experts, FeedForward, Mlp};
use crate::error::{Error, Result};
use crate::explain::{self, PlanOfRows, Product};
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::nn::{self, ChosenRows, ExpertLayer, ExpertRoom, FloatBuffer};
use halfbyte::cuda::sources::Instance;
use halfbyte::kernel::Problem;
use halfbyte::{Cuda, Float};
use std::collections::HashSet;

/// All experts of a layer together; None: they are not gated, or have no kernel. Error: memory is short.
pub(super) fn layer(
    cuda: &Cuda,
    experts: &[FeedForward<OnCuda>],
    top_k: usize,
    x: Float,
) -> Result<Option<ExpertLayer>> {
    let all = |of: fn(&FeedForward<OnCuda>) -> &Projection| -> Option<Vec<_>> {
        experts.iter().map(|mlp| of(mlp).single()).collect()
    };
    let (Some(up), Some(down)) = (all(|mlp| &mlp.up), all(|mlp| &mlp.down)) else { return Ok(None) };
    Ok(ExpertLayer::new(cuda.gpu(), cuda.stream(), [&up, &down], top_k, x)?.ok())
}

/// Those of each mixture of a model, in order. Errors: memory is short, gated experts that no kernel multiplies.
pub(super) fn layers(cuda: &Cuda, decoder: &Decoder<OnCuda>, x: Float) -> Result<Vec<Option<ExpertLayer>>> {
    let mixtures = decoder.layers.iter().filter_map(|layer| match &layer.mlp {
        Mlp::Dense(_) => None,
        Mlp::Experts(experts) => Some(experts),
    });
    let of = |mix: &Experts<OnCuda>| {
        let layer = layer(cuda, &mix.experts, mix.top_k, x)?;
        if layer.is_none() && mix.experts.iter().any(|mlp| mlp.up.activated_outputs().is_some()) {
            return Err(Error::invalid("experts", "weights that are multiplied together", "several forms"));
        }
        Ok(layer)
    };
    mixtures.map(of).collect()
}

impl CudaModel {
    fn expert_layer(&self, of: &Experts<OnCuda>) -> Option<&ExpertLayer> {
        self.mixtures().zip(&self.expert_layers).find(|(mix, _)| std::ptr::eq(*mix, of))?.1.as_ref()
    }

    /// What computes the experts that are multiplied together.
    pub(super) fn instances_of_experts(&self) -> Vec<Instance> {
        let of_layers = self.expert_layers.iter().flatten().flat_map(|layer| layer.instances(self.cuda.gpu()));
        let mut all: Vec<Instance> = of_layers.collect();
        all.sort_by_cached_key(Instance::to_string);
        all.dedup_by_key(|instance| instance.to_string());
        all
    }

    /// Adds what computes the experts that are multiplied together, and gives these.
    pub(super) fn explain_experts(&self, products: &mut Vec<Product>) -> HashSet<*const Projection> {
        let mut together = HashSet::new();
        for (mix, layer) in self.mixtures().zip(&self.expert_layers) {
            let Some(layer) = layer else { continue };
            let few = (1..).take_while(|&rows| layer.kernels(rows) == ["experts_gemv"]).count();
            let of_rows = |rows: [usize; 2], kernel| PlanOfRows {
                rows,
                kernel,
                configuration: format!("all of {} experts, {} of a row", mix.experts.len(), mix.top_k),
                workspace_bytes: 0,
            };
            let first = 1 + usize::from(self.persistent.is_ok());
            let plans =
                [of_rows([first, few], "experts_gemv"), of_rows([first.max(few + 1), usize::MAX], "grouped GEMM")];
            let plans = self.plan_of_one_row().into_iter().chain(plans).filter(|plan| plan.rows[0] <= plan.rows[1]);
            let plans: Vec<_> = plans.collect();
            for projection in mix.experts.iter().flat_map(|mlp| [&mlp.up, &mlp.down]) {
                let Some((packed, _)) = projection.single() else { continue };
                let ([n, k], format) = (packed.shape(), Some(packed.format()));
                let problem = Problem { format, x: self.activations, y: Float::F32, m: 1, n, k };
                explain::add(products, problem, plans.clone());
                together.insert(std::ptr::from_ref(projection));
            }
        }
        together
    }

    /// Names of the kernels between the router and the sum of what experts leave.
    pub(super) fn kernels_of_experts(&self, of: &Experts<OnCuda>, rows: usize) -> Result<String> {
        if let Some(layer) = self.expert_layer(of) {
            return Ok(layer.kernels(rows).join(", "));
        }
        let Some(mlp) = of.experts.first() else { return Ok(String::new()) };
        let kernel = |by: &Projection| by.kernel(&self.cuda, 1, self.activations);
        Ok(format!("gather, {}, gate, {}, combine_experts", kernel(&mlp.up)?, kernel(&mlp.down)?))
    }
}

/// What passes between the steps of a mixture.
#[derive(Debug)]
pub(super) struct Mixture {
    /// What the router reads, `[m, hidden]`: a choice should not turn on how products round their inputs.
    pub(super) exact: Buffer<f32>,
    /// Of the router, `[m, experts]`.
    logits: Buffer<f32>,
    /// The experts of each row, and their shares, `[m, top_k]`.
    ids: Buffer<u32>,
    shares: Buffer<f32>,
    /// Between the steps of experts that are multiplied together.
    room: Option<ExpertRoom>,
    /// Of those that are multiplied as the host says.
    on_host: Option<HostRoom>,
}

/// What passes between the steps of experts that are multiplied as the host says.
#[derive(Debug)]
struct HostRoom {
    /// Rows, expert by expert; and where among them each row's are, `[m, top_k]`.
    rows: Buffer<u32>,
    places: Buffer<u32>,
    /// The rows of an expert.
    gathered: FloatBuffer,
    /// What experts leave, expert by expert, `[m · top_k, hidden]`.
    left: Buffer<f32>,
}

impl Mixture {
    /// For so many rows; None: the model has no experts.
    pub(super) fn of(model: &CudaModel, cuda: &Cuda, rows: usize) -> Result<Option<Self>> {
        let most = |of: fn(&Experts<OnCuda>) -> usize| model.mixtures().map(of).max();
        let (Some(experts), Some(top_k)) = (most(|mix| mix.experts.len()), most(|mix| mix.top_k)) else {
            return Ok(None);
        };
        let (context, hidden, chosen) = (cuda.gpu().context(), model.decoder.hidden, rows * top_k);
        let layers: Vec<&ExpertLayer> = model.expert_layers.iter().flatten().collect();
        let on_host = || {
            Ok::<_, Error>(HostRoom {
                rows: context.allocate(chosen)?,
                places: context.allocate(chosen)?,
                gathered: FloatBuffer::allocate(cuda.gpu(), model.activations, rows * hidden)?,
                left: context.allocate(chosen * hidden)?,
            })
        };
        let asks_host = model.expert_layers.iter().any(Option::is_none);
        Ok(Some(Self {
            exact: context.allocate(rows * hidden)?,
            logits: context.allocate(rows * experts)?,
            ids: context.allocate(chosen)?,
            shares: context.allocate(chosen)?,
            room: if layers.is_empty() { None } else { Some(ExpertLayer::room(cuda, &layers, rows)?) },
            on_host: if asks_host { Some(on_host()?) } else { None },
        }))
    }

    /// Whether a step asks the host which experts compute.
    pub(super) fn asks_host(&self) -> bool {
        self.on_host.is_some()
    }
}

/// Rows, expert by expert, as the host says.
struct OnHost {
    /// How many each has.
    counts: Vec<usize>,
    rows: Vec<u32>,
    places: Vec<u32>,
}

impl OnHost {
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
        self.route(cuda, of, m)?;
        let Some(layer) = model.expert_layer(of) else { return self.as_the_host_says(cuda, of, m) };
        let Self { normed, update, mixture: Some(Mixture { ids, shares, room: Some(room), .. }), .. } = self else {
            return Err(no_room());
        };
        let (chosen, hidden) = (m * of.top_k, layer.k());
        let (ids, shares) = (ids.view().slice(0..chosen), shares.view().slice(0..chosen));
        let rows = ChosenRows { x: normed.view(0..m * hidden), ids, shares };
        Ok(layer.forward(cuda, rows, room, update.view_mut().slice(0..m * hidden))?)
    }

    /// The experts of each row, and their shares.
    fn route(&mut self, cuda: &Cuda, of: &Experts<OnCuda>, m: usize) -> Result<()> {
        let Self { part, mixture: Some(mixture), .. } = self else { return Err(no_room()) };
        let (gpu, stream, hidden) = (&**cuda.gpu(), cuda.stream(), of.router.k());
        let (count, chosen) = (of.experts.len(), m * of.top_k);
        let Mixture { exact, logits, ids, shares, .. } = mixture;
        of.router.run(cuda, Input::Floats(exact.view().slice(0..m * hidden).into()), m, (logits, 0), part)?;
        let of_chosen = of.routing == Routing::SoftmaxOfChosen;
        let to_shares = shares.view_mut().slice(0..chosen);
        let of_rows = logits.view().slice(0..m * count);
        let to_ids = ids.view_mut().slice(0..chosen);
        Ok(nn::route(gpu, stream, of_rows, [count, of.top_k], of_chosen, to_ids, to_shares)?)
    }

    fn as_the_host_says(&mut self, cuda: &Cuda, of: &Experts<OnCuda>, m: usize) -> Result<()> {
        self.watch(cuda)?;
        let Self { normed, up, inner, part, update, mixture: Some(mixture), .. } = self else { return Err(no_room()) };
        let Mixture { ids, shares, on_host: Some(room), .. } = mixture else { return Err(no_room()) };
        let HostRoom { rows, places, gathered, left } = room;
        let (gpu, stream, hidden) = (&**cuda.gpu(), cuda.stream(), of.router.k());
        let (count, chosen) = (of.experts.len(), m * of.top_k);
        let mut choice = vec![0; chosen];
        stream.download(ids.view().slice(0..chosen), &mut choice)?;
        let on_host = OnHost::of(&choice, count, of.top_k);
        stream.upload(&on_host.rows, rows.view_mut().slice(0..chosen))?;
        stream.upload(&on_host.places, places.view_mut().slice(0..chosen))?;
        let mut first = 0;
        for (mlp, &of_expert) in of.experts.iter().zip(&on_host.counts) {
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

fn no_room() -> Error {
    Error::invalid("experts", "room for what passes between their steps", "none")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_is_found_where_it_is_said_to_be() {
        let ids = [2, 0, 0, 3, 2, 3, 3, 0];
        let OnHost { counts, rows, places } = OnHost::of(&ids, 5, 2);
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
