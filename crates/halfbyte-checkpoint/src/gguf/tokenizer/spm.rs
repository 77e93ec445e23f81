//! SentencePiece's BPE, "llama" in GGUF: the pair whose union has the highest score is merged first, and what is no
//! token becomes bytes.
//!
//! The tokenizers library merges by rank. Scores are turned into ranks: every way to part a token into two is a merge,
//! in the order of the tokens' scores. Back, each token's score is the place of its merges.
//! Source: transformers' `generate_merges` for the order of merges of one token.

use super::{Parts, Source, Vocab, kind, refuse};
use crate::error::{Error, Result};
use crate::gguf::header::Header;
use crate::gguf::model::token;
use crate::gguf::value::{Array, Value as Meta};
use serde_json::{Map, Value, json};
use std::cmp::Reverse;
use std::collections::HashMap;

/// How SentencePiece writes a space.
const SPACE: &str = "▁";

/// Longer tokens are not parted: that takes time in the square of the length. Real ones are a tenth of it.
const LONGEST: usize = 512;

/// Merges for each token, on average, beyond which a vocabulary is no language's. Real ones have two or three.
const MOST_MERGES: usize = 32;

const SCORES: &str = "tokenizer.ggml.scores";
const TOKENS: &str = "tokenizer.ggml.tokens";

pub(super) fn read(header: &Header, vocab: &Vocab<'_>) -> Result<Parts> {
    let scores = match header.get(SCORES) {
        Some(Meta::Array(Array::F32(s))) if s.len() == vocab.tokens.len() && !s.iter().any(|s| s.is_nan()) => s,
        _ => return Err(header.unexpected(SCORES, &format!("an array of {} f32, none NaN", vocab.tokens.len()))),
    };
    if header.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
        let what = "key `tokenizer.ggml.remove_extra_whitespaces`: texts that are changed before they are cut";
        return Err(Error::unsupported(&header.file, what));
    }
    let pieces = Pieces { tokens: vocab.tokens, kinds: &vocab.kinds, ids: &vocab.ids };
    let merges =
        pieces.merges(scores).map_err(|what| Error::unsupported(&header.file, format!("key `{TOKENS}`: {what}")))?;
    let merges: Vec<Value> = merges.iter().map(|m| json!([pieces.tokens[m.left], pieces.tokens[m.right]])).collect();
    // The first token where the file does not say, as llama.cpp has it.
    let unknown = match token(header, "unknown")? {
        None => vocab.tokens[0].as_str(),
        Some(_) => vocab.role(header, "unknown")?.0,
    };
    let prefix = header.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let mut normalizers = vec![json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let model = json!({
        "type": "BPE",
        "dropout": null,
        "unk_token": unknown,
        "continuing_subword_prefix": null,
        "end_of_word_suffix": null,
        "fuse_unk": true,
        "byte_fallback": true,
        "ignore_merges": false,
        "merges": merges,
    });
    Ok(Parts {
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        decoder: json!({"type": "Sequence", "decoders": decoders}),
        model: if let Value::Object(model) = model { model } else { Map::new() },
        add_bos: true,
    })
}

/// Tokens of which the normal ones are made by merging.
struct Pieces<'a> {
    tokens: &'a [String],
    kinds: &'a [i32],
    ids: &'a HashMap<&'a str, u32>,
}

/// Two tokens and what they are together, all by id.
#[derive(Clone, Copy, PartialEq)]
struct Merge {
    left: usize,
    right: usize,
    whole: usize,
}

impl Pieces<'_> {
    /// Every way to part a normal token into two, those of high scores first; of the same token, those with a long left
    /// part first.
    fn merges(&self, scores: &[f32]) -> std::result::Result<Vec<Merge>, String> {
        let normal = |text: &str| {
            let id = *self.ids.get(text)? as usize;
            (self.kinds[id] == kind::NORMAL).then_some(id)
        };
        let mut merges = Vec::new();
        for (whole, token) in self.tokens.iter().enumerate().filter(|&(id, _)| self.kinds[id] == kind::NORMAL) {
            if token.len() > LONGEST {
                return Err(format!("token {whole} is longer than {LONGEST} bytes"));
            }
            for (at, _) in token.char_indices().skip(1) {
                if let (Some(left), Some(right)) = (normal(&token[..at]), normal(&token[at..])) {
                    merges.push(Merge { left, right, whole });
                }
            }
            if merges.len() > MOST_MERGES * self.tokens.len() {
                return Err(format!("more than {MOST_MERGES} merges a token"));
            }
        }
        let characters = |id: usize| self.tokens[id].chars().count();
        merges.sort_by_cached_key(|m| {
            (Reverse(Score(scores[m.whole])), Reverse(characters(m.left)), Reverse(characters(m.right)), m.whole)
        });
        Ok(merges)
    }
}

