//! Writing a quantised model.

use super::dense::{converted, floats_of};
use super::part::refuse_part;
use super::staging::Staging;
use super::{HEAD, Job, Linear, Step, Written, check_side_files, complete, dense_config, linears, owners, write_steps};
use crate::checkpoint::Checkpoint;
use crate::contents::{coarse_scales, odd_values};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::safetensors::{DType, TensorSpec, cast_floats};
use crate::scheme::{LinearWeight, Weights};
use crate::target::{Module, Settings, Target, unrepresentable};
use halfbyte::{Float, Floats, QTensor, WeightFormat, Zero};
use std::borrow::Cow;

/// How the modules of a model become quantised ones.
pub struct Quantization<'a> {
    /// The form of the files.
    pub target: Target,
    /// The format of a module; None leaves it dense, or makes it so, in f32, which holds every product of a code and an f16
    /// scale exactly. Asked for every module before any is read.
    pub format: &'a mut dyn FnMut(&Linear<'_>) -> Option<WeightFormat>,
    /// Quantises a module to the format that was chosen for it.
    pub quantize: &'a mut dyn FnMut(&Linear<'_>, &LinearWeight<'_>, WeightFormat) -> halfbyte::Result<QTensor>,
    /// New elements of a float tensor that is not quantised, by its name; None leaves it as it is. They are rounded to the
    /// tensor's type.
    pub dense: &'a mut dyn FnMut(&str) -> Option<Vec<f32>>,
    /// The head of a model whose embedding is the head, where it becomes a quantised module of its own.
    pub untied: Option<Untied<'a>>,
}

/// A head, `lm_head`, that is quantised from the embedding which is the head in the source. The embedding stays as it is, and
/// the config that is written says `tie_word_embeddings: false`; a head that the source stores beside its embedding is not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Untied<'a> {
    /// Module of the embedding.
    pub embedding: &'a str,
    /// Format of the head.
    pub format: WeightFormat,
}

impl Untied<'_> {
    /// The name of the module that the head becomes.
    pub const HEAD: &'static str = HEAD;
}

impl std::fmt::Debug for Quantization<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quantization").field("target", &self.target).finish_non_exhaustive()
    }
}

/// What becomes of a module or tensor.
enum Task<'a> {
    /// The tensor is taken over.
    Copy(TensorSpec),
    /// The module is quantised to this format.
    Quantize(&'a Linear<'a>, WeightFormat),
    /// The module is written as the floats that it stands for.
    Dequantize(TensorSpec),
}

