//! Codes of 4 bits for values of a table, with a scale for each block.

use super::super::{StoredModule, StoredWeight, Weights};
use super::{declared, other_kind};
use crate::checkpoint::{Checkpoint, TensorInfo};
use crate::config::BitsAndBytesKind;
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, FloatData};
use half::{bf16, f16};
use halfbyte::Float;
use rayon::prelude::*;
use serde::Deserialize;
use std::borrow::Cow;

/// Quantiles of a normal distribution, scaled to end at −1 and 1.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Floats of a sign, two bits of exponent and one of mantissa, divided by the largest; no negative zero.
const FP4: [f32; 16] = {
    const MAGNITUDES: [f32; 8] = [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0];
    let mut table = [0.0; 16];
    let mut code = 1;
    while code < 8 {
        table[code] = MAGNITUDES[code] / 12.0;
        table[code + 8] = -MAGNITUDES[code] / 12.0;
        code += 1;
    }
    table
};

/// The JSON of a `quant_state`, as far as it is needed.
#[derive(Debug, Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: u32,
    dtype: String,
    shape: Vec<usize>,
    nested_blocksize: Option<u32>,
    nested_dtype: Option<String>,
    nested_offset: Option<f64>,
}

/// The scales of scales.
struct Nested {
    block: usize,
    offset: f32,
}

/// A module of which everything but codes and scales has been read.
pub(super) struct Module {
    pub kind: BitsAndBytesKind,
    pub shape: [usize; 2],
    /// Weights that share a scale.
    pub block: usize,
    pub findings: Vec<Finding>,
    dtype: Float,
    nested: Option<Nested>,
}

impl Module {
    fn table(&self) -> &'static [f32; 16] {
        if self.kind == BitsAndBytesKind::Nf4 { &NF4 } else { &FP4 }
    }
}

/// Reads a module's shapes and its `quant_state`.
pub(super) fn examine(weights: &Weights, prefix: &str) -> Result<Module> {
    let checkpoint = weights.checkpoint();
    let (kind, info, state) = state(checkpoint, prefix)?;
    let fail = |what: String| Err(Error::malformed(info.file, format!("tensor `{}`: {what}", info.name)));
    if state.quant_type != kind.name() {
        return fail(format!("expected quant_type `{}` as its name says, got `{}`", kind.name(), state.quant_type));
    }
    let dtype = match state.dtype.as_str() {
        "float16" => Float::F16,
        "bfloat16" => Float::BF16,
        "float32" => Float::F32,
        other => return fail(format!("expected dtype float16, bfloat16 or float32, got `{other}`")),
    };
    let elements = match *state.shape.as_slice() {
        [n, k] if n > 0 && k > 0 => n.checked_mul(k).map(|elements| ([n, k], elements)),
        _ => None,
    };
    let Some((shape, elements)) = elements else {
        return fail(format!("expected a shape [outputs, inputs] without a 0, got {:?}", state.shape));
    };
    let stored = checkpoint.info(&format!("{prefix}.weight"))?;
    if stored.bytes != elements.div_ceil(2) {
        let what = format!(
            "tensor `{}`: expected {} bytes for the shape {shape:?} of its quant_state, got {}",
            stored.name,
            elements.div_ceil(2),
            stored.bytes
        );
        return Err(Error::malformed(stored.file, what));
    }
    if state.blocksize == 0 {
        return fail("expected a blocksize of 1 or more, got 0".into());
    }
    let block = state.blocksize as usize;
    let blocks = elements.div_ceil(block);
    let vector = |part: &str, dtype: DType, len: usize| {
        let info = checkpoint.info(&format!("{prefix}.{part}"))?;
        if info.dtype == dtype && info.shape == [len] {
            return Ok(());
        }
        let what = format!("tensor `{}`: expected {dtype} [{len}], got {} {:?}", info.name, info.dtype, info.shape);
        Err(Error::malformed(info.file, what))
    };
    let nested = if checkpoint.contains(&format!("{prefix}.weight.nested_absmax")) {
        let (Some(size @ 1..), Some("float32"), Some(offset)) =
            (state.nested_blocksize, state.nested_dtype.as_deref(), state.nested_offset)
        else {
            return fail(
                "expected nested_blocksize, nested_dtype float32 and nested_offset, as absmax is nested".into(),
            );
        };
        let size = size as usize;
        vector("weight.absmax", DType::U8, blocks)?;
        vector("weight.nested_absmax", DType::F32, blocks.div_ceil(size))?;
        vector("weight.nested_quant_map", DType::F32, 256)?;
        Some(Nested { block: size, offset: offset as f32 })
    } else {
        vector("weight.absmax", DType::F32, blocks)?;
        None
    };
    let mut module = Module { kind, shape, block, findings: Vec::new(), dtype, nested };
    module.findings = odd(weights, prefix, &module)?;
    Ok(module)
}

