//! Vectors of f32 behind one trait, so that a kernel is written once for every instruction set.
//!
//! A kernel is a [`Kernel`] whose `run` is generic over [`Simd`] and `#[inline(always)]`, as is everything that it
//! calls with a [`Simd`]. [`dispatch`] calls it from a function that has the instruction set enabled, so that all of
//! it is compiled for that set.

use super::Cpu;
use super::isa::Isa;
use half::{bf16, f16};

/// The operations of one instruction set. A value of such a type is the proof that the processor has the set.
pub(crate) trait Simd: Copy {
    /// A vector.
    type V: Copy;
    /// Its number of elements: 4, 8 or 16.
    const LANES: usize;

    fn splat(self, x: f32) -> Self::V;
    /// # Safety
    /// `LANES` elements must be readable at `x`.
    unsafe fn load_ptr(self, x: *const f32) -> Self::V;
    /// # Safety
    /// `LANES` elements must be writable at `x`.
    unsafe fn store_ptr(self, x: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a·b + c`, with one rounding where the instruction set has it, with two elsewhere.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The greater one; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `x` where `a < b`, else (also for NaN) `y`.
    fn if_less(self, a: Self::V, b: Self::V, x: Self::V, y: Self::V) -> Self::V;
    /// The bits, shifted from the end of the mantissa to the exponent.
    fn shift_to_exponent(self, x: Self::V) -> Self::V;

    /// The first elements of a slice. Panics if it is shorter than a vector.
    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::V {
        assert!(x.len() >= Self::LANES);
        // SAFETY: the length was checked just now.
        unsafe { self.load_ptr(x.as_ptr()) }
    }

    /// As [`Simd::load`], of halfs.
    fn load_f16(self, x: &[f16]) -> Self::V;
    /// As [`Simd::load`], of brain floats.
    fn load_bf16(self, x: &[bf16]) -> Self::V;
    /// As [`Simd::load`], of bytes.
    fn load_i8(self, x: &[i8]) -> Self::V;

    /// Writes the first elements of a slice. Panics if it is shorter than a vector.
    #[inline(always)]
    fn store(self, x: &mut [f32], v: Self::V) {
        assert!(x.len() >= Self::LANES);
        // SAFETY: the length was checked just now.
        unsafe { self.store_ptr(x.as_mut_ptr(), v) }
    }

    /// A slice that is shorter than a vector, filled up with `fill`.
    #[inline(always)]
    fn load_part(self, x: &[f32], fill: f32) -> Self::V {
        let mut whole = [fill; 16];
        whole[..x.len()].copy_from_slice(x);
        self.load(&whole)
    }

    /// Writes a slice that is shorter than a vector.
    #[inline(always)]
    fn store_part(self, x: &mut [f32], v: Self::V) {
        let mut whole = [0.0; 16];
        self.store(&mut whole, v);
        x.copy_from_slice(&whole[..x.len()]);
    }

    /// The elements, then zeros.
    #[inline(always)]
    fn to_array(self, v: Self::V) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes, v);
        lanes
    }

    /// The sum of the elements, by halves.
    #[inline(always)]
    fn sum(self, v: Self::V) -> f32 {
        let mut lanes = self.to_array(v);
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] += lanes[i + half];
            }
            half /= 2;
        }
        lanes[0]
    }

    /// The greatest element, if none is NaN.
    #[inline(always)]
    fn greatest(self, v: Self::V) -> f32 {
        let mut lanes = self.to_array(v);
        let mut half = Self::LANES / 2;
        while half > 0 {
            for i in 0..half {
                lanes[i] = if lanes[i] > lanes[i + half] { lanes[i] } else { lanes[i + half] };
            }
            half /= 2;
        }
        lanes[0]
    }
}

/// Code generic over the instruction set.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;
    /// The code; implementations are `#[inline(always)]`.
    fn run<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs `kernel` with the instruction set of `cpu`.
#[inline]
pub(crate) fn dispatch<K: Kernel>(cpu: &Cpu, kernel: K) -> K::Output {
    match cpu.caps().isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            #[target_feature(enable = "avx,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
            fn enabled<K: Kernel>(kernel: K) -> K::Output {
                kernel.run(x86::Avx512(()))
            }
            // SAFETY: a `Cpu` only has capabilities that were detected.
            unsafe { enabled(kernel) }
        }
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => {
            #[target_feature(enable = "avx,avx2,fma,f16c")]
            fn enabled<K: Kernel>(kernel: K) -> K::Output {
                kernel.run(x86::Avx2(()))
            }
            // SAFETY: a `Cpu` only has capabilities that were detected.
            unsafe { enabled(kernel) }
        }
        _ => kernel.run(Plain),
    }
}

