//! What tensors that are packed one below the other have in common.

use super::OP;
use crate::cuda::nn::Gate;
use crate::error::{Error, Result};
use crate::format::WeightFormat;
use crate::layout::places::runs;
use crate::layout::stored::StoredTensor;
use std::ops::Range;

/// What the parts have in common.
#[derive(Clone, Copy)]
pub(in super::super) struct Whole {
    pub format: WeightFormat,
    pub n: usize,
    pub k: usize,
    pub groups: usize,
    /// Two parts of which rows take turns, eight at a time: gates and what they let through.
    pub gate: Option<Gate>,
}

/// Rows that lie together in a gated matrix.
pub(super) const EIGHT: usize = 8;

impl Whole {
    /// What the parts have in common. Errors: no tensor; tensors that differ in format, k or group index.
    pub(super) fn of(parts: &[&StoredTensor<'_>]) -> Result<Self> {
        let first = parts.first().ok_or_else(|| Error::invalid(OP, "at least one tensor", "none"))?;
        if let Some(other) = parts.iter().find(|part| !first.continues(part)) {
            let describe = |part: &StoredTensor<'_>| format!("format {}, k {}", part.format(), part.k());
            let expected = format!("{} and the same group index everywhere", describe(first));
            return Err(Error::invalid(OP, expected, describe(other)));
        }
        let n = parts.iter().try_fold(0usize, |n, part| n.checked_add(part.n()));
        let n = n.ok_or_else(|| Error::invalid(OP, "rows that fit memory", "more"))?;
        Ok(Self { format: first.format(), n, k: first.k(), groups: first.groups(), gate: None })
    }

    /// The parts that some rows lie in: each with its first row there, the first of them in the packed matrix (of a gated one in rows
    /// of a part), and how many.
    pub(super) fn runs(&self, heights: &[usize], rows: Range<usize>) -> Vec<[usize; 4]> {
        if self.gate.is_some() {
            let [first, end] = [rows.start, rows.end].map(|row| row / 2);
            return (0..heights.len()).map(|part| [part, first, first, end - first]).collect();
        }
        let top = |part: usize| rows.start.max(heights[..part].iter().sum());
        runs(heights, rows.clone()).map(|(part, first, count)| [part, first, top(part), count]).collect()
    }

    /// Error: more rows or columns than kernels count.
    pub(super) fn checked(self) -> Result<Self> {
        let Self { n, k, .. } = self;
        if n > i32::MAX as usize || k > i32::MAX as usize {
            return Err(Error::invalid(OP, "fewer than 2³¹ rows and columns", format!("{n} × {k}")));
        }
        Ok(self)
    }
}
