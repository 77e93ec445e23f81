//! Weights of convolutions to codes.

use super::rtn::{Rtn, rtn};
use crate::conv::Geometry;
use crate::error::Result;
use crate::format::{QTensor, WeightFormat};
use crate::tensor::Floats;

/// Quantises the weights of a convolution by rounding to nearest, as [`rtn`] does, in the order `[co, kh, kw, ci / groups]`.
///
/// *Shapes:* w `[co, ci / groups, kh, kw]`, the result `[co, k]`. *Errors:* those of [`rtn`] (columns counted in the new
/// order), a length that does not fit, groups of a scale that do not divide `ci / groups`.
pub fn rtn_conv2d(w: Floats<'_>, geometry: &Geometry, format: WeightFormat, options: Rtn) -> Result<QTensor> {
    let shape = [geometry.co, geometry.k()];
    format.validate()?;
    geometry.scale_channels(format.group)?;
    match w {
        Floats::F16(w) => rtn(Floats::F16(&geometry.weight_rows(w)?), shape, format, options),
        Floats::BF16(w) => rtn(Floats::BF16(&geometry.weight_rows(w)?), shape, format, options),
        Floats::F32(w) => rtn(Floats::F32(&geometry.weight_rows(w)?), shape, format, options),
    }
}
