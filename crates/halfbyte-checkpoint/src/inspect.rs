//! A description of a checkpoint: what is in it, and what looks wrong.

use crate::config::{
    AwqConfig, BitsAndBytesConfig, CompressedTensorsConfig, FpaIntBConfig, GptqConfig, HalfbyteConfig, ModelOptConfig,
    Mxfp4Config, QuantizationConfig,
};
use crate::error::Result;
use crate::finding::Finding;
use crate::safetensors::DType;
use crate::scheme::{ModuleKind, Weights};
use rayon::prelude::*;
use serde::{Serialize, Serializer};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The file that a config was read from, of each method's.
macro_rules! file_of {
    ($config:expr) => {
        match $config {
            QuantizationConfig::Gptq(GptqConfig { file, .. })
            | QuantizationConfig::Awq(AwqConfig { file, .. })
            | QuantizationConfig::CompressedTensors(CompressedTensorsConfig { file, .. })
            | QuantizationConfig::BitsAndBytes(BitsAndBytesConfig { file, .. })
            | QuantizationConfig::FpaIntB(FpaIntBConfig { file, .. })
            | QuantizationConfig::Mxfp4(Mxfp4Config { file, .. })
            | QuantizationConfig::ModelOpt(ModelOptConfig { file, .. })
            | QuantizationConfig::Halfbyte(HalfbyteConfig { file, .. }) => file,
        }
    };
}

/// Everything that can be said of a checkpoint without reading its codes. As text, U+FFFD stands in its paths for what is no UTF-8.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection {
    /// The path that was opened.
    #[serde(serialize_with = "path_as_text")]
    pub path: PathBuf,
    /// First of `architectures` in `config.json`.
    pub architecture: Option<String>,
    /// What the checkpoint says of its quantisation.
    #[serde(serialize_with = "config_as_text")]
    pub quantization: Option<QuantizationConfig>,
    /// The safetensors files.
    #[serde(serialize_with = "paths_as_text")]
    pub files: Vec<PathBuf>,
    /// Every tensor, in the order of the files.
    pub tensors: Vec<TensorSummary>,
    /// Every module with a matrix of weights, in the same order.
    pub modules: Vec<ModuleSummary>,
    /// Bytes of all tensors.
    pub total_bytes: u64,
    /// Weights that the checkpoint stands for; codes count, scales and zeros do not.
    pub parameters: u64,
    /// Bits of the files for each of these weights.
    pub bits_per_weight: f64,
    /// Everything that looks wrong.
    pub findings: Vec<Finding>,
}

impl Inspection {
    /// The file that says how the checkpoint is quantised.
    pub fn config_file(&self) -> Option<&Path> {
        Some(file_of!(self.quantization.as_ref()?))
    }
}

fn path_as_text<S: Serializer>(path: &Path, serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

fn paths_as_text<S: Serializer>(paths: &[PathBuf], serializer: S) -> std::result::Result<S::Ok, S::Error> {
    serializer.collect_seq(paths.iter().map(|path| path.to_string_lossy()))
}

fn config_as_text<S: Serializer>(
    config: &Option<QuantizationConfig>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let mut config = config.clone();
    if let Some(config) = &mut config {
        let file = file_of!(config);
        *file = file.to_string_lossy().into_owned().into();
    }
    config.serialize(serializer)
}

/// A tensor as its file declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorSummary {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Bytes it takes.
    pub bytes: u64,
    /// The file that holds it, without its folder.
    pub file: String,
}

/// A module with a matrix of weights.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ModuleSummary {
    /// Its name.
    pub name: String,
    /// Outputs and length of the reduction, `[n, k]`; None if its tensors do not fit each other.
    pub shape: Option<[usize; 2]>,
    /// How it is stored: `dense`, or the scheme's name.
    pub scheme: &'static str,
    /// What its numbers are: a float type for dense ones, `w4a16-g128` and the like for codes,
    /// `nf4-g64` and the like for codes that stand for floats, `unreadable` if its
    /// tensors do not fit each other.
    pub format: String,
    /// Whether columns were quantised in another order than they lie in.
    pub act_order: bool,
    /// Bytes of its tensors, bias included.
    pub bytes: u64,
}

impl Weights {
    /// What is odd about how modules are stored, and how they are read for that, as [`inspect`] finds it; what holds of several is said
    /// once. What cannot be read at all is no part of it.
    pub fn findings_of_modules(&self) -> Vec<Finding> {
        let of_module = |name: &&str| {
            let Ok(kind) = self.kind(name) else { return Vec::new() };
            let description = match kind {
                ModuleKind::Quantized(scheme) => (scheme.describe)(self, name).ok(),
                ModuleKind::Dense | ModuleKind::Absent => None,
            };
            let findings = description.into_iter().flat_map(|description| description.findings);
            self.contradiction(name, kind).into_iter().chain(findings).collect()
        };
        let all: Vec<Vec<Finding>> = self.modules().par_iter().map(of_module).collect();
        let mut told: Vec<(Finding, usize)> = Vec::new();
        let mut known: HashMap<String, usize> = HashMap::new();
        for finding in all.into_iter().flatten() {
            let at = *known.entry(finding.text.clone()).or_insert(told.len());
            match told.get_mut(at) {
                Some((_, more)) => *more += 1,
                None => told.push((finding, 0)),
            }
        }
        let findings = told.into_iter().map(|(finding, more)| match more {
            0 => finding,
            more => Finding::new(format!("{} and {more} more", finding.subject), finding.text),
        });
        Finding::shortened(findings.collect())
    }
}

