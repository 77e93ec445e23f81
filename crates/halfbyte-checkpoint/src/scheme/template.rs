//! The templates of conversations that a model comes with.

use super::Weights;
use crate::checkpoint::Container;
use crate::error::{Error, Result};
use crate::json::{self, read_small};
use serde_json::Value;

/// The default template's key in GGUF; that of another is followed by a dot and its name.
const KEY: &str = "tokenizer.chat_template";

/// Fields of a `tokenizer_config.json`.
const MOST_FIELDS: usize = 1 << 14;

impl Weights {
    /// The template of conversations, in GGUF's metadata, `chat_template.jinja` or `tokenizer_config.json`, if there is one; of
    /// several with names the one named "default".
    pub fn chat_template(&self) -> Result<Option<String>> {
        self.template("default")
    }

    /// That of conversations with tools, where a model has another for them, named "tool_use".
    pub fn tool_template(&self) -> Result<Option<String>> {
        self.template("tool_use")
    }

    /// The templates besides the default one in GGUF's metadata, by their names, which are fit for files. Error: one that is not.
    pub(crate) fn own_templates(&self) -> Result<Vec<(&str, &str)>> {
        let Container::Gguf(header) = self.checkpoint.container() else { return Ok(Vec::new()) };
        let is_fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
        let mut templates = Vec::new();
        for (key, value) in &header.metadata {
            let name = key.strip_prefix(KEY).and_then(|rest| rest.strip_prefix('.'));
            let (Some(name), crate::gguf::Value::String(template)) = (name, value) else { continue };
            if name.is_empty() || !name.chars().all(is_fit) {
                let what = format!("key `{key}`: expected the name of a template in letters, digits, `_` and `-`");
                return Err(Error::malformed(&header.file, what));
            }
            templates.push((name, template.as_str()));
        }
        Ok(templates)
    }

    fn template(&self, name: &str) -> Result<Option<String>> {
        let is_default = name == "default";
        if let Container::Gguf(header) = self.checkpoint.container() {
            let key = if is_default { KEY.to_owned() } else { format!("{KEY}.{name}") };
            return Ok(match header.get(&key) {
                Some(crate::gguf::Value::String(template)) => Some(template.clone()),
                _ => None,
            });
        }
        let file = match is_default {
            true => self.folder.join("chat_template.jinja"),
            false => self.folder.join("additional_chat_templates").join(format!("{name}.jinja")),
        };
        if file.is_file() {
            let text = String::from_utf8(read_small(&file)?);
            return text.map(Some).map_err(|_| Error::malformed(&file, "expected UTF-8"));
        }
        let file = self.folder.join("tokenizer_config.json");
        if !file.exists() {
            return Ok(None);
        }
        // The rest of it, a list of all added tokens among it, may be long.
        let (text, bad_json) = (read_small(&file)?, |e| Error::malformed(&file, format!("expected JSON: {e}")));
        let fields = json::fields(&text, MOST_FIELDS).map_err(bad_json)?;
        let Some((_, value)) = fields.iter().find(|(name, _)| name == "chat_template") else { return Ok(None) };
        match json::parse(value.get().as_bytes()).map_err(bad_json)? {
            Value::String(template) => Ok(is_default.then_some(template)),
            Value::Array(named) => {
                let found = named.iter().find(|template| template["name"] == name);
                Ok(found.and_then(|template| template["template"].as_str()).map(str::to_owned))
            }
            _ => Ok(None),
        }
    }
}
