//! Tokenizers: the lists in GGUF's metadata as a `tokenizer.json`, and back.

mod bpe;
mod spm;

use super::header::Header;
use super::model::token;
use super::value::{Array, Value as Meta};
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashMap;

const OP: &str = "tokenizer as GGUF metadata";

/// A vocabulary beyond this is a broken config; the largest in the field has 262,144 tokens.
const MOST_TOKENS: usize = 1 << 19;

/// What a token is, as `tokenizer.ggml.token_type` numbers it.
mod kind {
    pub const NORMAL: i32 = 1;
    pub const UNKNOWN: i32 = 2;
    pub const CONTROL: i32 = 3;
    pub const USER_DEFINED: i32 = 4;
    pub const UNUSED: i32 = 5;
    pub const BYTE: i32 = 6;
}

/// The `tokenizer.json` for the tokenizer in a header: byte-level BPE ("gpt2") or SentencePiece's BPE with scores and
/// bytes as a last resort ("llama").
///
/// Control and unknown tokens become special added tokens, user-defined ones added tokens. Errors, naming the key: no
/// tokenizer, one of another kind, a pre-tokenizer that is not known, lists whose lengths differ, tokens that are there
/// twice, ids beyond the vocabulary.
///
/// A file that holds the whole `tokenizer.json` (`tokenizer.huggingface.json`) has it taken, if its tokens are those of the
/// lists.
pub fn tokenizer_json(header: &Header) -> Result<Value> {
    const MODEL: &str = "tokenizer.ggml.model";
    let vocab = Vocab::read(header)?;
    if let Some(text) = header.text(WHOLE)? {
        return whole(header, &vocab, text);
    }
    let mut parts = match header.text(MODEL)? {
        Some("gpt2") => bpe::read(header, &vocab)?,
        Some("llama") => spm::read(header, &vocab)?,
        _ => return Err(header.unexpected(MODEL, "\"gpt2\" or \"llama\"")),
    };
    let by_token: Map<String, Value> = vocab.tokens.iter().zip(0u32..).map(|(t, id)| (t.clone(), json!(id))).collect();
    parts.model.insert("vocab".into(), Value::Object(by_token));
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocab.added_tokens(),
        "normalizer": parts.normalizer,
        "pre_tokenizer": parts.pre_tokenizer,
        "post_processor": vocab.template(header, parts.add_bos)?,
        "decoder": parts.decoder,
        "model": parts.model,
    }))
}

/// Values that a `tokenizer.json` may have: three a merge and one a token, and twice what the largest in the field has.
pub(crate) const MOST_VALUES: usize = 1 << 22;

/// The key of a whole `tokenizer.json`, for what lists cannot say.
const WHOLE: &str = "tokenizer.huggingface.json";

/// The `tokenizer.json` in a header. Errors: no JSON, other tokens than the lists have.
fn whole(header: &Header, vocab: &Vocab<'_>, text: &str) -> Result<Value> {
    let malformed = |what: String| Error::malformed(&header.file, format!("key `{WHOLE}`: {what}"));
    let json = crate::json::parse_at_most(text.as_bytes(), MOST_VALUES)
        .map_err(|e| malformed(format!("expected JSON: {e}")))?;
    let source = Source::read(&json, vocab.tokens.len()).map_err(|e| malformed(e.to_string()))?;
    let other = source
        .tokens
        .iter()
        .zip(vocab.tokens)
        .zip(&source.kinds)
        .position(|((own, listed), &kind)| kind != kind::UNUSED && own != listed);
    match other {
        Some(id) => Err(malformed(format!(
            "expected token {id} as in the list, {:?}, got {:?}",
            vocab.tokens[id], source.tokens[id]
        ))),
        None => Ok(json),
    }
}

/// What the two kinds of tokenizers have apart.
struct Parts {
    normalizer: Value,
    pre_tokenizer: Value,
    decoder: Value,
    model: Map<String, Value>,
    /// Whether texts begin with a token for it, if the file does not say.
    add_bos: bool,
}

