//! Schemes: how the tensors of a quantised module are named and packed.
//!
//! [`SCHEMES`] is the table; a scheme is added by a file and a line in it. [`Weights`] answers, module by module,
//! whether a checkpoint holds it dense, quantised or not at all, and loads it.

pub(crate) mod awq;
mod bitsandbytes;
pub(crate) mod compressed_tensors;
pub(crate) mod fpa_intb;
pub(crate) mod gguf;
pub mod gptq;
mod marlin;
pub(crate) mod matmul_nbits;
mod memory;
mod modelopt;
pub(crate) mod mxfp4;
pub(crate) mod native;
mod template;

pub use memory::MemoryTensor;

use crate::checkpoint::{Checkpoint, Container};
use crate::config::{self, Expectation, QuantizationConfig};
use crate::contents::not_finite;
use crate::error::{Error, Result};
use crate::files;
use crate::finding::Finding;
use crate::safetensors::{DType, FloatData};
use halfbyte::{Act, Format, Group, QTensor, StoredTensor, WeightFormat};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A way to store a quantised linear layer as tensors.
#[derive(Debug)]
pub struct Scheme {
    /// Its name, as `quant_method` spells it.
    pub name: &'static str,
    /// Endings of the tensors that make up a module; the first is the one that gives it away.
    pub parts: &'static [&'static str],
    /// Those of them that say how activations are rounded to integers, or keys and values: they are not read, and no form that is written
    /// has them, so that they are compared by themselves. What is of inputs in small floats is none of them.
    pub activations: &'static [&'static str],
    /// Whether a module is stored this way.
    pub detect: fn(&Weights, prefix: &str) -> bool,
    /// What a module holds, without reading its codes.
    pub describe: fn(&Weights, prefix: &str) -> Result<Description>,
    /// Reads a module.
    pub load: for<'a> fn(&'a Weights, prefix: &str) -> Result<StoredModule<'a>>,
}

/// Every scheme that is read, in order of preference.
pub static SCHEMES: &[Scheme] = &[
    awq::SCHEME,
    gptq::SCHEME,
    compressed_tensors::PACKED,
    compressed_tensors::BYTES,
    matmul_nbits::SCHEME,
    gguf::SCHEME,
    marlin::SCHEME,
    bitsandbytes::BYTES,
    bitsandbytes::FOUR_BITS,
    fpa_intb::SCHEME,
    fpa_intb::PADDLE,
    mxfp4::SCHEME,
    modelopt::SCHEME,
    native::SCHEME,
];

/// What the stored numbers of a module mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredFormat {
    /// Codes that are numbers, loaded as they are.
    Codes(WeightFormat),
    /// Codes that stand for values which no format of codes holds exactly, loaded as floats.
    Floats {
        /// Name of the format.
        name: &'static str,
        /// Bits a code.
        bits: u32,
        /// Weights that share a scale.
        block: usize,
    },
}

impl StoredFormat {
    /// The format of codes that are numbers.
    pub fn codes(self) -> Option<WeightFormat> {
        match self {
            StoredFormat::Codes(format) => Some(format),
            StoredFormat::Floats { .. } => None,
        }
    }
}

impl std::fmt::Display for StoredFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            StoredFormat::Codes(weight) => Format { weight, act: Act::A16 }.fmt(f),
            StoredFormat::Floats { name, block, .. } => write!(f, "{name}-g{block}"),
        }
    }
}

/// What a quantised module holds, as far as labels, shapes, zero points and group indices tell.
#[derive(Clone, Debug, PartialEq)]
pub struct Description {
    /// The meaning of its codes.
    pub format: StoredFormat,
    /// Outputs and length of the reduction.
    pub shape: [usize; 2],
    /// Whether columns were quantised in another order than they lie in.
    pub act_order: bool,
    /// What is odd about it.
    pub findings: Vec<Finding>,
}

/// A quantised module whose codes were left where they lie, as far as some format of codes holds them.
#[derive(Clone, Debug)]
pub struct StoredModule<'a> {
    /// Its codes, scales and zeros; or what they stand for, if no format of codes holds it.
    pub weight: StoredWeight<'a>,
    /// What is odd about it.
    pub findings: Vec<Finding>,
}

/// How a checkpoint holds a module.
#[derive(Clone, Copy, Debug)]
pub enum ModuleKind {
    /// As floats, in `<prefix>.weight`.
    Dense,
    /// As codes, in a scheme's tensors.
    Quantized(&'static Scheme),
    /// Not at all.
    Absent,
}

impl Scheme {
    /// Endings of the tensors that a module's weight is read from.
    pub(crate) fn parts_of_weight(&self) -> impl Iterator<Item = &'static str> {
        self.parts.iter().copied().filter(|part| !self.activations.contains(part))
    }
}

