//! Reading a module in a layout of fpA_intB kernels: everything but the codes is read and checked first.

use super::super::{StoredModule, StoredWeight, Weights, matrix};
use super::SCALES;
use crate::checkpoint::TensorInfo;
use crate::config::{FpaIntBConfig, QuantizationConfig};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::DType;
use halfbyte::layout::codes::{Codes, FpaIntB};
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Float, FloatData, Group, WeightFormat, Zero};
use std::sync::Arc;

/// A module of which everything but its codes has been read.
pub(super) struct Module<'a> {
    pub n: usize,
    pub k: usize,
    pub format: WeightFormat,
    pub findings: Vec<Finding>,
    codes: String,
    /// None: signed codes, output by output.
    layout: Option<FpaIntB>,
    scales: FloatData<'a>,
    zeros: StoredZeros<'static>,
}

/// Reads a module under TensorRT-LLM's names but for its codes.
pub(super) fn examine<'a>(weights: &'a Weights, prefix: &str) -> Result<Module<'a>> {
    let checkpoint = weights.checkpoint();
    let name = |part: &str| format!("{prefix}.{part}");
    for part in ["prequant_scaling_factor", "activation_scaling_factor", "alpha"] {
        if let Some(info) = checkpoint.get(&name(part)) {
            let what = format!("module `{prefix}`: it has `{part}`, a scale of activations, which is not read");
            return Err(Error::unsupported(info.file, what));
        }
    }
    let weight = checkpoint.info(&name("weight"))?;
    let scales = SCALES.map(|part| checkpoint.get(&name(part)));
    let (scales, grouped) = match scales {
        [Some(scales), None] => (scales, false),
        [None, Some(scales)] => (scales, true),
        _ => {
            let what =
                format!("module `{prefix}`: expected either `{}` or `{}`, got both or none", SCALES[0], SCALES[1]);
            return Err(Error::malformed(weight.file, what));
        }
    };
    let (n, groups) = outputs(&scales, grouped)?;
    let width = match (weight.dtype, weight.shape) {
        (DType::I8 | DType::U8, &[k, width]) => Some((k, width)),
        (DType::F16 | DType::BF16, &[k, width]) => width.checked_mul(2).map(|width| (k, width)),
        (DType::F32, &[k, width]) => width.checked_mul(4).map(|width| (k, width)),
        _ => None,
    };
    let found = width.and_then(|(k, width)| Some((k, bits(width, n)?)));
    let Some((k, bits)) = found.filter(|&(k, _)| k > 0) else {
        let what = format!(
            "tensor `{}`: expected bytes [inputs, {n}] or [inputs, {n} / 2], as they are or as halfs, beside scales of {n} outputs, \
             got {} {:?}",
            weight.name, weight.dtype, weight.shape
        );
        return Err(Error::malformed(weight.file, what));
    };
    let arch = arch(weights, prefix, &weight)?;
    if arch >= 90 {
        let what = format!(
            "module `{prefix}`: the layouts that TensorRT-LLM has for sm_90 and later are not read, and it is said to be for sm_{arch}"
        );
        return Err(Error::unsupported(weight.file, what));
    }
    let shape = [n, k];
    let group = group(weights, &scales, shape, groups, grouped)?;
    let zeros = zeros(weights, prefix, &scales, shape, groups, bits)?;
    module(weights, prefix, Parts { weight: weight.name, scales, shape, bits, group, arch: Some(arch), zeros })
}

/// Reads a module under Paddle's names but for its codes.
pub(super) fn examine_paddle<'a>(weights: &'a Weights, prefix: &str) -> Result<Module<'a>> {
    let checkpoint = weights.checkpoint();
    let weight = checkpoint.info(&format!("{prefix}.quant_weight"))?;
    let [rows, k] = matrix(checkpoint, weight.name, DType::I8)?;
    let scales = checkpoint.info(&format!("{prefix}.quant_scale"))?;
    let (n, groups) = outputs(&scales, scales.shape.len() == 2)?;
    let Some(bits) = bits(rows, n).filter(|_| k > 0) else {
        let what = format!(
            "tensor `{}`: expected [{n}, inputs] or [{n} / 2, inputs] beside scales of {n} outputs, got [{rows}, {k}]",
            weight.name
        );
        return Err(Error::malformed(weight.file, what));
    };
    let plain = declared(weights).is_some_and(|config| config.plain) && bits == 8;
    let arch = if plain { None } else { Some(arch(weights, prefix, &weight)?) };
    let group = group(weights, &scales, [n, k], groups, scales.shape.len() == 2)?;
    let zeros = StoredZeros::Symmetric;
    module(weights, prefix, Parts { weight: weight.name, scales, shape: [n, k], bits, group, arch, zeros })
}

