//! The types as forms of blocks, and what their codes are scaled by.

use super::k_types::multiples::{self, GROUPS};
use super::{groups_of_32, half, k_types, tables};
use crate::gguf::types::GgmlType;
use crate::small_floats::E2M1;
use half::{bf16, f16};
use halfbyte::layout::codes::{BlockForm, Fields, UnpackBlocks};

/// How blocks of a type hold codes; None: it is no codes with scales.
pub(super) fn form_of(ggml_type: GgmlType) -> Option<BlockForm> {
    let fields = |at, run, bits| Fields { at, run, bits };
    let nibbles_of_32 = |at| fields(at, 16, 4);
    type Form = (Fields, Fields, u8, u8, UnpackBlocks);
    // Without high fields.
    let low = |low: Fields, unpack: UnpackBlocks| (low, Fields::NONE, 0, 0, unpack);
    let (low, high, add, flip, unpack): Form = match ggml_type {
        GgmlType::Q4_0 => low(nibbles_of_32(2), |bytes, codes| each(bytes, codes, groups_of_32::q4_0)),
        GgmlType::Q4_1 => low(nibbles_of_32(4), |bytes, codes| each(bytes, codes, groups_of_32::q4_1)),
        GgmlType::Q5_0 => {
            (nibbles_of_32(6), fields(2, 1, 1), 128 - 16, 0, |bytes, codes| each(bytes, codes, groups_of_32::q5_0))
        }
        GgmlType::Q5_1 => {
            (nibbles_of_32(8), fields(4, 1, 1), 0, 0, |bytes, codes| each(bytes, codes, groups_of_32::q5_1))
        }
        GgmlType::Q8_0 => {
            (fields(2, 32, 8), Fields::NONE, 0, 0x80, |bytes, codes| each(bytes, codes, groups_of_32::q8_0))
        }
        GgmlType::Q2_K => low(fields(16, 32, 2), |bytes, codes| each(bytes, codes, k_types::q2_k)),
        GgmlType::Q3_K => (fields(32, 32, 2), fields(0, 32, 1), 0, 0, |bytes, codes| each(bytes, codes, k_types::q3_k)),
        GgmlType::Q4_K => low(fields(16, 32, 4), |bytes, codes| each(bytes, codes, k_types::q4_k)),
        GgmlType::Q5_K => {
            (fields(48, 32, 4), fields(16, 32, 1), 0, 0, |bytes, codes| each(bytes, codes, k_types::q5_k))
        }
        GgmlType::Q6_K => {
            (fields(0, 64, 4), fields(128, 32, 2), 128 - 32, 0, |bytes, codes| each(bytes, codes, k_types::q6_k))
        }
        GgmlType::IQ4_NL => low(nibbles_of_32(2), |bytes, codes| each(bytes, codes, tables::iq4_nl)),
        GgmlType::IQ4_XS => low(nibbles_of_32(8), |bytes, codes| each(bytes, codes, tables::iq4_xs)),
        GgmlType::MXFP4 => low(nibbles_of_32(1), |bytes, codes| each(bytes, codes, tables::mxfp4)),
        GgmlType::NVFP4 => low(fields(4, 8, 4), |bytes, codes| each(bytes, codes, tables::nvfp4)),
        _ => return None,
    };
    let table = match ggml_type {
        GgmlType::IQ4_NL | GgmlType::IQ4_XS => Some(tables::IQ4),
        GgmlType::MXFP4 | GgmlType::NVFP4 => Some(E2M1),
        _ => None,
    };
    let (codes, bytes) = (ggml_type.block_len(), ggml_type.block_bytes());
    Some(BlockForm { codes, bytes, low, high, add, flip, table, unpack: Some(unpack) })
}

/// The scales and offsets of blocks, as the file has them, also where they are not finite. Lengths fit; symmetric types have
/// no offsets.
pub(super) fn scales_of(ggml_type: GgmlType, bytes: &[u8], scales: &mut [f32], offsets: &mut [f32]) {
    match ggml_type {
        GgmlType::Q4_0 => each(bytes, scales, one::<18>),
        GgmlType::Q4_1 => each_two(bytes, scales, offsets, two::<20>),
        GgmlType::Q5_0 => each(bytes, scales, one::<22>),
        GgmlType::Q5_1 => each_two(bytes, scales, offsets, two::<24>),
        GgmlType::Q8_0 => each(bytes, scales, one::<34>),
        GgmlType::IQ4_NL => each(bytes, scales, one::<18>),
        GgmlType::MXFP4 => widened(bytes, scales, tables::mxfp4_scale, |bits| bf16::from_bits(bits).to_f32()),
        GgmlType::NVFP4 => widened(bytes, scales, tables::nvfp4_scales, |bits| f16::from_bits(bits).to_f32()),
        _ => {
            let Some(form) = form_of(ggml_type) else { return };
            let (groups, blocks) = (scales.len() / (bytes.len() / form.bytes).max(1), bytes.chunks_exact(form.bytes));
            let mut factors = [[0; GROUPS]; 2];
            for (i, block) in blocks.enumerate() {
                let [of_scales, of_offsets] = &mut factors;
                let halves = multiples_of(ggml_type, block, of_scales, of_offsets).unwrap_or_default();
                let numbers = [&mut *scales, &mut *offsets].into_iter().zip(halves).zip(&factors);
                for ((numbers, bits), factors) in numbers {
                    let half = half(&bits.to_le_bytes());
                    let numbers = numbers.iter_mut().skip(i * groups).take(groups);
                    numbers.zip(factors).for_each(|(number, &factor)| *number = half * f32::from(factor));
                }
            }
        }
    }
}

