//! How far a model's predictions are from those of another, most often of the model that it was quantised from.
//!
//! ```text
//! each window:  logits of the reference [window, vocab]
//!   each part of it:  logits of the model [some positions, vocab]
//!     each position with a target, p by the reference, q by the model:
//!       Σ p·ln(p/q);  argmax p = argmax q?;  −ln p and −ln q of the target
//! ```

use super::perplexity::loss;
use super::{OnProgress, Progress, Windows};
use crate::engine::{Model, Session};
use crate::error::{Error, Result};
use halfbyte::cpu::{Cpu, nn};
use std::time::Instant;

const OP: &str = "KL divergence";

/// What [`kl_divergence`] found. Divergences are in nats a position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KlDivergence {
    /// Mean over all positions.
    pub mean: f64,
    /// Standard error of the mean, positions taken as independent; None for a single one.
    pub standard_error: Option<f64>,
    /// Half of the positions diverge by at most this much. Quantiles lie linearly between neighbours.
    pub median: f64,
    /// 90 % of the positions diverge by at most this much.
    pub p90: f64,
    /// 99 % of the positions diverge by at most this much.
    pub p99: f64,
    /// 99.9 % of the positions diverge by at most this much.
    pub p999: f64,
    /// The position that diverges most.
    pub max: f64,
    /// Fraction of positions where both models hold the same token for the most probable.
    pub top1_agreement: f64,
    /// Perplexity of the model, as [`super::perplexity`] gives it.
    pub perplexity: f64,
    /// Perplexity of the reference.
    pub reference_perplexity: f64,
    /// Windows compared.
    pub windows: usize,
    /// Tokens run through each model: windows times their length.
    pub tokens: usize,
    /// Positions compared: every position of a window but the last.
    pub positions: usize,
    /// Time it took.
    pub seconds: f64,
}

impl KlDivergence {
    /// How many times the reference's perplexity the model's is.
    pub fn perplexity_ratio(&self) -> f64 {
        self.perplexity / self.reference_perplexity
    }
}

