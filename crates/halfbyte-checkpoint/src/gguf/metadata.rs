//! A Hugging Face folder's `config.json` and `tokenizer.json` as GGUF's metadata.

use super::architectures::{self, Architecture, Window};
use super::tokenizer;
use super::types::GgmlType;
use super::value::Value as Meta;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

const OP: &str = "config as GGUF metadata";

/// Version of the blocks' layouts, which files with blocks state.
const QUANTIZATION_VERSION: u32 = 2;

/// The metadata of a model, in the order in which it is written: shape, tokenizer, `chat_template` if there is
/// one. `file_type` is the type of most of its matrices.
///
/// Factors of rotary frequencies (`rope_type` llama3) are a tensor in GGUF and not in here: see
/// [`super::rope_factors`]. Errors, naming the field: a size that is missing or beyond u32, or another value that no config has
/// ([`Error::Malformed`]); another architecture, an activation, window or rotary scaling that such models in GGUF do not have, a
/// file type that has no number, a tokenizer that GGUF cannot say exactly ([`Error::Invalid`]).
pub fn metadata_from(
    config: &Map<String, Value>,
    tokenizer: &Value,
    file_type: GgmlType,
    chat_template: Option<&str>,
) -> Result<Vec<(String, Meta)>> {
    let config = Config(config);
    let known = architecture_of(config.0)?;
    if config.get("hidden_act").is_some_and(|act| act != "swish") {
        config.require("hidden_act", "silu")?;
    }
    let rope = config.rope()?;
    if let Some(other) =
        [config, rope].iter().filter_map(|c| c.get("partial_rotary_factor")).find(|f| f.as_f64() != Some(1.0))
    {
        return Err(unfit("partial_rotary_factor", "1 (all of a head rotates)", other));
    }
    let heads = config.size("num_attention_heads")?;
    let head_dim = config.head_dim()? as u32;
    let kv_heads = match config.get("num_key_value_heads") {
        Some(_) => config.size("num_key_value_heads")?,
        None if config.means_absent("num_key_value_heads", "mistral") => 8,
        None => heads,
    };
    let vocab_size = config.size("vocab_size")?;
    let mut metadata: Vec<(String, Meta)> = vec![
        ("general.architecture".into(), Meta::String(known.gguf.into())),
        ("general.type".into(), Meta::String("model".into())),
        ("general.file_type".into(), Meta::U32(file_type_number(file_type)?)),
        ("general.quantization_version".into(), Meta::U32(QUANTIZATION_VERSION)),
    ];
    let mut set = |key: &str, value: Meta| metadata.push((known.key(key), value));
    set("block_count", Meta::U32(config.size("num_hidden_layers")?));
    set("context_length", Meta::U32(config.size("max_position_embeddings")?));
    set("embedding_length", Meta::U32(config.size("hidden_size")?));
    set("feed_forward_length", Meta::U32(config.size("intermediate_size")?));
    set("attention.head_count", Meta::U32(heads));
    set("attention.head_count_kv", Meta::U32(kv_heads));
    set("attention.key_length", Meta::U32(head_dim));
    set("attention.value_length", Meta::U32(head_dim));
    set("attention.layer_norm_rms_epsilon", Meta::F32(config.single("rms_norm_eps")?));
    set("rope.dimension_count", Meta::U32(head_dim));
    set("rope.freq_base", Meta::F32(narrow("rope_theta", config.rope_theta()?)?));
    match config.rope_scaling()? {
        // The factors of llama3 are a tensor.
        None | Some(("llama3", _)) => {}
        Some(("linear", scaling)) => {
            set("rope.scaling.type", Meta::String("linear".into()));
            set("rope.scaling.factor", Meta::F32(Config(scaling).single("factor")?));
        }
        Some((other, _)) => {
            return Err(unfit("rope_type", "default, linear or llama3", &Value::String(other.to_owned())));
        }
    }
    set("vocab_size", Meta::U32(vocab_size));
    let all = known.window == Window::Always;
    let slides = all || config.get("use_sliding_window").is_some_and(|value| value == true);
    match config.get("sliding_window") {
        Some(_) if all => {
            let types = config.get("layer_types").and_then(Value::as_array);
            if let Some(other) = types.into_iter().flatten().find(|kind| *kind != "sliding_attention") {
                return Err(unfit(
                    "layer_types",
                    "sliding_attention in all layers: GGUF has one window for them",
                    other,
                ));
            }
            set(architectures::WINDOW, Meta::U32(config.size("sliding_window")?));
        }
        Some(window) if slides => {
            return Err(unfit("sliding_window", "null: GGUF cannot say which layers have one", window));
        }
        _ => {}
    }

    let (bos, eos) = (config.tokens("bos_token_id", 1)?, config.tokens("eos_token_id", 3)?);
    let ids = bos.iter().map(|&id| ("bos", id)).chain(["eos", "eot", "eom"].into_iter().zip(eos.iter().copied()));
    let ids = ids.chain(config.tokens("pad_token_id", 1)?.iter().map(|&id| ("padding", id))).collect::<Vec<_>>();
    let (bos, eos) = (bos.first().copied().map(u64::from), eos.first().copied().map(u64::from));
    metadata.extend(tokenizer::metadata(tokenizer, vocab_size as usize, bos, eos)?);
    for (role, id) in ids {
        metadata.push((format!("tokenizer.ggml.{role}_token_id"), Meta::U32(id)));
    }
    if let Some(template) = chat_template {
        metadata.push(("tokenizer.chat_template".into(), Meta::String(template.to_owned())));
    }
    Ok(metadata)
}

