//! Layers on a GPU.

use super::Weight;
use super::device::layers::{self, Convolution, EpilogueInt8, ImagesInt8};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::driver::{Buffer, FloatView, FloatViewMut, View};
use crate::cuda::int8::{self, Layer, Target};
use crate::cuda::matmul::{
    self, Epilogue, FoldedNorm, LlmInt8Call, Packed, Packer, QuantizedCall, QuantizedView, run_quantized,
};
use crate::cuda::nn::{Dense, DenseCall};
use crate::cuda::{AnyBytes, AnyBytesMut, AnyFloats, AnyFloatsMut, Cuda, Workspace, conv};
use crate::error::{Error, Result};
use crate::format::int8::Int8Weight;
use crate::format::reference::Bound;
use crate::format::{Act, Format, WeightFormat};
use crate::kernel::{Activation, Problem};
use crate::tensor::Float;
use std::sync::Arc;

/// The type that activations of a format have where nothing else is said.
fn inputs(weight: WeightFormat, act: Act) -> Float {
    match (act, weight.scale) {
        (Act::A32, _) => Float::F32,
        (_, Float::BF16) => Float::BF16,
        _ => Float::F16,
    }
}

/// Error: a weight that lies on another GPU than the one that is to compute.
fn same_gpu(of: &Cuda, device: &Cuda) -> Result<()> {
    let [of, got] = [of, device].map(|cuda| cuda.gpu().context().info().index);
    if of == got {
        return Ok(());
    }
    Err(Error::invalid("cuda", format!("GPU {of}, where the weight lies"), format!("GPU {got}")))
}

/// A bias on the GPU.
fn upload(device: &Cuda, bias: &[f32]) -> Result<Buffer<f32>> {
    let mut buffer = device.gpu().context().allocate(bias.len())?;
    device.stream().upload(bias, buffer.view_mut())?;
    Ok(buffer)
}

/// A weight with its bias.
#[derive(Debug)]
pub struct Linear {
    device: Cuda,
    weight: LinearWeight,
    bias: Option<Buffer<f32>>,
}

#[derive(Debug)]
enum LinearWeight {
    Quantized(Box<Packed>),
    Dense(Dense),
}

impl Linear {
    /// With a weight that is packed already.
    pub(super) fn of(device: &Cuda, packed: Packed) -> Self {
        Self { device: device.clone(), weight: LinearWeight::Quantized(Box::new(packed)), bias: None }
    }

    /// With floats that lie on the device already.
    pub(super) fn of_dense(device: &Cuda, weight: Dense) -> Self {
        Self { device: device.clone(), weight: LinearWeight::Dense(weight), bias: None }
    }

    /// Lets products round weights, if f16 holds them.
    pub(super) fn allow_rounded_weights(&mut self) -> Result<bool> {
        match &mut self.weight {
            LinearWeight::Quantized(w) => w.allow_rounded_weights(self.device.gpu(), self.device.stream()),
            LinearWeight::Dense(_) => Ok(false),
        }
    }

    /// The floats; None if it is quantised.
    pub(super) fn dense(&self) -> Option<&Dense> {
        if let LinearWeight::Dense(w) = &self.weight { Some(w) } else { None }
    }

    /// The packed codes; None if it is dense.
    pub(super) fn packed(&self) -> Option<&Packed> {
        match &self.weight {
            LinearWeight::Quantized(w) => Some(w),
            LinearWeight::Dense(_) => None,
        }
    }

    pub(super) fn bias(&self) -> Option<View<'_, f32>> {
        self.bias.as_ref().map(Buffer::view)
    }

    /// Multiplies and does its part of a norm.
    pub(super) fn forward_folded(
        &self,
        device: &Cuda,
        x: FloatView<'_>,
        m: usize,
        y: FloatViewMut<'_>,
        activation: Activation,
        norm: &FoldedNorm<'_>,
    ) -> Result<()> {
        same_gpu(&self.device, device)?;
        let Some(w) = self.packed() else {
            return Err(Error::invalid("linear", "quantised weights beside a folded norm", "dense ones"));
        };
        let bytes = w.plans(device.gpu(), x.dtype(), y.dtype())?.at(m, false)?.workspace_bytes();
        let epilogue = Epilogue { bias: self.bias.as_ref().map(Buffer::view), activation };
        let mut working = device.workspace("linear", bytes)?;
        let call = matmul::Call { x, m, w, epilogue, y, workspace: working.get(), batch_invariant: false };
        matmul::run_folded(device.gpu(), device.stream(), &call, norm)
    }

    /// Multiplies rows that are codes already.
    pub(super) fn forward_rows(
        &self,
        device: &Cuda,
        x: QuantizedView<'_>,
        y: FloatViewMut<'_>,
        activation: Activation,
    ) -> Result<()> {
        same_gpu(&self.device, device)?;
        let Some(w) = self.packed() else {
            return Err(Error::invalid("linear", "floats for dense weights", "codes"));
        };
        let bytes = w.plans(device.gpu(), Float::F32, y.dtype())?.at(x.form.m, false)?.workspace_bytes();
        let epilogue = Epilogue { bias: self.bias.as_ref().map(Buffer::view), activation };
        let mut working = device.workspace("linear", bytes)?;
        let call = QuantizedCall { x, w, epilogue, y, workspace: working.get() };
        run_quantized(device.gpu(), device.stream(), call)
    }
}

