//! `halfbyte eval ppl`: perplexity over a text.

use super::WindowArgs;
use crate::app::App;
use crate::failure::Result;
use crate::interrupt;
use crate::model::{LoadArgs, tokenizer};
use crate::progress::{Progress, Unit};
use crate::text::{bytes, rate, several};
use halfbyte_llm::eval;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Perplexity over the documents of a file.
///
/// Each document is encoded without special tokens, the model's bos id goes in front of each, the stream is cut into
/// windows, the remainder dropped; every window is scored on its own, targets are all its tokens but the first. With --second-half
/// they are as llama-perplexity takes them.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    #[command(flatten)]
    windows: WindowArgs,
    /// Put the model's bos id in the place of each window's first token, and score the second half only, as llama.cpp's
    /// llama-perplexity does of a file (which is one document here)
    #[arg(long)]
    second_half: bool,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Perplexity {
    perplexity: f64,
    windows: usize,
    window: usize,
    tokens: usize,
    targets: usize,
    seconds: f64,
    tokens_per_second: f64,
    format: String,
    device: String,
    kv_type: &'static str,
    weight_bytes: usize,
}

/// Prints the perplexity.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let cpu = app.cpu()?;
    let documents = args.windows.documents(app, args.load.tp.into())?;
    let model = args.load.load(app, &args.model)?;
    let (tokenizer, most) = (tokenizer(&args.model)?, args.windows.most_tokens());
    let tokens = eval::first_tokens(&tokenizer, &documents, model.config().bos, most)?;
    args.windows.same(app, &tokens)?;
    let progress = Progress::new(app, "scoring", Unit::Things("windows"));
    let cooperate = interrupt::cooperate();
    let bos = model.config().bos;
    let scored = if args.second_half { eval::Scored::SecondHalf { bos } } else { eval::Scored::AllButFirst };
    let found = eval::perplexity_of(&model, &cpu, &tokens, (args.windows.window, scored), &mut |at| {
        progress.at(at.done as u64, at.total as u64);
        if interrupt::cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    drop((cooperate, progress));
    let result = Perplexity {
        perplexity: found.perplexity,
        windows: found.windows,
        window: args.windows.window,
        tokens: found.tokens,
        targets: found.targets,
        seconds: found.seconds,
        tokens_per_second: found.tokens_per_second(),
        format: args.load.name(&args.model)?,
        device: model.device().to_string(),
        kv_type: model.kv_type().name(),
        weight_bytes: model.weight_bytes(),
    };
    app.result(&result, |r| {
        format!(
            "perplexity {:.4} ({}, {} of weights), {} of {} tokens, {:.1} s, {} tok/s\n",
            r.perplexity,
            r.format,
            bytes(r.weight_bytes as u64),
            several(r.windows, "window"),
            r.window,
            r.seconds,
            rate(r.tokens_per_second)
        )
    })
}
