//! Vectors of f32 behind one trait, so that a kernel is written once for every instruction set.
//!
//! A kernel is a [`Kernel`] whose `run` is generic over [`Simd`] and `#[inline(always)]`, as is everything that it
//! calls with a [`Simd`]. [`dispatch`] calls it from a function that has the instruction set enabled, so that all of
//! it is compiled for that set.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::Cpu;
#[cfg(any(test, target_arch = "x86_64"))]
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
    /// `LANES` elements must be readable at `x`.
    unsafe fn load_f16_ptr(self, x: *const f16) -> Self::V;
    /// # Safety
    /// `LANES` elements must be readable at `x`.
    unsafe fn load_bf16_ptr(self, x: *const bf16) -> Self::V;
    /// # Safety
    /// `LANES` elements must be readable at `x`.
    unsafe fn load_i8_ptr(self, x: *const i8) -> Self::V;
    /// # Safety
    /// `LANES` elements must be writable at `x`.
    unsafe fn store_ptr(self, x: *mut f32, v: Self::V);
    /// Writes the lowest byte of each element's bits.
    ///
    /// # Safety
    /// `LANES` bytes must be writable at `x`.
    unsafe fn store_low_bytes_ptr(self, x: *mut i8, v: Self::V);
    fn abs(self, x: Self::V) -> Self::V;
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
    /// Runs a kernel as a function of its own, compiled for the instruction set once: also within another, of which there are many.
    fn apart<K: Kernel>(self, kernel: K) -> K::Output;

    /// The first elements of a slice. Panics if it is shorter than a vector.
    #[inline(always)]
    fn load(self, x: &[f32]) -> Self::V {
        assert!(x.len() >= Self::LANES);
        // SAFETY: the length was checked just now.
        unsafe { self.load_ptr(x.as_ptr()) }
    }

    /// Writes the first elements of a slice. Panics if it is shorter than a vector.
    #[inline(always)]
    fn store(self, x: &mut [f32], v: Self::V) {
        assert!(x.len() >= Self::LANES);
        // SAFETY: the length was checked just now.
        unsafe { self.store_ptr(x.as_mut_ptr(), v) }
    }

    /// Writes the lowest byte of each element's bits to the first elements of a slice. Panics if it is shorter than a vector.
    #[inline(always)]
    fn store_low_bytes(self, x: &mut [i8], v: Self::V) {
        assert!(x.len() >= Self::LANES);
        // SAFETY: the length was checked just now.
        unsafe { self.store_low_bytes_ptr(x.as_mut_ptr(), v) }
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
    // A `Cpu` only has capabilities that were detected.
    match cpu.caps().isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => x86::Avx512(()).apart(kernel),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => x86::Avx2(()).apart(kernel),
        _ => Plain.apart(kernel),
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
    unsafe fn load_f16_ptr(self, x: *const f16) -> [f32; 4] {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast::<[f16; 4]>() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16_ptr(self, x: *const bf16) -> [f32; 4] {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast::<[bf16; 4]>() }.map(bf16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8_ptr(self, x: *const i8) -> [f32; 4] {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast::<[i8; 4]>() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn store_ptr(self, x: *mut f32, v: [f32; 4]) {
        // SAFETY: the caller's promise; an array needs the alignment of its elements only.
        unsafe { *x.cast() = v }
    }
    #[inline(always)]
    unsafe fn store_low_bytes_ptr(self, x: *mut i8, v: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe { *x.cast() = v.map(|v| v.to_bits() as i8) }
    }
    #[inline(always)]
    fn abs(self, x: [f32; 4]) -> [f32; 4] {
        x.map(f32::abs)
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
    #[inline(never)]
    fn apart<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Caps;

    /// Loads of every other type, of numbers that are exact in it.
    struct Loads;

    impl Kernel for Loads {
        type Output = [[f32; 16]; 3];

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> [[f32; 16]; 3] {
            let codes: [i8; 17] = std::array::from_fn(|i| (i as i8 - 8) * 15 + 1);
            let halves = codes.map(|code| f16::from_f32(f32::from(code) / 1024.0));
            let bfloats = codes.map(|code| bf16::from_f32(f32::from(code) * 1e30));
            // SAFETY: sixteen elements lie behind the first, which is not aligned to a vector.
            unsafe {
                [
                    s.load_i8_ptr(codes[1..].as_ptr()),
                    s.load_f16_ptr(halves[1..].as_ptr()),
                    s.load_bf16_ptr(bfloats[1..].as_ptr()),
                ]
                .map(|v| s.to_array(v))
            }
        }
    }

    #[test]
    fn other_types_load_as_they_are_on_every_instruction_set() {
        for (isa, lanes) in [(Isa::Plain, 4), (Isa::Avx2, 8), (Isa::Avx512, 16)] {
            let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
            let [codes, halves, bfloats] = dispatch(&Cpu::with_caps(1, caps).unwrap(), Loads);
            for i in 0..lanes {
                let code = (i as f32 - 7.0) * 15.0 + 1.0;
                let bfloat = bf16::from_f32(code * 1e30).to_f32();
                assert_eq!((codes[i], halves[i], bfloats[i]), (code, code / 1024.0, bfloat), "{isa:?}, lane {i}");
            }
        }
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
                s.abs(a),
            ] {
                results.extend(&s.to_array(v)[..4]);
            }
            let mut part = [9.0; 3];
            s.store_part(&mut part[..2], a);
            results.extend(part);
            let (mut bytes, bits) = ([3i8; 17], f32::from_bits(0x4b40_01ff));
            s.store_low_bytes(&mut bytes[..n], s.splat(bits));
            assert!(bytes[..n].iter().all(|&byte| byte == -1));
            s.store_low_bytes(&mut bytes[..n], s.splat(f32::from_bits(0x4b40_01fe)));
            results.extend([-1.0, f32::from(bytes[n - 1] as u8), f32::from(bytes[n])]);
            results
        }
    }

    #[test]
    fn operations_mean_the_same_on_every_instruction_set() {
        for (isa, lanes) in [(Isa::Plain, 4.0), (Isa::Avx2, 8.0), (Isa::Avx512, 16.0)] {
            let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
            let got = dispatch(&Cpu::with_caps(1, caps).unwrap(), Everything);
            assert_eq!(got[..2], [lanes * (lanes - 5.0) / 2.0, lanes - 3.0], "{isa:?}");
            let nan = f32::NAN;
            #[rustfmt::skip]
            let expected = [
                0.0, 1.0, 2.0, 3.0,  -4.0, -3.0, -2.0, -1.0,  -4.0, -2.0, 0.0, 2.0,  -1.0, -0.5, 0.0, 0.5,
                -2.0, 0.0, 2.0, 4.0,  1.0, nan, 1.0, 1.0,  1.0, -1.0, 1.0, 1.0,  2.0, -1.0, 2.0, 1.0,
                5.0, 6.0, 7.0, 7.0,  8.0, 8.0, 8.0, 8.0,  2.0, 1.0, 0.0, 1.0,  -2.0, -1.0, 9.0,  -1.0, 254.0, 3.0,
            ];
            assert_eq!(format!("{:?}", &got[2..]), format!("{expected:?}"), "{isa:?}");
        }
    }
}
