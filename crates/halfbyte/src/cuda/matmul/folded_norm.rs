//! Norms that two products of few rows share: no kernel comes between them (`include/folded_norm.cuh`).
//!
//! ```text
//! output, down:     stream += x · Wᵀ;   scaled = stream · weight · scale;   squares += those of the stream
//! q, k, v, gate:    y = (scaled · Wᵀ) / (scale · √(mean of the squares + ε))
//! ```
//!
//! A row's scale is a power of two, so that scaling rounds nothing within the range of x: that of the norm before. Squares are exact
//! sums of floats, in whole numbers, whatever the order of blocks.

use super::{Call, OP, Packed, check_lengths};
use crate::cuda::Gpu;
use crate::cuda::driver::{FloatViewMut, Stream, View, ViewMut};
use crate::cuda::parameters::parameters;
use crate::cuda::sources::Instance;
use crate::error::{Error, Result};
use crate::kernel::{Activation, Problem};
use crate::tensor::Float;

/// Rows at most, as in the source.
pub(super) const ROWS: usize = 32;

/// Bytes of shared memory for a factor of each.
pub(super) const FACTORS_BYTES: usize = 4 * ROWS;

/// Whole numbers that a row's sum of squares is in, as in the source.
const BINS: usize = 16;

/// Columns that a stream has a multiple of.
pub(super) const COLUMNS: usize = 64;

/// What a product does of a norm, with its number in the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    /// Adds to the stream, and leaves what the next product reads.
    Leaves = 1,
    /// Divides its sums by the root mean square.
    Divides = 2,
}

/// A product's part of a norm.
#[derive(Debug)]
pub enum FoldedNorm<'a> {
    /// y is the stream `[m, n]` in f32, to which the product is added.
    Leaves {
        /// What the next product reads, `[m, n]`, in the type of x.
        scaled: FloatViewMut<'a>,
        /// Factors of the norm, `[n]`.
        weight: View<'a, f32>,
        /// Sums of squares, `[m, 16]`, to which those of the stream are added.
        squares: ViewMut<'a, u64>,
        /// Powers of two, `[m]`.
        scales: View<'a, f32>,
    },
    /// x is what such a product left.
    Divides {
        /// Sums of squares, `[m, 16]`.
        squares: View<'a, u64>,
        /// Powers of two, `[m]`, that x was multiplied by.
        scales: View<'a, f32>,
        /// What the next norm begins with.
        next: NextNorm<'a>,
        /// Added to the mean square.
        eps: f32,
    },
}

/// What a norm leaves for the next one, where products fold that. The sums of squares become zeros.
#[derive(Debug)]
pub struct NextNorm<'a> {
    /// Sums of squares, `[m, 16]`.
    pub squares: ViewMut<'a, u64>,
    /// Powers of two, `[m]`.
    pub scales: ViewMut<'a, f32>,
}

parameters! {
    /// As in `include/next_norm.cuh`; zeros: there is none.
    #[derive(Default)]
    pub(in crate::cuda) struct NextOperands {
        squares: u64,
        scales: u64,
    }

    /// `NormOperands` of the source.
    pub(in crate::cuda) struct NormOperands {
        squares: u64,
        scaled: u64,
        weight: u64,
        scales: u64,
        next: NextOperands,
        eps: f32,
        width: i32,
    }
}

impl NextNorm<'_> {
    /// As the source has it, of m rows. Error: lengths that do not fit, numbers that are not whole vectors.
    pub(in crate::cuda) fn operands(&self, m: usize) -> Result<NextOperands> {
        fits("the next squares", m * BINS, self.squares.len())?;
        fits("the next scales", m, self.scales.len())?;
        let (squares, scales) = (self.squares.pointer(), self.scales.pointer());
        aligned(squares).map(|()| NextOperands { squares, scales })
    }
}

/// Error: another length.
fn fits(what: &str, want: usize, got: usize) -> Result<()> {
    match want == got {
        true => Ok(()),
        false => Err(Error::invalid(OP, format!("{what} of {want}"), format!("{got} elements"))),
    }
}

