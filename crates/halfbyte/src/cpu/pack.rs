//! Packing: from the words of a file to the tiles of `cpu_n16`, at the speed of memory.
//!
//! ```text
//! for each block of panels, in parallel:
//!     if the codes lie in words of 2, 4 or 8 bits and every tile is whole:
//!         tile by tile: order the codes within each word, bring the words of 16 outputs side by side
//!     else, panel by panel:
//!         unpack rows to bytes, sort them by group, put them in words, or in those of two planes, and then as above
//!     each into a small buffer, and from there past the caches to its place
//! ```
//!
//! A tile's lane is 32 bits of one output, as a word of a file is, but for the order of the codes in it; so that the work
//! is shuffling whole vectors. It stands here, not in `layout`, because it is compiled for each instruction set. Each byte
//! is read once and written once. Ordinary stores would first read what they overwrite; stores past the caches do not,
//! and need whole lines, which is what the buffer is for.

mod stream;
mod words;

use super::isa::{Caps, Isa};
use crate::error::{Error, Result};
use crate::layout::codes::{Codes, NIBBLES};
use crate::layout::cpu_n16::{CpuN16, FILLER, Held, PANEL, columns_per_tile, planes, tile_bytes};
use crate::layout::places::{Places, runs};
use crate::layout::stored::StoredTensor;
use rayon::prelude::*;
use words::{Panels, Rows};

/// Packs tensors one below the other; `code_sums` for kernels that take activations with offsets.
///
/// The result is that of [`CpuN16::pack`], bit for bit. Errors: no tensor; tensors that differ in format, k or group
/// index; an instruction set that the processor does not have; memory that is short.
pub fn pack(caps: Caps, parts: &[&StoredTensor<'_>], code_sums: bool) -> Result<CpuN16> {
    const OP: &str = "pack";
    let first = parts.first().ok_or_else(|| Error::invalid(OP, "at least one tensor", "none"))?;
    if let Some(other) = parts.iter().find(|part| !first.continues(part)) {
        let describe = |part: &StoredTensor<'_>| format!("format {}, k {}", part.format(), part.k());
        let expected = format!("{} and the same group index everywhere", describe(first));
        return Err(Error::invalid(OP, expected, describe(other)));
    }
    let isa = Caps::detect().limited_to(caps.isa)?.isa;
    CpuN16::assemble(parts, code_sums, |places, held, out| Packing::new(isa, parts, (places, held)).fill(out))
}

/// Panels of a block at most: what they have of a row of words is a page or a good part of one.
const BLOCK_PANELS: usize = 128;

/// Panels that are unpacked to bytes together.
const BYTES_PANELS: usize = 4;

struct Packing<'a> {
    isa: Isa,
    parts: &'a [&'a StoredTensor<'a>],
    heights: Vec<usize>,
    places: &'a Places,
    held: Held,
    /// What is held of each code.
    of_codes: [u8; 256],
    /// Bits of the codes of files.
    bits: u32,
    k: usize,
}