/// Writes a model in which some modules are quantised.
///
/// What is written is complete: weights, config with a `quantization_config`, tokenizer. Memory holds one module at a
/// time. *Errors:* a source that is the part of a rank; no module chosen (GGUF files can do without), a module that the form
/// cannot hold, a quantised tensor of another format than was chosen; whatever `quantize` refuses, with the module's name;
/// [`Error::Cancelled`]; a target that may not be replaced. After an error nothing is left.
pub fn write_model(mut job: Job<'_>, quantization: Quantization<'_>) -> Result<Written> {
    const OP: &str = "quantise a model";
    let Quantization { target, format: choose, quantize, dense: replace, untied } = quantization;
    let source = job.source;
    refuse_part(OP, source)?;
    check_side_files(source)?;
    let checkpoint = source.checkpoint();
    let mut config = dense_config(source)?;

    let mut modules = linears(source)?;
    if untied.is_some() {
        modules.retain(|module| module.name != HEAD);
    }
    let mut formats: Vec<Option<WeightFormat>> = modules.iter().map(&mut *choose).collect();
    if let Some(Untied { embedding, format }) = untied {
        let Some(&Linear { shape, .. }) = modules.iter().find(|module| module.name == embedding) else {
            return Err(Error::missing(
                checkpoint.path(),
                format!("there is no embedding `{embedding}` to be the head"),
            ));
        };
        modules.push(Linear { name: HEAD, shape, source: None });
        formats.push(Some(format));
        config.insert("tie_word_embeddings".into(), false.into());
    }
    let chosen = || modules.iter().zip(&formats).filter_map(|(module, format)| Some((module, (*format)?)));
    if chosen().next().is_none() && target != Target::Gguf {
        return Err(Error::invalid(OP, "at least one module to quantise", format!("none of {}", modules.len())));
    }
    for (module, format) in chosen() {
        format.validate().map_err(Error::numbers(module.name))?;
        target.check(format, module.shape).map_err(unrepresentable(module.name, target.name()))?;
    }
    let form = target.form(source, chosen().any(|(_, format)| format.zero != Zero::Symmetric))?;
    let quantized: Vec<Module> =
        chosen().map(|(m, format)| Module { name: m.name.to_owned(), format, shape: m.shape }).collect();
    let dense: Vec<String> = modules
        .iter()
        .zip(&formats)
        .filter(|(module, format)| format.is_none() && module.in_block())
        .map(|(module, _)| module.name.to_owned())
        .collect();
    let settings = |act_order| Settings { quantized: &quantized, dense: &dense, act_order };
    form.config(&settings(false))?;

    let touched = |at: usize| formats[at].is_some() || modules[at].source.is_some();
    let owners = owners(source, modules.iter().enumerate().filter(|(at, _)| touched(*at)))?;
    let mut left_out = owners.left_out;
    let mut planned = vec![false; modules.len()];
    let mut steps = Vec::new();
    for info in checkpoint.tensors() {
        let Some(&at) = owners.at.get(info.name) else {
            let spec = TensorSpec { name: info.name.to_owned(), dtype: info.dtype, shape: info.shape.to_vec() };
            match form.dense(&spec)? {
                Some(target) => steps.push(Step { name: info.name, task: Task::Copy(spec), specs: vec![target] }),
                None => {
                    form.check_left_out(&spec, &checkpoint.data(info.name)?)?;
                    left_out.push(info.name.to_owned());
                }
            }
            continue;
        };
        if std::mem::replace(&mut planned[at], true) {
            continue;
        }
        let module = &modules[at];
        match formats[at] {
            Some(format) => {
                let specs = form.specs(module.name, format, module.shape);
                steps.push(Step { name: module.name, task: Task::Quantize(module, format), specs });
            }
            None => {
                let name = format!("{}.weight", module.name);
                let spec = TensorSpec { name, dtype: DType::F32, shape: module.shape.to_vec() };
                let specs = form.dense(&spec)?.into_iter().collect();
                steps.push(Step { name: module.name, task: Task::Dequantize(spec), specs });
            }
        }
    }

    if let (Some(Untied { format, .. }), Some((module, false))) = (untied, modules.iter().zip(planned).next_back()) {
        let specs = form.specs(module.name, format, module.shape);
        steps.push(Step { name: module.name, task: Task::Quantize(module, format), specs });
    }

    let staging = match form.only_file() {
        None => Staging::create(job.target, job.overwrite, source)?,
        Some(name) => Staging::create_for_file(job.target, job.overwrite, source, name)?,
    };
    let mut act_order = false;
    // A head is no small thing to leave out.
    let heads = left_out.iter().filter(|name| name.strip_suffix(".weight") == Some(HEAD));
    let text = "is left out: the configuration says tie_word_embeddings, and the embedding is the head";
    let mut findings: Vec<Finding> = heads.map(|name| Finding::new(name, text.to_owned())).collect();
    let create = |specs: &[TensorSpec], shard| {
        let extra = form.extra().iter().map(|(spec, _)| spec);
        let specs: Vec<TensorSpec> = specs.iter().chain(extra).cloned().collect();
        let mut writer = form.create(staging.path(), &specs, &settings(false), shard)?;
        for (spec, data) in form.extra() {
            writer.write(&spec.name, data)?;
        }
        Ok(writer)
    };
    let written = write_steps(&mut job, create, steps, |step, writer| {
        let name = step.name;
        let mut specs = step.specs.iter();
        let mut put = |bytes: &[u8]| specs.next().map_or(Ok(()), |spec| writer.write(&spec.name, bytes));
        match &step.task {
            Task::Copy(spec) => {
                if spec.dtype.float().is_some() {
                    findings.extend(odd_values(name, checkpoint.floats(name)?.as_floats()));
                }
                let data = match replace(name) {
                    None => checkpoint.data(name)?,
                    Some(values) => Cow::Owned(replaced(checkpoint, name, &values)?),
                };
                put(&form.dense_data(spec, data)?)?;
                checkpoint.release(name);
                Ok(())
            }
            Task::Dequantize(spec) => {
                let floats = floats_of(source, name, Float::F32)?;
                source.release(name);
                findings.extend(odd_values(name, cast_floats(Float::F32, floats.as_slice()).as_floats()));
                put(&form.dense_data(spec, Cow::Owned(floats))?)
            }
            Task::Quantize(module, format) => {
                let stored = untied.filter(|_| name == HEAD).map_or(name, |untied| untied.embedding);
                let weight = source.load_linear(stored)?.weight;
                let q = quantize(module, &weight, *format).map_err(Error::numbers(name))?;
                let full = format.group.count(q.k());
                if q.format() != *format || [q.n(), q.k()] != module.shape || q.groups() != full {
                    let expected = format!("`{name}` as {format:?} {:?}, {full} groups", module.shape);
                    let got = format!("{:?} {:?}, {} groups", q.format(), [q.n(), q.k()], q.groups());
                    return Err(Error::invalid(OP, expected, got));
                }
                findings.extend(coarse_scales(name, &weight, &q));
                drop(weight);
                source.release(stored);
                findings.extend(odd_values(name, Floats::F32(q.scales())));
                act_order |= q.group_index().is_some();
                form.pack(name, &q, &mut put)
            }
        }
    })?;
    let path = if form.only_file().is_some() {
        staging.commit()?
    } else {
        if let Some(own) = form.config(&settings(act_order))? {
            config.insert("quantization_config".into(), own);
        }
        complete(&job, staging, config)?
    };
    Ok(Written { path, tensor_bytes: written.tensor_bytes, quantized: quantized.len(), findings, left_out })
}

