//! One row of exact activations by products of int16 with AVX2.
//!
//! As [`exact_row`](super::exact_row) says. An integer of x is two words with sign; codes of four columns are words of the even and of
//! the odd ones, and `vpmaddwd` adds pairs of products in int32.
//!
//! ```text
//! X = low + high·2^16, low from −2^15 to 2^15 − 1
//! acc[low], acc[high] = −zero·Σ low, −zero·Σ high
//! for each 4 columns:  acc[low]  += dot2(even codes, low) + dot2(odd codes, low)                             vpmaddwd
//!                      acc[high] += dot2(even codes, high) + dot2(odd codes, high)
//! ```

use super::exact_row::{Functions, PanelsFn};
use crate::cpu::isa::AHEAD;
use crate::layout::cpu_n16::TABLE;

pub(super) const FUNCTIONS: Functions = Functions { add_block: x86::add_block, panels, ahead: |_, _| AHEAD };

fn panels(form: u32) -> PanelsFn {
    match form {
        2 => x86::panels::<2>,
        3 => x86::panels::<3>,
        4 => x86::panels::<4>,
        5 => x86::panels::<5>,
        6 => x86::panels::<6>,
        8 => x86::panels::<8>,
        // Whatever the values are.
        TABLE.. => x86::panels::<TABLE>,
        form => unreachable!("no codes of form {form}"),
    }
}

mod x86 {
    use crate::cpu::matmul::exact_row::{BLOCK, Exponent, FixedPoint, Places};
    use crate::cpu::x86::avx2::{Numbers, load_u16, quad, room, store_f32, table};
    use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, quads, tile_bytes};
    use std::arch::x86_64::*;

    /// See [`Functions::add_block`](super::Functions): words of four columns lie even low, odd low, even high, odd high.
    #[target_feature(enable = "avx2,fma")]
    pub(super) fn add_block(w: &CpuN16, places: Places, x: &[f32], all: &mut FixedPoint) {
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
            let exponent =
                Exponent::of((_mm_cvtsi128_si32(greatest) as u32).max(_mm_extract_epi32::<1>(greatest) as u32));
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
                // Words with sign: −2^15 is carried as 2^15 is.
                let carry = _mm256_set1_epi32(0x8000);
                let words = _mm256_xor_si256(_mm256_add_epi32(integers, carry), carry);
                let order = _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, 2, 3, 10, 11, 6, 7, 14, 15);
                let words = _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(order));
                sums = _mm256_add_epi32(sums, _mm256_madd_epi16(words, _mm256_set1_epi16(1)));
                // SAFETY: 32 bytes.
                unsafe { _mm256_storeu_si256(digits.as_mut_ptr().cast(), words) };
            }
            all.digits.truncate(from + x.len());
            let sums = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
            let mut of_words = [0i32; 4];
            // SAFETY: 16 bytes.
            unsafe { _mm_storeu_si128(of_words.as_mut_ptr().cast(), sums) };
            let [even_low, odd_low, even_high, odd_high] = of_words;
            all.blocks.push(exponent.block(w, places, total, [even_low + odd_low, even_high + odd_high]));
            if lost == 0 {
                return;
            }
            total = 0.0;
        }
    }

    /// See [`PanelsFn`](super::PanelsFn).
    #[target_feature(enable = "avx2,fma,f16c")]
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
    #[target_feature(enable = "avx2,fma,f16c")]
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
        let mut y = [_mm256_setzero_ps(); 2];
        for part in x {
            let mut digits = part.digits.as_ptr();
            for block in &part.blocks {
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
                let mut sums = [[_mm256_setzero_si256(); 2]; 2];
                for digit in 0..2 {
                    let less = _mm256_set1_epi32(block.less[digit]);
                    for h in 0..2 {
                        sums[digit][h] = if let Some(zero) = zero { _mm256_mullo_epi32(zero[h], less) } else { less };
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
                    let [low, high] = [_mm256_cvtepi32_ps(sums[0][h]), _mm256_cvtepi32_ps(sums[1][h])];
                    let dot = _mm256_fmadd_ps(low, _mm256_set1_ps(1.0 / 65536.0), high);
                    y[h] = _mm256_fmadd_ps(_mm256_mul_ps(dot, _mm256_set1_ps(block.scale)), scale[h], y[h]);
                    if let Some(offset) = offset {
                        y[h] = _mm256_fmadd_ps(offset[h], _mm256_set1_ps(block.total), y[h]);
                    }
                }
            }
        }
        store_f32(y, c);
    }

    /// Adds the products of some tiles of a panel with digits of as many places to sums of either digit, of eight outputs each, and
    /// prefetches codes `ahead` bytes ahead; a prefetch never faults.
    ///
    /// # Safety
    /// The panel's codes and x are as long.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn add_tiles<const FORM: u32>(
        (mut tile, ahead): (*const u8, usize),
        mut x: *const i32,
        tiles: usize,
        table: __m256i,
        sums: &mut [[__m256i; 2]; 2],
    ) {
        let (tile_bytes, quads) = const { (tile_bytes(FORM), quads(FORM)) };
        // Sums of a block are below 2³⁰: 64 products of at most 255 · 2¹⁵.
        let mut acc = *sums;
        for _ in 0..tiles {
            if ahead > 0 {
                for at in (0..tile_bytes).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(tile.wrapping_add(at + ahead).cast());
                }
            }
            for i in 0..quads {
                let mut of_x = [[_mm256_setzero_si256(); 2]; 2];
                for digit in 0..2 {
                    for odd in 0..2 {
                        // SAFETY: digits of four places.
                        of_x[digit][odd] = _mm256_set1_epi32(unsafe { x.add(i * 4 + digit * 2 + odd).read() });
                    }
                }
                for h in 0..2 {
                    // SAFETY: a tile of the panel.
                    let codes = unsafe { quad::<FORM>(tile, i, h, table) };
                    let (even, odd) = (_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(codes));
                    for digit in 0..2 {
                        let evens = _mm256_madd_epi16(even, of_x[digit][0]);
                        let odds = _mm256_madd_epi16(odd, of_x[digit][1]);
                        acc[digit][h] = _mm256_add_epi32(acc[digit][h], _mm256_add_epi32(evens, odds));
                    }
                }
            }
            x = x.wrapping_add(quads * 4);
            tile = tile.wrapping_add(tile_bytes);
        }
        *sums = acc;
    }

    /// What is left of offsets, and zero points that bring them near to 0.
    #[inline]
    #[target_feature(enable = "avx2,fma")]
    fn centre(scale: [__m256; 2], offset: [__m256; 2]) -> ([__m256; 2], [__m256i; 2]) {
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
}
