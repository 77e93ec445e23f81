//! Which pages of a cache of keys and values each sequence has: the books of it, without memory.
//!
//! A sequence has a table of pages of [`PAGE_LENGTH`] positions. Others may share its first ones; what would write to a shared page
//! takes another in its place, to which the device copies. A page that no sequence has any more goes to the next that needs one.
//!
//! *Source:* Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Positions in a page.
pub const PAGE_LENGTH: usize = 128;

const OP: &str = "kv cache";

#[cfg(test)]
mod tests;

/// The name of a sequence of positions in a cache. No two of a process are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// A page whose content goes to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Of this one.
    pub from: u32,
    /// To this one.
    pub to: u32,
}

/// The books of a cache.
#[derive(Debug)]
pub struct Pages {
    budget: usize,
    /// Pages that no sequence has, of those that one had; the last is taken first.
    free: Vec<u32>,
    /// Of each page that a sequence ever had, how many have it.
    owners: Vec<u32>,
    tables: BTreeMap<Sequence, Vec<u32>>,
}

impl Pages {
    /// Books of so many pages, at most 2³², that nobody has.
    pub fn new(budget: usize) -> Self {
        let budget = budget.min(u32::MAX as usize);
        Self { budget, free: Vec::new(), owners: Vec::new(), tables: BTreeMap::new() }
    }

    /// Pages in all.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Pages that no sequence has.
    pub fn free(&self) -> usize {
        self.budget - (self.owners.len() - self.free.len())
    }

    /// Numbers of pages stay below this when so many more are taken.
    pub fn numbered(&self, more: usize) -> usize {
        self.owners.len() + more.saturating_sub(self.free.len())
    }

    /// A new sequence, without pages.
    pub fn begin(&mut self) -> Sequence {
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let sequence = Sequence(BEGUN.fetch_add(1, Ordering::Relaxed));
        self.tables.insert(sequence, Vec::new());
        sequence
    }

    /// Forgets a sequence. *Errors:* it is none of these books.
    pub fn end(&mut self, sequence: Sequence) -> Result<()> {
        let pages = self.tables.remove(&sequence).ok_or_else(|| unknown(sequence))?;
        self.release(pages);
        Ok(())
    }

    /// The pages of a sequence: that of position `p` is number `p / PAGE_LENGTH`. *Errors:* it is none of these books.
    pub fn of(&self, sequence: Sequence) -> Result<&[u32]> {
        self.tables.get(&sequence).map(Vec::as_slice).ok_or_else(|| unknown(sequence))
    }

    /// A new sequence that has the first pages of another. *Errors:* the other is none of these books, or has not so many.
    pub fn share(&mut self, from: Sequence, pages: usize) -> Result<Sequence> {
        let of = self.of(from)?;
        let Some(shared) = of.get(..pages).map(<[u32]>::to_vec) else {
            return Err(Error::invalid(
                OP,
                format!("at most {} pages, which the other has", of.len()),
                pages.to_string(),
            ));
        };
        shared.iter().for_each(|&page| self.owners[page as usize] += 1);
        let sequence = self.begin();
        self.tables.insert(sequence, shared);
        Ok(sequence)
    }

    /// Pages that [`Pages::take`] would take; of a sequence that is none of these books, those of a new one.
    pub fn missing(&self, sequence: Sequence, first: usize, end: usize) -> usize {
        let has = self.tables.get(&sequence).map_or(0, Vec::len);
        let copied = end > first && self.shared(sequence, first / PAGE_LENGTH).is_some();
        end.div_ceil(PAGE_LENGTH).saturating_sub(has) + usize::from(copied)
    }

    /// Gives a sequence pages for positions from `first` to below `end`: new ones, and one in the place of that of `first` if others
    /// have it too, to which its content is to be copied. *Errors:* the sequence is none of these books; there are not so many pages,
    /// and it has what it had.
    pub fn take(&mut self, sequence: Sequence, first: usize, end: usize) -> Result<Option<Copied>> {
        self.of(sequence)?;
        if end <= first {
            return Ok(None);
        }
        let missing = self.missing(sequence, first, end);
        if missing > self.free() {
            let [needed, free] = [missing, self.free()].map(|pages| pages.saturating_mul(PAGE_LENGTH));
            return Err(Error::CacheFull { needed, free });
        }
        let shared = self.shared(sequence, first / PAGE_LENGTH);
        let mut taken: Vec<u32> = (0..missing).map(|_| self.page()).collect();
        let Some(table) = self.tables.get_mut(&sequence) else { return Err(unknown(sequence)) };
        let copied = shared.and_then(|from| Some(Copied { from, to: taken.pop()? }));
        if let Some(Copied { from, to }) = copied {
            table[first / PAGE_LENGTH] = to;
            self.owners[from as usize] -= 1;
        }
        table.append(&mut taken);
        Ok(copied)
    }

    /// Takes from a sequence all pages but so many of the first. *Errors:* it is none of these books.
    pub fn keep(&mut self, sequence: Sequence, pages: usize) -> Result<()> {
        let table = self.tables.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        let released = table.split_off(pages.min(table.len()));
        self.release(released);
        Ok(())
    }

    /// A page of a sequence, if others have it too.
    fn shared(&self, sequence: Sequence, index: usize) -> Option<u32> {
        let page = *self.tables.get(&sequence)?.get(index)?;
        (self.owners[page as usize] > 1).then_some(page)
    }

    /// A page for one sequence; the caller has seen that there is one.
    fn page(&mut self) -> u32 {
        if let Some(page) = self.free.pop() {
            self.owners[page as usize] = 1;
            return page;
        }
        self.owners.push(1);
        self.owners.len() as u32 - 1
    }

    /// Pages that one sequence less has.
    fn release(&mut self, pages: Vec<u32>) {
        for page in pages {
            self.owners[page as usize] -= 1;
            if self.owners[page as usize] == 0 {
                self.free.push(page);
            }
        }
    }
}

fn unknown(sequence: Sequence) -> Error {
    Error::invalid(OP, "a sequence that was begun in this cache and has not ended", format!("{sequence:?}"))
}