/// Four elements in plain Rust, which compilers turn into SSE2 or NEON.
#[derive(Clone, Copy)]
pub(crate) struct Plain;

impl Simd for Plain {
    type V = [f32; 4];
    const LANES: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load_ptr(self, x: *const f32) -> [f32; 4] {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast() }
    }
    #[inline(always)]
    unsafe fn store_ptr(self, x: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast() = v }
    }
    #[inline(always)]
    fn add(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn if_less(self, a: [f32; 4], b: [f32; 4], x: [f32; 4], y: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] < b[i] { x[i] } else { y[i] })
    }
    #[inline(always)]
    fn shift_to_exponent(self, x: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| f32::from_bits(x[i].to_bits() << 23))
    }
    #[inline(always)]
    fn load_f16(self, x: &[f16]) -> [f32; 4] {
        std::array::from_fn(|i| x[i].to_f32())
    }
    #[inline(always)]
    fn load_bf16(self, x: &[bf16]) -> [f32; 4] {
        std::array::from_fn(|i| x[i].to_f32())
    }
    #[inline(always)]
    fn load_i8(self, x: &[i8]) -> [f32; 4] {
        std::array::from_fn(|i| f32::from(x[i]))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Simd;
    use half::{bf16, f16};
    use std::arch::x86_64::*;

    /// AVX2 and FMA: eight elements.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(pub(super) ());

    /// AVX-512 F, BW, DQ, VL: sixteen elements.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(pub(super) ());

    macro_rules! instructions {
        ($($name:ident($($arg:ident: $type:ty),*) -> $ret:ty { $body:expr })*) => { $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) -> $ret {
                // SAFETY: register operations only; `self` exists, so the processor has the instruction set.
                unsafe { $body }
            }
        )* };
    }

    /// Loads of elements that are no f32.
    macro_rules! loads {
        ($($name:ident($x:ident: &[$type:ty]) -> $ret:ty { $body:expr })*) => { $(
            #[inline(always)]
            fn $name(self, $x: &[$type]) -> $ret {
                let $x = $x[..Self::LANES].as_ptr();
                // SAFETY: a vector of elements is read, as checked above; `self` exists, so the processor has the instruction set.
                unsafe { $body }
            }
        )* };
    }

    impl Simd for Avx512 {
        type V = __m512;
        const LANES: usize = 16;

        #[inline(always)]
        unsafe fn load_ptr(self, x: *const f32) -> __m512 {
            // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
            unsafe { _mm512_loadu_ps(x) }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, x: *mut f32, v: __m512) {
            // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
            unsafe { _mm512_storeu_ps(x, v) }
        }
        instructions! {
            splat(x: f32) -> __m512 { _mm512_set1_ps(x) }
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
        loads! {
            load_f16(x: &[f16]) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(x.cast())) }
            load_bf16(x: &[bf16]) -> __m512 {
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(x.cast()))))
            }
            load_i8(x: &[i8]) -> __m512 { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.cast()))) }
        }
    }

    impl Simd for Avx2 {
        type V = __m256;
        const LANES: usize = 8;

        #[inline(always)]
        unsafe fn load_ptr(self, x: *const f32) -> __m256 {
            // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
            unsafe { _mm256_loadu_ps(x) }
        }
        #[inline(always)]
        unsafe fn store_ptr(self, x: *mut f32, v: __m256) {
            // SAFETY: the caller's promise; `self` exists, so the processor has the instruction set.
            unsafe { _mm256_storeu_ps(x, v) }
        }
        instructions! {
            splat(x: f32) -> __m256 { _mm256_set1_ps(x) }
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
        }
        loads! {
            load_f16(x: &[f16]) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(x.cast())) }
            load_bf16(x: &[bf16]) -> __m256 {
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(x.cast()))))
            }
            load_i8(x: &[i8]) -> __m256 { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.cast()))) }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cpu::isa::Caps;

    /// For each instruction set of this machine: `result` with one thread and with three must have the same bits;
    /// they go to `check`.
    pub(crate) fn on_every_cpu(result: impl Fn(&Cpu) -> Vec<f32>, check: impl Fn(Isa, &[f32])) {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512] {
            let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
            let values = result(&Cpu::with_caps(1, caps).unwrap());
            let on_three = result(&Cpu::with_caps(3, caps).unwrap());
            assert_eq!(bits(&values), bits(&on_three), "{isa:?}: one thread and three");
            check(isa, &values);
        }
    }

    /// Numbers in −1 … 1 that look random.
    pub(crate) fn noise(seed: u32, len: usize) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_769) | 1;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    struct Everything;

    impl Kernel for Everything {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let n = S::LANES;
            let a: Vec<f32> = (0..n).map(|i| i as f32 - 2.0).collect();
            let b: Vec<f32> = (0..n).map(|i| if i == 1 { f32::NAN } else { 1.0 }).collect();
            let (a, b, two) = (s.load(&a), s.load(&b), s.splat(2.0));
            let mut results = vec![s.sum(a), s.greatest(a)];
            let halfs: Vec<f16> = (0..n).map(|i| f16::from_f32(i as f32 * -0.5)).collect();
            let brains: Vec<bf16> = (0..n).map(|i| bf16::from_f32(i as f32 * -256.0)).collect();
            let bytes: Vec<i8> = (0..n).map(|i| [127, -128, -1, 42][i % 4]).collect();
            let shifted = s.shift_to_exponent(s.splat(f32::from_bits(130)));
            for v in [
                s.add(a, two),
                s.sub(a, two),
                s.mul(a, two),
                s.div(a, two),
                s.mul_add(a, two, two),
                s.max(a, b),
                s.max(b, a),
                s.if_less(a, b, two, a),
                s.load_part(&[5.0, 6.0], 7.0),
                shifted,
                s.load_f16(&halfs),
                s.load_bf16(&brains),
                s.load_i8(&bytes),
            ] {
                results.extend(&s.to_array(v)[..4]);
            }
            let mut part = [9.0; 3];
            s.store_part(&mut part[..2], a);
            results.extend(part);
            results
        }
    }

    #[test]
    fn operations_mean_the_same_on_every_instruction_set() {
        for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512] {
            let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
            let got = dispatch(&Cpu::with_caps(1, caps).unwrap(), Everything);
            let lanes = [4.0, 8.0, 16.0][isa as usize];
            assert_eq!(got[..2], [lanes * (lanes - 5.0) / 2.0, lanes - 3.0], "{isa:?}");
            let nan = f32::NAN;
            #[rustfmt::skip]
            let expected = [
                0.0, 1.0, 2.0, 3.0,  -4.0, -3.0, -2.0, -1.0,  -4.0, -2.0, 0.0, 2.0,  -1.0, -0.5, 0.0, 0.5,
                -2.0, 0.0, 2.0, 4.0,  1.0, nan, 1.0, 1.0,  1.0, -1.0, 1.0, 1.0,  2.0, -1.0, 2.0, 1.0,
                5.0, 6.0, 7.0, 7.0,  8.0, 8.0, 8.0, 8.0,  -0.0, -0.5, -1.0, -1.5,
                -0.0, -256.0, -512.0, -768.0,  127.0, -128.0, -1.0, 42.0,  -2.0, -1.0, 9.0,
            ];
            assert_eq!(format!("{:?}", &got[2..]), format!("{expected:?}"), "{isa:?}");
        }
    }
}
