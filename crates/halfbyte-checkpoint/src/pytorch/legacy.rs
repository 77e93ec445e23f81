//! Files as PyTorch saved them before 1.6: five pickles, then the storages.

use super::heap::{Heap, Value};
use super::pickle::{Pickle, unpickle};
use super::{Refusal, shown, state};
use std::collections::HashMap;
use std::ops::Range;

/// What the first two pickles hold.
const MAGIC: i128 = 0x1950_a86a_20f9_469c_fc6c;
const PROTOCOL: i128 = 1001;

type Parse<T> = Result<T, String>;

/// Whether a file begins with a pickle. Such bytes could also be the length of a safetensors header, but of one that no
/// reader takes.
pub(super) fn is_pickle(file: &[u8]) -> bool {
    let begins = matches!(file, [0x80, 2..=5, ..]);
    let length = file.first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
    begins && length.is_none_or(|length| length > crate::safetensors::MAX_HEADER_BYTES)
}

/// A file of this form.
pub(super) struct Legacy<'a> {
    /// The state dict.
    pub pickle: Pickle<'a>,
    /// The place of each storage.
    pub storages: HashMap<&'a str, Range<usize>>,
}

/// Reads a file's pickles and finds its storages. Errors: those of [`unpickle`]; other pickles than the five; storages that
/// are not those of the state dict, or not there.
pub(super) fn parse(file: &[u8]) -> Result<Legacy<'_>, Refusal> {
    let mut at = 0;
    let mut next = |what: &str| -> Result<Pickle<'_>, Refusal> {
        let pickle = unpickle(&file[at..]).map_err(|refusal| refusal.of(what))?;
        at += pickle.bytes;
        Ok(pickle)
    };
    let magic = next("the magic number")?;
    match magic.heap.get(magic.root) {
        Value::Int(MAGIC) => {}
        other => {
            return Err(format!(
                "expected PyTorch's magic number 0x{MAGIC:x} first, got {}; is it a pickle of another program?",
                match other {
                    Value::Int(int) => format!("0x{int:x}"),
                    other => other.kind().to_owned(),
                }
            )
            .into());
        }
    }
    let protocol = next("the protocol's version")?;
    if protocol.heap.int(protocol.root) != Some(PROTOCOL) {
        return Err(format!("expected version {PROTOCOL} of PyTorch's protocol, got another").into());
    }
    let system = next("the sizes of the system")?;
    if !is_little_endian(&system) {
        return Err("expected numbers of little-endian systems, got those of a big-endian one".to_owned().into());
    }
    let pickle = next("the state dict")?;
    let keys = next("the keys of its storages")?;
    let storages = storages(file, at, &pickle.heap, &keys)?;
    Ok(Legacy { pickle, storages })
}

fn is_little_endian(system: &Pickle<'_>) -> bool {
    let Value::Dict(pairs) = system.heap.get(system.root) else { return false };
    let said = pairs.iter().find(|&&(key, _)| system.heap.text(key) == Some("little_endian"));
    said.is_some_and(|&(_, value)| matches!(system.heap.get(value), Value::Bool(true)))
}

/// The storages that lie one behind the other from `at` on, in the order of their keys.
fn storages<'a>(
    file: &'a [u8],
    mut at: usize,
    heap: &Heap<'a>,
    keys: &Pickle<'a>,
) -> Parse<HashMap<&'a str, Range<usize>>> {
    let mut declared = HashMap::new();
    for value in heap.values() {
        if let Value::Storage(storage) = value
            && let Some(other) = declared.insert(storage.key, *storage)
            && other != *storage
        {
            return Err(format!("storage `{}` has two types or sizes", shown(storage.key)));
        }
    }
    let Some(keys_of) = keys.heap.items(keys.root) else {
        return Err(format!("expected a list of the storages' keys, got {}", keys.heap.get(keys.root).kind()));
    };
    let mut places = HashMap::new();
    for &key in keys_of {
        let Some(key) = keys.heap.text(key) else {
            return Err(format!("expected texts as the storages' keys, got {}", keys.heap.get(key).kind()));
        };
        let Some(storage) = declared.get(key) else {
            return Err(format!("storage `{}` belongs to no tensor", shown(key)));
        };
        let fail = |what: String| Err(format!("storage `{}`: {what}", shown(key)));
        let Some((elements, data)) = file[at..].split_first_chunk::<8>() else {
            return fail("it lies beyond the end of the file".into());
        };
        let elements = u64::from_le_bytes(*elements);
        if elements != storage.elements {
            return fail(format!("the state dict says {} elements, the storage says {elements}", storage.elements));
        }
        let bytes = state::storage_bytes(storage).filter(|&bytes| bytes <= data.len());
        let Some(bytes) = bytes else {
            return fail(format!("its {elements} elements reach beyond the file, which has {} bytes more", data.len()));
        };
        let start = at + 8;
        at = start + bytes;
        if places.insert(key, start..at).is_some() {
            return fail("there are two of this key".into());
        }
    }
    match file.len() - at {
        0 => Ok(places),
        more => Err(format!("expected the file to end with its last storage, got {more} bytes more")),
    }
}
