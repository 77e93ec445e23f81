//! The network on a GPU, in bytes and with 4-bit weights and half images: every tensor stays on the device, all work is in one
//! stream, and the host waits only where it wants the classes.
//!
//! Each operation has a buffer of its own for its result, which the next run writes again.

use super::bytes::{Operation, Quantised, activation};
use super::network::{Arithmetic, Network};
use half::f16;
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cuda::driver::{Buffer, FloatView, Stream, View, ViewMut};
use halfbyte::cuda::int8::{self, Layer};
use halfbyte::cuda::matmul::{self, Packed};
use halfbyte::cuda::nn::{self, FloatBuffer};
use halfbyte::cuda::{Caps, Gpu, Workspace, conv};
use halfbyte::format::int8::{Affine, Mean, Sum};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::{Activation, Problem};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Floats, Format, Group, QTensor, Result};

/// A result on the device: whose buffer it lies in, and its shape. The images are in buffer 0.
#[derive(Clone, Copy)]
pub struct Place {
    buffer: usize,
    pub batch: usize,
    pub size: [usize; 2],
    pub channels: usize,
}

impl Place {
    /// Elements.
    pub fn len(self) -> usize {
        self.batch * self.pixels() * self.channels
    }

    pub fn pixels(self) -> usize {
        self.size[0] * self.size[1]
    }
}

/// What an operation leaves its result in, as large as the largest so far.
pub trait Room: Sized {
    fn allocate(gpu: &Gpu, len: usize) -> Result<Self>;
    fn room(&self) -> usize;
}

impl Room for Buffer<u8> {
    fn allocate(gpu: &Gpu, len: usize) -> Result<Self> {
        gpu.context().allocate(len)
    }

    fn room(&self) -> usize {
        self.len()
    }
}

impl Room for FloatBuffer {
    fn allocate(gpu: &Gpu, len: usize) -> Result<Self> {
        FloatBuffer::allocate(gpu, Float::F16, len)
    }

    fn room(&self) -> usize {
        self.len()
    }
}

/// The device with the results of all operations, and the number of the one that comes next.
struct Tape<'a, T> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    results: Vec<Option<T>>,
    /// The head's, in f32.
    classes: Option<Buffer<f32>>,
    workspace: Option<Workspace>,
    /// From 0; the result of an operation lies in the buffer after its number.
    next: usize,
}

impl<'a, T: Room> Tape<'a, T> {
    fn new(gpu: &'a Gpu, stream: &'a Stream, operations: usize) -> Self {
        let results = (0..=operations).map(|_| None).collect();
        Self { gpu, stream, results, classes: None, workspace: None, next: 0 }
    }

    /// The number of the next operation; after the last one the first again.
    fn step(&mut self) -> usize {
        let step = self.next;
        self.next = (step + 1) % (self.results.len() - 1);
        step
    }

    /// A buffer for a result, taken out while it is written.
    fn take(&mut self, buffer: usize, len: usize) -> Result<T> {
        match self.results[buffer].take() {
            Some(room) if room.room() >= len => Ok(room),
            _ => T::allocate(self.gpu, len),
        }
    }

    fn result(&self, place: Place) -> &T {
        self.results[place.buffer].as_ref().expect("a result of this run")
    }

    fn workspace(&mut self, bytes: usize) -> Result<Workspace> {
        match self.workspace.take() {
            Some(workspace) if workspace.bytes() >= bytes => Ok(workspace),
            _ => Workspace::new(self.gpu, self.stream, bytes),
        }
    }

    fn take_classes(&mut self, len: usize) -> Result<Buffer<f32>> {
        match self.classes.take() {
            Some(classes) if classes.len() >= len => Ok(classes),
            _ => self.gpu.context().allocate(len),
        }
    }

    /// The classes on the host.
    fn classes(&self, place: Place) -> Result<Vec<f32>> {
        let mut classes = vec![0.0; place.len()];
        let on_device = self.classes.as_ref().expect("the head has run");
        self.stream.download(on_device.view().slice(0..classes.len()), &mut classes)?;
        Ok(classes)
    }
}

enum ByteStep {
    /// Convolution or head.
    Layer(Box<Layer>),
    Sum(Sum),
    Mean(Affine),
}

/// The network in bytes.
pub struct GpuBytes<'a> {
    tape: Tape<'a, Buffer<u8>>,
    steps: Vec<ByteStep>,
    /// What the codes of each buffer stand for.
    meanings: Vec<Affine>,
}

