//! The architectures: a table, and what an architecture has to offer.

pub mod llama;

use crate::config::Config;
use crate::error::Result;
use crate::weights::{Head, Loader};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::KvCache;

/// An architecture, as checkpoints name it.
#[derive(Clone, Copy, Debug)]
pub struct Architecture {
    /// Its name in `architectures` of `config.json`.
    pub architecture: &'static str,
    /// Its name in `model_type`.
    pub model_type: &'static str,
    /// Packs the weights.
    pub load: fn(&Config, &mut Loader<'_>) -> Result<Box<dyn Graph>>,
}

/// Every architecture that can run.
pub static MODELS: &[Architecture] =
    &[Architecture { architecture: "LlamaForCausalLM", model_type: "llama", load: llama::load }];

/// A model's layers, from token ids to the vectors that the head takes.
pub trait Graph: std::fmt::Debug + Send + Sync {
    /// Runs tokens through all layers and appends their keys and values to the cache.
    ///
    /// Returns the normed vectors `[rows, hidden]` within `scratch`: of all tokens, or of the last one only.
    /// The caller has checked that ids are below the vocabulary and that the cache has room.
    /// After an error the cache may hold them for some layers only.
    fn forward<'s>(
        &self,
        cpu: &Cpu,
        batch: Batch<'_>,
        cache: &mut KvCache,
        scratch: &'s mut Scratch,
    ) -> Result<&'s [f32]>;

    /// The layer from vectors to logits.
    fn head(&self) -> &Head;

    /// Bytes of all weights, as they lie in memory.
    fn bytes(&self) -> usize;
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
