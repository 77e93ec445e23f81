//! `halfbyte quantize`: a quantised checkpoint from a dense one.

mod calibrated;
mod head;

use crate::app::App;
use crate::args::{FormArg, RtnArgs, SymmetricRange, bits, group, head_bits};
use crate::escape::path;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::open_complete;
use crate::progress::{Progress, Unit};
use crate::text::{bytes, several};
use calibrated::{Calibration, CalibrationArgs};
use clap::ValueEnum;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Float, Format, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::folder::look_at_target;
use halfbyte_checkpoint::scheme::gptq;
use halfbyte_checkpoint::{
    GptqVersion, Hint, Job, Linear, LinearWeight, Quantization, Target, Weights, linears, write_model,
};
use head::Head;
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Write a quantised model: the linear layers of the blocks, and the output head by choice; embedding and norms stay as they are.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Dense model folder.
    model: PathBuf,
    /// Folder to write; with --to gguf a file, if its name ends so.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Bits a code.
    #[arg(long, default_value = "4", value_name = "BITS", value_parser = bits)]
    bits: u32,
    /// Weights along k that share a scale; -1: one scale an output channel [default: 128; 32 for gguf, which has no other].
    #[arg(long, value_name = "N", value_parser = group)]
    group: Option<Group>,
    /// Zero in the middle of the codes (the default).
    #[arg(long, conflicts_with = "asym")]
    sym: bool,
    /// A zero point of its own for each group.
    #[arg(long)]
    asym: bool,
    /// Scales of groups as factors of 8 bits of one scale an output channel: 4 bits, and --to native. With activations of 8
    /// bits products sum whole rows before they scale.
    #[arg(long)]
    two_level: bool,
    /// Bits of the output head: 8 or 4, in groups as the blocks' layers, 8 without zero points; by the method where there is
    /// calibration text, else rounded to nearest. 16: it stays as it is. Where the embedding is the head, the result has a head of
    /// its own beside the embedding, and its config says tie_word_embeddings false.
    #[arg(long, value_name = "BITS", default_value = "16", value_parser = head_bits)]
    head: u32,
    /// How codes are chosen: rtn rounds to nearest; gptq makes good each column's error by the columns after it; awq scales
    /// input channels up and clips ranges. gptq and awq need --calibration. The least loss: gptq with --asym --correct
    /// --search --sweeps 3.
    #[arg(long, value_enum, default_value = "rtn")]
    method: Method,
    #[command(flatten)]
    rtn: RtnArgs,
    #[command(flatten)]
    calibration: CalibrationArgs,
    /// The form of the files. Scales are f16 in all of them.
    #[arg(long, value_enum, default_value = "gptq")]
    to: FormArg,
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