impl<'a> GpuBytes<'a> {
    /// Brings the operations to the device.
    pub fn new(gpu: &'a Gpu, stream: &'a Stream, quantised: &Quantised) -> Result<Self> {
        let mut meanings = vec![quantised.input];
        let step = |operation: &Operation| {
            Ok(match *operation {
                Operation::Conv { ref rounded, geometry, x, y, relu } => {
                    meanings.push(y);
                    let epilogue = int8::Epilogue {
                        bias: Some(&rounded.bias),
                        activation: activation(relu),
                        ..int8::Epilogue::default()
                    };
                    let w = rounded.weight()?;
                    ByteStep::Layer(Box::new(Layer::conv2d(gpu, stream, &w, geometry, x, Some(y), epilogue)?))
                }
                Operation::Sum(sum, y) => {
                    meanings.push(y);
                    ByteStep::Sum(sum)
                }
                Operation::Mean(y) => {
                    meanings.push(y);
                    ByteStep::Mean(y)
                }
                Operation::Head { ref rounded, x } => {
                    meanings.push(x);
                    let epilogue = int8::Epilogue { bias: Some(&rounded.bias), ..int8::Epilogue::default() };
                    ByteStep::Layer(Box::new(Layer::linear(gpu, stream, &rounded.weight()?, x, None, epilogue)?))
                }
            })
        };
        let steps = quantised.operations.iter().map(step).collect::<Result<Vec<_>>>()?;
        Ok(Self { tape: Tape::new(gpu, stream, steps.len()), steps, meanings })
    }

    /// Brings images to the device.
    pub fn images(&mut self, pixels: &[u8], batch: usize, size: usize) -> Result<Place> {
        let mut buffer = self.tape.take(0, pixels.len())?;
        self.tape.stream.upload(pixels, buffer.view_mut().slice(0..pixels.len()))?;
        self.tape.results[0] = Some(buffer);
        Ok(Place { buffer: 0, batch, size: [size; 2], channels: pixels.len() / (batch * size * size) })
    }

    /// The codes of a result on the host.
    pub fn codes(&self, place: Place) -> Result<Vec<u8>> {
        let mut codes = vec![0; place.len()];
        self.tape.stream.download(self.view(place), &mut codes)?;
        Ok(codes)
    }

    /// The classes on the host.
    pub fn classes(&self, place: Place) -> Result<Vec<f32>> {
        self.tape.classes(place)
    }

    /// Bytes that the weights take on the device.
    pub fn bytes(&self) -> usize {
        self.steps.iter().map(|step| if let ByteStep::Layer(layer) = step { layer.bytes() } else { 0 }).sum()
    }

    fn view(&self, place: Place) -> View<'_, u8> {
        self.tape.result(place).view().slice(0..place.len())
    }

    /// Runs a layer on images, to bytes or to classes.
    fn layer(&mut self, step: usize, x: Place, y: Place, target: int8::Target<'_>) -> Result<Place> {
        let ByteStep::Layer(layer) = &self.steps[step] else { unreachable!("operations come in one order") };
        let problem = int8::Problem {
            shape: Conv2dShape::new(*layer.geometry(), x.batch, x.size)?,
            x: layer.x().byte(),
            symmetric: layer.is_symmetric(),
            floats: layer.y().is_none(),
            layouts: [Layout2d::Nhwc; 2],
        };
        let mut workspace = self.tape.workspace(int8::plan(self.tape.gpu, layer, problem)?.workspace_bytes())?;
        let call = int8::Call {
            layer,
            x: self.view(x),
            x_layout: Layout2d::Nhwc,
            batch: x.batch,
            size: x.size,
            y: target,
            y_layout: Layout2d::Nhwc,
            workspace: Some(&mut workspace),
        };
        int8::run(self.tape.gpu, self.tape.stream, call)?;
        self.tape.workspace = Some(workspace);
        Ok(y)
    }

    fn geometry(&self, step: usize) -> Geometry {
        match &self.steps[step] {
            ByteStep::Layer(layer) => *layer.geometry(),
            _ => unreachable!("operations come in one order"),
        }
    }

    /// Writes a result.
    fn write(&mut self, y: Place, work: impl FnOnce(&mut Self, ViewMut<'_, u8>) -> Result<()>) -> Result<Place> {
        let mut buffer = self.tape.take(y.buffer, y.len())?;
        work(self, buffer.view_mut().slice(0..y.len()))?;
        self.tape.results[y.buffer] = Some(buffer);
        Ok(y)
    }
}

