//! A MODEL argument and what becomes of it while it is loaded.

pub mod arch;

use crate::app::App;
use crate::args::{ActArg, HintArgs, KvArg, RtnArgs, SymmetricRange, whole};
use crate::failure::{Exit, Failure, Result};
use crate::progress::{Progress, Unit};
use crate::start::{Laps, Start};
use crate::text::several;
use halfbyte::cpu::isa::Caps;
use halfbyte::kernel::KvType;
use halfbyte::{Act, Float, Format};
use halfbyte_checkpoint::{Finding, Hint, Part, StoredFormat, Weights, linears};
use halfbyte_llm::check::contradictions;
use halfbyte_llm::comm::{Alone, Rendezvous};
use halfbyte_llm::device::{Device, Gpu};
use halfbyte_llm::shard::check_ranks;
use halfbyte_llm::{Config, LoadOptions, Model, Tokenizer};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, ScopedJoinHandle};

/// How a model is loaded: the options of run, eval and bench model.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// Quantise the blocks' dense layers in memory while loading, as w4a8-g128 (nothing is written).
    #[arg(long, value_name = "FORMAT")]
    pub quantize: Option<Format>,
    /// What becomes of activations: a16 and a32 take them exactly, on a GPU as f16 and f32; a8 rounds those of quantised
    /// layers to 8 bits, which is faster on a CPU and costs 0.05 % of perplexity on the model that ships; a GPU that --device
    /// names does so for codes of 4 and 8 bits [default: what --quantize says, else a16].
    #[arg(long, value_enum)]
    pub act: Option<ActArg>,
    /// Keep keys and values as this type; int8: codes of 8 bits with a scale for each position and head [default: f32 on the CPU; on a
    /// GPU the type of activations].
    #[arg(long, value_enum, value_name = "TYPE")]
    pub kv: Option<KvArg>,
    /// Share the model among so many ranks (tensor parallelism): processes that each hold a part of every layer, on CPUs, or on GPUs of
    /// one host that reach each other's memory. Weights and memory that are told are the first rank's.
    /// A launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (as torchrun, or mpirun and Slurm with a line of shell) starts
    /// them all, each with the GPU of its LOCAL_RANK; without it the others are started here. All get the same command. Under torchrun,
    /// which listens at MASTER_PORT itself, ranks meet at the next port.
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = whole::<u16>(1..=64))]
    pub tp: u16,
    #[command(flatten)]
    pub rtn: RtnArgs,
    #[command(flatten)]
    pub hint: HintArgs,
}

impl LoadArgs {
    /// A model as its folder holds it, activations taken exactly.
    pub const AS_STORED: Self = Self {
        quantize: None,
        act: None,
        kv: None,
        tp: 1,
        rtn: RtnArgs { search: false, symmetric_range: SymmetricRange::Narrow },
        hint: HintArgs::NONE,
    };

    /// The library's options for one process. Errors: `--act` against what the format says, options that change nothing.
    fn options(&self, app: &App) -> Result<LoadOptions> {
        // Packing meets it too, and blames the weights.
        Caps::detect_within_environment()?;
        let act = self.act.map(Act::from);
        if let (Some(format), Some(named)) = (self.quantize, self.act)
            && format.act != Act::from(named)
        {
            return Err(Failure::usage(
                "--act and the format contradict each other",
                format!("the format is {format}, --act says {}", named.name()),
                "leave --act out, or change the format",
            ));
        }
        let idle = [
            ("--search", self.rtn.search, "only quantising searches for scales"),
            ("--symmetric-range", self.rtn.symmetric_range == SymmetricRange::Full, "only quantising makes scales"),
        ];
        if let Some((option, _, why)) = idle.iter().find(|(_, given, _)| *given && self.quantize.is_none()) {
            let what = format!("{option} changes nothing without --quantize");
            return Err(Failure::usage(what, why, "add --quantize, as in --quantize w4a8-g128"));
        }
        let act = self.quantize.map(|format| format.act).or(act).unwrap_or(Act::A16);
        let device = device(app, act, self.tp.into())?;
        Ok(LoadOptions {
            device,
            act,
            quantize: self.quantize.map(|format| (format.weight, self.rtn.into())),
            kv: self.kv.map(KvType::from),
            comm: Arc::new(Alone),
        })
    }

