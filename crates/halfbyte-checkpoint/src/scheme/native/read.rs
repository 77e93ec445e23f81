//! Reading a module of our own form: every shape and number is checked before any code is unpacked.

use crate::checkpoint::Checkpoint;
use crate::config::QuantizationConfig;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, FloatData, cast};
use crate::scheme::compressed_tensors::packing::Packing;
use crate::scheme::{StoredModule, StoredWeight, Weights};
use halfbyte::layout::codes::Codes;
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::{Act, Float, Format, Group, WeightFormat, Zero};
use std::borrow::Cow;
use std::sync::Arc;

/// A module of which everything but codes, scales and zeros has been read.
pub(super) struct Module {
    pub format: WeightFormat,
    pub shape: [usize; 2],
    pub groups: usize,
    /// Only if it says more than `j / group size`.
    pub group_index: Option<Vec<u32>>,
    pub findings: Vec<Finding>,
}

/// The largest factor that some zero point allows.
const MOST_FACTOR: u8 = 16;

/// Reads all of a module but its codes, and what of scales and zeros lies as kernels take it.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let Module { format, shape: [n, k], groups, group_index, findings } = examine(weights, prefix)?;
    let parts = Parts { checkpoint: weights.checkpoint(), prefix };
    let words = parts.checkpoint.words(&parts.name("codes"))?;
    let packing = Packing::dense(format.bits);
    let signed: &[i32] = bytemuck::cast_slice(&words);
    if !packing.spare_bits_are_zero(signed, k) {
        return parts.unexpected("codes", "0 in the bits that hold no code");
    }
    let codes = match format.bits {
        2 | 4 | 8 => Codes::WordsAlong(words),
        _ => Codes::Rows(Arc::new(move |rows, codes| packing.unpack(&words, k, rows, codes))),
    };
    let strides = Strides::of_outputs(groups);
    let scales = match format.channel_scale {
        None => parts.checkpoint.floats(&parts.name("scales"))?,
        Some(_) => FloatData::F32(Cow::Owned(parts.products(groups)?)),
    };
    if format.group == Group::Tensor {
        let values = scales.as_floats();
        if (1..n).any(|i| values.get(i) != values.get(0)) {
            return parts.unexpected("scales", "the same scale throughout, as `layout` says that the tensor has one");
        }
    }
    let zeros = match format.zero {
        Zero::Symmetric => StoredZeros::Symmetric,
        Zero::Integer => StoredZeros::Integer(parts.zero_points(format.bits)?, strides),
        Zero::Float => StoredZeros::Float(parts.checkpoint.floats(&parts.name("offsets"))?, strides),
    };
    let tensor = StoredTensor::new(format, [n, k], codes, (scales, strides), zeros, group_index);
    Ok(StoredModule { weight: StoredWeight::Quantized(tensor.map_err(Error::numbers(prefix))?), findings })
}

/// Reads a module's layout, the shapes and types of its tensors, and its group index.
pub(super) fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let parts = Parts { checkpoint: weights.checkpoint(), prefix };
    let ([n, k], bits, group, groups) = parts.layout()?;
    parts.is("codes", &[DType::I32], &[n, Packing::dense(bits).words_of(k)])?;
    let floats = [DType::F16, DType::BF16, DType::F32];
    let two_levels = parts.has("factors");
    let scales = if two_levels {
        parts.is("factors", &[DType::U8], &[n, groups])?;
        parts.is("scales", &floats[..2], &[n])?
    } else {
        parts.is("scales", &floats, &[n, groups])?
    };
    let zero = match [parts.has("zero_points"), parts.has("offsets")] {
        [false, false] => Zero::Symmetric,
        [true, false] => {
            parts.is("zero_points", &[points(bits)], &[n, groups])?;
            Zero::Integer
        }
        [false, true] => {
            parts.is("offsets", &[scales.into()], &[n, groups])?;
            Zero::Float
        }
        [true, true] => return parts.unexpected("offsets", "either zero points or offsets, not both"),
    };
    let format = WeightFormat {
        bits,
        group,
        zero,
        scale: if two_levels { Float::F32 } else { scales },
        channel_scale: two_levels.then_some(scales),
    };
    format.validate().map_err(Error::numbers(prefix))?;
    let group_index = parts.group_index(k, group, groups)?;
    let findings = contradiction(weights, prefix, format).into_iter().collect();
    Ok(Module { format, shape: [n, k], groups, group_index, findings })
}

/// Type of zero points: 2^bits must fit.
pub(super) fn points(bits: u32) -> DType {
    if bits == 8 { DType::U16 } else { DType::U8 }
}

/// How formats are named here: the part of the activations is not the file's to say.
pub(super) fn name_of(weight: WeightFormat) -> String {
    Format { weight, act: Act::A16 }.to_string()
}

/// Where the config says another format than the tensors have.
fn contradiction(weights: &Weights, prefix: &str, format: WeightFormat) -> Option<Finding> {
    let Some(QuantizationConfig::Halfbyte(config)) = weights.quantization() else { return None };
    let (says, has) = (config.format_of(prefix)?, name_of(format));
    (says != has)
        .then(|| Finding::new(prefix, format!("the config says {says}, but its tensors have {has}; read as {has}")))
}

