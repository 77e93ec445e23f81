//! Products on a GPU: graphs of launches, one after the other on weights that are cold, replayed.
//!
//! In the same run are measured: a bare read of memory, large and of each weight's own size; the rate of the tensor cores,
//! with cuBLASLt on 8192³; and cuBLASLt's dense product of every shape, the baseline.

use super::super::case::Shape;
use super::super::check::{self, Computed};
use super::super::replays::{GRAPH_SECONDS, TIMES_L2, expected_seconds, replay};
use super::super::report::{self, OnGpu, Rooflines, Timed, verdict};
use super::cuda_report::{Blas, Limits, Line, Product, Report, Share, human};
use super::{Args, Plan, Rows, operations, sweep};
use crate::app::App;
use crate::args::WeightKind;
use crate::failure::{Failure, Result};
use crate::progress::Progress;
use crate::random;
use crate::timing::Measured;
use half::f16;
use halfbyte::cuda::cublaslt::CublasLt;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream};
use halfbyte::cuda::matmul::{self, Call, Epilogue, Kernel, Packed, Packer};
use halfbyte::cuda::nn::FloatBuffer;
use halfbyte::cuda::roofline::Roofline;
use halfbyte::cuda::{Gpu, Workspace};
use halfbyte::kernel::Problem;
use halfbyte::{Float, Format, QTensor, StoredTensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the large read.
const LARGE_BYTES: usize = 2 << 30;

/// Side of the matrices that the rate of the tensor cores is measured with.
const SIDE: usize = 8192;

/// Runs all products of the plan on a GPU.
pub fn run(args: &Args, plan: &Plan, number: u32, app: &App) -> Result<()> {
    let x: Float = args.x.map_or(Float::F16, Float::from);
    let y = args.y.map_or(x, Float::from);
    let formats = plan.kinds.iter().map(|&kind| match kind {
        WeightKind::Quantized(format) => Ok(format),
        WeightKind::Dense(_) => Err(Failure::usage(
            "dense weights are not measured by themselves on a GPU",
            format!("format {kind}"),
            "name a quantised format; the dense product of the same shape is the baseline",
        )),
    });
    let formats = formats.collect::<Result<Vec<Format>>>()?;
    let kernel = args.kernel.as_deref().map(|name| {
        let unknown =
            |why: halfbyte::Error| Failure::usage("no such kernel", format!("--kernel {name}"), why.to_string());
        matmul::by_name(name, None).map_err(unknown)
    });
    let kernel = kernel.transpose()?;
    let progress = Progress::steps(app);
    progress.step("opening the GPU");
    let gpu = Gpu::open(number)?;
    let stream = gpu.stream()?;
    let blas = if args.no_baseline { None } else { Some(CublasLt::open(&gpu)?) };
    let roofline = Roofline::new(&gpu)?;
    let large = gpu.context().allocate::<u32>(LARGE_BYTES / 4)?;
    let mut bench = Bench {
        gpu: &gpu,
        stream: &stream,
        roofline,
        large,
        blas,
        x,
        y,
        kernel,
        drawn: match (args.k_types, args.table) {
            (true, _) => Drawn::KTypes,
            (_, true) => Drawn::OfTable,
            _ => Drawn::Numbers,
        },
        round_weights: args.round_weights,
        check: args.check,
        progress: &progress,
    };
    bench.fill()?;
    if args.sweep {
        let (start, within) = (Instant::now(), args.within.map_or(Duration::MAX, Duration::from_secs));
        let (mut swept, mut left) = (Vec::new(), 0);
        for Rows { shape, m, .. } in &plan.shapes {
            if start.elapsed() >= within {
                left += m.len() * formats.len();
                continue;
            }
            let baselines = bench.baselines(shape, m)?;
            for &format in &formats {
                let weights = bench.random_weights([shape.n, shape.k], format)?;
                for (&m, &baseline_us) in m.iter().zip(&baselines) {
                    match start.elapsed() < within {
                        true => swept.push(bench.sweep(format, &weights, [m, shape.n, shape.k], baseline_us)?),
                        false => left += 1,
                    }
                }
            }
        }
        drop(bench);
        drop(progress);
        return sweep::print(&swept, left, app);
    }
    progress.step("measuring the device");
    let before = bench.limits()?;
    let mut results = Vec::new();
    for Rows { shape, named, m } in &plan.shapes {
        let baselines = bench.baselines(shape, m)?;
        for &format in &formats {
            let beside = |(line, &baseline): (Line, _)| line.beside(named.then(|| shape.origin.clone()), baseline);
            results.extend(bench.lines(shape, format, m)?.into_iter().zip(&baselines).map(beside));
        }
    }
    progress.step("measuring the device again");
    let after = bench.limits()?;
    let tensor = before.f16_tflop_per_s.zip(after.f16_tflop_per_s).map(|(a, b)| a.max(b));
    for line in &mut results {
        let (Product { m, n, k, .. }, share) = (&line.work, &mut line.limit);
        // Tensor cores multiply bytes twice as fast as halves, but cuBLASLt does not reach that: its rate is no limit.
        let (times, peak) = if share.quantized { (2.0, "2 × f16 peak") } else { (1.0, "f16 peak") };
        let computing = tensor.map_or(0.0, |rate| operations([*m, *n, *k]) / (times * rate) * 1e-6);
        (share.limit_us, share.limit) =
            if share.read_us > computing { (share.read_us, "read") } else { (computing, peak) };
        share.roofline_percent = 100.0 * share.limit_us / line.median_us;
    }
    let passed = report::passed(args.check, &results);
    let limits = Rooflines { roofline_before: before, roofline_after: after };
    let more = Blas { cublaslt: bench.blas.as_ref().map(|blas| blas.path().display().to_string()) };
    let report = Report { machine: OnGpu::of(&gpu), origin: plan.origin.clone(), limits, results, more, passed };
    drop(bench);
    drop(progress);
    app.result(&report, human)?;
    verdict(passed, report.results.len())
}

/// What weights are drawn as.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Drawn {
    /// Numbers of the format.
    Numbers,
    /// Those of GGUF's K types.
    KTypes,
    /// Codes of a table.
    OfTable,
}

