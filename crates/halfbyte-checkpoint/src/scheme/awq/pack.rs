//! Nibbles out of words, in each of the three layouts.

use rayon::prelude::*;

/// Column of eight that nibble i of a `gemm` word holds.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Words and rows of a `gemm` weight that are unpacked together.
const TILE: usize = 16;

fn nibble(word: u32, i: usize) -> u8 {
    (word >> (4 * i) & 15) as u8
}

/// `gemm` words `[rows, columns/8]` to codes of the transpose, `[columns, rows]`.
pub(super) fn unpack_gemm(words: &[i32], [rows, columns]: [usize; 2]) -> Vec<u8> {
    debug_assert_eq!(words.len() * 8, rows * columns);
    let width = columns / 8;
    let mut codes = vec![0u8; rows * columns];
    if codes.is_empty() {
        return codes;
    }
    codes.par_chunks_mut(TILE * 8 * rows).enumerate().for_each(|(tile, codes)| {
        for top in (0..rows).step_by(TILE) {
            for (c, eight) in codes.chunks_exact_mut(8 * rows).enumerate() {
                for row in top..rows.min(top + TILE) {
                    let word = words[row * width + tile * TILE + c] as u32;
                    for (i, column) in ORDER.into_iter().enumerate() {
                        eight[column * rows + row] = nibble(word, i);
                    }
                }
            }
        }
    });
    codes
}

/// Codes `[columns, rows]` to `gemm` words `[rows, columns/8]`: the inverse of [`unpack_gemm`].
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
pub(super) fn unpack_gemv(words: &[i32]) -> Vec<u8> {
    let mut codes = vec![0u8; words.len() * 8];
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

/// `gemv_fast` words `[n/4, k]` of 16 bits, as bytes, to codes `[n, k]`.
///
/// Row b holds outputs 4b to 4b + 3, 64 words for every 64 inputs: 16 words an output, 8 for each half of the inputs.
/// Nibble i of word q of these is input 8i + q of the half.
pub(super) fn unpack_gemv_fast(bytes: &[u8], [n, k]: [usize; 2]) -> Vec<u8> {
    debug_assert_eq!(bytes.len() * 2, n * k);
    let mut codes = vec![0u8; n * k];
    if codes.is_empty() {
        return codes;
    }
    codes.par_chunks_mut(FAST_OUTPUTS * k).zip(bytes.par_chunks(2 * k)).for_each(|(codes, bytes)| {
        for (t, word) in bytes.chunks_exact(2).enumerate() {
            let word = u32::from(u16::from_le_bytes([word[0], word[1]]));
            let (output, half, q) = (t % FAST_INPUTS / 16, t % 16 / 8, t % 8);
            let from = output * k + t / FAST_INPUTS * FAST_INPUTS + 32 * half + q;
            for i in 0..4 {
                codes[from + 8 * i] = nibble(word, i);
            }
        }
    });
    codes
}
