//! `halfbyte bench experts`: the experts of a layer on a GPU.

use super::replays::replay;
use crate::app::App;
use crate::args::WeightKind;
use crate::failure::{Exit, Failure, Result};
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, several, table};
use crate::timing::Measured;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{Packed, Packer};
use halfbyte::cuda::nn::{self, ChosenRows, ExpertLayer, FloatBuffer, Gate};
use halfbyte::cuda::roofline::Roofline;
use halfbyte::{Cuda, Float, Format, StoredTensor};
use serde::Serialize;
use std::collections::BTreeSet;

/// Bytes of weights that launches go through in turn, at least: many times what the second-level cache holds.
const COLD_BYTES: usize = 1 << 30;

/// Bytes of the large read.
const LARGE_BYTES: usize = 2 << 30;

/// Launches of a graph, each with rows and a choice of its own.
const LAUNCHES: usize = 12;

/// Time the experts of a layer on a GPU: the choice by logits, products up with their gates and down, and the sum of what the experts of
/// a row leave. The product of the router is not in it.
///
/// Weights, rows and logits are random; each launch has others, and weights come from memory.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Format of the weights.
    #[arg(long, value_name = "FORMAT", default_value = "w4a16-g128")]
    format: WeightKind,
    /// Experts of the layer.
    #[arg(long, value_name = "COUNT", default_value_t = 8)]
    experts: usize,
    /// Experts that each row chooses.
    #[arg(long, value_name = "COUNT", default_value_t = 2)]
    top_k: usize,
    /// Elements of a row.
    #[arg(long, value_name = "SIZE", default_value_t = 4096)]
    hidden: usize,
    /// Elements of the vector inside an expert.
    #[arg(long, value_name = "SIZE", default_value_t = 14336)]
    inner: usize,
    /// Rows of tiles, in the place of those that are chosen.
    #[arg(long, value_name = "ROWS")]
    tile: Option<usize>,
    /// Rows.
    #[arg(short, value_name = "M", value_delimiter = ',', default_values_t = [1, 32, 4096])]
    m: Vec<usize>,
}

#[derive(Serialize)]
struct Report {
    device: String,
    driver: String,
    format: String,
    experts: usize,
    top_k: usize,
    hidden: usize,
    inner: usize,
    read_gb_per_s: f64,
    results: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    m: usize,
    kernels: &'static [&'static str],
    median_us: f64,
    least_us: f64,
    spread: f64,
    /// Experts that some row has chosen, on average over the launches.
    experts_read: f64,
    /// What the weights of these take at the rate of the large read.
    bytes_us: f64,
    tflop_per_s: f64,
}

/// The weights of all experts.
struct Weights {
    up: Vec<Packed>,
    down: Vec<Packed>,
}

/// Measures.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let Some(number) = app.cuda()? else {
        let why = "what is timed are kernels of a GPU";
        return Err(Failure::new(Exit::Usage, "a GPU is needed", why, "use --device cuda"));
    };
    let WeightKind::Quantized(format) = args.format else {
        let why = format!("format {}", args.format);
        return Err(Failure::usage("dense experts have no products together", why, "name a quantised format"));
    };
    let sizes = [args.experts, args.top_k, args.hidden, args.inner].into_iter().chain(args.m.iter().copied());
    if sizes.into_iter().any(|size| size == 0) || args.top_k > args.experts {
        let why = format!("{} experts, {} of a row, {} × {}", args.experts, args.top_k, args.inner, args.hidden);
        return Err(Failure::usage("no such layer", why, "give sizes of at least 1, and no more choices than experts"));
    }
    let progress = Progress::steps(app);
    progress.step("opening the GPU");
    let cuda = Cuda::open(number)?;
    let mut copies: Vec<Weights> = Vec::new();
    let mut bytes = 0;
    while bytes < COLD_BYTES || copies.len() < 2 {
        progress.step(format!("packing experts, {} times so far", copies.len()));
        let weights = pack(args, format, &cuda, copies.len())?;
        bytes += weights.up.iter().chain(&weights.down).map(Packed::bytes).sum::<usize>();
        copies.push(weights);
    }
    let layers = copies.iter().map(|weights| layer(args, weights, &cuda)).collect::<Result<Vec<_>>>()?;
    progress.step("reading memory");
    let read = read(&cuda)?;
    let of_expert = (bytes / copies.len() / args.experts) as f64;
    let mut results = Vec::new();
    for &m in &args.m {
        progress.step(format!("m={m}"));
        let (measured, experts_read) = measure(args, &cuda, &layers, m)?;
        let Measured { median, least, spread, .. } = measured;
        results.push(Line {
            m,
            kernels: layers[0].kernels(m),
            median_us: 1e6 * median,
            least_us: 1e6 * least,
            spread,
            experts_read,
            bytes_us: 1e6 * experts_read * of_expert / read,
            tflop_per_s: 6.0 * (m * args.top_k) as f64 * (args.hidden * args.inner) as f64 / median / 1e12,
        });
    }
    drop(progress);
    let context = cuda.gpu().context();
    let &Args { experts, top_k, hidden, inner, .. } = args;
    let report = Report {
        device: cuda.gpu().name(),
        driver: context.driver().version().to_string(),
        format: args.format.to_string(),
        experts,
        top_k,
        hidden,
        inner,
        read_gb_per_s: read / 1e9,
        results,
    };
    app.result(&report, human)
}

