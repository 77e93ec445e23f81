//! Tiles of f32 multiply-adds with AVX-512.
//!
//! A code becomes a float by a table lookup: the tile shifted so that a lane's code lies in its lowest four bits is the
//! index (`vpermps` ignores the bits above). The table's entries already have the middle code taken off for symmetric
//! formats. A code of 8 bits is set into the lowest bits of the float 2²³ instead, which makes it 2²³ + code. Integer zero
//! points are taken off before multiplying, so that a weight is exact until its scale comes; with float offsets each
//! weight is `scale · code + offset`, rounded once.
//!
//! Where weights are converted in registers, the codes of a lane's second byte are brought to its lowest bits by loading
//! from one byte further on, and so on: loads have room to spare where shifts have none.

mod dense;
mod product;

use super::exact_act::{ConvertFn, DirectFn, ProductFn, RUN, Tiles, Weights};
use super::placed::{Block, PlacedFn, PlacedTiles};
use crate::tensor::Float;

pub(super) const TILES: Tiles = Tiles {
    heights: &[1, 2, 4, 6, 8, 10, 12],
    panels,
    direct,
    convert,
    product,
    placed: PlacedTiles { height: 8, panels: 3, product: placed },
};

fn panels(height: usize) -> usize {
    if height <= 4 { 4 } else { 2 }
}

