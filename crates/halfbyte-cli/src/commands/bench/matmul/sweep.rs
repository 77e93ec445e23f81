//! `bench matmul --sweep`: the configurations of a kernel that are worth measuring, against the one that it chooses.

use super::cuda::Bench;
use super::operations;
use crate::app::App;
use crate::failure::{Failure, Result};
use crate::text::{Align, rate, several, table};
use halfbyte::Format;
use halfbyte::cuda::Workspace;
use halfbyte::cuda::matmul::{self, Call, Configuration, Epilogue, Packed};
use halfbyte::cuda::nn::FloatBuffer;
use halfbyte::kernel::{Activation, Problem};
use serde::Serialize;

/// Room for the sums of tiles that a configuration cuts.
const WORKSPACE_BYTES: usize = 128 << 20;

/// Other configurations that are named besides the fastest.
const NAMED: usize = 3;

#[derive(Serialize)]
struct Report<'a> {
    results: &'a [Swept],
    /// Products that `--within` left out.
    left: usize,
}

/// One number of rows of one shape.
#[derive(Serialize)]
pub struct Swept {
    format: String,
    x: &'static str,
    y: &'static str,
    m: usize,
    n: usize,
    k: usize,
    chosen: String,
    chosen_us: f64,
    /// Of cuBLASLt's dense product in halfs.
    baseline_us: Option<f64>,
    /// The fastest first.
    others: Vec<Other>,
}

#[derive(Serialize)]
struct Other {
    config: String,
    median_us: f64,
}

impl Bench<'_> {
    /// Times all candidates on weights that lie in one layout.
    pub(super) fn sweep(
        &self,
        format: Format,
        weights: &[Packed],
        [m, n, k]: [usize; 3],
        baseline_us: Option<f64>,
    ) -> Result<Swept> {
        let caps = weights[0].caps(self.gpu);
        let problem = Problem { format: Some(format), x: self.x, y: self.y, m, n, k };
        let kernel = match self.kernel {
            Some(kernel) => kernel,
            None => matmul::select(&caps, &problem, weights.first().map(Packed::layout))?,
        };
        let bytes = |c: &Configuration| c.workspace_bytes(&caps, &problem, false);
        let mut configs = kernel.candidates(&caps, &problem).map_err(|why| {
            Failure::usage(
                "a kernel whose configurations are measured computes the product",
                format!("{}: {why}", kernel.name),
                "name another with --kernel, or another format",
            )
        })?;
        configs.retain(|c| bytes(c) <= WORKSPACE_BYTES);
        if configs.len() < 2 {
            return Err(Failure::usage(
                "a kernel with several configurations",
                format!("{} for {problem}", kernel.name),
                "name another with --kernel, or another format",
            ));
        }
        let instances: Vec<_> = configs.iter().flat_map(|c| c.instances(&problem, Activation::None)).collect();
        self.progress.step(format!("{format} m={m} n={n} k={k}: compiling {} configurations", configs.len()));
        self.gpu.prepare(&instances, |_| ())?;
        let mut workspace = Workspace::new(self.gpu, self.stream, WORKSPACE_BYTES)?;
        let x = self.normals(m * k, self.x, 1.0)?;
        let mut y = FloatBuffer::allocate(self.gpu, self.y, m * n)?;
        let launches = self.launches(weights.len(), weights[0].bytes(), operations([m, n, k]));
        let mut others = Vec::new();
        for config in configs {
            self.progress.step(format!("{format} m={m} n={n} k={k}: {config}"));
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
                matmul::run_as(kernel, &config, self.gpu, stream, &call)
            })?;
            others.push(Other { config: config.to_string(), median_us: measured.median * 1e6 });
        }
        let Other { config: chosen, median_us: chosen_us } = others.remove(0);
        others.sort_by(|a, b| a.median_us.total_cmp(&b.median_us));
        Ok(Swept {
            format: format.to_string(),
            x: self.x.name(),
            y: self.y.name(),
            m,
            n,
            k,
            chosen,
            chosen_us,
            baseline_us,
            others,
        })
    }
}

/// Prints what was measured.
pub(super) fn print(results: &[Swept], left: usize, app: &App) -> Result<()> {
    app.result(&Report { results, left }, |Report { results, left }| {
        let mut columns = vec![("format", Align::Left), ("y", Align::Left)];
        columns.extend(["m", "n", "k"].map(|name| (name, Align::Right)));
        columns.extend([("µs", Align::Right), ("", Align::Left), ("configuration", Align::Left)]);
        let mut rows = Vec::new();
        for s in results.iter() {
            let mut row = vec![s.format.clone(), s.y.to_owned()];
            row.extend([s.m, s.n, s.k].map(|size| size.to_string()));
            row.extend([rate(s.chosen_us), "chosen".to_owned(), s.chosen.clone()]);
            rows.push(row);
            for other in s.others.iter().take(NAMED) {
                let mut row = vec![String::new(); 5];
                let share = format!("{:+.1} %", 100.0 * (other.median_us / s.chosen_us - 1.0));
                row.extend([rate(other.median_us), share, other.config.clone()]);
                rows.push(row);
            }
        }
        let out = table(&columns, &rows);
        let out = if results.len() < 2 { out } else { out + "\n" + &summary(results) };
        if *left == 0 {
            out
        } else {
            format!("{out}not measured, since the time that --within gives was over: {}\n", several(*left, "product"))
        }
    })
}

/// How the choice does over all: beside the fastest that was found, and beside cuBLASLt.
fn summary(results: &[Swept]) -> String {
    let best = |s: &Swept| s.others.first().map_or(s.chosen_us, |other| other.median_us.min(s.chosen_us));
    let beside_best = ("the fastest configuration", shares(results.iter().map(|s| (s, s.chosen_us / best(s)))));
    let dense = |s: &'_ Swept| s.baseline_us.map(|us| s.chosen_us / us);
    let beside_dense = ("cuBLASLt, dense", shares(results.iter().filter_map(|s| Some((s, dense(s)?)))));
    let mut out = String::new();
    for (beside, mut shares) in [beside_best, beside_dense] {
        let Some((worst, share)) = shares.pop() else { continue };
        let within = |most: f64| shares.partition_point(|(_, share)| *share <= most) + usize::from(share <= most);
        let of = shares.len() + 1;
        let percent = |most: f64| 100.0 * within(most) as f64 / of as f64;
        let Swept { format, m, n, k, .. } = worst;
        out += &format!(
            "chosen / {beside}: at most 1.05 for {:.1} % of {of} products, at most 1.2 for {:.1} %; {share:.2} at most, of {format} \
             m={m} n={n} k={k}\n",
            percent(1.05),
            percent(1.2),
        );
    }
    out
}

/// In the order of shares.
fn shares<'a>(results: impl Iterator<Item = (&'a Swept, f64)>) -> Vec<(&'a Swept, f64)> {
    let mut all: Vec<_> = results.collect();
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all
}
