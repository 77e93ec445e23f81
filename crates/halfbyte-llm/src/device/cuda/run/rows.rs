//! Rows that go through the layers together, and whose they are.

use halfbyte::cuda::driver::View;
use std::ops::Range;

/// Rows that go through the layers together.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Rows<'a> {
    pub(in super::super) tokens: View<'a, u32>,
    /// Of each in its text.
    pub(in super::super) positions: View<'a, u32>,
    /// Positions that attention is laid out for, at least those that a text has.
    pub(in super::super) longest: usize,
    /// None: they are of the one text, which lies in the cache in order.
    pub(in super::super) texts: Option<Pages<'a>>,
}

/// Whose rows are whose, and where the texts lie in the cache: first those of one row each, then the others.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Pages<'a> {
    /// Where each row lies.
    pub(in super::super) slots: View<'a, u32>,
    /// Positions of the texts' last rows.
    pub(in super::super) last: View<'a, u32>,
    /// The pages of each text, as many of all.
    pub(in super::super) tables: View<'a, u32>,
    /// The rows of the texts that have several.
    pub(in super::super) chunks: &'a [Range<usize>],
}

impl<'a> Pages<'a> {
    pub(super) fn texts(&self) -> usize {
        self.last.len()
    }

    /// Of a range of texts.
    pub(super) fn tables_of(&self, texts: Range<usize>) -> View<'a, u32> {
        let width = self.tables.len() / self.texts().max(1);
        self.tables.slice(texts.start * width..texts.end * width)
    }
}