/// Reads all of a module but its codes and scales, which stay where they are.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    stored(weights, prefix, examine(weights, prefix)?)
}

/// The same under Paddle's names.
pub(super) fn load_paddle<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    stored(weights, prefix, examine_paddle(weights, prefix)?)
}

fn stored<'a>(weights: &'a Weights, prefix: &str, module: Module<'a>) -> Result<StoredModule<'a>> {
    let Module { n, k, format, findings, codes, layout, scales, zeros } = module;
    let bytes = weights.checkpoint().data(&codes)?;
    let codes = match layout {
        None => Codes::Bytes { codes: bytes, flip: 0x80 },
        Some(layout) => Codes::Rows(Arc::new(move |rows, out| layout.rows(&bytes, rows, [n, k], format.bits, out))),
    };
    let scales = (scales, Strides::of_groups(n));
    let tensor = StoredTensor::new(format, [n, k], codes, scales, zeros, None).map_err(Error::numbers(prefix))?;
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor), findings })
}

/// What the shapes of a module say.
struct Parts<'a> {
    weight: &'a str,
    scales: TensorInfo<'a>,
    shape: [usize; 2],
    bits: u32,
    group: Group,
    arch: Option<u32>,
    zeros: StoredZeros<'static>,
}

fn module<'a>(weights: &'a Weights, prefix: &str, parts: Parts<'a>) -> Result<Module<'a>> {
    let Parts { weight, scales, shape: [n, k], bits, group, arch, zeros } = parts;
    let layout = arch.map(FpaIntB::of_arch).transpose().map_err(Error::numbers(prefix))?;
    if let Some(layout) = layout {
        layout.bytes([n, k], bits).map_err(Error::numbers(prefix))?;
    }
    let scale = scales.dtype.float().ok_or_else(|| {
        Error::malformed(scales.file, format!("tensor `{}`: expected floats, got {}", scales.name, scales.dtype))
    })?;
    let (zero, scale) = match &zeros {
        StoredZeros::Symmetric => (Zero::Symmetric, scale),
        StoredZeros::Integer(..) => (Zero::Integer, scale),
        StoredZeros::Float(..) => (Zero::Float, Float::F32),
    };
    let format = WeightFormat { bits, group, zero, scale, channel_scale: None };
    let mut findings = Vec::new();
    if let Some(says) = declared(weights).map(|config| config.bits).filter(|&says| says != bits) {
        let text = format!("the config says {says} bits, but its tensors hold {bits}; read as {bits} bits");
        findings.push(Finding::new(prefix, text));
    }
    if matches!(zeros, StoredZeros::Float(..)) {
        let text = "some of its zeros are not (2^(b-1) - a zero point) times the scale; all were read as float offsets";
        findings.push(Finding::new(prefix, text));
    }
    let scales = weights.checkpoint().floats(scales.name)?;
    Ok(Module { n, k, format, findings, codes: weight.to_owned(), layout, scales, zeros })
}

/// What the checkpoint declares, if it is of this scheme.
fn declared(weights: &Weights) -> Option<&FpaIntBConfig> {
    match weights.quantization() {
        Some(QuantizationConfig::FpaIntB(config)) => Some(config),
        _ => None,
    }
}

/// The architecture that codes lie for: by the config, else by the caller.
fn arch(weights: &Weights, prefix: &str, weight: &TensorInfo<'_>) -> Result<u32> {
    let arch = declared(weights).and_then(|config| config.arch).or(weights.hint().arch);
    arch.ok_or_else(|| {
        let what = format!(
            "module `{prefix}`: no config says for which architecture its codes lie, as `arch` does; say which (--arch 80)"
        );
        Error::unsupported(weight.file, what)
    })
}

/// Outputs and groups of a tensor of scales.
fn outputs(scales: &TensorInfo<'_>, grouped: bool) -> Result<(usize, usize)> {
    let found = match (scales.shape, grouped) {
        (&[n], false) => Some((n, 1)),
        (&[groups, n], true) => Some((n, groups)),
        _ => None,
    };
    found.filter(|&(n, groups)| n > 0 && groups > 0).ok_or_else(|| {
        let expected = if grouped { "[groups, outputs]" } else { "[outputs]" };
        let what = format!("tensor `{}`: expected {expected}, none of them 0, got {:?}", scales.name, scales.shape);
        Error::malformed(scales.file, what)
    })
}