impl Args {
    fn format(&self) -> WeightFormat {
        let gguf = self.to == FormArg::Gguf;
        let zero = match (self.asym, gguf) {
            (false, _) => Zero::Symmetric,
            (true, false) => Zero::Integer,
            (true, true) => Zero::Float,
        };
        let group = self.group.unwrap_or(Group::Size(if gguf { 32 } else { 128 }));
        let one = WeightFormat { bits: self.bits, group, zero, scale: Float::F16, channel_scale: None };
        match self.two_level {
            false => one,
            true => WeightFormat { scale: Float::F32, channel_scale: Some(Float::F16), ..one },
        }
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
    /// Format of the head, if that is quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    head_format: Option<String>,
    /// Whether the head was the embedding, and is a module of its own now.
    untied: bool,
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
    args.calibration.check(args.method, args.rtn)?;
    if args.asym && args.rtn.symmetric_range == SymmetricRange::Full {
        return Err(Failure::usage(
            "--symmetric-range changes nothing with --asym",
            "zero points say where zero is",
            "leave one of them out",
        ));
    }
    if let Err(e) = args.format().validate() {
        return Err(Failure::usage("these options make no format", e.to_string(), "see `halfbyte quantize --help`"));
    }
    let (format, options) = (args.format(), Rtn::from(args.rtn));
    let source = open_complete(&args.model, Hint::default(), app)?;
    let head = Head::of(args, &source)?;
    let layers = layers(args, &source, head.as_ref())?;
    let sizes = planned(&source, &layers, args.to.into())?;
    look_at_target(&source, &args.output, args.to.into(), args.overwrite)?;
    if let (FormArg::Gptq, Group::Size(size)) = (args.to, format.group)
        && !(size.is_power_of_two() && (16..=1024).contains(&size))
    {
        let usual = "other programs read powers of two from 16 to 1024, as a rule 128";
        app.note(&format!("note: hardly anybody else reads GPTQ files with groups of {size}: {usual}"));
    }
    if args.bits == 2 && !args.asym && args.rtn.symmetric_range == SymmetricRange::Narrow {
        app.note(
            "note: symmetric codes of 2 bits stand for -1, 0 and 1 times a scale: --asym, or --symmetric-range full, loses far less",
        );
    }
    if args.to == FormArg::Awq && head.is_some() {
        app.note(
            "note: vLLM and SGLang read the head of this form as codes; transformers does not, and fills it at random",
        );
    }
    let mut result = Quantized {
        model: args.model.clone(),
        output: args.output.clone(),
        method: args.method.names()[0],
        by: args.method.names()[1],
        to: args.to.name(),
        format: Format { weight: format, act: Act::A16 }.to_string(),
        head_format: head.as_ref().map(|head| Format { weight: head.format, act: Act::A16 }.to_string()),
        untied: head.as_ref().is_some_and(|head| head.untied().is_some()),
        dry_run: args.dry_run,
        sizes,
        seconds: 0.0,
        peak_memory_bytes: None,
        calibration: None,
    };
    if args.dry_run {
        result.seconds = estimate_seconds(&source, &layers, options)?;
        result.peak_memory_bytes = Some(peak_memory(&source, &layers, args.to.into())?);
    }
    if let Some(text) = &args.calibration.calibration {
        let (calibration, method, overwrite) = (&args.calibration, args.method, args.overwrite);
        let target = args.to.into();
        let task = calibrated::Task {
            app,
            source: &source,
            text,
            calibration,
            method,
            rtn: options,
            format,
            head: head.as_ref(),
            target,
            overwrite,
        };
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
        target: args.to.into(),
        format: &mut |layer| layers.iter().find(|(known, _)| known.name == layer.name).map(|(_, format)| *format),
        quantize: &mut |_, weight, format| match weight {
            LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, options),
            LinearWeight::Quantized(_) => Err(halfbyte::Error::Invalid {
                op: "quantize",
                expected: "a dense layer".to_owned(),
                got: "a quantised one".to_owned(),
            }),
        },
        dense: &mut |_| None,
        untied: head.as_ref().and_then(Head::untied),
    };
    let written = write_model(job, quantization)?;
    drop((cooperate, progress));
    app.findings(&written.findings);
    result.output = written.path;
    result.sizes = Sizes { bytes_after: written.tensor_bytes, modules: written.quantized, ..sizes };
    result.seconds = begun.elapsed().as_secs_f64();
    app.result(&result, human)
}

/// The layers that are going to be quantised, each with what it becomes. Errors: none, or such as are quantised already.
fn layers<'a>(args: &Args, source: &'a Weights, head: Option<&'a Head>) -> Result<Vec<(Linear<'a>, WeightFormat)>> {
    let all = linears(source)?;
    if let Some(layer) = all.iter().find(|layer| layer.source.is_some()) {
        return Err(Failure::usage(
            format!("{} is quantised already", args.model.display()),
            format!("`{}` holds codes; quantising them again would lose more than a new format says", layer.name),
            "start from the original model; `halfbyte dequantize` makes a dense one of this if need be",
        ));
    }
    let format = args.format();
    let chosen = all.into_iter().filter(|layer| layer.in_block() && !layer.is_router());
    let mut layers: Vec<_> = chosen.map(|layer| (layer, format)).collect();
    if layers.is_empty() {
        return Err(Failure::new(
            crate::failure::Exit::Input,
            format!("{} has nothing to quantise", args.model.display()),
            "no linear layer lies in a numbered block",
            "`halfbyte inspect MODEL` lists the modules",
        ));
    }
    layers.extend(head.map(|head| (head.linear(), head.format)));
    let target = Target::from(args.to);
    for (layer, format) in &layers {
        if let Err(reason) = target.check(*format, layer.shape) {
            return Err(Failure::usage(
                format!("`{}` does not fit the form {}", layer.name, target.name()),
                format!("of {}: {reason}", target.name()),
                "choose other options, or --to native, which holds every format, as --quantize with run and eval does in memory",
            ));
        }
    }
    let grouped = matches!(format.group, Group::Size(_));
    if args.calibration.permutes() && grouped && !matches!(target, Target::Gptq(_) | Target::Native) {
        return Err(Failure::usage(
            format!("--act-order does not fit the form {}", target.name()),
            "only GPTQ's files and our own say which group a column belongs to",
            "add --static-groups, leave --act-order out, or write --to gptq or native",
        ));
    }
    Ok(layers)
}

