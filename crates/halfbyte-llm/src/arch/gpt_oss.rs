//! GPT-OSS: Llama's recipe with experts whose gate is clamped, biases everywhere, attention sinks, and a window in every other layer.
//!
//! *Source:* OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025; tensor names as in Hugging Face transformers.

use super::llama::{Biases, recipe_as};
use super::rope::Says;
use super::sizes::Defaults;
use super::spec::{GateClamp, Routing, Spec};
use super::{Architecture, experts, windows};
use crate::config::Fields;
use crate::error::Result;
use serde_json::json;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "GptOssForCausalLM", model_type: "gpt_oss", spec };

const DEFAULTS: Defaults = Defaults {
    max_context: 131_072,
    eps: ("rms_norm_eps", 1e-5),
    theta: 150_000.0,
    head_size: Some(64),
    kv_heads: Some(8),
    ..Defaults::LLAMA
};

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    // What a config without rotary parameters means, also one that says null.
    let yarn =
        json!({"rope_type": "yarn", "factor": 32.0, "truncate": false, "original_max_position_embeddings": 4096});
    let says = Says { absent: yarn.as_object().cloned().unwrap_or_default(), ..Says::default() };
    let bias = fields.get("attention_bias").is_none() || fields.flag("attention_bias")?;
    let mut spec = recipe_as(fields, &DEFAULTS, &says, Biases { qkv: bias, output: bias, mlp: false })?;
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        layer.attention.sinks = Some(format!("model.layers.{i}.self_attn.sinks"));
    }
    windows::set(fields, &mut spec, 128, |i| i.is_multiple_of(2))?;
    let or = |field: &str, default: f64| if fields.get(field).is_some() { fields.factor(field) } else { Ok(default) };
    let (alpha, limit) = (or("swiglu_alpha", 1.702)? as f32, or("swiglu_limit", 7.0)? as f32);
    let of = experts::Of {
        inner: "intermediate_size",
        router: "mlp.router",
        experts: "mlp.experts",
        layers: ["gate_proj", "up_proj", "down_proj"],
        bias: true,
        routing: Routing::SoftmaxOfChosen,
        clamp: Some(GateClamp { alpha, limit }),
    };
    experts::set(fields, &mut spec, &of, |_| true)?;
    Ok(spec)
}
