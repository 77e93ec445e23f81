//! Buffers that a device keeps from call to call.

use super::threads;
use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};
use std::thread::LocalKey;

/// Buffers of a kind: one set of a device, for callers one after the other, and one of each thread, for calls inside of tasks.
///
/// A caller holds the device's set while it waits for the team. A task has the team already: were it to wait for that set,
/// both would wait for ever.
pub(super) struct Kept<T: 'static> {
    device: Mutex<T>,
    thread: &'static LocalKey<RefCell<T>>,
}

impl<T: Default> Kept<T> {
    pub(super) fn new(thread: &'static LocalKey<RefCell<T>>) -> Self {
        Self { device: Mutex::default(), thread }
    }

    /// Calls `f` with the buffers; it must not ask for them again.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        if threads::in_task() {
            return self.thread.with_borrow_mut(f);
        }
        f(&mut self.device.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<T> std::fmt::Debug for Kept<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("buffers")
    }
}
