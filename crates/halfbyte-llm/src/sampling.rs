//! From logits to the next token: the most likely one, or a draw.
//!
//! What changes logits or leaves tokens out comes in transformers' order: biases, repetition penalty, the other penalties, a
//! constraint, temperature, top-k, top-p, min-p.

mod changes;

pub use changes::Constraint;

use crate::error::{Error, Result};
use changes::Changes;
use halfbyte::random::splitmix64;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token (of equals the first), whatever the other fields say.
    pub temperature: f32,
    /// Draw from this many of the most likely tokens only; 0 for no limit.
    pub top_k: usize,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
    pub top_p: f32,
    /// Draw from tokens whose probability is at least this part of the most likely one's; 0 for no limit.
    pub min_p: f32,
    /// Logits of tokens that the text holds, the prompt's too, are divided by this if they are positive, else multiplied, behind
    /// biases and before anything else; 1 changes nothing. It changes which token is the most likely one.
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time that it was chosen; 0 changes nothing. The prompt does not count.
    pub frequency_penalty: f32,
    /// Subtracted from the logits of tokens that were chosen at all; 0 changes nothing. The prompt does not count.
    pub presence_penalty: f32,
    /// Same seed, same draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// The most likely token.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
        }
    }
}

/// Chooses tokens, one after the other.
#[derive(Debug)]
pub struct Sampler {
    options: Sampling,
    /// State of [`splitmix64`].
    random: u64,
    candidates: Vec<Candidate>,
    changes: Changes,
    /// Logits after them.
    changed: Vec<f32>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    /// Probability among all tokens.
    weight: f32,
}

impl Sampler {
    /// Errors: a temperature that is negative or not finite, a top-p that is not above 0 and at most 1, a min-p that is not from
    /// 0 to 1, a repetition penalty that is not above 0, penalties that are not finite.
    pub fn new(options: Sampling) -> Result<Self> {
        if !(options.temperature.is_finite() && options.temperature >= 0.0) {
            let got = options.temperature.to_string();
            return Err(Error::invalid("sampling", "a temperature of at least 0", got));
        }
        if !(options.top_p > 0.0 && options.top_p <= 1.0) {
            return Err(Error::invalid("sampling", "a top-p above 0 and at most 1", options.top_p.to_string()));
        }
        if !(0.0..=1.0).contains(&options.min_p) {
            return Err(Error::invalid("sampling", "a min-p from 0 to 1", options.min_p.to_string()));
        }
        let changes = Changes::new(&options)?;
        Ok(Self { options, random: options.seed, candidates: Vec::new(), changes, changed: Vec::new() })
    }

    /// Takes note of tokens that the text holds already; those that it chooses it knows.
    pub fn saw(&mut self, tokens: &[u32]) {
        self.changes.saw(tokens);
    }

    /// Adds these to the logits of tokens, before anything else. Errors: a bias that is NaN or plus infinity; minus infinity is a token
    /// that never comes.
    pub fn set_bias(&mut self, bias: Vec<(u32, f32)>) -> Result<()> {
        self.changes.set_bias(bias)
    }

    /// Leaves only tokens that a constraint lets come, after penalties and biases.
    pub fn set_constraint(&mut self, constraint: Box<dyn Constraint>) {
        self.changes.set_constraint(constraint);
    }

    /// Whether its constraint, if it has one, said that the text is complete.
    pub fn complete(&self) -> bool {
        self.changes.complete()
    }

    /// Whether a device must hand over its logits: it has no kernel for what is asked for.
    pub(crate) fn needs_logits(&self) -> bool {
        self.changes.any() || (self.options.min_p > 0.0 && self.options.temperature > 0.0)
    }

    /// What it was made with.
    pub fn options(&self) -> Sampling {
        self.options
    }

    /// The next of its random numbers, from 0 to below 1, for a draw that is made elsewhere.
    pub(crate) fn random(&mut self) -> f64 {
        unit(&mut self.random)
    }

