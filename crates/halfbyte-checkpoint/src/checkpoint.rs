//! A checkpoint as one set of named tensors, whatever the container and the number of files.

use crate::error::{Error, Result};
use crate::experts;
use crate::finding::Finding;
use crate::gguf;
use crate::mapping::Mapping;
use crate::onnx;
use crate::pytorch;
use crate::safetensors::{self, DType, FloatData, cast, cast_floats};
use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// The tensors of a model folder or of one file, memory-mapped.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<MappedFile>,
    /// Every tensor, in the order of files and bytes.
    tensors: Vec<Tensor>,
    by_name: HashMap<String, usize>,
    findings: Vec<Finding>,
    unread: Vec<String>,
    container: Container,
}

/// What a container says besides its tensors.
#[derive(Debug)]
pub(crate) enum Container {
    /// Nothing: safetensors, and PyTorch's files.
    Plain,
    /// The quantised products of a model.
    Onnx(onnx::Model),
    /// Metadata; all of what Hugging Face's folders have in several files.
    Gguf(gguf::Header),
}

#[derive(Debug)]
pub(crate) struct MappedFile {
    pub path: PathBuf,
    pub map: Mapping,
}

/// A tensor of a container.
#[derive(Debug)]
pub(crate) struct Tensor {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The file that holds it.
    pub file: usize,
    pub place: Place,
}

/// Where the bytes of a tensor are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// In this range of its file.
    Range(Range<usize>),
    /// In this range of its file, with rows in another order: GGUF's.
    Rows(Range<usize>, gguf::RowOrder),
    /// In this range of its file, elements in another order or with others between them: PyTorch's views. `strides` are in
    /// elements; `bytes` is what the elements take.
    Strided { range: Range<usize>, strides: Vec<usize>, bytes: usize },
    /// Here: the file holds them in another encoding.
    Decoded(Vec<u8>),
}

