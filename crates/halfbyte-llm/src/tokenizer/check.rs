//! What is checked of a `tokenizer.json` before foreign code reads it: that code trusts its files with memory and time.

use super::growth;
use super::parts::{Added, Parts};
use halfbyte_checkpoint::json;
use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;

/// Levels of brackets; tokenizers in the field have 8.
const DEEPEST: usize = 24;

/// Values in all but vocabulary, merges and added tokens; tokenizers in the field have some hundreds.
const MOST_VALUES: usize = 1 << 14;

/// Fields of an object whose fields have names that are known.
const MOST_FIELDS: usize = 64;

/// Tokens of a vocabulary; the largest in the field has 262,144.
const MOST_TOKENS: usize = 1 << 19;

/// Merges in all, each of which takes a kilobyte while it is read; Gemma's 256,000 tokens have 580,604.
const MOST_MERGES: usize = 3 << 18;

/// Merges for each token; tokenizers in the field have 2.3 at most.
const MERGES_A_TOKEN: usize = 8;

/// Added tokens; speech models have some ten thousand.
const MOST_ADDED: usize = 1 << 17;

/// Bytes of a token: each piece of a text may become a copy of one, and those in the field are far shorter.
const LONGEST_TOKEN: usize = 4096;

/// Nodes of the tree that a Unigram vocabulary becomes, a quarter of a kilobyte each; those in the field have a million.
const MOST_NODES: usize = 1 << 21;

/// Characters of a word that WordPiece looks at, in time with their third power; tokenizers in the field have 100.
const LONGEST_WORD: u64 = 512;

/// Errors: no JSON, a name twice in one object, brackets nested too deeply; more values, tokens, merges or added tokens than
/// any tokenizer has, or longer ones; a merge that does not fit the model's prefix; and what [`growth`] refuses.
pub(super) fn check(text: &[u8]) -> Result<Parts, String> {
    let bad_json = |e| format!("expected JSON: {e}");
    let mut parts = Parts::default();
    for (name, value) in json::fields(text, MOST_FIELDS).map_err(bad_json)? {
        let name = name.as_str();
        match name {
            "model" => check_model(value, &mut parts)?,
            "added_tokens" => parts.added = check_added(value).map_err(|e| format!("`added_tokens`: {e}"))?,
            _ => {
                let value = parse(value, MOST_VALUES).map_err(|e| format!("`{name}`: {e}"))?;
                if let Some(part) = parts.by_name(name) {
                    *part = value;
                }
            }
        }
    }
    growth::check(&mut parts)?;
    Ok(parts)
}

/// A value of at most so many values, nested as deeply as tokenizers are.
fn parse(value: &RawValue, values: usize) -> Result<Value, String> {
    let value = json::parse_at_most(value.get().as_bytes(), values).map_err(|e| format!("expected JSON: {e}"))?;
    // Two levels lie around it.
    check_depth(&value, DEEPEST - 1)?;
    Ok(value)
}

fn check_depth(value: &Value, levels: usize) -> Result<(), String> {
    let Some(below) = levels.checked_sub(1) else {
        return Err(format!("expected at most {DEEPEST} levels of brackets, got more"));
    };
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| check_depth(value, below)),
        Value::Object(fields) => fields.values().try_for_each(|value| check_depth(value, below)),
        _ => Ok(()),
    }
}

fn check_added(tokens: &RawValue) -> Result<Vec<Added>, String> {
    let mut added = Vec::new();
    // What is no list is refused by who reads it.
    if !tokens.get().starts_with('[') {
        return Ok(added);
    }
    each(tokens, &mut |token: &RawValue| {
        if added.len() == MOST_ADDED {
            return Err(format!("expected at most {MOST_ADDED}, got more"));
        }
        let token = parse(token, MOST_FIELDS)?;
        let is = |field: &str| token[field] == Value::Bool(true);
        let content = token["content"].as_str().unwrap_or_default().to_owned();
        check_length(content.len())?;
        added.push(Added { content, strips: is("lstrip") || is("rstrip"), normalized: is("normalized") });
        Ok(())
    })?;
    Ok(added)
}

fn check_length(length: usize) -> Result<(), String> {
    match length <= LONGEST_TOKEN {
        true => Ok(()),
        false => Err(format!("expected tokens of at most {LONGEST_TOKEN} bytes, got one of {length}")),
    }
}