impl Arithmetic for GpuBytes<'_> {
    type Tensor = Place;

    fn conv(&mut self, _: usize, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let geometry = self.geometry(step);
        let size = Conv2dShape::new(geometry, x.batch, x.size)?.output();
        let y = Place { buffer: step + 1, batch: x.batch, size, channels: geometry.co };
        self.write(y, |this, to| this.layer(step, x, y, int8::Target::Bytes(to)).map(drop))
    }

    fn add(&mut self, &a: &Place, &b: &Place) -> Result<Place> {
        let step = self.tape.step();
        self.write(Place { buffer: step + 1, ..a }, |this, to| {
            let ByteStep::Sum(sum) = &this.steps[step] else { unreachable!("operations come in one order") };
            nn::add_codes(this.tape.gpu, this.tape.stream, sum, [this.view(a), this.view(b)], to)
        })
    }

    fn pool(&mut self, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let y = Place { buffer: step + 1, size: [1, 1], ..x };
        self.write(y, |this, to| {
            let &ByteStep::Mean(of_y) = &this.steps[step] else { unreachable!("operations come in one order") };
            let mean = Mean::new(this.meanings[x.buffer], x.pixels(), of_y)?;
            let size = [x.batch, x.pixels(), x.channels];
            nn::mean_codes(this.tape.gpu, this.tape.stream, &mean, this.view(x), size, to)
        })
    }

    fn head(&mut self, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let y = Place { buffer: step + 1, channels: self.geometry(step).co, ..x };
        let mut classes = self.tape.take_classes(y.len())?;
        let place = self.layer(step, x, y, int8::Target::Floats(classes.view_mut().slice(0..y.len()).into()))?;
        self.tape.classes = Some(classes);
        Ok(place)
    }
}

/// A layer with its bias.
struct Weighted<W> {
    weight: W,
    bias: Buffer<f32>,
    activation: Activation,
}

/// The network with quantised weights and images in halves.
pub struct GpuFloats<'a> {
    tape: Tape<'a, FloatBuffer>,
    layers: Vec<Weighted<conv::Weights>>,
    head: Weighted<Packed>,
}

impl<'a> GpuFloats<'a> {
    /// Quantises and packs the layers, as [`super::floats::FloatNetwork`] does.
    pub fn new(gpu: &'a Gpu, stream: &'a Stream, network: &Network, format: Format) -> Result<Self> {
        let upload = |bias: &[f32]| -> Result<Buffer<f32>> {
            let mut buffer = gpu.context().allocate(bias.len())?;
            stream.upload(bias, buffer.view_mut())?;
            Ok(buffer)
        };
        let rounded = |weights: &[f32], geometry: &Geometry| -> Result<QTensor> {
            let mut weight = format.weight;
            if geometry.scale_channels(weight.group).is_err() {
                weight.group = Group::Channel;
            }
            rtn(Floats::F32(weights), [geometry.co, geometry.k()], weight, Rtn::default())
        };
        let mut layers = Vec::new();
        for layer in &network.layers {
            let w = rounded(&layer.weights, &layer.geometry)?;
            let weight = conv::Weights::pack(gpu, stream, &w, format.act, layer.geometry, Float::F16)?;
            layers.push(Weighted { weight, bias: upload(&layer.bias)?, activation: activation(layer.relu) });
        }
        let head = &network.head;
        let shape = [head.geometry.co, head.geometry.k()];
        let w = rtn(Floats::F32(&head.weights), shape, format.weight, Rtn::default())?;
        let weight = matmul::pack(gpu, stream, &w, format.act, Float::F16)?;
        let head = Weighted { weight, bias: upload(&head.bias)?, activation: Activation::None };
        // Sums, one a block, and the mean stand beside the layers.
        let operations = network.operations();
        Ok(Self { tape: Tape::new(gpu, stream, operations), layers, head })
    }

    /// Brings images of bytes, which stand for 0 to 1, to the device.
    pub fn images(&mut self, pixels: &[u8], batch: usize, size: usize) -> Result<Place> {
        let values: Vec<f16> = pixels.iter().map(|&code| f16::from_f32(f32::from(code) / 255.0)).collect();
        let mut buffer = self.tape.take(0, values.len())?;
        if let FloatBuffer::F16(halves) = &mut buffer {
            self.tape.stream.upload(&values, halves.view_mut().slice(0..values.len()))?;
        }
        self.tape.results[0] = Some(buffer);
        Ok(Place { buffer: 0, batch, size: [size; 2], channels: pixels.len() / (batch * size * size) })
    }

    /// A result on the host, widened.
    pub fn values(&self, place: Place) -> Result<Vec<f32>> {
        let mut values = vec![f16::ZERO; place.len()];
        if let FloatView::F16(view) = self.view(place) {
            self.tape.stream.download(view, &mut values)?;
        }
        Ok(values.into_iter().map(f16::to_f32).collect())
    }

