//! Weights before they are packed for a device: quantised here, dense, or out of a checkpoint.

use crate::checkpoint::halfbyte_checkpoint;
use crate::conv2d::halfbyte_conv2d_geometry;
use crate::handle::{Out, given};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::tensor::{DLTensor, Tensor};
use crate::text::text;
use ::halfbyte_checkpoint::{LinearWeight, LoadedLinear};
use halfbyte::quantize::{Rtn, SymmetricScale, rtn, rtn_conv2d};
use halfbyte::{Act, FloatData, Floats, FloatsMut, Format, QTensor, StoredTensor, Weight, WeightFormat, Zero};
use std::borrow::Cow;
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;

/// A weight [n, k] as it is given to layers: codes with scales, or floats; with the bias that a checkpoint has beside it.
#[derive(Debug)]
pub struct halfbyte_weight {
    pub(crate) data: Data,
    pub(crate) bias: Option<Vec<f32>>,
    format: CString,
}

/// The two kinds.
#[derive(Debug)]
pub(crate) enum Data {
    Quantized(QTensor, Act),
    Dense(FloatData<'static>, [usize; 2]),
}

impl halfbyte_weight {
    fn new(data: Data, bias: Option<Vec<f32>>) -> Self {
        let format = match &data {
            Data::Quantized(w, act) => Format { weight: w.format(), act: *act }.to_string(),
            Data::Dense(w, _) => w.dtype().name().to_owned(),
        };
        Self { data, bias, format: CString::new(format).unwrap_or_default() }
    }

    pub(crate) fn shape(&self) -> [usize; 2] {
        match &self.data {
            Data::Quantized(w, _) => [w.n(), w.k()],
            Data::Dense(_, shape) => *shape,
        }
    }

    pub(crate) fn as_weight(&self) -> Weight<'_> {
        match &self.data {
            Data::Quantized(w, act) => Weight::Quantized(w, *act),
            Data::Dense(w, shape) => Weight::Dense(w.as_floats(), *shape),
        }
    }
}

/// Activations as they are: f16 or bf16 by habit, any float type is taken.
pub const HALFBYTE_ACT_A16: i32 = 0;
/// Activations as they are: f32 by habit, any float type is taken.
pub const HALFBYTE_ACT_A32: i32 = 1;
/// Activations quantised on the fly to 8 bits, symmetric.
pub const HALFBYTE_ACT_A8: i32 = 2;
/// Activations quantised on the fly to 8 bits, with scale and offset.
pub const HALFBYTE_ACT_A8_ASYM: i32 = 3;

/// What becomes of activations, by its number.
pub(crate) fn act(number: i32) -> Result<Act> {
    match number {
        HALFBYTE_ACT_A16 => Ok(Act::A16),
        HALFBYTE_ACT_A32 => Ok(Act::A32),
        HALFBYTE_ACT_A8 => Ok(Act::A8),
        HALFBYTE_ACT_A8_ASYM => Ok(Act::A8Asym),
        other => Err(Failure::invalid("act", "one of HALFBYTE_ACT_*", other.to_string())),
    }
}

/// Scales from the largest magnitude of each group, so that both extremes are met exactly.
pub const HALFBYTE_RTN_DEFAULT: u32 = 0;
/// Scales such that every code is used; of symmetric formats alone, others are refused.
pub const HALFBYTE_RTN_FULL_RANGE: u32 = 1;
/// Scales by a search for the least squared error of each group.
pub const HALFBYTE_RTN_SEARCH: u32 = 2;

/// Options of rtn for a format, by their bits. Errors: bits that say nothing, a range of symmetric codes for others.
fn options(flags: u32, format: WeightFormat) -> Result<Rtn> {
    if flags & !(HALFBYTE_RTN_FULL_RANGE | HALFBYTE_RTN_SEARCH) != 0 {
        return Err(Failure::invalid("flags", "a sum of HALFBYTE_RTN_*", format!("{flags:#x}")));
    }
    let full = flags & HALFBYTE_RTN_FULL_RANGE != 0;
    if full && format.zero != Zero::Symmetric {
        let expected = "HALFBYTE_RTN_FULL_RANGE with codes that have no zero points and no offsets";
        return Err(Failure::invalid("flags", expected, format!("it with {}", format.zero)));
    }
    let symmetric = if full { SymmetricScale::Full } else { SymmetricScale::Narrow };
    Ok(Rtn { symmetric, search: flags & HALFBYTE_RTN_SEARCH != 0 })
}

/// A format of a caller.
///
/// # Safety
/// As of [`text`].
pub(crate) unsafe fn format_of(pointer: *const c_char) -> Result<Format> {
    // SAFETY: promised.
    Ok(unsafe { text("format", pointer) }?.parse::<Format>()?)
}

/// Quantises a matrix by rounding to nearest. `w`: floats [n, k] of the host; `format`: as "w4a16-g128", "w8a8", "w4a8-g32-asym";
/// `flags`: a sum of HALFBYTE_RTN_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_rtn(
    w: Option<&DLTensor>,
    format: *const c_char,
    flags: u32,
    out: Option<&mut MaybeUninit<*mut halfbyte_weight>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let w = Tensor::new("w", w)?;
        let shape = w.dimensions::<2>()?;
        // SAFETY: null or a string, as the header says.
        let format = unsafe { format_of(format) }?;
        // SAFETY: the caller's tensor, which the call alone reads.
        let floats = unsafe { w.floats() }?;
        let quantized = rtn(floats, shape, format.weight, options(flags, format.weight)?)?;
        out.give(halfbyte_weight::new(Data::Quantized(quantized, format.act), None))
    })
}

