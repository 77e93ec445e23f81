//! What ranks that share a model tell each other: every rank runs the same steps on its part of the weights.

use std::fmt::Debug;
use std::sync::{Arc, Barrier, Mutex, PoisonError};

/// The ranks that share a model. Every rank makes the same calls in the same order.
pub trait Comm: Debug + Send + Sync {
    /// This rank's number, below [`Comm::size`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Every rank's values, in the order of ranks.
    fn all_gather(&self, values: &[f32]) -> Vec<Arc<[f32]>>;

    /// Adds up the ranks' values, element by element and in the order of ranks, so that all get the same bits.
    fn all_reduce(&self, values: &mut [f32]) {
        if self.size() < 2 {
            return;
        }
        let parts = self.all_gather(values);
        for (i, value) in values.iter_mut().enumerate() {
            *value = parts.iter().map(|part| part[i]).fold(0.0, |sum, part| sum + part);
        }
    }
}

/// One rank that holds everything.
#[derive(Clone, Copy, Debug)]
pub struct Alone;

impl Comm for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        1
    }

    fn all_gather(&self, values: &[f32]) -> Vec<Arc<[f32]>> {
        vec![values.into()]
    }
}

/// A thread of one process that shares a model with others.
#[derive(Clone, Debug)]
pub struct Thread {
    rank: usize,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    all: Barrier,
    parts: Mutex<Vec<Option<Arc<[f32]>>>>,
}

impl Thread {
    /// The members of a group, one for each thread, in the order of ranks.
    pub fn group(size: usize) -> Vec<Self> {
        let group = Arc::new(Group { all: Barrier::new(size), parts: Mutex::new(vec![None; size]) });
        (0..size).map(|rank| Self { rank, group: group.clone() }).collect()
    }
}

impl Comm for Thread {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.parts.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn all_gather(&self, values: &[f32]) -> Vec<Arc<[f32]>> {
        let parts = || self.group.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts()[self.rank] = Some(values.into());
        self.group.all.wait();
        let all = parts().iter().flatten().cloned().collect();
        // Nobody writes the next values before all have read these.
        self.group.all.wait();
        all
    }
}
