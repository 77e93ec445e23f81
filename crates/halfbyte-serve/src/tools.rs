//! Calls of tools in what a model writes, taken apart where the form is one that is known.
//!
//! | form | a template has it if it writes | calls |
//! |---|---|---|
//! | Hermes (Qwen 2.5 and 3, Hermes) | `<tool_call>` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or more |
//! | Mistral | `[TOOL_CALLS]` | `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` |
//! | Llama 3 | `"parameters":`, and `ipython` or `<\|python_tag\|>` | `{"name": …, "parameters": {…}}` and nothing before, several with `;` |

use crate::random;
use crate::schema::moved;
use llguidance::api::TopLevelGrammar;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use std::sync::Arc;

/// How a model writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolForm {
    /// Tags around JSON.
    Hermes,
    /// A mark before a list.
    Mistral,
    /// JSON alone.
    Llama3,
}

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// Its place in the request's `tools`.
    pub at: usize,
    pub name: String,
    /// A schema of its arguments.
    pub parameters: Value,
}

impl Function {
    /// Where its schema stands in a request.
    pub fn field(&self) -> String {
        format!("tools[{}].function.parameters", self.at)
    }
}

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What it goes by.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// An object, as JSON: as the model wrote it.
    pub arguments: String,
}

/// A call, as it is written.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
    #[serde(borrow)]
    parameters: Option<&'a RawValue>,
}

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";
const MARK: &str = "[TOOL_CALLS]";
const TAG: &str = "<|python_tag|>";

impl ToolForm {
    /// That of a template, if it is a known one.
    pub fn of(template: &str) -> Option<Self> {
        let has = |what: &str| template.contains(what);
        match () {
            () if has(OPEN) => Some(Self::Hermes),
            () if has(MARK) => Some(Self::Mistral),
            () if has("\"parameters\":") && (has("ipython") || has(TAG)) => Some(Self::Llama3),
            () => None,
        }
    }

