//! Matrices of half or single precision: what callers hand in and get back.

use half::{bf16, f16};
use std::borrow::Cow;

/// The float types that activations, scales and dense weights come in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Float {
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    BF16,
    /// IEEE single precision.
    F32,
}

impl Float {
    /// Bytes an element takes.
    pub fn size_bytes(self) -> usize {
        match self {
            Float::F16 | Float::BF16 => 2,
            Float::F32 => 4,
        }
    }

    /// Unit roundoff: the largest relative error of rounding to this type.
    pub fn unit_roundoff(self) -> f64 {
        match self {
            Float::F16 => 2f64.powi(-11),
            Float::BF16 => 2f64.powi(-8),
            Float::F32 => 2f64.powi(-24),
        }
    }

    /// `value` rounded to this type (nearest, ties to even), widened again.
    pub fn round(self, value: f32) -> f32 {
        match self {
            Float::F16 => f16::from_f32(value).to_f32(),
            Float::BF16 => bf16::from_f32(value).to_f32(),
            Float::F32 => value,
        }
    }

    /// The name as formats write it: `f16`, `bf16`, `f32`.
    pub fn name(self) -> &'static str {
        match self {
            Float::F16 => "f16",
            Float::BF16 => "bf16",
            Float::F32 => "f32",
        }
    }
}

impl std::fmt::Display for Float {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A borrowed, contiguous buffer of floats of one of the three types.
#[derive(Clone, Copy, Debug)]
pub enum Floats<'a> {
    /// Half precision.
    F16(&'a [f16]),
    /// Brain float.
    BF16(&'a [bf16]),
    /// Single precision.
    F32(&'a [f32]),
}

impl<'a> Floats<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Floats::F16(v) => v.len(),
            Floats::BF16(v) => v.len(),
            Floats::F32(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        match self {
            Floats::F16(_) => Float::F16,
            Floats::BF16(_) => Float::BF16,
            Floats::F32(_) => Float::F32,
        }
    }

    /// Element `i`, widened (exact). Panics if it is not there.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Floats::F16(v) => v[i].to_f32(),
            Floats::BF16(v) => v[i].to_f32(),
            Floats::F32(v) => v[i],
        }
    }

    /// Elements `range` as a view of the same type. Panics if they are not there.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Floats<'a> {
        match self {
            Floats::F16(v) => Floats::F16(&v[range]),
            Floats::BF16(v) => Floats::BF16(&v[range]),
            Floats::F32(v) => Floats::F32(&v[range]),
        }
    }

    /// All elements, widened (exact).
    pub fn to_f32(&self) -> Vec<f32> {
        match self {
            Floats::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Floats::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Floats::F32(v) => v.to_vec(),
        }
    }
}

/// A contiguous buffer of floats of one of the three types, owned or borrowed.
#[derive(Clone, Debug)]
pub enum FloatData<'a> {
    /// Half precision.
    F16(Cow<'a, [f16]>),
    /// Brain float.
    BF16(Cow<'a, [bf16]>),
    /// Single precision.
    F32(Cow<'a, [f32]>),
}

impl FloatData<'_> {
    /// A borrowed view.
    pub fn as_floats(&self) -> Floats<'_> {
        match self {
            FloatData::F16(v) => Floats::F16(v),
            FloatData::BF16(v) => Floats::BF16(v),
            FloatData::F32(v) => Floats::F32(v),
        }
    }

    /// All elements, widened (exact).
    pub fn to_f32(&self) -> Vec<f32> {
        self.as_floats().to_f32()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_floats().len()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        self.as_floats().dtype()
    }

    /// The largest magnitude of finite elements; 0 if there are none.
    pub(crate) fn largest(&self) -> f32 {
        // Magnitudes are in the order of their bits, and integers are compared many at a time.
        match self {
            FloatData::F16(v) => f16::from_bits(v.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff))).to_f32(),
            FloatData::BF16(v) => bf16::from_bits(v.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff))).to_f32(),
            FloatData::F32(v) => f32::from_bits(v.iter().fold(0, |most, v| most.max(v.to_bits() & 0x7fff_ffff))),
        }
    }
}

/// A borrowed, contiguous, writable buffer of floats of one of the three types.
#[derive(Debug)]
pub enum FloatsMut<'a> {
    /// Half precision.
    F16(&'a mut [f16]),
    /// Brain float.
    BF16(&'a mut [bf16]),
    /// Single precision.
    F32(&'a mut [f32]),
}

impl FloatsMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            FloatsMut::F16(v) => v.len(),
            FloatsMut::BF16(v) => v.len(),
            FloatsMut::F32(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        match self {
            FloatsMut::F16(_) => Float::F16,
            FloatsMut::BF16(_) => Float::BF16,
            FloatsMut::F32(_) => Float::F32,
        }
    }
}

/// Slices, vectors and arrays of an element's type as one of the variants.
macro_rules! from_slices {
    ($shared:ident, $exclusive:ident: $($variant:ident($type:ty)),*) => {$(
        impl<'a> From<&'a [$type]> for $shared<'a> {
            fn from(values: &'a [$type]) -> Self {
                Self::$variant(values)
            }
        }

        impl<'a> From<&'a Vec<$type>> for $shared<'a> {
            fn from(values: &'a Vec<$type>) -> Self {
                Self::$variant(values)
            }
        }

        impl<'a, const N: usize> From<&'a [$type; N]> for $shared<'a> {
            fn from(values: &'a [$type; N]) -> Self {
                Self::$variant(values)
            }
        }

        impl<'a> From<&'a mut [$type]> for $exclusive<'a> {
            fn from(values: &'a mut [$type]) -> Self {
                Self::$variant(values)
            }
        }

        impl<'a> From<&'a mut Vec<$type>> for $exclusive<'a> {
            fn from(values: &'a mut Vec<$type>) -> Self {
                Self::$variant(values)
            }
        }

        impl<'a, const N: usize> From<&'a mut [$type; N]> for $exclusive<'a> {
            fn from(values: &'a mut [$type; N]) -> Self {
                Self::$variant(values)
            }
        }
    )*};
}
pub(crate) use from_slices;

from_slices!(Floats, FloatsMut: F16(f16), BF16(bf16), F32(f32));
