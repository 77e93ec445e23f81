//! Driver of products with exact activations: x in f32, weights converted to f32, f32 accumulation.
//!
//! Few rows (one panel of x): weights are converted in registers and multiplied there and then.
//!
//! ```text
//! for each tile of outputs, for each span:  sum += x · (code − zero);  y += scale · sum
//! ```
//!
//! More rows: weights of a few panels are converted once into a buffer in the cache, then multiplied by every panel of
//! x in the block.
//!
//! ```text
//! for each block along k:  for each tile of outputs:
//!     buffer[place][output] = scale · (code − zero)
//!     for each panel of rows:  y += x · buffer
//! ```

use super::blocking::{RowPanels, SPANS_TOGETHER, Steps, Tasks, take, with_buffers};
use super::placed::{self, PlacedTiles};
use super::{Input, Output, Packed, Rows, Scratch};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::transpose::transpose;
use crate::layout::cpu_dense_n16::CpuDenseN16;
use crate::layout::cpu_n16::{CpuN16, FILLER, PANEL};
use crate::tensor::Floats;
use std::ops::Range;

/// Bytes of weights that are converted at a time: they stay in a level-1 cache of 32 KiB while rows go over them.
const BLOCK_BYTES: usize = 24 << 10;

/// Places whose products tiles add up by themselves before they add that to a sum: in one long sum of like terms roundings add up too, and it
/// would leave the bound. A multiple of the places of every tile of codes.
pub(super) const RUN: usize = 96;

/// Places whose sums are added up by themselves where rows are many, whole blocks of any tile: where groups fill their tiles with little, or rows are
/// very long, there are many runs.
pub(super) const PLACES_TOGETHER: usize = SPANS_TOGETHER * RUN;

/// Places along k that are converted at a time, of so many panels: whole runs.
const fn block_places(panels: usize) -> usize {
    BLOCK_BYTES / (panels * PANEL * size_of::<f32>()) / RUN * RUN
}
const _: () = assert!(
    PLACES_TOGETHER.is_multiple_of(block_places(1))
        && PLACES_TOGETHER.is_multiple_of(block_places(2))
        && PLACES_TOGETHER.is_multiple_of(block_places(4))
);

