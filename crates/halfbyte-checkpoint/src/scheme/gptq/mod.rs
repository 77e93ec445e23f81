//! GPTQ: `qweight`, `qzeros`, `scales`, `g_idx`.
//!
//! ```text
//! qweight i32 [K·b/32, N]   for each column n, its K codes as one little-endian bit stream down the rows
//! qzeros  i32 [G, N·b/32]   the zero points of a group, the same along the row; less one in `gptq`, as is in `gptq_v2`
//! scales  f16 [G, N]
//! g_idx   i32 [K]           group of each row; may be missing
//! w[k, n] = scales[g_idx[k], n] · (q[k, n] − zero[g_idx[k], n])
//! ```
//!
//! [`halfbyte::QTensor`] is the transpose, `[n, k]` with n = N and k = K. A field of `qzeros` is masked first and then
//! increased in `gptq`, so that a stored `2^b − 1` means the zero point `2^b`.
//!
//! Files of before there were configs are read by their shapes (`infer`). The first form of GPTQ-for-LLaMa, which had float zero
//! points in `zeros`, is refused.
//!
//! Source: AutoGPTQ 0.7.1 and GPTQModel 7.7.0, whose files the tests read and write bit by bit.

mod infer;
mod labels;
mod read;
mod stream;
mod write;

pub use write::{GptqTensors, pack};
pub(crate) use write::{Writer, nearest};

use super::{Description, Scheme, StoredFormat};

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "gptq",
    parts: &["qweight", "qzeros", "scales", "g_idx"],
    activations: &[],
    detect: |weights, prefix| weights.checkpoint().contains(&format!("{prefix}.qweight")),
    describe: |weights, prefix| {
        let module = read::examine(weights, prefix)?;
        Ok(Description {
            format: StoredFormat::Codes(module.format),
            shape: [module.n, module.k],
            act_order: module.group_index.is_some(),
            findings: module.findings,
        })
    },
    load: read::load,
};
