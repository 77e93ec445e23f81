//! Many texts in a model in memory.

use super::profile::{Timing, most_likely};
use super::{CpuModel, Run, State};
use crate::device::{Rows, TextId, Texts};
use crate::error::{Error, Result};
use crate::profile::Profile;
use crate::sampling::Sampler;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::{KvCache, PAGE_LENGTH, Sequence};
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct CpuTexts<'m> {
    model: &'m CpuModel,
    cpu: &'m Cpu,
    state: State,
    sequences: BTreeMap<TextId, Sequence>,
    begun: u64,
    /// Of the texts that were read last, the first ones are wanted.
    wanted: usize,
    /// Theirs, as far as they are computed; kept to be used again.
    logits: Vec<f32>,
    computed: bool,
}

impl<'m> CpuTexts<'m> {
    pub(super) fn new(model: &'m CpuModel, cpu: &'m Cpu, positions: usize) -> Result<Self> {
        let decoder = &model.decoder;
        let cache = KvCache::new(decoder.layers.len(), decoder.heads, positions, model.kv)?;
        let state = State::new(decoder.hidden, decoder.heads, cache);
        Ok(Self {
            model,
            cpu,
            state,
            sequences: BTreeMap::new(),
            begun: 0,
            wanted: 0,
            logits: Vec::new(),
            computed: false,
        })
    }

    fn sequence(&self, text: TextId) -> Result<Sequence> {
        let known = self.sequences.get(&text).copied();
        known.ok_or_else(|| Error::invalid("many texts", "a text that has not ended", format!("{text:?}")))
    }

    fn sequences_of<'r>(&self, rows: &[Rows<'r>]) -> Result<Vec<(Sequence, &'r [u32])>> {
        rows.iter().map(|rows| Ok((self.sequence(rows.text)?, rows.tokens))).collect()
    }

    /// Logits of the texts that are wanted, computed once.
    fn computed(&mut self) -> Result<&[f32]> {
        let (CpuModel { decoder, comm, .. }, wanted) = (self.model, self.wanted);
        if !self.computed {
            self.logits.resize(wanted * decoder.vocab, 0.0);
            if wanted > 0 {
                let normed = self.state.normed(&(0..wanted));
                decoder.vocabulary.logits(self.cpu, comm.as_ref(), normed, wanted, &mut self.logits)?;
            }
            self.computed = true;
        }
        Ok(&self.logits)
    }

    fn add(&mut self, sequence: Sequence) -> TextId {
        let text = TextId(self.begun);
        self.begun += 1;
        self.sequences.insert(text, sequence);
        text
    }
}

impl Texts for CpuTexts<'_> {
    fn page_length(&self) -> usize {
        PAGE_LENGTH
    }

    fn pages(&self) -> usize {
        self.state.cache.capacity() / PAGE_LENGTH
    }

    fn free_pages(&self) -> usize {
        self.state.cache.free() / PAGE_LENGTH
    }

    fn pages_of(&self, texts: &[TextId]) -> usize {
        let sequences: Vec<Sequence> = texts.iter().filter_map(|text| self.sequences.get(text).copied()).collect();
        self.state.cache.pages_of(&sequences)
    }

    fn begin(&mut self) -> TextId {
        let sequence = self.state.cache.begin();
        self.add(sequence)
    }

    fn share(&mut self, from: TextId, positions: usize) -> Result<TextId> {
        let sequence = self.state.cache.share(self.sequence(from)?, positions)?;
        Ok(self.add(sequence))
    }

    fn truncate(&mut self, text: TextId, position: usize) -> Result<()> {
        Ok(self.state.cache.truncate(self.sequence(text)?, position)?)
    }

    fn end(&mut self, text: TextId) -> Result<()> {
        let sequence = self.sequence(text)?;
        self.sequences.remove(&text);
        Ok(self.state.cache.end(sequence)?)
    }

    fn missing_pages(&self, text: TextId, positions: usize) -> usize {
        match self.sequence(text) {
            Ok(sequence) => self.state.cache.missing_pages(sequence, positions),
            Err(_) => positions.div_ceil(PAGE_LENGTH),
        }
    }

    fn reserve(&mut self, text: TextId, positions: usize) -> Result<()> {
        Ok(self.state.cache.reserve(self.sequence(text)?, positions)?)
    }

    fn read(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<()> {
        let texts = self.sequences_of(rows)?;
        self.state.begin(&texts);
        let CpuModel { decoder, comm, .. } = self.model;
        let mut run = Run { cpu: self.cpu, comm: comm.as_ref(), state: &mut self.state, tap: None };
        (self.wanted, self.computed) = (wanted, false);
        decoder.forward(&mut run, false)?;
        Ok(())
    }

    fn profile(&mut self, rows: &[Rows<'_>], wanted: usize) -> Result<Profile> {
        let (model, cpu) = (self.model, self.cpu);
        let texts = self.sequences_of(rows)?;
        (self.wanted, self.computed) = (wanted, false);
        let mut timing = Timing::layers(cpu, model, &mut self.state, &texts)?;
        if wanted > 0 {
            timing.head(wanted, || self.computed().map(drop))?;
            timing.choice(wanted, || most_likely(self.computed()?, model.decoder.vocab))?;
        }
        Ok(timing.profile())
    }

    fn logits(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        out.extend_from_slice(self.computed()?);
        Ok(())
    }

    fn vectors(&mut self, out: &mut Vec<f32>) -> Result<()> {
        out.clear();
        out.extend_from_slice(self.state.normed(&(0..self.wanted)));
        Ok(())
    }

    fn choose(&mut self, samplers: &mut [&mut Sampler], _: bool) -> Result<Vec<Result<u32>>> {
        if samplers.is_empty() {
            return Ok(Vec::new());
        }
        let vocab = self.model.decoder.vocab;
        let of_texts = self.computed()?.chunks_exact(vocab);
        Ok(samplers.iter_mut().zip(of_texts).map(|(sampler, logits)| sampler.next(logits)).collect())
    }
}
