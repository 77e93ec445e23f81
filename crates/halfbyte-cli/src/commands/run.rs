//! `halfbyte run`: continues a prompt.

use crate::app::App;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::LoadArgs;
use crate::start::Start;
use crate::text::{rate, read_text, write_output, write_prose};
use halfbyte_llm::{Finish, Request, Sampling, Session};
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Continue a prompt: new text goes to standard output as it comes, speeds to standard error.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).args(["prompt", "file"]))]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// The prompt.
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Read the prompt from a file (- for standard input).
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Write at most this many new tokens.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, allow_negative_numbers = true, value_parser = count)]
    max_tokens: usize,
    /// Divide logits by this before drawing; 0 takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Draw from this many of the most likely tokens; 0 for all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Same seed, same text.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End at this text, which is not shown (may be given several times).
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Continuation {
    text: String,
    tokens: Vec<u32>,
    finish: &'static str,
    prompt_tokens: usize,
    format: String,
    device: String,
    prefill_tokens_per_second: f64,
    /// None where no token was decoded after the prompt.
    decode_tokens_per_second: Option<f64>,
    /// Where the time went until the first token, in seconds.
    start: Start,
}

/// Writes the continuation.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let prompt = prompt(args)?;
    let cpu = app.cpu()?;
    let (model, tokenizer, mut start, mut laps) = args.load.start_with_tokenizer(app, &args.model)?;
    let config = model.config();
    let ids = tokenizer.encode_prompt_within(&prompt, config.bos, config.spec.max_context)?;
    let context = ids.len().saturating_add(args.max_tokens).min(config.spec.max_context);
    let mut session = Session::new(&model, &cpu, context)?;
    let request = Request {
        prompt: &ids,
        max_tokens: args.max_tokens,
        sampling: Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed },
        end_tokens: &config.eos,
        stop: &args.stop,
        cancel: Some(interrupt::flag()),
    };
    start.first_token = laps.lap();
    let mut text = String::new();
    let mut closed = None;
    let cooperate = interrupt::cooperate();
    let generated = session.generate(&tokenizer, &request, &mut |piece| {
        if app.json() {
            text.push_str(piece);
        } else if let Err(failure) = write_prose(piece) {
            closed = Some(failure);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    drop(cooperate);
    start.first_token += generated.first.as_secs_f64();
    if let Some(failure) = closed {
        return Err(failure);
    }
    let per_second = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
    let prefill = per_second(ids.len(), generated.prefill.as_secs_f64());
    let decode = (generated.decoded > 0).then(|| per_second(generated.decoded, generated.decode.as_secs_f64()));
    if app.json() {
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let continuation = Continuation {
            text,
            tokens: generated.tokens,
            finish: name(generated.finish),
            prompt_tokens: ids.len(),
            format: args.load.name(&args.model)?,
            device: model.device().to_string(),
            prefill_tokens_per_second: prefill,
            decode_tokens_per_second: decode,
            start,
        };
        return app.result(&continuation, |_| String::new());
    }
    write_output("\n")?;
    let decoded = decode
        .map_or_else(String::new, |speed| format!("; decode {} tokens, {} tok/s", generated.decoded, rate(speed)));
    app.note(&format!(
        "prefill {} tokens, {} tok/s{decoded}; ended: {}",
        ids.len(),
        rate(prefill),
        name(generated.finish)
    ));
    app.note(&start.line());
    if interrupt::cancelled() {
        return Err(Failure::interrupted());
    }
    Ok(())
}

fn count(text: &str) -> std::result::Result<usize, String> {
    text.parse().map_err(|_| "expected a whole number, 0 or more".to_owned())
}

fn prompt(args: &Args) -> Result<String> {
    match (&args.prompt, &args.file) {
        (Some(text), _) => Ok(text.clone()),
        (None, Some(path)) => read_text(path),
        (None, None) => {
            Err(Failure::usage("there is no prompt", "neither -p nor -f is given", "add -p TEXT or -f FILE"))
        }
    }
}

fn name(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::End => "end of text",
        Finish::Stop => "stop text",
        Finish::Context => "context full",
        Finish::Cancelled => "cancelled",
    }
}
