//! A stream of codes down each column of 32-bit words: one word for 32/bits inputs of an output. GPTQ's `qweight`.
//!
//! ```text
//! word [t, i], 4 bits:  31 ………………………………………………… 0
//!                       │8t+7│8t+6│ … │8t+1│8t│   inputs of output i
//! ```

use std::ops::Range;

/// Unpacks outputs `range` of words `[k·bits/32, n]`.
pub(super) fn rows(words: &[u32], range: Range<usize>, [n, k]: [usize; 2], bits: u32, out: &mut [u8]) {
    let (per_word, mask) = (32 / bits as usize, ((1u16 << bits) - 1) as u8);
    // Words of neighbouring outputs share a cache line, so that rows of words come before outputs.
    for (t, words) in words.chunks_exact(n.max(1)).enumerate() {
        for (i, &word) in words[range.clone()].iter().enumerate() {
            let codes = &mut out[i * k + t * per_word..][..per_word];
            codes.iter_mut().zip(0..).for_each(|(code, c)| *code = (word >> (c * bits)) as u8 & mask);
        }
    }
}