/// What scales and offsets of a block of a K type or IQ4_XS are whole multiples of, as bits of halves, and the factors of its groups; None:
/// another type.
pub(super) fn multiples_of(
    ggml_type: GgmlType,
    block: &[u8],
    scales: &mut [i8],
    offsets: &mut [i8],
) -> Option<[u16; 2]> {
    Some(match ggml_type {
        GgmlType::Q2_K => multiples::q2_k(block.first_chunk()?, scales.first_chunk_mut()?, offsets.first_chunk_mut()?),
        GgmlType::Q3_K => multiples::q3_k(block.first_chunk()?, scales.first_chunk_mut()?),
        GgmlType::Q4_K => first::<144>(block, scales, offsets)?,
        GgmlType::Q5_K => first::<176>(block, scales, offsets)?,
        GgmlType::Q6_K => multiples::q6_k(block.first_chunk()?, scales.first_chunk_mut()?),
        GgmlType::IQ4_XS => tables::iq4_xs_multiples(block.first_chunk()?, scales.first_chunk_mut()?),
        _ => return None,
    })
}

fn first<const BYTES: usize>(block: &[u8], scales: &mut [i8], offsets: &mut [i8]) -> Option<[u16; 2]> {
    Some(multiples::first::<BYTES>(block.first_chunk()?, scales.first_chunk_mut()?, offsets.first_chunk_mut()?))
}

/// The bits of the scales and offsets of blocks, of the types whose scales have 16 bits.
pub(super) fn halves_of(ggml_type: GgmlType, bytes: &[u8], scales: &mut [u16], offsets: &mut [u16]) {
    match ggml_type {
        GgmlType::MXFP4 => return each(bytes, scales, tables::mxfp4_scale),
        GgmlType::NVFP4 => return each(bytes, scales, tables::nvfp4_scales),
        _ => {}
    }
    let block = ggml_type.block_bytes();
    let blocks = || bytes.chunks_exact(block);
    blocks().zip(scales).for_each(|(block, scale)| *scale = u16::from_le_bytes([block[0], block[1]]));
    blocks().zip(offsets).for_each(|(block, offset)| *offset = u16::from_le_bytes([block[2], block[3]]));
}

/// The half that a block of 32 codes begins with.
fn one<const BYTES: usize>(block: &[u8; BYTES], scale: &mut [f32; 1]) {
    scale[0] = half(&[block[0], block[1]]);
}

/// The two that it begins with.
fn two<const BYTES: usize>(block: &[u8; BYTES], scale: &mut [f32; 1], offset: &mut [f32; 1]) {
    scale[0] = half(&[block[0], block[1]]);
    offset[0] = half(&[block[2], block[3]]);
}

/// Block after block.
fn each<const BYTES: usize, const LEN: usize, T>(
    bytes: &[u8],
    out: &mut [T],
    block: impl Fn(&[u8; BYTES], &mut [T; LEN]),
) {
    let out = out.as_chunks_mut().0.iter_mut();
    bytes.as_chunks().0.iter().zip(out).for_each(|(bytes, out)| block(bytes, out));
}

/// The scales of blocks, made floats of 32 bits of the 16 that they are read as.
fn widened<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [u16; LEN]),
    float: impl Fn(u16) -> f32,
) {
    each(bytes, out, |bytes, out: &mut [f32; LEN]| {
        let mut bits = [0; LEN];
        block(bytes, &mut bits);
        *out = bits.map(&float);
    });
}

/// The same with scales and offsets.
fn each_two<const BYTES: usize, const GROUPS: usize>(
    bytes: &[u8],
    scales: &mut [f32],
    offsets: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; GROUPS], &mut [f32; GROUPS]),
) {
    let out = scales.as_chunks_mut().0.iter_mut().zip(offsets.as_chunks_mut().0);
    bytes.as_chunks().0.iter().zip(out).for_each(|(bytes, (scales, offsets))| block(bytes, scales, offsets));
}
