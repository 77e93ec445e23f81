//! Texts that wait or run.

use super::handle::{Wanted, Writer};
use crate::device::{TextId, Texts};
use crate::error::Result;
use crate::generate::Finish;

/// A text that waits or runs.
#[derive(Debug)]
pub(super) struct Live {
    /// Place in the line.
    pub(super) age: u64,
    /// Of the prompt, and what followed.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_len: usize,
    pub(super) max_tokens: usize,
    pub(super) end_tokens: Vec<u32>,
    pub(super) wanted: Wanted,
    pub(super) writer: Writer,
    /// Its keys and values, while it runs, and the tokens that they are of.
    pub(super) text: Option<TextId>,
    pub(super) read: usize,
    pub(super) finish: Option<Finish>,
}

impl Live {
    /// Tokens to read.
    pub(super) fn left(&self) -> usize {
        self.tokens.len() - self.read
    }
}

/// Pages for one more token of each text, if all may go on without anybody looking at their tokens; whether that is so.
pub(super) fn reserve_all(texts: &mut dyn Texts, running: &[Live], longest: usize) -> Result<bool> {
    let may = |live: &Live| live.wanted.logprobs().is_none() && live.read < longest;
    let goes_on = |live: &Live| live.tokens.len() - live.prompt_len + 1 < live.max_tokens;
    let all: Vec<(TextId, usize)> = running.iter().filter_map(|live| Some((live.text?, live.read + 1))).collect();
    let missing: usize = all.iter().map(|&(text, positions)| texts.missing_pages(text, positions)).sum();
    if !running.iter().all(may) || !running.iter().any(goes_on) || missing > texts.free_pages() {
        return Ok(false);
    }
    all.iter().try_for_each(|&(text, positions)| texts.reserve(text, positions))?;
    Ok(true)
}
