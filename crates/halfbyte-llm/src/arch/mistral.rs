//! Mistral: Llama's recipe with a sliding window.
//!
//! *Source:* Jiang et al., "Mistral 7B", 2023.

use super::Architecture;
use super::llama::{Biases, recipe};
use super::spec::Spec;
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "MistralForCausalLM", model_type: "mistral", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    with_window(fields, Some(4096))
}

/// With what an absent `sliding_window` means; null means none.
pub(super) fn with_window(fields: &Fields<'_>, absent: Option<usize>) -> Result<Spec> {
    let mut spec = recipe(fields, 4096 * 32, Biases { qkv: false, output: false, mlp: false })?;
    let window = match fields.is_null("sliding_window") {
        true => None,
        false => fields.optional_size("sliding_window")?.or(absent),
    };
    spec.layers.iter_mut().for_each(|layer| layer.attention.window = window);
    Ok(spec)
}
