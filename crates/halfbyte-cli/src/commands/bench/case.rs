//! Case files: shapes to be measured, with their origin.

use crate::args::WeightKind;
use crate::failure::{Exit, Failure, Result};
use serde::Deserialize;
use std::path::Path;

/// A case file, as TOML:
///
/// ```toml
/// origin = "where the shapes come from"
/// formats = ["w4a8-g128"]
/// m = [1, 8]
///
/// [[shape]]
/// origin = "what of it this shape is"
/// n = 4096
/// k = 4096
/// ```
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    /// Where the shapes come from.
    pub origin: String,
    /// Formats of the weights.
    pub formats: Vec<String>,
    /// Rows of x.
    pub m: Vec<usize>,
    /// The weights.
    #[serde(rename = "shape")]
    pub shapes: Vec<Shape>,
}

/// A weight of a case.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// What it is.
    pub origin: String,
    /// Outputs.
    pub n: usize,
    /// Length of the reduction.
    pub k: usize,
}

impl Case {
    /// Reads a case file. Errors: no such file, no TOML of this form, a format that does not exist, nothing to measure.
    pub fn read(path: &Path) -> Result<(Self, Vec<WeightKind>)> {
        let refuse = |cause: String| {
            Failure::new(
                Exit::Input,
                format!("{} is not a case file", path.display()),
                cause,
                "bench/cases/llama.toml shows the form",
            )
        };
        let text = crate::text::read_text(path)?;
        let case: Case = toml::from_str(&text).map_err(|e| refuse(crate::text::toml_cause(&text, &e)))?;
        if case.formats.is_empty() || case.m.is_empty() || case.shapes.is_empty() {
            return Err(refuse("expected at least one of each: formats, m, shape".to_owned()));
        }
        let kinds = case.formats.iter().map(|name| name.parse().map_err(&refuse)).collect::<Result<_>>()?;
        Ok((case, kinds))
    }
}
