//! What an AWQ checkpoint declares, under AutoAWQ's, llm-awq's and transformers' spellings.

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, group_size, strings, symmetry};
use crate::error::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// How AWQ files pack codes: named after the kernels that take them so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AwqVersion {
    /// `gemm`: eight outputs a word, interleaved; the usual one.
    Gemm,
    /// `gemv`: eight inputs a word, in order.
    Gemv,
    /// `gemv_fast`: four rows of 64 inputs interleaved in 16-bit words; llm-awq's own layout too.
    GemvFast,
}

impl AwqVersion {
    /// The name that configs use.
    pub fn name(self) -> &'static str {
        match self {
            AwqVersion::Gemm => "gemm",
            AwqVersion::Gemv => "gemv",
            AwqVersion::GemvFast => "gemv_fast",
        }
    }

    /// The layout of files with this label. `exllama` and `ipex` files are those of `gemm`, repacked when loaded.
    fn of(name: &str) -> Option<Self> {
        match name {
            "gemm" | "exllama" | "ipex" => Some(AwqVersion::Gemm),
            "gemv" => Some(AwqVersion::Gemv),
            "gemv_fast" | "llm-awq" => Some(AwqVersion::GemvFast),
            _ => None,
        }
    }
}

/// What an AWQ checkpoint declares. The tensors have the last word on most of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AwqConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// Bits a code: 4.
    pub bits: u32,
    /// Group size along k; None: one group a channel (−1 in the file).
    pub group_size: Option<usize>,
    /// Whether zero points are other than the middle code, if it says.
    pub zero_point: Option<bool>,
    /// How codes are packed; `gemv_fast` where `backend` is `llm-awq`.
    pub version: AwqVersion,
    /// Modules that stay dense: parts of their names.
    pub modules_to_not_convert: ModulePatterns,
}

const VERSION: &[&str] = &["version", "checkpoint_format", "format"];
const BITS: &[&str] = &["bits", "w_bit", "wbits"];

/// Whether these fields are AWQ's: by `quant_method`, or, as AutoAWQ's `quant_config.json` has none, by its own fields.
pub(super) fn is_declared(fields: &Fields<'_>) -> Result<bool> {
    match fields.text(&["quant_method"])?.as_deref() {
        Some(method) => Ok(method == "awq"),
        None if !fields.has(BITS) || fields.has(&["config_groups"]) => Ok(false),
        None => Ok(match fields.text(VERSION)? {
            Some(version) => AwqVersion::of(&version).is_some(),
            None => fields.has(&["zero_point"]),
        }),
    }
}

/// The fields of a config that is AWQ's.
pub(super) fn parse(fields: &Fields<'_>) -> Result<AwqConfig> {
    let file = fields.file;
    let version = match fields.text(VERSION)?.as_deref() {
        None => AwqVersion::Gemm,
        Some(name) => AwqVersion::of(name).ok_or_else(|| {
            let path = fields.path(VERSION.iter().find(|key| fields.has(&[key])).unwrap_or(&VERSION[0]));
            Error::unsupported(file, format!("{path} `{name}` of awq is not read yet; read: gemm, gemv, gemv_fast"))
        })?,
    };
    // Transformers writes `gemm` beside `llm-awq`, which packs in a way of its own. Other backends say who runs it only.
    let version = match fields.text(&["backend"])?.as_deref() {
        Some("llm-awq") => AwqVersion::GemvFast,
        _ => version,
    };
    match fields.integer(BITS)? {
        Some(4) => {}
        Some(other) => {
            let what = format!("`{}`: AWQ files have 4 bits only, got {other}", fields.path("bits"));
            return Err(Error::unsupported(file, what));
        }
        None => {
            return Err(Error::malformed(file, format!("expected the field `{}`, found none", fields.path("bits"))));
        }
    }
    Ok(AwqConfig {
        file: file.to_owned(),
        bits: 4,
        // What AutoAWQ and transformers take where nothing is said.
        group_size: group_size(fields)?.unwrap_or(Some(128)),
        zero_point: symmetry(fields)?.map(|sym| !sym),
        version,
        modules_to_not_convert: ModulePatterns::new(strings(fields, "modules_to_not_convert")?, |text| {
            Meaning::Parts(text)
        }),
    })
}
