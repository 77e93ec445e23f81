//! The state dict in a pickle, and each of its tensors held against its storage.

use super::heap::{Heap, Id, Storage, Tensor, Value};
use super::pickle::Pickle;
use super::shown;
use crate::checkpoint::Place;
use crate::safetensors::DType;
use std::collections::HashSet;
use std::ops::Range;

/// Levels of dicts within dicts that are searched.
const LEVELS: usize = 4;

/// Dimensions that a tensor may have.
const MAX_DIMENSIONS: usize = 16;

/// Tensors that a file may have.
const MAX_TENSORS: usize = 1 << 16;

/// Names that an error or a finding lists.
const LISTED: usize = 6;

type Parse<T> = Result<T, String>;

/// The one dict of tensors.
#[derive(Debug)]
pub(super) struct State<'a> {
    /// The keys that lead to it; empty: it is all that the pickle holds.
    pub path: String,
    /// Its tensors, in its order.
    pub tensors: Vec<(&'a str, Tensor)>,
    /// What is in it besides, and beside it, with what it is; None: nothing.
    pub others: Option<String>,
}

/// A dict on the way.
struct Level {
    dict: Id,
    /// The level above, and the key there.
    above: Option<(usize, Id)>,
    depth: usize,
}

/// Finds the dict that has tensors as values. Errors: there is none, or there are several; two values of one name.
pub(super) fn find<'a>(pickle: &Pickle<'a>) -> Parse<State<'a>> {
    let heap = &pickle.heap;
    let mut seen = vec![false; heap.len()];
    seen[Heap::index(pickle.root)] = true;
    let mut levels = vec![Level { dict: pickle.root, above: None, depth: 0 }];
    let mut found = Vec::new();
    let mut at = 0;
    while let Some(&Level { dict, depth, .. }) = levels.get(at) {
        let pairs = pairs(heap, dict);
        if pairs.iter().any(|&(key, value)| heap.text(key).is_some() && is_tensor(heap, value)) {
            found.push(at);
        }
        for &(key, value) in pairs.iter().filter(|_| depth < LEVELS) {
            let is_dict = matches!(heap.get(value), Value::Dict(_));
            if is_dict && !std::mem::replace(&mut seen[Heap::index(value)], true) {
                levels.push(Level { dict: value, above: Some((at, key)), depth: depth + 1 });
            }
        }
        at += 1;
    }
    match found.as_slice() {
        [only] => state(heap, &levels, *only, pickle.root),
        [] => match heap.get(pickle.root) {
            Value::Dict(pairs) => {
                let with = listed(others(heap, pairs)).unwrap_or_else(|| "no entries".into());
                Err(format!("expected a dict of tensors, got one with {with}"))
            }
            other => Err(format!("expected a dict of tensors, got {}", other.kind())),
        },
        several => {
            let paths = several.iter().map(|&at| match path(heap, &levels, at) {
                root if root.is_empty() => "all of it".to_owned(),
                path => format!("`{path}`"),
            });
            let (count, paths) = (several.len(), listed(paths).unwrap_or_default());
            Err(format!("expected one dict of tensors, found {count}: {paths}; save the one that is meant"))
        }
    }
}

fn is_tensor(heap: &Heap<'_>, value: Id) -> bool {
    matches!(heap.get(value), Value::Tensor(_))
}

/// The keys and values of a dict; of any other value none.
fn pairs<'h>(heap: &'h Heap<'_>, dict: Id) -> &'h [(Id, Id)] {
    match heap.get(dict) {
        Value::Dict(pairs) => pairs,
        _ => &[],
    }
}

fn state<'a>(heap: &Heap<'a>, levels: &[Level], at: usize, root: Id) -> Parse<State<'a>> {
    let dict = levels[at].dict;
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for &(key, value) in pairs(heap, dict) {
        let (Some(name), Value::Tensor(tensor)) = (heap.text(key), heap.get(value)) else { continue };
        if !names.insert(name) {
            return Err(format!("tensor `{}` appears twice", shown(name)));
        }
        if tensors.len() == MAX_TENSORS {
            return Err(format!("it has more than {MAX_TENSORS} tensors"));
        }
        tensors.push((name, *tensor));
    }
    // The root's entry that is the dict, or leads to it.
    let mut way = at;
    while let Some((above, _)) = levels[way].above.filter(|&(above, _)| above != 0) {
        way = above;
    }
    let beside = pairs(heap, root).iter().filter(|&&(_, value)| dict != root && value != levels[way].dict);
    let others = listed(others(heap, pairs(heap, dict)).chain(others(heap, beside)));
    Ok(State { path: path(heap, levels, at), tensors, others })
}

/// Entries of a dict that are no tensors with a name, each with what it is.
fn others<'h>(heap: &'h Heap<'_>, pairs: impl IntoIterator<Item = &'h (Id, Id)>) -> impl Iterator<Item = String> {
    let others = pairs.into_iter().filter(|&&(key, value)| heap.text(key).is_none() || !is_tensor(heap, value));
    others.map(|&(key, value)| {
        let kind = heap.get(value).kind();
        match heap.text(key) {
            Some(key) => format!("`{}` ({kind})", shown(key)),
            None => format!("{kind} under {}", heap.get(key).kind()),
        }
    })
}

