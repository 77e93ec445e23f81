//! Whole model folders: read from one, written to another, a tensor at a time.
//!
//! Everything goes to a folder beside the target, `.<target>.tmp`, is synced, and takes the target's name in one step at the
//! end. A run that is cancelled or fails removes the folder; what one that was killed has left, the next run on the same
//! target removes.

mod convert;
mod dense;
mod part;
mod quantized;
mod ranks;
mod replaceable;
mod replacement;
mod room;
mod staging;

pub use convert::{Conversion, Converted, convert};
pub(crate) use dense::converted;
pub use dense::write_dense;
pub use part::{Part, write_part};
pub use quantized::{Quantization, Sizes, Untied, sizes, write_model};
pub use ranks::RankFolders;
pub(crate) use replaceable::{TEMPLATES, is_template};
pub use replacement::{Replacement, refuse_input};

use crate::checkpoint::Container;
use crate::error::{Error, Result};
use crate::files::write_synced;
use crate::finding::Finding;
use crate::safetensors::{TensorSpec, pretty};
use crate::scheme::{ModuleKind, SCHEMES, Scheme, StoredFormat, Weights};
use crate::target::Target;
use crate::writer::{Writer, WrittenFiles};
use rayon::prelude::*;
use serde_json::{Map, Value};
use staging::{Place, Staging};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The output head, as all architectures that are run name it.
pub(crate) const HEAD: &str = "lm_head";

/// The only file of a model in GGUF.
const GGUF_FILE: &str = "model.gguf";

/// A model folder to be written from another.
pub struct Job<'a> {
    /// The model that is read.
    pub source: &'a Weights,
    /// The folder that is written, or the file where that is all there is (`*.gguf`). Folders above it are made.
    pub target: &'a Path,
    /// A file of weights is closed before it passes this size.
    pub max_shard_bytes: u64,
    /// Whether a model folder that is there already is replaced: one that holds nothing but files of a model.
    pub overwrite: bool,
    /// Called before each tensor and at the end.
    pub progress: Option<&'a mut dyn FnMut(Progress<'_>)>,
    /// Asked before each tensor whether to stop.
    pub cancel: Option<&'a dyn Fn() -> bool>,
}

impl<'a> Job<'a> {
    /// A job with shards of at most 5 GB, that replaces nothing and reports nothing.
    pub fn new(source: &'a Weights, target: &'a Path) -> Self {
        Self { source, target, max_shard_bytes: 5_000_000_000, overwrite: false, progress: None, cancel: None }
    }
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { source, target, max_shard_bytes, overwrite, .. } = self;
        f.debug_struct("Job")
            .field("source", &source.folder())
            .field("target", target)
            .field("max_shard_bytes", max_shard_bytes)
            .field("overwrite", overwrite)
            .finish_non_exhaustive()
    }
}

/// Finds out before long work whether a model can be written there in this form: makes the temporary folder and removes it.
/// Errors: those with which [`write_model`] would begin.
pub fn check_target(source: &Weights, target: &Path, form: Target, overwrite: bool) -> Result<()> {
    part::refuse_part("write a model", source)?;
    check_side_files(source)?;
    match form {
        Target::Gguf => Staging::create_for_file(target, overwrite, source, GGUF_FILE).map(drop),
        _ => Staging::create(target, overwrite, source).map(drop),
    }
}

/// The same, but that nothing is touched: what only an attempt can tell, such as who may write there, stays open.
pub fn look_at_target(source: &Weights, target: &Path, form: Target, overwrite: bool) -> Result<()> {
    part::refuse_part("write a model", source)?;
    check_side_files(source)?;
    match form {
        Target::Gguf => Place::of_file(target, overwrite, source, GGUF_FILE)?.check(),
        _ => Place::of_folder(target, overwrite, source)?.check(),
    }
}

/// Removes the folder of a model: its files, and the templates in a folder of their own. Errors: other folders in it, the system's refusal.
fn remove_model(folder: &Path) -> std::io::Result<()> {
    let templates = folder.join(TEMPLATES);
    if templates.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
        crate::files::remove_folder(&templates)?;
    }
    crate::files::remove_folder(folder)
}

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The tensor or module that is worked on; empty at the end.
    pub name: &'a str,
    /// Bytes of the target that are written.
    pub bytes: u64,
    /// Bytes of the target in all.
    pub total_bytes: u64,
}

