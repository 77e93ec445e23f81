//! The Jinja language as transformers sets it up for chat templates, within bounds.

use super::{Conversation, python};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use regex::Regex;
use std::fmt::Write as _;
use std::io;
use std::sync::mpsc;
use std::thread::Builder;
use std::time::Duration;

/// Bytes of a template; those in the field have at most some ten thousand.
const LONGEST_TEMPLATE: usize = 1 << 20;

/// Instructions, or 64 bytes of memory each: the longest templates in the field take some hundred for a turn.
const FUEL: u64 = 200_000;

/// The same for each turn besides.
const FUEL_OF_A_TURN: u64 = 10_000;

/// Calls of macros within each other cost 4 each.
const RECURSION: usize = 200;

/// Bytes of a text: this many, and as many times the bytes of the conversation.
const LONGEST_TEXT: (usize, usize) = (1 << 20, 4);

/// Levels of what is written as JSON.
const DEEPEST: usize = 64;

/// Time for a text; templates in the field take milliseconds.
const LONGEST: Duration = Duration::from_secs(10);

/// Stack: at least this, and for each instruction: lists in lists, of which a level takes eight, are freed by functions that call each
/// other.
const STACK_BYTES: (usize, usize) = (64 << 20, 64);

const NAME: &str = "chat";

/// A template, ready to run.
pub(super) fn environment(source: String) -> Result<Environment<'static>, Error> {
    if source.len() > LONGEST_TEMPLATE {
        let expected = format!("expected at most {LONGEST_TEMPLATE} bytes, got {}", source.len());
        return Err(Error::new(ErrorKind::SyntaxError, expected));
    }
    let mut environment = Environment::new();
    // Errors name what a template refers to and what that was, in a release too.
    environment.set_debug(true);
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_recursion_limit(RECURSION);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(python::method);
    environment.add_function("raise_exception", |what: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, what))
    });
    environment.add_function("strftime_now", |format: String| {
        let now = jiff::Zoned::now();
        jiff::fmt::strtime::format(python::of_dates(&format), &now)
            .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
    });
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", python::string);
    environment.add_filter("escape", escape);
    environment.add_filter("e", escape);
    environment.add_filter("default", python::default);
    environment.add_filter("d", python::default);
    // As in Jinja2: none is nothing to iterate over, and texts and objects are sequences too.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_test("sequence", |value: &Value| {
        value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment.set_formatter(|out, state, value| match python::float(value) {
        Some(number) => Ok(write!(out, "{}", python::of_float(number))?),
        None if *state.auto_escape() == AutoEscape::Html => Ok(write!(out, "{}", escape(state, value)?)?),
        None => minijinja::escape_formatter(out, state, value),
    });
    // Jinja2 knows no other ends of lines.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(NAME, without_marks(source))?;
    Ok(environment)
}

/// What it was made of.
pub(super) fn source(environment: &Environment<'static>) -> String {
    environment.get_template(NAME).map(|template| template.source().to_owned()).unwrap_or_default()
}

/// JSON as templates see it.
pub(super) fn value(json: &serde_json::Value) -> Value {
    use serde_json::Value as Json;
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => Value::from(number),
            (None, Some(number)) => Value::from(number),
            // Numbers of JSON are one of three.
            (None, None) => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(values) => Value::from(values.iter().map(value).collect::<Vec<Value>>()),
        Json::Object(fields) => object(fields),
    }
}

/// An object of JSON, in its order.
pub(super) fn object(fields: &serde_json::Map<String, serde_json::Value>) -> Value {
    Value::from_pairs(fields.iter().map(|(name, json)| (name.as_str(), value(json))))
}

/// The turns of a conversation, with tools and documents, and their bytes.
fn size(conversation: &Conversation) -> (u64, usize) {
    let Conversation { messages, tools, documents } = conversation;
    let listed = [tools, documents].into_iter().flatten().filter_map(serde_json::Value::as_array);
    let listed: Vec<&serde_json::Value> = listed.flatten().collect();
    let written = listed.iter().map(|value| value.to_string().len());
    let said = messages.iter().flat_map(|message| message.fields().values()).map(|value| match value.as_str() {
        Some(text) => text.len(),
        None => value.to_string().len(),
    });
    ((messages.len() + listed.len()) as u64, written.chain(said).sum())
}

/// The text that it makes of a conversation, which `context` holds too.
///
/// Fuel does not see all: a list that is added to itself again and again is walked through for longer than anybody lives. So this
/// is done on a thread, which also has stack enough for lists in lists, and which is left behind where it takes too long. Errors, which
/// may hold such lists, become words there.
pub(super) fn render(
    environment: &Environment<'static>,
    conversation: &Conversation,
    context: Value,
) -> Result<String, String> {
    let (turns, bytes) = size(conversation);
    let mut environment = Environment::clone(environment);
    // A template copies a turn some times: trims it, joins it to others, writes it.
    let fuel = FUEL + FUEL_OF_A_TURN * turns + bytes as u64;
    environment.set_fuel(Some(fuel));
    let mut text = Bounded { bytes: Vec::new(), most: LONGEST_TEXT.0 + LONGEST_TEXT.1 * bytes };
    let (done, rendered) = mpsc::sync_channel(1);
    let run = move || {
        let written = environment.get_template(NAME).and_then(|template| {
            template.render_captured_to(context, &mut text)?;
            String::from_utf8(text.bytes).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
        });
        // Nobody waits any more where it took too long.
        let _ = done.send(written.map_err(|error| what(&error)));
    };
    let stack = STACK_BYTES.0.max(usize::try_from(fuel).unwrap_or(usize::MAX).saturating_mul(STACK_BYTES.1));
    Builder::new().stack_size(stack).spawn(run).map_err(|e| format!("cannot start a thread: {e}"))?;
    rendered.recv_timeout(LONGEST).map_err(|_| {
        format!("expected one that comes to an end within {} seconds, got one that does not", LONGEST.as_secs())
    })?
}

