//! What a checkpoint of our own form declares.

use super::{Fields, short, strings};
use crate::error::{Error, Result};
use ::halfbyte::Format;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What a checkpoint of our own form declares; `scheme/native` has the layout. The tensors have the last word on all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HalfbyteConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// The format of modules that are not named, as `w4a16-g128`.
    pub format: String,
    /// The formats of modules that have another one.
    pub modules: BTreeMap<String, String>,
    /// Layers of the blocks that are floats.
    pub dense: Vec<String>,
}

impl HalfbyteConfig {
    /// The format that the config gives a module; None where it says that it is dense.
    pub fn format_of(&self, module: &str) -> Option<&str> {
        if self.dense.iter().any(|name| name == module) {
            return None;
        }
        Some(self.modules.get(module).unwrap_or(&self.format))
    }
}

/// The fields of a config that is ours. Errors: another version, names that are no formats.
pub(super) fn parse(fields: &Fields<'_>) -> Result<HalfbyteConfig> {
    let version = fields.integer(&["version"])?;
    if version != Some(1) {
        let got = version.map_or("none".to_owned(), |version| version.to_string());
        let what = format!("{} of halfbyte's own form: expected 1, got {got}", fields.path("version"));
        return Err(Error::unsupported(fields.file, what));
    }
    let checked = |key: &str, name: &str| match name.parse::<Format>() {
        Ok(_) => Ok(name.to_owned()),
        Err(e) => Err(Error::malformed(fields.file, format!("`{key}`: {e}"))),
    };
    let path = fields.path("format");
    let Some(format) = fields.text(&["format"])? else {
        return Err(Error::malformed(fields.file, format!("`{path}`: expected the name of a format, got none")));
    };
    let format = checked(&path, &format)?;
    let mut modules = BTreeMap::new();
    match fields.fields.get("modules") {
        None | Some(Value::Null) => {}
        Some(Value::Object(named)) => {
            for (module, name) in named {
                let path = format!("{}.{module}", fields.path("modules"));
                let Some(name) = name.as_str() else {
                    let what = format!("`{path}`: expected the name of a format, got {}", short(name));
                    return Err(Error::malformed(fields.file, what));
                };
                modules.insert(module.clone(), checked(&path, name)?);
            }
        }
        Some(other) => {
            let what = format!("`{}`: expected an object, got {}", fields.path("modules"), short(other));
            return Err(Error::malformed(fields.file, what));
        }
    }
    Ok(HalfbyteConfig { file: fields.file.to_owned(), format, modules, dense: strings(fields, "dense")? })
}
