//! Codes of 2, 3, 4 or 8 bits as a dense little-endian stream of 32-bit words, down columns or along rows.
//!
//! A period is the shortest run of words that holds whole codes: one word, or three words of 32 codes for 3 bits.

use rayon::prelude::*;
use std::ops::Range;

/// Words in a period.
fn period(bits: u32) -> usize {
    if bits == 3 { 3 } else { 1 }
}

/// Words `[k·bits/32, n]`, a stream down each column, to the codes of these columns, `[columns, k]`. `k · bits` must be a
/// multiple of 32.
pub(super) fn unpack_columns(words: &[u32], bits: u32, [n, k]: [usize; 2], columns: Range<usize>, codes: &mut [u8]) {
    assert_eq!(words.len() * 32, n * k * bits as usize);
    let (words_in_period, codes_in_period) = (period(bits), 32 * period(bits) / bits as usize);
    for p in 0..k / codes_in_period {
        for (column, row) in columns.clone().zip(codes.chunks_exact_mut(k)) {
            let at = |i: usize| words[(p * words_in_period + i) * n + column];
            let stream = if bits == 3 {
                u128::from(at(0)) | u128::from(at(1)) << 32 | u128::from(at(2)) << 64
            } else {
                u128::from(at(0))
            };
            spread(stream, bits, &mut row[p * codes_in_period..][..codes_in_period]);
        }
    }
}

/// The code that these words repeat in all of their fields; None if they hold different ones, or codes across two words.
pub(super) fn repeated(words: &[i32], bits: u32) -> Option<u8> {
    let code = *words.first()? as u32 & low(bits) as u32;
    let word = (0..32 / bits).fold(0, |word, _| word << bits | code);
    (32 % bits == 0 && words.iter().all(|&w| w as u32 == word)).then_some(code as u8)
}

/// Codes `[n, k]` to words `[k·bits/32, n]`: the inverse of [`unpack_columns`].
pub(super) fn pack_columns(codes: &[u8], bits: u32, [n, k]: [usize; 2]) -> Vec<i32> {
    assert_eq!(codes.len(), n * k);
    let mut words = vec![0i32; n * k * bits as usize / 32];
    if words.is_empty() {
        return words;
    }
    let (words_in_period, codes_in_period) = (period(bits), 32 * period(bits) / bits as usize);
    words.par_chunks_mut(words_in_period * n).enumerate().for_each(|(p, words)| {
        for column in 0..n {
            let stream = gather(&codes[column * k + p * codes_in_period..][..codes_in_period], bits);
            for i in 0..words_in_period {
                words[i * n + column] = (stream >> (32 * i)) as u32 as i32;
            }
        }
    });
    words
}

/// Words `[rows, columns·bits/32]`, a stream along each row, to codes `[rows, columns]`.
pub(super) fn unpack_rows(words: &[i32], bits: u32, rows_columns: usize) -> Vec<u8> {
    let (words_in_period, codes_in_period) = (period(bits), 32 * period(bits) / bits as usize);
    let mut codes = vec![0u8; rows_columns];
    for (words, codes) in words.chunks_exact(words_in_period).zip(codes.chunks_exact_mut(codes_in_period)) {
        let stream = words.iter().rev().fold(0u128, |stream, &word| stream << 32 | u128::from(word as u32));
        spread(stream, bits, codes);
    }
    codes
}

/// Codes `[rows, columns]` to words `[rows, columns·bits/32]`: the inverse of [`unpack_rows`].
pub(super) fn pack_rows(codes: &[u8], bits: u32) -> Vec<i32> {
    let (words_in_period, codes_in_period) = (period(bits), 32 * period(bits) / bits as usize);
    let mut words = Vec::with_capacity(codes.len() * bits as usize / 32);
    for codes in codes.chunks_exact(codes_in_period) {
        let stream = gather(codes, bits);
        words.extend((0..words_in_period).map(|i| (stream >> (32 * i)) as u32 as i32));
    }
    words
}

/// One period: a stream to codes.
#[inline(always)]
fn spread(stream: u128, bits: u32, codes: &mut [u8]) {
    if bits == 8 {
        codes.copy_from_slice(&(stream as u32).to_le_bytes());
        return;
    }
    for (i, eight) in codes.chunks_exact_mut(8).enumerate() {
        let chunk = (stream >> (8 * bits as usize * i)) as u64 & low(8 * bits);
        eight.copy_from_slice(&spread_eight(chunk, bits).to_le_bytes());
    }
}

