//! Ranks that are threads of one process.

use super::Comm;
use crate::error::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A thread of one process that shares a model with others. When the last clone of a member is dropped, the others are told that it
/// has left.
#[derive(Clone, Debug)]
pub struct Thread(Arc<Member>);

#[derive(Debug)]
struct Member {
    rank: usize,
    group: Arc<Group>,
}

#[derive(Debug)]
struct Group {
    size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Rounds in which all ranks have given their values.
    rounds: u64,
    /// Values of the round that is under way.
    parts: Vec<Option<Arc<[f32]>>>,
    /// Those of the round before. It is replaced when all have given values again, and so have read these.
    last: Vec<Arc<[f32]>>,
    /// The first rank that has left, and why.
    left: Option<(usize, String)>,
}

impl State {
    /// Error: a rank has left.
    fn gone(&self) -> Result<()> {
        match &self.left {
            None => Ok(()),
            Some((rank, what)) => Err(Error::Rank { rank: *rank, what: what.clone() }),
        }
    }
}

impl Group {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave(&self, rank: usize, why: &str) {
        self.state().left.get_or_insert_with(|| (rank, why.to_owned()));
        self.changed.notify_all();
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.group.leave(self.rank, "has ended");
    }
}

impl Thread {
    /// The members of a group, one for each thread, in the order of ranks.
    pub fn group(size: usize) -> Vec<Self> {
        let state = Mutex::new(State { parts: vec![None; size], ..State::default() });
        let group = Arc::new(Group { size, state, changed: Condvar::new() });
        (0..size).map(|rank| Self(Arc::new(Member { rank, group: group.clone() }))).collect()
    }
}

impl Comm for Thread {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn size(&self) -> usize {
        self.0.group.size
    }

    fn all_gather(&self, values: &[f32]) -> Result<Vec<Arc<[f32]>>> {
        let Member { rank, group } = &*self.0;
        let mut state = group.state();
        // What others gave before one left is of a round that has come to nothing.
        state.gone()?;
        let round = state.rounds;
        state.parts[*rank] = Some(values.into());
        if state.parts.iter().all(Option::is_some) {
            state.last = state.parts.iter_mut().filter_map(Option::take).collect();
            state.rounds += 1;
            group.changed.notify_all();
            return Ok(state.last.clone());
        }
        loop {
            if state.rounds > round {
                return Ok(state.last.clone());
            }
            state.gone()?;
            state = group.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self, why: &str) {
        self.0.group.leave(self.0.rank, why);
    }

    fn look(&self) -> Result<()> {
        self.0.group.state().gone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whoever goes on after a rank has left is not given what others had said before.
    #[test]
    fn no_round_ends_after_a_rank_has_left() {
        let ranks = Thread::group(2);
        let first = ranks[0].clone();
        let waits = std::thread::spawn(move || first.all_gather(&[1.0]));
        while ranks[0].0.group.state().parts[0].is_none() {
            std::thread::yield_now();
        }
        ranks[1].leave("has no memory");
        for result in [waits.join().unwrap(), ranks[1].all_gather(&[2.0]), ranks[0].all_gather(&[3.0])] {
            assert!(matches!(&result, Err(Error::Rank { rank: 1, what }) if what == "has no memory"), "{result:?}");
        }
    }
}
