//! [`Simd`] with AVX2 and with AVX-512.

use super::{Kernel, Simd, bf16, f16};
use std::arch::x86_64::*;

/// AVX2 and FMA: eight elements.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(pub(super) ());

/// AVX-512 F, BW, DQ, VL: sixteen elements.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(pub(super) ());

macro_rules! instructions {
    ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty { $($body:tt)* })*) => { $(
        #[inline(always)]
        fn $name(self, $($arg: $type),*) -> $ret {
            // SAFETY: register operations only; `self` exists, so the processor has the instruction set.
            unsafe { $($body)* }
        }
    )* };
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    #[inline(always)]
    fn apart<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
        #[inline(never)]
        fn enabled<K: Kernel>(kernel: K) -> K::Output {
            kernel.run(Avx512(()))
        }
        // SAFETY: `self` exists, so the processor has the instruction set.
        unsafe { enabled(kernel) }
    }

    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> __m512 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm512_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const f16) -> __m512 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, x: *const bf16) -> __m512 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(x.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, x: *const i8) -> __m512 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, x: *mut f32, v: __m512) {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm512_storeu_ps(x, v) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes_ptr(self, x: *mut i8, v: __m512) {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm_storeu_si128(x.cast(), _mm512_cvtepi32_epi8(_mm512_castps_si512(v))) }
    }
    instructions! {
        splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
        abs(x: __m512) -> __m512 { _mm512_abs_ps(x) }
        add(a: __m512, b: __m512) -> __m512 { _mm512_add_ps(a, b) }
        sub(a: __m512, b: __m512) -> __m512 { _mm512_sub_ps(a, b) }
        mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        div(a: __m512, b: __m512) -> __m512 { _mm512_div_ps(a, b) }
        mul_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        max(a: __m512, b: __m512) -> __m512 { _mm512_max_ps(a, b) }
        if_less(a: __m512, b: __m512, x: __m512, y: __m512) -> __m512 {
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), y, x)
        }
        shift_to_exponent(x: __m512) -> __m512 {
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(x)))
        }
        sum(v: __m512) -> f32 { _mm512_reduce_add_ps(v) }
        greatest(v: __m512) -> f32 { _mm512_reduce_max_ps(v) }
    }
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    #[inline(always)]
    fn apart<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx,avx2,fma,f16c")]
        #[inline(never)]
        fn enabled<K: Kernel>(kernel: K) -> K::Output {
            kernel.run(Avx2(()))
        }
        // SAFETY: `self` exists, so the processor has the instruction set.
        unsafe { enabled(kernel) }
    }

    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> __m256 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm256_loadu_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_f16_ptr(self, x: *const f16) -> __m256 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, x: *const bf16) -> __m256 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(x.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, x: *const i8) -> __m256 {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.cast()))) }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, x: *mut f32, v: __m256) {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe { _mm256_storeu_ps(x, v) }
    }
    #[inline(always)]
    unsafe fn store_low_bytes_ptr(self, x: *mut i8, v: __m256) {
        // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
        unsafe {
            let bytes = _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0xff));
            let words = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
            _mm_storel_epi64(x.cast(), _mm_packus_epi16(words, words));
        }
    }
    instructions! {
        splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
        abs(x: __m256) -> __m256 { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
        add(a: __m256, b: __m256) -> __m256 { _mm256_add_ps(a, b) }
        sub(a: __m256, b: __m256) -> __m256 { _mm256_sub_ps(a, b) }
        mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        div(a: __m256, b: __m256) -> __m256 { _mm256_div_ps(a, b) }
        mul_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        max(a: __m256, b: __m256) -> __m256 { _mm256_max_ps(a, b) }
        if_less(a: __m256, b: __m256, x: __m256, y: __m256) -> __m256 {
            _mm256_blendv_ps(y, x, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
        }
        shift_to_exponent(x: __m256) -> __m256 {
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(x)))
        }
        sum(v: __m256) -> f32 {
            let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
        greatest(v: __m256) -> f32 {
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
}
