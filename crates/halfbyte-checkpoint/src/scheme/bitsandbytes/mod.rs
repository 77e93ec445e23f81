//! bitsandbytes: signed bytes, or 4-bit codes that stand for floats.
//!
//! ```text
//! int8  weight         i8  [N, K]
//!       SCB            f32 [N]            the largest magnitude of each output
//!       weight_format  u8  []             0: by rows, the only order that is read; may be missing
//!       w[n, k] = weight[n, k] · SCB[n] / 127
//!
//! nf4   weight                                   u8 [ceil(N·K/2), 1]  two codes a byte, the first in the high nibble; any
//! fp4                                            type with as many bytes
//!       weight.absmax                            f32 [B], or u8 [B] codes of a table (nested)
//!       weight.quant_map                         f32 [16], the table
//!       weight.quant_state.bitsandbytes__nf4     u8, JSON: quant_type, blocksize, dtype, shape, nested_…
//!       weight.nested_absmax, nested_quant_map   f32 [ceil(B / nested_blocksize)], f32 [256]
//!       w[i] = table[code[i]] · absmax[i / blocksize],  i over the whole tensor, B = ceil(N·K / blocksize)
//!       absmax[b] = nested_quant_map[absmax[b]] · nested_absmax[b / nested_blocksize] + nested_offset
//! ```
//!
//! `int8` becomes 8-bit codes with a scale an output, `SCB / 127` rounded to f32, once; bitsandbytes multiplies by SCB and
//! by 1/127 in turn and rounds after each, so that single weights differ by up to two units in the last place of f32.
//! The 4-bit kinds are no numbers to calculate with and become floats of the `dtype` that they were, products and sums
//! in f32 and rounded to it at the end, bit by bit what bitsandbytes makes of them.
//!
//! Source: bitsandbytes 0.50.2, whose modules the tests read to the exact values that it gives itself.

mod four_bits;
mod int8;

use super::{Description, ModuleKind, Scheme, StoredFormat, Weights};
use crate::config::{BitsAndBytesConfig, BitsAndBytesKind, QuantizationConfig};
use crate::finding::Finding;
use crate::safetensors::DType;

/// The line in [`super::SCHEMES`] for signed bytes.
pub(super) const BYTES: Scheme = Scheme {
    name: "bitsandbytes",
    parts: &["weight", "SCB", "weight_format"],
    activations: &[],
    detect: |weights, prefix| {
        let checkpoint = weights.checkpoint();
        checkpoint.get(&format!("{prefix}.weight")).is_some_and(|info| info.dtype == DType::I8)
            && checkpoint.contains(&format!("{prefix}.SCB"))
    },
    describe: |weights, prefix| {
        let (format, shape, findings) = int8::examine(weights, prefix)?;
        Ok(Description { format: StoredFormat::Codes(format), shape, act_order: false, findings })
    },
    load: int8::load,
};

/// The line in [`super::SCHEMES`] for codes of 4 bits.
pub(super) const FOUR_BITS: Scheme = Scheme {
    name: "bitsandbytes",
    parts: &[
        "weight",
        "weight.absmax",
        "weight.quant_map",
        "weight.quant_state.bitsandbytes__nf4",
        "weight.quant_state.bitsandbytes__fp4",
        "weight.nested_absmax",
        "weight.nested_quant_map",
    ],
    activations: &[],
    detect: |weights, prefix| {
        let contains = |part: &str| weights.checkpoint().contains(&format!("{prefix}.{part}"));
        contains("weight") && contains("weight.absmax")
    },
    describe: |weights, prefix| {
        let module = four_bits::examine(weights, prefix)?;
        let format = StoredFormat::Floats { name: module.kind.name(), bits: 4, block: module.block };
        Ok(Description { format, shape: module.shape, act_order: false, findings: module.findings })
    },
    load: four_bits::load,
};

/// What is to be said of every module of signed bytes, once for all.
pub(super) fn rounding(weights: &Weights) -> Option<Finding> {
    let is_read =
        |module: &str| matches!(weights.kind(module), Ok(ModuleKind::Quantized(scheme)) if scheme.name == BYTES.name);
    let name = weights.checkpoint().tensor_names().find(|name| name.strip_suffix(".SCB").is_some_and(is_read))?;
    let text = "and all others like it: int8 weights of bitsandbytes are read with the scale SCB / 127, rounded to f32; \
                bitsandbytes itself rounds twice";
    Some(Finding::new(name, text))
}

/// The bitsandbytes part of what a checkpoint declares.
fn declared(weights: &Weights) -> Option<&BitsAndBytesConfig> {
    match weights.quantization() {
        Some(QuantizationConfig::BitsAndBytes(config)) => Some(config),
        _ => None,
    }
}

/// A sentence if the config announces another kind of codes.
fn other_kind(weights: &Weights, prefix: &str, is: BitsAndBytesKind) -> Option<Finding> {
    let says = declared(weights)?.kind;
    let (says_name, is_name) = (says.name(), is.name());
    let text = format!("the config says {says_name}, but its tensors are those of {is_name}; read as {is_name}");
    (says != is).then(|| Finding::new(prefix, text))
}
