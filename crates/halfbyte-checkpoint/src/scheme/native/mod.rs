//! Our own form, which holds every format: `codes` and `layout`, `scales`, and what else the format has.
//!
//! ```text
//! layout        i64 [4]           N, K, bits (2, 3, 4 or 8), group: columns that share a scale; −1: one scale a row;
//!                                 0: one for the whole tensor
//!               i64 [5]           of a part of a matrix's columns, which has cut groups: how many groups there are, G
//! codes         i32 [N, W]        for each row its K codes as a little-endian bit stream: code k has bits k·b … k·b + b − 1;
//!                                 W = ceil(K·b/32), the bits left over are 0
//! scales        float [N, G]      f16, bf16 or f32; G = ceil(K / group), 1 without groups; with one scale for the tensor
//!                                 all are the same
//!               float [N]         with factors: scales of the rows, f16 or bf16
//! factors       u8  [N, G]        two levels: the scale of a group is scales[n] · factors[n, g], each 1 to 16
//! zero_points   u8  [N, G]        0 to 2^b; u16 for 8 bits; missing if symmetric
//! offsets       float [N, G]      of the scales' type; instead of zero points
//! group_index   i32 [K]           group of each column; may be missing where that is k / group
//! w[n, k] = scale[n, g] · (code[n, k] − zero)      zero: the zero point, or 2^(b−1);  or  scale[n, g] · code[n, k] + offset
//! ```
//!
//! With factors f, b is 4 and −128 ≤ (c − zero) · f ≤ 127 for all codes c from 0 to 15. The tensors say all that there is to
//! know of a module; `quantization_config` names the format of each, and is held against them:
//!
//! ```text
//! {"quant_method": "halfbyte", "version": 1, "format": "w4a16-g128",         the commonest format
//!  "modules": {"model.layers.0.mlp.down_proj": "w8a16-g128"},                 modules of another one
//!  "dense": ["model.layers.1.mlp.up_proj"]}                                   layers of the blocks that stay floats
//! ```

mod read;
mod write;

pub(crate) use write::{Writer, nearest, pack, specs};

use super::{Description, Scheme, StoredFormat};

/// The scheme's line in [`super::SCHEMES`].
pub(super) const SCHEME: Scheme = Scheme {
    name: "halfbyte",
    parts: &["codes", "layout", "scales", "factors", "zero_points", "offsets", "group_index"],
    activations: &[],
    detect: |weights, prefix| {
        ["codes", "layout"].iter().all(|part| weights.checkpoint().contains(&format!("{prefix}.{part}")))
    },
    describe: |weights, prefix| {
        let module = read::examine(weights, prefix)?;
        Ok(Description {
            format: StoredFormat::Codes(module.format),
            shape: module.shape,
            act_order: module.group_index.is_some(),
            findings: module.findings,
        })
    },
    load: read::load,
};
