//! Opening a GGUF file as a checkpoint, in Hugging Face's terms where there are such.

use super::architectures::Architecture;
use super::{config_json, has_paired_rows, hf_name, parse};
use crate::checkpoint::{Checkpoint, Container, MappedFile, Place, Tensor};
use crate::error::{Error, Result};
use crate::mapping::Mapping;
use std::path::{Path, PathBuf};

/// What a config holds instead of a tensor.
const IN_THE_CONFIG: &str = "rope_freqs.weight";

/// The files of a folder that go by the name, `*.gguf`. Error: the folder cannot be listed.
pub(crate) fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries: Vec<_> = std::fs::read_dir(folder).and_then(Iterator::collect).map_err(Error::io("list", folder))?;
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && path.is_file();
    Ok(entries.into_iter().map(|entry| entry.path()).filter(is_gguf).collect())
}

/// Adds the tensors of a file. Those of a model that can be translated have the names and the order of rows of Hugging Face's files;
/// those of other architectures, and such as have no name there, keep theirs.
///
/// Errors: those of [`parse`] and, for such a model, of [`config_json`].
pub(crate) fn open_file(path: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    let map = Mapping::open(path)?;
    let header = parse(map.bytes(), path)?;
    let translated = match Architecture::of_file(&header)? {
        None => None,
        Some(known) => {
            let head_dim = config_json(&header, map.bytes())?.get("head_dim").and_then(|d| d.as_u64());
            Some(head_dim.filter(|_| known.paired_rows).map(|head_dim| head_dim as usize))
        }
    };
    let file = checkpoint.add_file(MappedFile { path: path.to_owned(), map });
    for entry in &header.tensors {
        let (mut name, mut place) = (entry.name.clone(), Place::Range(entry.range.clone()));
        if let Some(paired) = translated {
            if name == IN_THE_CONFIG {
                continue;
            }
            if let Some(head_dim) = paired.filter(|_| has_paired_rows(&name)) {
                if !entry.shape[0].is_multiple_of(head_dim) {
                    let what = format!("tensor `{name}`: expected heads of {head_dim} rows, got {}", entry.shape[0]);
                    return Err(Error::malformed(path, what));
                }
                place = Place::PairedRows(entry.range.clone(), head_dim);
            }
            name = hf_name(&name).unwrap_or(name);
        }
        let tensor = Tensor { name, dtype: entry.ggml_type.into(), shape: entry.shape.clone(), file, place };
        checkpoint.add_tensor(tensor)?;
    }
    checkpoint.set_container(Container::Gguf(header));
    Ok(())
}
