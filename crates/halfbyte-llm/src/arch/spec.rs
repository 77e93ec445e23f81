//! What a decoder-only language model is, as data: the decoder runs it on every device, [`crate::shard`] cuts it for
//! several ranks, and [`crate::calibrate`] quantises its layers.
//!
//! An architecture's file turns a `config.json` into a [`Spec`]; names are those of its tensors in Hugging Face's files.

use halfbyte::kernel::{Activation, Heads, KvType};
use std::sync::Arc;

/// A model's shape, its recipe and the names of its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Length of a token's vector between layers.
    pub hidden: usize,
    /// Heads of attention, the same in every layer.
    pub heads: Heads,
    /// Tokens that the model was made for.
    pub max_context: usize,
    /// Module of the embedding `[vocab, hidden]`.
    pub embedding: String,
    /// What its vectors are multiplied by: Gemma.
    pub embedding_scale: Option<f32>,
    /// Norm over its vectors: BLOOM.
    pub embedding_norm: Option<NormSpec>,
    /// The layers, in order.
    pub layers: Vec<LayerSpec>,
    /// The norm before the head.
    pub norm: NormSpec,
    /// Module of the head `[vocab, hidden]`; None: it is the embedding.
    pub head: Option<String>,
    /// A logit becomes `cap · tanh(logit / cap)`: Gemma 2.
    pub logit_cap: Option<f32>,
}

/// One layer: attention, then an MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// Attention and what belongs to it.
    pub attention: AttentionSpec,
    /// What follows it.
    pub mlp: MlpSpec,
    /// How both add to the residual stream.
    pub residual: Residual,
}

/// How attention and MLP add to the residual stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residual {
    /// The MLP reads what attention has added: Llama and most others.
    Sequential,
    /// Both read the same stream: GPT-J, GPT-NeoX, Falcon. Without a norm of its own the MLP reads attention's.
    Parallel,
}

/// A norm over vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    /// Its module: `name.weight`, of a LayerNorm `name.bias` too.
    pub name: String,
    /// Which.
    pub kind: NormKind,
    /// Added under the root.
    pub eps: f32,
    /// Added to the weight that the file holds: 1 of Gemma, as a rule 0.
    pub offset: f32,
}

/// The norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// Root mean square, with a weight.
    Rms,
    /// LayerNorm, with a weight and a bias.
    Layer,
}

/// A linear layer: module, shape, bias.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearSpec {
    /// Its module, as `model.layers.0.mlp.up_proj`.
    pub name: String,
    /// Outputs and inputs, and whether a bias must be there. One that the file holds is applied in any case.
    pub shape: Shape,
}

/// What a configuration says of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Whether it must have a bias. One that the file holds is applied in any case.
    pub bias: bool,
}

impl Shape {
    /// Rows and columns of the weights, `[n, k]`.
    pub fn matrix(self) -> [usize; 2] {
        [self.n, self.k]
    }
}

/// Causal attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Norm before it.
    pub norm: NormSpec,
    /// Queries, keys and values.
    pub qkv: Qkv,
    /// Norms over each query head and each key head, before positions come in: Qwen3.
    pub head_norms: Option<[NormSpec; 2]>,
    /// How positions come in.
    pub positions: Positions,
    /// Positions that a query sees, its own included; None: all up to its own.
    pub window: Option<usize>,
    /// Factor of the scores, as a rule `1/√head_size`.
    pub scale: f32,
    /// A scaled score becomes `cap · tanh(score / cap)`: Gemma 2.
    pub cap: Option<f32>,
    /// Tensor `[heads]` of scores that count in the softmax and stand for no value: GPT-OSS.
    pub sinks: Option<String>,
    /// From the heads back to the stream.
    pub output: LinearSpec,
    /// Norm over what is added to the stream: Gemma 2. Only with [`Residual::Sequential`].
    pub post_norm: Option<NormSpec>,
}

/// Where queries, keys and values come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Qkv {
    /// A layer each.
    Split(Box<[LinearSpec; 3]>),
    /// One layer for all.
    Fused(LinearSpec, QkvOrder),
}

/// The order of the outputs of a fused layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QkvOrder {
    /// All query heads, all key heads, all value heads: Phi-3.
    Blocks,
    /// For each key and value head its query heads, then the key head, then the value head: BLOOM, GPT-NeoX, Falcon.
    Groups,
}

/// How attention learns of positions.
#[derive(Clone, Debug, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated. Layers that rotate alike share one.
    Rope(Arc<RopeSpec>),
    /// Scores fall with the distance, by a slope for each head: BLOOM.
    Alibi,
    /// Not at all.
    None,
}

/// Rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    /// Angles, in radians a position, by which the pairs of a head's elements are rotated; scaling is included.
    /// At most `head_size / 2`.
    pub frequencies: Vec<f64>,
    /// Others for texts with room for many tokens: longrope.
    pub long: Option<LongRope>,
    /// What cosines and sines are multiplied by; other than 1 only where a part of each head rotates, else scores have the factor.
    pub factor: f64,
}

