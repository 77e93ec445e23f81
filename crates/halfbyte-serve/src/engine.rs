//! The thread that writes a model's texts, and what others see of it.

use crate::error::{Error, Result};
use crate::grammar::STACK;
use halfbyte::cpu::Cpu;
use halfbyte_llm::Model;
use halfbyte_llm::schedule::{Counts, Options, Queue, Scheduler};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// How often it says how much is going on, while something is.
const TOLD_EVERY: Duration = Duration::from_millis(50);

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Counts at the end, once beginnings that were kept are let go of: pages that are not free then are lost.
    pub counts: Counts,
    /// Why it could not go on, if so.
    pub failure: Option<String>,
}

/// A model's texts being written, in a thread of their own.
#[derive(Debug)]
pub struct Engine {
    /// None once it is to end.
    queue: Mutex<Option<Queue>>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    counts: Mutex<Counts>,
    ended: Mutex<Option<Ended>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Begins. Errors: options of zero, memory that is short, a thread that the system does not give.
    pub fn start(name: &str, model: Arc<Model>, cpu: Arc<Cpu>, options: Options) -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let (begun, first) = channel();
        let of_thread = shared.clone();
        let run = move || {
            // What panics is told like an error, and a server without an engine ends.
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                write(&model, &cpu, options, &of_thread, &begun);
            }));
            if ran.is_err() {
                let failure = Some("it panicked".to_owned());
                *lock(&of_thread.ended) = Some(Ended { counts: *lock(&of_thread.counts), failure });
            }
        };
        let thread = Builder::new().name(format!("engine {name}")).stack_size(STACK).spawn(run);
        let thread = thread.map_err(|source| Error::Start { what: "a thread for a model", source })?;
        let refused = |why: String| Error::Model { model: name.to_owned(), why };
        let queue = first.recv().map_err(|_| refused("its thread panicked".to_owned()))?.map_err(refused)?;
        Ok(Self { queue: Mutex::new(Some(queue)), shared, thread: Mutex::new(Some(thread)) })
    }

    /// What takes texts; None once it is to end.
    pub fn queue(&self) -> Option<Queue> {
        lock(&self.queue).clone()
    }

    /// How much is going on: some ten milliseconds old at most.
    pub fn counts(&self) -> Counts {
        *lock(&self.shared.counts)
    }

    /// How it ended, if it has.
    pub fn ended(&self) -> Option<Ended> {
        lock(&self.shared.ended).clone()
    }

    /// Takes no more texts; it ends once those that it has have ended or were cancelled.
    pub fn close(&self) {
        drop(lock(&self.queue).take());
    }

    /// Waits for the end, after [`Engine::close`].
    pub fn join(&self) -> Ended {
        if let Some(thread) = lock(&self.thread).take() {
            // Its panics are caught within.
            let _ = thread.join();
        }
        let unknown = || Ended { counts: self.counts(), failure: Some("it left no word".to_owned()) };
        self.ended().unwrap_or_else(unknown)
    }
}

/// What the thread does.
fn write(
    model: &Model,
    cpu: &Cpu,
    options: Options,
    shared: &Shared,
    begun: &Sender<std::result::Result<Queue, String>>,
) {
    let (mut scheduler, queue) = match Scheduler::new(model, cpu, options) {
        Ok(both) => both,
        // Who began it waits for this.
        Err(why) => return drop(begun.send(Err(why.to_string()))),
    };
    *lock(&shared.counts) = scheduler.counts();
    let _ = begun.send(Ok(queue));
    let mut told: Option<Instant> = None;
    let ran = scheduler.run_and_tell(&mut |scheduler| {
        if !scheduler.is_idle() && told.is_some_and(|told| told.elapsed() < TOLD_EVERY) {
            return;
        }
        told = Some(Instant::now());
        *lock(&shared.counts) = scheduler.counts();
    });
    let forgot = ran.and_then(|()| scheduler.forget_prefixes());
    let counts = scheduler.counts();
    let failure = forgot.err().map(|why| why.to_string());
    if let Some(why) = &failure {
        tracing::error!("a model cannot go on: {why}");
    }
    *lock(&shared.counts) = counts;
    *lock(&shared.ended) = Some(Ended { counts, failure });
}
