//! Loads of 16 numbers with AVX2, as two registers of 8.

use crate::layout::cpu_n16::PerGroup;
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

/// 16 bytes with sign, widened to int32.
#[inline]
#[target_feature(enable = "avx2")]
fn load_i8(v: &[i8]) -> [__m256i; 2] {
    let v = &v[..16];
    // SAFETY: 16 bytes, checked above.
    let bytes = unsafe { _mm_loadu_si128(v.as_ptr().cast()) };
    [_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(bytes, bytes))]
}

/// The numbers of a panel's group, from element `at` on.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(in crate::cpu) fn load_per_group(v: &PerGroup, at: usize) -> [__m256; 2] {
    match v {
        PerGroup::F16(v) => load_f16(&v[at..]),
        PerGroup::BF16(v) => load_bf16(&v[at..]),
        PerGroup::F32(v) => load_f32(&v[at..]),
        PerGroup::Multiples(multiples) => {
            let (halves, factors) = multiples.sixteen(at);
            let (halves, factors) = (load_f16(halves), load_i8(factors));
            [
                _mm256_mul_ps(halves[0], _mm256_cvtepi32_ps(factors[0])),
                _mm256_mul_ps(halves[1], _mm256_cvtepi32_ps(factors[1])),
            ]
        }
    }
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
