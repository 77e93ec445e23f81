//! `halfbyte quantize`: a quantised checkpoint from a dense one.

mod calibrated;

use crate::app::App;
use crate::args::RtnArgs;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::open;
use crate::progress::{Progress, Unit};
use crate::text::bytes;
use calibrated::{Calibration, CalibrationArgs};
use clap::ValueEnum;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Float, Format, Group, WeightFormat, Zero};
use halfbyte_checkpoint::scheme::gptq;
use halfbyte_checkpoint::{GptqVersion, Job, Linear, LinearWeight, Quantization, Weights, linears, write_model};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Write a quantised model: the linear layers of the blocks; embedding, head and norms stay as they are.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Dense model folder.
    model: PathBuf,
    /// Folder to write.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Bits a code.
    #[arg(long, default_value = "4", value_name = "BITS", value_parser = ["2", "3", "4", "8"])]
    bits: String,
    /// Weights along k that share a scale; -1: one scale an output channel.
    #[arg(long, default_value = "128", value_name = "N", allow_negative_numbers = true, value_parser = group)]
    group: Group,
    /// Zero in the middle of the codes (the default).
    #[arg(long, conflicts_with = "asym")]
    sym: bool,
    /// A zero point of its own for each group.
    #[arg(long)]
    asym: bool,
    /// How codes are chosen: rtn rounds to nearest; gptq makes good each column's error by the columns after it; awq scales
    /// input channels up and clips ranges. gptq and awq need --calibration. The least loss: gptq with --asym --correct
    /// --search --sweeps 3.
    #[arg(long, value_enum, default_value = "rtn")]
    method: Method,
    #[command(flatten)]
    rtn: RtnArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// The form of the files: gptq, which transformers, vLLM and others load; its scales are f16.
    #[arg(long, value_enum, default_value = "gptq")]
    to: Target,
    /// Write nothing; print the time, disk space and memory that it would take.
    #[arg(long)]
    dry_run: bool,
    /// Replace a model folder that is there already.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Method {
    Rtn,
    Gptq,
    Awq,
}

