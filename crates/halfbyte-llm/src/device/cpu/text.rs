//! One text in a model in memory.

use super::profile::{Timing, most_likely};
use super::{CpuModel, Run, State};
use crate::device::{Batch, Text};
use crate::error::Result;
use crate::profile::Profile;
use crate::sampling::Sampler;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{KvCache, Sequence};
use std::ops::Range;

#[derive(Debug)]
pub(super) struct CpuText<'m> {
    model: &'m CpuModel,
    cpu: &'m Cpu,
    state: State,
    /// Its keys and values.
    sequence: Sequence,
    /// Tokens it has room for.
    context: usize,
    /// Tokens read so far.
    len: usize,
    /// After the last token; empty if all rows were asked for.
    logits: Vec<f32>,
}

impl<'m> CpuText<'m> {
    pub(super) fn new(model: &'m CpuModel, cpu: &'m Cpu, context: usize) -> Result<Self> {
        let decoder = &model.decoder;
        let mut cache = KvCache::new(decoder.layers.len(), decoder.heads, context, model.kv)?;
        let sequence = cache.begin();
        let mut state = State::new(decoder.hidden, decoder.heads, cache);
        state.room = context;
        Ok(Self { model, cpu, state, sequence, context, len: 0, logits: Vec::new() })
    }

    /// Computes the logits after the last token if that was not done.
    fn last_logits(&mut self) -> Result<&[f32]> {
        if self.logits.is_empty() {
            let last = self.state.rows() - 1;
            let mut logits = vec![0.0; self.model.decoder.vocab];
            self.compute(last..last + 1, &mut logits)?;
            self.logits = logits;
        }
        Ok(&self.logits)
    }

    fn compute(&self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let CpuModel { decoder, comm, .. } = self.model;
        decoder.vocabulary.logits(self.cpu, comm.as_ref(), self.state.normed(&rows), rows.len(), out)
    }
}

impl Text for CpuText<'_> {
    fn capacity(&self) -> usize {
        self.context
    }

    fn position(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, position: usize) -> Result<()> {
        self.state.cache.truncate(self.sequence, position)?;
        self.len = self.len.min(position);
        Ok(())
    }

    fn read(&mut self, batch: Batch<'_>) -> Result<()> {
        self.logits.clear();
        self.state.begin(&[(self.sequence, batch.tokens)]);
        let CpuModel { decoder, comm, .. } = self.model;
        let mut run = Run { cpu: self.cpu, comm: comm.as_ref(), state: &mut self.state, tap: None };
        decoder.forward(&mut run, batch.all_rows)?;
        self.len += batch.tokens.len();
        if !batch.all_rows {
            self.last_logits()?;
        }
        Ok(())
    }

    fn profile(&mut self, tokens: &[u32]) -> Result<Profile> {
        let Self { cpu, model, .. } = *self;
        self.logits.clear();
        let mut timing = Timing::layers(cpu, model, &mut self.state, &[(self.sequence, tokens)])?;
        self.len += tokens.len();
        timing.head(1, || self.last_logits().map(drop))?;
        timing.choice(1, || most_likely(self.last_logits()?, model.decoder.vocab))?;
        Ok(timing.profile())
    }

    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if self.state.rows() == 1 && !self.logits.is_empty() {
            out.copy_from_slice(&self.logits);
            return Ok(());
        }
        self.compute(rows, out)
    }

    fn next(&mut self, sampler: &mut Sampler, _: bool) -> Result<u32> {
        sampler.next(self.last_logits()?)
    }
}
