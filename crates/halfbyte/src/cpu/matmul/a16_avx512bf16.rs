//! Products of bf16 activations with bf16 dot products (AVX512_BF16), from five rows on.
//!
//! A code less its zero point is an integer of at most 256 and so is exact in bf16. The integers are multiplied, summed
//! in f32 over a span, and only the sum is scaled: nothing is rounded before f32.
//!
//! ```text
//! x → pairs of columns, [panel of rows][place / 2][row][2]                            (once, all threads)
//! for each task (outputs × rows), for each block along k:
//!     for each two panels of outputs:
//!         buffer[place / 2][output][2] = code − zero                                  bf16
//!         for each panel of rows, for each run of up to 96 places of a span of the block:
//!             sum = Σ x · buffer                            vdpbf16ps, all sums of the tile in registers
//!             y += scale · sum
//!     with more than 128 runs, after each 128 or a few less:  all += y, y = 0
//! epilogue
//! ```
//!
//! Columns 0 and 2 of each four make a pair, and 1 and 3: so do the words of a tile of codes, as it lies and shifted by a
//! byte. Their low five bits are the index of a lookup among 32 words (`vpermw`).
//!
//! `vdpbf16ps` takes denormal numbers for zero, in x and in the sums: an activation below 2⁻¹²⁶ counts as 0.

use super::blocking::{RowPanels, SPANS_TOGETHER, Steps, Tasks, take, with_buffers};
use super::exact_act::RUN;
use super::{Input, Output, Packed, Rows, Scratch, at_least, exact};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::{Caps, Isa};
use crate::cpu::transpose::transpose;
use crate::format::Zero;
use crate::kernel::{Problem, Reason};
use crate::layout::cpu_n16::{CpuN16, FILLER, PANEL};
use crate::tensor::{Float, Floats};
use half::bf16;
use std::ops::Range;

/// Fewer rows are served faster by f32 tiles, which need no buffer of converted weights.
pub(super) const LEAST_ROWS: usize = 5;

/// Heights that tiles come in.
const HEIGHTS: &[usize] = &[6, 8, 10, 12];

/// Panels of outputs that a tile spans.
const TILE_PANELS: usize = 2;

/// Places along k that are converted at a time: two panels of 16 outputs take 32 KiB.
const BLOCK_PLACES: usize = 512;

/// Pieces of spans in a block at most: a span takes a tile, which has 4 places or more.
const BLOCK_PIECES: usize = BLOCK_PLACES / 4;
const _: () = assert!(BLOCK_PIECES <= SPANS_TOGETHER);

/// Below this many elements of x, one thread packs them all.
const PARALLEL_ELEMENTS: usize = 1 << 15;

/// Whether this kernel serves a problem; else why not.
pub(super) fn supports(caps: &Caps, problem: &Problem) -> Result<(), Reason> {
    exact(problem)?;
    if !caps.bf16_dot {
        return Err(Reason("needs AVX512_BF16, which this device does not use".into()));
    }
    let Some(format) = problem.format else {
        return Err(Reason("multiplies codes, the weights are dense".into()));
    };
    if format.weight.zero == Zero::Float {
        return Err(Reason("multiplies integers, the weights have float offsets".into()));
    }
    if problem.x != Float::BF16 {
        return Err(Reason(format!("multiplies x of type bf16, x is {}", problem.x)));
    }
    at_least(LEAST_ROWS, problem)
}

/// Adds to `c` `[height][panels · 16]` the product of a span, or a part of it, times the scales of its group.
///
/// x is `[place / 2][height]` and w `[place / 2][panels · 16]`, in pairs of bf16.
///
/// # Safety
/// The processor has AVX512_BF16.
type ProductFn = unsafe fn(x: &[u32], w: &[u32], scales: &[f32], c: &mut [f32]);

