//! `halfbyte bench model`: prefill and decoding speed.

use crate::app::App;
use crate::escape::path;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::machine;
use crate::model::LoadArgs;
use crate::progress::Progress;
use crate::random::{self, SplitMix64};
use crate::text::{bytes, count, rate};
use crate::timing::{Effort, Measured, measure};
use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::DType;
use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_llm::{Config, Device, Model, Sampler, Sampling, Session};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// Time a model: reading a prompt, and writing token by token from an empty context.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder.
    #[arg(required_unless_present = "random_weights", conflicts_with = "random_weights")]
    model: Option<PathBuf>,
    /// Time a model of this configuration with random weights instead; they pass through a temporary folder (TMPDIR).
    #[arg(long, value_name = "CONFIG.json")]
    random_weights: Option<PathBuf>,
    /// Tokens of the prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prompt: usize,
    /// Tokens to write.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    generate: usize,
    /// Repetitions of each, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repetitions: u16,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Report {
    model: PathBuf,
    random_weights: bool,
    format: String,
    device: String,
    /// For people.
    #[serde(skip)]
    machine: String,
    threads: usize,
    isa: &'static str,
    parameters: u64,
    weight_bytes: usize,
    kv_bytes_per_token: usize,
    peak_resident_bytes: Option<u64>,
    prompt_tokens: usize,
    generated_tokens: usize,
    #[serde(flatten)]
    speed: Speed,
}

/// How fast a model reads and writes.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Speed {
    /// Median.
    pub prefill_tokens_per_second: f64,
    /// Width of the middle eight tenths, as a share of the median.
    pub prefill_spread: f64,
    /// Median.
    pub decode_tokens_per_second: f64,
    /// Width of the middle eight tenths, as a share of the median.
    pub decode_spread: f64,
}

/// What is timed.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens written.
    pub generate: usize,
    /// Repetitions of each.
    pub repetitions: usize,
    /// No further repetition after this.
    pub at_most: Duration,
}

/// Prints the speeds.
pub fn run(args: &Args, app: &App) -> Result<()> {
    if args.prompt == 0 || args.generate == 0 {
        return Err(Failure::usage(
            "there is nothing to time",
            format!("--prompt {} --generate {}", args.prompt, args.generate),
            "give at least one token for each",
        ));
    }
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    progress.step("loading the model");
    let (model, path, format) = match (&args.model, &args.random_weights) {
        (Some(folder), _) => (args.load.load(app, folder)?, folder, args.load.name(folder)?),
        (None, Some(config)) => {
            // Until the folder is gone again.
            let _cooperate = interrupt::cooperate();
            let folder = random_model(config, &progress)?;
            (args.load.load(app, folder.path())?, config, args.load.name(folder.path())?)
        }
        (None, None) => {
            return Err(Failure::usage("there is no model", "neither MODEL nor --random-weights", "give one"));
        }
    };
    if interrupt::cancelled() {
        return Err(Failure::interrupted());
    }
    let work = Work {
        prompt: args.prompt,
        generate: args.generate,
        repetitions: usize::from(args.repetitions),
        at_most: Duration::MAX,
    };
    let speed = speed(&model, &cpu, work, &progress)?;
    drop(progress);
    let report = Report {
        model: path.clone(),
        random_weights: args.random_weights.is_some(),
        format,
        device: model.device().to_string(),
        machine: machine_of(&model, &cpu),
        threads: cpu.threads().count(),
        isa: cpu.caps().isa.name(),
        parameters: model.parameters(),
        weight_bytes: model.weight_bytes(),
        kv_bytes_per_token: model.kv_bytes_per_token(),
        peak_resident_bytes: machine::peak_resident(),
        prompt_tokens: args.prompt,
        generated_tokens: args.generate,
        speed,
    };
    app.result(&report, human)
}

/// What a model computes with, for people.
pub fn machine_of(model: &Model, cpu: &Cpu) -> String {
    match model.device() {
        Device::Cpu => format!("{} threads, {}", cpu.threads().count(), cpu.caps().isa.name()),
        gpu @ Device::Cuda(_) => gpu.to_string(),
    }
}

/// Times prefill and decoding, after a warm-up of each.
pub fn speed(model: &Model, cpu: &Cpu, work: Work, progress: &Progress) -> Result<Speed> {
    let vocab = model.config().spec.vocab;
    let mut random = SplitMix64(7);
    let tokens: Vec<u32> = (0..work.prompt.max(work.generate)).map(|_| (random.bits() % vocab as u64) as u32).collect();
    let mut session = Session::new(model, cpu, tokens.len())?;
    let Work { repetitions: runs, at_most, .. } = work;
    let effort = Effort { warm_up: 1, runs, at_least: Duration::ZERO, at_most, in_any_case: 1 };
    progress.step(format!("prefill of {} tokens", work.prompt));
    let prefill = measure(effort, |_| {
        session.clear()?;
        session.prefill(&tokens[..work.prompt])?;
        Ok(())
    })?;
    progress.step(format!("decoding of {} tokens", work.generate));
    let mut greedy = Sampler::new(Sampling::default())?;
    let decode = measure(effort, |_| {
        session.clear()?;
        let mut token = tokens[0];
        for _ in 0..work.generate {
            session.read_unless(&[token], None)?;
            token = session.next(&mut greedy)?;
            if interrupt::cancelled() {
                return Err(Failure::interrupted());
            }
        }
        Ok(())
    })?;
    let per_second = |tokens: usize, measured: Measured| tokens as f64 / measured.median;
    Ok(Speed {
        prefill_tokens_per_second: per_second(work.prompt, prefill),
        prefill_spread: prefill.spread,
        decode_tokens_per_second: per_second(work.generate, decode),
        decode_spread: decode.spread,
    })
}

/// A model folder of random weights, in f16, which goes when it is dropped.
pub(super) fn random_model(path: &Path, progress: &Progress) -> Result<TempDir> {
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

fn human(report: &Report) -> String {
    let Report { speed, .. } = report;
    let random = if report.random_weights { ", random weights" } else { "" };
    let mut out = format!(
        "{}{random}: {} weights as {}, {}\n",
        path(&report.model),
        count(report.parameters),
        report.format,
        report.machine
    );
    let line = |name: &str, tokens: usize, speed: f64, spread: f64| {
        format!("{name:<8} {tokens:>5} tokens  {:>8} tok/s  ±{:.0} %\n", rate(speed), 50.0 * spread)
    };
    out += &line("prefill", report.prompt_tokens, speed.prefill_tokens_per_second, speed.prefill_spread);
    out += &line("decode", report.generated_tokens, speed.decode_tokens_per_second, speed.decode_spread);
    let peak = report.peak_resident_bytes.map_or_else(|| "unknown".to_owned(), bytes);
    out += &format!(
        "weights {}, keys and values {} a token, peak resident memory {peak}\n",
        bytes(report.weight_bytes as u64),
        bytes(report.kv_bytes_per_token as u64)
    );
    out
}