    /// These options for a model that the ranks share, if there are others. Error: one that does not come, or was given something else.
    fn shared(&self, app: &App, options: LoadOptions) -> Result<LoadOptions> {
        let comm = if self.tp == 1 { options.comm } else { app.ranks().join(self.tp.into())? };
        Ok(LoadOptions { comm, ..options })
    }

    /// Refuses ranks, and folders of their parts, for what one process does by itself.
    pub fn one_rank(&self, what: &str, models: &[&Path]) -> Result<()> {
        let refuse = |why, help| Err(Failure::usage(format!("{what} is not shared among ranks"), why, help));
        if self.tp > 1 {
            return refuse(format!("--tp {}", self.tp), "leave --tp out");
        }
        match models.iter().find(|folder| is_parts(folder)) {
            None => Ok(()),
            Some(folder) => refuse(
                format!("{} holds the parts of ranks", folder.display()),
                "give the model that they were written from",
            ),
        }
    }

    /// Loads a model folder; what is odd about it is noted.
    pub fn load(&self, app: &App, folder: &Path) -> Result<Model> {
        Ok(self.start(app, folder)?.0)
    }

    /// The same, with where the time went, up to the last kernel.
    pub fn start(&self, app: &App, folder: &Path) -> Result<(Model, Start, Laps)> {
        let (model, _, start, laps) = self.with(app, folder, |_| Ok(()))?;
        Ok((model, start, laps))
    }

    /// The same with the tokenizer, which is read while weights are.
    pub fn start_with_tokenizer(&self, app: &App, folder: &Path) -> Result<(Model, Tokenizer, Start, Laps)> {
        let loaded = self.with(app, folder, |weights| Ok(Tokenizer::from_weights(weights)?))?;
        if self.tp > 1 {
            let (config, tokenizer) = (loaded.0.config(), &loaded.1);
            let tokens: Vec<_> = (0..tokenizer.vocab_size() as u32).map(|id| tokenizer.token(id)).collect();
            let own = format!("{} tokens", tokens.len());
            app.ranks().same("tokenizer", &own, &(tokens, config.bos, &config.eos))?;
        }
        Ok(loaded)
    }

    /// Loads a model, and `more` beside.
    fn with<T: Send>(
        &self,
        app: &App,
        folder: &Path,
        more: impl Fn(&Weights) -> Result<T> + Sync,
    ) -> Result<(Model, T, Start, Laps)> {
        self.refuse_other_parts(folder)?;
        let (mut start, mut laps) = (Start::default(), Laps::since_start(app));
        // A GPU takes some tenths of a second to open, and a tokenizer to read.
        let options = || self.options(app);
        std::thread::scope(|scope| {
            let opening = Builder::new().spawn_scoped(scope, options);
            let opened = open_whole(folder, self.hint).and_then(|weights| {
                let config = Config::from_weights(&weights)?;
                self.refuse_lone_part(folder, &weights)?;
                let quantized = linears(&weights)?.iter().any(|linear| linear.source.is_some());
                Ok((weights, config, quantized))
            });
            start.files = laps.lap();
            let (weights, config, quantized) = match opened {
                Ok(opened) => opened,
                // What is wrong with the options comes first.
                Err(failure) => {
                    let failure = joined(opening, &options).err().unwrap_or(failure);
                    app.ranks().leave(self.tp.into(), &format!("cannot begin: {}", failure.text()));
                    return Err(failure);
                }
            };
            let more = || more(&weights);
            std::thread::scope(|scope| {
                let reading = Builder::new().spawn_scoped(scope, more);
                let options = joined(opening, &options)?;
                if self.tp > 1 {
                    check_ranks(&config.spec, &weights, &options, self.tp.into()).map_err(|why| {
                        let what = format!("{} cannot be shared among {} ranks", folder.display(), self.tp);
                        Failure::usage(what, why.to_string(), "give a smaller --tp")
                    })?;
                }
                let options = self.shared(app, options)?;
                start.device = laps.lap();
                self.refuse_useless(folder, quantized)?;
                let model = Model::from_weights(config, &weights, &options)?;
                start.weights = laps.lap();
                start.sent(model.load_times());
                for finding in model.findings() {
                    app.note(&format!("note: {finding}"));
                }
                prepare(app, &model)?;
                start.kernels = laps.lap();
                let beside = joined(reading, &more)?;
                start.tokenizer = laps.lap();
                Ok((model, beside, start, laps))
            })
        })
    }

