//! Qwen2: Llama's recipe with biases on q, k and v, and a sliding window in the later layers where the config asks for it.
//!
//! *Source:* "Qwen2 Technical Report", 2024; which layers have a window as in Hugging Face transformers.

use super::llama::{Biases, recipe};
use super::sizes::Defaults;
use super::spec::Spec;
use super::{Architecture, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Qwen2ForCausalLM", model_type: "qwen2", spec };

pub(super) const DEFAULTS: Defaults = Defaults { max_context: 32_768, kv_heads: Some(32), ..Defaults::LLAMA };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = recipe(fields, &DEFAULTS, Biases { qkv: true, output: false, mlp: false })?;
    later_windows(fields, &mut spec)?;
    Ok(spec)
}

/// Sets the window of the layers that have one: those that `layer_types` names, or else those from `max_window_layers` on.
pub(super) fn later_windows(fields: &Fields<'_>, spec: &mut Spec) -> Result<()> {
    if !fields.flag("use_sliding_window")? {
        return Ok(());
    }
    let from = fields.count("max_window_layers")?.unwrap_or(28);
    windows::set(fields, spec, 4096, |i| i >= from).map(drop)
}
