//! What callers hold: a queue that takes texts, and a handle on each, which is read from any thread.

use super::Request;
use crate::error::{Error, Result};
use crate::generate::Finish;
use crate::sampling::Sampler;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};

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
    pub sampler: Sampler,
    pub writer: Writer,
}

/// What a reader is told.
#[derive(Debug)]
enum Event {
    Token(u32),
    Done(Finish),
    Failed(Error),
}

#[derive(Debug, Default)]
struct Shared {
    /// Tokens that were sent and not read.
    unread: AtomicUsize,
    cancelled: AtomicBool,
}

/// The scheduler's end of a text's stream.
#[derive(Debug)]
pub(super) struct Writer {
    events: Sender<Event>,
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

    pub fn token(&self, token: u32) {
        self.shared.unread.fetch_add(1, Ordering::SeqCst);
        self.send(Event::Token(token));
    }

    pub fn done(&self, finish: Finish) {
        self.send(Event::Done(finish));
    }

    pub fn failed(&self, error: Error) {
        self.send(Event::Failed(error));
    }

    /// A reader that is gone has cancelled its text.
    fn send(&self, event: Event) {
        let _ = self.events.send(event);
    }
}

/// Tells the scheduler when the last queue is gone.
#[derive(Debug)]
pub(super) struct Alive(Sender<Command>);

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
    pub(super) fn new(bounds: Bounds) -> (Self, Receiver<Command>, Weak<Alive>) {
        let (commands, received) = channel();
        let alive = Arc::new(Alive(commands.clone()));
        let weak = Arc::downgrade(&alive);
        (Self { commands, _alive: alive, bounds }, received, weak)
    }

    /// Hands a text over: it waits its turn. Errors, all at once: an empty prompt, ids beyond the vocabulary, a prompt that leaves
    /// no room for a token in the model's context or in the budget of keys and values, sampling options that make no sense, a
    /// scheduler that has ended.
    pub fn submit(&self, request: Request) -> Result<Handle> {
        let Bounds { vocab, longest, most_unread } = self.bounds;
        if request.prompt.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::UnknownToken { id, vocab });
        }
        if request.prompt.len() > longest {
            return Err(Error::ContextFull { limit: longest, got: request.prompt.len() });
        }
        let mut sampler = Sampler::new(request.sampling)?;
        sampler.saw(&request.prompt);
        let (events, received) = channel();
        let shared = Arc::new(Shared::default());
        let writer = Writer { events, shared: shared.clone(), most_unread };
        let submitted = Command::Submit(Box::new(Submitted { request, sampler, writer }));
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

impl Iterator for Handle {
    type Item = Result<u32>;

    fn next(&mut self) -> Option<Result<u32>> {
        if self.finish.is_some() {
            return None;
        }
        match self.events.recv() {
            Ok(Event::Token(token)) => {
                if self.shared.unread.fetch_sub(1, Ordering::SeqCst) >= self.most_unread {
                    // A scheduler that has ended waits for nothing.
                    let _ = self.commands.send(Command::Wake);
                }
                Some(Ok(token))
            }
            Ok(Event::Done(finish)) => {
                self.finish = Some(finish);
                None
            }
            Ok(Event::Failed(error)) => {
                self.finish = Some(Finish::Cancelled);
                Some(Err(error))
            }
            Err(_) => {
                self.finish = Some(Finish::Cancelled);
                Some(Err(Error::Stopped))
            }
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
    }
}
