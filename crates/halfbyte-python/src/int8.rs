//! `LinearInt8` and `Conv2dInt8`: bytes with a scale and a zero point in, bytes or floats out.

use crate::conv2d::{Pair, geometry, images, layout_of};
use crate::device::{self, On, forward, of_layer, place_of};
use crate::error::{Result, invalid};
use crate::linear::{activation_of, bias_of};
use crate::number::{self, either, refuse_truth_values};
use crate::quantize::matrix;
use crate::tensor::{DataType, Input, Output, Shape, rows_of, same_place, type_of_byte, wrong_type};
use halfbyte::conv::{Geometry, Layout2d};
use halfbyte::format::int8::{Affine, Byte, Bytes, Int8Weight};
use halfbyte::{Cpu, Cuda};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// One number for the tensor, or one for each output.
pub enum PerOutput<T> {
    /// For all.
    One(T),
    /// For each.
    Each(Vec<T>),
}

impl<'a, 'py, T: FromPyObjectOwned<'py>> FromPyObject<'a, 'py> for PerOutput<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        refuse_truth_values(&value, "numbers")?;
        let one = value.extract().map(Self::One).map_err(Into::into);
        either(value.py(), one, || value.extract().map(Self::Each))
    }
}

impl<T> PerOutput<T> {
    fn into_vec(self) -> Vec<T> {
        match self {
            Self::One(value) => vec![value],
            Self::Each(values) => values,
        }
    }
}

/// Scales of a weight.
pub struct Scales(Vec<f32>);

impl<'py> FromPyObject<'_, 'py> for Scales {
    type Error = PyErr;

    /// ValueError: one that is no 0, but would be in f32.
    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let scales = value.extract::<PerOutput<f64>>()?.into_vec();
        let narrow = |scale: f64| match scale as f32 {
            0.0 if scale != 0.0 => Err(PyValueError::new_err(format!("{scale} is 0 in float32"))),
            narrow => Ok(narrow),
        };
        scales.into_iter().map(narrow).collect::<PyResult<_>>().map(Self)
    }
}

/// What a tensor's bytes stand for, as Python says it.
struct Bytewise {
    scale: f32,
    zero: i32,
    dtype: String,
}

impl Bytewise {
    fn affine(&self) -> Result<Affine> {
        let byte = match self.dtype.as_str() {
            "uint8" => Byte::U8,
            "int8" => Byte::I8,
            other => return Ok(invalid("int8", "uint8 or int8", format_args!("{other:?}"))?),
        };
        Ok(Affine::new(byte, self.scale, self.zero)?)
    }
}

/// A weight in bytes with what belongs to it.
struct Given<'py> {
    codes: Input<'py>,
    shape: [usize; 2],
    scales: Vec<f32>,
    zeros: Vec<i32>,
    x: Affine,
    y: Option<Affine>,
}

impl Given<'_> {
    /// The codes in memory of the host, in the order of rows.
    fn codes(&self, rows: Option<&Geometry>) -> Result<(Vec<u8>, Byte)> {
        let byte = match self.codes.dtype() {
            DataType::U8 => Byte::U8,
            DataType::I8 => Byte::I8,
            other => return Err(wrong_type("int8", "a weight of uint8 or int8", other).into()),
        };
        let codes = self.codes.to_bytes()?;
        Ok((if let Some(geometry) = rows { geometry.weight_rows(&codes)? } else { codes }, byte))
    }
}

fn typed(codes: &[u8], byte: Byte) -> Bytes<'_> {
    match byte {
        Byte::U8 => Bytes::U8(codes),
        Byte::I8 => Bytes::I8(bytemuck::cast_slice(codes)),
    }
}

/// A bias of int32, in steps of the product of scales, or of floats.
enum Bias {
    None,
    Int(Vec<i32>),
    Float(Vec<f32>),
}

impl Bias {
    fn of(op: &str, bias: Option<&Bound<'_, PyAny>>, n: usize) -> PyResult<Self> {
        let Some(object) = bias.filter(|bias| !bias.is_none()) else { return Ok(Self::None) };
        let bias = Input::of(object, "bias")?;
        if bias.dtype() != DataType::I32 {
            return Ok(bias_of(op, Some(object), n)?.map_or(Self::None, Self::Float));
        }
        if **bias.shape() != [n] {
            return invalid(op, format_args!("a bias of shape ({n},)"), format_args!("shape {}", bias.shape()));
        }
        Ok(Self::Int(bytemuck::pod_collect_to_vec(&bias.to_bytes()?)))
    }
}

