//! Single files that are no models.

use super::staging::Staging;
use crate::error::{Error, Result};
use crate::files::{self, OutputFile};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Its name in the temporary folder.
const NAME: &str = "model.safetensors";

/// A file that takes its place when all of it is written and synced; dropped before, it leaves nothing. Pipes, terminals and
/// devices are written to as it goes.
#[derive(Debug)]
pub struct Replacement {
    file: BufWriter<OutputFile>,
    /// None: the path names no regular file.
    staging: Option<Staging>,
    path: PathBuf,
}

impl Replacement {
    /// Begins a file. A link is followed. Errors: a folder, a file that is one of `inputs`, that exists and may not be
    /// replaced, or that another process writes; the system's refusal.
    pub fn create(path: &Path, overwrite: bool, inputs: &[PathBuf]) -> Result<Self> {
        refuse_input(path, inputs)?;
        let special = path.metadata().is_ok_and(|metadata| !metadata.is_file() && !metadata.is_dir());
        let staging = if special { None } else { Some(Staging::for_any_file(path, overwrite, NAME)?) };
        let file = match &staging {
            Some(staging) => OutputFile::create(&staging.path().join(NAME)),
            None => OutputFile::open(path),
        };
        let file = BufWriter::new(file.map_err(Error::io("create", path))?);
        Ok(Self { file, staging, path: path.to_owned() })
    }

    /// Syncs the file and gives it its name. Errors: the system's refusal; then nothing is left.
    pub fn commit(mut self) -> Result<()> {
        self.file.flush().map_err(Error::io("write", &self.path))?;
        if let Some(staging) = self.staging {
            self.file.get_ref().sync().map_err(Error::io("sync", &self.path))?;
            staging.commit()?;
        }
        Ok(())
    }
}

impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Error: the path leads to one of these files, which are read.
pub fn refuse_input(path: &Path, inputs: &[PathBuf]) -> Result<()> {
    match inputs.iter().find(|input| files::is_same(path, input)) {
        None => Ok(()),
        Some(input) => {
            let got = format!("{}, which is {}", path.display(), input.display());
            Err(Error::invalid("write a file", "an output that is no input", got))
        }
    }
}