/// A linear layer's weight as it was stored.
#[derive(Clone, Debug)]
pub enum LinearWeight<'a> {
    /// Floats.
    Dense {
        /// The elements, row-major.
        floats: FloatData<'a>,
        /// Outputs and length of the reduction, `[n, k]`.
        shape: [usize; 2],
    },
    /// Codes.
    Quantized(QTensor),
}

impl LinearWeight<'_> {
    /// Outputs and length of the reduction, `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            LinearWeight::Dense { shape, .. } => *shape,
            LinearWeight::Quantized(q) => [q.n(), q.k()],
        }
    }
}

/// A linear layer's weight where it is stored.
#[derive(Clone, Debug)]
pub enum StoredWeight<'a> {
    /// Floats.
    Dense {
        /// The elements, row-major.
        floats: FloatData<'a>,
        /// Outputs and length of the reduction, `[n, k]`.
        shape: [usize; 2],
    },
    /// Codes.
    Quantized(StoredTensor<'a>),
}

impl StoredWeight<'_> {
    /// Outputs and length of the reduction, `[n, k]`.
    pub fn shape(&self) -> [usize; 2] {
        match self {
            StoredWeight::Dense { shape, .. } => *shape,
            StoredWeight::Quantized(w) => [w.n(), w.k()],
        }
    }
}

/// A linear layer whose weight was left where it is stored.
#[derive(Clone, Debug)]
pub struct StoredLinear<'a> {
    /// The weight.
    pub weight: StoredWeight<'a>,
    /// The bias `[n]`; None also where a file holds one that is zero throughout.
    pub bias: Option<Vec<f32>>,
    /// What was odd about the tensors, and which reading was taken.
    pub findings: Vec<Finding>,
}

/// A linear layer as it was stored.
#[derive(Clone, Debug)]
pub struct LoadedLinear<'a> {
    /// The weight.
    pub weight: LinearWeight<'a>,
    /// The bias `[n]`; None also where a file holds one that is zero throughout.
    pub bias: Option<Vec<f32>>,
    /// What was odd about the tensors, and which reading was taken.
    pub findings: Vec<Finding>,
}

/// The weights of a model: a checkpoint with the schemes that it is written in.
#[derive(Debug)]
pub struct Weights {
    checkpoint: Checkpoint,
    config: Option<QuantizationConfig>,
    folder: PathBuf,
    hint: Hint,
}

/// What a caller knows of a checkpoint that does not say it. It settles what the files leave open and overrules nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// Groups along k, for GPTQ's modules without a config where several sizes fit their shapes.
    pub group: Option<Group>,
    /// Architecture, 10 · major + minor of the compute capability, in whose layout the codes of fpA_intB modules lie, where no
    /// config says it.
    pub arch: Option<u32>,
}

