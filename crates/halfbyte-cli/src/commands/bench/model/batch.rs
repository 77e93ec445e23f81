//! How fast a model writes many texts at once.

use super::limits::{Machine, StepLimit};
use super::speed::Work;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::random::Random;
use crate::text::rate;
use crate::timing::Measured;
use halfbyte::cpu::Cpu;
use halfbyte_llm::profile::Profile;
use halfbyte_llm::schedule::{Handle, Options, Request, Scheduler};
use halfbyte_llm::{Model, Sampling};
use serde::Serialize;
use std::time::Instant;

/// Tokens of prompts in a step while texts begin.
const CHUNK: usize = 2048;

/// Steps before those that are timed, in which kernels are loaded and steps recorded.
const WARM_UP: usize = 4;

/// Tokens of each text where no depth is asked for.
const DEPTH: usize = 512;

/// Steps in which each of some texts was given a token.
#[derive(Debug)]
pub struct Steps {
    texts: usize,
    /// Tokens that a text had before them, on average.
    depth: f64,
    /// Between the first prompt's and the last prompt's end.
    begin_seconds: f64,
    each: Vec<f64>,
    /// Of as many repetitions as the others, where they are asked for.
    profiles: Vec<Profile>,
}

/// The same, beside what the machine allows.
#[derive(Debug, Serialize)]
pub struct Batch {
    texts: usize,
    depth_tokens: f64,
    /// Tokens of prompts and others that were read until all texts were there, a second.
    begin_tokens_per_second: f64,
    tokens_per_second: f64,
    /// Of a step's time: the width of the middle eight tenths, as a share of the median.
    spread: f64,
    step_milliseconds: f64,
    #[serde(flatten)]
    limit: Option<StepLimit>,
    share: Option<f64>,
    share_in_turn: Option<f64>,
}

/// Times steps of so many texts, each token by itself, once all of them are there.
pub fn steps(model: &Model, cpu: &Cpu, texts: usize, work: Work, profiled: bool, progress: &Progress) -> Result<Steps> {
    let depth = if work.depth == 0 { DEPTH } else { work.depth };
    progress.step(format!("{texts} texts at once"));
    // The first ones are written while the last ones are read.
    let ahead = (texts * depth).div_ceil(CHUNK) + 1 + WARM_UP;
    // A profile does not count at first.
    let profiles = if profiled { 1 + work.repetitions } else { 0 };
    let written = ahead + work.generate + profiles;
    let length = depth + written;
    let limit = model.config().spec.max_context;
    if length > limit {
        return Err(Failure::usage(
            format!("the model's context holds {limit} tokens"),
            format!("{texts} texts after {depth} tokens become {length} tokens long, while others begin"),
            "choose fewer texts or tokens",
        ));
    }
    let page = halfbyte::kv_pages::PAGE_LENGTH;
    let positions = texts * length.next_multiple_of(page);
    let options = Options { positions, chunk: CHUNK, texts, unread: length, batch_invariant: false };
    let (mut scheduler, queue) = Scheduler::new(model, cpu, options)?;
    let (mut random, vocab) = (Random(11), model.config().spec.vocab as u64);
    let submit = |_| {
        let prompt = (0..depth).map(|_| (random.bits() % vocab) as u32).collect();
        let sampling = Sampling::default();
        Ok(queue.submit(Request { prompt, max_tokens: written, sampling, end_tokens: Vec::new() })?)
    };
    let handles = (0..texts).map(submit).collect::<Result<Vec<Handle>>>()?;
    let begun = Instant::now();
    let ended =
        |scheduler: &Scheduler<'_>| Failure::device("texts ended before they were timed", format!("{scheduler:?}"));
    let mut step = || {
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        if scheduler.step()? { Ok(()) } else { Err(ended(&scheduler)) }
    };
    while handles.iter().any(|handle| handle.unread() == 0) {
        step()?;
    }
    let begin_seconds = begun.elapsed().as_secs_f64();
    (0..WARM_UP).try_for_each(|_| step())?;
    let before: usize = handles.iter().map(Handle::unread).sum();
    let timed = |_| {
        let begun = Instant::now();
        step()?;
        Ok(begun.elapsed().as_secs_f64())
    };
    let each = (0..work.generate).map(timed).collect::<Result<Vec<f64>>>()?;
    let after: usize = handles.iter().map(Handle::unread).sum();
    if after - before != texts * work.generate {
        let got = format!("{} in {} steps", after - before, work.generate);
        return Err(Failure::device(format!("{texts} texts have not a token each a step"), got));
    }
    if profiled {
        progress.step(format!("profile of {texts} texts at once"));
    }
    let timed = |_| match (interrupt::cancelled(), scheduler.profile()?) {
        (true, _) => Err(Failure::interrupted()),
        (false, profile) => profile.ok_or_else(|| ended(&scheduler)),
    };
    let profiles = (0..profiles).map(timed).collect::<Result<Vec<_>>>()?.into_iter().skip(1).collect();
    let depth = depth as f64 + before as f64 / texts as f64;
    Ok(Steps { texts, depth, begin_seconds, each, profiles })
}

impl Steps {
    /// How many texts, what was profiled, and the microseconds of a step without a profile.
    pub fn profiles(&self) -> (usize, &[Profile], f64) {
        (self.texts, &self.profiles, 1e6 * Measured::of(self.each.clone()).median)
    }
}

impl Batch {
    /// Of steps on a machine.
    pub fn new(steps: Steps, model: &Model, machine: Option<&Machine>, ranks: usize) -> Self {
        let Steps { texts, depth, begin_seconds, each, .. } = steps;
        let limit = machine.map(|machine| StepLimit::new(machine, model, [texts, each.len(), ranks], depth));
        let step = Measured::of(each);
        let per_second = |seconds: f64| texts as f64 / seconds;
        Self {
            texts,
            depth_tokens: depth,
            begin_tokens_per_second: texts as f64 * depth / begin_seconds,
            tokens_per_second: per_second(step.median),
            spread: step.spread,
            step_milliseconds: 1e3 * step.median,
            limit,
            share: limit.map(|limit| limit.limit_seconds / step.median),
            share_in_turn: limit.map(|limit| limit.limit_in_turn_seconds / step.median),
        }
    }

    /// Two lines.
    pub fn human(&self) -> String {
        let (texts, speed, spread) = (self.texts, rate(self.tokens_per_second), 50.0 * self.spread);
        let (ms, depth, begin) = (self.step_milliseconds, self.depth_tokens, rate(self.begin_tokens_per_second));
        let mut out = format!(
            "batch    {texts:>5} texts   {speed:>8} tok/s  ±{spread:.0} %  {ms:.3} ms a step, after {depth:.0} tokens of each, \
             begun at {begin} tok/s\n"
        );
        if let (Some(limit), Some(share), Some(in_turn)) = (&self.limit, self.share, self.share_in_turn) {
            let most = super::per_second(texts as f64 / limit.limit_seconds);
            let (share, in_turn, work) = (100.0 * share, 100.0 * in_turn, limit.in_words());
            out +=
                &format!("  {share:.0} % of {most}: {work}; {in_turn:.0} % where products and attention take turns\n");
        }
        out
    }
}
