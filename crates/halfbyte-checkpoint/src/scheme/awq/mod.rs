//! AWQ: `qweight`, `qzeros` (llm-awq: `scaled_zeros`), `scales`; 4 bits in one of three layouts.
//!
//! ```text
//! gemm       qweight i32 [K, N/8]   nibble i of word c is output 8c + (0 2 4 6 1 3 5 7)[i]
//!            qzeros  i32 [G, N/8]   the zero points as they are, in the same order
//!            scales  f16 [G, N]
//! gemv       qweight i32 [N, K/8]   in order along K
//!            qzeros  i32 [N, W]     in order along G, padded to 8W groups
//!            scales  f16 [N, 8W]    padded with zeros
//! gemv_fast  qweight i16 [N/4, K]   the interleaved stream of `halfbyte::layout::codes::FpaIntB`
//!            qzeros  f16 [≥ G, N]   −scale·zero, padded
//!            scales  f16 [≥ G, N]   padded with zeros
//! w[k, n] = scales[k / group, n] · (q[k, n] − zero[k / group, n])
//! ```
//!
//! [`halfbyte::QTensor`] is the transpose, `[n, k]` with n = N and k = K. The tensors' types and shapes tell the layouts
//! apart, and from GPTQ, in all but a few small cases; in those the config does.
//!
//! Source: AutoAWQ 0.2.9, whose files the tests read to their exact values, and llm-awq.

mod layout;
mod pack;
mod read;
mod write;

pub(super) use read::transposed;
pub(crate) use write::{Writer, nearest};

use super::{Description, Scheme, StoredFormat};

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "awq",
    parts: &["qweight", "qzeros", "scales", "scaled_zeros"],
    activations: &[],
    detect: layout::detect,
    describe: |weights, prefix| {
        let module = read::examine(weights, prefix)?;
        Ok(Description {
            format: StoredFormat::Codes(module.format),
            shape: [module.n, module.k],
            act_order: false,
            findings: module.findings,
        })
    },
    load: read::load,
};
