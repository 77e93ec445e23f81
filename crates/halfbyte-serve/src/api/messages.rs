//! What was said in a conversation and what a model may call, from a request's fields to what templates take.

use crate::error::ApiError;
use crate::fields::{Fields, wrong_type, wrong_value};
use crate::schema;
use crate::tools::Function;
use halfbyte_llm::chat::{Message, is_function_name};
use serde_json::{Map, Value, json};

/// Turns of a conversation, and tools.
const MOST: (usize, usize) = (4096, 128);

type Result<T> = std::result::Result<T, ApiError>;

/// The turns of a conversation.
pub fn messages(fields: &mut Fields) -> Result<Vec<Message>> {
    let list = match fields.required("messages")? {
        Value::Array(list) => list,
        other => return Err(wrong_type("messages", "an array of objects", &other)),
    };
    if list.is_empty() || list.len() > MOST.0 {
        return Err(wrong_value("messages", &format!("1 to {} messages", MOST.0)));
    }
    list.into_iter().enumerate().map(|(at, value)| message(Fields::of(value, format!("messages[{at}]"))?)).collect()
}

fn message(mut fields: Fields) -> Result<Message> {
    let path = fields.path("");
    let path = path.trim_end_matches('.').to_owned();
    let role = fields.required_text("role")?;
    // Templates know the older name.
    let role = match role.as_str() {
        "developer" => "system",
        "system" | "user" | "assistant" | "tool" => &role,
        _ => return Err(wrong_value(&format!("{path}.role"), "'system', 'developer', 'user', 'assistant' or 'tool'")),
    };
    let mut message = Map::new();
    message.insert("role".to_owned(), json!(role));
    let calls = if role == "assistant" { fields.list("tool_calls")? } else { None };
    let content = content(&mut fields)?;
    if content.is_none() && calls.is_none() {
        return Err(wrong_value(&format!("{path}.content"), "a text"));
    }
    message.insert("content".to_owned(), content.map_or(Value::Null, Value::String));
    if let Some(calls) = calls {
        let call = |(at, value): (usize, Value)| call(Fields::of(value, format!("{path}.tool_calls[{at}]"))?);
        message.insert("tool_calls".to_owned(), calls.into_iter().enumerate().map(call).collect::<Result<Value>>()?);
    }
    if role == "tool" {
        message.insert("tool_call_id".to_owned(), json!(fields.required_text("tool_call_id")?));
    }
    for name in ["name", "reasoning_content"] {
        if let Some(text) = fields.text(name)? {
            message.insert(name.to_owned(), json!(text));
        }
    }
    fields.ignore(&["refusal", "annotations"]);
    for name in ["audio", "function_call"] {
        fields.refuse(name, &[])?;
    }
    fields.finish()?;
    // Arguments of calls are JSON in a text here, and objects for templates.
    Message::from_json(Value::Object(message)).map_err(|what| ApiError::field(&path, "invalid_value", what))
}

/// A text, or the texts of parts one after the other.
fn content(fields: &mut Fields) -> Result<Option<String>> {
    let path = fields.path("content");
    match fields.take("content") {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let mut whole = String::new();
            for (at, part) in parts.into_iter().enumerate() {
                let mut part = Fields::of(part, format!("{path}[{at}]"))?;
                match part.required_text("type")?.as_str() {
                    "text" => whole.push_str(&part.required_text("text")?),
                    "refusal" => whole.push_str(&part.required_text("refusal")?),
                    _ => return Err(wrong_value(&part.path("type"), "'text': this model takes nothing else")),
                }
                part.finish()?;
            }
            Ok(Some(whole))
        }
        Some(other) => Err(wrong_type(&path, "a string or an array of parts", &other)),
    }
}

/// A call that a model made before.
fn call(mut fields: Fields) -> Result<Value> {
    let id = fields.required_text("id")?;
    let kind = fields.text("type")?;
    fields.ignore(&["index"]);
    let path = fields.path("function");
    let mut function = Fields::of(fields.required("function")?, path)?;
    let (name, arguments) = (function.required_text("name")?, function.required_text("arguments")?);
    function.finish()?;
    if kind.is_some_and(|kind| kind != "function") {
        return Err(wrong_value(&fields.path("type"), "'function'"));
    }
    fields.finish()?;
    Ok(json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}))
}

/// Whether a model may call something.
#[derive(Clone, Debug, PartialEq)]
pub enum ToolChoice {
    /// It may not.
    None,
    /// As it likes.
    Auto,
    /// It must call one of them.
    Required,
    /// It must call this one.
    Named(String),
}

/// What a model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// As templates take them.
    pub list: Value,
    /// What each may be called with.
    pub functions: Vec<Function>,
    pub choice: ToolChoice,
    /// Whether it may call several at once.
    pub parallel: bool,
}

