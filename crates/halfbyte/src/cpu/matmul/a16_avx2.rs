//! Tiles of f32 multiply-adds with AVX2 and FMA.
//!
//! As [`a16_avx512`](super::a16_avx512), 16 outputs in two registers of 8. There is no lookup among 16 floats. Instead a
//! code becomes the lowest bits of a float's fraction, where it lies in its lane:
//!
//! ```text
//! lane & (mask << s) | bits of 2^(23−s)        = 2^(23−s) + code             s = 0 … 15
//! that − (2^(23−s) + zero)                     = code − zero                 exact
//! ```
//!
//! The upper 16 bits of a lane are shifted down first, once for all their codes.
//!
//! Up to four rows are multiplied by weights converted in registers. More rows take the weights from a buffer.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]

use super::exact_act::{ConvertFn, DirectFn, ProductFn, Tiles, Weights};

pub(super) static TILES: Tiles = Tiles { heights: &[1, 2, 4, 6], panels, direct, convert, product };

fn panels(height: usize) -> usize {
    let _ = height;
    1
}

#[cfg(not(target_arch = "x86_64"))]
fn direct(_: Weights<'_>, _: usize, _: usize) -> DirectFn {
    unreachable!("selected on x86-64 only")
}
#[cfg(not(target_arch = "x86_64"))]
fn convert(_: Weights<'_>) -> ConvertFn {
    unreachable!("selected on x86-64 only")
}
#[cfg(not(target_arch = "x86_64"))]
fn product(_: usize, _: usize) -> ProductFn {
    unreachable!("selected on x86-64 only")
}

#[cfg(target_arch = "x86_64")]
use dispatch::{convert, direct, product};

#[cfg(target_arch = "x86_64")]
mod dispatch {
    use super::x86;
    use super::{ConvertFn, DirectFn, ProductFn, Weights};
    use crate::layout::cpu_n16::{PackedZeros, field_bits};
    use crate::tensor::Float;

