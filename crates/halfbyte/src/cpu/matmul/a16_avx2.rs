//! Tiles of f32 multiply-adds with AVX2 and FMA.
//!
//! As [`a16_avx512`](super::a16_avx512), 16 outputs in two registers of 8. There is no lookup among 16 floats; a code
//! becomes a float by conversion. Of 5 and 6 bits, and of a table, codes of four columns become bytes first, of which a shuffle makes
//! lanes, and the middle is taken off after. In a symmetric format of other bits the code less the middle one is a signed number, two's complement,
//! once its highest bit is flipped: shifted up and, with its sign, down again, it needs no zero point. A tile of 3 bits becomes two
//! of 4, which are read so.
//!
//! Up to four rows are multiplied by weights converted in registers. More rows take the weights from a buffer.

mod dense;
mod product;

use super::exact_act::{ConvertFn, DirectFn, ProductFn, RUN, Tiles, Weights};
use super::placed::{Block, PlacedTiles};
use crate::layout::cpu_n16::{NARROW_TABLE, PackedZeros, TABLE, WIDE_TABLE};
use crate::tensor::Float;

pub(super) const TILES: Tiles = Tiles {
    heights: &[1, 2, 4, 6],
    panels,
    direct,
    convert,
    product,
    placed: PlacedTiles { height: 6, panels: 1, product: |_| product::placed::<6, 1> },
};

fn panels(height: usize) -> usize {
    if height <= 2 { 2 } else { 1 }
}

