//! `Linear`: a weight packed for a device, and calls of it.

use crate::device::{self, On, forward, of_layer, place_of};
use crate::error::{Failure, Result, invalid};
use crate::number;
use crate::quantize::{QuantizedTensor, Rounding, matrix};
use crate::tensor::{
    DataType, Input, Output, Place, Shape, Tensor, copied, float_of, numpy_array, rows_of, same_place, wrong_type,
    zeroed,
};
use halfbyte::cpu::matmul::Packed;
use halfbyte::cuda::matmul::dequantize;
use halfbyte::quantize::rtn;
use halfbyte::{Act, Activation, Cpu, Cuda, Float, Floats, Format, QTensor, Weight};
use pyo3::prelude::*;
use rayon::prelude::*;
use std::num::NonZeroU32;
use std::sync::Arc;

const OP: &str = "linear";

/// Multiplications that take a microsecond or two at most.
const BRIEF: usize = 1 << 14;

type Layer = On<halfbyte::Linear<Cpu>, halfbyte::Linear<Cuda>>;

/// `y = activation(x · Wᵀ + bias)`, with W packed once for a device.
///
/// Calls take tensors of torch, numpy, cupy, jax and paddle that lie on that device, and return one of the same library and type, in
/// the stream that the library works in. The same layer may be called from many threads.
#[pyclass(frozen, weakref, module = "halfbyte")]
#[derive(Debug)]
pub struct Linear {
    layer: Layer,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

/// A weight before it is packed.
enum Given {
    Quantized(Arc<QTensor>, Act),
    Dense(Input32, [usize; 2]),
}

/// Floats that are ours, of the type that they came in.
pub enum Input32 {
    /// As they were.
    F16(Vec<half::f16>),
    /// As they were.
    BF16(Vec<half::bf16>),
    /// As they were.
    F32(Vec<f32>),
}

impl Input32 {
    /// A copy of a tensor's floats in memory of the host.
    pub fn of(tensor: &Input<'_>, what: &str) -> PyResult<Self> {
        if tensor.place() == Place::Cpu {
            return Ok(match tensor.floats(what)? {
                Floats::F16(v) => Self::F16(copied(v)?),
                Floats::BF16(v) => Self::BF16(copied(v)?),
                Floats::F32(v) => Self::F32(copied(v)?),
            });
        }
        let float = tensor.float(what)?;
        let bytes = tensor.to_bytes()?;
        Ok(match float {
            Float::F16 => Self::F16(bytemuck::pod_collect_to_vec(&bytes)),
            Float::BF16 => Self::BF16(bytemuck::pod_collect_to_vec(&bytes)),
            Float::F32 => Self::F32(bytemuck::pod_collect_to_vec(&bytes)),
        })
    }

    /// The floats.
    pub fn floats(&self) -> Floats<'_> {
        match self {
            Self::F16(v) => v.into(),
            Self::BF16(v) => v.into(),
            Self::F32(v) => v.into(),
        }
    }
}

/// An activation function by its name.
pub fn activation_of(name: Option<&str>) -> PyResult<Activation> {
    Ok(match name {
        None | Some("none") => Activation::None,
        Some("relu") => Activation::Relu,
        Some("relu6") => Activation::Relu6,
        Some("gelu") => Activation::Gelu,
        Some("gelu_tanh") => Activation::GeluTanh,
        Some("silu") => Activation::Silu,
        Some(other) => {
            let names = "none, relu, relu6, gelu, gelu_tanh or silu";
            return invalid("activation", names, format_args!("\"{other}\""));
        }
    })
}

fn name_of(activation: Activation) -> &'static str {
    match activation {
        Activation::None => "none",
        Activation::Relu => "relu",
        Activation::Relu6 => "relu6",
        Activation::Clamp(..) => "clamp",
        Activation::Gelu => "gelu",
        Activation::GeluTanh => "gelu_tanh",
        Activation::Silu => "silu",
    }
}

/// A bias as f32. Error: another shape than `[n]`.
pub fn bias_of(op: &str, bias: Option<&Bound<'_, PyAny>>, n: usize) -> PyResult<Option<Vec<f32>>> {
    let Some(bias) = bias.filter(|bias| !bias.is_none()) else { return Ok(None) };
    let bias = Input::of(bias, "bias")?;
    if **bias.shape() != [n] {
        return invalid(op, format_args!("a bias of shape ({n},)"), format_args!("shape {}", bias.shape()));
    }
    bias.to_f32("bias").map(Some)
}

