//! Some rows and columns of a tensor, as it lies where they are whole blocks of a file.

use super::{StoredTensor, StoredZeros, Strides};
use crate::error::Result;
use crate::format::Group;
use crate::layout::codes::Codes;
use crate::layout::multiples::Multiples;
use crate::tensor::FloatData;
use std::ops::Range;

impl StoredTensor<'_> {
    /// Some rows and columns with the numbers that [`StoredTensor::part`] gives. Codes that lie in blocks stay there, and what is known of
    /// scales and offsets stays known, where columns are asked for in their order and are whole blocks.
    ///
    /// Errors: those of [`StoredTensor::part`].
    pub fn cut(&self, rows: &[Range<usize>], columns: &[Range<usize>]) -> Result<StoredTensor<'static>> {
        match self.cut_blocks(rows, columns) {
            Some(part) => part,
            None => self.part(rows, columns).map(Into::into),
        }
    }

    /// None: they are no whole blocks, or not all there.
    fn cut_blocks(&self, rows: &[Range<usize>], columns: &[Range<usize>]) -> Option<Result<StoredTensor<'static>>> {
        let (Codes::Blocks { bytes, form }, Group::Size(group)) = (&self.codes, self.format.group) else { return None };
        let multiples = self.multiples.as_deref();
        let of_multiples = multiples.map_or(1, |(scales, offsets)| {
            scales.block().max(offsets.as_ref().map_or(1, Multiples::block)).saturating_mul(group)
        });
        let unit = form.codes.max(group).max(of_multiples);
        let whole = [form.codes, group, of_multiples].into_iter().all(|size| size > 0 && unit.is_multiple_of(size));
        let in_order = columns.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let there = |ranges: &[Range<usize>], end: usize| ranges.iter().all(|r| r.start <= r.end && r.end <= end);
        let cut_at_units = columns.iter().all(|r| r.start.is_multiple_of(unit) && r.end.is_multiple_of(unit));
        let some = columns.iter().any(|r| !r.is_empty());
        let fits = some && there(rows, self.n) && there(columns, self.k) && in_order && cut_at_units && whole;
        if !fits || self.group_index.is_some() || matches!(self.zeros, StoredZeros::Integer(..)) {
            return None;
        }
        let shape = [rows, columns].map(|ranges| ranges.iter().map(Range::len).sum());
        // Of each row so many elements for so many columns.
        let runs = |each: usize, of: usize, pitch: usize| {
            let of_row =
                move |row: usize| columns.iter().map(move |r| [r.start, r.end].map(|c| row * pitch + c / of * each));
            rows.iter().cloned().flatten().flat_map(of_row)
        };
        let codes =
            runs(form.bytes, form.codes, form.bytes_of_row(self.k)?).flat_map(|[a, b]| bytes[a..b].iter().copied());
        let codes = Codes::Blocks { bytes: codes.collect::<Vec<u8>>().into(), form: form.clone() };
        let strides = Strides::of_outputs(shape[1] / group);
        let floats = |values: &FloatData<'_>, by: Strides| {
            let values = values.as_floats();
            let groups = || columns.iter().flat_map(|r| r.start / group..r.end / group);
            let of_row = |row: usize| groups().map(move |g| values.get(by.at(row, g)));
            FloatData::F32(rows.iter().cloned().flatten().flat_map(of_row).collect::<Vec<f32>>().into())
        };
        let zeros = match &self.zeros {
            StoredZeros::Float(offsets, by) => StoredZeros::Float(floats(offsets, *by), strides),
            _ => StoredZeros::Symmetric,
        };
        let scales = (floats(&self.scales.0, self.scales.1), strides);
        let part = StoredTensor::new(self.format, shape, codes, scales, zeros, None);
        let cut = |of: &Multiples<'_>| {
            let per_block = of.block() * group;
            let halves = runs(1, per_block, self.k / per_block).flat_map(|[a, b]| of.halves()[a..b].iter().copied());
            let factors = runs(1, group, self.k / group).flat_map(|[a, b]| of.factors()[a..b].iter().copied());
            Multiples::new(of.block(), halves.collect::<Vec<_>>(), factors.collect::<Vec<_>>())
        };
        Some(match multiples {
            None => part,
            Some((scales, offsets)) => part.and_then(|part| {
                let offsets = offsets.as_ref().map(&cut).transpose()?;
                part.with_multiples(cut(scales)?, offsets)
            }),
        })
    }
}
