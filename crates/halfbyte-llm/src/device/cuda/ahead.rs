//! Steps of many texts that begin before anybody but the device knows what they read.
//!
//! ```text
//! device:  ─ step ─ tokens ─ next step ──────────
//! host:              └▶ copied in a stream of its own ─ told to readers ─ looked at: who goes on?
//! ```
//!
//! So the device does not wait for the host. A text that ends with such a token was read once too often, which nobody sees: what is in
//! its pages behind its last position is read by nobody, and whoever has the pages next writes them later, in the same stream.

use crate::device::{Rows, TextId};
use crate::error::Result;
use halfbyte::Cuda;
use halfbyte::cuda::driver::{Buffer, Event, Stream, View};

/// A step that has begun.
#[derive(Debug)]
pub(super) struct Ahead {
    /// Tokens and bits of logits that were chosen last.
    results: Buffer<u32>,
    /// They are there.
    there: Event,
    /// Beside that of the steps.
    copies: Stream,
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
    /// Of up to so many texts.
    pub(super) fn new(cuda: &Cuda, texts: usize) -> Result<Self> {
        let context = cuda.gpu().context();
        Ok(Self {
            results: context.allocate(2 * texts)?,
            there: Event::new(context)?,
            copies: Stream::new(context)?,
            rows: Vec::new(),
        })
    }

    /// Keeps what was chosen from what the next step writes.
    pub(super) fn keep(&mut self, cuda: &Cuda, from: View<'_, u32>) -> Result<()> {
        let stream = cuda.stream();
        stream.copy(from, self.results.view_mut().slice(0..from.len()))?;
        Ok(stream.record(&self.there)?)
    }

    /// What was kept, while the next step goes on.
    pub(super) fn results(&self, to: &mut [u32]) -> Result<()> {
        self.copies.wait(&self.there)?;
        Ok(self.copies.download(self.results.view().slice(0..to.len()), to)?)
    }

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
