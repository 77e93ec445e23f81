//! Convolutions on a GPU: graphs of launches on weights that take turns, replayed. Images lie pixel by pixel, and stay.

use super::int8::Source as Int8Source;
use super::plan::{Plan as Cases, Shape};
use super::{Args, Bench, LeftOut, Line, Share, name};
use crate::app::App;
use crate::args::WeightKind;
use crate::args::conv::Kind;
use crate::commands::bench::replays::{GRAPH_SECONDS, TIMES_L2, expected_seconds, replay};
use crate::commands::bench::report::{self, OnGpu, Timed, verdict};
use crate::commands::bench::source::Source;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, rate, table};
use crate::timing::Measured;
use halfbyte::Float;
use halfbyte::conv::{Conv2dShape, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::cuda::conv::{self, Call, Problem, Weights};
use halfbyte::cuda::dispatch::{Kernel, Operation, Plan};
use halfbyte::cuda::driver::{Buffer, Stream};
use halfbyte::cuda::int8::{self, Epilogue as Int8Epilogue, Layer, Target};
use halfbyte::cuda::matmul::Epilogue;
use halfbyte::cuda::nn::FloatBuffer;
use halfbyte::cuda::roofline::Roofline;
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::format::int8::Byte;
use halfbyte::kernel::Activation;
use serde::Serialize;

/// Bytes that the rate of memory is measured with.
const READ_BYTES: usize = 1 << 30;

/// Copies of a weight at most, since small weights are none of what takes time.
const MOST_COPIES: usize = 256;

type Report = report::Report<OnGpu, Read, Line, More>;

/// What the device reads.
#[derive(Serialize)]
struct Read {
    read_gb_per_s: f64,
}

/// What was not measured, and what `--sweep` measured besides.
#[derive(Serialize)]
struct More {
    #[serde(flatten)]
    left_out: LeftOut,
    swept: Vec<Swept>,
}

/// A kernel in one of its configurations.
#[derive(Serialize)]
struct Swept {
    format: String,
    batch: usize,
    convolution: String,
    kernel: &'static str,
    configuration: String,
    median_us: f64,
}

/// Runs all convolutions of the plan on a GPU.
pub(super) fn run(args: &Args, plan: Cases, number: u32, app: &App) -> Result<()> {
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    progress.step("opening the GPU");
    let gpu = Gpu::open(number)?;
    let stream = gpu.stream()?;
    let read_gb_per_s = read_rate(&gpu, &stream)?;
    let (mut results, mut left_out, mut swept) = (Vec::new(), LeftOut::default(), Vec::new());
    for (shape, &batch) in plan.shapes.iter().flat_map(|shape| plan.batches.iter().map(move |batch| (shape, batch))) {
        let x = args.x.map_or(Float::F16, Float::from);
        let (kernel, check, sweep) = (args.kernel.as_deref(), args.check, args.sweep);
        let (gpu, stream, layout) = (&gpu, &stream, Layout2d::from(args.layout));
        let device = Device { gpu, stream, cpu: &cpu, shape, batch, x, layout, kernel, check, sweep };
        for &kind in &plan.kinds {
            if left_out.refuses(kind, shape) {
                continue;
            }
            progress.step(format!("{kind} {} batch {batch}", name(&shape.geometry(), shape.size)));
            let (mut line, bytes) = match kind {
                Kind::Floats(kind) => device.floats(kind, &mut swept)?,
                Kind::Int8 => device.bytes(args.bytes(), &mut swept)?,
            };
            let read_percent = 100.0 * bytes as f64 / (line.median_us * 1e3) / read_gb_per_s;
            line.limit = Share { peak_percent: read_percent, peak: "read" };
            results.push(line.beside(plan.origin.is_some().then(|| shape.origin.clone()), None));
        }
    }
    drop(progress);
    let passed = report::passed(args.check, &results);
    let (limits, more) = (Read { read_gb_per_s }, More { left_out, swept });
    let report = Report { machine: OnGpu::of(&gpu), origin: plan.origin, limits, results, more, passed };
    app.result(&report, human)?;
    verdict(passed, report.results.len())
}

/// Gigabytes a second of a bare read.
fn read_rate(gpu: &Gpu, stream: &Stream) -> Result<f64> {
    let roofline = Roofline::new(gpu)?;
    let mut all = gpu.context().allocate::<u8>(READ_BYTES)?;
    stream.fill(all.view_mut(), 1)?;
    let mut sink = gpu.context().allocate::<u32>(1)?;
    let read = |stream: &Stream, _| roofline.read(stream, all.view(), &mut sink.view_mut());
    Ok(READ_BYTES as f64 / replay(stream, 2, read)?.median / 1e9)
}

/// Measures one convolution.
struct Device<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    cpu: &'a Cpu,
    shape: &'a Shape,
    batch: usize,
    x: Float,
    layout: Layout2d,
    kernel: Option<&'a str>,
    check: bool,
    sweep: bool,
}

