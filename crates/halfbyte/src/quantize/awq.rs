//! AWQ: input channels that matter are scaled up before rounding, and each group's range is clipped where that helps.
//!
//! Source: Lin and others, "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023. The
//! weights of an input channel are multiplied by a factor and its inputs divided by it, so that the layer means the same
//! but the channel's weights are rounded more finely. Factors are a power of how large the channel's inputs are; the
//! exponent is the one of a grid of 20 with the least error of the outputs. What differs: the size of a channel is its
//! root mean square, and errors of outputs come from the Hessian, exactly, instead of from a sample of inputs.

use super::damped::{Damped, check};
use super::gptq::Calibrated;
use super::panel::{Panel, rows_at_a_time};
use super::rtn::{Params, Range, Rtn, SymmetricScale, least, rtn};
use super::stats::Hessian;
use super::too_large;
use crate::error::{Error, Result};
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::Floats;
use rayon::prelude::*;

/// Exponents that are tried: 0, 1/20 and so on.
const EXPONENTS: usize = 20;
/// Rows of a matrix that are rounded to compare exponents; of a larger one, as many at even distances.
const SAMPLE: usize = 256;

/// What [`awq_scales`] returns.
#[derive(Clone, Debug, PartialEq)]
pub struct AwqScales {
    /// What the weights of each input channel are to be multiplied by, and its inputs divided by: `[k]`, all above 0.
    pub scales: Vec<f32>,
    /// The power of the channels' root mean square that the scales are.
    pub exponent: f64,
    /// The squared error of the outputs over all inputs, as far as it was computed: of 256 rows of each matrix at most.
    pub loss: f64,
    /// The same without scales.
    pub plain_loss: f64,
}

