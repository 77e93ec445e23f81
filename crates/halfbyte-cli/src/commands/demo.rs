//! `halfbyte demo`: the main job on the model that ships with the program, on one screen.

use super::bench::model::{Speed, Work, machine_of, speed};
use crate::app::App;
use crate::args::whole;
use crate::escape::escaped;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::{device, prepare, shipped, tokenizer};
use crate::progress::Progress;
use crate::text::{Align, bytes, count, cut, rate, several, table};
use halfbyte::cpu::Cpu;
use halfbyte::quantize::Rtn;
use halfbyte::{Act, Format};
use halfbyte_llm::{Device, LoadOptions, Model, Request, Sampling, Session, Tokenizer, eval};
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Quantise the small model that ships here; show size, perplexity, speed and a sample before and after.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Score the first windows of the validation set only [default: as many as there is time for, as a rule all].
    #[arg(long, value_name = "N", value_parser = whole::<u64>(1..))]
    max_windows: Option<u64>,
}

/// What the model becomes: on the CPU, where 8-bit activations are fastest, and on a GPU, where they stay f16.
const FORMAT: &str = "w4a8-g128";
const FORMAT_ON_GPUS: &str = "w4a16-g128";

/// What it is asked to continue.
const PROMPT: &str = "def read_lines(path):\n    \"\"\"";

/// New tokens of a sample.
const SAMPLE_TOKENS: usize = 56;

/// Time for the first perplexity; where it is not enough for the whole set, both models are scored on what was reached.
const SCORING_TIME: Duration = Duration::from_secs(25);

const WINDOW: usize = 512;

const SPEED: Work = Work { prompt: 512, depth: 0, generate: 128, repetitions: 5, at_most: Duration::from_secs(2) };

#[derive(Serialize)]
struct Demo {
    model: PathBuf,
    parameters: u64,
    device: String,
    /// For people.
    #[serde(skip)]
    machine: String,
    threads: usize,
    isa: &'static str,
    windows: usize,
    windows_in_all: usize,
    window: usize,
    prompt: &'static str,
    before: Side,
    after: Side,
    seconds: f64,
}

/// One column of the result.
#[derive(Serialize)]
struct Side {
    format: &'static str,
    /// Time to read the files, quantise and pack.
    load_seconds: f64,
    weight_bytes: usize,
    perplexity: f64,
    #[serde(flatten)]
    speed: Speed,
    sample: String,
}

/// Runs it.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let begun = Instant::now();
    let folder = shipped()?;
    let cpu = app.cpu()?;
    let progress = Progress::steps(app);
    let device = device(app, Act::A16, 1)?;
    let name = if matches!(device, Device::Cpu) { FORMAT } else { FORMAT_ON_GPUS };
    let format: Format = name.parse()?;
    progress.step("loading");
    let start = Instant::now();
    let dense = Model::load(&folder, &LoadOptions { device: device.clone(), ..LoadOptions::default() })?;
    let dense_seconds = start.elapsed().as_secs_f64();
    progress.step("quantising");
    let start = Instant::now();
    let options = LoadOptions {
        device,
        act: format.act,
        quantize: Some((format.weight, Rtn::default())),
        ..LoadOptions::default()
    };
    let quantized = Model::load(&folder, &options)?;
    let quantized_seconds = start.elapsed().as_secs_f64();
    for model in [&dense, &quantized] {
        prepare(app, model)?;
    }

    let tokenizer = tokenizer(&folder)?;
    let documents = eval::documents(&folder.join("validation.jsonl"))?;
    let tokens = eval::token_stream(&tokenizer, &documents, dense.config().bos)?;
    let windows_in_all = tokens.len() / WINDOW;
    let wanted = args.max_windows.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX).min(windows_in_all);
    let stage = Stage { cpu: &cpu, tokenizer: &tokenizer, progress: &progress };
    let before = stage.perplexity(&dense, &tokens[..wanted * WINDOW], Some(SCORING_TIME))?;
    let after = stage.perplexity(&quantized, &tokens[..before.windows * WINDOW], None)?;
    let before_side = stage.side(&dense, "f16", dense_seconds, before.perplexity)?;
    let after_side = stage.side(&quantized, name, quantized_seconds, after.perplexity)?;
    drop(progress);
    let demo = Demo {
        model: folder,
        parameters: dense.parameters(),
        device: dense.device().to_string(),
        machine: machine_of(&dense, &cpu),
        threads: cpu.threads().count(),
        isa: cpu.caps().isa.name(),
        windows: before.windows,
        windows_in_all,
        window: WINDOW,
        prompt: PROMPT,
        before: before_side,
        after: after_side,
        seconds: begun.elapsed().as_secs_f64(),
    };
    app.result(&demo, human)
}

