//! Models in memory, computed by the CPU.

use super::{Batch, Graph, Resident, Scratch, Text};
use crate::config::Config;
use crate::error::Result;
use crate::sampling::Sampler;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{Heads, KvCache, Sequence};
use std::ops::Range;

/// A graph with what a text in it needs to know.
#[derive(Debug)]
pub(crate) struct OnCpu {
    graph: Box<dyn Graph>,
    layers: usize,
    heads: Heads,
    hidden: usize,
    vocab: usize,
    kv_bytes_per_token: usize,
}

impl OnCpu {
    pub(crate) fn new(config: &Config, graph: Box<dyn Graph>) -> Self {
        Self {
            graph,
            layers: config.layers,
            heads: config.attention_heads(),
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            kv_bytes_per_token: config.kv_bytes_per_token(),
        }
    }
}

impl Resident for OnCpu {
    fn begin<'m>(&'m self, cpu: &'m Cpu, context: usize) -> Result<Box<dyn Text + 'm>> {
        let mut cache = KvCache::new(self.layers, self.heads, context)?;
        let sequence = cache.begin();
        let scratch = Scratch::default();
        Ok(Box::new(CpuText { model: self, cpu, cache, sequence, context, scratch, rows: 0, logits: Vec::new() }))
    }

    fn prepare(&self, _: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.graph.bytes()
    }

    fn kv_bytes_per_token(&self) -> usize {
        self.kv_bytes_per_token
    }
}

#[derive(Debug)]
struct CpuText<'m> {
    model: &'m OnCpu,
    cpu: &'m Cpu,
    cache: KvCache,
    sequence: Sequence,
    /// Positions that it may have: the cache's pages may hold a few more.
    context: usize,
    scratch: Scratch,
    /// Vectors in the scratch, the last of which is that of the last token.
    rows: usize,
    /// After the last token; empty if all rows were asked for.
    logits: Vec<f32>,
}

impl CpuText<'_> {
    /// Computes the logits after the last token if that was not done.
    fn last_logits(&mut self) -> Result<&[f32]> {
        let Self { model, cpu, scratch, rows, logits, .. } = self;
        if logits.is_empty() {
            logits.resize(model.vocab, 0.0);
            let vector = &scratch.normed[(*rows - 1) * model.hidden..*rows * model.hidden];
            model.graph.head().logits(cpu, vector, 1, logits)?;
        }
        Ok(&self.logits)
    }
}

impl Text for CpuText<'_> {
    fn capacity(&self) -> usize {
        self.context
    }

    fn position(&self) -> usize {
        self.cache.len(self.sequence)
    }

    fn truncate(&mut self, position: usize) {
        self.cache.truncate(self.sequence, position).expect("the sequence was begun with the text");
    }

    fn read(&mut self, batch: Batch<'_>) -> Result<()> {
        self.logits.clear();
        self.rows = self.model.graph.forward(self.cpu, batch, (&mut self.cache, self.sequence), &mut self.scratch)?;
        if !batch.all_rows {
            self.last_logits()?;
        }
        Ok(())
    }

    fn logits(&mut self, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        if self.rows == 1 && !self.logits.is_empty() {
            out.copy_from_slice(&self.logits);
            return Ok(());
        }
        let vectors = &self.scratch.normed[rows.start * self.model.hidden..rows.end * self.model.hidden];
        self.model.graph.head().logits(self.cpu, vectors, rows.len(), out)
    }

    fn next(&mut self, sampler: &mut Sampler) -> Result<u32> {
        sampler.next(self.last_logits()?)
    }
}
