//! Plain Rust tiles of one row and one panel, for every format on every processor. The compiler vectorises them as far
//! as the processor's baseline goes.

use super::blocking::SPANS_TOGETHER;
use super::placed::{Block, PlacedTiles};
use super::{exact_act, quantized_act};
use crate::format::Zero;
use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, Span, code};
use exact_act::Weights;
use quantized_act::Tile;
use std::ops::Range;

pub(super) const QUANTIZED_ACT_TILES: quantized_act::Tiles =
    quantized_act::Tiles { heights: &[1], panels: |_| 1, tile: |_, _, _| quantized_tile, as_bytes: |_| None };

pub(super) const EXACT_ACT_TILES: exact_act::Tiles = exact_act::Tiles {
    heights: &[1, 4],
    panels: |_| 1,
    direct: |_, height, _| if height == 1 { direct::<1> } else { direct::<4> },
    convert: |_| convert,
    product: |height, _| if height == 1 { product::<1> } else { product::<4> },
    placed: PlacedTiles { height: 4, panels: 1, product: |_| placed },
};

/// Values of place `place` of a panel.
fn codes(w: &CpuN16, panel: usize, place: usize) -> [u32; PANEL] {
    let (tile, within) = (place / w.columns_per_tile(), place % w.columns_per_tile());
    let held = w.held();
    let tile = &w.codes()[panel * w.panel_bytes() + tile * w.tile_bytes()..][..w.tile_bytes()];
    std::array::from_fn(|lane| u32::from(held.value(code(tile, held.bits, lane, within))))
}

/// Zero points of a panel's group; 0 where there are offsets instead.
fn zeros(w: &CpuN16, panel: usize, group: usize) -> [u32; PANEL] {
    let at = (panel * w.groups() + group) * PANEL;
    match w.zeros() {
        PackedZeros::Symmetric => [w.middle(); PANEL],
        PackedZeros::Integer(z) => std::array::from_fn(|lane| u32::from(z[at + lane])),
        PackedZeros::Float(_) => [0; PANEL],
    }
}

/// Scales and offsets of a panel's group.
fn scales_and_offsets(w: &CpuN16, panel: usize, group: usize) -> ([f32; PANEL], [f32; PANEL]) {
    let at = (panel * w.groups() + group) * PANEL;
    let offsets = match w.zeros() {
        PackedZeros::Float(o) => std::array::from_fn(|lane| o.get(at + lane)),
        _ => [0.0; PANEL],
    };
    (std::array::from_fn(|lane| w.scales().get(at + lane)), offsets)
}

fn quantized_tile(t: &Tile<'_>, c: &mut [f32]) {
    for first in t.spans.clone().step_by(SPANS_TOGETHER) {
        let mut sums = [0.0; PANEL];
        add_spans(t, first..t.spans.end.min(first + SPANS_TOGETHER), &mut sums);
        for (c, sum) in c.iter_mut().zip(sums) {
            *c += sum;
        }
    }
}

fn add_spans(t: &Tile<'_>, spans: Range<usize>, c: &mut [f32; PANEL]) {
    let w = t.w;
    let has_offsets = w.format().zero == Zero::Float;
    for (s, span) in spans.clone().zip(&w.spans()[spans]) {
        let row = t.rows[s];
        let zeros = zeros(w, t.panel, span.group);
        let mut acc = [0i32; PANEL];
        for place in places(w, span) {
            let codes = codes(w, t.panel, place);
            let x = i32::from(t.x[place]);
            for lane in 0..PANEL {
                acc[lane] += x * codes[lane] as i32;
            }
        }
        let (scales, offsets) = scales_and_offsets(w, t.panel, span.group);
        let sums = if t.x_offsets {
            &w.code_sums()[(t.panel * w.spans().len() + s) * PANEL..][..PANEL]
        } else {
            &[0.0; PANEL]
        };
        for lane in 0..PANEL {
            let dot = (acc[lane] + row.minus_sum * zeros[lane] as i32) as f32;
            c[lane] += scales[lane] * (row.scale * dot + row.offset * sums[lane]);
            // Without offsets their total counts for nothing, and may lie beyond floats.
            if has_offsets {
                c[lane] += offsets[lane] * row.total;
            }
        }
    }
}

