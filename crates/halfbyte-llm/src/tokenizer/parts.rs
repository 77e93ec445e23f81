//! The parts of a `tokenizer.json`, and what they say of texts: how many tokens one has at least, where one may be cut.

use super::check::all_in;
use serde_json::{Map, Value};
use std::borrow::Cow;

/// What a file says besides its merges.
#[derive(Default)]
pub(super) struct Parts {
    pub normalizer: Value,
    pub pre_tokenizer: Value,
    pub decoder: Value,
    pub post_processor: Value,
    pub added: Vec<Added>,
    /// The model without vocabulary and merges.
    pub model: Map<String, Value>,
    /// The model's tokens, in no order that matters.
    pub vocab: Vec<String>,
    /// How many times longer a text may become.
    pub growth: usize,
}

/// A token that is looked for in texts before anything else.
pub(super) struct Added {
    pub content: String,
    /// Whether it takes the white space beside it.
    pub strips: bool,
    /// Whether it is looked for in normalized texts.
    pub normalized: bool,
}

/// What is known of any text in a tokenizer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Texts {
    /// How many times longer a text may become before it is cut into tokens.
    pub growth: usize,
    /// Bytes of text that are no white space and that a token stands for at most; None: any number of them.
    pub longest: Option<usize>,
    /// Whether what comes after a letter and begins with a space and a letter has the same tokens as it has alone.
    pub cut_between_words: bool,
    /// Whether texts are cut by regular expressions that may go back over what they have passed.
    pub goes_back: bool,
}

/// White space, or capital letters, in a row: over such runs expressions in the field go back, a step or two a character, and the
/// library stops to cut a text, without a word, where a match takes more than a million steps.
const LONGEST_RUN: usize = 500_000;

/// Bytes of text that become one by Unicode's composition, at most.
const COMPOSED: usize = 4;

/// How byte-level BPE cuts texts; all of these begin a piece at a space in front of a letter, and end it at the last letter.
/// GPT-2's is what `use_regex` stands for; then Llama 3's and Qwen 2's.
pub(super) const BETWEEN_WORDS: [&str; 3] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

impl Parts {
    /// The part of this name, if it is one of those that are kept.
    pub fn by_name(&mut self, name: &str) -> Option<&mut Value> {
        match name {
            "normalizer" => Some(&mut self.normalizer),
            "pre_tokenizer" => Some(&mut self.pre_tokenizer),
            "decoder" => Some(&mut self.decoder),
            "post_processor" => Some(&mut self.post_processor),
            _ => None,
        }
    }

    /// What this says of texts.
    pub fn texts(&self) -> Texts {
        Texts {
            growth: self.growth,
            longest: self.longest(),
            cut_between_words: self.cut_between_words(),
            goes_back: has_regex(&self.pre_tokenizer),
        }
    }

    /// A token stands for no more bytes than it has, if nothing of a text is dropped: every byte has a token, steps keep or
    /// lengthen what they take. White space is left out, which added tokens may swallow.
    fn longest(&self) -> Option<usize> {
        let mut composed = 1;
        for step in steps(&self.normalizer, "normalizers")? {
            match kind(step) {
                "NFC" => composed = COMPOSED,
                "Prepend" => {}
                "Replace" if longer(step) => {}
                _ => return None,
            }
        }
        let mut byte_level = false;
        for step in steps(&self.pre_tokenizer, "pretokenizers")? {
            match kind(step) {
                "ByteLevel" => byte_level = true,
                "Digits" | "Metaspace" => {}
                "Split" if step["behavior"] != "Removed" => {}
                _ => return None,
            }
        }
        let is = |field: &str, value: Value| self.model.get(field) == Some(&value);
        let covered = match byte_level {
            true => all_in((0..=255u8).map(byte_level_character).map(String::from), &self.vocab),
            false => {
                let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
                is("byte_fallback", Value::Bool(true)) && all_in(bytes, &self.vocab)
            }
        };
        if !covered || !is("type", "BPE".into()) {
            return None;
        }
        let added = self.added.iter().map(|token| &token.content);
        let longest = self.vocab.iter().chain(added).map(String::len).max()?;
        Some(longest.max(1) * composed)
    }

