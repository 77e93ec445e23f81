//! Which pages of a cache of keys and values each sequence has: numbers only, for every device.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Positions in a page.
pub const PAGE_LENGTH: usize = 128;

/// The name of a sequence of positions in a cache of keys and values. No two of a process are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// A page that was replaced by one of the sequence's own, since others have it too: what it holds must be copied before the new one
/// is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Of this one.
    pub from: u32,
    /// To this one.
    pub to: u32,
}

/// The pages of a budget, numbered from 0, and the sequences that have them.
///
/// A sequence has a table: position `p` lies in page `table[p / PAGE_LENGTH]`. Sequences may share pages; a page that none has any
/// more goes to the next that needs one, the last freed first. A number is used for the first time only where all below it are taken,
/// so that a device may take memory as numbers grow.
///
/// *Source:* Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
#[derive(Debug)]
pub struct Pages {
    budget: usize,
    /// Pages that some sequence had and none has now.
    freed: Vec<u32>,
    /// Of each page that was ever used, the sequences that have it.
    owners: Vec<u32>,
    tables: BTreeMap<Sequence, Vec<u32>>,
}

impl Pages {
    /// Pages that are all free. There are never more than 2³² − 1.
    pub fn new(budget: usize) -> Self {
        let budget = budget.min(u32::MAX as usize);
        Self { budget, freed: Vec::new(), owners: Vec::new(), tables: BTreeMap::new() }
    }

    /// Pages in all.
    pub fn budget(&self) -> usize {
        self.budget
    }

    /// Pages that no sequence has.
    pub fn free(&self) -> usize {
        self.budget - (self.owners.len() - self.freed.len())
    }

    /// All numbers ever used are below this, once so many more pages are taken.
    pub fn used_with(&self, more: usize) -> usize {
        self.owners.len() + more.saturating_sub(self.freed.len())
    }

    /// A new sequence, without pages.
    pub fn begin(&mut self) -> Sequence {
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let sequence = Sequence(BEGUN.fetch_add(1, Ordering::Relaxed));
        self.tables.insert(sequence, Vec::new());
        sequence
    }

    /// Forgets a sequence. Error: there is none of this name.
    pub fn end(&mut self, sequence: Sequence) -> Result<()> {
        let table = self.tables.remove(&sequence).ok_or_else(|| unknown(sequence))?;
        self.release(table);
        Ok(())
    }

    /// A new sequence that has the first so many pages of another too. Error: there is none of this name, or it has fewer.
    pub fn share(&mut self, from: Sequence, pages: usize) -> Result<Sequence> {
        let of = self.of(from)?;
        let Some(shared) = of.get(..pages) else {
            let expected = format!("at most {} pages, which the other has", of.len());
            return Err(Error::invalid(OP, expected, pages.to_string()));
        };
        let shared = shared.to_vec();
        shared.iter().for_each(|&page| self.owners[page as usize] += 1);
        let sequence = self.begin();
        self.tables.insert(sequence, shared);
        Ok(sequence)
    }

    /// Pages that [`Pages::take`] would take.
    pub fn missing(&self, sequence: Sequence, first: usize, end: usize) -> usize {
        if end <= first {
            return 0;
        }
        let table = self.tables.get(&sequence).map_or(&[][..], Vec::as_slice);
        let end = end.div_ceil(PAGE_LENGTH);
        let written = table.get(first / PAGE_LENGTH..end.min(table.len())).unwrap_or(&[]);
        let shared = written.iter().filter(|&&page| self.owners[page as usize] > 1).count();
        end.saturating_sub(table.len()) + shared
    }

    /// Gives a sequence pages of its own for positions from `first` to below `end`, which will be written. What of the page of
    /// `first` comes before it must be copied where others have the page too. Error: there is no sequence of this name, or not so
    /// many pages are free; then none is taken.
    pub fn take(&mut self, sequence: Sequence, first: usize, end: usize) -> Result<Option<Copied>> {
        let missing = self.missing(sequence, first, end);
        let free = self.free();
        let Self { freed, owners, tables, .. } = self;
        let table = tables.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        if missing > free {
            let [needed, free] = [missing, free].map(|pages| pages.saturating_mul(PAGE_LENGTH));
            return Err(Error::CacheFull { needed, free });
        }
        let mut copied = None;
        if missing > 0 {
            let (first, end) = (first / PAGE_LENGTH, end.div_ceil(PAGE_LENGTH));
            let written = first.min(table.len())..end.min(table.len());
            for (i, page) in table[written].iter_mut().enumerate() {
                if owners[*page as usize] > 1 {
                    owners[*page as usize] -= 1;
                    let from = std::mem::replace(page, one(freed, owners));
                    copied = copied.or((i == 0).then_some(Copied { from, to: *page }));
                }
            }
            table.extend((table.len()..end).map(|_| one(freed, owners)));
        }
        Ok(copied)
    }

