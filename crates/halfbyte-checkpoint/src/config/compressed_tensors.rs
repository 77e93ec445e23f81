//! What a compressed-tensors checkpoint declares.
//!
//! Source: `QuantizationConfig`, `QuantizationScheme` and `QuantizationArgs` of compressed-tensors 0.20.0, with their
//! defaults.

use super::{Fields, MAX_GROUP, short};
use crate::error::{Error, Result};
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;

/// What a compressed-tensors checkpoint declares. The tensors have the last word on all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompressedTensorsConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// Settings with the modules that they are for (`config_groups`); those that leave weights alone are not listed.
    pub groups: Vec<CompressedTensorsGroup>,
    /// Modules that stay dense: class names, module names, or `re:` and a regular expression.
    pub ignore: Vec<String>,
}

/// The settings of some modules: one of `config_groups`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompressedTensorsGroup {
    /// Its key.
    pub name: String,
    /// The modules that it is for: class names, module names, or `re:` and a regular expression.
    pub targets: Vec<String>,
    /// How codes are stored, if it says.
    pub format: Option<CompressedTensorsFormat>,
    /// Bits a code, 1 to 8.
    pub bits: u32,
    /// Whether every zero point is the middle code.
    pub symmetric: bool,
    /// How far one scale reaches.
    pub strategy: CompressedTensorsStrategy,
    /// Whether columns were grouped in another order than they lie in (`actorder` "group"), which takes a
    /// `weight_g_idx`.
    pub act_order: bool,
    /// Bits of the activations, if they are to be quantised.
    pub activation_bits: Option<u32>,
}

/// How codes are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CompressedTensorsFormat {
    /// As a stream of bits in 32-bit words.
    PackQuantized,
    /// As signed bytes.
    IntQuantized,
}

impl CompressedTensorsFormat {
    /// The name that configs use.
    pub fn name(self) -> &'static str {
        match self {
            CompressedTensorsFormat::PackQuantized => "pack-quantized",
            CompressedTensorsFormat::IntQuantized => "int-quantized",
        }
    }
}

/// How far one scale reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CompressedTensorsStrategy {
    /// The whole tensor.
    Tensor,
    /// An output channel.
    Channel,
    /// This many neighbours along k.
    Group(usize),
}

impl std::fmt::Display for CompressedTensorsStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            CompressedTensorsStrategy::Tensor => f.write_str("one scale a tensor"),
            CompressedTensorsStrategy::Channel => f.write_str("one scale a channel"),
            CompressedTensorsStrategy::Group(size) => write!(f, "groups of {size}"),
        }
    }
}

/// Reads the fields of a compressed-tensors config.
pub(super) fn parse(fields: &Fields<'_>) -> Result<CompressedTensorsConfig> {
    let own = format(fields)?;
    if let Some(sparsity) = object(fields, "sparsity_config")? {
        match sparsity.text(&["format"])?.as_deref() {
            None | Some("dense") => {}
            Some(other) => return not_read(&sparsity, "format", other, "dense"),
        }
    }
    if let Some(transform) = object(fields, "transform_config")?
        && transform.fields.get("config_groups").and_then(Value::as_object).is_some_and(|g| !g.is_empty())
    {
        return not_read(&transform, "config_groups", "(rotations)", "none");
    }
    let mut groups = Vec::new();
    if let Some(listed) = object(fields, "config_groups")? {
        for name in listed.fields.keys() {
            if let Some(group) = object(&listed, name)? {
                groups.extend(parse_group(name, &group, own)?);
            }
        }
    }
    Ok(CompressedTensorsConfig { file: fields.file.to_owned(), groups, ignore: strings(fields, "ignore")? })
}

fn parse_group(
    name: &str,
    fields: &Fields<'_>,
    format_of_all: Option<CompressedTensorsFormat>,
) -> Result<Option<CompressedTensorsGroup>> {
    let targets = strings(fields, "targets")?;
    let format = format(fields)?.or(format_of_all);
    let Some(weights) = object(fields, "weights")? else { return Ok(None) };
    match weights.text(&["type"])?.as_deref() {
        None | Some("int") => {}
        Some(other) => return not_read(&weights, "type", other, "int"),
    }
    let activations = object(fields, "input_activations")?;
    Ok(Some(CompressedTensorsGroup {
        name: name.to_owned(),
        targets,
        format,
        bits: bits(&weights)?,
        symmetric: weights.boolean(&["symmetric"])?.unwrap_or(true),
        strategy: strategy(&weights)?,
        act_order: act_order(&weights)?,
        activation_bits: activations.map(|a| bits(&a)).transpose()?,
    }))
}

