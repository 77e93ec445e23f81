//! Beginnings of texts whose keys and values are there: of those that run, and of some that have ended.

use crate::device::{TextId, Texts};
use crate::error::Result;
use std::collections::VecDeque;

/// What texts that have ended left, in whole pages, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    kept: VecDeque<(TextId, Vec<u32>)>,
}

impl Prefixes {
    /// The text that has the most of these tokens as its first, in multiples of `unit`, and how many; `alive` are texts that run.
    pub fn longest<'a>(
        &'a self,
        tokens: &[u32],
        alive: impl Iterator<Item = (TextId, &'a [u32])>,
        unit: usize,
    ) -> Option<(TextId, usize)> {
        let kept = self.kept.iter().map(|(text, of)| (*text, of.as_slice()));
        let common = kept.chain(alive).map(|(text, of)| {
            let same = of.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            (text, same / unit * unit)
        });
        common.filter(|&(_, same)| same > 0).max_by_key(|&(_, same)| same)
    }

    /// Keeps the whole pages of a text that has ended, and has read these tokens.
    pub fn keep(&mut self, texts: &mut dyn Texts, text: TextId, mut tokens: Vec<u32>) -> Result<()> {
        tokens.truncate(tokens.len() / texts.page_length() * texts.page_length());
        if self.kept.iter().any(|(_, of)| of.starts_with(&tokens)) || tokens.is_empty() {
            return texts.end(text);
        }
        texts.truncate(text, tokens.len())?;
        self.kept.push_back((text, tokens));
        Ok(())
    }

    /// Lets the oldest go; false: there is none.
    pub fn evict(&mut self, texts: &mut dyn Texts) -> Result<bool> {
        match self.kept.pop_front() {
            None => Ok(false),
            Some((text, _)) => texts.end(text).map(|()| true),
        }
    }
}

pub(super) fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}