/// The `quant_state`: kind by its tensor's name, the tensor, and its fields.
fn state<'a>(checkpoint: &'a Checkpoint, prefix: &str) -> Result<(BitsAndBytesKind, TensorInfo<'a>, QuantState)> {
    /// No field of it is long.
    const MAX_BYTES: usize = 1 << 16;
    let name = |kind: BitsAndBytesKind| format!("{prefix}.weight.quant_state.bitsandbytes__{}", kind.name());
    let kinds = [BitsAndBytesKind::Nf4, BitsAndBytesKind::Fp4];
    let (kind, info) = match kinds.map(|kind| Some((kind, checkpoint.get(&name(kind))?))) {
        [Some(one), None] | [None, Some(one)] => one,
        [Some((_, info)), Some(_)] => {
            let what = format!("module `{prefix}`: expected one quant_state, got one of nf4 and one of fp4");
            return Err(Error::malformed(info.file, what));
        }
        [None, None] => {
            let what = format!("there is no tensor `{}` and none of fp4, as absmax needs one", name(kinds[0]));
            return Err(Error::missing(checkpoint.path(), what));
        }
    };
    if info.dtype != DType::U8 || info.bytes > MAX_BYTES {
        let what = format!(
            "tensor `{}`: expected JSON as U8, at most {MAX_BYTES} bytes of it, got {} {:?}",
            info.name, info.dtype, info.shape
        );
        return Err(Error::malformed(info.file, what));
    }
    match serde_json::from_slice(&checkpoint.data(info.name)?) {
        Ok(state) => Ok((kind, info, state)),
        Err(e) => {
            let what = format!("tensor `{}`: expected the JSON of a quant_state: {e}", info.name);
            Err(Error::malformed(info.file, what))
        }
    }
}

/// What is not as the config or the program that wrote it has it.
fn odd(weights: &Weights, prefix: &str, module: &Module) -> Result<Vec<Finding>> {
    let mut findings: Vec<Finding> = other_kind(weights, prefix, module.kind).into_iter().collect();
    let mut find = |text: String| findings.push(Finding::new(prefix, text));
    let says = declared(weights).filter(|config| config.kind != BitsAndBytesKind::Int8);
    match says.and_then(|config| config.double_quant) {
        Some(true) if module.nested.is_none() => {
            find("the config says bnb_4bit_use_double_quant, but absmax is stored as floats; read as those".into());
        }
        Some(false) if module.nested.is_some() => {
            find("the config does not say bnb_4bit_use_double_quant, but absmax is nested; read as nested".into());
        }
        _ => {}
    }
    let name = format!("{prefix}.weight.quant_map");
    let same = |stored: &FloatData<'_>| stored.to_f32() == *module.table();
    if weights.checkpoint().contains(&name) && !same(&weights.checkpoint().floats(&name)?) {
        let kind = module.kind.name();
        find(format!("quant_map is not the table of {kind}; bitsandbytes takes its own, and that was done here"));
    }
    Ok(findings)
}

/// Reads a module.
pub(super) fn load<'a>(weights: &'a Weights, prefix: &str) -> Result<StoredModule<'a>> {
    let mut module = examine(weights, prefix)?;
    let checkpoint = weights.checkpoint();
    let absmax = absmax(checkpoint, prefix, module.nested.as_ref())?;
    let bytes = checkpoint.data(&format!("{prefix}.weight"))?;
    let (table, block) = (module.table(), module.block);
    let value = |i: usize| {
        let code = if i.is_multiple_of(2) { bytes[i / 2] >> 4 } else { bytes[i / 2] & 15 };
        table[usize::from(code)] * absmax[i / block]
    };
    let [n, k] = module.shape;
    let floats = match module.dtype {
        Float::F16 => FloatData::F16(Cow::Owned(all(n * k, |i| f16::from_f32(value(i))))),
        Float::BF16 => FloatData::BF16(Cow::Owned(all(n * k, |i| bf16::from_f32(value(i))))),
        Float::F32 => FloatData::F32(Cow::Owned(all(n * k, value))),
    };
    let findings = std::mem::take(&mut module.findings);
    Ok(StoredModule { weight: StoredWeight::Dense { floats, shape: module.shape }, findings })
}

fn all<T: Send>(len: usize, value: impl Fn(usize) -> T + Sync + Send) -> Vec<T> {
    (0..len).into_par_iter().with_min_len(1 << 14).map(value).collect()
}

/// The scale of each block.
fn absmax(checkpoint: &Checkpoint, prefix: &str, nested: Option<&Nested>) -> Result<Vec<f32>> {
    let name = format!("{prefix}.weight.absmax");
    let Some(Nested { block, offset }) = nested else { return Ok(checkpoint.floats(&name)?.to_f32()) };
    let part = |part: &str| Ok(checkpoint.floats(&format!("{prefix}.weight.{part}"))?.to_f32());
    let (table, outer): (Vec<f32>, Vec<f32>) = (part("nested_quant_map")?, part("nested_absmax")?);
    let codes = checkpoint.data(&name)?;
    Ok(codes.iter().enumerate().map(|(i, &code)| table[usize::from(code)] * outer[i / block] + offset).collect())
}
