//! Blocks of codes with their scales, as [`halfbyte::StoredTensor`], and from [`halfbyte::QTensor`].
//!
//! A row is whole blocks one after the other, and rows follow each other without padding. What a tensor is read to is
//! exact: each of its numbers, in f64, is what the block's formula says.
//!
//! Source: `ggml-common.h` and `ggml-quants.c` of github.com/ggml-org/ggml for the layouts.

mod forms;
mod groups_of_32;
mod k_types;
mod pack;
mod tables;

pub use pack::pack;

use super::types::GgmlType;
use crate::error::{Error, Result};
use crate::safetensors::FloatData;
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};
use halfbyte::layout::codes::{BlockForm, Codes};
use halfbyte::layout::multiples::Multiples;
use halfbyte::layout::stored::{StoredZeros, Strides};
use halfbyte::{Float, Group, StoredTensor, WeightFormat, Zero};
use rayon::prelude::*;
use std::borrow::Cow;

const OP: &str = "unpack GGUF blocks";

/// Codes of a task, when several threads unpack a tensor.
const TASK_CODES: usize = 1 << 18;

/// The blocks of a whole tensor `[n, k]`, with codes left where they lie; `tensor` is its name, for errors.
///
/// Errors: a type that is no codes with scales (see [`GgmlType::weight_format`]), a k that is no multiple of the block,
/// another number of bytes than `[n, k]` takes, a scale or offset that is NaN or infinite.
pub fn load<'a>(
    tensor: &str,
    ggml_type: GgmlType,
    bytes: impl Into<Cow<'a, [u8]>>,
    shape: [usize; 2],
) -> Result<StoredTensor<'a>> {
    scaled(tensor, ggml_type, bytes.into(), shape, None)
}

/// The same of blocks whose scales have 16 bits, with all of them multiplied by a number, if there is one: they become f32.
pub(crate) fn scaled<'a>(
    tensor: &str,
    ggml_type: GgmlType,
    bytes: Cow<'a, [u8]>,
    [n, k]: [usize; 2],
    by: Option<f32>,
) -> Result<StoredTensor<'a>> {
    let invalid =
        |expected: String, got: String| Error::numbers(tensor)(halfbyte::Error::Invalid { op: OP, expected, got });
    let (Some(format), Some(form)) = (ggml_type.weight_format(), forms::form_of(ggml_type)) else {
        return Err(invalid("a type of codes with scales".into(), ggml_type.to_string()));
    };
    if k == 0 || ggml_type.bytes_of(&[n, k]) != Some(bytes.len()) {
        let expected = format!("whole blocks of {} for [{n}, {k}]", ggml_type.block_len());
        return Err(invalid(expected, format!("{} bytes of {ggml_type}", bytes.len())));
    }
    if by.is_some() && format.scale == Float::F32 {
        return Err(invalid("blocks with scales of 16 bits, as they are multiplied".into(), ggml_type.to_string()));
    }
    let strides = Strides::of_outputs(format.group.count(k));
    let tensor_of = |format: WeightFormat, codes, scales, offsets: FloatData<'static>| {
        let zeros = match format.zero {
            Zero::Float => StoredZeros::Float(offsets, strides),
            _ => StoredZeros::Symmetric,
        };
        let codes = Codes::Blocks { bytes: codes, form: form.into() };
        StoredTensor::new(format, [n, k], codes, (scales, strides), zeros, None)
    };
    let stored = if format.scale != Float::F32 {
        let [scales, offsets] = gathered(&bytes, form, format, |bytes, scales, offsets| {
            forms::halves_of(ggml_type, bytes, scales, offsets);
        })
        .map(|halves: Vec<u16>| match format.scale {
            Float::BF16 => FloatData::BF16(halves.reinterpret_into::<bf16>().into()),
            _ => FloatData::F16(halves.reinterpret_into::<f16>().into()),
        });
        match by {
            None => tensor_of(format, bytes, scales, offsets),
            // A product is rounded to f32, once.
            Some(by) => {
                let products: Vec<f32> = scales.to_f32().iter().map(|scale| scale * by).collect();
                tensor_of(WeightFormat { scale: Float::F32, ..format }, bytes, FloatData::F32(products.into()), offsets)
            }
        }
    } else {
        multiples_of_blocks(ggml_type, &bytes, form, format).and_then(|(scales, offsets)| {
            let products = |multiples: &Multiples<'_>| FloatData::F32(multiples.products().into());
            let of_offsets = offsets.as_ref().map_or(FloatData::F32(Cow::default()), products);
            tensor_of(format, bytes, products(&scales), of_offsets)?.with_multiples(scales, offsets)
        })
    };
    stored.map_err(Error::numbers(tensor))
}

