//! A stream of codes along each row of 32-bit words, rows beginning with a word of their own. The `weight_packed` of
//! compressed-tensors, and the `qweight` of AWQ's gemv.
//!
//! ```text
//! word [i, t], 4 bits:  31 ………………………………………………… 0
//!                       │8t+7│8t+6│ … │8t+1│8t│   inputs of output i; bits beyond the last input mean nothing
//! ```

use std::ops::Range;

/// Unpacks outputs `range` of words `[n, ceil(k·bits/32)]`.
pub(super) fn rows(words: &[u32], range: Range<usize>, k: usize, bits: u32, out: &mut [u8]) {
    let (per_word, mask) = (32 / bits as usize, ((1u16 << bits) - 1) as u8);
    let per_row = k.div_ceil(per_word);
    for (i, codes) in range.zip(out.chunks_exact_mut(k.max(1))) {
        for (codes, &word) in codes.chunks_mut(per_word).zip(&words[i * per_row..]) {
            codes.iter_mut().zip(0..).for_each(|(code, c)| *code = (word >> (c * bits)) as u8 & mask);
        }
    }
}
