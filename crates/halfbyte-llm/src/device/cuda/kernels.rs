//! Kernels that are loaded while weights are.

use super::PREFILL_TOKENS;
use super::projection::{self, Projection};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::sources::Instance;
use halfbyte::{Cuda, Float};
use std::collections::{HashSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Kernels that a model is going to need, as far as is known.
#[derive(Debug, Default)]
pub(super) struct Kernels {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    wanted: VecDeque<Instance>,
    /// Names of all that were ever wanted.
    known: HashSet<String>,
    /// Whether nothing more is loaded.
    ended: bool,
}

/// How long kernels are loaded.
pub(super) struct Until<'a>(&'a Kernels);

impl Drop for Until<'_> {
    fn drop(&mut self) {
        self.0.state().ended = true;
        self.0.changed.notify_one();
    }
}

impl Kernels {
    /// Those of a projection.
    pub(super) fn want(&self, cuda: &Cuda, projection: &Projection, x: Float) {
        // What cannot be planned is refused where it is asked for.
        let instances = projection::instances(cuda, std::iter::once(projection), x, PREFILL_TOKENS);
        let mut state = self.state();
        for instance in instances.unwrap_or_default() {
            if state.known.insert(instance.to_string()) {
                state.wanted.push_back(instance);
            }
        }
        self.changed.notify_one();
    }

    /// When this is dropped, nothing more is loaded: what is left is for whoever shows how far that is.
    pub(super) fn until_dropped(&self) -> Until<'_> {
        Until(self)
    }

    /// Loads kernels, the first of them, then what is wanted, until the end; says how long it worked. A kernel that cannot be
    /// had is told of where it is needed.
    pub(super) fn load(&self, gpu: &Gpu, first: &[Instance]) -> Duration {
        let mut worked = Duration::ZERO;
        {
            let mut state = self.state();
            state.wanted.extend(first.iter().cloned());
            state.known.extend(first.iter().map(Instance::to_string));
        }
        while let Some(instance) = self.next() {
            let begun = Instant::now();
            let _ = gpu.function(&instance);
            worked += begun.elapsed();
        }
        worked
    }

    /// The next one; None at the end.
    fn next(&self) -> Option<Instance> {
        let waiting = |state: &mut State| !state.ended && state.wanted.is_empty();
        let mut state = self.changed.wait_while(self.state(), waiting).unwrap_or_else(PoisonError::into_inner);
        if state.ended { None } else { state.wanted.pop_front() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_waited_for_after_the_end() {
        let kernels = Kernels::default();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| kernels.next());
            drop(kernels.until_dropped());
            assert!(waiting.join().is_ok_and(|next| next.is_none()));
        });
        let arch = halfbyte::cuda::sources::Arch::of([8, 0]);
        let first = halfbyte::cuda::nn::instances(arch, Some(64), &[halfbyte::kernel::KvType::F16]);
        kernels.state().wanted.extend(first);
        assert!(kernels.next().is_none());
    }
}