impl layers::Linear<Cuda> for Linear {
    fn pack(device: &Cuda, w: Weight<'_>, x: Option<Float>) -> Result<Self> {
        let (gpu, stream) = (device.gpu(), device.stream());
        let weight = match w {
            Weight::Quantized(w, act) => {
                let x = x.unwrap_or(inputs(w.format(), act));
                LinearWeight::Quantized(matmul::pack(gpu, stream, w, act, x)?.into())
            }
            Weight::Stored(parts, act) => {
                let format = parts.first().map(|part| part.format());
                let x = x.or(format.map(|format| inputs(format, act))).unwrap_or(Float::F16);
                LinearWeight::Quantized(Packer::new(gpu, stream).pack(parts, act, x)?.into())
            }
            Weight::Dense(w, shape) => LinearWeight::Dense(Dense::new(gpu, stream, w, shape)?),
        };
        Ok(Self { device: device.clone(), weight, bias: None })
    }

    fn shape(&self) -> [usize; 2] {
        match &self.weight {
            LinearWeight::Quantized(w) => w.shape(),
            LinearWeight::Dense(w) => w.shape(),
        }
    }

    fn outputs(&self) -> usize {
        match &self.weight {
            LinearWeight::Quantized(w) => w.outputs(),
            LinearWeight::Dense(w) => w.shape()[0],
        }
    }

    fn format(&self) -> Option<Format> {
        match &self.weight {
            LinearWeight::Quantized(w) => Some(w.format()),
            LinearWeight::Dense(_) => None,
        }
    }

    fn bytes(&self) -> usize {
        match &self.weight {
            LinearWeight::Quantized(w) => w.bytes(),
            LinearWeight::Dense(w) => w.bytes(),
        }
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.bias = Some(upload(&self.device, &bias)?);
        Ok(())
    }

    fn kernel(&self, device: &Cuda, problem: &Problem) -> Result<&'static str> {
        match &self.weight {
            LinearWeight::Quantized(w) => {
                let plans = w.plans(device.gpu(), problem.x, problem.y)?;
                Ok(plans.at(problem.m, false)?.kernel().name)
            }
            LinearWeight::Dense(w) => Ok(w.kernel(device.gpu(), problem.m, problem.x)),
        }
    }

    fn bound(&self, device: &Cuda, problem: &Problem) -> Result<Bound> {
        match &self.weight {
            LinearWeight::Quantized(w) => {
                let plans = w.plans(device.gpu(), problem.x, problem.y)?;
                Ok(plans.at(problem.m, false)?.kernel().bound(&w.caps(device.gpu()), problem))
            }
            LinearWeight::Dense(_) => Ok(Bound::new(problem.y, problem.k)),
        }
    }

    fn forward(
        &self,
        device: &Cuda,
        x: AnyFloats<'_>,
        m: usize,
        y: AnyFloatsMut<'_>,
        activation: Activation,
    ) -> Result<()> {
        same_gpu(&self.device, device)?;
        let (gpu, stream, bias) = (device.gpu(), device.stream(), self.bias.as_ref().map(Buffer::view));
        match &self.weight {
            LinearWeight::Quantized(w) => {
                let plans = w.plans(gpu, x.dtype(), y.dtype())?;
                let plan = plans.at(m, false)?;
                let run = |x: FloatView<'_>, y: FloatViewMut<'_>, workspace: Option<&mut Workspace>| {
                    let epilogue = Epilogue { bias, activation };
                    let call = matmul::Call { x, m, w, epilogue, y, workspace, batch_invariant: false };
                    plan.run(gpu, stream, &call)
                };
                match (x, y) {
                    (AnyFloats::Device(x), AnyFloatsMut::Device(y)) => {
                        run(x, y, device.workspace("linear", plan.workspace_bytes())?.get())
                    }
                    (x, y) => device.floats("linear", x, y, plan.workspace_bytes(), run),
                }
            }
            LinearWeight::Dense(w) => {
                let bytes = w.workspace_bytes(gpu, m, [x.dtype(), y.dtype()]);
                device.floats("linear", x, y, bytes, |x, y, workspace| {
                    let workspace = workspace.filter(|_| bytes > 0);
                    w.forward_activated(gpu, stream, DenseCall { x, m, bias, y }, activation, workspace)
                })
            }
        }
    }
}

