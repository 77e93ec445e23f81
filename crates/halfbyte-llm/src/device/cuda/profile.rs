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
use halfbyte::cuda::driver::{Buffer, Event, Stream};
use halfbyte::cuda::nn;
use halfbyte::{Cuda, Float};
use std::collections::BTreeSet;
use std::ops::Range;
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
            What::Attend(attention) => self.attention_kernels(attention.window, rows)?,
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

impl Run<'_> {
    /// The kernels that compute what so many rows see: those of one text together, of several each text's by themselves.
    fn attention_kernels(&self, window: Option<usize>, rows: usize) -> Result<String> {
        let chunks = self.rows.texts.map_or(&[][..], |texts| if self.narrowed { &[] } else { texts.chunks });
        let singles = rows - chunks.iter().map(Range::len).sum::<usize>();
        let singles = if self.rows.texts.is_some() { singles.min(1) } else { singles };
        let kinds = [singles].into_iter().chain(chunks.iter().map(Range::len)).filter(|&rows| rows > 0);
        let kernel = |rows| nn::attention_kernel(self.cuda.gpu(), rows, self.rows.longest, window, &self.state.cache);
        let names = kinds.map(kernel).collect::<halfbyte::Result<BTreeSet<_>>>()?;
        Ok(names.into_iter().collect::<Vec<_>>().join(", "))
    }
}

/// A step that is being timed: what was put into the stream so far, between its marks.
pub(super) struct Timing<'a> {
    model: &'a CudaModel,
    cuda: &'a Cuda,
    clock: Events<'a>,
    steps: Vec<Step>,
}

impl<'a> Timing<'a> {
    /// Of what comes next in the stream.
    pub(super) fn new(model: &'a CudaModel, cuda: &'a Cuda) -> Result<Self> {
        let most = model.decoder.layers.len() * STEPS[0] + STEPS[1];
        let clock = Events::new(cuda.stream(), 2 * most)?;
        cuda.stream().synchronize()?;
        cuda.stream().delay(HOST_TIME * u32::try_from(most).unwrap_or(u32::MAX))?;
        Ok(Self { model, cuda, clock, steps: Vec::new() })
    }

    /// As [`State::layers`] to the last rows of texts, whose rows have these positions.
    pub(super) fn layers(&mut self, state: &mut State, rows: Rows<'_>, texts: Vec<Range<usize>>) -> Result<()> {
        let decoder = &self.model.decoder;
        let sizes = Sizes::of(decoder, state.cache.kv(), decoder.vocabulary.row_bytes());
        let mut run = Run::new(self.model, self.cuda, state, rows);
        let mut profiled = Profiled::new(&mut run, &mut self.clock, sizes, texts);
        decoder.forward(&mut profiled, false)?;
        self.steps.extend(profiled.into_steps());
        Ok(())
    }

    /// The logits of so many texts.
    pub(super) fn head(&mut self, state: &mut State, texts: usize, logits: &mut Buffer<f32>) -> Result<()> {
        let Self { model, cuda, clock, steps } = self;
        let (kernel, Product { n, k, bytes }) = model.decoder.vocabulary.kernel(cuda, texts, model.activations)?;
        clock.mark()?;
        state.head(model, cuda, 0..texts, logits)?;
        clock.mark()?;
        let of_rows = texts * (k * model.activations.size_bytes() + n * size_of::<f32>());
        let (bytes, flop) = ((bytes + of_rows) as f64, (2 * texts * n * k) as f64);
        steps.push(Step { name: "head", layer: None, rows: texts, kernel, bytes, flop });
        Ok(())
    }

    /// The choice of the most likely tokens of so many texts.
    pub(super) fn choice(&mut self, texts: usize, choose: impl FnOnce() -> Result<()>) -> Result<()> {
        self.clock.mark()?;
        choose()?;
        self.clock.mark()?;
        let (kernel, bytes) = ("argmax".to_owned(), (texts * self.model.decoder.vocab * size_of::<f32>()) as f64);
        self.steps.push(Step { name: "choice", layer: None, rows: texts, kernel, bytes, flop: 0.0 });
        Ok(())
    }

    /// All of it, once it is done.
    pub(super) fn profile(self) -> Result<Profile> {
        self.cuda.stream().synchronize()?;
        let marks = &self.clock.events[..self.clock.used];
        let (Some(first), Some(last)) = (marks.first(), marks.last()) else {
            return Err(Error::invalid("a profile", "steps", "none"));
        };
        let seconds = last.seconds_since(first)?;
        let timed = self.steps.into_iter().zip(marks.chunks_exact(2));
        let steps = timed.map(|(step, marks)| Ok(TimedStep::new(step, marks[1].seconds_since(&marks[0])?)));
        Ok(Profile { steps: steps.collect::<Result<_>>()?, seconds })
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
        next.make_room(cuda, 1)?;
        let mut timing = Timing::new(model, cuda)?;
        timing.layers(state, inputs.rows(m, longest), std::iter::once(position..position + m).collect())?;
        timing.head(state, 1, logits)?;
        timing.choice(1, || next.most_likely(cuda, inputs.next(), m, logits.view()))?;
        let likely = next.chosen(1);
        let profile = timing.profile()?;
        (self.rows, self.chosen, self.likely, self.len) = (1, true, likely, position + m);
        Ok(profile)
    }
}