type LinearLayer = On<halfbyte::LinearInt8<Cpu>, halfbyte::LinearInt8<Cuda>>;
type ConvLayer = On<halfbyte::Conv2dInt8<Cpu>, halfbyte::Conv2dInt8<Cuda>>;

/// A layer of either kind on either device, with bias and activation.
macro_rules! finished {
    ($layer:expr, $bias:expr, $activation:expr) => {{
        let layer = match &$bias {
            Bias::None => $layer,
            Bias::Int(bias) => $layer.with_bias(bias.clone())?,
            Bias::Float(bias) => $layer.with_float_bias(bias.clone())?,
        };
        layer.with_activation($activation)?
    }};
}

/// The type of y: its bytes, or the floats that were asked for.
fn type_of_y(y: Option<Affine>, floats: &str) -> PyResult<DataType> {
    match (y, floats) {
        (Some(y), _) => Ok(type_of_byte(y.byte())),
        (None, "float32") => Ok(DataType::F32),
        (None, "float16") => Ok(DataType::F16),
        (None, "bfloat16") => Ok(DataType::BF16),
        (None, other) => invalid("int8", "outputs in float32, float16 or bfloat16", format_args!("{other:?}")),
    }
}

/// Bytes in memory of a GPU.
fn device_bytes<'a>(x: &'a Input<'_>) -> PyResult<halfbyte::cuda::AnyBytes<'a>> {
    match x.dtype() {
        DataType::U8 => Ok(x.view::<u8>().into()),
        DataType::I8 => Ok(x.view::<i8>().into()),
        other => Err(wrong_type("int8", "an x of uint8 or int8", other)),
    }
}

/// Bytes in memory of a GPU, to be written.
fn device_bytes_mut<'a>(y: &'a mut Output<'_>, byte: Byte) -> halfbyte::cuda::AnyBytesMut<'a> {
    match byte {
        Byte::U8 => y.view_mut::<u8>().into(),
        Byte::I8 => y.view_mut::<i8>().into(),
    }
}

/// Runs a layer of bytes: `$arguments` are what its `forward` takes between x and y.
macro_rules! forward_bytes {
    ($py:ident, $of:expr, $x:ident, ($($argument:expr),*), $y:ident) => {
        match $of.y {
            Some(affine) => forward!($py, &$of.layer, $x, brief false, forward($($argument),*),
                cpu $x.bytes("x")? => $y.bytes_mut()?,
                gpu device_bytes(&$x)? => device_bytes_mut(&mut $y, affine.byte())),
            None => forward!($py, &$of.layer, $x, brief false, forward_floats($($argument),*),
                cpu $x.bytes("x")? => $y.floats_mut()?, gpu device_bytes(&$x)? => $y.float_view_mut()?),
        }
    };
}

/// `y = activation(x · Wᵀ + bias)` of bytes: sums are exact, rounded once, to the bit as onnxruntime's QLinearMatMul.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct LinearInt8 {
    layer: LinearLayer,
    sizes: [usize; 2],
    x: Byte,
    /// None: outputs are floats.
    y: Option<Affine>,
    y_type: DataType,
}

