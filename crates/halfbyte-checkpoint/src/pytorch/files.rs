//! Opening PyTorch's files as a checkpoint.

use super::heap::{Heap, Storage, Value};
use super::{Refusal, legacy, pickle, shown, state, zip};
use crate::checkpoint::{Checkpoint, MappedFile, Tensor};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::mapping::Mapping;
use crate::safetensors;
use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Names of the files of a model, whole and in shards.
const SINGLE: &str = "pytorch_model.bin";
const INDEX: &str = "pytorch_model.bin.index.json";

/// Endings that such files have.
const ENDINGS: &[&str] = &["bin", "pt", "pth"];

/// What training leaves beside a model, in the same form.
const OF_TRAINING: &[&str] = &["training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"];

/// Whether a file is one of PyTorch's, by its first bytes: a zip archive or a pickle.
pub(crate) fn is_pytorch(file: &[u8]) -> bool {
    zip::is_zip(file) || legacy::is_pickle(file)
}

/// Adds the tensors of a folder: of `pytorch_model.bin`, or of its index's shards. False: there is neither.
pub(crate) fn open_folder(path: &Path, checkpoint: &mut Checkpoint) -> Result<bool> {
    let (single, index) = (path.join(SINGLE), path.join(INDEX));
    if single.is_file() {
        add_file(&single, checkpoint)?;
        if index.is_file() {
            let text = format!("lies beside {SINGLE}; the single file was read and the index was not");
            checkpoint.add_finding(Finding::new(INDEX, text));
        }
        return Ok(true);
    }
    if index.is_file() {
        return safetensors::files::add_index(path, &index, checkpoint, add_file).map(|()| true);
    }
    Ok(false)
}

/// The only file of a folder that is PyTorch's by name and content, apart from what training leaves. Errors: there are
/// several; the folder or a file cannot be read.
pub(crate) fn only_file(folder: &Path) -> Result<Option<PathBuf>> {
    let mut found: Option<PathBuf> = None;
    for entry in std::fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let path = entry.map_err(Error::io("list", folder))?.path();
        let named = path.extension().is_some_and(|e| ENDINGS.iter().any(|ending| e.eq_ignore_ascii_case(ending)))
            && !OF_TRAINING.iter().any(|name| path.ends_with(name));
        if !(named && path.is_file() && is_pytorch(Mapping::open(&path)?.bytes())) {
            continue;
        }
        if let Some(other) = found.replace(path) {
            let what = format!(
                "expected one file of PyTorch's, found {} and others; name the one that is meant",
                other.display()
            );
            return Err(Error::missing(folder, what));
        }
    }
    Ok(found)
}

/// Adds the tensors of one file. What is in it besides tensors is a finding.
///
/// Errors: neither a zip archive nor a pickle; a pickle that asks for anything but tensors and containers; no dict of
/// tensors, or several; storages or tensors that do not fit the file.
pub(crate) fn add_file(path: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    let map = Mapping::open(path)?;
    let file = checkpoint.next_file();
    let (tensors, finding) = parse(map.bytes(), path, file).map_err(|refusal| refusal.into_error(path))?;
    checkpoint.add_file(MappedFile { path: path.to_owned(), map });
    finding.into_iter().for_each(|finding| checkpoint.add_finding(finding));
    tensors.into_iter().try_for_each(|tensor| checkpoint.add_tensor(tensor))
}