/// What scales and offsets of blocks of a K type or IQ4_XS are whole multiples of.
fn multiples_of_blocks(
    ggml_type: GgmlType,
    bytes: &[u8],
    form: BlockForm,
    format: WeightFormat,
) -> halfbyte::Result<(Multiples<'static>, Option<Multiples<'static>>)> {
    let (groups, blocks) = (form.codes / format.group.len(form.codes).max(1), bytes.len() / form.bytes);
    let has_offsets = format.zero == Zero::Float;
    let [mut of_scales, mut of_offsets] =
        [true, has_offsets].map(|there| vec![0; if there { blocks * groups } else { 0 }]);
    let mut halves = vec![[0; 2]; blocks];
    let each = TASK_CODES / form.codes;
    let mut offset_tasks: Vec<&mut [i8]> = of_offsets.chunks_mut(each * groups).collect();
    offset_tasks.resize_with(blocks.div_ceil(each), Default::default);
    (
        bytes.par_chunks(each * form.bytes),
        of_scales.par_chunks_mut(each * groups),
        offset_tasks,
        halves.par_chunks_mut(each),
    )
        .into_par_iter()
        .for_each(|(bytes, scales, offsets, halves)| {
            for (i, (block, halves)) in bytes.chunks_exact(form.bytes).zip(halves).enumerate() {
                let [scales, offsets] = [&mut *scales, &mut *offsets]
                    .map(|factors| factors.get_mut(i * groups..(i + 1) * groups).unwrap_or_default());
                *halves = forms::multiples_of(ggml_type, block, scales, offsets).unwrap_or_default();
            }
        });
    let multiples = |at: usize, factors: Vec<i8>| {
        let halves: Vec<f16> = halves.iter().map(|halves| f16::from_bits(halves[at])).collect();
        Multiples::new(groups, halves, factors)
    };
    let offsets = if has_offsets { Some(multiples(1, of_offsets)?) } else { None };
    Ok((multiples(0, of_scales)?, offsets))
}

/// Scales and offsets of blocks, read by several threads.
fn gathered<T: Clone + Default + Send>(
    bytes: &[u8],
    form: BlockForm,
    format: WeightFormat,
    read: impl Fn(&[u8], &mut [T], &mut [T]) + Sync,
) -> [Vec<T>; 2] {
    let group = format.group.len(form.codes).max(1);
    let groups = bytes.len() / form.bytes * (form.codes / group);
    let mut scales = vec![T::default(); groups];
    let mut offsets = vec![T::default(); if format.zero == Zero::Float { groups } else { 0 }];
    let (blocks, each) = (TASK_CODES / form.codes, TASK_CODES / group);
    // Symmetric types have no offsets: each task gets none of them.
    let offset_tasks: Vec<&mut [T]> = match format.zero {
        Zero::Float => offsets.chunks_mut(each).collect(),
        _ => (0..groups.div_ceil(each)).map(|_| Default::default()).collect(),
    };
    (bytes.par_chunks(blocks * form.bytes), scales.par_chunks_mut(each), offset_tasks)
        .into_par_iter()
        .for_each(|(bytes, scales, offsets)| read(bytes, scales, offsets));
    [scales, offsets]
}

/// Unpacks the blocks of some rows, on this thread, to the codes, scales and offsets that a [`halfbyte::QTensor`] of
/// [`GgmlType::weight_format`] has.
///
/// Shapes: `codes` `[rows, k]`; `scales` `[rows, groups]`; `offsets` the same, or empty for symmetric types. Scales and
/// offsets are as the file has them, also where they are not finite. Errors: a type that is no codes with scales, a k
/// that is no multiple of the block, lengths that do not fit each other.
pub fn unpack_rows(
    ggml_type: GgmlType,
    bytes: &[u8],
    k: usize,
    codes: &mut [u8],
    scales: &mut [f32],
    offsets: &mut [f32],
) -> halfbyte::Result<()> {
    let invalid = |expected: String, got: String| halfbyte::Error::Invalid { op: OP, expected, got };
    let (Some(format), Some(form)) = (ggml_type.weight_format(), forms::form_of(ggml_type)) else {
        return Err(invalid("a type of codes with scales".into(), ggml_type.to_string()));
    };
    let (Group::Size(group), block) = (format.group, ggml_type.block_len()) else {
        return Err(invalid("a type with groups".into(), ggml_type.to_string()));
    };
    let blocks = codes.len() / block;
    let groups = codes.len() / group;
    let of_offsets = if format.zero == Zero::Float { groups } else { 0 };
    let fits = k > 0
        && k.is_multiple_of(block)
        && codes.len().is_multiple_of(k)
        && bytes.len() == blocks * ggml_type.block_bytes()
        && scales.len() == groups
        && offsets.len() == of_offsets;
    if !fits {
        return Err(invalid(
            format!("rows of k, whole blocks of {block} with a scale for {group} codes"),
            format!(
                "k {k}, {} bytes of {ggml_type}, {} codes, {} scales, {} offsets",
                bytes.len(),
                codes.len(),
                scales.len(),
                offsets.len()
            ),
        ));
    }
    form.unpack.iter().for_each(|unpack| unpack(bytes, codes));
    forms::scales_of(ggml_type, bytes, scales, offsets);
    Ok(())
}

/// Cuts a block into its parts.
fn split<const A: usize>(bytes: &[u8]) -> (&[u8; A], &[u8]) {
    bytes.split_first_chunk().expect("a block holds its parts")
}

/// The half that two bytes are, widened (exact).
///
/// In a block of 32 codes this is most of the work, so that finite halves go without the detour through a function for
/// the instruction set at hand: their bits, moved to the places of a single's, are 2⁻¹¹² of their value.
fn half(bytes: &[u8; 2]) -> f32 {
    let bits = u32::from(u16::from_le_bytes(*bytes));
    if bits & 0x7c00 == 0x7c00 {
        return half::f16::from_le_bytes(*bytes).to_f32();
    }
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((112 + 127) << 23);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}
