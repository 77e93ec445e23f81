//! Linear layers.

use crate::checkpoint::halfbyte_checkpoint;
use crate::device::{Device, On, halfbyte_device, index, other_device};
use crate::handle::{Out, given};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::tensor::{DLTensor, Tensor};
use crate::text::text;
use crate::weight::halfbyte_weight;
use ::halfbyte_checkpoint::{StoredLinear, StoredWeight};
use halfbyte::{Activation, Cpu, Cuda, Linear, Weight};
use std::ffi::c_char;
use std::mem::MaybeUninit;

/// y = activation(x W^T + bias), with W packed for the kernels of a device.
#[derive(Debug)]
pub struct halfbyte_linear(Layer);

type Layer = On<Linear<Cpu>, Linear<Cuda>>;

/// Results as they are.
pub const HALFBYTE_ACTIVATION_NONE: i32 = 0;
/// max(v, 0).
pub const HALFBYTE_ACTIVATION_RELU: i32 = 1;
/// min(max(v, 0), 6).
pub const HALFBYTE_ACTIVATION_RELU6: i32 = 2;
/// v Phi(v), with the error function.
pub const HALFBYTE_ACTIVATION_GELU: i32 = 3;
/// Its approximation by the hyperbolic tangent.
pub const HALFBYTE_ACTIVATION_GELU_TANH: i32 = 4;
/// v / (1 + exp(-v)).
pub const HALFBYTE_ACTIVATION_SILU: i32 = 5;

/// The function of a number.
pub(crate) fn activation(number: i32) -> Result<Activation> {
    match number {
        HALFBYTE_ACTIVATION_NONE => Ok(Activation::None),
        HALFBYTE_ACTIVATION_RELU => Ok(Activation::Relu),
        HALFBYTE_ACTIVATION_RELU6 => Ok(Activation::Relu6),
        HALFBYTE_ACTIVATION_GELU => Ok(Activation::Gelu),
        HALFBYTE_ACTIVATION_GELU_TANH => Ok(Activation::GeluTanh),
        HALFBYTE_ACTIVATION_SILU => Ok(Activation::Silu),
        other => Err(Failure::invalid("activation", "one of HALFBYTE_ACTIVATION_*", other.to_string())),
    }
}

/// Floats of a bias: what the caller gives, else what lies beside the weight.
pub(crate) fn bias(given: Option<&DLTensor>, n: usize, beside: Option<&Vec<f32>>) -> Result<Option<Vec<f32>>> {
    let Some(bias) = Tensor::optional("bias", given)? else { return Ok(beside.cloned()) };
    bias.expect_shape(&[n])?;
    // SAFETY: the caller's tensor, which the call alone reads.
    Ok(Some(unsafe { bias.to_f32() }?))
}

impl Layer {
    fn new(device: &Device, weight: Weight<'_>, bias: Option<Vec<f32>>, activation: Activation) -> Result<Self> {
        macro_rules! on {
            ($variant:ident, $device:expr) => {{
                let layer = Linear::on($device, weight)?.with_activation(activation);
                Self::$variant(match bias {
                    Some(bias) => layer.with_bias(bias)?,
                    None => layer,
                })
            }};
        }
        Ok(match device {
            Device::Cpu(cpu) => on!(Cpu, &**cpu),
            Device::Cuda(cuda) => on!(Cuda, cuda),
        })
    }

    fn shape(&self) -> [usize; 2] {
        match self {
            Self::Cpu(layer) => [layer.n(), layer.k()],
            Self::Cuda(layer) => [layer.n(), layer.k()],
        }
    }
}

/// Packs a weight for a device. `bias`: floats [n] of the host; null: that of the weight's checkpoint, if it came out of one and there is
/// one, else none. `activation`: HALFBYTE_ACTIVATION_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_create(
    device: Option<&halfbyte_device>,
    weight: Option<&halfbyte_weight>,
    bias: Option<&DLTensor>,
    activation: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_linear>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let (device, weight) = (given("device", device)?, given("weight", weight)?);
        let activation = crate::linear::activation(activation)?;
        let bias = crate::linear::bias(bias, weight.shape()[0], weight.bias.as_ref())?;
        out.give(halfbyte_linear(Layer::new(&device.0, weight.as_weight(), bias, activation)?))
    })
}

/// Packs a layer of a checkpoint for a device, with its bias, from the file to the kernels' layout in one pass. `name`: of the layer, as
/// "model.layers.0.self_attn.q_proj"; `act`: what becomes of the activations of a quantised layer, HALFBYTE_ACT_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_load(
    device: Option<&halfbyte_device>,
    checkpoint: Option<&halfbyte_checkpoint>,
    name: *const c_char,
    act: i32,
    activation: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_linear>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let (device, checkpoint) = (given("device", device)?, given("checkpoint", checkpoint)?);
        let (act, activation) = (crate::weight::act(act)?, crate::linear::activation(activation)?);
        // SAFETY: null or a string, as the header says.
        let name = unsafe { text("name", name) }?;
        let StoredLinear { weight, bias, .. } = checkpoint.layer(name)?.stored_linear(name)?;
        let layer = match &weight {
            StoredWeight::Quantized(w) => Layer::new(&device.0, Weight::Stored(&[w], act), bias, activation)?,
            StoredWeight::Dense { floats, shape } => {
                Layer::new(&device.0, Weight::Dense(floats.as_floats(), *shape), bias, activation)?
            }
        };
        out.give(halfbyte_linear(layer))
    })
}

/// Outputs; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_n(linear: Option<&halfbyte_linear>) -> usize {
    linear.map_or(0, |linear| linear.0.shape()[0])
}

/// Inputs; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_k(linear: Option<&halfbyte_linear>) -> usize {
    linear.map_or(0, |linear| linear.0.shape()[1])
}

/// Bytes that the packed weight takes; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_bytes(linear: Option<&halfbyte_linear>) -> usize {
    linear.map_or(0, |linear| match &linear.0 {
        Layer::Cpu(layer) => layer.bytes(),
        Layer::Cuda(layer) => layer.bytes(),
    })
}

/// Multiplies. `x`: floats [.., k]; `y`: floats [.., n] with the same dimensions before the last, which are rows; either in f16, bf16 or
/// f32. On a CPU both lie in memory of the host. On a GPU each lies in its memory or the host's: what lies on the GPU is read and written
/// in the device's stream, and the call does not wait for it; what lies in the host's is copied, and y is there when the call returns.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_linear_forward(
    linear: Option<&halfbyte_linear>,
    device: Option<&halfbyte_device>,
    x: Option<&DLTensor>,
    y: Option<&DLTensor>,
) -> halfbyte_status {
    guard(|| {
        let (linear, device) = (given("linear", linear)?, given("device", device)?);
        let (x, y) = (Tensor::new("x", x)?, Tensor::new("y", y)?);
        let m = x.rows_to(&y, linear.0.shape())?;
        // SAFETY: the caller's tensors, which share nothing; on a GPU they stay until the work is done, as the header says.
        unsafe {
            match (&linear.0, &device.0) {
                (Layer::Cpu(layer), Device::Cpu(cpu)) => layer.forward(cpu, x.floats()?, m, y.floats_mut()?)?,
                (Layer::Cuda(layer), Device::Cuda(cuda)) => {
                    layer.forward(cuda, x.any_floats(index(cuda))?, m, y.any_floats_mut(index(cuda))?)?;
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
pub extern "C" fn halfbyte_linear_free(linear: Option<Box<halfbyte_linear>>) {
    guard_quietly((), || drop(linear));
}
