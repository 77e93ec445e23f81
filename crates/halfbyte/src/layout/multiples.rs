//! Numbers of groups as whole multiples of halves that neighbouring groups share: the scales and offsets of GGUF's K types.
//!
//! ```text
//! number (i, g) = half (i, g / groups of a block) · factor (i, g)            exact in f32: 11 bits times 8
//! ```

use super::stored::Strides;
use crate::error::{Error, Result};
use crate::tensor::FloatData;
use half::f16;
use rayon::prelude::*;
use std::borrow::Cow;

/// Numbers `[n, groups]` in two parts.
#[derive(Clone, Debug)]
pub struct Multiples<'a> {
    block: usize,
    halves: Cow<'a, [f16]>,
    factors: Cow<'a, [i8]>,
    /// What [`Multiples::without_sign`] says.
    without_sign: Option<(i8, u8)>,
}

/// Products that a task makes.
const PIECE: usize = 1 << 15;

impl<'a> Multiples<'a> {
    /// Halves `[n, blocks]` of `block` neighbouring groups each, and factors `[n, groups]`.
    ///
    /// Errors: a block that is no power of two, another number of factors than `block` for each half.
    pub fn new(block: usize, halves: impl Into<Cow<'a, [f16]>>, factors: impl Into<Cow<'a, [i8]>>) -> Result<Self> {
        let (halves, factors) = (halves.into(), factors.into());
        if !block.is_power_of_two() || halves.len().checked_mul(block) != Some(factors.len()) {
            let got = format!("{} of {} factors in blocks of {block}", halves.len(), factors.len());
            return Err(Error::invalid("multiples of halves", "a half for every block of 1, 2, 4 … factors", got));
        }
        let ends = factors.par_chunks(PIECE).map(|factors| factors.iter().fold((0, 0), |ends, &f| widen(ends, (f, f))));
        let (least, most) = ends.reduce(|| (0, 0), widen);
        let without_sign = match (least, most) {
            (0, most) => Some((1, most.unsigned_abs())),
            (least, 0) => Some((-1, least.unsigned_abs())),
            _ => None,
        };
        Ok(Self { block, halves, factors, without_sign })
    }

    /// Groups of a block, a power of two.
    pub fn block(&self) -> usize {
        self.block
    }

    /// Halves, `[n, blocks]`.
    pub fn halves(&self) -> &[f16] {
        &self.halves
    }

    /// Factors, `[n, groups]`.
    pub fn factors(&self) -> &[i8] {
        &self.factors
    }

    /// 1 or -1, by which every factor becomes one without a sign, as GGUF's types with offsets have them, and the greatest of these; None:
    /// some have another sign than others.
    pub(crate) fn without_sign(&self) -> Option<(i8, u8)> {
        self.without_sign
    }

    /// The numbers, `[n, groups]`.
    pub fn products(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.factors.len()];
        out.par_chunks_mut(self.piece()).zip(self.pieces()).for_each(|(out, piece)| self.multiply(piece, out));
        out
    }

    /// Whether they are the numbers of a table `[n, groups]`, to the sign of zero.
    pub(super) fn are(&self, values: &FloatData<'_>, strides: Strides, [n, groups]: [usize; 2]) -> bool {
        let (FloatData::F32(values), Some(len)) = (values, n.checked_mul(groups)) else { return false };
        let fits = self.factors.len() == len && values.len() >= len && groups.is_multiple_of(self.block);
        let same = |(values, piece): (&[f32], Piece<'_>)| {
            let mut products = vec![0.0; values.len()];
            self.multiply(piece, &mut products);
            products.iter().zip(values).fold(true, |same, (a, b)| same & (a.to_bits() == b.to_bits()))
        };
        fits && strides == Strides::of_outputs(groups)
            && values[..len].par_chunks(self.piece()).zip(self.pieces()).all(same)
    }

    /// Numbers of a piece: whole blocks, but for the last.
    fn piece(&self) -> usize {
        PIECE.max(self.block)
    }

    fn pieces(&self) -> impl IndexedParallelIterator<Item = Piece<'_>> {
        let halves = self.halves.par_chunks(self.piece() / self.block);
        halves.zip(self.factors.par_chunks(self.piece()))
    }

    fn multiply(&self, (halves, factors): Piece<'_>, out: &mut [f32]) {
        let blocks = out.chunks_exact_mut(self.block).zip(factors.chunks_exact(self.block));
        for ((out, factors), half) in blocks.zip(halves) {
            let half = half.to_f32();
            out.iter_mut().zip(factors).for_each(|(out, &factor)| *out = half * f32::from(factor));
        }
    }
}

/// The least and the greatest of two ranges.
fn widen(a: (i8, i8), b: (i8, i8)) -> (i8, i8) {
    (a.0.min(b.0), a.1.max(b.1))
}

/// Halves and the factors that they are multiplied by.
type Piece<'a> = (&'a [f16], &'a [i8]);