    /// Keeps the first so many pages of a sequence. Error: there is none of this name.
    pub fn keep(&mut self, sequence: Sequence, pages: usize) -> Result<()> {
        let table = self.tables.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        let released = table.split_off(pages.min(table.len()));
        self.release(released);
        Ok(())
    }

    /// A sequence's table. No page stands in it twice. Error: there is none of this name.
    pub fn of(&self, sequence: Sequence) -> Result<&[u32]> {
        self.tables.get(&sequence).map(Vec::as_slice).ok_or_else(|| unknown(sequence))
    }

    /// Pages that these sequences have together, one that several have counted once.
    pub fn of_all(&self, sequences: &[Sequence]) -> usize {
        let mut seen = vec![false; self.owners.len()];
        let tables = sequences.iter().filter_map(|sequence| self.tables.get(sequence));
        tables.flatten().filter(|&&page| !std::mem::replace(&mut seen[page as usize], true)).count()
    }

    /// Pages that one sequence less has.
    fn release(&mut self, pages: Vec<u32>) {
        for page in pages {
            let owners = &mut self.owners[page as usize];
            *owners -= 1;
            if *owners == 0 {
                self.freed.push(page);
            }
        }
    }
}

const OP: &str = "kv cache";

/// A free page, which one sequence has now.
fn one(freed: &mut Vec<u32>, owners: &mut Vec<u32>) -> u32 {
    let page = freed.pop().unwrap_or(owners.len() as u32);
    match owners.get_mut(page as usize) {
        Some(owners) => *owners = 1,
        None => owners.push(1),
    }
    page
}

