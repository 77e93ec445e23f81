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
use crate::cpu::lanes::{Kernel, Simd, dispatch};
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
                    encode_row(cpu, self, x, codes, &mut row_spans[at * spans..], 1);
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

/// Quantises a row that lies in the order of places; the numbers of span `s` go to `numbers[s · stride]`.
pub(super) fn encode_row(
    cpu: &Cpu,
    of: &Pixels<'_>,
    row: &[f32],
    codes: &mut [i8],
    numbers: &mut [RowSpan],
    stride: usize,
) {
    dispatch(cpu, EncodeRow { of, row, codes, numbers, stride });
}

struct EncodeRow<'a> {
    of: &'a Pixels<'a>,
    row: &'a [f32],
    codes: &'a mut [i8],
    numbers: &'a mut [RowSpan],
    stride: usize,
}

impl Kernel for EncodeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.of.act {
            Act::A8Asym => self.by::<S, true>(s),
            _ => self.by::<S, false>(s),
        }
    }
}

impl EncodeRow<'_> {
    #[inline(always)]
    fn by<S: Simd, const OFFSET: bool>(self, s: S) {
        let (spans, per_tile) = (self.of.spans, self.of.per_tile);
        let mut first = 0;
        while first < spans.len() {
            let mut end = first + 1;
            while end < spans.len() && (self.of.one_scale || spans[end].group == spans[first].group) {
                end += 1;
            }
            let mut extremes = Extremes::none::<OFFSET>(s);
            for span in &spans[first..end] {
                extremes.take::<OFFSET>(s, &self.row[span.tile * per_tile..][..span.columns]);
            }
            let range = extremes.range::<OFFSET>(s);
            for (at, span) in (first..).zip(&spans[first..end]) {
                let start = span.tile * per_tile;
                let codes = &mut self.codes[start..start + span.tiles * per_tile];
                let x = &self.row[start..start + span.columns];
                let sum = encode::<S, OFFSET>(s, x, range, &mut codes[..span.columns]);
                if let filler @ [_, ..] = &mut codes[span.columns..] {
                    filler.fill(0);
                }
                self.numbers[at * self.stride] = RowSpan {
                    // NaN where one of the elements is.
                    scale: range.scale + 0.0 * sum,
                    minus_sum: -(sum as i32),
                    total: range.scale * sum + span.columns as f32 * range.offset,
                    offset: range.offset,
                };
            }
            first = end;
        }
    }
}

/// What a range is made of, of elements but NaN: the least one, if the range has an offset, and the greatest one or magnitude; of parts, as many
/// as two vectors have elements, so that one does not wait for the other.
struct Extremes<S: Simd> {
    least: [S::V; 2],
    greatest: [S::V; 2],
}

impl<S: Simd> Extremes<S> {
    #[inline(always)]
    fn none<const OFFSET: bool>(s: S) -> Self {
        let greatest = if OFFSET { f32::NEG_INFINITY } else { 0.0 };
        Self { least: [s.splat(f32::INFINITY); 2], greatest: [s.splat(greatest); 2] }
    }

    #[inline(always)]
    fn take<const OFFSET: bool>(&mut self, s: S, x: &[f32]) {
        let pairs = x.chunks_exact(2 * S::LANES);
        for x in pairs.clone() {
            self.take_vector::<OFFSET>(s, s.load(x), 0);
            self.take_vector::<OFFSET>(s, s.load(&x[S::LANES..]), 1);
        }
        for x in pairs.remainder().chunks(S::LANES) {
            self.take_vector::<OFFSET>(s, s.load_part(x, x[0]), 0);
        }
    }

    #[inline(always)]
    fn take_vector<const OFFSET: bool>(&mut self, s: S, x: S::V, part: usize) {
        if OFFSET {
            self.least[part] = s.if_less(x, self.least[part], x, self.least[part]);
            self.greatest[part] = s.max(x, self.greatest[part]);
        } else {
            self.greatest[part] = s.max(s.abs(x), self.greatest[part]);
        }
    }

    #[inline(always)]
    fn range<const OFFSET: bool>(&self, s: S) -> ActRange {
        let greatest = s.greatest(s.max(self.greatest[0], self.greatest[1]));
        if !OFFSET {
            return ActRange::symmetric(greatest);
        }
        let [a, b] = self.least.map(|v| s.sub(s.splat(0.0), v));
        let least = -s.greatest(s.max(a, b));
        ActRange::asymmetric(least, greatest, true)
    }
}

