//! `halfbyte bench matmul`: products on cold weights, beside what the machine could do at most.

mod cuda;
mod cuda_report;
mod plan;
mod sweep;

use super::case::Shape;
use super::check::Computed;
use super::limits::Limits;
use super::report::{self, Nothing, OnCpu, Rooflines, Timed, verdict};
use super::source::Source;
use crate::app::App;
use crate::args::{FloatArg, WeightKind, whole};
use crate::failure::{Failure, Result};
use crate::machine;
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, bytes, rate};
use crate::timing::{Effort, measure};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::matmul;
use halfbyte::format::reference::Bound;
use halfbyte::kernel::Problem;
use halfbyte::ops::Linear;
use halfbyte::{Float, FloatsMut};
use plan::{Plan, Rows, plan};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;

/// Time products y = x Wᵀ on weights that lie in no cache.
///
/// Weights and x are random; as many copies of the weights are passed through in turn as it takes to find each of them
/// cold. The machine's read bandwidth and peaks are measured before and after.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Shapes, formats and rows from a file, as bench/cases/llama.toml.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["n", "k"])]
    case: Option<PathBuf>,
    /// So many shapes drawn at random, n and k from 512 to 32768, and for each eight numbers of rows from 1 to 4096, unless -m
    /// names them; all evenly spread by their logarithms.
    #[arg(long, value_name = "COUNT", conflicts_with_all = ["n", "k", "case"], value_parser = whole::<u32>(1..))]
    random: Option<u32>,
    /// With --random: other shapes.
    // clap requires nothing that conflicts with what is there.
    #[arg(long, value_name = "SEED", default_value_t = 1, requires = "random", conflicts_with_all = ["n", "k", "case"])]
    seed: u64,
    /// Formats of the weights, as w4a8-g128; or f32, f16, bf16 for dense ones [default: w4a8-g128].
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    format: Vec<WeightKind>,
    /// Rows of x [default: 1,8,128,512].
    #[arg(short, value_name = "M", value_delimiter = ',')]
    m: Vec<usize>,
    /// Outputs.
    #[arg(short, value_name = "N", default_value_t = 4096)]
    n: usize,
    /// Length of the reduction.
    #[arg(short, value_name = "K", default_value_t = 4096)]
    k: usize,
    /// Type of x [default: f32; on a GPU f16].
    #[arg(long, value_enum)]
    x: Option<FloatArg>,
    /// Type of y, on a GPU [default: that of x].
    #[arg(long, value_enum)]
    y: Option<FloatArg>,
    /// On a GPU: scales and offsets as GGUF's K types have them, in multiples of halves, and codes in as few bits. Q2_K is
    /// w2a16-g16-float-sf32, Q3_K w3a16-g16-sf32, Q4_K w4a16-g32-float-sf32, Q5_K w8a16-g32-float-sf32, Q6_K w8a16-g16-sf32.
    #[arg(long)]
    k_types: bool,
    /// On a GPU: codes of 8 bits that are those of a table of 16. IQ4_NL is w8a16-g32, MXFP4 w8a16-g32-sbf16, NVFP4 w8a16-g16.
    #[arg(long, conflicts_with = "k_types")]
    table: bool,
    /// On a GPU: let products of many rows round weights to the type of x where y is finer, as models with f16 activations do.
    #[arg(long)]
    round_weights: bool,
    /// Compare a sample of every result with the f64 reference; exit status 1 if one is out of bounds.
    #[arg(long)]
    check: bool,
    /// Leave out the dense product of the same shape, to which times are compared: in f32, on a GPU cuBLASLt in f16.
    #[arg(long)]
    no_baseline: bool,
    /// Take this kernel of the table, also where another comes first; on a GPU only.
    #[arg(long, value_name = "NAME")]
    kernel: Option<String>,
    /// On a GPU: time every configuration of the kernel that has several, beside the one it chooses, instead of the products.
    #[arg(long)]
    sweep: bool,
    /// With --sweep: begin no other product after so many seconds, and report those that were measured.
    #[arg(long, value_name = "SECONDS", requires = "sweep")]
    within: Option<u64>,
}

