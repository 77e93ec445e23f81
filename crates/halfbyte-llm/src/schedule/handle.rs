//! What callers hold: a queue that takes texts, and a handle on each, which is read from any thread.

use super::{Chosen, Extras, Request};
use crate::error::{Error, Result};
use crate::generate::Finish;
use crate::sampling::{Sampler, Sampling};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

/// What the scheduler is told.
#[derive(Debug)]
pub(super) enum Command {
    Submit(Box<Submitted>),
    /// Something changed: a text was read or cancelled, or the last queue is gone.
    Wake,
}

/// A text on its way to the scheduler.
#[derive(Debug)]
pub(super) struct Submitted {
    pub request: Request,
    pub wanted: Wanted,
    pub writer: Writer,
}

/// What is wanted of a text.
#[derive(Debug)]
pub(super) enum Wanted {
    /// Tokens that follow it; perhaps how likely each was, with so many others.
    Tokens { sampler: Box<Sampler>, logprobs: Option<usize> },
    /// The vector after its last token.
    Vector,
}

impl Wanted {
    pub fn is_tokens(&self) -> bool {
        matches!(self, Self::Tokens { .. })
    }

    pub fn sampler(&mut self) -> Option<&mut Sampler> {
        match self {
            Self::Tokens { sampler, .. } => Some(sampler),
            Self::Vector => None,
        }
    }

    pub fn logprobs(&self) -> Option<usize> {
        match self {
            Self::Tokens { logprobs, .. } => *logprobs,
            Self::Vector => None,
        }
    }

    pub fn complete(&self) -> bool {
        matches!(self, Self::Tokens { sampler, .. } if sampler.complete())
    }
}

/// What a reader is told.
#[derive(Debug)]
enum Event {
    Token(Chosen),
    Vector(Vec<f32>),
    Done(Finish),
    Failed(Error),
}

#[derive(Debug, Default)]
struct Shared {
    /// Tokens that were sent and not read.
    unread: AtomicUsize,
    cancelled: AtomicBool,
    /// Of a reader that polls.
    waker: Mutex<Option<Waker>>,
}

impl Shared {
    fn wake(&self) {
        let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The scheduler's end of a text's stream.
#[derive(Debug)]
pub(super) struct Writer {
    /// None once it is dropped.
    events: Option<Sender<Event>>,
    shared: Arc<Shared>,
    most_unread: usize,
}

impl Writer {
    /// Whether the reader is so far behind that the text has to wait.
    pub fn is_full(&self) -> bool {
        self.shared.unread.load(Ordering::SeqCst) >= self.most_unread
    }

    pub fn is_cancelled(&self) -> bool {
        self.shared.cancelled.load(Ordering::SeqCst)
    }

    pub fn token(&self, chosen: Chosen) {
        self.shared.unread.fetch_add(1, Ordering::SeqCst);
        self.send(Event::Token(chosen));
    }

    pub fn vector(&self, vector: &[f32]) {
        self.send(Event::Vector(vector.to_vec()));
    }

    pub fn done(&self, finish: Finish) {
        self.send(Event::Done(finish));
    }

    pub fn failed(&self, error: Error) {
        self.send(Event::Failed(error));
    }

    /// A reader that is gone has cancelled its text.
    fn send(&self, event: Event) {
        if let Some(events) = &self.events {
            let _ = events.send(event);
        }
        self.shared.wake();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Before its reader looks again.
        self.events = None;
        self.shared.wake();
    }
}

/// Whether there are queues.
#[derive(Debug)]
pub(super) struct Queues(Weak<Alive>);

impl Queues {
    /// Whether all are gone: what they sent has arrived then.
    pub fn are_gone(&self) -> bool {
        let gone = self.0.strong_count() == 0;
        if gone {
            fence(Ordering::Acquire);
        }
        gone
    }
}

/// Tells the scheduler when the last queue is gone.
#[derive(Debug)]
struct Alive(Sender<Command>);

impl Drop for Alive {
    fn drop(&mut self) {
        let _ = self.0.send(Command::Wake);
    }
}

/// Bounds that a text is held to before it is taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub vocab: usize,
    /// Tokens that a text may have.
    pub longest: usize,
    pub most_unread: usize,
}

/// Takes texts, from any thread. The scheduler ends when all queues are gone and all texts have ended.
#[derive(Clone, Debug)]
pub struct Queue {
    commands: Sender<Command>,
    _alive: Arc<Alive>,
    bounds: Bounds,
}

impl Queue {
    pub(super) fn new(bounds: Bounds) -> (Self, Receiver<Command>, Queues) {
        let (commands, received) = channel();
        let alive = Arc::new(Alive(commands.clone()));
        let queues = Queues(Arc::downgrade(&alive));
        (Self { commands, _alive: alive, bounds }, received, queues)
    }

    /// Hands a text over: it waits its turn. Errors, all at once: an empty prompt, ids beyond the vocabulary, a prompt that leaves
    /// no room for a token in the model's context or in the budget of keys and values, sampling options that make no sense, a
    /// scheduler that has ended.
    pub fn submit(&self, request: Request) -> Result<Handle> {
        self.submit_with(request, Extras::default())
    }

    /// The same with what else is wanted. Errors also: a bias that is NaN or plus infinity.
    pub fn submit_with(&self, request: Request, extras: Extras) -> Result<Handle> {
        self.check(&request.prompt)?;
        let Extras { bias, constraint, logprobs } = extras;
        let mut sampler = Box::new(Sampler::new(request.sampling)?);
        sampler.set_bias(bias)?;
        constraint.into_iter().for_each(|constraint| sampler.set_constraint(constraint));
        sampler.saw(&request.prompt);
        self.hand_over(request, Wanted::Tokens { sampler, logprobs })
    }

