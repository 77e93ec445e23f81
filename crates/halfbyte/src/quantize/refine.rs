//! Refining quantised weights: scales and codes move, one at a time, wherever the outputs come closer.
//!
//! What is minimised is the loss of GPTQ, `tr((W − Q) · H · (W − Q)ᵀ)` with H damped. Rows do not depend on each other.
//! With `E = Q − W`, a sweep goes over the groups of a row:
//!
//! ```text
//! pull = −E · H                                       for the group's columns
//! scale += (u · pull) / (u · H · u)                   u: the group's codes less its zero; then rounded to its type
//! for each column j:  q[j] = round( q[j] + pull[j] / H[j, j] )
//! ```
//!
//! (a float offset moves as the scale does, with u all ones), the pull following every move. A move is made only if it
//! lowers the loss, so that no sweep can raise it. Source: Behdin and others, "QuantEase: Optimization-based
//! Quantization for Language Models", 2023, for the descent over codes. What differs: scales take part, and the pull of
//! a group is computed when its turn comes, by a matrix product with H, instead of being kept up to date.

use super::damped::{Damped, check};
use super::gptq::Calibrated;
use super::panel::{Panel, pieces, rows_at_a_time};
use super::rtn::Params;
use super::stats::Hessian;
use crate::error::Result;
use crate::format::factors::most_factor;
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::Floats;
use rayon::prelude::*;
use std::ops::Range;

/// Options of [`refine`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refine {
    /// How often every scale and code gets its turn; a row with which nothing moves any more is done sooner.
    pub sweeps: usize,
    /// Added to H's diagonal, as a fraction of its mean over the columns that are not dead.
    pub damping: f64,
}

impl Default for Refine {
    fn default() -> Self {
        Self { sweeps: 3, damping: 0.01 }
    }
}

/// Moves scales, offsets and codes of a quantised matrix so that its outputs come closer to those of w. Zero points stay,
/// and so does the scale of a whole tensor.
///
/// *Shapes:* w `[n, k]`, as `start`; `hessian` of k. *Loss:* no greater than that of `start`. *Dead columns* count as
/// weights of 0. *Cost:* `(2 · sweeps + 1) · n·k²` floating-point operations, and somewhat more for large groups; `8 · k²`
/// bytes. The result is the same, bit for bit, whatever the number of threads.
///
/// *Errors:* a length or a k that is not that of `start`, no inputs or none but zeros, a damping that is negative or not
/// finite, NaN or infinity in w (with its place).
pub fn refine(w: Floats<'_>, start: &QTensor, hessian: &Hessian, options: Refine) -> Result<Calibrated> {
    const OP: &str = "refine";
    let (format, n, k) = (start.format(), start.n(), start.k());
    check(OP, w, [n, k], hessian, options.damping)?;
    if n == 0 || k == 0 {
        let dead = (0..k).filter(|&j| hessian.get(j, j) == 0.0).count();
        return Ok(Calibrated { weights: start.clone(), damping: options.damping, dead, loss: 0.0 });
    }
    let damped = Damped::new(OP, hessian, options.damping)?;
    let plan = Plan::new(start, &damped)?;
    let groups = start.groups();
    let zero = |i: usize| match start.zeros() {
        Zeros::Symmetric => format.middle() as f32,
        Zeros::Integer(zeros) => f32::from(zeros[i]),
        Zeros::Float(offsets) => offsets[i],
    };
    let mut params: Vec<Params> =
        start.scales().iter().enumerate().map(|(i, &scale)| Params { scale, zero: zero(i) }).collect();
    let mut codes = start.codes().to_vec();
    let mut losses = vec![0.0; n];
    let at_a_time = rows_at_a_time(n);
    codes
        .par_chunks_mut(at_a_time * k)
        .zip(params.par_chunks_mut(at_a_time * groups))
        .zip(losses.par_chunks_mut(at_a_time))
        .enumerate()
        .for_each(|(block, ((codes, params), losses))| {
            let first = block * at_a_time * k;
            let channels = start.channel_scales().map(|scales| &scales[block * at_a_time..][..losses.len()]);
            let weight = |i: usize| if damped.dead[i % k] { 0.0 } else { f64::from(w.get(first + i)) };
            let mut rows = Rows { work: vec![0.0; losses.len() * plan.stride()], codes, params, channels };
            for (i, row) in rows.work.chunks_mut(plan.stride()).enumerate() {
                for ((error, &j), &g) in row.iter_mut().zip(&plan.order).zip(&plan.group_of) {
                    *error = rows.params[i * groups + g].exact(rows.codes[i * k + j], format) - weight(i * k + j);
                }
            }
            for _ in 0..options.sweeps {
                if !rows.sweep(&plan) {
                    break;
                }
            }
            let mut errors = vec![0.0; losses.len() * k];
            for (errors, row) in errors.chunks_mut(k).zip(rows.work.chunks(plan.stride())) {
                plan.order.iter().zip(row).for_each(|(&j, &error)| errors[j] = error);
            }
            losses.copy_from_slice(&damped.losses(&errors));
        });
    let zeros = match start.zeros() {
        Zeros::Float(_) => Zeros::Float(params.iter().map(|p| p.zero).collect()),
        unmoved => unmoved.clone(),
    };
    let scales = params.iter().map(|p| p.scale).collect();
    let index = start.group_index().map(<[u32]>::to_vec);
    let weights = QTensor::new(format, [n, k], codes, scales, zeros, index)?;
    Ok(Calibrated { weights, damping: options.damping, dead: damped.dead_count(), loss: losses.iter().sum() })
}