/// The error of a name that no sequence has.
pub(crate) fn unknown(sequence: Sequence) -> Error {
    Error::invalid(OP, "a sequence that was begun in this cache and has not ended", format!("{sequence:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// Draws numbers below a bound, from a seed.
    fn draws(mut state: u64) -> impl FnMut(usize) -> usize {
        move |n| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        }
    }

    /// What pages hold, as a device has it: of each sequence, the marks that it wrote at its positions.
    struct Model {
        memory: BTreeMap<u32, [u64; PAGE_LENGTH]>,
        texts: Vec<(Sequence, Vec<u64>)>,
    }

    impl Model {
        /// Writes marks at positions from `first` on, as a device does after [`Pages::take`].
        fn write(&mut self, pages: &Pages, at: usize, first: usize, marks: &[u64], copied: Option<Copied>) {
            if let Some(Copied { from, to }) = copied {
                let page = self.memory[&from];
                self.memory.insert(to, page);
            }
            let (sequence, text) = &mut self.texts[at];
            let table = pages.of(*sequence).unwrap();
            text.truncate(first);
            text.extend(marks);
            for (p, &mark) in text.iter().enumerate().skip(first) {
                self.memory.entry(table[p / PAGE_LENGTH]).or_insert([0; PAGE_LENGTH])[p % PAGE_LENGTH] = mark;
            }
        }

        /// Every text reads what it wrote, and the pages are those that texts need.
        fn check(&self, pages: &Pages) {
            let mut had = BTreeSet::new();
            for (sequence, text) in &self.texts {
                let table = pages.of(*sequence).unwrap();
                assert_eq!(table.len(), text.len().div_ceil(PAGE_LENGTH));
                assert_eq!(table.iter().collect::<BTreeSet<_>>().len(), table.len(), "a page stands twice");
                for (p, mark) in text.iter().enumerate() {
                    assert_eq!(self.memory[&table[p / PAGE_LENGTH]][p % PAGE_LENGTH], *mark, "position {p}");
                }
                had.extend(table);
            }
            assert_eq!(pages.free() + had.len(), pages.budget());
            let all: Vec<Sequence> = self.texts.iter().map(|(sequence, _)| *sequence).collect();
            assert_eq!(pages.of_all(&all), had.len());
            assert!(had.iter().all(|&&page| (page as usize) < pages.used_with(0)));
            assert!(pages.used_with(0) <= pages.budget() && pages.used_with(pages.free()) == pages.budget());
        }
    }

    #[test]
    fn walks_leave_every_text_what_it_wrote_and_lose_no_page() {
        for seed in 0..40 {
            let mut below = draws(seed * 7919 + 1);
            let mut pages = Pages::new(1 + below(24));
            let mut model = Model { memory: BTreeMap::new(), texts: Vec::new() };
            let (mut copies, mut refused, mut marks) = (0, 0, 0);
            for _ in 0..400 {
                let at = below(model.texts.len().max(1));
                match below(9) {
                    _ if model.texts.is_empty() => model.texts.push((pages.begin(), Vec::new())),
                    0 => model.texts.push((pages.begin(), Vec::new())),
                    1 => pages.end(model.texts.swap_remove(at).0).unwrap(),
                    2 | 3 => {
                        let (from, text) = &model.texts[at];
                        let some = below(text.len() + 1);
                        let shared = pages.share(*from, some.div_ceil(PAGE_LENGTH)).unwrap();
                        let text = text[..some].to_vec();
                        model.texts.push((shared, text));
                    }
                    4 => {
                        let (sequence, text) = &mut model.texts[at];
                        text.truncate(below(text.len() + 1));
                        pages.keep(*sequence, text.len().div_ceil(PAGE_LENGTH)).unwrap();
                    }
                    _ => {
                        let (sequence, len) = (model.texts[at].0, model.texts[at].1.len());
                        // Mostly goes on, now and then writes what it has anew.
                        let first = if below(4) == 0 { below(len + 1) } else { len };
                        let end = len.max(first + [0, 1, 1, 7, 128, 300][below(6)]);
                        let (missing, free, used) =
                            (pages.missing(sequence, first, end), pages.free(), pages.used_with(0));
                        let before = pages.of(sequence).unwrap().to_vec();
                        match pages.take(sequence, first, end) {
                            Ok(copied) => {
                                assert_eq!(pages.free() + missing, free);
                                assert_eq!(pages.missing(sequence, first, end), 0);
                                copies += usize::from(copied.is_some());
                                marks += 1000;
                                let marks: Vec<u64> = (marks..).take(end - first).collect();
                                model.write(&pages, at, first, &marks, copied);
                            }
                            Err(Error::CacheFull { needed, free: positions }) => {
                                assert_eq!((needed, positions), (missing * PAGE_LENGTH, free * PAGE_LENGTH));
                                assert!(missing > free && pages.free() == free && pages.used_with(0) == used);
                                assert_eq!(pages.of(sequence).unwrap(), before);
                                refused += 1;
                            }
                            Err(other) => panic!("{other}"),
                        }
                    }
                }
                model.check(&pages);
            }
            assert!(copies + refused > 10, "seed {seed}: {copies} copies, {refused} refused");
            for (sequence, _) in model.texts {
                pages.end(sequence).unwrap();
            }
            assert_eq!(pages.free(), pages.budget());
        }
    }

    #[test]
    fn pages_freed_last_are_taken_first_and_numbers_grow_one_by_one() {
        let mut pages = Pages::new(5);
        let [a, b] = [0; 2].map(|_| pages.begin());
        assert_eq!(pages.take(a, 0, 3 * PAGE_LENGTH).unwrap(), None);
        assert_eq!((pages.of(a).unwrap(), pages.used_with(0), pages.used_with(2)), (&[0, 1, 2][..], 3, 5));
        pages.keep(a, 1).unwrap();
        assert_eq!((pages.free(), pages.used_with(2), pages.used_with(3)), (4, 3, 4));
        pages.take(b, 0, 3 * PAGE_LENGTH).unwrap();
        assert_eq!(pages.of(b).unwrap(), [2, 1, 3]);
        let c = pages.share(b, 2).unwrap();
        assert_eq!(pages.take(c, PAGE_LENGTH + 5, PAGE_LENGTH + 6).unwrap(), Some(Copied { from: 1, to: 4 }));
        assert_eq!((pages.of(c).unwrap(), pages.free()), (&[2, 4][..], 0));
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let (mut pages, mut other) = (Pages::new(2), Pages::new(usize::MAX));
        assert_eq!(other.budget(), u32::MAX as usize);
        let (sequence, ended, foreign) = (pages.begin(), pages.begin(), other.begin());
        pages.end(ended).unwrap();
        pages.take(sequence, 0, 1).unwrap();
        assert!(pages.share(sequence, 2).is_err());
        for none in [ended, foreign] {
            assert!(pages.end(none).is_err() && pages.share(none, 0).is_err() && pages.keep(none, 0).is_err());
            assert!(pages.take(none, 0, 1).is_err() && pages.take(none, 0, usize::MAX).is_err());
            assert!(pages.of(none).is_err());
        }
        let full = pages.take(sequence, 1, usize::MAX).unwrap_err();
        assert!(matches!(full, Error::CacheFull { free: PAGE_LENGTH, .. }), "{full}");
        assert_eq!(pages.free(), 1);
    }
}