/// The product of a line.
#[derive(Serialize)]
struct Product {
    #[serde(skip)]
    kind: WeightKind,
    m: usize,
    n: usize,
    k: usize,
}

/// What the machine allows it.
#[derive(Serialize)]
struct Share {
    weights_gb_per_s: f64,
    roofline_percent: f64,
    limit: &'static str,
}

type Line = report::Line<Product, Share>;
type Report = report::Report<OnCpu, Rooflines<Limits>, Line, Nothing>;

/// Runs all products of the plan.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let plan = plan(args)?;
    if let Some(number) = app.cuda()? {
        return cuda::run(args, &plan, number, app);
    }
    let asked = [
        ("--sweep", args.sweep),
        ("--y", args.y.is_some()),
        ("--kernel", args.kernel.is_some()),
        ("--k-types", args.k_types),
        ("--table", args.table),
        ("--round-weights", args.round_weights),
    ];
    if let Some((option, _)) = asked.iter().find(|(_, given)| *given) {
        return Err(Failure::usage(
            "it asks for what only kernels on a GPU have",
            format!("option {option}"),
            "add --device cuda; on a CPU y is f32, and each kernel has one configuration",
        ));
    }
    let cpu = app.cpu()?;
    let x = args.x.map_or(Float::F32, Float::from);
    let progress = Progress::steps(app);
    progress.step("measuring the machine");
    let before = Limits::measure(&cpu);
    let mut results = Vec::new();
    for Rows { shape, named, m } in &plan.shapes {
        let baseline = if args.no_baseline { vec![None; m.len()] } else { baselines(&cpu, shape, m, &progress)? };
        for &kind in &plan.kinds {
            let bench = Bench { cpu: &cpu, kind, x, check: args.check, progress: &progress };
            let lines = bench.run(shape, m)?;
            let beside = |(line, &baseline): (Line, _)| line.beside(named.then(|| shape.origin.clone()), baseline);
            results.extend(lines.into_iter().zip(&baseline).map(beside));
        }
    }
    progress.step("measuring the machine again");
    let after = Limits::measure(&cpu);
    drop(progress);
    let limits = before.best(after);
    for line in &mut results {
        let Product { kind, m, n, k } = line.work;
        let traffic = line.weight_bytes + m * (k * x.size_bytes() + n * 4);
        let (least, limit) = limits.least_seconds(kind, x, traffic as f64, operations([m, n, k]));
        line.limit.roofline_percent = 100.0 * least * 1e6 / line.median_us;
        line.limit.limit = limit;
    }
    let passed = report::passed(args.check, &results);
    let limits = Rooflines { roofline_before: before, roofline_after: after };
    let report = Report { machine: OnCpu::of(&cpu), origin: plan.origin, limits, results, more: Nothing {}, passed };
    app.result(&report, human)?;
    verdict(passed, report.results.len())
}

/// Multiplications and additions of a product.
fn operations([m, n, k]: [usize; 3]) -> f64 {
    2.0 * m as f64 * n as f64 * k as f64
}

/// Median times, in microseconds, of the dense f32 product of a shape for each m.
fn baselines(cpu: &Cpu, shape: &Shape, m: &[usize], progress: &Progress) -> Result<Vec<Option<f64>>> {
    let dense = Bench { cpu, kind: WeightKind::Dense(Float::F32), x: Float::F32, check: false, progress };
    Ok(dense.run(shape, m)?.iter().map(|line| Some(line.median_us)).collect())
}

/// Measures one kind of weight.
struct Bench<'a> {
    cpu: &'a Cpu,
    kind: WeightKind,
    x: Float,
    check: bool,
    progress: &'a Progress,
}

