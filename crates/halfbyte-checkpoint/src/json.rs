//! JSON of hostile files: names are unique; nesting, length and the number of values are bounded.
//!
//! Of two fields of one name, one reader takes the first, the next the last, and a file could tell each what it likes.

use crate::error::Result as FileResult;
use crate::regular::read_at_most;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::cell::Cell;
use std::collections::HashSet;
use std::path::Path;

/// The longest JSON file that is read.
const LONGEST: u64 = 100_000_000;

/// Values that [`parse`] takes, each of which takes more memory than its two bytes in the file: far more than configs have.
const MOST_VALUES: usize = 1 << 18;

/// Reads a JSON file whole. Errors: it cannot be read, is no regular file, or is absurdly long: more than 100 MB.
pub fn read_small(path: &Path) -> FileResult<Vec<u8>> {
    read_at_most(path, LONGEST)
}

/// Refuses what Git LFS leaves in the place of a file that it has not fetched.
pub(crate) fn refuse_lfs_pointer(file: &Path, content: &[u8]) -> FileResult<()> {
    if !content.starts_with(b"version https://git-lfs.github.com/spec/") {
        return Ok(());
    }
    let what = "is a pointer of Git LFS, which stands for the file; `git lfs pull` fetches it";
    Err(crate::error::Error::malformed(file, what))
}

/// Parses a JSON text. Errors, each with line and column: no JSON, a name twice in one object, more than 128 levels, more
/// than a quarter of a million values.
pub fn parse(text: &[u8]) -> serde_json::Result<Value> {
    parse_at_most(text, MOST_VALUES)
}

/// [`parse`] of at most so many values. Errors: as there, more values than these.
pub fn parse_at_most(text: &[u8], values: usize) -> serde_json::Result<Value> {
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = Unique { most: values, left: &Cell::new(values) }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

/// Levels of brackets that are read, as serde_json has it.
const DEEPEST: usize = 128;

/// The fields of a JSON object in their order, their values unread. Errors: no object, a name twice, more names than this,
/// more than 128 levels.
pub fn fields(text: &[u8], most: usize) -> serde_json::Result<Vec<(String, &RawValue)>> {
    if depth(text) > DEEPEST {
        return Err(serde_json::Error::custom("recursion limit exceeded"));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let fields = deserializer.deserialize_map(Fields { most })?;
    deserializer.end()?;
    Ok(fields)
}

/// The most brackets that are open at a time.
fn depth(text: &[u8]) -> usize {
    let (mut open, mut deepest, mut in_string, mut escaped) = (0usize, 0, false, false);
    for &byte in text {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            b'[' | b'{' if !in_string => {
                open += 1;
                deepest = deepest.max(open);
            }
            b']' | b'}' if !in_string => open = open.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

struct Fields {
    most: usize,
}

impl<'de> Visitor<'de> for Fields {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut fields = Vec::new();
        while let Some(field) = map.next_entry::<String, &RawValue>()? {
            if fields.len() == self.most {
                return Err(A::Error::custom(format!("expected at most {} names, got more", self.most)));
            }
            fields.push(field);
        }
        let mut seen = HashSet::with_capacity(fields.len());
        if let Some((twice, _)) = fields.iter().find(|(name, _)| !seen.insert(name.as_str())) {
            return Err(A::Error::custom(format!("`{}` appears twice", twice.escape_debug())));
        }
        drop(seen);
        Ok(fields)
    }
}

/// A value in which no object has a name twice, of no more values than are left.
#[derive(Clone, Copy)]
struct Unique<'a> {
    most: usize,
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Unique<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let Some(left) = self.left.get().checked_sub(1) else {
            return Err(D::Error::custom(format!("expected at most {} values", self.most)));
        };
        self.left.set(left);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unique<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = seq.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = map.next_key::<String>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format!("`{}` appears twice", name.escape_debug())));
            }
            fields.insert(name, map.next_value_seed(self)?);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_any_parser_and_names_are_unique() {
        let text = r#" {"a": [null, true, -3, 18446744073709551615, 0.1, "x\n", []], "b": {"a": {}}} "#;
        assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for text in [r#"{"a":1,"a":1}"#, r#"{"a":1,"\u0061":2}"#, r#"[{"b":{"x":0,"a":1,"a":2}}]"#] {
            let error = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("`a` appears twice at line 1"), "{error}");
        }
        for text in ["", "{", "{}{}", "nul", "{\"a\":1e999}", "\"\u{1}\"", "{\"a\":\"\\ud800\"}"] {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse(b"\"\xff\"").is_err());
        for open in ["[", "{\"a\":"] {
            let error = parse(open.repeat(100_000).as_bytes()).unwrap_err().to_string();
            assert!(error.contains("recursion limit"), "{error}");
            let error = fields(format!("{{\"a\":{}", open.repeat(100_000)).as_bytes(), 1).unwrap_err().to_string();
            assert!(error.contains("recursion limit"), "{error}");
        }
        let brackets = format!("{{\"a\":\"{}\\\"{}\",\"b\":[]}}", "[".repeat(200), "{".repeat(200));
        assert_eq!(fields(brackets.as_bytes(), 2).unwrap()[1].1.get(), "[]");
        assert!(fields(brackets.as_bytes(), 1).unwrap_err().to_string().contains("at most 1 names"));
        let many = format!("[{}0]", "0,".repeat(8));
        assert_eq!(parse_at_most(many.as_bytes(), 10).unwrap().as_array().unwrap().len(), 9);
        for (text, most) in [(many.clone(), 9), (format!("[{}0]", "{},".repeat(MOST_VALUES)), MOST_VALUES)] {
            let error = parse_at_most(text.as_bytes(), most).unwrap_err().to_string();
            assert!(error.contains(&format!("expected at most {most} values")), "{error}");
        }
    }
}
