//! The safetensors files of a folder: which they are, and all their tensors.

use super::header;
use crate::checkpoint::{Checkpoint, MappedFile, Place, Tensor};
use crate::error::{Error, Result};
use crate::finding::Finding;
use crate::json::read_small;
use crate::mapping::Mapping;
use std::path::{Path, PathBuf};

/// Adds the tensors of a folder: of `model.safetensors`; or of an index's shards; or of the only `*.safetensors` in it.
/// False: there is none of these.
pub(crate) fn open_folder(path: &Path, checkpoint: &mut Checkpoint) -> Result<bool> {
    let single = path.join("model.safetensors");
    let index = path.join("model.safetensors.index.json");
    if single.is_file() {
        add_file(&single, checkpoint)?;
        let said = "lies beside model.safetensors; the single file was read and the index was not";
        match index.is_file() {
            true => checkpoint.add_finding(Finding::new("model.safetensors.index.json", said)),
            // Parts of a model are called so; others may be of anything.
            false => tell_others(path, "model", "lies beside model.safetensors, which was read alone", checkpoint)?,
        }
        return Ok(true);
    }
    if index.is_file() {
        return add_shards(path, &index, checkpoint).map(|()| true);
    }
    match (names(path, ".safetensors.index.json")?.as_slice(), names(path, ".safetensors")?.as_slice()) {
        ([index], _) => add_shards(path, index, checkpoint).map(|()| true),
        ([], [single]) => add_file(single, checkpoint).map(|()| true),
        ([], []) => Ok(false),
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

/// The files of a folder whose names end so, in the order of their names.
fn names(path: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io("list", path))? {
        let file = entry.map_err(Error::io("list", path))?.path();
        if file.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.ends_with(ending)) && file.is_file() {
            found.push(file);
        }
    }
    found.sort();
    Ok(found)
}

/// Adds the tensors of an index's shards.
fn add_shards(path: &Path, index: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    add_index(path, index, checkpoint, add_file)?;
    let name = index.file_name().unwrap_or_default().to_string_lossy();
    tell_others(path, "", &format!("lies beside {name}, which does not name it; it was not read"), checkpoint)
}

/// Safetensors files of the folder that begin so and were not read: a finding each, as some models come with all tensors twice.
fn tell_others(path: &Path, begin: &str, what: &str, checkpoint: &mut Checkpoint) -> Result<()> {
    let others = names(path, ".safetensors")?;
    let others = others.iter().filter(|file| !checkpoint.files().any(|read| read == *file));
    let names = others.map(|path| path.file_name().unwrap_or_default().to_string_lossy());
    let findings = names.filter(|name| name.starts_with(begin)).map(|name| Finding::new(&*name, what));
    findings.collect::<Vec<_>>().into_iter().for_each(|finding| checkpoint.add_finding(finding));
    Ok(())
}

/// Adds the tensors of one file.
pub(crate) fn add_file(path: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    let map = Mapping::open(path)?;
    let entries = header::parse(map.bytes(), path)?;
    let file = checkpoint.add_file(MappedFile { path: path.to_owned(), map });
    for header::Entry { name, dtype, shape, range } in entries {
        checkpoint.add_tensor(Tensor { name, dtype, shape, file, place: Place::Range(range) })?;
    }
    Ok(())
}

/// Adds the tensors of an index's shards, each by `add_file`. Errors: those of `add_file`; shards outside the folder or not
/// there; tensors that are not where the index says.
pub(crate) fn add_index(
    path: &Path,
    index: &Path,
    checkpoint: &mut Checkpoint,
    add_file: impl Fn(&Path, &mut Checkpoint) -> Result<()>,
) -> Result<()> {
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
    for name in &names {
        add_file(&path.join(name), checkpoint)?;
    }
    for (tensor, shard) in &weight_map {
        let file = path.join(shard);
        match checkpoint.get(tensor) {
            Some(info) if info.file == file => {}
            Some(info) => {
                let other = info.file.display();
                let what = format!("tensor `{tensor}`: the index says {shard}, but it lies in {other}");
                return Err(Error::malformed(index, what));
            }
            None => {
                let what =
                    format!("tensor `{tensor}` is not in this shard, where the index {} says it is", index.display());
                return Err(Error::missing(&file, what));
            }
        }
    }
    let named: std::collections::HashSet<&str> = weight_map.iter().map(|(tensor, _)| tensor.as_str()).collect();
    let unnamed: Vec<Finding> = checkpoint
        .tensors()
        .filter(|info| !named.contains(info.name))
        .map(|info| {
            let text = format!("is in {} but not in the index; it was taken all the same", info.file.display());
            Finding::new(info.name, text)
        })
        .collect();
    unnamed.into_iter().for_each(|finding| checkpoint.add_finding(finding));
    Ok(())
}
