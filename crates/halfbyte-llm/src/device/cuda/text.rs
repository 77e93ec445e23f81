//! One text in a model on a GPU.
//!
//! ```text
//! several tokens:  upload them ─ layers ─ (head ─ most likely token)            each kernel launched by the host
//! one token:       layers ─ head ─ most likely token, position + 1              recorded once, then replayed
//! ```
//!
//! A recorded step reads token and position from the device and leaves the next ones there, so that a text that goes on by the
//! tokens that were chosen here takes one launch a token. The host sees the token as it comes, while the next step reads it already
//! where the caller says that it will. There is a recording for each power of two of the context's length, which attention divides into
//! parts.

use super::CudaModel;
use super::next::{Chosen, Next};
use super::recording::Recordings;
use super::run::{Rows, State};
use crate::decoder::Decoder;
use crate::device::{Batch, Text};
use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::sampling::{Sampler, Sampling};
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, ViewMut};
use halfbyte::cuda::nn::{Draw, KvCache};
use std::ops::Range;

/// Positions that the shortest recording serves.
pub(super) const SHORTEST_RECORDING: usize = 256;

/// Nothing is drawn.
pub(super) const MOST_LIKELY: Draw = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, random: 0.0 };

/// What the layers read of a text, where recordings find it.
#[derive(Debug)]
pub(super) struct Inputs {
    tokens: Buffer<u32>,
    positions: Buffer<u32>,
}

impl Inputs {
    /// So many rows.
    pub(super) fn rows(&self, m: usize, longest: usize) -> Rows<'_> {
        let [tokens, positions] = [&self.tokens, &self.positions].map(|of_rows| of_rows.view().slice(0..m));
        Rows { tokens, positions, longest, texts: None }
    }

    /// Token and position of the next step.
    pub(super) fn next(&mut self) -> [ViewMut<'_, u32>; 2] {
        [&mut self.tokens, &mut self.positions].map(|of_rows| of_rows.view_mut().slice(0..1))
    }
}

#[derive(Debug)]
pub(super) struct CudaText<'m> {
    pub(super) model: &'m CudaModel,
    pub(super) cuda: Cuda,
    /// By the positions that they serve.
    recordings: Recordings<usize>,
    pub(super) state: State,
    pub(super) inputs: Inputs,
    pub(super) next: Next,
    /// After the last token, `[vocab]`.
    pub(super) logits: Buffer<f32>,
    /// After some tokens, where all are asked for; grows.
    many_logits: Buffer<f32>,
    pub(super) len: usize,
    /// Vectors in `normed`.
    pub(super) rows: usize,
    /// Whether `logits` and `likely` are those after the last token, and the device's position is the text's length.
    pub(super) chosen: bool,
    /// The most likely token.
    pub(super) likely: Chosen,
    /// The token that the device goes on with, where the host knows it.
    pub(super) token: Option<u32>,
    /// Whether that token was drawn, and is not the most likely one that a step leaves.
    pub(super) drew: bool,
    /// Whether the device reads that token already.
    ahead: bool,
}

impl<'m> CudaText<'m> {
    /// For so many tokens, of which `rows` go through the layers together; it must meet the other ranks first.
    pub(super) fn new(model: &'m CudaModel, cuda: Cuda, context: usize, rows: usize) -> Result<Self> {
        let (gpu, Decoder { layers, heads, .. }) = (cuda.gpu(), &model.decoder);
        let cache = KvCache::new(gpu, layers.len(), *heads, context, model.kv)?;
        let state = State::new(model, &cuda, cache, [rows, 1, context], false)?;
        let next = Next::new(&cuda, 1)?;
        let context = gpu.context().clone();
        Ok(Self {
            inputs: Inputs { tokens: context.allocate(rows)?, positions: context.allocate(rows)? },
            logits: context.allocate(model.decoder.vocab)?,
            many_logits: context.allocate(0)?,
            model,
            cuda,
            recordings: Recordings::default(),
            state,
            next,
            len: 0,
            rows: 0,
            chosen: false,
            likely: Chosen::default(),
            token: None,
            drew: false,
            ahead: false,
        })
    }

    /// Meets the other ranks.
    pub(super) fn meet(&mut self) -> Result<()> {
        self.state.meet(self.model, &self.cuda, 1)
    }

    /// Puts tokens and their positions onto the device; of none the position of the next.
    pub(super) fn place(&mut self, tokens: &[u32]) -> Result<()> {
        self.ahead = false;
        self.state.watch(&self.cuda)?;
        let rows = tokens.len().max(1);
        let first = u32::try_from(self.len).ok().filter(|first| first.checked_add(rows as u32).is_some());
        let first = first.ok_or(Error::ContextFull { limit: u32::MAX as usize, got: self.len })?;
        let positions: Vec<u32> = (first..).take(rows).collect();
        let Inputs { tokens: to, positions: of_rows } = &mut self.inputs;
        self.cuda.stream().upload(&positions, of_rows.view_mut().slice(0..rows))?;
        Ok(self.cuda.stream().upload(tokens, to.view_mut().slice(0..tokens.len()))?)
    }

