//! What methods make of layers, looked at before it is taken.

use super::OP;
use super::method::{Layers, Method, Outcome, RoundToNearest};
use crate::error::{Error, Result};
use halfbyte::WeightFormat;

/// What a method makes of the layers of a group; those without inputs that it could look at are rounded to nearest.
/// Errors: what it refuses, something else than was asked for.
pub(super) fn quantized(method: &dyn Method, layers: &Layers<'_>, format: WeightFormat) -> Result<Vec<Outcome>> {
    let of_group = &layers.group.layers;
    let name = &of_group[0].0;
    // An expert that no token chose, or what lies behind a layer of zeros.
    let unseen = layers.inputs.dead() == layers.k();
    let outcomes = match method.rounding().filter(|_| unseen) {
        Some(rounding) => RoundToNearest(rounding).quantize(layers, format),
        None => method.quantize(layers, format),
    };
    let outcomes = outcomes.map_err(|source| Error::Quantize { name: name.clone(), source })?;
    let fits = |outcome: &Outcome, shape: [usize; 2]| {
        outcome.weights.format() == format && [outcome.weights.n(), outcome.weights.k()] == shape
    };
    let shapes = of_group.iter().map(|(_, shape)| [shape.n, shape.k]);
    if outcomes.len() == of_group.len() && outcomes.iter().zip(shapes).all(|(o, shape)| fits(o, shape)) {
        return Ok(outcomes);
    }
    let got = outcomes.iter().map(|o| format!("{} × {}", o.weights.n(), o.weights.k())).collect::<Vec<_>>();
    Err(Error::invalid(OP, format!("the layers of {name} in their shapes, as {format:?}"), got.join(", ")))
}
