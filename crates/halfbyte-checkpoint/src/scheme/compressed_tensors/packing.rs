//! Codes in the 32-bit words of a row: as a dense stream, or with no code across two words.

use rayon::prelude::*;
use std::ops::Range;

/// How codes lie in words: this many codes in this many words, again and again, from the lowest bit up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::scheme) struct Packing {
    /// Bits a code, 1 to 8.
    pub bits: u32,
    words: usize,
    codes: usize,
}

impl Packing {
    /// A stream without gaps.
    pub fn dense(bits: u32) -> Self {
        // Widths of 8 bits and below: the shortest run of whole words that holds whole codes.
        let words = (1..=7).find(|words| words * 32 % bits == 0).unwrap_or(bits);
        Self { bits, words: words as usize, codes: (words * 32 / bits) as usize }
    }

    /// As many whole codes in each word as fit; the bits above them are 0.
    pub fn whole(bits: u32) -> Self {
        Self { bits, words: 1, codes: 32 / bits as usize }
    }

    /// Every packing that puts rows of this many codes into this many words. Where the two packings of a width put every
    /// code at the same place, only the dense one is listed.
    pub fn fitting(codes: usize, words: usize) -> Vec<Self> {
        let whole = |bits: u32| (codes > 32 / bits as usize && 32 % bits != 0).then(|| Self::whole(bits));
        (1..=8)
            .flat_map(|bits| [Some(Self::dense(bits)), whole(bits)])
            .flatten()
            .filter(|packing| packing.words_of(codes) == words)
            .collect()
    }

    /// Words that a row of this many codes takes.
    pub fn words_of(&self, codes: usize) -> usize {
        codes / self.codes * self.words + (codes % self.codes * self.bits as usize).div_ceil(32)
    }

    /// Whether no code lies across two words though the width would have it so.
    pub fn is_whole(&self) -> bool {
        *self != Self::dense(self.bits)
    }

    /// Rows of words `[n, words_of(k)]` to the codes of these rows, `[rows, k]`, for widths up to 4 bits and 8.
    pub fn unpack(&self, words: &[u32], k: usize, rows: Range<usize>, codes: &mut [u8]) {
        let row = self.words_of(k);
        for (i, codes) in rows.zip(codes.chunks_exact_mut(k)) {
            self.unpack_row(&words[i * row..][..row], codes);
        }
    }

    /// Words `[words_of(n), groups]`, a stream down each column, to codes `[n, groups]`, for the same widths.
    pub fn unpack_columns(&self, words: &[i32], [n, groups]: [usize; 2]) -> Vec<u8> {
        assert_eq!(words.len(), self.words_of(n) * groups);
        let mut codes = vec![0u8; n * groups];
        if codes.is_empty() {
            return codes;
        }
        if self.words == 1 {
            let mask = ((1u16 << self.bits) - 1) as u8;
            let rows = codes.par_chunks_mut(self.codes * groups).zip(words.par_chunks(groups));
            rows.with_min_len(64).for_each(|(codes, words)| {
                for (codes, i) in codes.chunks_exact_mut(groups).zip(0..) {
                    codes
                        .iter_mut()
                        .zip(words)
                        .for_each(|(code, &w)| *code = (w as u32 >> (i * self.bits)) as u8 & mask);
                }
            });
            return codes;
        }
        let mut column = vec![0u8; n];
        for g in 0..groups {
            let stream: Vec<u32> = words.iter().skip(g).step_by(groups).map(|&word| word as u32).collect();
            self.unpack_row(&stream, &mut column);
            codes.iter_mut().skip(g).step_by(groups).zip(&column).for_each(|(code, &value)| *code = value);
        }
        codes
    }

    /// Codes `[n, k]` to rows of words: the inverse of [`Packing::unpack`].
    pub fn pack(&self, codes: &[u8], [n, k]: [usize; 2]) -> Vec<i32> {
        assert_eq!(codes.len(), n * k);
        let row = self.words_of(k);
        let mut words = vec![0i32; n * row];
        if !words.is_empty() {
            words.par_chunks_mut(row).zip(codes.par_chunks(k)).for_each(|(words, codes)| self.pack_row(codes, words));
        }
        words
    }

    /// Codes `[n, groups]` to columns of words: the inverse of [`Packing::unpack_columns`].
    pub fn pack_columns(&self, codes: &[u8], [n, groups]: [usize; 2]) -> Vec<i32> {
        assert_eq!(codes.len(), n * groups);
        let rows = self.words_of(n);
        let mut words = vec![0i32; rows * groups];
        let mut stream = vec![0i32; rows];
        for g in 0..groups {
            let column: Vec<u8> = codes.iter().skip(g).step_by(groups).copied().collect();
            self.pack_row(&column, &mut stream);
            words.iter_mut().skip(g).step_by(groups).zip(&stream).for_each(|(word, &value)| *word = value);
        }
        words
    }