    /// What begins a call.
    fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes => &[OPEN],
            Self::Mistral => &[MARK],
            Self::Llama3 => &[TAG, "{"],
        }
    }

    /// Whether a grammar can say what a call is: Mistral's mark is a special token as a rule.
    pub fn can_be_forced(self) -> bool {
        self != Self::Mistral
    }

    /// The schema of one call of one of these functions.
    pub fn call(self, functions: &[Function]) -> Value {
        let arguments = if self == Self::Llama3 { "parameters" } else { "arguments" };
        let name = |at: usize| format!("f{at}");
        let call = |(at, function): (usize, &Function)| {
            json!({
                "type": "object",
                "properties": {"name": {"const": function.name}, arguments: {"$ref": format!("#/$defs/{}", name(at))}},
                "required": ["name", arguments],
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = functions.iter().enumerate().map(call).collect();
        let parameters = functions.iter().enumerate();
        let parameters: serde_json::Map<String, Value> =
            parameters.map(|(at, function)| (name(at), moved(function.parameters.clone(), &name(at)))).collect();
        json!({"anyOf": calls, "$defs": parameters})
    }

    /// The grammar of a text that is a call which keeps to a schema.
    pub fn grammar(self, call: Value) -> TopLevelGrammar {
        match self {
            Self::Hermes => {
                TopLevelGrammar::from_lark(format!("start: \"{OPEN}\\n\" call \"\\n{CLOSE}\"\ncall: %json {call}\n"))
            }
            Self::Mistral | Self::Llama3 => TopLevelGrammar::from_json_schema(call),
        }
    }

    /// An id as templates of this form take it.
    fn id(self) -> String {
        match self {
            Self::Mistral => random::letters(9),
            Self::Hermes | Self::Llama3 => format!("call_{}", random::letters(24)),
        }
    }

    /// The calls of a text that begins with a mark; None: it is none of this form, or calls what is none of these functions.
    fn calls(self, text: &str, known: &[String]) -> Option<Vec<Call>> {
        let named = |name: String, arguments: &RawValue| {
            let written = arguments.get();
            let arguments = match written.as_bytes().first()? {
                b'"' => serde_json::from_str(written).ok()?,
                b'{' => written.to_owned(),
                _ => return None,
            };
            known.contains(&name).then(|| Call { id: self.id(), name, arguments })
        };
        let call = |value: &RawValue| {
            let Written { name, arguments, parameters } = serde_json::from_str(value.get()).ok()?;
            named(name, arguments.or(parameters)?)
        };
        let calls: Option<Vec<Call>> = match self {
            Self::Hermes => {
                let (mut rest, mut calls) = (text.trim(), Vec::new());
                while let Some(inside) = rest.strip_prefix(OPEN) {
                    let (value, after) = json(inside)?;
                    calls.push(call(value)?);
                    rest = after.strip_prefix(CLOSE).unwrap_or(after).trim_start();
                }
                rest.is_empty().then_some(calls)
            }
            Self::Mistral => {
                let (mut rest, mut calls) = (text.trim(), Vec::new());
                while let Some(inside) = rest.strip_prefix(MARK) {
                    let inside = inside.trim_start();
                    if inside.starts_with('[') {
                        let (list, after) = json(inside)?;
                        let list: Vec<&RawValue> = serde_json::from_str(list.get()).ok()?;
                        calls.extend(list.into_iter().map(call).collect::<Option<Vec<_>>>()?);
                        rest = after;
                        continue;
                    }
                    let (name, arguments) = inside.split_at(inside.find('{')?);
                    let name = name.trim().trim_end_matches("[ARGS]").trim();
                    let (arguments, after) = json(arguments)?;
                    calls.push(named(name.to_owned(), arguments)?);
                    rest = after;
                }
                rest.is_empty().then_some(calls)
            }
            Self::Llama3 => {
                let text = text.trim();
                let mut rest = text.strip_prefix(TAG).unwrap_or(text);
                let mut calls = Vec::new();
                while !rest.trim().is_empty() {
                    let (value, after) = json(rest)?;
                    calls.push(call(value)?);
                    rest = after.trim_start_matches(';');
                }
                Some(calls)
            }
        };
        calls.filter(|calls| !calls.is_empty())
    }
}

/// The JSON that a text begins with, as it is written, and what follows it and spaces.
fn json(text: &str) -> Option<(&RawValue, &str)> {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<&RawValue>();
    let value = values.next()?.ok()?;
    Some((value, text[values.byte_offset()..].trim_start()))
}

/// Parts a text in what is said and what is called, as it comes.
#[derive(Debug)]
pub struct Splitter {
    form: ToolForm,
    /// Names of functions.
    known: Arc<[String]>,
    /// What may be the beginning of a call, or is one.
    held: String,
    calling: bool,
    begun: bool,
}

impl Splitter {
    /// For a text of this form, with names of functions that may be called.
    pub fn new(form: ToolForm, known: Arc<[String]>) -> Self {
        Self { form, known, held: String::new(), calling: false, begun: false }
    }

    /// Takes a piece of text; gives what of it is said.
    pub fn push(&mut self, text: &str) -> String {
        self.held.push_str(text);
        if self.calling {
            return String::new();
        }
        let marks = self.form.marks();
        if self.form == ToolForm::Llama3 {
            // A call has nothing before it.
            let start = self.held.trim_start();
            let undecided = start.is_empty() || marks.iter().any(|mark| mark.starts_with(start));
            self.calling = !self.begun && marks.iter().any(|mark| start.starts_with(mark));
            if self.calling || !self.begun && undecided {
                return String::new();
            }
            self.begun = true;
            return std::mem::take(&mut self.held);
        }
        if let Some(at) = marks.iter().filter_map(|mark| self.held.find(mark)).min() {
            self.calling = true;
            let call = self.held.split_off(at);
            return std::mem::replace(&mut self.held, call);
        }
        let may_begin = |at: &usize| marks.iter().any(|mark| mark.starts_with(&self.held[*at..]));
        let at = self.held.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.held.len());
        let rest = self.held.split_off(at);
        std::mem::replace(&mut self.held, rest)
    }

    /// Ends the text: what is said besides, and the calls.
    pub fn finish(self) -> (String, Vec<Call>) {
        match self.calling.then(|| self.form.calls(&self.held, &self.known)).flatten() {
            Some(calls) => (String::new(), calls),
            None => (self.held, Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said and called, however the text is cut.
    fn split(form: ToolForm, text: &str) -> (String, Vec<(String, String)>) {
        let mut all = Vec::new();
        for size in [1, 2, 3, 7, 1000] {
            let mut splitter = Splitter::new(form, ["f", "g"].map(str::to_owned).into());
            let characters: Vec<char> = text.chars().collect();
            let mut said: String =
                characters.chunks(size).map(|piece| splitter.push(&piece.iter().collect::<String>())).collect();
            let (rest, calls) = splitter.finish();
            said.push_str(&rest);
            all.push((said, calls.into_iter().map(|call| (call.name, call.arguments)).collect::<Vec<_>>()));
        }
        assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
        all.swap_remove(0)
    }

    fn calls(of: &[(&str, &str)]) -> Vec<(String, String)> {
        of.iter().map(|(name, arguments)| ((*name).to_owned(), (*arguments).to_owned())).collect()
    }

    #[test]
    fn hermes() {
        let text = "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"é<\"}}\n</tool_call>\n<tool_call>{\"name\":\"g\",\"arguments\":{}}";
        let (said, called) = split(ToolForm::Hermes, text);
        assert_eq!(said, "Let me see.\n");
        assert_eq!(called, calls(&[("f", "{\"a\": \"é<\"}"), ("g", "{}")]));
        // Arguments stay as they are written: numbers that no float holds, spaces.
        let text = "<tool_call>{\"name\": \"f\", \"arguments\": { \"a\": [1e9, 61.71418541781391899e1, 99999e9792999]}}</tool_call>";
        let expected = calls(&[("f", "{ \"a\": [1e9, 61.71418541781391899e1, 99999e9792999]}")]);
        assert_eq!(split(ToolForm::Hermes, text), (String::new(), expected));
        // Tags within arguments are text; between calls there may be spaces alone.
        let text = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"x</tool_call> y<tool_call>{}\"}} </tool_call> \n<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>\n";
        let expected = calls(&[("f", "{\"a\": \"x</tool_call> y<tool_call>{}\"}"), ("g", "{}")]);
        assert_eq!(split(ToolForm::Hermes, text), (String::new(), expected));
        let unknown = "<tool_call>{\"name\": \"h\", \"arguments\": {}}</tool_call>";
        let between = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call> or not";
        for plain in [
            unknown,
            between,
            "a < b <tool",
            "",
            "<tool_call>{broken</tool_call>",
            "<tool_call>{\"name\": 1}</tool_call>",
        ] {
            assert_eq!(split(ToolForm::Hermes, plain), (plain.to_owned(), vec![]));
        }
    }

    #[test]
    fn mistral_and_llama() {
        let text = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]";
        assert_eq!(split(ToolForm::Mistral, text), (String::new(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")])));
        let text = "Well. [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}";
        assert_eq!(split(ToolForm::Mistral, text), ("Well. ".to_owned(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")])));
        let text =
            " <|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"g\", \"parameters\": {}}";
        assert_eq!(split(ToolForm::Llama3, text), (String::new(), calls(&[("f", "{\"a\": 1}"), ("g", "{}")])));
        let text = "[TOOL_CALLS]f[ARGS]{\"a\": \"[TOOL_CALLS]\"}[TOOL_CALLS] [{\"name\": \"g\", \"arguments\": {}}]";
        let expected = calls(&[("f", "{\"a\": \"[TOOL_CALLS]\"}"), ("g", "{}")]);
        assert_eq!(split(ToolForm::Mistral, text), (String::new(), expected));
        // An answer that only looks like a call.
        let answer = "{\"name\": \"Ann\", \"parameters\": {}}";
        for plain in [answer, "say {\"name\": \"f\", \"parameters\": {}}", "{\"x\": 1}", " <|pyth", "  "] {
            assert_eq!(split(ToolForm::Llama3, plain), (plain.to_owned(), vec![]));
        }
    }

    #[test]
    fn forms_are_known_by_templates_and_ids_by_forms() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../halfbyte-llm/testdata/chat");
        let form = |name: &str| ToolForm::of(&std::fs::read_to_string(folder.join(name)).unwrap());
        assert_eq!(form("tools_chatml.jinja"), Some(ToolForm::Hermes));
        assert_eq!(form("tools_mistral.jinja"), Some(ToolForm::Mistral));
        assert_eq!(form("tools_llama3.jinja"), Some(ToolForm::Llama3));
        assert_eq!(form("chatml.jinja"), None);
        assert_eq!((ToolForm::Mistral.id().len(), ToolForm::Hermes.id().len()), (9, 29));
    }
}
