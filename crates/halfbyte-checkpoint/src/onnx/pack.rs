//! From a quantised tensor to the initialisers of a product.

use super::codes::pack_row;
use crate::error::{Error, Result};
use crate::safetensors::DType;
use half::{bf16, f16};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use rayon::prelude::*;

/// Shapes and types of a product's initialisers, known before its data are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLayout {
    n: usize,
    k: usize,
    bits: u32,
    block_size: usize,
    /// Neighbours along k that share a scale in the tensor; at least a block.
    group_size: usize,
    scale: Float,
    has_zero_points: bool,
}

/// A quantised tensor as the initialisers of a product.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedBlocks {
    /// What the bytes are.
    pub layout: BlockLayout,
    /// Codes, u8 `[n, blocks, block_size·bits/8]`.
    pub weight: Vec<u8>,
    /// Scales, `[n, blocks]` of the layout's type.
    pub scales: Vec<u8>,
    /// Zero points, u8 `[n, ceil(blocks·bits/8)]`, unless the format is symmetric.
    pub zero_points: Option<Vec<u8>>,
}

/// What onnxruntime's kernels for the CPU take.
const BLOCK_SIZES: [usize; 5] = [16, 32, 64, 128, 256];

/// What groups of other sizes are divided into: those of 256 are not taken everywhere.
const DIVISIONS: [usize; 4] = [128, 64, 32, 16];

fn refuse<T>(tensor: &str, reason: impl Into<String>) -> Result<T> {
    Err(Error::Unrepresentable { tensor: tensor.to_owned(), scheme: "MatMulNBits", reason: reason.into() })
}

impl BlockLayout {
    /// The layout of a tensor `[n, k]` of this format, with scales stored as `scale`.
    ///
    /// The operator's readers take blocks of 16, 32, 64, 128 and 256. Groups of such a size become blocks. Larger ones
    /// are divided, and their scale is repeated: into blocks of 128, or the largest of 64, 32 and 16 that they are a
    /// multiple of. One scale a row or for the whole tensor becomes one block if it can, else blocks of 128. *Errors:*
    /// what the operator cannot hold: bits other than 2, 4 and 8, float offsets, groups that are no multiple of 16
    /// (unless there is one only), an empty tensor, one that does not fit memory.
    pub fn of(name: &str, format: WeightFormat, [n, k]: [usize; 2], scale: Float) -> Result<Self> {
        format.validate().map_err(Error::numbers(name))?;
        let WeightFormat { bits, group, zero, .. } = format;
        if !matches!(bits, 2 | 4 | 8) {
            return refuse(name, format!("its codes are of 2, 4 or 8 bits, not {bits}"));
        }
        if zero == Zero::Float {
            return refuse(name, "it has zero points, no float offsets");
        }
        if n == 0 || k == 0 {
            return refuse(name, format!("a tensor [{n}, {k}] is empty"));
        }
        let (block_size, group_size) = match group {
            Group::Size(size) if BLOCK_SIZES.contains(&size) => (size, size),
            Group::Size(size) if size < k => {
                let Some(block) = DIVISIONS.into_iter().find(|block| size % block == 0) else {
                    return refuse(name, format!("its blocks are of 16, 32, 64, 128 or 256, not {size}"));
                };
                (block, size)
            }
            _ => (BLOCK_SIZES.into_iter().find(|&size| size >= k).unwrap_or(DIVISIONS[0]), usize::MAX),
        };
        // Of everything, an f32 for each code would take the most.
        let codes = k.checked_next_multiple_of(block_size).and_then(|codes| n.checked_mul(codes)?.checked_mul(4));
        if codes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            return refuse(name, format!("a tensor [{n}, {k}] in blocks of {block_size} does not fit memory"));
        }
        Ok(Self { n, k, bits, block_size, group_size, scale, has_zero_points: zero == Zero::Integer })
    }

    /// Outputs and length of the reduction, `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// Bits a code.
    pub fn bits(&self) -> u32 {
        self.bits
    }

    /// Neighbours along k that share a scale.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Type of the scales.
    pub fn scale(&self) -> Float {
        self.scale
    }

    fn blocks(&self) -> usize {
        self.k.div_ceil(self.block_size)
    }

    /// The values of groups, `[n, groups]`, as those of blocks, `[n, blocks]`, row after row.
    fn by_block<'a, T: Copy>(&self, of_groups: &'a [T]) -> impl Iterator<Item = impl Iterator<Item = T> + use<'a, T>> {
        let &Self { n, block_size, group_size, .. } = self;
        let blocks = self.blocks();
        of_groups
            .chunks_exact(of_groups.len() / n)
            .map(move |groups| (0..blocks).map(move |block| groups[block * block_size / group_size]))
    }

    fn block_bytes(&self) -> usize {
        self.block_size * self.bits as usize / 8
    }

    fn zero_row_bytes(&self) -> usize {
        (self.blocks() * self.bits as usize).div_ceil(8)
    }

    /// Type and shape of each initialiser, by the ending of its name: weight, scales, zero points if there are any.
    pub fn tensors(&self) -> impl Iterator<Item = (String, DType, Vec<usize>)> {
        let &Self { n, bits, scale, has_zero_points, .. } = self;
        let zeros = has_zero_points.then(|| ("zero_points".to_owned(), DType::U8, vec![n, self.zero_row_bytes()]));
        [
            (format!("weight_Q{bits}"), DType::U8, vec![n, self.blocks(), self.block_bytes()]),
            ("scales".to_owned(), scale.into(), vec![n, self.blocks()]),
        ]
        .into_iter()
        .chain(zeros)
    }
}