    /// Whether all bits are 0 that hold no code in this packing, in rows of `k` codes.
    pub fn spare_bits_are_zero(&self, words: &[i32], k: usize) -> bool {
        words.chunks(self.words_of(k).max(1)).all(|row| {
            row.chunks(self.words).enumerate().all(|(period, words)| {
                let used = self.codes.min(k - period * self.codes) * self.bits as usize;
                stream(words).checked_shr(used as u32).unwrap_or(0) == 0
            })
        })
    }

    fn unpack_row(&self, words: &[u32], codes: &mut [u8]) {
        let (bits, mask) = (self.bits, ((1u16 << self.bits) - 1) as u8);
        for (words, codes) in words.chunks(self.words).zip(codes.chunks_mut(self.codes)) {
            if let &[word] = words {
                codes.iter_mut().zip(0..).for_each(|(code, i)| *code = (word >> (i * bits)) as u8 & mask);
            } else {
                let stream = words.iter().rev().fold(0u128, |stream, &word| stream << 32 | u128::from(word));
                codes.iter_mut().zip(0..).for_each(|(code, i)| *code = (stream >> (i * bits)) as u8 & mask);
            }
        }
    }

    fn pack_row(&self, codes: &[u8], words: &mut [i32]) {
        for (codes, words) in codes.chunks(self.codes).zip(words.chunks_mut(self.words)) {
            let stream = codes.iter().rev().fold(0u128, |stream, &code| stream << self.bits | u128::from(code));
            words.iter_mut().zip(0..).for_each(|(word, i)| *word = (stream >> (32 * i)) as u32 as i32);
        }
    }
}

/// At most four words as one number, the first lowest.
fn stream(words: &[i32]) -> u128 {
    words.iter().rev().fold(0, |stream, &word| stream << 32 | u128::from(word as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::random::splitmix64;

    #[test]
    fn rows_are_as_long_as_their_formulas() {
        for bits in 1..=8 {
            for codes in 0..300 {
                assert_eq!(Packing::dense(bits).words_of(codes), (codes * bits as usize).div_ceil(32));
                assert_eq!(Packing::whole(bits).words_of(codes), codes.div_ceil(32 / bits as usize));
            }
        }
    }

    #[test]
    fn codes_are_the_bits_at_their_places() {
        let mut seed = 1u64;
        for packing in [2, 3, 4, 8].map(Packing::dense).into_iter().chain([Packing::whole(3)]) {
            for k in [1, 7, 10, 11, 31, 32, 33, 64, 97] {
                let (n, row, bits) = (3, packing.words_of(k), packing.bits as usize);
                let words: Vec<i32> = (0..n * row).map(|_| (splitmix64(&mut seed) >> 32) as i32).collect();
                let unpack = |words: &[i32]| {
                    let mut codes = vec![0; n * k];
                    let (front, back) = codes.split_at_mut(k);
                    packing.unpack(bytemuck::cast_slice(words), k, 0..1, front);
                    packing.unpack(bytemuck::cast_slice(words), k, 1..n, back);
                    codes
                };
                let codes = unpack(&words);
                let packed = packing.pack(&codes, [n, k]);
                assert_eq!(unpack(&packed), codes);
                assert!(packing.spare_bits_are_zero(&packed, k));
                for (at, &code) in codes.iter().enumerate() {
                    let (i, j) = (at / k, at % k);
                    let start = if packing.is_whole() { j / 10 * 32 + j % 10 * 3 } else { j * bits };
                    let bit = |b: usize| (words[i * row + b / 32] as u32 >> (b % 32) & 1) as u8;
                    let expected = (0..bits).fold(0, |code, b| code | bit(start + b) << b);
                    assert_eq!(code, expected, "{packing:?}, k {k}, code {i}, {j}");
                }
                let transposed: Vec<i32> =
                    (0..row).flat_map(|w| (0..n).map(move |i| (w, i))).map(|(w, i)| words[i * row + w]).collect();
                let columns = packing.unpack_columns(&transposed, [k, n]);
                for (at, &code) in columns.iter().enumerate() {
                    assert_eq!(code, codes[at % n * k + at / n]);
                }
                assert_eq!(packing.unpack_columns(&packing.pack_columns(&columns, [k, n]), [k, n]), columns);
            }
        }
    }

    #[test]
    fn the_shape_tells_widths_and_packings_apart() {
        assert_eq!(Packing::fitting(256, 32), [Packing::dense(4)]);
        assert_eq!(Packing::fitting(256, 24), [Packing::dense(3)]);
        assert_eq!(Packing::fitting(256, 26), [Packing::whole(3)]);
        assert_eq!(Packing::fitting(256, 64), [Packing::whole(7), Packing::dense(8)]);
        assert_eq!(Packing::fitting(256, 27), []);
        assert_eq!(Packing::fitting(20, 2), [Packing::dense(2), Packing::dense(3), Packing::whole(3)]);
    }
}
