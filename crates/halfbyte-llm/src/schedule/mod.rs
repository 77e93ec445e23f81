//! Many texts at once in one model: continuous batching.
//!
//! ```text
//! Queue::submit ──▶ waiting ──admitted: pages for all its tokens──▶ running ──▶ Handle, an iterator
//!                      ▲                                               │
//!                      └── preempted: its pages are needed ────────────┘
//! ```
//!
//! A step takes one token of each running text that has one to read, and of prompts as many as a chunk has: a text that joins delays
//! the others by no more than its chunk. First come, first served. Keys and values lie in pages of a fixed budget; whole pages of
//! a beginning that texts have in common are shared, also with texts that have ended as long as nobody needs their pages. Where
//! pages run out, they are taken in this order: of texts that have ended, of texts whose readers are behind, of the text that came
//! last. A text that lost its pages waits at its old place and is read again later; nobody sees that but by the time it takes.
//!
//! A reader that stops reading stops its own text only. The device is behind a trait (`device::Texts`).
//!
//! ```no_run
//! use halfbyte::cpu::Cpu;
//! use halfbyte_llm::schedule::{Options, Request, Scheduler};
//! use halfbyte_llm::{LoadOptions, Model, Sampling, Tokenizer};
//! use std::path::Path;
//!
//! # fn main() -> halfbyte_llm::Result<()> {
//! let folder = Path::new("models/stdlib-11m");
//! let (cpu, tokenizer) = (Cpu::all_threads()?, Tokenizer::from_folder(folder)?);
//! let model = Model::load(folder, &LoadOptions::default())?;
//! let (mut scheduler, queue) = Scheduler::new(&model, &cpu, Options::default())?;
//! let submit = |text: &str| {
//!     let prompt = tokenizer.encode_prompt(text, model.config().bos)?;
//!     let (sampling, end_tokens) = (Sampling::default(), model.config().eos.clone());
//!     queue.submit(Request { prompt, max_tokens: 64, sampling, end_tokens })
//! };
//! let handles = [submit("def read(")?, submit("import ")?];
//! drop(queue);
//! std::thread::scope(|scope| {
//!     let running = scope.spawn(|| scheduler.run());
//!     for mut handle in handles {
//!         println!("{}", tokenizer.decode(&handle.rest()?)?);
//!     }
//!     running.join().unwrap()
//! })
//! # }
//! ```
//!
//! *Source:* Yu et al., "Orca", 2022; Kwon et al., "Efficient Memory Management for Large Language Model Serving with
//! PagedAttention", 2023; Agrawal et al., "SARATHI: Efficient LLM Inference by Piggybacking Decodes with Chunked Prefills", 2023.

mod handle;
mod live;
mod options;
mod prefixes;
mod profile;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod toy;

pub use handle::{Handle, Queue, VectorHandle};
pub use options::{Chosen, Counts, Extras, Options, Request};

use crate::config::Config;
use crate::device::{Room, Rows, TextId, Texts};
use crate::engine::Model;
use crate::error::{Error, Result};
use crate::generate::Finish;
use crate::profile::Profile;
use crate::sampling::{LogProbs, Sampler};
use halfbyte::cpu::Cpu;
use handle::{Bounds, Command, Queues, Submitted, Wanted};
use live::{Live, reserve_all};
use prefixes::{Prefixes, least_common_multiple};
use std::collections::VecDeque;
use std::sync::mpsc::Receiver;

/// Writes many texts in one model, a step at a time.
#[derive(Debug)]
pub struct Scheduler<'m> {
    texts: Box<dyn Texts + 'm>,
    options: Options,
    bounds: Bounds,
    commands: Receiver<Command>,
    queues: Queues,
    begun: u64,
    /// In the order in which they came.
    waiting: VecDeque<Live>,
    running: Vec<Live>,
    prefixes: Prefixes,
    /// What was done; the rest of it is counted when it is asked for.
    done: Counts,
    /// Where steps are timed.
    timed: Option<Profile>,
    /// Kept to be used again.
    numbers: Vec<f32>,
}