fn direct(w: Weights<'_>, height: usize, panels: usize) -> DirectFn {
    fn quantized<const FORM: u32, const ZERO: u8>(height: usize, panels: usize) -> DirectFn {
        match (height, panels) {
            (1, 2) => x86::direct_quantized::<FORM, 1, 2, ZERO>,
            (2, 2) => x86::direct_quantized::<FORM, 2, 2, ZERO>,
            (1, 1) => x86::direct_quantized::<FORM, 1, 1, ZERO>,
            (2, 1) => x86::direct_quantized::<FORM, 2, 1, ZERO>,
            (4, 1) => x86::direct_quantized::<FORM, 4, 1, ZERO>,
            (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    fn dense<const DTYPE: usize>(height: usize, panels: usize) -> DirectFn {
        match (height, panels) {
            (1, 2) => dense::direct::<DTYPE, 1, 2>,
            (2, 2) => dense::direct::<DTYPE, 2, 2>,
            (1, 1) => dense::direct::<DTYPE, 1, 1>,
            (2, 1) => dense::direct::<DTYPE, 2, 1>,
            (4, 1) => dense::direct::<DTYPE, 4, 1>,
            (6, 1) => dense::direct::<DTYPE, 6, 1>,
            (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
    match w {
        Weights::Quantized(w) if height == 6 => match w.held().form() {
            2 => x86::direct_through_buffer::<2, 6>,
            3 => x86::direct_through_buffer::<3, 6>,
            4 => x86::direct_through_buffer::<4, 6>,
            5 => x86::direct_through_buffer::<5, 6>,
            6 => x86::direct_through_buffer::<6, 6>,
            8 => x86::direct_through_buffer::<8, 6>,
            _ => x86::direct_through_buffer::<TABLE, 6>,
        },
        // Of codes of 5 and 6 bits none have zero points.
        Weights::Quantized(w) => match (w.zeros(), w.held().form()) {
            (PackedZeros::Symmetric, 2) => quantized::<2, { x86::SIGNED }>(height, panels),
            (PackedZeros::Symmetric, 3) => quantized::<3, { x86::SIGNED }>(height, panels),
            (PackedZeros::Symmetric, 4) => quantized::<4, { x86::SIGNED }>(height, panels),
            (PackedZeros::Symmetric, 5) => quantized::<5, { x86::MIDDLE }>(height, panels),
            (PackedZeros::Symmetric, 6) => quantized::<6, { x86::MIDDLE }>(height, panels),
            (PackedZeros::Symmetric, 8) => quantized::<8, { x86::SIGNED }>(height, panels),
            (PackedZeros::Symmetric, NARROW_TABLE) => quantized::<NARROW_TABLE, { x86::MIDDLE }>(height, panels),
            (PackedZeros::Symmetric, _) => quantized::<WIDE_TABLE, { x86::MIDDLE }>(height, panels),
            (PackedZeros::Integer(_), 2) => quantized::<2, { x86::ZERO_POINT }>(height, panels),
            (PackedZeros::Integer(_), 3) => quantized::<3, { x86::ZERO_POINT }>(height, panels),
            (PackedZeros::Integer(_), 4) => quantized::<4, { x86::ZERO_POINT }>(height, panels),
            (PackedZeros::Integer(_), _) => quantized::<8, { x86::ZERO_POINT }>(height, panels),
            (PackedZeros::Float(_), 2) => quantized::<2, { x86::OFFSET }>(height, panels),
            (PackedZeros::Float(_), 3) => quantized::<3, { x86::OFFSET }>(height, panels),
            (PackedZeros::Float(_), 4) => quantized::<4, { x86::OFFSET }>(height, panels),
            (PackedZeros::Float(_), 5) => quantized::<5, { x86::OFFSET }>(height, panels),
            (PackedZeros::Float(_), 6) => quantized::<6, { x86::OFFSET }>(height, panels),
            (PackedZeros::Float(_), _) => quantized::<8, { x86::OFFSET }>(height, panels),
        },
        Weights::Dense(w) => match w.dtype() {
            Float::F16 => dense::<{ dense::F16 }>(height, panels),
            Float::BF16 => dense::<{ dense::BF16 }>(height, panels),
            Float::F32 => dense::<{ dense::F32 }>(height, panels),
        },
    }
}

fn convert(w: Weights<'_>) -> ConvertFn {
    match w {
        Weights::Quantized(w) => match w.held().form() {
            2 => x86::convert_quantized::<2>,
            3 => x86::convert_quantized::<3>,
            4 => x86::convert_quantized::<4>,
            5 => x86::convert_quantized::<5>,
            6 => x86::convert_quantized::<6>,
            8 => x86::convert_quantized::<8>,
            _ => x86::convert_quantized::<TABLE>,
        },
        Weights::Dense(_) => dense::convert,
    }
}

fn product(height: usize, panels: usize) -> ProductFn {
    match (height, panels) {
        (1, 2) => product::packed::<1, 2>,
        (2, 2) => product::packed::<2, 2>,
        (1, 1) => product::packed::<1, 1>,
        (2, 1) => product::packed::<2, 1>,
        (4, 1) => product::packed::<4, 1>,
        (6, 1) => product::packed::<6, 1>,
        (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
    }
}

mod x86 {
    use super::{RUN, Weights, product};
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::matmul::exact_act::PLACES_TOGETHER;
    use crate::cpu::x86::avx2::{Numbers, load_f32, load_u16, nibbles, quad, room, store_f32, table};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, TABLE, columns_per_tile, tile_bytes, value_bits};
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Where zero is taken off: by making codes signed, from each code, with an offset to each scaled code, or from each code
    /// where it is the middle of FORM.
    pub(super) const SIGNED: u8 = 0;
    pub(super) const ZERO_POINT: u8 = 1;
    pub(super) const OFFSET: u8 = 2;
    pub(super) const MIDDLE: u8 = 3;

    /// Sums of `R` rows by `P` panels, each in two registers of 8 outputs.
    pub(super) type Sums<const R: usize, const P: usize> = [[[__m256; 2]; P]; R];

    /// How the codes of a group become weights.
    #[derive(Clone, Copy)]
    struct GroupParams {
        scale: [__m256; 2],
        /// Taken off each code; 0 where there is an offset.
        zero: [__m256; 2],
        offset: [__m256; 2],
    }

    /// Those of a group, from panel `panel` on.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn group_params<const P: usize>(
        w: &CpuN16,
        panel: usize,
        group: usize,
        numbers: &mut Numbers<'_, P>,
    ) -> [GroupParams; P] {
        numbers.to(group);
        let none = [_mm256_setzero_ps(); 2];
        let mut params = [GroupParams { scale: none, zero: none, offset: none }; P];
        for p in 0..P {
            let at = ((panel + p) * w.groups() + group) * PANEL;
            params[p].scale = numbers.scale(p, at);
            match w.zeros() {
                PackedZeros::Symmetric => params[p].zero = [_mm256_set1_ps(w.middle() as f32); 2],
                PackedZeros::Integer(zeros) => {
                    let zero = load_u16(&zeros[at..]);
                    params[p].zero = [_mm256_cvtepi32_ps(zero[0]), _mm256_cvtepi32_ps(zero[1])];
                }
                PackedZeros::Float(_) => params[p].offset = numbers.offset(p, at).unwrap_or(none),
            }
        }
        params
    }

    /// Codes at bit `shift` of each lane as floats.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn codes<const FORM: u32>(raw: __m256i, shift: u32) -> __m256 {
        let shifted = _mm256_srl_epi32(raw, _mm_cvtsi32_si128(shift as i32));
        _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32((1 << FORM) - 1)))
    }

    /// Column `byte` of a quad as floats: a shuffle of bytes does what a shift and a mask would.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn column(quad: __m256i, byte: usize) -> __m256 {
        let lanes = _mm256_set_epi32(12, 8, 4, 0, 12, 8, 4, 0);
        // A byte to the lowest of each lane, zeros above.
        let from = _mm256_add_epi32(lanes, _mm256_set1_epi32(0x8080_8000u32.wrapping_add(byte as u32) as i32));
        _mm256_cvtepi32_ps(_mm256_shuffle_epi8(quad, from))
    }

    /// Codes at bit `shift` of each lane, whose highest bits have been flipped, less the middle code, as floats.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn signed_codes<const FORM: u32>(raw: __m256i, shift: u32) -> __m256 {
        let shifted = _mm256_sll_epi32(raw, _mm_cvtsi32_si128((32 - FORM - shift) as i32));
        _mm256_cvtepi32_ps(_mm256_sra_epi32(shifted, _mm_cvtsi32_si128(32 - FORM as i32)))
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn direct_quantized<const FORM: u32, const R: usize, const P: usize, const ZERO: u8>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        let per_tile = w.columns_per_tile();
        let panel_bytes = w.panel_bytes();
        let data = &w.codes()[panel * panel_bytes..(panel + P) * panel_bytes];
        assert!(x.len() == w.tiles() * per_tile * R && c.len() == R * P * PANEL);
        c.fill(0.0);
        let table = table(w);
        let mut room = room();
        let mut numbers = Numbers::<P>::new(w, panel, &mut room);
        let mut total: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
        for spans in w.spans().chunks(SPANS_TOGETHER) {
            for span in spans {
                let params = group_params(w, panel, span.group, &mut numbers);
                let x = &x[span.tile * per_tile * R..(span.tile + span.tiles) * per_tile * R];
                for (x, first) in x.chunks(RUN * R).zip((span.tile..).step_by(RUN / per_tile)) {
                    let data = &data[first * const { tile_bytes(FORM) }..];
                    let mut sums: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
                    direct_span::<FORM, R, P, ZERO>((data, panel_bytes, table), x, &params, &mut sums);
                    for r in 0..R {
                        for p in 0..P {
                            let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                            let mut y = load_f32(out);
                            for h in 0..2 {
                                y[h] = if ZERO == OFFSET {
                                    _mm256_add_ps(y[h], sums[r][p][h])
                                } else {
                                    _mm256_fmadd_ps(sums[r][p][h], params[p].scale[h], y[h])
                                };
                            }
                            store_f32(y, out);
                        }
                    }
                }
            }
            add_to(&total, c);
            total = std::array::from_fn(|r| std::array::from_fn(|p| load_f32(&c[(r * P + p) * PANEL..])));
            c.fill(0.0);
        }
        add_to(&total, c);
    }

    /// Sets `sums` to the products of a run of a span's weights, panels `panel_bytes` apart, with their table, and x `[place][R]`; the weights are
    /// not scaled yet unless there are offsets.
    ///
    /// A function of its own, not inlined, so that the sums stay in registers all through the loop.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    fn direct_span<const FORM: u32, const R: usize, const P: usize, const ZERO: u8>(
        (data, panel_bytes, table): (&[u8], usize, __m256i),
        x: &[f32],
        params: &[GroupParams; P],
        sums: &mut Sums<R, P>,
    ) {
        let (tile_bytes, per_tile) = const { (tile_bytes(FORM), columns_per_tile(FORM)) };
        // Fields of a byte; of 3 bits those of the words that are made of a tile.
        let fields = const {
            match FORM {
                3 => 2,
                TABLE.. => 1,
                _ => 8 / FORM as usize,
            }
        };
        let flip = _mm256_set1_epi8(const { highest_bits(FORM) });
        let middle = _mm256_set1_ps(const { 1u32 << (value_bits(FORM) - 1) } as f32);
        let tiles = x.len() / (per_tile * R);
        assert!(tiles * tile_bytes + (P - 1) * panel_bytes <= data.len());
        let mut acc: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
        let (mut tile, mut x) = (data.as_ptr(), x.as_ptr());
        for _ in 0..tiles {
            /// Adds the products of a column of some panels with a place of x.
            macro_rules! add_column {
                ($panels:expr, $place:expr, |$p:ident, $h:ident| $weight:expr) => {{
                    let mut weight = [[_mm256_setzero_ps(); 2]; P];
                    for $p in $panels {
                        for $h in 0..2 {
                            weight[$p][$h] = $weight;
                        }
                    }
                    for r in 0..R {
                        // SAFETY: within x, from whose length `tiles` comes.
                        let v = _mm256_set1_ps(unsafe { *x.add($place * R + r) });
                        for p in $panels {
                            for h in 0..2 {
                                acc[r][p][h] = _mm256_fmadd_ps(v, weight[p][h], acc[r][p][h]);
                            }
                        }
                    }
                }};
            }
            for p in 0..P {
                for at in (0..tile_bytes).step_by(64) {
                    // Far enough ahead to hide memory; a prefetch never faults.
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + at + 1024).cast());
                }
            }
            /// Adds the products of the columns of a word of each panel, from `$first` on.
            macro_rules! add_word {
                ($first:expr, |$tile:ident, $half:ident| $load:expr) => {{
                    let mut raw = [[_mm256_setzero_si256(); 2]; P];
                    for p in 0..P {
                        let $tile = tile.wrapping_add(p * panel_bytes);
                        for $half in 0..2 {
                            // SAFETY: half of panel p's tile, within `data` as asserted.
                            raw[p][$half] = unsafe { $load };
                            if ZERO == SIGNED {
                                raw[p][$half] = _mm256_xor_si256(raw[p][$half], flip);
                            }
                        }
                    }
                    for field in 0..fields {
                        for byte in 0..4 {
                            let shift = (byte * 8 + field * 8 / fields) as u32;
                            add_column!(0..P, $first + field * 4 + byte, |p, h| match ZERO {
                                SIGNED => signed_codes::<FORM>(raw[p][h], shift),
                                ZERO_POINT => _mm256_sub_ps(codes::<FORM>(raw[p][h], shift), params[p].zero[h]),
                                _ => {
                                    let code = codes::<FORM>(raw[p][h], shift);
                                    _mm256_fmadd_ps(code, params[p].scale[h], params[p].offset[h])
                                }
                            });
                        }
                    }
                }};
            }
            if const { FORM == 5 || FORM == 6 || FORM >= TABLE } {
                // Scales and offsets fill the registers: with them one panel after the other.
                let step = const { if ZERO == OFFSET { 1 } else { P } };
                let mut raw = [[_mm256_setzero_si256(); 2]; P];
                for at in 0..per_tile / 4 {
                    for first in (0..P).step_by(step) {
                        for p in first..first + step {
                            for h in 0..2 {
                                // SAFETY: panel p's tile, within `data` as asserted.
                                raw[p][h] = unsafe { quad::<FORM>(tile.add(p * panel_bytes), at, h, table) };
                            }
                        }
                        for byte in 0..4 {
                            add_column!(first..first + step, at * 4 + byte, |p, h| {
                                let code = column(raw[p][h], byte);
                                match ZERO {
                                    MIDDLE => _mm256_sub_ps(code, middle),
                                    _ => _mm256_fmadd_ps(code, params[p].scale[h], params[p].offset[h]),
                                }
                            });
                        }
                    }
                }
            } else if const { FORM == 3 } {
                // One after the other, not in a loop: the compiler would leave it rolled up, and the words in memory.
                add_word!(0, |tile, h| nibbles(tile, h)[0]);
                add_word!(8, |tile, h| nibbles(tile, h)[1]);
            } else {
                add_word!(0, |tile, h| _mm256_loadu_si256(tile.add(h * 32).cast()));
            }
            tile = tile.wrapping_add(tile_bytes);
            x = x.wrapping_add(per_tile * R);
        }
        *sums = acc;
    }

    /// The highest bit of each code of a byte.
    const fn highest_bits(bits: u32) -> i8 {
        match bits {
            2 => 0xaau8 as i8,
            3 => 0x44,
            4 => 0x88u8 as i8,
            _ => 0x80u8 as i8,
        }
    }

    /// More rows than leave registers for converting: one panel of weights, a few places at a time.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn direct_through_buffer<const FORM: u32, const R: usize>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        /// A multiple of the places of every tile.
        const BLOCK: usize = 128;
        let places = x.len() / R;
        let mut buffer = [0.0f32; BLOCK * PANEL];
        let mut total: Sums<R, 1> = [[[_mm256_setzero_ps(); 2]; 1]; R];
        c.fill(0.0);
        for start in (0..places).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(places);
            let buffer = &mut buffer[..block.len() * PANEL];
            convert_quantized::<FORM>(w, panel, block.clone(), buffer, PANEL);
            product::packed::<R, 1>(&x[block.start * R..block.end * R], buffer, c);
            if block.end.is_multiple_of(PLACES_TOGETHER) {
                add_to(&total, c);
                total = std::array::from_fn(|r| [load_f32(&c[r * PANEL..])]);
                c.fill(0.0);
            }
        }
        add_to(&total, c);
    }

    /// By way of memory: the compiler keeps sums there all along if a rolled-up loop indexes them.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn add_to<const R: usize, const P: usize>(y: &Sums<R, P>, c: &mut [f32]) {
        let mut sums = [[[0.0f32; PANEL]; P]; R];
        for r in 0..R {
            for p in 0..P {
                store_f32(y[r][p], &mut sums[r][p]);
            }
        }
        for (c, sum) in c.iter_mut().zip(sums.as_flattened().as_flattened()) {
            *c += sum;
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn convert_quantized<const FORM: u32>(
        w: Weights<'_>,
        panel: usize,
        places: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        let (tile_bytes, per_tile) = const { (tile_bytes(FORM), columns_per_tile(FORM)) };
        let data = &w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()];
        let (first, end) = (places.start / per_tile, places.end / per_tile);
        let begin = w.spans().partition_point(|s| s.tile + s.tiles <= first);
        let table = table(w);
        let mut room = room();
        let mut numbers = Numbers::<1>::new(w, panel, &mut room);
        for span in w.spans()[begin..].iter().take_while(|s| s.tile < end) {
            let [params] = group_params(w, panel, span.group, &mut numbers);
            let tiles = span.tile.max(first)..(span.tile + span.tiles).min(end);
            let held = &data[tiles.start * tile_bytes..tiles.end * tile_bytes];
            let out = &mut out[(tiles.start - first) * per_tile * stride..];
            assert!(out.len() >= (tiles.len() * per_tile - 1) * stride + PANEL);
            let (mut tile, mut out) = (held.as_ptr(), out.as_mut_ptr());
            for _ in tiles {
                for at in (0..tile_bytes).step_by(64) {
                    // The same tile of the panel that is converted next but one; a prefetch never faults.
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(2 * w.panel_bytes() + at).cast());
                }
                for field in 0..per_tile / 4 {
                    let mut quads = [_mm256_setzero_si256(); 2];
                    for half in 0..2 {
                        // SAFETY: a tile within `held`.
                        quads[half] = unsafe { quad::<FORM>(tile, field, half, table) };
                    }
                    for byte in 0..4 {
                        for h in 0..2 {
                            let code = _mm256_sub_ps(column(quads[h], byte), params.zero[h]);
                            let weight = _mm256_fmadd_ps(code, params.scale[h], params.offset[h]);
                            // SAFETY: half of a place within `out`, as asserted.
                            unsafe { _mm256_storeu_ps(out.wrapping_add(h * 8), weight) };
                        }
                        out = out.wrapping_add(stride);
                    }
                }
                tile = tile.wrapping_add(tile_bytes);
            }
        }
    }
}