/// The architecture of a `config.json`. Error: one that is not translated.
pub(crate) fn architecture_of(config: &Map<String, Value>) -> Result<&'static Architecture> {
    let model_type = config.get("model_type").unwrap_or(&Value::Null);
    let known = model_type.as_str().and_then(Architecture::of_config);
    known.ok_or_else(|| unfit("model_type", &architectures::written(), model_type))
}

/// The number by which `general.file_type` names a file of mostly this type.
fn file_type_number(file_type: GgmlType) -> Result<u32> {
    match file_type {
        GgmlType::F32 => Ok(0),
        GgmlType::F16 => Ok(1),
        GgmlType::Q4_0 => Ok(2),
        GgmlType::Q4_1 => Ok(3),
        GgmlType::Q8_0 => Ok(7),
        GgmlType::BF16 => Ok(32),
        other => Err(Error::invalid(OP, "a type that is written: F32, F16, BF16, Q4_0, Q4_1, Q8_0", other.name())),
    }
}

/// The fields of a `config.json`, or of an object in it, taken with their types checked. A null counts as absent.
#[derive(Clone, Copy)]
pub(super) struct Config<'a>(pub &'a Map<String, Value>);

impl<'a> Config<'a> {
    fn get(self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    /// Whether a field is absent, and not null, in a config of this type.
    fn means_absent(self, field: &str, model_type: &str) -> bool {
        !self.0.contains_key(field) && self.get("model_type").is_some_and(|of| of == model_type)
    }

    fn require(self, field: &str, text: &str) -> Result<()> {
        match self.get(field) {
            Some(value) if value == text => Ok(()),
            other => Err(unfit(field, &format!("\"{text}\""), other.unwrap_or(&Value::Null))),
        }
    }

    fn size(self, field: &str) -> Result<u32> {
        let value = self.get(field).unwrap_or(&Value::Null);
        let size = value.as_u64().and_then(|size| u32::try_from(size).ok()).filter(|&size| size > 0);
        size.ok_or_else(|| wrong(field, "a whole number from 1 to 2^32 - 1", value))
    }

    pub fn float(self, field: &str) -> Result<f64> {
        let value = self.get(field).unwrap_or(&Value::Null);
        value.as_f64().filter(|v| v.is_finite()).ok_or_else(|| wrong(field, "a number", value))
    }

    fn single(self, field: &str) -> Result<f32> {
        narrow(field, self.float(field)?)
    }

    /// Ids of tokens, in a list or one alone.
    fn tokens(self, field: &str, most: usize) -> Result<Vec<u32>> {
        let vocab_size = self.size("vocab_size")?;
        let Some(value) = self.get(field) else { return Ok(Vec::new()) };
        let list = if let Value::Array(list) = value { list.as_slice() } else { std::slice::from_ref(value) };
        let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|&id| id < vocab_size);
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        let ids = ids.ok_or_else(|| wrong(field, &format!("ids of tokens below {vocab_size}"), value))?;
        if ids.len() > most { Err(unfit(field, &format!("at most {most} ids of tokens"), value)) } else { Ok(ids) }
    }

