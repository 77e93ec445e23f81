//! From logits to the next token: the most likely one, or a draw.

use crate::error::{Error, Result};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 takes the most likely token (of equals the first), whatever the other fields say.
    pub temperature: f32,
    /// Draw from this many of the most likely tokens only; 0 for no limit.
    pub top_k: usize,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum; 1 for no limit.
    pub top_p: f32,
    /// Same seed, same draws.
    pub seed: u64,
}

impl Default for Sampling {
    /// The most likely token.
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// Chooses tokens, one after the other.
#[derive(Clone, Debug)]
pub struct Sampler {
    options: Sampling,
    random: SplitMix64,
    candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    token: u32,
    logit: f32,
    /// Probability among all tokens.
    weight: f32,
}

impl Sampler {
    /// Errors: a temperature that is negative or not finite, a top-p that is not above 0 and at most 1.
    pub fn new(options: Sampling) -> Result<Self> {
        if !(options.temperature.is_finite() && options.temperature >= 0.0) {
            let got = options.temperature.to_string();
            return Err(Error::invalid("sampling", "a temperature of at least 0", got));
        }
        if !(options.top_p > 0.0 && options.top_p <= 1.0) {
            return Err(Error::invalid("sampling", "a top-p above 0 and at most 1", options.top_p.to_string()));
        }
        Ok(Self { options, random: SplitMix64(options.seed), candidates: Vec::new() })
    }

    /// What it was made with.
    pub fn options(&self) -> Sampling {
        self.options
    }

    /// The next of its random numbers, from 0 to below 1, for a draw that is made elsewhere.
    pub(crate) fn random(&mut self) -> f64 {
        self.random.unit()
    }

    /// Chooses a token. Errors: no logits, NaN or infinity among them (minus infinity is a token that never comes).
    pub fn next(&mut self, logits: &[f32]) -> Result<u32> {
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
        let mut left = self.random.unit() * total;
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

/// Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014): any seed will do.
#[derive(Clone, Debug)]
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0 (included) to 1 (excluded).
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draws(options: Sampling, logits: &[f32], count: usize) -> Vec<u32> {
        let mut sampler = Sampler::new(options).unwrap();
        (0..count).map(|_| sampler.next(logits).unwrap()).collect()
    }

    #[test]
    fn splitmix_gives_the_published_sequence() {
        let mut random = SplitMix64(1_234_567);
        let got: Vec<u64> = (0..3).map(|_| random.next()).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
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
}
