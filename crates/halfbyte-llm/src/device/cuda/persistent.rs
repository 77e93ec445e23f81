//! All layers of a step of one token in one kernel, for the models that it takes.

use super::run::gate_of;
use super::{CudaModel, OnCuda};
use crate::arch::spec::{NormKind, Residual, Routing};
use crate::decoder::{Attention, Decoder, Experts, FeedForward, Layer, Mlp, Norm};
use crate::device::rope::Rope as ByRoom;
use crate::error::{Error, Result};
use halfbyte::cuda::Caps;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::nn::{
    HeadNorms, KvCache, PersistentDecode, PersistentLayers, PersistentPlan, Rope, StepExperts, StepLayer, StepMlp,
    StepSizes, StreamNorm,
};
use halfbyte::kernel::Reason;
use halfbyte::{Cuda, Float};
use std::sync::Arc;

/// The kernel for this rank's part of a model with keys and values of a type, or why there is none.
pub(super) fn plan(
    caps: &Caps,
    decoder: &Decoder<OnCuda>,
    dtype: Float,
    ranks: usize,
) -> std::result::Result<PersistentPlan, Reason> {
    let refuse = |why: &str| Reason(why.to_owned());
    let first = decoder.layers.first().ok_or_else(|| refuse("at least one layer"))?;
    if let Some(why) = lacks(decoder) {
        return Err(refuse(why));
    }
    let ropes = kinds_of_rope(decoder);
    let pairs = ropes.first().map_or(0, |rope| rope.of(0).pairs());
    let rotates = |layer: &Layer<OnCuda>| layer.attention.rope.is_some() != ropes.is_empty();
    if !decoder.layers.iter().all(rotates) || ropes.iter().any(|rope| rope.of(0).pairs() != pairs) {
        return Err(refuse("as many elements of a head that rotate in all layers"));
    }
    let layers = step_layers(decoder)
        .ok_or_else(|| refuse("quantised layers, each stored in one format but for values and routers"))?;
    let inner = parts(&first.mlp).first().map_or(0, |mlp| mlp.inner);
    let sizes = StepSizes { hidden: decoder.hidden, inner, heads: decoder.heads, pairs, ropes: ropes.len().max(1) };
    PersistentPlan::of(caps, sizes, &layers, dtype)?.among(ranks)
}

/// The layers of a model, as the kernel is told of them.
pub(super) fn layers(cuda: &Cuda, decoder: &Decoder<OnCuda>, plan: PersistentPlan) -> Result<Arc<PersistentLayers>> {
    let layers =
        step_layers(decoder).ok_or_else(|| Error::invalid("a step in one kernel", "layers that it takes", "others"))?;
    Ok(Arc::new(PersistentLayers::new(cuda.gpu(), cuda.stream(), plan, &layers)?))
}

/// The kinds of rotations that layers have, in the order in which they come.
fn kinds_of_rope(decoder: &Decoder<OnCuda>) -> Vec<&Arc<ByRoom<Rope>>> {
    let mut kinds: Vec<&Arc<ByRoom<Rope>>> = Vec::new();
    for rope in decoder.layers.iter().filter_map(|layer| layer.attention.rope.as_ref()) {
        if !kinds.iter().any(|kind| Arc::ptr_eq(kind, rope)) {
            kinds.push(rope);
        }
    }
    kinds
}

/// What the kernel lacks for a model. All of a model is taken apart here, so that what is added to it must be said.
pub(super) fn lacks(decoder: &Decoder<OnCuda>) -> Option<&'static str> {
    // What is before all layers, and what follows them, is other kernels' work.
    let Decoder { hidden: _, vocab: _, heads: _, embedding_norm: _, layers, norm, vocabulary: _ } = decoder;
    let like_the_last = |other: &Norm<OnCuda>| {
        let Norm { kind, eps: _, weight: _, bias } = other;
        *kind == norm.kind && bias.is_some() == norm.bias.is_some()
    };
    if norm.bias.is_some() != (norm.kind == NormKind::Layer) {
        return Some("RMS norms, or LayerNorms with biases");
    }
    layers.iter().find_map(|layer| {
        let Layer { attention, mlp_norm, mlp, mlp_post_norm, residual } = layer;
        let Attention {
            norm,
            qkv: _,
            heads: _,
            head_norms: _,
            rope: _,
            alibi: _,
            window: _,
            scale: _,
            cap: _,
            sinks,
            output: _,
            post_norm,
        } = attention;
        if *residual != Residual::Sequential || post_norm.is_some() != mlp_post_norm.is_some() {
            return Some("the MLP behind attention, and norms of what both give or of neither");
        }
        let behind = [post_norm, mlp_post_norm].into_iter().flatten();
        if !like_the_last(norm)
            || !mlp_norm.as_ref().is_some_and(like_the_last)
            || !behind.into_iter().all(like_the_last)
        {
            return Some("norms of one kind");
        }
        if sinks.is_some() {
            return Some("no sinks");
        }
        let first = parts(mlp).first().map(gate_of);
        let alike = |mlp: &FeedForward<OnCuda>| {
            let FeedForward { up: _, down: _, activation: _, clamp: _, gated: _, inner: _ } = mlp;
            Some(gate_of(mlp)) == first
        };
        (!parts(mlp).iter().all(alike)).then_some("experts of one kind")
    })
}