fn planned(source: &Weights, layers: &[(Linear<'_>, WeightFormat)], target: Target) -> Result<Sizes> {
    let planned = halfbyte_checkpoint::sizes(target, source, layers)?;
    let weights: u64 = layers.iter().map(|(l, _)| l.shape[0] as u64 * l.shape[1] as u64).sum();
    Ok(Sizes {
        bytes_before: source.checkpoint().tensors().map(|info| info.bytes as u64).sum(),
        bytes_after: planned.all,
        modules: layers.len(),
        bits_per_weight: planned.modules as f64 * 8.0 / weights as f64,
    })
}

/// Weights of the piece that is timed.
const SAMPLE: usize = 1 << 20;

/// Quantises and packs a piece of the first layer, and multiplies.
fn estimate_seconds(source: &Weights, layers: &[(Linear<'_>, WeightFormat)], options: Rtn) -> Result<f64> {
    let Some(&(ref layer, format)) = layers.first() else { return Ok(0.0) };
    let loaded = source.load_linear(layer.name)?;
    let LinearWeight::Dense { floats, shape: [n, k] } = &loaded.weight else { return Ok(0.0) };
    if n * k == 0 {
        return Ok(0.0);
    }
    let rows = match (SAMPLE / k).max(32).min(*n) {
        few @ ..32 => few,
        many => many / 32 * 32,
    };
    let piece = floats.as_floats().slice(0..rows * k);
    let mut best = f64::INFINITY;
    for _ in 0..2 {
        let begun = Instant::now();
        let q = rtn(piece, [rows, *k], format, options)?;
        // Packing takes about as long in every form; GPTQ's is the one with the fewest conditions.
        let plain = WeightFormat { zero: Zero::Symmetric, scale: Float::F16, channel_scale: None, ..format };
        let (codes, scales) = (q.codes().to_vec(), q.scales().iter().map(|&s| Float::F16.round(s)).collect());
        let packed = QTensor::new(plain, [rows, *k], codes, scales, Zeros::Symmetric, None)?;
        if [rows, *k].iter().all(|len| len.is_multiple_of(32)) {
            gptq::pack(layer.name, &packed, GptqVersion::V2)?;
        }
        best = best.min(begun.elapsed().as_secs_f64());
    }
    let weights: f64 = layers.iter().map(|(l, _)| l.shape[0] as f64 * l.shape[1] as f64).sum();
    Ok(best / (rows * k) as f64 * weights)
}

/// The largest layer as codes, a byte each, beside what they are packed to; and what every process takes.
fn peak_memory(source: &Weights, layers: &[(Linear<'_>, WeightFormat)], target: Target) -> Result<u64> {
    const PROCESS: u64 = 8 << 20;
    let mut largest = 0;
    for planned in layers {
        let (Linear { shape: [n, k], .. }, format) = *planned;
        let scales = (n * format.group.count(k)) as u64 * 12;
        let packed = halfbyte_checkpoint::sizes(target, source, std::slice::from_ref(planned))?.modules;
        largest = largest.max((n * k) as u64 + scales + packed);
    }
    Ok(PROCESS + largest)
}

fn human(result: &Quantized) -> String {
    let Quantized { sizes, format, calibration, .. } = result;
    let mut out = String::new();
    if let Some(calibration) = calibration {
        out += &calibrated::human(calibration);
    }
    out += &format!(
        "{}: {} to {format}{} by {}, in the form {}\n",
        path(&result.output),
        several(sizes.modules, "layer"),
        result.head_format.as_ref().map_or_else(String::new, |head| format!(", the head among them to {head},")),
        result.by,
        result.to
    );
    out += &format!(
        "tensors {} before, {} after; {:.2} bits a weight in the quantised layers\n",
        bytes(sizes.bytes_before),
        bytes(sizes.bytes_after),
        sizes.bits_per_weight
    );
    if result.untied {
        out += "the embedding, which is the head in the source, stays; beside it lies a head of its own\n";
    }
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
