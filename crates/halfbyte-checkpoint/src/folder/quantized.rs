//! Writing a quantised model.

use super::dense::converted;
use super::staging::Staging;
use super::{Job, Linear, Step, Written, complete, dense_config, linears, owners, write_steps};
use crate::error::{Error, Result};
use crate::safetensors::{Checkpoint, TensorSpec};
use crate::scheme::LinearWeight;
use crate::target::{Module, Settings, Target, unrepresentable};
use halfbyte::{Floats, QTensor, WeightFormat, Zero};

/// How the modules of a model become quantised ones.
pub struct Quantization<'a> {
    /// The form of the files.
    pub target: Target,
    /// The format of a module; None leaves it as it is. Asked for every module before any is read.
    pub format: &'a mut dyn FnMut(&Linear<'_>) -> Option<WeightFormat>,
    /// Quantises a module to the format that was chosen for it.
    pub quantize: &'a mut dyn FnMut(&Linear<'_>, &LinearWeight<'_>, WeightFormat) -> halfbyte::Result<QTensor>,
    /// New elements of a float tensor that is not quantised, by its name; None leaves it as it is. They are rounded to the
    /// tensor's type.
    pub dense: &'a mut dyn FnMut(&str) -> Option<Vec<f32>>,
}

impl std::fmt::Debug for Quantization<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quantization").field("target", &self.target).finish_non_exhaustive()
    }
}

/// Writes a model folder in which some modules are quantised.
///
/// The folder is complete: weights, `config.json` with a `quantization_config`, tokenizer. Memory holds one module at a
/// time. *Errors:* no module chosen, a module that the form cannot hold, a quantised tensor of another format than was
/// chosen, a module that is quantised in the source and has no format chosen; whatever `quantize` refuses, with the
/// module's name; [`Error::Cancelled`]; a target that may not be replaced. After an error nothing is left.
pub fn write_model(mut job: Job<'_>, quantization: Quantization<'_>) -> Result<Written> {
    const OP: &str = "quantise a model";
    let Quantization { target, format: choose, quantize, dense: replace } = quantization;
    let source = job.source;
    let checkpoint = source.checkpoint();
    let mut config = dense_config(source)?;

    let modules = linears(source)?;
    let formats: Vec<Option<WeightFormat>> = modules.iter().map(&mut *choose).collect();
    for (module, format) in modules.iter().zip(&formats) {
        if format.is_none() && module.source.is_some() {
            let got = format!("none for `{}`, which is quantised already", module.name);
            return Err(Error::invalid(OP, "a format for every quantised module", got));
        }
    }
    let chosen = || modules.iter().zip(&formats).filter_map(|(module, format)| Some((module, (*format)?)));
    if chosen().next().is_none() {
        return Err(Error::invalid(OP, "at least one module to quantise", format!("none of {}", modules.len())));
    }
    let form = target.form(chosen().any(|(_, format)| format.zero != Zero::Symmetric));
    for (module, format) in chosen() {
        format.validate().map_err(Error::numbers(module.name))?;
        let refuse = unrepresentable(module.name, target.name());
        let nearest = form.nearest(format, module.shape).map_err(&refuse)?;
        if nearest != format {
            return Err(refuse(differences(format, nearest)));
        }
    }
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

    let owners = owners(
        checkpoint,
        modules
            .iter()
            .enumerate()
            .filter(|(at, _)| formats[*at].is_some())
            .map(|(at, module)| (at, module.name, module.source.is_some())),
    );
    let mut planned = vec![false; modules.len()];
    let mut steps = Vec::new();
    for info in checkpoint.tensors() {
        match owners.get(info.name).map(|&at| (at, formats[at])) {
            Some((at, Some(format))) => {
                if !std::mem::replace(&mut planned[at], true) {
                    let module = &modules[at];
                    let specs = form.specs(module.name, format, module.shape);
                    steps.push(Step { name: module.name, task: Some((at, format)), specs });
                }
            }
            _ => {
                let spec = TensorSpec { name: info.name.to_owned(), dtype: info.dtype, shape: info.shape.to_vec() };
                steps.push(Step { name: info.name, task: None, specs: vec![spec] });
            }
        }
    }

    let staging = Staging::create(job.target, job.overwrite, source.folder())?;
    let mut act_order = false;
    let create = |specs: &[TensorSpec], shard| form.create(staging.path(), specs, &settings(false), shard);
    let written = write_steps(&mut job, create, steps, |task, name, writer| {
        let &Some((at, format)) = task else {
            match replace(name) {
                None => writer.write(name, checkpoint.bytes(name)?)?,
                Some(values) => writer.write(name, &replaced(checkpoint, name, &values)?)?,
            }
            checkpoint.release(name);
            return Ok(());
        };
        let module = &modules[at];
        let weight = source.load_linear(name)?.weight;
        let q = quantize(module, &weight, format).map_err(Error::numbers(name))?;
        if q.format() != format || [q.n(), q.k()] != module.shape {
            let expected = format!("`{name}` as {format:?} {:?}", module.shape);
            return Err(Error::invalid(OP, expected, format!("{:?} {:?}", q.format(), [q.n(), q.k()])));
        }
        drop(weight);
        source.release(name);
        act_order |= q.group_index().is_some();
        let mut specs = form.specs(name, format, module.shape).into_iter();
        let mut put = |bytes: &[u8]| specs.next().map_or(Ok(()), |spec| writer.write(&spec.name, bytes));
        form.pack(name, &q, &mut put)
    })?;
    if let Some(own) = form.config(&settings(act_order))? {
        config.insert("quantization_config".into(), own);
    }
    let folder = complete(&job, staging, config)?;
    Ok(Written { folder, tensor_bytes: written.tensor_bytes, quantized: quantized.len() })
}

/// Why a form does not take a format as it is.
fn differences(format: WeightFormat, nearest: WeightFormat) -> String {
    let mut reasons = Vec::new();
    if format.bits != nearest.bits {
        reasons.push(format!("its codes have {} bits, not {}", nearest.bits, format.bits));
    }
    if format.group != nearest.group {
        reasons.push(format!("its groups are {:?}, not {:?}", nearest.group, format.group));
    }
    if format.zero != nearest.zero {
        reasons.push(match nearest.zero {
            Zero::Symmetric => "it has no zero points".to_owned(),
            Zero::Integer => "it has integer zero points only, no float offsets".to_owned(),
            Zero::Float => "it has float offsets only, no zero points".to_owned(),
        });
    }
    if format.scale != nearest.scale {
        reasons.push(format!("its scales are {}, not {}", nearest.scale, format.scale));
    }
    reasons.join("; ")
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
