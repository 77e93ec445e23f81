//! What a bitsandbytes checkpoint declares.
//!
//! Source: `BitsAndBytesConfig` of transformers 5, with its defaults.

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, strings};
use crate::error::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// What a bitsandbytes checkpoint declares. The tensors have the last word on all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BitsAndBytesConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// How weights are stored.
    pub kind: BitsAndBytesKind,
    /// Whether scales of 4-bit codes are 8-bit codes themselves (`bnb_4bit_use_double_quant`), if it says.
    pub double_quant: Option<bool>,
    /// Modules that stay dense (`llm_int8_skip_modules`).
    pub skip_modules: ModulePatterns,
}

/// How bitsandbytes stores weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BitsAndBytesKind {
    /// A signed byte each, with a scale an output.
    Int8,
    /// Codes of 4 bits for values spread as those of a normal distribution are.
    Nf4,
    /// Codes of 4 bits for small floats.
    Fp4,
}

impl BitsAndBytesKind {
    /// The name that configs and files use.
    pub fn name(self) -> &'static str {
        match self {
            BitsAndBytesKind::Int8 => "int8",
            BitsAndBytesKind::Nf4 => "nf4",
            BitsAndBytesKind::Fp4 => "fp4",
        }
    }
}

const IN_8_BITS: &[&str] = &["load_in_8bit", "_load_in_8bit"];
const IN_4_BITS: &[&str] = &["load_in_4bit", "_load_in_4bit"];

/// Whether these fields are those of bitsandbytes. Before it was one of several methods, its configs named none.
pub(super) fn is_declared(fields: &Fields<'_>, method: Option<&str>) -> bool {
    match method {
        Some(method) => method == "bitsandbytes",
        None => fields.has(IN_8_BITS) || fields.has(IN_4_BITS),
    }
}

/// The fields of a config that is that of bitsandbytes.
pub(super) fn parse(fields: &Fields<'_>) -> Result<BitsAndBytesConfig> {
    let in_8_bits = fields.boolean(IN_8_BITS)?.unwrap_or(false);
    let in_4_bits = fields.boolean(IN_4_BITS)?.unwrap_or(false);
    let kind = match (in_8_bits, in_4_bits) {
        (true, false) => BitsAndBytesKind::Int8,
        (false, true) => match fields.text(&["bnb_4bit_quant_type"])?.as_deref() {
            None | Some("fp4") => BitsAndBytesKind::Fp4,
            Some("nf4") => BitsAndBytesKind::Nf4,
            Some(other) => {
                let path = fields.path("bnb_4bit_quant_type");
                let what = format!("{path} `{other}` of bitsandbytes is not read yet; those that are: fp4, nf4");
                return Err(Error::unsupported(fields.file, what));
            }
        },
        _ => {
            let [eight, four] = [IN_8_BITS, IN_4_BITS].map(|keys| fields.path(keys[0]));
            let what = format!("expected either `{eight}` or `{four}` to be true, got {in_8_bits} and {in_4_bits}");
            return Err(Error::malformed(fields.file, what));
        }
    };
    Ok(BitsAndBytesConfig {
        file: fields.file.to_owned(),
        kind,
        double_quant: fields.boolean(&["bnb_4bit_use_double_quant"])?,
        skip_modules: ModulePatterns::new(strings(fields, "llm_int8_skip_modules")?, |text| Meaning::Parts(text)),
    })
}
