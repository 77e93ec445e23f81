//! Driver of products with activations quantised on the fly.
//!
//! ```text
//! x → codes qA, scale sA, offset oA of each row and group; sums of each span         (once, all threads)
//! for each task (outputs × rows), for each block of spans that fits the cache, for each tile of outputs:
//!     codes of fewer bits become bytes in a buffer                                    (if several panels of rows meet them)
//!     for each panel of rows:                                                         (in registers)
//!         for each span:  D = Σ qA·(qB − zB)         int32, exact
//!                         y += sB·(sA·D + oA·ΣqB') + oB·(sA·ΣqA + K·oA)
//! epilogue
//! ```
//!
//! which is the four-term formula `Σ (sA·qA + oA)(sB·qB' + oB)`, with `qB' = qB − zB` where the weight has a zero point
//! and `oB` where it has a float offset instead.

use super::blocking::{RowPanels, SPANS_TOGETHER, Steps, Tasks, take, with_buffers};
use super::encode::{Pixels, encode_row};
use super::{Input, Output, Packed, Rows, Scratch};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::transpose::transpose;
use crate::format::Act;
use crate::layout::cpu_n16::{CpuN16, PANEL, Span};
use std::ops::Range;

/// Places along k that are multiplied before the next tile of outputs: a panel of x and one of weights in the cache.
const BLOCK_PLACES: usize = 4096;

/// The same where codes become bytes before: two panels of 16 outputs take 32 KiB.
const BLOCK_PLACES_OF_BYTES: usize = 1024;

/// From how many panels of rows on codes of fewer bits become bytes before they are multiplied.
const LEAST_PANELS_FOR_BYTES: usize = 3;

/// Below this many elements of x, one thread quantises them all.
const PARALLEL_ELEMENTS: usize = 1 << 14;

/// The tile functions of an instruction set.
pub(super) struct Tiles {
    /// Heights that tiles come in, ascending.
    pub heights: &'static [usize],
    /// Panels of outputs that a tile of this height spans.
    pub panels: fn(height: usize) -> usize,
    /// The function for codes that tiles hold in this form, for this height, and one panel or as many as `panels` says.
    pub tile: fn(form: u32, height: usize, panels: usize) -> TileFn,
    /// Makes bytes of codes of this form, which the function for codes of 8 bits multiplies; None where that gains little.
    pub as_bytes: fn(form: u32) -> Option<AsBytesFn>,
}

/// Adds the product of a panel of x and some panels of weights, over some spans, to `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set; the tile's slices are as long as its fields say.
pub(super) type TileFn = unsafe fn(tile: &Tile<'_>, c: &mut [f32]);

/// Writes the codes of some places of a panel, whole tiles, as bytes, `[place / 4][16][4]`.
///
/// # Safety
/// The processor has the instruction set.
pub(super) type AsBytesFn = unsafe fn(w: &CpuN16, panel: usize, places: Range<usize>, out: &mut [u8]);

/// What a tile function multiplies.
pub(super) struct Tile<'a> {
    /// Weights.
    pub w: &'a CpuN16,
    /// First panel of outputs.
    pub panel: usize,
    /// The codes of these panels and spans as bytes, one panel after the other; or empty.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vectors read this"))]
    pub bytes: &'a [u8],
    /// Spans to go over.
    pub spans: Range<usize>,
    /// Tiles of each span of the weights, if span `i` is the whole of group `i` and all have as many: then a tile of one row need not read them.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vectors read this"))]
    pub tiles_of_group: Option<usize>,
    /// Bytes ahead that a tile of one row prefetches codes.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "vectors read this"))]
    pub ahead: usize,
    /// Codes of the panel of x, `[place / 4][height][4]`.
    pub x: &'a [i8],
    /// Numbers of the panel of x for each span and row, `[span][height]`.
    pub rows: &'a [RowSpan],
    /// Whether x has offsets.
    pub x_offsets: bool,
}

