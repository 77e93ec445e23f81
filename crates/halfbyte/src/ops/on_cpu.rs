//! Layers on a CPU.

mod llm_int8;

pub use llm_int8::LlmInt8;

use super::Weight;
use super::device::layers::{self, Convolution, EpilogueInt8, ImagesInt8};
use crate::conv::Geometry;
use crate::cpu::conv::depthwise::{self, Depthwise};
use crate::cpu::conv::explain::format_of_products;
use crate::cpu::conv::int8::{Depthwise as DepthwiseInt8, Epilogue as ConvEpilogueInt8, Weights as WeightsInt8, Y};
use crate::cpu::conv::{self, Weights};
use crate::cpu::int8::{Dequantize, Requantize, Rows, Target};
use crate::cpu::isa::Caps;
use crate::cpu::matmul::{self, Epilogue, Packed, Plans};
use crate::cpu::pack::pack;
use crate::cpu::{self, Cpu};
use crate::error::{Error, Result};
use crate::format::int8::{Affine, Bytes, BytesMut, Int8Weight};
use crate::format::reference::Bound;
use crate::format::{Act, Format, QTensor};
use crate::kernel::{Activation, Problem};
use crate::layout::cpu_dense_n16::CpuDenseN16;
use crate::layout::cpu_int8::CpuInt8;
use crate::tensor::{Float, Floats, FloatsMut};
use std::borrow::Cow;
use std::ops::Range;

/// A weight with its bias, and the kernels that were chosen for it.
#[derive(Debug)]
pub struct Linear {
    packed: Packed,
    bias: Option<Vec<f32>>,
    plans: Plans,
}

impl Linear {
    pub(super) fn new(caps: Caps, weight: Weight<'_>) -> Result<Self> {
        let packed = match weight {
            Weight::Quantized(w, act) => Packed::Quantized(pack(caps, &[&w.into()], act == Act::A8Asym)?, act),
            Weight::Stored(parts, act) => Packed::Quantized(pack(caps, parts, act == Act::A8Asym)?, act),
            Weight::Dense(w, shape) => Packed::Dense(CpuDenseN16::pack(w, shape)?),
        };
        Ok(Self { packed, bias: None, plans: Plans::default() })
    }

    pub(super) fn packed(&self) -> &Packed {
        &self.packed
    }
}

impl layers::Linear<Cpu> for Linear {
    fn pack(device: &Cpu, w: Weight<'_>, _: Option<Float>) -> Result<Self> {
        Self::new(device.caps(), w)
    }

    fn shape(&self) -> [usize; 2] {
        [self.packed.n(), self.packed.k()]
    }

    fn format(&self) -> Option<Format> {
        self.packed.format()
    }

    fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.bias = Some(bias);
        Ok(())
    }

    fn kernel(&self, device: &Cpu, problem: &Problem) -> Result<&'static str> {
        Ok(matmul::select(&device.caps(), problem)?.name)
    }

    fn bound(&self, device: &Cpu, problem: &Problem) -> Result<Bound> {
        matmul::select(&device.caps(), problem)?;
        Ok(Bound::new(problem.y, problem.k))
    }

    fn forward(&self, device: &Cpu, x: Floats<'_>, m: usize, y: FloatsMut<'_>, activation: Activation) -> Result<()> {
        let [n, k] = [self.packed.n(), self.packed.k()];
        let problem = Problem { format: self.packed.format(), x: x.dtype(), y: y.dtype(), m, n, k };
        let kernel = self.plans.at(&device.caps(), &problem)?;
        if m > 0 && n > 0 {
            let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
            matmul::run(kernel, device, matmul::Call { x, m, w: &self.packed, epilogue, y });
        }
        Ok(())
    }
}

/// A convolution's weight with its bias, and the kernels that were chosen for it.
#[derive(Debug)]
pub struct Conv2d {
    weights: Weights,
    format: Option<Format>,
    bias: Option<Vec<f32>>,
    plans: Plans,
}

impl Conv2d {
    pub(super) fn new(caps: Caps, weight: Weight<'_>, geometry: Geometry) -> Result<Self> {
        let (weights, format) = match weight {
            Weight::Quantized(w, act) => (quantized(caps, w, act, geometry)?, Some((w.format(), act))),
            Weight::Stored(parts, act) => {
                let [w] = parts else {
                    return Err(Error::invalid("conv2d", "one stored tensor", parts.len().to_string()));
                };
                let w = w.to_qtensor()?;
                (quantized(caps, &w, act, geometry)?, Some((w.format(), act)))
            }
            Weight::Dense(w, _) => (dense(w, geometry)?, None),
        };
        let format = format.map(|(weight, act)| Format { weight, act });
        Ok(Self { weights, format, bias: None, plans: Plans::default() })
    }
}

