//! [Llama](super::llama) on a GPU: the same graph, the same numbers but for the type of what products read.

mod state;
mod text;

use super::llama::{EMBEDDING, groups};
use super::{Resident, Text};
use crate::config::Config;
use crate::device::Gpu as Device;
use crate::engine::PREFILL_TOKENS;
use crate::error::Result;
use crate::weights::Loader;
use crate::weights_cuda::{self, Loading, Projection};
use halfbyte::Float;
use halfbyte::cpu::Cpu;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{Packer, QuantizedForm};
use halfbyte::cuda::nn::{self, Dense, KvCache, Rope};
use halfbyte::kernel::Heads;
use state::State;
use std::sync::Arc;
use text::CudaText;

#[derive(Debug)]
struct LlamaCuda {
    gpu: Arc<Gpu>,
    activations: Float,
    /// Whether norms quantise what only products with quantised activations read.
    fused: bool,
    shape: Shape,
    rope: Rope,
    layers: Vec<Layer>,
    norm: Buffer<f32>,
    /// `[vocab, hidden]`.
    embedding: Dense,
    /// None where the head's weight is the embedding.
    head: Option<Projection>,
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    layers: usize,
    hidden: usize,
    intermediate: usize,
    vocab: usize,
    heads: Heads,
    eps: f32,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Buffer<f32>,
    /// Queries, keys and values, side by side.
    qkv: Projection,
    output: Projection,
    mlp_norm: Buffer<f32>,
    /// Gate, then up.
    gate_up: Projection,
    down: Projection,
}

impl Layer {
    fn load(config: &Config, weights: &mut Loader<'_>, loading: &mut Loading<'_>, i: usize) -> Result<Self> {
        let groups = groups(config, i);
        let mut norm = |name: &str| -> Result<Buffer<f32>> {
            loading.vector(&weights.vector(&format!("model.layers.{i}.{name}.weight"), config.hidden_size)?)
        };
        let [attention_norm, mlp_norm] = [norm("input_layernorm")?, norm("post_attention_layernorm")?];
        let mut joined = |group: usize| loading.joined(weights, &groups[group].layers);
        let (qkv, output, gate_up, down) = (joined(0)?, joined(1)?, joined(2)?, joined(3)?);
        Ok(Self { attention_norm, qkv, output, mlp_norm, gate_up, down })
    }

    fn projections(&self) -> [&Projection; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }
}

/// Packs the weights of a Llama onto a GPU.
pub fn load(config: &Config, weights: &mut Loader<'_>, device: &Device) -> Result<Box<dyn Resident>> {
    let Device { gpu, activations, fused } = device.clone();
    let stream = gpu.stream()?;
    let mut loading = Loading { gpu: &gpu, stream: &stream, activations, packer: Packer::new(&gpu, &stream) };
    let hidden = config.hidden_size;
    // One after the other: all threads bring each to the one bus.
    let layers = (0..config.layers).map(|i| Layer::load(config, weights, &mut loading, i)).collect::<Result<_>>()?;
    let norm = loading.vector(&weights.vector("model.norm.weight", hidden)?)?;
    let shape = [config.vocab_size, hidden];
    let embedding =
        weights.embedding_by(EMBEDDING, shape, |rows| Ok(Dense::new(&gpu, &stream, rows.as_floats(), shape)?))?;
    let head = match config.tied_embeddings {
        true => None,
        false => Some(weights.untied_head_by("lm_head", shape, |stored, act| loading.pack(&[stored], act, "lm_head"))?),
    };
    drop(loading);
    let shape = Shape {
        layers: config.layers,
        hidden,
        intermediate: config.intermediate_size,
        vocab: config.vocab_size,
        heads: config.attention_heads(),
        eps: config.rms_norm_eps,
    };
    let rope = Rope::new(&gpu, &stream, &config.rope_frequencies)?;
    stream.synchronize()?;
    Ok(Box::new(LlamaCuda { gpu, activations, fused, shape, rope, layers, norm, embedding, head }))
}

impl LlamaCuda {
    fn projections(&self) -> impl Iterator<Item = &Projection> {
        self.layers.iter().flat_map(Layer::projections).chain(&self.head)
    }

    /// How m rows lie that are quantised before a projection reads them; None where it reads floats.
    fn form_of_rows(&self, projection: &Projection, m: usize) -> Option<QuantizedForm> {
        self.fused.then(|| projection.rows_form(&self.gpu, m)).flatten()
    }

    /// Every form of rows that norms and activations leave.
    fn forms_of_rows(&self, m: usize) -> Vec<QuantizedForm> {
        let mut forms = Vec::new();
        for projection in self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.gate_up, &layer.down]) {
            forms.extend(self.form_of_rows(projection, m).filter(|form| !forms.contains(form)));
        }
        forms
    }
}

impl Resident for LlamaCuda {
    fn begin<'m>(&'m self, _: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>> {
        let Self { gpu, activations, shape, .. } = self;
        let stream = gpu.stream()?;
        let cache = KvCache::new(gpu, shape.layers, shape.heads, context, *activations)?;
        let state = State::new(self, &stream, cache, context.clamp(1, PREFILL_TOKENS))?;
        Ok(Box::new(CudaText::new(self, stream, state)?))
    }

    fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        let mut instances = nn::instances(Some(self.shape.heads.head_size));
        let weights = self.projections().flat_map(Projection::quantized);
        instances.extend(self.forms_of_rows(PREFILL_TOKENS).into_iter().flat_map(nn::quantized_instances));
        instances.extend(weights_cuda::instances(&self.gpu, weights, self.activations, PREFILL_TOKENS)?);
        Ok(self.gpu.prepare(&instances, |done| progress(done, instances.len()))?)
    }

    fn bytes(&self) -> usize {
        let norms: usize = self.layers.iter().map(|l| l.attention_norm.bytes() + l.mlp_norm.bytes()).sum();
        let products: usize = self.projections().map(Projection::bytes).sum();
        norms + self.norm.bytes() + products + self.embedding.bytes()
    }

    fn kv_bytes_per_token(&self) -> usize {
        let Shape { layers, heads, .. } = self.shape;
        2 * layers * heads.kv_heads * heads.head_size * self.activations.size_bytes()
    }
}
