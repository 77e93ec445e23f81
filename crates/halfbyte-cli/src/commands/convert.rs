//! `halfbyte convert`: the same numbers in another form of files.

use crate::app::App;
use crate::args::{FormArg, bits, group};
use crate::escape::{escaped, path};
use crate::failure::Result;
use crate::interrupt;
use crate::model::open_complete;
use crate::progress::{Progress, Unit};
use crate::text::bytes;
use halfbyte::{Float, Group};
use halfbyte_checkpoint::{Conversion, Hint, Job, convert};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Write a quantised model in another form of files: the same numbers, bit by bit, or a refusal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Quantised model.
    model: PathBuf,
    /// Folder to write.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// The form of the files.
    #[arg(long, value_enum)]
    to: FormArg,
    /// Bits a code [default: as they are, or the nearest that the form has].
    #[arg(long, value_name = "BITS", value_parser = bits)]
    bits: Option<u32>,
    /// Weights along k that share a scale, -1 for all of an output channel [default: as they are, or the nearest that the
    /// form has]. GPTQ files without a config, whose shapes leave it open, are read so too.
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = group)]
    group: Option<Group>,
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
    to: &'static str,
    bytes_before: u64,
    bytes_after: u64,
    /// Quantised modules.
    modules: usize,
    /// Those of them that were rounded again.
    requantized: Vec<Requantized>,
    seconds: f64,
}

#[derive(Serialize)]
struct Requantized {
    module: String,
    reason: String,
}

/// Writes the model.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let begun = Instant::now();
    let source = open_complete(&args.model, Hint { group: args.group })?;
    let progress = Progress::new(app, "converting", Unit::Bytes);
    let mut report = |at: halfbyte_checkpoint::Progress<'_>| progress.at(at.bytes, at.total_bytes);
    let cooperate = interrupt::cooperate();
    let job = Job {
        overwrite: args.overwrite,
        progress: Some(&mut report),
        cancel: Some(&interrupt::cancelled),
        ..Job::new(&source, &args.output)
    };
    let conversion = Conversion {
        target: args.to.into(),
        bits: args.bits,
        group: args.group,
        channel_scale: args.two_level.then_some(Float::F16),
        requantize: args.requantize,
    };
    let converted = convert(job, conversion)?;
    drop((cooperate, progress));
    app.findings(&converted.written.findings);
    let result = Converted {
        model: args.model.clone(),
        output: converted.written.path,
        to: args.to.name(),
        bytes_before: source.checkpoint().tensors().map(|t| t.bytes as u64).sum(),
        bytes_after: converted.written.tensor_bytes,
        modules: converted.written.quantized,
        requantized: converted.requantized.into_iter().map(|(module, reason)| Requantized { module, reason }).collect(),
        seconds: begun.elapsed().as_secs_f64(),
    };
    app.result(&result, human)
}

fn human(r: &Converted) -> String {
    let exact = r.modules - r.requantized.len();
    let mut out = format!(
        "{}: {} of {} layers to {} without loss; tensors {} before, {} after, {:.1} s\n",
        path(&r.output),
        exact,
        r.modules,
        r.to,
        bytes(r.bytes_before),
        bytes(r.bytes_after),
        r.seconds
    );
    if let Some(first) = r.requantized.first() {
        out += &format!(
            "{} layers were rounded again; the first: `{}`: {}\n",
            r.requantized.len(),
            escaped(&first.module),
            escaped(&first.reason)
        );
    }
    out
}
