//! Llama: grouped-query attention with rotary positions, a gated SiLU MLP, RMS norms before each.
//!
//! *Source:* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; tensor names and the order
//! of q, k, v as in Hugging Face transformers.

use super::{Batch, Block, Fold, Graph, LinearGroup, Scratch, Tap, room};
use crate::config::Config;
use crate::error::Result;
use crate::weights::{Head, Loader, Projection, Shape};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{Attention, Heads, KvCache, Sequence, attention};
use halfbyte::cpu::nn::{self, Rope};
use halfbyte_checkpoint::Weights;
use std::ops::ControlFlow;

pub(super) const EMBEDDING: &str = "model.embed_tokens";

#[derive(Debug)]
struct Llama {
    common: Common,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Head,
}

/// What all layers share.
#[derive(Debug)]
struct Common {
    hidden: usize,
    intermediate: usize,
    heads: Heads,
    eps: f32,
    rope: Rope,
}

#[derive(Debug)]
struct Layer {
    attention_norm: Vec<f32>,
    /// Queries, keys and values, side by side.
    qkv: Projection,
    output: Projection,
    mlp_norm: Vec<f32>,
    /// Gate, then up.
    gate_up: Projection,
    down: Projection,
}

/// Packs the weights of a Llama.
pub fn load(config: &Config, weights: &mut Loader<'_>) -> Result<Box<dyn Graph>> {
    let hidden = config.hidden_size;
    let layers = weights.side_by_side(config.layers, |weights, i| Layer::load(config, weights, i))?;
    Ok(Box::new(Llama {
        common: Common::new(config)?,
        layers,
        norm: weights.vector("model.norm.weight", hidden)?,
        head: weights.head(EMBEDDING, "lm_head", config)?,
    }))
}

/// Packs one of its blocks.
pub fn block(config: &Config, weights: &mut Loader<'_>, i: usize) -> Result<Box<dyn Block>> {
    let (common, layer) = (Common::new(config)?, Layer::load(config, weights, i)?);
    let mut cache = KvCache::new(1, common.heads, config.max_context)?;
    let sequence = cache.begin();
    Ok(Box::new(LlamaBlock { common, layer, cache, sequence, scratch: Scratch::default() }))
}

/// The linear layers of a block: q, k and v; o; gate and up; down.
pub fn groups(config: &Config, i: usize) -> Vec<LinearGroup> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let group = |part: &str, layers: &[(&str, usize)], k, bias, step, fold| LinearGroup {
        layers: layers
            .iter()
            .map(|&(name, n)| (format!("model.layers.{i}.{part}.{name}_proj"), Shape { n, k, bias }))
            .collect(),
        step,
        adds: layers.len() == 1,
        fold,
    };
    let norm = |name: &str| Some(Fold::Norm(format!("model.layers.{i}.{name}.weight")));
    // A head of values that several heads of queries share can take up one factor, not several.
    let values = (config.heads == config.kv_heads).then_some(Fold::Linear { group: 0, layer: 2 });
    let up = Some(Fold::Linear { group: 2, layer: 1 });
    let (attention, mlp) = (config.attention_bias, config.mlp_bias);
    vec![
        group("self_attn", &[("q", q), ("k", kv), ("v", kv)], hidden, attention, 0, norm("input_layernorm")),
        group("self_attn", &[("o", hidden)], q, attention, 0, values),
        group("mlp", &[("gate", inner), ("up", inner)], hidden, mlp, 1, norm("post_attention_layernorm")),
        group("mlp", &[("down", hidden)], inner, mlp, 1, up),
    ]
}

/// The rows of the embedding.
pub fn embed(config: &Config, weights: &Weights, tokens: &[u32], out: &mut [f32]) -> Result<()> {
    let hidden = config.hidden_size;
    let name = format!("{EMBEDDING}.weight");
    let rows = weights.floats(&name, &[config.vocab_size, hidden])?;
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
        let row = rows.as_floats().slice(token as usize * hidden..(token as usize + 1) * hidden);
        out.iter_mut().enumerate().for_each(|(j, out)| *out = row.get(j));
    }
    weights.checkpoint().release(&name);
    Ok(())
}