impl PackedBlocks {
    /// The initialisers' bytes, in the order of [`BlockLayout::tensors`].
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        [&self.weight, &self.scales].into_iter().chain(&self.zero_points).map(Vec::as_slice)
    }
}

/// Packs a tensor as onnxruntime's quantiser does, without loss; scales are stored as `scale`.
///
/// [`BlockLayout::of`] says which blocks groups become; what the tensor stands for is the same in all of them. Spare codes are 0, spare zero points `2^(bits−1)`. *Errors:* those of [`BlockLayout::of`]; act-order; a scale that is
/// not exact in its type, a zero point of `2^bits`.
pub fn pack(name: &str, q: &QTensor, scale: Float) -> Result<PackedBlocks> {
    let layout = BlockLayout::of(name, q.format(), [q.n(), q.k()], scale)?;
    if q.group_index().is_some() {
        return refuse(name, "its columns are grouped in their order, not by act-order");
    }
    let BlockLayout { n, k, bits, .. } = layout;
    let row = layout.blocks() * layout.block_bytes();
    let mut weight = vec![0u8; n * row];
    weight.par_chunks_mut(row).zip(q.codes().par_chunks(k)).for_each(|(bytes, codes)| pack_row(bits, codes, bytes));
    let zero_points = match q.zeros() {
        Zeros::Integer(zeros) => {
            let largest = q.format().max_code();
            if let Some(zero) = zeros.iter().find(|&&zero| u32::from(zero) > largest) {
                return refuse(name, format!("its zero points go from 0 to {largest}, got {zero}"));
            }
            let row = layout.zero_row_bytes();
            let mut bytes = vec![0u8; n * row];
            let mut codes = vec![1u8 << (bits - 1); row * 8 / bits as usize];
            for (bytes, zeros) in bytes.chunks_exact_mut(row).zip(layout.by_block(zeros)) {
                codes.iter_mut().zip(zeros).for_each(|(code, zero)| *code = zero as u8);
                pack_row(bits, &codes, bytes);
            }
            Some(bytes)
        }
        Zeros::Symmetric => None,
        Zeros::Float(_) => return refuse(name, "it has zero points, no float offsets"),
    };
    if let Some(wide) = q.scales().iter().find(|&&s| scale.round(s) != s) {
        return refuse(name, format!("its scales are {scale}, and {wide} is not exact in it"));
    }
    let scales = layout.by_block(q.scales()).flatten();
    let scales: Vec<u8> = match scale {
        Float::F16 => scales.flat_map(|s| f16::from_f32(s).to_le_bytes()).collect(),
        Float::BF16 => scales.flat_map(|s| bf16::from_f32(s).to_le_bytes()).collect(),
        Float::F32 => scales.flat_map(|s| s.to_le_bytes()).collect(),
    };
    Ok(PackedBlocks { layout, weight, scales, zero_points })
}