impl<'m> Scheduler<'m> {
    /// A scheduler with the queue of its texts. Errors: options of zero, memory that is short.
    pub fn new(model: &'m Model, cpu: &'m Cpu, options: Options) -> Result<(Self, Queue)> {
        let Config { spec, .. } = model.config();
        let longest = spec.short_context();
        let begin = || {
            let Options { positions, chunk, texts, .. } = options;
            let rows = chunk.saturating_add(texts);
            model.begin_many(cpu, Room { positions, longest: longest.min(positions), texts, rows })
        };
        Self::over(begin, spec.vocab, longest, options)
    }

    /// The same over any texts with these bounds, which are begun once the options are found to be good.
    fn over(
        begin: impl FnOnce() -> Result<Box<dyn Texts + 'm>>,
        vocab: usize,
        max_context: usize,
        options: Options,
    ) -> Result<(Self, Queue)> {
        let Options { positions, chunk, texts, unread, .. } = options;
        if [positions, chunk, texts, unread].contains(&0) {
            return Err(Error::invalid("many texts", "options of at least 1", format!("{options:?}")));
        }
        let texts = begin()?;
        // Devices have room for a text of so many, and pages for whole ones of them.
        let longest = max_context.min(positions).min(texts.pages().saturating_mul(texts.page_length()));
        let bounds = Bounds { vocab, longest, most_unread: unread };
        let (queue, commands, queues) = Queue::new(bounds);
        let scheduler = Self {
            texts,
            options,
            bounds,
            commands,
            queues,
            begun: 0,
            waiting: VecDeque::new(),
            running: Vec::new(),
            prefixes: Prefixes::default(),
            done: Counts::default(),
            timed: None,
            numbers: Vec::new(),
        };
        Ok((scheduler, queue))
    }

    /// Steps until all queues are gone and all texts have ended; waits where there is nothing to do. Errors: as
    /// [`Scheduler::step`].
    pub fn run(&mut self) -> Result<()> {
        self.run_and_tell(&mut |_| {})
    }

    /// The same; `tell` is called after each step and before waiting.
    pub fn run_and_tell(&mut self, tell: &mut dyn FnMut(&Self)) -> Result<()> {
        loop {
            let alone = self.queues.are_gone();
            let went_on = self.step()?;
            tell(self);
            if went_on {
                continue;
            }
            let idle = self.is_idle();
            if idle && alone {
                return Ok(());
            }
            // What came before the last queue went is not known yet.
            if !alone && self.queues.are_gone() {
                continue;
            }
            // Handles and queues that are all gone have cancelled what they had.
            match self.commands.recv() {
                Ok(command) => self.take(command),
                Err(_) if idle => return Ok(()),
                Err(_) => {}
            }
        }
    }

    /// Reads the next tokens of all texts that have some; false: there is nothing to do until a text comes, or a reader reads.
    ///
    /// Errors: the device refuses, or memory is short beyond the budget; the scheduler is of no use then, and the readers of its
    /// texts are told when it is dropped.
    pub fn step(&mut self) -> Result<bool> {
        while let Ok(command) = self.commands.try_recv() {
            self.take(command);
        }
        self.end_cancelled()?;
        let mut parts = self.decodes()?;
        // The device reads these already: others wait for their turn, a step.
        if parts.is_empty() || !self.texts.is_ahead() {
            self.prompts(&mut parts)?;
        }
        if parts.is_empty() {
            return Ok(false);
        }
        // Those whose last token is read come first: logits are wanted of them.
        let mut parts: Vec<(usize, usize)> =
            parts.into_iter().filter_map(|(age, count)| Some((self.place(age)?, count))).collect();
        // Of these, those that tokens are chosen for.
        let order = |&(i, count): &(usize, usize)| match &self.running[i] {
            live if live.left() > count => 2,
            live if live.wanted.is_tokens() => 0,
            _ => 1,
        };
        parts.sort_by_key(order);
        match self.options.batch_invariant {
            false => self.read(&parts)?,
            true => parts.iter().try_for_each(|part| self.read(&[*part]))?,
        }
        while let Some((i, finish)) = self.running.iter().enumerate().find_map(|(i, live)| Some((i, live.finish?))) {
            self.finish(i, finish)?;
        }
        Ok(true)
    }

