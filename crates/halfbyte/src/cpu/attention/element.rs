//! The types that keys and values lie in: how they are written, and how vectors of f32 come of them.

use crate::cpu::lanes::Simd;
use bytemuck::Pod;
use half::{bf16, f16};

/// An element of a key or a value, as a page has it.
pub(super) trait Element: Pod {
    /// Whether a key, and a value, has a scale for all its elements.
    const SCALED: bool = false;

    /// The scale of a key or a value; 1 where there is none.
    fn scale(_vector: &[f32]) -> f32 {
        1.0
    }

    /// What stands for an element of a key or a value of this scale.
    fn of(element: f32, scale: f32) -> Self;

    /// As f32, without the scale.
    /// # Safety
    /// A vector of elements must be readable at `from`.
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V;
}

impl Element for f32 {
    fn of(element: f32, _: f32) -> Self {
        element
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_ptr(from) }
    }
}

impl Element for f16 {
    fn of(element: f32, _: f32) -> Self {
        f16::from_f32(element)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16_ptr(from) }
    }
}

impl Element for bf16 {
    fn of(element: f32, _: f32) -> Self {
        bf16::from_f32(element)
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16_ptr(from) }
    }
}

/// A code of 8 bits, which stands for itself times a scale.
///
/// Scales are f32: of a scale in f16 the greatest code would have to be chosen so that no element passes it, and vectors below
/// 127 · 2⁻²⁴ would have none.
impl Element for i8 {
    const SCALED: bool = true;

    /// The greatest element over 127, so that none is cut off; NaN where an element is none or infinite.
    fn scale(vector: &[f32]) -> f32 {
        if vector.iter().any(|v| !v.is_finite()) {
            return f32::NAN;
        }
        let greatest = vector.iter().fold(0.0f32, |greatest, v| greatest.max(v.abs()));
        // A subnormal one has too few bits for codes of at most 127.
        (greatest / 127.0).max(f32::MIN_POSITIVE)
    }

    fn of(element: f32, scale: f32) -> Self {
        // Adding 1.5 · 2²³ rounds to the nearest integer, ties to even. Of a scale that is NaN the code is 0.
        const ROUND: f32 = 12_582_912.0;
        ((element / scale + ROUND) - ROUND) as i8
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const Self) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_i8_ptr(from) }
    }
}
