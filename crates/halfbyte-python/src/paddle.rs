//! Paddle's functions for weight-only and LLM.int8 layers: what `python/halfbyte/paddle.py` hands on once it has looked at the
//! arguments as Paddle does.

use crate::device;
use crate::error::{Result, invalid};
use crate::linear::{Linear, bias_of};
use crate::quantize::matrix;
use crate::tensor::{DataType, Input, Output, Place, Shape, float_of, rows_of, same_place, type_of, wrong_type};
use half::{bf16, f16};
use halfbyte::cuda::matmul::fpa_intb;
use halfbyte::format::int8::BytesMut;
use halfbyte::layout::codes::{Codes, FpaIntB};
use halfbyte::layout::stored::{StoredTensor, StoredZeros, Strides};
use halfbyte::quantize::{WeightOnlyRule, weight_only};
use halfbyte::{
    Act, Activation, Device, Float, FloatData, Floats, FloatsMut, Group, LlmInt8Linear, Weight, WeightFormat, Zero,
};
use pyo3::prelude::*;
use rayon::prelude::*;
use std::sync::Arc;

/// Rows of a matrix that are transposed together.
const TOGETHER: usize = 16;

fn format(bits: u32, group_size: i64, scale: Float) -> WeightFormat {
    let group = usize::try_from(group_size).map_or(Group::Channel, Group::Size);
    WeightFormat { bits, group, zero: Zero::Symmetric, scale, channel_scale: None }
}

/// `[n]`, or `[groups, n]` where there are groups.
fn shape_of_scales(format: WeightFormat, [n, k]: [usize; 2]) -> PyResult<Shape> {
    match format.group {
        Group::Size(_) => Shape::new(&[format.group.count(k), n]),
        Group::Channel | Group::Tensor => Shape::new(&[n]),
    }
}

/// Floats to memory, each rounded once.
fn write(values: impl IndexedParallelIterator<Item = f32>, to: FloatsMut<'_>) {
    match to {
        FloatsMut::F16(to) => to.par_iter_mut().zip(values).for_each(|(to, value)| *to = f16::from_f32(value)),
        FloatsMut::BF16(to) => to.par_iter_mut().zip(values).for_each(|(to, value)| *to = bf16::from_f32(value)),
        FloatsMut::F32(to) => to.par_iter_mut().zip(values).for_each(|(to, value)| *to = value),
    }
}

fn bytes_of<'a>(out: &'a mut Output<'_>) -> PyResult<&'a mut [i8]> {
    match out.bytes_mut()? {
        BytesMut::I8(out) => Ok(out),
        BytesMut::U8(_) => Err(wrong_type("weight_quantize", "int8", DataType::U8)),
    }
}

/// Weights `[k, n]` to a stream of codes and their scales. plain: signed codes `[n, k]` with float32 scales (llm.int8), else the layout
/// of an architecture, with scales of x's type. bfloat16: x is float32 that stands for brain floats, and so are the scales.
#[pyfunction]
pub fn _paddle_weight_quantize<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    bits: u32,
    plain: bool,
    arch: u32,
    group_size: i64,
    bfloat16: bool,
) -> Result<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    const OP: &str = "weight_quantize";
    let x = Input::of(x, OP)?;
    let [k, n] = matrix(OP, "x", &x)?;
    let (float, layout) = (x.float(OP)?, FpaIntB::of_arch(arch)?);
    let rounded = if bfloat16 { Float::BF16 } else { float };
    let format = format(bits, group_size, if plain { Float::F32 } else { rounded });
    let dtype = if plain || bfloat16 { Float::F32 } else { float };
    let shape = Shape::new(&[n * bits as usize / 8, k])?;
    let mut out = Output::like(&x, shape, DataType::I8)?;
    let mut scales = Output::like(&x, shape_of_scales(format, [n, k])?, type_of(dtype))?;
    if let Place::Cuda(index) = x.place() {
        let (queue, gpu) = (device::queue(py, index, x.stream())?, device::gpu(py, index)?);
        let (w, stream) = (x.float_view(OP)?, queue.stream());
        if plain {
            let to = (out.view_mut::<i8>(), scales.float_view_mut()?);
            fpa_intb::quantize_signed(&gpu, stream, w, [k, n], format, to)?;
        } else {
            let to = (out.view_mut::<u8>(), scales.float_view_mut()?);
            fpa_intb::quantize(&gpu, stream, layout, w, [k, n], format, to)?;
        }
        x.settle(&queue)?;
        return Ok((out.finish(py)?, scales.finish(py)?));
    }
    {
        let (w, to, scales_to) = (x.floats(OP)?, bytes_of(&mut out)?, scales.floats_mut()?);
        device::compute(py, || -> halfbyte::Result<()> {
            let q = weight_only(w, [k, n], format, WeightOnlyRule::Paddle)?;
            if plain {
                to.par_iter_mut().zip(q.codes()).for_each(|(to, code)| *to = (code ^ 0x80) as i8);
            } else {
                to.copy_from_slice(bytemuck::cast_slice(&layout.pack(q.codes(), [n, k], bits)?));
            }
            let groups = q.groups();
            write((0..n * groups).into_par_iter().map(|at| q.scales()[at % n * groups + at / n]), scales_to);
            Ok(())
        })?;
    }
    Ok((out.finish(py)?, scales.finish(py)?))
}