    /// Error: a folder with the parts of another number of ranks.
    fn refuse_other_parts(&self, folder: &Path) -> Result<()> {
        let parts = (0..).take_while(|&rank| folder.join(Part::folder(rank)).is_dir()).count();
        if !is_parts(folder) || parts == usize::from(self.tp) {
            return Ok(());
        }
        Err(Failure::usage(
            format!("{} holds the parts of {}", folder.display(), several(parts, "rank")),
            format!("--tp says {}", self.tp),
            format!("add --tp {parts}"),
        ))
    }

    /// Error: the part of a rank by itself.
    fn refuse_lone_part(&self, folder: &Path, weights: &Weights) -> Result<()> {
        match weights.part()?.filter(|part| !is_parts(folder) && part.size != usize::from(self.tp)) {
            None => Ok(()),
            Some(Part { rank, size, .. }) => Err(Failure::usage(
                format!("{} is the part of rank {rank} of {size}", folder.display()),
                "a rank has not all of the model",
                format!("give the folder that holds the parts of all ranks, and --tp {size}"),
            )),
        }
    }

    /// Error: options that change nothing for a model, or cannot be followed.
    fn refuse_useless(&self, folder: &Path, quantized: bool) -> Result<()> {
        if quantized && self.quantize.is_some() {
            return Err(Failure::usage(
                format!("{} is quantised already", folder.display()),
                "--quantize takes dense models",
                "leave --quantize out; `halfbyte dequantize` makes a dense model of it",
            ));
        }
        if !quantized && self.quantize.is_none() && self.act.is_some_and(|act| Act::from(act).is_quantized()) {
            return Err(Failure::usage(
                "--act changes nothing here",
                format!("no layer of {} is quantised, and dense layers take activations as they are", folder.display()),
                "add --quantize, as in --quantize w4a8-g128",
            ));
        }
        Ok(())
    }

    /// The library's options for random weights, and the format of their blocks: `--format`, or `--quantize` to the same effect.
    /// Errors: those of [`LoadArgs::options`], options that change nothing.
    pub fn of_random(&self, app: &App, format: Option<Format>) -> Result<(LoadOptions, Option<Format>)> {
        let HintArgs { group, arch } = self.hint;
        let useless = [("--search", self.rtn.search), ("--group", group.is_some()), ("--arch", arch.is_some())];
        if let Some((option, _)) = useless.iter().find(|(_, given)| *given) {
            return Err(Failure::usage(
                format!("{option} changes nothing here"),
                "random weights are made in their format, and nothing is quantised",
                format!("leave {option} out"),
            ));
        }
        let args = Self { quantize: format.or(self.quantize), ..self.clone() };
        if args.quantize.is_none() && args.act.is_some_and(|act| Act::from(act).is_quantized()) {
            return Err(Failure::usage(
                "--act changes nothing here",
                "random weights without a format are dense, and dense layers take activations as they are",
                "add --format, as in --format w4a8-g128",
            ));
        }
        Ok((LoadOptions { quantize: None, ..self.shared(app, args.options(app)?)? }, args.quantize))
    }

    /// The format of random weights, if there is one.
    pub fn format(&self, format: Option<Format>) -> Option<Format> {
        format.or(self.quantize)
    }

    /// What becomes of activations, with the format of random weights if there is one.
    pub fn act_of(&self, format: Option<Format>) -> Act {
        format.or(self.quantize).map(|format| format.act).or(self.act.map(Act::from)).unwrap_or(Act::A16)
    }

    /// Format of the model's layers for people and JSON: what was asked for, or what the checkpoint says.
    pub fn name(&self, folder: &Path) -> Result<String> {
        match self.quantize {
            Some(format) => Ok(format.to_string()),
            None => {
                let act = self.act.map_or(Act::A16, Act::from);
                name_of(&open_whole(folder, self.hint)?, act)
            }
        }
    }
}

