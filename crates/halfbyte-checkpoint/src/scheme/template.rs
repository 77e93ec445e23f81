//! The templates of conversations that a model comes with.

use super::Weights;
use crate::checkpoint::Container;
use crate::error::{Error, Result};
use crate::files::names;
use crate::folder::{TEMPLATES, is_template};
use crate::gguf::{Header, Value as Meta};
use crate::json::{self, read_small};
use serde_json::Value;
use std::path::Path;

/// The default template's key in GGUF; that of another is followed by a dot and its name.
pub(super) const KEY: &str = "tokenizer.chat_template";

/// Name of the default one.
const DEFAULT: &str = "default";

/// Fields of a `tokenizer_config.json`.
const MOST_FIELDS: usize = 1 << 14;

impl Weights {
    /// The template of conversations, in GGUF's metadata, `chat_template.jinja` or `tokenizer_config.json`, if there is one; of
    /// several with names the one named "default". Errors: files that cannot be read, or hold no such thing.
    pub fn chat_template(&self) -> Result<Option<String>> {
        self.template(DEFAULT)
    }

    /// That of conversations with tools, where a model has another for them, named "tool_use". Errors: as
    /// [`Weights::chat_template`].
    pub fn tool_template(&self) -> Result<Option<String>> {
        self.template("tool_use")
    }

    /// The templates besides the default one, by their names, which are fit for files and keys. Error: one that is not.
    pub(crate) fn named_templates(&self) -> Result<Vec<(String, String)>> {
        let (templates, place) = match self.checkpoint.container() {
            Container::Gguf(header) => (named_in(header), header.file.as_path()),
            Container::Plain | Container::Onnx(_) => (self.named_beside()?, self.folder.as_path()),
        };
        let is_fit =
            |name: &str| !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
        match templates.iter().find(|(name, _)| !is_fit(name)) {
            None => Ok(templates),
            Some((name, _)) => {
                let what = format!("template `{name}`: expected a name of letters, digits, `_` and `-`");
                Err(Error::malformed(place, what))
            }
        }
    }

    /// Those of files of their own, then those of `tokenizer_config.json` that have none.
    fn named_beside(&self) -> Result<Vec<(String, String)>> {
        let folder = self.folder.join(TEMPLATES);
        let names = if folder.is_dir() { names(&folder).map_err(Error::io("list", &folder))? } else { Vec::new() };
        let mut templates = Vec::new();
        for file in names.iter().filter_map(|name| name.to_str()).filter(|name| is_template(name)) {
            let path = folder.join(file);
            if let (Some(name), true) = (file.strip_suffix(".jinja"), path.is_file()) {
                templates.push((name.to_owned(), text(&path)?));
            }
        }
        if let Some(Value::Array(list)) = self.configured()? {
            for template in &list {
                let (Some(name), Some(text)) = (template["name"].as_str(), template["template"].as_str()) else {
                    continue;
                };
                if name != DEFAULT && templates.iter().all(|(known, _)| known != name) {
                    templates.push((name.to_owned(), text.to_owned()));
                }
            }
        }
        Ok(templates)
    }

    fn template(&self, name: &str) -> Result<Option<String>> {
        let is_default = name == DEFAULT;
        if let Container::Gguf(header) = self.checkpoint.container() {
            let key = if is_default { KEY.to_owned() } else { format!("{KEY}.{name}") };
            return Ok(match header.get(&key) {
                Some(Meta::String(template)) => Some(template.clone()),
                _ => None,
            });
        }
        let file = match is_default {
            true => self.folder.join("chat_template.jinja"),
            false => self.folder.join(TEMPLATES).join(format!("{name}.jinja")),
        };
        if file.is_file() {
            return text(&file).map(Some);
        }
        Ok(match self.configured()? {
            Some(Value::String(template)) => is_default.then_some(template),
            Some(Value::Array(named)) => {
                let found = named.iter().find(|template| template["name"] == name);
                found.and_then(|template| template["template"].as_str()).map(str::to_owned)
            }
            _ => None,
        })
    }

    /// What `tokenizer_config.json` says of templates.
    fn configured(&self) -> Result<Option<Value>> {
        let file = self.folder.join("tokenizer_config.json");
        if !file.exists() {
            return Ok(None);
        }
        // The rest of it, a list of all added tokens among it, may be long.
        let (text, bad_json) = (read_small(&file)?, |e| Error::malformed(&file, format!("expected JSON: {e}")));
        let fields = json::fields(&text, MOST_FIELDS).map_err(bad_json)?;
        let Some((_, value)) = fields.iter().find(|(name, _)| name == "chat_template") else { return Ok(None) };
        json::parse(value.get().as_bytes()).map(Some).map_err(bad_json)
    }
}

/// The templates with names in GGUF's metadata.
fn named_in(header: &Header) -> Vec<(String, String)> {
    let named =
        header.metadata.iter().filter_map(|(key, value)| match (key.strip_prefix(KEY)?.strip_prefix('.')?, value) {
            (name, Meta::String(template)) => Some((name.to_owned(), template.clone())),
            _ => None,
        });
    named.collect()
}

fn text(file: &Path) -> Result<String> {
    String::from_utf8(read_small(file)?).map_err(|_| Error::malformed(file, "expected UTF-8"))
}