/// The type of activations by its name.
fn float_named(name: &str) -> PyResult<Float> {
    match name.trim_start_matches("torch.") {
        "float16" | "f16" | "half" => Ok(Float::F16),
        "bfloat16" | "bf16" => Ok(Float::BF16),
        "float32" | "f32" | "float" => Ok(Float::F32),
        other => invalid("dtype", "float16, bfloat16 or float32", format_args!("\"{other}\"")),
    }
}

impl Linear {
    fn packed(
        py: Python<'_>,
        given: &Given,
        bias: Option<Vec<f32>>,
        activation: Activation,
        place: Place,
    ) -> Result<Self> {
        let weight = match given {
            Given::Quantized(tensor, act) => Weight::Quantized(tensor, *act),
            Given::Dense(floats, shape) => Weight::Dense(floats.floats(), *shape),
        };
        Self::of_weight(py, weight, bias, activation, place)
    }

    /// Packs a weight for a device.
    pub fn of_weight(
        py: Python<'_>,
        weight: Weight<'_>,
        bias: Option<Vec<f32>>,
        activation: Activation,
        place: Place,
    ) -> Result<Self> {
        fn finished<D: halfbyte::Device>(
            linear: halfbyte::Linear<D>,
            bias: Option<&Vec<f32>>,
            activation: Activation,
        ) -> halfbyte::Result<halfbyte::Linear<D>> {
            let linear = match bias {
                Some(bias) => linear.with_bias(bias.clone())?,
                None => linear,
            };
            Ok(linear.with_activation(activation))
        }
        let layer = device::pack(
            py,
            place,
            |cpu| finished(halfbyte::Linear::on(cpu, weight)?, bias.as_ref(), activation),
            |queue| finished(halfbyte::Linear::on(queue, weight)?, bias.as_ref(), activation),
        )?;
        Ok(Self { layer, bias, activation })
    }

    fn sizes(&self) -> [usize; 2] {
        of_layer!(&self.layer, linear => [linear.n(), linear.k()])
    }

    fn weight_format(&self) -> Option<Format> {
        of_layer!(&self.layer, linear => linear.format())
    }
}

