//! How much longer a tokenizer may make a text, and what its regular expressions may take.

use super::parts::{Parts, short};
use serde_json::Value;

/// How many times longer a chain of replacements may make a text.
const MOST_GROWTH: usize = 4096;

/// How many copies of a part nested repetitions of a regular expression may ask for.
const MOST_COPIES: usize = 4096;

/// Steps of a normalizer, a pre-tokenizer, a decoder or a post-processor; tokenizers in the field have some ten.
const MOST_STEPS: usize = 512;

/// Bytes of a regular expression or another text in a step; the longest in the field has 3,000.
const LONGEST_TEXT: usize = 1 << 14;

/// How often a post-processor may repeat the tokens of a text.
const MOST_REPEATS: usize = 16;

/// A text may become so many times longer whatever its length: SentencePiece's tables make 18 characters of one.
const ANY_LENGTH: usize = 64;

/// Bytes that a text may become where it becomes longer than that.
const MOST_BYTES: usize = 1 << 21;

/// Errors: a table of characters that lies about its length, replacements that multiply a text, or replace nothing at all,
/// repetitions that multiply a regular expression, templates that multiply the tokens.
pub(super) fn check(parts: &mut Parts) -> Result<(), String> {
    let mut of_texts = 1usize;
    for (name, part) in
        [("normalizer", &parts.normalizer), ("pre_tokenizer", &parts.pre_tokenizer), ("decoder", &parts.decoder)]
    {
        let mut chain = Chain { steps: 0, growth: Some(1) };
        chain.check(part).map_err(|e| format!("`{name}`: {e}"))?;
        let Some(growth) = chain.growth else {
            return Err(format!("`{name}`: expected replacements that make a text at most {MOST_GROWTH} times longer"));
        };
        match name {
            "decoder" => {
                let longest = parts.vocab.iter().map(String::len).max().unwrap_or(0);
                check_text(growth, longest).map_err(|e| format!("`{name}`: {e}"))?;
            }
            _ => of_texts = of_texts.saturating_mul(growth),
        }
    }
    if repeats(&parts.post_processor).is_none_or(|repeats| repeats > MOST_REPEATS) {
        return Err(format!("`post_processor`: expected templates that repeat a text at most {MOST_REPEATS} times"));
    }
    parts.growth = of_texts;
    let length = parts.added.iter().filter(|token| token.normalized).map(|token| token.content.len()).sum();
    check_text(of_texts, length).map_err(|e| format!("`added_tokens`: {e}"))
}

/// Error: a text of this length that may become so many times longer takes too much memory.
pub(super) fn check_text(growth: usize, length: usize) -> Result<(), String> {
    match growth <= ANY_LENGTH || length.saturating_mul(growth) <= MOST_BYTES {
        true => Ok(()),
        false => Err(format!(
            "expected at most {} bytes of text, which its replacements make up to {growth} times longer, got {length}",
            MOST_BYTES / growth
        )),
    }
}

/// How often a post-processor has the tokens of a text; None: too often to count.
fn repeats(processor: &Value) -> Option<usize> {
    if let Some(single) = processor["single"].as_array() {
        return Some(single.iter().filter(|piece| piece.get("Sequence").is_some()).count().max(1));
    }
    let inner = processor["processors"].as_array().map_or(&[][..], Vec::as_slice);
    inner.iter().try_fold(1usize, |product, inner| product.checked_mul(repeats(inner)?))
}

/// Steps one after the other.
struct Chain {
    steps: usize,
    /// How many times longer a text becomes, None if that is too much.
    growth: Option<usize>,
}

impl Chain {
    /// Checks a step and those in it.
    fn check(&mut self, step: &Value) -> Result<(), String> {
        match step {
            Value::Array(steps) => steps.iter().try_for_each(|step| self.check(step)),
            Value::Object(fields) => {
                if let Some(kind) = fields.get("type").and_then(Value::as_str) {
                    self.steps += 1;
                    if self.steps > MOST_STEPS {
                        return Err(format!("expected at most {MOST_STEPS} steps, got more"));
                    }
                    self.grow(growth_of(kind, step)?);
                }
                if let Some(pattern) = step["pattern"]["Regex"].as_str() {
                    check_repetitions(pattern)?;
                }
                for (name, text) in fields.iter().filter_map(|(name, value)| Some((name, value.as_str()?))) {
                    if text.len() > LONGEST_TEXT && name != "precompiled_charsmap" && self.growth.is_some() {
                        return Err(format!("`{name}`: expected at most {LONGEST_TEXT} bytes, got {}", text.len()));
                    }
                }
                fields.values().try_for_each(|field| self.check(field))
            }
            _ => Ok(()),
        }
    }

