//! Codes in planes: those of 2 and 3 bits from and to the words that codes of 4 bits would have, those of 5 and 6 bits the words of 8.
//!
//! ```text
//! 2 and 3 bits: unit [half 0..2] { low [lane 0..32][j 0..2], of 3 bits high [lane 0..32] }
//! low:   the lower 2 bits of the words of the k16 steps 4 · half + 2j and the next one, in bits 0, 1 and 2, 3 of each nibble
//! high:  the upper bits of steps 4 · half .. 4 · half + 3, in bits 0 .. 3 of each nibble
//!
//! 5 and 6 bits: unit [half 0..2] { low [lane 0..32][j 0..4], high [lane 0..32], of 6 bits [i 0..2] }     k16 step s = 4 · half + j
//! low:   the lower 4 bits of the two words of step s: of the even word in the lower nibbles, of the odd one in the upper
//! high:  of 6 bits the upper 2 bits of steps 4 · half + 2i and the next one: bits 2t, 2t + 1 of each byte; t = 0, 1: the words of the first
//!        of 5 bits the upper bit of steps 4 · half .. 4 · half + 3: bit t of each byte; t = 2j, 2j + 1: the words of step j
//! ```

/// Where the words of 8-bit codes of a step lie: the even one; the odd one is the next.
fn even(warp: usize, step: usize, lane: usize) -> usize {
    ((warp * 4 + step / 2) * 32 + lane) * 4 + 2 * (step % 2)
}

/// Places of the low and the high word of a warp, step and lane, in words; and how far the bits of the step's even word lie in it.
fn place(warp: usize, step: usize, lane: usize, bits: u32) -> ([usize; 2], u32) {
    let (half, j) = (step / 4, step % 4);
    let upper = bits as usize - 4; // words of a lane, and bits of each code
    let first = (2 * warp + half) * 32 * bits as usize;
    let per_word = 4 / upper; // steps
    ([first + 4 * lane + j, first + 128 + upper * lane + j / per_word], (2 * upper * (j % per_word)) as u32)
}

fn steps() -> impl Iterator<Item = [usize; 3]> {
    (0..4 * 8 * 32).map(|i| [i / 256, i / 32 % 8, i % 32])
}

const LOW: u32 = 0x0f0f_0f0f;

/// Of each byte the bits above the lowest four.
fn high(bits: u32) -> u32 {
    0x0101_0101 * ((1 << (bits - 4)) - 1)
}

/// Words of codes of 8 bits below 32 or 64 to those of two planes, of 5 or 6 `bits`.
pub(super) fn fold(words: &[u32; 2048], bits: u32) -> Vec<u32> {
    let mut out = vec![0; 256 * bits as usize];
    for [warp, step, lane] in steps() {
        let ([low, at], shift) = place(warp, step, lane, bits);
        let [even, odd] = [0, 1].map(|i| words[even(warp, step, lane) + i]);
        out[low] = even & LOW | (odd & LOW) << 4;
        out[at] |= (even >> 4 & high(bits)) << shift | (odd >> 4 & high(bits)) << (shift + bits - 4);
    }
    out
}

/// And back.
pub(super) fn unfold(words: &[u32], bits: u32) -> [u32; 2048] {
    let mut out = [0; 2048];
    for [warp, step, lane] in steps() {
        let ([low, at], shift) = place(warp, step, lane, bits);
        let upper = [0, bits - 4].map(|odd| (words[at] >> (shift + odd) & high(bits)) << 4);
        let to = even(warp, step, lane);
        out[to] = words[low] & LOW | upper[0];
        out[to + 1] = words[low] >> 4 & LOW | upper[1];
    }
    out
}

const LOW_OF_NIBBLES: u32 = 0x3333_3333;
const BIT_OF_NIBBLES: u32 = 0x1111_1111;

/// Of the 8 halves of an atom and their lanes, in words: where those of 4-bit codes lie, the low ones, and the high one.
fn halves(bits: u32) -> impl Iterator<Item = [usize; 3]> {
    let of_half = 32 * bits as usize;
    (0..8 * 32).map(move |i| [4 * i, i / 32 * of_half + i % 32 * 2, i / 32 * of_half + 64 + i % 32])
}

/// Words of 4-bit codes below 4 or 8 to those of planes, of 2 or 3 `bits`.
pub(super) fn fold_nibbles(words: &[u32; 1024], bits: u32) -> Vec<u32> {
    let mut out = vec![0; 256 * bits as usize];
    for [from, low, high] in halves(bits) {
        for (j, word) in words[from..from + 4].iter().enumerate() {
            out[low + j / 2] |= (word & LOW_OF_NIBBLES) << (2 * (j % 2));
            if bits == 3 {
                out[high] |= (word >> 2 & BIT_OF_NIBBLES) << j;
            }
        }
    }
    out
}

/// And back.
pub(super) fn unfold_nibbles(words: &[u32], bits: u32) -> [u32; 1024] {
    let mut out = [0; 1024];
    for [to, low, high] in halves(bits) {
        for j in 0..4 {
            let upper = if bits == 3 { words[high] >> j & BIT_OF_NIBBLES } else { 0 };
            out[to + j] = words[low + j / 2] >> (2 * (j % 2)) & LOW_OF_NIBBLES | upper << 2;
        }
    }
    out
}
