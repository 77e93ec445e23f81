//! `halfbyte bench model`: the first token, prefill and decoding, beside what the machine allows.

mod batch;
mod limits;
mod profile;
mod speed;

pub use speed::{Speed, Work, speed};

use crate::app::App;
use crate::args::{head_bits, whole};
use crate::escape::path;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::machine;
use crate::model::LoadArgs;
use crate::progress::Progress;
use crate::start::Start;
use crate::text::{bytes, count, rate, several};
use batch::Batch;
use halfbyte::cpu::Cpu;
use halfbyte::{Float, Format, Group, WeightFormat, Zero};
use halfbyte_llm::arch::Spec;
use halfbyte_llm::{Config, Device, Model, RandomWeights};
use limits::{Limits, Machine};
use profile::Profiles;
use serde::Serialize;
use speed::first_token;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Time a model: its first token, reading a prompt from an empty context, and writing token by token; each beside its limit, which
/// is measured in the same run.
///
/// Decoding is held against the bandwidth of memory: bytes of weights, keys and values that a token must read. Prefill is held
/// against the peak of the arithmetic: two operations for each weight of the blocks and token.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder or GGUF file.
    #[arg(required_unless_present = "random_weights", conflicts_with = "random_weights")]
    model: Option<PathBuf>,
    /// Time a model of this configuration with random weights, made where they will lie: no files, any size that fits;
    /// bench/cases has some configurations.
    #[arg(long, value_name = "CONFIG.json")]
    random_weights: Option<PathBuf>,
    /// Format of the blocks' layers of random weights, as w4a16-g128 [default: floats in f16].
    #[arg(long, value_name = "FORMAT", conflicts_with_all = ["model", "quantize"])]
    format: Option<Format>,
    /// Bits of the output head of random weights: 4 or 8, in groups of 128; 16: floats in f16, the embedding if that is the head.
    #[arg(long, value_name = "BITS", conflicts_with = "model", default_value = "16", value_parser = head_bits)]
    head: u32,
    /// Tokens of the prompt.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    prompt: usize,
    /// Tokens to write.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    generate: usize,
    /// Tokens that are there already when writing begins: random ones, read as a prompt is, which is not timed.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    depth: usize,
    /// Write this many texts at once too, each after --depth tokens (512 where that is 0) and --generate steps long; several numbers,
    /// separated by commas, one after the other.
    #[arg(long, value_name = "TEXTS", value_delimiter = ',', value_parser = whole::<u16>(1..))]
    batch: Vec<u16>,
    /// Repetitions of each, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole::<u16>(1..))]
    repetitions: u16,
    /// Time each step of a layer too, when a token is written, when the prompt is read, and when each of --batch texts is given a token: the
    /// kernel that computes it, its bytes, its time, and its share of the limit. On a GPU kernels run one by one then, between events.
    #[arg(long)]
    profile: bool,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Report {
    model: PathBuf,
    random_weights: bool,
    format: String,
    /// Of random weights.
    head_bits: Option<u32>,
    device: String,
    /// Of a GPU: the newest CUDA that it takes.
    #[serde(skip_serializing_if = "Option::is_none")]
    driver: Option<String>,
    /// For people.
    #[serde(skip)]
    machine: String,
    threads: usize,
    isa: &'static str,
    parameters: u64,
    weight_bytes: usize,
    kv_type: &'static str,
    kv_bytes_per_token: usize,
    peak_resident_bytes: Option<u64>,
    /// What weights, keys and values and all else take on a GPU.
    device_memory_bytes: Option<u64>,
    prompt_tokens: usize,
    depth_tokens: usize,
    generated_tokens: usize,
    /// From the start of the program to the token after the prompt.
    first_token_seconds: f64,
    /// Its parts, in seconds; None of random weights.
    start: Option<Start>,
    /// GPU kernels that were compiled for that, and not found on disk.
    kernels_compiled: usize,
    prefill_ms_per_token: f64,
    decode_ms_per_token: f64,
    #[serde(flatten)]
    speed: Speed,
    /// None: a GPU has no memory left to measure with.
    limits: Option<Limits>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    batches: Vec<Batch>,
    #[serde(skip_serializing_if = "Option::is_none")]
    profile: Option<Profiles>,
}

