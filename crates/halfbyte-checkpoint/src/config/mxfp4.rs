//! What a checkpoint with experts in MXFP4 declares: GPT-OSS, as OpenAI publishes it.
//!
//! Source: `Mxfp4Config` of transformers 5.

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, strings};
use crate::error::Result;
use serde::Serialize;
use std::path::PathBuf;

/// What such a checkpoint declares. Only experts are quantised, whatever it lists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mxfp4Config {
    /// The file that says so.
    pub file: PathBuf,
    /// Modules that stay dense (`modules_to_not_convert`).
    pub modules_to_not_convert: ModulePatterns,
}

/// The fields of a config that names this method.
pub(super) fn parse(fields: &Fields<'_>) -> Result<Mxfp4Config> {
    let listed = strings(fields, "modules_to_not_convert")?;
    let modules_to_not_convert = ModulePatterns::new(listed, |text| Meaning::Parts(text));
    Ok(Mxfp4Config { file: fields.file.to_owned(), modules_to_not_convert })
}