impl Drawn {
    fn weights(self, format: Format, shape: [usize; 2]) -> halfbyte::Result<StoredTensor<'static>> {
        let random = match self {
            Self::Numbers => StoredTensor::random,
            Self::KTypes => StoredTensor::random_k_type,
            Self::OfTable => StoredTensor::random_of_table,
        };
        random(format.weight, shape, 1)
    }
}

pub(super) struct Bench<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) stream: &'a Stream,
    roofline: Roofline,
    /// What is read, and then numbers of cuBLASLt's matrices.
    large: Buffer<u32>,
    blas: Option<Arc<CublasLt>>,
    pub(super) x: Float,
    pub(super) y: Float,
    /// The one that multiplies, if not the first that serves a product.
    pub(super) kernel: Option<&'static Kernel>,
    drawn: Drawn,
    /// Whether products may round weights to the type of x where y is finer.
    round_weights: bool,
    check: bool,
    pub(super) progress: &'a Progress,
}

impl Bench<'_> {
    /// Random halfs all over the large buffer.
    fn fill(&mut self) -> Result<()> {
        let Self { stream, roofline, large, .. } = self;
        let mut halfs = FloatViewMut::F16(large.view_mut().cast::<f16>());
        roofline.normal(stream, &mut halfs, 1.0, 1)?;
        Ok(self.stream.synchronize()?)
    }

    /// Random values on the device.
    pub(super) fn normals(&self, len: usize, dtype: Float, deviation: f32) -> Result<FloatBuffer> {
        let mut values = FloatBuffer::allocate(self.gpu, dtype, len)?;
        match &mut values {
            FloatBuffer::F32(buffer) => self.stream.upload(&random::normals(len, 2), buffer.view_mut())?,
            _ => self.roofline.normal(self.stream, &mut values.all_mut(), deviation, 2)?,
        }
        self.stream.synchronize()?;
        Ok(values)
    }

    /// As [`replay`].
    pub(super) fn replay(
        &self,
        launches: usize,
        launch: impl FnMut(&Stream, usize) -> halfbyte::Result<()>,
    ) -> Result<Measured> {
        replay(self.stream, launches, launch)
    }

    fn limits(&mut self) -> Result<Limits> {
        let read = self.read(LARGE_BYTES)?;
        let f16_tflop_per_s = match &self.blas {
            None => None,
            Some(blas) => {
                let plan = blas.plan(self.gpu, [SIDE; 3], Float::F16, Float::F16)?;
                let halfs = self.large.view().cast::<f16>();
                let [x, w] = [0, 1].map(|i| FloatView::F16(halfs.slice(i * SIDE * SIDE..(i + 1) * SIDE * SIDE)));
                let mut y = FloatBuffer::allocate(self.gpu, Float::F16, SIDE * SIDE)?;
                let measured = self.replay(2, |stream, _| plan.run(stream, x, w, &y.all_mut()))?;
                Some(2.0 * (SIDE as f64).powi(3) / measured.median / 1e12)
            }
        };
        Ok(Limits { read_gb_per_s: LARGE_BYTES as f64 / read / 1e9, f16_tflop_per_s })
    }

    /// Seconds of reading so many bytes, each time others of the large buffer.
    fn read(&self, bytes: usize) -> Result<f64> {
        let bytes = bytes.clamp(16, LARGE_BYTES).next_multiple_of(256).min(LARGE_BYTES);
        let all = self.large.view().cast::<u8>();
        let windows = LARGE_BYTES / bytes;
        let mut sink = self.gpu.context().allocate::<u32>(1)?;
        let launches = windows.min(64);
        let measured = self.replay(launches, |stream, i| {
            let first = i % windows * bytes;
            self.roofline.read(stream, all.slice(first..first + bytes), &mut sink.view_mut())
        })?;
        Ok(measured.median)
    }

    /// Copies of so many bytes that pass the cache often enough.
    fn copies(&self, bytes: usize) -> usize {
        (TIMES_L2 * self.gpu.caps().l2_bytes as usize).div_ceil(bytes.max(1)).clamp(1, 1 << 12) + 1
    }

    /// Launches of a graph: whole rounds through the copies, and long enough.
    pub(super) fn launches(&self, copies: usize, bytes: usize, products: f64) -> usize {
        let seconds = expected_seconds(bytes, products);
        if seconds > GRAPH_SECONDS {
            copies.min(2)
        } else {
            copies * (GRAPH_SECONDS / seconds / copies as f64).ceil() as usize
        }
    }

    /// Median times of cuBLASLt's product of a shape, in microseconds, in the type of x or f16.
    fn baselines(&mut self, shape: &Shape, m: &[usize]) -> Result<Vec<Option<f64>>> {
        let Some(blas) = self.blas.clone() else { return Ok(vec![None; m.len()]) };
        let Shape { n, k, .. } = *shape;
        let dtype = if self.x == Float::BF16 { Float::BF16 } else { Float::F16 };
        let copies = self.copies(2 * n * k);
        let weights = (0..copies).map(|_| self.normals(n * k, dtype, 0.02)).collect::<Result<Vec<_>>>()?;
        let mut out = Vec::new();
        for &m in m {
            self.progress.step(format!("cuBLASLt m={m} n={n} k={k}"));
            let plan = blas.plan(self.gpu, [m, n, k], dtype, dtype)?;
            let x = self.normals(m * k, dtype, 1.0)?;
            let mut y = FloatBuffer::allocate(self.gpu, dtype, m * n)?;
            let launches = self.launches(copies, 2 * n * k, operations([m, n, k]));
            let measured =
                self.replay(launches, |stream, i| plan.run(stream, x.all(), weights[i % copies].all(), &y.all_mut()))?;
            out.push(Some(measured.median * 1e6));
        }
        Ok(out)
    }

    /// Random weights on the CPU, and enough copies of them on the device.
    fn weights(&self, [n, k]: [usize; 2], format: Format) -> Result<(QTensor, Vec<Packed>)> {
        self.progress.step(format!("{format} n={n} k={k}: packing"));
        if self.drawn != Drawn::Numbers {
            let w = self.drawn.weights(format, [n, k])?;
            return Ok((w.to_qtensor()?, self.duplicates(self.pack(&w, format)?)?));
        }
        let w = random::qtensor(format.weight, [n, k], 1)?;
        let first = self.pack(&(&w).into(), format)?;
        Ok((w, self.duplicates(first)?))
    }

    /// The same, of weights that are drawn on the device.
    fn random_weights(&self, shape: [usize; 2], format: Format) -> Result<Vec<Packed>> {
        self.progress.step(format!("{format} n={} k={}: packing", shape[0], shape[1]));
        self.duplicates(self.pack(&self.drawn.weights(format, shape)?, format)?)
    }

    fn pack(&self, w: &StoredTensor<'_>, format: Format) -> Result<Packed> {
        let mut packer = Packer::new(self.gpu, self.stream);
        let mut packed = match self.kernel {
            None => packer.pack(&[w], format.act, self.x)?,
            Some(kernel) => packer.pack_for(kernel, &[w], format.act)?,
        };
        if self.round_weights && !packed.allow_rounded_weights(self.gpu, self.stream)? {
            return Err(Failure::usage(
                "products round no weights beside quantised activations",
                format!("--round-weights with format {format}"),
                "name a format with exact activations, as w4a16-g128",
            ));
        }
        Ok(packed)
    }

    fn duplicates(&self, first: Packed) -> Result<Vec<Packed>> {
        let mut weights = vec![first];
        for _ in 1..self.copies(weights[0].bytes()) {
            let copy = weights[0].duplicate(self.stream)?;
            weights.push(copy);
        }
        Ok(weights)
    }

    fn lines(&mut self, shape: &Shape, format: Format, m: &[usize]) -> Result<Vec<Line>> {
        let Shape { n, k, .. } = *shape;
        let (w, weights) = self.weights([n, k], format)?;
        let read_us = self.read(weights[0].bytes())? * 1e6;
        m.iter().map(|&m| self.line(&w, &weights, [m, n, k], read_us)).collect()
    }

    fn line(&self, w: &QTensor, weights: &[Packed], [m, n, k]: [usize; 3], read_us: f64) -> Result<Line> {
        let format = weights[0].format();
        self.progress.step(format!("{format} m={m} n={n} k={k}"));
        let problem = Problem { format: Some(format), x: self.x, y: self.y, m, n, k };
        let caps = weights[0].caps(self.gpu);
        let kernel = match self.kernel {
            None => matmul::select(&caps, &problem, Some(weights[0].layout()))?,
            Some(kernel) => kernel,
        };
        let bytes = kernel.workspace_bytes(&caps, &problem);
        let mut workspace = Workspace::new(self.gpu, self.stream, bytes)?;
        let x = self.normals(m * k, self.x, 1.0)?;
        let mut y = FloatBuffer::allocate(self.gpu, self.y, m * n)?;
        let launches = self.launches(weights.len(), weights[0].bytes(), operations([m, n, k]));
        let measured = self.replay(launches, |stream, i| {
            let call = Call {
                x: x.all(),
                m,
                w: &weights[i % weights.len()],
                epilogue: Epilogue::default(),
                y: y.all_mut(),
                workspace: Some(&mut workspace),
                batch_invariant: false,
            };
            matmul::run_with(kernel, self.gpu, stream, call)
        })?;
        let check = match self.check {
            false => None,
            true => {
                let rows = check::rows(m);
                let of = |floats: &FloatBuffer, width: usize| {
                    let row = |&row: &usize| floats.to_f32(self.stream, row * width..(row + 1) * width);
                    Ok::<_, Failure>(rows.iter().map(row).collect::<halfbyte::Result<Vec<_>>>()?.concat())
                };
                let (x, y) = (of(&x, k)?, of(&y, n)?);
                let computed =
                    Computed { x: &x, y: &y, shape: [rows.len(), n, k], bound: kernel.bound(&caps, &problem) };
                Some(check::check_rows(check::Weight::Quantized(w, format), computed)?)
            }
        };
        let weight_bytes = weights[0].bytes();
        let share = Share {
            quantized: format.act.is_quantized(),
            weights_gb_per_s: weight_bytes as f64 / measured.median / 1e9,
            read_us,
            limit_us: 0.0,
            roofline_percent: 0.0,
            limit: "",
        };
        let operations = operations([m, n, k]);
        let timed = Timed { kernel: kernel.name, weight_bytes, copies: weights.len(), measured, operations };
        let product = Product { y: self.y.name(), m, n, k };
        Ok(Line::new(format.to_string(), self.x.name(), product, timed, share, check))
    }
}
