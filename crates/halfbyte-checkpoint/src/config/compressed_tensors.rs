//! What a compressed-tensors checkpoint declares.
//!
//! Source: `QuantizationConfig`, `QuantizationScheme` and `QuantizationArgs` of compressed-tensors 0.20.0, with their
//! defaults.

use super::patterns::{MAX_EXPRESSIONS, Meaning, ModulePatterns};
use super::{Fields, MAX_GROUP, object, short, strings};
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
    pub ignore: ModulePatterns,
}

/// The settings of some modules: one of `config_groups`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CompressedTensorsGroup {
    /// Its key.
    pub name: String,
    /// The modules that it is for: class names, module names, or `re:` and a regular expression.
    pub targets: ModulePatterns,
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
    /// Floats of 4 bits, two a byte, in groups of 32 with a power of two.
    Mxfp4PackQuantized,
    /// Floats of 4 bits, two a byte, in groups of 16 with a float of 8 bits.
    Nvfp4PackQuantized,
}

impl CompressedTensorsFormat {
    /// The name that configs use.
    pub fn name(self) -> &'static str {
        match self {
            CompressedTensorsFormat::PackQuantized => "pack-quantized",
            CompressedTensorsFormat::IntQuantized => "int-quantized",
            CompressedTensorsFormat::Mxfp4PackQuantized => "mxfp4-pack-quantized",
            CompressedTensorsFormat::Nvfp4PackQuantized => "nvfp4-pack-quantized",
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

/// Groups that a config may have.
const MAX_GROUPS: usize = 256;

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
        for (name, value) in listed.fields {
            if value.is_array() {
                groups.extend(preset(name, &listed, own)?);
            } else if let Some(group) = object(&listed, name)? {
                groups.extend(parse_group(name, &group, own)?);
            }
            // Every module is held against every group.
            let expressions: usize = groups.iter().map(|group| group.targets.compiled()).sum();
            if groups.len() > MAX_GROUPS || expressions > MAX_EXPRESSIONS {
                let what = format!(
                    "`{}`: expected at most {MAX_GROUPS} groups and {MAX_EXPRESSIONS} expressions, got more",
                    listed.prefix
                );
                return Err(Error::unsupported(listed.file, what));
            }
        }
    }
    Ok(CompressedTensorsConfig { file: fields.file.to_owned(), groups, ignore: modules(fields, "ignore")? })
}

fn parse_group(
    name: &str,
    fields: &Fields<'_>,
    format_of_all: Option<CompressedTensorsFormat>,
) -> Result<Option<CompressedTensorsGroup>> {
    let targets = modules(fields, "targets")?;
    let format = format(fields)?.or(format_of_all);
    let Some(weights) = object(fields, "weights")? else { return Ok(None) };
    let is_float = match weights.text(&["type"])?.as_deref() {
        None | Some("int") => false,
        Some("float") => true,
        Some(other) => return not_read(&weights, "type", other, TYPES),
    };
    let (bits, strategy) = (bits_of(&weights)?, strategy(&weights, is_float)?);
    let format = match (is_float, strategy) {
        (false, _) => format,
        (true, CompressedTensorsStrategy::Group(size)) if bits == 4 && fp4_of(size).is_some() => fp4_of(size),
        _ => return not_read(&weights, "type", "float", TYPES),
    };
    let activations = object(fields, "input_activations")?;
    Ok(Some(CompressedTensorsGroup {
        name: name.to_owned(),
        targets,
        format,
        bits,
        symmetric: weights.boolean(&["symmetric"])?.unwrap_or(true),
        strategy,
        act_order: act_order(&weights)?,
        activation_bits: activations.map(|a| bits_of(&a)).transpose()?,
    }))
}

/// How floats of 4 bits in groups of this size are stored.
fn fp4_of(size: usize) -> Option<CompressedTensorsFormat> {
    match size {
        16 => Some(CompressedTensorsFormat::Nvfp4PackQuantized),
        32 => Some(CompressedTensorsFormat::Mxfp4PackQuantized),
        _ => None,
    }
}

/// Types of codes that are read.
const TYPES: &str = "int, and float of 4 bits in groups of 16 or 32";

/// The modules that a list is for.
fn modules(fields: &Fields<'_>, key: &str) -> Result<ModulePatterns> {
    Ok(ModulePatterns::new(strings(fields, key)?, |text| match text.strip_prefix("re:") {
        Some(expression) => Meaning::Expression(expression),
        None => Meaning::Name(text),
    }))
}

