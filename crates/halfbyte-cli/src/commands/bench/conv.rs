//! `halfbyte bench conv`: convolutions on cold images and weights, beside what the machine could compute at most.

mod cuda;
mod int8;
mod plan;

use super::check::{self, Check};
use super::limits::Limits;
use super::report::{self, OnCpu, Rooflines, Timed, verdict};
use super::source::Source;
use crate::app::App;
use crate::args::conv::{ByteArg, Kind, LayoutArg, Sizes};
use crate::args::{FloatArg, WeightKind};
use crate::failure::{Failure, Result};
use crate::machine::{cold_bytes, memory_available};
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, bytes, rate};
use crate::timing::{Effort, measure};
use halfbyte::conv::{Conv2dShape, Geometry, Layout2d};
use halfbyte::cpu::Cpu;
use halfbyte::format::int8::Byte;
use halfbyte::format::reference::{self, Bound};
use halfbyte::ops::Conv2d;
use halfbyte::{Float, Floats, FloatsMut};
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
    /// Type of x and y where the format is int8 [default: u8].
    #[arg(long, value_enum)]
    bytes: Option<ByteArg>,
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

impl Args {
    /// Type of x and y where the format is int8.
    fn bytes(&self) -> Byte {
        self.bytes.unwrap_or(ByteArg::U8).into()
    }
}

/// The convolution of a line.
#[derive(Serialize)]
struct Convolution {
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
}

/// What the machine allows it.
#[derive(Serialize)]
struct Share {
    peak_percent: f64,
    peak: &'static str,
}

type Line = report::Line<Convolution, Share>;
type Report = report::Report<OnCpu, Rooflines<Limits>, Line, LeftOut>;

/// Formats that a shape cannot have.
#[derive(Default, Serialize)]
struct LeftOut {
    left_out: Vec<Refused>,
}

#[derive(Serialize)]
struct Refused {
    format: String,
    shape: String,
    cause: String,
}

impl LeftOut {
    /// Whether a shape has no such format, which it then notes.
    fn refuses(&mut self, kind: Kind, shape: &Shape) -> bool {
        let Kind::Floats(WeightKind::Quantized(format)) = kind else { return false };
        let Err(why) = shape.geometry().scale_channels(format.weight.group) else { return false };
        let shape = name(&shape.geometry(), shape.size);
        self.left_out.push(Refused { format: kind.to_string(), shape, cause: why.to_string() });
        true
    }

    /// A line each.
    fn lines(&self) -> String {
        let line = |Refused { format, shape, cause }: &Refused| format!("left out: {format} of {shape}: {cause}\n");
        self.left_out.iter().map(line).collect()
    }
}

impl Convolution {
    fn of(shape: &Conv2dShape, layout: Layout2d, batch: usize) -> Self {
        let Geometry { ci, co, kernel, stride, padding, dilation, groups, .. } = *shape.geometry();
        let (layout, size) = (layout.name(), shape.input());
        Self { layout, batch, ci, co, size, kernel_size: kernel, stride, padding, dilation, groups }
    }

    /// As [`name`] gives it.
    fn name(&self) -> String {
        let Self { stride, dilation, groups, .. } = *self;
        name(&Geometry { stride, dilation, groups, ..Geometry::new(self.ci, self.co, self.kernel_size) }, self.size)
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
    let (mut results, mut more) = (Vec::new(), LeftOut::default());
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
            if more.refuses(kind, shape) {
                continue;
            }
            let line = match kind {
                Kind::Floats(kind) => bench.run(kind, &progress)?,
                Kind::Int8 => bench.run_int8(args.bytes(), &progress)?,
            };
            results.push(line.beside(plan.origin.is_some().then(|| shape.origin.clone()), baseline));
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
        line.limit = Share { peak_percent: 100.0 * line.gflop_per_s / peak, peak: name };
    }
    let passed = report::passed(args.check, &results);
    let limits = Rooflines { roofline_before: before, roofline_after: after };
    let report = Report { machine: OnCpu::of(&cpu), origin: plan.origin, limits, results, more, passed };
    app.result(&report, human)?;
    verdict(passed, report.results.len())
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
        let rows = [geometry.co, geometry.k()];
        let source = Source::new(kind, rows)?;
        let pack = || {
            let conv = Conv2d::new(source.weight(rows), geometry)?;
            Ok::<_, Failure>(conv.with_layouts(self.layout, self.layout))
        };
        let mut convs = vec![pack()?];
        let copies = copies(image_bytes + convs[0].bytes());
        while convs.len() < copies {
            convs.push(pack()?);
        }
        let x: Vec<_> = (0..copies).map(|seed| random::floats(shape.x_len(), 2 + seed as u64, self.x)).collect();
        let mut y = vec![vec![f32::NAN; shape.y_len()]; copies];
        let measured = measure(EFFORT, |run| {
            let at = run % copies;
            Ok(convs[at].forward(self.cpu, x[at].as_floats(), self.batch, size, FloatsMut::F32(&mut y[at]))?)
        })?;
        let bound = Bound::new(Float::F32, geometry.k());
        let check =
            if self.check { Some(self.compare(&source, &shape, x[0].as_floats(), &y[0], bound)?) } else { None };
        let kernel = convs[0].kernel(self.cpu, self.batch, size, self.x, Float::F32)?;
        let timed = Timed { kernel, weight_bytes: convs[0].bytes(), copies, measured, operations: shape.operations() };
        Ok(self.line(kind.to_string(), self.x.name(), &shape, timed, check))
    }

    /// A line whose share is to be filled in.
    fn line(&self, format: String, x: &'static str, shape: &Conv2dShape, timed: Timed, check: Option<Check>) -> Line {
        let work = Convolution::of(shape, self.layout, self.batch);
        Line::new(format, x, work, timed, Share { peak_percent: 0.0, peak: "" }, check)
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
                    reference::conv2d(&wide(&x), &wide(&w.to_f32()[..channels * geometry.k()]), &one)
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
    let columns = [
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
    let row = |line: &Line| {
        vec![
            line.format.clone(),
            line.x.to_owned(),
            line.work.layout.to_owned(),
            line.work.batch.to_string(),
            line.work.name(),
            line.kernel.to_owned(),
            rate(line.median_us),
            format!("{:.0}", 50.0 * line.spread),
            format!("{:.1}", line.gflop_per_s),
            format!("{:.0} %", line.limit.peak_percent),
            line.limit.peak.to_owned(),
            line.times_baseline.map_or_else(|| "-".to_owned(), |times| format!("{times:.2}")),
        ]
    };
    let Rooflines { roofline_before, roofline_after } = report.limits;
    report.table("weights and x random; they and y cold", columns.to_vec(), row)
        + &report.more.lines()
        + &Limits::table(roofline_before, roofline_after)
}
