//! Codes of 6 bits in two planes, from and to the words that codes of 8 bits would have.
//!
//! ```text
//! unit [half 0..2] { low [lane 0..32][j 0..4], high [lane 0..32][i 0..2] }       k16 step s = 4 · half + j
//! low:   the lower 4 bits of the two words of step s: of the even word in the lower nibbles, of the odd one in the upper
//! high:  the upper 2 bits of steps 4 · half + 2i and the next one: bits 2t, 2t + 1 of each byte; t = 0, 1: the words of the first
//! ```

/// Where the words of 8-bit codes of a step lie: the even one; the odd one is the next.
fn even(warp: usize, step: usize, lane: usize) -> usize {
    ((warp * 4 + step / 2) * 32 + lane) * 4 + 2 * (step % 2)
}

/// Places of the low and the high word of a warp, step and lane, in words; and how far the bits of the step's even word lie in it.
fn place(warp: usize, step: usize, lane: usize) -> ([usize; 2], u32) {
    let (half, j) = (step / 4, step % 4);
    let first = (2 * warp + half) * 192;
    ([first + 4 * lane + j, first + 128 + 2 * lane + j / 2], 4 * (j as u32 % 2))
}

fn steps() -> impl Iterator<Item = [usize; 3]> {
    (0..4 * 8 * 32).map(|i| [i / 256, i / 32 % 8, i % 32])
}

const LOW: u32 = 0x0f0f_0f0f;
const HIGH: u32 = 0x0303_0303;

/// Words of codes of 8 bits below 64 to those of two planes.
pub(super) fn fold(words: &[u32; 2048]) -> [u32; 1536] {
    let mut out = [0; 1536];
    for [warp, step, lane] in steps() {
        let ([low, high], shift) = place(warp, step, lane);
        let [even, odd] = [0, 1].map(|i| words[even(warp, step, lane) + i]);
        out[low] = even & LOW | (odd & LOW) << 4;
        out[high] |= (even >> 4 & HIGH) << shift | (odd >> 4 & HIGH) << (shift + 2);
    }
    out
}

/// And back.
pub(super) fn unfold(words: &[u32]) -> [u32; 2048] {
    let mut out = [0; 2048];
    for [warp, step, lane] in steps() {
        let ([low, high], shift) = place(warp, step, lane);
        let upper = words[high] >> shift;
        let at = even(warp, step, lane);
        out[at] = words[low] & LOW | (upper & HIGH) << 4;
        out[at + 1] = words[low] >> 4 & LOW | (upper >> 2 & HIGH) << 4;
    }
    out
}