    /// Positions that attention of one token is laid out for.
    pub(super) fn longest_of_step(&self) -> usize {
        (self.len + 1).next_power_of_two().max(SHORTEST_RECORDING).min(self.capacity())
    }

    /// One token, with what chooses the next.
    fn step(&mut self) -> Result<()> {
        let longest = self.longest_of_step();
        let Self { model, cuda, recordings, state, inputs, next, logits, .. } = self;
        // What the host is asked for within a step cannot be recorded.
        let asks_host = state.asks_host();
        next.make_room(cuda, 1)?;
        let mut step = || {
            state.step(model, cuda, inputs.rows(1, longest))?;
            state.head(model, cuda, 0..1, logits)?;
            next.most_likely(cuda, inputs.next(), 1, logits.view())
        };
        if asks_host { step() } else { recordings.run(cuda, &longest, step) }?;
        self.likely = self.next.chosen(1);
        Ok(())
    }

    /// Computes the logits after the last token, and the most likely next one, if that was not done.
    fn choose(&mut self) -> Result<()> {
        if !self.chosen {
            self.place(&[])?;
            let Self { model, cuda, state, inputs, next, logits, rows, .. } = self;
            state.head(model, cuda, *rows - 1..*rows, logits)?;
            next.make_room(cuda, 1)?;
            next.most_likely(cuda, inputs.next(), 0, logits.view())?;
            self.likely = next.chosen(1);
            (self.chosen, self.token, self.drew) = (true, None, false);
        }
        Ok(())
    }
}

impl Drop for CudaText<'_> {
    fn drop(&mut self) {
        if self.ahead {
            // A step that nobody asked for any more may still run. Whoever comes next hears of an error.
            let _ = self.cuda.stream().synchronize();
        }
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
            (self.len, self.chosen, self.token) = (position, false, None);
        }
        Ok(())
    }

    fn read(&mut self, batch: Batch<'_>) -> Result<()> {
        let m = batch.tokens.len();
        let goes_on = self.chosen && m == 1 && self.token == Some(batch.tokens[0]);
        let is_read = self.ahead && goes_on && !batch.all_rows;
        if !goes_on || self.ahead && !is_read {
            self.place(batch.tokens)?;
        }
        (self.chosen, self.token, self.drew, self.ahead) = (false, None, false, false);
        if m == 1 && !batch.all_rows {
            if !is_read {
                self.step()?;
            }
            (self.rows, self.chosen) = (1, true);
            self.len += 1;
            return Ok(());
        }
        let rows = self.inputs.rows(m, self.len + m);
        self.state.layers(self.model, &self.cuda, rows, batch.all_rows)?;
        self.rows = if batch.all_rows { m } else { 1 };
        self.len += m;
        if !batch.all_rows {
            self.choose()?;
        }
        self.state.wait(&self.cuda)
    }

    fn profile(&mut self, tokens: &[u32]) -> Result<Profile> {
        self.timed(tokens)
    }

    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if rows == (self.rows - 1..self.rows) && self.chosen {
            return self.state.read(&self.cuda, self.logits.view(), out);
        }
        let Self { model, cuda, state, many_logits, .. } = self;
        if many_logits.len() < out.len() {
            *many_logits = cuda.gpu().context().allocate(out.len())?;
        }
        state.head(model, cuda, rows, many_logits)?;
        state.read(cuda, many_logits.view().slice(0..out.len()), out)
    }

    fn next(&mut self, sampler: &mut Sampler, goes_on: bool) -> Result<u32> {
        self.choose()?;
        if sampler.needs_logits() {
            // The device goes on with what it is given, not with what it chose.
            let mut logits = vec![0.0; self.model.decoder.vocab];
            self.state.read(&self.cuda, self.logits.view(), &mut logits)?;
            return sampler.next(&logits);
        }
        let draws = sampler.options().temperature > 0.0;
        let chosen = if draws {
            // Until it is known, the device goes on with a token that the host does not know.
            (self.drew, self.token) = (true, None);
            let [token, _] = self.inputs.next();
            self.next.draw(&self.cuda, &[draw(sampler)], self.logits.view(), token)?
        } else {
            self.likely.clone()
        };
        // What was drawn lies where the next step reads, also if the most likely token is asked for after it.
        let on_device = draws || !self.drew;
        let room = self.len < self.capacity();
        if goes_on && on_device && room && self.model.comm.size() == 1 && !self.state.asks_host() {
            self.step()?;
            self.ahead = true;
        }
        let mut tokens = self.state.tokens(&self.cuda, &self.next, &chosen)?;
        let token = tokens.pop().ok_or(Error::EmptyPrompt)??;
        if on_device {
            self.token = Some(token);
        }
        Ok(token)
    }
}

/// What a sampler asks of the device for its next token.
pub(super) fn draw(sampler: &mut Sampler) -> Draw {
    let Sampling { temperature, top_k, top_p, .. } = sampler.options();
    // A token that is not drawn takes no random number.
    let random = if temperature > 0.0 { sampler.random() } else { 0.0 };
    Draw { temperature, top_k, top_p, random }
}
