//! `halfbyte bench conv`: convolutions on cold images and weights, beside what the machine could compute at most.

mod cuda;
mod int8;
mod plan;

use super::check::{self, Check};
use super::limits::Limits;
use super::matmul::{X, verdict};
use crate::app::App;
use crate::args::conv::{ByteArg, Kind, LayoutArg, Sizes};
use crate::args::{FloatArg, WeightKind};
use crate::failure::{Failure, Result};
use crate::machine::{cold_bytes, memory_available};
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, bytes, rate, table};
use crate::timing::{Effort, Measured, measure};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::reference::{self, Bound};
use halfbyte::ops::{Conv2d, Weight};
use halfbyte::{Act, Float, Floats, FloatsMut, QTensor};
use plan::{Shape, plan};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Time two-dimensional convolutions on images and weights that lie in no cache.
///
/// Weights and x are random; as many copies of weights, x and y are passed through in turn as it takes to find each of them
/// cold. The machine's peaks are measured before and after.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shapes, formats and batches from a file, as bench/cases/resnet50.toml.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = Sizes::NAMES)]
    case: Option<PathBuf>,
    /// Formats of the weights, as w8a8; f32, f16, bf16 for dense ones; or int8 for bytes in, bytes out [default: w8a8].
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    format: Vec<Kind>,
    /// Images at a time [default: 1].
    #[arg(long, value_name = "N", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Type of x [default: f32, and f16 on a GPU]; y is f32, and on a GPU of the type of x.
    #[arg(long, value_enum)]
    x: Option<FloatArg>,
    /// Type of x and y where the format is int8.
    #[arg(long, value_enum, default_value = "u8")]
    bytes: ByteArg,
    /// Order of the elements of x and y.
    #[arg(long, value_enum, default_value = "nhwc")]
    layout: LayoutArg,
    #[command(flatten)]
    sizes: Sizes,
    /// Compare a sample of every result with the f64 reference; exit status 1 if one is out of bounds.
    #[arg(long)]
    check: bool,
    /// Take this kernel of the table, also where another comes first; on a GPU only.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// On a GPU: time every configuration of the kernel beside the one that it chooses.
    #[arg(long)]
    sweep: bool,
    /// Leave out the convolution with dense f32 weights, to which times are compared.
    #[arg(long)]
    no_baseline: bool,
}

#[derive(Serialize)]
struct Report {
    threads: usize,
    isa: &'static str,
    origin: Option<String>,
    roofline_before: Limits,
    roofline_after: Limits,
    results: Vec<Line>,
    /// Formats that a shape cannot have.
    left_out: Vec<LeftOut>,
    /// None without `--check`.
    passed: Option<bool>,
}

#[derive(Serialize)]
struct LeftOut {
    format: String,
    shape: String,
    cause: String,
}

#[derive(Serialize)]
struct Line {
    format: String,
    x: &'static str,
    layout: &'static str,
    batch: usize,
    ci: usize,
    co: usize,
    size: [usize; 2],
    kernel_size: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 4],
    dilation: [usize; 2],
    groups: usize,
    origin: Option<String>,
    kernel: &'static str,
    weight_bytes: usize,
    copies: usize,
    runs: usize,
    median_us: f64,
    least_us: f64,
    spread: f64,
    gflop_per_s: f64,
    peak_percent: f64,
    peak: &'static str,
    baseline_us: Option<f64>,
    times_baseline: Option<f64>,
    check: Option<Check>,
}

impl Line {
    /// As far as [`name`] tells of it.
    fn geometry(&self) -> Geometry {
        let Self { stride, dilation, groups, .. } = *self;
        Geometry { stride, dilation, groups, ..Geometry::new(self.ci, self.co, self.kernel_size) }
    }
}

