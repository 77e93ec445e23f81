//! Sums of products in AMX tiles: 32 rows by two panels.
//!
//! ```text
//! x of a block → tiles, [16 rows][step][16][64]             whatever its rows are made of; past the last column 0
//! for each span of panels that stays in a cache, for each 32 rows, for each two panels:
//!     sums = Σ x·w                                          tdpbusd, u8 × i8, over all of k
//!     y = epilogue(sums + what zero points and bias add)
//! ```
//!
//! 64 columns of a panel are a tile as they lie. What is left of k is copied to a tile that zeros fill.

use super::{Placed, Product, SPAN_BYTES};
use crate::cpu::x86::amx::{ROW_BYTES, ROWS, Set, Tiles};
use crate::layout::Lines;
use crate::layout::cpu_int8::{PANEL, QUAD};
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of a tile.
const TILE: usize = ROWS * ROW_BYTES;

/// Fewer rows of a block leave tiles empty.
const LEAST_ROWS: usize = ROWS;

/// Fewer columns are multiplied as fast as they are copied and their sums are stored: two tiles.
const LEAST_QUADS: usize = 2 * ROWS;

thread_local! {
    /// Rows of a block in tiles.
    static TILES: RefCell<Lines> = RefCell::default();
}

/// Sums of 32 rows and outputs.
#[repr(C, align(64))]
struct Sums([[i32; 2 * PANEL]; 2 * ROWS]);

/// Whether so many rows of a block are multiplied faster in tiles, on a processor that has them.
pub(super) fn pays(rows: usize, quads: usize) -> bool {
    rows >= LEAST_ROWS && quads >= LEAST_QUADS
}

/// Multiplies the rows that begin at `starts`, `first` the number of the first of them, by panels; see [`Product::tiles`].
pub(super) fn tiles(product: &Product<'_>, x: &Placed<'_>, starts: &[usize], first: usize, panels: Range<usize>) {
    let (w, quads) = (product.w, product.w.quads());
    let (steps, whole) = (quads.div_ceil(ROWS), quads / ROWS);
    let row_tiles = starts.len().div_ceil(ROWS);
    TILES.with_borrow_mut(|buffer| {
        buffer.ensure((row_tiles * steps + 2) * TILE);
        let (gathered, rest) = buffer.as_mut_slice::<u8>().split_at_mut(row_tiles * steps * TILE);
        gather(x, starts, quads, gathered);
        let rest: &mut [i8] = bytemuck::cast_slice_mut(&mut rest[..2 * TILE]);
        rest.fill(0);
        let mut sums = Sums([[0; 2 * PANEL]; 2 * ROWS]);
        // SAFETY: the device is one with AMX.
        let tiles = unsafe { Tiles::new(ROW_BYTES) };
        let across = (SPAN_BYTES / w.panel_len().max(1)).max(1).next_multiple_of(2);
        for span in panels.clone().step_by(across) {
            let span = span..panels.end.min(span + across);
            for (row_tile, rows) in (0..row_tiles).step_by(2).zip(starts.chunks(2 * ROWS)) {
                let second = (row_tile + 1).min(row_tiles - 1);
                let x_tiles = [row_tile, second].map(|t| &gathered[t * steps * TILE..][..steps * TILE]);
                for panel in span.clone().step_by(2) {
                    let width = (span.end - panel).min(2);
                    let codes = [panel, panel + width - 1].map(|p| &w.codes()[p * w.panel_len()..][..w.panel_len()]);
                    tiles.zero(Set::First);
                    tiles.zero(Set::Second);
                    if whole > 0 {
                        // SAFETY: both operands have that many tiles.
                        unsafe {
                            tiles.multiply_unsigned(x_tiles.map(<[u8]>::as_ptr), codes.map(<[i8]>::as_ptr), whole)
                        };
                    }
                    if steps > whole {
                        let left = quads % ROWS * QUAD * PANEL;
                        for (rest, codes) in rest.chunks_exact_mut(TILE).zip(codes) {
                            rest[..left].copy_from_slice(&codes[whole * TILE..][..left]);
                        }
                        let (x, w) =
                            (x_tiles.map(|x| x[whole * TILE..].as_ptr()), [rest.as_ptr(), rest[TILE..].as_ptr()]);
                        // SAFETY: one tile of each.
                        unsafe { tiles.multiply_unsigned(x, w, 1) };
                    }
                    tiles.store_all(&mut sums.0);
                    let c = sums.0.as_flattened_mut();
                    if width == 1 {
                        // One panel beside the other again.
                        for r in 1..rows.len() {
                            c.copy_within(r * 2 * PANEL..r * 2 * PANEL + PANEL, r * PANEL);
                        }
                    }
                    let size = [rows.len(), width * PANEL];
                    let c = &mut c[..size[0] * size[1]];
                    // SAFETY: tasks cover disjoint rows and panels.
                    unsafe { product.output.store([first + row_tile * ROWS, panel * PANEL], size, (x, rows), c) };
                }
            }
        }
    });
}

/// Copies rows, each from its runs, to tiles; the columns past the last are 0.
fn gather(x: &Placed<'_>, starts: &[usize], quads: usize, out: &mut [u8]) {
    let steps = quads.div_ceil(ROWS);
    let (lines, _) = out.as_chunks_mut::<ROW_BYTES>();
    for (row, &start) in starts.iter().enumerate() {
        let first = row / ROWS * steps * ROWS + row % ROWS;
        if !quads.is_multiple_of(ROWS) {
            lines[first + (steps - 1) * ROWS] = [0; ROW_BYTES];
        }
        let mut at = 0;
        for run in x.runs.bytes(x.x, start) {
            let mut run = run;
            while !run.is_empty() {
                let (step, within) = (at / ROW_BYTES, at % ROW_BYTES);
                let line = &mut lines[first + step * ROWS];
                if let (0, Some((whole, rest))) = (within, run.split_first_chunk::<ROW_BYTES>()) {
                    *line = *whole;
                    run = rest;
                    at += ROW_BYTES;
                } else {
                    let len = run.len().min(ROW_BYTES - within);
                    line[within..within + len].copy_from_slice(&run[..len]);
                    run = &run[len..];
                    at += len;
                }
            }
        }
    }
}