impl Common {
    fn new(config: &Config) -> Result<Self> {
        Ok(Self {
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            heads: config.attention_heads(),
            eps: config.rms_norm_eps,
            rope: Rope::new(config.rope_frequencies.clone(), 1.0, config.max_context)?,
        })
    }

    fn attended(&self) -> usize {
        self.heads.heads * self.heads.head_size
    }
}

impl Layer {
    fn load(config: &Config, weights: &mut Loader<'_>, i: usize) -> Result<Self> {
        let hidden = config.hidden_size;
        let groups = groups(config, i);
        Ok(Self {
            attention_norm: weights.vector(&format!("model.layers.{i}.input_layernorm.weight"), hidden)?,
            qkv: weights.joined(&groups[0].layers)?,
            output: weights.joined(&groups[1].layers)?,
            mlp_norm: weights.vector(&format!("model.layers.{i}.post_attention_layernorm.weight"), hidden)?,
            gate_up: weights.joined(&groups[2].layers)?,
            down: weights.joined(&groups[3].layers)?,
        })
    }

    /// Queries, keys and values from the normed rows; keys and values go to the cache.
    fn read(&self, cpu: &Cpu, common: &Common, cache: &mut KvCache, at: Rows, scratch: &mut Scratch) -> Result<()> {
        let Scratch { normed, qkv, part, .. } = scratch;
        let qkv = room(qkv, at.m * common.heads.row());
        self.qkv.forward(cpu, room(normed, at.m * common.hidden), at.m, qkv, part)?;
        common.rope.apply(cpu, qkv, common.heads, at.position)?;
        Ok(cache.append(cpu, at.sequence, at.layer, at.position, qkv)?)
    }

    /// Gate and up from the normed rows, and their product.
    fn gated(&self, cpu: &Cpu, common: &Common, m: usize, scratch: &mut Scratch) -> Result<()> {
        let Scratch { normed, gate_up, inner, part, .. } = scratch;
        let gate_up = room(gate_up, m * 2 * common.intermediate);
        self.gate_up.forward(cpu, room(normed, m * common.hidden), m, gate_up, part)?;
        Ok(nn::swiglu(cpu, gate_up, common.intermediate, room(inner, m * common.intermediate))?)
    }
}

/// Rows that go through a layer together, and the position of the first.
#[derive(Clone, Copy)]
struct Rows {
    sequence: Sequence,
    layer: usize,
    position: usize,
    m: usize,
}

impl Common {
    /// What the queries see in the cache.
    fn attend(&self, cpu: &Cpu, cache: &KvCache, at: Rows, scratch: &mut Scratch) -> Result<()> {
        let heads = self.heads;
        let what = Attention {
            qkv: room(&mut scratch.qkv, at.m * heads.row()),
            heads,
            first_position: at.position,
            scale: (heads.head_size as f32).sqrt().recip(),
            window: None,
            alibi: None,
        };
        let attended = room(&mut scratch.attended, at.m * self.attended());
        Ok(attention(cpu, &what, cache, at.sequence, at.layer, attended)?)
    }
}