    /// Pages of keys and values in all.
    pub fn pages(&self) -> usize {
        self.texts.pages()
    }

    /// Of these, the ones that no text has, running or ended.
    pub fn free_pages(&self) -> usize {
        self.texts.free_pages()
    }

    /// How often a text lost its pages to others.
    pub fn preempted(&self) -> u64 {
        self.done.preempted
    }

    /// Whether no text waits or runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// How much is going on, and what was done.
    pub fn counts(&self) -> Counts {
        let running: Vec<TextId> = self.running.iter().filter_map(|live| live.text).collect();
        Counts {
            waiting: self.waiting.len(),
            running: self.running.len(),
            pages: self.texts.pages(),
            free_pages: self.texts.free_pages(),
            used_pages: self.texts.pages_of(&running),
            ..self.done
        }
    }

    /// Lets go of the beginnings that texts which have ended left for others.
    pub fn forget_prefixes(&mut self) -> Result<()> {
        while self.prefixes.evict(self.texts.as_mut())? {}
        Ok(())
    }

    fn take(&mut self, command: Command) {
        let Command::Submit(submitted) = command else { return };
        let Submitted { request, wanted, writer } = *submitted;
        let Request { prompt, max_tokens, end_tokens, .. } = request;
        if max_tokens == 0 && !matches!(wanted, Wanted::Vector) {
            return writer.done(Finish::Length);
        }
        let (age, prompt_len) = (self.begun, prompt.len());
        self.begun += 1;
        self.waiting.push_back(Live {
            age,
            tokens: prompt,
            prompt_len,
            max_tokens,
            end_tokens,
            wanted,
            writer,
            text: None,
            read: 0,
            finish: None,
        });
    }

    fn place(&self, age: u64) -> Option<usize> {
        self.running.iter().position(|live| live.age == age)
    }

    fn end_cancelled(&mut self) -> Result<()> {
        self.waiting.retain(|live| {
            let cancelled = live.writer.is_cancelled();
            if cancelled {
                live.writer.done(Finish::Cancelled);
            }
            !cancelled
        });
        while let Some(i) = self.running.iter().position(|live| live.writer.is_cancelled()) {
            self.finish(i, Finish::Cancelled)?;
        }
        Ok(())
    }

    /// Texts with one token to read, the oldest first: each has a page for it, or is no more running.
    fn decodes(&mut self) -> Result<Vec<(u64, usize)>> {
        let goes_on = |live: &&Live| live.left() == 1 && !live.writer.is_full();
        let ages: Vec<u64> = self.running.iter().filter(goes_on).map(|live| live.age).collect();
        let mut parts = Vec::new();
        for age in ages {
            if self.place(age).is_some() && self.make_room(age)? {
                parts.push((age, 1));
            }
        }
        Ok(parts)
    }

    /// Tokens of prompts, up to a chunk: of running texts, then of those that are admitted.
    fn prompts(&mut self, parts: &mut Vec<(u64, usize)>) -> Result<()> {
        let mut budget = self.options.chunk;
        let ages = self.running.iter().filter(|live| live.left() > 1).map(|live| live.age);
        for age in ages.collect::<Vec<_>>() {
            self.add_chunk(age, parts, &mut budget);
        }
        while budget > 0 {
            let Some(live) = self.waiting.iter().find(|live| !live.writer.is_full()) else { break };
            let age = live.age;
            // A text whose reader is behind keeps no other from running.
            if self.running.len() >= self.options.texts && !self.preempt(|live| live.writer.is_full())? {
                break;
            }
            let Some(i) = self.waiting.iter().position(|live| live.age == age) else { break };
            if !self.admit(i)? {
                break;
            }
            self.add_chunk(age, parts, &mut budget);
        }
        Ok(())
    }

