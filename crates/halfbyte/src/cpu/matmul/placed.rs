//! Driver of products with exact activations whose rows lie in images: windows are multiplied where they are, and no patch is
//! gathered.
//!
//! ```text
//! for each block along k:  for each few panels of outputs:
//!     buffer[place][output] = scale · (code − zero)
//!     for each tile of rows:  y += x · buffer            x read from as many places as the tile has rows
//! ```
//!
//! Sums are added up in the order of [`super::exact_act`], so that they have its bits.

use super::Output;
use super::blocking::{take, with_buffers};
use super::exact_act::{PLACES_TOGETHER, RUN, Tiles, Weights};
use crate::cpu::Cpu;
use crate::layout::cpu_n16::PANEL;
use std::ops::Range;

/// Places along k that are converted at a time: whole runs, that lie in the caches with sums and x.
const PLACES: usize = 2 * RUN;
const _: () = assert!(PLACES_TOGETHER.is_multiple_of(PLACES));

/// Panels of outputs whose sums a task keeps.
const CHUNK_PANELS: usize = 16;

/// How every row lies: in runs of floats, one after the other in the row, at the same places from the row's start on.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    /// Parts of runs, none of which crosses a multiple of [`RUN`] of the row.
    parts: Vec<Part>,
    /// The parts of each [`RUN`] columns.
    of_run: Vec<Range<usize>>,
    /// Columns.
    k: usize,
    /// Floats from the row's start to the end of the furthest run.
    reach: usize,
}

/// Floats that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Where they begin, from the row's start on.
    pub from: usize,
    pub len: usize,
}

impl Runs {
    /// Runs of `len` floats at these places.
    pub fn new(starts: &[usize], len: usize) -> Self {
        let (mut parts, mut of_run, mut k) = (Vec::new(), Vec::new(), 0);
        let mut first = 0;
        for &start in starts {
            let mut done = 0;
            while done < len {
                let part = Part { from: start + done, len: (len - done).min(RUN - k % RUN) };
                parts.push(part);
                (done, k) = (done + part.len, k + part.len);
                if k.is_multiple_of(RUN) {
                    of_run.push(first..parts.len());
                    first = parts.len();
                }
            }
        }
        if first < parts.len() {
            of_run.push(first..parts.len());
        }
        let reach = starts.iter().max().map_or(0, |start| start + len);
        Self { parts, of_run, k, reach }
    }

    /// Copies a row that begins at `start` to `out`.
    pub fn copy(&self, x: &[f32], start: usize, out: &mut [f32]) {
        let mut at = 0;
        for part in &self.parts {
            out[at..at + part.len].copy_from_slice(&x[start + part.from..][..part.len]);
            at += part.len;
        }
    }

    /// The parts of columns `columns`, which begin with a run.
    fn within(&self, columns: Range<usize>) -> Block<'_> {
        Block { parts: &self.parts, of_run: &self.of_run[columns.start / RUN..columns.end.div_ceil(RUN)] }
    }
}

/// Rows wherever they lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed<'a> {
    x: &'a [f32],
    runs: &'a Runs,
    starts: &'a [usize],
    /// Which part of the outputs, of how many, is multiplied; none: all, by copies of the rows.
    share: Option<[usize; 2]>,
}

impl<'a> Placed<'a> {
    /// Rows that begin at these places of x, and which part of the outputs they are multiplied by, of how many, by weights whose columns
    /// [lie in order](super::Packed::is_in_order). Without it all outputs are computed from copies of the rows, which is faster for few.
    pub fn new(x: &'a [f32], runs: &'a Runs, starts: &'a [usize], share: Option<[usize; 2]>) -> Self {
        // Tiles read without looking.
        assert!(starts.iter().max().is_none_or(|start| start + runs.reach <= x.len()), "rows lie within x");
        Self { x, runs, starts, share }
    }

    /// The part of the outputs, of how many, if rows are multiplied where they lie.
    pub(super) fn share(&self) -> Option<[usize; 2]> {
        self.share
    }

    /// Copies a row to `out`.
    pub fn copy(&self, row: usize, out: &mut [f32]) {
        self.runs.copy(self.x, self.starts[row], out);
    }
}

/// Some runs of every row.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    parts: &'a [Part],
    of_run: &'a [Range<usize>],
}

impl<'a> Block<'a> {
    /// The parts of each run.
    #[inline(always)]
    pub fn runs(self) -> impl Iterator<Item = &'a [Part]> {
        self.of_run.iter().map(move |run| &self.parts[run.clone()])
    }
}

/// The tile functions of an instruction set for rows wherever they lie.
pub(super) struct PlacedTiles {
    /// Rows of a tile.
    pub height: usize,
    /// Panels of outputs that a tile has at most.
    pub panels: usize,
    /// Multiplies converted weights.
    pub product: fn(panels: usize) -> PlacedFn,
}

