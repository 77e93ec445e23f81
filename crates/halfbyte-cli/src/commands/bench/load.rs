//! `halfbyte bench load`: how fast the layers of a checkpoint come from its files to the kernels.

use crate::app::App;
use crate::args::{FormArg, bits, group, whole};
use crate::escape::path;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::open;
use crate::progress::Progress;
use crate::random;
use crate::text::{Align, bytes as in_bytes, several, table};
use crate::timing::Measured;
use halfbyte::cpu::roofline::{Roofline, copy_to_new_memory};
use halfbyte::ops::{Linear, Weight};
use halfbyte::{Act, Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::scheme::SCHEMES;
use halfbyte_checkpoint::{DType, Job, Quantization, StoredWeight, Target, Weights, linears, write_model};
use halfbyte_llm::Config;
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::TempDir;

/// Time opening a checkpoint and packing its layers, from files that were read before.
///
/// Every quantised layer counts, and every dense one of a block. What is measured is what loading a model does: new memory
/// each time, layers side by side, and all of them held until the last is packed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder, or one file.
    #[arg(required_unless_present = "random", conflicts_with = "random")]
    model: Option<PathBuf>,
    /// Time a random checkpoint of this configuration instead, written to a temporary folder (TMPDIR) first.
    #[arg(long, value_name = "CONFIG.json", requires = "to")]
    random: Option<PathBuf>,
    /// Form of the random checkpoint; awq has zero points, the others are symmetric.
    #[arg(long, value_enum, value_name = "FORM", requires = "random", conflicts_with = "model")]
    to: Option<FormArg>,
    /// Bits a code of the random checkpoint.
    #[arg(long, value_name = "BITS", value_parser = bits, default_value = "4", conflicts_with = "model")]
    bits: u32,
    /// Weights along k that share a scale in the random checkpoint, -1 for all of an output channel.
    #[arg(
        long,
        value_name = "N",
        value_parser = group,
        default_value = "128",
        conflicts_with = "model"
    )]
    group: Group,
    /// Repetitions, of which the best and the median are told.
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = whole::<u16>(1..))]
    repetitions: u16,
}

#[derive(Serialize)]
struct Report {
    model: PathBuf,
    random: bool,
    threads: usize,
    isa: &'static str,
    /// What the machine reads from memory at most.
    read_bytes_per_second: f64,
    /// What it copies at most from memory to memory that is new.
    copy_to_new_bytes_per_second: f64,
    #[serde(flatten)]
    total: Speed,
    /// The layers of each format by themselves.
    formats: Vec<OfFormat>,
}

#[derive(Serialize)]
struct OfFormat {
    format: String,
    layers: usize,
    #[serde(flatten)]
    speed: Speed,
}

#[derive(Serialize)]
struct Speed {
    /// Of the layers' tensors.
    file_bytes: u64,
    best_bytes_per_second: f64,
    median_bytes_per_second: f64,
    /// The best as a share of what the machine reads.
    best_share: f64,
    median_share: f64,
    /// The best as a share of what the machine copies to new memory.
    best_share_of_copy: f64,
}

impl Speed {
    fn of(file_bytes: u64, seconds: Vec<f64>, [read, copy]: [f64; 2]) -> Self {
        let Measured { median, least, .. } = Measured::of(seconds);
        let [best, median] = [least, median].map(|seconds| file_bytes as f64 / seconds);
        Self {
            file_bytes,
            best_bytes_per_second: best,
            median_bytes_per_second: median,
            best_share: best / read,
            median_share: median / read,
            best_share_of_copy: best / copy,
        }
    }
}

/// A layer that is timed.
struct Layer {
    name: String,
    /// Number of its format.
    format: usize,
    bytes: u64,
}

