//! What quantising activations would add to the error of quantised layers.
//!
//! ```text
//! e = x̂ − x      for each input x of a layer, x̂ being what its codes of 8 bits stand for
//! squares += |e · Qᵀ|²
//! ```
//!
//! `squares` is `tr(Q E Qᵀ)` with E the second moments of e. Multiplying costs what running the layer once more costs, and
//! takes no `[k, k]` sums of its own as E would. The diagonal of E alone would cost nothing, and is within 2 % of the root on
//! every layer of the model that ships (4 bits, groups of 128, 64 windows); but where an outlier takes the codes of its
//! group away the other columns all become 0, and their errors depend on each other as the inputs do. Those are the layers
//! that the report is to find.

use super::report::{ActivationReport, LayerReport};
use crate::error::{Error, Result};
use halfbyte::cpu::Cpu;
use halfbyte::ops::{Linear, Weight};
use halfbyte::quantize::activations::{ActCodes, quantize_activations};
use halfbyte::{Act, Floats, FloatsMut, QTensor};
use rayon::prelude::*;

/// Rows that a thread quantises at a time.
const ROWS: usize = 16;

/// What quantising the inputs of a group of layers adds, summed up over all calibration text.
#[derive(Debug)]
pub(super) struct ActivationError {
    act: Act,
    layers: Vec<OfLayer>,
}

#[derive(Debug)]
struct OfLayer {
    /// Its quantised weight without its bias.
    linear: Linear,
    /// `Σ |x · Wᵀ|²` of the dense weight.
    outputs: f64,
    /// `Σ |e · Qᵀ|²`.
    squares: f64,
}

impl ActivationError {
    /// Of no inputs yet, for quantised layers and the squares of their dense outputs. Error: weights that cannot be packed.
    pub fn new<'a>(layers: impl Iterator<Item = (&'a QTensor, f64)>, act: Act) -> halfbyte::Result<Self> {
        let of_layer = |(q, outputs): (&QTensor, f64)| {
            Ok(OfLayer { linear: Linear::new(Weight::Quantized(q, Act::A32))?, outputs, squares: 0.0 })
        };
        Ok(Self { act, layers: layers.map(of_layer).collect::<halfbyte::Result<_>>()? })
    }

    /// Adds inputs `[rows, k]` of the layers, whose weights are handed in again, in order.
    pub fn add<'a>(
        &mut self,
        cpu: &Cpu,
        x: &[f32],
        weights: impl Iterator<Item = &'a QTensor>,
    ) -> halfbyte::Result<()> {
        let (mut error, mut outputs) = (Vec::new(), Vec::new());
        let mut groups_of: Option<&QTensor> = None;
        for (layer, q) in self.layers.iter_mut().zip(weights) {
            // Layers whose columns are grouped alike share codes.
            if groups_of.is_none_or(|other| {
                other.activation_groups() != q.activation_groups() || other.group_index() != q.group_index()
            }) {
                error = rounding_error(x, q, self.act);
                groups_of = Some(q);
            }
            let (n, rows) = (q.n(), x.len() / q.k().max(1));
            outputs.clear();
            outputs.resize(rows * n, 0.0f32);
            layer.linear.forward(cpu, Floats::F32(&error), rows, FloatsMut::F32(&mut outputs))?;
            let square = |row: &[f32]| row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>();
            let of_rows: Vec<f64> = outputs.par_chunks_exact(n.max(1)).map(square).collect();
            layer.squares += of_rows.iter().sum::<f64>();
        }
        Ok(())
    }

    /// Enters what was found into the reports of the layers. Error: inputs that were not finite.
    pub fn report(self, reports: &mut [LayerReport]) -> Result<()> {
        for (report, layer) in reports.iter_mut().zip(self.layers) {
            if !layer.squares.is_finite() {
                let expected = format!("finite inputs of {}", report.name);
                return Err(Error::invalid("calibration", expected, "NaN or infinity".to_owned()));
            }
            let error = if layer.outputs > 0.0 { (layer.squares / layer.outputs).sqrt() } else { 0.0 };
            report.activations = Some(ActivationReport::new(error, report.output_error));
        }
        Ok(())
    }
}

/// What is added to inputs `[rows, k]` where they are quantised for a weight.
fn rounding_error(x: &[f32], q: &QTensor, act: Act) -> Vec<f32> {
    let (k, groups) = (q.k(), q.activation_groups());
    let group_of: Vec<usize> = (0..k).map(|j| q.activation_group_of(j)).collect();
    let mut error = vec![0.0; x.len()];
    let at_a_time = (ROWS * k).max(1);
    error.par_chunks_mut(at_a_time).zip(x.par_chunks(at_a_time)).for_each(|(error, x)| {
        let ActCodes { codes, scales, offsets } = quantize_activations(x, x.len() / k, q, act);
        for (r, (error, x)) in error.chunks_exact_mut(k).zip(x.chunks_exact(k)).enumerate() {
            for (j, (error, &x)) in error.iter_mut().zip(x).enumerate() {
                let at = r * groups + group_of[j];
                let value = f64::from(scales[at]) * f64::from(codes[r * k + j]) + f64::from(offsets[at]);
                *error = (value - f64::from(x)) as f32;
            }
        }
    });
    error
}
