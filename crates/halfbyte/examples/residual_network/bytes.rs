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
use super::machine::Machine;
use super::network::{Arithmetic, Layer, Network};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::format::int8::{Affine, Byte, Bytes, Int8Weight, Mean, Sum};
use halfbyte::ops::{Activation, Conv2dInt8, Device, LinearInt8};
use halfbyte::{Float, Result};

/// Images pixel by pixel, and what their bytes stand for.
pub struct Codes<M: Machine> {
    pub values: Values<M>,
    pub affine: Affine,
    pub batch: usize,
    pub size: [usize; 2],
    pub channels: usize,
}

/// Bytes, or floats where the head has been.
pub enum Values<M: Machine> {
    Bytes(M::Bytes),
    Floats(M::Floats),
}

impl<M: Machine> Codes<M> {
    pub fn bytes(&self) -> &M::Bytes {
        let Values::Bytes(bytes) = &self.values else { unreachable!("the head comes last") };
        bytes
    }

    pub fn classes(&self) -> &M::Floats {
        let Values::Floats(floats) = &self.values else { unreachable!("the head has run") };
        floats
    }

    pub fn pixels(&self) -> usize {
        self.size[0] * self.size[1]
    }
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
enum Step<D: Device> {
    Conv(Box<Conv2dInt8<D>>, Affine),
    Sum(Sum, Affine),
    Mean(Affine),
    Head(Box<LinearInt8<D>>),
}

/// The network on a machine.
pub struct ByteNetwork<'a, M: Machine> {
    pub machine: &'a M,
    steps: Vec<Step<M::Device>>,
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

impl<D: Device> Step<D> {
    fn new(device: &D, operation: &Operation) -> Result<Self> {
        Ok(match *operation {
            Operation::Conv { ref rounded, geometry, x, y, relu } => {
                let conv = Conv2dInt8::on(device, &rounded.weight()?, geometry, x, Some(y))?;
                let conv = conv.with_bias(rounded.bias.clone())?.with_activation(activation(relu))?;
                Step::Conv(Box::new(conv.with_layouts(Layout2d::Nhwc, Layout2d::Nhwc)), y)
            }
            Operation::Sum(sum, y) => Step::Sum(sum, y),
            Operation::Mean(y) => Step::Mean(y),
            Operation::Head { ref rounded, x } => {
                let head = LinearInt8::on(device, &rounded.weight()?, x, None)?;
                Step::Head(Box::new(head.with_bias(rounded.bias.clone())?))
            }
        })
    }
}

impl<'a, M: Machine> ByteNetwork<'a, M> {
    /// Packs the operations' weights.
    pub fn new(machine: &'a M, quantised: &Quantised) -> Result<Self> {
        let step = |operation| Step::new(machine.device(), operation);
        let steps = quantised.operations.iter().map(step).collect::<Result<_>>()?;
        Ok(Self { machine, steps, next: 0, input: quantised.input })
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        let bytes = |step: &Step<M::Device>| match step {
            Step::Conv(conv, _) => conv.bytes(),
            Step::Sum(..) | Step::Mean(_) => 0,
            Step::Head(head) => head.bytes(),
        };
        self.steps.iter().map(bytes).sum()
    }

    /// Images of bytes.
    pub fn images(&self, pixels: &[u8], batch: usize, size: usize) -> Result<Codes<M>> {
        let (values, channels) =
            (Values::Bytes(self.machine.upload_bytes(pixels)?), pixels.len() / (batch * size * size));
        Ok(Codes { values, affine: self.input, batch, size: [size; 2], channels })
    }

    /// The operation that comes next; after the last one the first again.
    fn step(&mut self) -> (&'a M, &Step<M::Device>) {
        let step = self.next;
        self.next = (step + 1) % self.steps.len();
        (self.machine, &self.steps[step])
    }
}

impl<M: Machine> Arithmetic for ByteNetwork<'_, M> {
    type Tensor = Codes<M>;

    fn conv(&mut self, _: usize, x: &Codes<M>) -> Result<Codes<M>> {
        let (machine, Step::Conv(conv, affine)) = self.step() else { unreachable!("operations come in one order") };
        let shape = Conv2dShape::new(*conv.geometry(), x.batch, x.size)?;
        let mut bytes = machine.bytes(shape.y_len())?;
        conv.forward(machine.device(), M::x_bytes(x.bytes()), x.batch, x.size, M::y_bytes(&mut bytes))?;
        let (values, size, channels) = (Values::Bytes(bytes), shape.output(), shape.geometry().co);
        Ok(Codes { values, affine: *affine, batch: x.batch, size, channels })
    }

    fn add(&mut self, a: &Codes<M>, b: &Codes<M>) -> Result<Codes<M>> {
        let (machine, &Step::Sum(sum, affine)) = self.step() else { unreachable!("operations come in one order") };
        let mut bytes = machine.bytes(a.batch * a.pixels() * a.channels)?;
        machine.add_codes(&sum, [a.bytes(), b.bytes()], &mut bytes)?;
        Ok(Codes { values: Values::Bytes(bytes), affine, ..*a })
    }

    fn pool(&mut self, x: &Codes<M>) -> Result<Codes<M>> {
        let (machine, &Step::Mean(affine)) = self.step() else { unreachable!("operations come in one order") };
        let mean = Mean::new(x.affine, x.pixels(), affine)?;
        let mut bytes = machine.bytes(x.batch * x.channels)?;
        machine.mean_codes(&mean, x.bytes(), [x.batch, x.pixels(), x.channels], &mut bytes)?;
        Ok(Codes { values: Values::Bytes(bytes), affine, size: [1, 1], ..*x })
    }

    fn head(&mut self, x: &Codes<M>) -> Result<Codes<M>> {
        let (machine, Step::Head(head)) = self.step() else { unreachable!("operations come in one order") };
        let mut floats = machine.floats(Float::F32, x.batch * head.n())?;
        head.forward_floats(machine.device(), M::x_bytes(x.bytes()), x.batch, M::y(&mut floats))?;
        Ok(Codes { values: Values::Floats(floats), channels: head.n(), ..*x })
    }
}
