//! NVFP4 as NVIDIA's ModelOpt writes it.
//!
//! ```text
//! weight          u8 [N, K/2]    byte j of a row: q[2j] | q[2j + 1] << 4, each E2M1
//! weight_scale    f8 [N, K/16]   E4M3
//! weight_scale_2  f32 []         what scales are multiplied by
//! w[n, k] = E2M1[q[n, k]] · (weight_scale[n, k / 16] · weight_scale_2)
//! ```
//!
//! They become codes as those of compressed-tensors' files do; the product of scales is rounded to f32, as in ModelOpt. `input_scale` is of
//! activations and `k_scale` and `v_scale` of keys and values, which are not quantised to floats here.
//!
//! Source: ModelOpt 0.47 (`NVFP4QTensor`), whose files the tests read to their exact values.

use super::compressed_tensors::fp4;
use super::{Description, Scheme, StoredFormat, StoredModule, Weights, matrix};
use crate::config::QuantizationConfig;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::{Float, Group, WeightFormat, Zero};

const CODES: &str = "weight";
const SCALES: &str = "weight_scale";
const SCALE_OF_ALL: &str = "weight_scale_2";
/// What inputs are multiplied by before, where AWQ moved scales there.
const SCALES_OF_INPUTS: &str = "pre_quant_scale";

/// Weights that share a scale.
const GROUP: usize = 16;

const FORMAT: WeightFormat =
    WeightFormat { bits: 8, group: Group::Size(GROUP), zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "modelopt",
    parts: &[CODES, SCALES, SCALE_OF_ALL, SCALES_OF_INPUTS, "input_scale", "k_scale", "v_scale"],
    activations: &["k_scale", "v_scale"],
    detect: |weights, prefix| {
        let checkpoint = weights.checkpoint();
        checkpoint.get(&format!("{prefix}.{CODES}")).is_some_and(|info| info.dtype == DType::U8)
            && checkpoint.contains(&format!("{prefix}.{SCALE_OF_ALL}"))
    },
    describe: |weights, prefix| {
        let (shape, _) = examine(weights, prefix)?;
        Ok(Description { format: StoredFormat::Codes(FORMAT), shape, act_order: false, findings: Vec::new() })
    },
    load,
};

/// Outputs and inputs of a module, and what its scales are multiplied by.
fn examine(weights: &Weights, prefix: &str) -> Result<([usize; 2], f32)> {
    let checkpoint = weights.checkpoint();
    let name = |part: &str| format!("{prefix}.{part}");
    let [n, bytes] = matrix(checkpoint, &name(CODES), DType::U8)?;
    let [rows, groups] = matrix(checkpoint, &name(SCALES), DType::F8E4M3)?;
    if n == 0 || groups == 0 || rows != n || groups.checked_mul(GROUP / 2) != Some(bytes) {
        let info = checkpoint.info(&name(SCALES))?;
        let what = format!(
            "tensor `{}`: expected [{n}, {bytes} / 8], as `{CODES}` is [{n}, {bytes}], got {:?}",
            info.name, info.shape
        );
        return Err(Error::malformed(info.file, what));
    }
    if let Some(info) = checkpoint.get(&name(SCALES_OF_INPUTS)) {
        let what = format!("tensor `{}`: scales that inputs are multiplied by are not read", info.name);
        return Err(Error::unsupported(info.file, what));
    }
    let info = checkpoint.info(&name(SCALE_OF_ALL))?;
    let number = match *checkpoint.data(info.name)? {
        [a, b, c, d] if info.dtype == DType::F32 => Some(f32::from_le_bytes([a, b, c, d])).filter(|by| by.is_finite()),
        _ => None,
    };
    let number = number.ok_or_else(|| {
        let (name, dtype, shape) = (info.name, info.dtype, info.shape);
        Error::malformed(
            info.file,
            format!("tensor `{name}`: expected one finite number of F32, got {dtype} {shape:?}"),
        )
    })?;
    Ok(([n, 2 * bytes], number))
}

fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let (shape, by) = examine(weights, prefix)?;
    let weight = fp4::weight(weights, prefix, [CODES, SCALES], (FORMAT, shape), |scale| scale * by)?;
    Ok(StoredModule { weight, findings: Vec::new() })
}

/// What is to be said of activations that the config has as floats of 4 bits, once for all.
pub(super) fn activations(weights: &Weights) -> Option<Finding> {
    let QuantizationConfig::ModelOpt(config) = weights.quantization()? else { return None };
    let algorithm = config.algorithm.as_deref().filter(|_| config.quantizes_activations())?;
    let text = format!(
        "{algorithm} has activations in floats of 4 bits; they are taken as they are, which is nearer to the model that was quantised"
    );
    Some(Finding::new("quantization_config", text))
}
