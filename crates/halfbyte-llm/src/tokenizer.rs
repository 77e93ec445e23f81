//! Text to token ids and back, also piece by piece.

mod bytes;
mod check;
mod growth;
mod guard;
mod parts;

pub use bytes::TokenBytes;

use crate::config::read_bytes;
use crate::error::{Error, Result};
use guard::guarded;
use halfbyte_checkpoint::{Weights, json};
use parts::Texts;
use std::collections::HashMap;
use std::path::Path;
use tokenizers::{Encoding, PostProcessor, Token};

/// Bytes of a text that are cut into tokens together where a text may be cut anywhere: a hundred times as much memory.
const PIECE: usize = 1 << 16;

/// Fields of a `tokenizer_config.json`; those in the field have some dozens.
pub(crate) const MOST_FIELDS: usize = 1 << 12;

/// A `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    texts: Texts,
    /// Tokens that it puts before a text; None: nothing says whether it puts any.
    begins: Option<Vec<u32>>,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a folder.
    ///
    /// Where it says nothing of tokens around a text (`post_processor` is null), `add_bos_token` of a `tokenizer_config.json` beside it
    /// does: false, or absent, means none. Errors: files that are not there, or that hold no tokenizer.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let mut tokenizer = Self::from_file(&folder.join("tokenizer.json"))?;
        let beside = folder.join("tokenizer_config.json");
        if tokenizer.begins.is_none() && beside.is_file() {
            let bad = |what: String| Error::Tokenizer(format!("{}: {what}", beside.display()));
            let text = read_bytes(&beside)?;
            let fields = json::fields(&text, MOST_FIELDS).map_err(|e| bad(format!("expected JSON: {e}")))?;
            match fields.iter().find(|(field, _)| *field == "add_bos_token").map(|(_, value)| value.get()) {
                Some("true") => {}
                None | Some("false" | "null") => tokenizer.begins = Some(Vec::new()),
                Some(other) => {
                    let got: String = other.chars().take(60).collect();
                    return Err(bad(format!("`add_bos_token`: expected true or false, got {got}")));
                }
            }
        }
        Ok(tokenizer)
    }

    /// The tokenizer of a checkpoint: in the file itself where that holds one (GGUF), else in its folder. Errors: as
    /// [`Tokenizer::from_folder`].
    pub fn from_weights(weights: &Weights) -> Result<Self> {
        match weights.own_tokenizer()? {
            Some(json) => {
                let bytes = json.to_string().into_bytes();
                // It takes several times as much.
                drop(json);
                Self::from_bytes(bytes, weights.checkpoint().path())
            }
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
        let texts = check::check(&bytes).map_err(refuse)?.texts();
        let read = || {
            let mut inner = tokenizers::Tokenizer::from_bytes(bytes)?;
            inner.with_padding(None);
            inner.with_truncation(None)?;
            Ok(inner)
        };
        let inner = guarded(read).map_err(refuse)?;
        let begins = guarded(|| begins(&inner)).map_err(refuse)?;
        Ok(Self { inner, texts, begins })
    }

    /// The same without a memory of words: else each thread that cuts texts keeps the first 10,000 words that it sees with their tokens, up
    /// to 80 MB where clients think of long ones. Ids are the same.
    pub fn without_memory(mut self) -> Self {
        let mut model = self.inner.get_model().clone();
        model.resize_cache(0);
        self.inner.with_model(model);
        self
    }

    /// Ids of a text, without special tokens around it. Errors: what the tokenizer refuses, among it a text that its
    /// replacements may make too long, or with a run of white space too long for its regular expressions.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_at_most(text, usize::MAX)
    }

    /// [`Tokenizer::encode`] of a text that must have at most `limit` tokens. Where that can be told before the whole text is cut
    /// into tokens, the error is [`Error::TextTooLong`]; ids of accepted texts are the same.
    pub fn encode_within(&self, text: &str, limit: usize) -> Result<Vec<u32>> {
        self.encode_at_most(text, limit)
    }

    /// Ids of a prompt: those that the tokenizer puts before a text, as in transformers, and the text's. Where it does not say whether
    /// it puts any, `bos` is put there, the token that the model's configuration names. What it would put behind a text is left out.
    /// Errors: as [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str, bos: Option<u32>) -> Result<Vec<u32>> {
        self.encode_prompt_within(text, bos, usize::MAX)
    }

    /// [`Tokenizer::encode_prompt`] of a text that must have at most `limit` tokens, as [`Tokenizer::encode_within`].
    pub fn encode_prompt_within(&self, text: &str, bos: Option<u32>, limit: usize) -> Result<Vec<u32>> {
        let mut ids = self.begins.clone().unwrap_or_else(|| bos.into_iter().collect());
        ids.extend(self.encode_at_most(text, limit)?);
        Ok(ids)
    }

    fn encode_at_most(&self, text: &str, limit: usize) -> Result<Vec<u32>> {
        let check = |least: usize| match least <= limit {
            true => Ok(()),
            false => Err(Error::TextTooLong { limit, bytes: text.len(), least }),
        };
        if limit < usize::MAX {
            check(self.texts.least_tokens(text))?;
        }
        growth::check_text(self.texts.growth, text.len()).map_err(Error::Tokenizer)?;
        self.texts.check_runs(text).map_err(Error::Tokenizer)?;
        let mut ids = Vec::new();
        for piece in self.texts.pieces(text, PIECE) {
            let encoding = guarded(|| self.inner.encode_fast(piece, false)).map_err(Error::Tokenizer)?;
            ids.extend(encoding.get_ids());
            check(ids.len())?;
        }
        Ok(ids)
    }

    /// Text of ids, without special tokens. Bytes that are no UTF-8 become U+FFFD. Error: what the tokenizer refuses.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.decode_as(ids, false)
    }

    /// Text of ids, with the names of special tokens if they are asked for.
    fn decode_as(&self, ids: &[u32], special: bool) -> Result<String> {
        guarded(|| self.inner.decode(ids, !special)).map_err(Error::Tokenizer)
    }

    /// Whether an id is left out of texts, whatever comes before and behind it: no token has it, or a special one and names of such
    /// are not asked for.
    fn says_nothing(&self, id: u32, special: bool) -> bool {
        let is_special = |token: String| self.inner.get_added_vocabulary().is_special_token(&token);
        self.inner.id_to_token(id).is_none_or(|token| !special && is_special(token))
    }

    /// Number of tokens, the added ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Every token with its id, the added ones included.
    pub fn vocabulary(&self) -> HashMap<String, u32> {
        self.inner.get_vocab(true)
    }

    /// The token of an id, as it stands in the vocabulary.
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Begins to decode a stream of ids.
    pub fn stream(&self) -> DecodeStream<'_> {
        self.stream_as(false)
    }

    /// The same, with the names of special tokens if they are asked for: some models write calls of tools with such.
    pub fn stream_as(&self, special: bool) -> DecodeStream<'_> {
        DecodeStream { tokenizer: self, state: DecodeState { special, ..DecodeState::default() } }
    }
}

