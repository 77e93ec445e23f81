//! Signed bytes with the largest magnitude of each output.

use super::super::{StoredModule, StoredWeight, Weights, matrix};
use super::other_kind;
use crate::checkpoint::Checkpoint;
use crate::config::BitsAndBytesKind;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};

/// Reads a module's shapes.
pub(super) fn examine(weights: &Weights, prefix: &str) -> Result<(WeightFormat, [usize; 2], Vec<Finding>)> {
    let checkpoint = weights.checkpoint();
    let [n, k] = matrix(checkpoint, &format!("{prefix}.weight"), DType::I8)?;
    let scales = checkpoint.info(&format!("{prefix}.SCB"))?;
    if scales.dtype != DType::F32 || scales.shape != [n] || n == 0 || k == 0 {
        let what = format!(
            "tensor `{}`: expected F32 [{n}], beside a weight of [{n}, {k}] without a dimension of 0, got {} {:?}",
            scales.name, scales.dtype, scales.shape
        );
        return Err(Error::malformed(scales.file, what));
    }
    order(checkpoint, prefix)?;
    let format =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    Ok((format, [n, k], other_kind(weights, prefix, BitsAndBytesKind::Int8).into_iter().collect()))
}

/// Checks that the codes lie row by row. Error: in an order of certain processors, which are numbered from 1.
fn order(checkpoint: &Checkpoint, prefix: &str) -> Result<()> {
    let Some(info) = checkpoint.get(&format!("{prefix}.weight_format")) else { return Ok(()) };
    let what = |got: String| format!("tensor `{}`: expected one U8 of 0 (codes row by row), got {got}", info.name);
    match (info.dtype, &*checkpoint.data(info.name)?) {
        (DType::U8, [0]) => Ok(()),
        (DType::U8, [number]) => Err(Error::unsupported(info.file, what(number.to_string()))),
        _ => Err(Error::malformed(info.file, what(format!("{} {:?}", info.dtype, info.shape)))),
    }
}

/// Reads a module.
pub(super) fn load(weights: &Weights, prefix: &str) -> Result<StoredModule<'static>> {
    let (format, shape, findings) = examine(weights, prefix)?;
    let checkpoint = weights.checkpoint();
    let codes = checkpoint.data(&format!("{prefix}.weight"))?.iter().map(|&code| code ^ 0x80).collect();
    let scales = checkpoint.floats(&format!("{prefix}.SCB"))?.to_f32().into_iter().map(|scb| scb / 127.0).collect();
    let tensor = QTensor::new(format, shape, codes, scales, Zeros::Symmetric, None).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor.into()), findings })
}
