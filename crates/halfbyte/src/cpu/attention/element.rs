//! What keys and values are kept as: how a vector is rounded, and how it becomes f32 again where it is read.

use crate::cpu::lanes::Simd;
use crate::quantize::activations::ActRange;
use bytemuck::Pod;
use half::{bf16, f16};

/// An element of a stored key or value.
pub(super) trait Element: Pod {
    /// What a vector is rounded by.
    type Range: Copy;

    /// Of a vector.
    fn range(vector: &[f32]) -> Self::Range;
    /// An element, rounded.
    fn of(x: f32, range: Self::Range) -> Self;
    /// What elements are multiplied by to be numbers again. None: they are numbers.
    fn scale(range: Self::Range) -> Option<f32>;
    /// A vector of elements, as f32. Panics if the slice is shorter.
    fn load<S: Simd>(s: S, x: &[Self]) -> S::V;
}

/// An element that is a float.
macro_rules! float {
    ($float:ty, $of:expr, $load:ident) => {
        impl Element for $float {
            type Range = ();

            #[inline(always)]
            fn range(_: &[f32]) {}
            #[inline(always)]
            fn of(x: f32, (): ()) -> Self {
                $of(x)
            }
            #[inline(always)]
            fn scale((): ()) -> Option<f32> {
                None
            }
            #[inline(always)]
            fn load<S: Simd>(s: S, x: &[Self]) -> S::V {
                s.$load(x)
            }
        }
    };
}

float!(f32, std::convert::identity, load);
float!(f16, f16::from_f32, load_f16);
float!(bf16, bf16::from_f32, load_bf16);

impl Element for i8 {
    type Range = ActRange;

    #[inline(always)]
    fn range(vector: &[f32]) -> ActRange {
        let greatest = |greatest: f32, x: &f32| if x.is_finite() { greatest.max(x.abs()) } else { f32::NAN };
        // Once NaN, always NaN.
        ActRange::symmetric(vector.iter().fold(0.0, |m: f32, x| if m.is_nan() { m } else { greatest(m, x) }))
    }
    #[inline(always)]
    fn of(x: f32, range: ActRange) -> Self {
        range.code(x)
    }
    #[inline(always)]
    fn scale(range: ActRange) -> Option<f32> {
        Some(range.scale)
    }
    #[inline(always)]
    fn load<S: Simd>(s: S, x: &[Self]) -> S::V {
        s.load_i8(x)
    }
}

/// Elements as f32, in whole vectors; every line of 16 times the factors, if there are such.
#[inline(always)]
pub(super) fn widen<S: Simd, T: Element>(s: S, from: &[T], factors: Option<&[f32; 16]>, to: &mut [f32]) {
    let vectors = from.chunks_exact(S::LANES).zip(to.chunks_exact_mut(S::LANES)).enumerate();
    match factors {
        None => vectors.for_each(|(_, (from, to))| s.store(to, T::load(s, from))),
        Some(factors) => vectors.for_each(|(i, (from, to))| {
            let factor = s.load(&factors[i * S::LANES % 16..]);
            s.store(to, s.mul(T::load(s, from), factor));
        }),
    }
}