/// The same of a convolution's weight. `w`: floats [co, ci / groups, kh, kw] of the host; scales lie along the channels of a position.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_rtn_conv2d(
    w: Option<&DLTensor>,
    geometry: Option<&halfbyte_conv2d_geometry>,
    format: *const c_char,
    flags: u32,
    out: Option<&mut MaybeUninit<*mut halfbyte_weight>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let w = Tensor::new("w", w)?;
        let geometry = given("geometry", geometry)?.checked()?;
        w.expect_shape(&[geometry.co, geometry.channels(), geometry.kernel[0], geometry.kernel[1]])?;
        // SAFETY: null or a string, as the header says.
        let format = unsafe { format_of(format) }?;
        // SAFETY: the caller's tensor, which the call alone reads.
        let floats = unsafe { w.floats() }?;
        let quantized = rtn_conv2d(floats, &geometry, format.weight, options(flags, format.weight)?)?;
        out.give(halfbyte_weight::new(Data::Quantized(quantized, format.act), None))
    })
}

/// Elements that stay when what lends them is gone. Error: memory is short.
fn owned<T: Copy>(values: Cow<'_, [T]>) -> halfbyte::Result<Cow<'static, [T]>> {
    let values = match values {
        Cow::Owned(values) => values,
        Cow::Borrowed(values) => {
            let mut copy = Vec::new();
            let requested_bytes = size_of_val(values);
            copy.try_reserve_exact(values.len())
                .map_err(|_| halfbyte::Error::Memory { op: "weight", requested_bytes })?;
            copy.extend_from_slice(values);
            copy
        }
    };
    Ok(Cow::Owned(values))
}

/// Copies floats [n, k] of the host, to be multiplied exactly.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_dense(
    w: Option<&DLTensor>,
    out: Option<&mut MaybeUninit<*mut halfbyte_weight>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let w = Tensor::new("w", w)?;
        let shape = w.dimensions::<2>()?;
        // SAFETY: the caller's tensor, which the call alone reads.
        let floats = match unsafe { w.floats() }? {
            Floats::F16(v) => FloatData::F16(owned(Cow::Borrowed(v))?),
            Floats::BF16(v) => FloatData::BF16(owned(Cow::Borrowed(v))?),
            Floats::F32(v) => FloatData::F32(owned(Cow::Borrowed(v))?),
        };
        out.give(halfbyte_weight::new(Data::Dense(floats, shape), None))
    })
}

/// Reads a linear layer's weight, and its bias if there is one, out of a checkpoint by the layer's name, as
/// "model.layers.0.self_attn.q_proj". `act`: what becomes of the activations of quantised layers, HALFBYTE_ACT_*.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_load(
    checkpoint: Option<&halfbyte_checkpoint>,
    name: *const c_char,
    act: i32,
    out: Option<&mut MaybeUninit<*mut halfbyte_weight>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let (checkpoint, act) = (given("checkpoint", checkpoint)?, crate::weight::act(act)?);
        // SAFETY: null or a string, as the header says.
        let name = unsafe { text("name", name) }?;
        let LoadedLinear { weight, bias, .. } = checkpoint.layer(name)?.load_linear(name)?;
        let data = match weight {
            LinearWeight::Quantized(w) => Data::Quantized(w, act),
            LinearWeight::Dense { floats, shape } => {
                let floats = match floats {
                    FloatData::F16(v) => FloatData::F16(owned(v)?),
                    FloatData::BF16(v) => FloatData::BF16(owned(v)?),
                    FloatData::F32(v) => FloatData::F32(owned(v)?),
                };
                Data::Dense(floats, shape)
            }
        };
        out.give(halfbyte_weight::new(data, bias))
    })
}

/// Outputs; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_n(weight: Option<&halfbyte_weight>) -> usize {
    weight.map_or(0, |weight| weight.shape()[0])
}

/// Length of the reduction; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_k(weight: Option<&halfbyte_weight>) -> usize {
    weight.map_or(0, |weight| weight.shape()[1])
}

/// Its format, as "w4a16-g128" or, dense, "f16"; null of null. It stays as long as the weight.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_format(weight: Option<&halfbyte_weight>) -> *const c_char {
    weight.map_or(std::ptr::null(), |weight| weight.format.as_ptr())
}

/// Writes what the weight stands for to `out`: f32 [n, k] of the host, each number rounded once.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_dequantize(
    weight: Option<&halfbyte_weight>,
    out: Option<&DLTensor>,
) -> halfbyte_status {
    guard(|| {
        let weight = given("weight", weight)?;
        let out = Tensor::new("out", out)?;
        out.expect_shape(&weight.shape())?;
        // SAFETY: the caller's tensor, which the call alone writes.
        let FloatsMut::F32(out) = (unsafe { out.floats_mut() })? else {
            return Err(Failure::invalid("out", "elements of f32", "those of another type"));
        };
        match &weight.data {
            Data::Quantized(w, _) => out.copy_from_slice(&StoredTensor::from(w).values()?),
            Data::Dense(w, _) => {
                let floats = w.as_floats();
                out.iter_mut().enumerate().for_each(|(i, out)| *out = floats.get(i));
            }
        }
        Ok(())
    })
}

/// Frees a weight; null is nothing. Layers that were made of it go on.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_weight_free(weight: Option<Box<halfbyte_weight>>) {
    guard_quietly((), || drop(weight));
}