/// What an error says, with the line, and of its causes the first.
pub(super) fn what(error: &Error) -> String {
    let line = error.line().map_or_else(String::new, |line| format!(" (line {line})"));
    match error.kind() {
        ErrorKind::OutOfFuel => {
            format!("expected one that comes to an end, got more steps or memory than any takes{line}")
        }
        ErrorKind::WriteFailure => format!("expected a text in proportion to the conversation, got a longer one{line}"),
        kind => format!("{kind}: {}{line}", error.detail().unwrap_or("no more is known")),
    }
}

/// Text up to a length; more is an error.
struct Bounded {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.most - self.bytes.len() {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The template without transformers' marks of what an assistant wrote, which are for training and write nothing.
fn without_marks(source: String) -> String {
    let begin = Regex::new(r"\{%([-+]?)\s*generation\s*([-+]?)%\}");
    let end = Regex::new(r"\{%([-+]?)\s*endgeneration\s*([-+]?)%\}");
    let (Ok(begin), Ok(end)) = (begin, end) else { return source };
    let source = begin.replace_all(&source, "{%$1 if true $2%}");
    end.replace_all(&source, "{%$1 endif $2%}").into_owned()
}

/// The filters `escape` and `e`, with the entities of Jinja2 (markupsafe). What is marked as safe, as what they leave is, stays as it is.
fn escape(state: &State, value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = python::string(state, value)?;
    let mut escaped = String::new();
    for c in text.as_str().unwrap_or_default().chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&#34;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    Ok(Value::from_safe_string(escaped))
}

/// As transformers does: Python's `json.dumps`, with characters beyond ASCII as they are unless it is told otherwise.
fn to_json(value: &Value, given: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if given.len() > names.len() {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let option = |name: &str| -> Result<Value, Error> {
        let at = names.iter().position(|known| *known == name);
        match at.and_then(|at| given.get(at)) {
            Some(value) => Ok(value.clone()),
            None if options.has(name) => options.get(name),
            None => Ok(Value::from(())),
        }
    };
    let (ascii, sort_keys) = (option("ensure_ascii")?.is_true(), option("sort_keys")?.is_true());
    let (indent,): (Option<usize>,) = from_args(&[option("indent")?])?;
    let (separators,): (Option<Vec<String>>,) = from_args(&[option("separators")?])?;
    options.assert_all_used()?;
    let separators = match separators.as_deref() {
        None => [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
        Some([item, key]) => [item.clone(), key.clone()],
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: expected two separators")),
    };
    if indent.is_some_and(|indent| indent > DEEPEST) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: expected an indent of at most {DEEPEST}"),
        ));
    }
    let mut json = Json { out: String::new(), ascii, indent, sort_keys, separators };
    json.write(value, 0)?;
    Ok(Value::from(json.out))
}

struct Json {
    out: String,
    /// Whether all but ASCII is escaped.
    ascii: bool,
    indent: Option<usize>,
    sort_keys: bool,
    separators: [String; 2],
}

impl Json {
    fn write(&mut self, value: &Value, level: usize) -> Result<(), Error> {
        if level == DEEPEST {
            return Err(Error::new(ErrorKind::BadSerialization, format!("expected at most {DEEPEST} levels")));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            // A String takes everything.
            ValueKind::Number => match python::float(value) {
                Some(number) => self.out.push_str(&python::of_float(number)),
                None => drop(write!(self.out, "{value}")),
            },
            ValueKind::String => self.text(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.all(['{', '}'], keys, level, |json, key| {
                    json.text(&match (key.as_str(), python::float(key)) {
                        (Some(text), _) => text.to_owned(),
                        (None, Some(number)) => python::of_float(number),
                        (None, None) if key.is_none() => "null".to_owned(),
                        (None, None) => key.to_string().to_lowercase(),
                    });
                    let separator = json.separators[1].clone();
                    json.out.push_str(&separator);
                    json.write(&value.get_item(key)?, level + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect();
                self.all(['[', ']'], items, level, |json, item| json.write(item, level + 1))?;
            }
            other => return Err(Error::new(ErrorKind::BadSerialization, format!("{other} is no JSON"))),
        }
        Ok(())
    }

    fn all(
        &mut self,
        [open, close]: [char; 2],
        values: Vec<Value>,
        level: usize,
        write: impl Fn(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for (i, value) in values.iter().enumerate() {
            if i > 0 {
                let separator = self.separators[0].clone();
                self.out.push_str(&separator);
            }
            self.line(level + 1);
            write(self, value)?;
        }
        if !values.is_empty() {
            self.line(level);
        }
        self.out.push(close);
        Ok(())
    }

    fn line(&mut self, level: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * level));
        }
    }

    /// A text, escaped as Python does.
    fn text(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || self.ascii && c > '~' => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}