/// The tokens that a tokenizer's post-processor puts before a text; None: it has none.
fn begins(tokenizer: &tokenizers::Tokenizer) -> tokenizers::Result<Option<Vec<u32>>> {
    let Some(processor) = tokenizer.get_post_processor() else { return Ok(None) };
    // A text of one token, which no vocabulary has.
    let text = Encoding::from_tokens(vec![Token::new(u32::MAX, "a".to_owned(), (0, 1))], 0);
    let around = processor.process(text, None, true)?;
    Ok(Some(around.get_ids().iter().copied().take_while(|&id| id != u32::MAX).collect()))
}

/// Turns ids into text as they come, and holds back what may still change: a character whose last bytes are missing.
#[derive(Clone, Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    state: DecodeState,
}

/// Where a [`DecodeStream`] is, without its tokenizer: for those that cannot borrow it for so long.
#[derive(Clone, Debug, Default)]
pub struct DecodeState {
    special: bool,
    /// The last ids: some that are shown, kept as context (a decoder may treat the first token apart), and those after.
    ids: Vec<u32>,
    /// Ids that are context only.
    settled: usize,
    /// Text of `ids` as far as it was given out.
    shown: String,
}

/// A longer run of replacement characters is no unfinished character but text that will never be valid.
const LONGEST_HELD: usize = 16;

/// Of such a run the last ones may be a character yet: its bytes but the last.
const UNFINISHED: usize = 3;

/// Ids that are kept of such a run: more bytes than those of an unfinished character.
const KEPT_OF_RUN: usize = 16;

impl DecodeStream<'_> {
    /// Takes an id; gives the text that is now certain, perhaps none. Error: as [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.state.push(self.tokenizer, id)
    }

    /// Ends the stream; gives what was held back, bytes that never became a character as U+FFFD. Error: as [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        let DecodeState { special, ids, shown, .. } = self.state;
        Ok(unshown(&self.tokenizer.decode_as(&ids, special)?, &shown))
    }
}