/// Describes a checkpoint. Modules that cannot be read become findings. Errors: a `config.json` that is not JSON.
pub fn inspect(weights: &Weights) -> Result<Inspection> {
    let checkpoint = weights.checkpoint();
    let mut findings = weights.findings();
    let config = match weights.own_config() {
        Ok(None) => crate::config::read_object(&weights.folder().join("config.json"))?,
        Ok(own) => own,
        Err(e) => {
            findings.push(Finding::new("metadata", e.to_string()));
            None
        }
    };
    let architecture =
        config.as_ref().and_then(|c| c.get("architectures")?.as_array()?.first()?.as_str()).map(str::to_owned);
    let mut modules = Vec::new();
    let mut quantized_parameters = 0u64;
    let mut quantized_parts = std::collections::HashSet::new();
    for name in weights.modules() {
        let bytes_of = |parts: &[&str]| -> u64 {
            parts
                .iter()
                .filter_map(|part| checkpoint.get(&format!("{name}.{part}")))
                .map(|info| info.bytes as u64)
                .sum()
        };
        let kind = weights.kind(name);
        findings.extend(kind.as_ref().ok().and_then(|&kind| weights.contradiction(name, kind)));
        let summary = match kind {
            Ok(ModuleKind::Absent) => continue,
            Ok(ModuleKind::Dense) => {
                let info = checkpoint.info(&format!("{name}.weight"))?;
                ModuleSummary {
                    name: name.to_owned(),
                    shape: Some([info.shape[0], info.shape[1]]),
                    scheme: "dense",
                    format: info.dtype.float().map_or(info.dtype.name(), |f| f.name()).to_owned(),
                    act_order: false,
                    bytes: bytes_of(&["weight", "bias"]),
                }
            }
            Ok(ModuleKind::Quantized(scheme)) => {
                quantized_parts.extend(scheme.parts.iter().map(|part| format!("{name}.{part}")));
                let bytes = bytes_of(scheme.parts) + bytes_of(&["bias"]);
                let unread = ModuleSummary {
                    name: name.to_owned(),
                    shape: None,
                    scheme: scheme.name,
                    format: "unreadable".into(),
                    act_order: false,
                    bytes,
                };
                match (scheme.describe)(weights, name) {
                    Ok(description) => {
                        let [n, k] = description.shape;
                        quantized_parameters += n as u64 * k as u64;
                        findings.extend(description.findings);
                        let format = description.format.to_string();
                        ModuleSummary { shape: Some([n, k]), format, act_order: description.act_order, ..unread }
                    }
                    Err(e) => {
                        findings.push(Finding::new(name, e.to_string()));
                        unread
                    }
                }
            }
            Err(e) => {
                findings.push(Finding::new(name, e.to_string()));
                continue;
            }
        };
        modules.push(summary);
    }
    findings.extend(weights.unreadable());
    findings.extend(weights.foreign_parts());
    let quantized = modules.iter().filter(|module| module.scheme != "dense");
    findings.extend(biases(weights, quantized.filter_map(|module| Some((module.name.as_str(), module.shape?[0])))));
    if weights.quantization().is_some() && quantized_parts.is_empty() {
        findings.push(Finding::new("quantization_config", "declares a quantised model, but no module is quantised"));
    }
    let mut parameters = quantized_parameters;
    let mut total_bytes = 0;
    let mut tensors = Vec::new();
    for info in checkpoint.tensors() {
        total_bytes += info.bytes as u64;
        if !quantized_parts.contains(info.name) {
            parameters += info.shape.iter().product::<usize>() as u64;
        }
        tensors.push(TensorSummary {
            name: info.name.to_owned(),
            dtype: info.dtype,
            shape: info.shape.to_vec(),
            bytes: info.bytes as u64,
            file: info.file.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        });
    }
    Ok(Inspection {
        path: checkpoint.path().to_owned(),
        architecture,
        quantization: weights.quantization().cloned(),
        files: checkpoint.files().map(|file| file.to_owned()).collect(),
        tensors,
        modules,
        total_bytes,
        parameters,
        bits_per_weight: if parameters == 0 { 0.0 } else { total_bytes as f64 * 8.0 / parameters as f64 },
        findings,
    })
}

/// What is to be said of the biases of quantised modules with so many outputs: those that cannot be read, and a sentence on those that are
/// zero throughout, which some packers write for every layer without one.
fn biases<'a>(weights: &Weights, modules: impl Iterator<Item = (&'a str, usize)>) -> Vec<Finding> {
    let (mut findings, mut zero) = (Vec::new(), Vec::new());
    for (module, n) in modules {
        let name = format!("{module}.bias");
        match weights.bias(module, n) {
            Ok(None) if weights.checkpoint().contains(&name) => zero.push(name.clone()),
            Ok(_) => {}
            Err(e) => findings.push(Finding::new(module, e.to_string())),
        }
        weights.checkpoint().release(&name);
    }
    let others = match zero.len() {
        0 => return findings,
        1 => String::new(),
        2 => ", with 1 other,".into(),
        all => format!(", with {} others,", all - 1),
    };
    let text = format!("a bias{others} is zero throughout, as for a layer without one; read as no bias");
    findings.push(Finding::new(zero.swap_remove(0), text));
    findings
}