/// Converts the codes of places `places` of one panel, whole tiles, less their zero points, and the scales.
///
/// # Safety
/// The processor has AVX-512.
pub(super) type ConvertFn = unsafe fn(w: &CpuN16, panel: usize, places: Range<usize>, out: Converted<'_>);

/// A block of weights that the dot products read.
pub(super) struct Converted<'a> {
    /// Pairs of bf16, 16 at every `stride`th.
    pub pairs: &'a mut [u32],
    /// Scales of the block's pieces, 16 at every `stride`th.
    pub scales: &'a mut [f32],
    pub stride: usize,
}

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>) {
    let Packed::Quantized(w, _) = input.w else { unreachable!("selected for quantised weights only") };
    let rows = RowPanels::new(input.m, HEIGHTS);
    let (height, places) = (rows.height, w.places());
    let x_len = places / 2 * height;
    scratch.x.ensure(rows.count * x_len * 4);
    let x_out = DisjointMut::new(scratch.x.as_mut_slice::<u32>());
    let pack_panel = |p: usize| {
        // SAFETY: each panel has a part of its own.
        let x = unsafe { x_out.range(p * x_len..(p + 1) * x_len) };
        pack(input.x, w, rows, p, x);
    };
    if input.m * places < PARALLEL_ELEMENTS {
        (0..rows.count).for_each(pack_panel);
    } else {
        cpu.threads().run(rows.count, &pack_panel);
    }

    let x = scratch.x.as_slice::<u32>();
    let (convert, wide, narrow) = (convert(w), product(height, TILE_PANELS), product(height, 1));
    let x_block = places.min(BLOCK_PLACES) / 2 * height * 4;
    let tasks = Tasks::new(rows, x_block, w.panels(), TILE_PANELS, cpu.threads().count());
    cpu.threads().run(tasks.count, &|i| {
        let (row_panels, panels) = tasks.get(i);
        let steps = Steps { panels, wide: TILE_PANELS };
        let tile_len = height * TILE_PANELS * PANEL;
        let sums_len = tile_len * row_panels.len() * steps.count();
        let in_runs = sums_of(w, 0..places) > SPANS_TOGETHER;
        let all_len = if in_runs { 2 * sums_len } else { sums_len };
        with_buffers([all_len, (BLOCK_PLACES / 2 + BLOCK_PIECES) * TILE_PANELS * PANEL], |sums, buffer| {
            let (buffer, scales) = buffer.split_at_mut(BLOCK_PLACES / 2 * TILE_PANELS * PANEL);
            let buffer: &mut [u32] = bytemuck::cast_slice_mut(buffer);
            sums.fill(0.0);
            let (sums, totals) = sums.split_at_mut(sums_len);
            let mut together = 0;
            for start in (0..places).step_by(BLOCK_PLACES) {
                let block = start..(start + BLOCK_PLACES).min(places);
                let count = sums_of(w, block.clone());
                if in_runs && together + count > SPANS_TOGETHER {
                    take(Isa::Avx512, sums, totals);
                    together = 0;
                }
                together += count;
                for step in 0..steps.count() {
                    let (panel, width) = steps.get(step);
                    let (product, stride) = (if width == TILE_PANELS { wide } else { narrow }, width * PANEL);
                    for p in 0..width {
                        let (out, scales) = (&mut buffer[p * PANEL..], &mut scales[p * PANEL..]);
                        // SAFETY: `select` found the instruction set.
                        unsafe { convert(w, panel + p, block.clone(), Converted { pairs: out, scales, stride }) };
                    }
                    for p in row_panels.clone() {
                        let at = step * row_panels.len() + p - row_panels.start;
                        let c = &mut sums[at * tile_len..][..height * stride];
                        let x = &x[p * x_len + block.start / 2 * height..p * x_len + block.end / 2 * height];
                        for (piece, scales) in pieces(w, block.clone()).zip(scales.chunks_exact(stride)) {
                            for run in piece.runs(w.columns_per_tile()) {
                                let (first, end) = (run.start / 2, run.end / 2);
                                let (x, w) = (&x[first * height..end * height], &buffer[first * stride..end * stride]);
                                // SAFETY: as above.
                                unsafe { product(x, w, scales, c) };
                            }
                        }
                    }
                }
            }
            if in_runs {
                take(Isa::Avx512, totals, sums);
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

/// A span, or the part of it that lies in a block.
struct Piece {
    group: usize,
    /// Places from the start of the block.
    places: Range<usize>,
}

impl Piece {
    /// Even parts of whole tiles, of [`RUN`] places at most, whose products are added up by themselves.
    fn runs(&self, per_tile: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let (places, runs) = (self.places.clone(), self.places.len().div_ceil(RUN).max(1));
        let run = places.len().div_ceil(runs).next_multiple_of(per_tile).max(per_tile);
        places.clone().step_by(run).map(move |from| from..(from + run).min(places.end))
    }
}

/// The pieces of a block, in order.
fn pieces(w: &CpuN16, block: Range<usize>) -> impl Iterator<Item = Piece> {
    let per_tile = w.columns_per_tile();
    let begin = w.spans().partition_point(|s| (s.tile + s.tiles) * per_tile <= block.start);
    w.spans()[begin..].iter().take_while(move |s| s.tile * per_tile < block.end).map(move |s| {
        let (first, end) = (s.tile * per_tile, (s.tile + s.tiles) * per_tile);
        let places = first.max(block.start) - block.start..end.min(block.end) - block.start;
        Piece { group: s.group, places }
    })
}

/// How many sums the products of a block are.
fn sums_of(w: &CpuN16, block: Range<usize>) -> usize {
    pieces(w, block).map(|piece| piece.runs(w.columns_per_tile()).count()).sum()
}

/// Brings the rows of a panel of x to the order of places, in pairs, `[place / 2][height]`; filler is 0.
fn pack(x: Rows<'_>, w: &CpuN16, rows: RowPanels, panel: usize, out: &mut [u32]) {
    let (k, height) = (w.k(), rows.height);
    if k == 0 {
        return;
    }
    let (rows, pairs) = (rows.rows(panel), w.places() / 2);
    with_buffers([height * pairs, k.div_ceil(2)], |lines, room| {
        let lines: &mut [u32] = bytemuck::cast_slice_mut(lines);
        let room: &mut [bf16] = &mut bytemuck::cast_slice_mut(room)[..k];
        lines[rows.len() * pairs..].fill(0);
        for (line, at) in lines.chunks_exact_mut(pairs).zip(rows) {
            let row = match x {
                Rows::Matrix(Floats::BF16(x)) => &x[at * k..(at + 1) * k],
                Rows::Patches(Floats::BF16(x), patches) => {
                    patches.copy(x, at, bf16::ZERO, room);
                    &*room
                }
                _ => unreachable!("selected for x of type bf16 only"),
            };
            pair(row, w.columns(), line);
        }
        transpose(Isa::Avx512, [height, pairs], (lines, pairs), (out, height));
    });
}

/// Brings a row to pairs in the order of places; filler is 0.
fn pair(row: &[bf16], columns: Option<&[u32]>, out: &mut [u32]) {
    let pair = |low: bf16, high: bf16| u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16;
    let pairs = |[a, b, c, d]: [bf16; 4]| [pair(a, c), pair(b, d)];
    let (out, _) = out.as_chunks_mut::<2>();
    match columns {
        Some(columns) => {
            let value = |c: u32| if c == FILLER { bf16::ZERO } else { row[c as usize] };
            for (out, columns) in out.iter_mut().zip(columns.as_chunks::<4>().0) {
                *out = pairs(columns.map(value));
            }
        }
        None => {
            let (fours, rest) = row.as_chunks::<4>();
            let (full, last) = out.split_at_mut(fours.len());
            for (out, &four) in full.iter_mut().zip(fours) {
                *out = pairs(four);
            }
            last.fill([0; 2]);
            if !rest.is_empty() {
                last[0] = pairs(std::array::from_fn(|i| rest.get(i).copied().unwrap_or(bf16::ZERO)));
            }
        }
    }
}

pub(super) fn convert(w: &CpuN16) -> ConvertFn {
    match w.bits() {
        2 => x86::convert::<2>,
        3 => x86::convert::<3>,
        4 => x86::convert::<4>,
        5 => x86::convert::<5>,
        6 => x86::convert::<6>,
        _ => x86::convert::<8>,
    }
}

fn product(height: usize, panels: usize) -> ProductFn {
    match (height, panels) {
        (6, 2) => x86::product::<6, 2>,
        (6, 1) => x86::product::<6, 1>,
        (8, 2) => x86::product::<8, 2>,
        (10, 2) => x86::product::<10, 2>,
        (12, 2) => x86::product::<12, 2>,
        (8, 1) => x86::product::<8, 1>,
        (10, 1) => x86::product::<10, 1>,
        (12, 1) => x86::product::<12, 1>,
        _ => unreachable!("no tile of {height} rows × {panels} panels"),
    }
}

mod x86 {
    use super::{Converted, pieces};
    use crate::cpu::x86::avx512::{load_f32, load_per_group, load_u16, quad};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, columns_per_tile, planes, tile_bytes};
    use half::bf16;
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// The greatest zero point of codes of 4 bits or fewer.
    const GREATEST_ZERO: i16 = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,f16c")]
    pub(super) fn convert<const BITS: u32>(w: &CpuN16, panel: usize, places: Range<usize>, out: Converted<'_>) {
        let planes = const { planes(BITS).1 > 0 };
        let (tile_bytes, per_tile) = const { (tile_bytes(BITS), columns_per_tile(BITS)) };
        let data = &w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()];
        let data = &data[places.start / per_tile * tile_bytes..];
        let words = |f: &dyn Fn(i16) -> i16| {
            let mut words = [0; 32];
            (0..32).zip(&mut words).for_each(|(i, word)| *word = bf16::from_f32(f32::from(f(i))).to_bits());
            // SAFETY: 64 bytes.
            unsafe { _mm512_loadu_si512(words.as_ptr().cast()) }
        };
        let mask = (1i16 << BITS) - 1;
        let (held, middle) = (w.held(), w.middle() as i32);
        // By the code and whatever bits come after it; by the code less the zero point.
        let (of_code, of_difference) =
            (words(&|i| i16::from(held.value((i & mask) as u8)) - middle as i16), words(&|i| i - GREATEST_ZERO));
        for (i, piece) in pieces(w, places).enumerate() {
            let at = (panel * w.groups() + piece.group) * PANEL;
            let scales = &mut out.scales[i * out.stride..][..PANEL];
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(scales.as_mut_ptr(), load_per_group(w.scales(), at)) };
            let zero = match w.zeros() {
                PackedZeros::Integer(zeros) => Some(load_u16(&zeros[at..])),
                _ => None,
            };
            for tile in piece.places.start / per_tile..piece.places.end / per_tile {
                let bytes = &data[tile * tile_bytes..][..tile_bytes];
                // SAFETY: 64 bytes, checked by the slice.
                let mut raw = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
                for pair in 0..per_tile / 2 {
                    if planes {
                        // SAFETY: a tile, checked by the slice.
                        raw = unsafe { quad::<BITS>(bytes.as_ptr(), pair / 2) };
                    }
                    let shift = (pair % 2 * 8) as u32 + if planes { 0 } else { (pair / 2) as u32 * BITS };
                    let codes = _mm512_srl_epi32(raw, _mm_cvtsi32_si128(shift as i32));
                    let pairs = if BITS > 4 {
                        let byte = _mm512_set1_epi32(0xff);
                        let zero = zero.unwrap_or(_mm512_set1_epi32(middle));
                        let float = |code| _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_sub_epi32(code, zero)));
                        let low = float(_mm512_and_si512(codes, byte));
                        let high = float(_mm512_and_si512(_mm512_srli_epi32::<16>(codes), byte));
                        _mm512_mask_blend_epi16(0xaaaa_aaaa, _mm512_srli_epi32::<16>(low), high)
                    } else if let Some(zero) = zero {
                        let add = _mm512_sub_epi16(
                            _mm512_set1_epi16(GREATEST_ZERO),
                            _mm512_or_si512(zero, _mm512_slli_epi32::<16>(zero)),
                        );
                        let codes = _mm512_and_si512(codes, _mm512_set1_epi16(mask));
                        _mm512_permutexvar_epi16(_mm512_add_epi16(codes, add), of_difference)
                    } else {
                        _mm512_permutexvar_epi16(codes, of_code)
                    };
                    let out = &mut out.pairs[(tile * (per_tile / 2) + pair) * out.stride..][..PANEL];
                    // SAFETY: 16 pairs, checked by the slice.
                    unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), pairs) };
                }
            }
        }
    }

    /// Not inlined, so that the sums stay in registers all through the loop.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bf16")]
    pub(super) fn product<const R: usize, const P: usize>(x: &[u32], w: &[u32], scales: &[f32], c: &mut [f32]) {
        let pairs = x.len() / R;
        assert!(w.len() == pairs * P * PANEL && scales.len() == P * PANEL && c.len() == R * P * PANEL);
        let mut sums = [[_mm512_setzero_ps(); P]; R];
        let (mut x, mut w) = (x.as_ptr(), w.as_ptr());
        for _ in 0..pairs {
            let mut weight = [bf16s(_mm512_setzero_si512()); P];
            for p in 0..P {
                // SAFETY: within w, whose length was asserted.
                weight[p] = bf16s(unsafe { _mm512_loadu_si512(w.add(p * PANEL).cast()) });
            }
            for r in 0..R {
                // SAFETY: within x, from whose length `pairs` comes.
                let v = bf16s(_mm512_set1_epi32(unsafe { *x.add(r) } as i32));
                for p in 0..P {
                    sums[r][p] = _mm512_dpbf16_ps(sums[r][p], v, weight[p]);
                }
            }
            x = x.wrapping_add(R);
            w = w.wrapping_add(P * PANEL);
        }
        for r in 0..R {
            for p in 0..P {
                let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                let y = _mm512_fmadd_ps(sums[r][p], load_f32(&scales[p * PANEL..]), load_f32(out));
                // SAFETY: `out` is 16 floats.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), y) };
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn bf16s(bits: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes of which any pattern is valid.
        unsafe { std::mem::transmute(bits) }
    }
}
