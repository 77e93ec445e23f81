//! Launches of `fpa_intb.cu`: codes to and from the layouts of fpA_intB kernels, and floats straight to them.

use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Launch, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::{Group, WeightFormat, Zero};
use crate::layout::codes::FpaIntB;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "matmul/fpa_intb.cu", text: include_str!("fpa_intb.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "fpa_intb layout";

/// As in the source.
const OUTPUTS: usize = 32;
const INPUTS: usize = 64;
const THREADS: u32 = 256;

parameters! {
    /// As in the source.
    struct Params {
        floats: u64,
        scales: u64,
        codes: u64,
        stream: u64,
        n: u32,
        k: u32,
        group: u32,
        groups: u32,
        of_outputs: u32,
        float_type: u32,
        scale_type: u32,
        most: f32,
    }
}

pub(super) fn instances() -> Vec<Instance> {
    let forms = [4, 8].into_iter().flat_map(|bits| [FpaIntB::RowMajor, FpaIntB::Interleaved].map(|form| (bits, form)));
    let all = forms
        .flat_map(|(bits, form)| ["pack", "unpack", "quantize", "dequantize"].map(|name| instance(name, form, bits)));
    all.chain(["scales", "quantize_signed"].map(|name| Instance::new(&SOURCE, name))).collect()
}

fn instance(name: &str, layout: FpaIntB, bits: u32) -> Instance {
    Instance::new(&SOURCE, format!("{name}<{bits}, {}>", layout == FpaIntB::Interleaved))
}

/// Codes `[n, k]`, one a byte, to the stream, on the device: [`FpaIntB::pack`]. Of a code only its low bits count.
///
/// *Errors:* those of [`FpaIntB::bytes`], a length that does not fit, a stream that does not begin at a multiple of 4 bytes.
pub fn pack(
    gpu: &Gpu,
    stream: &Stream,
    layout: FpaIntB,
    codes: View<'_, u8>,
    [n, k]: [usize; 2],
    bits: u32,
    out: ViewMut<'_, u8>,
) -> Result<()> {
    let params =
        Params { codes: codes.pointer(), ..checked(layout, [n, k], bits, codes.len(), out.pointer(), out.len())? };
    run(gpu, stream, instance("pack", layout, bits), tiles([n, k]), &params)
}

/// The stream to codes `[n, k]`, one a byte, on the device: [`FpaIntB::unpack`]. *Errors:* those of [`pack`].
pub fn unpack(
    gpu: &Gpu,
    stream: &Stream,
    layout: FpaIntB,
    from: View<'_, u8>,
    [n, k]: [usize; 2],
    bits: u32,
    codes: ViewMut<'_, u8>,
) -> Result<()> {
    let params = checked(layout, [n, k], bits, codes.len(), from.pointer(), from.len())?;
    let params = Params { codes: codes.pointer(), ..params };
    run(gpu, stream, instance("unpack", layout, bits), tiles([n, k]), &params)
}

/// Weights `[k, n]` to the stream and its scales `[groups, n]`, the pair that is written, by Paddle's rule, on the device: the bits of
/// [`weight_only`](crate::quantize::weight_only). A group with NaN or infinity gets a scale of NaN.
///
/// *Errors:* those of [`pack`]; a format that is not symmetric or has one scale for the tensor; scales of another type than the
/// format's.
pub fn quantize(
    gpu: &Gpu,
    stream: &Stream,
    layout: FpaIntB,
    w: FloatView<'_>,
    [k, n]: [usize; 2],
    format: WeightFormat,
    (out, scales): (ViewMut<'_, u8>, FloatViewMut<'_>),
) -> Result<()> {
    let params = Params {
        floats: w.pointer(),
        float_type: float_type(w.dtype()),
        ..checked(layout, [n, k], format.bits, w.len(), out.pointer(), out.len())?
    };
    let params = scaled(params, [k, n], format, (scales.pointer(), scales.len(), scales.dtype()))?;
    run(gpu, stream, Instance::new(&SOURCE, "scales"), n.div_ceil(OUTPUTS) * params.groups as usize, &params)?;
    run(gpu, stream, instance("quantize", layout, format.bits), tiles([n, k]), &params)
}

/// Weights `[k, n]` to signed codes `[n, k]` of 8 bits and scales `[groups, n]`, on the device: Paddle's `llm.int8`. A group with NaN
/// or infinity gets a scale of NaN. *Errors:* those of [`quantize`], a format of other than 8 bits.
pub fn quantize_signed(
    gpu: &Gpu,
    stream: &Stream,
    w: FloatView<'_>,
    [k, n]: [usize; 2],
    format: WeightFormat,
    (codes, scales): (ViewMut<'_, i8>, FloatViewMut<'_>),
) -> Result<()> {
    if format.bits != 8 || n.checked_mul(k).is_none_or(|len| w.len() != len || codes.len() != len) {
        let got = format!("{} and {} of {} bits", w.len(), codes.len(), format.bits);
        return Err(Error::invalid(OP, format!("{n} × {k} numbers and codes of 8 bits"), got));
    }
    let params =
        Params { floats: w.pointer(), codes: codes.pointer(), float_type: float_type(w.dtype()), ..sized([n, k])? };
    let params = scaled(params, [k, n], format, (scales.pointer(), scales.len(), scales.dtype()))?;
    run(gpu, stream, Instance::new(&SOURCE, "scales"), n.div_ceil(OUTPUTS) * params.groups as usize, &params)?;
    run(gpu, stream, Instance::new(&SOURCE, "quantize_signed"), tiles([n, k]), &params)
}

/// What the stream stands for with scales `[groups, n]`, as floats `[k, n]` of the scales' type, each rounded once, on the device.
///
/// *Errors:* those of [`quantize`], floats of another type.
pub fn dequantize(
    gpu: &Gpu,
    stream: &Stream,
    layout: FpaIntB,
    (from, scales): (View<'_, u8>, FloatView<'_>),
    [k, n]: [usize; 2],
    format: WeightFormat,
    out: FloatViewMut<'_>,
) -> Result<()> {
    if out.dtype() != scales.dtype() {
        return Err(Error::invalid(OP, format!("floats in {}", scales.dtype()), out.dtype().name()));
    }
    let params = Params {
        floats: out.pointer(),
        ..checked(layout, [n, k], format.bits, out.len(), from.pointer(), from.len())?
    };
    let params = scaled(params, [k, n], format, (scales.pointer(), scales.len(), scales.dtype()))?;
    run(gpu, stream, instance("dequantize", layout, format.bits), tiles([n, k]), &params)
}

/// The same parameters with scales `[groups, n]`: where they lie, how many there are, and of which type.
fn scaled(
    params: Params,
    [k, n]: [usize; 2],
    format: WeightFormat,
    (at, len, dtype): (u64, usize, Float),
) -> Result<Params> {
    let WeightFormat { bits: _, group, zero, scale, channel_scale } = format;
    if zero != Zero::Symmetric || channel_scale.is_some() || matches!(group, Group::Tensor | Group::Size(0)) {
        let expected = "a symmetric format with scales of one level, an output or a group each";
        return Err(Error::invalid(OP, expected, format!("{group}, {zero}")));
    }
    let groups = group.count(k);
    if dtype != scale || n.checked_mul(groups) != Some(len) {
        return Err(Error::invalid(OP, format!("{groups} × {n} scales in {scale}"), format!("{len} in {dtype}")));
    }
    Ok(Params {
        scales: at,
        group: u32::try_from(group.len(k).max(1)).unwrap_or(u32::MAX),
        groups: groups as u32,
        of_outputs: u32::from(group == Group::Channel),
        scale_type: float_type(scale),
        most: (format.middle() - 1) as f32,
        ..params
    })
}

fn tiles([n, k]: [usize; 2]) -> usize {
    n.div_ceil(OUTPUTS) * k.div_ceil(INPUTS)
}

/// The parameters that all kernels have, with lengths that fit.
fn checked(layout: FpaIntB, [n, k]: [usize; 2], bits: u32, len: usize, stream: u64, bytes: usize) -> Result<Params> {
    let needed = layout.bytes([n, k], bits)?;
    if len != n * k || bytes != needed {
        let expected = format!("{n} × {k} numbers and {needed} bytes");
        return Err(Error::invalid(OP, expected, format!("{len} and {bytes}")));
    }
    if !stream.is_multiple_of(4) {
        return Err(Error::invalid(OP, "a stream that begins at a multiple of 4 bytes", format!("{stream:#x}")));
    }
    Ok(Params { stream, ..sized([n, k])? })
}

/// Parameters with a shape and nothing else.
fn sized([n, k]: [usize; 2]) -> Result<Params> {
    let narrow = |what: &str, value: usize| {
        u32::try_from(value).map_err(|_| Error::invalid(OP, format!("{what} below 2³²"), value.to_string()))
    };
    Ok(Params {
        floats: 0,
        scales: 0,
        codes: 0,
        stream: 0,
        n: narrow("outputs", n)?,
        k: narrow("inputs", k)?,
        group: 1,
        groups: 1,
        of_outputs: 0,
        float_type: 0,
        scale_type: 0,
        most: 0.0,
    })
}

fn run(gpu: &Gpu, stream: &Stream, instance: Instance, blocks: usize, params: &Params) -> Result<()> {
    if blocks == 0 {
        return Ok(());
    }
    let blocks = i32::try_from(blocks).map_err(|_| Error::invalid(OP, "fewer than 2³¹ blocks", blocks.to_string()))?;
    let function = gpu.function(&instance)?;
    // SAFETY: the one parameter is the source's `Params`, whose addresses are those of views with the lengths that were checked.
    unsafe { function.launch(stream, &Launch::linear(blocks as u32, THREADS), &[Arg::new(params)]) }
}
