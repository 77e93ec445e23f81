//! Floats to codes: `quantize`, what it needs to know of inputs, and what it returns.

use crate::device;
use crate::error::{Result, invalid};
use crate::number::{self, Ids};
use crate::tensor::{DataType, Input, copied, float_of, numpy_array, wrong_type};
use halfbyte::quantize::{self as library, Gptq, Rtn, SymmetricScale, awq_scales, gptq, rtn, rtn_clipped};
use halfbyte::{Act, Floats, Format, QTensor, StoredTensor, WeightFormat, Zero, Zeros};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// A weight matrix as codes with scales and zero points.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct QuantizedTensor {
    tensor: Arc<QTensor>,
    act: Act,
    /// What the inputs of AWQ's weights must be divided by.
    input_scales: Option<Vec<f32>>,
}

impl QuantizedTensor {
    /// One without scales of inputs.
    pub fn new(tensor: QTensor, act: Act) -> Self {
        Self { tensor: Arc::new(tensor), act, input_scales: None }
    }

    /// The weight, and what becomes of activations. Error: inputs have to be divided by scales first.
    pub fn folded_weight(&self) -> PyResult<(&Arc<QTensor>, Act)> {
        match self.input_scales {
            Some(_) => invalid(
                "linear",
                "a weight whose inputs are as they were: divide what makes them by input_scales, then give weight.folded()",
                "one that AWQ has scaled",
            ),
            None => Ok((&self.tensor, self.act)),
        }
    }
}

#[pymethods]
impl QuantizedTensor {
    /// Puts a tensor together from codes `[n, k]` (uint8), scales `[n, groups]` (float32), zero points or offsets of the same shape,
    /// and the group of each column where it is not `column // group`.
    #[new]
    #[pyo3(signature = (format, codes, scales, zeros=None, group_index=None))]
    fn from_parts(
        format: &str,
        codes: &Bound<'_, PyAny>,
        scales: &Bound<'_, PyAny>,
        zeros: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::group_index)] group_index: Option<Ids>,
    ) -> Result<Self> {
        const OP: &str = "QuantizedTensor";
        let Format { weight, act } = format.parse()?;
        let codes = Input::of(codes, "codes")?;
        let [n, k] = matrix(OP, "codes", &codes)?;
        let scales = Input::of(scales, "scales")?;
        // An index may name more groups than columns fill; then the library counts them.
        let groups = match **scales.shape() {
            [_, groups] if group_index.is_some() => groups,
            _ => weight.group.count(k),
        };
        let in_groups = |what: &str, numbers: &Input<'_>| match **numbers.shape() == [n, groups] {
            true => Ok(()),
            false => {
                invalid(OP, format_args!("{what} of shape ({n}, {groups})"), format_args!("shape {}", numbers.shape()))
            }
        };
        in_groups("scales", &scales)?;
        let zeros = match zeros.filter(|zeros| !zeros.is_none()) {
            None => Zeros::Symmetric,
            Some(zeros) => {
                let zeros = Input::of(zeros, "zeros")?;
                in_groups("zeros", &zeros)?;
                zeros_of(OP, &zeros, weight.max_code() + 1)?
            }
        };
        let scales = scales.to_f32("scales")?;
        let codes = copied(codes.slice::<u8>("codes", DataType::U8)?)?;
        let group_index = group_index.map(|Ids(index)| index);
        Ok(Self::new(QTensor::new(weight, [n, k], codes, scales, zeros, group_index)?, act))
    }

    /// Its format, as `w4a16-g128`.
    #[getter]
    pub fn format(&self) -> String {
        Format { weight: self.tensor.format(), act: self.act }.to_string()
    }

    /// Outputs and inputs, `(n, k)`.
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.tensor.n(), self.tensor.k())
    }

    /// What inputs must be divided by, `[k]`; None where they are taken as they are.
    #[getter]
    fn input_scales<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let array = |scales: &Vec<f32>| numpy_array(py, scales, &[scales.len()], DataType::F32);
        self.input_scales.as_ref().map(array).transpose()
    }

    /// The same for inputs that are divided by `input_scales` already.
    fn folded(&self) -> Self {
        Self { tensor: self.tensor.clone(), act: self.act, input_scales: None }
    }

    /// Codes `[n, k]` as uint8.
    fn codes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numpy_array(py, self.tensor.codes(), &[self.tensor.n(), self.tensor.k()], DataType::U8)
    }

    /// Scales `[n, groups]` as float32.
    fn scales<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        numpy_array(py, self.tensor.scales(), &[self.tensor.n(), self.tensor.groups()], DataType::F32)
    }

    /// Zero points as int32 or offsets as float32, `[n, groups]`; None where codes are symmetric.
    fn zeros<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let shape = [self.tensor.n(), self.tensor.groups()];
        match self.tensor.zeros() {
            Zeros::Symmetric => Ok(None),
            Zeros::Integer(zeros) => {
                let zeros: Vec<i32> = zeros.iter().map(|&z| z.into()).collect();
                numpy_array(py, &zeros, &shape, DataType::I32).map(Some)
            }
            Zeros::Float(offsets) => numpy_array(py, offsets, &shape, DataType::F32).map(Some),
        }
    }

    /// Group of each column where that is not `column // group` (act-order), else None.
    #[getter]
    fn group_index(&self) -> Option<Vec<u32>> {
        self.tensor.group_index().map(<[u32]>::to_vec)
    }

    /// What the codes stand for, `[n, k]` as float32, rounded once.
    fn dequantize<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyAny>> {
        let values = device::compute(py, || StoredTensor::from(&*self.tensor).values())?;
        Ok(numpy_array(py, &values, &[self.tensor.n(), self.tensor.k()], DataType::F32)?)
    }

    fn __repr__(&self) -> String {
        format!("QuantizedTensor({} x {}, {})", self.tensor.n(), self.tensor.k(), self.format())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}

