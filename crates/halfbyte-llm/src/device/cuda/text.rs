//! One text in a model on a GPU.
//!
//! ```text
//! several tokens:  upload them ─ layers ─ (head ─ most likely token)            each kernel launched by the host
//! one token:       layers ─ head ─ most likely token, position + 1              recorded once, then replayed
//! ```
//!
//! A recorded step reads token and position from the device and leaves the next ones there, so that a text that goes on by the
//! tokens that were chosen here takes one launch a token, and brings back its id. There is a recording for each power of two of
//! the context's length, which attention divides into parts.

use super::CudaModel;
use super::run::{Rows, State};
use crate::device::{Batch, Text};
use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::sampling::Sampler;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, Graph};
use halfbyte::cuda::nn::{self, Draw};
use std::ops::Range;

/// Positions that the shortest recording serves.
const SHORTEST_RECORDING: usize = 256;

/// A step of one token, as it was recorded.
#[derive(Debug)]
struct Recording {
    /// Positions that it serves.
    longest: usize,
    graph: Graph,
}

#[derive(Debug)]
pub(super) struct CudaText<'m> {
    pub(super) model: &'m CudaModel,
    pub(super) cuda: Cuda,
    recordings: Vec<Recording>,
    pub(super) state: State,
    /// After the last token, `[vocab]`.
    pub(super) logits: Buffer<f32>,
    /// After some tokens, where all are asked for; grows.
    many_logits: Buffer<f32>,
    pub(super) len: usize,
    /// Vectors in `normed`.
    pub(super) rows: usize,
    /// Whether `logits` and `choice` are those after the last token, and the device's position is the text's length.
    pub(super) chosen: bool,
    /// The token that the device goes on with, where the host knows it.
    pub(super) next: Option<u32>,
    /// Whether that token was drawn, and is not the most likely one that a step leaves.
    pub(super) drew: bool,
    /// Whether a step was made, so that every kernel of it is loaded: that cannot be done while one is recorded.
    stepped: bool,
}

impl<'m> CudaText<'m> {
    pub(super) fn new(model: &'m CudaModel, cuda: Cuda, state: State) -> Result<Self> {
        let context = cuda.gpu().context().clone();
        Ok(Self {
            logits: context.allocate(model.decoder.vocab)?,
            many_logits: context.allocate(0)?,
            model,
            cuda,
            recordings: Vec::new(),
            state,
            len: 0,
            rows: 0,
            chosen: false,
            next: None,
            drew: false,
            stepped: false,
        })
    }

    /// Puts tokens and position onto the device.
    pub(super) fn place(&mut self, tokens: &[u32]) -> Result<()> {
        let position = u32::try_from(self.len);
        let position = position.map_err(|_| Error::ContextFull { limit: u32::MAX as usize, got: self.len })?;
        self.cuda.stream().upload(&[position], self.state.position.view_mut())?;
        Ok(self.cuda.stream().upload(tokens, self.state.tokens.view_mut().slice(0..tokens.len()))?)
    }

    /// Positions that attention of one token is laid out for.
    pub(super) fn longest_of_step(&self) -> usize {
        (self.len + 1).next_power_of_two().max(SHORTEST_RECORDING).min(self.capacity())
    }

    /// One token, with what chooses the next.
    fn step(&mut self) -> Result<()> {
        let longest = self.longest_of_step();
        let Self { model, cuda, recordings, state, logits, stepped, .. } = self;
        // What the host is asked for within a step cannot be recorded.
        if !*stepped || state.mixture.as_ref().is_some_and(|mixture| mixture.asks_host) {
            state.step(model, cuda, longest)?;
            state.choose(model, cuda, 0, 1, logits)?;
            *stepped = true;
            return Ok(());
        }
        if !recordings.iter().any(|recording| recording.longest == longest) {
            let graph = cuda.stream().capture(|_| {
                state.step(model, cuda, longest)?;
                state.choose(model, cuda, 0, 1, logits)
            })?;
            recordings.push(Recording { longest, graph });
        }
        for recording in recordings.iter().filter(|recording| recording.longest == longest) {
            recording.replay(cuda)?;
        }
        Ok(())
    }