/// Runs all convolutions of the plan.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let plan = plan(args)?;
    if let Some(number) = app.cuda()? {
        return cuda::run(args, plan, number, app);
    }
    if args.sweep || args.kernel.is_some() {
        let cause = "--sweep and --kernel ask for what only kernels on a GPU have";
        return Err(Failure::usage("no such measurement", cause, "add --device cuda"));
    }
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    progress.step("measuring the machine");
    let before = Limits::measure(&cpu);
    let (mut results, mut left_out) = (Vec::new(), Vec::new());
    for (shape, &batch) in plan.shapes.iter().flat_map(|shape| plan.batches.iter().map(move |batch| (shape, batch))) {
        let bench = Bench {
            cpu: &cpu,
            shape,
            batch,
            x: args.x.map_or(Float::F32, Float::from),
            layout: args.layout.into(),
            check: args.check,
        };
        let baseline = match args.no_baseline {
            true => None,
            false => Some(bench.run(WeightKind::Dense(Float::F32), &progress)?.median_us),
        };
        for &kind in &plan.kinds {
            if let Kind::Floats(WeightKind::Quantized(format)) = kind
                && let Err(e) = shape.geometry().scale_channels(format.weight.group)
            {
                let (format, shape) = (kind.to_string(), name(&shape.geometry(), shape.size));
                left_out.push(LeftOut { format, shape, cause: e.to_string() });
                continue;
            }
            let mut line = match kind {
                Kind::Floats(kind) => bench.run(kind, &progress)?,
                Kind::Int8 => bench.run_int8(args.bytes.into(), &progress)?,
            };
            line.origin = plan.origin.is_some().then(|| shape.origin.clone());
            line.baseline_us = baseline;
            line.times_baseline = baseline.map(|b| b / line.median_us);
            results.push(line);
        }
    }
    progress.step("measuring the machine again");
    let after = Limits::measure(&cpu);
    drop(progress);
    let limits = before.best(after);
    for line in &mut results {
        let (peak, name) = match line.kernel {
            "a16_amx" | "a16_avx512bf16" => limits.exact(args.x.map_or(Float::F32, Float::from)),
            kernel if kernel.starts_with("a8_") || kernel.starts_with("int8_") => (limits.int8_gop_per_s, "int8 peak"),
            _ => (limits.f32_gflop_per_s, "f32 peak"),
        };
        line.peak_percent = 100.0 * line.gflop_per_s / peak;
        line.peak = name;
    }
    let passed = args.check.then(|| results.iter().all(|line| line.check.is_some_and(|check| check.passed)));
    let report = Report {
        threads: cpu.threads().count(),
        isa: cpu.caps().isa.name(),
        origin: plan.origin,
        roofline_before: before,
        roofline_after: after,
        results,
        left_out,
        passed,
    };
    app.result(&report, human)?;
    verdict(passed)
}

/// A weight before it is packed.
enum Source {
    Quantized(QTensor, Act),
    Dense(X),
}

impl Source {
    fn new(kind: WeightKind, geometry: &Geometry) -> Result<Self> {
        let [n, k] = [geometry.co, geometry.k()];
        Ok(match kind {
            WeightKind::Quantized(format) => Source::Quantized(random::qtensor(format.weight, [n, k], 1)?, format.act),
            WeightKind::Dense(dtype) => Source::Dense(X::new(random::normals(n * k, 1), dtype)),
        })
    }

    fn pack(&self, geometry: Geometry) -> Result<Conv2d> {
        Ok(match self {
            Source::Quantized(w, act) => Conv2d::new(Weight::Quantized(w, *act), geometry)?,
            Source::Dense(w) => Conv2d::new(Weight::Dense(w.floats(), [geometry.co, geometry.k()]), geometry)?,
        })
    }
}

/// Measures one convolution.
struct Bench<'a> {
    cpu: &'a Cpu,
    shape: &'a Shape,
    batch: usize,
    x: Float,
    layout: Layout2d,
    check: bool,
}

