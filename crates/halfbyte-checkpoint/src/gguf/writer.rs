//! Writing a GGUF file one tensor at a time, so that memory is bounded by the largest of them.

use super::header::DEFAULT_ALIGNMENT;
use super::types::GgmlType;
use super::value::{Value, write_string};
use crate::error::{Error, Result};
use crate::safetensors::{sync_dir, temporary_name};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

const OP: &str = "write GGUF";

/// The version that is written; what is written would be the same in version 2.
const VERSION: u32 = 3;

/// Names must be shorter than this to be read by ggml.
const NAME_BYTES: usize = 64;

/// A tensor that is going to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub ggml_type: GgmlType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// Writes one GGUF file.
///
/// All tensors are declared first; then the data of each is written, in any order, straight to its place. The file has a
/// temporary name until [`Writer::finish`] has synced it; dropping the writer before that removes it.
#[derive(Debug)]
pub struct Writer {
    file: File,
    /// Where the file is now.
    current: PathBuf,
    /// Where it is going to be.
    path: PathBuf,
    places: HashMap<String, Place>,
    unwritten: usize,
    tensor_bytes: u64,
    finished: bool,
}

#[derive(Debug)]
struct Place {
    offset: u64,
    bytes: usize,
    written: bool,
}

impl Writer {
    /// Lays out the file and writes its header: metadata and tensors in the order given, data at multiples of 32 bytes.
    ///
    /// Errors: a key or a name that is empty or given twice, a `general.alignment` other than 32, a name too long for
    /// ggml, a shape of more than 4 dimensions, that overflows or whose rows are no whole blocks, a file that exists
    /// already, the system's refusal.
    pub fn create(path: impl AsRef<Path>, metadata: &[(String, Value)], tensors: &[TensorSpec]) -> Result<Self> {
        let path = path.as_ref();
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Error::invalid(OP, "the path of a file", path.display().to_string()));
        };
        let mut header = b"GGUF".to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        let mut seen = HashSet::new();
        for (key, value) in metadata {
            if key.is_empty() || !seen.insert(key) {
                return Err(Error::invalid(OP, "keys once each, not empty", format!("`{key}`")));
            }
            if key == "general.alignment" && *value != Value::U32(DEFAULT_ALIGNMENT as u32) {
                let expected = format!("`{key}` of {DEFAULT_ALIGNMENT} in u32");
                return Err(Error::invalid(OP, expected, format!("{value:?}")));
            }
            write_string(key, &mut header);
            value.write(&mut header);
        }
        let (mut places, mut end) = (HashMap::with_capacity(tensors.len()), 0u64);
        for tensor in tensors {
            let bytes = declare(tensor, end, &mut header)?;
            let place = Place { offset: end, bytes, written: false };
            if places.insert(tensor.name.clone(), place).is_some() {
                return Err(Error::invalid(OP, "tensor names once each", format!("`{}`", tensor.name)));
            }
            let next = end.checked_add(bytes as u64).and_then(|e| e.checked_next_multiple_of(DEFAULT_ALIGNMENT as u64));
            end = next.ok_or_else(|| Error::invalid(OP, "tensors that fit a file", format!("`{}`", tensor.name)))?;
        }
        header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT), 0);
        let start = header.len() as u64;
        places.values_mut().for_each(|place| place.offset += start);

        if path.symlink_metadata().is_ok() {
            return Err(Error::Exists { path: path.to_owned(), why: String::new() });
        }
        let current = temporary_name(dir, &name.to_string_lossy());
        let mut file = File::create_new(&current).map_err(Error::io("create", &current))?;
        let written = file.write_all(&header).and_then(|()| file.set_len(start + end));
        let this = Self {
            file,
            current,
            path: path.to_owned(),
            places,
            unwritten: tensors.len(),
            tensor_bytes: end,
            finished: false,
        };
        written.map_err(Error::io("write", &this.current))?;
        Ok(this)
    }

    /// Bytes of all declared tensors, with what aligns them.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    /// Writes a tensor's data: numbers little-endian or blocks, row-major. Errors: a name that was not declared or is
    /// written already, another length than declared, the system's refusal.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<()> {
        let Some(place) = self.places.get_mut(name) else {
            return Err(Error::invalid(OP, "a tensor that was declared", format!("`{name}`")));
        };
        if place.written {
            return Err(Error::invalid(OP, "each tensor once", format!("`{name}` again")));
        }
        if data.len() != place.bytes {
            return Err(Error::invalid(OP, format!("{} bytes for `{name}`", place.bytes), data.len().to_string()));
        }
        self.file
            .seek(SeekFrom::Start(place.offset))
            .and_then(|_| self.file.write_all(data))
            .map_err(Error::io("write", &self.current))?;
        place.written = true;
        self.unwritten -= 1;
        Ok(())
    }

    /// Syncs the file and gives it its final name. Errors: a declared tensor that was not written, the system's refusal;
    /// then nothing is left.
    pub fn finish(mut self) -> Result<PathBuf> {
        if self.unwritten > 0 {
            let unwritten = self.places.iter().filter(|(_, place)| !place.written);
            let first = unwritten.map(|(name, _)| name.as_str()).min().unwrap_or_default();
            let got = format!("{} without, the first of them `{first}`", self.unwritten);
            return Err(Error::invalid("finish GGUF", "data for every declared tensor", got));
        }
        self.file.sync_all().map_err(Error::io("sync", &self.current))?;
        std::fs::rename(&self.current, &self.path).map_err(Error::io("rename", &self.current))?;
        self.finished = true;
        match self.path.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => sync_dir(dir)?,
            _ => sync_dir(Path::new("."))?,
        }
        Ok(self.path.clone())
    }
}

/// Appends a tensor's declaration; gives its bytes.
fn declare(tensor: &TensorSpec, offset: u64, header: &mut Vec<u8>) -> Result<usize> {
    let TensorSpec { name, ggml_type, shape } = tensor;
    if name.is_empty() || name.len() >= NAME_BYTES {
        return Err(Error::invalid(OP, format!("tensor names of 1 to {} bytes", NAME_BYTES - 1), format!("`{name}`")));
    }
    let bytes = ggml_type.bytes_of(shape).filter(|_| shape.len() <= 4).ok_or_else(|| {
        let expected = format!("up to 4 dimensions that fit memory, rows of whole blocks of {}", ggml_type.block_len());
        Error::invalid(OP, expected, format!("`{name}` of {ggml_type} {shape:?}"))
    })?;
    write_string(name, header);
    header.extend((shape.len() as u32).to_le_bytes());
    shape.iter().rev().for_each(|&d| header.extend((d as u64).to_le_bytes()));
    header.extend(ggml_type.id().to_le_bytes());
    header.extend(offset.to_le_bytes());
    Ok(bytes)
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing can be done here about a failure.
            let _ = std::fs::remove_file(&self.current);
        }
    }
}