/// [`ActRange::code`] of each element, and their sum, NaN if one of them is; exact, since a span has 4,096 elements at most.
#[inline(always)]
fn encode<S: Simd, const OFFSET: bool>(s: S, x: &[f32], range: ActRange, codes: &mut [i8]) -> f32 {
    // Adding 1.5·2²³ rounds to an integer, half to even, and leaves it in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let [base, inverse, round, back] = [range.base, range.inverse, ROUND - range.shift, ROUND].map(|v| s.splat(v));
    let rounded = |x| s.add(s.mul(if OFFSET { s.sub(x, base) } else { x }, inverse), round);
    let (pairs, mut code_pairs) = (x.chunks_exact(2 * S::LANES), codes.chunks_exact_mut(2 * S::LANES));
    let mut sums = [s.splat(0.0); 2];
    for (x, codes) in pairs.clone().zip(&mut code_pairs) {
        let code = [rounded(s.load(x)), rounded(s.load(&x[S::LANES..]))];
        s.store_low_bytes(codes, code[0]);
        s.store_low_bytes(&mut codes[S::LANES..], code[1]);
        sums = [s.add(sums[0], s.sub(code[0], back)), s.add(sums[1], s.sub(code[1], back))];
    }
    let mut sum = s.sum(s.add(sums[0], sums[1]));
    for (x, codes) in pairs.remainder().chunks(S::LANES).zip(code_pairs.into_remainder().chunks_mut(S::LANES)) {
        let (mut bytes, code) = ([0i8; 16], rounded(s.load_part(x, 0.0)));
        s.store_low_bytes(&mut bytes, code);
        codes.copy_from_slice(&bytes[..x.len()]);
        sum += s.to_array(s.sub(code, back))[..x.len()].iter().sum::<f32>();
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::{Caps, Isa};
    use crate::format::{Format, QTensor, Zeros};
    use crate::quantize::activations::quantize_activations;

    #[test]
    fn codes_are_those_of_the_rule_on_every_instruction_set() {
        for (name, k) in [
            ("w4a8-g32", 256usize),
            ("w4a8-g20", 95),
            ("w8a8-g16", 50),
            ("w8a8", 4099),
            ("w4a8-g128-xasym", 300),
            ("w2a8-g7-xasym", 65),
        ] {
            let format: Format = name.parse().unwrap();
            let groups = k.div_ceil(format.weight.group.len(k));
            let w =
                QTensor::new(format.weight, [16, k], vec![0; 16 * k], vec![1.0; 16 * groups], Zeros::Symmetric, None);
            let w = w.unwrap();
            let packed = CpuN16::pack(&w, format.act == Act::A8Asym);
            let mut row: Vec<f32> = (0..k).map(|i| ((i * 7919 + 13) % 1009) as f32 / 97.0 - 4.0).collect();
            row[k / 2] = -30.0;
            // A group without range.
            row[..format.weight.group.len(k).min(20)].fill(1e-32);
            for special in [None, Some(f32::NAN), Some(f32::INFINITY)] {
                row[k - 1] = special.unwrap_or(2.5);
                let expected = quantize_activations(&row, 1, &w, format.act);
                for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512] {
                    let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
                    let (mut codes, spans) = (vec![77; packed.places()], packed.spans());
                    let mut numbers = vec![RowSpan::default(); 2 * spans.len()];
                    let (of, mut room) = (Pixels::new(&packed, format.act, 1), vec![0.0; packed.places().max(k)]);
                    let row = of.ordered(Floats::F32(&row), 0, &mut room);
                    encode_row(&Cpu::with_caps(1, caps).unwrap(), &of, row, &mut codes, &mut numbers, 2);
                    let mut column = 0;
                    for (span, got) in spans.iter().zip(numbers.iter().step_by(2)) {
                        let codes = &codes[span.tile * packed.columns_per_tile()..][..span.columns];
                        let (scale, offset) = (expected.scales[span.group], expected.offsets[span.group]);
                        let of_rule = &expected.codes[column..column + span.columns];
                        column += span.columns;
                        if scale.is_nan() {
                            // Of several spans of a group one is enough.
                            assert!(got.scale.is_nan() || column < k, "{name}, {isa:?}");
                            continue;
                        }
                        assert_eq!(codes, of_rule, "{name}, {isa:?}");
                        let sum: i32 = of_rule.iter().map(|&code| i32::from(code)).sum();
                        assert_eq!((got.scale, got.offset, got.minus_sum), (scale, offset, -sum), "{name}, {isa:?}");
                        assert_eq!(got.total, scale * sum as f32 + span.columns as f32 * offset, "{name}, {isa:?}");
                    }
                    assert_eq!(column, k);
                }
            }
        }
    }
}
