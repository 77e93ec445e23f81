//! What quantised activations would add, against outputs that are computed one by one.

use super::case::*;
use halfbyte::format::reference;
use halfbyte::quantize::activations::quantize_activations;
use halfbyte::{Act, Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_llm::calibrate::{ActivationReport, ByGptq, Layers, Method, Needs, Outcome};
use std::sync::Mutex;

/// Inputs, dense weights and answers of a group.
type Recorded = (Vec<f32>, Vec<f32>, Vec<Outcome>);

/// Keeps all inputs.
struct Recording {
    inner: ByGptq,
    seen: Mutex<Vec<Recorded>>,
}

impl Method for Recording {
    fn settings(&self) -> String {
        self.inner.settings()
    }

    fn needs(&self) -> Needs {
        Needs { rows: usize::MAX, ..self.inner.needs() }
    }

    fn quantize(&self, layers: &Layers<'_>, format: WeightFormat) -> halfbyte::Result<Vec<Outcome>> {
        let outcomes = self.inner.quantize(layers, format)?;
        let seen = (layers.inputs.sample().to_vec(), layers.weights.to_vec(), outcomes.clone());
        self.seen.lock().unwrap().push(seen);
        Ok(outcomes)
    }
}

/// `Σ |(x̂ − x) · Qᵀ|²`, `Σ |x̂ · Qᵀ − x · Wᵀ|²`, `Σ |x · Wᵀ|²`.
fn squares(x: &[f32], w: &[f32], q: &QTensor, act: Act) -> [f64; 3] {
    let (m, k, groups) = (x.len() / q.k(), q.k(), q.groups());
    let values = reference::dequantize(q);
    let codes = quantize_activations(x, m, q, act);
    let mut squares = [0.0; 3];
    for r in 0..m {
        let quantized: Vec<f64> = (0..k)
            .map(|j| {
                let at = r * groups + q.group_of(j);
                f64::from(codes.scales[at]) * f64::from(codes.codes[r * k + j]) + f64::from(codes.offsets[at])
            })
            .collect();
        let x = &x[r * k..(r + 1) * k];
        for (w, q) in w.chunks_exact(k).zip(values.chunks_exact(k)) {
            let [mut added, mut whole, mut dense] = [0.0; 3];
            for j in 0..k {
                let (x, w) = (f64::from(x[j]), f64::from(w[j]));
                added += (quantized[j] - x) * q[j];
                whole += quantized[j] * q[j] - x * w;
                dense += x * w;
            }
            squares.iter_mut().zip([added, whole, dense]).for_each(|(sum, v)| *sum += v * v);
        }
    }
    squares
}

#[test]
fn the_report_is_the_error_of_outputs() {
    for (bits, group, zero, act) in [
        (4, Group::Size(32), Zero::Integer, Act::A8),
        (4, Group::Size(32), Zero::Symmetric, Act::A8Asym),
        (8, Group::Channel, Zero::Symmetric, Act::A8),
        (2, Group::Size(64), Zero::Float, Act::A8Asym),
        (8, Group::Tensor, Zero::Symmetric, Act::A8),
    ] {
        for true_sequential in [true, false] {
            let case = Case::new("llama");
            let recording = Recording { inner: by_gptq(), seen: Mutex::new(Vec::new()) };
            let format = WeightFormat { bits, group, zero, scale: Float::F16, channel_scale: None };
            let finished = case
                .run(&recording, |job| (job.format, job.act, job.true_sequential) = (format, act, true_sequential))
                .unwrap();
            let mut reports = finished.report().iter();
            for (x, weights, outcomes) in recording.seen.into_inner().unwrap() {
                let mut weights = weights.as_slice();
                for Outcome { weights: q, .. } in outcomes {
                    let (dense, rest) = weights.split_at(q.n() * q.k());
                    weights = rest;
                    let [added, whole, outputs] = squares(&x, dense, &q, act);
                    let report = reports.next().unwrap();
                    let ActivationReport { error, whole_error, stays_a16 } = report.activations.unwrap();
                    // Without the order of the model, what is measured is another input than what was collected.
                    let near = if true_sequential { 1e-4 } else { 0.5 };
                    assert!((error / (added / outputs).sqrt() - 1.0).abs() < near, "{report:?}");
                    let near = if true_sequential { 0.03 } else { 0.5 };
                    assert!(
                        (whole_error / (whole / outputs).sqrt() - 1.0).abs() < near,
                        "{report:?}: {whole} {outputs}"
                    );
                    assert_eq!(stays_a16, error > 0.01 && error > report.output_error, "{report:?}");
                }
            }
            assert!(reports.next().is_none());
            finished.remove().unwrap();
        }
    }
}

#[test]
fn exact_activations_are_not_measured_and_the_model_is_the_same() {
    let case = Case::new("llama");
    let method = by_gptq();
    let run = |act: Act| content(&case, case.run(&method, |job| job.act = act).unwrap());
    let (exact, quantized) = (run(Act::A16), run(Act::A8));
    assert_eq!((&exact.0, &exact.1), (&quantized.0, &quantized.1));
    assert!(exact.2.contains("activations: None") && !quantized.2.contains("activations: None"));
    // Unfinished work with another report is not gone on with.
    case.run_until(&method, 40, |job| job.act = Act::A8).unwrap_err();
    let refused = case.run(&method, |job| job.act = Act::A16).unwrap_err().to_string();
    assert!(refused.contains("reported_activations"), "{refused}");
}