    /// Chooses a token. Errors: no logits, NaN or infinity among them (minus infinity is a token that never comes); those of its
    /// constraint.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
        if !self.changes.any() {
            return self.choose(logits);
        }
        let mut changed = std::mem::take(&mut self.changed);
        changed.clear();
        changed.extend_from_slice(logits);
        let chosen = self.changes.apply(&mut changed).and_then(|()| self.choose(&changed));
        self.changed = changed;
        let chosen = chosen?;
        self.changes.chose(chosen)?;
        Ok(chosen)
    }

    fn choose(&mut self, logits: &[f32]) -> Result<u32> {
        let (best, max) = greatest(logits)?;
        if self.options.temperature == 0.0 {
            return Ok(best);
        }
        let inverse = 1.0 / self.options.temperature;
        self.candidates.clear();
        self.candidates.extend(logits.iter().enumerate().map(|(token, &logit)| Candidate {
            token: token as u32,
            logit,
            weight: 0.0,
        }));
        if self.options.top_k > 0 && self.options.top_k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(self.options.top_k - 1, likelier);
            self.candidates.truncate(self.options.top_k);
        }
        let mut total = 0.0f64;
        for candidate in &mut self.candidates {
            // A difference of 0 stays 0 also where 1/temperature overflows.
            let distance = candidate.logit - max;
            candidate.weight = if distance == 0.0 { 1.0 } else { (distance * inverse).exp() };
            total += f64::from(candidate.weight);
        }
        if self.options.top_p < 1.0 {
            total = self.keep_nucleus(total);
        } else {
            // Selection leaves an order that the standard library may change; a draw must not depend on it.
            self.candidates.sort_unstable_by_key(|c| c.token);
        }
        if self.options.min_p > 0.0 {
            // The most likely token weighs 1.
            self.candidates.retain(|c| c.weight >= self.options.min_p);
            total = self.candidates.iter().map(|c| f64::from(c.weight)).sum();
        }
        let mut left = unit(&mut self.random) * total;
        for candidate in &self.candidates {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return Ok(candidate.token);
            }
        }
        // Rounding of the sums: the last token that can come.
        Ok(self.candidates.iter().rfind(|c| c.weight > 0.0).map_or(best, |c| c.token))
    }

    /// Keeps the most likely candidates that reach top-p of `total`; returns their weight.
    fn keep_nucleus(&mut self, total: f64) -> f64 {
        let wanted = total * f64::from(self.options.top_p);
        // The nucleus is small as a rule: sort a few, and more only when they do not suffice.
        let mut sorted = 64;
        loop {
            if sorted < self.candidates.len() {
                self.candidates.select_nth_unstable_by(sorted - 1, likelier);
            }
            let head = sorted.min(self.candidates.len());
            self.candidates[..head].sort_unstable_by(likelier);
            let mut sum = 0.0;
            for (i, candidate) in self.candidates[..head].iter().enumerate() {
                sum += f64::from(candidate.weight);
                if sum >= wanted {
                    self.candidates.truncate(i + 1);
                    return sum;
                }
            }
            if head == self.candidates.len() {
                return sum;
            }
            sorted *= 8;
        }
    }
}

/// A token with the logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogProb {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// How likely a token was, by the model alone: before any penalty, temperature or limit.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbs {
    /// The token that was chosen.
    pub chosen: LogProb,
    /// The most likely tokens, the likeliest first; of equals the smaller id.
    pub top: Vec<LogProb>,
}

