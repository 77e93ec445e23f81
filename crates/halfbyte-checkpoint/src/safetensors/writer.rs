//! Laying out safetensors files: shards, headers, an index.

use super::dtype::DType;
use crate::error::{Error, Result};
use crate::writer::Writer;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
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

const OP: &str = "write safetensors";

/// Begins `model.safetensors`, or shards with an index, as Hugging Face names them.
///
/// A shard is filled in the declared order until the next tensor would pass `max_shard_bytes`; a tensor larger than that
/// has a shard of its own. Within a shard, types with larger elements come first, so that every tensor is aligned.
/// Errors: a name declared twice or empty, a shape that overflows, a file that exists already, the system's refusal.
pub fn create(dir: impl AsRef<Path>, tensors: &[TensorSpec], max_shard_bytes: u64) -> Result<Writer> {
    let dir = dir.as_ref();
    let mut seen = HashSet::new();
    let mut shards: Vec<Vec<(&TensorSpec, usize)>> = vec![Vec::new()];
    let (mut in_shard, mut total) = (0u64, 0u64);
    for tensor in tensors {
        if tensor.name.is_empty() || tensor.name == "__metadata__" || !seen.insert(&tensor.name) {
            let expected = "tensor names once each, not empty, not `__metadata__`";
            return Err(Error::invalid(OP, expected, format!("`{}`", tensor.name)));
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
    let mut writer = Writer::new(OP);
    if shards.len() > 1 {
        let shard_of = shards.iter().enumerate().flat_map(|(i, shard)| shard.iter().map(move |(t, _)| (t, i)));
        let map: Map<String, Value> = shard_of.map(|(t, i)| (t.name.clone(), Value::String(name_of(i)))).collect();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        writer.end_with(dir.join("model.safetensors.index.json"), pretty(&index))?;
    }
    for (i, mut tensors) in shards.iter().cloned().enumerate() {
        tensors.sort_by_key(|(t, _)| std::cmp::Reverse(t.dtype.size_bits()));
        add_shard(&mut writer, dir.join(name_of(i)), &tensors)?;
    }
    Ok(writer)
}

fn add_shard(writer: &mut Writer, path: PathBuf, tensors: &[(&TensorSpec, usize)]) -> Result<()> {
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
    let mut json = Value::Object(header).to_string().into_bytes();
    // The data must begin at a multiple of 8, so that aligned offsets are aligned addresses.
    json.resize(json.len().next_multiple_of(8), b' ');
    let header = [&(json.len() as u64).to_le_bytes(), json.as_slice()].concat();
    let mut at = header.len() as u64;
    writer.add_file(path, &header, at + offset)?;
    for &(tensor, bytes) in tensors {
        writer.declare(tensor.name.clone(), at, bytes)?;
        at += bytes as u64;
    }
    Ok(())
}

/// JSON as Hugging Face's tools write it: indented by two, with a newline at the end.
pub(crate) fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
