//! Writing tensors one at a time, so that memory is bounded by the largest of them.

use super::dtype::DType;
use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// A tensor that is going to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// Writes `model.safetensors`, or shards with an index, as Hugging Face names them.
///
/// All tensors are declared first; then the data of each is written, in any order, straight to its place. Files have
/// temporary names until [`Writer::finish`] has synced them all; dropping the writer before that removes them.
#[derive(Debug)]
pub struct Writer {
    dir: PathBuf,
    shards: Vec<Shard>,
    places: HashMap<String, Place>,
    unwritten: usize,
    total_bytes: u64,
    /// The index's content, if there is more than one shard.
    index: Option<Value>,
    finished: bool,
}

#[derive(Debug)]
struct Shard {
    file: File,
    /// Where the file is now.
    current: PathBuf,
    /// Where it is going to be.
    path: PathBuf,
}

#[derive(Debug)]
struct Place {
    shard: usize,
    offset: u64,
    bytes: usize,
    written: bool,
}

/// The files that a [`Writer`] has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenFiles {
    /// Shards in order, then the index if there is one.
    pub files: Vec<PathBuf>,
    /// Bytes of all tensors.
    pub tensor_bytes: u64,
}

impl Writer {
    /// Lays out the files for these tensors and writes their headers.
    ///
    /// A shard is filled in the declared order until the next tensor would pass `max_shard_bytes`; a tensor larger than
    /// that has a shard of its own. Within a shard, types with larger elements come first, so that every tensor is
    /// aligned. Errors: a name declared twice or empty, a shape that overflows, a file that exists already, the system's
    /// refusal.
    pub fn create(dir: impl AsRef<Path>, tensors: &[TensorSpec], max_shard_bytes: u64) -> Result<Self> {
        const OP: &str = "write safetensors";
        let dir = dir.as_ref();
        let mut seen = HashSet::new();
        let mut shards: Vec<Vec<(&TensorSpec, usize)>> = vec![Vec::new()];
        let (mut in_shard, mut total) = (0u64, 0u64);
        for tensor in tensors {
            if tensor.name.is_empty() || tensor.name == "__metadata__" || !seen.insert(&tensor.name) {
                return Err(Error::invalid(
                    OP,
                    "tensor names once each, not empty, not `__metadata__`",
                    format!("`{}`", tensor.name),
                ));
            }
            if matches!(tensor.dtype, DType::Block(_)) {
                let got = format!("`{}` of {}", tensor.name, tensor.dtype);
                return Err(Error::invalid(OP, "types that safetensors files have", got));
            }
            let bytes = tensor.dtype.bytes_of(&tensor.shape).ok_or_else(|| {
                let got = format!("`{}` of {} {:?}", tensor.name, tensor.dtype, tensor.shape);
                Error::invalid(OP, "shapes that fit memory and fill whole bytes", got)
            })?;
            if !shards[shards.len() - 1].is_empty() && in_shard.saturating_add(bytes as u64) > max_shard_bytes {
                shards.push(Vec::new());
                in_shard = 0;
            }
            in_shard = in_shard.saturating_add(bytes as u64);
            total = total.saturating_add(bytes as u64);
            let last = shards.len() - 1;
            shards[last].push((tensor, bytes));
        }
        let name_of = |shard: usize| match shards.len() {
            1 => "model.safetensors".to_owned(),
            count => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        };
        let mut this = Self {
            dir: dir.to_owned(),
            shards: Vec::with_capacity(shards.len()),
            places: HashMap::with_capacity(tensors.len()),
            unwritten: tensors.len(),
            total_bytes: total,
            index: None,
            finished: false,
        };
        if shards.len() > 1 {
            let map: Map<String, Value> = shards
                .iter()
                .enumerate()
                .flat_map(|(i, shard)| shard.iter().map(move |(t, _)| (t.name.clone(), i)))
                .map(|(name, i)| (name, Value::String(name_of(i))))
                .collect();
            this.refuse_existing(&this.index_path())?;
            this.index = Some(json!({"metadata": {"total_size": total}, "weight_map": map}));
        }
        for (i, mut tensors) in shards.iter().cloned().enumerate() {
            tensors.sort_by_key(|(t, _)| std::cmp::Reverse(t.dtype.size_bits()));
            this.create_shard(&name_of(i), &tensors)?;
        }
        Ok(this)
    }

