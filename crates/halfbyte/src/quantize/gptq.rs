//! GPTQ: rounding column by column, each column's error made good by the columns after it.
//!
//! Source: Frantar, Ashkboos, Hoefler, Alistarh, "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
//! Transformers", 2022, section "The GPTQ Algorithm" (steps 1 to 3: arbitrary order, lazy batch updates, Cholesky
//! reformulation); act-order and static groups as in programs that followed. What is minimised is
//! `tr((W − Q) · H · (W − Q)ᵀ)` with `H = Σ xᵀx`.
//!
//! What differs: the paper factors the inverse, `H⁻¹ = Uᵀ · U`, and subtracts each column's error from all later
//! weights. Here H itself is factored from its far end, `H = R · Rᵀ` with R upper triangular. Since `U = R⁻¹`, the same
//! weights come out of
//!
//! ```text
//! q[j] = round( w[j] − Σ_{i<j} (q[i] − w[i]) · R[i, j] / R[j, j] )
//! ```
//!
//! (Chee et al., "QuIP", 2023, call this LDLQ and prove the two equal.) No inverse is needed, which saves three quarters
//! of the work on H, and sums are over what is already settled: a block of columns takes one product with all
//! before it. The weights that the paper's update would show when a group begins, from which its scale is found, follow
//! from the same recursion without rounding. All of it is in f64.

use super::damped::{Damped, check};
use super::panel::{BLOCK, Panel, pieces, rows_at_a_time};
use super::rtn::{Params, Range as ScaleRange, Rtn, SymmetricScale, rtn};
use super::stats::Hessian;
use super::too_large;
use crate::error::Result;
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::Floats;
use rayon::prelude::*;
use std::ops::Range;

const OP: &str = "quantize (GPTQ)";

/// Options of [`gptq`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Gptq {
    /// Added to H's diagonal, as a fraction of its mean over the columns that are not dead. Ten times as much is tried
    /// (10⁻⁶ after 0), up to 10, while H is not positive definite.
    pub damping: f64,
    /// Columns in order of falling diagonal of H, instead of as they lie. Groups are then of columns in that order, and
    /// the result has a group index, unless groups are static.
    pub act_order: bool,
    /// Find all scales beforehand, from the weights as they are, for groups of columns as they lie.
    pub static_groups: bool,
    /// How a symmetric scale follows from the largest magnitude.
    pub symmetric: SymmetricScale,
    /// Search for each group's scale as [`Rtn::search`] does, for the least error as it counts in the loss: each column's
    /// squared error by how little the columns after it can make good.
    pub search: bool,
}

impl Default for Gptq {
    fn default() -> Self {
        Self {
            damping: 0.01,
            act_order: false,
            static_groups: false,
            symmetric: SymmetricScale::default(),
            search: false,
        }
    }
}

/// What [`gptq`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibrated {
    /// The quantised weights.
    pub weights: QTensor,
    /// The damping that was used: more than asked for if H was not positive definite with that.
    pub damping: f64,
    /// Dead columns: input channels that were 0 in every input.
    pub dead: usize,
    /// `tr((W − Q) · H · (W − Q)ᵀ)` for the damped H, W being zero in dead columns: the squared error of the outputs over
    /// all inputs, and the damping times the squared error of the weights.
    pub loss: f64,
}

