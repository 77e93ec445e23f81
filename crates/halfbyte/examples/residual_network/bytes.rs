//! The network in bytes: u8 in, u8 out, weights in i8; floats come in only where the head leaves them.
//!
//! ```text
//! convolution:  sums in int32, one multiplication and rounding an output, relu by clamping           Conv2dInt8
//! sum:          relu(a + b) in integers: each code less its zero point, times a scale of 16 binary places  Sum
//! mean:         the sum of the codes of a channel, exact, brought to the scale of the means          Mean
//! head:         sums in int32, to floats                                                             LinearInt8
//! ```
//!
//! Scales come from calibration: the least and the greatest value seen become the ends of the codes.

use super::calibration::Seen;
use super::floats::change;
use super::network::{Arithmetic, Layer, Network};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::int8::{Affine, Byte, Bytes, BytesMut, Int8Weight, Mean, Sum};
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

/// An operation in bytes, for any device.
pub enum Operation {
    Conv {
        rounded: Rounded,
        geometry: Geometry,
        x: Affine,
        y: Affine,
        relu: bool,
    },
    Sum(Sum, Affine),
    /// To be rounded to codes of this meaning.
    Mean(Affine),
    Head {
        rounded: Rounded,
        x: Affine,
    },
}

/// The network's operations in their order.
pub struct Quantised {
    pub operations: Vec<Operation>,
    pub input: Affine,
    /// What rounding has done to the weights of each layer, the head last.
    pub changes: Vec<Vec<f64>>,
    /// What one step of the codes stands for, of the images and of every result in its order; 0 where it is floats.
    pub scales: Vec<f32>,
}

/// An operation, ready to be run.
enum Step {
    Conv(Box<Conv2dInt8>, Affine),
    Sum(Sum, Affine),
    Mean(Affine),
    Head(Box<LinearInt8>),
}

/// The network on a CPU.
pub struct ByteNetwork<'a> {
    cpu: &'a Cpu,
    steps: Vec<Step>,
    /// The operation that comes next.
    next: usize,
    input: Affine,
}

/// The codes of values from `least` to `greatest`, 0 among them.
fn affine(seen: &Seen) -> Result<Affine> {
    let (least, greatest) = (seen.least.min(0.0), seen.greatest.max(0.0));
    let scale = ((greatest - least) / 255.0).max(f32::MIN_POSITIVE);
    Affine::new(Byte::U8, scale, (-least / scale).round() as i32)
}

/// A layer's weights in bytes: symmetric, a scale an output; and its bias in steps of the sums.
pub struct Rounded {
    codes: Vec<i8>,
    scales: Vec<f32>,
    pub bias: Vec<i32>,
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

    pub fn weight(&self) -> Result<Int8Weight<'_>> {
        Int8Weight::new(Bytes::I8(&self.codes), self.shape, &self.scales, &[])
    }

    fn values(&self) -> Vec<f64> {
        let scale = |i: usize| f64::from(self.scales[i / self.shape[1]]);
        self.codes.iter().enumerate().map(|(i, &code)| f64::from(code) * scale(i)).collect()
    }
}

/// Quantises the operations one after the other. What lies between them is what codes there stand for.
struct Quantise<'a> {
    network: &'a Network,
    /// What calibration has seen, from the result of the next operation on.
    seen: std::slice::Iter<'a, Seen>,
    out: &'a mut Quantised,
}

impl Quantise<'_> {
    fn result(&mut self) -> Result<Affine> {
        let y = affine(self.seen.next().expect("calibration has seen every result"))?;
        self.out.scales.push(y.scale());
        Ok(y)
    }
}

impl Arithmetic for Quantise<'_> {
    type Tensor = Affine;

    fn conv(&mut self, layer: usize, &x: &Affine) -> Result<Affine> {
        let (layer, y) = (&self.network.layers[layer], self.result()?);
        let rounded = Rounded::new(layer, x);
        self.out.changes.push(change(layer, rounded.values()));
        self.out.operations.push(Operation::Conv { rounded, geometry: layer.geometry, x, y, relu: layer.relu });
        Ok(y)
    }

    fn add(&mut self, &a: &Affine, &b: &Affine) -> Result<Affine> {
        let y = self.result()?;
        self.out.operations.push(Operation::Sum(Sum::new([a, b], y, true)?, y));
        Ok(y)
    }

    fn pool(&mut self, _: &Affine) -> Result<Affine> {
        let y = self.result()?;
        self.out.operations.push(Operation::Mean(y));
        Ok(y)
    }

    fn head(&mut self, &x: &Affine) -> Result<Affine> {
        let rounded = Rounded::new(&self.network.head, x);
        self.out.changes.push(change(&self.network.head, rounded.values()));
        self.out.operations.push(Operation::Head { rounded, x });
        self.out.scales.push(0.0);
        Ok(x)
    }
}