impl Device<'_> {
    fn swept<O: Operation>(&self, format: &str, plan: &Plan<O>, measured: Measured) -> Swept {
        Swept {
            format: format.to_owned(),
            batch: self.batch,
            convolution: name(&self.shape.geometry(), self.shape.size),
            kernel: plan.kernel().name,
            configuration: plan.to_string(),
            median_us: measured.median * 1e6,
        }
    }

    /// What is measured: the plan of the kernel that was asked for, or of the first that can; and for a sweep every configuration of
    /// the kernels that have several.
    fn plans<O: Operation>(&self, problem: &O::Problem) -> Result<(Plan<O>, Vec<Plan<O>>)> {
        let caps = self.gpu.caps();
        let kernels: Vec<&'static Kernel<O>> = match self.kernel {
            None => O::KERNELS.iter().collect(),
            Some(name) => O::KERNELS.iter().filter(|kernel| kernel.name == name).collect(),
        };
        let chosen = match (self.kernel, kernels.as_slice()) {
            (None, _) => Plan::of(&caps, problem)?,
            (Some(_), [kernel, ..]) => kernel.plan(&caps, problem).map_err(|why| {
                let what = format!("{} does not compute {problem}", kernel.name);
                Failure::usage(what, why.to_string(), "`halfbyte explain conv` lists every kernel with its reason")
            })?,
            (Some(name), []) => {
                let names = O::KERNELS.iter().map(|kernel| kernel.name).collect::<Vec<_>>().join(", ");
                let (cause, help) = (format!("--kernel {name}"), format!("name one of {names}"));
                return Err(Failure::usage(format!("no such kernel for {}", O::NAME), cause, help));
            }
        };
        let all = kernels.into_iter().filter(|_| self.sweep).map(|kernel| kernel.plans(&caps, problem));
        Ok((chosen, all.filter(|plans| plans.len() > 1).flatten().collect()))
    }

    /// What compares results with the reference, and describes them.
    fn bench(&self) -> Bench<'_> {
        let Self { cpu, shape, batch, x, layout, check, .. } = *self;
        Bench { cpu, shape, batch, x, layout, check }
    }

    fn copies(&self, weight_bytes: usize) -> usize {
        let cold = TIMES_L2 * self.gpu.caps().l2_bytes as usize;
        cold.div_ceil(weight_bytes.max(1)).clamp(1, MOST_COPIES) + 1
    }

    /// Launches of a graph: whole rounds through the copies, and long enough.
    fn launches(&self, copies: usize, bytes: usize, operations: f64) -> usize {
        let seconds = expected_seconds(bytes, operations);
        copies * (GRAPH_SECONDS / seconds / copies as f64).ceil().max(1.0) as usize
    }

    /// A line, and the bytes of weight and images.
    fn floats(&self, kind: WeightKind, swept: &mut Vec<Swept>) -> Result<(Line, usize)> {
        let Self { gpu, stream, batch, x: dtype, layout, .. } = *self;
        let (geometry, size) = (self.shape.geometry(), self.shape.size);
        let shape = Conv2dShape::new(geometry, batch, size)?;
        let source = Source::new(kind, [geometry.co, geometry.k()])?;
        let first = match &source {
            Source::Quantized(w, act) => Weights::pack(gpu, stream, w, *act, geometry, dtype)?,
            Source::Dense(w) => Weights::dense(gpu, stream, w.as_floats(), geometry)?,
        };
        let mut weights = vec![first];
        while weights.len() < self.copies(weights[0].bytes()) {
            let copy = weights[0].duplicate(stream)?;
            weights.push(copy);
        }
        let (layouts, packed) = ([layout; 2], weights[0].layout());
        let problem = Problem { format: weights[0].format(), shape, x: dtype, y: dtype, layouts, packed };
        let (chosen, all) = self.plans(&problem)?;
        let needed = all.iter().chain([&chosen]).map(Plan::workspace_bytes).max().unwrap_or(0);
        let mut workspace = Workspace::new(gpu, stream, needed)?;
        let x = random::floats(shape.x_len(), 2, dtype);
        let on_device = FloatBuffer::upload(gpu, stream, x.as_floats())?;
        let mut y = FloatBuffer::allocate(gpu, dtype, shape.y_len())?;
        let bytes = weights[0].bytes() + on_device.bytes() + y.bytes();
        let launches = self.launches(weights.len(), bytes, shape.operations());
        let mut run = |stream: &Stream, i: usize, plan: &conv::Plan| {
            let call = Call {
                x: on_device.all(),
                x_layout: layout,
                batch,
                size,
                w: &weights[i % weights.len()],
                epilogue: Epilogue::default(),
                y: y.all_mut(),
                y_layout: layout,
                workspace: Some(&mut workspace),
            };
            plan.run(gpu, stream, call)
        };
        for plan in &all {
            let measured = replay(stream, launches, |stream, i| run(stream, i, plan))?;
            swept.push(self.swept(&kind.to_string(), plan, measured));
        }
        let measured = replay(stream, launches, |stream, i| run(stream, i, &chosen))?;
        let check = match self.check {
            true => {
                let y = y.to_f32(stream, 0..y.len())?;
                Some(self.bench().compare(&source, &shape, x.as_floats(), &y, chosen.bound())?)
            }
            false => None,
        };
        let (kernel, weight_bytes) = (chosen.kernel().name, weights[0].bytes());
        let timed = Timed { kernel, weight_bytes, copies: weights.len(), measured, operations: shape.operations() };
        Ok((self.bench().line(kind.to_string(), dtype.name(), &shape, timed, check), bytes))
    }

    fn upload(&self, values: &[u8]) -> Result<Buffer<u8>> {
        let mut buffer = self.gpu.context().allocate(values.len())?;
        self.stream.upload(values, buffer.view_mut())?;
        Ok(buffer)
    }

    /// The same of bytes, with bias and relu.
    fn bytes(&self, byte: Byte, swept: &mut Vec<Swept>) -> Result<(Line, usize)> {
        let Self { gpu, stream, batch, layout, .. } = *self;
        let (geometry, size) = (self.shape.geometry(), self.shape.size);
        let shape = Conv2dShape::new(geometry, batch, size)?;
        let source = Int8Source::new(&geometry, byte)?;
        let weight = source.weight(&geometry)?;
        let epilogue = Int8Epilogue { bias: Some(&source.bias), float_bias: None, activation: Activation::Relu };
        let mut layers = vec![Layer::conv2d(gpu, stream, &weight, geometry, source.x, Some(source.y), epilogue)?];
        while layers.len() < self.copies(layers[0].bytes()) {
            let copy = layers[0].duplicate(stream)?;
            layers.push(copy);
        }
        let layouts = [layout; 2];
        let problem = int8::Problem { shape, x: byte, symmetric: layers[0].is_symmetric(), floats: false, layouts };
        let (chosen, all) = self.plans(&problem)?;
        let needed = all.iter().chain([&chosen]).map(Plan::workspace_bytes).max().unwrap_or(0);
        let mut workspace = Workspace::new(gpu, stream, needed)?;
        let x = random::bytes(shape.x_len(), 3);
        let on_device = self.upload(&x)?;
        let mut y = gpu.context().allocate::<u8>(shape.y_len())?;
        let bytes = layers[0].bytes() + shape.x_len() + shape.y_len();
        // Bytes multiply at twice the rate of halfs.
        let launches = self.launches(layers.len(), bytes, shape.operations() / 2.0);
        let mut run = |stream: &Stream, i: usize, plan: &int8::Plan| {
            let call = int8::Call {
                layer: &layers[i % layers.len()],
                x: on_device.view(),
                x_layout: layout,
                batch,
                size,
                y: Target::Bytes(y.view_mut()),
                y_layout: layout,
                workspace: Some(&mut workspace),
            };
            plan.run(gpu, stream, call)
        };
        for plan in &all {
            let measured = replay(stream, launches, |stream, i| run(stream, i, plan))?;
            swept.push(self.swept("int8", plan, measured));
        }
        let measured = replay(stream, launches, |stream, i| run(stream, i, &chosen))?;
        let check = match self.check {
            true => {
                let mut codes = vec![0; shape.y_len()];
                stream.download(y.view(), &mut codes)?;
                let [x, y] = [&x, &codes].map(|bits| super::int8::bytes(byte, bits));
                Some(self.bench().compare_int8(&source, &shape, x, y)?)
            }
            false => None,
        };
        let (kernel, weight_bytes) = (chosen.kernel().name, layers[0].bytes());
        let timed = Timed { kernel, weight_bytes, copies: layers.len(), measured, operations: shape.operations() };
        Ok((self.bench().line("int8".to_owned(), byte.name(), &shape, timed, check), bytes))
    }
}

