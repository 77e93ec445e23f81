//! What `overwrite` may replace: a folder with nothing in it but files of a model, templates in a folder of their own among them.

use crate::error::{Error, Result};
use crate::files::names;
use std::ffi::OsString;
use std::path::Path;

/// What belongs to a model besides its weights and `config.json`.
const SIDE_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
];

/// The folder of further templates of conversations, the only folder that a model has in it.
pub(crate) const TEMPLATES: &str = "additional_chat_templates";

/// Configs and weights, as this crate and Hugging Face's tools name them.
const OWN_FILES: &[&str] = &[
    "config.json",
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model.gguf",
    "model.onnx",
    "model.onnx.data",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

/// Whether a file of this name goes with a model wherever that is written: tokenizer, generation settings, licence, code of
/// the model's own and the like.
pub(super) fn is_side_file(name: &str) -> bool {
    SIDE_FILES.contains(&name) || name.ends_with(".py")
}

/// Whether a file of this name in [`TEMPLATES`] is a template.
pub(crate) fn is_template(name: &str) -> bool {
    name.ends_with(".jinja") && !name.starts_with('.')
}

/// Whether a file of this name is a config, weights or a side file, but for code, whose names say nothing.
fn is_of_model(name: &str) -> bool {
    let is_shard = |start: &str, end: &str| {
        let part = name.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
        part.and_then(|part| part.split_once("-of-")).is_some_and(|(part, count)| {
            [part, count].iter().all(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
        })
    };
    OWN_FILES.contains(&name)
        || SIDE_FILES.contains(&name)
        || is_shard("model-", ".safetensors")
        || is_shard("pytorch_model-", ".bin")
}

/// Whether a file of this name can be one that was written in a temporary folder, or a file of a model.
pub(super) fn is_written_here(name: &str) -> bool {
    is_of_model(name) || is_side_file(name) || is_temporary(name)
}

/// Whether a file of this name can be one that was written in [`TEMPLATES`] in a temporary folder.
pub(super) fn is_written_in_templates(name: &str) -> bool {
    is_template(name) || is_temporary(name)
}

fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(".tmp")
}

/// Errors: the folder `target` is not empty, and may not be replaced or holds something that a model from `source` would not
/// have, which is named; it is no folder.
///
/// Files are known by their names. Code may be replaced where the source has the same.
pub(super) fn check(folder: &Path, target: &Path, overwrite: bool, source: &Path) -> Result<()> {
    let refuse = |why: &str| Err(Error::Exists { path: target.to_owned(), why: why.to_owned() });
    if !folder.is_dir() {
        return refuse(", and is not a folder");
    }
    let names = names(folder).map_err(Error::io("list", target))?;
    if names.is_empty() {
        return Ok(());
    }
    if !overwrite {
        return refuse(" and is not empty: choose another folder, or ask to overwrite it");
    }
    if !["config.json", "model.gguf"].iter().any(|name| folder.join(name).is_file()) {
        return refuse(", and is not overwritten: it has no config.json, so it is not a model folder");
    }
    for name in names {
        let path = folder.join(&name);
        let kind = path.symlink_metadata().map_err(Error::io("open", &path))?.file_type();
        let shown = name.to_string_lossy();
        let no_file = |shown: &str| {
            refuse(&format!(", and is not overwritten: `{shown}` in it is no file of a model, and would be lost"))
        };
        if kind.is_dir() && name == TEMPLATES {
            match no_template(&path)? {
                None => continue,
                Some(other) => return no_file(&format!("{TEMPLATES}/{}", other.to_string_lossy())),
            }
        }
        if kind.is_dir() {
            let why = format!("it has folders in it, `{shown}` for one, so it holds more than a model");
            return refuse(&format!(", and is not overwritten: {why}"));
        }
        let (from, name) = (source.join(&name), name.to_str().unwrap_or_default());
        let is_known = is_of_model(name) || is_side_file(name) && has_same_content(&path, &from);
        if !kind.is_file() || !is_known {
            return no_file(&shown);
        }
    }
    Ok(())
}

/// The first thing in a folder of templates that is none.
fn no_template(folder: &Path) -> Result<Option<OsString>> {
    let names = names(folder).map_err(Error::io("list", folder))?;
    let is_file = |name: &OsString| folder.join(name).symlink_metadata().is_ok_and(|metadata| metadata.is_file());
    Ok(names.into_iter().find(|name| !(name.to_str().is_some_and(is_template) && is_file(name))))
}

fn has_same_content(a: &Path, b: &Path) -> bool {
    let len = |path: &Path| path.metadata().ok().filter(std::fs::Metadata::is_file).map(|metadata| metadata.len());
    len(a).is_some() && len(a) == len(b) && std::fs::read(a).is_ok_and(|a| std::fs::read(b).is_ok_and(|b| a == b))
}
