//! `halfbyte run`: continues a prompt, or talks.

mod chat;
mod many;
mod report;

use crate::app::App;
use crate::args::whole;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::LoadArgs;
use crate::start::{Laps, Start};
use crate::text::{read_text, write_output, write_prose};
use halfbyte_llm::{Generated, Model, Request, Sampling, Session, Tokenizer};
use report::{Continuation, Texts, Token};
use std::ops::ControlFlow;
use std::path::PathBuf;

/// Continue a prompt, or talk: new text goes to standard output as it comes, speeds to standard error.
///
/// With --json one object at the end: text, tokens, finish, counts, speeds; with --stream an object a line before it for each token:
/// token (null for text that was held back), text, and with --logprobs logprob and top.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("source").required(true).multiple(true).args(["prompt", "file", "chat", "prompts"]))]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// The prompt; with --chat what the user says, and one answer.
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file (- for standard input).
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Continue each line of a file (- for standard input), many at a time. Lines end with \n or \r\n and are else taken as they are,
    /// backslashes too; of what is written each text is a line, with line breaks as \n and \r and backslashes as two, or with --json an
    /// object a line with index, text, tokens, finish and prompt_tokens.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "file", "chat", "stop", "stream", "logprobs"])]
    prompts: Option<PathBuf>,
    /// With --prompts: texts at a time, at most [default: 16].
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt", "file", "chat"], value_parser = whole::<u32>(1..=4096))]
    parallel: Option<u32>,
    /// With --prompts: room for keys and values of this many tokens of all texts together [default: what they need].
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt", "file", "chat"], value_parser = whole::<u32>(1..))]
    positions: Option<u32>,
    /// With --prompts: each text has the very bits that it has alone, as `run` reads it; slower.
    #[arg(long, conflicts_with_all = ["prompt", "file", "chat"])]
    batch_invariant: bool,
    /// Talk, by the model's chat template: each line of standard input is what the user says, until its end.
    #[arg(long)]
    chat: bool,
    /// What the system says before a conversation.
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with = "prompts")]
    system: Option<String>,
    /// Begin with these messages: a JSON list of objects with role, content, tool_calls and what else the template knows, or an object
    /// that has it as messages, beside tools and documents. Where the last one is not the assistant's, it is answered, and that is all.
    #[arg(long, value_name = "FILE.json", requires = "chat", conflicts_with_all = ["system", "prompts"])]
    messages: Option<PathBuf>,
    /// Functions that the model may call: a JSON list of objects as {"type": "function", "function": {"name": ..., "parameters": ...}}.
    /// Calls are part of the answer's text.
    #[arg(long, value_name = "FILE.json", requires = "chat", conflicts_with = "prompts")]
    tools: Option<PathBuf>,
    /// Room for a conversation, in tokens [default: 8192, or the model's context if that is shorter, with longrope the original one].
    #[arg(long, value_name = "N", requires = "chat", conflicts_with = "prompts", value_parser = whole::<u32>(1..))]
    context: Option<u32>,
    /// Write at most this many new tokens [default: 128, in a conversation 1024].
    #[arg(short = 'n', long, value_name = "N", value_parser = whole::<usize>(0..))]
    max_tokens: Option<usize>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// End at this text, which is not shown (may be given several times).
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// With --json: an object for each token as it comes.
    #[arg(long, requires = "json")]
    stream: bool,
    /// With --json: how likely each token was, and this many of the most likely ones, before penalties, temperature and limits.
    #[arg(long, value_name = "N", requires = "json", value_parser = whole::<u32>(0..=1000))]
    logprobs: Option<u32>,
    #[command(flatten)]
    load: LoadArgs,
}

/// How tokens are chosen. What is left out follows in this order: repetition penalty, temperature, top-k, top-p, min-p.
#[derive(Clone, Copy, Debug, clap::Args)]
struct SamplingArgs {
    /// Divide logits by this before drawing; 0 takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,
    /// Draw from the fewest most likely tokens whose probabilities reach this sum.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,
    /// Draw from this many of the most likely tokens; 0 for all.
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = whole::<usize>(0..))]
    top_k: usize,
    /// Draw from tokens that are at least this part as likely as the most likely one; 0 for all.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Make tokens that the text holds less likely: positive logits are divided by this, negative ones multiplied; 0.01 to 10.
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = penalty)]
    repetition_penalty: f32,
    /// Same seed, same text.
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..))]
    seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        let SamplingArgs { temperature, top_p, top_k, min_p, repetition_penalty, seed } = args;
        Self { temperature, top_p, top_k, min_p, repetition_penalty, seed, ..Self::default() }
    }
}

/// Writes the continuation, or the answers.
pub fn run(args: &Args, app: &App) -> Result<()> {
    match (&args.prompts, args.chat) {
        (Some(file), _) => many::run(args, file, app),
        (None, true) => chat::run(args, app),
        (None, false) => continue_prompt(args, app),
    }
}