/// What a span's products of a row are multiplied by and added to.
#[derive(Clone, Copy, Debug, Default, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct RowSpan {
    /// Scale of x, sA.
    pub scale: f32,
    /// `−ΣqA`.
    pub minus_sum: i32,
    /// Sum of what the codes stand for, `sA·ΣqA + K·oA`.
    pub total: f32,
    /// Offset of x, oA.
    pub offset: f32,
}

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>, tiles: &Tiles) {
    let Packed::Quantized(w, act) = input.w else { unreachable!("selected for quantised weights only") };
    let rows = RowPanels::new(input.m, tiles.heights);
    let (height, spans) = (rows.height, w.spans().len());
    let (x_len, rows_len) = (w.places() * height, spans * height);
    scratch.x.ensure(rows.count * x_len);
    scratch.meta.ensure(rows.count * rows_len * size_of::<RowSpan>());

    let pack = Pack { x: input.x, whole: Pixels::new(w, *act, 1), rows };
    let x_out = DisjointMut::new(scratch.x.as_mut_slice::<i8>());
    let rows_out = DisjointMut::new(scratch.meta.as_mut_slice::<RowSpan>());
    let pack_panel = |p: usize| {
        // SAFETY: each panel has a part of its own.
        let (x, row_spans) =
            unsafe { (x_out.range(p * x_len..(p + 1) * x_len), rows_out.range(p * rows_len..(p + 1) * rows_len)) };
        pack.panel(cpu, p, x, row_spans);
    };
    if input.m * w.k() < PARALLEL_ELEMENTS {
        (0..rows.count).for_each(pack_panel);
    } else {
        cpu.threads().run(rows.count, &pack_panel);
    }

    let x = scratch.x.as_slice::<i8>();
    let row_spans = scratch.meta.as_slice::<RowSpan>();
    let tile_panels = (tiles.panels)(height);
    let as_bytes = (tiles.as_bytes)(w.held().form()).filter(|_| rows.count >= LEAST_PANELS_FOR_BYTES);
    let (form, places) = match as_bytes {
        Some(_) => (8, BLOCK_PLACES_OF_BYTES),
        // Weights of one row are streams, which blocks would cut: its tiles themselves add up few spans at a time.
        None if height == 1 => (w.held().form(), usize::MAX),
        None => (w.held().form(), BLOCK_PLACES),
    };
    let (wide, narrow) = ((tiles.tile)(form, height, tile_panels), (tiles.tile)(form, height, 1));
    let in_runs = height > 1 && spans > SPANS_TOGETHER;
    let blocks = blocks(w, places, if in_runs { SPANS_TOGETHER } else { usize::MAX });
    let tiles_of_group = if height == 1 { tiles_of_group(w) } else { None };
    let longest = blocks.iter().map(|block| places_of(w, block).len()).max().unwrap_or(0);
    let tasks = Tasks::new(rows, longest * height, w.panels(), tile_panels, cpu.threads().count());
    cpu.threads().run(tasks.count, &|i| {
        let (row_panels, panels) = tasks.get(i);
        let steps = Steps { panels, wide: tile_panels };
        let tile_len = height * tile_panels * PANEL;
        let kept = if blocks.len() <= 1 { 1 } else { row_panels.len() * steps.count() };
        let buffer_len = if as_bytes.is_some() { longest * tile_panels * PANEL / 4 } else { 0 };
        let buffers = tile_len * kept * if in_runs { 2 } else { 1 };
        with_buffers([buffers, buffer_len], |c, buffer| {
            let (c, runs) = c.split_at_mut(tile_len * kept);
            let buffer: &mut [u8] = bytemuck::cast_slice_mut(buffer);
            for (number, block) in blocks.iter().enumerate() {
                let places = places_of(w, block);
                for step in 0..steps.count() {
                    let (panel, width) = steps.get(step);
                    let function = if width == tile_panels { wide } else { narrow };
                    let mut bytes: &[u8] = &[];
                    if let Some(as_bytes) = as_bytes {
                        let len = places.len() * PANEL;
                        for p in 0..width {
                            // SAFETY: `select` found the instruction set.
                            unsafe { as_bytes(w, panel + p, places.clone(), &mut buffer[p * len..][..len]) };
                        }
                        bytes = &buffer[..width * len];
                    }
                    for p in row_panels.clone() {
                        let at = if kept == 1 { 0 } else { step * row_panels.len() + p - row_panels.start };
                        let c = &mut c[at * tile_len..][..height * width * PANEL];
                        let run = if in_runs { &mut runs[at * tile_len..][..c.len()] } else { &mut [] };
                        if number == 0 {
                            c.fill(0.0);
                            run.fill(0.0);
                        }
                        let tile = Tile {
                            w,
                            panel,
                            bytes,
                            spans: block.clone(),
                            tiles_of_group,
                            ahead: cpu.stream_ahead,
                            x: &x[p * x_len..][..x_len],
                            rows: &row_spans[p * rows_len..][..rows_len],
                            x_offsets: *act == Act::A8Asym,
                        };
                        // SAFETY: `select` found the instruction set; the slices are those that `Tile` describes.
                        unsafe { function(&tile, if in_runs { &mut *run } else { &mut *c }) };
                        if in_runs && (block.end.is_multiple_of(SPANS_TOGETHER) || block.end == spans) {
                            take(cpu.caps().isa, run, c);
                        }
                        if number + 1 == blocks.len() {
                            for (row, c) in rows.rows(p).zip(c.chunks_exact(width * PANEL)) {
                                // SAFETY: tasks cover disjoint rows and outputs.
                                unsafe { y.store(row, panel * PANEL, c) };
                            }
                        }
                    }
                }
            }
        });
    });
}

