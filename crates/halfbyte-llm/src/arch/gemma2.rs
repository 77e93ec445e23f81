//! Gemma 2: Llama's recipe with norms before and after attention and MLP, whose weights lack 1, GELU at the gate, an embedding times
//! the root of its length, caps of scores and logits, and a window in every other layer.
//!
//! *Source:* "Gemma 2: Improving Open Language Models at a Practical Size", 2024; tensor names as in Hugging Face transformers.

use super::llama::{self, Biases};
use super::rope::{self, Rotary};
use super::sizes::{Defaults, check_activation};
use super::spec::{NormSpec, Spec};
use super::{Architecture, windows};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::{Activation, CAPS};

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Gemma2ForCausalLM", model_type: "gemma2", spec };

pub(super) const DEFAULTS: Defaults =
    Defaults { max_context: 8192, head_size: Some(256), kv_heads: Some(4), ..Defaults::LLAMA };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let rotary = rope::read(fields, llama::head_size(fields, &DEFAULTS)?, &DEFAULTS)?;
    let mut spec = recipe(fields, &DEFAULTS, rotary)?;
    spec.logit_cap = cap(fields, "final_logit_softcapping", Some(30.0))?;
    let of_scores = cap(fields, "attn_logit_softcapping", Some(50.0))?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.cap = of_scores);
    windows::set(fields, &mut spec, 4096, |i| i.is_multiple_of(2))?;
    Ok(spec)
}

/// What Gemma 2 and 3 share.
pub(super) fn recipe(fields: &Fields<'_>, defaults: &Defaults, rotary: Rotary) -> Result<Spec> {
    check_activation(fields, "hidden_activation", &["gelu_pytorch_tanh"])?;
    if fields.flag("use_bidirectional_attention")? {
        return Err(fields.refuse("use_bidirectional_attention", "false (a model of text to come)", "true"));
    }
    let bias = fields.flag("attention_bias")?;
    let biases = Biases { qkv: bias, output: bias, mlp: false };
    let mut spec = llama::gated(fields, defaults, biases, (Activation::GeluTanh, rotary))?;
    if fields.get("tie_word_embeddings").is_none() {
        spec.head = None;
    }
    spec.embedding_scale = Some((spec.hidden as f32).sqrt());
    spec.norm.offset = 1.0;
    let per = match fields.get("query_pre_attn_scalar") {
        Some(_) => fields.factor("query_pre_attn_scalar")?,
        None => 256.0,
    };
    let (norm, of_scale) = (spec.norm.clone(), (spec.heads.head_size as f64 / per).sqrt() as f32);
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let norm = |name: &str| NormSpec { name: format!("model.layers.{i}.{name}"), ..norm.clone() };
        layer.attention.norm = norm("input_layernorm");
        layer.attention.post_norm = Some(norm("post_attention_layernorm"));
        layer.mlp.norm = Some(norm("pre_feedforward_layernorm"));
        layer.mlp.post_norm = Some(norm("post_feedforward_layernorm"));
        layer.attention.scale *= of_scale;
    }
    Ok(spec)
}

/// A cap, with what an absent field means; a null is none.
pub(super) fn cap(fields: &Fields<'_>, field: &str, absent: Option<f32>) -> Result<Option<f32>> {
    if fields.get(field).is_none() {
        return Ok(absent.filter(|_| !fields.is_null(field)));
    }
    let cap = fields.factor(field)?;
    if CAPS.contains(&(cap as f32)) {
        return Ok(Some(cap as f32));
    }
    Err(fields.refuse(field, "a number from 2⁻¹²⁶ to 2¹²⁵", cap))
}
