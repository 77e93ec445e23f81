//! Labels against data: which settings of the config a module follows, and where it does not.

use crate::config::{
    CompressedTensorsConfig, CompressedTensorsFormat, CompressedTensorsGroup, CompressedTensorsStrategy,
    QuantizationConfig, other_names,
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

/// The settings that are meant for a module.
pub(super) struct Label<'a> {
    pub group: &'a CompressedTensorsGroup,
    /// The joined layer, or the part of this one, that they name instead of it.
    pub joined: Option<String>,
}

/// The settings that are meant for a module: those that name it, or else those with an expression that matches it, or
/// else the same for the layer that it is joined in. Class names say nothing that the tensors do not: of the groups that
/// have them, and of all where none has, the one that fits the tensors best is taken.
pub(super) fn group_of<'a>(
    config: &'a CompressedTensorsConfig,
    prefix: &str,
    evidence: &Evidence<'_>,
) -> Option<Label<'a>> {
    let named = |name: &str| {
        let groups = || config.groups.iter();
        groups().find(|g| g.targets.names(name)).or_else(|| groups().find(|g| g.targets.matching(name).is_some()))
    };
    if let Some(group) = named(prefix) {
        return Some(Label { group, joined: None });
    }
    if let Some((group, other)) = other_names(prefix).into_iter().find_map(|other| Some((named(&other)?, other))) {
        return Some(Label { group, joined: Some(other) });
    }
    let fit = |group: &&CompressedTensorsGroup| {
        let storage = group.format.is_none_or(|format| format == evidence.format);
        let bits = evidence.bits.contains(&group.bits);
        let reach = evidence.reach.fits(group.strategy, evidence.k);
        (group.targets.class().is_some(), bits, reach, group.symmetric != evidence.zero_points, storage)
    };
    // The first of several that fit alike.
    config.groups.iter().rev().max_by_key(fit).map(|group| Label { group, joined: None })
}