    fn add_chunk(&self, age: u64, parts: &mut Vec<(u64, usize)>, budget: &mut usize) {
        let Some(live) = self.place(age).map(|i| &self.running[i]) else { return };
        let chunk = self.options.chunk;
        let count = match self.options.batch_invariant {
            false => live.left().min(*budget),
            // As alone: prompts are cut at multiples of the chunk, what followed was read token by token.
            true if live.read < live.prompt_len => (chunk - live.read % chunk).min(live.prompt_len - live.read),
            true => 1,
        };
        if count <= *budget && count > 0 {
            *budget -= count;
            parts.push((age, count));
        }
    }

    /// Moves a text from the line to those that run, with pages for all its tokens; false if there are none for it.
    fn admit(&mut self, i: usize) -> Result<bool> {
        let Self { waiting, running, texts, prefixes, options, .. } = self;
        let Some(live) = waiting.get(i) else { return Ok(false) };
        let unit = match options.batch_invariant {
            false => texts.page_length(),
            true => least_common_multiple(texts.page_length(), options.chunk),
        };
        let alive = running.iter().filter_map(|other| {
            let sure = if options.batch_invariant { other.read.min(other.prompt_len) } else { other.read };
            Some((other.text?, &other.tokens[..sure]))
        });
        let (text, read) = match prefixes.longest(&live.tokens[..live.tokens.len() - 1], alive, unit) {
            Some((from, positions)) => (texts.share(from, positions)?, positions),
            None => (texts.begin(), 0),
        };
        let (age, len) = (live.age, live.tokens.len());
        // Pages of texts that have ended, and of those whose readers are behind, are taken only where that makes room enough.
        let stays = running.iter().filter(|other| !other.writer.is_full()).filter_map(|other| other.text);
        let staying: Vec<TextId> = stays.chain([text]).collect();
        if texts.missing_pages(text, len) > texts.pages() - texts.pages_of(&staying) {
            return texts.end(text).map(|()| false);
        }
        while self.texts.missing_pages(text, len) > self.texts.free_pages() {
            if !self.prefixes.evict(self.texts.as_mut())? && !self.preempt(|live| live.writer.is_full())? {
                self.texts.end(text)?;
                return Ok(false);
            }
        }
        // Texts that were preempted have gone to the line, each to its place.
        let place = self.waiting.iter().position(|live| live.age == age);
        let Some(mut live) = place.and_then(|i| self.waiting.remove(i)) else {
            return self.texts.end(text).map(|()| false);
        };
        self.texts.reserve(text, len)?;
        self.done.shared_tokens += read as u64;
        (live.text, live.read) = (Some(text), read);
        let place = self.running.partition_point(|other| other.age < live.age);
        self.running.insert(place, live);
        Ok(true)
    }

    /// A page for a text's next token; false if the text itself had to go.
    fn make_room(&mut self, age: u64) -> Result<bool> {
        loop {
            let Some(live) = self.place(age).map(|i| &self.running[i]) else { return Ok(false) };
            let Some(text) = live.text else { return Ok(false) };
            let positions = live.read + 1;
            if self.texts.missing_pages(text, positions) <= self.texts.free_pages() {
                self.texts.reserve(text, positions)?;
                return Ok(true);
            }
            let alone = self.running.len() == 1;
            let freed = self.prefixes.evict(self.texts.as_mut())?
                || self.preempt(|live| live.writer.is_full() && live.age != age)?
                || (!alone && self.preempt(|live| live.age >= age)?);
            if !freed {
                let (page, free) = (self.texts.page_length(), self.texts.free_pages());
                return Err(halfbyte::Error::CacheFull { needed: page, free: free * page }.into());
            }
        }
    }

    /// Takes the pages of the last text that is such a one; it waits at its old place. False: there is none.
    fn preempt(&mut self, such: impl Fn(&Live) -> bool) -> Result<bool> {
        let Some(i) = self.running.iter().rposition(such) else { return Ok(false) };
        let mut live = self.running.remove(i);
        if let Some(text) = live.text.take() {
            self.texts.end(text)?;
        }
        live.read = 0;
        self.done.preempted += 1;
        let place = self.waiting.partition_point(|other| other.age < live.age);
        self.waiting.insert(place, live);
        Ok(true)
    }

