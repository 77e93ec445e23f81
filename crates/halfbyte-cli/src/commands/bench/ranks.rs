//! `halfbyte bench ranks`: what ranks on GPUs of this machine tell each other.

use crate::app::App;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, table};
use crate::timing::Measured;
use halfbyte::Float;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, Stream};
use halfbyte::cuda::nn::{self, Collectives, FloatBuffer, LayerNorm, Mailbox, Norm, Update};
use serde::Serialize;
use std::sync::{Barrier, Mutex, PoisonError};

/// Calls of a graph; replays that count, and those before them.
const CALLS: usize = 50;
const REPLAYS: usize = 21;
const WARM_UP: usize = 3;

/// Time sums over ranks, alone and with the residual and the norm that follow, in recorded graphs.
///
/// Ranks are threads, each with a GPU of `--device cuda:I,J,...` (all of the machine where none is named). Values are random f32; what one
/// rank takes is beside them: the norm without a sum.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Elements of a row.
    #[arg(short = 'k', long, value_name = "SIZE", value_delimiter = ',', default_values_t = [4096, 8192, 14336])]
    hidden: Vec<usize>,
    /// Rows.
    #[arg(short, value_name = "M", value_delimiter = ',', default_values_t = [1, 16, 512])]
    m: Vec<usize>,
}

#[derive(Serialize)]
struct Report {
    devices: Vec<String>,
    driver: String,
    results: Vec<Line>,
}

/// What the slowest rank takes for a call, in µs.
#[derive(Serialize)]
struct Line {
    m: usize,
    hidden: usize,
    /// Bytes that a rank sends to each other one.
    bytes: usize,
    all_reduce_us: f64,
    /// The sum, added to the residual, and its norm; none where so many rows take a launch for the sum.
    rms_norm_us: Option<f64>,
    layer_norm_us: Option<f64>,
    /// The residual and the norm of what one rank has.
    rms_norm_alone_us: f64,
}

/// Measures.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let numbers = app.all_cuda()?;
    let sizes = args.m.iter().chain(&args.hidden);
    if sizes.clone().any(|&size| size == 0 || size > 1 << 20) {
        let why = format!("rows {:?} of {:?} elements", args.m, args.hidden);
        return Err(Failure::usage("no such rows", why, "give sizes of 1 to 1048576"));
    }
    let progress = Progress::steps(app);
    progress.step("opening the GPUs");
    let gpus = numbers.iter().map(|&number| Gpu::open(number)).collect::<halfbyte::Result<Vec<_>>>()?;
    for gpu in &gpus {
        // What is loaded while ranks wait for each other would wait for them.
        let alone = nn::instances(gpu.caps().arch, None, &[]).into_iter().chain(nn::instances_of_ranks());
        gpu.prepare(&alone.collect::<Vec<_>>(), |_| ())?;
    }
    progress.step("measuring");
    let results = ranks(&gpus, args)?;
    drop(progress);
    let devices = gpus.iter().map(Gpu::name).collect();
    let driver = gpus[0].context().driver().version().to_string();
    app.result(&Report { devices, driver, results }, human)
}

/// Every rank's measurements, joined.
fn ranks(gpus: &[Gpu], args: &Args) -> Result<Vec<Line>> {
    let (all, addresses) = (&Barrier::new(gpus.len()), &Mutex::new(vec![Vec::new(); gpus.len()]));
    let rank = |number: usize| {
        move || -> Result<Vec<Line>> {
            let gpu = &gpus[number];
            let stream = Stream::new(gpu.context())?;
            // Who fails meets the others all the same: they would wait for it.
            let mailbox = Mailbox::new(gpu, &stream, gpus.len());
            let address = mailbox.as_ref().ok().map(|mailbox| mailbox.address(gpu)).transpose();
            let told = address.as_ref().ok().cloned().flatten().unwrap_or_default();
            addresses.lock().unwrap_or_else(PoisonError::into_inner)[number] = told;
            all.wait();
            let known = addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let met = mailbox.and_then(|mailbox| Collectives::new(gpu, &stream, mailbox, number, &known));
            let ready = met.and_then(|met| stream.synchronize().map(|()| met));
            all.wait();
            address?;
            let rank = Rank { gpu, stream: &stream, ranks: &ready?, all };
            let mut lines = Vec::new();
            for &hidden in &args.hidden {
                for &m in &args.m {
                    lines.push(rank.measure(m, hidden)?);
                }
            }
            rank.ranks.heard().map_err(|silent| {
                Failure::new(Exit::Device, "a rank was silent", format!("rank {silent}"), "see its error")
            })?;
            Ok(lines)
        }
    };
    let of_ranks: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..gpus.len()).map(|number| scope.spawn(rank(number))).collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    let mut joined: Vec<Line> = Vec::new();
    for lines in of_ranks {
        let lines = lines.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        if joined.is_empty() {
            joined = lines;
            continue;
        }
        for (line, other) in joined.iter_mut().zip(lines) {
            line.all_reduce_us = line.all_reduce_us.max(other.all_reduce_us);
            line.rms_norm_us = line.rms_norm_us.zip(other.rms_norm_us).map(|(a, b)| a.max(b));
            line.layer_norm_us = line.layer_norm_us.zip(other.layer_norm_us).map(|(a, b)| a.max(b));
            line.rms_norm_alone_us = line.rms_norm_alone_us.max(other.rms_norm_alone_us);
        }
    }
    Ok(joined)
}

