//! Which layers see a window of positions only.

use super::spec::Spec;
use crate::config::Fields;
use crate::error::Result;

/// Gives a window to the layers that `layer_types` names, or else to those that `otherwise` does; returns which they are. A null
/// window is none.
pub(super) fn set(
    fields: &Fields<'_>,
    spec: &mut Spec,
    window: usize,
    otherwise: impl Fn(usize) -> bool,
) -> Result<Vec<bool>> {
    let layers = spec.layers.len();
    if fields.is_null("sliding_window") {
        return Ok(vec![false; layers]);
    }
    let window = fields.optional_size("sliding_window")?.unwrap_or(window);
    let slides: Vec<bool> = match fields.strings("layer_types")? {
        Some(types) if types.len() == layers => {
            let slides = |&kind: &&str| match kind {
                "sliding_attention" => Ok(true),
                "full_attention" => Ok(false),
                other => Err(fields.refuse("layer_types", "sliding_attention or full_attention", other)),
            };
            types.iter().map(slides).collect::<Result<_>>()?
        }
        Some(types) => {
            return Err(fields.refuse("layer_types", format!("a type for each of {layers} layers"), types.len()));
        }
        None => (0..layers).map(otherwise).collect(),
    };
    for (layer, _) in spec.layers.iter_mut().zip(&slides).filter(|(_, slides)| **slides) {
        layer.attention.window = Some(window);
    }
    Ok(slides)
}
