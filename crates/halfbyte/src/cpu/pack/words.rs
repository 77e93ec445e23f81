//! From words of files to tiles: loops that the compiler vectorises for each instruction set.

use super::stream;
use crate::cpu::isa::{Isa, per_isa};
use crate::layout::codes::{NIBBLES, OUTPUT_OF_NIBBLE};
use crate::layout::cpu_n16::PANEL;

/// Tiles of a panel that are made before they are stored.
const RUN: usize = 8;

/// Rows of words ahead of the one at work that are asked for.
const ROWS_AHEAD: usize = 2;

/// Bytes ahead along a row that are asked for.
const WORDS_AHEAD: usize = 128;

/// The order of codes in a word of a file, ascending, to that in a tile's lane, byte by byte: bits that change places.
fn swaps(bits: u32) -> [(u32, u32); 2] {
    match bits {
        // Codes 0 1 2 3 4 5 6 7 to 0 4 1 5 2 6 3 7: the middle bytes, then the middle nibbles of each half.
        4 => [(8, 0x0000_ff00), (4, 0x00f0_00f0)],
        // Code 4i + b to field 4b + i: a transposition of 4 × 4.
        2 => [(12, 0x0000_f0f0), (6, 0x00cc_00cc)],
        _ => [(0, 0); 2],
    }
}

#[inline(always)]
fn ordered(word: u32, swaps: [(u32, u32); 2]) -> u32 {
    swaps.into_iter().fold(word, |x, (shift, mask)| {
        let changed = (x ^ (x >> shift)) & mask;
        x ^ changed ^ (changed << shift)
    })
}

/// A perfect shuffle: the two halves of a slice, element by element in turn. Transposing `[2^a, 2^b]` takes a of them.
#[inline(always)]
fn shuffle<const N: usize>(from: &[u32; N]) -> [u32; N] {
    let mut to = [0; N];
    for i in 0..N / 2 {
        to[2 * i] = from[i];
        to[2 * i + 1] = from[i + N / 2];
    }
    to
}

/// 16 words of each of 16 outputs, to 16 tiles.
#[inline(always)]
fn transposed(words: &[u32; 256]) -> [u32; 256] {
    shuffle(&shuffle(&shuffle(&shuffle(words))))
}

per_isa! {
    /// Words `[tiles, n]` of outputs from `row` on, to panels.
    fn down_in(
        stores: Isa, words: &[u32], n: usize, row: usize, bits: u32, tiles: usize, room: &mut [u32], out: &mut [u8],
    ) {
        let (panels, swaps) = (out.len() / (tiles * 64), swaps(bits));
        for first in (0..tiles).step_by(RUN) {
            let run = RUN.min(tiles - first);
            for t in 0..run {
                let at = (first + t) * n + row;
                let line = words[at..][..panels * PANEL].as_chunks::<PANEL>().0;
                for (p, words_of_panel) in line.iter().enumerate() {
                    stream::prefetch(words, at + ROWS_AHEAD * n + p * PANEL);
                    let tile = &mut room[(p * RUN + t) * PANEL..][..PANEL];
                    for (to, &word) in tile.iter_mut().zip(words_of_panel) {
                        *to = ordered(word, swaps);
                    }
                }
            }
            for p in 0..panels {
                let to = &mut out[(p * tiles + first) * 64..][..run * 64];
                stream::copy(stores, &room[p * RUN * PANEL..][..run * PANEL], to);
            }
        }
    }
}

/// [`crate::layout::codes::Codes::WordsDown`].
pub(super) fn down(
    isa: Isa,
    words: &[u32],
    n: usize,
    row: usize,
    bits: u32,
    tiles: usize,
    room: &mut Vec<u32>,
    out: &mut [u8],
) {
    room.resize(out.len() / (tiles * 64) * RUN * PANEL, 0);
    down_in(isa, isa, words, n, row, bits, tiles, room, out);
}

per_isa! {
    /// Words `[16 · panels, tiles]`, to panels.
    fn along_in(stores: Isa, words: &[u32], bits: u32, tiles: usize, out: &mut [u8]) {
        let swaps = swaps(bits);
        for (words, out) in words.chunks_exact(PANEL * tiles).zip(out.chunks_exact_mut(tiles * 64)) {
            for first in (0..tiles).step_by(16) {
                let run = 16.min(tiles - first);
                let mut block = [0; 256];
                for (i, row) in block.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let at = i * tiles + first;
                    stream::prefetch(words, at + WORDS_AHEAD);
                    match words[at..].first_chunk::<16>() {
                        Some(words) if run == 16 => *row = words.map(|word| ordered(word, swaps)),
                        _ => row.iter_mut().zip(&words[at..][..run]).for_each(|(to, &w)| *to = ordered(w, swaps)),
                    }
                }
                let tiles = transposed(&block);
                stream::copy(stores, &tiles[..run * PANEL], &mut out[first * 64..][..run * 64]);
            }
        }
    }
}

/// [`crate::layout::codes::Codes::WordsAlong`], from the first row of a panel on.
pub(super) fn along(isa: Isa, words: &[u32], bits: u32, tiles: usize, out: &mut [u8]) {
    along_in(isa, isa, words, bits, tiles, out);
}