#[pymethods]
impl LinearInt8 {
    /// weight: codes `[n, k]` of int8 or uint8 with a scale and zero point an output, or one of each. Inputs stand for
    /// `x_scale · (x − x_zero)`. With y_scale outputs are bytes, else floats of y_dtype.
    #[new]
    #[pyo3(signature = (weight, weight_scale, bias=None, *, x_scale, x_zero=0, x_dtype="uint8", weight_zero=None, y_scale=None,
                        y_zero=0, y_dtype=None, activation=None, device=None))]
    #[expect(clippy::too_many_arguments, reason = "Python's options have names")]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::weight_scale)] weight_scale: Scales,
        bias: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::x_scale)] x_scale: f32,
        #[pyo3(from_py_with = number::x_zero)] x_zero: i32,
        x_dtype: &str,
        #[pyo3(from_py_with = number::weight_zero)] weight_zero: Option<PerOutput<i32>>,
        #[pyo3(from_py_with = number::y_scale)] y_scale: Option<f32>,
        #[pyo3(from_py_with = number::y_zero)] y_zero: i32,
        y_dtype: Option<&str>,
        activation: Option<&str>,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        const OP: &str = "linear int8";
        let codes = Input::of(weight, "weight")?;
        let shape = matrix(OP, "a weight", &codes)?;
        let place = device.filter(|device| !device.is_none()).map_or(Ok(codes.place()), place_of)?;
        let given =
            given(codes, shape, weight_scale, weight_zero, (x_scale, x_zero, x_dtype), (y_scale, y_zero, y_dtype))?;
        let (codes, byte) = given.codes(None)?;
        let (bias, activation) = (Bias::of(OP, bias, shape[0])?, activation_of(activation)?);
        let w = Int8Weight::new(typed(&codes, byte), shape, &given.scales, &given.zeros)?;
        let (x, y) = (given.x, given.y);
        let layer = device::pack(
            py,
            place,
            |cpu| Ok(finished!(halfbyte::LinearInt8::on(cpu, &w, x, y)?, bias, activation)),
            |queue| Ok(finished!(halfbyte::LinearInt8::on(queue, &w, x, y)?, bias, activation)),
        )?;
        let y_type = type_of_y(given.y, y_dtype.unwrap_or("float32"))?;
        Ok(Self { layer, sizes: shape, x: given.x.byte(), y: given.y, y_type })
    }

    /// Multiplies x `[..., k]` of bytes to `[..., n]`.
    #[pyo3(signature = (x, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        const OP: &str = "linear int8";
        let x = Input::of(x, "x")?;
        let [n, k] = self.sizes;
        let m = rows_of(OP, &x, k)?;
        if x.dtype() != type_of_byte(self.x) {
            return Err(wrong_type(OP, &format!("an x of {}", type_of_byte(self.x)), x.dtype()));
        }
        same_place(OP, &x, self.layer.place(), "the weight lies")?;
        let mut y = Output::new(OP, out, &x, x.shape().with_last(n)?, self.y_type)?;
        forward_bytes!(py, self, x, (m), y);
        y.finish(py)
    }

    /// Bytes that the packed weight takes.
    #[getter]
    fn nbytes(&self) -> usize {
        of_layer!(&self.layer, layer => layer.bytes())
    }

    /// Where the weight lies: `cpu` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.layer.place().to_string()
    }

    fn __repr__(&self) -> String {
        let [n, k] = self.sizes;
        format!("LinearInt8(in_features={k}, out_features={n}, out={}, device={})", self.y_type, self.device())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}

/// What belongs to a weight, put together.
fn given<'py>(
    codes: Input<'py>,
    shape: [usize; 2],
    Scales(scales): Scales,
    zeros: Option<PerOutput<i32>>,
    (x_scale, x_zero, x_dtype): (f32, i32, &str),
    (y_scale, y_zero, y_dtype): (Option<f32>, i32, Option<&str>),
) -> Result<Given<'py>> {
    let x = Bytewise { scale: x_scale, zero: x_zero, dtype: x_dtype.to_owned() }.affine()?;
    let y = match y_scale {
        None if y_zero != 0 => return Ok(invalid("int8", "y_zero with a y_scale", "it alone")?),
        None => None,
        Some(scale) => {
            let dtype = y_dtype.unwrap_or("uint8").to_owned();
            Some(Bytewise { scale, zero: y_zero, dtype }.affine()?)
        }
    };
    let zeros = zeros.map(PerOutput::into_vec).unwrap_or_default();
    Ok(Given { codes, shape, scales, zeros, x, y })
}

/// `y = activation(x ∗ W + bias)` of bytes: sums are exact, rounded once, to the bit as onnxruntime's QLinearConv.
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Conv2dInt8 {
    layer: ConvLayer,
    geometry: Geometry,
    layout: Layout2d,
    x: Byte,
    /// None: outputs are floats.
    y: Option<Affine>,
    y_type: DataType,
}