/// A convolution's weight with its bias.
#[derive(Debug)]
pub struct Conv2d {
    device: Cuda,
    weights: conv::Weights,
    bias: Option<Buffer<f32>>,
}

impl Conv2d {
    fn problem(&self, call: &Convolution<'_>, [x, y]: [Float; 2]) -> conv::Problem {
        let (format, packed) = (self.weights.format(), self.weights.layout());
        conv::Problem { format, shape: *call.shape, x, y, layouts: call.layouts, packed }
    }
}

impl layers::Conv2d<Cuda> for Conv2d {
    fn pack(device: &Cuda, w: Weight<'_>, geometry: Geometry, x: Option<Float>) -> Result<Self> {
        let (gpu, stream) = (device.gpu(), device.stream());
        let pack =
            |w, format, act| conv::Weights::pack(gpu, stream, w, act, geometry, x.unwrap_or(inputs(format, act)));
        let weights = match w {
            Weight::Quantized(w, act) => pack(w, w.format(), act)?,
            Weight::Stored(parts, act) => {
                let [w] = parts else {
                    return Err(Error::invalid("conv2d", "one stored tensor", parts.len().to_string()));
                };
                pack(&w.to_qtensor()?, w.format(), act)?
            }
            Weight::Dense(w, _) => conv::Weights::dense(gpu, stream, w, geometry)?,
        };
        Ok(Self { device: device.clone(), weights, bias: None })
    }

    fn format(&self) -> Option<Format> {
        self.weights.format()
    }

    fn bytes(&self) -> usize {
        self.weights.bytes()
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.bias = Some(upload(&self.device, &bias)?);
        Ok(())
    }

    fn kernel(&self, device: &Cuda, call: &Convolution<'_>, types: [Float; 2]) -> Result<&'static str> {
        Ok(conv::plan(device.gpu(), &self.weights, self.problem(call, types))?.kernel().name)
    }

    fn bound(&self, device: &Cuda, call: &Convolution<'_>, types: [Float; 2]) -> Result<Bound> {
        Ok(conv::plan(device.gpu(), &self.weights, self.problem(call, types))?.bound())
    }

    fn forward(&self, device: &Cuda, call: &Convolution<'_>, x: AnyFloats<'_>, y: AnyFloatsMut<'_>) -> Result<()> {
        same_gpu(&self.device, device)?;
        let (gpu, stream, w) = (device.gpu(), device.stream(), &self.weights);
        let plan = conv::plan(gpu, w, self.problem(call, [x.dtype(), y.dtype()]))?;
        let Convolution { shape, layouts: [x_layout, y_layout], activation } = *call;
        let (batch, size) = (shape.batch(), shape.input());
        device.floats("conv2d", x, y, plan.workspace_bytes(), |x, y, workspace| {
            let epilogue = Epilogue { bias: self.bias.as_ref().map(Buffer::view), activation };
            plan.run(gpu, stream, conv::Call { x, x_layout, batch, size, w, epilogue, y, y_layout, workspace })
        })
    }
}

/// A layer of bytes: a convolution, or a product, which is one of rows as images of one pixel.
#[derive(Debug)]
pub struct LayerInt8 {
    device: Cuda,
    layer: Layer,
}

/// What is done to sums, as a layer on a GPU is told.
fn epilogue(of: &EpilogueInt8) -> int8::Epilogue<'_> {
    let EpilogueInt8 { bias, float_bias, activation, .. } = of;
    int8::Epilogue { bias: bias.as_deref(), float_bias: float_bias.as_deref(), activation: *activation }
}

impl LayerInt8 {
    fn new(device: &Cuda, w: &Int8Weight<'_>, geometry: Geometry, of: &EpilogueInt8) -> Result<Self> {
        let (gpu, stream) = (device.gpu(), device.stream());
        let layer = Layer::conv2d(gpu, stream, w, geometry, of.x, of.y, epilogue(of))?;
        Ok(Self { device: device.clone(), layer })
    }

    fn set(&mut self, of: &EpilogueInt8) -> Result<()> {
        self.layer.set_epilogue(self.device.gpu(), self.device.stream(), epilogue(of))
    }

    /// How a call is computed.
    fn plan(&self, device: &Cuda, call: ImagesInt8<'_>) -> Result<Arc<int8::Plan>> {
        same_gpu(&self.device, device)?;
        let (x, symmetric, floats) = (self.layer.x().byte(), self.layer.is_symmetric(), self.layer.y().is_none());
        let problem = int8::Problem { shape: *call.shape, x, symmetric, floats, layouts: call.layouts };
        int8::plan(device.gpu(), &self.layer, problem)
    }