/// The rotary positions of long texts.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Texts with room for more tokens than this have them.
    pub beyond: usize,
    /// As in [`RopeSpec`].
    pub frequencies: Vec<f64>,
}

/// What follows attention.
#[derive(Clone, Debug, PartialEq)]
pub struct MlpSpec {
    /// Norm before it; None only with [`Residual::Parallel`].
    pub norm: Option<NormSpec>,
    /// What it computes.
    pub kind: MlpKind,
    /// Norm over what is added to the stream: Gemma 2. Only with [`Residual::Sequential`].
    pub post_norm: Option<NormSpec>,
}

/// The kinds of MLP.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpKind {
    /// One for all tokens.
    Dense(FeedForward),
    /// Some of many for each token.
    Experts(ExpertsSpec),
}

/// `down(act(gate(x)) ⊙ up(x))`, or `down(act(up(x)))`.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// Gate, then up, in a layer each or in one (Phi-3); of a plain one up alone.
    pub up: Vec<LinearSpec>,
    /// Back to the stream.
    pub down: LinearSpec,
    /// The function.
    pub activation: Activation,
    /// In place of the function and the product with up: GPT-OSS.
    pub clamp: Option<GateClamp>,
}

/// `gate · σ(alpha · gate) · (up + 1)`, of a gate at most `limit` and up from `−limit` to `limit`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GateClamp {
    /// Factor in the sigmoid.
    pub alpha: f32,
    /// The greatest magnitude.
    pub limit: f32,
}

impl FeedForward {
    /// Whether it has a gate.
    pub fn is_gated(&self) -> bool {
        self.up.iter().map(|layer| layer.shape.n).sum::<usize>() == 2 * self.inner()
    }

    /// Length of the vector inside.
    pub fn inner(&self) -> usize {
        self.down.shape.k
    }
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// From the stream to a number for each expert.
    pub router: LinearSpec,
    /// Experts that compute a token.
    pub top_k: usize,
    /// How the router's numbers become weights.
    pub routing: Routing,
    /// The experts, all of one shape. Files may hold those of a layer in one tensor.
    pub experts: Vec<FeedForward>,
}

/// How a router's numbers become the weights of the chosen experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Routing {
    /// Softmax over all experts; the chosen ones' shares as they are.
    Softmax,
    /// Softmax over the chosen ones alone, so that they add up to 1: Mixtral.
    SoftmaxOfChosen,
}

/// Linear layers that read the same vector.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearGroup {
    /// Their names, without `.weight`, and shapes, whose k is the same.
    pub layers: Vec<(String, Shape)>,
    /// The step of the block that they belong to: 0 attention, 1 the MLP; 0 of an MLP beside attention too.
    pub step: usize,
    /// Groups of a stage do not read each other: q, k and v; o; gate and up, of all experts; down.
    pub stage: usize,
    /// Whether only the rows of tokens that chose an expert reach it.
    pub routed: bool,
    /// Whether their output is the last that the step adds to the residual stream, as it is.
    pub adds: bool,
    /// What can take up factors of the input's channels; None if nothing can.
    pub fold: Option<Fold>,
}

impl NormSpec {
    /// The name of its weight.
    pub fn weight(&self) -> String {
        format!("{}.weight", self.name)
    }

    /// The name of its bias, if it has one.
    pub fn bias(&self) -> Option<String> {
        (self.kind == NormKind::Layer).then(|| format!("{}.bias", self.name))
    }
}

impl LinearGroup {
    /// Inputs of each layer.
    pub fn k(&self) -> usize {
        self.layers[0].1.k
    }

    /// Outputs of all layers.
    pub fn n(&self) -> usize {
        self.layers.iter().map(|(_, shape)| shape.n).sum()
    }
}

/// What makes the input of a group, channel by channel in proportion to its own weights.
#[derive(Clone, Debug, PartialEq)]
pub enum Fold {
    /// A norm, with its bias if it has one.
    Norm(NormSpec),
    /// The outputs of a layer of an earlier group of the block, by its place there.
    Linear {
        /// Place of the group.
        group: usize,
        /// Place of the layer in it.
        layer: usize,
    },
}

impl Spec {
    /// Tokens of a text up to which it needs no other rotary positions than short ones (longrope).
    pub fn short_context(&self) -> usize {
        let beyond = |layer: &LayerSpec| match &layer.attention.positions {
            Positions::Rope(rope) => rope.long.as_ref().map(|long| long.beyond),
            Positions::Alibi | Positions::None => None,
        };
        self.layers.iter().filter_map(beyond).fold(self.max_context, usize::min)
    }

    /// Bytes that keys and values of one token take over all layers.
    pub fn kv_bytes_per_token(&self, kv: KvType) -> usize {
        2 * self.layers.len() * self.heads.kv_heads * kv.bytes(self.heads.head_size)
    }

