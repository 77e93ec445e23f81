//! Strips of images: what the windows of some output pixels see, in f32, with its padding, each element once.
//!
//! An axis of a strip lies as the images do, or, where windows leave out more than they share, position by position of each window.

use super::super::matmul::{Runs, widen};
use crate::conv::{Conv2dShape, Geometry};
use crate::tensor::Floats;
use std::ops::Range;

/// Bytes of a strip: part of a level-2 cache of 1 MiB, with weights and sums beside it. A line of output pixels may take more.
const BYTES: usize = 256 << 10;

/// Output pixels of a strip: enough to pay for converting weights, few enough for the tasks to come out even.
const PIXELS: Range<usize> = 96..257;

/// The same where there would be fewer strips than threads.
const FEWEST_PIXELS: usize = 32;

/// Bytes that lie in the same sets of a level-1 cache, if they are a multiple of this apart.
const ALIASES: usize = 2 << 10;

/// Floats between two pixels that would lie so.
const APART: usize = 16;

/// One axis of a strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    /// Positions of the kernel.
    kernel: usize,
    /// Of the convolution.
    stride: usize,
    dilation: usize,
    /// Whether each window has its own.
    apart: bool,
}

impl Axis {
    /// Of `outputs` windows side by side.
    fn new(kernel: usize, stride: usize, dilation: usize, outputs: usize) -> Self {
        let apart = Self { kernel, stride, dilation, apart: true };
        let shared = Self { apart: false, ..apart };
        if apart.len(outputs) < shared.len(outputs) { apart } else { shared }
    }

    /// Elements that so many windows side by side see.
    fn len(&self, outputs: usize) -> usize {
        match self.apart {
            true => outputs * self.kernel,
            false => (outputs - 1) * self.stride + (self.kernel - 1) * self.dilation + 1,
        }
    }

    /// Elements from window to window, and from position to position of a window.
    fn steps(&self) -> [usize; 2] {
        if self.apart { [self.kernel, 1] } else { [self.stride, self.dilation] }
    }

    /// Where element `i` lies in the image, from the first window's first position on.
    fn source(&self, i: usize) -> usize {
        match self.apart {
            true => i / self.kernel * self.stride + i % self.kernel * self.dilation,
            false => i,
        }
    }
}

/// How the output pixels of a convolution are cut into strips: whole lines, or parts of one.
#[derive(Clone, Debug)]
pub(super) struct Strips<'a> {
    shape: &'a Conv2dShape,
    /// Lines of output pixels in a strip, of all images; 1 if lines are cut.
    lines: usize,
    /// Parts of a line; 1 if a strip has whole lines.
    parts: usize,
    axes: [Axis; 2],
    /// Floats from pixel to pixel.
    pitch: usize,
    /// Elements of a line of a strip.
    width: usize,
    runs: Runs,
}

/// A strip that was made.
pub(super) struct Strip<'a> {
    pub x: &'a [f32],
    /// Where the window of each output pixel begins.
    pub starts: &'a [usize],
}

/// Buffers of a thread.
#[derive(Default)]
pub(super) struct Room {
    x: Vec<f32>,
    starts: Vec<usize>,
}

impl<'a> Strips<'a> {
    /// For so many threads.
    pub fn new(shape: &'a Conv2dShape, threads: usize) -> Self {
        let Geometry { kernel, stride, dilation, .. } = *shape.geometry();
        let [oh, ow] = shape.output();
        let channels = shape.geometry().channels();
        // What a thread has to do, of all groups.
        let each = shape.output_pixels().saturating_mul(shape.geometry().groups) / threads;
        let (least, most) = (each.clamp(FEWEST_PIXELS, PIXELS.start), each.clamp(PIXELS.start, PIXELS.end - 1));
        let parts = ow.div_ceil(most);
        let columns = Axis::new(kernel[1], stride[1], dilation[1], ow.div_ceil(parts));
        let width = columns.len(ow.div_ceil(parts));
        let aliases = (columns.steps()[0] * channels * size_of::<f32>()).is_multiple_of(ALIASES);
        let pitch = if aliases { channels + APART } else { channels };
        let rows_of = |lines: usize| Axis::new(kernel[0], stride[0], dilation[0], lines);
        let bytes = |lines: usize| rows_of(lines).len(lines) * width * pitch * size_of::<f32>();
        let lines = if parts > 1 {
            1
        } else {
            match oh * ow < least {
                // Small images: several of them.
                true => least.div_ceil(oh * ow) * oh,
                false => {
                    let least = least.div_ceil(ow);
                    let fits = |lines: &usize| lines * ow <= most && bytes(*lines) <= BYTES;
                    (least..=oh).take_while(fits).last().unwrap_or(least)
                }
            }
        };
        let rows = rows_of(lines.min(oh));
        let line = width * pitch;
        let [_, across] = columns.steps();
        let one_run = pitch == channels && across == 1;
        let (pieces, len) = if one_run { (1, kernel[1] * channels) } else { (kernel[1], channels) };
        let piece = |ky: usize| (0..pieces).map(move |kx| ky * rows.steps()[1] * line + kx * across * pitch);
        let starts: Vec<usize> = (0..kernel[0]).flat_map(piece).collect();
        Self { shape, lines, parts, axes: [rows, columns], pitch, width, runs: Runs::new(&starts, len) }
    }

    /// How the window of every output pixel lies.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// Number of strips.
    pub fn count(&self) -> usize {
        (self.shape.batch() * self.shape.output()[0]).div_ceil(self.lines) * self.parts
    }

