//! Codes that are floats of 4 bits: `mxfp4-pack-quantized` and `nvfp4-pack-quantized`.
//!
//! ```text
//! weight_packed        u8 [N, K/2]    byte j of a row: q[2j] | q[2j + 1] << 4, each E2M1
//! weight_scale         u8 [N, K/32]   E8M0, or
//!                      f8 [N, K/16]   E4M3
//! weight_global_scale  f32 [1]        beside E4M3: what scales are divided by; may be missing
//! w[n, k] = E2M1[q[n, k]] · (weight_scale[n, g] / weight_global_scale)
//! ```
//!
//! They become codes of 8 bits, twice the E2M1, with half the scale: exact, but that the quotient of scales is rounded to f32, as in
//! compressed-tensors. ModelOpt's modules become weights by the same function ([`weight`]). `input_global_scale` is of activations, which are not quantised to floats here.

use super::super::{Description, StoredFormat, StoredModule, StoredWeight, Weights, matrix, mxfp4};
use super::labels::{self, Evidence, Reach};
use crate::config::{CompressedTensorsFormat, CompressedTensorsStrategy};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, FloatData};
use crate::small_floats::{half_of_e8m0, half_of_ue4m3};
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Float, Group, WeightFormat, Zero};

/// A module of which everything but codes and scales has been read.
struct Module {
    n: usize,
    k: usize,
    /// Weights that share a scale.
    size: usize,
    global: Option<f32>,
    findings: Vec<Finding>,
}

impl Module {
    fn format(&self) -> WeightFormat {
        let scale = match (self.size, self.global) {
            (mxfp4::GROUP, _) => Float::BF16,
            (_, None) => Float::F16,
            (_, Some(_)) => Float::F32,
        };
        WeightFormat { bits: 8, group: Group::Size(self.size), zero: Zero::Symmetric, scale, channel_scale: None }
    }
}

/// Whether a module's codes are floats: bytes, where integers lie in words, and no scales that integers have.
pub(super) fn is_there(weights: &Weights, prefix: &str) -> bool {
    let dtype = |part: &str| weights.checkpoint().get(&format!("{prefix}.{part}")).map(|info| info.dtype);
    dtype("weight_packed") == Some(DType::U8) && dtype("weight_scale").is_none_or(|scale| scale.float().is_none())
}

pub(super) fn describe(weights: &Weights, prefix: &str) -> Result<Description> {
    let module = examine(weights, prefix)?;
    let (format, shape) = (StoredFormat::Codes(module.format()), [module.n, module.k]);
    Ok(Description { format, shape, act_order: false, findings: module.findings })
}

fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let checkpoint = weights.checkpoint();
    let name = |part: &str| format!("{prefix}.{part}");
    let [n, bytes] = matrix(checkpoint, &name("weight_packed"), DType::U8)?;
    let scales = checkpoint.info(&name("weight_scale"))?;
    let unexpected = |expected: String| {
        let what = format!("tensor `{}`: expected {expected}, got {} {:?}", scales.name, scales.dtype, scales.shape);
        Err(Error::malformed(scales.file, what))
    };
    let (size, format) = match scales.dtype {
        DType::U8 | DType::F8E8M0 => (mxfp4::GROUP, CompressedTensorsFormat::Mxfp4PackQuantized),
        DType::F8E4M3 => (16, CompressedTensorsFormat::Nvfp4PackQuantized),
        _ => return unexpected("U8 (E8M0) or F8_E4M3 beside codes in bytes".into()),
    };
    let (groups, per_group) = (bytes / (size / 2), size / 2);
    if n == 0 || groups == 0 || !bytes.is_multiple_of(per_group) || scales.shape != [n, groups] {
        return unexpected(format!("[{n}, {bytes} / {per_group}], as `weight_packed` is [{n}, {bytes}]"));
    }
    if let Some(info) = checkpoint.get(&name("weight_zero_point")) {
        let what = format!("tensor `{}`: zero points beside codes that are floats are not read", info.name);
        return Err(Error::unsupported(info.file, what));
    }
    let global = match checkpoint.get(&name("weight_global_scale")) {
        None => None,
        Some(info) => match *checkpoint.data(info.name)? {
            [a, b, c, d] if info.dtype == DType::F32 && size != mxfp4::GROUP => {
                Some(f32::from_le_bytes([a, b, c, d])).filter(|by| by.is_finite() && *by != 0.0)
            }
            _ => None,
        }
        .map(Some)
        .ok_or_else(|| {
            let expected = if size == mxfp4::GROUP { "none beside scales of E8M0" } else { "one number of F32, not 0" };
            let what = format!("tensor `{}`: expected {expected}, got {} {:?}", info.name, info.dtype, info.shape);
            Error::malformed(info.file, what)
        })?,
    };
    let mut findings = Vec::new();
    let k = 2 * bytes;
    let evidence = Evidence { bits: &[4], reach: Reach::Rows(groups), k, zero_points: false, format };
    if let Some(label) = labels::declared(weights).and_then(|config| labels::group_of(config, prefix, &evidence)) {
        let group = label.group;
        let is = (Some(format), 4, CompressedTensorsStrategy::Group(size));
        if (group.format, group.bits, group.strategy) != is {
            let says = group.format.map_or("no format", CompressedTensorsFormat::name);
            let text = format!(
                "the config says {says} of {} bits with {}, but its tensors are those of {}; read as that",
                group.bits,
                group.strategy,
                format.name()
            );
            findings.push(Finding::new(prefix, text));
        }
    }
    Ok(Module { n, k, size, global, findings })
}

pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let module = examine(weights, prefix)?;
    let (what, by) = ((module.format(), [module.n, module.k]), module.global.unwrap_or(1.0));
    let weight = weight(weights, prefix, ["weight_packed", "weight_scale"], what, |scale| scale / by)?;
    Ok(StoredModule { weight, findings: module.findings })
}

/// A weight of codes of E2M1 with scales of E8M0 (a format with scales in bf16) or of E4M3, which in a format with scales in f32 become what
/// `scaled` makes of them. The caller has checked shapes. Errors: scales that are no numbers, or have a sign.
pub(in super::super) fn weight<'a>(
    weights: &'a Weights,
    prefix: &str,
    [codes, scales]: [&str; 2],
    (format, [n, k]): (WeightFormat, [usize; 2]),
    scaled: impl Fn(f32) -> f32,
) -> Result<StoredWeight<'a>> {
    let (checkpoint, name) = (weights.checkpoint(), format!("{prefix}.{scales}"));
    let (bytes, size) = (checkpoint.data(&name)?, format.group.len(k));
    let groups = k / size;
    let is_number = |byte: u8| if format.scale == Float::BF16 { byte != u8::MAX } else { byte < 0x7f };
    if let Some(at) = bytes.iter().position(|&byte| !is_number(byte)) {
        let (byte, row, group) = (bytes[at], at / groups, at % groups);
        let what = format!(
            "tensor `{name}`: expected scales that are numbers without a sign, got {byte:#04x} in row {row}, group {group}"
        );
        return Err(Error::malformed(checkpoint.info(&name)?.file, what));
    }
    let scales = match format.scale {
        Float::BF16 => FloatData::BF16(bytes.iter().map(|&byte| half_of_e8m0(byte)).collect::<Vec<_>>().into()),
        Float::F16 => FloatData::F16(bytes.iter().map(|&byte| half_of_ue4m3(byte)).collect::<Vec<_>>().into()),
        Float::F32 => {
            FloatData::F32(bytes.iter().map(|&byte| scaled(half_of_ue4m3(byte).to_f32())).collect::<Vec<_>>().into())
        }
    };
    let codes = checkpoint.data(&format!("{prefix}.{codes}"))?;
    let codes = Codes::Blocks { bytes: codes, form: mxfp4::form(size).into() };
    let scales = (scales, Strides::of_outputs(groups));
    let tensor = StoredTensor::new(format, [n, k], codes, scales, StoredZeros::Symmetric, None);
    Ok(StoredWeight::Quantized(tensor.map_err(Error::numbers(prefix))?))
}

/// What is to be said of activations that the config has as floats of 4 or 8 bits, once for all.
pub(super) fn activations(weights: &Weights) -> Option<Finding> {
    let groups = &labels::declared(weights)?.groups;
    let group = groups.iter().find(|group| group.activation_bits.is_some() && group.format.is_some_and(is_fp4))?;
    let text = format!(
        "{} has activations in floats of {} bits; they are taken as they are, which is nearer to the model that was quantised",
        group.name,
        group.activation_bits.unwrap_or(4)
    );
    Some(Finding::new("quantization_config", text))
}

fn is_fp4(format: CompressedTensorsFormat) -> bool {
    matches!(format, CompressedTensorsFormat::Mxfp4PackQuantized | CompressedTensorsFormat::Nvfp4PackQuantized)
}
