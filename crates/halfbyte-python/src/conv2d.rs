//! `Conv2d`: a convolution's weight packed for a device, and calls of it.

use crate::device::{self, On, forward, of_layer, place_of};
use crate::error::{Failure, Result, invalid};
use crate::linear::{Input32, activation_of, bias_of};
use crate::number::{self, either, refuse_truth_values};
use crate::quantize::Rounding;
use crate::tensor::{Input, Output, Shape, float_of, same_place, wrong_type};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::quantize::rtn_conv2d;
use halfbyte::{Activation, Cpu, Cuda, Device, Format, QTensor, Weight};
use pyo3::prelude::*;

const OP: &str = "conv2d";

type Layer = On<halfbyte::Conv2d<Cpu>, halfbyte::Conv2d<Cuda>>;

/// `y = activation(x ∗ W + bias)` of images `[batch, channels, h, w]`, or `[batch, h, w, channels]` with layout="nhwc".
#[pyclass(frozen, module = "halfbyte")]
#[derive(Debug)]
pub struct Conv2d {
    layer: Layer,
    geometry: Geometry,
    layout: Layout2d,
}

/// One number for both axes, or two.
pub enum Pair {
    /// For both.
    One(usize),
    /// Down and across.
    Two([usize; 2]),
    /// Above, left, below and right (padding alone).
    Four([usize; 4]),
}

impl<'py> FromPyObject<'_, 'py> for Pair {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        refuse_truth_values(&value, "whole numbers")?;
        let one = value.extract().map(Self::One);
        match value.len() {
            Ok(4) => either(value.py(), one, || value.extract().map(Self::Four)),
            Ok(_) => either(value.py(), one, || value.extract().map(Self::Two)),
            Err(_) => one,
        }
    }
}

impl Pair {
    fn two(&self, what: &str) -> PyResult<[usize; 2]> {
        match *self {
            Pair::One(size) => Ok([size; 2]),
            Pair::Two(sizes) => Ok(sizes),
            Pair::Four(_) => invalid(OP, format_args!("{what} of one or two numbers"), "four"),
        }
    }

    fn four(&self) -> [usize; 4] {
        match *self {
            Pair::One(size) => [size; 4],
            Pair::Two([down, across]) => [down, across, down, across],
            Pair::Four(sizes) => sizes,
        }
    }
}

/// What a weight `[co, ci / groups, kh, kw]` and the options fix.
pub fn geometry(
    op: &str,
    weight: &Input<'_>,
    [stride, padding, dilation]: [&Pair; 3],
    groups: usize,
) -> PyResult<Geometry> {
    let [co, channels, kh, kw] = **weight.shape() else {
        let expected = "a weight of four dimensions [co, ci / groups, kh, kw]";
        return invalid(op, expected, format_args!("shape {}", weight.shape()));
    };
    let ci = channels.saturating_mul(groups);
    let (stride, padding, dilation) = (stride.two("a stride")?, padding.four(), dilation.two("a dilation")?);
    let geometry = Geometry { ci, co, kernel: [kh, kw], stride, padding, dilation, groups };
    geometry.validate().map_err(Failure::from)?;
    Ok(geometry)
}

/// The order of the elements of images by its name.
pub fn layout_of(name: &str) -> PyResult<Layout2d> {
    match name {
        "nchw" => Ok(Layout2d::Nchw),
        "nhwc" => Ok(Layout2d::Nhwc),
        other => invalid("layout", "\"nchw\" or \"nhwc\"", format_args!("{other:?}")),
    }
}

/// Batch, size and the shape of y of images. Error: another number of dimensions or of channels, images smaller than the kernel.
pub fn images(op: &str, x: &Input<'_>, geometry: &Geometry, layout: Layout2d) -> PyResult<(usize, [usize; 2], Shape)> {
    let Geometry { ci, co, .. } = *geometry;
    let expected = match layout {
        Layout2d::Nchw => format!("an x of shape (batch, {ci}, h, w)"),
        Layout2d::Nhwc => format!("an x of shape (batch, h, w, {ci})"),
    };
    let refuse = || invalid(op, &expected, format_args!("shape {}", x.shape()));
    let [batch, a, b, c] = **x.shape() else { return refuse() };
    let (channels, size) = match layout {
        Layout2d::Nchw => (a, [b, c]),
        Layout2d::Nhwc => (c, [a, b]),
    };
    if channels != ci {
        return refuse();
    }
    let [oh, ow] = Conv2dShape::new(*geometry, batch, size).map_err(Failure::from)?.output();
    let y = match layout {
        Layout2d::Nchw => [batch, co, oh, ow],
        Layout2d::Nhwc => [batch, oh, ow, co],
    };
    Ok((batch, size, Shape::new(&y)?))
}

/// A weight before it is packed: rows `[co, k]`.
enum Given {
    Quantized(QTensor, Format),
    Dense(Input32),
}

impl Given {
    fn weight(&self, geometry: &Geometry) -> Weight<'_> {
        match self {
            Self::Quantized(tensor, format) => Weight::Quantized(tensor, format.act),
            Self::Dense(floats) => Weight::Dense(floats.floats(), [geometry.co, geometry.k()]),
        }
    }
}