/// Adds the product of a block of the tile's rows, which begin at `starts` of x, and converted weights `[place][panels · 16]` to
/// `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set; x has the block of each row.
pub(super) type PlacedFn = unsafe fn(x: *const f32, starts: &[usize], block: Block<'_>, w: &[f32], c: &mut [f32]);

/// Panels cut evenly into steps of up to `most`.
fn steps(panels: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let (first, len, count) = (panels.start, panels.len(), panels.len().div_ceil(most));
    (0..count).map(move |step| first + step * len / count..first + (step + 1) * len / count)
}

/// Multiplies rows wherever they lie by a part of the outputs, of how many, of weights whose places are their columns.
pub(super) fn run(
    cpu: &Cpu,
    x: &Placed<'_>,
    [share, shares]: [usize; 2],
    w: Weights<'_>,
    y: &Output<'_>,
    tiles: &Tiles,
) {
    let PlacedTiles { height, panels: most, product } = tiles.placed;
    let (k, rows) = (x.runs.k, x.starts.len());
    let row_tiles = rows.div_ceil(height);
    let convert = (tiles.convert)(w);
    let all = share * w.panels() / shares..(share + 1) * w.panels() / shares;
    let chunk = CHUNK_PANELS / most * most;
    for first in all.clone().step_by(chunk) {
        let panels = first..(first + chunk).min(all.end);
        let tile_len = height * PANEL;
        let sums_len = tile_len * row_tiles * panels.len();
        let in_runs = k > PLACES_TOGETHER;
        let all_len = if in_runs { 2 * sums_len } else { sums_len };
        with_buffers([all_len, PLACES * most * PANEL], |sums, buffer| {
            sums.fill(0.0);
            let (sums, totals) = sums.split_at_mut(sums_len);
            // The last tile multiplies the last row again and again where it has too few.
            let mut last = vec![x.starts[rows - 1]; height];
            let (whole, rest) = x.starts.split_at(rows / height * height);
            last[..rest.len()].copy_from_slice(rest);
            let starts = |tile: usize| whole.chunks_exact(height).nth(tile).unwrap_or(&last);
            for first in (0..k).step_by(PLACES) {
                let columns = first..(first + PLACES).min(k);
                let block = x.runs.within(columns.clone());
                // The filler of the last tile of codes is converted, and not multiplied.
                let places = first..(first + PLACES).min(w.places());
                let mut at = 0;
                for step in steps(panels.clone(), most) {
                    let width = step.len() * PANEL;
                    let buffer = &mut buffer[..places.len() * width];
                    for (p, panel) in step.clone().enumerate() {
                        // SAFETY: `select` found the instruction set.
                        unsafe { convert(w, panel, places.clone(), &mut buffer[p * PANEL..], width) };
                    }
                    let product = product(step.len());
                    for (tile, c) in sums[at..].chunks_exact_mut(height * width).take(row_tiles).enumerate() {
                        // SAFETY: as above; `Placed::new` looked that every row lies within x.
                        unsafe { product(x.x.as_ptr(), starts(tile), block, buffer, c) };
                    }
                    at += row_tiles * height * width;
                }
                if in_runs && columns.end.is_multiple_of(PLACES_TOGETHER) {
                    take(cpu.caps().isa, sums, totals);
                }
            }
            if in_runs {
                take(cpu.caps().isa, totals, sums);
            }
            let mut at = 0;
            for step in steps(panels.clone(), most) {
                let width = step.len() * PANEL;
                for (row, c) in sums[at..].chunks_exact(width).take(rows).enumerate() {
                    // SAFETY: shares cover disjoint outputs.
                    unsafe { y.store(row, step.start * PANEL, c) };
                }
                at += row_tiles * height * width;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_at_multiples_and_cover_every_column_once() {
        for (starts, len) in [(vec![0, 50, 1000], 40), (vec![7], 300), (vec![0, 96, 192], 96), (vec![3, 9], 1)] {
            let runs = Runs::new(&starts, len);
            let columns: Vec<usize> = starts.iter().flat_map(|start| *start..start + len).collect();
            assert_eq!(runs.k, columns.len());
            let mut next = 0;
            for (i, parts) in runs.within(0..runs.k).runs().enumerate() {
                assert_eq!(next, i * RUN);
                for part in parts {
                    assert_eq!((part.from..part.from + part.len).collect::<Vec<_>>(), columns[next..next + part.len]);
                    next += part.len;
                }
            }
            assert_eq!((next, runs.reach), (runs.k, columns.iter().max().unwrap() + 1));
            let x: Vec<f32> = (0..2000).map(|i| i as f32).collect();
            let mut row = vec![0.0; runs.k];
            runs.copy(&x, 5, &mut row);
            assert!(row.iter().zip(&columns).all(|(v, column)| *v == (column + 5) as f32));
        }
    }

    #[test]
    fn steps_are_even_and_cover_every_panel() {
        for panels in 1..20 {
            for most in 1..4 {
                let all: Vec<_> = steps(3..3 + panels, most).collect();
                assert_eq!((all[0].start, all[all.len() - 1].end), (3, 3 + panels));
                assert!(all.is_sorted_by(|a, b| a.end == b.start));
                assert!(all.iter().all(|step| (1..=most).contains(&step.len())));
                assert_eq!(all.len(), panels.div_ceil(most));
            }
        }
    }
}