impl Graph for Llama {
    fn forward(
        &self,
        cpu: &Cpu,
        batch: Batch<'_>,
        (cache, sequence): (&mut KvCache, Sequence),
        scratch: &mut Scratch,
    ) -> Result<usize> {
        let common = &self.common;
        let (hidden, eps) = (common.hidden, common.eps);
        let (mut m, position) = (batch.tokens.len(), cache.len(sequence));
        self.head.embed(batch.tokens, room(&mut scratch.stream, m * hidden));
        for (layer, weights) in self.layers.iter().enumerate() {
            let Scratch { stream, normed, update, .. } = &mut *scratch;
            let (stream, normed) = (room(stream, m * hidden), room(normed, m * hidden));
            match layer {
                0 => nn::rms_norm(cpu, stream, &weights.attention_norm, eps, normed)?,
                _ => nn::add_rms_norm(cpu, stream, room(update, m * hidden), &weights.attention_norm, eps, normed)?,
            }
            let mut at = Rows { sequence, layer, position, m };
            weights.read(cpu, common, cache, at, scratch)?;
            if layer + 1 == self.layers.len() && !batch.all_rows {
                // From here on nothing looks at rows other than the last.
                let row = common.heads.row();
                scratch.stream.copy_within((m - 1) * hidden..m * hidden, 0);
                scratch.qkv.copy_within((m - 1) * row..m * row, 0);
                at = Rows { sequence, layer, position: position + m - 1, m: 1 };
                m = 1;
            }
            common.attend(cpu, cache, at, scratch)?;
            let Scratch { stream, normed, update, attended, part, .. } = &mut *scratch;
            let update = room(update, m * hidden);
            weights.output.forward(cpu, room(attended, m * common.attended()), m, update, part)?;
            let (stream, normed) = (room(stream, m * hidden), room(normed, m * hidden));
            nn::add_rms_norm(cpu, stream, update, &weights.mlp_norm, eps, normed)?;
            weights.gated(cpu, common, m, scratch)?;
            let Scratch { update, inner, part, .. } = &mut *scratch;
            weights.down.forward(cpu, room(inner, m * common.intermediate), m, room(update, m * hidden), part)?;
        }
        let Scratch { stream, normed, update, .. } = scratch;
        let (stream, normed) = (room(stream, m * hidden), room(normed, m * hidden));
        nn::add_rms_norm(cpu, stream, room(update, m * hidden), &self.norm, eps, normed)?;
        Ok(m)
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn bytes(&self) -> usize {
        let norms = self.norm.len() + self.layers.len() * 2 * self.common.hidden;
        let of_layer = |l: &Layer| l.qkv.bytes() + l.output.bytes() + l.gate_up.bytes() + l.down.bytes();
        norms * size_of::<f32>() + self.layers.iter().map(of_layer).sum::<usize>() + self.head.bytes()
    }
}

/// A layer on its own, with keys and values of one text at a time.
#[derive(Debug)]
struct LlamaBlock {
    common: Common,
    layer: Layer,
    cache: KvCache,
    sequence: Sequence,
    scratch: Scratch,
}

impl Block for LlamaBlock {
    fn forward(&mut self, cpu: &Cpu, step: usize, stream: &mut [f32], tap: &mut Tap<'_>) -> Result<ControlFlow<()>> {
        let Self { common, layer, cache, sequence, scratch } = self;
        let m = stream.len() / common.hidden;
        let attention = step == 0;
        let norm = if attention { &layer.attention_norm } else { &layer.mlp_norm };
        let normed = room(&mut scratch.normed, stream.len());
        nn::rms_norm(cpu, stream, norm, common.eps, normed)?;
        if tap(if attention { 0 } else { 2 }, normed)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        if attention {
            let at = Rows { sequence: *sequence, layer: 0, position: 0, m };
            cache.truncate(*sequence, 0)?;
            layer.read(cpu, common, cache, at, scratch)?;
            common.attend(cpu, cache, at, scratch)?;
        } else {
            layer.gated(cpu, common, m, scratch)?;
        }
        let Scratch { update, attended, inner, part, .. } = scratch;
        let (group, last, x) = if attention {
            (1, &layer.output, room(attended, m * common.attended()))
        } else {
            (3, &layer.down, room(inner, m * common.intermediate))
        };
        if tap(group, x)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let update = room(update, stream.len());
        last.forward(cpu, x, m, update, part)?;
        nn::add(cpu, stream, update)?;
        Ok(ControlFlow::Continue(()))
    }

    fn replace(&mut self, group: usize, weights: Projection) {
        let Layer { qkv, output, gate_up, down, .. } = &mut self.layer;
        if let Some(place) = [qkv, output, gate_up, down].into_iter().nth(group) {
            *place = weights;
        }
    }

    fn replace_norm(&mut self, group: usize, weight: Vec<f32>) {
        match group {
            0 => self.layer.attention_norm = weight,
            2 => self.layer.mlp_norm = weight,
            _ => {}
        }
    }
}