impl DecodeState {
    /// As [`DecodeStream::push`]; the tokenizer is the same each time.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        // As context it would stand for the beginning of a text, where decoders take spaces away.
        if tokenizer.says_nothing(id, self.special) {
            return Ok(String::new());
        }
        self.ids.push(id);
        let text = tokenizer.decode_as(&self.ids, self.special)?;
        let certain = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let held = (text.len() - certain.len()) / char::REPLACEMENT_CHARACTER.len_utf8();
        if held > 0 && held <= LONGEST_HELD {
            // A decoder may turn bytes that were a character into replacements until the next ones come.
            let Some(new) = certain.strip_prefix(self.shown.as_str()) else { return Ok(String::new()) };
            let new = new.to_owned();
            self.shown.push_str(&new);
            return Ok(new);
        }
        if held > LONGEST_HELD {
            let given = |text: &str| -> Option<String> {
                let end = text.len().checked_sub(UNFINISHED * char::REPLACEMENT_CHARACTER.len_utf8())?;
                let (before, behind) = text.split_at_checked(end)?;
                behind.chars().all(|c| c == char::REPLACEMENT_CHARACTER).then(|| before.to_owned())
            };
            let kept = self.ids.len().saturating_sub(KEPT_OF_RUN);
            let of_kept = tokenizer.decode_as(&self.ids[kept..], self.special)?;
            if let (Some(text), Some(shown)) = (given(&text), given(&of_kept)) {
                let new = unshown(&text, &self.shown);
                self.ids.drain(..kept);
                (self.settled, self.shown) = (0, shown);
                return Ok(new);
            }
        }
        let new = unshown(&text, &self.shown);
        self.ids.drain(..self.settled);
        self.settled = self.ids.len();
        self.shown = tokenizer.decode_as(&self.ids, self.special)?;
        Ok(new)
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

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::random::splitmix64;
    use serde_json::{Value, json};