/// The tensors of a module.
struct Parts<'a, 'p> {
    checkpoint: &'a Checkpoint,
    prefix: &'p str,
}

impl<'a> Parts<'a, '_> {
    fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.prefix)
    }

    fn has(&self, part: &str) -> bool {
        self.checkpoint.contains(&self.name(part))
    }

    /// The error that a tensor is not as expected.
    fn unexpected<T>(&self, part: &str, expected: &str) -> Result<T> {
        self.checkpoint.unexpected(&self.name(part), expected)
    }

    /// Checks a tensor's type and shape; its float type, or f32 where it has none.
    fn is(&self, part: &str, types: &[DType], shape: &[usize]) -> Result<Float> {
        let info = self.checkpoint.info(&self.name(part))?;
        if !types.contains(&info.dtype) || info.shape != shape {
            let names: Vec<&str> = types.iter().map(|dtype| dtype.name()).collect();
            return self.unexpected(part, &format!("{} {shape:?} by `layout`", names.join(" or ")));
        }
        Ok(info.dtype.float().unwrap_or(Float::F32))
    }

    /// Outputs and inputs, bits, group, and how many groups there are.
    fn layout(&self) -> Result<([usize; 2], u32, Group, usize)> {
        const EXPECTED: &str = "I64 [4] or [5]: outputs and inputs from 1 on; 2, 3, 4 or 8 bits; a group of 1 to 2²⁴, -1 or 0; more \
                                groups than the inputs would fill, and at most as many as inputs";
        const MOST: i64 = 1 << 24;
        let name = self.name("layout");
        let info = self.checkpoint.info(&name)?;
        if info.dtype != DType::I64 || !matches!(info.shape, [4 | 5]) {
            return self.unexpected("layout", EXPECTED);
        }
        let numbers = cast::<i64>(self.checkpoint.data(&name)?);
        let refuse = || {
            let what = format!("tensor `{name}`: expected {EXPECTED}, got {numbers:?}");
            Error::malformed(info.file, what)
        };
        let [n, k, bits, group, more @ ..] = &*numbers else { return Err(refuse()) };
        let group = match *group {
            -1 => Group::Channel,
            0 => Group::Tensor,
            size @ 1..=MOST => Group::Size(size as usize),
            _ => return Err(refuse()),
        };
        match (u32::try_from(*n), u32::try_from(*k), bits) {
            (Ok(n @ 1..), Ok(k @ 1..), 2 | 3 | 4 | 8) => {
                let full = group.count(k as usize);
                let groups = match more {
                    [] => full,
                    // Each has a column.
                    [groups] if matches!(group, Group::Size(_)) && *groups > full as i64 && *groups <= i64::from(k) => {
                        *groups as usize
                    }
                    _ => return Err(refuse()),
                };
                Ok(([n as usize, k as usize], *bits as u32, group, groups))
            }
            _ => Err(refuse()),
        }
    }

    /// Scales of groups on two levels. Error: a factor that no zero point allows.
    fn products(&self, groups: usize) -> Result<Vec<f32>> {
        let factors = self.checkpoint.data(&self.name("factors"))?;
        if let Some(factor) = factors.iter().find(|&&factor| !(1..=MOST_FACTOR).contains(&factor)) {
            return self.unexpected("factors", &format!("factors from 1 to {MOST_FACTOR}, not {factor},"));
        }
        let channels = self.checkpoint.floats(&self.name("scales"))?.to_f32();
        let rows = channels.iter().zip(factors.chunks_exact(groups));
        Ok(rows.flat_map(|(channel, factors)| factors.iter().map(move |&f| channel * f32::from(f))).collect())
    }

    fn zero_points(&self, bits: u32) -> Result<Cow<'a, [u16]>> {
        let bytes = self.checkpoint.data(&self.name("zero_points"))?;
        Ok(match points(bits) {
            DType::U16 => cast::<u16>(bytes),
            _ => bytes.iter().map(|&zero| u16::from(zero)).collect(),
        })
    }

    /// The group of each column, if that is not simply `j / group size`.
    fn group_index(&self, k: usize, group: Group, groups: usize) -> Result<Option<Vec<u32>>> {
        if !self.has("group_index") {
            if groups != group.count(k) {
                return self.unexpected("layout", "`group_index` beside groups that are not full");
            }
            return Ok(None);
        }
        self.is("group_index", &[DType::I32], &[k])?;
        let index = self.checkpoint.ints(&self.name("group_index"))?;
        if let Some((j, g)) = index.iter().enumerate().find(|&(_, &g)| g < 0 || g as usize >= groups) {
            return self.unexpected("group_index", &format!("groups from 0 to {}, not {g} at {j},", groups - 1));
        }
        let size = group.len(k).max(1);
        let trivial = index.iter().enumerate().all(|(j, &g)| g as usize == j / size);
        Ok((!trivial).then(|| index.iter().map(|&g| g as u32).collect()))
    }
}