impl LogProbs {
    /// Of a token that was chosen, and of the `top` most likely ones. Errors: as [`Sampler::next`], a token beyond the logits.
    pub fn of(logits: &[f32], token: u32, top: usize) -> Result<Self> {
        let (_, max) = greatest(logits)?;
        let vocab = logits.len();
        let &chosen = logits.get(token as usize).ok_or(Error::UnknownToken { id: token, vocab })?;
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let logprob = |logit: f32| (f64::from(logit - max) - sum.ln()) as f32;
        let mut all: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        let likelier = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
        if top > 0 && top < all.len() {
            all.select_nth_unstable_by(top - 1, likelier);
        }
        all.truncate(top);
        all.sort_unstable_by(likelier);
        let top = all.into_iter().map(|(token, logit)| LogProb { token, logprob: logprob(logit) }).collect();
        Ok(Self { chosen: LogProb { token, logprob: logprob(chosen) }, top })
    }
}

/// The likelier first; of equals the one with the smaller id.
fn likelier(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.logit.total_cmp(&a.logit).then(a.token.cmp(&b.token))
}

/// The greatest logit and its token, the first of equals.
fn greatest(logits: &[f32]) -> Result<(u32, f32)> {
    let mut best = (0, f32::NEG_INFINITY);
    for (token, &logit) in logits.iter().enumerate() {
        if logit.is_nan() || logit == f32::INFINITY {
            return Err(Error::NotFinite(logit));
        }
        if logit > best.1 {
            best = (token as u32, logit);
        }
    }
    if best.1 == f32::NEG_INFINITY {
        return Err(Error::NotFinite(best.1));
    }
    Ok(best)
}

