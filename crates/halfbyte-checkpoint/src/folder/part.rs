//! Writing a part of a model: what one of the ranks that share it holds.

use super::dense::converted;
use super::staging::Staging;
use super::{Job, Linear, Step, Written, check_side_files, complete, dense_config, linears, owners, write_steps};
use crate::contents::odd_values;
use crate::cut::Cut;
use crate::error::{Error, Result};
use crate::safetensors::{self, TensorSpec};
use crate::scheme::{StoredFormat, StoredLinear, StoredWeight, Weights, native};
use crate::target::{Form, Module, Settings, Target, unrepresentable};
use halfbyte::Floats;
use serde::Serialize;
use serde_json::{Value, json};

/// The field of `config.json` that says of which rank a folder is the part.
const FIELD: &str = "tensor_parallel";

/// Which part of which model a folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// The rank whose part it is.
    pub rank: usize,
    /// Ranks that share the model.
    pub size: usize,
    /// What the parts of a model have in common, and those of another have not.
    pub model: String,
}

impl Part {
    /// The name of its folder among those of the other ranks.
    pub fn folder(rank: usize) -> String {
        format!("rank-{rank}")
    }
}

impl Weights {
    /// The part that the checkpoint is, if it is one. Error: a config that does not say which.
    pub fn part(&self) -> Result<Option<Part>> {
        // Only folders are parts, and some checkpoints have no config.
        if !self.folder().join("config.json").is_file() || self.own_config()?.is_some() {
            return Ok(None);
        }
        let config = self.model_config()?;
        let Some(field) = config.get(FIELD) else { return Ok(None) };
        let number = |name: &str| field.get(name).and_then(Value::as_u64).and_then(|v| usize::try_from(v).ok());
        let part = (number("rank"), number("size"), field.get("model").and_then(Value::as_str));
        match part {
            (Some(rank), Some(size), Some(model)) if rank < size => {
                Ok(Some(Part { rank, size, model: model.to_owned() }))
            }
            _ => {
                let what =
                    format!("`{FIELD}`: expected {{\"rank\": below size, \"size\", \"model\": text}}, got {field}");
                Err(Error::malformed(&self.folder().join("config.json"), what))
            }
        }
    }
}

/// What becomes of a module or tensor.
enum Task<'a> {
    /// The tensor is taken over.
    Copy,
    /// A part of the module's codes.
    Codes(&'a Linear<'a>, Cut),
    /// A part of the module's floats.
    Floats(Cut),
    /// A part of a module's bias.
    Bias(Cut),
}