/// What the stream of sm_75 and later stands for, `[k, n]` of the scales' type; plain: what signed codes `[n, k]` do.
#[pyfunction]
pub fn _paddle_weight_dequantize<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    scale: &Bound<'py, PyAny>,
    bits: u32,
    group_size: i64,
) -> Result<Bound<'py, PyAny>> {
    const OP: &str = "weight_dequantize";
    let (x, scale) = (Input::of(x, OP)?, Input::of(scale, OP)?);
    let ([rows, k], float) = (matrix(OP, "x", &x)?, scale.float(OP)?);
    let n = rows * (8 / bits as usize);
    let format = format(bits, group_size, float);
    same_shape(OP, &scale, shape_of_scales(format, [n, k])?)?;
    same_place(OP, &x, scale.place(), "the scales lie")?;
    let mut out = Output::like(&scale, Shape::new(&[k, n])?, scale.dtype())?;
    if let Place::Cuda(index) = x.place() {
        if x.dtype() != DataType::I8 {
            return Err(wrong_type(OP, "int8", x.dtype()).into());
        }
        let (queue, gpu) = (device::queue(py, index, scale.stream())?, device::gpu(py, index)?);
        let (from, to) = ((x.view::<u8>(), scale.float_view(OP)?), out.float_view_mut()?);
        fpa_intb::dequantize(&gpu, queue.stream(), FpaIntB::Interleaved, from, [k, n], format, to)?;
        scale.settle(&queue)?;
    } else {
        let (codes, scales, to) = (x.slice::<i8>(OP, DataType::I8)?, scale.floats(OP)?, out.floats_mut()?);
        device::compute(py, || -> halfbyte::Result<()> {
            let codes = FpaIntB::Interleaved.unpack(bytemuck::cast_slice(codes), [n, k], bits)?;
            let (middle, size) = (format.middle() as f32, format.group.len(k).max(1));
            let value = |at: usize| {
                let (j, i) = (at / n, at % n);
                (f32::from(codes[i * k + j]) - middle) * scales.get(j / size * n + i)
            };
            write((0..k * n).into_par_iter().with_min_len(TOGETHER * n).map(value), to);
            Ok(())
        })?;
    }
    Ok(out.finish(py)?)
}

/// A layer of weights in the layout of an architecture, packed where they lie.
#[pyfunction]
#[pyo3(signature = (weight, scale, bias, bits, arch, group_size))]
pub fn _paddle_linear(
    py: Python<'_>,
    weight: &Bound<'_, PyAny>,
    scale: &Bound<'_, PyAny>,
    bias: Option<&Bound<'_, PyAny>>,
    bits: u32,
    arch: u32,
    group_size: i64,
) -> Result<Linear> {
    const OP: &str = "weight_only_linear";
    let (weight, scale) = (Input::of(weight, OP)?, Input::of(scale, OP)?);
    let ([rows, k], float, layout) = (matrix(OP, "weight", &weight)?, scale.float(OP)?, FpaIntB::of_arch(arch)?);
    if weight.dtype() != DataType::I8 {
        return Err(wrong_type(OP, "a weight of int8", weight.dtype()).into());
    }
    let n = rows * (8 / bits as usize);
    let format = format(bits, group_size, float);
    same_shape(OP, &scale, shape_of_scales(format, [n, k])?)?;
    layout.bytes([n, k], bits)?;
    let copied;
    let bytes: &[u8] = match weight.place() {
        Place::Cpu => bytemuck::cast_slice(weight.slice::<i8>(OP, DataType::I8)?),
        Place::Cuda(_) => {
            copied = weight.to_bytes()?;
            &copied
        }
    };
    let scales = match scale.place() {
        Place::Cpu => borrowed(scale.floats(OP)?),
        Place::Cuda(_) => FloatData::F32(scale.to_f32(OP)?.into()),
    };
    let codes = Codes::Rows(Arc::new(move |rows, out| layout.rows(bytes, rows, [n, k], bits, out)));
    let scales = (scales, Strides::of_groups(n));
    let tensor = StoredTensor::new(format, [n, k], codes, scales, StoredZeros::Symmetric, None)?;
    let bias = bias_of(OP, bias, n)?;
    Linear::of_weight(py, Weight::Stored(&[&tensor], Act::A16), bias, Activation::None, weight.place())
}