    /// Length of a head's vectors, even.
    pub fn head_dim(self) -> Result<usize> {
        let (hidden, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let head_dim = match self.get("head_dim") {
            Some(_) => self.size("head_dim")?,
            None if self.means_absent("head_dim", "qwen3") => 128,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(wrong("num_attention_heads", &format!("a divisor of {hidden}"), &heads.into())),
        };
        if !head_dim.is_multiple_of(2) {
            return Err(wrong("head_dim", "an even number", &head_dim.into()));
        }
        Ok(head_dim as usize)
    }

    /// The object of what is said of rotary positions, with its name: of the old spelling where that holds something, as transformers
    /// takes it, else of the new one.
    fn rope_object(self) -> Result<Option<(&'static str, &'a Map<String, Value>)>> {
        let object = |name: &'static str| match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some((name, map))),
            Some(other) => Err(wrong(name, "an object", other)),
        };
        let (old, new) = (object("rope_scaling")?, object("rope_parameters")?);
        Ok(old.filter(|(_, map)| !map.is_empty()).or(new))
    }

    /// What is said of rotary positions: an object of its own, or this one.
    fn rope(self) -> Result<Self> {
        Ok(self.rope_object()?.map_or(self, |(_, map)| Config(map)))
    }

    pub fn rope_theta(self) -> Result<f64> {
        let rope = self.rope()?;
        let theta = match [rope, self].into_iter().find(|place| place.get("rope_theta").is_some()) {
            Some(place) => place.float("rope_theta")?,
            None => 10_000.0,
        };
        if let Some(("rope_scaling", _)) = self.rope_object()?
            && let Some(other) = self.get("rope_parameters").and_then(|object| object.get("rope_theta"))
            && other.as_f64().is_some_and(|other| other != theta)
        {
            return Err(wrong("rope_parameters.rope_theta", &format!("{theta}, as beside rope_scaling"), other));
        }
        Ok(theta)
    }

    /// Type of the scaling of rotary frequencies, and its parameters; None: no scaling.
    pub fn rope_scaling(self) -> Result<Option<(&'a str, &'a Map<String, Value>)>> {
        let Some((_, map)) = self.rope_object()? else { return Ok(None) };
        let inner = Config(map);
        match inner.get("rope_type").or(inner.get("type")) {
            None => Ok(None),
            Some(Value::String(kind)) if kind == "default" => Ok(None),
            Some(Value::String(kind)) => Ok(Some((kind, map))),
            Some(other) => Err(wrong("rope_type", "a string", other)),
        }
    }

    /// The positions that a model was first made for: outside of the object of rotary positions, in it, or all that it has.
    pub fn original_context(self) -> Result<f64> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        match [self, self.rope()?].into_iter().find(|place| place.get(ORIGINAL).is_some()) {
            Some(place) => place.float(ORIGINAL),
            None => self.float("max_position_embeddings"),
        }
    }
}

/// A number in single precision, as GGUF holds it.
fn narrow(field: &str, value: f64) -> Result<f32> {
    let single = value as f32;
    if single.is_finite() { Ok(single) } else { Err(wrong(field, "a number that f32 holds", &value.into())) }
}

/// A value that a field of a `config.json` cannot have.
pub(super) fn wrong(field: &str, expected: &str, got: &Value) -> Error {
    Error::malformed(Path::new("config.json"), format!("`{field}`: expected {expected}, got {got}"))
}

/// A value that GGUF cannot say.
fn unfit(field: &str, expected: &str, got: &Value) -> Error {
    Error::invalid(OP, format!("`{field}`: {expected}"), got.to_string())
}

/// Length of a head's vectors by a `config.json`. Errors: sizes that are missing or do not divide.
pub fn head_dim(config: &Map<String, Value>) -> Result<usize> {
    Config(config).head_dim()
}