    /// The model that ships, with another way to cut texts.
    fn with(pre_tokenizer: Value, normalizer: Value) -> Tokenizer {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m/tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        json["pre_tokenizer"] = pre_tokenizer;
        json["normalizer"] = normalizer;
        Tokenizer::from_bytes(json.to_string().into_bytes(), &path).unwrap()
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let mut cuts = vec![byte_level(true)];
        for regex in parts::BETWEEN_WORDS {
            cuts.push(json!({"type": "Sequence", "pretokenizers": [split(regex), byte_level(false)]}));
        }
        // Words of every kind, with all that may lie between them.
        let words = [
            "a",
            "Word",
            "don't",
            "we'LL",
            "x1",
            "12345",
            "é",
            "e\u{301}",
            "中文",
            "🦀",
            "<|endoftext|>",
            "_",
            "--",
            "\u{301}",
        ];
        let between = ["", " ", " ", " ", "  ", "\n", " \n", "\n\n ", "\t", "\r\n", "\u{a0}", "\u{3000} "];
        let mut state = 1u64;
        let mut random = |below: usize| splitmix64(&mut state) as usize % below;
        let text: String =
            (0..4000).flat_map(|_| [words[random(words.len())], between[random(between.len())]]).collect();
        for cut in cuts {
            for normalizer in [Value::Null, json!({"type": "NFC"})] {
                let tokenizer = with(cut.clone(), normalizer);
                let texts = tokenizer.texts;
                let pieces: Vec<&str> = texts.pieces(&text, 1).collect();
                assert!(pieces.len() > 100 && pieces.concat() == text);
                let whole = tokenizer.inner.encode_fast(text.as_str(), false).unwrap();
                let of_pieces: Vec<u32> = pieces.iter().flat_map(|piece| tokenizer.encode(piece).unwrap()).collect();
                assert_eq!(of_pieces, whole.get_ids(), "{cut}");
                assert!(texts.least_tokens(&text) <= whole.len() && texts.least_tokens(&text) > 10);
            }
        }
        // What may look across, or add something to each piece, is not cut; what drops text has any number of bytes a token.
        let prefix = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let removed = json!({"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}, byte_level(false)]});
        for (pre_tokenizer, bounded) in [(prefix, true), (removed, false), (Value::Null, false)] {
            let texts = with(pre_tokenizer, Value::Null).texts;
            assert_eq!(texts.pieces(&text, 1).count(), 1);
            assert_eq!(texts.least_tokens(&text) > 0, bounded);
        }
        assert_eq!(with(byte_level(true), json!({"type": "Lowercase"})).texts.least_tokens(&text), 0);
    }

    #[test]
    fn runs_that_expressions_cannot_pass_are_refused() {
        let byte_level = |regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": regex});
        let split = json!({"type": "Split", "pattern": {"Regex": parts::BETWEEN_WORDS[1]}, "behavior": "Isolated", "invert": false});
        let by_split = with(json!({"type": "Sequence", "pretokenizers": [split, byte_level(false)]}), Value::Null);
        let by_itself = with(byte_level(true), Value::Null);
        let text = |c: &str, count: usize| format!("a{}a b", c.repeat(count));
        for (c, of) in [(" ", "of white space"), ("A", "that are capital letters")] {
            let ids = by_split.encode(&text(c, 500_000)).unwrap();
            assert_eq!(by_split.decode(&ids).unwrap(), text(c, 500_000));
            assert_eq!(ids[ids.len() - 1], by_split.encode(" b").unwrap()[0]);
            let error = by_split.encode(&text(c, 500_001)).unwrap_err().to_string();
            assert!(error.contains(&format!("at most 500000 characters {of} in a row, got 500001")), "{error}");
            assert!(by_itself.encode(&text(c, 500_001)).is_ok());
        }
    }

    /// A tokenizer as SentencePiece's, of which few bytes have tokens, and no letter.
    fn few_tokens() -> Value {
        let vocab =
            json!({"<unk>": 0, "</s>": 1, "\u{2581}a": 2, "\u{2581}b": 3, "<0xE4>": 4, "<0xB8>": 5, "<0xAD>": 6});
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true})
        };
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "added_tokens": [special(0, "<unk>"), special(1, "</s>")],
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": true, "byte_fallback": true, "ignore_merges": false, "vocab": vocab, "merges": []},
        })
    }

    #[test]
    fn special_tokens_in_a_stream_take_no_space_from_what_follows() {
        let tokenizer = Tokenizer::from_bytes(few_tokens().to_string().into_bytes(), Path::new("t")).unwrap();
        for ids in [&[2, 1, 3][..], &[1, 2, 1, 1, 3, 9, 3], &[2, 4, 1, 5, 9, 6, 3], &[4, 1, 3], &[9, 1]] {
            for special in [false, true] {
                let mut stream = tokenizer.stream_as(special);
                let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
                text.push_str(&stream.finish().unwrap());
                assert_eq!(text, tokenizer.decode_as(ids, special).unwrap(), "{ids:?}");
            }
        }
        assert_eq!(tokenizer.decode(&[2, 1, 3]).unwrap(), "a b");
    }

    /// Bytes that are no characters, whole ones and such in pieces, in runs of any length: the stream says what the whole does.
    #[test]
    fn streams_of_bytes_that_are_no_characters_are_the_whole_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
        let tokenizer = Tokenizer::from_folder(&folder).unwrap();
        let mut state = 5;
        for case in 0..400 {
            // Single bytes of UTF-8, the beginnings and the rest of long characters among them, and a word.
            let mut draw = |n: u64| splitmix64(&mut state) % n;
            let lengths = 1 + draw(90);
            let odd = [173, 254, 247, 223, 130, 188];
            let ids: Vec<u32> = (0..lengths).map(|_| if draw(30) == 0 { 300 } else { odd[draw(6) as usize] }).collect();
            let mut stream = tokenizer.stream();
            let mut text: String = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
            text += &stream.finish().unwrap();
            assert_eq!(text, tokenizer.decode(&ids).unwrap(), "{case}: {ids:?}");
        }
    }

    #[test]
    fn what_begins_a_prompt_depends_on_no_letter() {
        let piece = |token: &str| json!({"SpecialToken": {"id": token, "type_id": 0}});
        let token = |id: u32, token: &str| json!({"id": token, "ids": [id], "tokens": [token]});
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let mut json = few_tokens();
        json["post_processor"] = json!({"type": "TemplateProcessing", "single": [piece("<unk>"), text, piece("</s>")],
            "pair": [text], "special_tokens": {"<unk>": token(0, "<unk>"), "</s>": token(1, "</s>")}});
        let tokenizer = Tokenizer::from_bytes(json.to_string().into_bytes(), Path::new("t")).unwrap();
        assert_eq!((tokenizer.encode("a").unwrap(), tokenizer.encode("中").unwrap()), (vec![], vec![4, 5, 6]));
        assert_eq!(tokenizer.encode_prompt("中", Some(7)).unwrap(), [0, 4, 5, 6]);
    }

    #[test]
    fn panics_of_foreign_code_are_errors_and_others_stay_panics() {
        let error = guard::guarded(|| -> tokenizers::Result<()> { panic!("of {}", 1) }).unwrap_err();
        assert_eq!(error, "it contradicts itself: of 1");
        let caught = std::panic::catch_unwind(|| panic!("ours"));
        assert!(caught.is_err());
    }
}
