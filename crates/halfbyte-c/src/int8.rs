//! Layers of bytes: products and convolutions, to bytes or to floats.

use crate::conv2d::{batch, halfbyte_conv2d_geometry, layout};
use crate::device::{Device, On, halfbyte_device, index, other_device};
use crate::handle::{Out, given};
use crate::linear::activation;
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::tensor::{DLTensor, Element, Tensor};
use halfbyte::conv::Layout2d;
use halfbyte::format::int8::{Affine, Byte, Int8Weight};
use halfbyte::{Activation, Conv2dInt8, Cpu, Cuda, LinearInt8};
use std::mem::MaybeUninit;

/// What a tensor's bytes stand for: scale * (code - zero).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct halfbyte_affine {
    /// 1: bytes are signed; 0: they are not.
    pub is_signed: i32,
    /// What one step of the codes stands for, finite and above 0.
    pub scale: f32,
    /// The code of 0.
    pub zero: i32,
}

impl halfbyte_affine {
    fn checked(&self, what: &str) -> Result<Affine> {
        let byte = match self.is_signed {
            0 => Byte::U8,
            1 => Byte::I8,
            other => return Err(Failure::invalid(what, "is_signed of 0 or 1", other.to_string())),
        };
        Ok(Affine::new(byte, self.scale, self.zero)?)
    }
}

/// A weight of bytes and what becomes of its sums: what the two kinds of layers have in common.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct halfbyte_int8_layer {
    /// i8 or u8 of the host: [n, k]; of a convolution [co, ci / groups, kh, kw].
    pub codes: *const DLTensor,
    /// Floats of the host: [n], or one for all.
    pub scales: *const DLTensor,
    /// i32 of the host: [n], or one for all; null: all are 0.
    pub zeros: *const DLTensor,
    /// What the bytes of x stand for.
    pub x: halfbyte_affine,
    /// What the bytes of y stand for; null: y is floats.
    pub y: *const halfbyte_affine,
    /// i32 [n] of the host, in steps of the scale of x times that of the weight; or null.
    pub bias: *const DLTensor,
    /// Floats [n] of the host, for outputs in floats; or null.
    pub float_bias: *const DLTensor,
    /// HALFBYTE_ACTIVATION_*; for outputs in bytes one that is a clamp.
    pub activation: i32,
}

/// The same, looked at and copied.
struct Parts {
    codes: Tensor,
    scales: Vec<f32>,
    zeros: Vec<i32>,
    x: Affine,
    y: Option<Affine>,
    bias: Option<Vec<i32>>,
    float_bias: Option<Vec<f32>>,
    activation: Activation,
}

impl Parts {
    /// # Safety
    /// Every pointer is null or points to what its field says, all through the call.
    unsafe fn new(layer: &halfbyte_int8_layer) -> Result<Self> {
        let halfbyte_int8_layer { codes, scales, zeros, x, y, bias, float_bias, activation } = *layer;
        // SAFETY: promised, of these and of the memory that the tensors have.
        unsafe {
            Ok(Self {
                codes: Tensor::new("codes", codes.as_ref())?,
                scales: Tensor::new("scales", scales.as_ref())?.to_f32()?,
                zeros: match Tensor::optional("zeros", zeros.as_ref())? {
                    Some(zeros) => zeros.to_i32()?,
                    None => Vec::new(),
                },
                x: x.checked("x")?,
                y: y.as_ref().map(|y| y.checked("y")).transpose()?,
                bias: Tensor::optional("bias", bias.as_ref())?.map(|bias| bias.to_i32()).transpose()?,
                float_bias: Tensor::optional("float_bias", float_bias.as_ref())?
                    .map(|bias| bias.to_f32())
                    .transpose()?,
                activation: crate::int8::activation(activation)?,
            })
        }
    }
}

/// A layer with what its parts say.
macro_rules! finished {
    ($layer:expr, $parts:expr) => {{
        let mut layer = $layer.with_activation($parts.activation)?;
        if let Some(bias) = $parts.bias.clone() {
            layer = layer.with_bias(bias)?;
        }
        if let Some(bias) = $parts.float_bias.clone() {
            layer = layer.with_float_bias(bias)?;
        }
        layer
    }};
}

/// Runs a layer of either kind, to bytes or to floats as y is: `$arguments` are what its `forward` takes between x and y.
macro_rules! forward {
    ($layer:expr, $device:expr, $x:expr, ($($argument:expr),*), $y:expr) => {{
        let (x, y, floats) = (&$x, &$y, matches!($y.element, Element::Float(_)));
        // SAFETY: the caller's tensors, which share nothing; on a GPU they stay until the work is done, as the header says.
        unsafe {
            match (&$layer, &$device.0) {
                (On::Cpu(layer), Device::Cpu(cpu)) if floats => {
                    layer.forward_floats(cpu, x.bytes()?, $($argument,)* y.floats_mut()?)?;
                }
                (On::Cpu(layer), Device::Cpu(cpu)) => layer.forward(cpu, x.bytes()?, $($argument,)* y.bytes_mut()?)?,
                (On::Cuda(layer), Device::Cuda(cuda)) if floats => {
                    let index = index(cuda);
                    layer.forward_floats(cuda, x.any_bytes(index)?, $($argument,)* y.any_floats_mut(index)?)?;
                }
                (On::Cuda(layer), Device::Cuda(cuda)) => {
                    let index = index(cuda);
                    layer.forward(cuda, x.any_bytes(index)?, $($argument,)* y.any_bytes_mut(index)?)?;
                }
                (On::Cpu(_), device) => return other_device("a CPU", device),
                (On::Cuda(_), device) => return other_device("a GPU", device),
            }
        }
        Ok(())
    }};
}

