//! The output head as a layer like the others: quantised by its inputs, the normed stream behind the last block.

use super::activations::ActivationError;
use super::inputs::{DriftOf, Inputs};
use super::method::Layers;
use super::outcomes::quantized;
use super::piece::Streams;
use super::report::reports;
use super::{Doing, Job, Watch, work};
use crate::arch::spec::{LinearGroup, NormKind, Shape};
use crate::error::{Error, Result};
use halfbyte::WeightFormat;
use halfbyte::cpu::{Cpu, nn};
use halfbyte_checkpoint::StoredWeight;

/// The output head, to be quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head<'a> {
    /// The name that it has in the result.
    pub name: &'a str,
    /// The module whose weight it has: the embedding, where that is the head.
    pub source: &'a str,
    /// What it becomes.
    pub format: WeightFormat,
}

/// It is a group of its own, into which nothing can be folded.
pub(super) fn group(job: &Job<'_>, head: Head<'_>) -> LinearGroup {
    let shape = Shape { n: job.config.spec.vocab, k: job.config.spec.hidden, bias: false };
    LinearGroup {
        layers: vec![(head.name.to_owned(), shape)],
        step: 0,
        stage: 0,
        routed: false,
        adds: false,
        fold: None,
    }
}

/// Quantises the head; the streams have gone through all blocks.
pub(super) fn quantize(
    job: &Job<'_>,
    head: Head<'_>,
    streams: &Streams,
    watch: &mut Watch<'_, '_>,
) -> Result<work::Block> {
    let named = |source| Error::Quantize { name: head.name.to_owned(), source };
    let (norm, group, needs) = (Norm::load(job)?, group(job, head), job.method.needs());
    let rows = streams.quantized.len() / streams.hidden;
    let mut inputs = Inputs::new([group.n(), group.k()], rows, needs, DriftOf::Inputs).map_err(named)?;
    let [mut x, mut missing] = [vec![0.0; streams.window], Vec::new()];
    for (done, window) in streams.quantized.chunks_exact(streams.window).enumerate() {
        watch.tell(head.name, Doing::Inputs, done)?;
        norm.apply(job.cpu, window, &mut x)?;
        if let Some(dense) = &streams.dense {
            missing.resize(streams.window, 0.0);
            norm.apply(job.cpu, &dense[done * streams.window..][..streams.window], &mut missing)?;
            missing.iter_mut().zip(&x).for_each(|(dense, x)| *dense -= x);
        }
        inputs.add(&x, needs.drift.then_some(missing.as_slice())).map_err(named)?;
    }

    watch.tell(head.name, Doing::Quantizing, 0)?;
    let weights = weights(job, head, [group.n(), group.k()])?;
    let layers = Layers { group: &group, weights: &weights, inputs: &inputs };
    let outcomes = quantized(job.method, &layers, head.format)?;
    let (mut report, outputs): (Vec<_>, Vec<f64>) = reports(&layers, &outcomes).into_iter().unzip();
    drop(weights);
    let tensors: Vec<_> = outcomes.into_iter().map(|outcome| outcome.weights).collect();
    if job.act.is_quantized() {
        let mut cost = ActivationError::new(tensors.iter().zip(outputs), job.act).map_err(named)?;
        for (done, window) in streams.quantized.chunks_exact(streams.window).enumerate() {
            watch.tell(head.name, Doing::Outputs, done)?;
            norm.apply(job.cpu, window, &mut x)?;
            cost.add(job.cpu, &x, tensors.iter()).map_err(named)?;
        }
        cost.report(&mut report)?;
    }
    let tensors = tensors.into_iter().map(|tensor| (head.name.to_owned(), tensor)).collect();
    Ok(work::Block { tensors, changed: Vec::new(), report })
}

/// The head's weights, widened. Errors: codes, another shape than the configuration's.
fn weights(job: &Job<'_>, head: Head<'_>, shape: [usize; 2]) -> Result<Vec<f32>> {
    let refuse = |expected: String, got: String| Err(Error::Weight { name: head.source.to_owned(), expected, got });
    let by = |[n, k]: [usize; 2]| format!("{n} × {k}");
    match job.source.stored_linear(head.source)?.weight {
        StoredWeight::Quantized(_) => refuse("floats, to be quantised".to_owned(), "codes".to_owned()),
        StoredWeight::Dense { shape: found, .. } if found != shape => refuse(by(shape), by(found)),
        StoredWeight::Dense { floats, .. } => {
            let weights = floats.to_f32();
            drop(floats);
            job.source.release(head.source);
            Ok(weights)
        }
    }
}

/// The norm before the head.
struct Norm {
    kind: NormKind,
    eps: f32,
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl Norm {
    fn load(job: &Job<'_>) -> Result<Self> {
        let spec = &job.config.spec;
        let part = |part: &str| -> Result<Vec<f32>> {
            Ok(job.source.floats(&format!("{}.{part}", spec.norm.name), &[spec.hidden])?.to_f32())
        };
        let bias = (spec.norm.kind == NormKind::Layer).then(|| part("bias")).transpose()?;
        let weight = part("weight")?.into_iter().map(|v| v + spec.norm.offset).collect();
        Ok(Self { kind: spec.norm.kind, eps: spec.norm.eps, weight, bias })
    }

    fn apply(&self, cpu: &Cpu, stream: &[f32], out: &mut [f32]) -> Result<()> {
        match self.kind {
            NormKind::Rms => nn::rms_norm(cpu, stream, &self.weight, self.eps, out)?,
            NormKind::Layer => nn::layer_norm(cpu, stream, &self.weight, self.bias.as_deref(), self.eps, out)?,
        }
        Ok(())
    }
}