fn places(w: &CpuN16, span: &Span) -> Range<usize> {
    span.tile * w.columns_per_tile()..(span.tile + span.tiles) * w.columns_per_tile()
}

fn direct<const R: usize>(w: Weights<'_>, panel: usize, x: &[f32], c: &mut [f32]) {
    const BLOCK: usize = 64;
    let places = x.len() / R;
    let mut buffer = [0.0; BLOCK * PANEL];
    c.fill(0.0);
    for first in (0..places).step_by(BLOCK * SPANS_TOGETHER) {
        let mut sums = [[0.0; PANEL]; R];
        for start in (first..places.min(first + BLOCK * SPANS_TOGETHER)).step_by(BLOCK) {
            let end = (start + BLOCK).min(places);
            let buffer = &mut buffer[..(end - start) * PANEL];
            convert(w, panel, start..end, buffer, PANEL);
            product::<R>(&x[start * R..end * R], buffer, sums.as_flattened_mut());
        }
        for (c, sum) in c.iter_mut().zip(sums.as_flattened()) {
            *c += sum;
        }
    }
}

fn convert(w: Weights<'_>, panel: usize, range: Range<usize>, out: &mut [f32], stride: usize) {
    match w {
        Weights::Dense(w) => {
            let data = w.data();
            for (j, out) in range.zip(out.chunks_mut(stride)) {
                for lane in 0..PANEL {
                    out[lane] = data.get((panel * w.k() + j) * PANEL + lane);
                }
            }
        }
        Weights::Quantized(w) => {
            let begin = w.spans().partition_point(|s| places(w, s).end <= range.start);
            for span in &w.spans()[begin..] {
                let inside = places(w, span).start.max(range.start)..places(w, span).end.min(range.end);
                if inside.is_empty() {
                    return;
                }
                let zeros = zeros(w, panel, span.group);
                let (scales, offsets) = scales_and_offsets(w, panel, span.group);
                for place in inside {
                    let codes = codes(w, panel, place);
                    let out = &mut out[(place - range.start) * stride..][..PANEL];
                    for lane in 0..PANEL {
                        // Rounded once, as by multiply-adds.
                        let scaled = f64::from(scales[lane]) * (f64::from(codes[lane]) - f64::from(zeros[lane]));
                        out[lane] = (scaled + f64::from(offsets[lane])) as f32;
                    }
                }
            }
        }
    }
}

fn product<const R: usize>(x: &[f32], w: &[f32], c: &mut [f32]) {
    for (x, w) in x.chunks(exact_act::RUN * R).zip(w.chunks(exact_act::RUN * PANEL)) {
        let mut sums = [[0.0; PANEL]; R];
        for (x, w) in x.chunks_exact(R).zip(w.chunks_exact(PANEL)) {
            for r in 0..R {
                for lane in 0..PANEL {
                    sums[r][lane] += x[r] * w[lane];
                }
            }
        }
        for (c, sum) in c.iter_mut().zip(sums.as_flattened()) {
            *c += sum;
        }
    }
}

/// # Safety
/// x has the block of each row.
unsafe fn placed(x: *const f32, starts: &[usize], block: Block<'_>, w: &[f32], c: &mut [f32]) {
    let mut w = w;
    for run in block.runs() {
        let mut sums = [[0.0; PANEL]; 4];
        for part in run {
            let (weights, after) = w.split_at(part.len * PANEL);
            w = after;
            for (i, w) in (part.from..).zip(weights.chunks_exact(PANEL)) {
                for r in 0..4 {
                    // SAFETY: promised to this function.
                    let v = unsafe { *x.add(starts[r] + i) };
                    for lane in 0..PANEL {
                        sums[r][lane] += v * w[lane];
                    }
                }
            }
        }
        for (c, sum) in c.iter_mut().zip(sums.as_flattened()) {
            *c += sum;
        }
    }
}
