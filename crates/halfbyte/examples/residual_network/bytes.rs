//! The network in bytes: u8 in, u8 out, weights in i8; floats come in only where the head leaves them.
//!
//! ```text
//! convolution:  sums in int32, one multiplication and rounding an output, relu by clamping           Conv2dInt8
//! sum:          relu(a + b) in integers: each code less its zero point, times a scale of 16 binary places
//! mean:         the sum of the codes of a channel, exact, brought to the scale of the means
//! head:         sums in int32, to floats                                                             LinearInt8
//! ```
//!
//! Scales come from calibration: the least and the greatest value seen become the ends of the codes.

use super::calibration::Seen;
use super::floats::change;
use super::network::{Arithmetic, Layer, Network};
use halfbyte::conv::{Conv2dShape, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight};
use halfbyte::ops::{Activation, Conv2dInt8, LinearInt8};
use halfbyte::{FloatsMut, Result};

/// Images pixel by pixel, and what their bytes stand for; floats where the head has been.
pub struct Codes {
    pub bytes: Vec<u8>,
    pub floats: Vec<f32>,
    pub affine: Affine,
    pub batch: usize,
    pub size: [usize; 2],
}

/// An operation, ready to be run.
enum Step {
    Conv(Box<Conv2dInt8>),
    /// To be rounded to codes of this meaning.
    Round(Affine),
    Head(Box<LinearInt8>),
}

/// The network's operations in their order.
pub struct ByteNetwork<'a> {
    cpu: &'a Cpu,
    steps: Vec<Step>,
    /// The operation that comes next.
    next: usize,
    input: Affine,
    /// What rounding has done to the weights of each layer, the head last.
    pub changes: Vec<Vec<f64>>,
    /// What one step of the codes stands for, of the images and of every result in its order; 0 where it is floats.
    pub scales: Vec<f32>,
}

/// The codes of values from `least` to `greatest`, 0 among them.
fn affine(seen: &Seen) -> Result<Affine> {
    let (least, greatest) = (seen.least.min(0.0), seen.greatest.max(0.0));
    let scale = ((greatest - least) / 255.0).max(f32::MIN_POSITIVE);
    Affine::new(Byte::U8, scale, (-least / scale).round() as i32)
}

/// A layer's weights in bytes: symmetric, a scale an output; and its bias in steps of the sums.
struct Rounded {
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<i32>,
    shape: [usize; 2],
}

impl Rounded {
    fn new(layer: &Layer, x: Affine) -> Self {
        let shape = [layer.geometry.co, layer.geometry.k()];
        let rows = || layer.weights.chunks_exact(shape[1]);
        let greatest = |row: &[f32]| row.iter().fold(0.0f32, |most, w| most.max(w.abs()));
        let scales: Vec<f32> = rows().map(|row| (greatest(row) / 127.0).max(f32::MIN_POSITIVE)).collect();
        let codes = rows().zip(&scales).flat_map(|(row, scale)| row.iter().map(move |w| (w / scale).round() as i8));
        let bias = layer.bias.iter().zip(&scales).map(|(bias, scale)| (bias / (x.scale() * scale)).round() as i32);
        Self { codes: codes.collect(), bias: bias.collect(), scales, shape }
    }

    fn weight(&self) -> Result<Int8Weight<'_>> {
        Int8Weight::new(Bytes::I8(&self.codes), self.shape, &self.scales, &[])
    }

    fn values(&self) -> Vec<f64> {
        let scale = |i: usize| f64::from(self.scales[i / self.shape[1]]);
        self.codes.iter().enumerate().map(|(i, &code)| f64::from(code) * scale(i)).collect()
    }
}

/// Quantises the operations one after the other. What lies between them is what codes there stand for.
struct Quantise<'a, 'b> {
    network: &'a Network,
    /// What calibration has seen, from the result of the next operation on.
    seen: std::slice::Iter<'a, Seen>,
    out: &'a mut ByteNetwork<'b>,
}

impl Quantise<'_, '_> {
    fn result(&mut self) -> Result<Affine> {
        let y = affine(self.seen.next().expect("calibration has seen every result"))?;
        self.out.scales.push(y.scale());
        Ok(y)
    }
}

impl Arithmetic for Quantise<'_, '_> {
    type Tensor = Affine;

