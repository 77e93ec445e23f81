//! Numbers of groups in packed order.

use super::{OP, PANEL};
use crate::error::Result;
use crate::layout::multiples::Multiples;
use crate::layout::places::runs;
use crate::layout::stored::{StoredTensor, Strides};
use crate::memory::{collected, zeroed};
use crate::tensor::{Float, FloatData};
use bytemuck::Zeroable;
use half::{bf16, f16};
use rayon::prelude::*;

/// One number for each panel, group and lane, as narrow as its type allows.
#[derive(Clone, Debug)]
pub enum PerGroup {
    /// Half floats.
    F16(Vec<f16>),
    /// Brain floats.
    BF16(Vec<bf16>),
    /// Singles.
    F32(Vec<f32>),
    /// Whole multiples of halves.
    Multiples(Box<PanelMultiples>),
}

/// Numbers as whole multiples of halves that neighbouring groups share.
#[derive(Clone, Debug)]
pub struct PanelMultiples {
    /// `[panel][block][16]`.
    halves: Vec<f16>,
    /// `[panel][group][16]`; of nibbles `[panel][group / 2][16]`, the first of each two groups in the low ones.
    factors: Vec<u8>,
    /// Binary logarithm of the number of groups of a block. Panels have whole blocks.
    log2_block: u32,
    /// Whether factors are nibbles, from 0 to 15, else bytes with sign.
    nibbles: bool,
}

/// What 16 outputs have of a group.
#[derive(Clone, Copy, Debug)]
pub struct Sixteen<'a> {
    /// The halves.
    pub halves: &'a [f16],
    /// Bytes with the factors.
    pub factors: &'a [u8],
    /// How far down the factors have to be shifted.
    pub shift: u32,
    /// The bits that are theirs then.
    pub mask: u8,
}

impl PanelMultiples {
    /// Of tensors one below the other with blocks of `block` groups, one in each row at least.
    fn of(parts: &[&Multiples<'_>], heights: &[usize], block: usize, groups: usize) -> Result<Self> {
        let halves: Vec<_> = parts.iter().map(|m| (m.halves(), Strides::of_outputs(groups / block))).collect();
        let factors: Vec<_> = parts.iter().map(|m| (m.factors(), Strides::of_outputs(groups))).collect();
        let small = |m: &&Multiples<'_>| m.factors().par_iter().all(|factor| (0..16).contains(factor));
        let nibbles = block > 1 && parts.iter().all(small);
        let bytes: Vec<u8> = bytemuck::cast_vec(spread(&factors, heights, groups)?);
        let factors = if nibbles {
            let two = bytes.as_chunks::<{ 2 * PANEL }>().0;
            let both = |two: &[u8; 2 * PANEL]| std::array::from_fn::<u8, PANEL, _>(|i| two[i] | two[PANEL + i] << 4);
            collected(OP, two.len() * PANEL, two.iter().flat_map(both))?
        } else {
            bytes
        };
        let halves = spread(&halves, heights, groups / block)?;
        Ok(Self { halves, factors, log2_block: block.ilog2(), nibbles })
    }

    /// Those of 16 outputs, from element `at` of `[panel][group][16]` on, a multiple of 16.
    #[inline(always)]
    pub fn sixteen(&self, at: usize) -> Sixteen<'_> {
        let group = at / PANEL;
        let (row, shift, mask) = if self.nibbles { (group / 2, group as u32 % 2 * 4, 15) } else { (group, 0, u8::MAX) };
        Sixteen {
            halves: &self.halves[(group >> self.log2_block) * PANEL..][..PANEL],
            factors: &self.factors[row * PANEL..][..PANEL],
            shift,
            mask,
        }
    }

    /// Groups of an aligned run that share halves, 16 at most: a power of two.
    pub fn run(&self) -> usize {
        1 << self.log2_block.min(PANEL.ilog2())
    }

    /// The halves of a run of groups from row `row` of `[panel][group]` on, its factors, and whether they are nibbles.
    pub fn run_at(&self, row: usize) -> (&[f16], &[u8], bool) {
        let factors = match self.nibbles {
            true => &self.factors[row / 2 * PANEL..][..self.run() / 2 * PANEL],
            false => &self.factors[row * PANEL..][..self.run() * PANEL],
        };
        (&self.halves[(row >> self.log2_block) * PANEL..][..PANEL], factors, self.nibbles)
    }

