//! Eight outputs of one input in each 32-bit word, interleaved. The `qweight` of AWQ's gemm.
//!
//! ```text
//! word [j, c]:  31 ……………………………………………………………………………………………………… 0
//!               │8c+7│8c+5│8c+3│8c+1│8c+6│8c+4│8c+2│8c│   outputs of input j
//! ```

use std::ops::Range;

/// Outputs a word.
pub const NIBBLES: usize = 8;

/// Output of eight that a nibble holds, the lowest nibble first.
pub const OUTPUT_OF_NIBBLE: [usize; NIBBLES] = [0, 2, 4, 6, 1, 3, 5, 7];

/// Unpacks outputs `range` of words `[k, n/8]`.
pub(super) fn rows(words: &[u32], range: Range<usize>, [n, k]: [usize; 2], out: &mut [u8]) {
    if range.is_empty() {
        return;
    }
    let (first, last) = (range.start / NIBBLES, range.end.div_ceil(NIBBLES));
    for (j, words) in words.chunks_exact((n / NIBBLES).max(1)).enumerate() {
        for (c, &word) in (first..last).zip(&words[first..last]) {
            for (nibble, output) in OUTPUT_OF_NIBBLE.into_iter().enumerate() {
                let i = c * NIBBLES + output;
                if range.contains(&i) {
                    out[(i - range.start) * k + j] = (word >> (4 * nibble) & 15) as u8;
                }
            }
        }
    }
}