/// Finds the scales of the input channels that some matrices share.
///
/// *Shapes:* `weights`: each matrix `[n, k]` with its n; `hessian` of k. *Scales* are normalised: the least times the
/// largest is 1. A dead channel's scale is 1. Folding them into what makes the inputs is the caller's; if that rounds,
/// the weights should be multiplied by what really became of the inputs, and the Hessian with it
/// ([`Hessian::scaled`]). *Cost:* `20 · k²` floating-point operations for each row that is tried. The result is the same,
/// bit for bit, whatever the number of threads.
///
/// *Errors:* no matrix; those of [`gptq`](super::gptq()).
pub fn awq_scales(
    weights: &[(Floats<'_>, usize)],
    k: usize,
    format: WeightFormat,
    hessian: &Hessian,
    symmetric: SymmetricScale,
) -> Result<AwqScales> {
    const OP: &str = "AWQ scales";
    format.validate()?;
    if weights.is_empty() {
        return Err(Error::invalid(OP, "at least one matrix", "none"));
    }
    for &(w, n) in weights {
        check(OP, w, [n, k], hessian, 0.0)?;
    }
    if k == 0 || weights.iter().all(|&(_, n)| n == 0) {
        return Ok(AwqScales { scales: vec![1.0; k], exponent: 0.0, loss: 0.0, plain_loss: 0.0 });
    }
    let dead = Damped::new(OP, hessian, 0.0)?.dead;
    let range = Range { format, options: Rtn { symmetric, search: false } };
    let rows: Vec<(usize, usize)> = weights
        .iter()
        .enumerate()
        .flat_map(|(m, &(_, n))| (0..n.min(SAMPLE)).map(move |i| (m, i * n / n.min(SAMPLE))))
        .collect();
    let at_a_time = rows_at_a_time(rows.len());
    let tries = (0..EXPONENTS).map(|step| {
        let exponent = step as f64 / EXPONENTS as f64;
        let scales = powers(hessian, &dead, exponent);
        let scaled = |m: usize, i: usize| {
            let w = weights[m].0;
            scales.iter().enumerate().map(move |(j, &scale)| w.get(i * k + j) * scale)
        };
        let tensor_wide: Vec<Option<Params>> = (0..weights.len())
            .map(|m| match format.group {
                Group::Tensor => {
                    let all: Vec<f32> = (0..weights[m].1).flat_map(|i| scaled(m, i)).collect();
                    Some(range.of(&all, &[1.0], None))
                }
                _ => None,
            })
            .collect();
        let losses: Vec<f64> = rows
            .par_chunks(at_a_time)
            .flat_map_iter(|rows| {
                let mut errors = Vec::with_capacity(rows.len() * k);
                for &(m, i) in rows {
                    let row: Vec<f32> = scaled(m, i).collect();
                    let channel = range.channel(row.chunks(format.group.len(k)));
                    for (group, scales) in row.chunks(format.group.len(k)).zip(scales.chunks(format.group.len(k))) {
                        let params = tensor_wide[m].unwrap_or_else(|| range.of(group, &[1.0], channel));
                        errors.extend(group.iter().zip(scales).map(|(&v, &scale)| {
                            (params.exact(params.code(v, format), format) - f64::from(v)) / f64::from(scale)
                        }));
                    }
                }
                hessian.squares(&errors)
            })
            .collect();
        (losses.iter().sum::<f64>(), exponent, scales)
    });
    let tries: Vec<(f64, f64, Vec<f32>)> = tries.collect();
    let plain_loss = tries[0].0;
    // A scale beyond the format's range makes a loss that is no number; it is not below any.
    let best = tries.into_iter().reduce(|best, next| if next.0 < best.0 { next } else { best });
    let (loss, exponent, scales) = best.expect("there are exponents to try");
    if !loss.is_finite() {
        return Err(too_large(OP, format, ""));
    }
    Ok(AwqScales { scales, exponent, loss, plain_loss })
}

/// The channels' root mean squares to a power, normalised.
fn powers(hessian: &Hessian, dead: &[bool], exponent: f64) -> Vec<f32> {
    // Counting from the mean of the logarithms' extremes is the normalisation, and no power is out of range before it.
    let logarithms: Vec<f64> = (0..dead.len()).map(|j| 0.5 * libm::log(hessian.get(j, j))).collect();
    let live = || logarithms.iter().zip(dead).filter(|&(_, &dead)| !dead).map(|(&l, _)| l);
    let low = live().fold(f64::INFINITY, f64::min);
    let high = live().fold(f64::NEG_INFINITY, f64::max);
    let scale = |(&l, &dead): (&f64, &bool)| {
        if dead { 1.0 } else { libm::exp(exponent * (l - (low + high) / 2.0)) as f32 }
    };
    logarithms.iter().zip(dead).map(scale).collect()
}

/// Rounds a matrix to nearest, each group's range being the one of 41, from the full one down to half of it, with the
/// least error of the outputs as far as they come from that group.
///
/// *Shapes:* w `[n, k]`; `hessian` of k. *Cost:* `82 · n·k · group` floating-point operations. The loss returned is that
/// without damping. The result is the same, bit for bit, whatever the number of threads.
///
/// *Errors:* those of [`gptq`](super::gptq()).
pub fn rtn_clipped(
    w: Floats<'_>,
    [n, k]: [usize; 2],
    format: WeightFormat,
    hessian: &Hessian,
    symmetric: SymmetricScale,
) -> Result<Calibrated> {
    const OP: &str = "quantize (clipped)";
    format.validate()?;
    check(OP, w, [n, k], hessian, 0.0)?;
    let range = Range { format, options: Rtn { symmetric, search: true } };
    if n == 0 || k == 0 {
        let weights = rtn(w, [n, k], format, Rtn { search: false, ..range.options })?;
        let dead = (0..k).filter(|&j| hessian.get(j, j) == 0.0).count();
        return Ok(Calibrated { weights, damping: 0.0, dead, loss: 0.0 });
    }
    let damped = Damped::new(OP, hessian, 0.0)?;
    let (groups, len) = (format.group.count(k), format.group.len(k));
    let row_of =
        |i: usize, columns: std::ops::Range<usize>| w.slice(i * k + columns.start..i * k + columns.end).to_f32();
    let channels: Vec<Option<f32>> =
        (0..n).into_par_iter().map(|i| range.channel(row_of(i, 0..k).chunks(len))).collect();
    let mut params = vec![Params { scale: 0.0, zero: 0.0 }; n * groups];
    for g in 0..groups {
        let columns = g * len..((g + 1) * len).min(k);
        let len = columns.len();
        let panel = Panel::from_fn([len, len], |d, c| hessian.get(columns.start + d, columns.start + c));
        let losses = |group: &[f32], candidates: &[Params]| -> Vec<f64> {
            let mut work = vec![0.0; candidates.len() * 2 * len];
            for (work, params) in work.chunks_mut(2 * len).zip(candidates) {
                work.iter_mut().zip(group).for_each(|(error, &v)| {
                    *error = params.exact(params.code(v, format), format) - f64::from(v);
                });
            }
            panel.subtract_from(&mut work, 2 * len, 0, len);
            let loss = |row: &[f64]| -> f64 { row[..len].iter().zip(&row[len..]).map(|(e, p)| -e * p).sum() };
            work.chunks(2 * len).map(loss).collect()
        };
        if format.group == Group::Tensor {
            let candidates: Vec<Params> = range.candidates(&w.to_f32(), None);
            let of_rows: Vec<Vec<f64>> =
                (0..n).into_par_iter().map(|i| losses(&row_of(i, columns.clone()), &candidates)).collect();
            let totals = (0..candidates.len()).map(|c| of_rows.iter().map(|losses| losses[c]).sum());
            params.fill(least(totals.zip(candidates.iter().copied())));
        } else {
            params.par_chunks_mut(groups).enumerate().for_each(|(i, params)| {
                let group = row_of(i, columns.clone());
                let candidates: Vec<Params> = range.candidates(&group, channels[i]);
                params[g] = least(losses(&group, &candidates).into_iter().zip(candidates.iter().copied()));
            });
        }
    }
    if let Some(i) = params.iter().position(|p| !(p.scale.is_finite() && p.zero.is_finite())) {
        return Err(too_large(OP, format, &format!(" in row {}", i / groups)));
    }
    let mut codes = vec![0u8; n * k];
    let mut losses = vec![0.0; n];
    let at_a_time = rows_at_a_time(n);
    codes.par_chunks_mut(at_a_time * k).zip(losses.par_chunks_mut(at_a_time)).enumerate().for_each(
        |(block, (codes, losses))| {
            let mut errors = Vec::with_capacity(codes.len());
            for (i, codes) in codes.chunks_mut(k).enumerate() {
                let i = block * at_a_time + i;
                for (j, (code, v)) in codes.iter_mut().zip(row_of(i, 0..k)).enumerate() {
                    let params = params[i * groups + j / len];
                    *code = params.code(v, format);
                    errors.push(params.exact(*code, format) - f64::from(v));
                }
            }
            losses.copy_from_slice(&hessian.squares(&errors));
        },
    );
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => Zeros::Integer(params.iter().map(|p| p.zero as u16).collect()),
        Zero::Float => Zeros::Float(params.iter().map(|p| p.zero).collect()),
    };
    let weights = QTensor::new(format, [n, k], codes, params.iter().map(|p| p.scale).collect(), zeros, None)?;
    Ok(Calibrated { weights, damping: 0.0, dead: damped.dead_count(), loss: losses.iter().sum() })
}
