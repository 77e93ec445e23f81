//! Perplexity of one model over a text.

use super::{OnProgress, Progress, Windows};
use crate::engine::{Model, Session};
use crate::error::{Error, Result};
use halfbyte::cpu::{Cpu, nn};
use std::time::Instant;

/// What [`perplexity`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Exponential of the mean negative log-likelihood over all targets.
    pub perplexity: f64,
    /// Windows scored.
    pub windows: usize,
    /// Tokens run through the model: windows times their length.
    pub tokens: usize,
    /// Tokens scored.
    pub targets: usize,
    /// Time it took.
    pub seconds: f64,
}

impl Perplexity {
    /// Tokens run through the model in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// Which tokens of a window are scored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scored {
    /// Every one but the first.
    AllButFirst,
    /// Those of the second half, behind the first of them: as llama.cpp's `llama-perplexity` does, where the token that begins a text
    /// also stands in the place of each window's first.
    SecondHalf {
        /// The token that begins a text, where the model has one.
        bos: Option<u32>,
    },
}

impl Scored {
    /// The first position that is scored.
    fn first(self, window: usize) -> usize {
        match self {
            Self::AllButFirst => 1,
            Self::SecondHalf { .. } => window / 2 + 1,
        }
    }
}

/// Perplexity over a stream of tokens: [`perplexity_of`] all tokens of a window but the first. *Errors:* as there.
pub fn perplexity(
    model: &Model,
    cpu: &Cpu,
    tokens: &[u32],
    window: usize,
    progress: &mut OnProgress<'_>,
) -> Result<Perplexity> {
    perplexity_of(model, cpu, tokens, (window, Scored::AllButFirst), progress)
}

/// Perplexity over a stream of tokens.
///
/// The stream is cut into consecutive windows of `window` tokens, the remainder dropped; each is scored on its own from
/// position 0. *Accuracy:* logits in f32, sums in f64. *Errors:* a window of
/// less than 2 tokens (of which half are scored, 3) or beyond the model's context, a stream shorter than one window, ids beyond the vocabulary, logits
/// that are not finite.
pub fn perplexity_of(
    model: &Model,
    cpu: &Cpu,
    tokens: &[u32],
    (window, scored): (usize, Scored),
    progress: &mut OnProgress<'_>,
) -> Result<Perplexity> {
    let windows = Windows::of("perplexity", tokens, window)?;
    let first = scored.first(window);
    let of_window = window.checked_sub(first).filter(|&targets| targets > 0);
    let of_window =
        of_window.ok_or_else(|| Error::invalid("perplexity", "a window of at least 3 tokens", window.to_string()))?;
    let begun = Instant::now();
    let mut session = Session::new(model, cpu, window)?;
    let vocab = model.config().spec.vocab;
    let (mut sum, mut perplexity) = (0.0f64, f64::NAN);
    let (mut normalisers, mut window_tokens) = (Vec::new(), Vec::new());
    for (done, read) in windows.iter().enumerate() {
        session.clear()?;
        window_tokens.clear();
        window_tokens.extend_from_slice(read);
        if let Scored::SecondHalf { bos: Some(bos) } = scored {
            window_tokens[0] = bos;
        }
        let mut position = 0;
        session.logits_of_all(&window_tokens, &mut |logits| {
            normalisers.resize(logits.len() / vocab, 0.0);
            nn::log_sum_exp(cpu, logits, &mut normalisers)?;
            for (row, &normaliser) in logits.chunks_exact(vocab).zip(&normalisers) {
                position += 1;
                let Some(&target) = window_tokens.get(position) else { break };
                if position >= first {
                    sum += loss(row, normaliser, target)?;
                }
            }
            Ok(())
        })?;
        perplexity = (sum / ((done + 1) * of_window) as f64).exp();
        if progress(Progress { done: done + 1, total: windows.count(), perplexity }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    Ok(Perplexity {
        perplexity,
        windows: windows.count(),
        tokens: windows.count() * window,
        targets: windows.count() * of_window,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Negative log-likelihood of a token. Error: it is not finite.
pub(super) fn loss(logits: &[f32], normaliser: f64, target: u32) -> Result<f64> {
    let loss = normaliser - f64::from(logits[target as usize]);
    if loss.is_finite() { Ok(loss) } else { Err(Error::NotFinite(loss as f32)) }
}