/// What a thread came to, or, where the system gave none, what its work comes to here; its panic is this one's.
fn joined<T>(thread: io::Result<ScopedJoinHandle<'_, T>>, work: &impl Fn() -> T) -> T {
    match thread {
        Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
        Err(_) => work(),
    }
}

/// Where a model computes that takes its activations so; noted where that is not the device that would be chosen.
pub fn device(app: &App, act: Act, ranks: usize) -> Result<Device> {
    let Some(gpu) = app.gpu(ranks)? else { return Ok(Device::Cpu) };
    if act.is_quantized() && app.chooses_device() {
        app.note("note: the CPU computes: activations of 8 bits go to a GPU where --device names it");
        return Ok(Device::Cpu);
    }
    let activations = if act == Act::A32 { Float::F32 } else { gpu.activations };
    Ok(Device::Cuda(Gpu { activations, ..gpu }))
}

/// Makes a model ready to compute, with a bar while kernels are compiled.
pub fn prepare(app: &App, model: &Model) -> Result<()> {
    let progress = Progress::new(app, "compiling GPU kernels, once a machine", Unit::Things("kernels"));
    Ok(model.prepare(&|done, total| progress.at(done as u64, total as u64))?)
}

/// The commonest format of the blocks' layers.
fn name_of(weights: &Weights, act: Act) -> Result<String> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for linear in linears(weights)?.iter().filter(|linear| linear.in_block()) {
        let name = match linear.source {
            Some(StoredFormat::Codes(weight)) => Format { weight, act }.to_string(),
            Some(floats) => floats.to_string(),
            None => {
                let info = weights.checkpoint().info(&format!("{}.weight", linear.name))?;
                info.dtype.name().to_lowercase()
            }
        };
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    Ok(counts.into_iter().max_by_key(|(_, count)| *count).map_or_else(|| "no layers".to_owned(), |(name, _)| name))
}

/// Whether a path looks like the name of a repository: `meta-llama/Llama-3.1-8B`.
fn is_repository(path: &Path) -> bool {
    let Some((owner, name)) = path.to_str().and_then(|path| path.split_once('/')) else { return false };
    let word = |text: &str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain)
    };
    word(owner) && word(name) && !Path::new(owner).exists()
}

/// Opens a model: a folder, or one file.
pub fn open(path: &Path) -> Result<Weights> {
    open_with(path, Hint::default())
}

/// Opens a model with what is known of it besides. Error: an architecture of GPUs, where that changes nothing.
pub fn open_with(path: &Path, hint: Hint) -> Result<Weights> {
    let weights = open_any(path, hint)?;
    arch::refuse_idle(hint, &[&weights])?;
    Ok(weights)
}

/// The same, where it is one of several that the hint may be meant for.
pub fn open_any(path: &Path, hint: Hint) -> Result<Weights> {
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && is_repository(path) => Err(Failure::new(
            Exit::Input,
            format!("cannot open {}", path.display()),
            "there is no such folder, and models are not downloaded from here",
            format!(
                "if it is a repository of Hugging Face, download it first: hf download {} --local-dir FOLDER",
                path.display()
            ),
        )),
        Err(e) => Err(Failure::io("open", path, &e)),
        Ok(_) if is_parts(path) => Err(Failure::usage(
            format!("{} holds the parts of ranks", path.display()),
            "each of them has a part of every tensor",
            format!("give the model that they were written from, or {} for one of them", Part::folder(0)),
        )),
        Ok(_) => Ok(Weights::open_with(path, hint)?),
    }
}