impl Quantised {
    /// Quantises a network by what calibration has seen of it.
    pub fn new(network: &Network, seen: &[Seen]) -> Result<Self> {
        // Images are bytes already.
        let input = Affine::new(Byte::U8, 1.0 / 255.0, 0)?;
        let mut out = Self { operations: Vec::new(), input, changes: Vec::new(), scales: vec![0.0] };
        network.run(&mut Quantise { network, seen: seen[1..].iter(), out: &mut out }, &input)?;
        Ok(out)
    }
}

/// The activation of a layer.
pub fn activation(relu: bool) -> Activation {
    if relu { Activation::Relu } else { Activation::None }
}

impl Step {
    fn new(operation: &Operation) -> Result<Self> {
        Ok(match *operation {
            Operation::Conv { ref rounded, geometry, x, y, relu } => {
                let conv = Conv2dInt8::new(&rounded.weight()?, geometry, x, y)?.with_bias(rounded.bias.clone())?;
                let conv = conv.with_activation(activation(relu))?;
                Step::Conv(Box::new(conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc)), y)
            }
            Operation::Sum(sum, y) => Step::Sum(sum, y),
            Operation::Mean(y) => Step::Mean(y),
            Operation::Head { ref rounded, x } => {
                let head = LinearInt8::with_float_outputs(&rounded.weight()?, x)?;
                Step::Head(Box::new(head.with_bias(rounded.bias.clone())?))
            }
        })
    }
}

impl<'a> ByteNetwork<'a> {
    /// Packs the operations' weights.
    pub fn new(cpu: &'a Cpu, quantised: &Quantised) -> Result<Self> {
        let steps = quantised.operations.iter().map(Step::new).collect::<Result<_>>()?;
        Ok(Self { cpu, steps, next: 0, input: quantised.input })
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        let bytes = |step: &Step| match step {
            Step::Conv(conv, _) => conv.bytes(),
            Step::Sum(..) | Step::Mean(_) => 0,
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
        let Step::Conv(conv, y) = self.step() else { unreachable!("operations come in one order") };
        let shape = Conv2dShape::new(*conv.geometry(), x.batch, x.size)?;
        let mut bytes = vec![0; shape.y_len()];
        conv.forward(cpu, Bytes::U8(&x.bytes), x.batch, x.size, BytesMut::U8(&mut bytes))?;
        Ok(Codes { bytes, floats: Vec::new(), affine: *y, batch: x.batch, size: shape.output() })
    }

    fn add(&mut self, a: &Codes, b: &Codes) -> Result<Codes> {
        let Step::Sum(sum, y) = self.step() else { unreachable!("operations come in one order") };
        let code = |(&a, &b): (&u8, &u8)| sum.code(a.into(), b.into()) as u8;
        let bytes = a.bytes.iter().zip(&b.bytes).map(code).collect();
        Ok(Codes { bytes, floats: Vec::new(), affine: *y, ..*a })
    }

    fn pool(&mut self, x: &Codes) -> Result<Codes> {
        let &Step::Mean(y) = self.step() else { unreachable!("operations come in one order") };
        let pixels = x.size[0] * x.size[1];
        let channels = x.bytes.len() / (x.batch * pixels);
        let mean = Mean::new(x.affine, pixels, y)?;
        let mut bytes = Vec::with_capacity(x.batch * channels);
        for image in x.bytes.chunks_exact(pixels * channels) {
            let mut sums = vec![0i32; channels];
            for pixel in image.chunks_exact(channels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &code)| *sum += i32::from(code));
            }
            bytes.extend(sums.iter().map(|&sum| mean.code(sum) as u8));
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
