//! `halfbyte explain`: which kernel would run, and why each other would not; on a GPU also what a weight of the shape would hold for
//! every number of rows.

mod conv;
mod model;

use crate::app::App;
use crate::args::{FloatArg, WeightKind};
use crate::failure::{Failure, Result};
use crate::text::{Align, bytes, table};
use halfbyte::Float;
use halfbyte::cpu::isa::Caps;
use halfbyte::cpu::matmul;
use halfbyte::cuda::matmul::{Plan, Plans};
use halfbyte::cuda::{self, Gpu};
use halfbyte::kernel::{Problem, Reason};
use serde::Serialize;

/// Show which kernel would compute a product or a convolution, and why each other would not.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    of: Option<Of>,
    #[command(flatten)]
    product: Option<Product>,
}

/// What is explained instead of a product.
#[derive(Debug, clap::Subcommand)]
enum Of {
    Conv(conv::Args),
    Model(model::Args),
}

/// A product.
#[derive(Debug, clap::Args)]
struct Product {
    /// Format of the weights, as w4a8-g128; or f32, f16, bf16 for dense ones.
    format: WeightKind,
    /// Rows of x.
    m: usize,
    /// Outputs.
    n: usize,
    /// Length of the reduction.
    k: usize,
    /// Type of x [default: f32; on a GPU f16].
    #[arg(long, value_enum)]
    x: Option<FloatArg>,
    /// Type of y; models on a GPU ask for f32, too [default: f32].
    #[arg(long, value_enum)]
    y: Option<FloatArg>,
}

#[derive(Serialize)]
struct Explanation {
    problem: String,
    /// Instruction sets, or the GPU's processor.
    isa: String,
    chosen: Option<&'static str>,
    /// How the chosen one computes it, where it has several ways.
    #[serde(skip_serializing_if = "Option::is_none")]
    configuration: Option<String>,
    /// What the chosen one works in.
    #[serde(skip_serializing_if = "Option::is_none")]
    workspace_bytes: Option<usize>,
    kernels: Vec<Line>,
    /// On a GPU: what products with any number of rows are computed by.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    plans: Vec<Range>,
}

/// A range of rows.
#[derive(Serialize)]
struct Range {
    first_m: usize,
    last_m: usize,
    batch_invariant: bool,
    kernel: &'static str,
    configuration: String,
    workspace_bytes: usize,
}

#[derive(Serialize)]
struct Line {
    kernel: &'static str,
    layout: &'static str,
    chosen: bool,
    /// Why it is not taken; what it does, if it is.
    reason: String,
}

/// Prints the table.
pub fn run(args: &Args, app: &App) -> Result<()> {
    match (&args.of, &args.product) {
        (Some(Of::Conv(args)), _) => conv::run(args, app),
        (Some(Of::Model(args)), _) => model::run(args, app),
        (None, Some(args)) => product(args, app),
        (None, None) => {
            Err(Failure::usage("nothing to explain", "expected a format and sizes, got none", "see --help"))
        }
    }
}

fn product(args: &Product, app: &App) -> Result<()> {
    let default = if app.cuda()?.is_some() { Float::F16 } else { Float::F32 };
    let x = args.x.map_or(default, Float::from);
    let y = args.y.map_or(Float::F32, Float::from);
    let problem = Problem { format: args.format.format(), x, y, m: args.m, n: args.n, k: args.k };
    let (isa, kernels, plans) = match app.cuda()? {
        None => {
            let caps = Caps::detect_within_environment()?;
            let explained = matmul::explain(&caps, &problem).into_iter();
            let lines = explained.map(|(kernel, reason)| line(kernel.name, kernel.layout, kernel.what, reason));
            (caps.isa.name().to_owned(), lines.collect::<Vec<_>>(), Vec::new())
        }
        Some(number) => {
            let caps = Gpu::open(number)?.caps();
            let explained = cuda::matmul::explain(&caps, &problem, None).into_iter();
            let lines = explained.map(|(kernel, reason)| line(kernel.name, kernel.layout, kernel.what, reason));
            let layout = cuda::matmul::select(&caps, &problem, None).ok().map(|kernel| kernel.layout);
            let plans = layout.and_then(|layout| Plans::new(caps, problem, layout).ok());
            (caps.arch.to_string(), lines.collect(), plans.as_ref().map_or_else(Vec::new, ranges))
        }
    };
    Explanation { plans, ..Explanation::new(problem.to_string(), isa, kernels) }.print(app)
}

impl Explanation {
    fn new(problem: String, isa: String, kernels: Vec<Line>) -> Self {
        let chosen = kernels.iter().find(|line| line.chosen).map(|line| line.kernel);
        Self { problem, isa, chosen, configuration: None, workspace_bytes: None, kernels, plans: Vec::new() }
    }

    fn print(&self, app: &App) -> Result<()> {
        app.result(self, |e| {
            let rows: Vec<Vec<String>> = e
                .kernels
                .iter()
                .map(|line| {
                    let mark = if line.chosen { "chosen" } else { "no" };
                    vec![line.kernel.to_owned(), mark.to_owned(), line.reason.clone()]
                })
                .collect();
            let columns = [("kernel", Align::Left), ("", Align::Left), ("why", Align::Left)];
            let mut out = format!("{}, on {}\n\n{}", e.problem, e.isa, table(&columns, &rows));
            if let (Some(configuration), Some(workspace_bytes)) = (&e.configuration, e.workspace_bytes) {
                out += &format!("\n{configuration}; {} of workspace\n", bytes(workspace_bytes as u64));
            }
            if !e.plans.is_empty() {
                out += &format!("\nheld for all numbers of rows\n\n{}", held(&e.plans));
            }
            out
        })
    }
}

fn ranges(plans: &Plans) -> Vec<Range> {
    let of = |(plans, batch_invariant): (&[Plan], bool)| {
        let range = |plan: &Plan| Range {
            first_m: plan.rows()[0],
            last_m: plan.rows()[1],
            batch_invariant,
            kernel: plan.kernel().name,
            configuration: plan.configuration().to_string(),
            workspace_bytes: plan.workspace_bytes(),
        };
        plans.iter().map(range).collect::<Vec<_>>()
    };
    plans.explain().into_iter().zip([false, true]).flat_map(of).collect()
}

fn held(ranges: &[Range]) -> String {
    let row = |range: &Range| {
        let rows = format!("{} to {}", range.first_m, range.last_m);
        let what = if range.batch_invariant { "batch-invariant" } else { "" };
        let (kernel, bytes) = (range.kernel.to_owned(), range.workspace_bytes.to_string());
        vec![rows, what.to_owned(), kernel, range.configuration.clone(), bytes]
    };
    let left = ["m", "", "kernel", "configuration"].map(|name| (name, Align::Left));
    let columns: Vec<_> = left.into_iter().chain([("workspace bytes", Align::Right)]).collect();
    table(&columns, &ranges.iter().map(row).collect::<Vec<_>>())
}

fn line(kernel: &'static str, layout: &'static str, what: &'static str, reason: Option<Reason>) -> Line {
    let chosen = reason.is_none();
    Line { kernel, layout, chosen, reason: reason.map_or_else(|| what.to_owned(), |r| r.to_string()) }
}
