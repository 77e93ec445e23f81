//! What a model's `config.json` says, in either spelling of its fields.

mod fields;

pub use fields::Fields;
pub(crate) use fields::shown;

use crate::arch::{ARCHITECTURES, Architecture, Spec};
use crate::error::{Error, Result};
use halfbyte::Float;
use halfbyte_checkpoint::{ModuleKind, Weights, json};
use serde_json::{Map, Value};
use std::path::Path;

/// A model's recipe and shape, and what goes with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Name of the architecture, as `LlamaForCausalLM`; a name of [`ARCHITECTURES`].
    pub architecture: &'static str,
    /// What the decoder runs.
    pub spec: Spec,
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
            let fields = Fields::new(&path, &object);
            for id in fields.tokens("eos_token_id", config.spec.vocab)? {
                if !config.eos.contains(&id) {
                    config.eos.push(id);
                }
            }
            if config.bos.is_none() {
                config.bos = fields.tokens("bos_token_id", config.spec.vocab)?.first().copied();
            }
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is named in errors.
    ///
    /// Fields may be spelled as today (`rope_parameters`, `dtype`) or as before (`rope_theta` with `rope_scaling`,
    /// `torch_dtype`). Errors, each naming the field: an architecture that is not supported, and what
    /// [`Architecture::spec`] refuses.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        Self::of(&object(text, path)?, path)
    }

    /// What a checkpoint says: in the file itself where that holds a config (GGUF, ONNX), else in its folder. Tensors have the names
    /// of the files, where these leave the name of the whole out in front (`h.0.…` for `transformer.h.0.…`).
    ///
    /// Errors: as [`Config::from_folder`], and what the checkpoint's own config cannot say.
    pub fn from_weights(weights: &Weights) -> Result<Self> {
        let mut config = match weights.own_config()? {
            Some(config) => Self::of(&config, weights.checkpoint().path())?,
            None => Self::from_folder(weights.folder())?,
        };
        let absent = |module: &str| matches!(weights.kind(module), Ok(ModuleKind::Absent));
        if let Some((whole, rest)) = config.spec.embedding.split_once('.')
            && absent(&config.spec.embedding)
            && !absent(rest)
        {
            let whole = format!("{whole}.");
            config.spec.rename(&|name| name.strip_prefix(&whole).unwrap_or(name).to_owned());
        }
        Ok(config)
    }

    fn of(object: &Map<String, Value>, path: &Path) -> Result<Self> {
        let fields = Fields::new(path, object);
        let architecture = architecture(&fields)?;
        let spec = (architecture.spec)(&fields)?;
        let bos = fields.tokens("bos_token_id", spec.vocab)?;
        Ok(Self {
            architecture: architecture.architecture,
            dtype: dtype(&fields)?,
            bos: bos.first().copied(),
            eos: fields.tokens("eos_token_id", spec.vocab)?,
            spec,
        })
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

fn architecture(fields: &Fields<'_>) -> Result<&'static Architecture> {
    let known = || {
        let names: Vec<_> = ARCHITECTURES.iter().map(|known| known.architecture).collect();
        format!("a supported architecture ({})", names.join(", "))
    };
    match fields.get("architectures") {
        Some(Value::Array(names)) if !names.is_empty() => {
            let found = ARCHITECTURES.iter().find(|known| names.iter().any(|name| name == known.architecture));
            found.ok_or_else(|| fields.refuse("architectures", known(), shown(&Value::Array(names.clone()))))
        }
        None | Some(Value::Array(_)) => {
            let model_type = fields.string("model_type")?;
            let found = ARCHITECTURES.iter().find(|known| Some(known.model_type) == model_type);
            found.ok_or_else(|| {
                let got = model_type.map_or("neither this nor architectures".to_owned(), |name| format!("\"{name}\""));
                fields.refuse("model_type", known(), got)
            })
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
