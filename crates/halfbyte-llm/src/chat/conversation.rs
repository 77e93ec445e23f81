//! What is said in a conversation, and what a model may use in it.

use crate::config::{read_bytes, shown};
use crate::error::{Error, Result};
use halfbyte_checkpoint::json;
use serde_json::{Map, Value};
use std::path::Path;

/// Names in use for what a model wrote before its answer, the first that is there counts.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// One turn of a conversation: an object with a role and whatever else templates know, as `content`, `tool_calls`, `name`.
#[derive(Clone, Debug, PartialEq)]
pub struct Message(Map<String, Value>);

impl Message {
    /// A turn of a role ("system", "user", "assistant", "tool", or another that the template knows) that says a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let fields = [("role", role.into()), ("content", content.into())];
        Self(fields.into_iter().map(|(field, text)| (field.to_owned(), Value::String(text))).collect())
    }

    /// A turn as JSON has it. Arguments of tool calls that are JSON in a text, as servers give them, become the object that
    /// templates expect. Error: no object, or no role.
    pub fn from_json(value: Value) -> std::result::Result<Self, String> {
        let Value::Object(mut fields) = value else {
            return Err(format!("an object with a role, got {}", shown(&value)));
        };
        if !fields.get("role").is_some_and(Value::is_string) {
            return Err("a `role`, which is a text".to_owned());
        }
        let calls = fields.get_mut("tool_calls").and_then(Value::as_array_mut);
        for arguments in calls.into_iter().flatten().filter_map(|call| call.pointer_mut("/function/arguments")) {
            let object = arguments.as_str().and_then(|text| json::parse(text.as_bytes()).ok());
            if let Some(object) = object.filter(Value::is_object) {
                *arguments = object;
            }
        }
        Ok(Self(fields))
    }

    /// Whose turn it is.
    pub fn role(&self) -> &str {
        self.0.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    pub(super) fn fields(&self) -> &Map<String, Value> {
        &self.0
    }

    /// Whether a field of it is null.
    pub(super) fn has_nulls(&self) -> bool {
        self.0.values().any(Value::is_null)
    }

    /// What a template is told of it, as by transformers: fields of null are none, unless asked for, and what led to an answer has
    /// both names that templates read, whichever of the three in use it came under.
    pub(super) fn told(&self, nulls: bool) -> Map<String, Value> {
        let told = self.0.iter().filter(|(_, value)| nulls || !value.is_null());
        let told = told.map(|(name, value)| (name.clone(), value.clone()));
        let reasoning = REASONING.iter().find_map(|name| self.0.get(*name).filter(|value| !value.is_null()));
        let Some(reasoning) = reasoning else { return told.collect() };
        let under = |name: &str| (name.to_owned(), reasoning.clone());
        std::iter::once(under("thinking")).chain(told).chain([under("reasoning_content")]).collect()
    }
}

/// A conversation: what was said, and what templates are told besides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conversation {
    /// The turns.
    pub messages: Vec<Message>,
    /// Functions that the model may call: a list of JSON schemas, as `{"type": "function", "function": {"name": …}}`.
    pub tools: Option<Value>,
    /// Texts that it may use: a list of objects, as `{"title": …, "text": …}`.
    pub documents: Option<Value>,
}

impl Conversation {
    /// Reads a JSON file: a list of messages, or an object with `messages`, and `tools` and `documents` if there are such.
    ///
    /// Errors: it cannot be read, is no JSON of this form, holds a name twice or more than a quarter of a million values; tools that
    /// are no functions with names.
    pub fn from_file(path: &Path) -> Result<Self> {
        let refuse = refusal(path);
        let mut conversation = Self::default();
        let messages = match parsed(path)? {
            Value::Object(mut fields) => {
                let mut listed = |field: &str| fields.remove(field).filter(|value| !value.is_null());
                conversation.tools = listed("tools").map(|tools| functions(path, tools)).transpose()?;
                conversation.documents = listed("documents").map(|all| objects(path, "documents", all)).transpose()?;
                listed("messages").unwrap_or_default()
            }
            list => list,
        };
        let Value::Array(messages) = messages else {
            return Err(refuse(
                "messages",
                "a list of messages, or an object that has it as `messages`",
                shown(&messages),
            ));
        };
        for (at, message) in messages.into_iter().enumerate() {
            let message = Message::from_json(message);
            conversation
                .messages
                .push(message.map_err(|e| refuse(&format!("messages[{at}]"), &e, "another".to_owned()))?);
        }
        Ok(conversation)
    }

    /// Reads a JSON file that is a list of tools. Errors: as [`Conversation::from_file`].
    pub fn tools_from_file(path: &Path) -> Result<Value> {
        functions(path, parsed(path)?)
    }

    /// Adds a turn.
    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }
}

/// Whether a function may be called so: by at most 64 letters, digits, underscores, dots and dashes.
pub fn is_function_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    !name.is_empty() && name.len() <= 64 && name.chars().all(plain)
}

fn refusal(path: &Path) -> impl Fn(&str, &str, String) -> Error {
    |field, expected, got| Error::Config {
        path: path.to_owned(),
        field: field.to_owned(),
        expected: expected.to_owned(),
        got,
    }
}

fn parsed(path: &Path) -> Result<Value> {
    json::parse(&read_bytes(path)?).map_err(|e| refusal(path)("(the whole)", "JSON", e.to_string()))
}

/// A list of objects. Error: something else.
fn objects(path: &Path, field: &str, value: Value) -> Result<Value> {
    let are = value.as_array().is_some_and(|list| list.iter().all(Value::is_object));
    if are { Ok(value) } else { Err(refusal(path)(field, "a list of objects", shown(&value))) }
}

/// A place in a tool, what is expected there, and whether something is it.
type Check = (&'static str, &'static str, fn(&Value) -> bool);

/// A list of functions that have names. Error: something else.
fn functions(path: &Path, value: Value) -> Result<Value> {
    let tools = objects(path, "tools", value)?;
    for (at, tool) in tools.as_array().into_iter().flatten().enumerate() {
        let checks: [Check; 4] = [
            ("/type", "\"function\"", |kind| kind == "function"),
            ("/function", "an object with a name", Value::is_object),
            ("/function/name", "at most 64 letters, digits, underscores, dots and dashes", |name| {
                name.as_str().is_some_and(is_function_name)
            }),
            ("/function/parameters", "a schema, which is an object", |schema| schema.is_object() || schema.is_null()),
        ];
        for (place, expected, fits) in checks {
            let got = tool.pointer(place).unwrap_or(&Value::Null);
            if !fits(got) {
                let got = if got.is_null() { "nothing".to_owned() } else { shown(got) };
                return Err(refusal(path)(&format!("tools[{at}]{}", place.replace('/', ".")), expected, got));
            }
        }
    }
    Ok(tools)
}
