//! Activations to codes for the kernels: rows of a matrix as they are needed, pixels of a convolution once each.
//!
//! ```text
//! for each group of a scale:  range over its columns;  codes, with their sum for each span
//! a row of a convolution's product: the codes of the pixels that its window sees, one after the other; 0 in the padding
//! ```

use super::blocking::with_buffers;
use super::quantized_act::RowSpan;
use super::{Scratch, widen};
use crate::conv::Conv2dShape;
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::{Isa, per_isa};
use crate::cpu::patches::Patches;
use crate::format::{Act, Group};
use crate::layout::cpu_n16::{CpuN16, FILLER, Span};
use crate::quantize::activations::ActRange;
use crate::tensor::Floats;

/// Images that are quantised pixel by pixel, and windows on them.
///
/// A group of channels of the convolution has as many places and spans in each pixel as in each position of the weight's
/// kernel; so a row of the product is made of whole pixels.
#[derive(Clone, Copy)]
pub(crate) struct EncodedPixels<'a> {
    /// Codes in the order of places, four in each element.
    quads: &'a [u32],
    row_spans: &'a [RowSpan],
    /// Windows on the pixels, of an element for each group.
    patches: Patches<'a>,
    /// Elements of `quads` and `row_spans` that a pixel has in a group.
    lens: [usize; 2],
}

impl EncodedPixels<'_> {
    /// Brings the codes of row `row` to `line`, and its numbers to every `height`th of `row_spans`.
    pub(super) fn row(&self, row: usize, line: &mut [u32], height: usize, row_spans: &mut [RowSpan]) {
        let [quads, spans] = self.lens;
        self.patches.runs(row, |position, count, from| {
            let line = &mut line[position * quads..][..count * quads];
            let row_spans = row_spans[position * spans * height..].iter_mut().step_by(height);
            match from {
                Some(from) => {
                    line.copy_from_slice(&self.quads[from * quads..][..count * quads]);
                    let numbers = &self.row_spans[from * spans..][..count * spans];
                    row_spans.zip(numbers).for_each(|(out, &numbers)| *out = numbers);
                }
                None => {
                    line.fill(0);
                    row_spans.take(count * spans).for_each(|out| *out = RowSpan::default());
                }
            }
        });
    }
}

/// Pixels of a convolution's input in one group of channels, as they are quantised.
pub(crate) struct Pixels<'a> {
    act: Act,
    spans: &'a [Span],
    columns: Option<&'a [u32]>,
    /// Columns of a pixel.
    pub(super) channels: usize,
    per_tile: usize,
    /// Places of a pixel, filler included.
    pub(super) places: usize,
    /// All spans share one scale, whatever their groups.
    one_scale: bool,
}

impl<'a> Pixels<'a> {
    /// For a weight whose groups of a scale divide the `channels` of each of the `positions` of its kernel.
    pub fn new(w: &'a CpuN16, act: Act, positions: usize) -> Self {
        let places = w.places() / positions;
        Self {
            act,
            spans: &w.spans()[..w.spans().len() / positions],
            columns: w.columns().map(|columns| &columns[..places]),
            channels: w.k() / positions,
            per_tile: w.columns_per_tile(),
            places,
            one_scale: w.format().activation_group() == Group::Channel,
        }
    }

    /// Quantises `count` pixels: x `[count, channels]` to `scratch`.
    pub fn encode(&self, cpu: &Cpu, x: Floats<'_>, count: usize, scratch: &mut Scratch) {
        let (quads, spans) = (self.places / 4, self.spans.len());
        scratch.x.ensure(count * self.places);
        scratch.meta.ensure(count * spans * size_of::<RowSpan>());
        let quads_out = DisjointMut::new(scratch.x.as_mut_slice::<u32>());
        let spans_out = DisjointMut::new(scratch.meta.as_mut_slice::<RowSpan>());
        cpu.threads().run(count.div_ceil(BLOCK_PIXELS), &|block| {
            let pixels = block * BLOCK_PIXELS..((block + 1) * BLOCK_PIXELS).min(count);
            // SAFETY: each block has parts of its own.
            let (out, row_spans) = unsafe {
                let part = |len: usize| pixels.start * len..pixels.end * len;
                (quads_out.range(part(quads)), spans_out.range(part(spans)))
            };
            with_buffers([self.channels.max(self.places), 0], |row, _| {
                for (pixel, at) in pixels.zip(0..) {
                    let x = self.ordered(x, pixel, row);
                    let codes = bytemuck::cast_slice_mut(&mut out[at * quads..(at + 1) * quads]);
                    encode_row(cpu.caps().isa, self, x, codes, |span, numbers| row_spans[at * spans + span] = numbers);
                }
            });
        });
    }

    /// Row `row` of x in the order of places.
    pub(super) fn ordered<'x>(&self, x: Floats<'x>, row: usize, room: &'x mut [f32]) -> &'x [f32] {
        let at = row * self.channels;
        match (self.columns, x) {
            (Some(columns), x) => {
                for (v, &c) in room.iter_mut().zip(columns) {
                    *v = if c == FILLER { 0.0 } else { x.get(at + c as usize) };
                }
                room
            }
            (None, Floats::F32(x)) => &x[at..at + self.channels],
            (None, x) => {
                let room = &mut room[..self.channels];
                widen(x, at..at + self.channels, room);
                room
            }
        }
    }