/// What both columns are made with.
struct Stage<'a> {
    cpu: &'a Cpu,
    tokenizer: &'a Tokenizer,
    progress: &'a Progress,
}

/// Perplexity over the windows that there was time for.
struct Scored {
    perplexity: f64,
    windows: usize,
}

impl Stage<'_> {
    fn perplexity(&self, model: &Model, tokens: &[u32], time: Option<Duration>) -> Result<Scored> {
        let begun = Instant::now();
        let mut scored = Scored { perplexity: f64::NAN, windows: 0 };
        let outcome = eval::perplexity(model, self.cpu, tokens, WINDOW, &mut |at| {
            scored = Scored { perplexity: at.perplexity, windows: at.done };
            self.progress.step(format!("perplexity: window {} of {}", at.done, at.total));
            if time.is_some_and(|time| begun.elapsed() > time) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        match outcome {
            // Out of time after some windows, which is no failure here.
            Err(halfbyte_llm::Error::Cancelled) if scored.windows > 0 => Ok(scored),
            Err(other) => Err(other.into()),
            Ok(_) => Ok(scored),
        }
    }

    fn side(&self, model: &Model, format: &'static str, load_seconds: f64, perplexity: f64) -> Result<Side> {
        Ok(Side {
            format,
            load_seconds,
            weight_bytes: model.weight_bytes(),
            perplexity,
            speed: speed(model, self.cpu, SPEED, self.progress)?,
            sample: self.sample(model)?,
        })
    }

    fn sample(&self, model: &Model) -> Result<String> {
        let prompt = self.tokenizer.encode_prompt(PROMPT, model.config().bos)?;
        let mut session = Session::new(model, self.cpu, prompt.len() + SAMPLE_TOKENS)?;
        let request = Request {
            prompt: &prompt,
            max_tokens: SAMPLE_TOKENS,
            sampling: Sampling::default(),
            end_tokens: &model.config().eos,
            stop: &[],
            cancel: Some(interrupt::flag()),
        };
        let mut text = String::new();
        session.generate(self.tokenizer, &request, &mut |piece| {
            text.push_str(piece);
            ControlFlow::Continue(())
        })?;
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        Ok(text)
    }
}

fn human(demo: &Demo) -> String {
    let (before, after) = (&demo.before, &demo.after);
    let name = demo.model.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut out = format!("{}: {} weights; {}\n\n", escaped(&name), count(demo.parameters), demo.machine);
    let windows = match demo.windows == demo.windows_in_all {
        true => format!("all {} windows of {} tokens of its validation set", demo.windows, demo.window),
        false => {
            format!("the first {} of {} of its validation set", demo.windows, several(demo.windows_in_all, "window"))
        }
    };
    let row = |name: &str, value: &dyn Fn(&Side) -> String, remark: String| {
        vec![name.to_owned(), value(before), value(after), remark]
    };
    let rows = [
        row(
            "weights in memory",
            &|s| bytes(s.weight_bytes as u64),
            "embedding, head and norms are not quantised".into(),
        ),
        row("perplexity", &|s| format!("{:.4}", s.perplexity), windows),
        row("prefill, tok/s", &|s| rate(s.speed.prefill_tokens_per_second), format!("{} tokens at once", SPEED.prompt)),
        row(
            "decode, tok/s",
            &|s| rate(s.speed.decode_tokens_per_second),
            format!("{} tokens one by one", SPEED.generate),
        ),
        row("time to load", &|s| format!("{:.2} s", s.load_seconds), "with quantising: round to nearest".into()),
    ];
    let columns = [("", Align::Left), (before.format, Align::Right), (after.format, Align::Right), ("", Align::Left)];
    out += &table(&columns, &rows);
    let activations = if after.format == FORMAT { "to 8 bits on the fly" } else { "as f16" };
    out += &format!("\n{}: 4-bit codes, a scale for each 128; activations {activations}.\n", after.format);
    for side in [before, after] {
        out += &format!("\n{} continues, greedily:\n", side.format);
        let text = format!("{}{}", demo.prompt, side.sample);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        for line in lines.iter().take(SAMPLE_LINES) {
            out += &format!("  | {}\n", escaped(&cut(line, 94)));
        }
    }
    out += &format!("{:.0} s in all\n", demo.seconds);
    out
}

/// Lines shown of each sample, so that everything fits a screen of 24.
const SAMPLE_LINES: usize = 4;
