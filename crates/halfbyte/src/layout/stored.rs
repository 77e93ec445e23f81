//! A quantised tensor as a file holds it, borrowed: what [`crate::QTensor`] says, with the bits where they lie.
//!
//! Packing for the kernels goes from here in one pass over the file's bytes; [`StoredTensor::to_qtensor`] makes the
//! canonical tensor for whoever computes with codes.

mod cut;
mod strides;

pub use strides::Strides;

use super::codes::Codes;
use super::multiples::Multiples;
use crate::error::{Error, Result};
use crate::format::factors::Factors;
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros, groups};
use crate::memory::{check_columns, check_empty, collected, zeroed};
use crate::tensor::{Float, FloatData};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Where zero lies, group by group, as in [`Zeros`].
#[derive(Clone, Debug)]
pub enum StoredZeros<'a> {
    /// In the middle of the codes, everywhere.
    Symmetric,
    /// Zero points, each from 0 to `2^bits`.
    Integer(Cow<'a, [u16]>, Strides),
    /// Offsets added after scaling.
    Float(FloatData<'a>, Strides),
}

/// Codes, scales and zeros of a matrix `[n, k]` in the layouts of a file.
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    format: WeightFormat,
    n: usize,
    k: usize,
    groups: usize,
    codes: Codes<'a>,
    scales: (FloatData<'a>, Strides),
    zeros: StoredZeros<'a>,
    group_index: Option<Cow<'a, [u32]>>,
    channel_scales: Option<Cow<'a, [f32]>>,
    multiples: Option<Box<(Multiples<'a>, Option<Multiples<'a>>)>>,
}

const OP: &str = "stored tensor";

/// Outputs that are unpacked together: their words share cache lines.
const ROWS_AT_ONCE: usize = 64;

impl<'a> StoredTensor<'a> {
    /// Brings the parts together.
    ///
    /// Errors: those of [`QTensor::new`], but that [`Codes::Rows`] is trusted to give codes of the
    /// format's bits.
    pub fn new(
        format: WeightFormat,
        [n, k]: [usize; 2],
        codes: Codes<'a>,
        scales: (FloatData<'a>, Strides),
        zeros: StoredZeros<'a>,
        group_index: Option<Vec<u32>>,
    ) -> Result<Self> {
        format.validate()?;
        check_columns(OP, k)?;
        let has_scales = |groups: usize| scales.1.needs(n, groups).is_some_and(|needed| needed <= scales.0.len());
        let groups = groups(format.group, k, group_index.as_deref(), has_scales);
        n.checked_mul(k.max(groups))
            .ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))?;
        check_empty(OP, [n, k])?;
        check_empty(OP, [n, groups])?;
        if let Some(len) = codes.len()
            && codes.len_of([n, k], format.bits) != Some(len)
        {
            let expected = format!("codes for {n} × {k} of {} bits", format.bits);
            return Err(Error::invalid(OP, expected, format!("{codes:?}")));
        }
        if let Codes::Bytes { codes, flip } = &codes
            && let Some(code) = beyond(codes, *flip, format.max_code())
        {
            return Err(Error::invalid(OP, format!("codes of {} bits", format.bits), code.to_string()));
        }
        let long_enough = |what: &str, len: usize, strides: Strides| match strides.needs(n, groups) {
            Some(needed) if needed <= len => Ok(()),
            _ => Err(Error::invalid(OP, format!("{what} for {n} outputs and {groups} groups"), len.to_string())),
        };
        let exact = |what: &str, values: &FloatData<'_>| match not_exact(values, format.scale) {
            None => Ok(()),
            Some(s) => Err(Error::invalid(OP, format!("{what} finite and exact in {}", format.scale), s.to_string())),
        };
        long_enough("scales", scales.0.len(), scales.1)?;
        exact("scales", &scales.0)?;
        match (&zeros, format.zero) {
            (StoredZeros::Symmetric, Zero::Symmetric) => {}
            (StoredZeros::Integer(z, strides), Zero::Integer) => {
                long_enough("zero points", z.len(), *strides)?;
                let most = format.max_code() as u16 + 1;
                if let Some(z) = z.iter().find(|&&z| z > most) {
                    return Err(Error::invalid(OP, format!("zero points up to {most}"), z.to_string()));
                }
            }
            (StoredZeros::Float(o, strides), Zero::Float) => {
                long_enough("offsets", o.len(), *strides)?;
                exact("offsets", o)?;
            }
            (_, want) => return Err(Error::invalid(OP, want.to_string(), "others")),
        }
        if format.group == Group::Tensor {
            let values = scales.0.as_floats();
            let one = |same: &dyn Fn(usize) -> bool| (1..n).all(same);
            let alike = match &zeros {
                StoredZeros::Symmetric => true,
                StoredZeros::Integer(z, strides) => one(&|i| z[strides.at(i, 0)] == z[strides.at(0, 0)]),
                StoredZeros::Float(o, strides) => {
                    let offsets = o.as_floats();
                    one(&|i| offsets.get(strides.at(i, 0)) == offsets.get(strides.at(0, 0)))
                }
            };
            if !alike || !one(&|i| values.get(scales.1.at(i, 0)) == values.get(scales.1.at(0, 0))) {
                return Err(Error::invalid(OP, "one scale and zero for the whole tensor", "several"));
            }
        }
        let group_index = match group_index {
            None => None,
            Some(index) => {
                if index.len() != k {
                    return Err(Error::invalid(OP, format!("{k} group indices"), index.len().to_string()));
                }
                if let Some(g) = index.iter().find(|&&g| g as usize >= groups) {
                    return Err(Error::invalid(OP, format!("group indices below {groups}"), g.to_string()));
                }
                let size = format.group.len(k).max(1);
                let trivial = index.iter().enumerate().all(|(j, &g)| g as usize == j / size);
                (!trivial).then_some(Cow::Owned(index))
            }
        };
        let channel_scales = match format.channel_scale {
            None => None,
            Some(dtype) => {
                let values = scales.0.as_floats();
                let scale = |i: usize, g: usize| values.get(scales.1.at(i, g));
                let zero = |i: usize, g: usize| match &zeros {
                    StoredZeros::Integer(z, strides) => u32::from(z[strides.at(i, g)]),
                    StoredZeros::Symmetric | StoredZeros::Float(..) => format.middle(),
                };
                Some(Cow::Owned(Factors::of(OP, [n, groups], scale, zero, dtype)?.channel))
            }
        };
        Ok(Self { format, n, k, groups, codes, scales, zeros, group_index, channel_scales, multiples: None })
    }

    /// Says what the scales, and the offsets where there are such, are whole multiples of, for layouts that hold them so.
    ///
    /// Errors: other products than the scales and offsets, which must lie output by output in f32.
    pub fn with_multiples(self, scales: Multiples<'a>, offsets: Option<Multiples<'a>>) -> Result<Self> {
        let shape = [self.n, self.groups];
        let same = match (&self.zeros, &offsets) {
            (StoredZeros::Float(o, strides), Some(multiples)) => multiples.are(o, *strides, shape),
            (StoredZeros::Float(..), None) | (_, Some(_)) => false,
            (_, None) => true,
        };
        if !same || !scales.are(&self.scales.0, self.scales.1, shape) {
            let expected = "multiples that are its scales and offsets, f32 in rows of whole blocks";
            return Err(Error::invalid(OP, expected, "others"));
        }
        Ok(Self { multiples: Some(Box::new((scales, offsets))), ..self })
    }

    /// What the codes mean.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Output channels (rows).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction (columns).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Groups along k.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// The codes, where they lie.
    pub fn codes(&self) -> &Codes<'a> {
        &self.codes
    }

    /// Scales, and where they lie.
    pub fn scales(&self) -> (&FloatData<'a>, Strides) {
        (&self.scales.0, self.scales.1)
    }

    /// Scales of channels, `[n]`, of which [`StoredTensor::scales`] are whole multiples; None without two levels.
    pub fn channel_scales(&self) -> Option<&[f32]> {
        self.channel_scales.as_deref()
    }

    /// Zeros or offsets, and where they lie.
    pub fn zeros(&self) -> &StoredZeros<'a> {
        &self.zeros
    }

    /// Integer zero points; None in formats without.
    pub(super) fn zero_points(&self) -> Option<(&[u16], Strides)> {
        if let StoredZeros::Integer(z, strides) = &self.zeros { Some((z, *strides)) } else { None }
    }

    /// Float offsets; None in formats without.
    pub(super) fn offsets(&self) -> Option<(&FloatData<'a>, Strides)> {
        if let StoredZeros::Float(o, strides) = &self.zeros { Some((o, *strides)) } else { None }
    }

    /// What the scales are whole multiples of, if that was said.
    pub(crate) fn scale_multiples(&self) -> Option<&Multiples<'a>> {
        self.multiples.as_ref().map(|multiples| &multiples.0)
    }

    /// What the offsets are whole multiples of, if that was said.
    pub(crate) fn offset_multiples(&self) -> Option<&Multiples<'a>> {
        self.multiples.as_ref().and_then(|multiples| multiples.1.as_ref())
    }

    /// Group of each column, if it is not simply `j / group size`.
    pub fn group_index(&self) -> Option<&[u32]> {
        self.group_index.as_deref()
    }

    /// Whether rows of the other tensor can be packed below those of this one.
    pub fn continues(&self, other: &StoredTensor<'_>) -> bool {
        self.format == other.format && self.k == other.k && self.group_index == other.group_index
    }

    /// The canonical tensor. Errors: a code beyond the format's bits, memory that is short.
    pub fn to_qtensor(&self) -> Result<QTensor> {
        let (shape, groups) = ([self.n, self.k], self.groups());
        let mut codes = zeroed::<u8>(OP, self.n * self.k)?;
        codes.par_chunks_mut((ROWS_AT_ONCE * self.k).max(1)).enumerate().for_each(|(block, out)| {
            let first = block * ROWS_AT_ONCE;
            self.codes.rows(first..first + out.len() / self.k, shape, self.format.bits, out);
        });
        let floats = |values: &FloatData<'_>, strides: Strides| {
            let values = values.as_floats();
            self.gather(groups, |i, g| values.get(strides.at(i, g)))
        };
        let scales = floats(&self.scales.0, self.scales.1)?;
        let zeros = match &self.zeros {
            StoredZeros::Symmetric => Zeros::Symmetric,
            StoredZeros::Integer(z, strides) => Zeros::Integer(self.gather(groups, |i, g| z[strides.at(i, g)])?),
            StoredZeros::Float(o, strides) => Zeros::Float(floats(o, *strides)?),
        };
        let index = self.group_index.as_ref().map(|index| index.to_vec());
        QTensor::new(self.format, shape, codes, scales, zeros, index)
    }

    /// Group of column `j`.
    fn group_of(&self, j: usize) -> usize {
        match (&self.group_index, self.format.group) {
            (Some(index), _) => index[j] as usize,
            (None, Group::Size(size)) => j / size,
            (None, _) => 0,
        }
    }

    /// The groups that some columns are of, in order; columns that are not there are of none.
    pub fn used_groups(&self, columns: impl IntoIterator<Item = usize>) -> Vec<usize> {
        let mut used = vec![false; self.groups()];
        columns.into_iter().filter(|&j| j < self.k).for_each(|j| used[self.group_of(j)] = true);
        (0..used.len()).filter(|&g| used[g]).collect()
    }

    /// Some rows and columns, in the order in which they are asked for, with the groups that these columns have: the same numbers,
    /// wherever a group is cut. Rows that are not asked for are not unpacked. Where these columns would fill more groups than they have,
    /// there are as many, and no column is of the last ones.
    ///
    /// Errors: rows or columns that are not there, columns that are asked for twice, a code beyond the format's bits, memory that is
    /// short.
    pub fn part(&self, rows: &[Range<usize>], columns: &[Range<usize>]) -> Result<QTensor> {
        const OP: &str = "part of a stored tensor";
        for (what, ranges, end) in [("rows", rows, self.n), ("columns", columns, self.k)] {
            if let Some(range) = ranges.iter().find(|range| range.start > range.end || range.end > end) {
                return Err(Error::invalid(OP, format!("{what} below {end}"), format!("{range:?}")));
            }
        }
        let all = |ranges: &[Range<usize>]| {
            let len = ranges.iter().map(ExactSizeIterator::len).fold(0, usize::saturating_add);
            collected(OP, len, ranges.iter().cloned().flatten())
        };
        let columns = all(columns)?;
        let mut asked = zeroed::<u8>(OP, self.k)?;
        if let Some(j) = columns.iter().find(|&&j| std::mem::replace(&mut asked[j], 1) > 0) {
            return Err(Error::invalid(OP, "each column once", format!("column {j} twice")));
        }
        let mut used = self.used_groups(columns.iter().copied());
        let mut named = zeroed::<u32>(OP, self.groups())?;
        used.iter().zip(0..).for_each(|(&g, name)| named[g] = name);
        // Groups that no column has still have a scale.
        let filled = self.format.group.count(columns.len());
        used.resize(filled.max(used.len()), used.last().copied().unwrap_or(0));
        // Neighbours, whose words may share cache lines.
        let blocks = rows.iter().flat_map(|range| {
            range.clone().step_by(ROWS_AT_ONCE).map(move |first| first..range.end.min(first + ROWS_AT_ONCE))
        });
        let rows = all(rows)?;
        let (shape, width) = ([self.n, self.k], columns.len());
        let mut codes = zeroed::<u8>(OP, rows.len().saturating_mul(width))?;
        let (mut rest, mut work) = (codes.as_mut_slice(), Vec::new());
        for block in blocks {
            let (out, others) = std::mem::take(&mut rest).split_at_mut(block.len() * width);
            work.push((block, out));
            rest = others;
        }
        work.into_par_iter().for_each_init(Vec::new, |whole, (block, out)| {
            whole.resize(block.len() * self.k, 0u8);
            self.codes.rows(block, shape, self.format.bits, whole);
            for (out, whole) in out.chunks_exact_mut(width.max(1)).zip(whole.chunks_exact(self.k.max(1))) {
                out.iter_mut().zip(&columns).for_each(|(out, &j)| *out = whole[j]);
            }
        });
        let (rows, used) = (&rows, &used);
        let places = || rows.iter().flat_map(|&i| used.iter().map(move |&g| (i, g)));
        let of_groups = rows.len().saturating_mul(used.len());
        let floats = |(values, strides): (&FloatData<'_>, Strides)| {
            let values = values.as_floats();
            collected(OP, of_groups, places().map(|(i, g)| values.get(strides.at(i, g))))
        };
        let zeros = match &self.zeros {
            StoredZeros::Symmetric => Zeros::Symmetric,
            StoredZeros::Integer(z, strides) => {
                Zeros::Integer(collected(OP, of_groups, places().map(|(i, g)| z[strides.at(i, g)]))?)
            }
            StoredZeros::Float(o, strides) => Zeros::Float(floats((o, *strides))?),
        };
        let index = collected(OP, width, columns.iter().map(|&j| named[self.group_of(j)]))?;
        QTensor::new(self.format, [rows.len(), width], codes, floats(self.scales())?, zeros, Some(index))
    }

    /// What the codes stand for, `[n, k]`, each rounded to f32 once. Errors: a code beyond the format's bits, memory that is short.
    pub fn values(&self) -> Result<Vec<f32>> {
        let (shape, format) = ([self.n, self.k], self.format);
        let (size, most) = (format.group.len(self.k).max(1), format.max_code());
        let scales = self.scales.0.as_floats();
        let of_group = |i: usize, g: usize, codes: &[u8], out: &mut [f32]| {
            let scale = f64::from(scales.get(self.scales.1.at(i, g)));
            let centred = |zero: f64| move |code: f64| (scale * (code - zero)) as f32;
            match &self.zeros {
                StoredZeros::Symmetric => each(codes, out, centred(f64::from(format.middle()))),
                StoredZeros::Integer(z, strides) => each(codes, out, centred(f64::from(z[strides.at(i, g)]))),
                StoredZeros::Float(o, strides) => {
                    let offset = f64::from(o.as_floats().get(strides.at(i, g)));
                    each(codes, out, |code| (scale * code + offset) as f32);
                }
            }
        };
        let mut values = zeroed::<f32>("values", self.n * self.k)?;
        let blocks = values.par_chunks_mut((ROWS_AT_ONCE * self.k).max(1)).enumerate();
        blocks.try_for_each_init(Vec::new, |codes, (block, out)| {
            let first = block * ROWS_AT_ONCE;
            codes.resize(out.len(), 0u8);
            self.codes.rows(first..first + out.len() / self.k, shape, format.bits, codes);
            if let Some(code) = beyond(codes, 0, most) {
                return Err(Error::invalid("values", format!("codes of {} bits", format.bits), code.to_string()));
            }
            let rows = out.chunks_exact_mut(self.k).zip(codes.chunks_exact(self.k));
            for (i, (out, codes)) in (first..).zip(rows) {
                match &self.group_index {
                    None => {
                        let groups = out.chunks_mut(size).zip(codes.chunks(size)).enumerate();
                        groups.for_each(|(g, (out, codes))| of_group(i, g, codes, out));
                    }
                    Some(index) => {
                        let columns = out.chunks_exact_mut(1).zip(codes.chunks_exact(1)).zip(index.iter());
                        columns.for_each(|((out, code), &g)| of_group(i, g as usize, code, out));
                    }
                }
            }
            Ok(())
        })?;
        Ok(values)
    }

    /// Values `[n, groups]`.
    fn gather<T>(&self, groups: usize, value: impl Fn(usize, usize) -> T) -> Result<Vec<T>> {
        let value = &value;
        collected(OP, self.n * groups, (0..self.n).flat_map(|i| (0..groups).map(move |g| value(i, g))))
    }
}

