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
    /// Tokens scored: every token of a window but the first.
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

/// Perplexity over a stream of tokens.
///
/// The stream is cut into consecutive windows of `window` tokens, the remainder dropped; each is scored on its own from
/// position 0; targets are positions 1 to `window` − 1. *Accuracy:* logits in f32, sums in f64. *Errors:* a window of
/// less than 2 tokens or beyond the model's context, a stream shorter than one window, ids beyond the vocabulary, logits
/// that are not finite.
pub fn perplexity(
    model: &Model,
    cpu: &Cpu,
    tokens: &[u32],
    window: usize,
    progress: &mut OnProgress<'_>,
) -> Result<Perplexity> {
    let windows = Windows::of("perplexity", tokens, window)?;
    let begun = Instant::now();
    let mut session = Session::new(model, cpu, window)?;
    let vocab = model.config().spec.vocab;
    let (mut sum, mut perplexity) = (0.0f64, f64::NAN);
    let mut normalisers = Vec::new();
    for (done, window_tokens) in windows.iter().enumerate() {
        session.clear()?;
        let mut position = 0;
        session.logits_of_all(window_tokens, &mut |logits| {
            normalisers.resize(logits.len() / vocab, 0.0);
            nn::log_sum_exp(cpu, logits, &mut normalisers)?;
            for (row, &normaliser) in logits.chunks_exact(vocab).zip(&normalisers) {
                position += 1;
                let Some(&target) = window_tokens.get(position) else { break };
                sum += loss(row, normaliser, target)?;
            }
            Ok(())
        })?;
        perplexity = (sum / ((done + 1) * (window - 1)) as f64).exp();
        if progress(Progress { done: done + 1, total: windows.count(), perplexity }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    Ok(Perplexity {
        perplexity,
        windows: windows.count(),
        tokens: windows.count() * window,
        targets: windows.targets(),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Negative log-likelihood of a token. Error: it is not finite.
pub(super) fn loss(logits: &[f32], normaliser: f64, target: u32) -> Result<f64> {
    let loss = normaliser - f64::from(logits[target as usize]);
    if loss.is_finite() { Ok(loss) } else { Err(Error::NotFinite(loss as f32)) }
}
