//! Phi-3: Llama's recipe with q, k and v in one layer, gate and up in another, and positions in a part of each head where the config
//! says so.
//!
//! *Source:* "Phi-3 Technical Report", 2024; tensor names as in Hugging Face transformers.

use super::Architecture;
use super::mistral::with_window;
use super::sizes::linear;
use super::spec::{MlpKind, Qkv, QkvOrder, Spec};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Phi3ForCausalLM", model_type: "phi3", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = with_window(fields, None)?;
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