/// Prints the speeds.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    // Until the folder is gone again.
    let _cooperate = interrupt::cooperate();
    let written = match (&args.random, args.to) {
        (Some(config), Some(form)) => Some(random_checkpoint(config, form.into(), args, &progress)?),
        _ => None,
    };
    let model = args.model.as_deref().or(args.random.as_deref()).unwrap_or(Path::new(""));
    let path = written.as_ref().map_or(model, |folder| folder.path());
    let (formats, layers) = layers_of(&open(path)?)?;
    if layers.is_empty() {
        return Err(Failure::usage(
            "there is nothing to time",
            format!("{} has no linear layers", model.display()),
            "give a model with quantised layers, or with blocks",
        ));
    }
    progress.step("reading the files once");
    for file in open(path)?.checkpoint().files() {
        let read = File::open(file).and_then(|mut file| std::io::copy(&mut file, &mut std::io::sink()));
        read.map_err(|e| Failure::io("read", file, &e))?;
    }
    let machine = [Roofline::measure(&cpu).read_bytes_per_second, copy_to_new_memory(&cpu)];
    let (mut totals, mut of_format) = (Vec::new(), vec![Vec::new(); formats.len()]);
    for run in 0..=args.repetitions {
        progress.step(format!("loading, {run} of {}", args.repetitions));
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let mut seconds = vec![0.0; formats.len()];
        let begun = Instant::now();
        let weights = open(path)?;
        let load = |layer: &Layer| -> Result<Linear> {
            let linear = match weights.stored_linear(&layer.name)?.weight {
                StoredWeight::Quantized(w) => Linear::new(Weight::Stored(&[&w], Act::A16))?,
                StoredWeight::Dense { floats, shape } => Linear::new(Weight::Dense(floats.as_floats(), shape))?,
            };
            weights.release(&layer.name);
            Ok(linear)
        };
        let mut packed = Vec::with_capacity(formats.len());
        for (format, seconds) in seconds.iter_mut().enumerate() {
            let begun = Instant::now();
            let layers = layers.par_iter().filter(|layer| layer.format == format);
            packed.push(layers.map(load).collect::<Result<Vec<_>>>()?);
            *seconds = begun.elapsed().as_secs_f64();
        }
        let total = begun.elapsed().as_secs_f64();
        // The first counts for nothing.
        if run > 0 {
            totals.push(total);
            of_format.iter_mut().zip(seconds).for_each(|(all, seconds)| all.push(seconds));
        }
    }
    drop(progress);
    let bytes_of = |format: Option<usize>| {
        layers.iter().filter(|layer| format.is_none_or(|f| f == layer.format)).map(|layer| layer.bytes).sum()
    };
    let report = Report {
        model: model.to_owned(),
        random: written.is_some(),
        threads: cpu.threads().count(),
        isa: cpu.caps().isa.name(),
        read_bytes_per_second: machine[0],
        copy_to_new_bytes_per_second: machine[1],
        total: Speed::of(bytes_of(None), totals, machine),
        formats: formats
            .into_iter()
            .zip(of_format)
            .enumerate()
            .map(|(at, (format, seconds))| OfFormat {
                format,
                layers: layers.iter().filter(|layer| layer.format == at).count(),
                speed: Speed::of(bytes_of(Some(at)), seconds, machine),
            })
            .collect(),
    };
    app.result(&report, human)
}

/// Names of the formats, and the layers that are timed.
fn layers_of(weights: &Weights) -> Result<(Vec<String>, Vec<Layer>)> {
    let parts: BTreeSet<&str> = SCHEMES.iter().flat_map(|scheme| scheme.parts).copied().chain(["weight"]).collect();
    let (mut formats, mut layers): (Vec<String>, Vec<Layer>) = (Vec::new(), Vec::new());
    for linear in linears(weights)?.iter().filter(|linear| linear.source.is_some() || linear.in_block()) {
        let tensors = parts.iter().filter_map(|part| weights.checkpoint().get(&format!("{}.{part}", linear.name)));
        let name = match linear.source {
            Some(format) => format.to_string(),
            None => weights.checkpoint().info(&format!("{}.weight", linear.name))?.dtype.name().to_lowercase(),
        };
        let bytes = tensors.map(|tensor| tensor.bytes as u64).sum();
        let format = formats.iter().position(|known| *known == name).unwrap_or(formats.len());
        if format == formats.len() {
            formats.push(name);
        }
        layers.push(Layer { name: linear.name.to_owned(), format, bytes });
    }
    Ok((formats, layers))
}

