//! Scales and offsets of a unit as whole multiples of halves: what lies in the place of both.
//!
//! ```text
//! [i 0..8][word 0..4] of factors, [i 0..8] a last word of two halves    of rows R = i and R + 8
//! with offsets, groups of 32:   word g: bits 0 … 5 and 16 … 21 the factors of the scales of R and R + 8, above them 6 bits each of the
//!                               offsets and 4 of the halves of the scales, which are four bytes: of byte i the lower bits in word
//!                               i / 2, the upper ones in word 2 + i / 2, for even i above R's;   last word: the halves of the offsets
//! with offsets, groups of 16:   word g / 2, byte 2 (g % 2) = factors of group g: of the scale, above it of the offset, 4 bits each, of R;
//!                               the next byte of R + 8;   two last words: the halves of the scales, those of the offsets
//! without, groups of 16:        word g / 2, byte 2 (g % 2) = factor of group g plus 128, of R; the next byte of R + 8
//!                               last word = the halves of the scales
//! ```

use super::{Atom, STEP, STRIP, row_at};
use crate::layout::multiples::Multiples;
use half::f16;

/// Where the words of a pair of a strip's rows begin, and its last word or words.
fn words_of(atom: Atom, pair: usize) -> [usize; 2] {
    let (unit, i) = (pair / 8, pair % 8);
    [16 * i, 128 + if atom.has_nibbles() { 8 } else { 4 } * i]
        .map(|at| atom.codes_bytes() + unit * atom.unit_params_bytes() + at)
}

/// A tensor's scales, and offsets where it has such.
pub(super) type OfTensor<'a> = (&'a Multiples<'a>, Option<&'a Multiples<'a>>);

/// Halves and factors of the groups of a row of an atom; nothing where the tensor has none.
#[derive(Clone, Copy, Default)]
struct Row {
    half: f16,
    factors: [i32; 8],
}

impl Row {
    fn of(of: &Multiples<'_>, [n, groups]: [usize; 2], row: usize, first: usize, small: bool) -> Self {
        if row >= n || first >= groups {
            return Self::default();
        }
        let sign = if small { of.without_sign().map_or(1, |(sign, _)| sign) } else { 1 };
        let half = of.halves()[(row * groups + first) / of.block()];
        let mut factors = [0; 8];
        let there = &of.factors()[row * groups + first..(row + 1) * groups];
        factors.iter_mut().zip(there).for_each(|(to, &factor)| *to = i32::from(sign) * i32::from(factor));
        Self { half: if sign < 0 { -half } else { half }, factors }
    }
}

/// Writes those of a strip and a step along k to their atom.
pub(super) fn pack(atom: Atom, of: OfTensor<'_>, shape: [usize; 2], [strip, step]: [usize; 2], out: &mut [u8]) {
    let first = step * (STEP / atom.group);
    let pair_of = |of: &Multiples<'_>, pair: usize| {
        [0, 1].map(|i| Row::of(of, shape, strip * STRIP + row_at(2 * pair + i), first, atom.offset))
    };
    let mut put = |at: usize, word: u32| out[at..at + 4].copy_from_slice(&word.to_le_bytes());
    for pair in 0..STRIP / 2 {
        let [first, last] = words_of(atom, pair);
        let [scales, scales8] = pair_of(of.0, pair);
        let halves = |[a, b]: [Row; 2]| u32::from(a.half.to_bits()) | u32::from(b.half.to_bits()) << 16;
        let of_scales = halves([scales, scales8]);
        match of.1 {
            Some(offsets) if atom.has_nibbles() => {
                let [offsets, offsets8] = pair_of(offsets, pair);
                for i in 0..4 {
                    let byte = |scale: Row, offset: Row, g: usize| (scale.factors[g] | offset.factors[g] << 4) as u8;
                    let of_group = |g: usize| [byte(scales, offsets, g), byte(scales8, offsets8, g)];
                    let [[a, b], [c, d]] = [2 * i, 2 * i + 1].map(of_group);
                    put(first + 4 * i, u32::from_le_bytes([a, b, c, d]));
                }
                put(last, of_scales);
                put(last + 4, halves([offsets, offsets8]));
            }
            Some(offsets) => {
                let [offsets, offsets8] = pair_of(offsets, pair);
                for g in 0..4 {
                    let half = |scale: Row, offset: Row, i: usize| {
                        let bits = of_scales >> (16 * (g % 2) + 8 * i + 4 * (g / 2)) & 15;
                        scale.factors[g] as u32 | (offset.factors[g] as u32) << 6 | bits << 12
                    };
                    put(first + 4 * g, half(scales, offsets, 0) | half(scales8, offsets8, 1) << 16);
                }
                put(last, halves([offsets, offsets8]));
            }
            None => {
                for i in 0..4 {
                    let bytes = [0, 1].map(|e| [scales, scales8].map(|row| (row.factors[2 * i + e] + 128) as u8));
                    put(first + 4 * i, u32::from_le_bytes([bytes[0][0], bytes[0][1], bytes[1][0], bytes[1][1]]));
                }
                put(last, of_scales);
            }
        }
    }
}

/// Scale and offset of the row at `at` of a strip and of group `g` of an atom, out of its bytes.
pub(super) fn unpack(atom: Atom, bytes: &[u8], at: usize, g: usize) -> [f32; 2] {
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i]));
    let (pair, second) = (at / 2, at % 2);
    let half = |word: u32| f16::from_bits((word >> (16 * second)) as u16).to_f32();
    let [first, at_last] = words_of(atom, pair);
    let last = word(at_last);
    if atom.has_nibbles() {
        let factors = bytes[first + 2 * g + second];
        return [half(last) * f32::from(factors & 15), half(word(at_last + 4)) * f32::from(factors >> 4)];
    }
    if !atom.offset {
        let factor = i32::from(bytes[first + 2 * g + second]) - 128;
        return [half(last) * factor as f32, 0.0];
    }
    let words = [0, 1, 2, 3].map(|i| word(first + 4 * i));
    let factor = |field: usize| (words[g] >> (16 * second + 6 * field) & 0x3f) as f32;
    let bits = |word: usize, i: usize| words[word] >> (16 * i + 12) & 15;
    let byte = |i: usize| bits(i / 2, i % 2) | bits(2 + i / 2, i % 2) << 4;
    let of_scales = (0..4).rev().fold(0, |halves, i| halves << 8 | byte(i));
    [half(of_scales) * factor(0), half(last) * factor(1)]
}
