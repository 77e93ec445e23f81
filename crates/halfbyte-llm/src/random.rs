//! Models of random weights, for measurements: drawn where they will lie, without files, the same each time and on every device.
//!
//! Codes are uniform, floats too; weights have the deviation `k^−½`, norms are near 1, so that activations stay of order one through
//! any number of layers. Numbers follow from the names of tensors.

use crate::arch::spec::{Shape, Spec};
use crate::error::{Error, Result};
use half::f16;
use halfbyte::WeightFormat;
use halfbyte::layout::codes::random::{first_of, word};
use rayon::prelude::*;
use std::ops::Range;

/// What random weights are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RandomWeights {
    /// Format of the linear layers of the blocks; None: floats in f16.
    pub format: Option<WeightFormat>,
    /// Format of the head, which then is a matrix of its own; None: it is what the configuration says, in f16.
    pub head: Option<WeightFormat>,
}

impl RandomWeights {
    /// Error: a format that does not exist.
    pub(crate) fn validate(&self) -> Result<()> {
        Ok(self.format.iter().chain(&self.head).try_for_each(WeightFormat::validate)?)
    }

    /// Bytes that the weights of a model take at least; as many as there are numbers for, where they are more.
    pub fn bytes(&self, spec: &Spec) -> u64 {
        let of = |format: Option<WeightFormat>, Shape { n, k, .. }: Shape| {
            let elements = n as u128 * k as u128;
            match format {
                None => 2 * elements,
                Some(format) => {
                    let scale = format.channel_scale.map_or(format.scale.size_bytes(), |_| 1) as u128;
                    elements * u128::from(format.bits) / 8 + (n * format.group.count(k)) as u128 * scale
                }
            }
        };
        let embedding = Shape { n: spec.vocab, k: spec.hidden, bias: false };
        let head = if spec.head.is_some() || self.head.is_some() { of(self.head, embedding) } else { 0 };
        let blocks: u128 = spec.linears().map(|layer| of(self.format, layer.shape)).sum();
        u64::try_from(of(None, embedding) + head + blocks).unwrap_or(u64::MAX)
    }
}

/// Matrices of random floats in f16, one below the other, which are drawn where they will lie.
#[derive(Clone, Debug)]
pub(crate) struct RandomFloats {
    /// Columns of each.
    pub k: usize,
    /// Rows of each, and the number of its first word, of two floats each.
    pub parts: Vec<(usize, u64)>,
}

impl RandomFloats {
    /// Of layers with so many outputs.
    pub fn new<'a>(k: usize, layers: impl Iterator<Item = (&'a str, usize)>) -> Self {
        Self { k, parts: layers.map(|(name, n)| (n, first_of(seed_of(name)))).collect() }
    }

    /// The same of some rows of one matrix. None: numbers come in pairs, one of which another row would have.
    pub fn of_rows(k: usize, name: &str, rows: &Range<usize>) -> Option<(usize, u64)> {
        let before = rows.start * k;
        before.is_multiple_of(2).then(|| (rows.len(), first_of(seed_of(name)) + before as u64 / 2))
    }

    /// Outputs of all, and length of the reduction.
    pub fn shape(&self) -> [usize; 2] {
        [self.parts.iter().map(|(n, _)| n).sum(), self.k]
    }

    /// Elements. Error: more than there are numbers for.
    pub fn len(&self) -> Result<usize> {
        let [n, k] = self.shape();
        n.checked_mul(k)
            .ok_or_else(|| Error::invalid("random floats", "a matrix that fits memory", format!("{n} × {k}")))
    }

    /// From a float to the next.
    pub fn step(&self) -> f32 {
        step((self.k.max(1) as f32).powf(-0.5))
    }

    /// The numbers, in memory.
    pub fn draw(&self) -> Result<Vec<f16>> {
        const CHUNK: usize = 1 << 14;
        let (mut out, step) = (vec![f16::ZERO; self.len()?], self.step());
        let mut rest = out.as_mut_slice();
        for &(n, first) in &self.parts {
            let (part, others) = rest.split_at_mut(n * self.k);
            part.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, out)| fill(out, first, chunk * CHUNK, step));
            rest = others;
        }
        Ok(out)
    }
}

