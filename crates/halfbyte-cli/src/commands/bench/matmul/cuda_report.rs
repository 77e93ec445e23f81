//! What was measured of products on a GPU, for people and as JSON.

use super::report::{self, OnGpu, Rooflines};
use crate::text::{Align, rate};
use serde::Serialize;

pub type Report = report::Report<OnGpu, Rooflines<Limits>, Line, Blas>;
pub type Line = report::Line<Product, Share>;

/// Where NVIDIA's library lies, if it was asked for.
#[derive(Serialize)]
pub struct Blas {
    pub cublaslt: Option<String>,
}

/// What the device can do at most.
#[derive(Clone, Copy, Serialize)]
pub struct Limits {
    pub read_gb_per_s: f64,
    pub f16_tflop_per_s: Option<f64>,
}

/// The product of a line.
#[derive(Serialize)]
pub struct Product {
    pub y: &'static str,
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// What the device allows it.
#[derive(Serialize)]
pub struct Share {
    /// Whether x is quantised on the fly.
    #[serde(skip)]
    pub quantized: bool,
    pub weights_gb_per_s: f64,
    /// A bare read of as many bytes as the weight has.
    pub read_us: f64,
    pub limit_us: f64,
    pub roofline_percent: f64,
    pub limit: &'static str,
}

/// A table.
pub fn human(report: &Report) -> String {
    let mut columns = vec![("format", Align::Left), ("x", Align::Left), ("y", Align::Left)];
    columns.extend(["m", "n", "k"].map(|name| (name, Align::Right)));
    columns.push(("kernel", Align::Left));
    columns.extend(["µs", "±%", "limit µs", "roofline"].map(|name| (name, Align::Right)));
    columns.push(("of", Align::Left));
    columns.extend(["cuBLASLt µs", "×"].map(|name| (name, Align::Right)));
    let optional = |value: Option<f64>, text: fn(f64) -> String| value.map_or_else(|| "-".to_owned(), text);
    let row = |line: &Line| {
        let Product { y, m, n, k } = line.work;
        let mut row = vec![line.format.clone(), line.x.to_owned(), y.to_owned()];
        row.extend([m, n, k].map(|size| size.to_string()));
        row.extend([
            line.kernel.to_owned(),
            rate(line.median_us),
            format!("{:.1}", 50.0 * line.spread),
            rate(line.limit.limit_us),
            format!("{:.0} %", line.limit.roofline_percent),
            line.limit.limit.to_owned(),
            optional(line.baseline_us, rate),
            optional(line.times_baseline, |times| format!("{times:.2}")),
        ]);
        row
    };
    let mut out = report.table("x and weights random, weights cold", columns, row);
    let Rooflines { roofline_before, roofline_after } = report.limits;
    for (when, limits) in [("before", roofline_before), ("after", roofline_after)] {
        let peak = limits.f16_tflop_per_s.map_or_else(String::new, |peak| format!(", f16 {peak:.0} TFLOP/s"));
        out += &format!("device {when:<6} read {:.0} GB/s{peak}\n", limits.read_gb_per_s);
    }
    out
}
