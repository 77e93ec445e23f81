//! Laying out a GGUF file.

use super::header::{DEFAULT_ALIGNMENT, MAGIC};
use super::types::GgmlType;
use super::value::{Value, write_string};
use crate::error::{Error, Result};
use crate::writer::Writer;
use std::collections::HashSet;
use std::path::Path;

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

/// Begins a GGUF file: metadata and tensors in the order given, data at multiples of 32 bytes.
///
/// Errors: a key or a name that is empty or given twice, a `general.alignment` other than 32, a name too long for ggml, a
/// shape of more than 4 dimensions or with one of 0, that overflows or whose rows are no whole blocks, a file that
/// exists already, the system's refusal.
pub fn create(path: impl AsRef<Path>, metadata: &[(String, Value)], tensors: &[TensorSpec]) -> Result<Writer> {
    let mut header = MAGIC.to_vec();
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
    let (mut places, mut end) = (Vec::with_capacity(tensors.len()), 0u64);
    for tensor in tensors {
        let bytes = declare(tensor, end, &mut header)?;
        places.push((end, bytes));
        let next = end.checked_add(bytes as u64).and_then(|e| e.checked_next_multiple_of(DEFAULT_ALIGNMENT as u64));
        end = next.ok_or_else(|| Error::invalid(OP, "tensors that fit a file", format!("`{}`", tensor.name)))?;
    }
    header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT), 0);
    let start = header.len() as u64;
    let mut writer = Writer::new(OP);
    writer.add_file(path.as_ref().to_owned(), &header, start + end)?;
    for (tensor, (offset, bytes)) in tensors.iter().zip(places) {
        writer.declare(tensor.name.clone(), start + offset, bytes)?;
    }
    Ok(writer)
}

/// Appends a tensor's declaration; gives its bytes.
fn declare(tensor: &TensorSpec, offset: u64, header: &mut Vec<u8>) -> Result<usize> {
    let TensorSpec { name, ggml_type, shape } = tensor;
    if name.is_empty() || name.len() >= NAME_BYTES {
        return Err(Error::invalid(OP, format!("tensor names of 1 to {} bytes", NAME_BYTES - 1), format!("`{name}`")));
    }
    let bytes = ggml_type.bytes_of(shape).filter(|_| shape.len() <= 4 && !shape.contains(&0)).ok_or_else(|| {
        let block = ggml_type.block_len();
        let expected = format!("up to 4 dimensions above 0 that fit memory, rows of whole blocks of {block}");
        Error::invalid(OP, expected, format!("`{name}` of {ggml_type} {shape:?}"))
    })?;
    write_string(name, header);
    header.extend((shape.len() as u32).to_le_bytes());
    shape.iter().rev().for_each(|&d| header.extend((d as u64).to_le_bytes()));
    header.extend(ggml_type.id().to_le_bytes());
    header.extend(offset.to_le_bytes());
    Ok(bytes)
}
