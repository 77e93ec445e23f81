//! One row of exact activations by 16 outputs in two registers of 256 bits, but for the products themselves: of `a16_avxvnni` and
//! `a16_avx2madd`.

use super::exact_row::{BLOCK, Exponent, FixedPoint, Places};
use crate::layout::cpu_n16::{CpuN16, PackedZeros};
use std::arch::x86_64::*;

/// See [`Functions::add_block`](super::exact_row::Functions). Of four columns four digits of 8 bits lie `[digit][4]`; two of 16 even low, odd low, even
/// high, odd high.
#[target_feature(enable = "avx2,fma")]
pub(super) fn add_block<const DIGITS: usize>(w: &CpuN16, places: Places, x: &[f32], all: &mut FixedPoint) {
    let mut values = [_mm256_setzero_ps(); BLOCK / 8];
    let (whole, four) = x.as_chunks::<8>();
    for (v, x) in values.iter_mut().zip(whole) {
        // SAFETY: 8 floats.
        *v = unsafe { _mm256_loadu_ps(x.as_ptr()) };
    }
    if let Some((four, [])) = four.split_first_chunk::<4>() {
        // SAFETY: 4 floats.
        values[whole.len()] = _mm256_zextps128_ps256(unsafe { _mm_loadu_ps(four.as_ptr()) });
    }
    let vectors = x.len().div_ceil(8);
    let mut total = 0.0;
    if let PackedZeros::Float(_) = w.zeros() {
        let mut sums = _mm256_setzero_pd();
        for &v in &values[..vectors] {
            sums = _mm256_add_pd(sums, _mm256_cvtps_pd(_mm256_castps256_ps128(v)));
            sums = _mm256_add_pd(sums, _mm256_cvtps_pd(_mm256_extractf128_ps::<1>(v)));
        }
        let sums = _mm_add_pd(_mm256_castpd256_pd128(sums), _mm256_extractf128_pd::<1>(sums));
        total = (_mm_cvtsd_f64(sums) + _mm_cvtsd_f64(_mm_unpackhi_pd(sums, sums))) as f32;
    }
    let sign = _mm256_set1_ps(-0.0);
    loop {
        let mut greatest = _mm256_setzero_si256();
        for &v in &values[..vectors] {
            greatest = _mm256_max_epu32(greatest, _mm256_castps_si256(_mm256_andnot_ps(sign, v)));
        }
        let greatest = _mm_max_epu32(_mm256_castsi256_si128(greatest), _mm256_extracti128_si256::<1>(greatest));
        let greatest = _mm_max_epu32(greatest, _mm_unpackhi_epi64(greatest, greatest));
        let exponent = Exponent::of((_mm_cvtsi128_si32(greatest) as u32).max(_mm_extract_epi32::<1>(greatest) as u32));
        if !exponent.finite {
            values = [_mm256_setzero_ps(); BLOCK / 8];
        }
        // A power of two in two steps, since one may be no float.
        let halves = |e: i32| [e / 2, e - e / 2].map(|e| _mm256_set1_ps(f32::from_bits(((e + 127) as u32) << 23)));
        let (up, down) = (halves(31 - exponent.e), halves(exponent.e - 31));
        let (mut sums, mut lost) = (_mm256_setzero_si256(), 0);
        let from = all.digits.len();
        all.digits.resize(from + 8 * vectors, 0);
        for (v, digits) in values[..vectors].iter_mut().zip(all.digits[from..].as_chunks_mut::<8>().0) {
            let integers = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(*v, up[0]), up[1]));
            let back = _mm256_mul_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(integers), down[0]), down[1]);
            let rest = _mm256_sub_ps(*v, back);
            let least = _mm256_mul_ps(_mm256_andnot_ps(sign, *v), _mm256_set1_ps(2.0f32.powi(-21)));
            let too_much = _mm256_cmp_ps::<_CMP_GT_OQ>(_mm256_andnot_ps(sign, rest), least);
            lost |= _mm256_movemask_ps(too_much);
            *v = _mm256_and_ps(too_much, rest);
            // Digits with sign, from the lowest on: −2^15 is carried as 2^15 is, or −128 as 128.
            let carry = _mm256_set1_epi32(if DIGITS == 4 { 0x0080_8080 } else { 0x8000 });
            let of_columns = _mm256_xor_si256(_mm256_add_epi32(integers, carry), carry);
            let order = match DIGITS {
                4 => _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15),
                _ => _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15),
            };
            let of_digits = _mm256_shuffle_epi8(of_columns, _mm256_broadcastsi128_si256(order));
            let words = if DIGITS == 4 { _mm256_maddubs_epi16(_mm256_set1_epi8(1), of_digits) } else { of_digits };
            sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
            // SAFETY: 32 bytes.
            unsafe { _mm256_storeu_si256(digits.as_mut_ptr().cast(), of_digits) };
        }
        all.digits.truncate(from + x.len());
        let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
        let mut of_digits = [0i32; 4];
        // SAFETY: 16 bytes.
        unsafe { _mm_storeu_si128(of_digits.as_mut_ptr().cast(), sums) };
        let [a, b, c, d] = of_digits;
        let place = if DIGITS == 4 { 256 } else { 1 };
        all.blocks.push(exponent.block(w, places, total, [a + place * b, c + place * d]));
        if lost == 0 {
            return;
        }
        total = 0.0;
    }
}