/// Zero points up to `most`, of whichever integers, or offsets.
fn zeros_of(op: &str, zeros: &Input<'_>, most: u32) -> PyResult<Zeros> {
    fn points<T: Copy + Into<i64>>(op: &str, zeros: &[T], most: u32) -> PyResult<Zeros> {
        let point = |&zero: &T| match zero.into() {
            zero if (0..=i64::from(most)).contains(&zero) => Ok(zero as u16),
            other => invalid(op, format_args!("zero points from 0 to {most}"), other),
        };
        zeros.iter().map(point).collect::<PyResult<_>>().map(Zeros::Integer)
    }
    match zeros.dtype() {
        dtype @ DataType::U8 => points(op, zeros.slice::<u8>(op, dtype)?, most),
        dtype @ DataType::I8 => points(op, zeros.slice::<i8>(op, dtype)?, most),
        dtype @ DataType::I32 => points(op, zeros.slice::<i32>(op, dtype)?, most),
        dtype @ DataType::I64 => points(op, zeros.slice::<i64>(op, dtype)?, most),
        dtype if float_of(dtype).is_some() => zeros.to_f32(op).map(Zeros::Float),
        other => Err(wrong_type(op, "zeros of uint8, int8, int32, int64, float16, bfloat16 or float32", other)),
    }
}

/// What GPTQ and AWQ need to know of a layer's inputs: the sum of `xᵀx` over all of them, in float64.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Hessian {
    inner: Mutex<library::Hessian>,
    /// Of the process that used it last.
    generation: AtomicU32,
}

#[pymethods]
impl Hessian {
    /// Of no inputs yet, for a layer of k inputs.
    #[new]
    fn new(py: Python<'_>, #[pyo3(from_py_with = number::k)] k: usize) -> Result<Self> {
        let inner = Mutex::new(library::Hessian::new(k)?);
        Ok(Self { inner, generation: device::generation(py).into() })
    }

    /// Adds inputs `[..., k]`.
    fn add(&self, py: Python<'_>, x: &Bound<'_, PyAny>) -> Result<()> {
        const OP: &str = "Hessian.add";
        let x = Input::of(x, OP)?;
        self.claim(py)?;
        let (values, last) = (x.to_f32(OP)?, x.shape().last().copied());
        device::compute_holding(py, &self.inner, |hessian| {
            let k = hessian.k();
            if last != Some(k) {
                let got = last.map_or_else(|| "a scalar".to_owned(), |last| format!("one of {last}"));
                return Err(halfbyte::Error::Invalid { op: OP, expected: format!("a last dimension of {k}"), got });
            }
            hessian.add(&values, values.len() / k.max(1))
        })?;
        Ok(())
    }

