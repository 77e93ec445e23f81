//! `halfbyte explain`: which kernel would run, and why each other would not.

use crate::app::App;
use crate::args::{FloatArg, WeightKind};
use crate::failure::Result;
use crate::text::{Align, table};
use halfbyte::Float;
use halfbyte::cpu::isa::Caps;
use halfbyte::cpu::matmul;
use halfbyte::cuda::{self, Gpu};
use halfbyte::kernel::{Problem, Reason};
use serde::Serialize;

/// Show which kernel would compute a product, and why each other would not.
#[derive(Debug, clap::Args)]
pub struct Args {
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
    /// Type of y [default: f32; on a GPU f16].
    #[arg(long, value_enum)]
    y: Option<FloatArg>,
}

#[derive(Serialize)]
struct Explanation {
    problem: String,
    /// Instruction sets, or the GPU's processor.
    isa: String,
    chosen: Option<&'static str>,
    kernels: Vec<Line>,
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
    let default = if app.cuda().is_some() { Float::F16 } else { Float::F32 };
    let x = args.x.map_or(default, Float::from);
    let y = args.y.map_or(default, Float::from);
    let problem = Problem { format: args.format.format(), x, y, m: args.m, n: args.n, k: args.k };
    let (isa, kernels) = match app.cuda() {
        None => {
            let caps = Caps::detect_within_environment()?;
            let explained = matmul::explain(&caps, &problem).into_iter();
            let lines = explained.map(|(kernel, reason)| line(kernel.name, kernel.layout, kernel.what, reason));
            (caps.isa.name().to_owned(), lines.collect::<Vec<_>>())
        }
        Some(number) => {
            let caps = Gpu::open(number)?.caps();
            let explained = cuda::matmul::explain(&caps, &problem, None).into_iter();
            let lines = explained.map(|(kernel, reason)| line(kernel.name, kernel.layout, kernel.what, reason));
            (caps.arch.to_string(), lines.collect())
        }
    };
    let chosen = kernels.iter().find(|line| line.chosen).map(|line| line.kernel);
    app.result(&Explanation { problem: problem.to_string(), isa, chosen, kernels }, |e| {
        let rows: Vec<Vec<String>> = e
            .kernels
            .iter()
            .map(|line| {
                let mark = if line.chosen { "chosen" } else { "no" };
                vec![line.kernel.to_owned(), mark.to_owned(), line.reason.clone()]
            })
            .collect();
        let columns = [("kernel", Align::Left), ("", Align::Left), ("why", Align::Left)];
        format!("{}, on {}\n\n{}", e.problem, e.isa, table(&columns, &rows))
    })
}

fn line(kernel: &'static str, layout: &'static str, what: &'static str, reason: Option<Reason>) -> Line {
    let chosen = reason.is_none();
    Line { kernel, layout, chosen, reason: reason.map_or_else(|| what.to_owned(), |r| r.to_string()) }
}