/// Presets of integer weights with one scale for 128 inputs, no zero points: name, bits, bits of the activations.
const GROUPED: &[(&str, u32, Option<u32>)] = &[
    ("W2A4", 2, Some(4)),
    ("W2A8", 2, Some(8)),
    ("W2A16", 2, None),
    ("W3A4", 3, Some(4)),
    ("W3A8", 3, Some(8)),
    ("W3A16", 3, None),
    ("W4A4", 4, Some(4)),
    ("W4A8", 4, Some(8)),
    ("W4AFP8", 4, Some(8)),
    ("W4A16", 4, None),
    ("W4A16_ASYM", 4, None),
    ("W5A8", 5, Some(8)),
    ("W5A16", 5, None),
    ("W6A8", 6, Some(8)),
    ("W6A16", 6, None),
    ("W7A8", 7, Some(8)),
    ("W7A16", 7, None),
    ("W8A16", 8, None),
];

/// Presets of floats of 4 bits: name, weights that share a scale, bits of the activations.
const FP4: &[(&str, usize, Option<u32>)] = &[
    ("MXFP4", 32, Some(4)),
    ("MXFP4A16", 32, None),
    ("MXFP4XFP8", 32, Some(8)),
    ("NVFP4", 16, Some(4)),
    ("NVFP4A16", 16, None),
];

/// Presets of weights that are other floats.
const FLOATS: &[&str] = &["FP8", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP6A16", "MXFP6A8", "MXFP8", "MXFP8A16"];

/// A group that is the name of settings with a list of modules.
fn preset(
    name: &str,
    listed: &Fields<'_>,
    format: Option<CompressedTensorsFormat>,
) -> Result<Option<CompressedTensorsGroup>> {
    let known = name.to_uppercase();
    let fp4 = FP4.iter().find(|(name, ..)| *name == known);
    let format = fp4.map_or(format, |(_, size, _)| fp4_of(*size));
    let (bits, strategy, activation_bits) = match known.as_str() {
        "UNQUANTIZED" => return Ok(None),
        "W8A8" | "INT8" => (8, CompressedTensorsStrategy::Channel, Some(8)),
        other => match (GROUPED.iter().find(|(name, ..)| *name == other), fp4) {
            (Some(&(_, bits, activations)), _) => (bits, CompressedTensorsStrategy::Group(128), activations),
            (None, Some(&(_, size, activations))) => (4, CompressedTensorsStrategy::Group(size), activations),
            (None, None) if FLOATS.contains(&other) => {
                let integers: Vec<&str> = GROUPED.iter().map(|(name, ..)| *name).collect();
                let read = format!("{}, W8A8, INT8, those of MXFP4 and NVFP4", integers.join(", "));
                return not_read(listed, name, "preset of floats", &read);
            }
            (None, None) => {
                let what = format!(
                    "`{}`: expected settings, or the name of a preset of compressed-tensors 0.20 before a list, and \
                     there is no preset `{name}`",
                    listed.path(name)
                );
                return Err(Error::malformed(listed.file, what));
            }
        },
    };
    Ok(Some(CompressedTensorsGroup {
        name: name.to_owned(),
        targets: modules(listed, name)?,
        format,
        bits,
        symmetric: known != "W4A16_ASYM",
        strategy,
        act_order: false,
        activation_bits,
    }))
}

/// The storage that `format` names; None where it names none, or leaves it to each group.
fn format(fields: &Fields<'_>) -> Result<Option<CompressedTensorsFormat>> {
    match fields.text(&["format"])?.as_deref() {
        None | Some("dense" | "mixed-precision") => Ok(None),
        Some("pack-quantized") => Ok(Some(CompressedTensorsFormat::PackQuantized)),
        Some("int-quantized") => Ok(Some(CompressedTensorsFormat::IntQuantized)),
        Some("mxfp4-pack-quantized") => Ok(Some(CompressedTensorsFormat::Mxfp4PackQuantized)),
        Some("nvfp4-pack-quantized") => Ok(Some(CompressedTensorsFormat::Nvfp4PackQuantized)),
        Some(other) => {
            let read = "pack-quantized, int-quantized, mxfp4-pack-quantized, nvfp4-pack-quantized";
            not_read(fields, "format", other, read)
        }
    }
}

fn bits_of(fields: &Fields<'_>) -> Result<u32> {
    match fields.integer(&["num_bits"])? {
        None => Ok(8),
        Some(bits @ 1..=16) => Ok(bits as u32),
        Some(other) => {
            let what = format!("`{}`: expected 1 to 16, got {other}", fields.path("num_bits"));
            Err(Error::malformed(fields.file, what))
        }
    }
}

fn strategy(weights: &Fields<'_>, is_float: bool) -> Result<CompressedTensorsStrategy> {
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
        (Some("tensor_group"), size) if is_float => group(size),
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
