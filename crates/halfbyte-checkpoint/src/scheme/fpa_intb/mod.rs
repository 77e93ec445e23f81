//! Codes in the layouts of CUTLASS's fpA_intB kernels, under the names of TensorRT-LLM or of Paddle.
//!
//! ```text
//! TensorRT-LLM  weight                  a stream of K·N·b/8 bytes, [K, N·b/8] i8; in groups [K, N·b/16] f16 or bf16, whose bits
//!                                       are the stream's (older files: f32, which hold four bytes each)
//!               per_channel_scale       [N]; or, in groups,
//!               weights_scaling_factor  [G, N]
//!               zero                    [G, N], only with zero points: T((2^(b−1) − point) · scale)
//! Paddle        quant_weight            the same stream, [N·b/8, K] i8; of llm.int8 signed codes [N, K] as they are
//!               quant_scale             [N] or [G, N]
//! w[k, n] = scale[k / group, n] · (code[k, n] − 2^(b−1)) + zero[k / group, n]        b = 4 or 8
//! ```
//!
//! [`halfbyte::layout::codes::FpaIntB`] draws the streams: one for sm_70, one for what came after it. Nothing in the tensors tells
//! which; the config's `arch` does, or the caller ([`super::Hint`]). Of TensorRT-LLM's files those of sm_70 to sm_89 are read: on
//! sm_90 and later it has streams of its own, which changed from version to version. [`halfbyte::QTensor`] is the transpose,
//! `[n, k]` with n = N and k = K; TensorRT-LLM's `zero` becomes the zero point that it was computed from.
//!
//! Modules keep their names: those of TensorRT-LLM's own architectures (`transformer.layers.0.attention.qkv`) are inspected,
//! compared and converted, but no architecture here runs them. Scales of activations (`prequant_scaling_factor`,
//! `activation_scaling_factor`) are not read.
//!
//! Source: `quantization/layers.py` and `cutlass_preprocessors.cpp` of TensorRT-LLM, read, not run; paddlepaddle 3.3.1, whose
//! streams the tests read to the exact codes.

mod read;
mod write;

pub(crate) use write::{Writer, nearest};

use super::{Description, Scheme, StoredFormat, Weights};
use crate::error::Result;
use crate::safetensors::DType;

/// Endings of TensorRT-LLM's tensors of scales: an output each, groups.
const SCALES: [&str; 2] = ["per_channel_scale", "weights_scaling_factor"];

/// The line in [`super::SCHEMES`] for TensorRT-LLM's names.
pub(super) const SCHEME: Scheme = Scheme {
    name: "fpa_intb",
    parts: &["weight", SCALES[0], SCALES[1], "zero"],
    activations: &[],
    detect: |weights, prefix| {
        let get = |part: &str| weights.checkpoint().get(&format!("{prefix}.{part}"));
        let types = [DType::I8, DType::U8, DType::F16, DType::BF16, DType::F32];
        get("weight").is_some_and(|weight| types.contains(&weight.dtype))
            && SCALES.iter().any(|part| get(part).is_some())
    },
    describe: |weights, prefix| describe(weights, prefix),
    load: read::load,
};

/// The line in [`super::SCHEMES`] for Paddle's names.
pub(super) const PADDLE: Scheme = Scheme {
    name: "fpa_intb",
    parts: &["quant_weight", "quant_scale"],
    activations: &[],
    detect: |weights, prefix| weights.checkpoint().contains(&format!("{prefix}.quant_weight")),
    describe: |weights, prefix| describe(weights, prefix),
    load: read::load_paddle,
};

fn describe(weights: &Weights, prefix: &str) -> Result<Description> {
    let module = match weights.checkpoint().contains(&format!("{prefix}.quant_weight")) {
        true => read::examine_paddle(weights, prefix)?,
        false => read::examine(weights, prefix)?,
    };
    let format = StoredFormat::Codes(module.format);
    Ok(Description { format, shape: [module.n, module.k], act_order: false, findings: module.findings })
}
