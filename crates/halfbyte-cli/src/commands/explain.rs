//! `halfbyte explain`: which kernel would run, and why each other would not.

use crate::app::App;
use crate::args::{FloatArg, WeightKind};
use crate::failure::Result;
use crate::text::{Align, table};
use halfbyte::cpu::isa::Caps;
use halfbyte::cpu::matmul;
use halfbyte::kernel::Problem;
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
    /// Type of x.
    #[arg(long, value_enum, default_value = "f32")]
    x: FloatArg,
}

#[derive(Serialize)]
struct Explanation {
    problem: String,
    isa: &'static str,
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
    let caps = Caps::detect_within_environment()?;
    let problem = Problem { format: args.format.format(), x: args.x.into(), m: args.m, n: args.n, k: args.k };
    let kernels: Vec<Line> = matmul::explain(&caps, &problem)
        .into_iter()
        .map(|(kernel, reason)| Line {
            kernel: kernel.name,
            layout: kernel.layout,
            chosen: reason.is_none(),
            reason: reason.map_or_else(|| kernel.what.to_owned(), |r| r.to_string()),
        })
        .collect();
    let chosen = kernels.iter().find(|line| line.chosen).map(|line| line.kernel);
    app.result(&Explanation { problem: problem.to_string(), isa: caps.isa.name(), chosen, kernels }, |e| {
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