impl Bench<'_> {
    fn run(&self, kind: WeightKind, progress: &Progress) -> Result<Line> {
        let (geometry, size) = (self.shape.geometry(), self.shape.size);
        let shape = Conv2dShape::new(geometry, self.batch, size)?;
        progress.step(format!("{kind} {} batch {}", name(&geometry, size), self.batch));
        let image_bytes = shape.x_len() * self.x.size_bytes() + shape.y_len() * 4;
        self.refuse_too_large(&shape, image_bytes)?;
        let source = Source::new(kind, &geometry)?;
        let pack = || Ok::<_, Failure>(source.pack(geometry)?.with_layouts(self.layout, self.layout));
        let mut convs = vec![pack()?];
        let copies = copies(image_bytes + convs[0].bytes());
        while convs.len() < copies {
            convs.push(pack()?);
        }
        let x: Vec<X> =
            (0..copies).map(|seed| X::new(random::normals(shape.x_len(), 2 + seed as u64), self.x)).collect();
        let mut y = vec![vec![f32::NAN; shape.y_len()]; copies];
        let measured = measure(EFFORT, |run| {
            let at = run % copies;
            Ok(convs[at].forward(self.cpu, x[at].floats(), self.batch, size, FloatsMut::F32(&mut y[at]))?)
        })?;
        let bound = Bound::new(Float::F32, geometry.k());
        let check = if self.check { Some(self.compare(&source, &shape, x[0].floats(), &y[0], bound)?) } else { None };
        let kernel = convs[0].kernel(self.cpu, self.batch, size, self.x, Float::F32)?;
        Ok(Line {
            format: kind.to_string(),
            x: self.x.name(),
            kernel,
            weight_bytes: convs[0].bytes(),
            copies,
            check,
            ..self.line(&shape, measured)
        })
    }

    /// A line of this shape and these times; the rest is to be filled in.
    fn line(&self, shape: &Conv2dShape, Measured { median, least, spread, runs }: Measured) -> Line {
        let geometry = shape.geometry();
        Line {
            format: String::new(),
            x: "",
            layout: self.layout.name(),
            batch: self.batch,
            ci: geometry.ci,
            co: geometry.co,
            size: shape.input(),
            kernel_size: geometry.kernel,
            stride: geometry.stride,
            padding: geometry.padding,
            dilation: geometry.dilation,
            groups: geometry.groups,
            origin: None,
            kernel: "",
            weight_bytes: 0,
            copies: 0,
            runs,
            median_us: median * 1e6,
            least_us: least * 1e6,
            spread,
            gflop_per_s: shape.operations() / median / 1e9,
            peak_percent: 0.0,
            peak: "",
            baseline_us: None,
            times_baseline: None,
            check: None,
        }
    }

    /// Error: more memory than the system says is available.
    fn refuse_too_large(&self, shape: &Conv2dShape, image_bytes: usize) -> Result<()> {
        let Some(available) = memory_available() else { return Ok(()) };
        let weights = shape.geometry().co * shape.geometry().k() * 16;
        let needed = (image_bytes + 8 * shape.x_len() + weights) as u64 + cold_bytes();
        if needed > available {
            return Err(Failure::memory(
                format!("{} at batch {} does not fit", name(shape.geometry(), shape.input()), self.batch),
                format!("about {} are needed, {} are available", bytes(needed), bytes(available)),
            ));
        }
        Ok(())
    }

    /// Compares the first and the last image with the reference: all their pixels, of the first channels if any may be left out.
    fn compare(&self, source: &Source, shape: &Conv2dShape, x: Floats<'_>, y: &[f32], bound: Bound) -> Result<Check> {
        let geometry = shape.geometry();
        let one = checked_part(shape)?;
        let channels = one.geometry().co;
        let (pixels, seen) = (shape.input().iter().product::<usize>(), shape.output().iter().product::<usize>());
        let mut found = Check { elements: 0, worst: 0.0, passed: true };
        for image in self.checked_images() {
            let planes = (0..geometry.ci).flat_map(|c| (0..pixels).map(move |p| (c, p)));
            let x: Vec<f32> = planes.map(|(c, p)| x.get(self.at([image, c, p], [geometry.ci, pixels]))).collect();
            let product = match source {
                Source::Quantized(w, act) => reference::conv2d_linear(&x, &w.rows(0..channels)?, *act, &one)?,
                Source::Dense(w) => {
                    let wide = |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
                    reference::conv2d(&wide(&x), &wide(&w.floats().to_f32()[..channels * geometry.k()]), &one)
                }
            };
            let elements = (0..channels).flat_map(|c| (0..seen).map(move |p| (c, p)));
            let elements = elements.map(|(c, p)| y[self.at([image, c, p], [geometry.co, seen])]);
            let check = check::compare(&product, elements, bound);
            found = Check {
                elements: found.elements + check.elements,
                worst: found.worst.max(check.worst),
                passed: found.passed && check.passed,
            };
        }
        Ok(found)
    }

    /// Images that are compared with the reference: the first and the last.
    fn checked_images(&self) -> Vec<usize> {
        if self.batch == 1 { vec![0] } else { vec![0, self.batch - 1] }
    }

    /// Where a channel of a pixel of an image lies.
    fn at(&self, [image, c, p]: [usize; 3], [channels, pixels]: [usize; 2]) -> usize {
        match self.layout {
            Layout2d::Nchw => (image * channels + c) * pixels + p,
            Layout2d::Nhwc => (image * pixels + p) * channels + c,
        }
    }
}