/// See [`Tile::tiles_of_group`].
fn tiles_of_group(w: &CpuN16) -> Option<usize> {
    let tiles = w.spans().first()?.tiles;
    let is_group = |(i, span): (usize, &Span)| (span.group, span.tile, span.tiles) == (i, i * tiles, tiles);
    w.spans().iter().enumerate().all(is_group).then_some(tiles)
}

/// Runs of spans, each of so many places at most, or of one longer span, none across a multiple of `together`; one that is empty where there
/// are none.
fn blocks(w: &CpuN16, places: usize, together: usize) -> Vec<Range<usize>> {
    let (spans, mut blocks, mut first) = (w.spans(), Vec::new(), 0);
    while first < spans.len() || blocks.is_empty() {
        let fits = |end: &usize| places_of(w, &(first..end + 1)).len() <= places;
        let end = (first..spans.len()).take(together - first % together).take_while(fits).count().max(1);
        blocks.push(first..(first + end).min(spans.len()));
        first += end;
    }
    blocks
}

/// Places that a run of spans takes, filler included.
fn places_of(w: &CpuN16, spans: &Range<usize>) -> Range<usize> {
    let (spans, per_tile) = (&w.spans()[spans.clone()], w.columns_per_tile());
    match (spans.first(), spans.last()) {
        (Some(first), Some(last)) => first.tile * per_tile..(last.tile + last.tiles) * per_tile,
        _ => 0..0,
    }
}

/// Quantises rows of x into panels.
struct Pack<'a> {
    x: Rows<'a>,
    /// Whole rows as if they were pixels of one position.
    whole: Pixels<'a>,
    rows: RowPanels,
}

impl Pack<'_> {
    fn panel(&self, cpu: &Cpu, p: usize, out: &mut [i8], row_spans: &mut [RowSpan]) {
        let (isa, height, rows) = (cpu.caps().isa, self.rows.height, self.rows.rows(p));
        let (k, places) = (self.whole.channels, self.whole.places);
        if places == 0 {
            return;
        }
        let quads = places / 4;
        with_buffers([k.max(places), height * quads], |room, lines| {
            let lines: &mut [u32] = bytemuck::cast_slice_mut(lines);
            lines[rows.len() * quads..].fill(0);
            for r in rows.len()..height {
                row_spans[r..].iter_mut().step_by(height).for_each(|s| *s = RowSpan::default());
            }
            for ((r, row), line) in rows.enumerate().zip(lines.chunks_exact_mut(quads)) {
                match self.x {
                    Rows::Matrix(x) => {
                        let row = self.whole.ordered(x, row, room);
                        encode_row(cpu, &self.whole, row, bytemuck::cast_slice_mut(line), &mut row_spans[r..], height);
                    }
                    Rows::Encoded(pixels) => pixels.row(row, line, height, &mut row_spans[r..]),
                    Rows::Patches(..) | Rows::Placed(_) => {
                        unreachable!("pixels are quantised before their windows are gathered")
                    }
                }
            }
            let out = bytemuck::cast_slice_mut(out);
            transpose(isa, [height, quads], (lines, quads), (out, height));
        });
    }
}