/// What a job has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// The folder or file.
    pub path: PathBuf,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
    /// Modules that are quantised in the target.
    pub quantized: usize,
    /// What is odd about the numbers that were written.
    pub findings: Vec<Finding>,
    /// Tensors of the source that the target does without: what says how activations are rounded, what follows from the config, and what
    /// is of a type that no other file has (ONNX).
    pub left_out: Vec<String>,
}

/// A module that could be a linear layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Linear<'a> {
    /// Its name without `.weight`, as in `model.layers.0.self_attn.q_proj`.
    pub name: &'a str,
    /// Outputs and length of the reduction, `[n, k]`.
    pub shape: [usize; 2],
    /// Its format in the source, if it is quantised there.
    pub source: Option<StoredFormat>,
}

impl Linear<'_> {
    /// Whether it lies inside one of the repeated blocks, as all that quantisers take by default do: its name has a
    /// number in it. Embeddings and the output head do not.
    pub fn in_block(&self) -> bool {
        crate::config::in_block(self.name)
    }

    /// Whether it chooses the experts of a token, by the names that architectures have for it: small, and quantisers leave it.
    pub fn is_router(&self) -> bool {
        matches!(self.name.rsplit('.').next(), Some("gate" | "router"))
    }

    /// Whether it is a table of vectors and no product, by the names that architectures have for it.
    pub fn is_embedding(&self) -> bool {
        let last = self.name.rsplit('.').next().unwrap_or_default();
        last.contains("embed") || matches!(last, "wte" | "wpe" | "token_embd")
    }

    /// Whether it is the output head.
    pub fn is_head(&self) -> bool {
        crate::config::is_head(self.name)
    }
}

/// The modules of a model that could be linear layers, in the order of its files. Errors: quantised tensors that do not
/// fit each other, and what [`Weights::unreadable`] finds; of types that are not read [`Error::Unsupported`].
pub fn linears(source: &Weights) -> Result<Vec<Linear<'_>>> {
    if let Some(Finding { subject, text }) = source.checkpoint().tensors().find_map(|info| source.unread_matrix(&info))
    {
        return Err(Error::unsupported(source.checkpoint().path(), format!("`{subject}` {text}")));
    }
    if let Some(Finding { subject, text }) = source.unreadable().into_iter().next() {
        return Err(Error::malformed(source.checkpoint().path(), format!("`{subject}` {text}")));
    }
    // Zero points and group indices are looked at, of all modules.
    let all = source.modules().into_par_iter();
    let all = all
        .map(|name| match source.kind(name)? {
            ModuleKind::Quantized(scheme) => {
                let description = (scheme.describe)(source, name)?;
                Ok(Linear { name, shape: description.shape, source: Some(description.format) })
            }
            ModuleKind::Dense | ModuleKind::Absent => {
                let info = source.checkpoint().info(&format!("{name}.weight"))?;
                // The list holds matrices only.
                let [n, k] = [info.shape[0], info.shape[1]];
                Ok(Linear { name, shape: [n, k], source: None })
            }
        })
        .collect::<Vec<Result<_>>>();
    all.into_iter().collect()
}

/// The tensors of a source that are parts of modules.
struct Owners {
    /// The module, by its place in a list, that a tensor is part of. Others are part of none.
    at: HashMap<String, usize>,
    /// Those that no weight is read from: they say how activations are rounded, or their type is not read.
    left_out: Vec<String>,
}

