//! Qwen3-MoE: Qwen3 with experts in the place of some or all MLPs, and a window in all layers where the config asks for it.
//!
//! *Source:* "Qwen3 Technical Report", 2025; tensor names as in Hugging Face transformers.

use super::sizes::Defaults;
use super::spec::{Routing, Spec};
use super::{Architecture, experts, qwen2, qwen3, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Qwen3MoeForCausalLM", model_type: "qwen3_moe", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = qwen3::recipe(fields, &Defaults { kv_heads: Some(4), ..qwen2::DEFAULTS })?;
    // Unlike in Qwen3, whatever max_window_layers says.
    if fields.flag("use_sliding_window")? {
        let slides = windows::set(fields, &mut spec, 4096, |_| true)?;
        if !fields.is_null("sliding_window") && slides.contains(&false) {
            let expected = "sliding_attention in all layers, with use_sliding_window";
            return Err(fields.refuse("layer_types", expected, "full_attention"));
        }
    }
    let routing = if fields.flag("norm_topk_prob")? { Routing::SoftmaxOfChosen } else { Routing::Softmax };
    let of = experts::Of {
        inner: "moe_intermediate_size",
        router: "mlp.gate",
        experts: "mlp.experts",
        layers: ["gate_proj", "up_proj", "down_proj"],
        bias: false,
        routing,
        clamp: None,
    };
    let (every, dense) = (fields.optional_size("decoder_sparse_step")?.unwrap_or(1), fields.counts("mlp_only_layers")?);
    experts::set(fields, &mut spec, &of, |i| (i + 1).is_multiple_of(every) && !dense.contains(&(i as u64)))?;
    Ok(spec)
}