/// Quantises a matrix by GPTQ.
///
/// *Shapes:* w `[n, k]`; `hessian` of k. *Scales* are found when a group begins, from the weights as updated until then
/// (beforehand if groups are static, or one scale covers all of a row), by the rules of [`rtn`], rounded to the
/// format's scale type before any code is chosen. Every [`Zero`] is served. *Dead columns:* their weights become 0, as
/// in the authors' program.
///
/// *Cost:* `k³/3 + n·k²` floating-point operations and `8 · k²` bytes besides the Hessian's own; for k = 16384 that is
/// 1.5 · 10¹² operations before the first row, and 2 GiB. A matrix of n = k = 4096 takes about 4 s on two cores. The
/// result is the same, bit for bit, whatever the number of threads.
///
/// *Errors:* a length that is not n·k, a Hessian of another k, one without inputs or of zeros only, one that no damping
/// makes positive definite, a damping that is negative or not finite, a bad format, NaN or infinity (with its place), a
/// scale beyond the scale type.
pub fn gptq(
    w: Floats<'_>,
    [n, k]: [usize; 2],
    format: WeightFormat,
    hessian: &Hessian,
    options: Gptq,
) -> Result<Calibrated> {
    format.validate()?;
    check(OP, w, [n, k], hessian, options.damping)?;
    let scales = ScaleRange { format, options: Rtn { symmetric: options.symmetric, search: options.search } };
    if n == 0 || k == 0 {
        let weights = rtn(w, [n, k], format, scales.options)?;
        let dead = (0..k).filter(|&j| hessian.get(j, j) == 0.0).count();
        return Ok(Calibrated { weights, damping: options.damping, dead, loss: 0.0 });
    }
    let mut damped = Damped::new(OP, hessian, options.damping)?;
    let order = order(hessian, options.act_order);
    let factor = factor(&mut damped, &order)?;
    let dead = &damped.dead;
    let groups = format.group.count(k);
    let len = format.group.len(k);
    let beforehand = options.static_groups || groups == 1;
    let row = |i: usize| -> Vec<f32> { (0..k).map(|j| if dead[j] { 0.0 } else { w.get(i * k + j) }).collect() };
    // A search weighs errors as the loss does. Scales found beforehand are of columns as they lie.
    let mut lying = vec![0.0; k];
    order.iter().zip(&factor.pivots).for_each(|(&j, &pivot)| lying[j] = pivot);
    let tensor_wide = match format.group {
        Group::Tensor => Some(scales.of(&(0..n).flat_map(row).collect::<Vec<f32>>(), &lying, None)),
        _ => None,
    };
    let plan = Plan {
        k,
        groups,
        len,
        group_of: order.iter().enumerate().map(|(p, &j)| if beforehand { j / len } else { p / len }).collect(),
        scales,
        factor,
    };

    let mut codes = vec![0u8; n * k];
    let mut params = vec![Params { scale: 0.0, zero: 0.0 }; n * groups];
    let mut losses = vec![0.0; n];
    let rows = rows_at_a_time(n);
    let beyond = codes
        .par_chunks_mut(rows * k)
        .zip(params.par_chunks_mut(rows * groups))
        .zip(losses.par_chunks_mut(rows))
        .enumerate()
        .map(|(block, ((codes, params), losses))| {
            let first = block * rows;
            let mut weights: Vec<f32> = Vec::with_capacity(codes.len());
            let mut channels = Vec::with_capacity(losses.len());
            for (i, params) in params.chunks_mut(groups).enumerate() {
                let row = row(first + i);
                let ordered: Vec<f32> = order.iter().map(|&j| row[j]).collect();
                // Of the weights as they are: errors of columns before a group may ask for more than its greatest factor.
                let channel = plan.scales.channel(if beforehand { &row } else { &ordered }.chunks(len));
                channels.push(channel);
                if beforehand {
                    for ((params, group), pivots) in params.iter_mut().zip(row.chunks(len)).zip(lying.chunks(len)) {
                        *params = tensor_wide.unwrap_or_else(|| plan.scales.of(group, pivots, channel));
                    }
                }
                weights.extend(ordered);
            }
            let mut rows =
                Rows { errors: vec![0.0; weights.len()], weights, params, codes, losses, order: &order, channels };
            if beforehand {
                rows.settle(&plan, 0..k, k);
            } else {
                rows.settle_with_scales(&plan);
            }
            // A row may be in a block of any size: its first group too large is found whatever the blocks.
            params.iter().position(|p| !(p.scale.is_finite() && p.zero.is_finite())).map(|i| first + i / groups)
        })
        .find_map_first(|bad| bad);
    if let Some(row) = beyond {
        return Err(too_large(OP, format, &format!(" in row {row}")));
    }

    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => Zeros::Integer(params.iter().map(|p| p.zero as u16).collect()),
        Zero::Float => Zeros::Float(params.iter().map(|p| p.zero).collect()),
    };
    let mut group_index = vec![0; k];
    for (&j, &g) in order.iter().zip(&plan.group_of) {
        group_index[j] = g as u32;
    }
    let scales = params.iter().map(|p| p.scale).collect();
    let weights = QTensor::new(format, [n, k], codes, scales, zeros, Some(group_index))?;
    let (damping, dead) = (damped.damping, damped.dead_count());
    Ok(Calibrated { weights, damping, dead, loss: losses.iter().sum() })
}

/// The columns in the order in which they are quantised.
fn order(hessian: &Hessian, act_order: bool) -> Vec<usize> {
    let mut order: Vec<usize> = (0..hessian.k()).collect();
    if act_order {
        order.sort_by(|&a, &b| hessian.get(b, b).total_cmp(&hessian.get(a, a)));
    }
    order
}

/// R of `H = R · Rᵀ`, each column divided by its diagonal element, and the squares of those.
struct Factor {
    /// `[k, k]`; only what is above the diagonal counts.
    feedback: Vec<f64>,
    /// `R[j, j]²`, by which a column's own rounding error counts.
    pivots: Vec<f64>,
}

/// Factors the damped Hessian in the given order.
fn factor(damped: &mut Damped<'_>, order: &[usize]) -> Result<Factor> {
    // Cholesky's lower factor of the matrix turned by 180° is R, turned.
    let turned: Vec<usize> = order.iter().rev().copied().collect();
    let mut factor = damped.factor(&turned)?;
    let k = order.len();
    factor.reverse();
    let diagonal: Vec<f64> = (0..k).map(|j| factor[j * k + j]).collect();
    factor.par_chunks_mut(k).enumerate().for_each(|(i, row)| {
        row[i..].iter_mut().zip(&diagonal[i..]).for_each(|(v, d)| *v /= d);
    });
    Ok(Factor { feedback: factor, pivots: diagonal.iter().map(|d| d * d).collect() })
}

