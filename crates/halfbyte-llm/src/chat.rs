//! Conversations as text: a model's chat template, rendered as transformers does.
//!
//! A template is a program in the Jinja language that comes with a model. It computes within bounds: of instructions and memory
//! (fuel), of recursion, and of the text that it writes.

mod conversation;
mod python;
mod template;

pub use conversation::{Conversation, Message, is_function_name};

use crate::error::{Error, Result};
use crate::tokenizer::{MOST_FIELDS, Tokenizer};
use crate::{Config, config};
use halfbyte_checkpoint::{Weights, json};
use minijinja::{Environment, Value, context};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Tokens that templates write by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// What begins a text.
    pub bos: Option<String>,
    /// What ends one.
    pub eos: Option<String>,
    /// Others by their names in templates: `unk_token`, `pad_token` and such.
    pub others: BTreeMap<String, String>,
}

/// Names of those that are no begin and no end.
const OTHERS: [&str; 5] = ["unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// How a model wants a conversation written.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    environment: Environment<'static>,
    /// Another for conversations with tools.
    with_tools: Option<Environment<'static>>,
    tokens: SpecialTokens,
}

impl ChatTemplate {
    /// The template of a checkpoint: `tokenizer.chat_template` of a GGUF file; else `chat_template.jinja`, or `chat_template` of
    /// `tokenizer_config.json`, a text or a list with one named "default". None if there is no such. One named "tool_use" (also
    /// `tokenizer.chat_template.tool_use`, `additional_chat_templates/tool_use.jinja`) writes conversations with tools.
    ///
    /// Special tokens are those of `tokenizer_config.json`; where it does not name `bos_token` or `eos_token`, not as null either, those
    /// of the configuration. Errors: files that cannot be read, and what [`ChatTemplate::parse`] refuses.
    pub fn from_weights(weights: &Weights, config: &Config, tokenizer: &Tokenizer) -> Result<Option<Self>> {
        let path = weights.checkpoint().path();
        let Some(source) = weights.chat_template()? else { return Ok(None) };
        let mut named = match weights.own_config()? {
            Some(_) => BTreeMap::new(),
            None => named(weights.folder())?,
        };
        let mut token =
            |name: &str, id: Option<u32>| named.remove(name).unwrap_or_else(|| id.and_then(|id| tokenizer.token(id)));
        let (bos, eos) = (token("bos_token", config.bos), token("eos_token", config.eos.first().copied()));
        let others = named.into_iter().filter_map(|(name, token)| Some((name, token?))).collect();
        let tokens = SpecialTokens { bos, eos, others };
        let mut template = Self::parse(source, tokens, path)?;
        let with_tools = weights.tool_template()?.map(template::environment);
        template.with_tools = with_tools.transpose().map_err(|e| refused(path, &e))?;
        Ok(Some(template))
    }

    /// Compiles a template; `path` is named in errors. Error: it is no template.
    pub fn parse(source: String, tokens: SpecialTokens, path: &Path) -> Result<Self> {
        let environment = template::environment(source).map_err(|e| refused(path, &e))?;
        Ok(Self { path: path.to_owned(), environment, with_tools: None, tokens })
    }

    /// The template's own text; of one for conversations with tools, if there is such and they are meant, that of the latter.
    pub fn source(&self, tools: bool) -> String {
        let environment = self.with_tools.as_ref().filter(|_| tools).unwrap_or(&self.environment);
        template::source(environment)
    }

    /// The tokens that it writes by name.
    pub fn tokens(&self) -> &SpecialTokens {
        &self.tokens
    }

    /// [`ChatTemplate::render`] of messages without tools and documents. Errors: as there.
    pub fn render_messages(&self, messages: &[Message], answer: bool) -> Result<String> {
        self.render(&Conversation { messages: messages.to_vec(), ..Conversation::default() }, answer)
    }

    /// The text of a conversation, with what begins an answer after it if that is asked for. It holds the token that begins a text
    /// where the model wants one: nothing is to be put before it.
    ///
    /// Fields of messages that are null are left out, as in transformers; a template that refuses that is told of them as none.
    /// Errors: what the template refuses (`raise_exception`), a template that is wrong, or one that passes its bounds.
    pub fn render(&self, conversation: &Conversation, answer: bool) -> Result<String> {
        let written = self.render_told(conversation, answer, false);
        // DeepSeek R1's asks whether what calls tools says none, which for transformers, that leaves nulls out, is an error.
        let again = written.is_err() && conversation.messages.iter().any(Message::has_nulls);
        let written = if again { self.render_told(conversation, answer, true).or(written) } else { written };
        written.map_err(|what| Error::Chat { path: self.path.clone(), what })
    }

    fn render_told(
        &self,
        conversation: &Conversation,
        answer: bool,
        nulls: bool,
    ) -> std::result::Result<String, String> {
        let SpecialTokens { bos, eos, others } = &self.tokens;
        let Conversation { messages, tools, documents } = conversation;
        let turns: Vec<Value> = messages.iter().map(|message| template::object(&message.told(nulls))).collect();
        let all = context! {
            messages => turns,
            tools => tools.as_ref().map_or_else(|| Value::from(()), template::value),
            documents => documents.as_ref().map_or_else(|| Value::from(()), template::value),
            add_generation_prompt => answer,
        };
        let environment = self.with_tools.as_ref().filter(|_| tools.is_some()).unwrap_or(&self.environment);
        // Without such a token the name means nothing, as in transformers: it is not none.
        let begin = bos.as_ref().map_or_else(|| context! {}, |bos| context! { bos_token => bos });
        let end = eos.as_ref().map_or_else(|| context! {}, |eos| context! { eos_token => eos });
        let others = Value::from_pairs(others.iter().map(|(name, token)| (name.as_str(), token.as_str())));
        template::render(environment, conversation, context! { ..begin, ..end, ..all, ..others })
    }
}

/// Special tokens that a folder's `tokenizer_config.json` names, some as null: none. Errors: it cannot be read, or is no JSON.
fn named(folder: &Path) -> Result<BTreeMap<String, Option<String>>> {
    let path = folder.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(BTreeMap::new());
    }
    let text = config::read_bytes(&path)?;
    let bad = |what: String| Error::Tokenizer(format!("{}: {what}", path.display()));
    let fields = json::fields(&text, MOST_FIELDS).map_err(|e| bad(format!("expected JSON: {e}")))?;
    let is_token = |name: &str| ["bos_token", "eos_token"].contains(&name) || OTHERS.contains(&name);
    let tokens = fields.iter().filter(|(field, _)| is_token(field)).map(|(field, value)| {
        let token = token_of(value).map_err(|e| bad(format!("`{field}`: {e}")))?;
        Ok((field.to_string(), token))
    });
    tokens.collect()
}

/// A token as `tokenizer_config.json` spells it: a text, or an object with one.
fn token_of(value: &RawValue) -> std::result::Result<Option<String>, String> {
    use serde_json::Value::{Null, Object, String};
    let expected = "expected a token, as a text or an object with `content`";
    match json::parse(value.get().as_bytes()).map_err(|e| format!("expected JSON: {e}"))? {
        Null => Ok(None),
        String(token) => Ok(Some(token)),
        Object(fields) => match fields.get("content") {
            Some(String(token)) => Ok(Some(token.clone())),
            _ => Err(expected.to_owned()),
        },
        other => Err(format!("{expected}, got {}", config::shown(&other))),
    }
}

fn refused(path: &Path, error: &minijinja::Error) -> Error {
    Error::Chat { path: path.to_owned(), what: template::what(error) }
}
