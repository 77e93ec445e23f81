//! What a checkpoint says of its quantisation: `quantization_config` in `config.json`, `quantize_config.json` (AutoGPTQ),
//! `quant_config.json` (AutoAWQ) or `hf_quant_config.json` (ModelOpt).
//!
//! Source: the fields as AutoAWQ, AutoGPTQ, GPTQModel, transformers and vLLM read and write them; each has several
//! spellings.

use crate::error::{Error, Result};
use crate::json::{self, read_small, refuse_lfs_pointer};
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::io::ErrorKind;
use std::path::Path;

mod awq;
mod bitsandbytes;
mod compressed_tensors;
mod expectation;
mod fpa_intb;
mod gptq;
mod halfbyte;
mod modelopt;
mod mxfp4;
mod patterns;

pub use awq::{AwqConfig, AwqVersion};
pub use bitsandbytes::{BitsAndBytesConfig, BitsAndBytesKind};
pub use compressed_tensors::{
    CompressedTensorsConfig, CompressedTensorsFormat, CompressedTensorsGroup, CompressedTensorsStrategy,
};
pub(crate) use expectation::{Expectation, in_block, is_head, other_names};
pub use fpa_intb::FpaIntBConfig;
pub(crate) use gptq::GptqSettings;
pub use gptq::{GptqConfig, GptqDynamic, GptqOverride, GptqVersion};
pub use halfbyte::HalfbyteConfig;
pub use modelopt::ModelOptConfig;
pub use mxfp4::Mxfp4Config;
pub use patterns::ModulePatterns;

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
    /// bitsandbytes.
    #[serde(rename = "bitsandbytes")]
    BitsAndBytes(BitsAndBytesConfig),
    /// The layouts of fpA_intB kernels.
    #[serde(rename = "fpa_intb")]
    FpaIntB(FpaIntBConfig),
    /// Experts in MXFP4.
    Mxfp4(Mxfp4Config),
    /// NVIDIA's ModelOpt.
    #[serde(rename = "modelopt")]
    ModelOpt(ModelOptConfig),
    /// Our own form.
    Halfbyte(HalfbyteConfig),
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
        // TensorRT-LLM's; other programs have a field of this name too.
        if let Some(Value::Object(inner)) = fields.get("quantization")
            && inner.get("quant_algo").is_some_and(Value::is_string)
        {
            return parse(inner, "quantization", &config).map(Some);
        }
    }
    for name in ["quantize_config.json", "quant_config.json"] {
        let separate = folder.join(name);
        if let Some(fields) = read_object(&separate)? {
            return parse(&fields, "", &separate).map(Some);
        }
    }
    let separate = folder.join("hf_quant_config.json");
    if let Some(fields) = read_object(&separate)? {
        let fields = Fields { fields: &fields, prefix: "".into(), file: &separate };
        return modelopt::parse_own_file(&fields).map(QuantizationConfig::ModelOpt).map(Some);
    }
    Ok(None)
}

/// What an object says that would be `quantization_config` in this file. Errors: those of [`read`].
pub(crate) fn of_object(fields: &Map<String, Value>, file: &Path) -> Result<QuantizationConfig> {
    parse(fields, "quantization_config", file)
}

/// The JSON object in a file; None if there is no such file. Errors: one that is there cannot be read, a link to nothing among them.
pub(crate) fn read_object(file: &Path) -> Result<Option<Map<String, Value>>> {
    match file.symlink_metadata() {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(Error::io("open", file)(error)),
        Ok(_) => {}
    }
    let text = read_small(file)?;
    refuse_lfs_pointer(file, &text)?;
    match json::parse(&text) {
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
    if method.as_deref() == Some("halfbyte") {
        return halfbyte::parse(&fields).map(QuantizationConfig::Halfbyte);
    }
    if method.as_deref().map_or(fpa_intb::is_declared(&fields), |method| method == "fpa_intb") {
        return fpa_intb::parse(&fields).map(QuantizationConfig::FpaIntB);
    }
    if method.as_deref() == Some("mxfp4") {
        return mxfp4::parse(&fields).map(QuantizationConfig::Mxfp4);
    }
    if method.as_deref() == Some("modelopt") {
        return modelopt::parse(&fields).map(QuantizationConfig::ModelOpt);
    }
    if bitsandbytes::is_declared(&fields, method.as_deref()) {
        return bitsandbytes::parse(&fields).map(QuantizationConfig::BitsAndBytes);
    }
    if awq::is_declared(&fields)? {
        return awq::parse(&fields).map(QuantizationConfig::Awq);
    }
    // AutoGPTQ's own quantize_config.json names no method.
    match method.as_deref() {
        Some("gptq" | "marlin") => {}
        None if fields.has(&["bits", "wbits", "w_bit"]) && !fields.has(&["zero_point"]) => {}
        None => return not_read(&fields, "quant_method", "(none)"),
        Some(other) => return not_read(&fields, "quant_method", other),
    }
    let format = fields.text(&["checkpoint_format", "format", "version"])?;
    gptq::parse(&fields, method.as_deref(), format.as_deref()).map(QuantizationConfig::Gptq)
}

fn not_read<T>(fields: &Fields<'_>, key: &str, name: &str) -> Result<T> {
    let what = format!(
        "{} `{name}` is not read yet; methods that are: awq, bitsandbytes, compressed-tensors, fpa_intb, gptq, halfbyte, marlin, \
         modelopt, mxfp4",
        fields.path(key)
    );
    Err(Error::unsupported(fields.file, what))
}

/// The group size, if there is one; inner None: one group a channel (−1).
fn group_size(fields: &Fields<'_>) -> Result<Option<Option<usize>>> {
    match fields.integer(&["group_size", "q_group_size"])? {
        None => Ok(None),
        Some(-1) => Ok(Some(None)),
        Some(size @ 1..=MAX_GROUP) => Ok(Some(Some(size as usize))),
        Some(other) => {
            let what = format!("`{}`: expected -1 or 1 to {MAX_GROUP}, got {other}", fields.path("group_size"));
            Err(Error::malformed(fields.file, what))
        }
    }
}

/// Whether every zero point is the middle code, as `sym` or, negated, `zero_point` say.
fn symmetry(fields: &Fields<'_>) -> Result<Option<bool>> {
    let zero_point = fields.boolean(&["zero_point"])?;
    let sym = fields.boolean(&["sym"])?;
    if let (Some(sym), Some(zero_point)) = (sym, zero_point)
        && sym == zero_point
    {
        let what = format!("`sym` and `zero_point` contradict each other: both are {sym}");
        return Err(Error::malformed(fields.file, what));
    }
    Ok(sym.or(zero_point.map(|z| !z)))
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