    /// Windows of a group from output pixel `first` on, on pixels that were quantised to `scratch`.
    pub fn windows<'s>(
        &self,
        scratch: &'s Scratch,
        shape: &'s Conv2dShape,
        [group, first]: [usize; 2],
    ) -> EncodedPixels<'s> {
        EncodedPixels {
            quads: scratch.x.as_slice(),
            row_spans: scratch.meta.as_slice(),
            patches: Patches::new(shape, group, first, 1),
            lens: [self.places / 4, self.spans.len()],
        }
    }
}

/// Pixels that are quantised together.
const BLOCK_PIXELS: usize = 64;

/// Quantises a row that lies in the order of places; hands out the numbers of each span.
pub(super) fn encode_row(
    isa: Isa,
    of: &Pixels<'_>,
    row: &[f32],
    codes: &mut [i8],
    mut put: impl FnMut(usize, RowSpan),
) {
    let (spans, per_tile) = (of.spans, of.per_tile);
    let mut s = 0;
    while s < spans.len() {
        let group = spans[s].group;
        let in_group = spans[s..].iter().take_while(|span| of.one_scale || span.group == group).count();
        let extremes = spans[s..s + in_group].iter().fold(Extremes::NONE, |e, span| {
            let piece = &row[span.tile * per_tile..][..span.columns];
            e.join(if of.act == Act::A8Asym { low_and_high(isa, piece) } else { magnitude(isa, piece) })
        });
        let range = match of.act {
            Act::A8Asym => ActRange::asymmetric(extremes.low, extremes.high, extremes.finite()),
            _ => ActRange::symmetric(f32::from_bits(extremes.magnitude_bits)),
        };
        for (span, at) in spans[s..s + in_group].iter().zip(s..) {
            let start = span.tile * per_tile;
            let out = &mut codes[start..start + span.tiles * per_tile];
            let sum = encode(isa, &row[start..start + span.columns], range, &mut out[..span.columns]);
            out[span.columns..].fill(0);
            put(
                at,
                RowSpan {
                    scale: range.scale,
                    minus_sum: -sum,
                    total: range.scale * sum as f32 + span.columns as f32 * range.offset,
                    offset: range.offset,
                },
            );
        }
        s += in_group;
    }
}

/// Least, greatest element, and the greatest magnitude as bits, by which NaN and infinity are greatest.
#[derive(Clone, Copy)]
struct Extremes {
    low: f32,
    high: f32,
    magnitude_bits: u32,
}

impl Extremes {
    const NONE: Self = Self { low: f32::INFINITY, high: f32::NEG_INFINITY, magnitude_bits: 0 };

    fn join(self, other: Self) -> Self {
        Self {
            low: self.low.min(other.low),
            high: self.high.max(other.high),
            magnitude_bits: self.magnitude_bits.max(other.magnitude_bits),
        }
    }

    fn finite(self) -> bool {
        f32::from_bits(self.magnitude_bits).is_finite()
    }
}

per_isa! {
    fn magnitude(x: &[f32]) -> Extremes {
        let bits = x.iter().fold(0u32, |a, v| a.max(v.to_bits() & 0x7fff_ffff));
        Extremes { magnitude_bits: bits, ..Extremes::NONE }
    }
}

per_isa! {
    fn low_and_high(x: &[f32]) -> Extremes {
        // Sixteen of each side by side, for the vectoriser: it may not reorder float comparisons itself.
        let (mut low, mut high, mut bits) = ([f32::INFINITY; 16], [f32::NEG_INFINITY; 16], [0u32; 16]);
        let chunks = x.chunks_exact(16);
        let rest = chunks.remainder();
        for chunk in chunks {
            for i in 0..16 {
                let v = chunk[i];
                low[i] = if v < low[i] { v } else { low[i] };
                high[i] = if v > high[i] { v } else { high[i] };
                bits[i] = bits[i].max(v.to_bits() & 0x7fff_ffff);
            }
        }
        let mut all = Extremes::NONE;
        for i in 0..16 {
            all = all.join(Extremes { low: low[i], high: high[i], magnitude_bits: bits[i] });
        }
        for &v in rest {
            all = all.join(Extremes { low: v, high: v, magnitude_bits: v.to_bits() & 0x7fff_ffff });
        }
        all
    }
}

per_isa! {
    /// [`ActRange::code`] of each element, and their sum.
    fn encode(x: &[f32], range: ActRange, out: &mut [i8]) -> i32 {
        // Adding 1.5·2²³ rounds to an integer, half to even, and leaves it in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let flip = if range.shift == 0.0 { 0u8 } else { 0x80 };
        let mut sum = 0i32;
        for (out, &v) in out.iter_mut().zip(x) {
            let code = (((v - range.base) * range.inverse + ROUND).to_bits() as u8 ^ flip) as i8;
            *out = code;
            sum += i32::from(code);
        }
        sum
    }
}
