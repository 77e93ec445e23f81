//! Writing files a tensor at a time to declared places, under temporary names first.

use crate::error::{Error, Result};
use crate::files::{self, OutputFile, parent, sync_dir, temporary_name, write_synced};
use std::collections::HashMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Files in which tensors are written one at a time, so that memory is bounded by the largest of them.
///
/// [`crate::safetensors::create`], [`crate::gguf::create`] and [`crate::onnx::create`] declare all tensors; then the data
/// of each is written, in any order, straight to its place. Files have temporary names until [`Writer::finish`] has synced
/// them all; dropping the writer before that removes them. The same declarations and data make the same bytes.
#[derive(Debug)]
pub struct Writer {
    /// The operation, for errors.
    op: &'static str,
    files: Vec<TensorFile>,
    places: HashMap<String, Place>,
    unwritten: usize,
    tensor_bytes: u64,
    /// Written whole when all tensors are: where, and what.
    last: Option<(PathBuf, Vec<u8>)>,
    last_written: bool,
    finished: bool,
}

#[derive(Debug)]
struct TensorFile {
    file: OutputFile,
    /// Where the file is now.
    current: PathBuf,
    /// Where it is going to be.
    path: PathBuf,
}

#[derive(Debug)]
struct Place {
    file: usize,
    offset: u64,
    bytes: usize,
    written: bool,
}

/// The files that a [`Writer`] has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFiles {
    /// Those with tensors in order, then what was written last if there is such a file.
    pub files: Vec<PathBuf>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
}

impl Writer {
    pub(crate) fn new(op: &'static str) -> Self {
        Self {
            op,
            files: Vec::new(),
            places: HashMap::new(),
            unwritten: 0,
            tensor_bytes: 0,
            last: None,
            last_written: false,
            finished: false,
        }
    }

    /// Begins a file of this many bytes with `header`. Errors: a file that exists already, the system's refusal.
    pub(crate) fn add_file(&mut self, path: PathBuf, header: &[u8], bytes: u64) -> Result<()> {
        let Some(name) = path.file_name() else {
            return Err(self.invalid("the path of a file", path.display().to_string()));
        };
        refuse_existing(&path)?;
        let current = temporary_name(parent(&path), &name.to_string_lossy());
        let mut file = OutputFile::create(&current).map_err(Error::io("create", &current))?;
        let begun = file.write_all(header).and_then(|()| file.set_len(bytes)).map_err(Error::io("write", &current));
        // Also a file that could not be begun is removed in the end.
        self.files.push(TensorFile { file, current, path });
        begun
    }

    /// Declares a tensor in the file that was added last. Error: a name that was declared before.
    pub(crate) fn declare(&mut self, name: String, offset: u64, bytes: usize) -> Result<()> {
        let place = Place { file: self.files.len() - 1, offset, bytes, written: false };
        if self.places.contains_key(&name) {
            return Err(self.invalid("tensor names once each", format!("`{name}`")));
        }
        self.places.insert(name, place);
        self.unwritten += 1;
        self.tensor_bytes += bytes as u64;
        Ok(())
    }

    /// A file that is written whole after all tensors. Error: it exists already.
    pub(crate) fn end_with(&mut self, path: PathBuf, content: Vec<u8>) -> Result<()> {
        refuse_existing(&path)?;
        self.last = Some((path, content));
        Ok(())
    }

    /// Bytes of all declared tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// Writes a tensor's data: numbers little-endian or blocks, row-major. Errors: a name that was not declared or is
    /// written already, another length than declared, the system's refusal.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let Some(place) = self.places.get_mut(name) else {
            return Err(self.invalid("a tensor that was declared", format!("`{name}`")));
        };
        if place.written {
            return Err(self.invalid("each tensor once", format!("`{name}` again")));
        }
        if data.len() != place.bytes {
            let expected = format!("{} bytes for `{name}`", place.bytes);
            return Err(self.invalid(&expected, data.len().to_string()));
        }
        let TensorFile { file, current, .. } = &mut self.files[place.file];
        file.write_at(place.offset, data).map_err(Error::io("write", current))?;
        place.written = true;
        self.unwritten -= 1;
        Ok(())
    }

    /// Syncs all files and gives them their final names. Errors: a declared tensor that was not written, the system's
    /// refusal; then nothing is left.
    pub fn finish(mut self) -> Result<WrittenFiles> {
        if self.unwritten > 0 {
            let missing = self.places.iter().filter(|(_, place)| !place.written).map(|(name, _)| name.as_str());
            let first = missing.min().unwrap_or_default();
            let got = format!("{} without, the first of them `{first}`", self.unwritten);
            return Err(self.invalid("data for every declared tensor", got));
        }
        for TensorFile { file, current, .. } in &self.files {
            file.sync().map_err(Error::io("sync", current))?;
        }
        let mut written = Vec::with_capacity(self.files.len() + 1);
        for file in &mut self.files {
            files::rename_new(&file.current, &file.path).map_err(Error::io("rename", &file.current))?;
            file.current.clone_from(&file.path);
            written.push(file.path.clone());
        }
        if let Some((path, content)) = &self.last {
            write_synced(path, content)?;
            self.last_written = true;
            written.push(path.clone());
        }
        if let Some(path) = written.first() {
            sync_dir(parent(path))?;
        }
        self.finished = true;
        Ok(WrittenFiles { files: written, tensor_bytes: self.tensor_bytes })
    }

    fn invalid(&self, expected: &str, got: String) -> Error {
        Error::invalid(self.op, expected, got)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        // Nothing can be done here about a failure.
        for file in &self.files {
            let _ = files::remove_file(&file.current);
        }
        if let Some((path, _)) = self.last.as_ref().filter(|_| self.last_written) {
            let _ = files::remove_file(path);
        }
    }
}

fn refuse_existing(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(_) => Err(Error::Exists { path: path.to_owned(), why: String::new() }),
        Err(_) => Ok(()),
    }
}