/// Prints the speeds.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let work = Work {
        prompt: args.prompt,
        depth: args.depth,
        generate: args.generate,
        repetitions: usize::from(args.repetitions),
        at_most: Duration::MAX,
    };
    if work.prompt == 0 || work.generate == 0 {
        return Err(Failure::usage(
            "there is nothing to time",
            format!("--prompt {} --generate {}", args.prompt, args.generate),
            "give at least one token for each",
        ));
    }
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    progress.step("loading the model");
    if app.gpu(args.load.tp.into())?.is_none() {
        args.load.one_rank("a measurement on a CPU, whose limits are of all its threads,", &[])?;
    }
    let free_before = free_bytes(args, app)?;
    let mut start = None;
    let (model, path) = match (&args.model, &args.random_weights) {
        (Some(folder), _) => {
            let (model, parts, laps) = args.load.start(app, folder)?;
            start = Some((parts, laps));
            (model, folder)
        }
        (None, Some(config)) => (random(args, app, config, work)?, config),
        (None, None) => {
            return Err(Failure::usage("there is no model", "neither MODEL nor --random-weights", "give one"));
        }
    };
    refuse_too_long(&model.config().spec, work)?;
    if interrupt::cancelled() {
        return Err(Failure::interrupted());
    }
    progress.step("the first token");
    let (first_token, free_after) = first_token(&model, &cpu, work, || Ok((app.age(), free_bytes(args, app)?)))?;
    let start = start.map(|(start, mut laps)| Start { first_token: laps.lap(), ..start });
    let format = match (&args.model, args.load.format(args.format)) {
        (Some(folder), _) => args.load.name(folder)?,
        (None, format) => format.map_or_else(|| "f16".to_owned(), |format| format.to_string()),
    };
    let (driver, kernels_compiled) = match model.device() {
        Device::Cpu => (None, 0),
        Device::Cuda(gpu) => (Some(gpu.gpu.context().driver().version().to_string()), gpu.gpu.compiler().compiled()),
    };
    let speed = speed(&model, &cpu, work, &progress)?;
    let steps = |&texts: &_| batch::steps(&model, &cpu, usize::from(texts), work, args.profile, &progress);
    let batches = args.batch.iter().map(steps).collect::<Result<Vec<_>>>()?;
    let timed = args.profile.then(|| profile::timed(&model, &cpu, work, &progress)).transpose()?;
    // Before memory is taken to measure the machine.
    let peak_resident_bytes = machine::peak_resident();
    progress.step("measuring the machine");
    let machine = Machine::measure(&model, &cpu, args.load.act_of(args.format))?;
    drop(progress);
    let profiles = |timed| Profiles::new(timed, &batches, &model, &cpu, &speed, machine.as_ref());
    let profile = timed.map(profiles).transpose()?;
    let (on_gpu, ranks) = (matches!(model.device(), Device::Cuda(_)), usize::from(args.load.tp));
    let taken = free_before.zip(free_after).map(|(before, after)| before.saturating_sub(after));
    let report = Report {
        model: path.clone(),
        random_weights: args.random_weights.is_some(),
        format,
        head_bits: args.random_weights.is_some().then_some(args.head),
        device: model.device().to_string(),
        driver,
        machine: machine_of(&model, &cpu),
        threads: cpu.threads().count(),
        isa: cpu.caps().isa.name(),
        parameters: model.parameters(),
        weight_bytes: model.weight_bytes(),
        kv_type: model.kv_type().name(),
        kv_bytes_per_token: model.kv_bytes_per_token(),
        peak_resident_bytes,
        device_memory_bytes: taken.filter(|_| on_gpu),
        prompt_tokens: args.prompt,
        depth_tokens: args.depth,
        generated_tokens: args.generate,
        first_token_seconds: first_token.as_secs_f64(),
        start,
        kernels_compiled,
        prefill_ms_per_token: 1e3 / speed.prefill_tokens_per_second,
        decode_ms_per_token: 1e3 / speed.decode_tokens_per_second,
        speed,
        batches: batches.into_iter().map(|steps| Batch::new(steps, &model, machine.as_ref(), ranks)).collect(),
        limits: machine.map(|machine| Limits::new(machine, &model, work, &speed, ranks)),
        profile,
    };
    app.result(&report, human)
}

/// Bytes that are free on the GPU that computes, if one does.
fn free_bytes(args: &Args, app: &App) -> Result<Option<u64>> {
    let Some(gpu) = app.gpu(args.load.tp.into())? else { return Ok(None) };
    Ok(Some(gpu.gpu.context().memory()?[0] as u64))
}