    /// The groups of linear layers of a layer, in the order in which data passes them: q, k and v; o; gate and up; down. Of experts
    /// gate and up of each, then down of each; routers are in none. None: there is no such layer.
    pub fn groups(&self, layer: usize) -> Option<Vec<LinearGroup>> {
        let LayerSpec { attention, mlp, residual } = self.layers.get(layer)?;
        let beside = *residual == Residual::Parallel;
        let (mlps, routed) = match &mlp.kind {
            MlpKind::Dense(mlp) => (std::slice::from_ref(mlp), false),
            MlpKind::Experts(experts) => (experts.experts.as_slice(), true),
        };
        let norm = |norm: &NormSpec| Some(Fold::Norm(norm.clone()));
        // A head of values that several heads of queries share can take up one factor, not several.
        let whole = self.heads.heads == self.heads.kv_heads;
        let (qkv, values) = match &attention.qkv {
            Qkv::Split(layers) => (layers.as_slice(), whole.then_some(Fold::Linear { group: 0, layer: 2 })),
            Qkv::Fused(layer, _) => (std::slice::from_ref(layer), None),
        };
        let group = |layers: &[LinearSpec], stage, adds, fold| LinearGroup {
            layers: layers.iter().map(|layer| (layer.name.clone(), layer.shape)).collect(),
            step: if beside { 0 } else { stage / 2 },
            stage,
            routed: routed && stage >= 2,
            adds,
            fold,
        };
        let output = std::slice::from_ref(&attention.output);
        // The MLP may read what q, k and v do.
        let before = if beside && mlp.norm.is_none() { None } else { norm(&attention.norm) };
        let adds = attention.post_norm.is_none() && !beside;
        let mut groups = vec![group(qkv, 0, false, before), group(output, 1, adds, values)];
        // The norm before experts makes what all of them and the router read.
        let before = if routed { None } else { mlp.norm.as_ref().and_then(norm) };
        groups.extend(mlps.iter().map(|mlp| group(&mlp.up, 2, false, before.clone())));
        let adds = mlp.post_norm.is_none() && !routed;
        groups.extend(mlps.iter().enumerate().map(|(at, mlp)| {
            // Up is a layer of its own, and the product with it is one.
            let up = mlp.up.len() == 2 && mlp.clamp.is_none();
            let fold = up.then_some(Fold::Linear { group: 2 + at, layer: 1 });
            group(std::slice::from_ref(&mlp.down), 3, adds, fold)
        }));
        Some(groups)
    }

    /// Every linear layer of the blocks, in order.
    pub fn linears(&self) -> impl Iterator<Item = &LinearSpec> {
        self.layers.iter().flat_map(|layer| {
            let qkv = match &layer.attention.qkv {
                Qkv::Split(layers) => layers.as_slice(),
                Qkv::Fused(layer, _) => std::slice::from_ref(layer),
            };
            let (router, mlps) = match &layer.mlp.kind {
                MlpKind::Dense(mlp) => (None, std::slice::from_ref(mlp)),
                MlpKind::Experts(experts) => (Some(&experts.router), experts.experts.as_slice()),
            };
            let mlps = mlps.iter().flat_map(|mlp| mlp.up.iter().chain([&mlp.down]));
            qkv.iter().chain([&layer.attention.output]).chain(router).chain(mlps)
        })
    }

    /// Every norm, over vectors of the stream's length and over heads, with its length, in order.
    pub fn norms(&self) -> impl Iterator<Item = (&NormSpec, usize)> {
        let of_layer = |layer| {
            let LayerSpec { attention, mlp, .. }: &LayerSpec = layer;
            let post = [&attention.post_norm, &mlp.norm, &mlp.post_norm].into_iter().flatten();
            let stream = [&attention.norm].into_iter().chain(post).map(|norm| (norm, self.hidden));
            stream
                .chain(attention.head_norms.iter().flatten().map(|norm| (norm, self.heads.head_size)))
                .collect::<Vec<_>>()
        };
        let first = self.embedding_norm.iter().map(|norm| (norm, self.hidden));
        first.chain(self.layers.iter().flat_map(of_layer)).chain([(&self.norm, self.hidden)])
    }

    /// The sinks of every layer that has them, in order.
    pub fn sinks(&self) -> impl Iterator<Item = &String> {
        self.layers.iter().filter_map(|layer| layer.attention.sinks.as_ref())
    }

    /// Name and shape of every tensor of a dense model, in order: what a checkpoint of it holds.
    pub fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut out = vec![(format!("{}.weight", self.embedding), vec![self.vocab, self.hidden])];
        for LinearSpec { name, shape: Shape { n, k, bias } } in self.linears() {
            out.push((format!("{name}.weight"), vec![*n, *k]));
            if *bias {
                out.push((format!("{name}.bias"), vec![*n]));
            }
        }
        for (norm, len) in self.norms() {
            out.extend([norm.weight()].into_iter().chain(norm.bias()).map(|name| (name, vec![len])));
        }
        out.extend(self.sinks().map(|name| (name.clone(), vec![self.heads.heads])));
        out.extend(self.head.iter().map(|head| (format!("{head}.weight"), vec![self.vocab, self.hidden])));
        out
    }
}
