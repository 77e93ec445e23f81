//! Loads of 16 numbers with AVX-512.

use crate::layout::cpu_n16::PerGroup;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// 16 halfs, widened.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu) fn load_f16(v: &[f16]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) })
}

/// 16 brain floats, widened.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_bf16(v: &[bf16]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    let words = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) });
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
}

/// 16 singles.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_f32(v: &[f32]) -> __m512 {
    let v = &v[..16];
    // SAFETY: 64 bytes, checked above.
    unsafe { _mm512_loadu_ps(v.as_ptr()) }
}

/// 16 words, widened to int32.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::cpu) fn load_u16(v: &[u16]) -> __m512i {
    let v = &v[..16];
    // SAFETY: 32 bytes, checked above.
    _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(v.as_ptr().cast()) })
}

/// 16 bytes with sign, widened to int32.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_i8(v: &[i8]) -> __m512i {
    let v = &v[..16];
    // SAFETY: 16 bytes, checked above.
    _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(v.as_ptr().cast()) })
}

/// The numbers of a panel's group, from element `at` on.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
pub(in crate::cpu) fn load_per_group(v: &PerGroup, at: usize) -> __m512 {
    match v {
        PerGroup::F16(v) => load_f16(&v[at..]),
        PerGroup::BF16(v) => load_bf16(&v[at..]),
        PerGroup::F32(v) => load_f32(&v[at..]),
        PerGroup::Multiples(multiples) => {
            let (halves, factors) = multiples.sixteen(at);
            _mm512_mul_ps(load_f16(halves), _mm512_cvtepi32_ps(load_i8(factors)))
        }
    }
}