/// A model of random weights. Errors, before memory is taken: a configuration that cannot run, a
/// context that is too short, memory that is short.
fn random(args: &Args, app: &App, path: &Path, work: Work) -> Result<Model> {
    let config = Config::parse(&crate::text::read_text(path)?, path)?;
    refuse_too_long(&config.spec, work)?;
    let head = WeightFormat {
        bits: args.head,
        group: Group::Size(128),
        zero: Zero::Symmetric,
        scale: Float::F16,
        channel_scale: None,
    };
    let (options, format) = args.load.of_random(app, args.format)?;
    let weights = RandomWeights { format: format.map(|f| f.weight), head: (args.head < 16).then_some(head) };
    let available = match &options.device {
        Device::Cpu => machine::memory_available(),
        Device::Cuda(gpu) => Some(gpu.gpu.context().memory()?[0] as u64),
    };
    let cache = (config.spec.kv_bytes_per_token(options.kv_type()) as u64).saturating_mul(work.context() as u64);
    let needed = weights.bytes(&config.spec).saturating_add(cache) / u64::from(args.load.tp);
    if let Some(available) = available.filter(|&available| needed > available) {
        return Err(Failure::memory(
            format!("a model of {} does not fit", path.display()),
            format!(
                "at least {} are needed, {} of them for keys and values; {} are available on {}",
                bytes(needed),
                bytes(cache),
                bytes(available),
                options.device
            ),
        ));
    }
    let model = Model::random(config, weights, &options)?;
    crate::model::prepare(app, &model)?;
    Ok(model)
}

/// Error: more tokens than the model was made for.
fn refuse_too_long(spec: &Spec, work: Work) -> Result<()> {
    let limit = spec.max_context;
    if work.context() <= limit {
        return Ok(());
    }
    let Work { prompt, depth, generate, .. } = work;
    Err(Failure::usage(
        format!("the model's context holds {limit} tokens"),
        format!("--prompt {prompt} takes {prompt}, --depth {depth} with --generate {generate} takes their sum"),
        "choose fewer tokens",
    ))
}

/// What a model computes with, for people.
pub fn machine_of(model: &Model, cpu: &Cpu) -> String {
    match model.device() {
        Device::Cpu => format!("{}, {}", several(cpu.threads().count(), "thread"), cpu.caps().isa.name()),
        gpu @ Device::Cuda(_) => gpu.to_string(),
    }
}

fn per_second(tokens: f64) -> String {
    format!("{} tok/s", rate(tokens))
}

fn human(report: &Report) -> String {
    let Report { speed, limits, .. } = report;
    let random = match report.head_bits {
        Some(16) => ", random weights".to_owned(),
        Some(bits) => format!(", random weights, head in {bits} bits"),
        None => String::new(),
    };
    let mut out = format!(
        "{}{random}: {} weights as {}, {}\n",
        path(&report.model),
        count(report.parameters),
        report.format,
        report.machine
    );
    let kernels = match (report.device_memory_bytes, report.kernels_compiled) {
        (None, _) => String::new(),
        (Some(_), 0) => "; kernels were on disk".to_owned(),
        (Some(_), 1) => "; a kernel was compiled".to_owned(),
        (Some(_), compiled) => format!("; {compiled} kernels were compiled"),
    };
    let prompt = report.prompt_tokens;
    out += &format!(
        "first    {prompt:>5} tokens  {:.3} s from the program's start to the token after them{kernels}\n",
        report.first_token_seconds
    );
    if let Some(start) = &report.start {
        out += &format!("  {}\n", start.line());
    }
    let line = |name: &str, tokens: usize, speed: f64, spread: f64, after: String, limit: Option<String>| {
        let (speed, ms, spread) = (rate(speed), 1e3 / speed, 50.0 * spread);
        let limit = limit.map_or_else(String::new, |limit| format!("  {limit}\n"));
        format!("{name:<8} {tokens:>5} tokens  {speed:>8} tok/s  ±{spread:.0} %  {ms:.3} ms a token{after}\n{limit}")
    };
    let prefill = (speed.prefill_tokens_per_second, speed.prefill_spread);
    let limit = limits.as_ref().and_then(Limits::of_prefill);
    out += &line("prefill", prompt, prefill.0, prefill.1, String::new(), limit);
    let decode = (speed.decode_tokens_per_second, speed.decode_spread);
    let after = match report.depth_tokens {
        0 => String::new(),
        depth => format!(", after {} that were read as a prompt is", several(depth, "token")),
    };
    out +=
        &line("decode", report.generated_tokens, decode.0, decode.1, after, limits.as_ref().map(Limits::of_decoding));
    report.batches.iter().for_each(|batch| out += &batch.human());
    let peak = report.peak_resident_bytes.map_or_else(|| "unknown".to_owned(), bytes);
    let device = report.device_memory_bytes.map(|taken| format!(", {} of device memory", bytes(taken)));
    out += &format!(
        "weights {}, keys and values {} a token in {}{}, peak resident memory {peak}\n",
        bytes(report.weight_bytes as u64),
        bytes(report.kv_bytes_per_token as u64),
        report.kv_type,
        device.unwrap_or_default()
    );
    out + &report.profile.as_ref().map_or_else(String::new, Profiles::human)
}