/// One period: codes to a stream.
#[inline(always)]
fn gather(codes: &[u8], bits: u32) -> u128 {
    let mut stream = 0;
    if bits == 8 {
        for (i, &code) in codes.iter().enumerate() {
            stream |= u128::from(code) << (8 * i);
        }
        return stream;
    }
    for (i, eight) in codes.chunks_exact(8).enumerate() {
        let eight =
            u64::from_le_bytes([eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6], eight[7]]);
        stream |= u128::from(gather_eight(eight, bits)) << (8 * bits as usize * i);
    }
    stream
}

/// Eight codes side by side, to eight bytes: halves, quarters, eighths are moved apart in turn.
#[inline(always)]
fn spread_eight(mut x: u64, bits: u32) -> u64 {
    x = (x | x << (32 - 4 * bits)) & every(32, 4 * bits);
    x = (x | x << (16 - 2 * bits)) & every(16, 2 * bits);
    (x | x << (8 - bits)) & every(8, bits)
}

/// The inverse of [`spread_eight`].
#[inline(always)]
fn gather_eight(mut x: u64, bits: u32) -> u64 {
    x = (x | x >> (8 - bits)) & every(16, 2 * bits);
    x = (x | x >> (16 - 2 * bits)) & every(32, 4 * bits);
    (x | x >> (32 - 4 * bits)) & low(8 * bits)
}

/// The lowest `bits` bits, of at most 63.
#[inline(always)]
fn low(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// The lowest `bits` bits of every lane of `lane` bits.
#[inline(always)]
fn every(lane: u32, bits: u32) -> u64 {
    // A one in every lane, times the lowest bits.
    u64::MAX / low(lane) * low(bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::random::splitmix64;

    /// Code `i` of a stream, by its definition: bits `i·b` to `i·b + b`.
    fn bit_by_bit(word: impl Fn(usize) -> u32, bits: usize, i: usize) -> u8 {
        (0..bits).fold(0, |code, bit| {
            let at = i * bits + bit;
            code | ((word(at / 32) >> (at % 32) & 1) as u8) << bit
        })
    }

    #[test]
    fn columns_and_rows_are_the_stream_bit_by_bit_and_come_back() {
        let mut seed = 1;
        for bits in [2u32, 3, 4, 8] {
            for (n, k) in [(1, 32), (5, 32), (16, 64), (17, 96), (33, 32), (40, 160)] {
                let words: Vec<i32> =
                    (0..n * k * bits as usize / 32).map(|_| (splitmix64(&mut seed) >> 32) as i32).collect();
                let mut codes = vec![0; n * k];
                let (front, back) = codes.split_at_mut(n / 3 * k);
                for (columns, codes) in [(0..n / 3, front), (n / 3..n, back)] {
                    unpack_columns(bytemuck::cast_slice(&words), bits, [n, k], columns, codes);
                }
                for column in 0..n {
                    for j in 0..k {
                        let expected = bit_by_bit(|w| words[w * n + column] as u32, bits as usize, j);
                        assert_eq!(
                            codes[column * k + j],
                            expected,
                            "{bits} bits, n {n}, k {k}, column {column}, code {j}"
                        );
                    }
                }
                assert_eq!(pack_columns(&codes, bits, [n, k]), words, "{bits} bits, n {n}, k {k}");

                let codes = unpack_rows(&words, bits, n * k);
                for (i, &code) in codes.iter().enumerate() {
                    assert_eq!(code, bit_by_bit(|w| words[w] as u32, bits as usize, i), "{bits} bits, code {i}");
                }
                assert_eq!(pack_rows(&codes, bits), words, "{bits} bits, {n} × {k}");
            }
        }
    }

    #[test]
    fn words_of_one_code_are_told_from_others() {
        for bits in [2, 4, 8] {
            for code in [0, 1, (1u32 << bits) - 1] {
                let word = (0..32 / bits).fold(0, |word, i| word | code << (i * bits)) as i32;
                assert_eq!(repeated(&[word; 5], bits), Some(code as u8));
                assert_eq!(repeated(&[word, word ^ 1 << 31], bits), None);
                assert_eq!(repeated(&[word ^ 1 << 31; 2], bits), None);
            }
        }
        assert_eq!(repeated(&[0; 3], 3), None);
        assert_eq!(repeated(&[], 4), None);
    }
}
