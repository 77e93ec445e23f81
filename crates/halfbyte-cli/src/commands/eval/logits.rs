//! `halfbyte eval logits`: raw logits, to compare with other implementations.

use crate::app::App;
use crate::escape::path;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::{LoadArgs, files_of};
use crate::progress::{Progress, Unit};
use crate::text::bytes;
use halfbyte_checkpoint::folder::refuse_input;
use halfbyte_checkpoint::{Checkpoint, DType, Error as CheckpointError, Replacement, files};
use halfbyte_llm::{Error as LlmError, eval};
use serde::Serialize;
use std::borrow::Cow;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Write the logits of rows of token ids: `logits` [rows, positions, vocab] f32 for `input_ids` [rows, positions] int32.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// Safetensors file with `input_ids`.
    #[arg(long, value_name = "FILE.safetensors")]
    ids: PathBuf,
    /// Safetensors file to write; pipes and devices take it too.
    #[arg(short, long, value_name = "FILE.safetensors")]
    output: PathBuf,
    /// Replace the file if it is there already.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    load: LoadArgs,
}

#[derive(Serialize)]
struct Logits {
    output: PathBuf,
    rows: usize,
    positions: usize,
    vocab: usize,
    bytes: u64,
    seconds: f64,
    format: String,
}

/// Writes the file.
pub fn run(args: &Args, app: &App) -> Result<()> {
    let begun = Instant::now();
    let mut inputs = files_of(&args.model);
    inputs.push(args.ids.clone());
    refuse_input(&args.output, &inputs)?;
    if !args.overwrite && args.output.is_file() {
        return Err(CheckpointError::Exists {
            path: args.output.clone(),
            why: ": choose another file, or ask to overwrite it".to_owned(),
        }
        .into());
    }
    let cpu = app.cpu()?;
    let file = Checkpoint::open(&args.ids).and_then(|file| file.info("input_ids").map(drop).map(|()| file));
    let file = file
        .map_err(|e| Failure::from(e).with_help("--ids is a safetensors file with `input_ids`, [rows, positions]"))?;
    let info = file.info("input_ids")?;
    let &[rows, positions] = info.shape else {
        return Err(Failure::new(
            Exit::Input,
            format!("{} does not hold rows of token ids", args.ids.display()),
            format!("`input_ids`: expected [rows, positions], got {:?}", info.shape),
            "save a matrix of int32 or int64",
        ));
    };
    let ids = match info.dtype {
        DType::I64 => Cow::Owned(narrow(file.bytes("input_ids")?, &args.ids)?),
        _ => file.ints("input_ids")?,
    };
    let model = args.load.load(app, &args.model)?;
    app.ranks().same("token ids", &format!("{} of {}", ids.len(), args.ids.display()), &(rows, positions, &ids))?;
    // All ranks have the same; the first writes.
    let writes = app.ranks().join(args.load.tp.into())?.rank() == 0;
    let vocab = model.config().spec.vocab;
    let _cooperate = interrupt::cooperate();
    let refuse = |source| CheckpointError::Io { op: "write", path: args.output.clone(), source };
    let create = || Output::create(&args.output, args.overwrite, &inputs, [rows, positions, vocab]);
    let mut output = if writes { Some(create()?) } else { None };
    let progress = Progress::new(app, "computing", Unit::Things("rows"));
    eval::logits(
        &model,
        &cpu,
        &eval::Ids { ids: &ids, shape: [rows, positions] },
        &mut |logits| {
            let written = output.as_mut().map_or(Ok(()), |output| output.write(logits));
            written.map_err(|e| LlmError::Checkpoint(refuse(e)))
        },
        &mut |at| {
            progress.at(at.done as u64, at.total as u64);
            if interrupt::cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )?;
    drop(progress);
    let Some(output) = output else { return Ok(()) };
    // Before the output takes the place of a file that standard output goes to.
    let to_standard_output = files::is_same(&args.output, Path::new("/dev/stdout"));
    let written = output.finish()?;
    let result = Logits {
        output: args.output.clone(),
        rows,
        positions,
        vocab,
        bytes: written,
        seconds: begun.elapsed().as_secs_f64(),
        format: args.load.name(&args.model)?,
    };
    let human = |r: &Logits| {
        let shape = [r.rows, r.positions, r.vocab];
        format!("{}: logits {shape:?} ({}), {}, {:.1} s\n", path(&r.output), r.format, bytes(r.bytes), r.seconds)
    };
    if to_standard_output {
        app.note(human(&result).trim_end());
        return Ok(());
    }
    app.result(&result, human)
}

/// Ids of 64 bits, as most programs save them. Error: one that no vocabulary has.
fn narrow(bytes: &[u8], file: &Path) -> Result<Vec<i32>> {
    let id = |bytes: &[u8]| {
        let wide = bytes.iter().rev().fold(0i64, |id, &byte| id << 8 | i64::from(byte));
        i32::try_from(wide).map_err(|_| {
            Failure::new(
                Exit::Input,
                format!("{} does not hold rows of token ids", path(file)),
                format!("`input_ids`: {wide} is no id of a token"),
                "ids are those of the model's tokenizer",
            )
        })
    };
    bytes.chunks_exact(8).map(id).collect()
}

/// A safetensors file of one tensor, written as it comes, which takes its place when it is whole.
struct Output {
    file: Replacement,
    size: u64,
    left: u64,
}

impl Output {
    fn create(path: &Path, overwrite: bool, inputs: &[PathBuf], shape: [usize; 3]) -> Result<Self> {
        let left = shape.iter().try_fold(4u64, |size, &d| size.checked_mul(d as u64)).ok_or_else(|| {
            Failure::usage("the logits would be too large", format!("{shape:?} of f32"), "give fewer rows or positions")
        })?;
        let mut header =
            format!("{{\"logits\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[0,{left}]}}}}");
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let mut file = Replacement::create(path, overwrite, inputs)?;
        let header = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        file.write_all(&header).map_err(|e| Failure::io("write", path, &e))?;
        Ok(Self { file, size: left.saturating_add(header.len() as u64), left })
    }

    fn write(&mut self, logits: &[f32]) -> std::io::Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(logits);
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or(std::io::ErrorKind::InvalidData)?;
        self.file.write_all(bytes)
    }

    /// Gives the file its name; returns its size.
    fn finish(self) -> Result<u64> {
        if self.left > 0 {
            let cause = format!("{} of {} bytes are missing", self.left, self.size);
            return Err(Failure::new(Exit::Device, "the logits are not complete", cause, "run it again"));
        }
        self.file.commit()?;
        Ok(self.size)
    }
}
