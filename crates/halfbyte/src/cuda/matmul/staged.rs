//! What goes up of a tensor of the host: its bytes, and how many.

use crate::error::Result;
use crate::layout::codes::{Codes, NIBBLES};
use crate::layout::multiples::Multiples;
use crate::layout::stored::{StoredTensor, StoredZeros, Strides};
use crate::tensor::{FloatData, Floats};
use bytemuck::cast_slice;
use rayon::prelude::*;
use std::ops::Range;

/// Where what is uploaded begins.
const ALIGNMENT: usize = 256;

/// Bytes up to where the next may begin.
pub(super) fn aligned(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// What the codes of some rows take on the device.
pub(super) fn bytes_of_rows(tensor: &StoredTensor<'_>, rows: usize) -> usize {
    let (k, per_word) = (tensor.k(), 32 / tensor.format().bits as usize);
    match tensor.codes() {
        Codes::Bytes { .. } | Codes::Rows(_) => rows * k,
        Codes::WordsAlong(_) | Codes::WordsDown(_) => k.div_ceil(per_word) * 4 * rows,
        Codes::WordsAcross(_) => rows / NIBBLES * 4 * k,
        Codes::Blocks { form, .. } => rows * form.bytes_of_row(k).unwrap_or(0),
        Codes::Random { .. } => 0,
    }
}

/// Scales, zeros and scales of channels as they lie, with the strides of each; empty where there are none. Of multiples of halves
/// factors and halves: of scales the first and the third, of offsets the second and the last.
pub(super) fn params_of<'a>(tensor: &'a StoredTensor<'_>, multiples: bool) -> [(&'a [u8], Strides); 4] {
    let none = (&[] as &[u8], Strides::TENSOR);
    if let Some(of_scales) = tensor.scale_multiples().filter(|_| multiples) {
        let factors = |of: &'a Multiples<'_>| (cast_slice(of.factors()), Strides::of_outputs(tensor.groups()));
        let halves =
            |of: &'a Multiples<'_>| (cast_slice(of.halves()), Strides::of_outputs(tensor.groups() / of.block()));
        let offsets = tensor.offset_multiples();
        return [factors(of_scales), offsets.map_or(none, factors), halves(of_scales), offsets.map_or(none, halves)];
    }
    let floats = |values: &'a FloatData<'_>| bytes_of(values.as_floats());
    let (scales, strides) = tensor.scales();
    let zeros = match tensor.zeros() {
        StoredZeros::Symmetric => none,
        StoredZeros::Integer(z, strides) => (cast_slice(z), *strides),
        StoredZeros::Float(o, strides) => (floats(o), *strides),
    };
    let channels = cast_slice(tensor.channel_scales().unwrap_or_default());
    [(floats(scales), strides), zeros, (channels, Strides::of_outputs(1)), none]
}

/// The bytes of floats.
pub(super) fn bytes_of(values: Floats<'_>) -> &[u8] {
    match values {
        Floats::F16(v) => cast_slice(v),
        Floats::BF16(v) => cast_slice(v),
        Floats::F32(v) => cast_slice(v),
    }
}

/// Bytes `range` of some.
pub(super) fn copy(from: &[u8], range: Range<usize>, to: &mut [u8]) -> Result<()> {
    copy_lines(from, from.len(), 0, from.len(), range, to)
}

/// Bytes `range` of the columns `first .. first + width` of lines of `pitch` bytes, by several threads.
pub(super) fn copy_lines(
    from: &[u8],
    pitch: usize,
    first: usize,
    width: usize,
    range: Range<usize>,
    to: &mut [u8],
) -> Result<()> {
    /// What a thread copies at a time.
    const CHUNK_BYTES: usize = 256 << 10;
    to.par_chunks_mut(CHUNK_BYTES).enumerate().for_each(|(chunk, mut to)| {
        let mut at = range.start + chunk * CHUNK_BYTES;
        while !to.is_empty() {
            let (line, column) = (at / width, at % width);
            let len = (width - column).min(to.len());
            let (now, later) = std::mem::take(&mut to).split_at_mut(len);
            now.copy_from_slice(&from[line * pitch + first + column..][..len]);
            at += len;
            to = later;
        }
    });
    Ok(())
}
