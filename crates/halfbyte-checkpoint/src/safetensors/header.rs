//! The header of one safetensors file: parsed, and proven consistent with the size of the file.

use super::dtype::DType;
use crate::error::{Error, Result};
use crate::json::{self, refuse_lfs_pointer};
use serde::Deserialize;
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::ops::Range;
use std::path::Path;

/// The longest header that is read, as in the reference implementation.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// The most tensors of one file: each takes more memory than its entry's bytes, and files in the field have a tenth of it.
const MOST_TENSORS: usize = 1 << 17;

/// The most texts in `__metadata__`.
const MOST_METADATA: usize = 1 << 14;

/// The longest entry of a tensor: type, place, and some hundred dimensions.
const LONGEST_ENTRY: usize = 4096;

/// The most tensors that an index names.
const MOST_NAMES: usize = 1 << 19;

/// One tensor as its file declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Place in the file (not in the data section).
    pub range: Range<usize>,
}

/// Parses and validates the header of a file whose whole content is `file`; entries come in the order of their data.
///
/// Errors name the file and the tensor: a header that does not fit the file, that is not a JSON object, or that names
/// a tensor twice; a tensor with an unknown dtype, with a shape that overflows or does not fit its bytes, or whose
/// bytes overlap another's or lie outside the file; bytes that belong to no tensor.
pub(crate) fn parse(file: &[u8], path: &Path) -> Result<Vec<Entry>> {
    let fail = |what: String| Error::malformed(path, what);
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(fail(format!("expected a safetensors file of at least 8 bytes, got {}", file.len())));
    };
    refuse_lfs_pointer(path, file)?;
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER_BYTES {
        return Err(fail(format!(
            "expected a header of at most {MAX_HEADER_BYTES} bytes, got a header length of {length}; is this a safetensors file?"
        )));
    }
    if length > rest.len() as u64 {
        return Err(fail(format!(
            "header length {length} reaches beyond the file, which has {} bytes after it; the file is truncated or not safetensors",
            rest.len()
        )));
    }
    let (header, data) = rest.split_at(length as usize);
    if header.first() != Some(&b'{') {
        return Err(fail("expected the header to be a JSON object that begins with `{`".into()));
    }
    let fields = json::fields(header, MOST_TENSORS)
        .map_err(|e| fail(format!("the header is not a JSON object of unique names: {e}")))?;

    let data_start = 8 + header.len();
    let mut entries = Vec::with_capacity(fields.len());
    for (name, value) in fields {
        if name == "__metadata__" {
            let refuse = |e| fail(format!("`__metadata__`: expected an object of strings: {e}"));
            for (_, value) in json::fields(value.get().as_bytes(), MOST_METADATA).map_err(refuse)? {
                serde_json::from_str::<Cow<'_, str>>(value.get()).map_err(refuse)?;
            }
        } else {
            let entry = entry(name, value, data.len()).map_err(fail)?;
            entries.push(Entry { range: entry.range.start + data_start..entry.range.end + data_start, ..entry });
        }
    }
    entries.sort_by_key(|e| (e.range.start, e.range.end));
    let mut end = data_start;
    let mut before: Option<&Entry> = None;
    for entry in &entries {
        if entry.range.start < end {
            let other = before.map_or("", |e| &e.name);
            return Err(fail(format!("tensor `{}`: its bytes overlap those of tensor `{other}`", entry.name)));
        }
        if entry.range.start > end {
            return Err(fail(format!(
                "tensor `{}`: {} bytes before it belong to no tensor",
                entry.name,
                entry.range.start - end
            )));
        }
        end = entry.range.end;
        before = Some(entry);
    }
    if end != file.len() {
        return Err(fail(format!(
            "expected the file to end with its last tensor{}, got {} more bytes",
            before.map_or(String::new(), |e| format!(" `{}`", e.name)),
            file.len() - end
        )));
    }
    Ok(entries)
}

/// One field of the header, its range within the data section.
fn entry(name: String, value: &RawValue, data_len: usize) -> std::result::Result<Entry, String> {
    #[derive(Deserialize)]
    struct Fields {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    let fail = |what: String| format!("tensor `{name}`: {what}");
    let length = value.get().len();
    if length > LONGEST_ENTRY {
        return Err(fail(format!("expected at most {LONGEST_ENTRY} bytes of type, shape and place, got {length}")));
    }
    let Fields { dtype, shape, data_offsets: (from, to) } = serde_json::from_str(value.get())
        .map_err(|e| fail(format!("expected {{\"dtype\", \"shape\", \"data_offsets\"}}: {e}")))?;
    let dtype = DType::from_name(&dtype).ok_or_else(|| fail(format!("unknown dtype \"{dtype}\"")))?;
    if from > to {
        return Err(fail(format!("expected data offsets in order, got {from} to {to}")));
    }
    if to > data_len as u64 {
        return Err(fail(format!("data offset {to} lies past the end of the data, which has {data_len} bytes")));
    }
    let dims: Option<Vec<usize>> = shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let bytes = dims.as_ref().and_then(|dims| dtype.bytes_of(dims));
    let (Some(dims), Some(bytes)) = (dims, bytes) else {
        return Err(fail(format!("shape {shape:?} of {dtype} overflows or does not fill whole bytes")));
    };
    if bytes as u64 != to - from {
        return Err(fail(format!(
            "expected {bytes} bytes for shape {dims:?} of {dtype}, got {} (offsets {from} to {to})",
            to - from
        )));
    }
    Ok(Entry { name, dtype, shape: dims, range: from as usize..to as usize })
}

/// Parses an index file (`model.safetensors.index.json`): tensor name and shard name, in the order of the file.
pub(crate) fn parse_index(text: &[u8], path: &Path) -> Result<Vec<(String, String)>> {
    let fail = |what: String| Error::malformed(path, what);
    let fields = json::fields(text, MOST_NAMES)
        .map_err(|e| fail(format!("the index is not a JSON object of unique names: {e}")))?;
    let Some((_, map)) = fields.iter().find(|(name, _)| name == "weight_map") else {
        return Err(fail("expected a field `weight_map`, got none".into()));
    };
    if !map.get().starts_with('{') {
        let got = match map.get().as_bytes().first() {
            Some(b'[') => "a list",
            Some(b'"') => "a string",
            Some(b't' | b'f') => "a truth value",
            Some(b'n') => "null",
            _ => "a number",
        };
        return Err(fail(format!("`weight_map`: expected an object with the shard of each tensor, got {got}")));
    }
    let map = json::fields(map.get().as_bytes(), MOST_NAMES)
        .map_err(|e| fail(format!("`weight_map` is not a JSON object of unique names: {e}")))?;
    if map.is_empty() {
        return Err(fail("`weight_map`: expected an object with the shard of each tensor, got an empty one".into()));
    }
    map.into_iter()
        .map(|(tensor, shard)| {
            let shard: String = serde_json::from_str(shard.get())
                .map_err(|_| fail(format!("tensor `{tensor}`: expected the name of a shard, got {}", shard.get())))?;
            let mut parts = Path::new(&shard).components();
            match (parts.next(), parts.next()) {
                (Some(std::path::Component::Normal(only)), None) if only == shard.as_str() && !shard.contains('\\') => {
                    Ok((tensor, shard))
                }
                _ => Err(fail(format!(
                    "tensor `{tensor}`: expected a shard in the same folder, got the path \"{}\"",
                    shard.escape_debug()
                ))),
            }
        })
        .collect()
}
