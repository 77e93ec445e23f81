//! Fields of a `config.json`, taken with their types checked.

use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// No dimension of a model comes near this; one beyond it is a broken file.
const LARGEST_DIMENSION: usize = 1 << 28;

/// The fields of a JSON object, taken with their types checked. A null counts as absent.
#[derive(Clone, Copy, Debug)]
pub struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Those of a file's object.
    pub(crate) fn new(path: &'a Path, map: &'a Map<String, Value>) -> Self {
        Self { path, prefix: "", map }
    }

    /// Those of the object in a field.
    pub(crate) fn inner<'b>(&self, field: &'b str) -> Result<Option<Fields<'b>>>
    where
        'a: 'b,
    {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(self.within(field, map))),
            Some(other) => Err(self.refuse(field, "an object or null", shown(other))),
        }
    }

    /// Those of another object, which errors call `field`.
    pub(crate) fn within<'b>(&self, field: &'b str, map: &'b Map<String, Value>) -> Fields<'b>
    where
        'a: 'b,
    {
        Fields { path: self.path, prefix: field, map }
    }

    /// The object itself.
    pub(crate) fn object(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// What errors call it; nothing where it is the file's.
    pub(crate) fn name(&self) -> &'a str {
        self.prefix
    }

    /// Whether a field is there and says null.
    pub(crate) fn is_null(&self, field: &str) -> bool {
        self.map.get(field).is_some_and(Value::is_null)
    }

    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    /// The first of several spellings that is there; else the first.
    pub(crate) fn spelling(&self, fields: &[&'static str]) -> &'static str {
        let there = fields.iter().find(|field| self.get(field).is_some());
        there.or(fields.first()).copied().unwrap_or_default()
    }

    pub(crate) fn refuse(&self, field: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        let field = if self.prefix.is_empty() { field.to_owned() } else { format!("{}.{field}", self.prefix) };
        Error::Config { path: PathBuf::from(self.path), field, expected: expected.into(), got: got.to_string() }
    }

    pub(crate) fn size(&self, field: &str) -> Result<usize> {
        let expected = || format!("a whole number from 1 to {LARGEST_DIMENSION}");
        self.optional_size(field)?.ok_or_else(|| self.refuse(field, expected(), "nothing"))
    }

    pub(crate) fn optional_size(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) if (1..=LARGEST_DIMENSION).contains(&v) => Ok(Some(v)),
            _ => Err(self.refuse(field, format!("a whole number from 1 to {LARGEST_DIMENSION}"), shown(value))),
        }
    }

    /// A whole number, which may be 0.
    pub(crate) fn count(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) if v <= LARGEST_DIMENSION => Ok(Some(v)),
            _ => Err(self.refuse(field, format!("a whole number from 0 to {LARGEST_DIMENSION}"), shown(value))),
        }
    }

    pub(crate) fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v.is_finite() => Ok(Some(v)),
            _ => Err(self.refuse(field, "a number", shown(value))),
        }
    }

    pub(crate) fn factor(&self, field: &str) -> Result<f64> {
        match self.number(field)? {
            Some(v) if v > 0.0 => Ok(v),
            Some(v) => Err(self.refuse(field, "a number above 0", v)),
            None => Err(self.refuse(field, "a number above 0", "nothing")),
        }
    }

    pub(crate) fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(v)) => Ok(*v),
            Some(other) => Err(self.refuse(field, "true or false", shown(other))),
        }
    }

    pub(crate) fn string(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.refuse(field, "a string", shown(other))),
        }
    }

    /// A list of whole numbers.
    pub(crate) fn counts(&self, field: &str) -> Result<Vec<u64>> {
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => {
                let number =
                    |value: &Value| value.as_u64().ok_or_else(|| self.refuse(field, "whole numbers", shown(value)));
                list.iter().map(number).collect()
            }
            Some(other) => Err(self.refuse(field, "a list of whole numbers", shown(other))),
        }
    }

    /// A list of so many numbers above 0.
    pub(crate) fn factors(&self, field: &str, count: usize) -> Result<Vec<f64>> {
        let expected = || format!("{count} numbers above 0");
        match self.get(field) {
            Some(Value::Array(list)) if list.len() == count => {
                let number = |value: &Value| value.as_f64().filter(|v| v.is_finite() && *v > 0.0);
                let factor = |value: &Value| number(value).ok_or_else(|| self.refuse(field, expected(), shown(value)));
                list.iter().map(factor).collect()
            }
            Some(Value::Array(list)) => Err(self.refuse(field, expected(), format!("{} values", list.len()))),
            other => Err(self.refuse(field, expected(), other.map_or("nothing".to_owned(), shown))),
        }
    }

    /// A list of strings.
    pub(crate) fn strings(&self, field: &str) -> Result<Option<Vec<&'a str>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(list)) => {
                let text = |value: &'a Value| value.as_str().ok_or_else(|| self.refuse(field, "strings", shown(value)));
                Ok(Some(list.iter().map(text).collect::<Result<_>>()?))
            }
            Some(other) => Err(self.refuse(field, "a list of strings", shown(other))),
        }
    }

    /// One token id, several, or none.
    pub(crate) fn tokens(&self, field: &str, vocab: usize) -> Result<Vec<u32>> {
        let token = |value: &Value| match value.as_u64().and_then(|v| u32::try_from(v).ok()) {
            Some(v) if (v as usize) < vocab => Ok(v),
            _ => Err(self.refuse(field, format!("token ids below {vocab}"), shown(value))),
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token).collect(),
            Some(value) => Ok(vec![token(value)?]),
        }
    }
}

/// A value as text, cut where it is long.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
