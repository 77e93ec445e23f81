//! Elements of a tensor: borrowed from the mapping where they are aligned, copied where they are not.

use bytemuck::{AnyBitPattern, NoUninit};
use halfbyte::{Float, FloatData};
use std::borrow::Cow;

/// Elements of type `dtype` in these bytes.
pub(crate) fn cast_floats(dtype: Float, bytes: &[u8]) -> FloatData<'_> {
    match dtype {
        Float::F16 => FloatData::F16(cast(bytes)),
        Float::BF16 => FloatData::BF16(cast(bytes)),
        Float::F32 => FloatData::F32(cast(bytes)),
    }
}

/// The bytes as elements of `T`: in place if their address allows it. The length must be a multiple of the size.
pub(crate) fn cast<T: AnyBitPattern + NoUninit>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => Cow::Owned(bytemuck::pod_collect_to_vec(bytes)),
    }
}
