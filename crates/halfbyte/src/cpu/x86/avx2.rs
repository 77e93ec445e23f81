//! Loads of 16 numbers with AVX2, as two registers of 8.

use super::in_order::in_order;
use crate::layout::cpu_n16::{
    CpuN16, PANEL, PackedZeros, PanelMultiples, PerGroup, Sixteen, TABLE, planes, tile_bytes,
};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// 16 halfs, widened.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::cpu) fn load_f16(v: &[f16]) -> [__m256; 2] {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    let (low, high) = unsafe { (_mm_loadu_si128(v.as_ptr().cast()), _mm_loadu_si128(v[8..].as_ptr().cast())) };
    [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
}

/// 16 brain floats, widened.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn load_bf16(v: &[bf16]) -> [__m256; 2] {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    let (low, high) = unsafe { (_mm_loadu_si128(v.as_ptr().cast()), _mm_loadu_si128(v[8..].as_ptr().cast())) };
    let (low, high) = (_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high));
    [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
}

/// 16 singles.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn load_f32(v: &[f32]) -> [__m256; 2] {
    let v = &v[..16];
    // SAFETY: 64 bytes, checked above.
    unsafe { [_mm256_loadu_ps(v.as_ptr()), _mm256_loadu_ps(v[8..].as_ptr())] }
}

/// 16 words, widened to int32.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn load_u16(v: &[u16]) -> [__m256i; 2] {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    let (low, high) = unsafe { (_mm_loadu_si128(v.as_ptr().cast()), _mm_loadu_si128(v[8..].as_ptr().cast())) };
    [_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)]
}

in_order!("avx2,f16c", [__m256; 2]);

/// Halves times 16 bytes with sign.
#[inline]
#[target_feature(enable = "avx2")]
fn product(halves: [__m256; 2], bytes: __m128i) -> [__m256; 2] {
    let low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
    let high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes)));
    [_mm256_mul_ps(halves[0], low), _mm256_mul_ps(halves[1], high)]
}

/// Writes 16 singles.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn store_f32(v: [__m256; 2], out: &mut [f32]) {
    let out = &mut out[..16];
    // SAFETY: 64 bytes, checked above.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
        _mm256_storeu_ps(out[8..].as_mut_ptr(), v[1]);
    }
}

/// The two planes of a tile of 3 bits for eight outputs, from `8·half` on: bits 0 and 1 of codes, and bit 2 of those of either tile of
/// 4 bits that it is made of, in bits 2 and 6 of each byte or 3 and 7.
///
/// # Safety
/// `tile` is that of a tile of codes of 3 bits.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn planes_of_3(tile: *const u8, half: usize) -> [__m256i; 2] {
    // SAFETY: half of the 64 bytes that hold bits 0 and 1, and of the 32 that hold bit 2.
    let (low, high) =
        unsafe { (_mm256_loadu_si256(tile.add(half * 32).cast()), _mm_loadu_si128(tile.add(64 + half * 16).cast())) };
    let high = _mm256_cvtepu16_epi32(high);
    [low, _mm256_or_si256(high, _mm256_slli_epi32::<18>(high))]
}

/// Eight outputs, from `8·half` on, of a tile of 3 bits as those of two tiles of 4 bits.
///
/// # Safety
/// `tile` is that of a tile of codes of 3 bits.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) unsafe fn nibbles(tile: *const u8, half: usize) -> [__m256i; 2] {
    // SAFETY: promised to this function.
    let [low, high] = unsafe { planes_of_3(tile, half) };
    let joined = |low, high| {
        let low = _mm256_and_si256(low, _mm256_set1_epi32(0x3333_3333));
        _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi32(0x4444_4444)))
    };
    [joined(low, high), joined(_mm256_srli_epi32::<2>(low), _mm256_srli_epi32::<1>(high))]
}

/// The table of a form with numbers, twice; of others nothing.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) fn table(w: &CpuN16) -> __m256i {
    let values = w.table().unwrap_or_default();
    // SAFETY: 16 bytes.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
}

/// Quad `i` of a tile: four columns of eight outputs, from output `8·half` on, a byte each.
///
/// # Safety
/// `tile` is that of a tile of a FORM.
#[inline]
#[target_feature(enable = "avx2")]
pub(in crate::cpu) unsafe fn quad<const FORM: u32>(tile: *const u8, i: usize, half: usize, table: __m256i) -> __m256i {
    if FORM == 3 {
        // Joined once for all quads of a tile, where loops over them are unrolled.
        // SAFETY: promised to this function.
        let word = unsafe { nibbles(tile, half) }[i / 2 % 2];
        let word = if i % 2 == 1 { _mm256_srli_epi32::<4>(word) } else { word };
        return _mm256_and_si256(word, _mm256_set1_epi8(15));
    }
    let (field, high) = const { planes(FORM) };
    let fields = const { 8 / planes(FORM).0 as usize };
    // SAFETY: half of the 64 bytes that hold the low fields of this quad.
    let mut codes = unsafe { _mm256_loadu_si256(tile.add(i / fields * 64 + half * 32).cast()) };
    let shift = i % fields * field as usize;
    if shift > 0 {
        codes = _mm256_srl_epi32(codes, _mm_cvtsi32_si128(shift as i32));
    }
    if field < 8 {
        codes = _mm256_and_si256(codes, _mm256_set1_epi8(const { ((1u32 << planes(FORM).0) - 1) as u8 as i8 }));
    }
    if FORM >= TABLE {
        return _mm256_shuffle_epi8(table, codes);
    }
    if high == 0 {
        return codes;
    }
    // SAFETY: half of the 64 bytes that a tile of two planes ends with.
    let above = unsafe { _mm256_loadu_si256(tile.add(const { tile_bytes(FORM) - 64 } + half * 32).cast()) };
    // Bit `i · high` of each byte becomes bit 4.
    let above = match 4usize.checked_sub(i * high as usize) {
        Some(up) => _mm256_sll_epi32(above, _mm_cvtsi32_si128(up as i32)),
        None => _mm256_srl_epi32(above, _mm_cvtsi32_si128((i * high as usize - 4) as i32)),
    };
    let mask = _mm256_set1_epi8(const { ((1 << planes(FORM).1) - 1) << 4 });
    _mm256_or_si256(codes, _mm256_and_si256(above, mask))
}
