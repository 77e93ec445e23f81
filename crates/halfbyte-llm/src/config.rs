//! What a model's `config.json` says, in either spelling of its fields.

use crate::error::{Error, Result};
use halfbyte::Float;
use halfbyte::cpu::attention::Heads;
use halfbyte_checkpoint::{Weights, json};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// No dimension of a model comes near this; one beyond it is a broken file.
const LARGEST_DIMENSION: usize = 1 << 28;

/// Nor near this many elements of a matrix.
const LARGEST_MATRIX: usize = 1 << 40;

/// Nor do layers come near this.
const MOST_LAYERS: usize = 1 << 16;

/// As far as heads may go.
const LARGEST_HEAD: usize = 1 << 16;

/// A Llama-type model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of the architecture, as `LlamaForCausalLM`; a name of [`crate::models::MODELS`].
    pub architecture: &'static str,
    /// Size of the vocabulary.
    pub vocab_size: usize,
    /// Length of a token's vector between layers.
    pub hidden_size: usize,
    /// Length of the vector inside the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Attention heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Length of a head's vectors; even.
    pub head_dim: usize,
    /// Tokens that the model was made for.
    pub max_context: usize,
    /// Added under the root of the RMS norms.
    pub rms_norm_eps: f32,
    /// Angles, in radians a position, by which the pairs of a head's elements are rotated; scaling is included.
    /// `[head_dim / 2]`
    pub rope_frequencies: Vec<f64>,
    /// Whether q, k, v and o have biases.
    pub attention_bias: bool,
    /// Whether gate, up and down have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Type of the dense weights, if stated.
    pub dtype: Option<Float>,
    /// Token that begins a text.
    pub bos: Option<u32>,
    /// Tokens that end a text.
    pub eos: Vec<u32>,
}

impl Config {
    /// Reads `config.json` of a folder, and the end tokens of `generation_config.json` if it is there.
    ///
    /// Errors: no such file, no JSON, or what [`Config::parse`] refuses.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let mut config = Self::parse(&read(&path)?, &path)?;
        let path = folder.join("generation_config.json");
        if path.is_file() {
            let text = read(&path)?;
            let object = object(&text, &path)?;
            let fields = Fields { path: &path, prefix: "", map: &object };
            for id in fields.tokens("eos_token_id", config.vocab_size)? {
                if !config.eos.contains(&id) {
                    config.eos.push(id);
                }
            }
            if config.bos.is_none() {
                config.bos = fields.tokens("bos_token_id", config.vocab_size)?.first().copied();
            }
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is named in errors.
    ///
    /// Fields may be spelled as today (`rope_parameters`, `dtype`) or as before (`rope_theta` with `rope_scaling`,
    /// `torch_dtype`). Errors, each naming the field: a wrong type, a missing size, sizes that are zero, absurd or do
    /// not divide, an architecture, activation function or rope type that is not supported.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        Self::of(&object(text, path)?, path)
    }

    /// What a checkpoint says: in the file itself where that holds a config (GGUF, ONNX), else in its folder.
    ///
    /// Errors: as [`Config::from_folder`], and what the checkpoint's own config cannot say.
    pub fn from_weights(weights: &Weights) -> Result<Self> {
        match weights.own_config()? {
            Some(config) => Self::of(&config, weights.checkpoint().path()),
            None => Self::from_folder(weights.folder()),
        }
    }