per_isa! {
    /// Words `[8 · tiles, n/8]` of outputs from `row` on, to panels.
    fn across_in(stores: Isa, words: &[u32], n: usize, row: usize, tiles: usize, room: &mut [u32], out: &mut [u8]) {
        /// Words of a row at a time: those of eight panels.
        const COLUMNS: usize = 16;
        /// Which input goes where in a lane.
        const INPUTS: [usize; NIBBLES] = [0, 4, 1, 5, 2, 6, 3, 7];
        let (panels, width) = (out.len() / (tiles * 64), n / NIBBLES);
        for first in (0..tiles).step_by(RUN) {
            let run = RUN.min(tiles - first);
            for t in 0..run {
                for p in (0..panels).step_by(8) {
                    let columns = COLUMNS.min((panels - p) * 2);
                    let mut of_input = [[0u32; COLUMNS]; NIBBLES];
                    for (to, input) in of_input.iter_mut().zip(INPUTS) {
                        let at = ((first + t) * NIBBLES + input) * width + (row / NIBBLES) + 2 * p;
                        stream::prefetch(words, at + NIBBLES * width);
                        match words[at..].first_chunk::<COLUMNS>() {
                            Some(words) if columns == COLUMNS => *to = *words,
                            _ => to[..columns].copy_from_slice(&words[at..][..columns]),
                        }
                    }
                    let of_nibble = nibbles_transposed(of_input);
                    let mut of_output = [0u32; COLUMNS * NIBBLES];
                    for (words, output) in of_nibble.iter().zip(OUTPUT_OF_NIBBLE) {
                        of_output[output * COLUMNS..][..COLUMNS].copy_from_slice(words);
                    }
                    let tiles = shuffle(&shuffle(&shuffle(&of_output)));
                    for (i, tile) in tiles.as_chunks::<PANEL>().0[..columns / 2].iter().enumerate() {
                        room[((p + i) * RUN + t) * PANEL..][..PANEL].copy_from_slice(tile);
                    }
                }
            }
            for p in 0..panels {
                let to = &mut out[(p * tiles + first) * 64..][..run * 64];
                stream::copy(stores, &room[p * RUN * PANEL..][..run * PANEL], to);
            }
        }
    }
}

/// Nibble i of word j becomes nibble j of word i, in every column: halves change places, then quarters, then eighths.
#[inline(always)]
fn nibbles_transposed(mut words: [[u32; 16]; NIBBLES]) -> [[u32; 16]; NIBBLES] {
    for (distance, shift, mask) in [(4, 16, 0x0000_ffff), (2, 8, 0x00ff_00ff), (1, 4, 0x0f0f_0f0f)] {
        for i in (0..NIBBLES).filter(|i| i & distance == 0) {
            for c in 0..16 {
                let (a, b) = (words[i][c], words[i + distance][c]);
                let changed = ((a >> shift) ^ b) & mask;
                words[i][c] = a ^ (changed << shift);
                words[i + distance][c] = b ^ changed;
            }
        }
    }
    words
}

/// [`crate::layout::codes::Codes::WordsAcross`]; `row` must be the first output of a word.
pub(super) fn across(isa: Isa, words: &[u32], n: usize, row: usize, tiles: usize, room: &mut Vec<u32>, out: &mut [u8]) {
    room.resize(out.len() / (tiles * 64) * RUN * PANEL, 0);
    across_in(isa, isa, words, n, row, tiles, room, out);
}

per_isa! {
    /// Codes in bytes `[16 · panels, tiles · columns a tile]`, rows at a distance of `stride`, to panels.
    fn bytes_in(stores: Isa, codes: &[u8], stride: usize, flip: u8, field: u32, tiles: usize, out: &mut [u8]) {
        let fields = 8 / field as usize;
        let flip = u32::from_ne_bytes([flip; 4]);
        for (panel, out) in out.chunks_exact_mut(tiles * 64).enumerate() {
            for first in (0..tiles).step_by(16) {
                let run = 16.min(tiles - first);
                let mut block = [0u32; 256];
                for (i, row) in block.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let from = (panel * PANEL + i) * stride + first * 4 * fields;
                    let codes = codes[from..][..run * 4 * fields].as_chunks::<4>().0;
                    match field {
                        8 => words_of::<1>(codes, flip, row),
                        4 => words_of::<2>(codes, flip, row),
                        _ => words_of::<4>(codes, flip, row),
                    }
                }
                let tiles = transposed(&block);
                stream::copy(stores, &tiles[..run * PANEL], &mut out[first * 64..][..run * 64]);
            }
        }
    }
}

/// Each `FIELDS` times four codes to a lane: the first four in the lowest fields of its bytes.
#[inline(always)]
fn words_of<const FIELDS: usize>(codes: &[[u8; 4]], flip: u32, words: &mut [u32; 16]) {
    for (word, codes) in words.iter_mut().zip(codes.as_chunks::<FIELDS>().0) {
        *word = 0;
        for (i, &four) in codes.iter().enumerate() {
            *word |= (u32::from_le_bytes(four) ^ flip) << (i * 8 / FIELDS);
        }
    }
}

/// [`crate::layout::codes::Codes::Bytes`], from the first row of a panel on.
pub(super) fn bytes(isa: Isa, codes: &[u8], stride: usize, flip: u8, field: u32, tiles: usize, out: &mut [u8]) {
    bytes_in(isa, isa, codes, stride, flip, field, tiles, out);
}
