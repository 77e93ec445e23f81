//! `halfbyte explain model`: what the products of a model are computed by, as decided when it is loaded.

use crate::app::App;
use crate::escape::path;
use crate::failure::Result;
use crate::model::LoadArgs;
use crate::text::{Align, bytes, several, table};
use halfbyte_llm::explain::Product;
use serde::Serialize;
use std::path::PathBuf;

/// Show what the quantised products of a model are computed by, for every number of rows.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder, or a GGUF file.
    model: PathBuf,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Explanation {
    device: String,
    /// What one kernel for all layers of a token would need; None: that is what computes them, or a CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    one_kernel_needs: Option<String>,
    products: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    product: String,
    count: usize,
    plans: Vec<Plan>,
}

#[derive(Serialize)]
struct Plan {
    first_m: usize,
    /// None: any number.
    last_m: Option<usize>,
    kernel: &'static str,
    configuration: String,
    workspace_bytes: usize,
}

/// Prints the table.
pub fn run(args: &Args, app: &App) -> Result<()> {
    args.load.one_rank("an explanation", &[&args.model])?;
    let model = args.load.load(app, &args.model)?;
    let products = model.explain(&app.cpu()?)?.iter().map(line).collect();
    let one_kernel_needs = model.one_kernel_needs().map(ToString::to_string);
    let explanation = Explanation { device: model.device().to_string(), one_kernel_needs, products };
    app.result(&explanation, |e| {
        let mut out = format!("{}, on {}\n", path(&args.model), e.device);
        if e.products.is_empty() {
            out += "no quantised products\n";
        }
        if let Some(needed) = &e.one_kernel_needs {
            out += &format!("a token goes kernel by kernel; one kernel for all layers needs {needed}\n");
        }
        let columns = ["m", "kernel", "configuration"].map(|name| (name, Align::Left));
        let columns = columns.into_iter().chain([("workspace", Align::Right)]).collect::<Vec<_>>();
        for product in &e.products {
            let row = |plan: &Plan| {
                let rows = match plan.last_m {
                    Some(last) if last == plan.first_m => last.to_string(),
                    Some(last) => format!("{} to {last}", plan.first_m),
                    None => format!("from {} on", plan.first_m),
                };
                vec![rows, plan.kernel.to_owned(), plan.configuration.clone(), bytes(plan.workspace_bytes as u64)]
            };
            let rows: Vec<Vec<String>> = product.plans.iter().map(row).collect();
            out += &format!("\n{}, {}\n{}", product.product, several(product.count, "time"), table(&columns, &rows));
        }
        out
    })
}

fn line(Product { problem, count, plans }: &Product) -> Line {
    let of_rows = |plan: &halfbyte_llm::explain::PlanOfRows| {
        let [first, last] = plan.rows;
        Plan {
            first_m: first.max(1),
            last_m: (last < i32::MAX as usize).then_some(last),
            kernel: plan.kernel,
            configuration: plan.configuration.clone(),
            workspace_bytes: plan.workspace_bytes,
        }
    };
    Line { product: problem.to_string(), count: *count, plans: plans.iter().map(of_rows).collect() }
}