impl<'a> From<&'a QTensor> for StoredTensor<'a> {
    fn from(q: &'a QTensor) -> Self {
        let strides = Strides::of_outputs(q.groups());
        let zeros = match q.zeros() {
            Zeros::Symmetric => StoredZeros::Symmetric,
            Zeros::Integer(z) => StoredZeros::Integer(Cow::Borrowed(z), strides),
            Zeros::Float(o) => StoredZeros::Float(FloatData::F32(Cow::Borrowed(o)), strides),
        };
        Self {
            format: q.format(),
            n: q.n(),
            k: q.k(),
            groups: q.groups(),
            codes: Codes::Bytes { codes: Cow::Borrowed(q.codes()), flip: 0 },
            scales: (FloatData::F32(Cow::Borrowed(q.scales())), strides),
            zeros,
            group_index: q.group_index().map(Cow::Borrowed),
            channel_scales: q.channel_scales().map(Cow::Borrowed),
            multiples: None,
        }
    }
}

impl From<QTensor> for StoredTensor<'static> {
    fn from(q: QTensor) -> Self {
        let strides = Strides::of_outputs(q.groups());
        let zeros = match q.zeros() {
            Zeros::Symmetric => StoredZeros::Symmetric,
            Zeros::Integer(z) => StoredZeros::Integer(Cow::Owned(z.clone()), strides),
            Zeros::Float(o) => StoredZeros::Float(FloatData::F32(Cow::Owned(o.clone())), strides),
        };
        Self {
            format: q.format(),
            n: q.n(),
            k: q.k(),
            groups: q.groups(),
            scales: (FloatData::F32(Cow::Owned(q.scales().to_vec())), strides),
            zeros,
            group_index: q.group_index().map(|index| Cow::Owned(index.to_vec())),
            channel_scales: q.channel_scales().map(|scales| Cow::Owned(scales.to_vec())),
            multiples: None,
            codes: Codes::Bytes { codes: Cow::Owned(q.into_codes()), flip: 0 },
        }
    }
}