/// The tokens of a header, none twice.
struct Vocab<'a> {
    tokens: &'a [String],
    kinds: Vec<i32>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Vocab<'a> {
    fn read(header: &'a Header) -> Result<Self> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const KINDS: &str = "tokenizer.ggml.token_type";
        let Some(Meta::Array(Array::String(tokens))) = header.get(TOKENS) else {
            return Err(header.unexpected(TOKENS, "an array of strings"));
        };
        if tokens.is_empty() || tokens.len() > MOST_TOKENS {
            return Err(header.unexpected(TOKENS, &format!("1 to {MOST_TOKENS} tokens")));
        }
        let kinds = match header.get(KINDS) {
            None => vec![kind::NORMAL; tokens.len()],
            Some(Meta::Array(Array::I32(kinds))) if kinds.len() == tokens.len() => kinds.clone(),
            Some(_) => return Err(header.unexpected(KINDS, &format!("an array of {} i32", tokens.len()))),
        };
        let mut ids = HashMap::with_capacity(tokens.len());
        for (token, id) in tokens.iter().zip(0u32..) {
            if let Some(before) = ids.insert(token.as_str(), id) {
                let what = format!("key `{TOKENS}`: expected each token once, got {token:?} as {before} and {id}");
                return Err(Error::malformed(&header.file, what));
            }
        }
        Ok(Self { tokens, kinds, ids })
    }

    fn added_tokens(&self) -> Vec<Value> {
        let special = |kind| matches!(kind, kind::CONTROL | kind::UNKNOWN);
        let tokens = self.tokens.iter().zip(&self.kinds).enumerate();
        tokens
            .filter(|(_, (_, kind))| special(**kind) || **kind == kind::USER_DEFINED)
            .map(|(id, (token, kind))| {
                json!({
                    "id": id,
                    "content": token,
                    "single_word": false,
                    "lstrip": false,
                    "rstrip": false,
                    "normalized": false,
                    "special": special(*kind),
                })
            })
            .collect()
    }

    /// The token that has a role, with its id. Errors: none has it, or its id is beyond the vocabulary.
    fn role(&self, header: &Header, role: &str) -> Result<(&'a str, u64)> {
        let id = token(header, role)?;
        let token = id.and_then(|id| self.tokens.get(usize::try_from(id).ok()?));
        match (token, id) {
            (Some(token), Some(id)) => Ok((token, id)),
            _ => {
                let expected = format!("the id of one of {} tokens", self.tokens.len());
                Err(header.unexpected(&format!("tokenizer.ggml.{role}_token_id"), &expected))
            }
        }
    }

    /// The post-processor that puts tokens around a text, or says that there are none.
    fn template(&self, header: &Header, add_bos: bool) -> Result<Value> {
        let add_bos = header.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos);
        let add_eos = header.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        let bos = if add_bos { Some(self.role(header, "bos")?) } else { None };
        let eos = if add_eos { Some(self.role(header, "eos")?) } else { None };
        let around = |sequence: &str, type_id: u32| {
            let special = |(token, _)| json!({"SpecialToken": {"id": token, "type_id": type_id}});
            let text = json!({"Sequence": {"id": sequence, "type_id": type_id}});
            bos.map(special).into_iter().chain([text]).chain(eos.map(special)).collect::<Vec<Value>>()
        };
        let single = around("A", 0);
        let pair = [around("A", 0), around("B", 1)].concat();
        let tokens = bos.into_iter().chain(eos);
        let tokens: Map<String, Value> =
            tokens.map(|(t, id)| (t.to_owned(), json!({"id": t, "ids": [id], "tokens": [t]}))).collect();
        Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}))
    }
}

/// The metadata of a `tokenizer.json` for a model of `vocab_size` tokens whose texts begin with `bos` and end with
/// `eos`; ids that have no token are filled with unused ones.
pub(super) fn metadata(
    tokenizer: &Value,
    vocab_size: usize,
    bos: Option<u64>,
    eos: Option<u64>,
) -> Result<Vec<(String, Meta)>> {
    let source = Source::read(tokenizer, vocab_size)?;
    let mut metadata = if source.model.get("byte_fallback") == Some(&Value::Bool(true)) {
        spm::write(&source)?
    } else {
        bpe::write(&source)?
    };
    let (add_bos, add_eos) = around(tokenizer.get("post_processor").unwrap_or(&Value::Null), bos, eos)?;
    for (key, value) in [("add_bos_token", add_bos), ("add_eos_token", add_eos)] {
        metadata.push((key, Meta::Bool(value)));
    }
    let mut metadata: Vec<_> =
        metadata.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect();
    if source.model.get("byte_fallback") != Some(&Value::Bool(true)) && !source.part("normalizer").is_null() {
        // Lists say nothing of it: programs that read these alone do without.
        metadata.push((WHOLE.to_owned(), Meta::String(tokenizer.to_string())));
    }
    Ok(metadata)
}

/// A `tokenizer.json` whose ids have been checked.
struct Source<'a> {
    json: &'a Value,
    model: &'a Map<String, Value>,
    /// Every id's token.
    tokens: Vec<String>,
    kinds: Vec<i32>,
    merges: Vec<[&'a str; 2]>,
}