fn quantized(caps: Caps, w: &QTensor, act: Act, geometry: Geometry) -> Result<Weights> {
    geometry.scale_channels(w.format().group)?;
    if w.group_index().is_some() {
        let got = "columns that are grouped in another order (act-order)";
        return Err(Error::invalid("conv2d", "groups of neighbouring channels", got));
    }
    if depthwise::serves(&geometry).is_ok() {
        return Ok(Weights::Depthwise(Depthwise::quantized(w, act)?));
    }
    let w = w.express(format_of_products(w.format(), act, &geometry)?)?;
    let packed = |group: usize| {
        let part = match geometry.groups {
            1 => Cow::Borrowed(&*w),
            _ => Cow::Owned(w.rows(group * geometry.outputs()..(group + 1) * geometry.outputs())?),
        };
        Ok(Packed::Quantized(pack(caps, &[&part.as_ref().into()], act == Act::A8Asym)?, act))
    };
    Ok(Weights::Products((0..geometry.groups).map(packed).collect::<Result<_>>()?))
}

fn dense(w: Floats<'_>, geometry: Geometry) -> Result<Weights> {
    if depthwise::serves(&geometry).is_ok() {
        return Ok(Weights::Depthwise(Depthwise::dense(w, geometry.co)?));
    }
    let (outputs, k) = (geometry.outputs(), geometry.k());
    let packed = |group: usize| {
        let part = w.slice(group * outputs * k..(group + 1) * outputs * k);
        Ok(Packed::Dense(CpuDenseN16::pack(part, [outputs, k])?))
    };
    Ok(Weights::Products((0..geometry.groups).map(packed).collect::<Result<_>>()?))
}

impl layers::Conv2d<Cpu> for Conv2d {
    fn pack(device: &Cpu, w: Weight<'_>, geometry: Geometry, _: Option<Float>) -> Result<Self> {
        Self::new(device.caps(), w, geometry)
    }

    fn format(&self) -> Option<Format> {
        self.format
    }

    fn bytes(&self) -> usize {
        match &self.weights {
            Weights::Products(packed) => packed.iter().map(Packed::bytes).sum(),
            Weights::Depthwise(w) => w.bytes(),
        }
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.bias = Some(bias);
        Ok(())
    }

    /// `depthwise`, or one of [`crate::cpu::matmul::KERNELS`].
    fn kernel(&self, device: &Cpu, call: &Convolution<'_>, types: [Float; 2]) -> Result<&'static str> {
        match &self.weights {
            Weights::Products(w) => {
                Ok(self.plans.of_windows(&device.caps(), &conv::problem(call.shape, &w[0], types))?.name)
            }
            Weights::Depthwise(_) => Ok("depthwise"),
        }
    }

    fn bound(&self, device: &Cpu, call: &Convolution<'_>, types: [Float; 2]) -> Result<Bound> {
        self.kernel(device, call, types)?;
        Ok(Bound::new(types[1], call.shape.geometry().k()))
    }

    fn forward(&self, device: &Cpu, call: &Convolution<'_>, x: Floats<'_>, y: FloatsMut<'_>) -> Result<()> {
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation: call.activation };
        let [x_layout, y_layout] = call.layouts;
        let (weights, plans) = (&self.weights, &self.plans);
        conv::run(device, conv::Call { shape: call.shape, x, x_layout, weights, plans, epilogue, y, y_layout })
    }
}

/// A weight in bytes, and what becomes of its sums.
#[derive(Clone, Debug)]
pub struct LinearInt8 {
    packed: CpuInt8,
    epilogue: ConvEpilogueInt8,
}

impl LinearInt8 {
    pub(super) fn new(w: &Int8Weight<'_>, epilogue: &EpilogueInt8) -> Result<Self> {
        let packed = CpuInt8::pack(w)?;
        let epilogue = finish(&packed, epilogue, 0)?;
        Ok(Self { packed, epilogue })
    }

    fn run(&self, cpu: &Cpu, x: Bytes<'_>, m: usize, y: Target<'_>) {
        let (byte, k) = (x.byte(), self.packed.k());
        let (x, w) = (Rows::Strided(bits(x), k), &self.packed);
        cpu::int8::multiply(cpu, cpu::int8::Call { x, byte, m, w, y, stride: w.n(), column: 0 });
    }
}

/// What becomes of sums of a weight whose outputs begin with `first`.
fn finish(w: &CpuInt8, epilogue: &EpilogueInt8, first: usize) -> Result<ConvEpilogueInt8> {
    let EpilogueInt8 { x, y, bias, float_bias, activation } = epilogue;
    let rows = first..first + w.n();
    let bias = bias.as_ref().map(|bias| &bias[rows.clone()]);
    let float_bias = float_bias.as_ref().map(|bias| &bias[rows]);
    Ok(match *y {
        Some(y) => ConvEpilogueInt8::Bytes(Requantize::new(w, *x, bias, y, *activation)?),
        None => ConvEpilogueInt8::Floats(Dequantize::new(w, *x, bias, float_bias, *activation)?),
    })
}

/// Bytes as their bits.
fn bits(x: Bytes<'_>) -> &[u8] {
    match x {
        Bytes::U8(x) => x,
        Bytes::I8(x) => bytemuck::cast_slice(x),
    }
}