/// Bytes in, bytes or floats out: sums exact in int32, rounded once. To the bit as onnxruntime's QLinearMatMul.
#[derive(Debug)]
pub struct halfbyte_linear_int8(Linear);

type Linear = On<LinearInt8<Cpu>, LinearInt8<Cuda>>;

/// Packs a weight [n, k] of bytes for a device.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_int8_create(
    device: Option<&halfbyte_device>,
    layer: Option<&halfbyte_int8_layer>,
    out: Option<&mut MaybeUninit<*mut halfbyte_linear_int8>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let device = given("device", device)?;
        // SAFETY: the caller's struct, as the header says.
        let parts = unsafe { Parts::new(given("layer", layer)?) }?;
        // SAFETY: the caller's tensor, which the call alone reads.
        let codes = unsafe { parts.codes.bytes() }?;
        let weight = Int8Weight::new(codes, parts.codes.dimensions()?, &parts.scales, &parts.zeros)?;
        out.give(halfbyte_linear_int8(match &device.0 {
            Device::Cpu(cpu) => Linear::Cpu(finished!(LinearInt8::on(&**cpu, &weight, parts.x, parts.y)?, parts)),
            Device::Cuda(cuda) => Linear::Cuda(finished!(LinearInt8::on(cuda, &weight, parts.x, parts.y)?, parts)),
        }))
    })
}

/// Multiplies. `x`: bytes [.., k]; `y`: bytes, or floats if the layer was made so, [.., n]. Memory: as of halfbyte_linear_forward.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_int8_forward(
    linear: Option<&halfbyte_linear_int8>,
    device: Option<&halfbyte_device>,
    x: Option<&DLTensor>,
    y: Option<&DLTensor>,
) -> halfbyte_status {
    guard(|| {
        let (linear, device) = (given("linear", linear)?, given("device", device)?);
        let (x, y) = (Tensor::new("x", x)?, Tensor::new("y", y)?);
        let shape = match &linear.0 {
            Linear::Cpu(layer) => [layer.n(), layer.k()],
            Linear::Cuda(layer) => [layer.n(), layer.k()],
        };
        let m = x.rows_to(&y, shape)?;
        forward!(linear.0, device, x, (m), y)
    })
}

/// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_int8_free(linear: Option<Box<halfbyte_linear_int8>>) {
    guard_quietly((), || drop(linear));
}

/// The same of convolutions: to the bit as onnxruntime's QLinearConv.
#[derive(Debug)]
pub struct halfbyte_conv2d_int8 {
    layer: Conv,
    geometry: halfbyte::conv::Geometry,
    layouts: [Layout2d; 2],
}

type Conv = On<Conv2dInt8<Cpu>, Conv2dInt8<Cuda>>;

/// Packs a weight [co, ci / groups, kh, kw] of bytes for a device. `x_layout`, `y_layout`: HALFBYTE_LAYOUT_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_int8_create(
    device: Option<&halfbyte_device>,
    layer: Option<&halfbyte_int8_layer>,
    geometry: Option<&halfbyte_conv2d_geometry>,
    x_layout: i32,
    y_layout: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_conv2d_int8>>,
) -> halfbyte_status {
    use halfbyte::format::int8::Bytes;
    guard(|| {
        let out = Out::new(out)?;
        let device = given("device", device)?;
        let geometry = given("geometry", geometry)?.checked()?;
        let layouts = [layout("x_layout", x_layout)?, layout("y_layout", y_layout)?];
        // SAFETY: the caller's struct, as the header says.
        let parts = unsafe { Parts::new(given("layer", layer)?) }?;
        parts.codes.expect_shape(&[geometry.co, geometry.channels(), geometry.kernel[0], geometry.kernel[1]])?;
        let (unsigned, signed);
        // SAFETY: the caller's tensor, which the call alone reads.
        let codes = match unsafe { parts.codes.bytes() }? {
            Bytes::U8(codes) => {
                unsigned = geometry.weight_rows(codes)?;
                Bytes::U8(&unsigned)
            }
            Bytes::I8(codes) => {
                signed = geometry.weight_rows(codes)?;
                Bytes::I8(&signed)
            }
        };
        let weight = Int8Weight::new(codes, [geometry.co, geometry.k()], &parts.scales, &parts.zeros)?;
        macro_rules! on {
            ($device:expr) => {{
                let layer = finished!(Conv2dInt8::on($device, &weight, geometry, parts.x, parts.y)?, parts);
                layer.with_layouts(layouts[0], layouts[1])
            }};
        }
        let layer = match &device.0 {
            Device::Cpu(cpu) => Conv::Cpu(on!(&**cpu)),
            Device::Cuda(cuda) => Conv::Cuda(on!(cuda)),
        };
        out.give(halfbyte_conv2d_int8 { layer, geometry, layouts })
    })
}

/// Convolves. `x`: bytes, `y`: bytes, or floats if the layer was made so; shapes as of halfbyte_conv2d_forward, memory as of
/// halfbyte_linear_forward.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_int8_forward(
    conv2d: Option<&halfbyte_conv2d_int8>,
    device: Option<&halfbyte_device>,
    x: Option<&DLTensor>,
    y: Option<&DLTensor>,
) -> halfbyte_status {
    guard(|| {
        let (conv2d, device) = (given("conv2d", conv2d)?, given("device", device)?);
        let (x, y) = (Tensor::new("x", x)?, Tensor::new("y", y)?);
        let (batch, size) = batch(conv2d.geometry, conv2d.layouts, &x, &y)?;
        forward!(conv2d.layer, device, x, (batch, size), y)
    })
}

/// Frees a layer; null is nothing. On a GPU it waits for the work that uses it.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_conv2d_int8_free(conv2d: Option<Box<halfbyte_conv2d_int8>>) {
    guard_quietly((), || drop(conv2d));
}
