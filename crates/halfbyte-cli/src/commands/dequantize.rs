//! `halfbyte dequantize`: the dense checkpoint that a quantised one stands for.

use crate::app::App;
use crate::args::{FloatArg, HintArgs};
use crate::escape::path;
use crate::failure::{Failure, Result};
use crate::interrupt;
use crate::model::open_complete;
use crate::progress::{Progress, Unit};
use crate::text::bytes;
use halfbyte::Float;
use halfbyte_checkpoint::{Error as CheckpointError, Job, write_dense};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Instant;

/// Write the dense model that a quantised one stands for.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// Folder to write.
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Type of the weights; f32 holds every product of code and f16 scale exactly.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: FloatArg,
    /// Replace a model folder that is there already.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    hint: HintArgs,
}

#[derive(Serialize)]
struct Dequantized {
    model: PathBuf,
    output: PathBuf,
    dtype: &'static str,
    bytes_before: u64,
    bytes_after: u64,
    seconds: f64,
}

/// Writes the folder.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let begun = Instant::now();
    let source = open_complete(&args.model, args.hint.into(), app)?;
    let progress = Progress::new(app, "writing", Unit::Bytes);
    let mut report = |at: halfbyte_checkpoint::Progress<'_>| progress.at(at.bytes, at.total_bytes);
    let cooperate = interrupt::cooperate();
    let job = Job {
        overwrite: args.overwrite,
        progress: Some(&mut report),
        cancel: Some(&interrupt::cancelled),
        ..Job::new(&source, &args.output)
    };
    let dtype = Float::from(args.dtype);
    let written = write_dense(job, dtype).map_err(|error| match (&error, dtype) {
        (CheckpointError::Unrepresentable { .. }, Float::F16) => {
            Failure::from(error).with_help("choose --dtype f32 or bf16, which reach further")
        }
        (CheckpointError::Unrepresentable { .. }, Float::BF16) => {
            Failure::from(error).with_help("choose --dtype f32, which reaches further")
        }
        (CheckpointError::Unrepresentable { .. }, Float::F32) => {
            Failure::from(error).with_help("no --dtype reaches further; check where the weights come from")
        }
        _ => error.into(),
    })?;
    drop((cooperate, progress));
    app.findings(&written.findings);
    let result = Dequantized {
        model: args.model.clone(),
        output: written.path,
        dtype: dtype.name(),
        bytes_before: source.checkpoint().tensors().map(|t| t.bytes as u64).sum(),
        bytes_after: written.tensor_bytes,
        seconds: begun.elapsed().as_secs_f64(),
    };
    app.result(&result, |r| {
        let (before, after) = (bytes(r.bytes_before), bytes(r.bytes_after));
        format!("{}: {} in {}, from {before} to {after}, {:.1} s\n", path(&r.output), r.dtype, "safetensors", r.seconds)
    })
}
