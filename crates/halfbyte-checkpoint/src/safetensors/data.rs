//! Elements of a tensor: borrowed from the mapping where they are aligned, copied where they are not.

use bytemuck::{AnyBitPattern, NoUninit};
use halfbyte::{Float, FloatData};
use std::borrow::Cow;

/// Elements of type `dtype` in these bytes.
pub(crate) fn cast_floats<'a>(dtype: Float, bytes: impl Into<Cow<'a, [u8]>>) -> FloatData<'a> {
    match dtype {
        Float::F16 => FloatData::F16(cast(bytes)),
        Float::BF16 => FloatData::BF16(cast(bytes)),
        Float::F32 => FloatData::F32(cast(bytes)),
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