    fn of(object: &Map<String, Value>, path: &Path) -> Result<Self> {
        let fields = Fields { path, prefix: "", map: object };
        let architecture = architecture(&fields)?;
        let (hidden_size, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
        let kv_heads = fields.optional_size("num_key_value_heads")?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let expected = format!("a divisor of num_attention_heads, {heads}");
            return Err(fields.refuse("num_key_value_heads", expected, kv_heads));
        }
        let head_dim = match fields.optional_size("head_dim")? {
            Some(d) => d,
            None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            None => {
                let expected = format!("a divisor of hidden_size, {hidden_size}, as head_dim is absent");
                return Err(fields.refuse("num_attention_heads", expected, heads));
            }
        };
        if !head_dim.is_multiple_of(2) || head_dim > LARGEST_HEAD {
            return Err(fields.refuse("head_dim", format!("an even number up to {LARGEST_HEAD}"), head_dim));
        }
        let (vocab_size, intermediate_size) = (fields.size("vocab_size")?, fields.size("intermediate_size")?);
        for (field, rows) in [
            ("head_dim", (heads + 2 * kv_heads) * head_dim),
            ("vocab_size", vocab_size),
            ("intermediate_size", 2 * intermediate_size),
        ] {
            if rows.checked_mul(hidden_size).is_none_or(|elements| elements > LARGEST_MATRIX) {
                let got = format!("{rows} × {hidden_size}");
                return Err(fields.refuse(field, "a matrix of at most 2^40 elements", got));
            }
        }
        let layers = fields.size("num_hidden_layers")?;
        if layers > MOST_LAYERS {
            return Err(fields.refuse("num_hidden_layers", format!("at most {MOST_LAYERS}"), layers));
        }
        match fields.string("hidden_act")?.unwrap_or("silu") {
            "silu" | "swish" => {}
            other => return Err(fields.refuse("hidden_act", "\"silu\"", format!("\"{other}\""))),
        }
        let max_context = fields.optional_size("max_position_embeddings")?.unwrap_or(2048);
        let (theta, scaling) = rope(&fields)?;
        let of_pair = |i: usize| scaling.apply(theta.powf(-2.0 * i as f64 / head_dim as f64));
        let rms_norm_eps = fields.number("rms_norm_eps")?.unwrap_or(1e-6);
        if !(0.0..1.0).contains(&rms_norm_eps) {
            return Err(fields.refuse("rms_norm_eps", "a number from 0 to 1", rms_norm_eps));
        }
        let bos = fields.tokens("bos_token_id", vocab_size)?;
        Ok(Self {
            architecture,
            vocab_size,
            hidden_size,
            intermediate_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            max_context,
            rms_norm_eps: rms_norm_eps as f32,
            rope_frequencies: (0..head_dim / 2).map(of_pair).collect(),
            attention_bias: fields.flag("attention_bias")?,
            mlp_bias: fields.flag("mlp_bias")?,
            tied_embeddings: fields.flag("tie_word_embeddings")?,
            dtype: dtype(&fields)?,
            bos: bos.first().copied(),
            eos: fields.tokens("eos_token_id", vocab_size)?,
        })
    }

    /// The heads of a layer's attention.
    pub fn attention_heads(&self) -> Heads {
        Heads { heads: self.heads, kv_heads: self.kv_heads, head_size: self.head_dim }
    }

    /// Bytes that keys and values of one token take over all layers, in a cache of f32.
    pub fn kv_bytes_per_token(&self) -> usize {
        2 * self.layers * self.kv_heads * self.head_dim * size_of::<f32>()
    }
}

/// A JSON file as bytes. Errors: it cannot be read, or is absurdly long.
pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    json::read_small(path).map_err(|error| match error {
        halfbyte_checkpoint::Error::Io { path, source, .. } => Error::Io { path, source },
        other => other.into(),
    })
}

fn read(path: &Path) -> Result<String> {
    String::from_utf8(read_bytes(path)?).map_err(|e| Error::Config {
        path: path.to_path_buf(),
        field: "(the whole)".to_owned(),
        expected: "UTF-8".to_owned(),
        got: e.to_string(),
    })
}

fn object(text: &str, path: &Path) -> Result<Map<String, Value>> {
    let refuse = |got: String| Error::Config {
        path: path.to_path_buf(),
        field: "(the whole)".to_owned(),
        expected: "a JSON object".to_owned(),
        got,
    };
    match json::parse(text.as_bytes()) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(refuse(shown(&other))),
        Err(e) => Err(refuse(e.to_string())),
    }
}

