//! `halfbyte serve`: models behind OpenAI's interface.

mod config;
mod memory;

use crate::app::App;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::{LoadArgs, arch};
use crate::text::several;
use config::{Choices, ModelChoices};
use halfbyte::cpu::Cpu;
use halfbyte_checkpoint::Weights;
use halfbyte_llm::chat::ChatTemplate;
use halfbyte_llm::schedule::Options;
use halfbyte_llm::{Model, Tokenizer};
use halfbyte_serve::{Error as ServeError, Reserved, Served, Server};
use serde::Serialize;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Texts of a model that run at a time.
const PARALLEL: usize = 64;

/// Threads that read and write connections; few do for a great many.
const HTTP_THREADS: usize = 4;

/// Serve models over HTTP as OpenAI's interface, with a page to talk at /. It listens on this machine alone unless told otherwise.
///
/// Each option may also be given by the environment (HALFBYTE_PORT=8080) or by a TOML file (port = 8080), the command line first. SIGTERM
/// or Ctrl-C ends it: running requests have --drain-seconds to end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folders or GGUF files, each under its own name, or as NAME=MODEL under another.
    #[arg(value_name = "MODEL")]
    models: Vec<String>,
    /// Read options and models from a TOML file.
    #[arg(long, value_name = "FILE.toml", env = "HALFBYTE_CONFIG")]
    config: Option<PathBuf>,
    #[command(flatten)]
    choices: Choices,
    #[command(flatten)]
    load: LoadArgs,
}

/// What is told once it listens.
#[derive(Serialize)]
struct Listening {
    address: String,
    models: Vec<Listed>,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    weight_bytes: usize,
    positions: usize,
    kv_bytes: usize,
    chat: bool,
}

/// A model that is loaded and not served yet.
struct Loaded {
    name: String,
    choices: ModelChoices,
    model: Model,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

/// Serves until it is told to end.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let (choices, of_file) = args.choices.with_file(args.config.as_deref())?;
    let wanted = config::models(&args.models, of_file)?;
    let folders: Vec<&Path> = wanted.iter().map(|model| model.path.as_path()).collect();
    args.load.one_rank("a server", &folders)?;
    let settings = choices.settings()?;
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let open = settings.keys.is_empty() && !settings.address.ip().to_canonical().is_loopback();
    // Before models are loaded: nobody waits for a port that is taken, and nobody can connect to a server that is not ready.
    let reserved = Server::reserve(settings)?;
    if open {
        app.note("note: there are no API keys: whoever reaches this machine may use the server");
    }
    log(choices.log_json(), app.quiet());
    let mut loaded = Vec::new();
    let hints = arch::of_each(args.load.hint, &folders)?;
    for (choices, hint) in wanted.into_iter().zip(hints) {
        loaded.push(load(&LoadArgs { hint, ..args.load.clone() }, app, choices)?);
    }
    let positions = memory::positions(&loaded, &choices)?;
    let cpu = Arc::new(app.cpu()?);
    let (mut served, mut listed) = (Vec::new(), Vec::new());
    for (loaded, positions) in loaded.into_iter().zip(positions) {
        let (one, told) = serve(loaded, positions, &choices, &cpu)?;
        served.push(one);
        listed.push(told);
    }
    listen(reserved, scheme, served, listed, app)
}

