//! What is checked of a `tokenizer.json` before foreign code reads it: that code trusts its files with memory and time.

use halfbyte_checkpoint::json;
use serde_json::Value;

/// Levels of brackets; tokenizers in the field have 8.
const DEEPEST: usize = 24;

/// How many times longer a chain of replacements may make a text.
const MOST_GROWTH: usize = 4096;

/// How many copies of a part nested repetitions of a regular expression may ask for.
const MOST_COPIES: usize = 4096;

/// Errors: no JSON, a name twice in one object, brackets nested too deeply, a merge that does not fit the model's prefix,
/// a table of characters that lies about its length, replacements that multiply a text, repetitions that multiply a
/// regular expression.
pub(super) fn check(text: &[u8]) -> Result<(), String> {
    let file = json::parse(text).map_err(|e| format!("expected JSON: {e}"))?;
    check_depth(&file, DEEPEST)?;
    check_merges(&file["model"])?;
    for part in ["normalizer", "pre_tokenizer", "decoder"] {
        let mut growth = Some(1);
        check_part(&file[part], &mut growth).map_err(|e| format!("`{part}`: {e}"))?;
        if growth.is_none() {
            return Err(format!("`{part}`: expected replacements that make a text at most {MOST_GROWTH} times longer"));
        }
    }
    Ok(())
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

/// The prefix is cut off the second part of every merge, without a look whether it is there.
fn check_merges(model: &Value) -> Result<(), String> {
    let Some(prefix) = model["continuing_subword_prefix"].as_str().filter(|prefix| !prefix.is_empty()) else {
        return Ok(());
    };
    for merge in model["merges"].as_array().into_iter().flatten() {
        let second = match merge {
            Value::String(pair) => pair.split_once(' ').map(|(_, second)| second),
            pair => pair[1].as_str(),
        };
        if second.is_some_and(|second| !second.starts_with(prefix)) {
            return Err(format!("`model.merges`: expected second parts that begin with {prefix:?}, got {merge}"));
        }
    }
    Ok(())
}

/// Checks an object and what lies in it. `growth` is how many times longer a text becomes, None if that is too much.
fn check_part(part: &Value, growth: &mut Option<usize>) -> Result<(), String> {
    match part {
        Value::Array(parts) => parts.iter().try_for_each(|part| check_part(part, growth)),
        Value::Object(fields) => {
            if let Some(table) = fields.get("precompiled_charsmap").and_then(Value::as_str) {
                check_characters(table)?;
            }
            let pattern = fields.get("pattern").unwrap_or(&Value::Null);
            if let Some(pattern) = pattern["Regex"].as_str() {
                check_repetitions(pattern)?;
            }
            if let Some(content) = fields.get("content").and_then(Value::as_str) {
                // What matches nothing at all stands in front of every character.
                let beside = usize::from(pattern["String"].as_str().is_none_or(str::is_empty));
                let longer = (content.chars().count() + beside).max(1);
                *growth = growth.and_then(|so_far| so_far.checked_mul(longer)).filter(|&g| g <= MOST_GROWTH);
            }
            fields.values().try_for_each(|field| check_part(field, growth))
        }
        _ => Ok(()),
    }
}

/// A table in base64: its first four bytes say how long its first part is, and memory is taken for that.
fn check_characters(table: &str) -> Result<(), String> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(u64::from(c - b'A')),
        b'a'..=b'z' => Some(u64::from(c - b'a') + 26),
        b'0'..=b'9' => Some(u64::from(c - b'0') + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let first =
        table.as_bytes().get(..6).and_then(|digits| digits.iter().try_fold(0, |bits, &c| Some(bits << 6 | digit(c)?)));
    let Some(first) = first else {
        return Err("`precompiled_charsmap`: expected base64 of at least 4 bytes".to_owned());
    };
    let length = ((first >> 4) as u32).swap_bytes();
    let most = table.len().saturating_mul(3) / 4 - 4;
    if length as usize > most {
        return Err(format!(
            "`precompiled_charsmap`: expected a table of at most {most} bytes, got a length of {length}"
        ));
    }
    Ok(())
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
            "expected a regular expression with repetitions of at most {MOST_COPIES} in all, got {pattern:?}"
        )),
    }
}