    pub(super) fn direct(w: Weights<'_>, height: usize, panels: usize) -> DirectFn {
        fn quantized<const FIELD: u32, const OFFSET: bool>(height: usize, panels: usize) -> DirectFn {
            match (height, panels) {
                (1, 2) => x86::direct_quantized::<FIELD, 1, 2, OFFSET>,
                (2, 2) => x86::direct_quantized::<FIELD, 2, 2, OFFSET>,
                (1, 1) => x86::direct_quantized::<FIELD, 1, 1, OFFSET>,
                (2, 1) => x86::direct_quantized::<FIELD, 2, 1, OFFSET>,
                (4, 1) => x86::direct_quantized::<FIELD, 4, 1, OFFSET>,
                (6, 1) => x86::direct_through_buffer::<FIELD, 6>,
                (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
            }
        }
        fn dense<const DTYPE: usize>(height: usize, panels: usize) -> DirectFn {
            match (height, panels) {
                (1, 2) => x86::direct_dense::<DTYPE, 1, 2>,
                (2, 2) => x86::direct_dense::<DTYPE, 2, 2>,
                (1, 1) => x86::direct_dense::<DTYPE, 1, 1>,
                (2, 1) => x86::direct_dense::<DTYPE, 2, 1>,
                (4, 1) => x86::direct_dense::<DTYPE, 4, 1>,
                (6, 1) => x86::direct_dense::<DTYPE, 6, 1>,
                (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
            }
        }
        match w {
            Weights::Quantized(w) => {
                let offset = matches!(w.zeros(), PackedZeros::Float(_));
                match (field_bits(w.format().bits), offset) {
                    (2, false) => quantized::<2, false>(height, panels),
                    (2, true) => quantized::<2, true>(height, panels),
                    (4, false) => quantized::<4, false>(height, panels),
                    (4, true) => quantized::<4, true>(height, panels),
                    (_, false) => quantized::<8, false>(height, panels),
                    (_, true) => quantized::<8, true>(height, panels),
                }
            }
            Weights::Dense(w) => match w.dtype() {
                Float::F16 => dense::<{ x86::F16 }>(height, panels),
                Float::BF16 => dense::<{ x86::BF16 }>(height, panels),
                Float::F32 => dense::<{ x86::F32 }>(height, panels),
            },
        }
    }

    pub(super) fn convert(w: Weights<'_>) -> ConvertFn {
        match w {
            Weights::Quantized(w) => match field_bits(w.format().bits) {
                2 => x86::convert_quantized::<2>,
                4 => x86::convert_quantized::<4>,
                _ => x86::convert_quantized::<8>,
            },
            Weights::Dense(_) => x86::convert_dense,
        }
    }

    pub(super) fn product(height: usize, panels: usize) -> ProductFn {
        match (height, panels) {
            (1, 2) => x86::product::<1, 2>,
            (2, 2) => x86::product::<2, 2>,
            (1, 1) => x86::product::<1, 1>,
            (2, 1) => x86::product::<2, 1>,
            (4, 1) => x86::product::<4, 1>,
            (6, 1) => x86::product::<6, 1>,
            (height, panels) => unreachable!("no tile of {height} rows × {panels} panels"),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Weights;
    use crate::cpu::x86::avx2::{load_bf16, load_f16, load_f32, load_per_group, load_u16, store_f32};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros};
    use crate::tensor::Floats;
    use std::arch::x86_64::*;
    use std::ops::Range;

    /// Types of dense weights, as constants that a function can be generic over.
    pub(super) const F16: usize = 0;
    pub(super) const BF16: usize = 1;
    pub(super) const F32: usize = 2;

    /// Sums of `R` rows by `P` panels, each in two registers of 8 outputs.
    type Sums<const R: usize, const P: usize> = [[[__m256; 2]; P]; R];

    /// Positions of codes in half a lane, at most.
    const POSITIONS: usize = 8;

    /// How the codes of a group become weights.
    #[derive(Clone, Copy)]
    struct GroupParams {
        scale: [__m256; 2],
        /// Taken off [`raised`] codes of each position: `2^(23−s)`, and the zero point where there is no offset.
        zero: [[__m256; 2]; POSITIONS],
        offset: [__m256; 2],
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn group_params<const FIELD: u32>(w: &CpuN16, panel: usize, group: usize) -> GroupParams {
        let at = (panel * w.groups() + group) * PANEL;
        let scale = load_per_group(w.scales(), at);
        let mut offset = [_mm256_setzero_ps(); 2];
        let mut zero = [_mm256_setzero_ps(); 2];
        match w.zeros() {
            PackedZeros::Symmetric => zero = [_mm256_set1_ps(w.format().middle() as f32); 2],
            PackedZeros::Integer(zeros) => {
                let words = load_u16(&zeros[at..]);
                zero = [_mm256_cvtepi32_ps(words[0]), _mm256_cvtepi32_ps(words[1])];
            }
            PackedZeros::Float(offsets) => offset = load_per_group(offsets, at),
        }
        let mut zeros = [zero; POSITIONS];
        for position in 0..positions(FIELD) {
            let base = _mm256_set1_ps(base(position as u32 * FIELD));
            for h in 0..2 {
                zeros[position][h] = _mm256_add_ps(zero[h], base);
            }
        }
        GroupParams { scale, zero: zeros, offset }
    }

    /// Positions of codes in half a lane.
    const fn positions(field: u32) -> usize {
        (16 / field) as usize
    }

    /// The place in its tile of the code at a position of the lower or upper half of a lane.
    const fn place(field: u32, half: usize, position: usize) -> usize {
        let shift = position as u32 * field;
        (shift % 8 / field) as usize * 4 + half * 2 + (shift / 8) as usize
    }

    /// `2^(23−s)`: the unit in the last place is `2^−s`.
    const fn base(shift: u32) -> f32 {
        (1 << (23 - shift)) as f32
    }

    /// Codes at a position of the lower half of each lane, plus `2^(23−s)`.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn raised<const FIELD: u32>(raw: __m256i, position: usize) -> __m256 {
        let shift = position as u32 * FIELD;
        let code = _mm256_and_si256(raw, _mm256_set1_epi32(((1 << FIELD) - 1) << shift));
        _mm256_castsi256_ps(_mm256_or_si256(code, _mm256_set1_epi32(base(shift).to_bits() as i32)))
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn direct_quantized<const FIELD: u32, const R: usize, const P: usize, const OFFSET: bool>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        let per_tile = w.columns_per_tile();
        let panel_bytes = w.tiles() * 64;
        let data = &w.codes()[panel * panel_bytes..(panel + P) * panel_bytes];
        assert!(x.len() == w.tiles() * per_tile * R && c.len() == R * P * PANEL);
        c.fill(0.0);
        for span in w.spans() {
            let mut params = [group_params::<FIELD>(w, panel, span.group); P];
            for p in 1..P {
                params[p] = group_params::<FIELD>(w, panel + p, span.group);
            }
            let data = &data[span.tile * 64..];
            let x = &x[span.tile * per_tile * R..(span.tile + span.tiles) * per_tile * R];
            let mut sums: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
            direct_span::<FIELD, R, P, OFFSET>(data, panel_bytes, x, &params, &mut sums);
            for r in 0..R {
                for p in 0..P {
                    let out = &mut c[(r * P + p) * PANEL..][..PANEL];
                    let mut y = load_f32(out);
                    for h in 0..2 {
                        y[h] = if OFFSET {
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

    /// Sets `sums` to the products of a span's weights, panels `panel_bytes` apart, and x `[place][R]`; the weights are
    /// not scaled yet unless there are offsets.
    ///
    /// A function of its own, not inlined, so that the sums stay in registers all through the loop.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    fn direct_span<const FIELD: u32, const R: usize, const P: usize, const OFFSET: bool>(
        data: &[u8],
        panel_bytes: usize,
        x: &[f32],
        params: &[GroupParams; P],
        sums: &mut Sums<R, P>,
    ) {
        let per_tile = const { (32 / FIELD) as usize };
        let tiles = x.len() / (per_tile * R);
        assert!(tiles * 64 + (P - 1) * panel_bytes <= data.len());
        // Several sums of few rows take turns: else each would wait for the one before it.
        let chains = const { 4 / R };
        let mut acc = [[[[_mm256_setzero_ps(); 2]; P]; R]; 4];
        let (mut tile, mut x) = (data.as_ptr(), x.as_ptr());
        for _ in 0..tiles {
            let mut raw = [[_mm256_setzero_si256(); 2]; P];
            for p in 0..P {
                for h in 0..2 {
                    // SAFETY: half of the 64 bytes of panel p's tile, within `data` as asserted.
                    raw[p][h] = unsafe { _mm256_loadu_si256(tile.add(p * panel_bytes + h * 32).cast()) };
                }
                // Far enough ahead to hide memory; a prefetch never faults.
                _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(p * panel_bytes + 1024).cast());
            }
            for half in 0..2 {
                for position in 0..const { positions(FIELD) } {
                    let acc = &mut acc[(half * positions(FIELD) + position) % chains];
                    let mut v = [_mm256_setzero_ps(); R];
                    for r in 0..R {
                        // SAFETY: within x, from whose length `tiles` comes.
                        v[r] = _mm256_set1_ps(unsafe { *x.add(place(FIELD, half, position) * R + r) });
                    }
                    for p in 0..P {
                        for h in 0..2 {
                            let code = raised::<FIELD>(raw[p][h], position);
                            let mut weight = _mm256_sub_ps(code, params[p].zero[position][h]);
                            if OFFSET {
                                weight = _mm256_fmadd_ps(weight, params[p].scale[h], params[p].offset[h]);
                            }
                            for r in 0..R {
                                acc[r][p][h] = _mm256_fmadd_ps(v[r], weight, acc[r][p][h]);
                            }
                        }
                    }
                }
                for p in 0..P {
                    for h in 0..2 {
                        raw[p][h] = _mm256_srli_epi32::<16>(raw[p][h]);
                    }
                }
            }
            tile = tile.wrapping_add(64);
            x = x.wrapping_add(per_tile * R);
        }
        for r in 0..R {
            for p in 0..P {
                for h in 0..2 {
                    sums[r][p][h] = acc[0][r][p][h];
                    for chain in 1..chains {
                        sums[r][p][h] = _mm256_add_ps(sums[r][p][h], acc[chain][r][p][h]);
                    }
                }
            }
        }
    }

    /// More rows than leave registers for converting: one panel of weights, a few places at a time.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn direct_through_buffer<const FIELD: u32, const R: usize>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        /// A multiple of the places of every tile.
        const BLOCK: usize = 128;
        let places = x.len() / R;
        let mut buffer = [0.0f32; BLOCK * PANEL];
        c.fill(0.0);
        for start in (0..places).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(places);
            let buffer = &mut buffer[..block.len() * PANEL];
            convert_quantized::<FIELD>(w, panel, block.clone(), buffer, PANEL);
            product::<R, 1>(&x[block.start * R..block.end * R], buffer, c);
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn direct_dense<const DTYPE: usize, const R: usize, const P: usize>(
        w: Weights<'_>,
        panel: usize,
        x: &[f32],
        c: &mut [f32],
    ) {
        let Weights::Dense(w) = w else { unreachable!("asked for with dense weights") };
        let k = w.k();
        assert!(x.len() == k * R && c.len() == R * P * PANEL);
        let mut data = [w.data().slice(0..0); P];
        for p in 0..P {
            data[p] = w.data().slice((panel + p) * k * PANEL..(panel + p + 1) * k * PANEL);
        }
        let mut y: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
        for j in 0..k {
            let mut weight = [[_mm256_setzero_ps(); 2]; P];
            for p in 0..P {
                let at = j * PANEL;
                weight[p] = match (DTYPE, &data[p]) {
                    (F16, Floats::F16(v)) => {
                        prefetch(v, at + 1024);
                        load_f16(&v[at..])
                    }
                    (BF16, Floats::BF16(v)) => {
                        prefetch(v, at + 1024);
                        load_bf16(&v[at..])
                    }
                    (F32, Floats::F32(v)) => {
                        prefetch(v, at + 512);
                        load_f32(&v[at..])
                    }
                    _ => unreachable!("asked for with another type"),
                };
            }
            for r in 0..R {
                let v = _mm256_set1_ps(x[j * R + r]);
                for p in 0..P {
                    for h in 0..2 {
                        y[r][p][h] = _mm256_fmadd_ps(v, weight[p][h], y[r][p][h]);
                    }
                }
            }
        }
        store(&y, c);
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn store<const R: usize, const P: usize>(y: &Sums<R, P>, c: &mut [f32]) {
        for r in 0..R {
            for p in 0..P {
                store_f32(y[r][p], &mut c[(r * P + p) * PANEL..]);
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn prefetch<T>(v: &[T], at: usize) {
        _mm_prefetch::<_MM_HINT_T0>(v.as_ptr().wrapping_add(at).cast());
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn convert_quantized<const FIELD: u32>(
        w: Weights<'_>,
        panel: usize,
        places: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let Weights::Quantized(w) = w else { unreachable!("asked for with quantised weights") };
        let per_tile = const { (32 / FIELD) as usize };
        let panel_bytes = w.tiles() * 64;
        let data = &w.codes()[panel * panel_bytes..(panel + 1) * panel_bytes];
        let (first, end) = (places.start / per_tile, places.end / per_tile);
        let begin = w.spans().partition_point(|s| s.tile + s.tiles <= first);
        for span in w.spans()[begin..].iter().take_while(|s| s.tile < end) {
            let params = group_params::<FIELD>(w, panel, span.group);
            for tile in span.tile.max(first)..(span.tile + span.tiles).min(end) {
                let bytes = &data[tile * 64..][..64];
                // SAFETY: 64 bytes, checked by the slice.
                let mut raw = unsafe {
                    [_mm256_loadu_si256(bytes.as_ptr().cast()), _mm256_loadu_si256(bytes[32..].as_ptr().cast())]
                };
                let out = &mut out[(tile - first) * per_tile * stride..][..(per_tile - 1) * stride + PANEL];
                for half in 0..2 {
                    for position in 0..const { positions(FIELD) } {
                        let mut weight = params.offset;
                        for h in 0..2 {
                            let code = _mm256_sub_ps(raised::<FIELD>(raw[h], position), params.zero[position][h]);
                            weight[h] = _mm256_fmadd_ps(code, params.scale[h], params.offset[h]);
                        }
                        store_f32(weight, &mut out[place(FIELD, half, position) * stride..]);
                    }
                    raw = [_mm256_srli_epi32::<16>(raw[0]), _mm256_srli_epi32::<16>(raw[1])];
                }
            }
        }
    }

    #[target_feature(enable = "avx2,f16c")]
    pub(super) fn convert_dense(w: Weights<'_>, panel: usize, places: Range<usize>, out: &mut [f32], stride: usize) {
        let Weights::Dense(w) = w else { unreachable!("asked for with dense weights") };
        let data = w.data().slice((panel * w.k() + places.start) * PANEL..(panel * w.k() + places.end) * PANEL);
        for j in 0..places.len() {
            let weight = match data {
                Floats::F16(v) => load_f16(&v[j * PANEL..]),
                Floats::BF16(v) => load_bf16(&v[j * PANEL..]),
                Floats::F32(v) => load_f32(&v[j * PANEL..]),
            };
            store_f32(weight, &mut out[j * stride..]);
        }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn product<const R: usize, const P: usize>(x: &[f32], w: &[f32], c: &mut [f32]) {
        let places = x.len() / R;
        assert!(x.len() == places * R && w.len() == places * P * PANEL && c.len() == R * P * PANEL);
        let mut y: Sums<R, P> = [[[_mm256_setzero_ps(); 2]; P]; R];
        for r in 0..R {
            for p in 0..P {
                y[r][p] = load_f32(&c[(r * P + p) * PANEL..]);
            }
        }
        let (mut x, mut w) = (x.as_ptr(), w.as_ptr());
        for _ in 0..places {
            let mut weight = [[_mm256_setzero_ps(); 2]; P];
            for p in 0..P {
                for h in 0..2 {
                    // SAFETY: within w, whose length was asserted.
                    weight[p][h] = unsafe { _mm256_loadu_ps(w.add(p * PANEL + h * 8)) };
                }
            }
            for r in 0..R {
                // SAFETY: within x, whose length was asserted.
                let v = _mm256_set1_ps(unsafe { *x.add(r) });
                for p in 0..P {
                    for h in 0..2 {
                        y[r][p][h] = _mm256_fmadd_ps(v, weight[p][h], y[r][p][h]);
                    }
                }
            }
            x = x.wrapping_add(R);
            w = w.wrapping_add(P * PANEL);
        }
        store(&y, c);
    }
}
