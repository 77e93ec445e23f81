//! What templates use of Python and Jinja2 that minijinja has otherwise or not at all.

use minijinja::value::{Kwargs, Rest, Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

/// Methods of texts, lists and objects.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else { return pycompat::unknown_method_callback(state, value, name, args) };
    let three = |parts: [&str; 3]| Value::from_object(Tuple::from(parts.map(Value::from)));
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => {
            let (at,): (&str,) = from_args(args)?;
            not_empty(at)?;
            Ok(text.split_once(at).map_or_else(|| three([text, "", ""]), |(left, right)| three([left, at, right])))
        }
        "rpartition" => {
            let (at,): (&str,) = from_args(args)?;
            not_empty(at)?;
            Ok(text.rsplit_once(at).map_or_else(|| three(["", "", text]), |(left, right)| three([left, at, right])))
        }
        "rsplit" => {
            let (at, most): (Option<&str>, Option<i64>) = from_args(args)?;
            // Without a limit it is the same from either end.
            let Some(most) = most.and_then(|most| usize::try_from(most).ok()) else {
                return pycompat::unknown_method_callback(state, value, "split", &args[..args.len().min(1)]);
            };
            let at = at.unwrap_or_default();
            not_empty(at)?;
            let mut parts: Vec<Value> = text.rsplitn(most.saturating_add(1), at).map(Value::from).collect();
            parts.reverse();
            Ok(Value::from(parts))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

fn not_empty(separator: &str) -> Result<(), Error> {
    match separator.is_empty() {
        true => {
            Err(Error::new(ErrorKind::InvalidOperation, "expected a separator of at least one character, got none"))
        }
        false => Ok(()),
    }
}

/// The filter `string`.
pub(super) fn string(state: &State, value: &Value) -> Result<Value, Error> {
    float(value).map_or_else(|| filters::string(state, value), |number| Ok(Value::from(of_float(number))))
}

/// The filter `default`, whose arguments may be named.
pub(super) fn default(value: &Value, given: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    if given.len() > 2 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let named = |at: usize, name: &str, otherwise: Value| match given.get(at) {
        Some(value) => Ok(value.clone()),
        None if options.has(name) => options.get(name),
        None => Ok(otherwise),
    };
    let (other, also_false) = (named(0, "default_value", Value::from(""))?, named(1, "boolean", Value::from(false))?);
    options.assert_all_used()?;
    Ok(if value.is_undefined() || (also_false.is_true() && !value.is_true()) { other } else { value.clone() })
}

/// A format of dates with what Python's `datetime.now` and its C locale write otherwise than jiff: dates and times as a whole,
/// microseconds, and no time zone.
pub(super) fn of_dates(format: &str) -> String {
    let mut directive = false;
    let of = |c: char| {
        let after = directive;
        directive = c == '%' && !after;
        match c {
            'c' if after => "%a %b %e %H:%M:%S %Y".to_owned(),
            'x' if after => "%m/%d/%y".to_owned(),
            'f' if after => "%6f".to_owned(),
            'z' | 'Z' if after => String::new(),
            '%' if !after => String::new(),
            c if after => format!("%{c}"),
            c => c.to_string(),
        }
    };
    let written: String = format.chars().map(of).collect();
    // What ends in the middle of a directive is refused by who reads it.
    if directive { written + "%" } else { written }
}

/// A number that is no integer, also where it is whole.
pub(super) fn float(value: &Value) -> Option<f64> {
    if value.is_number() && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// A float as Python writes it: the shortest digits that are read back, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn of_float(value: f64) -> String {
    let text = format!("{value:e}");
    let parts = text.split_once('e').and_then(|(digits, exponent)| Some((digits, exponent.parse::<i32>().ok()?)));
    match parts {
        Some((digits, exponent)) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn dates_are_written_as_python_writes_them() {
        let moment = jiff::civil::date(2026, 3, 5).at(7, 8, 9, 123_456_789).to_zoned(jiff::tz::TimeZone::UTC).unwrap();
        for (format, text) in [
            ("%c|%x|%X", "Thu Mar  5 07:08:09 2026|03/05/26|07:08:09"),
            ("%f|%Z|%z|", "123456|||"),
            ("%d %b %Y, %-d. %B: 100%%c %%%Y", "05 Mar 2026, 5. March: 100%c %2026"),
        ] {
            assert_eq!(jiff::fmt::strtime::format(super::of_dates(format), &moment).unwrap(), text);
        }
        assert_eq!(super::of_dates("a%"), "a%");
    }
}