fn human(report: &Report) -> String {
    let mut columns = vec![("format", Align::Left), ("x", Align::Left), ("batch", Align::Right)];
    columns.extend([("convolution", Align::Left), ("kernel", Align::Left)]);
    columns.extend(["µs", "±%", "TFLOP/s", "of read"].map(|name| (name, Align::Right)));
    let row = |line: &Line| {
        let mut row = vec![line.format.clone(), line.x.to_owned(), line.work.batch.to_string()];
        row.extend([line.work.name(), line.kernel.to_owned(), rate(line.median_us)]);
        row.extend([format!("{:.1}", 50.0 * line.spread), format!("{:.1}", line.gflop_per_s / 1e3)]);
        row.push(format!("{:.0} %", line.limit.peak_percent));
        row
    };
    let mut out = report.table("x and weights random, weights take turns, images stay", columns, row);
    let More { left_out, swept } = &report.more;
    if !swept.is_empty() {
        let mut columns = ["format", "convolution", "kernel", "configuration"].map(|name| (name, Align::Left)).to_vec();
        columns.extend(["batch", "µs"].map(|name| (name, Align::Right)));
        let row = |form: &Swept| {
            let texts = [&form.format, &form.convolution, form.kernel, &form.configuration];
            texts.map(str::to_owned).into_iter().chain([form.batch.to_string(), rate(form.median_us)]).collect()
        };
        out += &table(&columns, &swept.iter().map(row).collect::<Vec<Vec<String>>>());
        out += "\n";
    }
    out + &left_out.lines() + &format!("device read {:.0} GB/s\n", report.limits.read_gb_per_s)
}
