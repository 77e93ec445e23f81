//! How good a model is: perplexity over a text, divergence from another model, and raw logits to compare with other
//! implementations.

mod kl;
mod logits;
mod perplexity;
mod text;

pub use kl::{KlDivergence, kl_divergence};
pub use logits::{Ids, logits};
pub use perplexity::{Perplexity, Scored, perplexity, perplexity_of};
pub use text::{documents, documents_of, first_tokens, shared_token_stream, token_stream};

use crate::error::{Error, Result};
use std::ops::ControlFlow;

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Windows (or rows) done.
    pub done: usize,
    /// Windows (or rows) in all.
    pub total: usize,
    /// Perplexity over what is done; NaN where none is computed.
    pub perplexity: f64,
}

/// Called after each window; may end the evaluation, which then fails with [`Error::Cancelled`].
pub type OnProgress<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// A stream of tokens, cut into consecutive windows of one length, the remainder dropped.
#[derive(Clone, Copy, Debug)]
struct Windows<'a> {
    tokens: &'a [u32],
    window: usize,
}

impl<'a> Windows<'a> {
    /// Errors: a window of less than 2 tokens, a stream shorter than one window.
    fn of(op: &'static str, tokens: &'a [u32], window: usize) -> Result<Self> {
        if window < 2 {
            return Err(Error::invalid(op, "a window of at least 2 tokens", window.to_string()));
        }
        if tokens.len() < window {
            let expected = format!("a text of at least {window} tokens");
            return Err(Error::Input { op, expected, got: tokens.len().to_string() });
        }
        Ok(Self { tokens, window })
    }

    fn iter(&self) -> impl Iterator<Item = &'a [u32]> {
        self.tokens.chunks_exact(self.window)
    }

    fn count(&self) -> usize {
        self.tokens.len() / self.window
    }

    /// Tokens that are scored: every token of a window but the first.
    fn targets(&self) -> usize {
        self.count() * (self.window - 1)
    }
}
