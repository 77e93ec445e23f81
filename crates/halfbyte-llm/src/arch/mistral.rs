//! Mistral: Llama's recipe with a sliding window, in all layers or in some.
//!
//! *Source:* Jiang et al., "Mistral 7B", 2023.

use super::llama::{Biases, recipe};
use super::sizes::Defaults;
use super::spec::Spec;
use super::{Architecture, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "MistralForCausalLM", model_type: "mistral", spec };

pub(super) const DEFAULTS: Defaults = Defaults { max_context: 4096 * 32, kv_heads: Some(8), ..Defaults::LLAMA };

/// With `layer_types` it is what transformers calls Ministral: a window in the layers that these name.
fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = recipe(fields, &DEFAULTS, NO_BIASES)?;
    windows::set(fields, &mut spec, 4096, |_| true)?;
    Ok(spec)
}

pub(super) const NO_BIASES: Biases = Biases { qkv: false, output: false, mlp: false };

/// Gives all layers the window that a config names, if any.
pub(super) fn set_window(fields: &Fields<'_>, spec: &mut Spec) -> Result<()> {
    let window = fields.optional_size("sliding_window")?;
    spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    Ok(())
}