fn pack(args: &Args, format: Format, cuda: &Cuda, copy: usize) -> Result<Weights> {
    let mut packer = Packer::new(cuda.gpu(), cuda.stream());
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for expert in 0..args.experts {
        let random = |n, k, which: usize| {
            StoredTensor::random(format.weight, [n, k], ((copy * args.experts + expert) * 3 + which) as u32)
        };
        let [gate, other] = [random(args.inner, args.hidden, 0)?, random(args.inner, args.hidden, 1)?];
        up.push(packer.pack_gated([&gate, &other], format.act, Gate::SWIGLU)?);
        down.push(packer.pack(&[&random(args.hidden, args.inner, 2)?], format.act, Float::F16)?);
    }
    Ok(Weights { up, down })
}

fn layer(args: &Args, Weights { up, down }: &Weights, cuda: &Cuda) -> Result<ExpertLayer> {
    let [up, down] = [up, down].map(|all| all.iter().map(|w| (w, None)).collect::<Vec<_>>());
    let made = ExpertLayer::new(cuda.gpu(), cuda.stream(), [&up, &down], args.top_k, Float::F16)?;
    let made = made.map_err(|why| {
        Failure::usage("no kernel multiplies these experts together", why.to_string(), "name another format or size")
    })?;
    Ok(match args.tile {
        Some(rows) => made.in_tiles(rows)?,
        None => made,
    })
}

/// Bytes a second that the device reads.
fn read(cuda: &Cuda) -> Result<f64> {
    let (gpu, stream) = (cuda.gpu(), cuda.stream());
    let roofline = Roofline::new(gpu)?;
    let mut large = gpu.context().allocate::<u8>(LARGE_BYTES)?;
    stream.fill(large.view_mut(), 0x5a)?;
    let mut sink = gpu.context().allocate::<u32>(1)?;
    let measured = replay(stream, 1, |stream, _| roofline.read(stream, large.view(), &mut sink.view_mut()))?;
    Ok(LARGE_BYTES as f64 / measured.median)
}

/// Seconds of a launch, and the experts that it reads on average.
fn measure(args: &Args, cuda: &Cuda, layers: &[ExpertLayer], m: usize) -> Result<(Measured, f64)> {
    let (gpu, stream, chosen) = (cuda.gpu(), cuda.stream(), m * args.top_k);
    let logits = random::normals(LAUNCHES * m * args.experts, 5);
    let read = logits.chunks_exact(m * args.experts).map(|of_launch| {
        of_launch.chunks_exact(args.experts).flat_map(|row| first(row, args.top_k)).collect::<BTreeSet<_>>().len()
    });
    let experts_read = read.sum::<usize>() as f64 / LAUNCHES as f64;
    let mut on_device = gpu.context().allocate(logits.len())?;
    stream.upload(&logits, on_device.view_mut())?;
    let mut x = FloatBuffer::allocate(gpu, Float::F16, m * args.hidden)?;
    Roofline::new(gpu)?.normal(stream, &mut x.view_mut(0..m * args.hidden), 1.0, 2)?;
    let (mut ids, mut shares): (Buffer<u32>, Buffer<f32>) =
        (gpu.context().allocate(chosen)?, gpu.context().allocate(chosen)?);
    let mut out = gpu.context().allocate(m * args.hidden)?;
    let all: Vec<&ExpertLayer> = layers.iter().collect();
    let mut room = ExpertLayer::room(cuda, &all, m)?;
    gpu.prepare(&layers[0].instances(gpu), |_| {})?;
    let mut launch = |stream: &halfbyte::cuda::driver::Stream, i: usize| {
        let begin = i % LAUNCHES * m * args.experts;
        let own = begin..begin + m * args.experts;
        let (logits, sizes) = (on_device.view().slice(own), [args.experts, args.top_k]);
        nn::route(gpu, stream, logits, sizes, true, ids.view_mut(), shares.view_mut())?;
        let rows = ChosenRows { x: x.view(0..m * args.hidden), ids: ids.view(), shares: shares.view() };
        layers[i % layers.len()].forward(cuda, rows, &mut room, out.view_mut())
    };
    // Each layer prepares what it needs when it is first used.
    (0..layers.len()).try_for_each(|i| launch(stream, i))?;
    Ok((replay(stream, LAUNCHES, launch)?, experts_read))
}

/// The experts with the greatest logits.
fn first(logits: &[f32], top_k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    order.truncate(top_k);
    order
}

fn human(report: &Report) -> String {
    let Report { device, driver, format, experts, top_k, hidden, inner, read_gb_per_s, results } = report;
    let mut columns = vec![("m", Align::Right)];
    columns.extend(["µs", "least", "±%", "experts", "bytes µs", "TFLOP/s"].map(|name| (name, Align::Right)));
    columns.push(("kernels", Align::Left));
    let row = |line: &Line| {
        let mut row = vec![line.m.to_string()];
        row.extend([line.median_us, line.least_us, 50.0 * line.spread].map(|v| format!("{v:.1}")));
        row.extend([line.experts_read, line.bytes_us, line.tflop_per_s].map(|v| format!("{v:.1}")));
        row.push(format!("route, {}", line.kernels.join(", ")));
        row
    };
    let rows: Vec<_> = results.iter().map(row).collect();
    format!(
        "{device}, driver for CUDA {driver}, reads {read_gb_per_s:.0} GB/s\n{}, {top_k} of a row, {inner} × {hidden}, \
         {format}\n\n{}",
        several(*experts, "expert"),
        table(&columns, &rows)
    )
}
