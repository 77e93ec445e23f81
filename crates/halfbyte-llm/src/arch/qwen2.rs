//! Qwen2: Llama's recipe with biases on q, k and v, and a sliding window in the later layers where the config asks for it.
//!
//! *Source:* "Qwen2 Technical Report", 2024; which layers have a window as in Hugging Face transformers.

use super::Architecture;
use super::llama::{Biases, recipe};
use super::spec::Spec;
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Qwen2ForCausalLM", model_type: "qwen2", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let mut spec = recipe(fields, 32_768, Biases { qkv: true, output: false, mlp: false })?;
    windows(fields, &mut spec)?;
    Ok(spec)
}

/// Sets the window of the layers that have one: those that `layer_types` names, or else those from `max_window_layers` on.
pub(super) fn windows(fields: &Fields<'_>, spec: &mut Spec) -> Result<()> {
    if !fields.flag("use_sliding_window")? || fields.is_null("sliding_window") {
        return Ok(());
    }
    let window = fields.optional_size("sliding_window")?.unwrap_or(4096);
    let slides: Vec<bool> = match fields.strings("layer_types")? {
        Some(types) if types.len() == spec.layers.len() => {
            let slides = |&kind: &&str| match kind {
                "sliding_attention" => Ok(true),
                "full_attention" => Ok(false),
                other => Err(fields.refuse("layer_types", "sliding_attention or full_attention", other)),
            };
            types.iter().map(slides).collect::<Result<_>>()?
        }
        Some(types) => {
            let expected = format!("a type for each of {} layers", spec.layers.len());
            return Err(fields.refuse("layer_types", expected, types.len()));
        }
        None => {
            let from = fields.count("max_window_layers")?.unwrap_or(28);
            (0..spec.layers.len()).map(|i| i >= from).collect()
        }
    };
    for (layer, _) in spec.layers.iter_mut().zip(slides).filter(|(_, slides)| *slides) {
        layer.attention.window = Some(window);
    }
    Ok(())
}
