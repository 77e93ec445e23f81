//! Steps of many texts that begin before anybody but the device knows what they read.
//!
//! ```text
//! device:  ─ step ─ tokens ─ next step ──────────
//! host:                └▶ seen in its own memory ─ told to readers ─ looked at: who goes on?
//! ```
//!
//! So the device does not wait for the host. A text that ends with such a token was read once too often, which nobody sees: what is in
//! its pages behind its last position is read by nobody, and whoever has the pages next writes them later, in the same stream.

use crate::device::{Rows, TextId};
use crate::error::Result;

/// A step of many texts that has begun.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// What is read, in its places; empty: nothing has begun.
    rows: Vec<Row>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    text: TextId,
    /// Positions before this one.
    len: usize,
    token: Option<u32>,
}

impl Ahead {
    /// A step of these texts, each with the positions that it has already, has begun.
    pub(super) fn begun(&mut self, texts: impl Iterator<Item = (TextId, usize)>) {
        self.rows = texts.map(|(text, len)| Row { text, len, token: None }).collect();
    }

    /// These are the tokens that it reads; of texts that failed, none.
    pub(super) fn chosen(&mut self, tokens: &[Result<u32>]) {
        self.rows.iter_mut().zip(tokens).for_each(|(row, token)| row.token = token.as_ref().ok().copied());
    }

    /// Whether one has begun that was not asked for yet.
    pub(super) fn is_begun(&self) -> bool {
        !self.rows.is_empty()
    }

    /// The place of rows that it reads, of a text with so many positions.
    pub(super) fn place(&self, rows: &Rows<'_>, len: usize) -> Option<usize> {
        let [token] = *rows.tokens else { return None };
        self.rows.iter().position(|row| *row == Row { text: rows.text, len, token: Some(token) })
    }

    /// It was asked for, or is of no use.
    pub(super) fn forget(&mut self) {
        self.rows.clear();
    }
}