impl Method {
    /// As `--method` spells it, and in words.
    fn names(self) -> [&'static str; 2] {
        match self {
            Method::Rtn => ["rtn", "round to nearest"],
            Method::Gptq => ["gptq", "GPTQ"],
            Method::Awq => ["awq", "AWQ"],
        }
    }
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Target {
    Gptq,
}

fn group(text: &str) -> std::result::Result<Group, String> {
    match text.parse() {
        Ok(-1i64) => Ok(Group::Channel),
        Ok(size @ 1..=0xff_ffff) => Ok(Group::Size(size as usize)),
        _ => Err("expected -1 (one scale a channel) or a size from 1 to 16777215".to_owned()),
    }
}

impl Args {
    fn format(&self) -> WeightFormat {
        let bits = match self.bits.as_str() {
            "2" => 2,
            "3" => 3,
            "8" => 8,
            _ => 4,
        };
        let zero = if self.asym { Zero::Integer } else { Zero::Symmetric };
        WeightFormat { bits, group: self.group, zero, scale: Float::F16 }
    }
}

/// Sizes of what is written, computed from the shapes alone.
#[derive(Clone, Copy, Debug, Serialize)]
struct Sizes {
    /// Bytes of all tensors of the source.
    bytes_before: u64,
    /// Bytes of all tensors of the result.
    bytes_after: u64,
    /// Modules that are quantised.
    modules: usize,
    /// Bits of a quantised module for each of its weights: codes, scales, zero points, group indices.
    bits_per_weight: f64,
}

#[derive(Serialize)]
struct Quantized {
    model: PathBuf,
    output: PathBuf,
    method: &'static str,
    /// The method in words.
    #[serde(skip)]
    by: &'static str,
    to: &'static str,
    format: String,
    dry_run: bool,
    #[serde(flatten)]
    sizes: Sizes,
    /// What it took; in a dry run what it would take, the disk's own time not counted.
    seconds: f64,
    /// What a dry run expects beyond the source's pages, which the system may drop.
    #[serde(skip_serializing_if = "Option::is_none")]
    peak_memory_bytes: Option<u64>,
    /// How calibration went, where there was any.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    calibration: Option<Calibration>,
}

/// Writes the folder, or says what it would take.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let begun = Instant::now();
    let Target::Gptq = args.to;
    args.calibration.check(args.method, args.rtn)?;
    let (format, options) = (args.format(), Rtn::from(args.rtn));
    let source = open(&args.model)?;
    let layers = layers(args, &source)?;
    let sizes = sizes(&source, &layers, format);
    let mut result = Quantized {
        model: args.model.clone(),
        output: args.output.clone(),
        method: args.method.names()[0],
        by: args.method.names()[1],
        to: "gptq",
        format: Format { weight: format, act: Act::A16 }.to_string(),
        dry_run: args.dry_run,
        sizes,
        seconds: 0.0,
        peak_memory_bytes: None,
        calibration: None,
    };
    if args.dry_run {
        result.seconds = estimate_seconds(&source, &layers, format, options)?;
        result.peak_memory_bytes = Some(peak_memory(&layers, format));
    }
    if let Some(text) = &args.calibration.calibration {
        let (calibration, method, overwrite) = (&args.calibration, args.method, args.overwrite);
        let task =
            calibrated::Task { app, source: &source, text, calibration, method, rtn: options, format, overwrite };
        calibrated::run(&task, &mut result)?;
        if !args.dry_run {
            result.seconds = begun.elapsed().as_secs_f64();
        }
        return app.result(&result, human);
    }
    if args.dry_run {
        return app.result(&result, human);
    }
    let progress = Progress::new(app, "quantising", Unit::Bytes);
    let mut report = |at: halfbyte_checkpoint::Progress<'_>| progress.at(at.bytes, at.total_bytes);
    let cooperate = interrupt::cooperate();
    let job = Job {
        overwrite: args.overwrite,
        progress: Some(&mut report),
        cancel: Some(&interrupt::cancelled),
        ..Job::new(&source, &args.output)
    };
    let quantization = Quantization {
        target: halfbyte_checkpoint::Target::Gptq(None),
        format: &mut |layer| layer.in_block().then_some(format),
        quantize: &mut |_, weight, format| match weight {
            LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, options),
            LinearWeight::Quantized(_) => Err(halfbyte::Error::Invalid {
                op: "quantize",
                expected: "a dense layer".to_owned(),
                got: "a quantised one".to_owned(),
            }),
        },
        dense: &mut |_| None,
    };
    let written = write_model(job, quantization)?;
    drop((cooperate, progress));
    result.output = written.path;
    result.sizes = Sizes { bytes_after: written.tensor_bytes, modules: written.quantized, ..sizes };
    result.seconds = begun.elapsed().as_secs_f64();
    app.result(&result, human)
}

/// The layers that are going to be quantised. Errors: none, or such as are quantised already.
fn layers<'a>(args: &Args, source: &'a Weights) -> Result<Vec<Linear<'a>>> {
    let all = linears(source)?;
    if let Some(layer) = all.iter().find(|layer| layer.source.is_some()) {
        return Err(Failure::usage(
            format!("{} is quantised already", args.model.display()),
            format!("`{}` holds codes; quantising them again would lose more than a new format says", layer.name),
            "start from the original model; `halfbyte dequantize` makes a dense one of this if need be",
        ));
    }
    let layers: Vec<_> = all.into_iter().filter(Linear::in_block).collect();
    if layers.is_empty() {
        return Err(Failure::new(
            crate::failure::Exit::Input,
            format!("{} has nothing to quantise", args.model.display()),
            "no linear layer lies in a numbered block",
            "`halfbyte inspect MODEL` lists the modules",
        ));
    }
    if let Some(layer) = layers.iter().find(|l| !l.shape.iter().all(|d| d.is_multiple_of(32))) {
        let [n, k] = layer.shape;
        return Err(Failure::usage(
            format!("`{}` does not fit GPTQ files", layer.name),
            format!("they hold outputs and inputs in multiples of 32, and it has {n} and {k}"),
            "use --quantize with run and eval, which takes every shape, in memory",
        ));
    }
    Ok(layers)
}

