//! What was measured of products on a GPU, for people and as JSON.

use super::super::check::Check;
use crate::text::{Align, rate, table};
use serde::Serialize;

/// All of it.
#[derive(Serialize)]
pub struct Report {
    pub device: String,
    pub driver: String,
    pub multiprocessors: u32,
    pub l2_bytes: u32,
    pub cublaslt: Option<String>,
    pub origin: Option<String>,
    pub roofline_before: Limits,
    pub roofline_after: Limits,
    pub results: Vec<Line>,
    /// None without `--check`.
    pub passed: Option<bool>,
}

/// What the device can do at most.
#[derive(Clone, Copy, Serialize)]
pub struct Limits {
    pub read_gb_per_s: f64,
    pub f16_tflop_per_s: Option<f64>,
}

/// One product.
#[derive(Serialize)]
pub struct Line {
    pub format: String,
    pub x: &'static str,
    pub y: &'static str,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub origin: Option<String>,
    pub kernel: &'static str,
    /// Whether x is quantised on the fly.
    #[serde(skip)]
    pub quantized: bool,
    pub weight_bytes: usize,
    pub copies: usize,
    pub runs: usize,
    pub median_us: f64,
    pub least_us: f64,
    pub spread: f64,
    pub gflop_per_s: f64,
    pub weights_gb_per_s: f64,
    /// A bare read of as many bytes as the weight has.
    pub read_us: f64,
    pub limit_us: f64,
    pub roofline_percent: f64,
    pub limit: &'static str,
    pub baseline_us: Option<f64>,
    pub times_baseline: Option<f64>,
    pub check: Option<Check>,
}

/// A table.
pub fn human(report: &Report) -> String {
    let mut out = report.origin.as_ref().map_or_else(String::new, |origin| format!("{origin}\n"));
    out += &format!("{}, driver for CUDA {}; x and weights random, weights cold\n\n", report.device, report.driver);
    let mut columns = vec![("format", Align::Left), ("x", Align::Left), ("y", Align::Left)];
    columns.extend(["m", "n", "k"].map(|name| (name, Align::Right)));
    columns.push(("kernel", Align::Left));
    columns.extend(["µs", "±%", "limit µs", "roofline"].map(|name| (name, Align::Right)));
    columns.push(("of", Align::Left));
    columns.extend(["cuBLASLt µs", "×"].map(|name| (name, Align::Right)));
    if report.passed.is_some() {
        columns.push(("check", Align::Left));
    }
    let optional = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), text);
    let rows: Vec<Vec<String>> = report
        .results
        .iter()
        .map(|line| {
            let mut row = vec![line.format.clone(), line.x.to_owned(), line.y.to_owned()];
            row.extend([line.m, line.n, line.k].map(|size| size.to_string()));
            row.extend([
                line.kernel.to_owned(),
                rate(line.median_us),
                format!("{:.1}", 50.0 * line.spread),
                rate(line.limit_us),
                format!("{:.0} %", line.roofline_percent),
                line.limit.to_owned(),
                optional(line.baseline_us, rate),
                optional(line.times_baseline, |times| format!("{times:.2}")),
            ]);
            row.extend(line.check.map(|c| format!("{} {:.2}", if c.passed { "ok" } else { "MISSED" }, c.worst)));
            row
        })
        .collect();
    out += &table(&columns, &rows);
    out += "\n";
    for (when, limits) in [("before", report.roofline_before), ("after", report.roofline_after)] {
        let peak = limits.f16_tflop_per_s.map_or_else(String::new, |peak| format!(", f16 {peak:.0} TFLOP/s"));
        out += &format!("device {when:<6} read {:.0} GB/s{peak}\n", limits.read_gb_per_s);
    }
    out
}
