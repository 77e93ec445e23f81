//! Text to token ids and back, also piece by piece.

mod check;

use crate::config::read_bytes;
use crate::error::{Error, Result};
use halfbyte_checkpoint::Weights;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a folder.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        Self::from_file(&folder.join("tokenizer.json"))
    }

    /// The tokenizer of a checkpoint: in the file itself where that holds one (GGUF), else in its folder.
    pub fn from_weights(weights: &Weights) -> Result<Self> {
        match weights.own_tokenizer()? {
            Some(json) => Self::from_bytes(json.to_string().into_bytes(), weights.checkpoint().path()),
            None => Self::from_folder(weights.folder()),
        }
    }

    /// Reads a `tokenizer.json`. Any truncation or padding that the file asks for is switched off.
    ///
    /// Errors: a file that cannot be read or is absurdly long; no JSON, or a name twice; what would take more memory or
    /// time than its length explains; what is no tokenizer.
    pub fn from_file(path: &Path) -> Result<Self> {
        Self::from_bytes(read_bytes(path)?, path)
    }

    fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        let refuse = |e: String| Error::Tokenizer(format!("{}: {e}", path.display()));
        check::check(&bytes).map_err(refuse)?;
        let read = || {
            let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
            inner.with_padding(None);
            inner.with_truncation(None)?;
            Ok(inner)
        };
        Ok(Self { inner: guarded(read).map_err(refuse)? })
    }

    /// Ids of a text, without special tokens around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode_fast(text, false)).map_err(Error::Tokenizer)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Ids of a prompt: the token that begins a text, where the model has one, and the text's.
    pub fn encode_prompt(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = bos.into_iter().collect();
        ids.extend(self.encode(text)?);
        Ok(ids)
    }

    /// Text of ids, without special tokens. Bytes that are no UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true)).map_err(Error::Tokenizer)
    }

    /// Number of tokens, the added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Every token with its id, the added ones included.
    pub fn vocabulary(&self) -> HashMap<String, u32> {
        self.inner.get_vocab(true)
    }

    /// Begins to decode a stream of ids.
    pub fn stream(&self) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, ids: Vec::new(), settled: 0, shown: String::new() }
    }
}

/// Runs foreign code, which panics on tokenizers that contradict themselves: on a table of characters with an index
/// beyond its end, or a token of nothing but what is to be stripped off both its ends. That is an error here. Nothing is
/// left half-changed: the tokenizer is only read, and one that is being made is lost.
fn guarded<T>(foreign: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(foreign)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given");
            Err(format!("it contradicts itself: {text}"))
        }
    }
}

/// Turns ids into text as they come, and holds back what may still change: a character whose last bytes are missing.
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The last ids: some that are shown, kept as context (a decoder may treat the first token apart), and those after.
    ids: Vec<u32>,
    /// Ids that are context only.
    settled: usize,
    /// Text of `ids` as far as it was given out.
    shown: String,
}

/// A longer run of replacement characters is no unfinished character but text that will never be valid.
const LONGEST_HELD: usize = 16;

impl DecodeStream<'_> {
    /// Takes an id; gives the text that is now certain, perhaps none.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let certain = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let held = (text.len() - certain.len()) / char::REPLACEMENT_CHARACTER.len_utf8();
        if held > 0 && held <= LONGEST_HELD {
            // A decoder may turn bytes that were a character into replacements until the next ones come.
            let Some(new) = certain.strip_prefix(self.shown.as_str()) else { return Ok(String::new()) };
            let new = new.to_owned();
            self.shown.push_str(&new);
            return Ok(new);
        }
        let new = unshown(&text, &self.shown);
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        self.shown = self.tokenizer.decode(&self.ids)?;
        Ok(new)
    }

    /// Ends the stream; gives what was held back, bytes that never became a character as U+FFFD.
    pub fn finish(self) -> Result<String> {
        Ok(unshown(&self.tokenizer.decode(&self.ids)?, &self.shown))
    }
}

/// What of `text` comes after the part that was shown.
fn unshown(text: &str, shown: &str) -> String {
    match text.strip_prefix(shown) {
        Some(rest) => rest.to_owned(),
        None => {
            let same =
                text.char_indices().zip(shown.chars()).find(|((_, a), b)| a != b).map_or(text.len(), |((at, _), _)| at);
            text[same..].to_owned()
        }
    }
}