/// What all rows share. Columns count group by group.
struct Plan {
    k: usize,
    format: WeightFormat,
    /// Where each column lies in the matrix.
    order: Vec<usize>,
    group_of: Vec<usize>,
    /// The columns of each group.
    groups: Vec<Range<usize>>,
    /// Columns of the largest group.
    len: usize,
    /// H, damped.
    matrix: Vec<f64>,
}

impl Plan {
    fn new(start: &QTensor, damped: &Damped<'_>) -> Result<Self> {
        let k = start.k();
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by_key(|&j| start.group_of(j));
        let group_of: Vec<usize> = order.iter().map(|&j| start.group_of(j)).collect();
        let groups: Vec<Range<usize>> = (0..start.groups())
            .map(|g| group_of.partition_point(|&of| of < g)..group_of.partition_point(|&of| of <= g))
            .collect();
        let len = groups.iter().map(Range::len).max().unwrap_or(0);
        let matrix = damped.matrix(&order)?;
        Ok(Self { k, format: start.format(), order, group_of, groups, len, matrix })
    }

    /// Of a row of work, first the errors `q − w` of all columns; then, for the columns of one group, these three.
    fn pull(&self) -> usize {
        self.k
    }

    /// How the errors change: by how much per unit of a scale, or by how much they have.
    fn step(&self) -> usize {
        self.k + self.len
    }

    /// What a unit of the step adds to the pull.
    fn turn(&self) -> usize {
        self.k + 2 * self.len
    }

    fn stride(&self) -> usize {
        self.k + 3 * self.len
    }

    /// The rows `from` and the columns `to` of H.
    fn panel(&self, from: Range<usize>, to: Range<usize>) -> Panel {
        Panel::from_rows([from.len(), to.len()], |d| &self.matrix[(from.start + d) * self.k..][to.clone()])
    }
}

/// What moves besides codes.
#[derive(Clone, Copy, PartialEq)]
enum Knob {
    Scale,
    Offset,
}

/// Some rows of the matrix.
struct Rows<'a> {
    work: Vec<f64>,
    /// In the order of the matrix.
    codes: &'a mut [u8],
    params: &'a mut [Params],
    /// Scales of the rows, of which those of groups stay multiples, where scales have two levels.
    channels: Option<&'a [f32]>,
}