/// What a model is going to take in a form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the quantised modules.
    pub modules: u64,
    /// Bytes of all tensors.
    pub all: u64,
}

/// What a dense model takes when these modules are quantised, each to its format; a head that the source does not hold may be
/// among them. Errors: those of [`Target::check`]; a tensor, config or tokenizer that the form cannot say.
pub fn sizes(target: Target, source: &Weights, modules: &[(Linear<'_>, WeightFormat)]) -> Result<Sizes> {
    let form = target.form(source, modules.iter().any(|(_, format)| format.zero != Zero::Symmetric))?;
    let of = |spec: &TensorSpec| spec.dtype.bytes_of(&spec.shape).unwrap_or(0) as u64;
    let (mut of_modules, mut all): (u64, u64) = (0, form.extra().iter().map(|(spec, _)| of(spec)).sum());
    let mut replaced = std::collections::HashSet::new();
    for (module, format) in modules {
        target.check(*format, module.shape).map_err(unrepresentable(module.name, target.name()))?;
        of_modules += form.specs(module.name, *format, module.shape).iter().map(of).sum::<u64>();
        replaced.insert(format!("{}.weight", module.name));
    }
    for info in source.checkpoint().tensors().filter(|info| !replaced.contains(info.name)) {
        let spec = TensorSpec { name: info.name.to_owned(), dtype: info.dtype, shape: info.shape.to_vec() };
        all += form.dense(&spec)?.as_ref().map_or(0, of);
    }
    Ok(Sizes { modules: of_modules, all: all + of_modules })
}

/// New elements of a tensor, in its own type. Errors: not a float tensor, another number of elements, a value beyond the
/// type.
fn replaced(checkpoint: &Checkpoint, name: &str, values: &[f32]) -> Result<Vec<u8>> {
    let floats = checkpoint.floats(name)?;
    if floats.len() != values.len() {
        let expected = format!("{} new elements for `{name}`", floats.len());
        return Err(Error::invalid("quantise a model", expected, values.len().to_string()));
    }
    converted(Floats::F32(values), floats.dtype(), name)
}