    /// Reads tokens of running texts; where the last one was read, chooses what follows, or hands the vector on.
    fn read(&mut self, parts: &[(usize, usize)]) -> Result<()> {
        let Self { texts, running, waiting, options, bounds, done, timed, numbers, .. } = self;
        let ended = parts.iter().filter(|&&(i, count)| running[i].left() == count).count();
        let rows = parts.iter().filter_map(|&(i, count)| {
            let live = &running[i];
            Some(Rows { text: live.text?, tokens: &live.tokens[live.read..live.read + count] })
        });
        let rows: Vec<Rows<'_>> = rows.collect();
        match timed {
            None => texts.read(&rows, ended)?,
            Some(profile) => profile.append(texts.profile(&rows, ended)?),
        }
        for &(i, count) in parts {
            running[i].read += count;
            done.read_tokens += count as u64;
        }
        done.steps += 1;
        let written = parts[..ended].iter().filter(|&&(i, _)| running[i].wanted.is_tokens()).count();
        let (written, vectors) = (&parts[..written], &parts[written..ended]);

        // Who waits could join with the next step, unless all places are taken.
        let nobody_joins = waiting.is_empty() || running.len() >= options.texts;
        let ahead = !options.batch_invariant
            && nobody_joins
            && written.len() == running.len()
            && reserve_all(texts.as_mut(), running, bounds.longest)?;
        let mut samplers: Vec<Option<&mut Sampler>> = running.iter_mut().map(|live| live.wanted.sampler()).collect();
        let mut samplers: Vec<&mut Sampler> = written.iter().filter_map(|&(i, _)| samplers[i].take()).collect();
        let chosen = texts.choose(&mut samplers, ahead)?;
        done.chosen_tokens += chosen.len() as u64;
        if written.iter().any(|&(i, _)| running[i].wanted.logprobs().is_some()) {
            texts.logits(numbers)?;
        }
        for (at, (&(i, _), chosen)) in written.iter().zip(chosen).enumerate() {
            let live = &mut running[i];
            let logits = || numbers.get(at * bounds.vocab..(at + 1) * bounds.vocab).unwrap_or_default();
            let top = live.wanted.logprobs();
            let chosen = chosen.and_then(|token| {
                let ends = live.end_tokens.contains(&token);
                let logprobs = top.filter(|_| !ends).map(|top| LogProbs::of(logits(), token, top)).transpose()?;
                Ok((Chosen { token, logprobs }, ends))
            });
            live.finish = match chosen {
                Err(error) => {
                    live.writer.failed(error);
                    Some(Finish::Cancelled)
                }
                Ok((_, true)) => Some(Finish::End),
                Ok((chosen, false)) => {
                    live.tokens.push(chosen.token);
                    live.writer.token(chosen);
                    let written = live.tokens.len() - live.prompt_len;
                    let ended = live.wanted.complete().then_some(Finish::End);
                    let full = (live.tokens.len() > bounds.longest).then_some(Finish::Context);
                    ended.or((written == live.max_tokens).then_some(Finish::Length)).or(full)
                }
            };
        }
        if !vectors.is_empty() {
            texts.vectors(numbers)?;
            let hidden = numbers.len() / ended;
            for (vector, &(i, _)) in numbers.chunks_exact(hidden.max(1)).skip(written.len()).zip(vectors) {
                running[i].writer.vector(vector);
                running[i].finish = Some(Finish::Length);
            }
        }
        Ok(())
    }

    /// Ends a running text; whole pages of what it read are left for others.
    fn finish(&mut self, i: usize, finish: Finish) -> Result<()> {
        let mut live = self.running.remove(i);
        live.writer.done(finish);
        let Some(text) = live.text else { return Ok(()) };
        let sure = if self.options.batch_invariant { live.read.min(live.prompt_len) } else { live.read };
        live.tokens.truncate(sure);
        self.prefixes.keep(self.texts.as_mut(), text, live.tokens)
    }
}