fn check_model(model: &RawValue, parts: &mut Parts) -> Result<(), String> {
    let bad_json = |e| format!("`model`: expected JSON: {e}");
    // A model that is no object is refused by who reads it.
    if !model.get().starts_with('{') {
        return Ok(());
    }
    let (mut vocab, mut merges) = (None, None);
    for (name, value) in json::fields(model.get().as_bytes(), MOST_FIELDS).map_err(bad_json)? {
        match name.as_str() {
            "vocab" => vocab = Some(value),
            "merges" => merges = Some(value),
            _ => {
                let value = parse(value, MOST_VALUES).map_err(|e| format!("`model.{name}`: {e}"))?;
                parts.model.insert(name, value);
            }
        }
    }
    if let Some(got) =
        parts.model.get("max_input_chars_per_word").filter(|v| v.as_u64().is_some_and(|v| v > LONGEST_WORD))
    {
        return Err(format!("`model.max_input_chars_per_word`: expected at most {LONGEST_WORD}, got {got}"));
    }
    if let Some(vocab) = vocab {
        parts.vocab = match vocab.get().starts_with('[') {
            true => check_pieces(vocab)?,
            false => json::fields(vocab.get().as_bytes(), MOST_TOKENS)
                .map_err(|e| format!("`model.vocab`: expected JSON: {e}"))?
                .into_iter()
                .map(|(token, _)| token)
                .collect(),
        };
        parts
            .vocab
            .iter()
            .try_for_each(|token| check_length(token.len()))
            .map_err(|e| format!("`model.vocab`: {e}"))?;
    }
    let prefix = parts.model.get("continuing_subword_prefix").and_then(Value::as_str).unwrap_or("");
    let most = MOST_MERGES.min(MERGES_A_TOKEN.saturating_mul(parts.vocab.len()));
    merges.map_or(Ok(()), |merges| check_merges(merges, prefix, most))
}

/// A Unigram vocabulary: pairs of a token and its score. The tree has a node for each distinct beginning of a token.
fn check_pieces(vocab: &RawValue) -> Result<Vec<String>, String> {
    let fail = |what: String| format!("`model.vocab`: {what}");
    let mut tokens = Vec::new();
    each(vocab, &mut |item: &RawValue| {
        if tokens.len() == MOST_TOKENS {
            return Err(format!("expected at most {MOST_TOKENS} tokens, got more"));
        }
        let (token, _): (String, IgnoredAny) =
            serde_json::from_str(item.get()).map_err(|e| format!("expected JSON: {e}"))?;
        tokens.push(token);
        Ok(())
    })
    .map_err(fail)?;
    let mut sorted: Vec<&[u8]> = tokens.iter().map(|token| token.as_bytes()).collect();
    sorted.sort_unstable();
    let (mut nodes, mut before) = (0, &[][..]);
    for token in sorted {
        nodes += token.len() - before.iter().zip(token).take_while(|(a, b)| a == b).count();
        before = token;
    }
    match nodes <= MOST_NODES {
        true => Ok(tokens),
        false => Err(fail(format!("expected tokens with {MOST_NODES} distinct beginnings at most, got {nodes}"))),
    }
}

/// The prefix is cut off the second part of every merge, without a look whether it is there.
fn check_merges(merges: &RawValue, prefix: &str, most: usize) -> Result<(), String> {
    let mut count = 0;
    let fail = |what: String| format!("`model.merges`: {what}");
    let check = &mut |merge: &RawValue| {
        count += 1;
        if count > most {
            return Err(format!(
                "expected at most {MERGES_A_TOKEN} merges for each token, and {MOST_MERGES} in all: {most} here, got more"
            ));
        }
        if prefix.is_empty() {
            return Ok(());
        }
        let text = merge.get();
        let second = if text.starts_with('"') {
            let pair: Option<Cow<'_, str>> = serde_json::from_str(text).ok();
            pair.and_then(|pair| pair.split_once(' ').map(|(_, second)| second.to_owned()))
        } else {
            serde_json::from_str::<(IgnoredAny, String)>(text).ok().map(|(_, second)| second)
        };
        match second.is_some_and(|second| !second.starts_with(prefix)) {
            true => Err(format!("expected second parts that begin with {prefix:?}, got {}", super::parts::short(text))),
            false => Ok(()),
        }
    };
    match merges.get().starts_with('[') {
        true => each(merges, check).map_err(fail),
        false => Ok(()),
    }
}

/// Hands on the values of an array, unread.
fn each(array: &RawValue, take: &mut dyn FnMut(&RawValue) -> Result<(), String>) -> Result<(), String> {
    struct Each<'a>(&'a mut dyn FnMut(&RawValue) -> Result<(), String>, &'a mut Option<String>);
    impl<'de> Visitor<'de> for Each<'_> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
            while let Some(item) = seq.next_element::<&RawValue>()? {
                if let Err(why) = (self.0)(item) {
                    *self.1 = Some(why);
                    return Err(serde::de::Error::custom("refused"));
                }
            }
            Ok(())
        }
    }
    let mut refused = None;
    let read = serde_json::Deserializer::from_str(array.get()).deserialize_seq(Each(take, &mut refused));
    read.map_err(|e| refused.unwrap_or_else(|| format!("expected JSON: {e}")))
}

/// Whether all of these are tokens.
pub(super) fn all_in(tokens: impl IntoIterator<Item = String>, vocabulary: &[String]) -> bool {
    let known: HashSet<&str> = vocabulary.iter().map(String::as_str).collect();
    tokens.into_iter().all(|token| known.contains(token.as_str()))
}
