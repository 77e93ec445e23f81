//! What `bench matmul` and `bench conv` report, on CPUs and GPUs: for people as tables, and as JSON.

use super::check::Check;
use crate::failure::{Exit, Failure, Result};
use crate::text::{Align, several, table};
use crate::timing::Measured;
use halfbyte::Cpu;
use halfbyte::cuda::Gpu;
use serde::Serialize;

/// All of it: the machine, what it could do at most, what was measured, and what else there is to tell.
#[derive(Serialize)]
pub struct Report<M, L, R, E> {
    #[serde(flatten)]
    pub machine: M,
    /// Where the shapes come from.
    pub origin: Option<String>,
    #[serde(flatten)]
    pub limits: L,
    pub results: Vec<R>,
    #[serde(flatten)]
    pub more: E,
    /// None without `--check`.
    pub passed: Option<bool>,
}

/// A CPU.
#[derive(Serialize)]
pub struct OnCpu {
    threads: usize,
    pub isa: &'static str,
}

/// A GPU.
#[derive(Serialize)]
pub struct OnGpu {
    device: String,
    driver: String,
    multiprocessors: u32,
    l2_bytes: u32,
}

/// What the machine could do before and after.
#[derive(Serialize)]
pub struct Rooflines<L> {
    pub roofline_before: L,
    pub roofline_after: L,
}

/// Nothing else.
#[derive(Serialize)]
pub struct Nothing {}

/// One measurement of some work, with what the machine allows it.
#[derive(Serialize)]
pub struct Line<W, L> {
    pub format: String,
    pub x: &'static str,
    #[serde(flatten)]
    pub work: W,
    /// What of its case it is.
    pub origin: Option<String>,
    pub kernel: &'static str,
    pub weight_bytes: usize,
    pub copies: usize,
    pub runs: usize,
    pub median_us: f64,
    pub least_us: f64,
    pub spread: f64,
    pub gflop_per_s: f64,
    #[serde(flatten)]
    pub limit: L,
    pub baseline_us: Option<f64>,
    pub times_baseline: Option<f64>,
    pub check: Option<Check>,
}

/// How long something took.
pub struct Timed {
    pub kernel: &'static str,
    pub weight_bytes: usize,
    /// Copies of the weight that took turns.
    pub copies: usize,
    pub measured: Measured,
    pub operations: f64,
}

impl OnCpu {
    pub fn of(cpu: &Cpu) -> Self {
        Self { threads: cpu.threads().count(), isa: cpu.caps().isa.name() }
    }
}

impl std::fmt::Display for OnCpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", several(self.threads, "thread"), self.isa)
    }
}

impl OnGpu {
    pub fn of(gpu: &Gpu) -> Self {
        let info = gpu.context().info();
        let driver = gpu.context().driver().version().to_string();
        Self { device: gpu.name(), driver, multiprocessors: info.multiprocessors, l2_bytes: info.l2_bytes }
    }
}

impl std::fmt::Display for OnGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, driver for CUDA {}", self.device, self.driver)
    }
}

impl<W, L> Line<W, L> {
    pub fn new(format: String, x: &'static str, work: W, timed: Timed, limit: L, check: Option<Check>) -> Self {
        let Timed { kernel, weight_bytes, copies, measured: Measured { median, least, spread, runs }, operations } =
            timed;
        Self {
            format,
            x,
            work,
            origin: None,
            kernel,
            weight_bytes,
            copies,
            runs,
            median_us: median * 1e6,
            least_us: least * 1e6,
            spread,
            gflop_per_s: operations / median / 1e9,
            limit,
            baseline_us: None,
            times_baseline: None,
            check,
        }
    }

    /// The same with where its shape comes from, and beside the dense product's time in microseconds.
    pub fn beside(self, origin: Option<String>, baseline_us: Option<f64>) -> Self {
        let times_baseline = baseline_us.map(|baseline| baseline / self.median_us);
        Self { origin, baseline_us, times_baseline, ..self }
    }
}

impl<M: std::fmt::Display, L, W, S, E> Report<M, L, Line<W, S>, E> {
    /// A table with a row for each line, below what the numbers are of; checks are its last column.
    pub fn table(
        &self,
        about: &str,
        mut columns: Vec<(&'static str, Align)>,
        row: impl Fn(&Line<W, S>) -> Vec<String>,
    ) -> String {
        if self.passed.is_some() {
            columns.push(("check", Align::Left));
        }
        let row = |line: &Line<W, S>| {
            let mut row = row(line);
            row.extend(line.check.map(|c| format!("{} {:.2}", if c.passed { "ok" } else { "MISSED" }, c.worst)));
            row
        };
        let rows: Vec<Vec<String>> = self.results.iter().map(row).collect();
        let origin = self.origin.as_ref().map_or_else(String::new, |origin| format!("{origin}\n"));
        format!("{origin}{}; {about}\n\n{}\n", self.machine, table(&columns, &rows))
    }
}

/// Whether all checks that were asked for have passed, of which there must be one.
pub fn passed<W, L>(asked: bool, lines: &[Line<W, L>]) -> Option<bool> {
    asked.then(|| !lines.is_empty() && lines.iter().all(|line| line.check.is_some_and(|check| check.passed)))
}

/// The failure of a check that found something, or that had nothing to look at.
pub fn verdict(passed: Option<bool>, lines: usize) -> Result<()> {
    match (passed, lines) {
        (Some(false), 0) => Err(Failure::new(
            Exit::No,
            "nothing was checked",
            "nothing was measured",
            "choose formats that the shapes can have",
        )),
        (Some(false), _) => Err(Failure::new(
            Exit::No,
            "a product is out of bounds",
            "an element lies further from the f64 reference than the bound allows",
            "the column `check` shows the worst distance as a share of the bound",
        )),
        (None | Some(true), _) => Ok(()),
    }
}