/// Some rows and columns of a layer's matrix of random floats, `k` columns wide, in memory: those that [`RandomFloats::draw`] gives of
/// all. Error: more than there are numbers for.
pub(crate) fn part_of_floats(
    k: usize,
    layer: &str,
    rows: &[Range<usize>],
    columns: &[Range<usize>],
) -> Result<Vec<f16>> {
    let whole = RandomFloats::new(k, std::iter::once((layer, 1)));
    let (step, first) = (whole.step(), first_of(seed_of(layer)));
    let width = columns.iter().map(Range::len).sum::<usize>();
    let rows: Vec<usize> = rows.iter().cloned().flatten().collect();
    let len = RandomFloats { k: width, parts: vec![(rows.len(), first)] }.len()?;
    let mut out = vec![f16::ZERO; len];
    out.par_chunks_mut(width.max(1)).zip(rows).for_each(|(mut out, row)| {
        for columns in columns {
            let (part, rest) = out.split_at_mut(columns.len());
            fill(part, first, row * k + columns.start, step);
            out = rest;
        }
    });
    Ok(out)
}

/// Floats from the one that is `begin` behind those of word `first`.
fn fill(out: &mut [f16], first: u64, begin: usize, step: f32) {
    let values = |number| {
        let word = word(number);
        [word as u16, (word >> 16) as u16].map(|bits| f16::from_f32(float(bits, step)))
    };
    // The second one of a word, if they begin with such.
    let (odd, pairs) = out.split_at_mut((begin % 2).min(out.len()));
    odd.iter_mut().for_each(|out| *out = values(first + begin as u64 / 2)[1]);
    for (pair, number) in pairs.chunks_mut(2).zip(first + begin.div_ceil(2) as u64..) {
        pair.iter_mut().zip(values(number)).for_each(|(out, value)| *out = value);
    }
}

/// The step of numbers of 16 bits that have a deviation.
fn step(deviation: f32) -> f32 {
    deviation * 12f32.sqrt() / 65536.0
}

/// As the source for GPUs computes it.
fn float(bits: u16, step: f32) -> f32 {
    (f32::from(bits) - 32767.5) * step
}

/// A vector around a number, with this deviation.
pub(crate) fn vector(name: &str, len: usize, around: f32, deviation: f32) -> Vec<f32> {
    let (first, step) = (first_of(seed_of(name)), step(deviation));
    (0..len as u64).map(|at| around + float(word(first + at) as u16, step)).collect()
}

/// Of a tensor's name 24 bits: FNV-1a, folded.
pub(crate) fn seed_of(name: &str) -> u32 {
    let hash = name.bytes().fold(0x811c_9dc5u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    (hash ^ (hash >> 24)) & 0x00ff_ffff
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_matrix_has_the_numbers_of_the_whole() {
        for [n, k] in [[6, 8], [5, 7], [40, 33]] {
            let whole = RandomFloats::new(k, std::iter::once(("a.layer", n))).draw().unwrap();
            // Odd beginnings, runs in another order, one row or column, none.
            let (all_rows, some_rows) = (0..n, [3..n, 0..1]);
            let (all_columns, some_columns) = (0..k, [3..6, k - 1..k, 0..1, 2..2]);
            for rows in [std::slice::from_ref(&all_rows), &some_rows, &[]] {
                for columns in [std::slice::from_ref(&all_columns), &some_columns, &[]] {
                    let got = part_of_floats(k, "a.layer", rows, columns).unwrap();
                    let of_row = |row| columns.iter().cloned().flatten().map(move |column| row * k + column);
                    let want: Vec<f16> = rows.iter().cloned().flatten().flat_map(of_row).map(|at| whole[at]).collect();
                    assert!(got == want, "{rows:?} × {columns:?} of {n} × {k}");
                }
            }
        }
    }
}