/// A score, which is never NaN.
#[derive(PartialEq)]
struct Score(f32);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // Zeros of either sign are the same score.
        (self.0 + 0.0).total_cmp(&(other.0 + 0.0))
    }
}

pub(super) fn write(source: &Source<'_>) -> Result<Vec<(&'static str, Meta)>> {
    let prefix = prefix(source.part("normalizer")).ok_or_else(|| {
        refuse("a `normalizer` that writes spaces as ▁, and may put one before", source.part("normalizer"))
    })?;
    if !source.part("pre_tokenizer").is_null() {
        return Err(refuse("no `pre_tokenizer` with byte_fallback", source.part("pre_tokenizer")));
    }
    let unknown = source.model.get("unk_token").and_then(Value::as_str);
    let unknown = unknown.and_then(|unknown| source.tokens.iter().position(|token| token == unknown));
    let unknown = unknown.ok_or_else(|| refuse("`model.unk_token`, a token of the vocabulary", &Value::Null))?;
    let mut kinds = source.kinds.clone();
    for (token, kind) in source.tokens.iter().zip(&mut kinds) {
        if *kind == kind::NORMAL && is_byte(token) {
            *kind = kind::BYTE;
        }
    }
    kinds[unknown] = kind::UNKNOWN;
    let scores = scores(source, &kinds)?;
    let [tokens, _] = source.tokens_and_kinds();
    Ok(vec![
        ("model", Meta::String("llama".into())),
        ("pre", Meta::String("default".into())),
        tokens,
        ("scores", Meta::Array(Array::F32(scores))),
        ("token_type", Meta::Array(Array::I32(kinds))),
        ("unknown_token_id", Meta::U32(unknown as u32)),
        ("add_space_prefix", Meta::Bool(prefix)),
    ])
}

/// Scores that give the file's merges again. Error: there are none.
fn scores(source: &Source<'_>, kinds: &[i32]) -> Result<Vec<f32>> {
    let ids: HashMap<&str, u32> = source.tokens.iter().map(String::as_str).zip(0..).collect();
    let id = |token: &str| ids.get(token).map(|&id| id as usize);
    let mut merges = Vec::with_capacity(source.merges.len());
    for pair in &source.merges {
        let [left, right] = pair;
        let (Some(left), Some(right), Some(whole)) = (id(left), id(right), id(&pair.concat())) else {
            return Err(refuse("merges of two tokens that are one together", &json!(pair)));
        };
        merges.push(Merge { left, right, whole });
    }
    let mut scores = vec![None; source.tokens.len()];
    let mut next = 0u32;
    for merge in &merges {
        scores[merge.whole].get_or_insert_with(|| {
            next += 1;
            -((next - 1) as f32)
        });
    }
    let scores: Vec<f32> = scores.into_iter().map(|score| score.unwrap_or(-(next as f32))).collect();
    // The order of one token's merges is no part of what scores say.
    for of_one in merges.chunk_by_mut(|a, b| a.whole == b.whole) {
        of_one.sort_by_key(|m| Reverse(source.tokens[m.left].chars().count()));
    }
    let pieces = Pieces { tokens: &source.tokens, kinds, ids: &ids };
    let given = pieces.merges(&scores).map_err(|what| Error::invalid(super::OP, "tokens of a language", what))?;
    match (0..given.len().max(merges.len())).find(|&i| given.get(i) != merges.get(i)) {
        None => Ok(scores),
        Some(at) => {
            let got = merges.get(at).map(|m| [&source.tokens[m.left], &source.tokens[m.right]]);
            Err(refuse(&format!("merges that scores of tokens can give; merge {at} is another"), &json!(got)))
        }
    }
}

/// Whether a normalizer puts a space before the text, beside writing spaces as ▁; None: it does something else.
fn prefix(normalizer: &Value) -> Option<bool> {
    let steps = match normalizer.get("type")?.as_str()? {
        "Sequence" => normalizer.get("normalizers")?.as_array()?.as_slice(),
        _ => std::slice::from_ref(normalizer),
    };
    let text = |step: &Value, pointer: &str, text: &str| step.pointer(pointer).is_some_and(|found| found == text);
    let replaces = |step: &Value| {
        text(step, "/type", "Replace") && text(step, "/pattern/String", " ") && text(step, "/content", SPACE)
    };
    let prepends = |step: &Value| text(step, "/type", "Prepend") && text(step, "/prepend", SPACE);
    match steps {
        [replace] if replaces(replace) => Some(false),
        [prepend, replace] if prepends(prepend) && replaces(replace) => Some(true),
        _ => None,
    }
}

/// Whether a token stands for a byte, as `<0x0A>`.
fn is_byte(token: &str) -> bool {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|d| d.len() == 2 && d.bytes().all(|b| b.is_ascii_digit() || (b'A'..=b'F').contains(&b)))
}