    fn grow(&mut self, times: usize) {
        self.growth = self.growth.and_then(|so_far| so_far.checked_mul(times)).filter(|&growth| growth <= MOST_GROWTH);
    }
}

/// How many times more characters a step may make of a text.
fn growth_of(kind: &str, step: &Value) -> Result<usize, String> {
    let characters = |field: &str| step[field].as_str().map_or(0, |text| text.chars().count());
    for (name, text) in [("pattern", &step["pattern"]["String"]), ("pattern", &step["pattern"]["Regex"])]
        .into_iter()
        .chain(["suffix", "pad_token", "word_delimiter_token"].map(|name| (name, &step[name])))
    {
        if text.as_str().is_some_and(str::is_empty) && (name == "pattern" || matches!(kind, "BPEDecoder" | "CTC")) {
            return Err(format!("`{name}`: expected a text to look for, got an empty one"));
        }
    }
    Ok(match kind {
        // What matches nothing at all stands in front of every character.
        "Replace" => characters("content") + usize::from(step["pattern"]["String"].as_str().is_none()),
        "Prepend" => characters("prepend") + 1,
        // A byte becomes a character.
        "ByteLevel" => 4,
        // A piece may get one more in front.
        "Metaspace" => 2,
        // Spaces on both sides.
        "BertNormalizer" => 3,
        "Precompiled" => step["precompiled_charsmap"].as_str().map_or(Ok(1), longest_replacement)?,
        _ => 1,
    }
    .max(1))
}

/// The longest replacement of a table in base64, in characters. Its first four bytes say how long its first part is, and
/// memory is taken for that; then come texts, each with a zero at its end.
fn longest_replacement(table: &str) -> Result<usize, String> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(u32::from(c - b'A')),
        b'a'..=b'z' => Some(u32::from(c - b'a') + 26),
        b'0'..=b'9' => Some(u32::from(c - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::with_capacity(table.len() / 4 * 3);
    for four in table.trim_end_matches('=').as_bytes().chunks(4) {
        let Some(bits) = four.iter().try_fold(0, |bits, &c| Some(bits << 6 | digit(c)?)) else { break };
        let bits: u32 = bits << (6 * (4 - four.len()));
        bytes.extend(&bits.to_be_bytes()[1..four.len().max(1)]);
    }
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
        return Err("`precompiled_charsmap`: expected base64 of at least 4 bytes".to_owned());
    };
    let length = u32::from_le_bytes(*length);
    let most = table.len().saturating_mul(3) / 4 - 4;
    if length as usize > most {
        return Err(format!(
            "`precompiled_charsmap`: expected a table of at most {most} bytes, got a length of {length}"
        ));
    }
    let texts = rest.get(length as usize..).unwrap_or_default().split(|&b| b == 0);
    Ok(texts.map(|text| String::from_utf8_lossy(text).chars().count()).max().unwrap_or(1))
}

/// Repetitions within repetitions are written out by the compiler of regular expressions.
fn check_repetitions(pattern: &str) -> Result<(), String> {
    let mut copies = Some(1usize);
    for counted in pattern.split('{').skip(1) {
        let Some((counts, _)) = counted.split_once('}') else { continue };
        let numbers = || counts.split(',').map(str::trim).filter(|count| !count.is_empty());
        if numbers().all(|count| count.bytes().all(|b| b.is_ascii_digit())) {
            let most = numbers().map(|count| count.parse().unwrap_or(usize::MAX)).max().unwrap_or(1).max(1);
            copies = copies.and_then(|copies| copies.checked_mul(most)).filter(|&copies| copies <= MOST_COPIES);
        }
    }
    match copies {
        Some(_) => Ok(()),
        None => Err(format!(
            "expected a regular expression with repetitions of at most {MOST_COPIES} in all, got {}",
            short(&format!("{pattern:?}"))
        )),
    }
}