#[pymethods]
impl Conv2dInt8 {
    /// weight: codes `[co, ci / groups, kh, kw]`; else as LinearInt8 and Conv2d.
    #[new]
    #[pyo3(signature = (weight, weight_scale, bias=None, *, x_scale, x_zero=0, x_dtype="uint8", weight_zero=None, y_scale=None,
                        y_zero=0, y_dtype=None, stride=Pair::One(1), padding=Pair::One(0), dilation=Pair::One(1), groups=1,
                        activation=None, layout="nchw", device=None),
           text_signature = "(weight, weight_scale, bias=None, *, x_scale, x_zero=0, x_dtype='uint8', weight_zero=None, y_scale=None, \
                             y_zero=0, y_dtype=None, stride=1, padding=0, dilation=1, groups=1, activation=None, layout='nchw', \
                             device=None)")]
    #[expect(clippy::too_many_arguments, reason = "Python's options have names")]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = number::weight_scale)] weight_scale: Scales,
        bias: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::x_scale)] x_scale: f32,
        #[pyo3(from_py_with = number::x_zero)] x_zero: i32,
        x_dtype: &str,
        #[pyo3(from_py_with = number::weight_zero)] weight_zero: Option<PerOutput<i32>>,
        #[pyo3(from_py_with = number::y_scale)] y_scale: Option<f32>,
        #[pyo3(from_py_with = number::y_zero)] y_zero: i32,
        y_dtype: Option<&str>,
        #[pyo3(from_py_with = number::stride)] stride: Pair,
        #[pyo3(from_py_with = number::padding)] padding: Pair,
        #[pyo3(from_py_with = number::dilation)] dilation: Pair,
        #[pyo3(from_py_with = number::groups)] groups: usize,
        activation: Option<&str>,
        layout: &str,
        device: Option<&Bound<'_, PyAny>>,
    ) -> Result<Self> {
        const OP: &str = "conv2d int8";
        let codes = Input::of(weight, "weight")?;
        let geometry = geometry(OP, &codes, [&stride, &padding, &dilation], groups)?;
        let (activation, layout) = (activation_of(activation)?, layout_of(layout)?);
        let place = device.filter(|device| !device.is_none()).map_or(Ok(codes.place()), place_of)?;
        let shape = [geometry.co, geometry.k()];
        let given =
            given(codes, shape, weight_scale, weight_zero, (x_scale, x_zero, x_dtype), (y_scale, y_zero, y_dtype))?;
        let (codes, byte) = given.codes(Some(&geometry))?;
        let bias = Bias::of(OP, bias, geometry.co)?;
        let w = Int8Weight::new(typed(&codes, byte), given.shape, &given.scales, &given.zeros)?;
        let (x, y) = (given.x, given.y);
        let layer = device::pack(
            py,
            place,
            |cpu| {
                let layer = halfbyte::Conv2dInt8::on(cpu, &w, geometry, x, y)?;
                Ok(finished!(layer, bias, activation).with_layouts(layout, layout))
            },
            |queue| {
                let layer = halfbyte::Conv2dInt8::on(queue, &w, geometry, x, y)?;
                Ok(finished!(layer, bias, activation).with_layouts(layout, layout))
            },
        )?;
        let y_type = type_of_y(given.y, y_dtype.unwrap_or("float32"))?;
        Ok(Self { layer, geometry, layout, x: given.x.byte(), y: given.y, y_type })
    }

    /// Convolves images of bytes.
    #[pyo3(signature = (x, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        const OP: &str = "conv2d int8";
        let x = Input::of(x, "x")?;
        let (batch, size, shape): (usize, [usize; 2], Shape) = images(OP, &x, &self.geometry, self.layout)?;
        if x.dtype() != type_of_byte(self.x) {
            return Err(wrong_type(OP, &format!("an x of {}", type_of_byte(self.x)), x.dtype()));
        }
        same_place(OP, &x, self.layer.place(), "the weight lies")?;
        let mut y = Output::new(OP, out, &x, shape, self.y_type)?;
        forward_bytes!(py, self, x, (batch, size), y);
        y.finish(py)
    }

    /// Bytes that the packed weight takes.
    #[getter]
    fn nbytes(&self) -> usize {
        of_layer!(&self.layer, layer => layer.bytes())
    }

    /// Where the weight lies: `cpu` or `cuda:N`.
    #[getter]
    fn device(&self) -> String {
        self.layer.place().to_string()
    }

    fn __repr__(&self) -> String {
        let Geometry { ci, co, kernel: [kh, kw], .. } = self.geometry;
        format!("Conv2dInt8({ci}, {co}, kernel_size=({kh}, {kw}), out={}, device={})", self.y_type, self.device())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}