/// Bits of the codes of n outputs in so many bytes.
fn bits(bytes: usize, n: usize) -> Option<u32> {
    match bytes {
        _ if bytes == n => Some(8),
        _ if bytes.checked_mul(2) == Some(n) => Some(4),
        _ => None,
    }
}

/// How far scales reach: as declared, as the caller says, or by their number.
fn group(
    weights: &Weights,
    scales: &TensorInfo<'_>,
    [n, k]: [usize; 2],
    groups: usize,
    grouped: bool,
) -> Result<Group> {
    if !grouped {
        return Ok(Group::Channel);
    }
    if let Some(said) = declared(weights).and_then(|config| config.group_size) {
        let group = said.map_or(Group::Channel, Group::Size);
        if group.count(k) == groups {
            return Ok(group);
        }
        let says = said.map_or("-1".to_owned(), |size| size.to_string());
        let what = format!(
            "tensor `{}`: expected [{}, {n}] for {k} inputs and group_size {says}, got {:?}",
            scales.name,
            group.count(k),
            scales.shape
        );
        return Err(Error::malformed(scales.file, what));
    }
    match weights.hint().group {
        Some(group) if group.count(k) == groups => Ok(group),
        _ if groups == 1 => Ok(Group::Channel),
        _ if k.is_multiple_of(groups) => Ok(Group::Size(k / groups)),
        _ => {
            let what = format!(
                "tensor `{}`: expected a number of groups that divides the {k} inputs, as no config gives the group size, got {:?}",
                scales.name, scales.shape
            );
            Err(Error::malformed(scales.file, what))
        }
    }
}

/// What TensorRT-LLM adds after scaling, as the zero points that it comes from, `[groups, n]`.
fn zeros(
    weights: &Weights,
    prefix: &str,
    scales: &TensorInfo<'_>,
    [n, _]: [usize; 2],
    groups: usize,
    bits: u32,
) -> Result<StoredZeros<'static>> {
    let checkpoint = weights.checkpoint();
    let Some(info) = checkpoint.get(&format!("{prefix}.zero")) else { return Ok(StoredZeros::Symmetric) };
    let Some(dtype) = info.dtype.float().filter(|_| info.dtype == scales.dtype && info.shape == scales.shape) else {
        let what = format!(
            "tensor `{}`: expected {} {:?} as the scales, got {} {:?}",
            info.name, scales.dtype, scales.shape, info.dtype, info.shape
        );
        return Err(Error::malformed(info.file, what));
    };
    let zeros = checkpoint.floats(info.name)?.to_f32();
    let scales = checkpoint.floats(scales.name)?.to_f32();
    let middle = (1u32 << (bits - 1)) as f32;
    let point = |zero: f32, scale: f32| {
        let point = if scale == 0.0 { middle } else { (middle - zero / scale).round() };
        let is_one = (0.0..=2.0 * middle).contains(&point) && dtype.round((middle - point) * scale) == zero;
        is_one.then_some(point as u16)
    };
    let points: Vec<u16> = zeros.iter().zip(&scales).map_while(|(&zero, &scale)| point(zero, scale)).collect();
    if points.len() == n * groups {
        let symmetric = points.iter().all(|&point| f32::from(point) == middle);
        return Ok(match symmetric {
            true => StoredZeros::Symmetric,
            false => StoredZeros::Integer(points.into(), Strides::of_groups(n)),
        });
    }
    let offset = |(&zero, &scale): (&f32, &f32)| {
        let exact = f64::from(zero) - f64::from(middle) * f64::from(scale);
        (f64::from(exact as f32) == exact && exact.is_finite()).then_some(exact as f32)
    };
    let offsets: Option<Vec<f32>> = zeros.iter().zip(&scales).map(offset).collect();
    match offsets {
        Some(offsets) => Ok(StoredZeros::Float(FloatData::F32(offsets.into()), Strides::of_groups(n))),
        None => {
            let what =
                format!("tensor `{}`: expected finite zeros whose sums with the scales are exact in f32", info.name);
            Err(Error::malformed(info.file, what))
        }
    }
}