/// Bytes of a module in GPTQ's files: codes, zero points, scales, group indices.
fn gptq_bytes([n, k]: [usize; 2], format: WeightFormat) -> u64 {
    let (n, k, bits) = (n as u64, k as u64, u64::from(format.bits));
    let groups = format.group.count(k as usize) as u64;
    n * k * bits / 8 + groups * n * bits / 8 + groups * n * 2 + k * 4
}

fn sizes(source: &Weights, layers: &[Linear<'_>], format: WeightFormat) -> Sizes {
    let all: u64 = source.checkpoint().tensors().map(|info| info.bytes as u64).sum();
    let dense: u64 = layers
        .iter()
        .filter_map(|layer| source.checkpoint().get(&format!("{}.weight", layer.name)))
        .map(|info| info.bytes as u64)
        .sum();
    let weights: u64 = layers.iter().map(|l| l.shape[0] as u64 * l.shape[1] as u64).sum();
    let codes: u64 = layers.iter().map(|layer| gptq_bytes(layer.shape, format)).sum();
    Sizes {
        bytes_before: all,
        bytes_after: all - dense + codes,
        modules: layers.len(),
        bits_per_weight: codes as f64 * 8.0 / weights as f64,
    }
}

/// Weights of the piece that is timed.
const SAMPLE: usize = 1 << 20;

/// Quantises and packs a piece of the first layer, and multiplies.
fn estimate_seconds(source: &Weights, layers: &[Linear<'_>], format: WeightFormat, options: Rtn) -> Result<f64> {
    let Some(layer) = layers.first() else { return Ok(0.0) };
    let loaded = source.load_linear(layer.name)?;
    let LinearWeight::Dense { floats, shape: [n, k] } = &loaded.weight else { return Ok(0.0) };
    let rows = (SAMPLE / k).clamp(32, *n) / 32 * 32;
    let piece = floats.as_floats().slice(0..rows * k);
    let mut best = f64::INFINITY;
    for _ in 0..2 {
        let begun = Instant::now();
        let q = rtn(piece, [rows, *k], format, options)?;
        let version = if format.zero == Zero::Symmetric { GptqVersion::V1 } else { GptqVersion::V2 };
        gptq::pack(layer.name, &q, version)?;
        best = best.min(begun.elapsed().as_secs_f64());
    }
    let weights: f64 = layers.iter().map(|l| l.shape[0] as f64 * l.shape[1] as f64).sum();
    Ok(best / (rows * k) as f64 * weights)
}

/// The largest layer as codes, a byte each, beside what they are packed to; and what every process takes.
fn peak_memory(layers: &[Linear<'_>], format: WeightFormat) -> u64 {
    const PROCESS: u64 = 8 << 20;
    let of_layer = |layer: &Linear<'_>| {
        let [n, k] = layer.shape;
        let scales = (n * format.group.count(k)) as u64 * 12;
        (n * k) as u64 + scales + gptq_bytes(layer.shape, format)
    };
    PROCESS + layers.iter().map(of_layer).max().unwrap_or(0)
}

fn human(result: &Quantized) -> String {
    let Quantized { sizes, format, calibration, .. } = result;
    let mut out = String::new();
    if let Some(calibration) = calibration {
        out += &calibrated::human(calibration);
    }
    out += &format!(
        "{}: {} layers to {format} by {}, in GPTQ's form with f16 scales\n",
        result.output.display(),
        sizes.modules,
        result.by
    );
    out += &format!(
        "tensors {} before, {} after; {:.2} bits a weight in the quantised layers\n",
        bytes(sizes.bytes_before),
        bytes(sizes.bytes_after),
        sizes.bits_per_weight
    );
    match result.peak_memory_bytes {
        None => out += &format!("done in {:.2} s\n", result.seconds),
        Some(memory) => {
            out += &format!(
                "dry run, nothing was written; it would take about {:.2} s and the disk's own time, {} of disk and about {} of memory\n",
                result.seconds,
                bytes(sizes.bytes_after + calibration.as_ref().map_or(0, Calibration::work_bytes)),
                bytes(memory)
            );
        }
    }
    out
}
