//! A checkpoint as one set of named tensors, whatever the number of files.

use super::data::{FloatData, cast};
use super::dtype::DType;
use super::header::{self, Entry, MAX_HEADER_BYTES};
use super::mapping::Mapping;
use crate::error::{Error, Result};
use crate::finding::Finding;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The tensors of a model folder or of one safetensors file, memory-mapped.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    shards: Vec<Shard>,
    /// Every tensor in the order of files and bytes: shard, and the tensor's entry.
    tensors: Vec<(usize, Entry)>,
    by_name: HashMap<String, usize>,
    findings: Vec<Finding>,
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Mapping,
}

/// What a checkpoint says of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorInfo<'a> {
    /// Its name.
    pub name: &'a str,
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: &'a [usize],
    /// Bytes it takes.
    pub bytes: usize,
    /// The file that holds it.
    pub file: &'a Path,
}

impl Checkpoint {
    /// Opens a folder (`model.safetensors`; or an index with its shards; or the only `*.safetensors` in it) or one
    /// safetensors file, and validates every header.
    ///
    /// Errors: no such files, a header that is not consistent with its file, an index that names shards outside the
    /// folder, shards or tensors that do not exist, a tensor in two shards.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::missing(path, "there is no such file or folder"),
            _ => Error::io("open", path)(source),
        })?;
        if !metadata.is_dir() {
            return Self::of_files(path, &[path.to_owned()]);
        }
        let single = path.join("model.safetensors");
        let index = path.join("model.safetensors.index.json");
        if single.is_file() {
            let mut checkpoint = Self::of_files(path, &[single])?;
            if index.is_file() {
                checkpoint.findings.push(Finding::new(
                    "model.safetensors.index.json",
                    "lies beside model.safetensors; the single file was read and the index was not",
                ));
            }
            return Ok(checkpoint);
        }
        if index.is_file() {
            return Self::of_index(path, &index);
        }
        let names = |ending: &str| -> Result<Vec<PathBuf>> {
            let mut found = Vec::new();
            for entry in std::fs::read_dir(path).map_err(Error::io("list", path))? {
                let file = entry.map_err(Error::io("list", path))?.path();
                if file.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with(ending)) && file.is_file() {
                    found.push(file);
                }
            }
            found.sort();
            Ok(found)
        };
        match (names(".safetensors.index.json")?.as_slice(), names(".safetensors")?.as_slice()) {
            ([index], _) => Self::of_index(path, index),
            ([], [single]) => Self::of_files(path, std::slice::from_ref(single)),
            ([], []) => {
                Err(Error::missing(path, "expected model.safetensors or model.safetensors.index.json, found neither"))
            }
            ([], several) => Err(Error::missing(
                path,
                format!(
                    "expected an index (model.safetensors.index.json) beside {} safetensors files; name one of them to read it alone",
                    several.len()
                ),
            )),
            (several, _) => Err(Error::malformed(path, format!("expected one index, found {}", several.len()))),
        }
    }

    fn of_files(path: &Path, files: &[PathBuf]) -> Result<Self> {
        let mut this = Self {
            path: path.to_owned(),
            shards: Vec::with_capacity(files.len()),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            findings: Vec::new(),
        };
        for file in files {
            let map = Mapping::open(file)?;
            for entry in header::parse(map.bytes(), file)? {
                let at = this.tensors.len();
                if let Some(before) = this.by_name.insert(entry.name.clone(), at) {
                    let other = &this.shards[this.tensors[before].0].path;
                    let what = format!("tensor `{}` lies in {} too", entry.name, other.display());
                    return Err(Error::malformed(file, what));
                }
                this.tensors.push((this.shards.len(), entry));
            }
            this.shards.push(Shard { path: file.clone(), map });
        }
        Ok(this)
    }

    fn of_index(path: &Path, index: &Path) -> Result<Self> {
        let text = read_small(index)?;
        let weight_map = header::parse_index(&text, index)?;
        let mut names: Vec<&str> = weight_map.iter().map(|(_, shard)| shard.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        for name in &names {
            if !path.join(name).is_file() {
                return Err(Error::missing(
                    &path.join(name),
                    format!("the index {} names this shard; there is no such file", index.display()),
                ));
            }
        }
        let files: Vec<PathBuf> = names.iter().map(|name| path.join(name)).collect();
        let mut this = Self::of_files(path, &files)?;
        for (tensor, shard) in &weight_map {
            let file = path.join(shard);
            match this.by_name.get(tensor) {
                Some(&at) if this.shards[this.tensors[at].0].path == file => {}
                Some(&at) => {
                    let other = this.shards[this.tensors[at].0].path.display();
                    let what = format!("tensor `{tensor}`: the index says {shard}, but it lies in {other}");
                    return Err(Error::malformed(index, what));
                }
                None => {
                    let what = format!(
                        "tensor `{tensor}` is not in this shard, where the index {} says it is",
                        index.display()
                    );
                    return Err(Error::missing(&file, what));
                }
            }
        }
        if weight_map.len() < this.tensors.len() {
            let named: std::collections::HashSet<&str> = weight_map.iter().map(|(tensor, _)| tensor.as_str()).collect();
            for (shard, entry) in &this.tensors {
                if !named.contains(entry.name.as_str()) {
                    let shard = this.shards[*shard].path.display();
                    let text = format!("is in {shard} but not in the index; it was taken all the same");
                    this.findings.push(Finding::new(&entry.name, text));
                }
            }
        }
        Ok(this)
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The safetensors files.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| shard.path.as_path())
    }

    /// Names of all tensors, in the order in which they lie in the files.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(_, entry)| entry.name.as_str())
    }

    /// What the files say of all tensors, in the same order.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        (0..self.tensors.len()).map(|at| self.info_at(at))
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    /// What was odd about the files, though they could be read.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// What the files say of a tensor; None if there is none of this name.
    pub fn get(&self, name: &str) -> Option<TensorInfo<'_>> {
        self.by_name.get(name).map(|&at| self.info_at(at))
    }

    /// What the files say of a tensor. Error: there is none of this name.
    pub fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        self.at(name).map(|at| self.info_at(at))
    }

    /// A tensor's bytes, little-endian, row-major; in place. Error: no such tensor.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let (shard, entry) = &self.tensors[self.at(name)?];
        Ok(&self.shards[*shard].map.bytes()[entry.range.clone()])
    }

    /// A float tensor's elements. Errors: no such tensor, another type than F16, BF16, F32.
    pub fn floats(&self, name: &str) -> Result<FloatData<'_>> {
        let info = self.info(name)?;
        let Some(dtype) = info.dtype.float() else {
            let what = format!("tensor `{name}`: expected floats (F16, BF16 or F32), got {}", info.dtype);
            return Err(Error::unsupported(info.file, what));
        };
        Ok(FloatData::from_bytes(dtype, self.bytes(name)?))
    }

    /// An integer tensor's elements. Errors: no such tensor, another type than I32.
    pub fn ints(&self, name: &str) -> Result<Cow<'_, [i32]>> {
        let info = self.info(name)?;
        if info.dtype != DType::I32 {
            return Err(Error::malformed(info.file, format!("tensor `{name}`: expected I32, got {}", info.dtype)));
        }
        Ok(cast(self.bytes(name)?))
    }

    /// Lets go of the memory that reading a tensor took; it is read from the file again when it is needed again. With
    /// this after each tensor, converting a model holds one tensor at a time. Unknown names are ignored.
    pub fn release(&self, name: &str) {
        if let Some(&at) = self.by_name.get(name) {
            let (shard, entry) = &self.tensors[at];
            self.shards[*shard].map.release(entry.range.clone());
        }
    }

    fn at(&self, name: &str) -> Result<usize> {
        self.by_name
            .get(name)
            .copied()
            .ok_or_else(|| Error::missing(&self.path, format!("there is no tensor `{name}`")))
    }

    fn info_at(&self, at: usize) -> TensorInfo<'_> {
        let (shard, entry) = &self.tensors[at];
        TensorInfo {
            name: &entry.name,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: entry.range.len(),
            file: &self.shards[*shard].path,
        }
    }
}

/// Reads a JSON file whole. Errors: it cannot be read, or is absurdly long: more than 100 MB.
pub fn read_small(path: &Path) -> Result<Vec<u8>> {
    let length = std::fs::metadata(path).map_err(Error::io("open", path))?.len();
    if length > MAX_HEADER_BYTES {
        return Err(Error::malformed(path, format!("expected at most {MAX_HEADER_BYTES} bytes of JSON, got {length}")));
    }
    std::fs::read(path).map_err(Error::io("read", path))
}