fn architecture(fields: &Fields<'_>) -> Result<&'static str> {
    let models = crate::models::MODELS;
    let known = || {
        let names: Vec<_> = models.iter().map(|m| m.architecture).collect();
        format!("a supported architecture ({})", names.join(", "))
    };
    match fields.get("architectures") {
        Some(Value::Array(names)) if !names.is_empty() => {
            let found = models.iter().find(|m| names.iter().any(|name| name == m.architecture));
            found
                .map(|m| m.architecture)
                .ok_or_else(|| fields.refuse("architectures", known(), shown(&Value::Array(names.clone()))))
        }
        None | Some(Value::Array(_)) => {
            let model_type = fields.string("model_type")?;
            let found = models.iter().find(|m| Some(m.model_type) == model_type);
            found
                .map(|m| m.architecture)
                .ok_or_else(|| fields.refuse("model_type", known(), format!("no architectures and {model_type:?}")))
        }
        Some(other) => Err(fields.refuse("architectures", "a list of names", shown(other))),
    }
}

fn dtype(fields: &Fields<'_>) -> Result<Option<Float>> {
    let field = if fields.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
    match fields.string(field)?.map(|name| name.strip_prefix("torch.").unwrap_or(name)) {
        None | Some("auto") => Ok(None),
        Some("float16") => Ok(Some(Float::F16)),
        Some("bfloat16") => Ok(Some(Float::BF16)),
        Some("float32") => Ok(Some(Float::F32)),
        Some(other) => Err(fields.refuse(field, "float16, bfloat16 or float32", format!("\"{other}\""))),
    }
}

fn rope(fields: &Fields<'_>) -> Result<(f64, RopeScaling)> {
    let name = if fields.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let empty = Map::new();
    let map = match fields.get(name) {
        None => &empty,
        Some(Value::Object(map)) => map,
        Some(other) => return Err(fields.refuse(name, "an object or null", shown(other))),
    };
    let inner = Fields { path: fields.path, prefix: name, map };
    let theta_in = if inner.get("rope_theta").is_some() { &inner } else { fields };
    let theta = theta_in.number("rope_theta")?.unwrap_or(10_000.0);
    if theta < 1.0 {
        return Err(theta_in.refuse("rope_theta", "a number of at least 1", theta));
    }
    for place in [&inner, fields] {
        match place.number("partial_rotary_factor")? {
            None | Some(1.0) => {}
            Some(other) => return Err(place.refuse("partial_rotary_factor", "1 (all of a head rotates)", other)),
        }
    }
    let kind = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match inner.string(kind)?.unwrap_or("default") {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: inner.factor("factor")? },
        "llama3" => {
            let (low, high) = (inner.factor("low_freq_factor")?, inner.factor("high_freq_factor")?);
            if low >= high {
                return Err(inner.refuse("high_freq_factor", format!("more than low_freq_factor, {low}"), high));
            }
            RopeScaling::Llama3 {
                factor: inner.factor("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: inner.size("original_max_position_embeddings")?,
            }
        }
        other => return Err(inner.refuse(kind, "default, linear or llama3", format!("\"{other}\""))),
    };
    Ok((theta, scaling))
}

/// How positions beyond the trained context are brought back into it.
#[derive(Clone, Copy, Debug)]
enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency divided.
    Linear { factor: f64 },
    /// Frequencies of fewer than `low_freq_factor` turns in the original context divided, those of more than
    /// `high_freq_factor` kept, those between blended (Llama 3.1).
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_context: usize },
}

impl RopeScaling {
    /// A frequency, in radians a position, scaled.
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = original_context as f64 * frequency / std::f64::consts::TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }
}

/// The fields of a JSON object, taken with their types checked. A null counts as absent.
struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|v| !v.is_null())
    }

    fn refuse(&self, field: &str, expected: impl Into<String>, got: impl ToString) -> Error {
        let field = if self.prefix.is_empty() { field.to_owned() } else { format!("{}.{field}", self.prefix) };
        Error::Config { path: PathBuf::from(self.path), field, expected: expected.into(), got: got.to_string() }
    }

    fn size(&self, field: &str) -> Result<usize> {
        let expected = || format!("a whole number from 1 to {LARGEST_DIMENSION}");
        self.optional_size(field)?.ok_or_else(|| self.refuse(field, expected(), "nothing"))
    }

    fn optional_size(&self, field: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().and_then(|v| usize::try_from(v).ok()) {
            Some(v) if (1..=LARGEST_DIMENSION).contains(&v) => Ok(Some(v)),
            _ => Err(self.refuse(field, format!("a whole number from 1 to {LARGEST_DIMENSION}"), shown(value))),
        }
    }

    fn number(&self, field: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64() {
            Some(v) if v.is_finite() => Ok(Some(v)),
            _ => Err(self.refuse(field, "a number", shown(value))),
        }
    }

    fn factor(&self, field: &str) -> Result<f64> {
        match self.number(field)? {
            Some(v) if v > 0.0 => Ok(v),
            Some(v) => Err(self.refuse(field, "a number above 0", v)),
            None => Err(self.refuse(field, "a number above 0", "nothing")),
        }
    }

    fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            None => Ok(false),
            Some(Value::Bool(v)) => Ok(*v),
            Some(other) => Err(self.refuse(field, "true or false", shown(other))),
        }
    }

    fn string(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.refuse(field, "a string", shown(other))),
        }
    }

    /// One token id, several, or none.
    fn tokens(&self, field: &str, vocab: usize) -> Result<Vec<u32>> {
        let token = |value: &Value| match value.as_u64().and_then(|v| u32::try_from(v).ok()) {
            Some(v) if (v as usize) < vocab => Ok(v),
            _ => Err(self.refuse(field, format!("token ids below {vocab}"), shown(value))),
        };
        match self.get(field) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token).collect(),
            Some(value) => Ok(vec![token(value)?]),
        }
    }
}

/// A value as text, cut where it is long.
fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}