impl Place {
    fn len(&self) -> usize {
        match self {
            Place::Range(range) | Place::Rows(range, _) => range.len(),
            Place::Strided { bytes, .. } => *bytes,
            Place::Decoded(bytes) => bytes.len(),
        }
    }
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

/// Tensors of all files together, those of experts apart.
pub(crate) const MOST_TENSORS: usize = 1 << 19;

/// What is opened in a folder without safetensors files.
const OTHER_FILES: &[&str] = &["model.gguf", "model.onnx"];

impl Checkpoint {
    /// Opens a folder (`model.safetensors`; or an index with its shards; or the only `*.safetensors` in it; or else
    /// `pytorch_model.bin` or its index; or else `model.gguf` or `model.onnx`; or the only `*.gguf`; or the only state dict of
    /// PyTorch's in it) or one file, and validates every header. GGUF and PyTorch's state dicts are told by their content,
    /// whatever their names; ONNX by the file's name, `*.onnx`; all else is safetensors.
    ///
    /// Errors: no such files, a header that is not consistent with its file, an index that names shards outside the
    /// folder, shards or tensors that do not exist, a tensor in two shards.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let metadata = std::fs::metadata(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => Error::missing(path, "there is no such file or folder"),
            _ => Error::io("open", path)(source),
        })?;
        let mut this = Self::empty(path);
        if !metadata.is_dir() {
            this.open_file(path)?;
        } else if !safetensors::files::open_folder(path, &mut this)? && !pytorch::files::open_folder(path, &mut this)? {
            let mut others: Vec<PathBuf> =
                OTHER_FILES.iter().map(|name| path.join(name)).filter(|file| file.is_file()).collect();
            if others.is_empty() {
                others.extend(gguf::files::in_folder(path)?);
            }
            if others.is_empty() {
                others.extend(pytorch::files::only_file(path)?);
            }
            let [only] = others.as_slice() else {
                let what = match others.len() {
                    0 => "found none of them",
                    _ => "found several of the last",
                };
                let others = OTHER_FILES.join(" or ");
                let what = format!(
                    "expected model.safetensors, model.safetensors.index.json, pytorch_model.bin, {others}; {what}"
                );
                return Err(Error::missing(path, what));
            };
            this.open_file(only)?;
        }
        this.experts_apart()?;
        Ok(this)
    }

    /// Without a tensor.
    fn empty(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            files: Vec::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            findings: Vec::new(),
            unread: Vec::new(),
            container: Container::Plain,
        }
    }

    /// Tensors of a program's memory as those of one file of this name. Error: two of one name.
    pub(crate) fn of_memory(
        name: &Path,
        tensors: impl Iterator<Item = (String, DType, Vec<usize>, Vec<u8>)>,
    ) -> Result<Self> {
        let mut this = Self::empty(name);
        let file = this.add_file(MappedFile { path: name.to_owned(), map: Mapping::none() });
        for (name, dtype, shape, bytes) in tensors {
            this.add_tensor(Tensor { name, dtype, shape, file, place: Place::Decoded(bytes) })?;
        }
        Ok(this)
    }

    /// Experts that lie in one tensor become a module each. Errors: one of them is there already; codes and scales that do not fit
    /// each other.
    fn experts_apart(&mut self) -> Result<()> {
        let tensors = std::mem::take(&mut self.tensors);
        self.by_name.clear();
        let apart = experts::apart(tensors);
        let apart = apart.map_err(|misfit| Error::malformed(&self.files[misfit.file].path, misfit.what))?;
        apart.into_iter().try_for_each(|tensor| self.add_tensor(tensor))
    }

    fn open_file(&mut self, path: &Path) -> Result<()> {
        let is = |ending: &str| path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending));
        if is("onnx") {
            return onnx::files::open_file(path, self);
        }
        let map = Mapping::open(path)?;
        if is("gguf") || map.bytes().starts_with(gguf::MAGIC) {
            return gguf::files::open_file(path, self);
        }
        if pytorch::files::is_pytorch(map.bytes()) {
            return pytorch::files::add_file(path, self);
        }
        safetensors::files::add_file(path, self)
    }

    /// The bytes of the file that was opened first.
    pub(crate) fn first_file(&self) -> &[u8] {
        self.files.first().map_or(&[], |file| file.map.bytes())
    }

    /// What the container says besides its tensors.
    pub(crate) fn container(&self) -> &Container {
        &self.container
    }

    /// Keeps what the container says besides its tensors.
    pub(crate) fn set_container(&mut self, container: Container) {
        self.container = container;
    }

    /// The number that the next file will have.
    pub(crate) fn next_file(&self) -> usize {
        self.files.len()
    }

    /// Adds a file; returns its number.
    pub(crate) fn add_file(&mut self, file: MappedFile) -> usize {
        self.files.push(file);
        self.files.len() - 1
    }

    /// Bytes of a file that was added.
    pub(crate) fn file_range(&self, file: usize, range: Range<usize>) -> &[u8] {
        &self.files[file].map.bytes()[range]
    }

    /// Size of a file that was added.
    pub(crate) fn file_bytes(&self, file: usize) -> usize {
        self.files[file].map.bytes().len()
    }

    /// Adds a tensor. Errors: there is one of this name, or more than [`MOST_TENSORS`] in all.
    pub(crate) fn add_tensor(&mut self, tensor: Tensor) -> Result<()> {
        let at = self.tensors.len();
        if at == MOST_TENSORS {
            let what = format!("expected at most {MOST_TENSORS} tensors, those of experts apart");
            return Err(Error::malformed(&self.files[tensor.file].path, what));
        }
        if let Some(before) = self.by_name.insert(tensor.name.clone(), at) {
            let other = &self.files[self.tensors[before].file].path;
            let what = format!("tensor `{}` lies in {} too", tensor.name, other.display());
            return Err(Error::malformed(&self.files[tensor.file].path, what));
        }
        self.tensors.push(tensor);
        Ok(())
    }

    /// Notes something odd.
    pub(crate) fn add_finding(&mut self, finding: Finding) {
        self.findings.push(finding);
    }

    /// Notes a tensor that is in a file and not here.
    pub(crate) fn add_unread(&mut self, name: &str) {
        self.unread.push(name.to_owned());
    }

    /// Tensors of types that no other file has, which were left out.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold tensors.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Names of all tensors, in the order in which they lie in the files.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|tensor| tensor.name.as_str())
    }

    /// What the files say of all tensors, in the same order.
    pub fn tensors(&self) -> impl Iterator<Item = TensorInfo<'_>> {
        self.tensors.iter().map(|tensor| self.info_of(tensor))
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
        self.by_name.get(name).map(|&at| self.info_of(&self.tensors[at]))
    }

    /// What the files say of a tensor. Error: there is none of this name.
    pub fn info(&self, name: &str) -> Result<TensorInfo<'_>> {
        self.tensor(name).map(|tensor| self.info_of(tensor))
    }

    /// A tensor's bytes, little-endian, row-major; in place. Errors: no such tensor; one whose elements the file has in another
    /// order, see [`Checkpoint::data`].
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        match self.data(name)? {
            Cow::Borrowed(bytes) => Ok(bytes),
            Cow::Owned(_) => {
                let what = format!("tensor `{name}`: expected elements in their order, got another order");
                Err(Error::unsupported(self.info(name)?.file, what))
            }
        }
    }

    /// A tensor's bytes, little-endian, row-major; a copy where the file has its elements in another order. Error: no such
    /// tensor.
    pub fn data(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        let tensor = self.tensor(name)?;
        let file = || self.files[tensor.file].map.bytes();
        Ok(match &tensor.place {
            Place::Range(range) => Cow::Borrowed(&file()[range.clone()]),
            Place::Rows(range, order) => {
                let rows = tensor.shape[0];
                Cow::Owned(gguf::reordered(&file()[range.clone()], rows, |row| order.gguf_row(row)))
            }
            Place::Strided { range, strides, .. } => {
                let element = tensor.dtype.size_bits().unwrap_or(8) / 8;
                Cow::Owned(pytorch::gathered(&file()[range.clone()], &tensor.shape, strides, element))
            }
            Place::Decoded(bytes) => Cow::Borrowed(bytes),
        })
    }

    /// A tensor's bytes as its file has them: rows in their order there, and what lies between the elements of a view.
    /// Error: no such tensor.
    pub fn stored_bytes(&self, name: &str) -> Result<&[u8]> {
        let tensor = self.tensor(name)?;
        Ok(match &tensor.place {
            Place::Range(range) | Place::Rows(range, _) | Place::Strided { range, .. } => {
                self.file_range(tensor.file, range.clone())
            }
            Place::Decoded(bytes) => bytes,
        })
    }

    /// A float tensor's elements. Errors: no such tensor, another type than F16, BF16, F32.
    pub fn floats(&self, name: &str) -> Result<FloatData<'_>> {
        let info = self.info(name)?;
        let Some(dtype) = info.dtype.float() else {
            let what = format!("tensor `{name}`: expected floats (F16, BF16 or F32), got {}", info.dtype);
            return Err(Error::unsupported(info.file, what));
        };
        Ok(cast_floats(dtype, self.data(name)?))
    }

    /// An integer tensor's elements. Errors: no such tensor, another type than I32.
    pub fn ints(&self, name: &str) -> Result<Cow<'_, [i32]>> {
        Ok(cast(self.bytes_of_ints(name)?))
    }

    /// An integer tensor's elements as words of packed codes. Errors: as [`Checkpoint::ints`].
    pub fn words(&self, name: &str) -> Result<Cow<'_, [u32]>> {
        Ok(cast(self.bytes_of_ints(name)?))
    }

    fn bytes_of_ints(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        let info = self.info(name)?;
        if info.dtype != DType::I32 {
            return Err(Error::malformed(info.file, format!("tensor `{name}`: expected I32, got {}", info.dtype)));
        }
        self.data(name)
    }

    /// Lets go of the memory that reading a tensor took; it is read from the file again when it is needed again. With
    /// this after each tensor, converting a model holds one tensor at a time. Unknown names are ignored.
    pub fn release(&self, name: &str) {
        if let Ok(Tensor { file, place, .. }) = self.tensor(name)
            && let Place::Range(range) | Place::Rows(range, _) | Place::Strided { range, .. } = place
        {
            self.files[*file].map.release(range.clone());
        }
    }

    /// The error that a tensor is of another type or shape, or holds other numbers, than was expected.
    pub(crate) fn unexpected<T>(&self, name: &str, expected: &str) -> Result<T> {
        let TensorInfo { name, dtype, shape, file, .. } = self.info(name)?;
        Err(Error::malformed(file, format!("tensor `{name}`: expected {expected}, got {dtype} {shape:?}")))
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        let at = self.by_name.get(name);
        at.map(|&at| &self.tensors[at])
            .ok_or_else(|| Error::missing(&self.path, format!("there is no tensor `{name}`")))
    }

    fn info_of<'a>(&'a self, tensor: &'a Tensor) -> TensorInfo<'a> {
        TensorInfo {
            name: &tensor.name,
            dtype: tensor.dtype,
            shape: &tensor.shape,
            bytes: tensor.place.len(),
            file: &self.files[tensor.file].path,
        }
    }
}
