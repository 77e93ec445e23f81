//! What ranks that share a model tell each other: every rank runs the same steps on its part of the weights.

mod tcp;
mod thread;

pub use tcp::{Rendezvous, Tcp};
pub use thread::Thread;

use crate::error::{Error, Result};
use std::fmt::Debug;
use std::sync::Arc;

/// The ranks that share a model. Every rank makes the same calls in the same order.
pub trait Comm: Debug + Send + Sync {
    /// This rank's number, below [`Comm::size`].
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn size(&self) -> usize;

    /// Every rank's values, in the order of ranks. Error: a rank has left, or is not heard of.
    fn all_gather(&self, values: &[f32]) -> Result<Vec<Arc<[f32]>>>;

    /// Tells the others why this rank leaves; what they wait for is an error then.
    fn leave(&self, why: &str);

    /// Looks whether all ranks are still there; waits for none. It may take some ms. Error: the rank that has left, or is not heard of.
    fn look(&self) -> Result<()>;

    /// Adds up the ranks' values, element by element and in the order of ranks, so that all get the same bits. Errors: those of
    /// [`Comm::all_gather`], ranks with values of other lengths.
    fn all_reduce(&self, values: &mut [f32]) -> Result<()> {
        if self.size() < 2 {
            return Ok(());
        }
        let parts = self.all_gather(values)?;
        if let Some(rank) = parts.iter().position(|part| part.len() != values.len()) {
            let what = format!("adds up {} numbers where this rank has {}", parts[rank].len(), values.len());
            return Err(Error::Rank { rank, what });
        }
        for (i, value) in values.iter_mut().enumerate() {
            *value = parts.iter().map(|part| part[i]).fold(0.0, |sum, part| sum + part);
        }
        Ok(())
    }

    /// Every rank's bytes. Errors: those of [`Comm::all_gather`].
    fn all_gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Numbers up to 255 are floats that stay what they are.
        let numbers: Vec<f32> = bytes.iter().map(|&byte| byte.into()).collect();
        let all = self.all_gather(&numbers)?;
        Ok(all.iter().map(|of_rank| of_rank.iter().map(|&number| number as u8).collect()).collect())
    }

    /// Waits until all ranks are here. Errors: those of [`Comm::all_gather`].
    fn wait(&self) -> Result<()> {
        if self.size() > 1 { self.all_gather(&[]).map(drop) } else { Ok(()) }
    }

    /// What every rank says of the same thing, which `what` names. Errors: those of [`Comm::all_gather`], a rank that tells of something else.
    fn all_say(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let named = [what.as_bytes(), &[0], own].concat();
        let all = if self.size() < 2 { vec![named] } else { self.all_gather_bytes(&named)? };
        let told = |(rank, said): (usize, Vec<u8>)| match said.strip_prefix([what.as_bytes(), &[0]].concat().as_slice())
        {
            Some(of_it) => Ok(of_it.to_vec()),
            None => {
                let what = format!("does something else, where rank {} compares the {what} of all", self.rank());
                Err(Error::Rank { rank, what })
            }
        };
        all.into_iter().enumerate().map(told).collect()
    }

    /// Makes sure that all ranks have the same of something, whose digest this rank's is. Errors: the first rank that has another one
    /// than rank 0, on every rank; those of [`Comm::all_say`].
    fn agree(&self, what: &str, digest: &[u8]) -> Result<()> {
        let all = self.all_say(what, digest)?;
        match all.iter().position(|other| *other != all[0]) {
            None => Ok(()),
            Some(rank) => Err(Error::Rank { rank, what: format!("has another {what} than rank 0") }),
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

    fn all_gather(&self, values: &[f32]) -> Result<Vec<Arc<[f32]>>> {
        Ok(vec![values.into()])
    }

    fn leave(&self, _: &str) {}

    fn look(&self) -> Result<()> {
        Ok(())
    }
}
