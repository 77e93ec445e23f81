//! Nibbles out of words, in the layouts `gemm` and `gemv`.

use rayon::prelude::*;

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
    assert_eq!(codes.len(), rows * columns);
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
