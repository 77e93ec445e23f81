//! What a checkpoint says of its quantisation: `quantization_config` in `config.json`, `quantize_config.json` (AutoGPTQ)
//! or `quant_config.json` (AutoAWQ).
//!
//! Source: the fields as AutoAWQ, AutoGPTQ, GPTQModel, transformers and vLLM read and write them; each has several
//! spellings.

use crate::error::{Error, Result};
use crate::json::{self, read_small};
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

mod awq;
mod compressed_tensors;

pub use awq::{AwqConfig, AwqVersion};
pub use compressed_tensors::{
    CompressedTensorsConfig, CompressedTensorsFormat, CompressedTensorsGroup, CompressedTensorsStrategy,
};

/// The quantisation that a checkpoint declares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "quant_method", rename_all = "snake_case")]
#[non_exhaustive]
pub enum QuantizationConfig {
    /// GPTQ.
    Gptq(GptqConfig),
    /// AWQ.
    Awq(AwqConfig),
    /// compressed-tensors.
    #[serde(rename = "compressed-tensors")]
    CompressedTensors(CompressedTensorsConfig),
}

/// How GPTQ files store zero points.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GptqVersion {
    /// `gptq`: the zero point less one.
    #[serde(rename = "gptq")]
    V1,
    /// `gptq_v2`: the zero point itself.
    #[serde(rename = "gptq_v2")]
    V2,
}

impl GptqVersion {
    /// The name that configs use.
    pub fn name(self) -> &'static str {
        match self {
            GptqVersion::V1 => "gptq",
            GptqVersion::V2 => "gptq_v2",
        }
    }
}

/// What a GPTQ checkpoint declares. The tensors have the last word on most of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GptqConfig {
    /// The file that says so.
    pub file: PathBuf,
    /// Bits a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// Group size along k; None: one group a channel (−1 in the file).
    pub group_size: Option<usize>,
    /// Whether every zero point is the middle code, if it says.
    pub sym: Option<bool>,
    /// Whether columns were quantised in another order (act-order).
    pub desc_act: bool,
    /// Whether groups were fixed before columns were reordered, so that act-order leaves no trace.
    pub static_groups: bool,
    /// How zero points are stored.
    pub version: GptqVersion,
    /// Whether the output head is quantised too.
    pub lm_head: bool,
    /// Whether some modules have settings of their own (`dynamic`); then the tensors' shapes tell.
    pub dynamic: bool,
}

impl GptqConfig {
    /// Bits of every module; None if modules may have their own.
    pub fn bits_of_all(&self) -> Option<u32> {
        (!self.dynamic).then_some(self.bits)
    }

    /// Whether every zero point of every module is the middle code, if the config says so for all of them.
    pub fn sym_of_all(&self) -> Option<bool> {
        self.sym.filter(|_| !self.dynamic)
    }
}

/// The largest group size that is believed.
const MAX_GROUP: i64 = 1 << 24;

/// Reads the quantisation config of a model folder; None if it declares none.
///
/// Errors: a file that is not JSON, a field of the wrong type or with an absurd value, two spellings of a field that
/// disagree, a method that is not read.
pub fn read(folder: &Path) -> Result<Option<QuantizationConfig>> {
    let config = folder.join("config.json");
    if let Some(fields) = read_object(&config)? {
        for key in ["quantization_config", "compression_config"] {
            match fields.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::Object(inner)) => return parse(inner, key, &config).map(Some),
                Some(other) => {
                    return Err(Error::malformed(
                        &config,
                        format!("`{key}`: expected an object, got {}", short(other)),
                    ));
                }
            }
        }
    }
    for name in ["quantize_config.json", "quant_config.json"] {
        let separate = folder.join(name);
        if let Some(fields) = read_object(&separate)? {
            return parse(&fields, "", &separate).map(Some);
        }
    }
    Ok(None)
}

/// The JSON object in a file; None if there is no such file.
pub(crate) fn read_object(file: &Path) -> Result<Option<Map<String, Value>>> {
    if !file.exists() {
        return Ok(None);
    }
    match json::parse(&read_small(file)?) {
        Ok(Value::Object(fields)) => Ok(Some(fields)),
        Ok(other) => Err(Error::malformed(file, format!("expected a JSON object, got {}", short(&other)))),
        Err(e) => Err(Error::malformed(file, format!("expected JSON: {e}"))),
    }
}