struct Rank<'a> {
    gpu: &'a Gpu,
    stream: &'a Stream,
    ranks: &'a Collectives,
    all: &'a Barrier,
}

impl Rank<'_> {
    fn measure(&self, m: usize, hidden: usize) -> Result<Line> {
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let (gpu, stream, len) = (self.gpu, self.stream, m * hidden);
        let upload = |values: &[f32]| -> halfbyte::Result<Buffer<f32>> {
            let mut buffer = gpu.context().allocate(values.len())?;
            stream.upload(values, buffer.view_mut())?;
            Ok(buffer)
        };
        let random = |len, seed| upload(&random::normals(len, seed));
        let (mut residual, values) = (random(len, 1)?, random(len, 2)?);
        let (weight, bias) = (random(hidden, 3)?, random(hidden, 4)?);
        let mut out = FloatBuffer::allocate(gpu, Float::F16, len)?;
        let fused = self.ranks.sums_in_norm(m, hidden);
        // Sums of sums stay finite for two replays.
        let small: Vec<f32> = random::normals(len, 2).iter().map(|v| v * 1e-20).collect();
        let mut sums = values.duplicate(stream)?;
        let mut of_replays = Vec::new();
        for _ in 0..REPLAYS {
            stream.upload(&small, sums.view_mut())?;
            of_replays.push(self.time([1, 1], |stream| self.ranks.all_reduce(gpu, stream, sums.view_mut()))?);
        }
        let all_reduce_us = Measured::of(of_replays).median;
        let mut norm = |of_ranks: bool, rms: bool| {
            let update = Update { values: values.view(), ranks: of_ranks.then_some(self.ranks) };
            self.time([WARM_UP, REPLAYS], |stream| {
                let (residual, out) = (residual.view_mut(), out.view_mut(0..len));
                if rms {
                    let (weight, update) = (weight.view(), Some(update));
                    return nn::rms_norm(
                        gpu,
                        stream,
                        Norm { residual, update, weight, eps: 1e-5, out, exact: None, next: None },
                    );
                }
                let norm = LayerNorm { weight: weight.view(), bias: bias.view(), eps: 1e-5 };
                norm.apply(gpu, stream, residual, Some(update), out)
            })
        };
        let rms_norm_us = fused.then(|| norm(true, true)).transpose()?;
        let layer_norm_us = fused.then(|| norm(true, false)).transpose()?;
        let rms_norm_alone_us = norm(false, true)?;
        Ok(Line { m, hidden, bytes: 4 * len, all_reduce_us, rms_norm_us, layer_norm_us, rms_norm_alone_us })
    }

    /// µs of a call among many of a graph.
    fn time(&self, [warm_up, runs]: [usize; 2], mut work: impl FnMut(&Stream) -> halfbyte::Result<()>) -> Result<f64> {
        self.stream.synchronize()?;
        self.all.wait();
        let seconds = self.stream.time_replays(warm_up, runs, |stream| (0..CALLS).try_for_each(|_| work(stream)))?;
        Ok(1e6 * Measured::of(seconds).median / CALLS as f64)
    }
}

fn human(report: &Report) -> String {
    let mut columns: Vec<_> = ["m", "hidden", "KB"].map(|name| (name, Align::Right)).to_vec();
    let times = ["all-reduce µs", "with RMS norm", "with LayerNorm", "RMS norm alone"];
    columns.extend(times.map(|name| (name, Align::Right)));
    let row = |line: &Line| {
        let or_none = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.2}"));
        vec![
            line.m.to_string(),
            line.hidden.to_string(),
            format!("{:.0}", line.bytes as f64 / 1024.0),
            format!("{:.2}", line.all_reduce_us),
            or_none(line.rms_norm_us),
            or_none(line.layer_norm_us),
            format!("{:.2}", line.rms_norm_alone_us),
        ]
    };
    let rows: Vec<_> = report.results.iter().map(row).collect();
    format!("{}, driver for CUDA {}\n\n{}", report.devices.join(" and "), report.driver, table(&columns, &rows))
}
