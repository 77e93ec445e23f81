//! The header of a GGUF file: parsed, and proven consistent with the size of the file.

use super::types::GgmlType;
use super::value::{Array, Cursor, Value};
use crate::error::{Error, Result};
use std::collections::HashSet;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Where tensors begin, unless `general.alignment` says otherwise: at multiples of this many bytes.
pub(super) const DEFAULT_ALIGNMENT: usize = 32;

/// The longest header that is read, so that a lie in a large file takes no memory in proportion to it. Headers with the
/// largest vocabularies have a tenth of it.
const LONGEST_HEADER: usize = 256 << 20;

/// The most tensors and the most metadata pairs: each takes more memory than its bytes in the file.
const MOST_TENSORS: usize = 1 << 17;
const MOST_PAIRS: usize = 1 << 16;

/// Dimensions that a tensor may have.
const MOST_DIMENSIONS: u32 = 4;

/// What a file begins with.
pub(crate) const MAGIC: &[u8] = b"GGUF";

/// What a GGUF file says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// The file, as errors name it.
    pub file: PathBuf,
    /// Version of the format, 2 or 3.
    pub version: u32,
    /// Keys and values in the order of the file; no key twice.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in the order of their data; no name twice.
    pub tensors: Vec<TensorEntry>,
    /// Every tensor's data begins at a multiple of this.
    pub alignment: usize,
}

/// One tensor as its file declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// Its name.
    pub name: String,
    /// Type of its elements.
    pub ggml_type: GgmlType,
    /// Its dimensions, outermost first (files list them the other way round).
    pub shape: Vec<usize>,
    /// Place of its data in the file.
    pub range: Range<usize>,
}

/// Parses and validates the header of a GGUF file, version 2 or 3, little-endian, whose whole content is `bytes`.
///
/// Errors name the file and the key or tensor. Not read: other versions, big-endian files. Malformed: a file that is not
/// GGUF; counts and lengths beyond the file, or a header beyond 256 MiB; more than 2^17 tensors, 2^16 keys or 2^21 strings; text that is not UTF-8; keys or tensors named twice; more than 4
/// dimensions; dimensions of 0; shapes that overflow or whose rows are no whole blocks; unknown types; data that is misaligned, outside
/// the file, overlapping, or apart by more than alignment needs. Bytes after the last tensor are ignored.
pub fn parse(bytes: &[u8], file: &Path) -> Result<Header> {
    let fail = |what: String| Error::malformed(file, what);
    let mut cursor = Cursor::new(&bytes[..bytes.len().min(LONGEST_HEADER)]);
    if cursor.slice(4) != Ok(MAGIC) {
        return Err(fail("expected a GGUF file, which begins with `GGUF`".into()));
    }
    let version = cursor.u32().map_err(fail)?;
    match version {
        2 | 3 => {}
        1 => return Err(Error::unsupported(file, "GGUF version 1; versions 2 and 3 are read")),
        other if other & 0xffff == 0 && other != 0 => {
            return Err(Error::unsupported(file, "a big-endian GGUF file; little-endian ones are read"));
        }
        other => return Err(Error::unsupported(file, format!("GGUF version {other}; versions 2 and 3 are read"))),
    }
    let (tensors, pairs) = cursor.u64().and_then(|tensors| Ok((tensors, cursor.u64()?))).map_err(fail)?;
    // A pair has a length, a name, a type and a value; a tensor a length, a name, dimensions, a type and an offset.
    let pairs = cursor.count(pairs, 14, "metadata pairs").map_err(fail)?;
    let tensors = cursor.count(tensors, 25, "tensors").map_err(fail)?;
    for (count, most, what) in [(pairs, MOST_PAIRS, "metadata pairs"), (tensors, MOST_TENSORS, "tensors")] {
        if count > most {
            return Err(fail(format!("expected at most {most} {what}, got {count}")));
        }
    }

    let mut metadata = Vec::with_capacity(pairs);
    let mut seen = HashSet::with_capacity(pairs);
    for i in 0..pairs {
        let key = cursor.string().map_err(|e| fail(format!("key of metadata pair {i}: {e}")))?;
        if key.is_empty() {
            return Err(fail(format!("metadata pair {i}: expected a key, got an empty one")));
        }
        if !seen.insert(key) {
            return Err(fail(format!("key `{key}` is there twice")));
        }
        let value = cursor.value().map_err(|e| fail(format!("key `{key}`: {e}")))?;
        metadata.push((key.to_owned(), value));
    }
    let alignment = match metadata.iter().find(|(key, _)| key == "general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some((_, Value::U32(alignment))) if alignment.is_power_of_two() => *alignment as usize,
        Some((_, other)) => {
            let got = shown(other);
            return Err(fail(format!("key `general.alignment`: expected a power of two in u32, got {got}")));
        }
    };

    let mut declared = Vec::with_capacity(tensors);
    let mut seen = HashSet::with_capacity(tensors);
    for i in 0..tensors {
        let name = cursor.string().map_err(|e| fail(format!("name of tensor {i}: {e}")))?;
        if name.is_empty() {
            return Err(fail(format!("tensor {i}: expected a name, got an empty one")));
        }
        if !seen.insert(name) {
            return Err(fail(format!("tensor `{name}` is there twice")));
        }
        declared.push(declaration(name, &mut cursor).map_err(|e| fail(format!("tensor `{name}`: {e}")))?);
    }
    let start = cursor.at.checked_next_multiple_of(alignment);
    let start = start.ok_or_else(|| fail(format!("alignment {alignment} is beyond the file")))?;
    let mut tensors = Vec::with_capacity(declared.len());
    for tensor in declared {
        let name = tensor.name;
        tensors.push(place(tensor, start, alignment, bytes.len()).map_err(|e| fail(format!("tensor `{name}`: {e}")))?);
    }
    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut end = start;
    let mut before = "";
    for tensor in &tensors {
        let TensorEntry { name, range, .. } = tensor;
        if range.start < end {
            return Err(fail(format!("tensor `{name}`: its bytes overlap those of tensor `{before}`")));
        }
        if range.start - end >= alignment {
            return Err(fail(format!("tensor `{name}`: {} bytes before it belong to no tensor", range.start - end)));
        }
        end = range.end;
        before = name;
    }
    Ok(Header { file: file.to_owned(), version, metadata, tensors, alignment })
}

