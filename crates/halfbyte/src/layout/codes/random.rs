//! Codes that lie nowhere: each word of 32 bits is a function of its number, the same on a CPU and on a GPU.
//!
//! ```text
//! word t of output i has the number  first + i · words + t     words = ceil(k · field / 32), fields of `field_bits`
//! its codes are those of a stream along the row, as in `words_along`; of 3 bits those in the low bits of fields of 4
//! ```

use super::field_bits;
use std::ops::Range;

/// Numbers of a seed: no matrix has as many words.
const SEED_SHIFT: u32 = 40;

/// The number of the first word of a seed, of which the low 24 bits count.
pub fn first_of(seed: u32) -> u64 {
    u64::from(seed) << SEED_SHIFT
}

/// The word of a number, 32 random bits. *Source:* the integer hash `lowbias32` of Wellons, 2018, over either half.
pub fn word(number: u64) -> u32 {
    mixed(mixed((number >> 32) as u32) ^ number as u32)
}

/// As `mixed` in `cuda/include/random.cuh`.
fn mixed(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    x ^ (x >> 16)
}

/// Words of a row.
pub(crate) fn words_of_row(k: usize, bits: u32) -> usize {
    k.div_ceil(32 / field_bits(bits) as usize)
}

/// Draws outputs `range` of a matrix whose first word has the number `first`, and each row's one `words` more.
pub(super) fn rows(first: u64, words: usize, range: Range<usize>, k: usize, bits: u32, out: &mut [u8]) {
    let (field, mask, words) = (field_bits(bits), ((1u16 << bits) - 1) as u8, words as u64);
    for (i, codes) in range.zip(out.chunks_exact_mut(k.max(1))) {
        let of_row = first + i as u64 * words;
        for (codes, number) in codes.chunks_mut(32 / field as usize).zip(of_row..) {
            let word = word(number);
            codes.iter_mut().zip(0..).for_each(|(code, c)| *code = (word >> (c * field)) as u8 & mask);
        }
    }
}