fn continue_prompt(args: &Args, app: &App) -> Result<()> {
    let Some(prompt) = prompt(args, app)? else {
        return Err(Failure::usage("there is no prompt", "neither -p nor -f is given", "add -p TEXT or -f FILE"));
    };
    let cpu = app.cpu()?;
    let (model, tokenizer, start, laps) = args.load.start_with_tokenizer(app, &args.model)?;
    let config = model.config();
    let ids = tokenizer.encode_prompt_within(&prompt, config.bos, config.spec.max_context)?;
    app.ranks().same("prompt", &format!("{} tokens", ids.len()), &ids)?;
    let max_tokens = args.max_tokens.unwrap_or(128);
    let context = ids.len().saturating_add(max_tokens).min(config.spec.max_context);
    let mut session = Session::new(&model, &cpu, context)?;
    let mut writer = Writer::new(args, app, (&model, &tokenizer), (start, laps), max_tokens);
    writer.write(&mut session, &ids, &config.eos).map(|_| ())
}

/// Writes texts and tells of them.
#[derive(Debug)]
struct Writer<'a> {
    args: &'a Args,
    app: &'a App,
    model: &'a Model,
    tokenizer: &'a Tokenizer,
    texts: Texts<'a>,
    start: Start,
    laps: Laps,
    max_tokens: usize,
}

impl<'a> Writer<'a> {
    fn new(
        args: &'a Args,
        app: &'a App,
        (model, tokenizer): (&'a Model, &'a Tokenizer),
        (start, laps): (Start, Laps),
        max_tokens: usize,
    ) -> Self {
        Self { args, app, model, tokenizer, texts: Texts::new(tokenizer), start, laps, max_tokens }
    }

    /// Continues `ids`, of which the session may hold the beginning; gives what it wrote.
    fn write(&mut self, session: &mut Session<'_>, ids: &[u32], end_tokens: &[u32]) -> Result<String> {
        let Self { args, app, model, tokenizer, texts, start, laps, max_tokens } = self;
        let kept = session.keep_beginning(ids)?;
        let request = Request {
            prompt: &ids[kept..],
            max_tokens: *max_tokens,
            sampling: args.sampling.into(),
            end_tokens,
            stop: &args.stop,
            cancel: Some(interrupt::flag()),
        };
        start.first_token = laps.lap();
        let mut text = String::new();
        let (mut tokens, mut closed) = (Vec::new(), None);
        let cooperate = interrupt::cooperate();
        let generated =
            session.generate_pieces(tokenizer, &request, args.logprobs.map(|top| top as usize), &mut |piece| {
                text.push_str(piece.text);
                let written = match (app.json(), args.stream) {
                    (false, _) => write_prose(piece.text),
                    (true, true) => app.result(&Token::of(piece, texts), |_| String::new()),
                    (true, false) => {
                        tokens.extend(piece.logprobs.map(|_| Token::of(piece, texts)));
                        Ok(())
                    }
                };
                match written {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(failure) => {
                        closed = Some(failure);
                        ControlFlow::Break(())
                    }
                }
            })?;
        drop(cooperate);
        start.first_token += generated.first.as_secs_f64();
        if let Some(failure) = closed {
            return Err(failure);
        }
        if app.json() && interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        let Generated { finish, .. } = generated;
        let told = Continuation {
            text,
            finish: report::name(finish),
            prompt_tokens: ids.len(),
            kept_tokens: kept,
            logprobs: args.logprobs.filter(|_| !args.stream).map(|_| tokens),
            format: args.load.name(&args.model)?,
            device: model.device().to_string(),
            prefill_tokens_per_second: report::speed(ids.len() - kept, generated.prefill),
            decode_tokens_per_second: (generated.decoded > 0)
                .then(|| report::speed(generated.decoded, generated.decode)),
            start: start.clone(),
            tokens: generated.tokens,
        };
        if app.json() {
            app.result(&told, |_| String::new())?;
            return Ok(told.text);
        }
        write_output("\n")?;
        app.note(&told.line(generated.decoded));
        if interrupt::cancelled() {
            return Err(Failure::interrupted());
        }
        if !args.chat {
            app.note(&start.line());
        }
        Ok(told.text)
    }
}

/// As a server bounds it: beyond, logits leave what their type holds.
fn penalty(text: &str) -> std::result::Result<f32, String> {
    match text.parse() {
        Ok(penalty) if (0.01..=10.0).contains(&penalty) => Ok(penalty),
        _ => Err("expected a number from 0.01 to 10".to_owned()),
    }
}

fn prompt(args: &Args, app: &App) -> Result<Option<String>> {
    match (&args.prompt, &args.file) {
        (Some(text), _) => Ok(Some(text.clone())),
        (None, Some(path)) => app.ranks().share(args.load.tp.into(), || read_text(path)).map(Some),
        (None, None) => Ok(None),
    }
}
