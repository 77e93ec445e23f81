//! The architectures: a table, and what an architecture has to offer.

pub mod llama;
pub mod llama_cuda;
mod on_cpu;

pub(crate) use on_cpu::OnCpu;

use crate::config::Config;
use crate::device::Gpu;
use crate::error::Result;
use crate::sampling::Sampler;
use crate::weights::{Head, Loader, Projection, Shape};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{KvCache, Sequence};
use halfbyte_checkpoint::Weights;
use std::ops::{ControlFlow, Range};

/// An architecture, as checkpoints name it.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Its name in `architectures` of `config.json`.
    pub architecture: &'static str,
    /// Its name in `model_type`.
    pub model_type: &'static str,
    /// Packs the weights for the CPU.
    pub load: fn(&Config, &mut Loader<'_>) -> Result<Box<dyn Graph>>,
    /// Packs the weights for a GPU, onto it.
    pub load_cuda: fn(&Config, &mut Loader<'_>, &Gpu) -> Result<Box<dyn Resident>>,
    /// Packs the weights of one block.
    pub block: fn(&Config, &mut Loader<'_>, usize) -> Result<Box<dyn Block>>,
    /// The linear layers of a block, in groups, in the order in which data passes them.
    pub groups: fn(&Config, usize) -> Vec<LinearGroup>,
    /// What the first block takes for tokens, whose ids are below the vocabulary; out `[tokens, hidden]`.
    pub embed: fn(&Config, &Weights, &[u32], &mut [f32]) -> Result<()>,
}

/// Every architecture that can run.
pub static MODELS: &[Architecture] = &[Architecture {
    architecture: "LlamaForCausalLM",
    model_type: "llama",
    load: llama::load,
    load_cuda: llama_cuda::load,
    block: llama::block,
    groups: llama::groups,
    embed: llama::embed,
}];

/// A model's weights where they lie and compute: on a CPU or on a GPU.
pub trait Resident: std::fmt::Debug + Send + Sync {
    /// Begins a text with room for `context` tokens; `cpu` computes if the weights lie there.
    fn begin<'m>(&'m self, cpu: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>>;

    /// Makes everything ready that is otherwise made when it is first needed; `progress` is told how much of how much is
    /// done, from any thread.
    fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()>;

    /// Bytes of all weights, as they lie in memory.
    fn bytes(&self) -> usize;

    /// Bytes that keys and values of one token take over all layers.
    fn kv_bytes_per_token(&self) -> usize;
}

/// One text in a model where that computes: what it has read, and what comes next.
pub trait Text: std::fmt::Debug + Send {
    /// Tokens it has room for.
    fn capacity(&self) -> usize;

    /// Tokens read so far: the position of the next.
    fn position(&self) -> usize;

    /// Forgets tokens from a position on.
    fn truncate(&mut self, position: usize);

    /// Reads some tokens, at most as many as go through the layers together.
    ///
    /// The caller has checked that ids are below the vocabulary and that there is room. After an error nothing of the batch
    /// has been read, or it must be forgotten by [`Text::truncate`].
    fn read(&mut self, batch: Batch<'_>) -> Result<()>;

    /// Logits `[rows, vocab]` of some rows of the batch read last: of the last token there is only row 0, unless all were
    /// asked for.
    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()>;

    /// The token that a sampler chooses to follow what was read. Error: as [`Sampler::next`].
    fn next(&mut self, sampler: &mut Sampler) -> Result<u32>;
}

/// A model's layers on a CPU, from token ids to the vectors that the head takes.
pub trait Graph: std::fmt::Debug + Send + Sync {
    /// Runs tokens through all layers and appends their keys and values to the cache.
    ///
    /// Leaves the normed vectors `[rows, hidden]` in [`Scratch::normed`] and returns how many: of all tokens, or of the last
    /// one only. The caller has checked that ids are below the vocabulary and that the cache has room.
    /// After an error the cache may hold them for some layers only.
    fn forward(
        &self,
        cpu: &Cpu,
        batch: Batch<'_>,
        cache: (&mut KvCache, Sequence),
        scratch: &mut Scratch,
    ) -> Result<usize>;

    /// The layer from vectors to logits.
    fn head(&self) -> &Head;

    /// Bytes of all weights, as they lie in memory.
    fn bytes(&self) -> usize;
}

/// A model's block on its own: its linear layers can be seen from their inputs, and replaced.
///
/// It adds to the residual stream in steps (attention, then the MLP), and each step changes the stream at its end only.
pub trait Block: std::fmt::Debug + Send {
    /// Takes one text, from its first token on, through step `step`. Shape: stream `[tokens, hidden]`.
    ///
    /// Before each group of the step, `tap` is handed the group's place in [`Architecture::groups`] and its inputs
    /// `[tokens, k]`; when it breaks, the step ends there and the stream is as it was.
    fn forward(&mut self, cpu: &Cpu, step: usize, stream: &mut [f32], tap: &mut Tap<'_>) -> Result<ControlFlow<()>>;

    /// Gives a group other weights.
    fn replace(&mut self, group: usize, weights: Projection);

    /// Gives the norm before a group another weight. Does nothing for a group without one.
    fn replace_norm(&mut self, group: usize, weight: Vec<f32>);
}

/// Sees the inputs of a group of linear layers.
pub type Tap<'a> = dyn FnMut(usize, &[f32]) -> Result<ControlFlow<()>> + 'a;

/// Linear layers that read the same vector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LinearGroup {
    /// Their names, without `.weight`, and shapes, whose k is the same.
    pub layers: Vec<(String, Shape)>,
    /// The step of the block that they belong to.
    pub step: usize,
    /// Whether their output is what the step adds to the residual stream.
    pub adds: bool,
    /// What can take up factors of the input's channels; None if nothing can.
    pub fold: Option<Fold>,
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fold {
    /// The norm whose weight has this name.
    Norm(String),
    /// The outputs of a layer of an earlier group of the block, by its place there.
    Linear {
        /// Place of the group.
        group: usize,
        /// Place of the layer in it.
        layer: usize,
    },
}

/// Tokens that go through the layers together.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Their ids, one after the other.
    pub tokens: &'a [u32],
    /// Whether every token's vector is wanted, or the last one's only.
    pub all_rows: bool,
}

/// Room for what passes between layers; grows to the largest batch seen and stays.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The residual stream `[m, hidden]`.
    pub stream: Vec<f32>,
    /// Its norm, which layers read `[m, hidden]`.
    pub normed: Vec<f32>,
    /// What a layer adds to the stream `[m, hidden]`.
    pub update: Vec<f32>,
    /// Queries, keys and values `[m, (heads + 2 kv_heads) · head_dim]`.
    pub qkv: Vec<f32>,
    /// What attention gives `[m, heads · head_dim]`.
    pub attended: Vec<f32>,
    /// Gate and up projections `[m, 2 · intermediate]`.
    pub gate_up: Vec<f32>,
    /// Their product `[m, intermediate]`.
    pub inner: Vec<f32>,
    /// For projections that could not be joined.
    pub part: Vec<f32>,
}

/// The first `len` elements of a buffer, which grows where it is shorter.
pub(crate) fn room(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
