//! Whole model folders: `convert`, and `quantize_model`, which rounds to nearest.

use crate::checkpoint::{group_of, text_of};
use crate::device::{self, Signals};
use crate::error::{Result, invalid};
use crate::number;
use crate::quantize::Rounding;
use halfbyte::layout::codes::FpaIntB;
use halfbyte::quantize::rtn;
use halfbyte::{Float, Format};
use halfbyte_checkpoint::{
    self as checkpoint, Conversion, Error, GptqVersion, Hint, Job, LinearWeight, Quantization, Target, Weights, linears,
};
use pyo3::prelude::*;
use serde_json::json;
use std::ffi::OsString;
use std::path::PathBuf;

/// The forms of files by their names, which are those of the command line's `--to`.
const TARGETS: [(&str, Target); 10] = [
    ("gptq", Target::Gptq(None)),
    ("gptq_v1", Target::Gptq(Some(GptqVersion::V1))),
    ("gptq_v2", Target::Gptq(Some(GptqVersion::V2))),
    ("awq", Target::Awq),
    ("compressed-tensors", Target::CompressedTensors),
    ("fpa_intb", Target::FpaIntB(FpaIntB::Interleaved)),
    ("fpa_intb_sm70", Target::FpaIntB(FpaIntB::RowMajor)),
    ("onnx", Target::Onnx),
    ("gguf", Target::Gguf),
    ("native", Target::Native),
];

/// The form of files by its name.
fn target_of(name: &str) -> PyResult<Target> {
    match TARGETS.iter().find(|(known, _)| *known == name) {
        Some((_, target)) => Ok(*target),
        None => {
            let names = TARGETS.map(|(name, _)| name).join(", ");
            invalid("to", format_args!("one of {names}"), format_args!("\"{name}\""))
        }
    }
}

/// `convert`: where it wrote, a path that need not be text, and what else it told as JSON text.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's options have names")]
pub fn _convert(
    py: Python<'_>,
    source: PathBuf,
    output: PathBuf,
    to: &str,
    #[pyo3(from_py_with = number::bits)] bits: Option<u32>,
    #[pyo3(from_py_with = number::group)] group: Option<i64>,
    #[pyo3(from_py_with = number::two_level)] two_level: bool,
    #[pyo3(from_py_with = number::requantize)] requantize: bool,
    #[pyo3(from_py_with = number::overwrite)] overwrite: bool,
) -> Result<(OsString, String)> {
    let group = group_of(group)?;
    let channel_scale = two_level.then_some(Float::F16);
    let conversion = Conversion { target: target_of(to)?, bits, group, channel_scale, requantize };
    let signals = Signals::default();
    let converted = device::compute_watching(py, &signals, || {
        let weights = Weights::open_with(&source, Hint { group, ..Hint::default() })?;
        let came = || signals.came();
        let job = Job { overwrite, cancel: Some(&came), ..Job::new(&weights, &output) };
        checkpoint::convert(job, conversion)
    });
    let converted = signals.first(converted)?;
    let told = json!({
        "to": to,
        "bytes": converted.written.tensor_bytes,
        "modules": converted.written.quantized,
        "requantized": converted.requantized,
        "made_dense": converted.made_dense,
        "left_out": converted.written.left_out,
        "findings": converted.written.findings,
    });
    Ok((converted.written.path.into_os_string(), text_of(&told)?))
}

/// `quantize_model`: where it wrote, a path that need not be text, and what else it told as JSON text.
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "Python's options have names")]
pub fn _quantize_model(
    py: Python<'_>,
    source: PathBuf,
    output: PathBuf,
    format: &str,
    to: &str,
    #[pyo3(from_py_with = number::search)] search: bool,
    symmetric: &str,
    #[pyo3(from_py_with = number::overwrite)] overwrite: bool,
) -> Result<(OsString, String)> {
    let Format { weight: format, act } = format.parse::<Format>()?;
    if act.is_quantized() {
        let got = Format { weight: format, act };
        return Ok(invalid(OP, "a format with a16, as files hold weights and nothing of activations", got)?);
    }
    let (target, options) = (target_of(to)?, Rounding::new(OP, search, symmetric, format)?.rtn);
    let signals = Signals::default();
    let written = device::compute_watching(py, &signals, || {
        let weights = Weights::open(&source)?;
        let layers = linears(&weights)?;
        if let Some(layer) = layers.iter().find(|layer| layer.source.is_some()) {
            return Err(refused("a model that is not quantised yet", format!("codes in `{}`", layer.name)));
        }
        let chosen: Vec<_> = layers.into_iter().filter(|layer| layer.in_block() && !layer.is_router()).collect();
        if chosen.is_empty() {
            return Err(refused("linear layers in numbered blocks", "none".to_owned()));
        }
        for layer in &chosen {
            if let Err(reason) = target.check(format, layer.shape) {
                return Err(refused(&format!("a format that the form {to} has for `{}`", layer.name), reason));
            }
        }
        let came = || signals.came();
        let job = Job { overwrite, cancel: Some(&came), ..Job::new(&weights, &output) };
        let quantization = Quantization {
            target,
            format: &mut |layer| chosen.iter().any(|known| known.name == layer.name).then_some(format),
            quantize: &mut |_, weight, format| match weight {
                LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, options),
                LinearWeight::Quantized(_) => Err(halfbyte::Error::Invalid {
                    op: OP,
                    expected: "a dense layer".to_owned(),
                    got: "a quantised one".to_owned(),
                }),
            },
            dense: &mut |_| None,
            untied: None,
        };
        checkpoint::write_model(job, quantization)
    });
    let written = signals.first(written)?;
    let told = json!({
        "to": to,
        "bytes": written.tensor_bytes,
        "modules": written.quantized,
        "findings": written.findings,
    });
    Ok((written.path.into_os_string(), text_of(&told)?))
}

const OP: &str = "quantize_model";

fn refused(expected: &str, got: String) -> Error {
    Error::Invalid { op: OP, expected: expected.to_owned(), got }
}