impl<'a> Source<'a> {
    fn read(json: &'a Value, vocab_size: usize) -> Result<Self> {
        let model = json.get("model").and_then(Value::as_object).ok_or_else(|| refuse("an object `model`", json))?;
        if model.get("type").is_some_and(|kind| kind != "BPE") {
            return Err(refuse("`model.type` \"BPE\"", &model["type"]));
        }
        for field in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
            match model.get(field) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) if text.is_empty() => {}
                Some(other) => return Err(refuse(&format!("no `model.{field}`"), other)),
            }
        }
        if vocab_size > MOST_TOKENS {
            return Err(refuse(&format!("a vocab_size of at most {MOST_TOKENS}"), &json!(vocab_size)));
        }
        let vocab = model.get("vocab").and_then(Value::as_object);
        let vocab = vocab.ok_or_else(|| refuse("an object `model.vocab`", &Value::Null))?;
        let mut tokens: Vec<Option<&str>> = vec![None; vocab_size];
        let mut kinds = vec![kind::UNUSED; vocab_size];
        let mut set = |token: &'a str, id: &Value, kind: i32| {
            let place = id.as_u64().and_then(|id| usize::try_from(id).ok()).filter(|&id| id < vocab_size);
            let Some(place) = place.filter(|&id| tokens[id].is_none_or(|before| before == token)) else {
                let expected = format!("an id of its own below vocab_size, {vocab_size}, for {token:?}");
                return Err(refuse(&expected, id));
            };
            (tokens[place], kinds[place]) = (Some(token), kind);
            Ok(())
        };
        for (token, id) in vocab {
            set(token, id, kind::NORMAL)?;
        }
        for added in json.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let flag = |field: &str| added.get(field) == Some(&Value::Bool(true));
            let (Some(content), Some(id)) = (added.get("content").and_then(Value::as_str), added.get("id")) else {
                return Err(refuse("added tokens with `content` and `id`", added));
            };
            if vocab.get(content).is_some_and(|other| other != id) {
                return Err(refuse(&format!("the id that `model.vocab` has for {content:?}"), id));
            }
            let normalized = flag("normalized") && json.get("normalizer").is_some_and(|n| !n.is_null());
            if flag("single_word") || flag("lstrip") || flag("rstrip") || normalized {
                let expected = "added tokens without single_word, lstrip, rstrip, and normalized with a normalizer";
                return Err(refuse(expected, added));
            }
            set(content, id, if flag("special") { kind::CONTROL } else { kind::USER_DEFINED })?;
        }
        let tokens: Vec<String> = tokens
            .into_iter()
            .enumerate()
            .map(|(id, token)| token.map_or_else(|| format!("[PAD{id}]"), str::to_owned))
            .collect();
        // A token of the vocabulary may be called as a filler is.
        let mut names = std::collections::HashSet::with_capacity(tokens.len());
        if let Some(twice) = tokens.iter().find(|token| !names.insert(token.as_str())) {
            return Err(refuse("each token once, fillers included", &json!(twice)));
        }
        let merges = model.get("merges").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let merges = merges.iter().map(|m| merge(m).ok_or_else(|| refuse("merges of two tokens", m)));
        let merges = merges.collect::<Result<Vec<_>>>()?;
        Ok(Self { json, model, tokens, kinds, merges })
    }

    /// A part of the JSON; null where it is absent.
    fn part(&self, name: &str) -> &'a Value {
        self.json.get(name).unwrap_or(&Value::Null)
    }

    fn tokens_and_kinds(&self) -> [(&'static str, Meta); 2] {
        let tokens = Meta::Array(Array::String(self.tokens.clone()));
        [("tokens", tokens), ("token_type", Meta::Array(Array::I32(self.kinds.clone())))]
    }
}

/// A merge in either spelling: `"a b"` or `["a", "b"]`.
fn merge(value: &Value) -> Option<[&str; 2]> {
    match value {
        Value::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
        Value::Array(pair) => match pair.as_slice() {
            [left, right] => Some([left.as_str()?, right.as_str()?]),
            _ => None,
        },
        _ => None,
    }
}

/// Whether a post-processor puts the tokens `bos` and `eos` around a text. Error: it does something else.
fn around(post_processor: &Value, bos: Option<u64>, eos: Option<u64>) -> Result<(bool, bool)> {
    match post_processor.get("type").and_then(Value::as_str) {
        None | Some("ByteLevel") => Ok((false, false)),
        Some("Sequence") => {
            let parts = post_processor.get("processors").and_then(Value::as_array);
            parts.into_iter().flatten().try_fold((false, false), |(b, e), part| {
                let (more_b, more_e) = around(part, bos, eos)?;
                Ok((b || more_b, e || more_e))
            })
        }
        Some("TemplateProcessing") => {
            let single = post_processor.get("single").and_then(Value::as_array);
            let ids: Option<Vec<Option<u64>>> = single
                .into_iter()
                .flatten()
                .map(|piece| {
                    if piece.get("Sequence").is_some() {
                        return Some(None);
                    }
                    let name = piece.pointer("/SpecialToken/id")?.as_str()?;
                    match post_processor.get("special_tokens")?.get(name)?.get("ids")?.as_array()?.as_slice() {
                        [id] => id.as_u64().map(Some),
                        _ => None,
                    }
                })
                .collect();
            match ids.as_deref() {
                Some([None]) => Ok((false, false)),
                Some([first @ Some(_), None]) if *first == bos => Ok((true, false)),
                Some([None, last @ Some(_)]) if *last == eos => Ok((false, true)),
                Some([first @ Some(_), None, last @ Some(_)]) if *first == bos && *last == eos => Ok((true, true)),
                _ => Err(refuse("a template of at most the config's bos and eos around the text", post_processor)),
            }
        }
        Some(_) => Err(refuse("a `post_processor` of ByteLevel and TemplateProcessing", post_processor)),
    }
}

/// The error that a `tokenizer.json` says what GGUF cannot.
fn refuse(expected: &str, got: &Value) -> Error {
    let mut got = got.to_string();
    if let Some((at, _)) = got.char_indices().nth(120) {
        got.truncate(at);
        got.push('…');
    }
    Error::invalid(OP, expected, got)
}
