//! Labels against data: which settings of the config a module follows, and where it does not.

use crate::config::{
    CompressedTensorsConfig, CompressedTensorsFormat, CompressedTensorsGroup, CompressedTensorsStrategy,
    QuantizationConfig,
};
use crate::scheme::Weights;
use halfbyte::Group;

/// How far one scale reaches, by the shape of the scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// A single scale.
    Tensor,
    /// This many scales for each row.
    Rows(usize),
}

impl Reach {
    /// Whether scales of this shape are what `strategy` leaves for rows of `k`.
    pub fn fits(self, strategy: CompressedTensorsStrategy, k: usize) -> bool {
        match strategy {
            CompressedTensorsStrategy::Tensor => self == Reach::Tensor,
            CompressedTensorsStrategy::Channel => self == Reach::Rows(1),
            CompressedTensorsStrategy::Group(size) => self == Reach::Rows(k.div_ceil(size)),
        }
    }

    /// The groups that the shape alone tells. None: rows that do not divide by their number of scales.
    pub fn group(self, k: usize) -> Option<Group> {
        match self {
            Reach::Tensor => Some(Group::Tensor),
            Reach::Rows(1) => Some(Group::Channel),
            Reach::Rows(groups) => (groups > 0 && k.is_multiple_of(groups) && k > 0).then(|| Group::Size(k / groups)),
        }
    }
}

/// What a module's tensors say of themselves.
pub(super) struct Evidence<'a> {
    /// Widths that the codes may have.
    pub bits: &'a [u32],
    pub reach: Reach,
    pub k: usize,
    pub zero_points: bool,
    pub format: CompressedTensorsFormat,
}

/// The compressed-tensors part of what a checkpoint declares.
pub(super) fn declared(weights: &Weights) -> Option<&CompressedTensorsConfig> {
    match weights.quantization() {
        Some(QuantizationConfig::CompressedTensors(config)) => Some(config),
        _ => None,
    }
}

/// The settings that are meant for a module: those that name it, or else those that fit its tensors best, as class names
/// and regular expressions say nothing here that the tensors do not.
pub(super) fn group_of<'a>(
    config: &'a CompressedTensorsConfig,
    prefix: &str,
    evidence: &Evidence<'_>,
) -> Option<&'a CompressedTensorsGroup> {
    let named = |group: &&CompressedTensorsGroup| group.targets.iter().any(|target| target == prefix);
    let fit = |group: &&CompressedTensorsGroup| {
        let storage = group.format.is_none_or(|format| format == evidence.format);
        let bits = evidence.bits.contains(&group.bits);
        let reach = evidence.reach.fits(group.strategy, evidence.k);
        (bits, reach, group.symmetric != evidence.zero_points, storage)
    };
    // The first of several that fit alike.
    config.groups.iter().find(named).or_else(|| config.groups.iter().rev().max_by_key(fit))
}