/// A model folder of random weights, in f16, which goes when it is dropped.
fn random_model(path: &Path, progress: &Progress) -> Result<TempDir> {
    let text = crate::text::read_text(path)?;
    let config = Config::parse(&text, path)?;
    let folder = tempfile::Builder::new()
        .prefix("halfbyte-random-")
        .tempdir()
        .map_err(|e| Failure::io("create a folder in", &std::env::temp_dir(), &e))?;
    let copy = folder.path().join("config.json");
    std::fs::write(&copy, &text).map_err(|e| Failure::io("write", &copy, &e))?;
    let specs: Vec<TensorSpec> =
        config.spec.tensors().into_iter().map(|(name, shape)| TensorSpec { name, dtype: DType::F16, shape }).collect();
    let mut writer = create(folder.path(), &specs, 5_000_000_000)?;
    for (i, spec) in specs.iter().enumerate() {
        progress.step(format!("random weights: {} of {} tensors", i, specs.len()));
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let len = spec.shape.iter().product();
        let deviation = match spec.shape.as_slice() {
            // Outputs of about the size of the inputs.
            [_, k] => (*k as f32).powf(-0.5),
            _ => 1.0,
        };
        writer.write(&spec.name, bytemuck::cast_slice(&random::uniform_f16(len, deviation, i as u64)))?;
    }
    writer.finish()?;
    Ok(folder)
}

/// A folder with a random quantised checkpoint, which goes when it is dropped.
fn random_checkpoint(config: &Path, form: Target, args: &Args, progress: &Progress) -> Result<TempDir> {
    let dense = random_model(config, progress)?;
    let source = Weights::open(dense.path())?;
    let folder = tempfile::Builder::new()
        .prefix("halfbyte-load-")
        .tempdir()
        .map_err(|e| Failure::io("create a folder in", &std::env::temp_dir(), &e))?;
    let zero = if form == Target::Awq { Zero::Integer } else { Zero::Symmetric };
    let wanted = WeightFormat { bits: args.bits, group: args.group, zero, scale: Float::F16, channel_scale: None };
    let mut seed = 0;
    let quantization = Quantization {
        target: form,
        format: &mut |layer| layer.in_block().then_some(wanted),
        quantize: &mut |layer, _, format| {
            seed += 1;
            progress.step(format!("random weights: {}", layer.name));
            random::qtensor(format, layer.shape, seed)
        },
        dense: &mut |_| None,
        untied: None,
    };
    let job = Job { overwrite: true, cancel: Some(&interrupt::cancelled), ..Job::new(&source, folder.path()) };
    write_model(job, quantization)?;
    Ok(folder)
}

fn human(report: &Report) -> String {
    let random = if report.random { ", random weights" } else { "" };
    let gigabytes = |per_second: f64| format!("{:.2}", per_second / 1e9);
    let share = |share: f64| format!("{:.0} %", 100.0 * share);
    let row = |name: String, layers: usize, speed: &Speed| {
        vec![
            name,
            layers.to_string(),
            in_bytes(speed.file_bytes),
            gigabytes(speed.best_bytes_per_second),
            share(speed.best_share),
            gigabytes(speed.median_bytes_per_second),
            share(speed.median_share),
            share(speed.best_share_of_copy),
        ]
    };
    let mut rows: Vec<Vec<String>> =
        report.formats.iter().map(|of| row(of.format.clone(), of.layers, &of.speed)).collect();
    rows.push(row("all, and opening".into(), report.formats.iter().map(|of| of.layers).sum(), &report.total));
    let columns = [
        ("layers of", Align::Left),
        ("count", Align::Right),
        ("file bytes", Align::Right),
        ("best GB/s", Align::Right),
        ("of reading", Align::Right),
        ("median GB/s", Align::Right),
        ("of reading", Align::Right),
        ("best of copying", Align::Right),
    ];
    format!(
        "{}{random}: {}, {}; this machine reads {} GB/s and copies {} GB/s to new memory\n{}",
        path(&report.model),
        several(report.threads, "thread"),
        report.isa,
        gigabytes(report.read_bytes_per_second),
        gigabytes(report.copy_to_new_bytes_per_second),
        table(&columns, &rows)
    )
}