fn listen(reserved: Reserved, scheme: &str, served: Vec<Served>, listed: Vec<Listed>, app: &App) -> Result<()> {
    let threads = HTTP_THREADS.min(app.threads().max(2));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
    let runtime = runtime.map_err(|e| Failure::device("cannot start threads for connections", e.to_string()))?;
    let cooperate = interrupt::cooperate();
    let ended = runtime.block_on(async {
        let server = reserved.listen(served)?;
        let listening = Listening { address: format!("{scheme}://{}", server.address()?), models: listed };
        app.result(&listening, |listening| {
            let names: Vec<&str> = listening.models.iter().map(|model| model.name.as_str()).collect();
            format!("{} listens at {}\n", names.join(", "), listening.address)
        })?;
        let stop = async {
            while !interrupt::cancelled() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        Ok::<_, Failure>(server.run(stop).await?)
    });
    drop(cooperate);
    // What still reads a body or computes a template is left behind.
    runtime.shutdown_timeout(Duration::from_secs(1));
    for (name, ended) in ended? {
        let counts = ended.counts;
        app.note(&format!(
            "{name}: {} written, {} of {} pages free",
            several(counts.chosen_tokens as usize, "token"),
            counts.free_pages,
            counts.pages
        ));
    }
    Ok(())
}

fn load(all: &LoadArgs, app: &App, choices: ModelChoices) -> Result<Loaded> {
    let load = choices.load(all)?;
    let (model, tokenizer, _, _) = load.start_with_tokenizer(app, &choices.path)?;
    let weights = Weights::open(&choices.path)?;
    let template = ChatTemplate::from_weights(&weights, model.config(), &tokenizer)?;
    let name = choices.name()?;
    if template.is_none() {
        app.note(&format!("note: {name} has no chat template: /v1/chat/completions is refused, /v1/completions works"));
    }
    Ok(Loaded { name, choices, model, tokenizer, template })
}

fn serve(loaded: Loaded, positions: usize, choices: &Choices, cpu: &Arc<Cpu>) -> Result<(Served, Listed)> {
    let Loaded { name, choices: of_model, model, tokenizer, template } = loaded;
    let usual = Options::on(model.device());
    let options = Options {
        positions,
        texts: of_model.parallel.or(choices.parallel).map_or(PARALLEL, |n| n as usize),
        chunk: choices.chunk.map_or(usual.chunk, |n| n as usize),
        batch_invariant: choices.batch_invariant(),
        ..usual
    };
    let listed = Listed {
        name: name.clone(),
        weight_bytes: model.weight_bytes(),
        positions,
        kv_bytes: positions * model.kv_bytes_per_token(),
        chat: template.is_some(),
    };
    let served = Served::start(&name, model, tokenizer, template, cpu.clone(), options)?;
    Ok((served, listed))
}

/// Lines of what happens, on standard error.
fn log(json: bool, quiet: bool) {
    let level = if quiet {
        tracing_subscriber::filter::LevelFilter::WARN
    } else {
        tracing_subscriber::filter::LevelFilter::INFO
    };
    let lines =
        tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).with_target(false).with_ansi(false);
    // A line that cannot be written is dropped; else it would be told by `eprintln!`, which panics for the same reason.
    let lines = lines.log_internal_errors(false);
    // There is one only if this ran before.
    let _ = match json {
        true => lines.json().flatten_event(true).try_init(),
        false => lines.try_init(),
    };
}

/// A path's own name: of a folder its last part, of a file without the extension.
fn name_of(path: &Path) -> Option<String> {
    let whole = path.canonicalize().ok()?;
    let name = if whole.is_dir() { whole.file_name() } else { whole.file_stem() };
    Some(name?.to_str()?.to_owned())
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        let text = error.to_string();
        match error {
            ServeError::Listen { address, source } => {
                let help = "choose another --port (0 takes a free one) or --host";
                Self::new(Exit::Device, format!("cannot listen on {address}"), source.to_string(), help)
            }
            ServeError::File { path, expected, got } => Self::new(
                Exit::Input,
                format!("{} cannot be used", path.display()),
                format!("expected {expected}, got {got}"),
                "check the file",
            ),
            ServeError::Settings { what, .. } => {
                Self::usage(format!("{what} cannot be used"), text, "see `halfbyte serve --help`")
            }
            ServeError::Start { what, source } => Self::device(format!("cannot start {what}"), source.to_string()),
            ServeError::Model { model, why } => Self::device(format!("the model {model} cannot be served"), why),
            _ => Self::device("the server has ended", text),
        }
    }
}