/// Opens a model that something is written from, and notes how it is read where it leaves that open. Error: it is incomplete, as far as
/// its architecture is known.
pub fn open_complete(path: &Path, hint: Hint, app: &App) -> Result<Weights> {
    let weights = open_with(path, hint)?;
    app.findings(&weights.findings());
    app.findings(&weights.findings_of_modules());
    let config = match Config::from_weights(&weights) {
        Ok(config) => config,
        Err(why) => {
            app.findings(&weights.irregular_blocks());
            if matches!(&why, halfbyte_llm::Error::Config { field, .. } if field != "architectures") {
                app.note(&format!("note: whether all tensors are there was not checked: {why}"));
            }
            return Ok(weights);
        }
    };
    let found = contradictions(&config, &weights);
    let findings: Vec<String> = found.missing.iter().chain(&found.uncounted).map(Finding::to_string).collect();
    let Some(first) = findings.first() else { return Ok(weights) };
    let more = match findings.len() - 1 {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Err(Failure::new(
        Exit::Input,
        format!("{} is incomplete", path.display()),
        format!("{first}{more}"),
        "`halfbyte inspect MODEL` lists all that is missing; download it again, or put its config right",
    ))
}

/// Of a folder with the parts of ranks the one of this process.
fn own_part(path: &Path) -> Result<PathBuf> {
    if !is_parts(path) {
        return Ok(path.to_owned());
    }
    let rank = Rendezvous::from_env()?.map_or(0, |at| at.rank);
    let part = path.join(Part::folder(rank));
    match part.is_dir() {
        true => Ok(part),
        false => Err(Failure::new(
            Exit::Input,
            format!("{} has no part for rank {rank}", path.display()),
            format!("there is no folder {}", Part::folder(rank)),
            "start as many ranks as `halfbyte convert --tp` has written parts for",
        )),
    }
}

/// Whether a folder holds the parts of ranks, each in a folder.
pub fn is_parts(path: &Path) -> bool {
    !path.join("config.json").exists() && path.join(Part::folder(0)).join("config.json").is_file()
}

/// Opens a model that must have a config and a tokenizer too: a folder, or a GGUF file.
fn open_whole(path: &Path, hint: HintArgs) -> Result<Weights> {
    let path = &own_part(path)?;
    let weights = open_with(path, hint.into())?;
    let file = !path.is_dir();
    let folder = weights.folder();
    let has_config = folder.join("config.json").symlink_metadata().is_ok();
    if (file || !has_config) && weights.own_config()?.is_none() {
        let cause = match file {
            true => "it is a file of weights, and running a model takes its config.json and tokenizer too",
            false => "there is no config.json in it",
        };
        let help = match file && has_config {
            true => "give the folder that the file lies in",
            false => {
                "a MODEL is a folder with config.json, tokenizer.json and weights, or a GGUF file; `halfbyte inspect` shows what this holds"
            }
        };
        return Err(Failure::new(Exit::Input, format!("{} is not a model folder", path.display()), cause, help));
    }
    Ok(weights)
}

/// The model that ships with the program: `stdlib-11m` in `models` of the current folder, beside the program, in `share/halfbyte`
/// beside the folder of the program, or in the repository that it was built in.
pub fn shipped() -> Result<PathBuf> {
    let program = std::env::current_exe().ok().and_then(|program| program.canonicalize().ok());
    let beside = program.as_deref().and_then(Path::parent);
    let beside = beside.into_iter().flat_map(|folder| [folder.join("models"), folder.join("../share/halfbyte/models")]);
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let places: Vec<PathBuf> = [PathBuf::from("models")].into_iter().chain(beside).chain([built]).collect();
    places.iter().map(|place| place.join("stdlib-11m")).find(|folder| folder.join("config.json").is_file()).ok_or_else(
        || {
            Failure::new(
                Exit::Input,
                "the demo's model is not here",
                format!(
                    "looked for stdlib-11m in {}",
                    places.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
                ),
                "run it in the folder of the repository, or put the folder `models` beside the program",
            )
        },
    )
}

/// The tokenizer of a model.
pub fn tokenizer(path: &Path) -> Result<Tokenizer> {
    Ok(Tokenizer::from_weights(&open_whole(path, HintArgs::NONE)?)?)
}

/// What a model consists of, which no output may replace: every file of its folder, or the one file.
pub fn files_of(model: &Path) -> Vec<PathBuf> {
    match halfbyte_checkpoint::files::names(model) {
        Ok(names) => names.iter().map(|name| model.join(name)).collect(),
        // A single file; one that is missing is found later.
        Err(_) => vec![model.to_owned()],
    }
}
