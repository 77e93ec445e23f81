//! Files: `Checkpoint` with its layers by name, tensors of memory as files would have them, `inspect`, `verify`.

use crate::device::{self, Signals, place_of};
use crate::error::{Result, invalid};
use crate::linear::{Linear, activation_of, bias_of};
use crate::number;
use crate::quantize::QuantizedTensor;
use crate::tensor::{DataType, Input, Place, numpy_array, widened};
use halfbyte::{Act, Format, Group, StoredTensor, Weight};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{self as checkpoint, Hint, LinearWeight, MemoryTensor, StoredLinear, StoredWeight, Weights};
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyUserWarning, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyMapping;
use serde_json::{Map, Value};
use std::ffi::{CString, OsString};
use std::path::PathBuf;

/// What becomes of activations by its name.
pub fn act_of(name: &str) -> PyResult<Act> {
    match name {
        "a16" => Ok(Act::A16),
        "a32" => Ok(Act::A32),
        "a8" => Ok(Act::A8),
        "a8-xasym" => Ok(Act::A8Asym),
        other => invalid("act", "a16, a32, a8 or a8-xasym", format_args!("\"{other}\"")),
    }
}

/// −1 is one group a channel.
pub fn group_of(group: Option<i64>) -> PyResult<Option<Group>> {
    match group {
        None => Ok(None),
        Some(-1) => Ok(Some(Group::Channel)),
        Some(size) if size > 0 => Ok(Some(Group::Size(size as usize))),
        Some(other) => invalid("group", "-1 or a number above 0", other),
    }
}

/// The tensors of a model folder or file, and its linear layers by name. Nothing is read before it is asked for.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Checkpoint {
    weights: Weights,
    /// Whether its tensors are a program's, and no files.
    in_memory: bool,
}

impl Checkpoint {
    /// Packs a layer for a device.
    fn packed(&self, py: Python<'_>, prefix: &str, act: Act, options: Options<'_, '_>) -> Result<Linear> {
        let StoredLinear { weight, bias, findings } = match py.detach(|| self.weights.stored_linear(prefix)) {
            Err(missing @ checkpoint::Error::Missing { .. }) if self.in_memory => {
                return Err(PyValueError::new_err(missing.to_string()).into());
            }
            other => other?,
        };
        for finding in findings {
            let text = CString::new(finding.to_string().replace('\0', " ")).unwrap_or_default();
            PyErr::warn(py, &py.get_type::<PyUserWarning>(), &text, 1)?;
        }
        let bias = match options.bias {
            Some(bias) => bias_of("linear", Some(bias), weight.shape()[0])?,
            None => bias,
        };
        let activation = activation_of(options.activation)?;
        match &weight {
            StoredWeight::Dense { .. } if act.is_quantized() => Ok(invalid(
                "act",
                "a16 or a32 with a dense layer, whose activations stay as they are",
                format_args!("a8 or a8-xasym with `{prefix}`"),
            )?),
            StoredWeight::Dense { floats, shape } => {
                let weight = Weight::Dense(floats.as_floats(), *shape);
                Linear::of_weight(py, weight, bias, activation, options.place)
            }
            StoredWeight::Quantized(stored) => {
                let parts: [&StoredTensor<'_>; 1] = [stored];
                Linear::of_weight(py, Weight::Stored(&parts, act), bias, activation, options.place)
            }
        }
    }
}

/// How a layer of a checkpoint is packed.
struct Options<'a, 'py> {
    bias: Option<&'a Bound<'py, PyAny>>,
    activation: Option<&'a str>,
    place: Place,
}

#[pymethods]
impl Checkpoint {
    /// path: a folder in Hugging Face's form, or a file of safetensors, GGUF, ONNX or PyTorch. group: where GPTQ's files leave it open.
    #[new]
    #[pyo3(signature = (path, *, group=None))]
    fn new(py: Python<'_>, path: PathBuf, #[pyo3(from_py_with = number::group)] group: Option<i64>) -> Result<Self> {
        let hint = Hint { group: group_of(group)?, ..Hint::default() };
        Ok(Self { weights: device::compute(py, || Weights::open_with(&path, hint))?, in_memory: false })
    }

    /// Names of all modules with a matrix of weights, in the order of the files.
    fn modules(&self) -> Vec<&str> {
        self.weights.modules()
    }

    /// Names of all tensors, in the order of the files.
    fn tensors(&self) -> Vec<&str> {
        self.weights.checkpoint().tensor_names().collect()
    }

    /// Type and shape of a tensor, as safetensors spell types. *Error:* KeyError.
    fn tensor_info(&self, name: &str) -> PyResult<(&'static str, Vec<usize>)> {
        match self.weights.checkpoint().get(name) {
            Some(info) => Ok((info.dtype.name(), info.shape.to_vec())),
            None => Err(PyKeyError::new_err(name.to_owned())),
        }
    }