    /// Hands over a text whose vector is wanted: the hidden state after its last token, behind the last norm. Errors: as
    /// [`Queue::submit`].
    pub fn submit_vector(&self, text: Vec<u32>) -> Result<VectorHandle> {
        self.check(&text)?;
        let request = Request { prompt: text, max_tokens: 0, sampling: Sampling::default(), end_tokens: Vec::new() };
        self.hand_over(request, Wanted::Vector).map(VectorHandle)
    }

    /// Tokens that a prompt may have, at most.
    pub fn longest_prompt(&self) -> usize {
        self.bounds.longest
    }

    fn check(&self, prompt: &[u32]) -> Result<()> {
        let Bounds { vocab, longest, .. } = self.bounds;
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::UnknownToken { id, vocab });
        }
        if prompt.len() > longest {
            return Err(Error::ContextFull { limit: longest, got: prompt.len() });
        }
        Ok(())
    }

    fn hand_over(&self, request: Request, wanted: Wanted) -> Result<Handle> {
        let Bounds { most_unread, .. } = self.bounds;
        let (events, received) = channel();
        let shared = Arc::new(Shared::default());
        let writer = Writer { events: Some(events), shared: shared.clone(), most_unread };
        let submitted = Command::Submit(Box::new(Submitted { request, wanted, writer }));
        self.commands.send(submitted).map_err(|_| Error::Stopped)?;
        Ok(Handle { events: received, shared, commands: self.commands.clone(), most_unread, finish: None })
    }
}

/// A text that was handed over: an iterator over its tokens, which waits for each. The token that ended the text is none of them.
/// Dropped, it cancels the text.
///
/// Errors: the model computed NaN or infinity for this text, or the scheduler has ended before it.
#[derive(Debug)]
pub struct Handle {
    events: Receiver<Event>,
    shared: Arc<Shared>,
    commands: Sender<Command>,
    most_unread: usize,
    finish: Option<Finish>,
}

impl Handle {
    /// All tokens that come, until the end. Errors: as those of the iterator.
    pub fn rest(&mut self) -> Result<Vec<u32>> {
        self.collect()
    }

    /// Tokens that wait to be read.
    pub fn unread(&self) -> usize {
        self.shared.unread.load(Ordering::SeqCst)
    }

    /// Why the text ended, once the iterator has said that it has.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Ends the text before its next token; its pages are free for others then.
    pub fn cancel(&self) {
        self.shared.cancelled.store(true, Ordering::SeqCst);
        // A scheduler that has ended has nothing to cancel.
        let _ = self.commands.send(Command::Wake);
    }
}

impl Handle {
    /// The next token, or None at the end, as the iterator gives them; what `context` belongs to is woken when there is one.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Chosen>>> {
        self.poll_event(context).map(|event| self.token(event?))
    }

    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        if self.finish.is_some() {
            return Poll::Ready(None);
        }
        // What is sent after this wakes.
        *self.shared.waker.lock().unwrap_or_else(PoisonError::into_inner) = Some(context.waker().clone());
        match self.events.try_recv() {
            Ok(event) => Poll::Ready(self.take(event)),
            Err(TryRecvError::Empty) => Poll::Pending,
            Err(TryRecvError::Disconnected) => Poll::Ready(self.take(Event::Failed(Error::Stopped))),
        }
    }

    fn next_event(&mut self) -> Option<Event> {
        if self.finish.is_some() {
            return None;
        }
        let event = self.events.recv().unwrap_or(Event::Failed(Error::Stopped));
        self.take(event)
    }

    /// Takes note of an event; None: the text has ended.
    fn take(&mut self, event: Event) -> Option<Event> {
        match event {
            Event::Done(finish) => {
                self.finish = Some(finish);
                return None;
            }
            Event::Failed(_) => self.finish = Some(Finish::Cancelled),
            Event::Vector(_) => {}
            Event::Token(_) => {
                if self.shared.unread.fetch_sub(1, Ordering::SeqCst) >= self.most_unread {
                    // A scheduler that has ended waits for nothing.
                    let _ = self.commands.send(Command::Wake);
                }
            }
        }
        Some(event)
    }

    fn token(&self, event: Event) -> Option<Result<Chosen>> {
        match event {
            Event::Token(chosen) => Some(Ok(chosen)),
            Event::Failed(error) => Some(Err(error)),
            // Of a text that is written there are no others.
            Event::Vector(_) | Event::Done(_) => None,
        }
    }
}

impl Iterator for Handle {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        let event = self.next_event()?;
        self.token(event).map(|chosen| chosen.map(|chosen| chosen.token))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// A text whose vector is wanted. Dropped, it cancels the text.
#[derive(Debug)]
pub struct VectorHandle(Handle);

impl VectorHandle {
    /// The vector `[hidden]`, which is waited for. Errors: the scheduler has ended before it.
    pub fn wait(mut self) -> Result<Vec<f32>> {
        let event = self.0.next_event();
        Self::vector(event)
    }

    /// The same for what polls.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<f32>>> {
        self.0.poll_event(context).map(Self::vector)
    }

    fn vector(event: Option<Event>) -> Result<Vec<f32>> {
        match event {
            Some(Event::Vector(vector)) => Ok(vector),
            Some(Event::Failed(error)) => Err(error),
            // It was cancelled.
            Some(Event::Token(_) | Event::Done(_)) | None => Err(Error::Cancelled),
        }
    }
}
