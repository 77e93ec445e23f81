//! The fields of a request's body, taken one by one and checked; what nobody took is refused, as OpenAI does.

use crate::error::ApiError;
use halfbyte_checkpoint::json;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Values that a body may hold, each of which takes more memory than its two bytes: a prompt of token ids has one each.
const MOST_VALUES: usize = 1 << 20;

type Result<T> = std::result::Result<T, ApiError>;

/// An object of JSON, and where in the body it stands.
#[derive(Debug)]
pub struct Fields {
    fields: Map<String, Value>,
    path: String,
}

impl Fields {
    /// Of a whole body. Errors: no JSON, no object, a name twice, too many values or levels.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let value = json::parse_at_most(body, MOST_VALUES).map_err(|e| {
            ApiError::invalid(format!(
                "We could not parse the JSON body of your request: {e}. It must be a JSON object."
            ))
        })?;
        Self::of(value, "")
    }

    /// Of a value at a place of the body. Error: no object.
    pub fn of(value: Value, path: impl Into<String>) -> Result<Self> {
        let path = path.into();
        match value {
            Value::Object(fields) => Ok(Self { fields, path }),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// The path of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// A field that is there and not null.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    /// A field that must be there.
    pub fn required(&mut self, name: &str) -> Result<Value> {
        self.take(name).ok_or_else(|| {
            let path = self.path(name);
            ApiError::field(&path, "missing_required_parameter", format!("Missing required parameter: '{path}'."))
        })
    }

    /// True or false.
    pub fn boolean(&mut self, name: &str) -> Result<Option<bool>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(wrong_type(&self.path(name), "a boolean", &other)),
        }
    }

    /// A text.
    pub fn text(&mut self, name: &str) -> Result<Option<String>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// A text that must be there.
    pub fn required_text(&mut self, name: &str) -> Result<String> {
        let value = self.required(name)?;
        match value {
            Value::String(text) => Ok(text),
            other => Err(wrong_type(&self.path(name), "a string", &other)),
        }
    }

    /// A number within bounds.
    pub fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let path = self.path(name);
        let number =
            value.as_f64().filter(|_| value.is_number()).ok_or_else(|| wrong_type(&path, "a decimal", &value))?;
        within(&path, (number, &value), &range, ["decimal_below_min_value", "decimal_above_max_value"])?;
        Ok(Some(number))
    }

    /// A whole number within bounds.
    pub fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let path = self.path(name);
        let number = whole(&value).ok_or_else(|| wrong_type(&path, "an integer", &value))?;
        let range = i128::from(*range.start())..=i128::from(*range.end());
        within(&path, (number, &value), &range, ["integer_below_min_value", "integer_above_max_value"])?;
        Ok(i64::try_from(number).ok())
    }

    /// The same, at least 0.
    pub fn count(&mut self, name: &str, range: RangeInclusive<usize>) -> Result<Option<usize>> {
        let bound = |n: &usize| i64::try_from(*n).unwrap_or(i64::MAX);
        Ok(self.integer(name, bound(range.start())..=bound(range.end()))?.map(|n| n as usize))
    }

    /// A list.
    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong_type(&self.path(name), "an array", &other)),
        }
    }

    /// An object.
    pub fn object(&mut self, name: &str) -> Result<Option<Fields>> {
        let path = self.path(name);
        self.take(name).map(|value| Self::of(value, path)).transpose()
    }

    /// Fields that say nothing about what a model writes.
    pub fn ignore(&mut self, names: &[&str]) {
        names.iter().for_each(|name| drop(self.fields.remove(*name)));
    }

    /// Fields that would change what is written, and are not served, unless they say what is done anyway.
    pub fn refuse(&mut self, name: &str, neutral: &[Value]) -> Result<()> {
        match self.take(name) {
            Some(value) if !neutral.contains(&value) => {
                let path = self.path(name);
                Err(ApiError::field(
                    &path,
                    "unsupported_parameter",
                    format!("Unsupported parameter: '{path}' is not served here."),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Nothing is left. Error: a field that nobody took.
    pub fn finish(self) -> Result<()> {
        match self.fields.keys().next() {
            None => Ok(()),
            Some(name) => {
                let path: String = self.path(name).chars().take(200).collect();
                Err(ApiError::field(&path, "unknown_parameter", format!("Unknown parameter: '{path}'.")))
            }
        }
    }
}

/// A value of another type.
pub fn wrong_type(path: &str, expected: &str, got: &Value) -> ApiError {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) if whole(got).is_some() => "an integer",
        Value::Number(_) => "a decimal",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    let what = if path.is_empty() { "the body".to_owned() } else { format!("'{path}'") };
    let message = format!("Invalid type for {what}: expected {expected}, but got {got} instead.");
    match path {
        "" => ApiError::invalid(message),
        path => ApiError::field(path, "invalid_type", message),
    }
}

/// A value of the right type that is none of those that may be.
pub fn wrong_value(path: &str, expected: &str) -> ApiError {
    ApiError::field(path, "invalid_value", format!("Invalid value for '{path}': expected {expected}."))
}

/// Token ids in the place of a text; None if the list holds something else. Error: integers that are not all ids of the vocabulary.
pub fn token_ids(path: &str, list: &[Value], vocab: usize) -> Result<Option<Vec<u32>>> {
    let numbers: Option<Vec<i128>> = list.iter().map(whole).collect();
    let id = |number: i128| u32::try_from(number).ok().filter(|&id| (id as usize) < vocab);
    let Some(numbers) = numbers else { return Ok(None) };
    match numbers.into_iter().map(id).collect() {
        None => Err(wrong_value(path, &format!("token ids from 0 to {}", vocab.saturating_sub(1)))),
        ids => Ok(ids),
    }
}

/// An integer. One of more than 64 bits was read as a decimal: its size is right, its last digits are not.
fn whole(value: &Value) -> Option<i128> {
    const BITS_64: f64 = (1u64 << 63) as f64;
    let integer = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
    integer.or_else(|| value.as_f64().filter(|number| number.abs() >= BITS_64).map(|number| number as i128))
}

/// Refuses a number outside of bounds, with the code of those below or above.
fn within<T: PartialOrd + std::fmt::Display>(
    path: &str,
    (number, value): (T, &Value),
    range: &RangeInclusive<T>,
    [below, above]: [&'static str; 2],
) -> Result<()> {
    if number < *range.start() {
        let message =
            format!("Invalid '{path}': {value} is below the minimum value. Expected a value >= {}.", range.start());
        return Err(ApiError::field(path, below, message));
    }
    if !range.contains(&number) {
        let message =
            format!("Invalid '{path}': {value} is above the maximum value. Expected a value <= {}.", range.end());
        return Err(ApiError::field(path, above, message));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn error<T: std::fmt::Debug>(result: Result<T>) -> (String, Option<&'static str>, Option<String>) {
        let ApiError { message, code, param, .. } = result.unwrap_err();
        (message, code, param)
    }

    #[test]
    fn fields_are_checked_and_what_nobody_took_is_refused() {
        let body = br#"{"a": true, "b": 1.5, "c": 3, "d": null, "e": {"f": "x", "g": 1}, "h": [1], "i": 2}"#;
        let mut fields = Fields::parse(body).unwrap();
        assert_eq!(fields.boolean("a").unwrap(), Some(true));
        assert_eq!(fields.number("b", 0.0..=2.0).unwrap(), Some(1.5));
        assert_eq!(fields.integer("c", 0..=5).unwrap(), Some(3));
        assert_eq!(fields.text("d").unwrap(), None);
        let mut inner = fields.object("e").unwrap().unwrap();
        assert_eq!(inner.required_text("f").unwrap(), "x");
        assert_eq!(error(inner.finish()).2.as_deref(), Some("e.g"));
        assert_eq!(fields.list("h").unwrap().unwrap(), [json!(1)]);
        let (message, code, param) = error(fields.finish());
        assert_eq!(
            (message.as_str(), code, param.as_deref()),
            ("Unknown parameter: 'i'.", Some("unknown_parameter"), Some("i"))
        );
    }

    #[test]
    fn types_and_bounds() {
        let parse = |body: &str| Fields::parse(body.as_bytes());
        for bad in ["", "[]", "{", "{} x", r#"{"a": 1, "a": 2}"#, "3", "\u{0}", &"[".repeat(500)] {
            assert_eq!(error(parse(bad)).2, None, "{bad}");
        }
        assert_eq!(error(parse(r#"{"a": "1"}"#).unwrap().number("a", 0.0..=1.0)).1, Some("invalid_type"));
        assert_eq!(error(parse(r#"{"a": 1.5}"#).unwrap().integer("a", 0..=9)).1, Some("invalid_type"));
        assert_eq!(error(parse(r#"{"a": 1e400}"#).map(|_| ())).2, None);
        assert_eq!(error(parse(r#"{"a": -1}"#).unwrap().count("a", 0..=9)).1, Some("integer_below_min_value"));
        assert_eq!(error(parse(r#"{"a": 10}"#).unwrap().integer("a", 0..=9)).1, Some("integer_above_max_value"));
        for (beyond, code) in [
            ("9223372036854775808", "integer_above_max_value"),
            ("99999999999999999999", "integer_above_max_value"),
            ("-99999999999999999999", "integer_below_min_value"),
        ] {
            let mut fields = parse(&format!(r#"{{"a": {beyond}}}"#)).unwrap();
            assert_eq!(error(fields.integer("a", i64::MIN..=i64::MAX)).1, Some(code), "{beyond}");
        }
        assert_eq!(error(parse(r#"{"a": 2.5}"#).unwrap().number("a", 0.0..=2.0)).1, Some("decimal_above_max_value"));
        assert_eq!(error(parse(r#"{"a": -1}"#).unwrap().number("a", 0.0..=2.0)).1, Some("decimal_below_min_value"));
        assert_eq!(token_ids("a", &[json!(0), json!(9)], 10).unwrap(), Some(vec![0, 9]));
        assert_eq!(token_ids("a", &[json!(0), json!("x")], 10).unwrap(), None);
        for id in [json!(-1), json!(10), json!(u64::MAX), json!(1e20)] {
            let (message, code, _) = error(token_ids("a", &[json!(0), id], 10));
            assert_eq!(code, Some("invalid_value"));
            assert_eq!(message, "Invalid value for 'a': expected token ids from 0 to 9.");
        }
        assert_eq!(error(parse("{}").unwrap().required("a")).1, Some("missing_required_parameter"));
        let mut fields = parse(r#"{"x": 1, "y": "auto", "z": 2}"#).unwrap();
        fields.ignore(&["z", "not there"]);
        fields.refuse("y", &[json!("auto")]).unwrap();
        assert_eq!(error(fields.refuse("x", &[json!(2)])).1, Some("unsupported_parameter"));
        fields.finish().unwrap();
    }
}
