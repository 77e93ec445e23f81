//! The steps of a run on a CPU, timed by its clock.

use super::{CpuModel, OnCpu, Projection, Run, State};
use crate::arch::spec::NormKind;
use crate::decoder::{Clock, Describe, FeedForward, Product, Profiled, Sizes, Step, What};
use crate::error::Result;
use crate::profile::{Profile, TimedStep};
use crate::sampling::{Sampler, Sampling};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::Sequence;
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

/// A step that is being timed.
pub(super) struct Timing<'a> {
    cpu: &'a Cpu,
    model: &'a CpuModel,
    begun: Instant,
    clock: Instants,
    steps: Vec<Step>,
}

impl<'a> Timing<'a> {
    /// Tokens of texts, on their way to the last row of each.
    pub(super) fn layers(
        cpu: &'a Cpu,
        model: &'a CpuModel,
        state: &mut State,
        texts: &[(Sequence, &[u32])],
    ) -> Result<Self> {
        let decoder = &model.decoder;
        let sizes = Sizes::of(decoder, model.kv, decoder.vocabulary.row_bytes());
        let from = texts.iter().map(|&(sequence, tokens)| (state.cache.len(sequence), tokens.len()));
        let positions = from.map(|(len, tokens)| len..len + tokens).collect();
        let (mut clock, begun) = (Instants::default(), Instant::now());
        state.begin(texts);
        let mut run = Run { cpu, comm: model.comm.as_ref(), state, tap: None };
        let mut profiled = Profiled::new(&mut run, &mut clock, sizes, positions);
        decoder.forward(&mut profiled, false)?;
        let steps = profiled.into_steps();
        Ok(Self { cpu, model, begun, clock, steps })
    }

    /// What computes the logits of so many texts.
    pub(super) fn head(&mut self, texts: usize, compute: impl FnOnce() -> Result<()>) -> Result<()> {
        let (kernel, Product { n, k, bytes }) = self.model.decoder.vocabulary.head(self.cpu, texts)?;
        let bytes = (bytes + texts * (k + n) * size_of::<f32>()) as f64;
        self.last("head", kernel, texts, [bytes, (2 * texts * n * k) as f64], compute)
    }

    /// What chooses the most likely tokens of so many texts.
    pub(super) fn choice(&mut self, texts: usize, choose: impl FnOnce() -> Result<()>) -> Result<()> {
        let bytes = (texts * self.model.decoder.vocab * size_of::<f32>()) as f64;
        self.last("choice", "argmax".to_owned(), texts, [bytes, 0.0], choose)
    }

    fn last(
        &mut self,
        name: &'static str,
        kernel: String,
        rows: usize,
        [bytes, flop]: [f64; 2],
        step: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.clock.mark()?;
        step()?;
        self.clock.mark()?;
        self.steps.push(Step { name, layer: None, rows, kernel, bytes, flop });
        Ok(())
    }

    /// All of it.
    pub(super) fn profile(self) -> Profile {
        let seconds = self.begun.elapsed().as_secs_f64();
        let times = self.clock.0.chunks_exact(2).map(|marks| (marks[1] - marks[0]).as_secs_f64());
        let steps = self.steps.into_iter().zip(times).map(|(step, seconds)| TimedStep::new(step, seconds)).collect();
        Profile { steps, seconds }
    }
}

/// The most likely token of each text that logits `[texts, vocab]` are of.
pub(super) fn most_likely(logits: &[f32], vocab: usize) -> Result<()> {
    let mut sampler = Sampler::new(Sampling::default())?;
    logits.chunks_exact(vocab).try_for_each(|of_text| sampler.next(of_text).map(drop))
}
