//! Convolutions' layers.

use crate::device::{Device, On, halfbyte_device, index, other_device};
use crate::handle::{Out, given};
use crate::linear::{activation, bias};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::tensor::{DLTensor, Tensor};
use crate::weight::halfbyte_weight;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::{Conv2d, Cpu, Cuda};
use std::mem::MaybeUninit;

/// What a convolution's layer fixes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct halfbyte_conv2d_geometry {
    /// Input channels.
    pub ci: usize,
    /// Output channels.
    pub co: usize,
    /// Rows and columns of the kernel.
    pub kernel: [usize; 2],
    /// Pixels from one output to the next, down and across.
    pub stride: [usize; 2],
    /// Pixels of zeros above, left of, below and right of the input.
    pub padding: [usize; 4],
    /// Pixels from one position of the kernel to the next, down and across.
    pub dilation: [usize; 2],
    /// Groups of channels.
    pub groups: usize,
}

impl halfbyte_conv2d_geometry {
    /// The same, looked at.
    pub(crate) fn checked(&self) -> Result<Geometry> {
        let Self { ci, co, kernel, stride, padding, dilation, groups } = *self;
        let geometry = Geometry { ci, co, kernel, stride, padding, dilation, groups };
        geometry.validate()?;
        Ok(geometry)
    }
}

/// Images plane by plane: [batch, channels, h, w].
pub const HALFBYTE_LAYOUT_NCHW: i32 = 0;
/// Images pixel by pixel: [batch, h, w, channels].
pub const HALFBYTE_LAYOUT_NHWC: i32 = 1;

/// The order of a number.
pub(crate) fn layout(what: &str, number: i32) -> Result<Layout2d> {
    match number {
        HALFBYTE_LAYOUT_NCHW => Ok(Layout2d::Nchw),
        HALFBYTE_LAYOUT_NHWC => Ok(Layout2d::Nhwc),
        other => Err(Failure::invalid(what, "one of HALFBYTE_LAYOUT_*", other.to_string())),
    }
}

/// Batch and size of images that lie so. Error: other channels than the layer's.
fn images(x: &Tensor, layout: Layout2d, channels: usize) -> Result<(usize, [usize; 2])> {
    let (batch, size, found) = match (layout, x.dimensions::<4>()?) {
        (Layout2d::Nchw, [batch, c, h, w]) => (batch, [h, w], c),
        (Layout2d::Nhwc, [batch, h, w, c]) => (batch, [h, w], c),
    };
    if found == channels {
        return Ok((batch, size));
    }
    Err(Failure::invalid("x", format!("{channels} channels, in the order {layout}"), format!("shape {:?}", x.shape)))
}

/// Batch and size of x, where y has the shape that follows from them, and shares nothing with it.
pub(crate) fn batch(
    geometry: Geometry,
    [x_layout, y_layout]: [Layout2d; 2],
    x: &Tensor,
    y: &Tensor,
) -> Result<(usize, [usize; 2])> {
    let (batch, size) = images(x, x_layout, geometry.ci)?;
    let [h, w] = Conv2dShape::new(geometry, batch, size)?.output();
    y.expect_shape(&match y_layout {
        Layout2d::Nchw => [batch, geometry.co, h, w],
        Layout2d::Nhwc => [batch, h, w, geometry.co],
    })?;
    y.expect_apart(x)?;
    Ok((batch, size))
}

/// y = activation(conv(x, W) + bias), with W packed for the kernels of a device.
#[derive(Debug)]
pub struct halfbyte_conv2d {
    layer: Layer,
    layouts: [Layout2d; 2],
}

type Layer = On<Conv2d<Cpu>, Conv2d<Cuda>>;

/// Packs a weight [co, k] for a device, k being kernel rows, kernel columns, channels in this order, as halfbyte_weight_rtn_conv2d
/// makes it. `bias`: floats [co] of the host; null: that of the weight's checkpoint, if it came out of one and there is one, else none.
/// `activation`: HALFBYTE_ACTIVATION_*; `x_layout`, `y_layout`: HALFBYTE_LAYOUT_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_create(
    device: Option<&halfbyte_device>,
    weight: Option<&halfbyte_weight>,
    geometry: Option<&halfbyte_conv2d_geometry>,
    bias: Option<&DLTensor>,
    activation: i32,
    x_layout: i32,
    y_layout: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_conv2d>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let (device, weight) = (given("device", device)?, given("weight", weight)?);
        let geometry = given("geometry", geometry)?.checked()?;
        let activation = crate::conv2d::activation(activation)?;
        let layouts = [layout("x_layout", x_layout)?, layout("y_layout", y_layout)?];
        let bias = crate::conv2d::bias(bias, geometry.co, weight.bias.as_ref())?;
        macro_rules! on {
            ($device:expr) => {{
                let layer = Conv2d::on($device, weight.as_weight(), geometry)?.with_activation(activation);
                let layer = layer.with_layouts(layouts[0], layouts[1]);
                match bias {
                    Some(bias) => layer.with_bias(bias)?,
                    None => layer,
                }
            }};
        }
        let layer = match &device.0 {
            Device::Cpu(cpu) => Layer::Cpu(on!(&**cpu)),
            Device::Cuda(cuda) => Layer::Cuda(on!(cuda)),
        };
        out.give(halfbyte_conv2d { layer, layouts })
    })
}

/// Convolves. `x`: floats [batch, ci, h, w] and `y`: floats [batch, co, oh, ow], or with channels last, as the layer was made; with
/// oh = (h + above + below - dilation (kh - 1) - 1) / stride + 1, rounded down. Memory: as of halfbyte_linear_forward.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_forward(
    conv2d: Option<&halfbyte_conv2d>,
    device: Option<&halfbyte_device>,
    x: Option<&DLTensor>,
    y: Option<&DLTensor>,
) -> halfbyte_status {
    guard(|| {
        let (halfbyte_conv2d { layer, layouts }, device) = (given("conv2d", conv2d)?, given("device", device)?);
        let (x, y) = (Tensor::new("x", x)?, Tensor::new("y", y)?);
        let geometry = match layer {
            Layer::Cpu(layer) => *layer.geometry(),
            Layer::Cuda(layer) => *layer.geometry(),
        };
        let (batch, size) = batch(geometry, *layouts, &x, &y)?;
        // SAFETY: the caller's tensors, which share nothing; on a GPU they stay until the work is done, as the header says.
        unsafe {
            match (layer, &device.0) {
                (Layer::Cpu(layer), Device::Cpu(cpu)) => {
                    layer.forward(cpu, x.floats()?, batch, size, y.floats_mut()?)?;
                }
                (Layer::Cuda(layer), Device::Cuda(cuda)) => {
                    let index = index(cuda);
                    layer.forward(cuda, x.any_floats(index)?, batch, size, y.any_floats_mut(index)?)?;
                }
                (Layer::Cpu(_), device) => return other_device("a CPU", device),
                (Layer::Cuda(_), device) => return other_device("a GPU", device),
            }
        }
        Ok(())
    })
}

/// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_free(conv2d: Option<Box<halfbyte_conv2d>>) {
    guard_quietly((), || drop(conv2d));
}