/// What a function makes of codes.
fn each(codes: &[u8], out: &mut [f32], value: impl Fn(f64) -> f32) {
    out.iter_mut().zip(codes).for_each(|(out, &code)| *out = value(f64::from(code)));
}

/// The first code above `most`.
fn beyond(codes: &[u8], flip: u8, most: u32) -> Option<u8> {
    let is_beyond = |code: u8| u32::from(code ^ flip) > most;
    // Pieces are looked at whole, many codes at a time.
    let any = |codes: &&[u8]| codes.iter().fold(false, |any, &code| any | is_beyond(code));
    let piece = (most < u32::from(u8::MAX)).then(|| codes.par_chunks(1 << 16).find_first(any)).flatten()?;
    piece.iter().find(|&&code| is_beyond(code)).map(|code| code ^ flip)
}

/// The first value that is not finite, or not exact in `dtype`.
fn not_exact(values: &FloatData<'_>, dtype: Float) -> Option<f32> {
    // The common cases look at exponents only, many at a time.
    let finite = match values {
        FloatData::F16(v) if dtype == Float::F16 => {
            v.iter().fold(true, |all, v| all & (v.to_bits() & 0x7c00 != 0x7c00))
        }
        FloatData::BF16(v) if dtype == Float::BF16 => {
            v.iter().fold(true, |all, v| all & (v.to_bits() & 0x7f80 != 0x7f80))
        }
        FloatData::F32(v) if dtype == Float::F32 => v.iter().fold(true, |all, v| all & v.is_finite()),
        _ => false,
    };
    if finite {
        return None;
    }
    let values = values.as_floats();
    (0..values.len()).map(|i| values.get(i)).find(|&v| !v.is_finite() || dtype.round(v) != v)
}