    /// Inputs of the layer.
    #[getter]
    fn k(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, library::Hessian::k)
    }

    /// Inputs that were added, in rows.
    #[getter]
    fn rows(&self, py: Python<'_>) -> PyResult<u64> {
        self.read(py, library::Hessian::rows)
    }
}

impl Hessian {
    /// Who adds inputs meanwhile has no need of Python's lock to get on.
    fn read<T: Send>(&self, py: Python<'_>, of: impl FnOnce(&library::Hessian) -> T + Send) -> PyResult<T> {
        self.claim(py)?;
        Ok(py.detach(|| of(&self.lock())))
    }

    fn lock(&self) -> MutexGuard<'_, library::Hessian> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// RuntimeError: this process was forked while a thread of the other one was adding inputs, which nobody ends here.
    fn claim(&self, py: Python<'_>) -> PyResult<()> {
        let generation = device::generation(py);
        if self.generation.load(Ordering::Relaxed) == generation {
            return Ok(());
        }
        if matches!(self.inner.try_lock(), Err(TryLockError::WouldBlock)) {
            let text =
                "Hessian: expected one that no thread was adding to when this process was forked, got one in use";
            return Err(PyRuntimeError::new_err(text));
        }
        self.generation.store(generation, Ordering::Relaxed);
        Ok(())
    }
}

/// How a weight is rounded.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Where the range of a group lies.
    pub rtn: Rtn,
}

impl Rounding {
    /// Of a layer that is rounded to a format, or not. Errors: those of [`Rounding::new`]; options although nothing is rounded.
    pub fn of_layer(op: &str, search: bool, symmetric: &str, format: Option<WeightFormat>) -> PyResult<Self> {
        if let Some(format) = format {
            return Self::new(op, search, symmetric, format);
        }
        if search || scale_of(op, symmetric)? != SymmetricScale::Narrow {
            return invalid(op, "search and symmetric with floats and a format to round them to", "them without");
        }
        Ok(Self { rtn: Rtn::default() })
    }

    /// Errors: a name that is not one of them; a range for symmetric codes in a format whose codes are not.
    pub fn new(op: &str, search: bool, symmetric: &str, format: WeightFormat) -> PyResult<Self> {
        let symmetric = scale_of(op, symmetric)?;
        if symmetric == SymmetricScale::Full && format.zero != Zero::Symmetric {
            let expected = "symmetric=\"full\" with codes that have no zero points and no offsets";
            return invalid(op, expected, format_args!("it with {}", format.zero));
        }
        Ok(Self { rtn: Rtn { symmetric, search } })
    }
}

/// The range of symmetric codes by its name. Error: a name that is not one of them.
fn scale_of(op: &str, name: &str) -> PyResult<SymmetricScale> {
    match name {
        "narrow" => Ok(SymmetricScale::Narrow),
        "full" => Ok(SymmetricScale::Full),
        other => invalid(op, "symmetric to be \"narrow\" or \"full\"", format_args!("{other:?}")),
    }
}

/// What GPTQ adds to the diagonal, as a part of its mean, if it is not said.
const DAMPING: f64 = 0.01;

/// Quantises a weight matrix `[n, k]`.
///
/// method "rtn" rounds to nearest; "gptq" and "awq" take what they know of inputs from `hessian` or `inputs` ([..., k]). AWQ scales
/// the weight's columns: the result has `input_scales`, by which its inputs must be divided. damping (gptq): a part of the mean diagonal
/// that is added to it, 0.01 if it is not said.
#[pyfunction]
#[pyo3(signature = (weight, format, *, method="rtn", hessian=None, inputs=None, search=false, symmetric="narrow",
                    act_order=false, static_groups=false, damping=None))]