/// Error: an address that is not of whole vectors.
fn aligned(at: u64) -> Result<()> {
    match at.is_multiple_of(16) {
        true => Ok(()),
        false => Err(Error::invalid(OP, "rows of a norm that begin at multiples of 16 bytes", "others")),
    }
}

impl FoldedNorm<'_> {
    /// Rows that products share a norm of, at most.
    pub const MOST_ROWS: usize = ROWS;

    /// Whole numbers that the sums of squares of m rows are in.
    pub const fn squares(m: usize) -> usize {
        m * BINS
    }

    /// What it is.
    pub(super) fn fold(&self) -> Fold {
        match self {
            Self::Leaves { .. } => Fold::Leaves,
            Self::Divides { .. } => Fold::Divides,
        }
    }

    /// As the source has it, for a product. Error: a length or a type that does not fit, addresses that are not whole vectors.
    pub(super) fn parameters(&self, &Problem { x, y, m, n, k, .. }: &Problem) -> Result<NormOperands> {
        let width = if self.fold() == Fold::Leaves { n } else { k };
        let none = NextOperands::default();
        let parameters = match self {
            Self::Leaves { scaled, weight, squares, scales } => {
                fits("scaled rows", m * n, scaled.len())?;
                fits("a norm's weight", n, weight.len())?;
                fits("squares", m * BINS, squares.len())?;
                fits("scales", m, scales.len())?;
                if scaled.dtype() != x || y != Float::F32 {
                    let expected = format!("scaled rows in {x}, and a stream in f32");
                    return Err(Error::invalid(OP, expected, format!("{} and {y}", scaled.dtype())));
                }
                let [scaled, weight, squares, scales] =
                    [scaled.pointer(), weight.pointer(), squares.pointer(), scales.pointer()];
                NormOperands { squares, scaled, weight, scales, next: none, eps: 0.0, width: width as i32 }
            }
            Self::Divides { squares, scales, next, eps } => {
                fits("squares", m * BINS, squares.len())?;
                fits("scales", m, scales.len())?;
                let (squares, scales, next) = (squares.pointer(), scales.pointer(), next.operands(m)?);
                NormOperands { squares, scaled: 0, weight: 0, scales, next, eps: *eps, width: width as i32 }
            }
        };
        aligned(parameters.squares).and_then(|()| aligned(parameters.scaled)).map(|()| parameters)
    }
}

impl Packed {
    /// Whether a product with it, of `problem.m` rows, does its part of a norm.
    ///
    /// *Errors:* no kernel computes the product.
    pub fn folds(&self, gpu: &Gpu, problem: &Problem, activation: Activation, fold: Fold) -> Result<bool> {
        let plans = self.plans(gpu, problem.x, problem.y)?;
        let plan = plans.at(problem.m, false)?;
        Ok(self.in_order() && plan.configuration().get().folds(&self.caps(gpu), problem, activation, fold))
    }

    /// What such a product is computed by; None where it does not. *Errors:* as of [`Packed::folds`].
    pub fn folding(
        &self,
        gpu: &Gpu,
        problem: &Problem,
        activation: Activation,
        fold: Fold,
    ) -> Result<Option<Instance>> {
        let plans = self.plans(gpu, problem.x, problem.y)?;
        let plan = plans.at(problem.m, false)?;
        let instance = plan.configuration().get().folding(&self.caps(gpu), problem, activation, fold);
        Ok(instance.filter(|_| self.in_order()))
    }
}

/// Puts a product that does its part of a norm into a stream: one that [`Packed::folds`] says so of.
///
/// *Accuracy:* what is scaled is rounded to the type of x, as a norm's result is; what sums are divided by has a relative error of at
/// most 32 · 2⁻²⁴. *Errors:* lengths that do not fit, a product that no kernel computes so.
pub fn run_folded(gpu: &Gpu, stream: &Stream, call: &Call<'_>, norm: &FoldedNorm<'_>) -> Result<()> {
    check_lengths(call)?;
    if call.y.is_empty() {
        return Ok(());
    }
    let plans = call.w.plans(gpu, call.x.dtype(), call.y.dtype())?;
    plans.at(call.m, false)?.configuration().get().run_folded(gpu, stream, call, norm)
}