    fn conv(&mut self, layer: usize, x: &Affine) -> Result<Affine> {
        let (layer, y) = (&self.network.layers[layer], self.result()?);
        let rounded = Rounded::new(layer, *x);
        let conv = Conv2dInt8::new(&rounded.weight()?, layer.geometry, *x, y)?;
        let activation = if layer.relu { Activation::Relu } else { Activation::None };
        let conv = conv.with_bias(rounded.bias.clone())?.with_activation(activation)?;
        self.out.changes.push(change(layer, rounded.values()));
        self.out.steps.push(Step::Conv(Box::new(conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc))));
        Ok(y)
    }

    fn add(&mut self, _: &Affine, _: &Affine) -> Result<Affine> {
        let y = self.result()?;
        self.out.steps.push(Step::Round(y));
        Ok(y)
    }

    fn pool(&mut self, _: &Affine) -> Result<Affine> {
        let y = self.result()?;
        self.out.steps.push(Step::Round(y));
        Ok(y)
    }

    fn head(&mut self, x: &Affine) -> Result<Affine> {
        let rounded = Rounded::new(&self.network.head, *x);
        let head = LinearInt8::with_float_outputs(&rounded.weight()?, *x)?.with_bias(rounded.bias.clone())?;
        self.out.changes.push(change(&self.network.head, rounded.values()));
        self.out.steps.push(Step::Head(Box::new(head)));
        self.out.scales.push(0.0);
        Ok(*x)
    }
}

impl<'a> ByteNetwork<'a> {
    /// Quantises a network by what calibration has seen of it.
    pub fn new(cpu: &'a Cpu, network: &Network, seen: &[Seen]) -> Result<Self> {
        // Images are bytes already.
        let input = Affine::new(Byte::U8, 1.0 / 255.0, 0)?;
        let mut out = Self { cpu, steps: Vec::new(), next: 0, input, changes: Vec::new(), scales: vec![0.0] };
        network.run(&mut Quantise { network, seen: seen[1..].iter(), out: &mut out }, &input)?;
        Ok(out)
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        let bytes = |step: &Step| match step {
            Step::Conv(conv) => conv.bytes(),
            Step::Round(_) => 0,
            Step::Head(head) => head.bytes(),
        };
        self.steps.iter().map(bytes).sum()
    }

    /// Images of bytes.
    pub fn images(&self, pixels: &[u8], batch: usize, size: usize) -> Codes {
        Codes { bytes: pixels.to_vec(), floats: Vec::new(), affine: self.input, batch, size: [size; 2] }
    }

    /// The operation that comes next; after the last one the first again.
    fn step(&mut self) -> &Step {
        let step = self.next;
        self.next = (step + 1) % self.steps.len();
        &self.steps[step]
    }
}

impl Arithmetic for ByteNetwork<'_> {
    type Tensor = Codes;

    fn conv(&mut self, _: usize, x: &Codes) -> Result<Codes> {
        let cpu = self.cpu;
        let Step::Conv(conv) = self.step() else { unreachable!("operations come in one order") };
        let affine = conv.y().expect("made for outputs in bytes");
        let shape = Conv2dShape::new(*conv.geometry(), x.batch, x.size)?;
        let mut bytes = vec![0; shape.y_len()];
        conv.forward(cpu, Bytes::U8(&x.bytes), x.batch, x.size, BytesMut::U8(&mut bytes))?;
        Ok(Codes { bytes, floats: Vec::new(), affine, batch: x.batch, size: shape.output() })
    }

    fn add(&mut self, a: &Codes, b: &Codes) -> Result<Codes> {
        let &Step::Round(y) = self.step() else { unreachable!("operations come in one order") };
        // With 16 binary places a scale is off by at most 2⁻¹⁷, 255 times that by 0.002 of a step.
        let factor = |x: &Codes| (x.affine.scale() / y.scale() * 65536.0).round() as i32;
        let (fa, fb, half) = (factor(a), factor(b), 1 << 15);
        let least = half - fa * a.affine.zero() - fb * b.affine.zero();
        let code = |(a, b): (&u8, &u8)| ((fa * i32::from(*a) + fb * i32::from(*b) + least) >> 16).clamp(0, 255) as u8;
        let bytes = a.bytes.iter().zip(&b.bytes).map(code).collect();
        Ok(Codes { bytes, floats: Vec::new(), affine: y, ..*a })
    }

    fn pool(&mut self, x: &Codes) -> Result<Codes> {
        let &Step::Round(y) = self.step() else { unreachable!("operations come in one order") };
        let pixels = x.size[0] * x.size[1];
        let channels = x.bytes.len() / (x.batch * pixels);
        let mut bytes = Vec::with_capacity(x.batch * channels);
        for image in x.bytes.chunks_exact(pixels * channels) {
            let mut sums = vec![0u32; channels];
            for pixel in image.chunks_exact(channels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &code)| *sum += u32::from(code));
            }
            // Behind a relu the code of 0 is 0.
            let scale = x.affine.scale() / pixels as f32;
            bytes.extend(sums.iter().map(|&sum| y.code(sum as f32 * scale) as u8));
        }
        Ok(Codes { bytes, floats: Vec::new(), affine: y, batch: x.batch, size: [1, 1] })
    }

    fn head(&mut self, x: &Codes) -> Result<Codes> {
        let cpu = self.cpu;
        let Step::Head(head) = self.step() else { unreachable!("operations come in one order") };
        let mut floats = vec![0.0; x.batch * head.n()];
        head.forward_floats(cpu, Bytes::U8(&x.bytes), x.batch, FloatsMut::F32(&mut floats))?;
        Ok(Codes { bytes: Vec::new(), floats, ..*x })
    }
}