#[expect(clippy::too_many_arguments, reason = "Python's options have names")]
pub fn quantize(
    py: Python<'_>,
    weight: &Bound<'_, PyAny>,
    format: &str,
    method: &str,
    hessian: Option<&Bound<'_, Hessian>>,
    inputs: Option<&Bound<'_, PyAny>>,
    #[pyo3(from_py_with = number::search)] search: bool,
    symmetric: &str,
    #[pyo3(from_py_with = number::act_order)] act_order: bool,
    #[pyo3(from_py_with = number::static_groups)] static_groups: bool,
    #[pyo3(from_py_with = number::damping)] damping: Option<f64>,
) -> Result<QuantizedTensor> {
    const OP: &str = "quantize";
    let Format { weight: format, act } = format.parse()?;
    let weight = Input::of(weight, OP)?;
    let shape = matrix(OP, "a weight", &weight)?;
    let rtn_options = Rounding::new(OP, search, symmetric, format)?.rtn;
    let own;
    let hessian = match (method, hessian, inputs) {
        ("rtn", None, None) => None,
        ("rtn", ..) => return Ok(invalid(OP, "hessian or inputs with gptq or awq", "them with rtn")?),
        ("gptq" | "awq", Some(hessian), None) => {
            hessian.get().claim(py)?;
            Some(hessian.get())
        }
        ("gptq" | "awq", None, Some(inputs)) => {
            own = Hessian::new(py, shape[1])?;
            own.add(py, inputs)?;
            Some(&own)
        }
        ("gptq" | "awq", ..) => {
            return Ok(invalid(OP, format_args!("either hessian or inputs with {method}"), "none, or both")?);
        }
        (other, ..) => return Ok(invalid(OP, "method to be \"rtn\", \"gptq\" or \"awq\"", format_args!("{other:?}"))?),
    };
    if method != "gptq" && (act_order || static_groups || damping.is_some()) {
        return Ok(invalid(OP, "act_order, static_groups and damping with gptq", format_args!("one with {method}"))?);
    }
    if method == "awq" && search {
        return Ok(invalid(OP, "search with rtn or gptq", "it with awq, which always searches")?);
    }
    let damping = damping.unwrap_or(DAMPING);
    // Of a GPU a copy, else where it lies.
    let copied;
    let floats = match weight.place() {
        crate::tensor::Place::Cpu => weight.floats(OP)?,
        crate::tensor::Place::Cuda(_) => {
            copied = weight.to_f32(OP)?;
            Floats::from(&copied)
        }
    };
    let options = Gptq { damping, act_order, static_groups, symmetric: rtn_options.symmetric, search };
    let (tensor, input_scales) = match hessian {
        None => (device::compute(py, || rtn(floats, shape, format, rtn_options))?, None),
        Some(hessian) => device::compute_holding(py, &hessian.inner, |hessian| match method {
            "gptq" => Ok((gptq(floats, shape, format, hessian, options)?.weights, None)),
            _ => awq(floats, shape, format, hessian, rtn_options.symmetric).map(|(q, scales)| (q, Some(scales))),
        })?,
    };
    Ok(QuantizedTensor { tensor: Arc::new(tensor), act, input_scales })
}

/// AWQ of one matrix: its columns times scales, rounded with clipped ranges.
fn awq(
    w: Floats<'_>,
    [n, k]: [usize; 2],
    format: WeightFormat,
    hessian: &library::Hessian,
    symmetric: SymmetricScale,
) -> halfbyte::Result<(QTensor, Vec<f32>)> {
    let scales = awq_scales(&[(w, n)], k, format, hessian, symmetric)?.scales;
    let mut scaled = w.to_f32();
    for row in scaled.chunks_mut(k.max(1)) {
        row.iter_mut().zip(&scales).for_each(|(v, scale)| *v *= scale);
    }
    // Inputs become x / s.
    let factors: Vec<f32> = scales.iter().map(|scale| 1.0 / scale).collect();
    let hessian = hessian.clone().scaled(&factors)?;
    let calibrated = rtn_clipped(Floats::from(&scaled), [n, k], format, &hessian, symmetric)?;
    Ok((calibrated.weights, scales))
}

/// The sizes of a matrix. Error: another number of dimensions.
pub fn matrix(op: &str, what: &str, tensor: &Input<'_>) -> PyResult<[usize; 2]> {
    match **tensor.shape() {
        [n, k] => Ok([n, k]),
        _ => invalid(op, format_args!("{what} of two dimensions [n, k]"), format_args!("shape {}", tensor.shape())),
    }
}