/// A tensor whose place is not checked yet.
struct Declared<'a> {
    name: &'a str,
    ggml_type: GgmlType,
    shape: Vec<usize>,
    bytes: usize,
    offset: u64,
}

fn declaration<'a>(name: &'a str, cursor: &mut Cursor<'_>) -> std::result::Result<Declared<'a>, String> {
    let dimensions = cursor.u32()?;
    if dimensions > MOST_DIMENSIONS {
        return Err(format!("expected at most {MOST_DIMENSIONS} dimensions, got {dimensions}"));
    }
    let mut dims = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        dims.push(cursor.u64()?);
    }
    if dims.contains(&0) {
        // Without inputs, any number of outputs would take no bytes.
        return Err(format!("expected dimensions above 0, got {dims:?}"));
    }
    dims.reverse();
    let (id, offset) = (cursor.u32()?, cursor.u64()?);
    let ggml_type = GgmlType::from_id(id).ok_or_else(|| format!("expected the number of a known type, got {id}"))?;
    let shape: Option<Vec<usize>> = dims.iter().map(|&d| usize::try_from(d).ok()).collect();
    let sized = shape.and_then(|shape| Some((ggml_type.bytes_of(&shape)?, shape)));
    let Some((bytes, shape)) = sized else {
        let block = ggml_type.block_len();
        return Err(format!("shape {dims:?} of {ggml_type} overflows, or its rows are no whole blocks of {block}"));
    };
    Ok(Declared { name, ggml_type, shape, bytes, offset })
}

fn place(
    tensor: Declared<'_>,
    start: usize,
    alignment: usize,
    length: usize,
) -> std::result::Result<TensorEntry, String> {
    let Declared { name, ggml_type, shape, bytes, offset } = tensor;
    if offset % alignment as u64 != 0 {
        return Err(format!("expected an offset that is a multiple of {alignment}, got {offset}"));
    }
    let from = usize::try_from(offset).ok().and_then(|offset| offset.checked_add(start));
    let range = from.and_then(|from| Some(from..from.checked_add(bytes)?)).filter(|range| range.end <= length);
    let Some(range) = range else {
        return Err(format!(
            "{bytes} bytes at offset {offset} reach beyond the file, which has {} bytes of data",
            length.saturating_sub(start)
        ));
    };
    Ok(TensorEntry { name: name.to_owned(), ggml_type, shape, range })
}

impl Header {
    /// The value of a key; None if there is none of this name.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// What the file says of a tensor; None if there is none of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The error that a key's value is not as expected.
    pub(super) fn unexpected(&self, key: &str, expected: &str) -> Error {
        let got = self.get(key).map_or("nothing".to_owned(), shown);
        Error::malformed(&self.file, format!("key `{key}`: expected {expected}, got {got}"))
    }

    /// A text, if the key is there. Error: another type.
    pub(super) fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.unexpected(key, "a string")),
        }
    }

    /// A boolean, if the key is there. Error: another type.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.unexpected(key, "a boolean")),
        }
    }

    /// A whole number that is not negative, if the key is there; where a file lists it layer by layer, the one number
    /// that all layers have. Error: another type, layers that differ.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(Value::Array(Array::U32(list))) => same(list).map(u64::from),
            Some(Value::Array(Array::I32(list))) => same(list).and_then(|v| v.try_into().ok()),
            Some(value) => value.as_u64(),
        };
        number
            .map(Some)
            .ok_or_else(|| self.unexpected(key, "a whole number that is not negative, the same for all layers"))
    }

    /// A finite number, if the key is there. Error: another type.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(v)) if v.is_finite() => Ok(Some(decimal(*v))),
            Some(Value::F64(v)) if v.is_finite() => Ok(Some(*v)),
            Some(_) => Err(self.unexpected(key, "a finite number")),
        }
    }
}

/// A value, cut where it is long.
fn shown(value: &Value) -> String {
    match value {
        Value::Array(array) => format!("an array of {}", array.len()),
        Value::String(text) => format!("{:?}", text.chars().take(60).collect::<String>()),
        number => format!("{number:?}"),
    }
}

/// The value that all of a list have.
fn same<T: Copy + PartialEq>(list: &[T]) -> Option<T> {
    list.first().copied().filter(|first| list.iter().all(|v| v == first))
}

/// The shortest decimal that is this single: 1e-5 and not 9.999999747378752e-6.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}