    fn create_shard(&mut self, name: &str, tensors: &[(&TensorSpec, usize)]) -> Result<()> {
        let path = self.dir.join(name);
        self.refuse_existing(&path)?;
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        let mut offset = 0u64;
        for (tensor, bytes) in tensors {
            let end = offset + *bytes as u64;
            header.insert(
                tensor.name.clone(),
                json!({"dtype": tensor.dtype.name(), "shape": tensor.shape, "data_offsets": [offset, end]}),
            );
            offset = end;
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        // The data must begin at a multiple of 8, so that aligned offsets are aligned addresses.
        header.resize(header.len().next_multiple_of(8), b' ');
        let start = 8 + header.len() as u64;

        let temporary = temporary_name(&self.dir, name);
        let file = File::create_new(&temporary).map_err(Error::io("create", &temporary))?;
        self.shards.push(Shard { file, current: temporary, path });
        let number = self.shards.len() - 1;
        let Shard { file, current, .. } = &mut self.shards[number];
        file.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| file.write_all(&header))
            .and_then(|()| file.set_len(start + offset))
            .map_err(Error::io("write", current))?;
        let mut at = start;
        for &(tensor, bytes) in tensors {
            self.places.insert(tensor.name.clone(), Place { shard: number, offset: at, bytes, written: false });
            at += bytes as u64;
        }
        Ok(())
    }

    fn index_path(&self) -> PathBuf {
        self.dir.join("model.safetensors.index.json")
    }

    fn refuse_existing(&self, path: &Path) -> Result<()> {
        match path.symlink_metadata() {
            Ok(_) => Err(Error::Exists { path: path.to_owned(), why: String::new() }),
            Err(_) => Ok(()),
        }
    }

    /// Bytes of all declared tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Writes a tensor's data, little-endian, row-major. Errors: a name that was not declared or is written already,
    /// another length than declared, the system's refusal.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<()> {
        const OP: &str = "write safetensors";
        let Some(place) = self.places.get_mut(name) else {
            return Err(Error::invalid(OP, "a tensor that was declared", format!("`{name}`")));
        };
        if place.written {
            return Err(Error::invalid(OP, "each tensor once", format!("`{name}` again")));
        }
        if data.len() != place.bytes {
            return Err(Error::invalid(OP, format!("{} bytes for `{name}`", place.bytes), data.len().to_string()));
        }
        let Shard { file, current, .. } = &mut self.shards[place.shard];
        file.seek(SeekFrom::Start(place.offset))
            .and_then(|_| file.write_all(data))
            .map_err(Error::io("write", current))?;
        place.written = true;
        self.unwritten -= 1;
        Ok(())
    }

    /// Syncs all files and gives them their final names, the index last. Errors: a declared tensor that was not
    /// written, the system's refusal; then nothing is left.
    pub fn finish(mut self) -> Result<WrittenFiles> {
        if self.unwritten > 0 {
            let mut missing: Vec<&str> =
                self.places.iter().filter(|(_, place)| !place.written).map(|(name, _)| name.as_str()).collect();
            missing.sort_unstable();
            let got = format!("{} without, the first of them `{}`", missing.len(), missing[0]);
            return Err(Error::invalid("finish safetensors", "data for every declared tensor", got));
        }
        for shard in &self.shards {
            shard.file.sync_all().map_err(Error::io("sync", &shard.current))?;
        }
        let mut files = Vec::with_capacity(self.shards.len() + 1);
        for shard in &mut self.shards {
            std::fs::rename(&shard.current, &shard.path).map_err(Error::io("rename", &shard.current))?;
            shard.current.clone_from(&shard.path);
            files.push(shard.path.clone());
        }
        if let Some(index) = &self.index {
            let path = self.index_path();
            write_synced(&path, &pretty(index))?;
            files.push(path);
        }
        sync_dir(&self.dir)?;
        self.finished = true;
        Ok(WrittenFiles { files, tensor_bytes: self.total_bytes })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            for shard in &self.shards {
                // Nothing can be done here about a failure.
                let _ = std::fs::remove_file(&shard.current);
            }
        }
    }
}

/// JSON as Hugging Face's tools write it: indented by two, with a newline at the end.
pub(crate) fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// A name in `dir` that no other process and no other call uses.
pub(crate) fn temporary_name(dir: &Path, name: &str) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    dir.join(format!(".{name}.{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// Writes a whole file under a temporary name, syncs it, and gives it its own.
pub(crate) fn write_synced(path: &Path, content: &[u8]) -> Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::invalid("write", "the path of a file", path.display().to_string()));
    };
    let temporary = temporary_name(dir, &name.to_string_lossy());
    let written = File::create_new(&temporary)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|e| {
        let _ = std::fs::remove_file(&temporary);
        Error::io("write", path)(e)
    })
}

/// Makes renames in a folder durable, where the system has a way to.
pub(crate) fn sync_dir(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    File::open(dir).and_then(|d| d.sync_all()).map_err(Error::io("sync", dir))?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}