    fn get(&self, i: usize) -> f32 {
        let Sixteen { halves, factors, shift, mask } = self.sixteen(i);
        halves[i % PANEL].to_f32() * f32::from((factors[i % PANEL] >> shift & mask) as i8)
    }
}

impl PerGroup {
    /// Values of tensors one below the other, which are exact in `dtype`; `multiples` of those whose are known. Error: memory is short.
    pub(super) fn of(
        (values, multiples): (Vec<(&FloatData<'_>, Strides)>, Vec<&Multiples<'_>>),
        parts: &[&StoredTensor<'_>],
        groups: usize,
        dtype: Float,
    ) -> Result<Self> {
        let heights = heights(parts);
        if let [first, ..] = multiples[..]
            && multiples.len() == parts.len()
            && multiples.iter().all(|multiples| multiples.block() == first.block())
        {
            let multiples = PanelMultiples::of(&multiples, &heights, first.block(), groups)?;
            return Ok(Self::Multiples(Box::new(multiples)));
        }
        macro_rules! in_their_type {
            ($variant:ident) => {{
                let tables: Option<Vec<_>> = values
                    .iter()
                    .map(|(v, strides)| if let FloatData::$variant(v) = v { Some((&**v, *strides)) } else { None })
                    .collect();
                if let Some(tables) = tables {
                    return Ok(Self::$variant(spread(&tables, &heights, groups)?));
                }
            }};
        }
        match dtype {
            Float::F16 => in_their_type!(F16),
            Float::BF16 => in_their_type!(BF16),
            Float::F32 => in_their_type!(F32),
        }
        let widened = |(v, strides): &(&FloatData<'_>, Strides)| {
            let floats = v.as_floats();
            Ok((collected(OP, v.len(), (0..v.len()).map(|i| floats.get(i)))?, *strides))
        };
        let wide: Vec<(Vec<f32>, Strides)> = values.iter().map(widened).collect::<Result<_>>()?;
        let tables: Vec<_> = wide.iter().map(|(v, strides)| (v.as_slice(), *strides)).collect();
        let spread = spread(&tables, &heights, groups)?;
        Ok(match dtype {
            Float::F16 => Self::F16(collected(OP, spread.len(), spread.into_iter().map(f16::from_f32))?),
            Float::BF16 => Self::BF16(collected(OP, spread.len(), spread.into_iter().map(bf16::from_f32))?),
            Float::F32 => Self::F32(spread),
        })
    }

    /// Element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F16(v) => v[i].to_f32(),
            Self::BF16(v) => v[i].to_f32(),
            Self::F32(v) => v[i],
            Self::Multiples(multiples) => multiples.get(i),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::F16(v) => v.len() * 2,
            Self::BF16(v) => v.len() * 2,
            Self::F32(v) => v.len() * 4,
            Self::Multiples(multiples) => multiples.halves.len() * 2 + multiples.factors.len(),
        }
    }
}

pub(super) fn heights(parts: &[&StoredTensor<'_>]) -> Vec<usize> {
    parts.iter().map(|part| part.n()).collect()
}

/// Values of tensors of these heights, one below the other, in packed order, `[panel][group][16]`. Error: memory is short.
pub(super) fn spread<T: Copy + Zeroable + Send + Sync>(
    tables: &[(&[T], Strides)],
    heights: &[usize],
    groups: usize,
) -> Result<Vec<T>> {
    let n: usize = heights.iter().sum();
    let mut out = zeroed::<T>(OP, n.div_ceil(PANEL) * groups * PANEL)?;
    out.par_chunks_mut((groups * PANEL).max(1)).enumerate().for_each(|(panel, out)| {
        let mut lane = 0;
        for (part, first, rows) in runs(heights, panel * PANEL..(panel + 1) * PANEL) {
            let (values, strides) = tables[part];
            if strides.output == 1 {
                for (g, out) in out.chunks_exact_mut(PANEL).enumerate() {
                    out[lane..lane + rows].copy_from_slice(&values[strides.at(first, g)..][..rows]);
                }
            } else {
                for i in 0..rows {
                    for (g, out) in out.chunks_exact_mut(PANEL).enumerate() {
                        out[lane + i] = values[strides.at(first + i, g)];
                    }
                }
            }
            lane += rows;
        }
    });
    Ok(out)
}
