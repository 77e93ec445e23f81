//! Writing a quantised model.

use super::staging::Staging;
use super::{Job, Linear, Step, Written, complete, dense_config, linears, owners, write_steps};
use crate::config::GptqVersion;
use crate::error::{Error, Result};
use crate::safetensors::TensorSpec;
use crate::scheme::{LinearWeight, gptq};
use halfbyte::{QTensor, WeightFormat, Zero};

/// How the modules of a model become quantised ones.
pub struct Quantization<'a> {
    /// How zero points are stored. None: `gptq` if every format is symmetric, else `gptq_v2`.
    ///
    /// The older `gptq` cannot hold a zero point of 0, and GPTQModel refuses asymmetric models in it that it has not
    /// written itself; symmetric ones are read by everything.
    pub version: Option<GptqVersion>,
    /// The format of a module; None leaves it as it is. Asked for every module before any is read.
    pub format: &'a mut dyn FnMut(&Linear<'_>) -> Option<WeightFormat>,
    /// Quantises a module to the format that was chosen for it.
    pub quantize: &'a mut dyn FnMut(&Linear<'_>, &LinearWeight<'_>, WeightFormat) -> halfbyte::Result<QTensor>,
}

impl std::fmt::Debug for Quantization<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Quantization").field("version", &self.version).finish_non_exhaustive()
    }
}

/// Writes a model folder in which some modules are quantised, in GPTQ's files.
///
/// The folder is complete: weights, `config.json` with a `quantization_config`, tokenizer. Memory holds one module at a
/// time. *Errors:* no module chosen, a module that GPTQ files cannot hold (see [`gptq::pack`]), a quantised tensor of
/// another format than was chosen, a module that is quantised in the source and has no format chosen; whatever `quantize`
/// refuses, with the module's name; [`Error::Cancelled`]; a target that may not be replaced. After an error nothing is
/// left.
pub fn write_model(mut job: Job<'_>, quantization: Quantization<'_>) -> Result<Written> {
    const OP: &str = "quantise a model";
    let Quantization { version, format: choose, quantize } = quantization;
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
    let asymmetric = chosen().any(|(_, format)| format.zero != Zero::Symmetric);
    let version = version.unwrap_or(if asymmetric { GptqVersion::V2 } else { GptqVersion::V1 });

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
                    let specs = gptq::specs(module.name, format, module.shape)?;
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
    let written = write_steps(&mut job, &staging, steps, |task, name, writer| {
        let &Some((at, format)) = task else {
            writer.write(name, checkpoint.bytes(name)?)?;
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
        for (part, bytes) in gptq::pack(name, &q, version)?.parts() {
            writer.write(&format!("{name}.{part}"), bytes)?;
        }
        Ok(())
    })?;

    let quantized: Vec<(String, WeightFormat)> = chosen().map(|(m, format)| (m.name.to_owned(), format)).collect();
    let dense: Vec<String> = modules
        .iter()
        .zip(&formats)
        .filter(|(module, format)| format.is_none() && module.in_block())
        .map(|(module, _)| module.name.to_owned())
        .collect();
    let settings = gptq::Settings { version, quantized: &quantized, dense: &dense, act_order };
    config.insert("quantization_config".into(), settings.to_json());
    let folder = complete(&job, staging, config)?;
    Ok(Written { folder, tensor_bytes: written.tensor_bytes, quantized: quantized.len() })
}
