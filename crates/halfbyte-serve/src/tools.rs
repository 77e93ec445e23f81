//! Calls of tools in what a model writes, taken apart where the form is one that is known.
//!
//! | form | a template has it if it writes | calls |
//! |---|---|---|
//! | Hermes (Qwen 2.5 and 3, Hermes) | `<tool_call>` | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or more |
//! | Mistral | `[TOOL_CALLS]` | `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`, or `[TOOL_CALLS]name[ARGS]{…}` |
//! | Llama 3 | `"parameters":`, and `ipython` or `<\|python_tag\|>` | `{"name": …, "parameters": {…}}` and nothing before, several with `;` |

use crate::grammar::{Form, spaced};
use crate::random;
use serde_json::{Value, json};

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

/// A call of a tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// What it goes by.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// An object, as JSON.
    pub arguments: String,
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

    /// The form of one call of one of these functions, each a name with a schema of its arguments; None: it cannot be said as a grammar.
    pub fn grammar(self, functions: &[(String, Value)]) -> Option<Form> {
        let of = |arguments: &str| {
            let call = |(name, schema): &(String, Value)| {
                json!({
                    "type": "object",
                    "properties": {"name": {"const": name}, arguments: schema},
                    "required": ["name", arguments],
                    "additionalProperties": false,
                })
            };
            match functions {
                [one] => call(one),
                several => json!({"anyOf": several.iter().map(call).collect::<Vec<_>>()}),
            }
        };
        match self {
            Self::Hermes => Some(Form::Lark(format!(
                "start: \"{OPEN}\\n\" call \"\\n{CLOSE}\"\ncall: %json {}\n",
                spaced(of("arguments"))
            ))),
            Self::Llama3 => Some(Form::Schema(of("parameters"))),
            // Its mark is a special token as a rule.
            Self::Mistral => None,
        }
    }

    /// An id as templates of this form take it.
    fn id(self) -> String {
        match self {
            Self::Mistral => random::letters(9),
            Self::Hermes | Self::Llama3 => format!("call_{}", random::letters(24)),
        }
    }

    /// The calls of a text that begins with a mark; None: it is none of this form.
    fn calls(self, text: &str) -> Option<Vec<Call>> {
        let call = |value: &Value| {
            let name = value.get("name")?.as_str()?.to_owned();
            let arguments = value.get("arguments").or_else(|| value.get("parameters"))?;
            let arguments = match arguments {
                Value::String(json) => json.clone(),
                object @ Value::Object(_) => object.to_string(),
                _ => return None,
            };
            Some(Call { id: self.id(), name, arguments })
        };
        let json = |text: &str| serde_json::from_str::<Value>(text.trim()).ok();
        let calls: Option<Vec<Call>> = match self {
            Self::Hermes => {
                let parts = text.split(OPEN).skip(1);
                let of_part = |part: &str| {
                    let (inside, after) = part.split_once(CLOSE).unwrap_or((part, ""));
                    after.trim().is_empty().then(|| call(&json(inside)?)).flatten()
                };
                parts.map(of_part).collect()
            }
            Self::Mistral => {
                let mut calls = Vec::new();
                for part in text.split(MARK).skip(1).map(str::trim) {
                    if part.starts_with('[') {
                        calls.extend(json(part)?.as_array()?.iter().map(call).collect::<Option<Vec<_>>>()?);
                        continue;
                    }
                    let (name, arguments) = part.split_at(part.find('{')?);
                    let name = name.trim().trim_end_matches("[ARGS]").trim();
                    calls.push(call(&json!({"name": name, "arguments": json(arguments)?}))?);
                }
                Some(calls)
            }
            Self::Llama3 => {
                let text = text.trim();
                let mut rest = text.strip_prefix(TAG).unwrap_or(text);
                let mut calls = Vec::new();
                while !rest.trim().is_empty() {
                    let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
                    calls.push(call(&values.next()?.ok()?)?);
                    rest = rest[values.byte_offset()..].trim_start().trim_start_matches(';');
                }
                Some(calls)
            }
        };
        calls.filter(|calls| !calls.is_empty())
    }
}

/// Parts a text in what is said and what is called, as it comes.
#[derive(Debug)]
pub struct Splitter {
    form: ToolForm,
    /// What may be the beginning of a call, or is one.
    held: String,
    calling: bool,
    begun: bool,
}

impl Splitter {
    /// For a text of this form.
    pub fn new(form: ToolForm) -> Self {
        Self { form, held: String::new(), calling: false, begun: false }
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
        match self.calling.then(|| self.form.calls(&self.held)).flatten() {
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
            let mut splitter = Splitter::new(form);
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
        assert_eq!(called, calls(&[("f", "{\"a\":\"é<\"}"), ("g", "{}")]));
        for plain in ["a < b <tool", "", "<tool_call>{broken</tool_call>", "<tool_call>{\"name\": 1}</tool_call>"] {
            assert_eq!(split(ToolForm::Hermes, plain), (plain.to_owned(), vec![]));
        }
    }

    #[test]
    fn mistral_and_llama() {
        let text = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"g\", \"arguments\": {}}]";
        assert_eq!(split(ToolForm::Mistral, text), (String::new(), calls(&[("f", "{\"a\":1}"), ("g", "{}")])));
        let text = "Well. [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}";
        assert_eq!(split(ToolForm::Mistral, text), ("Well. ".to_owned(), calls(&[("f", "{\"a\":1}"), ("g", "{}")])));
        let text =
            " <|python_tag|>{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"g\", \"parameters\": {}}";
        assert_eq!(split(ToolForm::Llama3, text), (String::new(), calls(&[("f", "{\"a\":1}"), ("g", "{}")])));
        for plain in ["say {\"name\": \"f\", \"parameters\": {}}", "{\"x\": 1}", " <|pyth", "  "] {
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
