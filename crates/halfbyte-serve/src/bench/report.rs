//! What a load came to, in numbers.

use super::Outcome;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Percentiles of times, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Percentiles {
    /// Mean.
    pub mean: f64,
    /// Half of all take at most this.
    pub p50: f64,
    /// Nine of ten.
    pub p90: f64,
    /// 95 of 100.
    pub p95: f64,
    /// 99 of 100.
    pub p99: f64,
    /// The longest.
    pub max: f64,
}

impl Percentiles {
    /// Of some values, in any order; None of none. A percentile is the least value that so many of all do not pass.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let &max = sorted.last()?;
        let at = |share: f64| {
            let rank = (share * sorted.len() as f64).ceil() as usize;
            sorted[rank.clamp(1, sorted.len()) - 1]
        };
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Some(Self { mean, p50: at(0.5), p90: at(0.9), p95: at(0.95), p99: at(0.99), max })
    }
}

/// What a load came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// From the first request to the end of the last answer.
    pub seconds: f64,
    /// Requests that were answered.
    pub answered: usize,
    /// Requests that failed.
    pub failed: usize,
    /// Why, with how many each.
    pub errors: BTreeMap<String, usize>,
    /// Answers a second.
    pub requests_per_second: f64,
    /// Tokens of prompts a second.
    pub prompt_tokens_per_second: f64,
    /// New tokens a second.
    pub new_tokens_per_second: f64,
    /// Tokens of prompts.
    pub prompt_tokens: usize,
    /// New tokens.
    pub new_tokens: usize,
    /// Seconds from a request to its first text; None where no answer had any, as of tokens that are not shown.
    pub first_token: Option<Percentiles>,
    /// Seconds a token after the first, on average over an answer.
    pub each_token: Option<Percentiles>,
    /// Seconds of a whole answer.
    pub whole: Option<Percentiles>,
}

/// Seconds to the first text of each answer.
pub(super) fn firsts(outcomes: &[Outcome]) -> Vec<f64> {
    answered(outcomes).filter_map(|one| Some(one.first?.as_secs_f64())).collect()
}

/// Seconds a token after the first, of each answer that has such.
pub(super) fn each(outcomes: &[Outcome]) -> Vec<f64> {
    let of = |one: &Outcome| {
        let spans = one.new_tokens.checked_sub(1).filter(|&n| n > 0)?;
        Some((one.whole - one.first?).as_secs_f64() / spans as f64)
    };
    answered(outcomes).filter_map(of).collect()
}

fn answered(outcomes: &[Outcome]) -> impl Iterator<Item = &Outcome> {
    outcomes.iter().filter(|one| one.error.is_none())
}

impl Report {
    /// Of what became of requests in this time.
    pub fn of(took: Duration, outcomes: &[Outcome]) -> Self {
        let seconds = took.as_secs_f64();
        let mut errors = BTreeMap::new();
        for error in outcomes.iter().filter_map(|one| one.error.clone()) {
            *errors.entry(error).or_insert(0) += 1;
        }
        let count = |of: fn(&Outcome) -> usize| answered(outcomes).map(of).sum::<usize>();
        let (prompt_tokens, new_tokens) = (count(|one| one.prompt_tokens), count(|one| one.new_tokens));
        let answers = answered(outcomes).count();
        let rate = |n: usize| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let whole: Vec<f64> = answered(outcomes).map(|one| one.whole.as_secs_f64()).collect();
        Self {
            seconds,
            answered: answers,
            failed: outcomes.len() - answers,
            errors,
            requests_per_second: rate(answers),
            prompt_tokens_per_second: rate(prompt_tokens),
            new_tokens_per_second: rate(new_tokens),
            prompt_tokens,
            new_tokens,
            first_token: Percentiles::of(&firsts(outcomes)),
            each_token: Percentiles::of(&each(outcomes)),
            whole: Percentiles::of(&whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_there() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        let all = Percentiles::of(&values).unwrap();
        assert_eq!(all, Percentiles { mean: 50.5, p50: 50.0, p90: 90.0, p95: 95.0, p99: 99.0, max: 100.0 });
        assert_eq!(Percentiles::of(&[3.0]).unwrap().p99, 3.0);
        assert_eq!(Percentiles::of(&[]), None);
    }

    #[test]
    fn what_failed_is_counted_and_no_speed() {
        let second = Duration::from_secs(1);
        let good = Outcome {
            sent: Duration::ZERO,
            first: Some(second),
            whole: 3 * second,
            prompt_tokens: 5,
            new_tokens: 5,
            error: None,
        };
        let bad = Outcome { error: Some("busy".to_owned()), first: None, ..good.clone() };
        let report = Report::of(2 * second, &[good, bad.clone(), bad]);
        assert_eq!((report.answered, report.failed, report.errors["busy"]), (1, 2, 2));
        let [first, each] = [&report.first_token, &report.each_token].map(|of| of.as_ref().unwrap().p50);
        assert_eq!((report.new_tokens_per_second, first, each), (2.5, 1.0, 0.5));
    }
}
