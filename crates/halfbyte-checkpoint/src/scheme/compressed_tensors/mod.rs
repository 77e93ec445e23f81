//! compressed-tensors: `weight_packed` or `weight` in bytes, `weight_scale`, `weight_zero_point`, `weight_shape`.
//!
//! ```text
//! weight_packed      i32 [N, W]        for each row its K codes as a little-endian bit stream; W = ceil(K·b/32), or
//!                                      ceil(K / floor(32/b)) where no code straddles two words (3 bits, older files)
//! weight             i8  [N, K]        instead, the codes as they are (`int-quantized`)
//! weight_scale       float             [N, G]; [N, 1] a channel; [1] a tensor
//! weight_zero_point  i32 [ceil(N·b/32), G]   packed like the codes, but down the columns; missing if symmetric
//!                    i8                instead, as they are, in the shape of weight_scale
//! weight_shape       i64 [2]           N, K; with weight_packed only
//! weight_g_idx       i32 [K]           group of each column; −1 throughout: not used
//! w[n, k] = weight_scale[n, g] · (q[n, k] − zero[n, g])
//! ```
//!
//! Codes that are floats of 4 bits lie in bytes: `fp4.rs`. Codes and zero points are signed; packed ones are stored with `2^(b−1)` added, which is how [`halfbyte::QTensor`]
//! holds them. A `quantization_config` is compared with the tensors and loses where the two differ.
//!
//! Source: compressed-tensors 0.20.0, whose files the tests read to their exact values. The older packing follows its
//! description; no file of an older release is among the tests.

pub(super) mod fp4;
mod labels;
pub(super) mod packing;
mod read;
mod write;

pub(crate) use write::{Writer, nearest};

use super::{Description, ModuleKind, Scheme, StoredFormat, Weights};
use crate::error::Result;
use crate::finding::Finding;
use crate::safetensors::DType;

/// What says how activations are rounded to integers.
const ACTIVATIONS: &[&str] = &["input_scale", "input_zero_point", "output_scale", "output_zero_point"];

/// The line in [`super::SCHEMES`] for packed codes (`pack-quantized`), those that are floats among them.
pub(super) const PACKED: Scheme = Scheme {
    name: "compressed-tensors",
    parts: &[
        "weight_packed",
        "weight_scale",
        "weight_zero_point",
        "weight_shape",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
        "weight_global_scale",
        "input_global_scale",
    ],
    activations: ACTIVATIONS,
    detect: |weights, prefix| weights.checkpoint().contains(&format!("{prefix}.weight_packed")),
    describe: |weights, prefix| match fp4::is_there(weights, prefix) {
        true => fp4::describe(weights, prefix),
        false => describe(weights, prefix, read::Storage::Packed),
    },
    load: |weights, prefix| match fp4::is_there(weights, prefix) {
        true => fp4::load(weights, prefix),
        false => read::load(weights, prefix, read::Storage::Packed),
    },
};

/// What is to be said of activations that are rounded to small floats, or to integers by scales that are stored, once for all modules.
pub(super) fn activations(weights: &Weights) -> Option<Finding> {
    fp4::activations(weights).or_else(|| scales_of_activations(weights))
}

/// What is to be said of scales by which activations are rounded to integers.
fn scales_of_activations(weights: &Weights) -> Option<Finding> {
    let is_scale = |name: &&str| {
        let part = name.rsplit_once('.').filter(|(_, part)| ACTIVATIONS.contains(part));
        part.is_some_and(|(module, _)| {
            matches!(weights.kind(module), Ok(ModuleKind::Quantized(scheme)) if scheme.name == BYTES.name)
                && !fp4::is_there(weights, module)
        })
    };
    let mut names = weights.checkpoint().tensor_names().filter(is_scale);
    let first = names.next()?;
    let others = match names.count() {
        0 => "says".to_owned(),
        1 => "and 1 other say".to_owned(),
        others => format!("and {others} others say"),
    };
    let text = format!(
        "{others} how activations are rounded to integers; they are taken as they are, which is nearer to the model that was quantised"
    );
    Some(Finding::new(first, text))
}

/// The line in [`super::SCHEMES`] for codes that take a byte each (`int-quantized`).
pub(super) const BYTES: Scheme = Scheme {
    name: "compressed-tensors",
    parts: &[
        "weight",
        "weight_scale",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
    ],
    activations: ACTIVATIONS,
    detect: |weights, prefix| {
        let checkpoint = weights.checkpoint();
        checkpoint.get(&format!("{prefix}.weight")).is_some_and(|info| info.dtype == DType::I8)
            && checkpoint.contains(&format!("{prefix}.weight_scale"))
    },
    describe: |weights, prefix| describe(weights, prefix, read::Storage::Bytes),
    load: |weights, prefix| read::load(weights, prefix, read::Storage::Bytes),
};

fn describe(weights: &Weights, prefix: &str, storage: read::Storage) -> Result<Description> {
    let module = read::examine(weights, prefix, storage)?;
    Ok(Description {
        format: StoredFormat::Codes(module.format),
        shape: [module.n, module.k],
        act_order: module.group_index.is_some(),
        findings: module.findings,
    })
}
