//! Qwen3: Llama's recipe with RMS norms over each head of queries and of keys.
//!
//! *Source:* "Qwen3 Technical Report", 2025; tensor names as in Hugging Face transformers.

use super::llama::Biases;
use super::sizes::Defaults;
use super::spec::{NormSpec, Spec};
use super::{Architecture, llama, qwen2};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Qwen3ForCausalLM", model_type: "qwen3", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = recipe(fields, &Defaults { head_size: Some(128), ..qwen2::DEFAULTS })?;
    qwen2::later_windows(fields, &mut spec)?;
    Ok(spec)
}

/// What Qwen3-MoE has too, with experts in the place of some MLPs.
pub(super) fn recipe(fields: &Fields<'_>, defaults: &Defaults) -> Result<Spec> {
    let bias = fields.flag("attention_bias")?;
    let mut spec = llama::recipe(fields, defaults, Biases { qkv: bias, output: bias, mlp: false })?;
    head_norms(&mut spec);
    Ok(spec)
}

/// Norms over heads as those over the stream, by the names `q_norm` and `k_norm`.
pub(super) fn head_norms(spec: &mut Spec) {
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let norm = |name: &str| NormSpec {
            name: format!("model.layers.{i}.self_attn.{name}"),
            ..layer.attention.norm.clone()
        };
        layer.attention.head_norms = Some([norm("q_norm"), norm("k_norm")]);
    }
}
