//! The network in floats, with weights as they are or quantised (weight-only: x stays what it is), on any machine.

use super::machine::Machine;
use super::network::{Arithmetic, Layer, Network};
use halfbyte::conv::{Conv2dShape, Layout2d};
use halfbyte::format::reference;
use halfbyte::ops::{Activation, Conv2d, Linear, Weight};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Floats, Format, Group, Result};

/// Images pixel by pixel.
pub struct Images<M: Machine> {
    pub values: M::Floats,
    pub batch: usize,
    pub size: [usize; 2],
    pub channels: usize,
}

impl<M: Machine> Images<M> {
    /// Of bytes, which stand for 0 to 1.
    pub fn of_bytes(machine: &M, pixels: &[u8], batch: usize, size: usize) -> Result<Self> {
        let values: Vec<f32> = pixels.iter().map(|&code| f32::from(code) / 255.0).collect();
        let channels = pixels.len() / (batch * size * size);
        Ok(Self { values: machine.upload(&values)?, batch, size: [size; 2], channels })
    }

    pub fn pixels(&self) -> usize {
        self.size[0] * self.size[1]
    }
}

/// Packed layers.
pub struct FloatNetwork<'a, M: Machine> {
    pub machine: &'a M,
    pub layers: Vec<Conv2d<M::Device>>,
    pub head: Linear<M::Device>,
    /// What rounding has done to the weights of each layer, the head last: their rounded values less what they were.
    pub changes: Vec<Vec<f64>>,
}

impl<'a, M: Machine> FloatNetwork<'a, M> {
    /// Weights as they are, or quantised. A layer whose channels the groups do not divide, as the stem with its 3, gets one
    /// scale an output.
    pub fn new(machine: &'a M, network: &Network, format: Option<Format>) -> Result<Self> {
        let device = machine.device();
        let mut changes = Vec::new();
        let mut layers = Vec::new();
        for layer in &network.layers {
            let (geometry, weights) = (layer.geometry, Floats::F32(&layer.weights));
            let conv = match format {
                None => Conv2d::on(device, Weight::Dense(weights, [geometry.co, geometry.k()]), geometry)?,
                Some(mut format) => {
                    if geometry.scale_channels(format.weight.group).is_err() {
                        format.weight.group = Group::Channel;
                    }
                    let quantised = rtn(weights, [geometry.co, geometry.k()], format.weight, Rtn::default())?;
                    changes.push(change(layer, reference::dequantize(&quantised)));
                    Conv2d::on(device, Weight::Quantized(&quantised, format.act), geometry)?
                }
            };
            let activation = if layer.relu { Activation::Relu } else { Activation::None };
            let conv = conv.with_bias(layer.bias.clone())?.with_activation(activation);
            layers.push(conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc));
        }
        let (shape, weights) =
            ([network.head.geometry.co, network.head.geometry.k()], Floats::F32(&network.head.weights));
        let head = match format {
            None => Linear::on(device, Weight::Dense(weights, shape))?,
            Some(format) => {
                let quantised = rtn(weights, shape, format.weight, Rtn::default())?;
                changes.push(change(&network.head, reference::dequantize(&quantised)));
                Linear::on(device, Weight::Quantized(&quantised, format.act))?
            }
        };
        Ok(Self { machine, layers, head: head.with_bias(network.head.bias.clone())?, changes })
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(Conv2d::bytes).sum::<usize>() + self.head.bytes()
    }
}

/// Rounded weights less what they were.
pub fn change(layer: &Layer, rounded: Vec<f64>) -> Vec<f64> {
    rounded.iter().zip(&layer.weights).map(|(rounded, &w)| rounded - f64::from(w)).collect()
}

impl<M: Machine> Arithmetic for FloatNetwork<'_, M> {
    type Tensor = Images<M>;

    fn conv(&mut self, layer: usize, x: &Images<M>) -> Result<Images<M>> {
        let conv = &self.layers[layer];
        let shape = Conv2dShape::new(*conv.geometry(), x.batch, x.size)?;
        let mut values = self.machine.floats(M::IMAGES, shape.y_len())?;
        conv.forward(self.machine.device(), M::x(&x.values), x.batch, x.size, M::y(&mut values))?;
        Ok(Images { values, size: shape.output(), channels: shape.geometry().co, ..*x })
    }

    fn add(&mut self, a: &Images<M>, b: &Images<M>) -> Result<Images<M>> {
        let mut values = self.machine.floats(M::IMAGES, a.batch * a.pixels() * a.channels)?;
        self.machine.add([&a.values, &b.values], &mut values)?;
        Ok(Images { values, ..*a })
    }

    fn pool(&mut self, x: &Images<M>) -> Result<Images<M>> {
        let mut values = self.machine.floats(M::IMAGES, x.batch * x.channels)?;
        self.machine.mean(&x.values, [x.batch, x.pixels(), x.channels], &mut values)?;
        Ok(Images { values, size: [1, 1], ..*x })
    }

    /// Classes are f32 on every machine.
    fn head(&mut self, x: &Images<M>) -> Result<Images<M>> {
        let mut values = self.machine.floats(Float::F32, x.batch * self.head.n())?;
        self.head.forward(self.machine.device(), M::x(&x.values), x.batch, M::y(&mut values))?;
        Ok(Images { values, channels: self.head.n(), ..*x })
    }
}