    /// The output pixels of a strip.
    pub fn rows(&self, strip: usize) -> Range<usize> {
        let ow = self.shape.output()[1];
        let lines = self.strip_lines(strip);
        if self.parts > 1 {
            let part = strip % self.parts;
            return lines.start * ow + part * ow / self.parts..lines.start * ow + (part + 1) * ow / self.parts;
        }
        lines.start * ow..lines.end * ow
    }

    fn strip_lines(&self, strip: usize) -> Range<usize> {
        let all = self.shape.batch() * self.shape.output()[0];
        let count = all.div_ceil(self.lines);
        let at = |strip: usize| (strip as u128 * all as u128 / count as u128) as usize;
        at(strip / self.parts)..at(strip / self.parts + 1)
    }

    /// Makes a strip of a group of channels, of images that lie pixel by pixel.
    pub fn make<'r>(&self, x: Floats<'_>, strip: usize, group: usize, room: &'r mut Room) -> Strip<'r> {
        let (rows, lines) = (self.rows(strip), self.strip_lines(strip));
        let ([oh, ow], stride) = (self.shape.output(), self.shape.geometry().stride);
        let line = self.width * self.pitch;
        let first_column = rows.start % ow;
        let columns = rows.len() / lines.len();
        let [between_lines, between_columns] = self.axes.map(|axis| axis.steps()[0]);
        room.x.clear();
        room.starts.clear();
        // Image by image.
        let mut next = lines.start;
        while next < lines.end {
            let end = ((next / oh + 1) * oh).min(lines.end);
            let base = room.x.len();
            let height = self.axes[0].len(end - next);
            room.x.resize(base + height * line, 0.0);
            let corner = [next % oh * stride[0], first_column * stride[1]];
            for (i, out) in room.x[base..].chunks_exact_mut(line).enumerate() {
                self.line(x, next / oh, [corner[0] + self.axes[0].source(i), corner[1]], group, out);
            }
            for row in 0..end - next {
                let start = |column| base + row * between_lines * line + column * between_columns * self.pitch;
                room.starts.extend((0..columns).map(start));
            }
            next = end;
        }
        Strip { x: &room.x, starts: &room.starts }
    }

    /// Fills a line that is zero with line `top` of an image with its padding, from column `left` on.
    fn line(&self, x: Floats<'_>, image: usize, [top, left]: [usize; 2], group: usize, out: &mut [f32]) {
        let Geometry { ci, padding, .. } = *self.shape.geometry();
        let ([h, w], channels, axis) = (self.shape.input(), self.shape.geometry().channels(), &self.axes[1]);
        if top < padding[0] || top >= padding[0] + h {
            return;
        }
        let first = (image * h + top - padding[0]) * w;
        let inside = |column: usize| (padding[1]..padding[1] + w).contains(&column);
        if !axis.apart && channels == ci && self.pitch == channels {
            let (from, to) = (left.max(padding[1]), (left + self.width).min(padding[1] + w));
            if from < to {
                let pixels = first + from - padding[1]..first + to - padding[1];
                widen(x, pixels.start * ci..pixels.end * ci, &mut out[(from - left) * ci..(to - left) * ci]);
            }
            return;
        }
        for (i, out) in out.chunks_exact_mut(self.pitch).enumerate() {
            let column = left + axis.source(i);
            if inside(column) {
                let at = (first + column - padding[1]) * ci + group * channels;
                widen(x, at..at + channels, &mut out[..channels]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::matmul::Placed;
    use crate::cpu::patches::Patches;

    #[test]
    fn windows_of_strips_are_patches() {
        for (geometry, batch, size) in [
            (Geometry { padding: [1; 4], ..Geometry::new(4, 8, [3, 3]) }, 2, [9, 11]),
            (Geometry { padding: [0, 2, 1, 0], stride: [2, 1], groups: 2, ..Geometry::new(6, 8, [2, 3]) }, 3, [7, 5]),
            (Geometry { stride: [4, 5], ..Geometry::new(3, 8, [2, 2]) }, 1, [23, 300]),
            (Geometry { stride: [1, 1], ..Geometry::new(5, 8, [1, 1]) }, 9, [3, 4]),
            (Geometry { padding: [9, 0, 3, 7], dilation: [3, 2], ..Geometry::new(2, 8, [3, 3]) }, 2, [8, 700]),
            (Geometry { padding: [1; 4], ..Geometry::new(512, 8, [3, 3]) }, 1, [20, 20]),
            (Geometry { padding: [300; 4], stride: [70, 90], ..Geometry::new(1, 8, [4, 4]) }, 1, [2, 3]),
        ] {
            let shape = Conv2dShape::new(geometry, batch, size).unwrap();
            let x: Vec<f32> = (0..shape.x_len()).map(|i| i as f32 + 1.0).collect();
            for threads in [1, 64] {
                let strips = Strips::new(&shape, threads);
                let (mut room, mut next, k) = (Room::default(), 0, geometry.k());
                for strip in 0..strips.count() {
                    let rows = strips.rows(strip);
                    assert!(rows.start == next && !rows.is_empty(), "{geometry:?}: {rows:?} after {next}");
                    next = rows.end;
                    for group in 0..geometry.groups {
                        let made = strips.make(Floats::F32(&x), strip, group, &mut room);
                        let placed = Placed::new(made.x, strips.runs(), made.starts, None);
                        let patches = Patches::new(&shape, group, rows.start, geometry.channels());
                        let (mut window, mut patch) = (vec![-1.0; k], vec![-1.0; k]);
                        for row in 0..rows.len() {
                            placed.copy(row, &mut window);
                            patches.copy(&x, row, 0.0, &mut patch);
                            assert_eq!(window, patch, "{geometry:?}, row {row} of strip {strip}, group {group}");
                        }
                    }
                }
                assert_eq!(next, shape.output_pixels());
            }
        }
    }
}
