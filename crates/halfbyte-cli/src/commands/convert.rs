//! `halfbyte convert`: the same numbers in another form of files.

use crate::app::App;
use crate::args::{FormArg, arch, bits, group, whole};
use crate::escape::{escaped, path};
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::open_complete;
use crate::progress::{Progress, Unit};
use crate::text::{bytes, several};
use clap::ValueEnum;
use halfbyte::{Float, Group};
use halfbyte_checkpoint::folder::RankFolders;
use halfbyte_checkpoint::{Conversion, Error as CheckpointError, Hint, Job, Weights, convert, write_part};
use halfbyte_llm::{Config, shard};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Write a quantised model in another form of files: the same numbers, bit by bit, or a refusal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Quantised model.
    model: PathBuf,
    /// Folder to write; with --to gguf a file, if its name ends so.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// The form of the files [with --tp: native].
    #[arg(long, value_enum, required_unless_present = "tp")]
    to: Option<FormArg>,
    /// Write a folder for each of so many ranks, `rank-0` and so on, with the part of every layer that it holds when --tp ranks run the
    /// model: the same numbers, in our own form (native).
    #[arg(long, value_name = "RANKS", value_parser = whole::<u16>(2..=64),
          conflicts_with_all = ["bits", "two_level", "requantize"])]
    tp: Option<u16>,
    /// Bits a code [default: as they are, or the nearest that the form has].
    #[arg(long, value_name = "BITS", value_parser = bits)]
    bits: Option<u32>,
    /// Weights along k that share a scale, -1 for all of an output channel [default: as they are, or the nearest that the
    /// form has]. GPTQ files without a config, whose shapes leave it open, are read so too.
    #[arg(long, value_name = "N", value_parser = group)]
    group: Option<Group>,
    /// Architecture of GPUs in whose layout the codes of MODEL lie: for fpA_intB weights without a config that says it.
    #[arg(long, value_name = "SM", value_parser = arch)]
    arch: Option<u32>,
    /// Scales of groups as factors of 8 bits of one f16 scale an output channel, where they are such: 4 bits, and --to native.
    #[arg(long)]
    two_level: bool,
    /// Round to nearest again what the form cannot hold as it is.
    #[arg(long)]
    requantize: bool,
    /// Replace a model that is there already.
    #[arg(long)]
    overwrite: bool,
}

#[derive(Serialize)]
struct Converted {
    model: PathBuf,
    output: PathBuf,
    /// As it was asked for.
    to: String,
    bytes_before: u64,
    bytes_after: u64,
    /// Quantised modules.
    modules: usize,
    /// Modules that were rounded again, those that became dense among them.
    requantized: Vec<Requantized>,
    /// Modules that were quantised and are dense here, since the form has no such embeddings or heads.
    made_dense: Vec<String>,
    /// Tensors that the target does without: what says how activations are rounded, and what follows from the config.
    left_out: Vec<String>,
    seconds: f64,
}

#[derive(Serialize)]
struct Requantized {
    module: String,
    reason: String,
}

/// Writes the model.
pub fn run(args: &Args, app: &App) -> Result<()> {
    match (args.tp, args.to) {
        (None, Some(form)) => to_form(args, form, app),
        (Some(ranks), None | Some(FormArg::Native)) => for_ranks(args, ranks.into(), app),
        (_, form) => Err(Failure::usage(
            "parts of ranks are written in our own form",
            format!("--to {} with --tp", form.map_or("nothing", FormArg::name)),
            "leave --to out",
        )),
    }
}

fn to_form(args: &Args, form: FormArg, app: &App) -> Result<()> {
    let begun = Instant::now();
    let source = open_complete(&args.model, Hint { group: args.group, arch: args.arch }, app)?;
    let conversion = Conversion {
        target: form.into(),
        bits: args.bits,
        group: args.group,
        channel_scale: args.two_level.then_some(Float::F16),
        requantize: args.requantize,
    };
    let mut written = |job: Job<'_>| convert(job, conversion);
    let converted = with_progress(args, &args.output, &source, "converting", app, &mut written)?;
    app.findings(&converted.written.findings);
    let result = Converted {
        model: args.model.clone(),
        left_out: converted.written.left_out,
        output: converted.written.path,
        to: form.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned()),
        bytes_before: bytes_of(&source),
        bytes_after: converted.written.tensor_bytes,
        modules: converted.written.quantized,
        requantized: converted.requantized.into_iter().map(|(module, reason)| Requantized { module, reason }).collect(),
        made_dense: converted.made_dense,
        seconds: begun.elapsed().as_secs_f64(),
    };
    app.result(&result, human)
}