/// Writes the part of a rank: of each module that `cut` names some rows and columns, of everything else all. Quantised modules are written
/// in our own form, which holds every format, with the numbers that they have; floats stay floats of their type.
///
/// Memory holds one module at a time. *Errors:* a model that is a part already; codes that stand for the values of a table; rows and columns
/// that are not there; otherwise as [`super::write_model`]. After an error nothing is left.
pub fn write_part(mut job: Job<'_>, part: &Part, cut: &dyn Fn(&str) -> Option<Cut>) -> Result<Written> {
    let source = job.source;
    refuse_part("cut a model for ranks", source)?;
    check_side_files(source)?;
    let checkpoint = source.checkpoint();
    let mut config = dense_config(source)?;
    let modules = linears(source)?;
    let of = |module: &Linear<'_>| cut(module.name).unwrap_or_else(|| Cut::whole(module.shape));
    let mut quantized = Vec::new();
    for module in &modules {
        match module.source {
            Some(StoredFormat::Codes(format)) => {
                quantized.push(Module { name: module.name.to_owned(), format, shape: of(module).shape() });
            }
            Some(StoredFormat::Floats { name, .. }) => {
                let why = format!("its codes, {name}, stand for values that no other form holds exactly");
                return Err(unrepresentable(module.name, Target::Native.name())(why));
            }
            None => {}
        }
    }
    let owners = owners(source, modules.iter().enumerate())?;
    let mut planned = vec![false; modules.len()];
    let mut steps = Vec::new();
    for info in checkpoint.tensors() {
        let same = TensorSpec { name: info.name.to_owned(), dtype: info.dtype, shape: info.shape.to_vec() };
        let (task, specs) = match owners.at.get(info.name) {
            Some(&at) if std::mem::replace(&mut planned[at], true) => continue,
            Some(&at) => {
                let (module, cut) = (&modules[at], of(&modules[at]));
                match module.source.and_then(StoredFormat::codes) {
                    Some(format) => {
                        let groups = groups(source, module, &cut)?;
                        let specs = native::specs(module.name, format, cut.shape(), groups);
                        (Task::Codes(module, cut), specs)
                    }
                    None => {
                        let shape = cut.shape().to_vec();
                        (Task::Floats(cut), vec![TensorSpec { shape, ..same }])
                    }
                }
            }
            None => match info.name.strip_suffix(".bias").and_then(cut) {
                Some(cut) if !cut.bias => continue,
                Some(cut) => {
                    let shape = vec![cut.shape()[0]];
                    (Task::Bias(cut), vec![TensorSpec { shape, ..same }])
                }
                None => (Task::Copy, vec![same]),
            },
        };
        steps.push(Step { name: info.name, task, specs });
    }
    let staging = Staging::create(job.target, job.overwrite, source)?;
    let mut findings = Vec::new();
    let create = |specs: &[TensorSpec], shard| safetensors::create(staging.path(), specs, shard);
    let written = write_steps(&mut job, create, steps, |step, writer| {
        let name = step.name;
        let mut specs = step.specs.iter();
        let mut put = |bytes: &[u8]| specs.next().map_or(Ok(()), |spec| writer.write(&spec.name, bytes));
        match &step.task {
            Task::Copy => put(&checkpoint.data(name)?)?,
            Task::Floats(cut) => {
                let [_, k] = *checkpoint.info(name)?.shape else {
                    return Err(Error::invalid("cut a model for ranks", "a matrix", name));
                };
                let floats = cut.of_floats(&checkpoint.floats(name)?, k);
                findings.extend(odd_values(name, floats.as_floats()));
                put(&converted(floats.as_floats(), floats.dtype(), name)?)?;
            }
            Task::Bias(cut) => {
                let vector = Cut { columns: std::iter::once(0..1).collect(), ..cut.clone() };
                let floats = vector.of_floats(&checkpoint.floats(name)?, 1);
                put(&converted(floats.as_floats(), floats.dtype(), name)?)?;
            }
            Task::Codes(module, cut) => {
                let layer = StoredLinear { bias: None, ..source.stored_linear(module.name)? };
                let StoredWeight::Quantized(codes) = layer.weight else {
                    return Err(Error::invalid("cut a model for ranks", "codes", module.name));
                };
                let q = codes.part(&cut.rows, &cut.columns).map_err(Error::numbers(module.name))?;
                drop(codes);
                source.release(module.name);
                findings.extend(odd_values(module.name, Floats::F32(q.scales())));
                native::pack(&q, &mut put)?;
            }
        }
        checkpoint.release(name);
        Ok(())
    })?;
    if !quantized.is_empty() {
        let dense: Vec<String> = modules
            .iter()
            .filter(|module| module.source.is_none() && module.in_block())
            .map(|module| module.name.to_owned())
            .collect();
        let settings = Settings { quantized: &quantized, dense: &dense, act_order: false };
        if let Some(own) = native::Writer.config(&settings)? {
            config.insert("quantization_config".into(), own);
        }
    }
    let Part { rank, size, model } = part;
    config.insert(FIELD.into(), json!({ "rank": rank, "size": size, "model": model }));
    let path = complete(&job, staging, config)?;
    let left_out = owners.left_out;
    Ok(Written { path, tensor_bytes: written.tensor_bytes, quantized: quantized.len(), findings, left_out })
}

/// Error: the source is the part of a rank, whose tensors are not those that its config tells of.
pub(super) fn refuse_part(op: &'static str, source: &Weights) -> Result<()> {
    match source.part()? {
        None => Ok(()),
        Some(Part { rank, size, .. }) => {
            Err(Error::invalid(op, "a whole model", format!("the part of rank {rank} of {size}: give the whole model")))
        }
    }
}

/// The groups that a part of a quantised module has.
fn groups(source: &Weights, module: &Linear<'_>, cut: &Cut) -> Result<usize> {
    match source.stored_linear(module.name)?.weight {
        StoredWeight::Quantized(codes) => Ok(codes.used_groups(cut.columns.iter().cloned().flatten()).len()),
        StoredWeight::Dense { .. } => Ok(1),
    }
}
