//! A team of threads that waits for work by spinning a while before it sleeps.
//!
//! Decoding a token is dozens of products of tens of microseconds each. Waking sleeping threads for each would cost as
//! much as the products; a spinning team takes a job within a cache line's way from core to core.

use super::disjoint::DisjointMut;
use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// How often an idle thread looks for work before it sleeps: about a quarter of a millisecond.
const SPINS_BEFORE_SLEEP: u32 = 20_000;

thread_local! {
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread runs a task of a team: it must wait for nothing that a caller of [`Threads::run`] may hold.
pub(super) fn in_task() -> bool {
    IN_TASK.get()
}

/// A fixed team of threads, the caller among them.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<std::thread::JoinHandle<()>>,
    submit: Mutex<()>,
}

type Job = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Counts jobs; a change tells that there is one.
    epoch: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    tasks: AtomicUsize,
    next: AtomicUsize,
    /// Whether workers may enter the job.
    open: AtomicBool,
    /// Workers that are in the job, or trying the door.
    active: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is written only by the submitter, under the `submit` lock, while the door is shut and no worker is inside
// (`Finish` waited for that), and read by workers only after they found the door open, which happens after the write.
unsafe impl Sync for Shared {}
// SAFETY: as above; the pointer is to a `Sync` closure that outlives the job, since `run` waits for all workers.
unsafe impl Send for Shared {}

impl Threads {
    /// A team of `count` threads (at least 1), of which `count − 1` are started now. Error: the system starts no more.
    pub fn new(count: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            tasks: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            open: AtomicBool::new(false),
            active: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut team = Self { shared, workers: Vec::new(), submit: Mutex::new(()) };
        for i in 1..count.max(1) {
            let shared = Arc::clone(&team.shared);
            let name = format!("halfbyte-{i}");
            team.workers.push(std::thread::Builder::new().name(name).spawn(move || shared.work())?);
        }
        Ok(team)
    }

    /// Number of threads, the caller included.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(i, row)` for each row of so many elements, as [`Threads::run`] does; for none of rows without elements.
    pub(crate) fn run_rows<T: Send>(&self, rows: &mut [T], width: usize, task: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (width, count) = (width.max(1), rows.len() / width.max(1));
        let rows = DisjointMut::new(rows);
        // SAFETY: each row is of one task.
        self.run(count, &|i| task(i, unsafe { rows.range(i * width..(i + 1) * width) }));
    }

    /// Runs `task(0) … task(tasks − 1)`, each once, on all threads, and returns when all are done. It waits for no thread
    /// that took no task: on a busy machine the caller may well do them all.
    ///
    /// Which thread runs which is not defined, so results must not depend on it. Called from inside a task, it runs
    /// everything on the calling thread. A panic in a task is passed on.
    pub fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        if tasks <= 1 || self.workers.is_empty() || in_task() {
            (0..tasks).for_each(task);
            return;
        }
        let _one_at_a_time = lock(&self.submit);
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; workers use the pointer only while they are inside, and `Finish` shuts the
        // door and waits for the last of them before this call returns or unwinds.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(task) };
        // SAFETY: the door is shut and no one inside: no worker reads the job now.
        unsafe { *shared.job.get() = Some(job) };
        shared.tasks.store(tasks, Ordering::Relaxed);
        shared.next.store(0, Ordering::Relaxed);
        // A caller whose own task panicked has not read what became of the others'.
        shared.panicked.store(false, Ordering::Relaxed);
        shared.open.store(true, Ordering::SeqCst);
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if shared.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&shared.sleep);
            shared.wake.notify_all();
        }
        let finish = Finish(shared);
        shared.take_tasks(task);
        drop(finish);
        if shared.panicked.load(Ordering::Relaxed) {
            panic!("a task panicked on another thread");
        }
    }
}

/// Shuts the door and waits until every worker has left, also when the caller's own task panics.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        // Either a worker's count comes before this and is waited for, or the worker finds the door shut: both are
        // sequentially consistent.
        self.0.open.store(false, Ordering::SeqCst);
        while self.0.active.load(Ordering::SeqCst) != 0 {
            std::hint::spin_loop();
        }
    }
}

impl Shared {
    fn take_tasks(&self, task: &(dyn Fn(usize) + Sync)) {
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                IN_TASK.set(false);
            }
        }
        IN_TASK.set(true);
        let _leave = Leave;
        let tasks = self.tasks.load(Ordering::Relaxed);
        loop {
            let i = self.next.fetch_add(1, Ordering::Relaxed);
            if i >= tasks {
                return;
            }
            task(i);
        }
    }

    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_job(seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            self.active.fetch_add(1, Ordering::SeqCst);
            if self.open.load(Ordering::SeqCst) {
                // SAFETY: the door is open and this worker is counted, so that the job was written and `Finish` keeps the
                // closure alive until the count is taken back.
                let task = unsafe { (*self.job.get()).map(|job| &*job) };
                if let Some(task) = task {
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.take_tasks(task)));
                    if let Err(payload) = outcome {
                        self.panicked.store(true, Ordering::Relaxed);
                        // Its drop may panic, and then nobody would take the count back.
                        std::mem::forget(payload);
                    }
                }
            }
            self.active.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn wait_for_job(&self, seen: u64) -> u64 {
        for _ in 0..SPINS_BEFORE_SLEEP {
            let epoch = self.epoch.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            if epoch != seen {
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                return epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        {
            let _guard = lock(&self.shared.sleep);
            self.shared.wake.notify_all();
        }
        for worker in self.workers.drain(..) {
            // A worker's panic was already passed on by `run`.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Threads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a team of {} threads", self.count())
    }
}

fn lock(mutex: &Mutex<()>) -> MutexGuard<'_, ()> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_also_after_sleeping_and_nested() {
        let team = Threads::new(4).unwrap();
        for round in 0..200 {
            let hits: Vec<AtomicUsize> = (0..37).map(|_| AtomicUsize::new(0)).collect();
            team.run(37, &|i| {
                team.run(2, &|_| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 2));
            if round % 50 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Threads::new(3).unwrap();
        for _ in 0..20 {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                team.run(8, &|i| assert!(i != 5, "task five fails"));
            }));
            assert!(outcome.is_err());
            let sum = AtomicUsize::new(0);
            team.run(10, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        }
    }

    #[test]
    fn panics_of_all_threads_are_over_with_their_job() {
        let team = Threads::new(3).unwrap();
        for _ in 0..20 {
            // All tasks are begun before one fails: each thread has one.
            let all = std::sync::Barrier::new(3);
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                team.run(3, &|i| {
                    all.wait();
                    panic!("task {i} fails");
                });
            }));
            assert!(outcome.is_err());
            let sum = AtomicUsize::new(0);
            team.run(10, &|i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            assert_eq!(sum.load(Ordering::Relaxed), 45);
        }
    }
}