/// What all rows share. Columns count in the order of quantisation.
struct Plan {
    k: usize,
    groups: usize,
    /// Length of a full group.
    len: usize,
    group_of: Vec<usize>,
    scales: ScaleRange,
    factor: Factor,
}

impl Plan {
    /// What the columns `to` get from the errors of the columns `from`.
    fn panel(&self, from: Range<usize>, to: Range<usize>) -> Panel {
        let rows = |d| &self.factor.feedback[(from.start + d) * self.k..][to.clone()];
        Panel::from_rows([from.len(), to.len()], rows)
    }
}

/// Some rows on their way from floats to codes.
struct Rows<'a> {
    /// In the order of quantisation.
    weights: Vec<f32>,
    /// For each settled column its error `q − w`; for the others what the settled ones add to the weight.
    errors: Vec<f64>,
    params: &'a mut [Params],
    /// In the order of the matrix.
    codes: &'a mut [u8],
    losses: &'a mut [f64],
    order: &'a [usize],
    /// Scales of the rows, where scales have two levels.
    channels: Vec<Option<f32>>,
}

impl Rows<'_> {
    /// Settles all columns, finding each group's scale when it begins.
    fn settle_with_scales(&mut self, plan: &Plan) {
        let Plan { k, len, groups, .. } = *plan;
        // Small groups share a block; a large group is one.
        let block = if len < BLOCK { BLOCK / len * len } else { len };
        for from in (0..k).step_by(block) {
            let to = (from + block).min(k);
            self.carry(plan, 0..from, from..to);
            for start in (from..to).step_by(len) {
                let group = start..(start + len).min(to);
                let pivots = &plan.factor.pivots[group.clone()];
                for (i, updated) in self.updated(plan, group.clone()).chunks(group.len()).enumerate() {
                    self.params[i * groups + start / len] = plan.scales.of(updated, pivots, self.channels[i]);
                }
                self.settle(plan, group, to);
            }
        }
    }

    /// Takes the errors of the settled columns `from` to the columns `to`.
    fn carry(&mut self, plan: &Plan, from: Range<usize>, to: Range<usize>) {
        if !from.is_empty() {
            for piece in pieces(to) {
                plan.panel(from.clone(), piece.clone()).subtract_from(
                    &mut self.errors,
                    plan.k,
                    from.start,
                    piece.start,
                );
            }
        }
    }

    /// Rounds the columns `range`, to which all before them have been carried, and takes their errors to all up to
    /// `until`, which lies beyond the range only if the range is within a block.
    fn settle(&mut self, plan: &Plan, range: Range<usize>, until: usize) {
        let Plan { k, groups, .. } = *plan;
        let format = plan.scales.format;
        for piece in pieces(range.clone()) {
            self.carry(plan, range.start..piece.start, piece.clone());
            let until = if piece.end == range.end { until } else { piece.end };
            for (i, errors) in self.errors.chunks_mut(k).enumerate() {
                let weights = &self.weights[i * k..(i + 1) * k];
                for j in piece.clone() {
                    let params = self.params[i * groups + plan.group_of[j]];
                    let weight = f64::from(weights[j]);
                    let updated = weight + errors[j];
                    let code = params.code(updated as f32, format);
                    let value = params.exact(code, format);
                    self.codes[i * k + self.order[j]] = code;
                    self.losses[i] += (updated - value).powi(2) * plan.factor.pivots[j];
                    errors[j] = value - weight;
                    feed(errors, j, &plan.factor.feedback[j * k..][..until]);
                }
            }
        }
    }

    /// The weights of the columns `range` as the errors of all columns before them would have them, in rows of the
    /// range's length.
    fn updated(&self, plan: &Plan, range: Range<usize>) -> Vec<f32> {
        let (k, len) = (plan.k, range.len());
        let mut shifts: Vec<f64> = self.errors.chunks(k).flat_map(|errors| &errors[range.clone()]).copied().collect();
        for piece in pieces(range.clone()) {
            let (from, to) = (piece.start - range.start, piece.end - range.start);
            if from > 0 {
                plan.panel(range.start..piece.start, piece.clone()).subtract_from(&mut shifts, len, 0, from);
            }
            for shifts in shifts.chunks_mut(len) {
                for j in from..to {
                    // Without rounding, a column's error is the very shift it got.
                    feed(&mut shifts[..to], j, &plan.factor.feedback[(range.start + j) * k + range.start..][..to]);
                }
            }
        }
        let weights = self.weights.chunks(k).flat_map(|weights| &weights[range.clone()]);
        weights.zip(shifts).map(|(&w, shift)| (f64::from(w) + shift) as f32).collect()
    }
}

/// Subtracts what the error of column `j` means to the columns after it.
fn feed(errors: &mut [f64], j: usize, feedback: &[f64]) {
    let error = errors[j];
    if error != 0.0 {
        errors[j + 1..].iter_mut().zip(&feedback[j + 1..]).for_each(|(x, f)| *x -= error * f);
    }
}
