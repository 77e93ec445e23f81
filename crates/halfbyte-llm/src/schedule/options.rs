//! What callers say and are told: how texts share a model, what a text is to be, how much is going on.

use crate::device::Device;
use crate::sampling::{Constraint, LogProbs, Sampling};

/// How texts share a model.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Positions of keys and values that all texts together may have, rounded up to whole pages.
    pub positions: usize,
    /// Tokens of prompts in a step.
    pub chunk: usize,
    /// Texts that run at a time, at most.
    pub texts: usize,
    /// Tokens of a text that wait to be read, at most; then it waits.
    pub unread: usize,
    /// Whether the bits of a text's numbers are those that it would have alone, whatever runs beside it: its tokens then go through
    /// the layers by themselves, prompts in whole chunks. It is slower: weights are read for each text anew.
    pub batch_invariant: bool,
}

/// Tokens of prompts in a step, in memory and on a GPU.
const CHUNKS: [usize; 2] = [256, 1024];

impl Options {
    /// As usual on the device that a model lies on: a GPU reads prompts in longer chunks.
    pub fn on(device: &Device) -> Self {
        let [in_memory, on_gpu] = CHUNKS;
        let chunk = if let Device::Cuda(_) = device { on_gpu } else { in_memory };
        Self { chunk, ..Self::default() }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self { positions: 1 << 14, chunk: CHUNKS[0], texts: 64, unread: 256, batch_invariant: false }
    }
}

/// A text to be written.
#[derive(Clone, Debug)]
pub struct Request {
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// At most this many new tokens.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the text.
    pub end_tokens: Vec<u32>,
}

/// What else a caller may want of a text.
#[derive(Debug, Default)]
pub struct Extras {
    /// Added to the logits of tokens.
    pub bias: Vec<(u32, f32)>,
    /// What may come: a grammar.
    pub constraint: Option<Box<dyn Constraint>>,
    /// How likely each token was, and this many of the most likely ones, by the model alone.
    pub logprobs: Option<usize>,
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// Its id.
    pub token: u32,
    /// How likely it was, if that was asked for.
    pub logprobs: Option<LogProbs>,
}

/// How much is going on, and what was done since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Texts that wait for their turn.
    pub waiting: usize,
    /// Texts that run.
    pub running: usize,
    /// Pages of keys and values in all.
    pub pages: usize,
    /// Of these, the ones that no text has, running or ended.
    pub free_pages: usize,
    /// Of these, the ones that running texts have; the others hold beginnings that ended texts left.
    pub used_pages: usize,
    /// Steps.
    pub steps: u64,
    /// Tokens that were read: prompts, and again after preemption, and what was written.
    pub read_tokens: u64,
    /// Tokens of prompts that need not be read, since another text had them.
    pub shared_tokens: u64,
    /// Tokens that were chosen.
    pub chosen_tokens: u64,
    /// How often a text lost its pages to others.
    pub preempted: u64,
}
