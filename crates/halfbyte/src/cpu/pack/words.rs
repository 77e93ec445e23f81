//! From words of files to tiles: loops that the compiler vectorises for each instruction set.

use super::stream;
use crate::cpu::isa::{Isa, per_isa};
use crate::layout::codes::{NIBBLES, OUTPUT_OF_NIBBLE};
use crate::layout::cpu_n16::{PANEL, columns_per_tile, pressed, tile_bytes};

/// Tiles of a panel that are made before they are stored.
const RUN: usize = 8;

/// Rows of words ahead of the one at work that are asked for.
const ROWS_AHEAD: usize = 2;

/// Panels on their way: runs of [`RUN`] tiles of each lie in `room` before they go to `out`.
pub(super) struct Panels<'a> {
    pub isa: Isa,
    pub tiles: usize,
    pub room: &'a mut Vec<u32>,
    pub out: &'a mut [u8],
}

impl Panels<'_> {
    #[inline(always)]
    fn count(&self) -> usize {
        self.out.len() / (self.tiles * 64)
    }

    /// Tile `t` of the run of panel `p`.
    #[inline(always)]
    fn tile(&mut self, p: usize, t: usize) -> &mut [u32] {
        &mut self.room[(p * RUN + t) * PANEL..][..PANEL]
    }

    /// Room for a run of every panel.
    #[inline(always)]
    fn make_room(&mut self) {
        self.room.resize(self.count() * RUN * PANEL, 0);
    }

    /// Stores the run of every panel, `run` tiles from `first` on.
    #[inline(always)]
    fn store(&mut self, first: usize, run: usize) {
        for p in 0..self.count() {
            let to = &mut self.out[(p * self.tiles + first) * 64..][..run * 64];
            stream::copy(self.isa, &self.room[p * RUN * PANEL..][..run * PANEL], to);
        }
    }
}

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
    /// [`crate::layout::codes::Codes::WordsDown`]: words `[tiles, n]`, the outputs from `row` on.
    pub(super) fn down(words: &[u32], n: usize, row: usize, bits: u32, to: &mut Panels<'_>) {
        let swaps = swaps(bits);
        to.make_room();
        for first in (0..to.tiles).step_by(RUN) {
            let run = RUN.min(to.tiles - first);
            for t in 0..run {
                let at = (first + t) * n + row;
                for (p, words_of_panel) in words[at..][..to.count() * PANEL].as_chunks::<PANEL>().0.iter().enumerate() {
                    stream::prefetch(words, at + ROWS_AHEAD * n + p * PANEL);
                    for (to, &word) in to.tile(p, t).iter_mut().zip(words_of_panel) {
                        *to = ordered(word, swaps);
                    }
                }
            }
            to.store(first, run);
        }
    }
}

per_isa! {
    /// [`crate::layout::codes::Codes::WordsAlong`]: words `[16 · panels, tiles]`, and what follows them.
    pub(super) fn along(words: &[u32], bits: u32, to: &mut Panels<'_>) {
        let (tiles, swaps) = (to.tiles, swaps(bits));
        for (panel, out) in to.out.chunks_exact_mut(tiles * 64).enumerate() {
            for first in (0..tiles).step_by(16) {
                let run = 16.min(tiles - first);
                let mut block = [0; 256];
                for (i, row) in block.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let at = (panel * PANEL + i) * tiles + first;
                    // The same place of the next panel, as rows are too short to look ahead along them.
                    stream::prefetch(words, at + PANEL * tiles);
                    match words[at..].first_chunk::<16>() {
                        Some(words) if run == 16 => *row = words.map(|word| ordered(word, swaps)),
                        _ => row.iter_mut().zip(&words[at..][..run]).for_each(|(to, &w)| *to = ordered(w, swaps)),
                    }
                }
                let tiles = transposed(&block);
                stream::copy(to.isa, &tiles[..run * PANEL], &mut out[first * 64..][..run * 64]);
            }
        }
    }
}

per_isa! {
    /// [`crate::layout::codes::Codes::WordsAcross`]: words `[8 · tiles, n/8]`, the outputs from `row` on, which must be the
    /// first of a word.
    pub(super) fn across(words: &[u32], n: usize, row: usize, to: &mut Panels<'_>) {
        /// Words of a row at a time: those of eight panels.
        const COLUMNS: usize = 16;
        /// Which input goes where in a lane.
        const INPUTS: [usize; NIBBLES] = [0, 4, 1, 5, 2, 6, 3, 7];
        let (panels, width) = (to.count(), n / NIBBLES);
        to.make_room();
        for first in (0..to.tiles).step_by(RUN) {
            let run = RUN.min(to.tiles - first);
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
                        to.tile(p + i, t).copy_from_slice(tile);
                    }
                }
            }
            to.store(first, run);
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

/// Codes in bytes: rows of `tiles · columns a tile` codes, from one to the next at a distance of `stride`.
pub(super) struct Rows<'a> {
    pub codes: &'a [u8],
    pub stride: usize,
    /// Bits to invert.
    pub flip: u8,
}