    /// A linear layer with its bias, packed. act: what becomes of activations, a16, a32, a8 or a8-xasym.
    #[pyo3(signature = (name, *, act="a16", activation=None, device=None))]
    fn linear(
        &self,
        py: Python<'_>,
        name: &str,
        act: &str,
        activation: Option<&str>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Result<Linear> {
        let place = device.filter(|device| !device.is_none()).map_or(Ok(Place::Cpu), place_of)?;
        self.packed(py, name, act_of(act)?, Options { bias: None, activation, place })
    }

    /// The codes of a linear layer. *Error:* ValueError: it holds floats.
    #[pyo3(signature = (name, *, act="a16"))]
    fn quantized(&self, py: Python<'_>, name: &str, act: &str) -> Result<QuantizedTensor> {
        let act = act_of(act)?;
        match device::compute(py, || self.weights.load_linear(name))?.weight {
            LinearWeight::Quantized(tensor) => Ok(QuantizedTensor::new(tensor, act)),
            LinearWeight::Dense { floats, .. } => {
                Ok(invalid("quantized", "a quantised layer", format_args!("`{name}` of {}", floats.dtype()))?)
            }
        }
    }

    /// A float tensor as a numpy array of float32.
    fn floats<'py>(&self, py: Python<'py>, name: &str) -> Result<Bound<'py, PyAny>> {
        let shape = self.tensor_info(name)?.1;
        let floats = py.detach(|| self.weights.checkpoint().floats(name))?;
        let values = py.detach(|| widened(floats.as_floats()))?;
        Ok(numpy_array(py, &values, &shape, DataType::F32)?)
    }

    fn __repr__(&self) -> String {
        format!("Checkpoint({:?}, {} tensors)", self.weights.checkpoint().path(), self.tensors().len())
    }
}

/// The type of a tensor in memory as files call it.
fn dtype_of(dtype: DataType) -> PyResult<DType> {
    Ok(match dtype {
        DataType::F16 => DType::F16,
        DataType::BF16 => DType::BF16,
        DataType::F32 => DType::F32,
        DataType::U8 => DType::U8,
        DataType::I8 => DType::I8,
        DataType::I32 => DType::I32,
        DataType::I64 => DType::I64,
        DataType::BOOL => DType::Bool,
        other => return Err(crate::tensor::wrong_type("linear_from_tensors", "a type that checkpoints have", other)),
    })
}

/// A layer whose tensors another loader has read: by the names that they have in files of GPTQ, AWQ, compressed-tensors and what else
/// is read, without the module's name, as "qweight". config: `quantization_config` as JSON text; module: the name by which that knows it.
#[pyfunction]
#[pyo3(signature = (tensors, config=None, *, module="linear", bias=None, act="a16", activation=None, device=None))]
#[expect(clippy::too_many_arguments, reason = "Python's options have names")]
pub fn linear_from_tensors(
    py: Python<'_>,
    tensors: &Bound<'_, PyMapping>,
    config: Option<&str>,
    module: &str,
    bias: Option<&Bound<'_, PyAny>>,
    act: &str,
    activation: Option<&str>,
    device: Option<&Bound<'_, PyAny>>,
) -> Result<Linear> {
    const OP: &str = "linear_from_tensors";
    let mut all = Vec::new();
    for item in tensors.items()? {
        let (name, tensor): (String, Bound<'_, PyAny>) = item.extract()?;
        let input = Input::of(&tensor, &name)?;
        let (dtype, shape) = (dtype_of(input.dtype())?, input.shape().to_vec());
        all.push(MemoryTensor { name: format!("{module}.{name}"), dtype, shape, bytes: input.to_bytes()? });
    }
    let config = config.map(object).transpose()?;
    let checkpoint = Checkpoint { weights: Weights::of_tensors(OP, all, config.as_ref())?, in_memory: true };
    let place = device.filter(|device| !device.is_none()).map_or(Ok(Place::Cpu), place_of)?;
    let bias = bias.filter(|bias| !bias.is_none());
    checkpoint.packed(py, module, act_of(act)?, Options { bias, activation, place })
}

fn object(text: &str) -> PyResult<Map<String, Value>> {
    match checkpoint::json::parse(text.as_bytes()) {
        Ok(Value::Object(fields)) => Ok(fields),
        _ => invalid("quantization_config", "a JSON object", "something else"),
    }
}

/// `inspect` as JSON text, and its paths, which need not be text: what was opened, the files, and the one that says how the checkpoint is
/// quantised.
#[pyfunction]
pub fn _inspect(
    py: Python<'_>,
    path: PathBuf,
    #[pyo3(from_py_with = number::group)] group: Option<i64>,
) -> Result<(String, OsString, Vec<OsString>, Option<OsString>)> {
    let hint = Hint { group: group_of(group)?, ..Hint::default() };
    let inspection = device::compute(py, || {
        let weights = Weights::open_with(&path, hint)?;
        checkpoint::inspect(&weights)
    })?;
    let config = inspection.config_file().map(|file| file.as_os_str().to_owned());
    let text = text_of(&inspection)?;
    let files = inspection.files.into_iter().map(PathBuf::into_os_string).collect();
    Ok((text, inspection.path.into_os_string(), files, config))
}

/// `verify` as JSON text.
#[pyfunction]
pub fn _verify(py: Python<'_>, first: PathBuf, second: PathBuf) -> Result<String> {
    let signals = Signals::default();
    let found = device::compute_watching(py, &signals, || {
        let (first, second) = (Weights::open(&first)?, Weights::open(&second)?);
        checkpoint::verify(&first, &second, &mut |_, _, _| !signals.came())
    });
    let found = signals.first(found)?;
    let mut told = serde_json::to_value(&found).map_err(unsaid)?;
    if let Value::Object(fields) = &mut told {
        fields.insert("equal".to_owned(), found.equal().into());
    }
    Ok(text_of(&told)?)
}

/// As JSON text.
pub fn text_of(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(unsaid)
}

fn unsaid(error: serde_json::Error) -> PyErr {
    PyRuntimeError::new_err(format!("json: {error}"))
}

/// A format in the spelling that the library gives it. *Error:* no format.
#[pyfunction]
pub fn parse_format(format: &str) -> Result<String> {
    Ok(format.parse::<Format>()?.to_string())
}