/// The tools of a request, if it has such.
pub fn tools(fields: &mut Fields) -> Result<Option<Tools>> {
    let list = fields.list("tools")?;
    let choice = fields.take("tool_choice");
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    fields.refuse("functions", &[])?;
    fields.refuse("function_call", &[json!("none")])?;
    let Some(list) = list.filter(|list| !list.is_empty()) else {
        return match choice {
            None => Ok(None),
            Some(Value::String(choice)) if ["none", "auto"].contains(&choice.as_str()) => Ok(None),
            Some(_) => Err(ApiError::field(
                "tool_choice",
                "invalid_value",
                "'tool_choice' is only allowed when 'tools' are specified.",
            )),
        };
    };
    if list.len() > MOST.1 {
        return Err(wrong_value("tools", &format!("at most {} tools", MOST.1)));
    }
    let functions = list.iter().enumerate().map(|(at, tool)| function(tool.clone(), at)).collect::<Result<Vec<_>>>()?;
    let known = |name: &str| functions.iter().any(|known| known.name == name);
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => ToolChoice::None,
            "auto" => ToolChoice::Auto,
            "required" => ToolChoice::Required,
            _ => return Err(wrong_value("tool_choice", "'none', 'auto', 'required' or a function")),
        },
        Some(value) => {
            let mut choice = Fields::of(value, "tool_choice")?;
            let kind = choice.required_text("type")?;
            let mut function = Fields::of(choice.required("function")?, "tool_choice.function")?;
            let name = function.required_text("name")?;
            function.finish()?;
            choice.finish()?;
            if kind != "function" || !known(&name) {
                return Err(wrong_value("tool_choice", "a function of 'tools'"));
            }
            ToolChoice::Named(name)
        }
    };
    Ok(Some(Tools { list: Value::Array(list), functions, choice, parallel }))
}

fn function(tool: Value, at: usize) -> Result<Function> {
    let mut tool = Fields::of(tool, format!("tools[{at}]"))?;
    if tool.required_text("type")? != "function" {
        return Err(wrong_value(&tool.path("type"), "'function'"));
    }
    let path = tool.path("function");
    let mut function = Fields::of(tool.required("function")?, path)?;
    let name = function.required_text("name")?;
    if !is_function_name(&name) {
        return Err(wrong_value(&function.path("name"), "at most 64 letters, digits, underscores, dots and dashes"));
    }
    function.text("description")?;
    function.boolean("strict")?;
    let path = function.path("parameters");
    let parameters = match function.take("parameters").filter(|schema| *schema != json!({})) {
        // A function without arguments.
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        Some(schema @ Value::Object(_)) if schema::is_of_objects(&schema) => schema,
        Some(Value::Object(_)) => {
            let message =
                format!("Invalid schema in '{path}': arguments are an object, so that its 'type' must be 'object'.");
            return Err(ApiError::field(path, "invalid_function_parameters", message));
        }
        Some(other) => return Err(wrong_type(&path, "an object", &other)),
    };
    function.finish()?;
    tool.finish()?;
    Ok(Function { at, name, parameters })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").unwrap()
    }

    #[test]
    fn turns_of_every_kind() {
        let all = messages(&mut fields(json!({"messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
            {"role": "assistant", "content": null, "tool_calls":
                [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]})));
        let all = all.unwrap();
        assert_eq!(all[0], Message::new("system", "Be brief."));
        let call = json!({"role": "assistant", "content": null, "tool_calls":
            [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]});
        assert_eq!(all[2], Message::from_json(call).unwrap());
        for (bad, param) in [
            (json!([]), "messages"),
            (json!([1]), "messages[0]"),
            (json!([{"content": "a"}]), "messages[0].role"),
            (json!([{"role": "king", "content": "a"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 1}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content[0].type",
            ),
            (json!([{"role": "tool", "content": "a"}]), "messages[0].tool_call_id"),
            (json!([{"role": "user", "content": "a", "tool_calls": []}]), "messages[0].tool_calls"),
            (json!([{"role": "user", "content": "a", "x": 1}]), "messages[0].x"),
        ] {
            let error = messages(&mut fields(json!({"messages": bad}))).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
    }

    #[test]
    fn tools_and_what_must_be_called() {
        let f = json!({"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}});
        let of = |choice: Value| tools(&mut fields(json!({"tools": [f], "tool_choice": choice})));
        assert_eq!(of(Value::Null).unwrap().unwrap().choice, ToolChoice::Auto);
        let known = Function { at: 0, name: "f".to_owned(), parameters: json!({"type": "object"}) };
        assert_eq!(of(json!("required")).unwrap().unwrap().functions, [known]);
        let named = json!({"type": "function", "function": {"name": "f"}});
        assert_eq!(of(named).unwrap().unwrap().choice, ToolChoice::Named("f".to_owned()));
        for bad in [json!("some"), json!(1), json!({"type": "function", "function": {"name": "g"}})] {
            assert_eq!(of(bad).unwrap_err().param.as_deref(), Some("tool_choice"));
        }
        let parameters = |parameters: Value| {
            let f = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
            tools(&mut fields(json!({"tools": [f]}))).map(|tools| tools.unwrap().functions[0].parameters.clone())
        };
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        for no_arguments in [Value::Null, json!({})] {
            assert_eq!(parameters(no_arguments).unwrap(), none);
        }
        let by_name = json!({"$defs": {"a": {"type": "object"}}, "$ref": "#/$defs/a"});
        assert_eq!(parameters(by_name.clone()).unwrap(), by_name);
        for no_object in [json!({"type": "array"}), json!({"properties": {}}), json!({"$ref": "#"})] {
            let error = parameters(no_object).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tools[0].function.parameters"));
            assert_eq!(error.code, Some("invalid_function_parameters"));
        }
        assert_eq!(tools(&mut fields(json!({"tool_choice": "auto"}))).unwrap(), None);
        assert!(tools(&mut fields(json!({"tool_choice": "required"}))).is_err());
        for bad in [
            json!({"type": "function"}),
            json!({"type": "x", "function": {"name": "f"}}),
            json!({"type": "function", "function": {"name": "no spaces"}}),
            json!({"type": "function", "function": {"name": "f", "parameters": 1}}),
        ] {
            assert!(tools(&mut fields(json!({"tools": [bad]}))).is_err());
        }
    }
}