/// The divergence KL(reference‖model) of two models' predictions over a stream of tokens.
///
/// Windows are those of [`super::perplexity`]; every position that has a target counts. Memory holds the logits of one
/// window. *Accuracy:* logits in f32, all after them in f64; a model does not diverge from itself. *Errors:* models with
/// vocabularies of different sizes; logits that are not finite; otherwise as [`super::perplexity`]. Whether an id means
/// the same token to both is for the caller to know. *Source:* Kullback and Leibler, "On Information and Sufficiency",
/// 1951.
pub fn kl_divergence(
    model: &Model,
    reference: &Model,
    cpu: &Cpu,
    tokens: &[u32],
    window: usize,
    progress: &mut OnProgress<'_>,
) -> Result<KlDivergence> {
    let vocab = reference.config().spec.vocab;
    if model.config().spec.vocab != vocab {
        let expected = format!("a model with the reference's vocabulary of {vocab} tokens");
        return Err(Error::invalid(OP, expected, format!("{} tokens", model.config().spec.vocab)));
    }
    let windows = Windows::of(OP, tokens, window)?;
    let begun = Instant::now();
    let mut session = Session::new(model, cpu, window)?;
    let mut session_of_reference = Session::new(reference, cpu, window)?;
    let mut expected = Vec::new();
    let mut found = Comparison::default();
    for (done, window_tokens) in windows.iter().enumerate() {
        expected.clear();
        session_of_reference.clear()?;
        session_of_reference.logits_of_all(window_tokens, &mut |logits| {
            expected.extend_from_slice(logits);
            Ok(())
        })?;
        let (mut expected, mut targets) = (&expected[..], &window_tokens[1..]);
        session.clear()?;
        session.logits_of_all(window_tokens, &mut |logits| {
            // The last position of a window has no target.
            let positions = targets.len().min(logits.len() / vocab);
            let (now, later) = expected.split_at(positions * vocab);
            let (targets_now, targets_later) = targets.split_at(positions);
            (expected, targets) = (later, targets_later);
            found.add(cpu, now, &logits[..positions * vocab], targets_now)
        })?;
        let [_, perplexity] = found.perplexities();
        if progress(Progress { done: done + 1, total: windows.count(), perplexity }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    let [reference_perplexity, perplexity] = found.perplexities();
    let (mean, standard_error) = mean(&found.divergences);
    let Comparison { mut divergences, agreements, .. } = found;
    divergences.sort_unstable_by(f64::total_cmp);
    Ok(KlDivergence {
        mean,
        standard_error,
        median: quantile(&divergences, 0.5),
        p90: quantile(&divergences, 0.9),
        p99: quantile(&divergences, 0.99),
        p999: quantile(&divergences, 0.999),
        max: quantile(&divergences, 1.0),
        top1_agreement: agreements as f64 / divergences.len() as f64,
        perplexity,
        reference_perplexity,
        windows: windows.count(),
        tokens: windows.count() * window,
        positions: windows.targets(),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// What was found so far, and room to find more. Of pairs the reference comes first.
#[derive(Default)]
struct Comparison {
    divergences: Vec<f64>,
    agreements: usize,
    losses: [f64; 2],
    normalisers: [Vec<f64>; 2],
    most_probable: [Vec<usize>; 2],
    divergences_of_rows: Vec<f64>,
}

impl Comparison {
    /// Compares logits `[targets, vocab]`. Error: such that are not finite.
    fn add(&mut self, cpu: &Cpu, reference: &[f32], model: &[f32], targets: &[u32]) -> Result<()> {
        if targets.is_empty() {
            return Ok(());
        }
        for (i, logits) in [reference, model].into_iter().enumerate() {
            let (normalisers, most_probable) = (&mut self.normalisers[i], &mut self.most_probable[i]);
            normalisers.resize(targets.len(), 0.0);
            most_probable.resize(targets.len(), 0);
            nn::log_sum_exp(cpu, logits, normalisers)?;
            nn::argmax(cpu, logits, most_probable)?;
            let rows = logits.chunks_exact(logits.len() / targets.len());
            for ((row, &normaliser), &target) in rows.zip(&*normalisers).zip(targets) {
                self.losses[i] += loss(row, normaliser, target)?;
            }
        }
        let [p, q] = &self.normalisers;
        self.divergences_of_rows.resize(targets.len(), 0.0);
        nn::kl_divergence(cpu, reference, p, model, q, &mut self.divergences_of_rows)?;
        if let Some(&odd) = self.divergences_of_rows.iter().find(|divergence| !divergence.is_finite()) {
            return Err(Error::NotFinite(odd as f32));
        }
        self.divergences.extend_from_slice(&self.divergences_of_rows);
        let [reference, model] = &self.most_probable;
        self.agreements += reference.iter().zip(model).filter(|(a, b)| a == b).count();
        Ok(())
    }

    fn perplexities(&self) -> [f64; 2] {
        self.losses.map(|sum| (sum / self.divergences.len() as f64).exp())
    }
}

/// The mean of at least one value, and its standard error.
fn mean(values: &[f64]) -> (f64, Option<f64>) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt()))
}

/// The quantile of at least one value in ascending order, between 0 and 1.
fn quantile(ascending: &[f64], fraction: f64) -> f64 {
    let at = fraction * (ascending.len() - 1) as f64;
    let below = ascending[at as usize];
    let above = ascending[at.ceil() as usize];
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_and_quantiles_are_those_of_the_books() {
        assert_eq!(mean(&[5.0]), (5.0, None));
        // Variance 5/3 of four values: error √(5/12).
        let (mean, error) = mean(&[1.0, 4.0, 2.0, 3.0]);
        assert_eq!(mean, 2.5);
        assert!((error.unwrap() - (5.0f64 / 12.0).sqrt()).abs() < 1e-15);
        let values: Vec<f64> = (0..=10).map(|i| f64::from(i * i)).collect();
        let of = |fraction| quantile(&values, fraction);
        assert_eq!([of(0.0), of(0.5), of(0.75), of(1.0)], [0.0, 25.0, 56.5, 100.0]);
        assert_eq!(quantile(&[7.0], 0.999), 7.0);
    }
}
