//! `halfbyte bench launch`: how long the host works for one product that a GPU computes.

use crate::app::App;
use crate::args::WeightKind;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, table};
use crate::timing::Measured;
use half::f16;
use halfbyte::cuda::roofline::Roofline;
use halfbyte::{Act, Cuda, Float, Format, Group, Linear, Weight, WeightFormat, Zero};
use serde::Serialize;
use std::time::Instant;

/// Products that are put into the queue before it is waited for: fewer than fill it up.
const QUEUED: usize = 200;

/// Products whose time does not count.
const WARM_UP: usize = 100;

/// Time what the host does for one product on a GPU, from the call of a layer's `forward` to its return, beside the driver's time for
/// the launch of an empty kernel.
///
/// x and y lie in device memory, and nothing waits for the device between the calls of a batch.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Formats of the weights [default: w4a16-g128,w4a8-g128].
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    format: Vec<WeightKind>,
    /// Rows of x.
    #[arg(short, value_name = "M", value_delimiter = ',', default_values_t = [1])]
    m: Vec<usize>,
    /// Outputs.
    #[arg(short, value_name = "N", default_value_t = 4096)]
    n: usize,
    /// Length of the reduction.
    #[arg(short, value_name = "K", default_value_t = 4096)]
    k: usize,
    /// Calls that count.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    calls: usize,
}

#[derive(Serialize)]
struct Report {
    device: String,
    driver: String,
    results: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    format: String,
    m: usize,
    n: usize,
    k: usize,
    kernel: &'static str,
    calls: usize,
    /// What the driver takes for the launch of an empty kernel, measured in turn with the products.
    driver_us: f64,
    /// From call to return.
    host_us: f64,
    least_us: f64,
    spread: f64,
}

/// Measures.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let Some(number) = app.cuda()? else {
        return Err(Failure::new(
            Exit::Usage,
            "a GPU is needed",
            "what is timed is the host's share of a product on a GPU",
            "use --device cuda",
        ));
    };
    let progress = Progress::steps(app);
    progress.step("opening the GPU");
    let cuda = Cuda::open(number)?;
    let roofline = Roofline::new(cuda.gpu())?;
    let mut results = Vec::new();
    for kind in kinds(&args.format) {
        let linear = layer(&cuda, kind, [args.n, args.k])?;
        for &m in &args.m {
            progress.step(format!("{kind} m={m}"));
            results.push(measure(&cuda, &roofline, &linear, (kind, m), args.calls)?);
        }
    }
    drop(progress);
    let (device, driver) = (cuda.gpu().name(), cuda.gpu().context().driver().version().to_string());
    app.result(&Report { device, driver, results }, human)
}

fn kinds(asked: &[WeightKind]) -> Vec<WeightKind> {
    let weight = WeightFormat {
        bits: 4,
        group: Group::Size(128),
        zero: Zero::Symmetric,
        scale: Float::F16,
        channel_scale: None,
    };
    match asked {
        [] => [Act::A16, Act::A8].map(|act| WeightKind::Quantized(Format { weight, act })).to_vec(),
        asked => asked.to_vec(),
    }
}

fn layer(cuda: &Cuda, kind: WeightKind, shape: [usize; 2]) -> Result<Linear<Cuda>> {
    Ok(match kind {
        WeightKind::Quantized(format) => {
            let w = random::qtensor(format.weight, shape, 1)?;
            Linear::for_inputs(cuda, Weight::Quantized(&w, format.act), Float::F16)?
        }
        WeightKind::Dense(_) => {
            let w = random::to_f16(&random::normals(shape[0] * shape[1], 1));
            Linear::on(cuda, Weight::Dense((&w).into(), shape))?
        }
    })
}

fn measure(
    cuda: &Cuda,
    roofline: &Roofline,
    linear: &Linear<Cuda>,
    (kind, m): (WeightKind, usize),
    calls: usize,
) -> Result<Line> {
    let [n, k] = [linear.n(), linear.k()];
    let x: Vec<f16> = random::to_f16(&random::normals(m * k, 2));
    let (x, mut y) = (cuda.upload(&x)?, cuda.allocate(Float::F16, m * n)?);
    for _ in 0..WARM_UP {
        linear.forward(cuda, &x, m, &mut y)?;
        roofline.nothing(cuda.stream())?;
    }
    cuda.synchronize()?;
    let calls = calls.max(1);
    let [mut seconds, mut of_driver] = [(); 2].map(|()| Vec::with_capacity(calls));
    while seconds.len() < calls {
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        for _ in 0..QUEUED {
            let start = Instant::now();
            linear.forward(cuda, &x, m, &mut y)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        cuda.synchronize()?;
        for _ in 0..QUEUED {
            let start = Instant::now();
            roofline.nothing(cuda.stream())?;
            of_driver.push(start.elapsed().as_secs_f64());
        }
        cuda.synchronize()?;
    }
    let (calls, kernel) = (seconds.len(), linear.kernel(cuda, m, Float::F16, Float::F16)?);
    let Measured { median, least, spread, .. } = Measured::of(seconds);
    let (format, host_us, least_us) = (kind.to_string(), 1e6 * median, 1e6 * least);
    let driver_us = 1e6 * Measured::of(of_driver).median;
    Ok(Line { format, m, n, k, kernel, calls, driver_us, host_us, least_us, spread })
}

fn human(report: &Report) -> String {
    let mut columns = vec![("format", Align::Left)];
    columns.extend(["m", "n", "k"].map(|name| (name, Align::Right)));
    columns.push(("kernel", Align::Left));
    columns.extend(["launch µs", "host µs", "least", "±%", "calls"].map(|name| (name, Align::Right)));
    let row = |line: &Line| {
        let mut row = vec![line.format.clone()];
        row.extend([line.m, line.n, line.k].map(|size| size.to_string()));
        row.push(line.kernel.to_owned());
        row.extend([line.driver_us, line.host_us, line.least_us].map(|us| format!("{us:.2}")));
        row.extend([format!("{:.1}", 50.0 * line.spread), line.calls.to_string()]);
        row
    };
    let rows: Vec<_> = report.results.iter().map(row).collect();
    format!("{}, driver for CUDA {}\n\n{}", report.device, report.driver, table(&columns, &rows))
}