fn parse(fields: &Map<String, Value>, prefix: &str, file: &Path) -> Result<QuantizationConfig> {
    let fields = Fields { fields, prefix: prefix.into(), file };
    let method = fields.text(&["quant_method"])?;
    if method.as_deref().map_or(fields.has(&["config_groups"]), |m| m == "compressed-tensors") {
        return compressed_tensors::parse(&fields).map(QuantizationConfig::CompressedTensors);
    }
    let format = fields.text(&["checkpoint_format", "format", "version"])?;
    let not_read = |what: &str, name: &str| {
        let what =
            format!("{} `{name}` is not read yet; methods that are: awq, compressed-tensors, gptq", fields.path(what));
        Err(Error::unsupported(file, what))
    };
    if awq::is_declared(&fields)? {
        return awq::parse(&fields).map(QuantizationConfig::Awq);
    }
    // AutoGPTQ's own quantize_config.json names no method.
    match method.as_deref() {
        Some("gptq") => {}
        None if fields.has(&["bits", "wbits", "w_bit"]) && !fields.has(&["zero_point"]) => {}
        None => return not_read("quant_method", "(none)"),
        Some(other) => return not_read("quant_method", other),
    }
    if fields.boolean(&["is_marlin_format"])? == Some(true) {
        return not_read("is_marlin_format", "true");
    }
    let version = match format.as_deref() {
        None | Some("gptq") => GptqVersion::V1,
        Some("gptq_v2") => GptqVersion::V2,
        Some(other) => return not_read("checkpoint_format", other),
    };
    match fields.text(&["pack_dtype"])?.as_deref() {
        None | Some("int32") => {}
        Some(other) => return not_read("pack_dtype", other),
    }
    let Some(bits) = fields.integer(&["bits", "w_bit", "wbits"])? else {
        return Err(Error::malformed(file, format!("expected the field `{}`, found none", fields.path("bits"))));
    };
    if !matches!(bits, 2 | 3 | 4 | 8) {
        return Err(Error::unsupported(file, format!("`{}`: expected 2, 3, 4 or 8, got {bits}", fields.path("bits"))));
    }
    let group_size = match fields.integer(&["group_size", "q_group_size"])? {
        None | Some(-1) => None,
        Some(size @ 1..=MAX_GROUP) => Some(size as usize),
        Some(other) => {
            let what = format!("`{}`: expected -1 or 1 to {MAX_GROUP}, got {other}", fields.path("group_size"));
            return Err(Error::malformed(file, what));
        }
    };
    let zero_point = fields.boolean(&["zero_point"])?;
    let sym = fields.boolean(&["sym"])?;
    if let (Some(sym), Some(zero_point)) = (sym, zero_point)
        && sym == zero_point
    {
        return Err(Error::malformed(file, format!("`sym` and `zero_point` contradict each other: both are {sym}")));
    }
    let dynamic = match fields.fields.get("dynamic") {
        None | Some(Value::Null) => false,
        Some(Value::Object(rules)) => !rules.is_empty(),
        Some(other) => {
            let what = format!("`{}`: expected an object, got {}", fields.path("dynamic"), short(other));
            return Err(Error::malformed(file, what));
        }
    };
    Ok(QuantizationConfig::Gptq(GptqConfig {
        file: file.to_owned(),
        bits: bits as u32,
        group_size,
        sym: sym.or(zero_point.map(|z| !z)),
        desc_act: fields.boolean(&["desc_act", "act_order"])?.unwrap_or(false),
        static_groups: fields.boolean(&["static_groups"])?.unwrap_or(false),
        version,
        lm_head: fields.boolean(&["lm_head"])?.unwrap_or(false),
        dynamic,
    }))
}

/// Typed access to the fields of a config, each under any of its spellings.
struct Fields<'a> {
    fields: &'a Map<String, Value>,
    prefix: Cow<'a, str>,
    file: &'a Path,
}

impl Fields<'_> {
    fn path(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    fn has(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.fields.get(*key).is_some_and(|v| !v.is_null()))
    }

    fn integer(&self, keys: &[&str]) -> Result<Option<i64>> {
        self.one(keys, "an integer", Value::as_i64)
    }

    fn boolean(&self, keys: &[&str]) -> Result<Option<bool>> {
        self.one(keys, "true or false", Value::as_bool)
    }

    fn text(&self, keys: &[&str]) -> Result<Option<String>> {
        self.one(keys, "a string", |v| v.as_str().map(str::to_lowercase))
    }

    /// The value under any of the keys; an error if one has the wrong type or two disagree.
    fn one<T: PartialEq + std::fmt::Debug>(
        &self,
        keys: &[&str],
        expected: &str,
        convert: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let mut found: Option<(&str, T)> = None;
        for &key in keys {
            let Some(value) = self.fields.get(key).filter(|v| !v.is_null()) else { continue };
            let Some(value) = convert(value) else {
                let what = format!("`{}`: expected {expected}, got {}", self.path(key), short(value));
                return Err(Error::malformed(self.file, what));
            };
            match &found {
                Some((other, before)) if *before != value => {
                    let what = format!("`{other}` and `{key}` contradict each other: {before:?} and {value:?}");
                    return Err(Error::malformed(self.file, what));
                }
                Some(_) => {}
                None => found = Some((key, value)),
            }
        }
        Ok(found.map(|(_, value)| value))
    }
}

/// A value as text, cut to a length that fits an error.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