/// The next number of a sequence, from 0 (included) to 1 (excluded).
fn unit(random: &mut u64) -> f64 {
    (splitmix64(random) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options).unwrap();
        (0..count).map(|_| sampler.next(logits).unwrap()).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(draws(Sampling::default(), &[0.0, 3.0, -1.0, 3.0], 2), [1, 1]);
    }

    #[test]
    fn same_seed_same_draws_and_frequencies_follow_the_softmax() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln()).collect();
        let options = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
        let a = draws(options, &logits, 20_000);
        assert_eq!(a, draws(options, &logits, 20_000));
        assert_ne!(a, draws(Sampling { seed: 8, ..options }, &logits, 20_000));
        for (token, p) in [0.1, 0.2, 0.3, 0.4].into_iter().enumerate() {
            let share = a.iter().filter(|&&t| t as usize == token).count() as f64 / 20_000.0;
            assert!((share - p).abs() < 0.015, "token {token}: {share}");
        }
    }

    #[test]
    fn top_k_and_top_p_keep_the_likeliest() {
        let logits: Vec<f32> = (0..1000).map(|i| ((i * 37 % 1000) as f32) / 100.0).collect();
        let options = Sampling { temperature: 2.0, top_k: 3, ..Sampling::default() };
        assert!(draws(options, &logits, 200).iter().all(|&t| logits[t as usize] >= 9.97));
        let equal = vec![0.0f32; 1000];
        let options = Sampling { temperature: 1.0, top_p: 0.125, ..Sampling::default() };
        let drawn = draws(options, &equal, 2000);
        assert!(drawn.iter().all(|&t| t < 125), "ties are broken by id");
        assert!(drawn.iter().any(|&t| t > 115));
    }

    #[test]
    fn tiny_temperatures_and_impossible_tokens() {
        let logits = [1.0, f32::NEG_INFINITY, 2.0];
        for temperature in [1e-45, 1e-30, 1e-3] {
            let options = Sampling { temperature, ..Sampling::default() };
            assert!(draws(options, &logits, 50).iter().all(|&t| t == 2), "{temperature}");
        }
        let options = Sampling { temperature: 1e6, ..Sampling::default() };
        assert!(draws(options, &logits, 200).iter().all(|&t| t != 1));
    }

    #[test]
    fn refuses_bad_options_and_logits() {
        for options in [
            Sampling { temperature: -1.0, ..Sampling::default() },
            Sampling { temperature: f32::NAN, ..Sampling::default() },
            Sampling { top_p: 0.0, ..Sampling::default() },
            Sampling { top_p: 1.5, ..Sampling::default() },
        ] {
            assert!(matches!(Sampler::new(options), Err(Error::Invalid { .. })));
        }
        let mut sampler = Sampler::new(Sampling::default()).unwrap();
        for logits in [&[][..], &[0.0, f32::NAN], &[f32::INFINITY], &[f32::NEG_INFINITY; 2]] {
            assert!(matches!(sampler.next(logits), Err(Error::NotFinite(_))), "{logits:?}");
        }
    }

    #[test]
    fn min_p_keeps_what_is_likely_beside_the_best() {
        let logits: Vec<f32> = [0.5f32, 0.3, 0.14, 0.06].iter().map(|p| p.ln()).collect();
        let options = Sampling { temperature: 1.0, min_p: 0.25, ..Sampling::default() };
        let drawn = draws(options, &logits, 3000);
        assert!(drawn.contains(&2) && !drawn.contains(&3), "0.14 ≥ 0.25 · 0.5 > 0.06");
        // After the temperature, as in transformers: at half of it probabilities are squared.
        let cold = draws(Sampling { temperature: 0.5, ..options }, &logits, 3000);
        assert!(cold.contains(&1) && !cold.contains(&2), "0.09 ≥ 0.25 · 0.25 > 0.0196");
        // After top-p, which keeps the first two here; what is left is drawn by its share.
        let both = draws(Sampling { top_p: 0.75, min_p: 0.1, ..options }, &logits, 20_000);
        let share = both.iter().filter(|&&token| token == 0).count() as f64 / 20_000.0;
        assert!(both.iter().all(|&token| token < 2) && (share - 0.625).abs() < 0.015, "{share}");
        assert!(draws(Sampling { min_p: 1.0, ..options }, &logits, 100).iter().all(|&token| token == 0));
    }

    #[test]
    fn what_was_said_is_less_likely_to_come_again() {
        let options = Sampling { repetition_penalty: 2.0, ..Sampling::default() };
        let mut sampler = Sampler::new(options).unwrap();
        sampler.saw(&[3, 9]);
        // 4 → 2 for what was seen, −1 → −2; tokens beyond the logits are no matter.
        let logits = [1.5, 3.0, -1.0, 4.0];
        assert_eq!((0..4).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<_>>(), [1, 3, 3, 3]);
        let mut sampler = Sampler::new(Sampling { repetition_penalty: 2.0, ..Sampling::default() }).unwrap();
        sampler.saw(&[0]);
        assert_eq!(sampler.next(&[-1.0, -1.5]).unwrap(), 1);
        for wrong in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(Sampler::new(Sampling { repetition_penalty: wrong, ..options }).is_err());
            assert!(Sampler::new(Sampling { min_p: wrong - 0.5, ..options }).is_err() || wrong == 1.0);
        }
    }

    #[test]
    fn logarithms_of_probabilities_are_those_of_the_model() {
        let logits: Vec<f32> = [0.1f32, 0.2, 0.3, 0.4].iter().map(|p| p.ln() + 7.0).collect();
        let LogProbs { chosen, top } = LogProbs::of(&logits, 1, 2).unwrap();
        let near = |got: LogProb, token: u32, p: f32| got.token == token && (got.logprob - p.ln()).abs() < 1e-6;
        assert!(near(chosen, 1, 0.2) && top.len() == 2 && near(top[0], 3, 0.4) && near(top[1], 2, 0.3), "{top:?}");
        assert_eq!(LogProbs::of(&logits, 1, 99).unwrap().top.len(), 4);
        assert_eq!(LogProbs::of(&[0.0, f32::NEG_INFINITY], 1, 0).unwrap().chosen.logprob, f32::NEG_INFINITY);
        assert!(matches!(LogProbs::of(&logits, 4, 1), Err(Error::UnknownToken { id: 4, vocab: 4 })));
        assert!(LogProbs::of(&[f32::NAN], 0, 1).is_err() && LogProbs::of(&[], 0, 1).is_err());
    }
}