impl Rows<'_> {
    /// Gives every scale and code its turn; whether anything moved.
    fn sweep(&mut self, plan: &Plan) -> bool {
        let mut moved = false;
        for (g, group) in plan.groups.iter().enumerate().filter(|(_, group)| !group.is_empty()) {
            for row in self.work.chunks_mut(plan.stride()) {
                row[plan.pull()..plan.step()].fill(0.0);
            }
            for piece in pieces(group.clone()) {
                let to = plan.pull() + piece.start - group.start;
                plan.panel(0..plan.k, piece).subtract_from(&mut self.work, plan.stride(), 0, to);
            }
            // The rows of a tensor share their scale.
            if plan.format.group != Group::Tensor {
                moved |= self.turn(plan, g, group, Knob::Scale);
                if plan.format.zero == Zero::Float {
                    moved |= self.turn(plan, g, group, Knob::Offset);
                }
            }
            moved |= self.round(plan, g, group);
        }
        moved
    }

    /// Moves the group's scale or offset to where the loss is least.
    fn turn(&mut self, plan: &Plan, g: usize, group: &Range<usize>, knob: Knob) -> bool {
        let (k, format, groups, len) = (plan.k, plan.format, plan.groups.len(), group.len());
        for (i, row) in self.work.chunks_mut(plan.stride()).enumerate() {
            let zero = if format.zero == Zero::Float { 0.0 } else { f64::from(self.params[i * groups + g].zero) };
            for (step, &j) in row[plan.step()..].iter_mut().zip(&plan.order[group.clone()]) {
                *step = if knob == Knob::Scale { f64::from(self.codes[i * k + j]) - zero } else { 1.0 };
            }
            row[plan.turn()..].fill(0.0);
        }
        for piece in pieces(group.clone()) {
            let to = plan.turn() + piece.start - group.start;
            plan.panel(group.clone(), piece).subtract_from(&mut self.work, plan.stride(), plan.step(), to);
        }
        let mut moved = false;
        for (i, row) in self.work.chunks_mut(plan.stride()).enumerate() {
            let (errors, rest) = row.split_at_mut(plan.pull());
            let (pull, rest) = rest.split_at_mut(plan.len);
            let (step, turn) = rest.split_at(plan.len);
            let (pull, step, turn) = (&mut pull[..len], &step[..len], &turn[..len]);
            let slope: f64 = step.iter().zip(&*pull).map(|(u, p)| u * p).sum();
            let curvature = -step.iter().zip(turn).map(|(u, t)| u * t).sum::<f64>();
            let params = &mut self.params[i * groups + g];
            let fits = most_factor(params.zero as u32) as f32;
            let value = if knob == Knob::Scale { &mut params.scale } else { &mut params.zero };
            let aim = (f64::from(*value) + slope / curvature) as f32;
            let next = match self.channels {
                None => format.scale.round(aim),
                Some(channels) => channels[i] * (aim / channels[i]).round_ties_even().clamp(1.0, fits),
            };
            let by = f64::from(next) - f64::from(*value);
            let keeps_sign = knob == Knob::Offset || next * *value > 0.0;
            if keeps_sign && next.is_finite() && by * (by * curvature - 2.0 * slope) < 0.0 {
                *value = next;
                errors[group.clone()].iter_mut().zip(step).for_each(|(e, u)| *e += by * u);
                pull.iter_mut().zip(turn).for_each(|(p, t)| *p += by * t);
                moved = true;
            }
        }
        moved
    }

    /// Moves the group's codes, one after the other, to where the loss is least.
    fn round(&mut self, plan: &Plan, g: usize, group: &Range<usize>) -> bool {
        let (k, format, groups) = (plan.k, plan.format, plan.groups.len());
        for row in self.work.chunks_mut(plan.stride()) {
            row[plan.step()..plan.turn()].fill(0.0);
        }
        let mut moved = false;
        for piece in pieces(group.clone()) {
            let (from, to) = (piece.start - group.start, piece.end - group.start);
            if from > 0 {
                let panel = plan.panel(group.start..piece.start, piece.clone());
                panel.subtract_from(&mut self.work, plan.stride(), plan.step(), plan.pull() + from);
            }
            for (i, row) in self.work.chunks_mut(plan.stride()).enumerate() {
                let (errors, rest) = row.split_at_mut(plan.pull());
                let (pull, rest) = rest.split_at_mut(plan.len);
                let (pull, step) = (&mut pull[..to], &mut rest[from..to]);
                let params = self.params[i * groups + g];
                for (at, j) in piece.clone().enumerate() {
                    let row_of_h = &plan.matrix[j * k..(j + 1) * k];
                    let code = &mut self.codes[i * k + plan.order[j]];
                    let value = params.exact(*code, format);
                    let next = params.code((value + pull[from + at] / row_of_h[j]) as f32, format);
                    let by = params.exact(next, format) - value;
                    if by * (by * row_of_h[j] - 2.0 * pull[from + at]) < 0.0 {
                        *code = next;
                        errors[j] += by;
                        step[at] = by;
                        pull[from..].iter_mut().zip(&row_of_h[piece.clone()]).for_each(|(p, h)| *p -= by * h);
                        moved = true;
                    }
                }
            }
        }
        moved
    }
}