#[pymethods]
impl Linear {
    /// weight: a QuantizedTensor, or floats `[n, k]`, which are rounded to nearest if `format` says to what, and else multiplied as
    /// they are. device: "cpu", "cuda" or "cuda:N"; as a rule where the weight lies.
    #[new]
    #[pyo3(signature = (weight, bias=None, format=None, *, activation=None, device=None, search=false, symmetric="narrow"))]
    #[expect(clippy::too_many_arguments, reason = "Python's options have names")]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        format: Option<&str>,
        activation: Option<&str>,
        device: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::search)] search: bool,
        symmetric: &str,
    ) -> Result<Self> {
        let activation = activation_of(activation)?;
        let format: Option<Format> = format.map(str::parse).transpose()?;
        let rounded = format.filter(|_| !weight.is_instance_of::<QuantizedTensor>()).map(|format| format.weight);
        let rounding = Rounding::of_layer(OP, search, symmetric, rounded)?.rtn;
        let (given, place, n) = if let Ok(quantized) = weight.cast::<QuantizedTensor>() {
            let (tensor, act) = quantized.get().folded_weight()?;
            let act = match format {
                None => act,
                Some(wanted) => {
                    if wanted.weight != tensor.format() {
                        let got = quantized.get().format();
                        return Ok(invalid(OP, format_args!("a weight of {wanted}"), format_args!("one of {got}"))?);
                    }
                    wanted.act
                }
            };
            (Given::Quantized(tensor.clone(), act), Place::Cpu, tensor.n())
        } else {
            let tensor = Input::of(weight, "weight")?;
            let shape = matrix(OP, "a weight", &tensor)?;
            let floats = Input32::of(&tensor, "weight")?;
            let given = match format {
                None => Given::Dense(floats, shape),
                Some(Format { weight, act }) => {
                    let quantized = device::compute(py, || rtn(floats.floats(), shape, weight, rounding))?;
                    Given::Quantized(Arc::new(quantized), act)
                }
            };
            (given, tensor.place(), shape[0])
        };
        let place = device.filter(|device| !device.is_none()).map_or(Ok(place), place_of)?;
        Self::packed(py, &given, bias_of(OP, bias, n)?, activation, place)
    }

    /// Multiplies x `[..., k]` to `[..., n]` of x's type. out: a tensor to write, instead of a new one.
    #[pyo3(signature = (x, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let x = Input::of(x, "x")?;
        let [n, k] = self.sizes();
        let m = rows_of(OP, &x, k)?;
        if float_of(x.dtype()).is_none() {
            return Err(wrong_type(OP, "an x of float16, bfloat16 or float32", x.dtype()));
        }
        same_place(OP, &x, self.layer.place(), "the weight lies")?;
        let mut y = Output::new(OP, out, &x, x.shape().with_last(n)?, x.dtype())?;
        let brief = m.saturating_mul(n).saturating_mul(k) <= BRIEF;
        forward!(py, &self.layer, x, brief brief, forward(m),
            cpu x.floats("x")? => y.floats_mut()?, gpu x.float_view("x")? => y.float_view_mut()?);
        y.finish(py)
    }

    /// Nanoseconds that a call with these tensors takes from Rust, of so many: what calls from Python are compared with. On a GPU the
    /// host's time, in the stream that x's library works in, until the last one is put there.
    fn _time(&self, py: Python<'_>, x: &Bound<'_, PyAny>, out: &Bound<'_, PyAny>, calls: NonZeroU32) -> PyResult<f64> {
        let (x, [n, k]) = (Input::of(x, "x")?, self.sizes());
        let m = rows_of(OP, &x, k)?;
        same_place(OP, &x, self.layer.place(), "the weight lies")?;
        let mut y = Output::new(OP, Some(out), &x, x.shape().with_last(n)?, x.dtype())?;
        let begun = std::time::Instant::now();
        match &self.layer {
            Layer::Cpu(linear) => {
                let cpu = device::cpu(py)?;
                for _ in 0..calls.get() {
                    linear.forward(&*cpu, x.floats("x")?, m, y.floats_mut()?).map_err(Failure::from)?;
                }
            }
            Layer::Cuda(index, linear) => {
                let queue = device::queue(py, *index, x.stream())?;
                for _ in 0..calls.get() {
                    linear.forward(&queue, x.float_view("x")?, m, y.float_view_mut()?).map_err(Failure::from)?;
                }
            }
        }
        Ok(begun.elapsed().as_nanos() as f64 / f64::from(calls.get()))
    }

    /// Outputs.
    #[getter]
    fn out_features(&self) -> usize {
        self.sizes()[0]
    }

    /// Inputs.
    #[getter]
    fn in_features(&self) -> usize {
        self.sizes()[1]
    }

    /// Format of the weight, as `w4a16-g128`; None if it is dense.
    #[getter]
    fn format(&self) -> Option<String> {
        self.weight_format().map(|format| format.to_string())
    }

    /// Whether something is added to each row.
    #[getter]
    fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    /// The activation function that is applied last, by its name.
    #[getter]
    fn activation(&self) -> &'static str {
        name_of(self.activation)
    }

    /// What is added to each row, `[n]` as a numpy array of float32; None if nothing is.
    #[getter]
    fn bias<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        self.bias.as_ref().map(|bias| numpy_array(py, bias, &[bias.len()], DataType::F32)).transpose()
    }

    /// Rows `start..stop` of W as float32: a numpy array `[rows, k]`; where the weight lies on a GPU a halfbyte.Tensor there,
    /// `[rows, k rounded up to a multiple of 8]`, for which start must be a multiple of 64.
    #[pyo3(signature = (start=0, stop=None))]
    fn dequantize<'py>(
        &self,
        py: Python<'py>,
        #[pyo3(from_py_with = number::start)] start: usize,
        #[pyo3(from_py_with = number::stop)] stop: Option<usize>,
    ) -> Result<Bound<'py, PyAny>> {
        let [n, k] = self.sizes();
        let stop = stop.unwrap_or(n);
        if start > stop || stop > n {
            return Ok(invalid("dequantize", format_args!("rows within 0..{n}"), format_args!("{start}..{stop}"))?);
        }
        let rows = stop - start;
        match &self.layer {
            Layer::Cpu(linear) => {
                let values = device::compute(py, || {
                    let mut values = zeroed::<f32>(rows * k)?;
                    let row = |(i, out): (usize, &mut [f32])| linear.packed().row(start + i, out);
                    values.par_chunks_mut(k.max(1)).enumerate().for_each(row);
                    Ok::<_, halfbyte::Error>(values)
                })?;
                Ok(numpy_array(py, &values, &[rows, k], DataType::F32)?)
            }
            Layer::Cuda(index, linear) => {
                let Some(packed) = linear.packed() else {
                    return Ok(invalid("dequantize", "a quantised weight on a GPU", "a dense one")?);
                };
                let queue = device::own_queue(py, *index)?;
                let shape = [rows, k.next_multiple_of(8)];
                let mut values = queue.allocate(Float::F32, shape[0] * shape[1])?;
                let (gpu, stream) = (queue.gpu(), queue.stream());
                let all = 0..values.len();
                dequantize::run(gpu, stream, packed, start..stop, &mut values.view_mut(all))?;
                Ok(Bound::new(py, Tensor::of_floats(Shape::new(&shape)?, values, queue))?.into_any())
            }
        }
    }

    /// The same layer packed for another device; itself where it lies there already. *Error:* it lies on a GPU: what its codes were
    /// is not kept.
    fn to(slf: &Bound<'_, Self>, device: &Bound<'_, PyAny>) -> Result<Py<Self>> {
        let (py, this, place) = (slf.py(), slf.get(), place_of(device)?);
        if place == this.layer.place() {
            return Ok(slf.clone().unbind());
        }
        let Layer::Cpu(linear) = &this.layer else {
            let expected = format_args!("a layer on the CPU, or made for {place} from its weight");
            return Ok(invalid("to", expected, format_args!("one packed for {}", this.layer.place()))?);
        };
        let moved = match linear.packed() {
            Packed::Quantized(packed, act) => {
                let tensor = device::compute(py, || packed.unpack());
                Self::of_weight(py, Weight::Quantized(&tensor, *act), this.bias.clone(), this.activation, place)?
            }
            Packed::Dense(packed) => {
                let (values, shape) = (packed.unpack(), [packed.n(), packed.k()]);
                Self::of_weight(
                    py,
                    Weight::Dense(Floats::from(&values), shape),
                    this.bias.clone(),
                    this.activation,
                    place,
                )?
            }
        };
        Ok(Py::new(py, moved)?)
    }

    /// Bytes that the packed weight takes.
    #[getter]
    fn nbytes(&self) -> usize {
        of_layer!(&self.layer, linear => linear.bytes())
    }

    /// Where the weight lies: `cpu` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.layer.place().to_string()
    }

    /// Name of the kernel that multiplies m rows of a type.
    #[pyo3(signature = (m, dtype="float16"))]
    fn kernel(&self, py: Python<'_>, #[pyo3(from_py_with = number::m)] m: usize, dtype: &str) -> Result<&'static str> {
        let float = float_named(dtype)?;
        match &self.layer {
            Layer::Cpu(linear) => Ok(linear.kernel(&*device::cpu(py)?, m, float, float)?),
            Layer::Cuda(index, linear) => Ok(linear.kernel(&device::own_queue(py, *index)?, m, float, float)?),
        }
    }

    /// How far an element of y may lie from the exact product where `|x|·|W|ᵀ` is `magnitude`, for m rows of a type. With a format of
    /// a8 the product and its magnitude are those of x as it is quantised, whose own error comes on top. *Error:* ValueError: a magnitude
    /// below 0.
    #[pyo3(signature = (magnitude, m=1, dtype="float16"))]
    fn bound(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = number::magnitude)] magnitude: f64,
        #[pyo3(from_py_with = number::m)] m: usize,
        dtype: &str,
    ) -> Result<f64> {
        let float = float_named(dtype)?;
        if magnitude.is_nan() || magnitude < 0.0 {
            return Ok(invalid("bound", "a magnitude of 0 or more", magnitude)?);
        }
        let bound = match &self.layer {
            Layer::Cpu(linear) => linear.bound(&*device::cpu(py)?, m, float, float)?,
            Layer::Cuda(index, linear) => linear.bound(&device::own_queue(py, *index)?, m, float, float)?,
        };
        Ok(bound.allowed(magnitude))
    }

    fn __repr__(&self) -> String {
        let [n, k] = self.sizes();
        let format = self.format().unwrap_or_else(|| "dense".to_owned());
        format!("Linear(in_features={k}, out_features={n}, format={format}, device={})", self.layer.place())
    }

    /// Weights are constants: a copy is the same layer.
    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}
