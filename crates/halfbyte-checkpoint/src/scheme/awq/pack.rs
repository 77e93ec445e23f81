//! Nibbles out of words, in each of the three layouts.

use rayon::prelude::*;
use std::ops::Range;

/// Column of eight that nibble i of a `gemm` word holds.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Words and rows of a `gemm` weight that are unpacked together.
const TILE: usize = 16;

fn nibble(word: u32, i: usize) -> u16 {
    (word >> (4 * i) & 15) as u16
}

/// `gemm` words to codes, eight a word in the order of outputs.
pub(super) fn unpack_gemm(words: &[i32]) -> Vec<u16> {
    let mut codes = vec![0u16; words.len() * 8];
    codes.par_chunks_exact_mut(8).zip(words).with_min_len(4096).for_each(|(eight, &word)| {
        for (i, column) in ORDER.into_iter().enumerate() {
            eight[column] = nibble(word as u32, i);
        }
    });
    codes
}

/// Codes `[columns, rows]` to `gemm` words `[rows, columns/8]`: the inverse of [`unpack_gemm`] on the transpose.
pub(super) fn pack_gemm(codes: &[u8], [columns, rows]: [usize; 2]) -> Vec<i32> {
    debug_assert_eq!(codes.len(), rows * columns);
    let width = columns / 8;
    let mut words = vec![0i32; rows * width];
    if words.is_empty() {
        return words;
    }
    words.par_chunks_mut(TILE * width).enumerate().for_each(|(tile, words)| {
        for (c, eight) in codes.chunks_exact(8 * rows).enumerate() {
            for (r, words) in words.chunks_exact_mut(width).enumerate() {
                let code = |i: usize| u32::from(eight[ORDER[i] * rows + tile * TILE + r]) << (4 * i);
                words[c] = (0..8).fold(0, |word, i| word | code(i)) as i32;
            }
        }
    });
    words
}

/// `gemv` words to codes, eight a word in order.
pub(super) fn unpack_gemv(words: &[i32]) -> Vec<u16> {
    let mut codes = vec![0u16; words.len() * 8];
    codes.par_chunks_exact_mut(8).zip(words).with_min_len(4096).for_each(|(eight, &word)| {
        for (i, code) in eight.iter_mut().enumerate() {
            *code = nibble(word as u32, i);
        }
    });
    codes
}

/// Inputs that `gemv_fast` packs together.
pub(super) const FAST_INPUTS: usize = 64;

/// Outputs that `gemv_fast` packs together.
pub(super) const FAST_OUTPUTS: usize = 4;

/// `gemv_fast` words `[n/4, k]` of 16 bits, as bytes, to the codes of these outputs, `[outputs, k]`.
///
/// Row b holds outputs 4b to 4b + 3, 64 words for every 64 inputs: 16 words an output, 8 for each half of the inputs.
/// Nibble i of word q of these is input 8i + q of the half.
pub(super) fn unpack_gemv_fast(bytes: &[u8], k: usize, outputs: Range<usize>, codes: &mut [u8]) {
    for (output, codes) in outputs.zip(codes.chunks_exact_mut(k)) {
        let row = &bytes[output / FAST_OUTPUTS * 2 * k..][..2 * k];
        let words = row.chunks_exact(2 * FAST_INPUTS).map(|block| &block[output % FAST_OUTPUTS * 32..][..32]);
        for (codes, words) in codes.chunks_exact_mut(FAST_INPUTS).zip(words) {
            for (t, word) in words.chunks_exact(2).enumerate() {
                let word = u32::from(u16::from_le_bytes([word[0], word[1]]));
                for i in 0..4 {
                    codes[t / 8 * 32 + 8 * i + t % 8] = nibble(word, i) as u8;
                }
            }
        }
    }
}
