//! How fast a model reads and writes.

use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::random::Random;
use crate::timing::{Effort, Measured, measure};
use halfbyte::cpu::Cpu;
use halfbyte_llm::{Model, Sampler, Sampling, Session};
use serde::Serialize;
use std::time::Duration;

/// How fast a model reads and writes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    /// Median.
    pub prefill_tokens_per_second: f64,
    /// Width of the middle eight tenths, as a share of the median.
    pub prefill_spread: f64,
    /// Median.
    pub decode_tokens_per_second: f64,
    /// Width of the middle eight tenths, as a share of the median.
    pub decode_spread: f64,
}

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens that are there when decoding begins.
    pub depth: usize,
    /// Tokens written.
    pub generate: usize,
    /// Repetitions of each.
    pub repetitions: usize,
    /// No further repetition after this.
    pub at_most: Duration,
}

impl Work {
    /// Tokens that there must be room for; as many as there are numbers for, where they are more.
    pub fn context(&self) -> usize {
        self.prompt.max(self.depth.saturating_add(self.generate))
    }
}

/// Random tokens of a vocabulary.
pub fn tokens(model: &Model, count: usize) -> Vec<u32> {
    let (mut random, vocab) = (Random(7), model.config().spec.vocab as u64);
    (0..count).map(|_| (random.bits() % vocab) as u32).collect()
}

/// Reads the prompt and chooses the token after it, for the first time, with room for all that is timed later; then tells `seen`.
pub fn first_token<T>(model: &Model, cpu: &Cpu, work: Work, seen: impl FnOnce() -> Result<T>) -> Result<T> {
    let mut session = Session::new(model, cpu, work.context())?;
    read(&mut session, &tokens(model, work.prompt))?;
    session.next(&mut Sampler::new(Sampling::default())?)?;
    seen()
}

/// Times prefill from an empty context, and decoding after `work.depth` tokens, after a warm-up of each.
pub fn speed(model: &Model, cpu: &Cpu, work: Work, progress: &Progress) -> Result<Speed> {
    let Work { prompt, depth, generate, repetitions: runs, at_most } = work;
    let tokens = tokens(model, prompt.max(depth).max(1));
    let mut session = Session::new(model, cpu, work.context())?;
    let effort = Effort { warm_up: 1, runs, at_least: Duration::ZERO, at_most, in_any_case: 1 };
    progress.step(format!("prefill of {prompt} tokens"));
    let prefill = measure(effort, |_| {
        session.clear()?;
        session.prefill(&tokens[..prompt])?;
        Ok(())
    })?;
    session.clear()?;
    if depth > 0 {
        progress.step(format!("{depth} tokens before decoding"));
        read(&mut session, &tokens[..depth])?;
    }
    progress.step(format!("decoding of {generate} tokens"));
    let mut greedy = Sampler::new(Sampling::default())?;
    let decode = measure(effort, |_| {
        session.forget(depth)?;
        let mut token = tokens[0];
        for left in (0..generate).rev() {
            session.read_unless(&[token], None)?;
            token = if left > 0 { session.next_to_read(&mut greedy) } else { session.next(&mut greedy) }?;
            if interrupt::cancelled() {
                return Err(Failure::interrupted());
            }
        }
        Ok(())
    })?;
    let per_second = |tokens: usize, measured: Measured| tokens as f64 / measured.median;
    Ok(Speed {
        prefill_tokens_per_second: per_second(prompt, prefill),
        prefill_spread: prefill.spread,
        decode_tokens_per_second: per_second(generate, decode),
        decode_spread: decode.spread,
    })
}

/// Reads tokens, unless told to stop.
pub fn read(session: &mut Session<'_>, tokens: &[u32]) -> Result<()> {
    match session.read_unless(tokens, Some(interrupt::flag())) {
        Err(halfbyte_llm::Error::Cancelled) => Err(Failure::interrupted()),
        other => Ok(other?),
    }
}
