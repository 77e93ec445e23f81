//! Where the loss is: how far each quantised layer is from the dense one.

use super::method::{Layers, Outcome};
use halfbyte::quantize::Hessian;
use halfbyte::{QTensor, WeightFormat, Zero, Zeros};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Rows of weights that are looked at together.
const ROWS: usize = 1024;

/// What quantising did to one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Its name.
    pub name: String,
    /// Outputs and inputs.
    pub shape: [usize; 2],
    /// `√(tr(ΔHΔᵀ) / tr(WHWᵀ))` with Δ = W − Q: the error of its outputs over all calibration inputs, relative to the
    /// outputs. 0 if all outputs are 0. A method that aims at the dense model's outputs leaves more of it.
    pub output_error: f64,
    /// `‖Δ‖ / ‖W‖`. 0 if all weights are 0.
    pub weight_error: f64,
    /// Bits for each weight: codes, scales, zero points, group index.
    pub bits_per_weight: f64,
    /// What quantising its inputs would add, if that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub activations: Option<ActivationReport>,
    /// Damping of the Hessian that was needed, where the method has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub damping: Option<f64>,
    /// Input channels that were 0 in every input.
    pub dead_columns: usize,
}

/// What quantising a layer's inputs to 8 bits would add to the error of its outputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ActivationReport {
    /// `√(tr(QEQᵀ) / tr(WHWᵀ))`, E being the second moments of what rounding adds to the inputs: relative to the outputs of
    /// the dense layer. 0 if all outputs are 0.
    pub error: f64,
    /// With the error of the weights: `√(output_error² + error²)`, since the two do not depend on each other.
    pub whole_error: f64,
    /// Whether the layer is better left with exact activations.
    pub stays_a16: bool,
}

impl ActivationReport {
    /// Where inputs hold outliers. A code of 8 bits has steps of `max/127`, so that rounding adds `c/440` of the inputs, c being
    /// their largest magnitude over their root mean square. Normal numbers have c near 2.7 in groups of 128 and 4 in
    /// rows of 4096, which adds 0.6 and 0.9 %; with c above 4.4 a few columns take the others' codes away.
    pub const OUTLIERS: f64 = 0.01;

    /// A layer stays with exact activations where quantising them adds more than [`Self::OUTLIERS`], and more than
    /// quantising its weights did.
    pub(super) fn new(error: f64, output_error: f64) -> Self {
        let stays_a16 = error > Self::OUTLIERS && error > output_error;
        Self { error, whole_error: error.hypot(output_error), stays_a16 }
    }
}

/// What quantising did to the layers of a group, and the squares of the outputs of each dense layer.
pub(super) fn reports(layers: &Layers<'_>, outcomes: &[Outcome]) -> Vec<(LayerReport, f64)> {
    let hessian = &layers.inputs.hessian;
    let (k, dead_columns) = (layers.k(), layers.inputs.dead());
    let mut reports = Vec::with_capacity(outcomes.len());
    for ((w, n), (outcome, (name, _))) in layers.each().zip(outcomes.iter().zip(&layers.group.layers)) {
        let ([output_error, weight_error], outputs) = errors(w, &outcome.weights, hessian);
        let report = LayerReport {
            name: name.clone(),
            shape: [n, k],
            output_error,
            weight_error,
            bits_per_weight: bits_per_weight(&outcome.weights),
            activations: None,
            damping: outcome.damping,
            dead_columns,
        };
        reports.push((report, outputs));
    }
    reports
}

/// Relative errors of outputs and of weights, and the squares of the dense outputs.
fn errors(w: &[f32], q: &QTensor, hessian: &Hessian) -> ([f64; 2], f64) {
    let (k, groups) = (q.k(), q.groups());
    let group_of: Vec<usize> = (0..k).map(|j| q.group_of(j)).collect();
    let value = |i: usize, j: usize| {
        let g = i * groups + group_of[j];
        let (scale, code) = (f64::from(q.scales()[g]), f64::from(q.codes()[i * k + j]));
        match q.zeros() {
            Zeros::Symmetric => scale * (code - f64::from(q.format().middle())),
            Zeros::Integer(zeros) => scale * (code - f64::from(zeros[g])),
            Zeros::Float(offsets) => scale * code + f64::from(offsets[g]),
        }
    };
    // Squares of outputs and weights, of the difference and of the dense layer; row by row, so that the order of the
    // sums does not depend on threads.
    let mut squares: Vec<[f64; 4]> = Vec::with_capacity(q.n());
    for (block, rows) in w.chunks(ROWS * k.max(1)).enumerate() {
        let dense: Vec<f64> = rows.par_iter().map(|&v| f64::from(v)).collect();
        let difference: Vec<f64> =
            dense.par_iter().enumerate().map(|(at, v)| v - value(block * ROWS + at / k, at % k)).collect();
        let [outputs_of_difference, outputs_of_dense] = [&difference, &dense].map(|m| hessian.squares(m));
        let square = |row: &[f64]| row.iter().map(|v| v * v).sum::<f64>();
        let rows = difference.chunks_exact(k).zip(dense.chunks_exact(k));
        squares.extend(
            rows.zip(outputs_of_difference.into_iter().zip(outputs_of_dense))
                .map(|((difference, dense), (a, b))| [a, b, square(difference), square(dense)]),
        );
    }
    let total = |at: usize| squares.iter().map(|row| row[at]).sum::<f64>();
    let ratio = |a: f64, b: f64| if b > 0.0 { (a.max(0.0) / b).sqrt() } else { 0.0 };
    ([ratio(total(0), total(1)), ratio(total(2), total(3))], total(1))
}

/// Bits of a tensor for each of its weights.
fn bits_per_weight(q: &QTensor) -> f64 {
    let WeightFormat { bits, zero, scale, channel_scale, .. } = q.format();
    // On two levels a group has a factor of 8 bits.
    let scale_bits = if channel_scale.is_some() { 8 } else { 8 * scale.size_bytes() };
    let of_row = channel_scale.map_or(0, |scale| 8 * scale.size_bytes());
    let of_group = scale_bits
        + match zero {
            Zero::Symmetric => 0,
            Zero::Integer => bits as usize,
            Zero::Float => scale_bits,
        };
    let index = if q.group_index().is_some() { 32 * q.k() } else { 0 };
    let extra = q.n() * (q.groups() * of_group + of_row) + index;
    f64::from(bits) + extra as f64 / (q.n() * q.k()).max(1) as f64
}