impl Bench<'_> {
    fn run(&self, shape: &Shape, m: &[usize]) -> Result<Vec<Line>> {
        let Shape { n, k, .. } = *shape;
        self.progress.step(format!("{} n={n} k={k}: packing", self.kind));
        self.refuse_too_large(shape, m)?;
        let source = Source::new(self.kind, [n, k])?;
        let pack = || Ok::<_, Failure>(Linear::new(source.weight([n, k]))?);
        let first = pack()?;
        let copies = (machine::cold_bytes() as usize).div_ceil(first.bytes().max(1)).clamp(1, 1 << 16);
        let mut weights = vec![first];
        while weights.len() < copies {
            weights.push(pack()?);
        }
        m.iter().map(|&m| self.measure(&source, &weights, [m, n, k])).collect()
    }

    /// Error: more memory than the system says is available.
    fn refuse_too_large(&self, shape: &Shape, m: &[usize]) -> Result<()> {
        let Some(available) = machine::memory_available() else { return Ok(()) };
        let (n, k) = (shape.n as u64, shape.k as u64);
        let weight = match self.kind {
            // Codes a byte each, and at most as much again when packed.
            WeightKind::Quantized(format) => 2 * n * k + 8 * n * format.weight.group.count(shape.k) as u64,
            WeightKind::Dense(dtype) => 2 * n * k * dtype.size_bytes() as u64 + 4 * n * k,
        };
        let rows = m.iter().copied().max().unwrap_or(0) as u64;
        let needed = weight + machine::cold_bytes() + rows * (n + 2 * k) * 4;
        if needed > available {
            return Err(Failure::memory(
                format!("{} with n {n}, k {k} does not fit", self.kind),
                format!("about {} are needed, {} are available", bytes(needed), bytes(available)),
            ));
        }
        Ok(())
    }

    fn measure(&self, source: &Source, weights: &[Linear], [m, n, k]: [usize; 3]) -> Result<Line> {
        self.progress.step(format!("{} m={m} n={n} k={k}", self.kind));
        let problem = Problem { format: self.kind.format(), x: self.x, y: Float::F32, m, n, k };
        let kernel = matmul::select(&self.cpu.caps(), &problem)?.name;
        let x = random::floats(m * k, 2, self.x);
        let mut y = vec![f32::NAN; m * n];
        let effort = Effort {
            warm_up: if weights.len() > 2 { 2 } else { 1 },
            runs: 10,
            at_least: Duration::from_millis(300),
            at_most: Duration::from_secs(3),
            in_any_case: 3,
        };
        let measured = measure(effort, |run| {
            let linear = &weights[run % weights.len()];
            Ok(linear.forward(self.cpu, x.as_floats(), m, FloatsMut::F32(&mut y))?)
        })?;
        let bound = Bound::new(Float::F32, k);
        let check = || source.check(Computed { x: &x.as_floats().to_f32(), y: &y, shape: [m, n, k], bound });
        let check = self.check.then(check).transpose()?;
        let weight_bytes = weights[0].bytes();
        let share =
            Share { weights_gb_per_s: weight_bytes as f64 / measured.median / 1e9, roofline_percent: 0.0, limit: "" };
        let operations = operations([m, n, k]);
        let timed = Timed { kernel, weight_bytes, copies: weights.len(), measured, operations };
        let product = Product { kind: self.kind, m, n, k };
        Ok(Line::new(self.kind.to_string(), self.x.name(), product, timed, share, check))
    }
}

fn human(report: &Report) -> String {
    let columns = [
        ("format", Align::Left),
        ("m", Align::Right),
        ("n", Align::Right),
        ("k", Align::Right),
        ("kernel", Align::Left),
        ("µs", Align::Right),
        ("±%", Align::Right),
        ("GFLOP/s", Align::Right),
        ("GB/s", Align::Right),
        ("roofline", Align::Right),
        ("of", Align::Left),
        ("× f32", Align::Right),
    ];
    let row = |line: &Line| {
        vec![
            line.format.clone(),
            line.work.m.to_string(),
            line.work.n.to_string(),
            line.work.k.to_string(),
            line.kernel.to_owned(),
            rate(line.median_us),
            format!("{:.0}", 50.0 * line.spread),
            format!("{:.1}", line.gflop_per_s),
            format!("{:.1}", line.limit.weights_gb_per_s),
            format!("{:.0} %", line.limit.roofline_percent),
            line.limit.limit.to_owned(),
            line.times_baseline.map_or_else(|| "-".to_owned(), |times| format!("{times:.2}")),
        ]
    };
    let Rooflines { roofline_before, roofline_after } = report.limits;
    report.table("x and weights random, weights cold", columns.to_vec(), row)
        + &Limits::table(roofline_before, roofline_after)
}