/// The MLP of a layer, or its experts.
fn parts(mlp: &Mlp<OnCuda>) -> &[FeedForward<OnCuda>] {
    match mlp {
        Mlp::Dense(mlp) => std::slice::from_ref(mlp),
        Mlp::Experts(experts) => &experts.experts,
    }
}

fn norm(norm: &Norm<OnCuda>) -> StreamNorm<'_> {
    StreamNorm { weight: norm.weight.view(), bias: norm.bias.as_ref().map(Buffer::view), eps: norm.eps }
}

fn step_layers(decoder: &Decoder<OnCuda>) -> Option<Vec<StepLayer<'_>>> {
    let ropes = kinds_of_rope(decoder);
    let layers = decoder.layers.iter();
    layers.map(|layer| step_layer(layer, &ropes)).collect()
}

fn step_layer<'a>(layer: &'a Layer<OnCuda>, ropes: &[&Arc<ByRoom<Rope>>]) -> Option<StepLayer<'a>> {
    let attention = &layer.attention;
    let mut qkv = attention.qkv.products()?;
    let values = if qkv.len() == 2 { qkv.pop() } else { None };
    let [qkv] = qkv.as_slice() else { return None };
    let head_norms = attention.head_norms.as_ref().map(|[queries, keys]| HeadNorms {
        queries: queries.weight.view(),
        keys: keys.weight.view(),
        eps: queries.eps,
    });
    Some(StepLayer {
        products: [*qkv, attention.output.single()?],
        mlp: match &layer.mlp {
            Mlp::Dense(mlp) => StepMlp::Dense([mlp.up.single()?, mlp.down.single()?]),
            Mlp::Experts(experts) => StepMlp::Experts(step_experts(experts)?),
        },
        gate: gate_of(parts(&layer.mlp).first()?),
        values,
        norms: [norm(&attention.norm), norm(layer.mlp_norm.as_ref()?)],
        norms_behind: match (&attention.post_norm, &layer.mlp_post_norm) {
            (Some(of_attention), Some(of_mlp)) => Some([norm(of_attention), norm(of_mlp)]),
            _ => None,
        },
        head_norms,
        rope: attention.rope.as_ref().map_or(Some(0), |rope| ropes.iter().position(|kind| Arc::ptr_eq(kind, rope)))?,
        cap: attention.cap,
        alibi: attention.alibi.as_ref().map(Buffer::view),
        scale: attention.scale,
        window: attention.window,
    })
}

/// None where routers are quantised, or anything has a bias.
fn step_experts(of: &Experts<OnCuda>) -> Option<StepExperts<'_>> {
    let Experts { router, top_k, routing, experts } = of;
    let mut weights = Vec::with_capacity(experts.len());
    for mlp in experts {
        let [(up, None), (down, None)] = [mlp.up.single()?, mlp.down.single()?] else { return None };
        weights.push([up, down]);
    }
    Some(StepExperts {
        experts: weights,
        router: router.floats()?,
        top_k: *top_k,
        of_chosen: *routing == Routing::SoftmaxOfChosen,
    })
}

/// The kernel with the cache of a text, or of texts whose keys and values lie in pages; None where the model has none.
pub(super) fn over(model: &CudaModel, cuda: &Cuda, cache: &KvCache, paged: bool) -> Result<Option<PersistentDecode>> {
    let Ok(layers) = &model.persistent else { return Ok(None) };
    Ok(Some(PersistentDecode::new(cuda.gpu(), cuda.stream(), layers, cache, paged)?))
}

/// The kinds of rotations of layers, in a text with room for so many tokens.
pub(super) fn ropes(model: &CudaModel, room: usize) -> Vec<&Rope> {
    let kinds = kinds_of_rope(&model.decoder);
    if kinds.is_empty() { vec![&model.no_rope] } else { kinds.into_iter().map(|kind| kind.of(room)).collect() }
}

/// The last norm.
pub(super) fn last_norm(model: &CudaModel) -> StreamNorm<'_> {
    norm(&model.decoder.norm)
}
