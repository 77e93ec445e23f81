//! Experts in MXFP4 as GPT-OSS's files have them, taken apart by [`crate::experts`].
//!
//! ```text
//! weight_blocks  u8 [N, 16·G]   codes of 4 bits; byte j of a group's 16: q[2j] | q[2j + 1] << 4       K = 32·G
//! weight_scales  u8 [N, G]      E8M0
//! w[n, k] = 2^(weight_scales[n, k / 32] − 127) · E2M1[q[n, k]]
//! ```
//!
//! Twice the E2M1 is an integer, so that this is a symmetric tensor with codes of 8 bits and scales half as large, exact in bf16.
//!
//! Source: transformers (`integrations/mxfp4.py`), by which they are tested to their bits.

use super::{Description, Scheme, StoredFormat, StoredModule, StoredWeight, Weights, matrix};
use crate::error::{Error, Result};
use crate::safetensors::{DType, FloatData};
use crate::small_floats::{E2M1, half_of_e8m0};
use halfbyte::layout::codes::{BlockForm, Codes, Fields};
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Float, Group, WeightFormat, Zero};

/// Codes of a group, and the bytes that they take.
pub(crate) const GROUP: usize = 32;
pub(crate) const GROUP_BYTES: usize = GROUP / 2;

const BLOCKS: &str = "weight_blocks";
const SCALES: &str = "weight_scales";

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "mxfp4",
    parts: &[BLOCKS, SCALES],
    activations: &[],
    detect: |weights, prefix| weights.checkpoint().contains(&format!("{prefix}.{BLOCKS}")),
    describe: |weights, prefix| {
        let shape = shape(weights, prefix)?;
        Ok(Description { format: StoredFormat::Codes(FORMAT), shape, act_order: false, findings: Vec::new() })
    },
    load,
};

const FORMAT: WeightFormat =
    WeightFormat { bits: 8, group: Group::Size(GROUP), zero: Zero::Symmetric, scale: Float::BF16, channel_scale: None };

/// Groups of so many codes of E2M1, two a byte, one after the other.
pub(super) fn form(group: usize) -> BlockForm {
    BlockForm {
        codes: group,
        bytes: group / 2,
        low: Fields { at: 0, run: 1, bits: 4 },
        high: Fields::NONE,
        add: 0,
        flip: 0,
        table: Some(E2M1),
        unpack: Some(|bytes, codes| {
            for (pair, byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(bytes) {
                *pair = [byte & 15, byte >> 4].map(|number| E2M1[usize::from(number)]);
            }
        }),
    }
}

/// Outputs and inputs of a module.
fn shape(weights: &Weights, prefix: &str) -> Result<[usize; 2]> {
    let checkpoint = weights.checkpoint();
    let [n, groups] = matrix(checkpoint, &format!("{prefix}.{SCALES}"), DType::U8)?;
    let info = checkpoint.info(&format!("{prefix}.{BLOCKS}"))?;
    let fits = groups.checked_mul(GROUP_BYTES).is_some_and(|bytes| info.shape == [n, bytes]);
    if info.dtype != DType::U8 || groups == 0 || !fits {
        let what = format!(
            "tensor `{}`: expected U8 [{n}, {GROUP_BYTES} · {groups}], as `{SCALES}` is [{n}, {groups}], got {} {:?}",
            info.name, info.dtype, info.shape
        );
        return Err(Error::malformed(info.file, what));
    }
    Ok([n, groups * GROUP])
}

fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let ([n, k], checkpoint) = (shape(weights, prefix)?, weights.checkpoint());
    let (groups, name) = (k / GROUP, format!("{prefix}.{SCALES}"));
    let bytes = checkpoint.data(&name)?;
    if let Some(at) = bytes.iter().position(|&byte| byte == u8::MAX) {
        let (row, group) = (at / groups, at % groups);
        let what = format!("tensor `{name}`: expected scales of E8M0, got NaN (255) in row {row}, group {group}");
        return Err(Error::malformed(checkpoint.info(&name)?.file, what));
    }
    let scales: Vec<half::bf16> = bytes.iter().map(|&byte| half_of_e8m0(byte)).collect();
    let codes = Codes::Blocks { bytes: checkpoint.data(&format!("{prefix}.{BLOCKS}"))?, form: form(GROUP).into() };
    let scales = (FloatData::BF16(scales.into()), Strides::of_outputs(groups));
    let tensor = StoredTensor::new(FORMAT, [n, k], codes, scales, StoredZeros::Symmetric, None);
    let weight = StoredWeight::Quantized(tensor.map_err(Error::numbers(prefix))?);
    Ok(StoredModule { weight, findings: Vec::new() })
}