fn outputs_in(what: &str) -> Error {
    Error::invalid("int8", format!("outputs in {what}"), "others")
}

impl layers::LinearInt8<Cpu> for LinearInt8 {
    fn pack(_: &Cpu, w: &Int8Weight<'_>, epilogue: &EpilogueInt8) -> Result<Self> {
        Self::new(w, epilogue)
    }

    fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()> {
        self.epilogue = finish(&self.packed, epilogue, 0)?;
        Ok(())
    }

    fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    fn forward(&self, device: &Cpu, x: Bytes<'_>, m: usize, y: BytesMut<'_>) -> Result<()> {
        let ConvEpilogueInt8::Bytes(requantize) = &self.epilogue else { return Err(outputs_in("floats")) };
        self.run(device, x, m, Target::Bytes(requantize, y));
        Ok(())
    }

    fn forward_floats(&self, device: &Cpu, x: Bytes<'_>, m: usize, y: FloatsMut<'_>) -> Result<()> {
        let ConvEpilogueInt8::Floats(dequantize) = &self.epilogue else { return Err(outputs_in("bytes")) };
        self.run(device, x, m, Target::Floats(dequantize, dequantize.output(y, [m, self.packed.n()])));
        Ok(())
    }
}

/// A convolution's weight in bytes, and what becomes of its sums.
#[derive(Clone, Debug)]
pub struct Conv2dInt8 {
    weights: WeightsInt8,
    x: Affine,
}

impl Conv2dInt8 {
    pub(super) fn new(w: &Int8Weight<'_>, geometry: Geometry, epilogue: &EpilogueInt8) -> Result<Self> {
        let depthwise = depthwise::serves(&geometry).is_ok().then(|| DepthwiseInt8::new(w)).transpose()?;
        let rows = if depthwise.is_some() { geometry.co } else { geometry.outputs() };
        let packed = (0..geometry.co / rows).map(|i| pack_rows(w, i * rows..(i + 1) * rows)).collect::<Result<_>>()?;
        let weights = WeightsInt8 { packed, epilogues: Vec::new(), depthwise };
        let mut layer = Self { weights, x: epilogue.x };
        layers::Conv2dInt8::set_epilogue(&mut layer, epilogue)?;
        Ok(layer)
    }

    pub(super) fn kernel(&self, cpu: &Cpu) -> &'static str {
        if self.weights.depthwise.is_some() { "int8_depthwise" } else { cpu::int8::kernel(cpu) }
    }

    fn run(&self, cpu: &Cpu, call: ImagesInt8<'_>, x: Bytes<'_>, y: Y<'_>) {
        let ImagesInt8 { shape, layouts: [x_layout, y_layout] } = call;
        let (x, affine, weights) = (bits(x), self.x, &self.weights);
        conv::int8::run(cpu, conv::int8::Call { shape, x, affine, x_layout, weights, y, y_layout });
    }
}

/// Packs some rows of a weight.
fn pack_rows(w: &Int8Weight<'_>, rows: Range<usize>) -> Result<CpuInt8> {
    let k = w.k();
    let codes = match w.codes() {
        Bytes::U8(codes) => Bytes::U8(&codes[rows.start * k..rows.end * k]),
        Bytes::I8(codes) => Bytes::I8(&codes[rows.start * k..rows.end * k]),
    };
    let scales: Vec<f32> = rows.clone().map(|i| w.scale(i)).collect();
    let zeros: Vec<i32> = rows.clone().map(|i| w.zero(i)).collect();
    CpuInt8::pack(&Int8Weight::new(codes, [rows.len(), k], &scales, &zeros)?)
}

impl layers::Conv2dInt8<Cpu> for Conv2dInt8 {
    fn pack(_: &Cpu, w: &Int8Weight<'_>, geometry: Geometry, epilogue: &EpilogueInt8) -> Result<Self> {
        Self::new(w, geometry, epilogue)
    }

    fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()> {
        let mut first = 0;
        let of = |w: &CpuInt8| {
            let finished = finish(w, epilogue, first);
            first += w.n();
            finished
        };
        self.weights.epilogues = self.weights.packed.iter().map(of).collect::<Result<_>>()?;
        Ok(())
    }

    fn bytes(&self) -> usize {
        let depthwise = self.weights.depthwise.as_ref().map_or(0, DepthwiseInt8::bytes);
        self.weights.packed.iter().map(CpuInt8::bytes).sum::<usize>() + depthwise
    }

    fn forward(&self, device: &Cpu, call: ImagesInt8<'_>, x: Bytes<'_>, y: BytesMut<'_>) -> Result<()> {
        let y = match y {
            BytesMut::U8(y) => y,
            BytesMut::I8(y) => bytemuck::cast_slice_mut(y),
        };
        self.run(device, call, x, Y::Bytes(y));
        Ok(())
    }

    fn forward_floats(&self, device: &Cpu, call: ImagesInt8<'_>, x: Bytes<'_>, y: FloatsMut<'_>) -> Result<()> {
        self.run(device, call, x, Y::Floats(y));
        Ok(())
    }
}
