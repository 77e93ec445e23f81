//! Faults for tests: an operation of this thread fails, or the process is dead from it on.

use std::cell::Cell;
use std::io;

/// What happens at an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Neither it nor any later one is done, as if the process had been killed before it.
    Killed,
    /// As [`Fault::Killed`], but a write leaves half of its bytes.
    KilledHalfway,
    /// The system refuses it with this error number, once.
    Refused(i32),
    /// A write takes half of its bytes, once, and says so.
    Short,
}

/// What happens to the operations of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The fault, and the operation, counted from 0, that it happens to.
    pub fault: Option<(usize, Fault)>,
    /// Whether the file system can exchange two names in one step.
    pub exchange: bool,
}

#[derive(Clone, Copy)]
struct State {
    plan: Plan,
    done: usize,
}

thread_local! {
    static STATE: Cell<Option<State>> = const { Cell::new(None) };
}

/// What becomes of an operation.
pub(super) enum Verdict {
    Go,
    /// A write takes half of its bytes.
    Half,
    Refuse(io::Error),
}

/// Runs something on this thread with faults, and counts its operations. Nothing is synced to the disk, which no test can
/// see.
pub fn with<T>(plan: Plan, run: impl FnOnce() -> T) -> (T, usize) {
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            STATE.set(None);
        }
    }
    STATE.set(Some(State { plan, done: 0 }));
    let end = End;
    let result = run();
    let done = STATE.get().map_or(0, |state| state.done);
    drop(end);
    (result, done)
}

/// What becomes of the next operation.
pub(super) fn next() -> Verdict {
    let Some(State { plan, done }) = STATE.get() else { return Verdict::Go };
    STATE.set(Some(State { plan, done: done + 1 }));
    match plan.fault {
        Some((at, Fault::Killed)) if done >= at => Verdict::Refuse(killed()),
        Some((at, Fault::KilledHalfway)) if done > at => Verdict::Refuse(killed()),
        Some((at, Fault::KilledHalfway | Fault::Short)) if done == at => Verdict::Half,
        Some((at, Fault::Refused(number))) if done == at => Verdict::Refuse(io::Error::from_raw_os_error(number)),
        _ => Verdict::Go,
    }
}

fn killed() -> io::Error {
    io::Error::other("the process was killed")
}

/// Whether syncs reach the disk.
pub(super) fn syncs() -> bool {
    STATE.get().is_none()
}

/// Whether the file system can exchange names.
pub(super) fn exchanges() -> bool {
    STATE.get().is_none_or(|state| state.plan.exchange)
}
