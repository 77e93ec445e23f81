//! Load on a server of OpenAI's interface, of any make, and what it makes of it.

mod client;
mod lengths;
mod plot;
mod report;

pub use client::Target;
pub use lengths::{Lengths, Random};
pub use plot::svg;
pub use report::{Percentiles, Report};

use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// So many a second on average, by chance and whatever the server does (a Poisson process).
    Poisson(f64),
    /// So many at a time: each that is done is followed by the next.
    AtOnce(usize),
}

impl Arrivals {
    /// Requests a second at least: one in a day.
    pub const LEAST_RATE: f64 = 1.0 / 86400.0;

    /// Whether requests can come so. Error: a rate below [`Self::LEAST_RATE`], whose times no clock holds, or none.
    pub fn check(self) -> Result<(), String> {
        match self {
            Self::Poisson(rate) if !(rate.is_finite() && rate >= Self::LEAST_RATE) => {
                Err(format!("expected at least {:.1e} requests a second, one in a day, got {rate}", Self::LEAST_RATE))
            }
            Self::Poisson(_) | Self::AtOnce(_) => Ok(()),
        }
    }
}

/// A request to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// A text, or token ids.
    pub prompt: Value,
    /// New tokens.
    pub max_tokens: usize,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Plan {
    /// When requests come.
    pub arrivals: Arrivals,
    /// Which.
    pub requests: Vec<Wanted>,
    /// Whether models are told not to end their texts (`ignore_eos`, which OpenAI does not know).
    pub ignore_eos: bool,
    /// For the times between requests.
    pub seed: u64,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// From the beginning of all until this was sent.
    pub sent: Duration,
    /// From there to the first text.
    pub first: Option<Duration>,
    /// To the end.
    pub whole: Duration,
    /// Tokens of the prompt, as the server counts them, or as they were sent.
    pub prompt_tokens: usize,
    /// Tokens that were written: as the server counts them, else pieces of text.
    pub new_tokens: usize,
    /// Why it failed, if it has.
    pub error: Option<String>,
}

/// Makes all requests; `done` is called after each. How long it took, and what became of them. Error: as [`Arrivals::check`].
pub async fn run(
    target: Arc<Target>,
    plan: Plan,
    done: impl Fn(usize) + Send + Sync + 'static,
) -> Result<(Duration, Vec<Outcome>), String> {
    plan.arrivals.check()?;
    let (plan, done) = (Arc::new(plan), Arc::new(done));
    let (begun, next, ended) = (Instant::now(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let one = {
        let (plan, target) = (plan.clone(), target.clone());
        move |at: usize| {
            let (plan, target, ended, done) = (plan.clone(), target.clone(), ended.clone(), done.clone());
            async move {
                let outcome = ask(&target, &plan, at, begun).await;
                done(ended.fetch_add(1, Ordering::Relaxed) + 1);
                outcome
            }
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    match plan.arrivals {
        Arrivals::AtOnce(count) => {
            for _ in 0..count.min(plan.requests.len()) {
                let (one, next, all) = (one.clone(), next.clone(), plan.requests.len());
                tasks.spawn(async move {
                    let mut outcomes = Vec::new();
                    loop {
                        let at = next.fetch_add(1, Ordering::Relaxed);
                        if at >= all {
                            return outcomes;
                        }
                        outcomes.push(one(at).await);
                    }
                });
            }
        }
        Arrivals::Poisson(rate) => {
            let (mut random, mut due) = (Random::new(plan.seed), 0.0);
            for at in 0..plan.requests.len() {
                let one = one.clone();
                let when = begun + Duration::from_secs_f64(due);
                tasks.spawn(async move {
                    tokio::time::sleep_until(when.into()).await;
                    vec![one(at).await]
                });
                due += random.exponential() / rate;
            }
        }
    }
    let mut outcomes = Vec::with_capacity(plan.requests.len());
    while let Some(joined) = tasks.join_next().await {
        // A task that panicked would be a bug; what it has is missing from the report's count.
        outcomes.extend(joined.unwrap_or_default());
    }
    Ok((begun.elapsed(), outcomes))
}

async fn ask(target: &Target, plan: &Plan, at: usize, begun: Instant) -> Outcome {
    let Wanted { prompt, max_tokens } = &plan.requests[at];
    let mut body = json!({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": true, "stream_options": {"include_usage": true},
    });
    if let Some(model) = &target.model {
        body["model"] = json!(model);
    }
    if plan.ignore_eos {
        body["ignore_eos"] = json!(true);
    }
    let sent = Instant::now();
    let (mut first, mut pieces, mut usage, mut error) = (None, 0, None, None);
    let streamed = target.stream("/v1/completions", &body, |event| {
        if let Some(message) = event.pointer("/error/message").and_then(Value::as_str) {
            error = Some(message.to_owned());
        }
        // A token may be a part of a character, and no text yet.
        if event.pointer("/choices/0/text").and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
            first.get_or_insert_with(|| sent.elapsed());
            pieces += 1;
        }
        if let Some(all) = event.get("usage").filter(|all| all.is_object()) {
            let count = |name: &str| all.get(name).and_then(Value::as_u64).map(|n| n as usize);
            usage = count("prompt_tokens").zip(count("completion_tokens"));
        }
    });
    let failed = streamed.await.err();
    let sent_prompt = prompt.as_array().map_or(0, Vec::len);
    let (prompt_tokens, new_tokens) = usage.unwrap_or((sent_prompt, pieces));
    Outcome { sent: sent - begun, first, whole: sent.elapsed(), prompt_tokens, new_tokens, error: failed.or(error) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times that no clock holds.
    #[tokio::test]
    async fn a_rate_of_less_than_one_request_in_a_day_is_refused() {
        let target = Arc::new(Target::new("http://127.0.0.1:1", None, None).unwrap());
        for rate in [1e-300, 1e-20, 1e-5, 0.0, -1.0, f64::NAN, f64::INFINITY] {
            let requests = vec![Wanted { prompt: json!("a"), max_tokens: 1 }; 2];
            let plan = Plan { arrivals: Arrivals::Poisson(rate), requests, ignore_eos: true, seed: 0 };
            let refused = run(target.clone(), plan, |_| {}).await.unwrap_err();
            assert!(refused.contains("one in a day"), "{rate}: {refused}");
        }
        Arrivals::Poisson(Arrivals::LEAST_RATE).check().unwrap();
    }
}