/// The tensors of a file that will have this number.
fn parse(bytes: &[u8], path: &Path, file: usize) -> std::result::Result<(Vec<Tensor>, Option<Finding>), Refusal> {
    let (pickle, storages) = if zip::is_zip(bytes) {
        let entries = zip::entries(bytes)?;
        let name = the_pickle(&entries)?;
        let range = entries[name].clone();
        let pickle = pickle::unpickle(&bytes[range.clone()])?;
        if pickle.bytes != range.len() {
            return Err(format!("{} bytes follow the pickle in `{}`", range.len() - pickle.bytes, shown(name)).into());
        }
        let folder = name.strip_suffix(PICKLE).unwrap_or_default();
        if let Some(order) = entries.get(format!("{folder}/byteorder").as_str()).map(|range| &bytes[range.clone()])
            && order != b"little"
        {
            return Err("expected numbers of little-endian systems, got those of a big-endian one".to_owned().into());
        }
        let place = move |key: &str| entries.get(format!("{folder}/data/{key}").as_str()).cloned();
        (pickle, Box::new(place) as Box<dyn Fn(&str) -> Option<Range<usize>>>)
    } else if legacy::is_pickle(bytes) {
        let legacy::Legacy { pickle, storages } = legacy::parse(bytes)?;
        (pickle, Box::new(move |key: &str| storages.get(key).cloned()) as Box<_>)
    } else {
        return Err("expected a file of PyTorch's: a zip archive or a pickle".to_owned().into());
    };
    let state = state::find(&pickle)?;
    let tensors = state.tensors.iter().map(|(name, tensor)| {
        let fail = |what: String| format!("tensor `{}`: {what}", shown(name));
        let range = storage(&pickle.heap, tensor.storage, &storages).map_err(fail)?;
        let (dtype, shape, place) = state::resolve(&pickle.heap, tensor, &range).map_err(fail)?;
        Ok(Tensor { name: (*name).to_owned(), dtype, shape, file, place })
    });
    let tensors = tensors.collect::<std::result::Result<_, String>>()?;
    let within = (!state.path.is_empty()).then(|| format!("the tensors are those under `{}`", state.path));
    let left_out = state.others.map(|others| format!("what is no tensor was left out: {others}"));
    let text: Vec<String> = within.into_iter().chain(left_out).collect();
    let subject = path.file_name().unwrap_or_default().to_string_lossy();
    Ok((tensors, (!text.is_empty()).then(|| Finding::new(subject, text.join("; ")))))
}

/// The name of an archive's pickle, below the archive's own name.
const PICKLE: &str = "/data.pkl";

/// The entry that holds the state dict. Errors: there is none, or there are several; a program of TorchScript.
fn the_pickle<'a>(entries: &HashMap<&'a str, Range<usize>>) -> std::result::Result<&'a str, String> {
    let is_pickle =
        |name: &&&str| name.strip_suffix(PICKLE).is_some_and(|folder| !folder.is_empty() && !folder.contains('/'));
    let mut pickles = entries.keys().filter(is_pickle);
    match (pickles.next(), pickles.next()) {
        (Some(name), None) if entries.contains_key(name.replace(PICKLE, "/constants.pkl").as_str()) => {
            Err("it is a program of TorchScript, not a state dict".into())
        }
        (Some(name), None) => Ok(name),
        (None, _) => Err("it is a zip archive without a data.pkl, so it is none of PyTorch's".into()),
        (Some(_), Some(_)) => Err("it is a zip archive with several data.pkl".into()),
    }
}

/// The place of a storage. Errors: it is not in the file; it has another length there than its type and elements take.
fn storage(
    heap: &Heap<'_>,
    id: super::heap::Id,
    place: &dyn Fn(&str) -> Option<Range<usize>>,
) -> std::result::Result<Range<usize>, String> {
    let Value::Storage(storage) = heap.get(id) else { return Err("it has no storage".into()) };
    let Storage { key, elements, .. } = *storage;
    let range = place(key).ok_or_else(|| format!("its storage `{}` is not in the file", shown(key)))?;
    match state::storage_bytes(storage) {
        Some(bytes) if bytes == range.len() => Ok(range),
        _ => {
            let (key, bytes) = (shown(key), range.len());
            Err(format!("its storage `{key}` should have {elements} elements, but the file has {bytes} bytes for it"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::parse;
    use crate::checkpoint::Place;
    use std::path::Path;

    #[test]
    fn damaged_files_are_refused_or_read_within_their_bytes() {
        let files: [&[u8]; 4] = [
            include_bytes!("../../testdata/pytorch/module.pt"),
            include_bytes!("../../testdata/pytorch/module_legacy.pt"),
            include_bytes!("../../testdata/pytorch/module_wrapped_protocol4.pt"),
            include_bytes!("../../testdata/pytorch/views.pt"),
        ];
        let path = Path::new("damaged.pt");
        for whole in files {
            assert!(parse(whole, path, 0).is_ok());
            for at in 0..whole.len() {
                assert!(parse(&whole[..at], path, 0).is_err(), "cut off at {at}");
                let mut damaged = whole.to_vec();
                for value in [0, 0xff, whole[at] ^ 1, whole[at] ^ 0x80, b'.', b'R', b'(', b'h'] {
                    damaged[at] = value;
                    let Ok((tensors, _)) = parse(&damaged, path, 0) else { continue };
                    for tensor in tensors {
                        let (Place::Range(range) | Place::Strided { range, .. }) = tensor.place else { panic!() };
                        assert!(range.end <= whole.len());
                    }
                }
            }
        }
    }
}
