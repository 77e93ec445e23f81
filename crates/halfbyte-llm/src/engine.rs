//! A model in memory, and the state of one text in it.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::models::{Batch, Graph, MODELS, Scratch, room};
use crate::weights::{LoadOptions, Loader};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::attention::KvCache;
use halfbyte_checkpoint::{Finding, Weights};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Tokens that go through the layers together: enough for the products to run at full speed.
const PREFILL_TOKENS: usize = 512;

/// Logits computed at a time where they are wanted for every token, in elements (4 MiB).
const LOGITS_AT_A_TIME: usize = 1 << 20;

/// A language model: its configuration and its packed weights.
#[derive(Debug)]
pub struct Model {
    config: Config,
    graph: Box<dyn Graph>,
    parameters: u64,
    findings: Vec<Finding>,
}

impl Model {
    /// Loads a folder in Hugging Face's form (`config.json` and safetensors, dense or quantised) or a GGUF file.
    ///
    /// Each tensor is read, packed and let go before the next. Errors: what [`Config::from_weights`] refuses; missing or
    /// malformed tensors, or such of another shape than the configuration says; weights that cannot be quantised.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let weights = Weights::open(path)?;
        Self::from_weights(Config::from_weights(&weights)?, &weights, options)
    }

    /// Loads the tensors of an open checkpoint.
    pub fn from_weights(config: Config, weights: &Weights, options: &LoadOptions) -> Result<Self> {
        let known = MODELS.iter().find(|m| m.architecture == config.architecture);
        let model =
            known.ok_or_else(|| Error::invalid("load a model", "an architecture of MODELS", config.architecture))?;
        let mut loader = Loader::new(weights, *options)?;
        let graph = (model.load)(&config, &mut loader)?;
        Ok(Self { config, graph, parameters: loader.parameters(), findings: loader.into_findings() })
    }

    /// Its shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Number of weights, a tied head counted once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// What was odd about the checkpoint, and which reading was taken.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Bytes that the weights take in memory: packed layers, embedding, norms.
    pub fn weight_bytes(&self) -> usize {
        self.graph.bytes()
    }

    /// Bytes that keys and values of one token take over all layers.
    pub fn kv_bytes_per_token(&self) -> usize {
        self.config.kv_bytes_per_token()
    }
}

/// One text in a model: what it has read so far, as keys and values.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    cpu: &'m Cpu,
    cache: KvCache,
    scratch: Scratch,
    logits: Vec<f32>,
}

impl<'m> Session<'m> {
    /// Begins a text with room for `context` tokens; memory for keys and values is taken as they come. Error: more than the model was made for.
    pub fn new(model: &'m Model, cpu: &'m Cpu, context: usize) -> Result<Self> {
        let config = model.config();
        if context > config.max_context {
            return Err(Error::ContextFull { limit: config.max_context, got: context });
        }
        let cache = KvCache::new(config.layers, config.attention_heads(), context)?;
        Ok(Self { model, cpu, cache, scratch: Scratch::default(), logits: Vec::new() })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Tokens it has room for.
    pub fn context(&self) -> usize {
        self.cache.capacity()
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// Whether no token was read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets everything; the room stays.
    pub fn clear(&mut self) {
        self.cache.truncate(0);
    }

    /// Reads tokens, many at a time; returns the logits `[vocab]` after the last.
    ///
    /// Errors, all before anything is read: no tokens, ids beyond the vocabulary, more tokens than there is room for.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.prefill_unless(tokens, None)
    }

    /// Reads one token; returns the logits `[vocab]` after it. Errors: as [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32]> {
        self.prefill(&[token])
    }

    /// As [`Session::prefill`]; looks at the flag between batches, forgets these tokens and fails with
    /// [`Error::Cancelled`] when it is set.
    pub fn prefill_unless(&mut self, tokens: &[u32], cancel: Option<&AtomicBool>) -> Result<&[f32]> {
        self.check(tokens)?;
        let Self { model, cpu, cache, scratch, logits } = self;
        let before = cache.len();
        let mut vector: &[f32] = &[];
        for tokens in tokens.chunks(PREFILL_TOKENS) {
            if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                cache.truncate(before);
                return Err(Error::Cancelled);
            }
            let batch = Batch { tokens, all_rows: false };
            vector = model.graph.forward(cpu, batch, cache, scratch).inspect_err(|_| cache.truncate(before))?;
        }
        let logits = room(logits, model.config.vocab_size);
        model.graph.head().logits(cpu, vector, 1, logits)?;
        Ok(logits)
    }

    /// Reads tokens and hands on the logits after each of them, `[some tokens, vocab]` at a time, in order.
    ///
    /// Errors: as [`Session::prefill`], and whatever `take` returns; these tokens are forgotten then.
    pub fn logits_of_all(&mut self, tokens: &[u32], take: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.check(tokens)?;
        let before = self.cache.len();
        self.each_logits(tokens, take).inspect_err(|_| self.cache.truncate(before))
    }

    fn each_logits(&mut self, tokens: &[u32], take: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let Self { model, cpu, cache, scratch, logits } = self;
        let (vocab, hidden) = (model.config.vocab_size, model.config.hidden_size);
        let at_a_time = (LOGITS_AT_A_TIME / vocab).max(16) * hidden;
        for tokens in tokens.chunks(PREFILL_TOKENS) {
            let vectors = model.graph.forward(cpu, Batch { tokens, all_rows: true }, cache, scratch)?;
            for vectors in vectors.chunks(at_a_time) {
                let rows = vectors.len() / hidden;
                let logits = room(logits, rows * vocab);
                model.graph.head().logits(cpu, vectors, rows, logits)?;
                take(logits)?;
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.model.config.vocab_size;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::UnknownToken { id, vocab });
        }
        if tokens.len() > self.context() - self.len() {
            return Err(Error::ContextFull { limit: self.context(), got: self.len() + tokens.len() });
        }
        Ok(())
    }
}
