//! GPT-OSS: Llama's recipe with experts whose gate is clamped, biases everywhere, attention sinks, and a window in every other layer.
//!
//! *Source:* OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025; tensor names as in Hugging Face transformers.

use super::llama::{Biases, recipe};
use super::spec::{GateClamp, Routing, Spec};
use super::{Architecture, experts, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "GptOssForCausalLM", model_type: "gpt_oss", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let bias = fields.get("attention_bias").is_none() || fields.flag("attention_bias")?;
    let mut spec = recipe(fields, 131_072, Biases { qkv: bias, output: bias, mlp: false })?;
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