/// The storage that `format` names; None where it names none, or leaves it to each group.
fn format(fields: &Fields<'_>) -> Result<Option<CompressedTensorsFormat>> {
    match fields.text(&["format"])?.as_deref() {
        None | Some("dense" | "mixed-precision") => Ok(None),
        Some("pack-quantized") => Ok(Some(CompressedTensorsFormat::PackQuantized)),
        Some("int-quantized") => Ok(Some(CompressedTensorsFormat::IntQuantized)),
        Some(other) => not_read(fields, "format", other, "pack-quantized, int-quantized"),
    }
}

fn bits(fields: &Fields<'_>) -> Result<u32> {
    match fields.integer(&["num_bits"])? {
        None => Ok(8),
        Some(bits @ 1..=16) => Ok(bits as u32),
        Some(other) => {
            let what = format!("`{}`: expected 1 to 16, got {other}", fields.path("num_bits"));
            Err(Error::malformed(fields.file, what))
        }
    }
}

fn strategy(weights: &Fields<'_>) -> Result<CompressedTensorsStrategy> {
    let size = weights.integer(&["group_size"])?;
    let malformed = |expected: &str, got: String| {
        let what = format!("`{}`: expected {expected}, got {got}", weights.path("group_size"));
        Err(Error::malformed(weights.file, what))
    };
    let group = |size: Option<i64>| match size {
        Some(size @ 1..=MAX_GROUP) => Ok(CompressedTensorsStrategy::Group(size as usize)),
        Some(other) => malformed(&format!("1 to {MAX_GROUP}"), other.to_string()),
        None => malformed("a size, as the strategy is `group`", "none".into()),
    };
    match (weights.text(&["strategy"])?.as_deref(), size) {
        (Some("tensor"), None | Some(-1)) | (None, None) => Ok(CompressedTensorsStrategy::Tensor),
        (Some("channel"), None | Some(-1)) | (None, Some(-1)) => Ok(CompressedTensorsStrategy::Channel),
        (Some("group") | None, size) => group(size),
        (Some(named @ ("tensor" | "channel")), Some(size)) => {
            malformed(&format!("none, as the strategy is `{named}`"), size.to_string())
        }
        (Some(other), _) => not_read(weights, "strategy", other, "tensor, channel, group"),
    }
}

fn act_order(weights: &Fields<'_>) -> Result<bool> {
    match weights.fields.get("actorder") {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(Value::String(name)) => match name.to_lowercase().as_str() {
            "group" | "dynamic" => Ok(true),
            "weight" | "static" => Ok(false),
            other => not_read(weights, "actorder", other, "group, weight"),
        },
        Some(other) => {
            let what = format!("`{}`: expected a string, got {}", weights.path("actorder"), short(other));
            Err(Error::malformed(weights.file, what))
        }
    }
}

fn not_read<T>(fields: &Fields<'_>, key: &str, name: &str, those_that_are: &str) -> Result<T> {
    let path = fields.path(key);
    let what = format!("{path} `{name}` of compressed-tensors is not read yet; those that are: {those_that_are}");
    Err(Error::unsupported(fields.file, what))
}

/// The object under a key.
fn object<'a>(fields: &Fields<'a>, key: &str) -> Result<Option<Fields<'a>>> {
    match fields.fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(inner)) => {
            Ok(Some(Fields { fields: inner, prefix: fields.path(key).into(), file: fields.file }))
        }
        Some(other) => {
            let what = format!("`{}`: expected an object, got {}", fields.path(key), short(other));
            Err(Error::malformed(fields.file, what))
        }
    }
}

/// The list of strings under a key; empty if there is none.
fn strings(fields: &Fields<'_>, key: &str) -> Result<Vec<String>> {
    let strings = match fields.fields.get(key) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(values)) => values.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
        Some(_) => None,
    };
    strings.ok_or_else(|| {
        let what = format!("`{}`: expected a list of strings, got {}", fields.path(key), short(&fields.fields[key]));
        Error::malformed(fields.file, what)
    })
}