/// What is left of offsets, and zero points that bring them near to 0.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn centre(scale: [__m256; 2], offset: [__m256; 2]) -> ([__m256; 2], [__m256i; 2]) {
    let (mut rest, mut zeros) = (offset, [_mm256_setzero_si256(); 2]);
    for h in 0..2 {
        // Nearly as good as a quotient: a zero point beside the nearest leaves little more.
        let codes = _mm256_mul_ps(_mm256_sub_ps(_mm256_setzero_ps(), offset[h]), _mm256_rcp_ps(scale[h]));
        // Of a scale of 0 any zero point will do.
        let codes = _mm256_max_ps(_mm256_min_ps(codes, _mm256_set1_ps(255.0)), _mm256_setzero_ps());
        zeros[h] = _mm256_cvtps_epi32(codes);
        rest[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(zeros[h]), scale[h], offset[h]);
    }
    (rest, zeros)
}

/// For a module that has `DIGITS` of an integer and `add_tiles`, which adds the products of each to sums of eight outputs: `panels`.
macro_rules! panels {
    ($features:literal) => {
        /// See [`PanelsFn`](super::PanelsFn).
        #[target_feature(enable = $features)]
        pub(super) unsafe fn panels<const FORM: u32>(
            w: &CpuN16,
            first: usize,
            x: &[FixedPoint],
            ahead: usize,
            c: &mut [f32],
        ) {
            for (panel, c) in (first..).zip(c.as_chunks_mut().0) {
                // SAFETY: promised to this function.
                unsafe { panel_of::<FORM>(w, panel, x, ahead, c) };
            }
        }

        /// # Safety
        /// x was made for this weight.
        #[target_feature(enable = $features)]
        unsafe fn panel_of<const FORM: u32>(
            w: &CpuN16,
            panel: usize,
            x: &[FixedPoint],
            ahead: usize,
            c: &mut [f32; PANEL],
        ) {
            let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
            let codes = w.codes()[panel * w.panel_bytes()..(panel + 1) * w.panel_bytes()].as_ptr();
            let table = table(w);
            let mut room = room();
            let mut numbers = Numbers::<1>::new(w, panel, &mut room);
            let (mut total, mut y, mut run) = ([_mm256_setzero_ps(); 2], [_mm256_setzero_ps(); 2], 0);
            for part in x {
                let mut digits = part.digits.as_ptr();
                for block in &part.blocks {
                    let of_block = block.group / SPANS_TOGETHER;
                    if of_block != run {
                        for h in 0..2 {
                            total[h] = _mm256_add_ps(total[h], y[h]);
                        }
                        (y, run) = ([_mm256_setzero_ps(); 2], of_block);
                    }
                    let at = (panel * w.groups() + block.group) * PANEL;
                    numbers.to(block.group);
                    let scale = numbers.scale(0, at);
                    let (mut zero, mut offset) = (None, None);
                    if let PackedZeros::Integer(zeros) = w.zeros() {
                        zero = Some(load_u16(&zeros[at..]));
                    } else if let Some(offsets) = numbers.offset(0, at) {
                        let (rest, zeros) = centre(scale, offsets);
                        (zero, offset) = (Some(zeros), Some(rest));
                    }
                    let mut sums = [[_mm256_setzero_si256(); 2]; DIGITS];
                    for half in 0..2 {
                        let less = _mm256_set1_epi32(block.less[half]);
                        for h in 0..2 {
                            sums[half * DIGITS / 2][h] =
                                if let Some(zero) = zero { _mm256_mullo_epi32(zero[h], less) } else { less };
                        }
                    }
                    // SAFETY: the block lies within the panel, and has as many digits.
                    unsafe {
                        add_tiles::<FORM>(
                            (codes.add(block.tile * tile_bytes), ahead),
                            digits,
                            block.tiles,
                            table,
                            &mut sums,
                        );
                    }
                    digits = digits.wrapping_add(block.tiles * quads * 4);
                    for h in 0..2 {
                        let mut halves = [sums[0][h], sums[DIGITS / 2][h]];
                        if DIGITS == 4 {
                            // Sums of two bytes are below 2³⁰: 64 products of at most 255 · 128.
                            for half in 0..2 {
                                let upper = _mm256_slli_epi32::<8>(sums[half * 2 + 1][h]);
                                halves[half] = _mm256_add_epi32(halves[half], upper);
                            }
                        }
                        let [low, high] = [_mm256_cvtepi32_ps(halves[0]), _mm256_cvtepi32_ps(halves[1])];
                        let dot = _mm256_fmadd_ps(low, _mm256_set1_ps(1.0 / 65536.0), high);
                        y[h] = _mm256_fmadd_ps(_mm256_mul_ps(dot, _mm256_set1_ps(block.scale)), scale[h], y[h]);
                        if let Some(offset) = offset {
                            y[h] = _mm256_fmadd_ps(offset[h], _mm256_set1_ps(block.total), y[h]);
                        }
                    }
                }
            }
            for h in 0..2 {
                total[h] = _mm256_add_ps(total[h], y[h]);
            }
            store_f32(total, c);
        }
    };
}

pub(super) use panels;
