//! Gemma 3: Gemma 2's recipe with norms over heads in the place of caps, windows in all layers but every sixth, and other rotary
//! frequencies where there is a window.
//!
//! *Source:* "Gemma 3 Technical Report", 2025; tensor names as in Hugging Face transformers.

use super::spec::{Positions, Spec};
use super::{Architecture, gemma2, llama, qwen3, rope, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Gemma3ForCausalLM", model_type: "gemma3_text", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let head_size = llama::head_size(fields)?;
    let full = rope::of_type(fields, "full_attention", "rope_theta", head_size)?;
    let sliding = rope::of_type(fields, "sliding_attention", "rope_local_base_freq", head_size)?;
    let [of_full, of_sliding] = [full.scores, sliding.scores];
    let mut spec = gemma2::recipe(fields, full)?;
    qwen3::head_norms(&mut spec);
    let of_pattern = fields.spelling(&["sliding_window_pattern", "_sliding_window_pattern"]);
    let every = fields.optional_size(of_pattern)?.unwrap_or(6);
    let slides = windows::set(fields, &mut spec, 4096, |i| !(i + 1).is_multiple_of(every))?;
    for (layer, _) in spec.layers.iter_mut().zip(slides).filter(|(_, slides)| *slides) {
        layer.attention.positions = Positions::Rope(sliding.rope.clone());
        layer.attention.scale *= of_sliding / of_full;
    }
    Ok(spec)
}