per_isa! {
    /// Codes that take a byte each, and `bits` bits in a tile, which are 2, 3, 4 or 8.
    pub(super) fn bytes(rows: Rows<'_>, bits: u32, to: &mut Panels<'_>) {
        let (tiles, per_tile, tile_bytes) = (to.tiles, columns_per_tile(bits), tile_bytes(bits));
        let flip = u32::from_ne_bytes([rows.flip; 4]);
        // Of 3 bits those of 4, two a tile, are pressed together.
        let at_a_time = if bits == 3 { 8 } else { 16 };
        for (panel, out) in to.out.chunks_exact_mut(tiles * tile_bytes).enumerate() {
            for first in (0..tiles).step_by(at_a_time) {
                let run = at_a_time.min(tiles - first);
                let mut block = [0u32; 256];
                for (i, row) in block.as_chunks_mut::<16>().0.iter_mut().enumerate() {
                    let from = (panel * PANEL + i) * rows.stride + first * per_tile;
                    let codes = rows.codes[from..][..run * per_tile].as_chunks::<4>().0;
                    match bits {
                        8 => words_of::<1>(codes, flip, row),
                        3 | 4 => words_of::<2>(codes, flip, row),
                        _ => words_of::<4>(codes, flip, row),
                    }
                }
                let mut tiles = transposed(&block);
                if bits == 3 {
                    tiles = all_pressed(&tiles);
                }
                let len = run * tile_bytes;
                stream::copy(to.isa, &tiles[..len / 4], &mut out[first * tile_bytes..][..len]);
            }
        }
    }
}

per_isa! {
    /// Codes that take a byte each, their low nibbles and `high` bits above in planes of a tile.
    pub(super) fn planes(rows: Rows<'_>, high: u32, to: &mut Panels<'_>) {
        match high {
            1 => planes_of::<1>(&rows, to),
            _ => planes_of::<2>(&rows, to),
        }
    }
}

#[inline(always)]
fn planes_of<const HIGH: usize>(rows: &Rows<'_>, to: &mut Panels<'_>) {
    /// Columns at a time: 16 words of nibbles.
    const COLUMNS: usize = 128;
    let (per_tile, lows) = const { (32 / HIGH, 4 / HIGH) };
    let (tile, mask) = (const { (4 / HIGH + 1) * PANEL }, const { ((1u32 << HIGH) - 1) * 0x0101_0101 });
    let tiles = to.tiles;
    for (panel, out) in to.out.chunks_exact_mut(tiles * tile * 4).enumerate() {
        for first in (0..tiles).step_by(COLUMNS / per_tile) {
            let run = (COLUMNS / per_tile).min(tiles - first);
            let (mut low, mut high) = ([0u32; 256], [0u32; 256]);
            let of_rows = low.as_chunks_mut::<16>().0.iter_mut().zip(high.as_chunks_mut::<16>().0);
            for (i, (low, high)) in of_rows.enumerate() {
                let from = (panel * PANEL + i) * rows.stride + first * per_tile;
                let codes = rows.codes[from..][..run * per_tile].as_chunks::<4>().0;
                for (word, [a, b]) in low.iter_mut().zip(codes.as_chunks::<2>().0) {
                    let [a, b] = [a, b].map(|&four| u32::from_le_bytes(four) & 0x0f0f_0f0f);
                    *word = a | b << 4;
                }
                for (word, codes) in high.iter_mut().zip(codes.chunks_exact(8 / HIGH)) {
                    let fields = codes.iter().map(|&four| u32::from_le_bytes(four) >> 4 & mask);
                    *word = fields.enumerate().fold(0, |word, (i, field)| word | field << (i * HIGH));
                }
            }
            let (low, high) = (transposed(&low), transposed(&high));
            let mut block = [0u32; (16 + 8) * PANEL];
            for (t, block) in block.chunks_exact_mut(tile).enumerate().take(run) {
                let (of_low, of_high) = block.split_at_mut(lows * PANEL);
                of_low.copy_from_slice(&low[t * lows * PANEL..][..lows * PANEL]);
                of_high.copy_from_slice(&high[t * PANEL..][..PANEL]);
            }
            stream::copy(to.isa, &block[..run * tile], &mut out[first * tile * 4..][..run * tile * 4]);
        }
    }
}

/// Sixteen tiles of 4 bits that hold 3, as eight of 3 bits.
#[inline(always)]
fn all_pressed(tiles: &[u32; 256]) -> [u32; 256] {
    /// Words of a tile of 3 bits.
    const WORDS: usize = PANEL * 3 / 2;
    let mut out = [0; 256];
    for (two, out) in tiles.as_chunks::<{ 2 * PANEL }>().0.iter().zip(out.as_chunks_mut::<WORDS>().0) {
        let mut highs = [0u16; PANEL];
        for lane in 0..PANEL {
            (out[lane], highs[lane]) = pressed([two[lane], two[PANEL + lane]]);
        }
        for (out, [a, b]) in out[PANEL..].iter_mut().zip(highs.as_chunks::<2>().0) {
            *out = u32::from(*a) | u32::from(*b) << 16;
        }
    }
    out
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