/// Floats in the order of rows.
fn rows_of(floats: &Input32, geometry: &Geometry) -> halfbyte::Result<Input32> {
    Ok(match floats {
        Input32::F16(v) => Input32::F16(geometry.weight_rows(v)?),
        Input32::BF16(v) => Input32::BF16(geometry.weight_rows(v)?),
        Input32::F32(v) => Input32::F32(geometry.weight_rows(v)?),
    })
}

#[pymethods]
impl Conv2d {
    /// weight: floats `[co, ci / groups, kh, kw]`, rounded to nearest if `format` says to what. padding: one number, (down, across),
    /// or (top, left, bottom, right).
    #[new]
    #[pyo3(signature = (weight, bias=None, format=None, *, stride=Pair::One(1), padding=Pair::One(0), dilation=Pair::One(1),
                        groups=1, activation=None, layout="nchw", device=None, search=false, symmetric="narrow"),
           text_signature = "(weight, bias=None, format=None, *, stride=1, padding=0, dilation=1, groups=1, activation=None, \
                             layout='nchw', device=None, search=False, symmetric='narrow')")]
    #[expect(clippy::too_many_arguments, reason = "Python's options have names")]
    fn new(
        py: Python<'_>,
        weight: &Bound<'_, PyAny>,
        bias: Option<&Bound<'_, PyAny>>,
        format: Option<&str>,
        #[pyo3(from_py_with = number::stride)] stride: Pair,
        #[pyo3(from_py_with = number::padding)] padding: Pair,
        #[pyo3(from_py_with = number::dilation)] dilation: Pair,
        #[pyo3(from_py_with = number::groups)] groups: usize,
        activation: Option<&str>,
        layout: &str,
        device: Option<&Bound<'_, PyAny>>,
        #[pyo3(from_py_with = number::search)] search: bool,
        symmetric: &str,
    ) -> Result<Self> {
        let (activation, layout) = (activation_of(activation)?, layout_of(layout)?);
        let weight = Input::of(weight, "weight")?;
        let geometry = geometry(OP, &weight, [&stride, &padding, &dilation], groups)?;
        let bias = bias_of(OP, bias, geometry.co)?;
        let place = device.filter(|device| !device.is_none()).map_or(Ok(weight.place()), place_of)?;
        let floats = Input32::of(&weight, "weight")?;
        let format: Option<Format> = format.map(str::parse).transpose()?;
        let rounding = Rounding::of_layer(OP, search, symmetric, format.map(|format| format.weight))?.rtn;
        let given = match format {
            None => Given::Dense(rows_of(&floats, &geometry)?),
            Some(format) => {
                let round = || rtn_conv2d(floats.floats(), &geometry, format.weight, rounding);
                Given::Quantized(device::compute(py, round)?, format)
            }
        };
        fn finished<D: Device>(
            layer: halfbyte::Conv2d<D>,
            bias: Option<&Vec<f32>>,
            activation: Activation,
            layout: Layout2d,
        ) -> halfbyte::Result<halfbyte::Conv2d<D>> {
            let layer = match bias {
                Some(bias) => layer.with_bias(bias.clone())?,
                None => layer,
            };
            Ok(layer.with_activation(activation).with_layouts(layout, layout))
        }
        let (weight, bias) = (given.weight(&geometry), bias.as_ref());
        let layer = device::pack(
            py,
            place,
            |cpu| finished(halfbyte::Conv2d::on(cpu, weight, geometry)?, bias, activation, layout),
            |queue| finished(halfbyte::Conv2d::on(queue, weight, geometry)?, bias, activation, layout),
        )?;
        Ok(Self { layer, geometry, layout })
    }

    /// Convolves images to images of x's type. out: a tensor to write, instead of a new one.
    #[pyo3(signature = (x, out=None))]
    fn __call__<'py>(
        &self,
        py: Python<'py>,
        x: &Bound<'py, PyAny>,
        out: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let x = Input::of(x, "x")?;
        let (batch, size, shape) = images(OP, &x, &self.geometry, self.layout)?;
        if float_of(x.dtype()).is_none() {
            return Err(wrong_type(OP, "an x of float16, bfloat16 or float32", x.dtype()));
        }
        same_place(OP, &x, self.layer.place(), "the weight lies")?;
        let mut y = Output::new(OP, out, &x, shape, x.dtype())?;
        forward!(py, &self.layer, x, brief false, forward(batch, size),
            cpu x.floats("x")? => y.floats_mut()?, gpu x.float_view("x")? => y.float_view_mut()?);
        y.finish(py)
    }

    /// Format of the weight, as `w4a16-g32`; None if it is dense.
    #[getter]
    fn format(&self) -> Option<String> {
        of_layer!(&self.layer, layer => layer.format()).map(|format| format.to_string())
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
        let format = self.format().unwrap_or_else(|| "dense".to_owned());
        format!("Conv2d({ci}, {co}, kernel_size=({kh}, {kw}), format={format}, device={})", self.device())
    }

    fn __copy__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __deepcopy__(slf: Py<Self>, _memo: &Bound<'_, PyAny>) -> Py<Self> {
        slf
    }
}