/// Instantiates `$function` for the height and number of panels of a tile.
macro_rules! of_shape {
    ($height:expr, $panels:expr, $($path:ident)::+ $(, $field:ident)?) => {
        match ($height, $panels) {
            (1, 4) => $($path)::+::<$($field,)? 1, 4>,
            (2, 4) => $($path)::+::<$($field,)? 2, 4>,
            (4, 4) => $($path)::+::<$($field,)? 4, 4>,
            (6, 2) => $($path)::+::<$($field,)? 6, 2>,
            (8, 2) => $($path)::+::<$($field,)? 8, 2>,
            (10, 2) => $($path)::+::<$($field,)? 10, 2>,
            (12, 2) => $($path)::+::<$($field,)? 12, 2>,
            (1, 1) => $($path)::+::<$($field,)? 1, 1>,
            (2, 1) => $($path)::+::<$($field,)? 2, 1>,
            (4, 1) => $($path)::+::<$($field,)? 4, 1>,
            (6, 1) => $($path)::+::<$($field,)? 6, 1>,
            (8, 1) => $($path)::+::<$($field,)? 8, 1>,
            (10, 1) => $($path)::+::<$($field,)? 10, 1>,
            (12, 1) => $($path)::+::<$($field,)? 12, 1>,
            (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    };
}

fn direct(w: Weights<'_>, height: usize, panels: usize) -> DirectFn {
    fn quantized<const BITS: u32>(height: usize, panels: usize) -> DirectFn {
        of_shape!(height, panels, x86::direct_quantized, BITS)
    }
    fn dense<const DTYPE: usize>(height: usize, panels: usize) -> DirectFn {
        of_shape!(height, panels, dense::direct, DTYPE)
    }
    match w {
        Weights::Quantized(w) => match w.bits() {
            2 => quantized::<2>(height, panels),
            3 => quantized::<3>(height, panels),
            4 => quantized::<4>(height, panels),
            5 => quantized::<5>(height, panels),
            6 => quantized::<6>(height, panels),
            _ => quantized::<8>(height, panels),
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
        Weights::Quantized(w) => match w.bits() {
            2 => x86::convert_quantized::<2>,
            3 => x86::convert_quantized::<3>,
            4 => x86::convert_quantized::<4>,
            5 => x86::convert_quantized::<5>,
            6 => x86::convert_quantized::<6>,
            _ => x86::convert_quantized::<8>,
        },
        Weights::Dense(_) => dense::convert,
    }
}

fn product(height: usize, panels: usize) -> ProductFn {
    of_shape!(height, panels, product::packed)
}

fn placed(panels: usize) -> PlacedFn {
    match panels {
        1 => product::placed::<8, 1>,
        2 => product::placed::<8, 2>,
        3 => product::placed::<8, 3>,
        panels => unreachable!("no tile of {panels} panels"),
    }
}

mod x86 {
    use super::{RUN, Weights};
    use crate::cpu::matmul::blocking::SPANS_TOGETHER;
    use crate::cpu::x86::avx512::{Numbers, load_f32, load_u16, nibbles, quad, room};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, columns_per_tile, planes, tile_bytes};
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Codes of up to so many bits become floats by a lookup; those in planes come as bytes, as codes of 8 bits.
    const LOOKUP: u32 = 4;

    /// 2²³, which [`codes`] adds to codes of a byte: the float whose lowest bits they become.
    const ADDED_TO_BYTES: f32 = 8_388_608.0;

    /// How the codes of a group become weights.
    #[derive(Clone, Copy)]
    struct GroupParams {
        scale: __m512,
        /// Taken off each of [`codes`]: what was added there, and the zero point unless the table has taken it off.
        zero: __m512,
        offset: __m512,
    }

    /// Those of a group, from panel `panel` on.
    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,f16c")]
    fn group_params<const BITS: u32, const P: usize>(
        w: &CpuN16,
        panel: usize,
        group: usize,
        numbers: &mut Numbers<'_, P>,
    ) -> [GroupParams; P] {
        numbers.to(group);
        let none = _mm512_setzero_ps();
        let mut params = [GroupParams { scale: none, zero: none, offset: none }; P];
        for p in 0..P {
            let at = ((panel + p) * w.groups() + group) * PANEL;
            params[p].scale = numbers.scale(p, at);
            params[p].zero = zeros::<BITS>(w, panel + p, group);
            if let Some(offset) = numbers.offset(p, at) {
                params[p].offset = offset;
            }
        }
        params
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512dq,f16c")]
    fn zeros<const BITS: u32>(w: &CpuN16, panel: usize, group: usize) -> __m512 {
        let added = _mm512_set1_ps(if BITS > LOOKUP { ADDED_TO_BYTES } else { 0.0 });
        match w.zeros() {
            PackedZeros::Symmetric if BITS <= LOOKUP => _mm512_setzero_ps(),
            PackedZeros::Symmetric => _mm512_add_ps(_mm512_set1_ps(w.middle() as f32), added),
            PackedZeros::Integer(zeros) => {
                let zero = load_u16(&zeros[(panel * w.groups() + group) * PANEL..]);
                _mm512_add_ps(_mm512_cvtepi32_ps(zero), added)
            }
            PackedZeros::Float(_) => added,
        }
    }

    /// Floats of the values of 0…15 (of their lowest BITS bits), less the middle one if the format is symmetric.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn table<const BITS: u32>(w: &CpuN16) -> __m512 {
        let codes = const {
            let (mut codes, mut i) = ([0u8; 16], 0);
            while i < codes.len() {
                codes[i] = i as u8 & (((1u32 << BITS) - 1) as u8);
                i += 1;
            }
            codes
        };
        let values = w.table().unwrap_or(codes);
        // SAFETY: 16 bytes.
        let values = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
        let middle = if matches!(w.zeros(), PackedZeros::Symmetric) { w.middle() as f32 } else { 0.0 };
        _mm512_sub_ps(_mm512_cvtepi32_ps(values), _mm512_set1_ps(middle))
    }

    /// Codes at bit `shift` of each lane as floats; codes of a byte with [`ADDED_TO_BYTES`].
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn codes<const BITS: u32>(raw: __m512i, shift: u32, table: __m512) -> __m512 {
        let shifted = if shift == 0 { raw } else { _mm512_srl_epi32(raw, _mm_cvtsi32_si128(shift as i32)) };
        if BITS > LOOKUP {
            // (lane & 0xff) | bits of 2²³
            let (mask, added) = (_mm512_set1_epi32(0xff), _mm512_set1_epi32(ADDED_TO_BYTES.to_bits() as i32));
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<0xea>(shifted, mask, added))
        } else {
            _mm512_permutexvar_ps(shifted, table)
        }
    }

    #[target_feature(enable = "avx512f,avx512dq,f16c")]
    pub(super) fn direct_quantized<const BITS: u32, const R: usize, const P: usize>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        // A constant condition: what it excludes is not compiled.
        if const { BITS <= LOOKUP } && matches!(w.zeros(), PackedZeros::Symmetric) {
            return direct_zero::<BITS, R, P, TABLE_ZERO>(w, panel, x, c);
        }
        match w.zeros() {
            PackedZeros::Symmetric | PackedZeros::Integer(_) => direct_zero::<BITS, R, P, GROUP_ZERO>(w, panel, x, c),
            PackedZeros::Float(_) => direct_zero::<BITS, R, P, OFFSET>(w, panel, x, c),
        }
    }

    /// Where zero is taken off: in the table, from each code, or as an offset added to each scaled code.
    const TABLE_ZERO: u8 = 0;
    const GROUP_ZERO: u8 = 1;
    const OFFSET: u8 = 2;

    #[target_feature(enable = "avx512f,avx512dq,f16c")]
    fn direct_zero<const BITS: u32, const R: usize, const P: usize, const ZERO: u8>(
        w: &CpuN16,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        let (tile_bytes, per_tile) = const { (tile_bytes(BITS), columns_per_tile(BITS)) };
        let panel_bytes = w.panel_bytes();
        let data = &w.codes()[panel * panel_bytes..(panel + P) * panel_bytes + CpuN16::READABLE_AFTER];
        let table = table::<BITS>(w);
        c.fill(0.0);
        let mut room = room();
        let mut numbers = Numbers::<P>::new(w, panel, &mut room);
        let mut total = [[_mm512_setzero_ps(); P]; R];
        for spans in w.spans().chunks(SPANS_TOGETHER) {
            for span in spans {
                let params = group_params::<BITS, _>(w, panel, span.group, &mut numbers);
                let x = &x[span.tile * per_tile * R..(span.tile + span.tiles) * per_tile * R];
                for (x, first) in x.chunks(RUN * R).zip((span.tile..).step_by(RUN / per_tile)) {
                    let operands = Operands { codes: &data[first * tile_bytes..], panel_bytes, x, table, params };
                    add_span::<BITS, R, P, ZERO>(&operands, c);
                }
            }
            add_to(&total, c);
            total = std::array::from_fn(|r| std::array::from_fn(|p| load_f32(&c[(r * P + p) * PANEL..])));
            c.fill(0.0);
        }
        add_to(&total, c);
    }

    /// A run of a span, of one tile of outputs.
    struct Operands<'a, const P: usize> {
        /// Codes of the panels, `panel_bytes` apart.
        codes: &'a [u8],
        panel_bytes: usize,
        /// `[place][R]`.
        x: &'a [f32],
        table: __m512,
        params: [GroupParams; P],
    }

    /// Repeats a block with a constant in place of a variable. The compiler leaves longer loops rolled up, and sums that a
    /// rolled-up loop indexes lie in memory.
    macro_rules! unrolled {
        ($i:ident in [$($value:literal),+] $body:block) => {
            $({
                const $i: usize = $value;
                $body
            })+
        };
    }

    /// Adds the product of a span to `c`. A function of its own so that the sums stay in registers.
    #[inline(never)]
    #[target_feature(enable = "avx512f")]
    fn add_span<const BITS: u32, const R: usize, const P: usize, const ZERO: u8>(o: &Operands<'_, P>, c: &mut [f32]) {
        let (tile_bytes, per_tile) = const { (tile_bytes(BITS), columns_per_tile(BITS)) };
        let tiles = o.x.len() / (per_tile * R);
        assert!(tiles * tile_bytes + (P - 1) * o.panel_bytes + 3 <= o.codes.len() && c.len() == R * P * PANEL);
        let c = c.as_mut_ptr();
        let mut sum = [[_mm512_setzero_ps(); P]; R];
        let (mut tile, mut x) = (o.codes.as_ptr(), o.x.as_ptr());
        for _ in 0..tiles {
            for p in 0..P {
                for at in (0..tile_bytes).step_by(64) {
                    // Far enough ahead to hide memory; a prefetch never faults.
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * o.panel_bytes + at + 1024).cast());
                }
            }
            /// Adds the products of a column: the codes at a shift of a lane's words, and a place of x.
            macro_rules! add_column {
                ($raw:expr, $shift:expr, $place:expr) => {{
                    let mut weight = [_mm512_setzero_ps(); P];
                    for p in 0..P {
                        let code = codes::<BITS>($raw[p], $shift, o.table);
                        let params = &o.params[p];
                        weight[p] = match ZERO {
                            TABLE_ZERO => code,
                            GROUP_ZERO => _mm512_sub_ps(code, params.zero),
                            _ => _mm512_fmadd_ps(_mm512_sub_ps(code, params.zero), params.scale, params.offset),
                        };
                    }
                    for r in 0..R {
                        // SAFETY: a place of this tile of row r, within x, from whose length `tiles` comes.
                        let v = _mm512_set1_ps(unsafe { *x.add($place * R + r) });
                        for p in 0..P {
                            sum[r][p] = _mm512_fmadd_ps(v, weight[p], sum[r][p]);
                        }
                    }
                }};
            }
            if const { planes(BITS).1 > 0 } {
                unrolled!(QUAD in [0, 1, 2, 3, 4, 5, 6, 7] {
                    if QUAD < per_tile / 4 {
                        let mut raw = [_mm512_setzero_si512(); P];
                        for p in 0..P {
                            let tile = tile.wrapping_add(p * o.panel_bytes);
                            // SAFETY: panel p's tile, within `codes` as asserted.
                            raw[p] = unsafe {
                                if BITS == 3 { nibbles(tile)[QUAD / 2 % 2] } else { quad::<BITS>(tile, QUAD) }
                            };
                        }
                        let shift = if BITS == 3 { QUAD as u32 % 2 * 4 } else { 0 };
                        unrolled!(BYTE in [0, 1, 2, 3] {
                            add_column!(raw, BYTE as u32 * 8 + shift, QUAD * 4 + BYTE);
                        });
                    }
                });
                tile = tile.wrapping_add(tile_bytes);
                x = x.wrapping_add(per_tile * R);
                continue;
            }
            // In the order of columns, as wider codes are: sums of the same values have the same bits, however codes are held.
            unrolled!(INDEX in [0, 1, 2, 3] {
                if INDEX < per_tile / 4 {
                    unrolled!(BYTE in [0, 1, 2, 3] {
                        let mut raw = [_mm512_setzero_si512(); P];
                        for p in 0..P {
                            // SAFETY: 64 bytes from this byte of panel p's tile, within `codes` as asserted.
                            raw[p] = unsafe { _mm512_loadu_si512(tile.add(p * o.panel_bytes + BYTE).cast()) };
                        }
                        add_column!(raw, INDEX as u32 * BITS, INDEX * 4 + BYTE);
                    });
                }
            });
            tile = tile.wrapping_add(tile_bytes);
            x = x.wrapping_add(per_tile * R);
        }
        for r in 0..R {
            for p in 0..P {
                // SAFETY: `PANEL` floats at this place of c, whose length was asserted.
                unsafe {
                    let c = c.add((r * P + p) * PANEL);
                    let y = match ZERO {
                        OFFSET => _mm512_add_ps(sum[r][p], _mm512_loadu_ps(c)),
                        _ => _mm512_fmadd_ps(sum[r][p], o.params[p].scale, _mm512_loadu_ps(c)),
                    };
                    _mm512_storeu_ps(c, y);
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(super) fn add_to<const R: usize, const P: usize>(y: &[[__m512; P]; R], c: &mut [f32]) {
        for r in 0..R {
            for p in 0..P {
                let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                // SAFETY: `out` is 16 floats.
                unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_add_ps(y[r][p], load_f32(out))) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512dq,f16c")]
    pub(super) fn convert_quantized<const BITS: u32>(
        w: Weights<'_>,
        panel: usize,
        places: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        let planes = const { planes(BITS).1 > 0 };
        let (tile_bytes, per_tile) = const { (tile_bytes(BITS), columns_per_tile(BITS)) };
        let data = &w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()];
        let table = table::<BITS>(w);
        let (first, end) = (places.start / per_tile, places.end / per_tile);
        let begin = w.spans().partition_point(|s| s.tile + s.tiles <= first);
        let mut room = room();
        let mut numbers = Numbers::<1>::new(w, panel, &mut room);
        for span in w.spans()[begin..].iter().take_while(|s| s.tile < end) {
            let [params] = group_params::<BITS, _>(w, panel, span.group, &mut numbers);
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
                // SAFETY: 64 bytes of a tile within `held`.
                let mut raw = unsafe { _mm512_loadu_si512(tile.cast()) };
                for field in 0..per_tile / 4 {
                    if planes {
                        // SAFETY: a tile within `held`.
                        raw = unsafe { quad::<BITS>(tile, field) };
                    }
                    for byte in 0..4 {
                        let shift = byte * 8 + if planes { 0 } else { field as u32 * BITS };
                        let code = codes::<BITS>(raw, shift, table);
                        let weight = _mm512_fmadd_ps(_mm512_sub_ps(code, params.zero), params.scale, params.offset);
                        // SAFETY: 16 floats of a place within `out`, as asserted.
                        unsafe { _mm512_storeu_ps(out, weight) };
                        out = out.wrapping_add(stride);
                    }
                }
                tile = tile.wrapping_add(tile_bytes);
            }
        }
    }
}
