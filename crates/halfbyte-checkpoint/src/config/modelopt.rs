//! What NVIDIA's ModelOpt declares: `quantization_config` in `config.json`, or `hf_quant_config.json` of older files.
//!
//! Source: ModelOpt 0.47 (`export/convert_hf_config.py`).

use super::patterns::{Meaning, ModulePatterns};
use super::{Fields, object, strings};
use crate::error::{Error, Result};
use serde::Serialize;
use std::path::PathBuf;

/// The algorithms whose modules are read, of a mixture as far as its modules are.
const READ: [&str; 4] = ["nvfp4", "w4a16_nvfp4", "nvfp4_awq", "mixed_precision"];

/// What a checkpoint of ModelOpt declares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ModelOptConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// The algorithm (`quant_algo`), in lower case; None where only keys and values are quantised.
    pub algorithm: Option<String>,
    /// Modules that stay dense (`ignore`, or `exclude_modules`), `*` for anything.
    pub ignore: ModulePatterns,
}

impl ModelOptConfig {
    /// Whether activations are quantised to floats of 4 bits as well.
    pub fn quantizes_activations(&self) -> bool {
        matches!(self.algorithm.as_deref(), Some("nvfp4" | "nvfp4_awq"))
    }
}

/// The fields of a config that names this method.
pub(super) fn parse(fields: &Fields<'_>) -> Result<ModelOptConfig> {
    let algorithm = fields.text(&["quant_algo"])?;
    if let Some(algorithm) = algorithm.as_deref().filter(|name| !READ.contains(name)) {
        let read = READ.join(", ");
        let what =
            format!("{} `{algorithm}` of ModelOpt is not read; those that are: {read}", fields.path("quant_algo"));
        return Err(Error::unsupported(fields.file, what));
    }
    let mut listed = strings(fields, "ignore")?;
    listed.extend(strings(fields, "exclude_modules")?);
    let ignore = ModulePatterns::new(listed, |text| match text.contains(['*', '?']) {
        true => Meaning::Wildcards(text),
        false => Meaning::Name(text),
    });
    Ok(ModelOptConfig { file: fields.file.to_owned(), algorithm, ignore })
}

/// `hf_quant_config.json`, which has the same under `quantization`.
pub(super) fn parse_own_file(fields: &Fields<'_>) -> Result<ModelOptConfig> {
    match object(fields, "quantization")? {
        Some(inner) => parse(&inner),
        None => Err(Error::malformed(fields.file, "`quantization`: expected an object, got none")),
    }
}
