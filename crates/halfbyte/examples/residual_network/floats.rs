//! The network in f32, with weights as they are or quantised (weight-only: x stays what it is), and what calibration sees of it.

use super::network::{Arithmetic, Layer, Network};
use halfbyte::conv::{Conv2dShape, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::reference;
use halfbyte::ops::{Activation, Conv2d, Linear, Weight};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Floats, FloatsMut, Format, Group, Result};

/// Images pixel by pixel.
pub struct Images {
    pub values: Vec<f32>,
    pub batch: usize,
    pub size: [usize; 2],
}

impl Images {
    /// Of bytes, which stand for 0 to 1.
    pub fn of_bytes(pixels: &[u8], batch: usize, size: usize) -> Self {
        Self { values: pixels.iter().map(|&code| f32::from(code) / 255.0).collect(), batch, size: [size; 2] }
    }

    /// Channels of a pixel.
    fn channels(&self) -> usize {
        self.values.len() / (self.batch * self.size[0] * self.size[1])
    }
}

/// Packed layers. A GPU's would stand beside them, with tensors in its memory.
pub struct FloatNetwork<'a> {
    cpu: &'a Cpu,
    layers: Vec<Conv2d>,
    head: Linear,
    /// What rounding has done to the weights of each layer, the head last: their rounded values less what they were.
    pub changes: Vec<Vec<f64>>,
}

impl<'a> FloatNetwork<'a> {
    /// Weights as they are, or quantised. A layer whose channels the groups do not divide, as the stem with its 3, gets one
    /// scale an output.
    pub fn new(cpu: &'a Cpu, network: &Network, format: Option<Format>) -> Result<Self> {
        let mut changes = Vec::new();
        let mut layers = Vec::new();
        for layer in &network.layers {
            let (geometry, weights) = (layer.geometry, Floats::F32(&layer.weights));
            let conv = match format {
                None => Conv2d::dense(weights, geometry)?,
                Some(mut format) => {
                    if geometry.scale_channels(format.weight.group).is_err() {
                        format.weight.group = Group::Channel;
                    }
                    let quantised = rtn(weights, [geometry.co, geometry.k()], format.weight, Rtn::default())?;
                    changes.push(change(layer, reference::dequantize(&quantised)));
                    Conv2d::new(&quantised, format.act, geometry)?
                }
            };
            let activation = if layer.relu { Activation::Relu } else { Activation::None };
            let conv = conv.with_bias(layer.bias.clone())?.with_activation(activation);
            layers.push(conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc));
        }
        let (shape, weights) =
            ([network.head.geometry.co, network.head.geometry.k()], Floats::F32(&network.head.weights));
        let head = match format {
            None => Linear::new(Weight::Dense(weights, shape))?,
            Some(format) => {
                let quantised = rtn(weights, shape, format.weight, Rtn::default())?;
                changes.push(change(&network.head, reference::dequantize(&quantised)));
                Linear::new(Weight::Quantized(&quantised, format.act))?
            }
        };
        Ok(Self { cpu, layers, head: head.with_bias(network.head.bias.clone())?, changes })
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

impl Arithmetic for FloatNetwork<'_> {
    type Tensor = Images;

    fn conv(&mut self, layer: usize, x: &Images) -> Result<Images> {
        let conv = &self.layers[layer];
        let shape = Conv2dShape::new(*conv.geometry(), x.batch, x.size)?;
        let mut y = Images { values: vec![0.0; shape.y_len()], batch: x.batch, size: shape.output() };
        conv.forward(self.cpu, Floats::F32(&x.values), x.batch, x.size, FloatsMut::F32(&mut y.values))?;
        Ok(y)
    }

    fn add(&mut self, a: &Images, b: &Images) -> Result<Images> {
        let values = a.values.iter().zip(&b.values).map(|(a, b)| (a + b).max(0.0)).collect();
        Ok(Images { values, ..*a })
    }

    fn pool(&mut self, x: &Images) -> Result<Images> {
        let (channels, pixels) = (x.channels(), x.size[0] * x.size[1]);
        let mut values = vec![0.0f32; x.batch * channels];
        for (sums, image) in values.chunks_exact_mut(channels).zip(x.values.chunks_exact(pixels * channels)) {
            for pixel in image.chunks_exact(channels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, v)| *sum += v);
            }
            sums.iter_mut().for_each(|sum| *sum /= pixels as f32);
        }
        Ok(Images { values, batch: x.batch, size: [1, 1] })
    }

    fn head(&mut self, x: &Images) -> Result<Images> {
        let mut y = Images { values: vec![0.0; x.batch * self.head.n()], ..*x };
        self.head.forward(self.cpu, Floats::F32(&x.values), x.batch, FloatsMut::F32(&mut y.values))?;
        Ok(y)
    }
}
