//! Gemma 3: Gemma 2's recipe with norms over heads in the place of caps, windows in all layers but every sixth, and other rotary
//! frequencies where there is a window.
//!
//! *Source:* "Gemma 3 Technical Report", 2025; tensor names as in Hugging Face transformers.

use super::sizes::Defaults;
use super::spec::{Positions, Spec};
use super::{Architecture, gemma2, llama, qwen3, rope, windows};
use crate::config::Fields;
use crate::error::Result;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "Gemma3ForCausalLM", model_type: "gemma3_text", spec };

const DEFAULTS: Defaults = Defaults { max_context: 131_072, ..gemma2::DEFAULTS };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    const CAP: &str = "attn_logit_softcapping";
    if let Some(cap) = fields.number(CAP)? {
        return Err(fields.refuse(CAP, "null: scores have no cap here", cap));
    }
    let head_size = llama::head_size(fields, &DEFAULTS)?;
    let rotary = |kind, theta| rope::of_type(fields, kind, theta, head_size, &DEFAULTS);
    let full = rotary("full_attention", ("rope_theta", 1e6))?;
    let sliding = rotary("sliding_attention", ("rope_local_base_freq", 10_000.0))?;
    let [of_full, of_sliding] = [full.scores, sliding.scores];
    let mut spec = gemma2::recipe(fields, &DEFAULTS, full)?;
    spec.logit_cap = gemma2::cap(fields, "final_logit_softcapping", None)?;
    qwen3::head_norms(&mut spec);
    let every = fields.optional_size("sliding_window_pattern")?;
    if every.is_none() && fields.get("layer_types").is_none() {
        // What transformers keeps beside the other two, and does not read.
        const KEPT: &str = "_sliding_window_pattern";
        if let Some(other) = fields.count(KEPT)?.filter(|&other| other != 6) {
            return Err(fields.refuse(KEPT, "6, or sliding_window_pattern in its place", other));
        }
    }
    let every = every.unwrap_or(6);
    let slides = windows::set(fields, &mut spec, 4096, |i| !(i + 1).is_multiple_of(every))?;
    for (layer, _) in spec.layers.iter_mut().zip(slides).filter(|(_, slides)| *slides) {
        layer.attention.positions = Positions::Rope(sliding.rope.clone());
        layer.attention.scale *= of_sliding / of_full;
    }
    Ok(spec)
}