/// The first of some names, and how many more there are; None: there are none.
fn listed(mut names: impl Iterator<Item = String>) -> Option<String> {
    let first: Vec<String> = names.by_ref().take(LISTED).collect();
    match names.count() {
        0 if first.is_empty() => None,
        0 => Some(first.join(", ")),
        more => Some(format!("{} and {more} more", first.join(", "))),
    }
}

/// The keys that lead to a level, joined by dots.
fn path(heap: &Heap<'_>, levels: &[Level], mut at: usize) -> String {
    let mut keys = Vec::new();
    while let Some((above, key)) = levels[at].above {
        keys.push(match heap.get(key) {
            Value::Text(text) => shown(text),
            Value::Int(int) => int.to_string(),
            other => format!("({})", other.kind()),
        });
        at = above;
    }
    keys.reverse();
    keys.join(".")
}

/// Bytes of a storage; None: more than there are addresses.
pub(super) fn storage_bytes(storage: &Storage<'_>) -> Option<usize> {
    let elements = usize::try_from(storage.elements).ok()?;
    storage.dtype.unwrap_or(DType::U8).bytes_of(&[elements])
}

/// Type, shape and place of a tensor, whose storage lies in `range` of the file.
///
/// Errors: a shape or strides that are none; elements beyond the storage; elements that several indices share.
pub(super) fn resolve(heap: &Heap<'_>, tensor: &Tensor, range: &Range<usize>) -> Parse<(DType, Vec<usize>, Place)> {
    let Value::Storage(storage) = heap.get(tensor.storage) else {
        return Err("expected a storage".into());
    };
    let Some(dtype) = tensor.dtype.or(storage.dtype) else {
        return Err("its storage has no type of elements, and nor has it".into());
    };
    let (shape, strides) = (sizes(heap, tensor.size, "shape")?, sizes(heap, tensor.stride, "strides")?);
    if shape.len() != strides.len() {
        return Err(format!("expected as many strides as dimensions, got {strides:?} for shape {shape:?}"));
    }
    let offset = match heap.int(tensor.offset).map(usize::try_from) {
        Some(Ok(offset)) => offset,
        _ => return Err("expected an offset into its storage that is not negative".into()),
    };
    let bytes = dtype.bytes_of(&shape).ok_or_else(|| format!("shape {shape:?} of {dtype} overflows"))?;
    let element = dtype.size_bits().unwrap_or(8) / 8;
    let there = range.len() / element;
    let empty = shape.contains(&0);
    // Elements from the first to the last, both counted.
    let extent = shape
        .iter()
        .zip(&strides)
        .try_fold(1usize, |extent, (&d, &stride)| extent.checked_add(d.saturating_sub(1).checked_mul(stride)?))
        .map(|extent| if empty { 0 } else { extent });
    let end = extent.and_then(|extent| offset.checked_add(extent)).filter(|&end| end <= there);
    let Some(end) = end else {
        return Err(format!(
            "shape {shape:?} with strides {strides:?} from element {offset} on reaches beyond its storage of {there} elements"
        ));
    };
    let place = range.start + offset * element..range.start + end * element;
    if empty || is_contiguous(&shape, &strides) {
        return Ok((dtype, shape, Place::Range(place)));
    }
    if shares_elements(&shape, &strides) {
        return Err(format!(
            "shape {shape:?} with strides {strides:?} has elements that share memory; save a clone of it"
        ));
    }
    Ok((dtype, shape, Place::Strided { range: place, strides, bytes }))
}

fn sizes(heap: &Heap<'_>, id: Id, what: &str) -> Parse<Vec<usize>> {
    let Some(items) = heap.items(id).filter(|items| items.len() <= MAX_DIMENSIONS) else {
        return Err(format!("expected its {what} as at most {MAX_DIMENSIONS} integers"));
    };
    let size = |&item: &Id| heap.int(item).and_then(|int| usize::try_from(int).ok());
    items.iter().map(size).collect::<Option<_>>().ok_or_else(|| format!("expected {what} that are not negative"))
}

/// Whether elements lie one behind the other, row-major. Where a dimension is 1 its stride says nothing.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&d, &stride)| {
        let fits = d == 1 || stride == expected;
        expected *= d;
        fits
    })
}

/// Whether two indices may have one element: a dimension's stride does not pass what smaller strides reach.
fn shares_elements(shape: &[usize], strides: &[usize]) -> bool {
    let mut steps: Vec<(usize, usize)> =
        shape.iter().zip(strides).filter(|&(&d, _)| d > 1).map(|(&d, &stride)| (stride, d)).collect();
    steps.sort_unstable();
    let mut reached = 0;
    steps.iter().any(|&(stride, d)| {
        let shares = stride <= reached;
        reached += (d - 1) * stride;
        shares
    })
}