    fn cut_between_words(&self) -> bool {
        let normalizer = steps(&self.normalizer, "normalizers");
        let Some(steps) = steps(&self.pre_tokenizer, "pretokenizers") else { return false };
        let is_byte_level = |step: &Value, by_regex: bool| {
            kind(step) == "ByteLevel"
                && step["add_prefix_space"] == Value::Bool(false)
                && step.get("use_regex").unwrap_or(&Value::Bool(true)) == &Value::Bool(by_regex)
        };
        let known = match steps.as_slice() {
            [only] => is_byte_level(only, true),
            [split, last] => {
                let pattern = split["pattern"]["Regex"].as_str();
                kind(split) == "Split"
                    && pattern.is_some_and(|pattern| BETWEEN_WORDS.contains(&pattern))
                    && (&split["behavior"], &split["invert"]) == (&"Isolated".into(), &Value::Bool(false))
                    && is_byte_level(last, false)
            }
            _ => false,
        };
        let stays_between = |token: &Added| !token.strips && !token.content.contains(char::is_whitespace);
        known
            && normalizer.is_some_and(|steps| steps.iter().all(|step| kind(step) == "NFC"))
            && self.model.get("type") == Some(&"BPE".into())
            && self.added.iter().all(stays_between)
    }
}

impl Texts {
    /// The least number of tokens that a text has.
    pub fn least_tokens(&self, text: &str) -> usize {
        let Some(longest) = self.longest else { return 0 };
        text.chars().filter(|c| !c.is_whitespace()).map(char::len_utf8).sum::<usize>().div_ceil(longest)
    }

    /// Error: a run of characters that is too long to be cut.
    pub fn check_runs(&self, text: &str) -> Result<(), String> {
        if !self.goes_back || text.len() <= LONGEST_RUN {
            return Ok(());
        }
        for (of, belongs) in [
            ("of white space", char::is_whitespace as fn(char) -> bool),
            ("that are capital letters", char::is_uppercase),
        ] {
            let longest = text.split(|c| !belongs(c)).map(|run| run.chars().count()).max().unwrap_or(0);
            if longest > LONGEST_RUN {
                return Err(format!(
                    "expected a text of at most {LONGEST_RUN} characters {of} in a row, got {longest}"
                ));
            }
        }
        Ok(())
    }

    /// A text in pieces of about this many bytes, if it may be cut; together they have the tokens of the whole.
    pub fn pieces<'t>(&self, mut text: &'t str, about: usize) -> impl Iterator<Item = &'t str> {
        let cut = self.cut_between_words;
        let mut first = true;
        std::iter::from_fn(move || {
            // A text of nothing is a piece too.
            if text.is_empty() && !std::mem::take(&mut first) {
                return None;
            }
            first = false;
            let bytes = text.as_bytes();
            let between_words = |at: &usize| {
                let near = &bytes[at - 1..at + 2];
                near[0].is_ascii_alphabetic() && near[1] == b' ' && near[2].is_ascii_alphabetic()
            };
            let last = bytes.len().saturating_sub(1);
            let end = (about.max(1)..last).find(between_words).filter(|_| cut).unwrap_or(bytes.len());
            let (piece, rest) = text.split_at(end);
            text = rest;
            Some(piece)
        })
    }
}

/// The beginning of a long text.
pub(super) fn short(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(100) {
        None => Cow::Borrowed(text),
        Some((at, _)) => Cow::Owned(format!("{}…", &text[..at])),
    }
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("")
}

/// The steps of a part one by one; None if they are nested more deeply, or no steps.
fn steps<'a>(part: &'a Value, list: &str) -> Option<Vec<&'a Value>> {
    match (part, kind(part)) {
        (Value::Null, _) => Some(Vec::new()),
        (_, "Sequence") => part[list].as_array().map(|steps| steps.iter().collect()),
        _ => Some(vec![part]),
    }
}

/// Whether there is a regular expression in a part.
fn has_regex(part: &Value) -> bool {
    match part {
        Value::Object(fields) => fields.contains_key("Regex") || fields.values().any(has_regex),
        Value::Array(values) => values.iter().any(has_regex),
        _ => false,
    }
}

/// Whether a replacement has no fewer bytes than what it replaces.
fn longer(replace: &Value) -> bool {
    let (pattern, content) = (replace["pattern"]["String"].as_str(), replace["content"].as_str());
    pattern.zip(content).is_some_and(|(pattern, content)| content.len() >= pattern.len())
}

/// The character that stands for a byte in byte-level BPE: itself where it is seen, else the next one from U+0100 on.
fn byte_level_character(byte: u8) -> char {
    let seen = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match seen(byte) {
        true => char::from(byte),
        false => {
            let unseen_before = (0..byte).filter(|&b| !seen(b)).count() as u32;
            char::from_u32(0x100 + unseen_before).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    }
}
