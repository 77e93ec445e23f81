//! Labels against data: which of the two zero conventions a module follows, and whether its group index means anything.

use super::super::Weights;
use crate::config::{GptqConfig, GptqVersion, QuantizationConfig};

/// The GPTQ part of what a checkpoint declares.
pub(super) fn declared(weights: &Weights) -> Option<&GptqConfig> {
    match weights.quantization() {
        Some(QuantizationConfig::Gptq(config)) => Some(config),
        _ => None,
    }
}

/// Which convention the stored zero points follow, and a sentence if that is not simply what the config says.
///
/// Symmetric zero points betray it: they are stored as `2^(b−1) − 1` in `gptq` and as `2^(b−1)` in `gptq_v2`, and
/// checkpoints that carry the other label exist (vLLM issue 38966). Where the config says that zero points are not
/// symmetric, its label is followed.
pub(super) fn zero_convention(
    stored: &[u8],
    bits: u32,
    config: Option<&GptqConfig>,
    sym: Option<bool>,
) -> (GptqVersion, Option<String>) {
    let middle = 1u8 << (bits - 1);
    let all = |value: u8| !stored.is_empty() && stored.iter().all(|&z| z == value);
    let label = config.map_or(GptqVersion::V1, |c| c.version);
    let (other, other_symmetric, symmetric) = match label {
        GptqVersion::V1 => (GptqVersion::V2, middle, middle - 1),
        GptqVersion::V2 => (GptqVersion::V1, middle - 1, middle),
    };
    let (name, other_name) = (label.name(), other.name());
    if all(other_symmetric) {
        if sym == Some(false) {
            let meaning =
                if label == GptqVersion::V1 { u32::from(other_symmetric) + 1 } else { u32::from(other_symmetric) };
            let text = format!(
                "every stored zero point is {other_symmetric}, which is symmetric in {other_name} but means {meaning} in \
                 {name}; the config says {name} and sym false, so it was read as {meaning}"
            );
            return (label, Some(text));
        }
        let text = match config {
            Some(_) => format!(
                "the config says {name}, where symmetric zero points are stored as {symmetric}, but every stored one is \
                 {other_symmetric}; read as {other_name}"
            ),
            None => format!(
                "no quantization_config of GPTQ's; every stored zero point is {other_symmetric}, so it was read as {other_name}"
            ),
        };
        return (other, Some(text));
    }
    let unlabelled = (config.is_none() && !all(symmetric)).then(|| {
        format!("no quantization_config of GPTQ's says how zero points are stored; read as {name} (less one)")
    });
    (label, unlabelled)
}