    /// Computes the logits after the last token, and the most likely next one, if that was not done.
    fn choose(&mut self) -> Result<()> {
        if !self.chosen {
            self.place(&[])?;
            let Self { model, cuda, state, logits, rows, .. } = self;
            state.choose(model, cuda, *rows - 1, 0, logits)?;
            (self.chosen, self.next, self.drew) = (true, None, false);
        }
        Ok(())
    }
}

impl Recording {
    #[expect(unsafe_code, reason = "what a recording uses is known here, where it was made")]
    fn replay(&self, cuda: &Cuda) -> halfbyte::Result<()> {
        // SAFETY: a recording uses the weights of the model, which outlives the text, and the text's own state and logits,
        // which are allocated once and go with it; all that uses them is in this stream.
        unsafe { self.graph.launch(cuda.stream()) }
    }
}

impl Text for CudaText<'_> {
    fn capacity(&self) -> usize {
        self.state.cache.capacity()
    }

    fn position(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        if position < self.len {
            (self.len, self.chosen, self.next) = (position, false, None);
        }
        Ok(())
    }

    fn read(&mut self, batch: Batch<'_>) -> Result<()> {
        let m = batch.tokens.len();
        let goes_on = self.chosen && m == 1 && self.next == Some(batch.tokens[0]);
        if !goes_on {
            self.place(batch.tokens)?;
        }
        (self.chosen, self.next, self.drew) = (false, None, false);
        if m == 1 && !batch.all_rows {
            self.step()?;
            (self.rows, self.chosen) = (1, true);
            self.len += 1;
            return Ok(());
        }
        let rows = Rows { m, longest: self.len + m, all: batch.all_rows };
        self.state.layers(self.model, &self.cuda, rows)?;
        self.rows = if batch.all_rows { m } else { 1 };
        self.len += m;
        if !batch.all_rows {
            self.choose()?;
        }
        Ok(self.cuda.stream().synchronize()?)
    }

    fn profile(&mut self, tokens: &[u32]) -> Result<Profile> {
        self.timed(tokens)
    }

    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if rows == (self.rows - 1..self.rows) && self.chosen {
            return Ok(self.cuda.stream().download(self.logits.view(), out)?);
        }
        let Self { model, cuda, state, many_logits, .. } = self;
        if many_logits.len() < out.len() {
            *many_logits = cuda.gpu().context().allocate(out.len())?;
        }
        state.head(model, cuda, rows, many_logits)?;
        Ok(cuda.stream().download(many_logits.view().slice(0..out.len()), out)?)
    }

    fn next(&mut self, sampler: &mut Sampler) -> Result<u32> {
        self.choose()?;
        if sampler.needs_logits() {
            // The device goes on with what it is given, not with what it chose.
            let mut logits = vec![0.0; self.model.decoder.vocab];
            self.cuda.stream().download(self.logits.view(), &mut logits)?;
            return sampler.next(&logits);
        }
        let options = sampler.options();
        let Self { cuda, state, logits, .. } = self;
        let mut result = [0; 2];
        if options.temperature == 0.0 {
            cuda.stream().download(state.choice.view(), &mut result)?;
        } else {
            let draw = Draw {
                logits: logits.view(),
                choice: state.choice.view(),
                drawn: state.drawn.view_mut(),
                token: state.tokens.view_mut().slice(0..1),
                temperature: options.temperature,
                top_k: options.top_k,
                top_p: options.top_p,
                random: sampler.random(),
            };
            nn::sample(cuda.gpu(), cuda.stream(), draw)?;
            cuda.stream().download(state.drawn.view(), &mut result)?;
            self.drew = true;
        }
        let [token, greatest] = result;
        let greatest = f32::from_bits(greatest);
        if !greatest.is_finite() {
            return Err(Error::NotFinite(greatest));
        }
        // What was drawn lies where the next step reads, also if the most likely token is asked for after it.
        if options.temperature > 0.0 || !self.drew {
            self.next = Some(token);
        }
        Ok(token)
    }
}
