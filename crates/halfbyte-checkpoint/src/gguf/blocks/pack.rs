//! Packing: a tensor whose numbers blocks can hold as they are, to blocks. Nothing is rounded.

use crate::error::{Error, Result};
use crate::gguf::types::GgmlType;
use half::f16;
use halfbyte::{QTensor, Zero, Zeros};
use rayon::prelude::*;

/// Codes of a block of the types that are packed.
const BLOCK: usize = 32;

/// Packs a tensor to Q4_0 (4 bits, symmetric), Q4_1 (4 bits, float offsets) or Q8_0 (8 bits, symmetric); `tensor` is its
/// name, for errors. Blocks stand for exactly the tensor's numbers.
///
/// Any groups will do, also one for a row or for the whole tensor, if each 32 columns have one scale. Errors: another
/// type; a tensor that such blocks cannot hold, with the reason: other bits or zeros, a k that is no multiple of 32,
/// groups that part a block, a scale or offset that is not exact in f16.
pub fn pack(tensor: &str, ggml_type: GgmlType, w: &QTensor) -> Result<Vec<u8>> {
    let (bits, zero) = match ggml_type {
        GgmlType::Q4_0 => (4, Zero::Symmetric),
        GgmlType::Q4_1 => (4, Zero::Float),
        GgmlType::Q8_0 => (8, Zero::Symmetric),
        other => return Err(Error::invalid("pack GGUF blocks", "Q4_0, Q4_1 or Q8_0", other.name())),
    };
    let refuse =
        |reason: String| Error::Unrepresentable { tensor: tensor.to_owned(), scheme: ggml_type.name(), reason };
    let format = w.format();
    if format.bits != bits || format.zero != zero {
        return Err(refuse(format!(
            "it takes {bits} bits with {zero}, the tensor has {} with {}",
            format.bits, format.zero
        )));
    }
    let (n, k, groups) = (w.n(), w.k(), w.groups());
    if k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(refuse(format!("rows of {k} are no whole blocks of {BLOCK}")));
    }
    let mut group_of_block = Vec::with_capacity(k / BLOCK);
    for from in (0..k).step_by(BLOCK) {
        let group = w.group_of(from);
        if let Some(other) = (from..from + BLOCK).find(|&j| w.group_of(j) != group) {
            return Err(refuse(format!("columns {from} and {other} lie in different groups, but in one block")));
        }
        group_of_block.push(group);
    }
    let scales = halves(w.scales()).map_err(|s| refuse(format!("scale {s} is not exact in f16")))?;
    let offsets = match w.zeros() {
        Zeros::Float(offsets) => halves(offsets).map_err(|o| refuse(format!("offset {o} is not exact in f16")))?,
        _ => Vec::new(),
    };
    let row_bytes = k / BLOCK * ggml_type.block_bytes();
    let mut out = vec![0u8; n * row_bytes];
    out.par_chunks_exact_mut(row_bytes).zip(w.codes().par_chunks_exact(k)).enumerate().for_each(|(i, (out, codes))| {
        let row = i * groups..(i + 1) * groups;
        let scales = &scales[row.clone()];
        let blocks = codes.as_chunks::<BLOCK>().0.iter().zip(&group_of_block);
        match ggml_type {
            GgmlType::Q4_0 => {
                for (out, (codes, &g)) in out.as_chunks_mut::<18>().0.iter_mut().zip(blocks) {
                    out[..2].copy_from_slice(&scales[g]);
                    nibbles(codes, &mut out[2..]);
                }
            }
            GgmlType::Q4_1 => {
                let offsets = &offsets[row];
                for (out, (codes, &g)) in out.as_chunks_mut::<20>().0.iter_mut().zip(blocks) {
                    out[..2].copy_from_slice(&scales[g]);
                    out[2..4].copy_from_slice(&offsets[g]);
                    nibbles(codes, &mut out[4..]);
                }
            }
            _ => {
                for (out, (codes, &g)) in out.as_chunks_mut::<34>().0.iter_mut().zip(blocks) {
                    out[..2].copy_from_slice(&scales[g]);
                    out[2..].iter_mut().zip(codes).for_each(|(byte, code)| *byte = code ^ 0x80);
                }
            }
        }
    });
    Ok(out)
}

/// These numbers as the bytes of halves. Error: the first that is not exact.
fn halves(values: &[f32]) -> std::result::Result<Vec<[u8; 2]>, f32> {
    let exact = |&value: &f32| {
        let half = f16::from_f32(value);
        if half.to_f32() == value { Ok(half.to_le_bytes()) } else { Err(value) }
    };
    values.iter().map(exact).collect()
}

/// Codes 0..16 to low nibbles, 16..32 to high ones; none is above 15.
fn nibbles(codes: &[u8; BLOCK], out: &mut [u8]) {
    let (low, high) = codes.as_chunks::<16>().0.split_at(1);
    let both = u128::from_le_bytes(low[0]) | u128::from_le_bytes(high[0]) << 4;
    out.copy_from_slice(&both.to_le_bytes());
}