/// LLM.int8() of x `[..., k]` with signed codes `[n, k]`.
#[pyfunction]
#[pyo3(signature = (x, weight, scale, bias, threshold))]
pub fn _paddle_llm_int8_linear<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    weight: &Bound<'py, PyAny>,
    scale: &Bound<'py, PyAny>,
    bias: Option<&Bound<'py, PyAny>>,
    threshold: f32,
) -> Result<Bound<'py, PyAny>> {
    const OP: &str = "llm_int8_linear";
    let (x, weight, scale) = (Input::of(x, OP)?, Input::of(weight, OP)?, Input::of(scale, OP)?);
    let [n, k] = matrix(OP, "weight", &weight)?;
    let m = rows_of(OP, &x, k)?;
    same_place(OP, &x, weight.place(), "the weight lies")?;
    same_shape(OP, &scale, Shape::new(&[n])?)?;
    if float_of(x.dtype()).is_none() {
        return Err(wrong_type(OP, "an x of float16, bfloat16 or float32", x.dtype()).into());
    }
    if weight.dtype() != DataType::I8 {
        return Err(wrong_type(OP, "a weight of int8", weight.dtype()).into());
    }
    let (scales, bias) = (scale.to_f32(OP)?, bias_of(OP, bias, n)?);
    let mut y = Output::like(&x, x.shape().with_last(n)?, x.dtype())?;
    if let Place::Cuda(index) = x.place() {
        let queue = device::queue(py, index, x.stream())?;
        let (codes, x_view, to) = (weight.to_bytes()?, x.float_view(OP)?, y.float_view_mut()?);
        device::compute(py, || -> halfbyte::Result<()> {
            let layer = llm_int8(LlmInt8Linear::on(&queue, bytemuck::cast_slice(&codes), [n, k], &scales)?, bias)?;
            layer.forward(&queue, x_view, m, threshold, to)?;
            // The layer goes before the work is done.
            queue.synchronize()
        })?;
    } else {
        let cpu = device::cpu(py)?;
        let (codes, x, to) = (weight.slice::<i8>(OP, DataType::I8)?, x.floats(OP)?, y.floats_mut()?);
        device::compute(py, || -> halfbyte::Result<()> {
            let layer = llm_int8(LlmInt8Linear::on(&*cpu, codes, [n, k], &scales)?, bias)?;
            layer.forward(&*cpu, x, m, threshold, to)
        })?;
    }
    Ok(y.finish(py)?)
}

fn llm_int8<D: Device>(layer: LlmInt8Linear<D>, bias: Option<Vec<f32>>) -> halfbyte::Result<LlmInt8Linear<D>> {
    match bias {
        Some(bias) => layer.with_bias(bias),
        None => Ok(layer),
    }
}

/// x `[m, n]` times scales `[n]`, each product rounded once.
#[pyfunction]
pub fn _paddle_apply_per_channel_scale<'py>(
    py: Python<'py>,
    x: &Bound<'py, PyAny>,
    scales: &Bound<'py, PyAny>,
) -> Result<Bound<'py, PyAny>> {
    const OP: &str = "apply_per_channel_scale";
    let (x, scales) = (Input::of(x, OP)?, Input::of(scales, OP)?);
    let [_, n] = matrix(OP, "x", &x)?;
    same_shape(OP, &scales, Shape::new(&[n])?)?;
    let mut y = Output::like(&x, *x.shape(), x.dtype())?;
    {
        let (x, scales, to) = (x.floats(OP)?, scales.floats(OP)?, y.floats_mut()?);
        device::compute(py, || {
            write((0..x.len()).into_par_iter().map(|at| x.get(at) * scales.get(at % n)), to);
        });
    }
    Ok(y.finish(py)?)
}

fn same_shape(op: &str, scale: &Input<'_>, expected: Shape) -> PyResult<()> {
    match *scale.shape() == expected {
        true => Ok(()),
        false => invalid(op, format_args!("scales of shape {expected}"), format_args!("shape {}", scale.shape())),
    }
}

fn borrowed(floats: Floats<'_>) -> FloatData<'_> {
    match floats {
        Floats::F16(floats) => FloatData::F16(floats.into()),
        Floats::BF16(floats) => FloatData::BF16(floats.into()),
        Floats::F32(floats) => FloatData::F32(floats.into()),
    }
}