impl Weights {
    /// Opens a model folder, or one file of tensors with the configs that lie beside it.
    ///
    /// Errors: those of [`Checkpoint::open`] and of [`config::read`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, Hint::default())
    }

    /// Opens a model with what the caller knows of it. Errors: those of [`Weights::open`].
    pub fn open_with(path: impl AsRef<Path>, hint: Hint) -> Result<Self> {
        let path = path.as_ref();
        let checkpoint = Checkpoint::open(path)?;
        let folder = if path.is_dir() { path.to_owned() } else { files::parent(path).to_owned() };
        let config = match checkpoint.container() {
            Container::Plain => config::read(&folder)?,
            Container::Onnx(_) | Container::Gguf(_) => None,
        };
        Ok(Self { checkpoint, config, folder, hint })
    }

    /// What `config.json` would say, where the file itself holds that (GGUF); None where a file beside it does. Errors:
    /// those of [`gguf::config_json`](crate::gguf::config_json).
    pub fn own_config(&self) -> Result<Option<Map<String, Value>>> {
        match self.checkpoint.container() {
            Container::Gguf(header) => crate::gguf::config_json(header, self.checkpoint.first_file()).map(Some),
            Container::Plain | Container::Onnx(_) => Ok(None),
        }
    }

    /// What `config.json` says, in the file itself or beside it. Errors: there is none, or it is no JSON object.
    pub(crate) fn model_config(&self) -> Result<Map<String, Value>> {
        if let Some(config) = self.own_config()? {
            return Ok(config);
        }
        let path = self.folder.join("config.json");
        config::read_object(&path)?
            .ok_or_else(|| Error::missing(&path, "there is no such file, and a model folder needs one"))
    }

    /// What `tokenizer.json` would say, where the file itself holds that (GGUF); None where a file beside it does. Errors:
    /// those of [`gguf::tokenizer_json`](crate::gguf::tokenizer_json).
    pub fn own_tokenizer(&self) -> Result<Option<Value>> {
        match self.checkpoint.container() {
            Container::Gguf(header) => crate::gguf::tokenizer_json(header).map(Some),
            Container::Plain | Container::Onnx(_) => Ok(None),
        }
    }

    /// The tensors.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// What the caller said of it.
    pub(crate) fn hint(&self) -> Hint {
        self.hint
    }

    /// The folder of the model.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the checkpoint says of its quantisation.
    pub fn quantization(&self) -> Option<&QuantizationConfig> {
        self.config.as_ref()
    }

    /// How the checkpoint holds the module `prefix`, as in `model.layers.0.self_attn.q_proj`. The tensors decide, not
    /// the config. Error: both a dense and a quantised weight.
    pub fn kind(&self, prefix: &str) -> Result<ModuleKind> {
        let scheme = SCHEMES.iter().find(|scheme| (scheme.detect)(self, prefix));
        // One scheme keeps its codes under the name that floats have.
        let own_weight = scheme.is_some_and(|scheme| scheme.parts.contains(&"weight"));
        let dense = self.checkpoint.get(&format!("{prefix}.weight")).filter(|_| !own_weight);
        match (scheme, dense) {
            (Some(scheme), None) => Ok(ModuleKind::Quantized(scheme)),
            (None, Some(_)) => Ok(ModuleKind::Dense),
            (None, None) => Ok(ModuleKind::Absent),
            (Some(scheme), Some(dense)) => Err(Error::malformed(
                dense.file,
                format!("module `{prefix}`: expected either `weight` or `{}`, got both", scheme.parts[0]),
            )),
        }
    }

    /// Loads a linear layer; codes become a [`QTensor`].
    ///
    /// Errors: those of [`Weights::stored_linear`].
    pub fn load_linear(&self, prefix: &str) -> Result<LoadedLinear<'_>> {
        let StoredLinear { weight, bias, findings } = self.stored_linear(prefix)?;
        let weight = match weight {
            StoredWeight::Dense { floats, shape } => LinearWeight::Dense { floats, shape },
            StoredWeight::Quantized(w) => LinearWeight::Quantized(w.to_qtensor().map_err(Error::numbers(prefix))?),
        };
        Ok(LoadedLinear { weight, bias, findings })
    }

    /// Reads all of a linear layer but its weight, which is left where it is stored: the form to pack for kernels.
    ///
    /// Errors: no such module, a weight that is not a float matrix, quantised tensors that do not fit each other or the
    /// config, a bias of another length.
    pub fn stored_linear(&self, prefix: &str) -> Result<StoredLinear<'_>> {
        let kind = self.kind(prefix)?;
        let (weight, mut findings) = match kind {
            ModuleKind::Absent => {
                let what = format!("there is no module `{prefix}`: neither `{prefix}.weight` nor quantised tensors");
                return Err(Error::missing(self.checkpoint.path(), what));
            }
            ModuleKind::Dense => {
                let name = format!("{prefix}.weight");
                let info = self.checkpoint.info(&name)?;
                let &[n, k] = info.shape else {
                    let what = format!("tensor `{name}`: expected a matrix [n, k], got shape {:?}", info.shape);
                    return Err(Error::malformed(info.file, what));
                };
                (StoredWeight::Dense { floats: self.checkpoint.floats(&name)?, shape: [n, k] }, Vec::new())
            }
            ModuleKind::Quantized(scheme) => {
                let loaded = (scheme.load)(self, prefix);
                let StoredModule { weight, findings } = loaded.map_err(|why| self.blamed(prefix, scheme, why))?;
                (weight, findings)
            }
        };
        findings.extend(self.contradiction(prefix, kind));
        let bias = self.bias(prefix, weight.shape()[0])?;
        Ok(StoredLinear { weight, bias, findings })
    }

    /// Why a module cannot be loaded: the tensor of scales with NaN or infinity, if that is it.
    fn blamed(&self, prefix: &str, scheme: &Scheme, why: Error) -> Error {
        // Codes may be stored as if they were floats.
        let names = scheme.parts.iter().filter(|part| **part != "weight").map(|part| format!("{prefix}.{part}"));
        let odd = names.filter_map(|name| {
            let info = self.checkpoint.get(&name)?;
            let floats = self.checkpoint.floats(&name).ok()?;
            let Finding { subject, text } = not_finite(&name, floats.as_floats())?;
            let what = format!("module `{prefix}`: expected finite numbers; tensor `{subject}`: {text}");
            Some(Error::malformed(info.file, what))
        });
        odd.into_iter().next().unwrap_or(why)
    }

    /// What the config and the tensors of a module say against each other on whether it is quantised, and how. The
    /// tensors decide.
    pub(crate) fn contradiction(&self, prefix: &str, kind: ModuleKind) -> Option<Finding> {
        let config = self.config.as_ref()?;
        let text = match (kind, config.expectation(prefix)) {
            (ModuleKind::Quantized(scheme), _) if scheme.name != config.scheme() => {
                let (says, is) = (config.scheme(), scheme.name);
                format!("the config says {says}, but its tensors are those of {is}; read as {is}")
            }
            (ModuleKind::Quantized(_), Expectation::Dense(why)) => {
                format!("{why}, but its tensors are quantised; read as quantised")
            }
            (ModuleKind::Dense, Expectation::Quantized(why)) => {
                format!("{why}, but its weight is stored as floats; read as dense")
            }
            _ => return None,
        };
        Some(Finding::new(prefix, text))
    }

    /// What is odd about the files and the config, not about a single module; what holds of every module of a kind.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = self.checkpoint.findings().to_vec();
        for (field, text, why) in self.config.iter().flat_map(QuantizationConfig::unread_expressions) {
            let text =
                format!("`{text}` in {field} is no expression that is read ({why}); it was taken to match nothing");
            findings.push(Finding::new("quantization_config", text));
        }
        let activations = || compressed_tensors::activations(self).or_else(|| modelopt::activations(self));
        findings.extend(bitsandbytes::rounding(self).or_else(activations));
        findings
    }

    /// The elements of a float tensor, with the shape that the caller expects. Errors: no such tensor, another shape,
    /// not floats.
    pub fn floats(&self, name: &str, shape: &[usize]) -> Result<FloatData<'_>> {
        let info = self.checkpoint.info(name)?;
        if info.shape != shape {
            let what = format!("tensor `{name}`: expected shape {shape:?}, got {:?}", info.shape);
            return Err(Error::malformed(info.file, what));
        }
        self.checkpoint.floats(name)
    }

    /// Lets go of the memory that reading a module took.
    pub fn release(&self, prefix: &str) {
        let parts = SCHEMES.iter().flat_map(|scheme| scheme.parts).copied();
        for part in parts.chain(["weight", "bias"]) {
            self.checkpoint.release(&format!("{prefix}.{part}"));
        }
    }

    /// Every module that could be a linear layer, in the order of the files: those with a float matrix `weight`
    /// (embeddings among them) and the quantised ones.
    pub fn modules(&self) -> Vec<&str> {
        let gives_away = |prefix: &str, part: &str| {
            SCHEMES.iter().any(|scheme| scheme.parts[0] == part && (scheme.detect)(self, prefix))
        };
        self.checkpoint
            .tensors()
            .filter_map(|info| {
                let (prefix, part) = info.name.rsplit_once('.')?;
                let dense = part == "weight" && info.shape.len() == 2 && info.dtype.float().is_some();
                (dense || gives_away(prefix, part)).then_some(prefix)
            })
            .collect()
    }

    /// The bias of a module with so many outputs; None also where it is zero throughout. Errors: another length, not floats.
    pub(crate) fn bias(&self, prefix: &str, n: usize) -> Result<Option<Vec<f32>>> {
        let name = format!("{prefix}.bias");
        if !self.checkpoint.contains(&name) {
            return Ok(None);
        }
        let bias = self.floats(&name, &[n])?.to_f32();
        Ok(bias.iter().any(|&b| b != 0.0).then_some(bias))
    }
}

/// A tensor's shape as a matrix of this type. Errors: no such tensor, another type, not a matrix.
pub(crate) fn matrix(checkpoint: &Checkpoint, name: &str, dtype: DType) -> Result<[usize; 2]> {
    let info = checkpoint.info(name)?;
    match info.shape {
        &[rows, columns] if info.dtype == dtype => Ok([rows, columns]),
        shape => {
            let what = format!("tensor `{name}`: expected a matrix of {dtype}, got {} {shape:?}", info.dtype);
            Err(Error::malformed(info.file, what))
        }
    }
}
