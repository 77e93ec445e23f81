//! `halfbyte eval logits`: raw logits, to compare with other implementations.

use crate::app::App;
use crate::failure::{Exit, Failure, Result};
use crate::interrupt;
use crate::model::LoadArgs;
use crate::progress::{Progress, Unit};
use crate::text::{bytes, path};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_llm::{Error as LlmError, eval};
use serde::Serialize;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;
use tempfile::NamedTempFile;

/// Write the logits of rows of token ids: `logits` [rows, positions, vocab] f32 for `input_ids` [rows, positions] int32.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Model folder.
    model: PathBuf,
    /// Safetensors file with `input_ids`.
    #[arg(long, value_name = "FILE.safetensors")]
    ids: PathBuf,
    /// Safetensors file to write.
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
    if !args.overwrite && args.output.symlink_metadata().is_ok() {
        return Err(halfbyte_checkpoint::Error::Exists { path: args.output.clone(), why: String::new() }.into());
    }
    let cpu = app.cpu()?;
    let file = Checkpoint::open(&args.ids)?;
    let info = file.info("input_ids")?;
    let &[rows, positions] = info.shape else {
        return Err(Failure::new(
            Exit::Input,
            format!("{} does not hold rows of token ids", args.ids.display()),
            format!("`input_ids`: expected [rows, positions], got {:?}", info.shape),
            "save a matrix of int32",
        ));
    };
    let ids = file.ints("input_ids")?;
    let model = args.load.load(app, &args.model)?;
    let vocab = model.config().spec.vocab;
    let _cooperate = interrupt::cooperate();
    let mut output = Output::create(&args.output, [rows, positions, vocab])?;
    let progress = Progress::new(app, "computing", Unit::Things("rows"));
    eval::logits(
        &model,
        &cpu,
        &eval::Ids { ids: &ids, shape: [rows, positions] },
        &mut |logits| output.write(logits).map_err(|source| LlmError::Io { path: args.output.clone(), source }),
        &mut |at| {
            progress.at(at.done as u64, at.total as u64);
            if interrupt::cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        },
    )?;
    drop(progress);
    let written = output.finish(&args.output, args.overwrite)?;
    let result = Logits {
        output: args.output.clone(),
        rows,
        positions,
        vocab,
        bytes: written,
        seconds: begun.elapsed().as_secs_f64(),
        format: args.load.name(&args.model)?,
    };
    app.result(&result, |r| {
        let shape = [r.rows, r.positions, r.vocab];
        format!("{}: logits {shape:?} ({}), {}, {:.1} s\n", path(&r.output), r.format, bytes(r.bytes), r.seconds)
    })
}

/// A safetensors file of one tensor, written as it comes, under a temporary name until it is whole.
struct Output {
    file: BufWriter<NamedTempFile>,
    left: u64,
}

impl Output {
    fn create(path: &Path, shape: [usize; 3]) -> Result<Self> {
        let size = shape.iter().try_fold(4u64, |size, &d| size.checked_mul(d as u64)).ok_or_else(|| {
            Failure::usage("the logits would be too large", format!("{shape:?} of f32"), "give fewer rows or positions")
        })?;
        let mut header =
            format!("{{\"logits\":{{\"dtype\":\"F32\",\"shape\":{shape:?},\"data_offsets\":[0,{size}]}}}}");
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let folder = folder(path);
        let create = || {
            let mut builder = tempfile::Builder::new();
            builder.prefix(".logits-");
            // What any new file gets, less the user's mask; temporary files are private otherwise.
            #[cfg(unix)]
            builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
            let mut file = BufWriter::new(builder.tempfile_in(folder)?);
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(header.as_bytes())?;
            Ok(file)
        };
        let file = create().map_err(|e: std::io::Error| Failure::io("write to", folder, &e))?;
        Ok(Self { file, left: size })
    }

    fn write(&mut self, logits: &[f32]) -> std::io::Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(logits);
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or(std::io::ErrorKind::InvalidData)?;
        self.file.write_all(bytes)
    }

    /// Syncs the file and gives it its name; returns its size.
    fn finish(self, path: &Path, overwrite: bool) -> Result<u64> {
        let refuse = |e: std::io::Error| Failure::io("write", path, &e);
        if self.left > 0 {
            return Err(refuse(std::io::ErrorKind::UnexpectedEof.into()));
        }
        let file = self.file.into_inner().map_err(|e| refuse(e.into_error()))?;
        file.as_file().sync_all().map_err(refuse)?;
        let file = match overwrite {
            true => file.persist(path),
            false => file.persist_noclobber(path),
        };
        let file = file.map_err(|e| refuse(e.error))?;
        #[cfg(unix)]
        File::open(folder(path)).and_then(|folder| folder.sync_all()).map_err(refuse)?;
        Ok(file.metadata().map_err(refuse)?.len())
    }
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}