impl<'a> Packing<'a> {
    fn new(isa: Isa, parts: &'a [&'a StoredTensor<'a>], (places, held): (&'a Places, Held)) -> Self {
        let heights = parts.iter().map(|part| part.n()).collect();
        Self {
            isa,
            parts,
            heights,
            places,
            held,
            of_codes: held.of_codes(),
            bits: parts[0].format().bits,
            k: parts[0].k(),
        }
    }

    /// Writes all tiles.
    fn fill(&self, out: &mut [u8]) {
        let panel_bytes = self.places.tiles * tile_bytes(self.held.bits);
        if out.is_empty() {
            return;
        }
        let n: usize = self.heights.iter().sum();
        // Several blocks a thread, so that none waits long for the last.
        let share = (out.len() / panel_bytes).div_ceil(4 * rayon::current_num_threads());
        let block = share.next_multiple_of(8).min(BLOCK_PANELS);
        out.par_chunks_mut(block * panel_bytes).enumerate().for_each_init(Room::default, |room, (at, mut out)| {
            let mut row = at * block * PANEL;
            let end = n.min(row + out.len() / panel_bytes * PANEL);
            while row < end {
                let (part, first, rows) = self.run(row, end);
                let mut panels = rows / PANEL;
                if panels == 0 || !self.words(part, first, &mut out[..panels * panel_bytes], room) {
                    // A panel that two tensors share is no place to end: what follows it may go the fast way again.
                    panels = panels.clamp(1, BYTES_PANELS);
                    let rows = row..end.min(row + panels * PANEL);
                    self.bytes(rows, &mut out[..panels * panel_bytes], room);
                }
                out = &mut std::mem::take(&mut out)[panels * panel_bytes..];
                row += panels * PANEL;
            }
            stream::finish(self.isa);
        });
    }

    /// The tensor that a row is in, which row of it that is, and how many follow before `end`.
    fn run(&self, row: usize, end: usize) -> (usize, usize, usize) {
        runs(&self.heights, row..end).next().unwrap_or((0, 0, 0))
    }

    /// Packs whole panels of one tensor, from its row `first` on, straight from its words. Returns false, having done
    /// nothing, if they cannot be.
    fn words(&self, part: usize, first: usize, out: &mut [u8], room: &mut Room) -> bool {
        let (isa, tiles, bits) = (self.isa, self.places.tiles, self.bits);
        let whole = self.k.is_multiple_of(columns_per_tile(bits));
        if self.places.columns.is_some() || !whole || self.held.bits != bits {
            return false;
        }
        let part = self.parts[part];
        let to = &mut Panels { isa, tiles, room: &mut room.tiles, out };
        match part.codes() {
            Codes::WordsDown(words) => words::down(isa, words, part.n(), first, bits, to),
            Codes::WordsAlong(words) => words::along(isa, &words[first * tiles..], bits, to),
            Codes::WordsAcross(words) if first.is_multiple_of(NIBBLES) => {
                words::across(isa, words, part.n(), first, to)
            }
            Codes::Bytes { codes, flip } => {
                let rows = Rows { codes: &codes[first * self.k..], stride: self.k, flip: *flip };
                words::bytes(isa, rows, bits, to);
            }
            _ => return false,
        }
        true
    }

    /// Packs panels by way of bytes.
    fn bytes(&self, rows: std::ops::Range<usize>, out: &mut [u8], room: &mut Room) {
        let Held { bits, base, table } = self.held;
        let per_tile = columns_per_tile(bits);
        let (k, places) = (self.k, self.places.tiles * per_tile);
        let Room { codes, placed, tiles } = room;
        codes.resize(rows.len() * k, 0);
        let mut free = codes.as_mut_slice();
        for (part, first, rows) in runs(&self.heights, rows.clone()) {
            let (codes, rest) = std::mem::take(&mut free).split_at_mut(rows * k);
            let part = self.parts[part];
            part.codes().rows(first..first + rows, [part.n(), k], self.bits, codes);
            free = rest;
        }
        // Rows that fill up the last panel stay 0.
        placed.clear();
        placed.resize(rows.len().next_multiple_of(PANEL) * places, 0);
        for (placed, codes) in placed.chunks_exact_mut(places).zip(codes.chunks_exact(k)) {
            match &self.places.columns {
                None if table.is_none() => {
                    placed.iter_mut().zip(codes).for_each(|(placed, code)| *placed = code.wrapping_sub(base));
                }
                None => placed.iter_mut().zip(codes).for_each(|(placed, &code)| *placed = self.of_codes[code as usize]),
                Some(columns) => {
                    for (placed, &column) in placed.iter_mut().zip(columns).filter(|&(_, &column)| column != FILLER) {
                        *placed = self.of_codes[codes[column as usize] as usize];
                    }
                }
            }
        }
        let rows = Rows { codes: placed, stride: places, flip: 0 };
        let to = &mut Panels { isa: self.isa, tiles: self.places.tiles, room: tiles, out };
        match planes(bits) {
            (4, high @ 1..) => words::planes(self.isa, rows, high, to),
            _ => words::bytes(self.isa, rows, bits, to),
        }
    }
}

/// Buffers of one thread.
#[derive(Default)]
struct Room {
    tiles: Vec<u32>,
    codes: Vec<u8>,
    placed: Vec<u8>,
}
