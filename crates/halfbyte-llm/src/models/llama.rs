//! Llama: grouped-query attention with rotary positions, a gated SiLU MLP, RMS norms before each.
//!
//! *Source:* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; tensor names and the order
//! of q, k, v as in Hugging Face transformers.

use super::{Batch, Graph, Scratch, room};
use crate::config::Config;
use crate::error::Result;
use crate::weights::{Head, Loader, Projection, Shape};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{Attention, Heads, KvCache, attention};
use halfbyte::cpu::nn::{self, Rope};

#[derive(Debug)]
struct Llama {
    hidden: usize,
    intermediate: usize,
    heads: Heads,
    eps: f32,
    rope: Rope,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Head,
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
    let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    let mut layers = Vec::new();
    for i in 0..config.layers {
        let of_attention = |name: &str| format!("model.layers.{i}.self_attn.{name}_proj");
        let of_mlp = |name: &str| format!("model.layers.{i}.mlp.{name}_proj");
        let shape = |n, k, bias| Shape { n, k, bias };
        let (in_attention, in_mlp) = (config.attention_bias, config.mlp_bias);
        let up = shape(config.intermediate_size, hidden, in_mlp);
        layers.push(Layer {
            attention_norm: weights.vector(&format!("model.layers.{i}.input_layernorm.weight"), hidden)?,
            qkv: weights.joined(&[
                (of_attention("q"), shape(q, hidden, in_attention)),
                (of_attention("k"), shape(kv, hidden, in_attention)),
                (of_attention("v"), shape(kv, hidden, in_attention)),
            ])?,
            output: weights.joined(&[(of_attention("o"), shape(hidden, q, in_attention))])?,
            mlp_norm: weights.vector(&format!("model.layers.{i}.post_attention_layernorm.weight"), hidden)?,
            gate_up: weights.joined(&[(of_mlp("gate"), up), (of_mlp("up"), up)])?,
            down: weights.joined(&[(of_mlp("down"), shape(hidden, config.intermediate_size, in_mlp))])?,
        });
    }
    Ok(Box::new(Llama {
        hidden,
        intermediate: config.intermediate_size,
        heads: config.attention_heads(),
        eps: config.rms_norm_eps,
        rope: Rope::new(config.rope_frequencies.clone(), 1.0, config.max_context)?,
        layers,
        norm: weights.vector("model.norm.weight", hidden)?,
        head: weights.head("model.embed_tokens", "lm_head", config)?,
    }))
}

impl Graph for Llama {
    fn forward<'s>(
        &self,
        cpu: &Cpu,
        batch: Batch<'_>,
        cache: &mut KvCache,
        scratch: &'s mut Scratch,
    ) -> Result<&'s [f32]> {
        let Scratch { stream, normed, update, qkv, attended, gate_up, inner, part } = scratch;
        let (hidden, heads, eps) = (self.hidden, self.heads, self.eps);
        let (mut m, position) = (batch.tokens.len(), cache.len());
        self.head.embed(batch.tokens, room(stream, m * hidden));
        for (i, layer) in self.layers.iter().enumerate() {
            let (stream, normed) = (room(stream, m * hidden), room(normed, m * hidden));
            match i {
                0 => nn::rms_norm(cpu, stream, &layer.attention_norm, eps, normed)?,
                _ => nn::add_rms_norm(cpu, stream, room(update, m * hidden), &layer.attention_norm, eps, normed)?,
            }
            let mut qkv = room(qkv, m * heads.row());
            layer.qkv.forward(cpu, normed, m, qkv, part)?;
            self.rope.apply(cpu, qkv, heads, position)?;
            cache.append(cpu, i, position, qkv)?;
            let mut first_position = position;
            if i + 1 == self.layers.len() && !batch.all_rows {
                // From here on nothing looks at rows other than the last.
                stream.copy_within((m - 1) * hidden.., 0);
                qkv = &mut qkv[(m - 1) * heads.row()..];
                first_position += m - 1;
                m = 1;
            }
            let (stream, normed) = (&mut stream[..m * hidden], &mut normed[..m * hidden]);
            let attended = room(attended, m * heads.heads * heads.head_size);
            let scale = (heads.head_size as f32).sqrt().recip();
            attention(cpu, &Attention { qkv, heads, first_position, scale, window: None }, cache, i, attended)?;
            let update = room(update, m * hidden);
            layer.output.forward(cpu, attended, m, update, part)?;
            nn::add_rms_norm(cpu, stream, update, &layer.mlp_norm, eps, normed)?;
            let gate_up = room(gate_up, m * 2 * self.intermediate);
            layer.gate_up.forward(cpu, normed, m, gate_up, part)?;
            let inner = room(inner, m * self.intermediate);
            nn::swiglu(cpu, gate_up, self.intermediate, inner)?;
            layer.down.forward(cpu, inner, m, update, part)?;
        }
        let (stream, normed) = (room(stream, m * hidden), room(normed, m * hidden));
        nn::add_rms_norm(cpu, stream, room(update, m * hidden), &self.norm, eps, normed)?;
        Ok(normed)
    }

    fn head(&self) -> &Head {
        &self.head
    }

    fn bytes(&self) -> usize {
        let norms = self.norm.len() + self.layers.len() * 2 * self.hidden;
        let of_layer = |l: &Layer| l.qkv.bytes() + l.output.bytes() + l.gate_up.bytes() + l.down.bytes();
        norms * size_of::<f32>() + self.layers.iter().map(of_layer).sum::<usize>() + self.head.bytes()
    }
}
