//! Elements of a tensor: borrowed from the mapping where they are aligned, copied where they are not.

use bytemuck::{AnyBitPattern, NoUninit};
use half::{bf16, f16};
use halfbyte::{Float, Floats};
use std::borrow::Cow;

/// The elements of a float tensor.
#[derive(Clone, Debug)]
pub enum FloatData<'a> {
    /// Half precision.
    F16(Cow<'a, [f16]>),
    /// Brain float.
    BF16(Cow<'a, [bf16]>),
    /// Single precision.
    F32(Cow<'a, [f32]>),
}

impl<'a> FloatData<'a> {
    /// Elements of type `dtype` in these bytes.
    pub(crate) fn from_bytes(dtype: Float, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        match dtype {
            Float::F16 => FloatData::F16(cast(bytes)),
            Float::BF16 => FloatData::BF16(cast(bytes)),
            Float::F32 => FloatData::F32(cast(bytes)),
        }
    }

    /// A view in the terms of [`halfbyte`].
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
}

/// The bytes as elements of `T`: in place if they are borrowed and their address allows it. The length must be a multiple
/// of the size.
pub(crate) fn cast<'a, T: AnyBitPattern + NoUninit>(bytes: impl Into<Cow<'a, [u8]>>) -> Cow<'a, [T]> {
    match bytes.into() {
        Cow::Borrowed(bytes) => match bytemuck::try_cast_slice(bytes) {
            Ok(elements) => Cow::Borrowed(elements),
            Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
        },
        Cow::Owned(bytes) => Cow::Owned(bytemuck::pod_collect_to_vec(&bytes)),
    }
}
