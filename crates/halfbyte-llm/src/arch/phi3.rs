//! Phi-3: Llama's recipe with q, k and v in one layer, gate and up in another, and positions in a part of each head where the config
//! says so.
//!
//! *Source:* "Phi-3 Technical Report", 2024; tensor names as in Hugging Face transformers.

use super::Architecture;
use super::llama::recipe_as;
use super::mistral::{NO_BIASES, set_window};
use super::rope::Says;
use super::sizes::{Defaults, linear};
use super::spec::{MlpKind, Qkv, QkvOrder, Spec};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Phi3ForCausalLM", model_type: "phi3", spec };

const DEFAULTS: Defaults = Defaults { max_context: 4096, eps: ("rms_norm_eps", 1e-5), ..Defaults::LLAMA };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let says = Says { part: Some(("partial_rotary_factor", 1.0)), longrope: Some(4096), ..Says::default() };
    let mut spec = recipe_as(fields, &DEFAULTS, &says, NO_BIASES)?;
    set_window(fields, &mut spec)?;
    let hidden = spec.hidden;
    for (i, layer) in spec.layers.iter_mut().enumerate() {
        let at = |module: &str| format!("model.layers.{i}.{module}");
        let qkv = linear(at("self_attn.qkv_proj"), [spec.heads.row(), hidden], false);
        layer.attention.qkv = Qkv::Fused(qkv, QkvOrder::Blocks);
        if let MlpKind::Dense(mlp) = &mut layer.mlp.kind {
            mlp.up = vec![linear(at("mlp.gate_up_proj"), [2 * mlp.inner(), hidden], false)];
        }
    }
    Ok(spec)
}