/// Below this many elements of x, one thread packs them all.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// The tile functions of an instruction set.
pub(super) struct Tiles {
    /// Heights that tiles come in, ascending.
    pub heights: &'static [usize],
    /// Panels of outputs that a tile of this height spans.
    pub panels: fn(height: usize) -> usize,
    /// Multiplies weights as they are packed.
    pub direct: fn(weights: Weights<'_>, height: usize, panels: usize) -> DirectFn,
    /// Converts a block of weights to f32.
    pub convert: fn(weights: Weights<'_>) -> ConvertFn,
    /// Multiplies converted weights.
    pub product: fn(height: usize, panels: usize) -> ProductFn,
    /// The same of rows wherever they lie.
    pub placed: PlacedTiles,
}

/// Weights of either kind.
#[derive(Clone, Copy)]
pub(super) enum Weights<'a> {
    Quantized(&'a CpuN16),
    Dense(&'a CpuDenseN16),
}

impl Weights<'_> {
    pub(super) fn places(&self) -> usize {
        match self {
            Weights::Quantized(w) => w.places(),
            Weights::Dense(w) => w.k(),
        }
    }

    pub(super) fn panels(&self) -> usize {
        match self {
            Weights::Quantized(w) => w.panels(),
            Weights::Dense(w) => w.panels(),
        }
    }
}

/// Writes the product of a panel of x `[place][height]` and some panels of weights to `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set, and the function was asked for with these weights.
pub(super) type DirectFn = unsafe fn(w: Weights<'_>, panel: usize, x: &[f32], c: &mut [f32]);

/// Converts places `places` of one panel; writes place by place, 16 floats at every `stride`th.
///
/// # Safety
/// As for [`DirectFn`].
pub(super) type ConvertFn =
    unsafe fn(w: Weights<'_>, panel: usize, places: Range<usize>, out: &mut [f32], stride: usize);

/// Adds the product of x `[place][height]` and converted weights `[place][panels · 16]` to `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set.
pub(super) type ProductFn = unsafe fn(x: &[f32], w: &[f32], c: &mut [f32]);

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>, tiles: &Tiles) {
    let w = match input.w {
        Packed::Quantized(w, _) => Weights::Quantized(w),
        Packed::Dense(w) => Weights::Dense(w),
    };
    if let Rows::Placed(x) = &input.x
        && let Some(share) = x.share()
    {
        return placed::run(cpu, x, share, w, y, tiles);
    }
    let rows = RowPanels::new(input.m, tiles.heights);
    let height = rows.height;
    let places = w.places();
    let x_len = places * height;
    scratch.x.ensure(rows.count * x_len * 4);
    let x_out = DisjointMut::new(scratch.x.as_mut_slice::<f32>());
    let pack_panel = |p: usize| {
        // SAFETY: each panel has a part of its own.
        let x = unsafe { x_out.range(p * x_len..(p + 1) * x_len) };
        pack(cpu, input, w, rows, p, x);
    };
    if input.m * places < PARALLEL_ELEMENTS {
        (0..rows.count).for_each(pack_panel);
    } else {
        cpu.threads().run(rows.count, &pack_panel);
    }
    let x = scratch.x.as_slice::<f32>();
    let tile_panels = (tiles.panels)(height);
    if rows.count == 1 {
        let (wide, narrow) = ((tiles.direct)(w, height, tile_panels), (tiles.direct)(w, height, 1));
        let tasks = Tasks::new(rows, x_len * 4, w.panels(), tile_panels, cpu.threads().count());
        cpu.threads().run(tasks.count, &|i| {
            let steps = Steps { panels: tasks.get(i).1, wide: tile_panels };
            with_buffers([height * tile_panels * PANEL, 0], |c, _| {
                for step in 0..steps.count() {
                    let (panel, width) = steps.get(step);
                    let c = &mut c[..height * width * PANEL];
                    // SAFETY: `select` found the instruction set.
                    unsafe { (if width == tile_panels { wide } else { narrow })(w, panel, &x[..x_len], c) };
                    for (row, c) in rows.rows(0).zip(c.chunks_exact(width * PANEL)) {
                        // SAFETY: tasks cover disjoint outputs.
                        unsafe { y.store(row, panel * PANEL, c) };
                    }
                }
            });
        });
        return;
    }

    let (convert, most_places) = ((tiles.convert)(w), block_places(tile_panels));
    let (wide, narrow) = ((tiles.product)(height, tile_panels), (tiles.product)(height, 1));
    let x_block = places.min(most_places) * height * 4;
    let tasks = Tasks::new(rows, x_block, w.panels(), tile_panels, cpu.threads().count());
    cpu.threads().run(tasks.count, &|i| {
        let (row_panels, panels) = tasks.get(i);
        let steps = Steps { panels, wide: tile_panels };
        let tile_len = height * tile_panels * PANEL;
        let sums_len = tile_len * row_panels.len() * steps.count();
        let in_runs = places > PLACES_TOGETHER;
        let all_len = if in_runs { 2 * sums_len } else { sums_len };
        with_buffers([all_len, most_places * tile_panels * PANEL], |sums, buffer| {
            sums.fill(0.0);
            let (sums, totals) = sums.split_at_mut(sums_len);
            for start in (0..places).step_by(most_places) {
                let block = start..(start + most_places).min(places);
                for step in 0..steps.count() {
                    let (panel, width) = steps.get(step);
                    let buffer = &mut buffer[..block.len() * width * PANEL];
                    for p in 0..width {
                        // SAFETY: `select` found the instruction set.
                        unsafe { convert(w, panel + p, block.clone(), &mut buffer[p * PANEL..], width * PANEL) };
                    }
                    for p in row_panels.clone() {
                        let at = step * row_panels.len() + p - row_panels.start;
                        let c = &mut sums[at * tile_len..][..height * width * PANEL];
                        let x = &x[p * x_len + block.start * height..p * x_len + block.end * height];
                        // SAFETY: as above.
                        unsafe { (if width == tile_panels { wide } else { narrow })(x, buffer, c) };
                    }
                }
                if in_runs && block.end.is_multiple_of(PLACES_TOGETHER) {
                    take(cpu.caps().isa, sums, totals);
                }
            }
            if in_runs {
                take(cpu.caps().isa, totals, sums);
            }
            for step in 0..steps.count() {
                let (panel, width) = steps.get(step);
                for p in row_panels.clone() {
                    let at = step * row_panels.len() + p - row_panels.start;
                    for (row, c) in rows.rows(p).zip(sums[at * tile_len..].chunks_exact(width * PANEL)) {
                        // SAFETY: tasks cover disjoint rows and outputs.
                        unsafe { y.store(row, panel * PANEL, c) };
                    }
                }
            }
        });
    });
}

/// Brings the rows of a panel of x to f32 in the order of places, `[place][height]`; filler is 0.
pub(super) fn pack(cpu: &Cpu, input: &Input<'_>, w: Weights<'_>, rows: RowPanels, panel: usize, out: &mut [f32]) {
    let (k, places) = (input.w.k(), w.places());
    if k == 0 {
        return;
    }
    let (isa, height, rows) = (cpu.caps().isa, rows.height, rows.rows(panel));
    let columns = match w {
        Weights::Quantized(w) => w.columns(),
        Weights::Dense(_) => None,
    };
    let out: &mut [u32] = bytemuck::cast_slice_mut(out);
    if let (Rows::Matrix(Floats::F32(x)), None) = (input.x, columns)
        && rows.len() == height
        && places == k
    {
        let x: &[u32] = bytemuck::cast_slice(&x[rows.start * k..rows.end * k]);
        return transpose(isa, [height, k], (x, k), (out, height));
    }
    with_buffers([height * places, k + k.div_ceil(2)], |lines, room| {
        let (row, room) = room.split_at_mut(k);
        lines[rows.len() * places..].fill(0.0);
        for (line, at) in lines.chunks_exact_mut(places).zip(rows) {
            match columns {
                Some(columns) => {
                    input.x.widen(at, row, room);
                    for (v, &c) in line.iter_mut().zip(columns) {
                        *v = if c == FILLER { 0.0 } else { row[c as usize] };
                    }
                }
                None => {
                    input.x.widen(at, &mut line[..k], room);
                    line[k..].fill(0.0);
                }
            }
        }
        transpose(isa, [height, places], (bytemuck::cast_slice(lines), places), (out, height));
    });
}