/// The tensors of these modules, each with its place in a list. Errors: those of [`Weights::kind`]; a tensor beside a quantised module that
/// is named like a part of another scheme's, since it would be read as one where it came beside other parts.
fn owners<'a>(source: &Weights, modules: impl Iterator<Item = (usize, &'a Linear<'a>)>) -> Result<Owners> {
    let mut owners = Owners { at: HashMap::new(), left_out: source.checkpoint().unread().to_vec() };
    for (at, module) in modules {
        let (parts, activations) = match source.kind(module.name)? {
            ModuleKind::Quantized(scheme) => {
                let is_foreign = |part: &&'static str| {
                    !scheme.parts.contains(part) && !SCHEMES.iter().any(|other| other.activations.contains(part))
                };
                let others = SCHEMES.iter().flat_map(Scheme::parts_of_weight).filter(is_foreign);
                let mut others = others.filter_map(|part| source.checkpoint().get(&format!("{}.{part}", module.name)));
                if let Some(other) = others.next() {
                    let what = format!("tensor `{}`: modules of {} have none of this name", other.name, scheme.name);
                    return Err(Error::malformed(other.file, what));
                }
                (scheme.parts, scheme.activations)
            }
            ModuleKind::Dense | ModuleKind::Absent => (&["weight"][..], &[][..]),
        };
        for part in parts {
            let tensor = format!("{}.{part}", module.name);
            if source.checkpoint().contains(&tensor) {
                if activations.contains(part) {
                    owners.left_out.push(tensor.clone());
                }
                owners.at.insert(tensor, at);
            }
        }
    }
    Ok(owners)
}

/// One step of a job: what is read, and the tensors that it becomes.
struct Step<'a, T> {
    name: &'a str,
    task: T,
    specs: Vec<TensorSpec>,
}

/// Writes the tensors of all steps; `write` gets each step with the writer.
fn write_steps<T>(
    job: &mut Job<'_>,
    create: impl FnOnce(&[TensorSpec], u64) -> Result<Writer>,
    steps: Vec<Step<'_, T>>,
    mut write: impl FnMut(&Step<'_, T>, &mut Writer) -> Result<()>,
) -> Result<WrittenFiles> {
    let specs: Vec<TensorSpec> = steps.iter().flat_map(|step| step.specs.iter().cloned()).collect();
    let mut writer = create(&specs, job.max_shard_bytes)?;
    let total_bytes = writer.tensor_bytes();
    let mut bytes = 0;
    let report = |name: &str, bytes: u64, job: &mut Job<'_>| {
        if let Some(progress) = &mut job.progress {
            progress(Progress { name, bytes, total_bytes });
        }
    };
    for step in &steps {
        if job.cancel.is_some_and(|cancel| cancel()) {
            return Err(Error::Cancelled);
        }
        report(step.name, bytes, job);
        write(step, &mut writer)?;
        bytes += step.specs.iter().filter_map(|s| s.dtype.bytes_of(&s.shape)).sum::<usize>() as u64;
    }
    if job.cancel.is_some_and(|cancel| cancel()) {
        return Err(Error::Cancelled);
    }
    let written = writer.finish()?;
    report("", bytes, job);
    Ok(written)
}

/// The source's config, without what it says of quantisation. Error: there is none.
fn dense_config(source: &Weights) -> Result<Map<String, Value>> {
    let mut config = source.model_config()?;
    config.shift_remove("quantization_config");
    config.shift_remove("compression_config");
    Ok(config)
}

/// Before long work: whether what goes with a model besides its weights can be copied. Errors: a link to nothing, a folder, a pipe or
/// the like under the name of such a file.
fn check_side_files(source: &Weights) -> Result<()> {
    match source.checkpoint().container() {
        // It is in the file itself.
        Container::Gguf(_) => Ok(()),
        Container::Plain | Container::Onnx(_) => staging::side_files(source.folder()).map(drop),
    }
}

/// Writes `config.json` and the files beside it, and gives the folder its name.
fn complete(job: &Job<'_>, staging: Staging, config: Map<String, Value>) -> Result<PathBuf> {
    write_synced(&staging.path().join("config.json"), &pretty(&Value::Object(config)))?;
    match job.source.own_tokenizer()? {
        Some(tokenizer) => {
            write_synced(&staging.path().join("tokenizer.json"), &pretty(&tokenizer))?;
            staging.write_templates(job.source)?;
        }
        None => staging.copy_side_files(job.source.folder())?,
    }
    staging.commit()
}
