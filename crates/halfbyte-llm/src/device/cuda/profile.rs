//! The steps of a run on a GPU, timed by events in its stream: kernel by kernel, without a recording.
//!
//! The stream waits before the first step until the host has put in all of them, so that no kernel waits for its launch.

use super::projection::Projection;
use super::run::{Rows, Run, State};
use super::text::CudaText;
use super::{CudaModel, OnCuda};
use crate::arch::spec::NormKind;
use crate::decoder::{Clock, Describe, Product, Profiled, Sizes, Slot, Step, What};
use crate::error::{Error, Result};
use crate::profile::{Profile, TimedStep};
use halfbyte::cuda::driver::{Event, Stream};
use halfbyte::{Cuda, Float};
use std::time::Duration;

/// Steps of a layer at most, and those outside of the layers.
const STEPS: [usize; 2] = [13, 5];

/// What the host takes to put in a step with its marks, at most.
const HOST_TIME: Duration = Duration::from_micros(20);

/// Events in a stream, those that were recorded first.
struct Events<'a> {
    stream: &'a Stream,
    events: Vec<Event>,
    used: usize,
}

impl<'a> Events<'a> {
    /// Room for so many marks, made before the first is needed.
    fn new(stream: &'a Stream, marks: usize) -> Result<Self> {
        let events = (0..marks).map(|_| Event::new(stream.context())).collect::<halfbyte::Result<_>>()?;
        Ok(Self { stream, events, used: 0 })
    }
}

impl Clock for Events<'_> {
    fn mark(&mut self) -> Result<()> {
        if self.used == self.events.len() {
            self.events.push(Event::new(self.stream.context())?);
        }
        self.stream.record(&self.events[self.used])?;
        self.used += 1;
        Ok(())
    }
}

impl Describe<OnCuda> for Run<'_> {
    fn kernel(&self, what: &What<'_, OnCuda>, rows: usize) -> Result<String> {
        let quantized = |reader: Option<&Projection>, from: Slot| {
            reader.is_some_and(|reader| self.model.form_of_rows(reader, from, rows).is_some())
        };
        Ok(match what {
            What::Embed => "embed".to_owned(),
            What::Norm { norm, .. } if norm.kind == NormKind::Layer => "layer_norm".to_owned(),
            What::Norm { reader, .. } => {
                if quantized(*reader, Slot::Normed) { "rms_norm_quantized" } else { "rms_norm" }.to_owned()
            }
            What::Product { by, from } => {
                // Rows that are quantised where they are made come as the codes of floats in f32.
                let codes = quantized(Some(by), *from);
                by.kernel(self.cuda, rows, if codes { Float::F32 } else { self.model.activations })?
            }
            What::Append(_) if self.appends_in_attention() => "in attention".to_owned(),
            What::Append(_) => "rope".to_owned(),
            What::Attend(attention) => self.attention_kernel(attention.window, rows)?.to_owned(),
            What::Activate(mlp) => {
                if quantized(Some(&mlp.down), Slot::Inner) { "gate_quantized" } else { "gate" }.to_owned()
            }
            What::Add => "add".to_owned(),
            What::Experts(experts) => {
                format!("route, {}", self.model.kernels_of_experts(experts, rows)?)
            }
        })
    }

    fn product(&self, of: &Projection) -> Product {
        Product { n: of.n(), k: of.k(), bytes: of.bytes() }
    }

    fn activated_outputs(&self, of: &Projection) -> Option<usize> {
        of.activated_outputs()
    }

    fn input_bytes(&self, reader: Option<&Projection>, rows: usize) -> usize {
        match reader.and_then(|reader| self.model.form_of_rows(reader, Slot::Normed, rows)) {
            Some(_) => 1,
            None => self.model.activations.size_bytes(),
        }
    }
}

impl State {
    /// As [`State::layers`] to the last row of a text, each step between two events.
    fn timed(
        &mut self,
        model: &CudaModel,
        cuda: &Cuda,
        rows: Rows<'_>,
        position: usize,
        clock: &mut Events<'_>,
    ) -> Result<Vec<Step>> {
        let sizes = Sizes::of(&model.decoder, self.cache.kv(), model.decoder.vocabulary.row_bytes());
        let m = rows.tokens.len();
        let mut run = Run::new(model, cuda, self, rows);
        let mut profiled = Profiled::new(&mut run, clock, sizes, m, position);
        model.decoder.forward(&mut profiled, false)?;
        Ok(profiled.into_steps())
    }
}

impl CudaText<'_> {
    /// Reads tokens, step by step.
    pub(super) fn timed(&mut self, tokens: &[u32]) -> Result<Profile> {
        let (m, position) = (tokens.len(), self.len);
        let longest = if m == 1 { self.longest_of_step() } else { position + m };
        self.place(tokens)?;
        (self.chosen, self.token, self.drew) = (false, None, false);
        let Self { model, cuda, state, inputs, next, logits, .. } = self;
        let most = model.decoder.layers.len() * STEPS[0] + STEPS[1];
        let mut clock = Events::new(cuda.stream(), 2 * most)?;
        let (kernel, Product { n, k, bytes }) = model.decoder.vocabulary.kernel(cuda, model.activations)?;
        cuda.stream().synchronize()?;
        cuda.stream().delay(HOST_TIME * u32::try_from(most).unwrap_or(u32::MAX))?;
        let mut steps = state.timed(model, cuda, inputs.rows(m, longest), position, &mut clock)?;
        clock.mark()?;
        state.head(model, cuda, 0..1, logits)?;
        clock.mark()?;
        let of_rows = k * model.activations.size_bytes() + n * size_of::<f32>();
        let (bytes, flop) = ((bytes + of_rows) as f64, (2 * n * k) as f64);
        steps.push(Step { name: "head", layer: None, rows: 1, kernel, bytes, flop });
        clock.mark()?;
        next.make_room(cuda, 1)?;
        next.most_likely(cuda, inputs.next(), m, logits.view())?;
        let likely = next.chosen(1);
        clock.mark()?;
        let bytes = (n * size_of::<f32>()) as f64;
        steps.push(Step { name: "choice", layer: None, rows: 1, kernel: "argmax".to_owned(), bytes, flop: 0.0 });
        cuda.stream().synchronize()?;

        let marks = &clock.events[..clock.used];
        let (Some(first), Some(last)) = (marks.first(), marks.last()) else {
            return Err(Error::invalid("a profile", "steps", "none"));
        };
        let seconds = last.seconds_since(first)?;
        let timed = steps.into_iter().zip(marks.chunks_exact(2));
        let steps = timed.map(|(step, marks)| Ok(TimedStep::new(step, marks[1].seconds_since(&marks[0])?)));
        let steps = steps.collect::<Result<_>>()?;
        (self.rows, self.chosen, self.likely, self.len) = (1, true, likely, position + m);
        Ok(Profile { steps, seconds })
    }
}