fn bytes_of(source: &Weights) -> u64 {
    source.checkpoint().tensors().map(|t| t.bytes as u64).sum()
}

/// Does a job that tells how far it is, and may be cancelled.
fn with_progress<T>(
    args: &Args,
    target: &Path,
    source: &Weights,
    what: &'static str,
    app: &App,
    work: &mut dyn FnMut(Job<'_>) -> halfbyte_checkpoint::Result<T>,
) -> Result<T> {
    let progress = Progress::new(app, what, Unit::Bytes);
    let mut report = |at: halfbyte_checkpoint::Progress<'_>| progress.at(at.bytes, at.total_bytes);
    let _cooperate = interrupt::cooperate();
    let job = Job {
        overwrite: args.overwrite,
        progress: Some(&mut report),
        cancel: Some(&interrupt::cancelled),
        ..Job::new(source, target)
    };
    work(job).map_err(|error| match &error {
        CheckpointError::Invalid { op: "write AWQ", .. } => {
            Failure::from(error).with_help("add --group N --requantize: layers in other groups are then rounded again")
        }
        CheckpointError::Invalid { op: "convert", .. } => {
            Failure::from(error).with_help("`halfbyte quantize` makes a quantised model of a dense one")
        }
        _ => error.into(),
    })
}

#[derive(Serialize)]
struct Parts {
    model: PathBuf,
    output: PathBuf,
    bytes_before: u64,
    /// Of each rank's folder.
    bytes_after: Vec<u64>,
    /// Quantised modules.
    modules: usize,
    seconds: f64,
}

fn for_ranks(args: &Args, ranks: usize, app: &App) -> Result<()> {
    let begun = Instant::now();
    let source = open_complete(&args.model, Hint { group: args.group, arch: args.arch }, app)?;
    let config = Config::from_weights(&source)?;
    let parts = shard::parts(&config.spec, &source, ranks)?;
    let cooperate = interrupt::cooperate();
    let folders = RankFolders::create(&source, &args.output, ranks, args.overwrite)?;
    let mut written = Vec::new();
    for (rank, (part, cuts)) in parts.iter().enumerate() {
        let mut work = |job: Job<'_>| write_part(job, part, &|module| cuts.get(module).cloned());
        written.push(with_progress(args, &folders.place(rank), &source, "writing a part", app, &mut work)?);
    }
    folders.commit()?;
    drop(cooperate);
    if let Some(first) = written.first() {
        app.findings(&first.findings);
    }
    let result = Parts {
        model: args.model.clone(),
        output: args.output.clone(),
        bytes_before: bytes_of(&source),
        bytes_after: written.iter().map(|part| part.tensor_bytes).collect(),
        modules: written.first().map_or(0, |part| part.quantized),
        seconds: begun.elapsed().as_secs_f64(),
    };
    app.result(&result, |r: &Parts| {
        let each: Vec<String> = r.bytes_after.iter().map(|&of| bytes(of)).collect();
        format!(
            "{}: parts of {} ranks without loss, {}; tensors {} before, {} after, {:.1} s\n",
            path(&r.output),
            each.len(),
            several(r.modules, "quantised layer"),
            bytes(r.bytes_before),
            each.join(" + "),
            r.seconds
        )
    })
}

fn human(r: &Converted) -> String {
    let exact = r.modules - r.requantized.iter().filter(|again| !r.made_dense.contains(&again.module)).count();
    let mut out = format!(
        "{}: {} of {} to {} without loss; tensors {} before, {} after, {:.1} s\n",
        path(&r.output),
        exact,
        several(r.modules, "layer"),
        r.to,
        bytes(r.bytes_before),
        bytes(r.bytes_after),
        r.seconds
    );
    if !r.made_dense.is_empty() {
        out += &format!("dense now, since the form has no such codes: {}\n", escaped(&r.made_dense.join(", ")));
    }
    if let Some(first) = r.left_out.first() {
        let others = match r.left_out.len() - 1 {
            0 => String::new(),
            others => format!(" and {others} more"),
        };
        out += &format!("left out, as no weight is read from them: `{}`{others}\n", escaped(first));
    }
    if let Some(first) = r.requantized.first() {
        out += &format!(
            "rounded again: {}; the first: `{}`: {}\n",
            several(r.requantized.len(), "layer"),
            escaped(&first.module),
            escaped(&first.reason)
        );
    }
    out
}