    fn to_bytes(&self, device: &Cuda, call: ImagesInt8<'_>, x: AnyBytes<'_>, y: AnyBytesMut<'_>) -> Result<()> {
        let plan = self.plan(device, call)?;
        device.bytes("int8", x, y, plan.workspace_bytes(), |x, y, workspace| {
            plan.run(device.gpu(), device.stream(), self.call(call, x, Target::Bytes(y), workspace))
        })
    }

    fn to_floats(&self, device: &Cuda, call: ImagesInt8<'_>, x: AnyBytes<'_>, y: AnyFloatsMut<'_>) -> Result<()> {
        let plan = self.plan(device, call)?;
        device.bytes_to_floats("int8", x, y, plan.workspace_bytes(), |x, y, workspace| {
            plan.run(device.gpu(), device.stream(), self.call(call, x, Target::Floats(y), workspace))
        })
    }

    fn call<'a>(
        &'a self,
        images: ImagesInt8<'_>,
        x: crate::cuda::driver::View<'a, u8>,
        y: Target<'a>,
        workspace: Option<&'a mut Workspace>,
    ) -> int8::Call<'a> {
        let ImagesInt8 { shape, layouts: [x_layout, y_layout] } = images;
        let (batch, size) = (shape.batch(), shape.input());
        int8::Call { layer: &self.layer, x, x_layout, batch, size, y, y_layout, workspace }
    }

    /// Rows of a product as images of one pixel.
    fn rows(&self, m: usize) -> Result<Conv2dShape> {
        Conv2dShape::new(*self.layer.geometry(), m, [1, 1])
    }
}

impl layers::LinearInt8<Cuda> for LayerInt8 {
    fn pack(device: &Cuda, w: &Int8Weight<'_>, epilogue: &EpilogueInt8) -> Result<Self> {
        Self::new(device, w, Geometry::new(w.k(), w.n(), [1, 1]), epilogue)
    }

    fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()> {
        self.set(epilogue)
    }

    fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    fn forward(&self, device: &Cuda, x: AnyBytes<'_>, m: usize, y: AnyBytesMut<'_>) -> Result<()> {
        self.to_bytes(device, ImagesInt8 { shape: &self.rows(m)?, layouts: [Layout2d::Nhwc; 2] }, x, y)
    }

    fn forward_floats(&self, device: &Cuda, x: AnyBytes<'_>, m: usize, y: AnyFloatsMut<'_>) -> Result<()> {
        self.to_floats(device, ImagesInt8 { shape: &self.rows(m)?, layouts: [Layout2d::Nhwc; 2] }, x, y)
    }
}

impl layers::Conv2dInt8<Cuda> for LayerInt8 {
    fn pack(device: &Cuda, w: &Int8Weight<'_>, geometry: Geometry, epilogue: &EpilogueInt8) -> Result<Self> {
        Self::new(device, w, geometry, epilogue)
    }

    fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()> {
        self.set(epilogue)
    }

    fn bytes(&self) -> usize {
        self.layer.bytes()
    }

    fn forward(&self, device: &Cuda, call: ImagesInt8<'_>, x: AnyBytes<'_>, y: AnyBytesMut<'_>) -> Result<()> {
        self.to_bytes(device, call, x, y)
    }

    fn forward_floats(&self, device: &Cuda, call: ImagesInt8<'_>, x: AnyBytes<'_>, y: AnyFloatsMut<'_>) -> Result<()> {
        self.to_floats(device, call, x, y)
    }
}

/// A weight of LLM.int8().
#[derive(Debug)]
pub struct LlmInt8 {
    device: Cuda,
    weight: matmul::LlmInt8,
}

impl layers::LlmInt8<Cuda> for LlmInt8 {
    fn pack(device: &Cuda, codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self> {
        let weight = matmul::LlmInt8::new(device.gpu(), device.stream(), codes, shape, scales)?;
        Ok(Self { device: device.clone(), weight })
    }

    fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    fn set_bias(&mut self, bias: Vec<f32>) -> Result<()> {
        self.weight.set_bias(self.device.gpu(), self.device.stream(), &bias)
    }

    fn forward(&self, device: &Cuda, x: AnyFloats<'_>, m: usize, threshold: f32, y: AnyFloatsMut<'_>) -> Result<()> {
        same_gpu(&self.device, device)?;
        let (gpu, stream) = (device.gpu(), device.stream());
        device.floats("llm.int8 linear", x, y, self.weight.workspace_bytes(gpu, m)?, |x, y, workspace| {
            self.weight.run(gpu, stream, LlmInt8Call { x, m, threshold, y, workspace })
        })
    }
}