    /// The classes on the host.
    pub fn classes(&self, place: Place) -> Result<Vec<f32>> {
        self.tape.classes(place)
    }

    /// Bytes that the weights take on the device.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.weight.bytes()).sum::<usize>() + self.head.weight.bytes()
    }

    /// The convolution of a layer as a problem.
    pub fn problem(&self, layer: usize, x: Place) -> Result<conv::Problem> {
        let weight = &self.layers[layer].weight;
        let shape = Conv2dShape::new(*weight.geometry(), x.batch, x.size)?;
        let (x, y) = (Float::F16, Float::F16);
        let (layouts, packed) = ([Layout2d::Nhwc; 2], weight.layout());
        Ok(conv::Problem { format: weight.format(), shape, x, y, layouts, packed })
    }

    /// How far classes of so many images lie from the reference at most.
    pub fn bound_of_head(&self, caps: &Caps, m: usize) -> Result<Bound> {
        let problem = self.head_problem(m);
        Ok(matmul::select(caps, &problem, Some(self.head.weight.layout()))?.bound(caps, &problem))
    }

    fn head_problem(&self, m: usize) -> Problem {
        let [n, k] = self.head.weight.shape();
        Problem { format: Some(self.head.weight.format()), x: Float::F16, y: Float::F32, m, n, k }
    }

    fn view(&self, place: Place) -> FloatView<'_> {
        self.tape.result(place).view(0..place.len())
    }

    /// Writes a result.
    fn write(&mut self, y: Place, work: impl FnOnce(&mut Self, &mut FloatBuffer) -> Result<()>) -> Result<Place> {
        let mut buffer = self.tape.take(y.buffer, y.len())?;
        work(self, &mut buffer)?;
        self.tape.results[y.buffer] = Some(buffer);
        Ok(y)
    }
}

impl Arithmetic for GpuFloats<'_> {
    type Tensor = Place;

    fn conv(&mut self, layer: usize, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let problem = self.problem(layer, x)?;
        let channels = problem.shape.geometry().co;
        let y = Place { buffer: step + 1, batch: x.batch, size: problem.shape.output(), channels };
        self.write(y, |this, to| {
            let needed = conv::plan(this.tape.gpu, &this.layers[layer].weight, problem)?.workspace_bytes();
            let mut workspace = this.tape.workspace(needed)?;
            let Weighted { weight, bias, activation } = &this.layers[layer];
            let call = conv::Call {
                x: this.view(x),
                x_layout: Layout2d::Nhwc,
                batch: x.batch,
                size: x.size,
                w: weight,
                epilogue: matmul::Epilogue { bias: Some(bias.view()), activation: *activation },
                y: to.view_mut(0..y.len()),
                y_layout: Layout2d::Nhwc,
                workspace: Some(&mut workspace),
            };
            conv::run(this.tape.gpu, this.tape.stream, call)?;
            this.tape.workspace = Some(workspace);
            Ok(())
        })
    }

    fn add(&mut self, &a: &Place, &b: &Place) -> Result<Place> {
        let step = self.tape.step();
        self.write(Place { buffer: step + 1, ..a }, |this, to| {
            let sums = [this.view(a), this.view(b)];
            nn::add(this.tape.gpu, this.tape.stream, sums, true, to.view_mut(0..a.len()))
        })
    }

    fn pool(&mut self, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let y = Place { buffer: step + 1, size: [1, 1], ..x };
        self.write(y, |this, to| {
            let size = [x.batch, x.pixels(), x.channels];
            nn::mean(this.tape.gpu, this.tape.stream, this.view(x), size, to.view_mut(0..y.len()))
        })
    }

    fn head(&mut self, &x: &Place) -> Result<Place> {
        let step = self.tape.step();
        let problem = self.head_problem(x.batch);
        let y = Place { buffer: step + 1, channels: problem.n, ..x };
        let needed = matmul::workspace_bytes(&self.tape.gpu.caps(), &problem, self.head.weight.layout())?;
        let (mut classes, mut workspace) = (self.tape.take_classes(y.len())?, self.tape.workspace(needed)?);
        let call = matmul::Call {
            x: self.view(x),
            m: x.batch,
            w: &self.head.weight,
            epilogue: matmul::Epilogue { bias: Some(self.head.bias.view()), activation: Activation::None },
            y: classes.view_mut().slice(0..y.len()).into(),
            workspace: Some(&mut workspace),
            batch_invariant: false,
        };
        matmul::run(self.tape.gpu, self.tape.stream, call)?;
        (self.tape.classes, self.tape.workspace) = (Some(classes), Some(workspace));
        Ok(y)
    }
}