/// How long a convolution is measured.
const EFFORT: Effort = Effort {
    warm_up: 2,
    runs: 10,
    at_least: Duration::from_millis(300),
    at_most: Duration::from_secs(3),
    in_any_case: 3,
};

/// Copies of so many bytes that are passed through in turn, so that none is in a cache when it is met again.
fn copies(each_bytes: usize) -> usize {
    (cold_bytes() as usize).div_ceil(each_bytes).clamp(1, 1 << 12)
}

/// What is compared with the reference: one image, of the first channels if any may be left out.
fn checked_part(shape: &Conv2dShape) -> Result<Conv2dShape> {
    const CHANNELS: usize = 4;
    let geometry = *shape.geometry();
    let co = if geometry.groups == 1 { geometry.co.min(CHANNELS) } else { geometry.co };
    Ok(Conv2dShape::new(Geometry { co, ..geometry }, 1, shape.input())?)
}

/// A convolution as a table names it: `64→128 3×3 /2 56×56`.
fn name(geometry: &Geometry, [h, w]: [usize; 2]) -> String {
    let Geometry { ci, co, kernel: [kh, kw], stride, dilation, groups, .. } = *geometry;
    let more = |sign: &str, [down, across]: [usize; 2]| match (down, across) {
        (1, 1) => String::new(),
        (a, b) if a == b => format!(" {sign}{a}"),
        (a, b) => format!(" {sign}{a}×{b}"),
    };
    let groups = if groups == 1 { String::new() } else { format!(" in {groups} groups") };
    format!("{ci}→{co} {kh}×{kw}{}{}{groups} {h}×{w}", more("/", stride), more("dilated ", dilation))
}

fn human(report: &Report) -> String {
    let mut out = String::new();
    if let Some(origin) = &report.origin {
        out += &format!("{origin}\n");
    }
    out += &format!("{} threads, {}; weights and x random; they and y cold\n\n", report.threads, report.isa);
    let checked = report.passed.is_some();
    let mut columns = vec![
        ("format", Align::Left),
        ("x", Align::Left),
        ("layout", Align::Left),
        ("batch", Align::Right),
        ("convolution", Align::Left),
        ("kernel", Align::Left),
        ("µs", Align::Right),
        ("±%", Align::Right),
        ("GFLOP/s", Align::Right),
        ("of peak", Align::Right),
        ("", Align::Left),
        ("× f32", Align::Right),
    ];
    if checked {
        columns.push(("check", Align::Left));
    }
    let rows: Vec<Vec<String>> = report
        .results
        .iter()
        .map(|line| {
            let mut row = vec![
                line.format.clone(),
                line.x.to_owned(),
                line.layout.to_owned(),
                line.batch.to_string(),
                name(&line.geometry(), line.size),
                line.kernel.to_owned(),
                rate(line.median_us),
                format!("{:.0}", 50.0 * line.spread),
                format!("{:.1}", line.gflop_per_s),
                format!("{:.0} %", line.peak_percent),
                line.peak.to_owned(),
                line.times_baseline.map_or_else(|| "-".to_owned(), |times| format!("{times:.2}")),
            ];
            if checked {
                row.push(line.check.map_or_else(String::new, |check| {
                    format!("{} {:.2}", if check.passed { "ok" } else { "MISSED" }, check.worst)
                }));
            }
            row
        })
        .collect();
    out += &table(&columns, &rows);
    out += "\n";
    for left in &report.left_out {
        out += &format!("left out: {} of {}: {}\n", left.format, left.shape, left.cause);
    }
    out + &Limits::table(report.roofline_before, report.roofline_after)
}
