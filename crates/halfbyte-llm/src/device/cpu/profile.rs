//! The steps of a run on a CPU, timed by its clock.

use super::text::CpuText;
use super::{OnCpu, Projection, Run};
use crate::arch::spec::NormKind;
use crate::decoder::{Clock, Describe, FeedForward, Product, Profiled, Sizes, Step, What};
use crate::error::Result;
use crate::profile::{Profile, TimedStep};
use crate::sampling::{Sampler, Sampling};
use halfbyte::kernel::Activation;
use std::time::Instant;

/// Points in time.
#[derive(Default)]
struct Instants(Vec<Instant>);

impl Clock for Instants {
    fn mark(&mut self) -> Result<()> {
        self.0.push(Instant::now());
        Ok(())
    }
}

impl Describe<OnCpu> for Run<'_> {
    fn kernel(&self, what: &What<'_, OnCpu>, rows: usize) -> Result<String> {
        Ok(match what {
            What::Embed => "embed".to_owned(),
            What::Add => "add".to_owned(),
            // With an update, that is added by the same loop.
            What::Norm { norm, .. } => match norm.kind {
                NormKind::Rms => "rms_norm",
                NormKind::Layer => "layer_norm",
            }
            .to_owned(),
            What::Product { by, .. } => by.kernel(self.cpu, rows)?,
            What::Append(attention) => {
                let parts = [("head_rms_norm", attention.head_norms.is_some()), ("rope", attention.rope.is_some())];
                let parts = parts.iter().filter(|(_, there)| *there).map(|(name, _)| *name);
                parts.chain(["append"]).collect::<Vec<_>>().join(", ")
            }
            What::Attend(_) => "attention".to_owned(),
            What::Activate(mlp) => activation(mlp).to_owned(),
            What::Experts(experts) => {
                let [router, expert] = [Some(&experts.router), experts.experts.first().map(|mlp| &mlp.up)]
                    .map(|product| product.map_or_else(|| Ok(String::new()), |product| product.kernel(self.cpu, rows)));
                format!("{}, {}", router?, expert?)
            }
        })
    }

    fn product(&self, of: &Projection) -> Product {
        Product { n: of.n(), k: of.k(), bytes: of.bytes() }
    }

    fn input_bytes(&self, _: Option<&Projection>, _: usize) -> usize {
        size_of::<f32>()
    }
}

/// The function between the layers of an MLP.
fn activation(mlp: &FeedForward<OnCpu>) -> &'static str {
    if mlp.clamp.is_some() {
        return "clamped_swiglu";
    }
    match (mlp.gated, mlp.activation) {
        (true, Activation::Silu) => "swiglu",
        (true, Activation::Gelu) => "geglu",
        (true, Activation::GeluTanh) => "geglu_tanh",
        (false, Activation::Gelu) => "gelu",
        (false, Activation::GeluTanh) => "gelu_tanh",
        (_, _) => "activation",
    }
}

impl CpuText<'_> {
    /// Reads tokens, step by step.
    pub(super) fn timed(&mut self, tokens: &[u32]) -> Result<Profile> {
        let (cpu, model, position) = (self.cpu, self.model, self.len);
        let decoder = &model.decoder;
        let sizes = Sizes::of(decoder, model.kv, decoder.vocabulary.row_bytes());
        let (mut clock, begun) = (Instants::default(), Instant::now());
        self.logits.clear();
        self.state.begin(&[(self.sequence, tokens)]);
        let mut run = Run { cpu, comm: model.comm.as_ref(), state: &mut self.state, tap: None };
        let mut profiled = Profiled::new(&mut run, &mut clock, sizes, tokens.len(), position);
        decoder.forward(&mut profiled, false)?;
        let mut steps = profiled.into_steps();
        self.len += tokens.len();

        let (kernel, Product { n, k, bytes }) = decoder.vocabulary.head(cpu)?;
        clock.mark()?;
        self.last_logits()?;
        clock.mark()?;
        let bytes = (bytes + (k + n) * size_of::<f32>()) as f64;
        steps.push(Step { name: "head", layer: None, rows: 1, kernel, bytes, flop: (2 * n * k) as f64 });
        clock.mark()?;
        Sampler::new(Sampling::default())?.next(self.last_logits()?)?;
        clock.mark()?;
        let bytes = (n * size_of::<f32>()) as f64;
        steps.push(Step { name: "choice", layer: None, rows: 1, kernel: "argmax".to_owned(), bytes, flop: 0.0 });

        let seconds = begun.elapsed().as_secs_f64();
        let times = clock.0.chunks_exact(2).map(|marks| (marks[1] - marks[0]).as_secs_f64());
        let steps = steps.into_iter().zip(times).map(|(step, seconds)| TimedStep::new(step, seconds)).collect();
        Ok(Profile { steps, seconds })
    }
}
