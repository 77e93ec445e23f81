//! Opening GGUF files as a checkpoint, in Hugging Face's terms where there are such.

use super::architectures::{Architecture, Rows};
use super::header::{Header, TensorEntry};
use super::names::{RowOrder, has_fused_rows};
use super::scaling::{FACTORS, LONG_FACTORS, SHORT_FACTORS};
use super::types::GgmlType;
use super::{config_json, has_paired_rows, parse};
use crate::checkpoint::{Checkpoint, Container, MappedFile, Place, Tensor};
use crate::error::{Error, Result};
use crate::mapping::Mapping;
use crate::safetensors::cast;
use std::path::{Path, PathBuf};

/// What a config holds instead of tensors.
const IN_THE_CONFIG: [&str; 3] = [FACTORS, LONG_FACTORS, SHORT_FACTORS];

/// Experts that a layer may have.
const MOST_EXPERTS: usize = 1 << 12;

/// Files that a model may lie in.
const MOST_PARTS: u64 = 1 << 10;

/// The files of a folder that go by the name, `*.gguf`; of a model in several parts the first. Error: the folder cannot be listed.
pub(crate) fn in_folder(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries: Vec<_> = std::fs::read_dir(folder).and_then(Iterator::collect).map_err(Error::io("list", folder))?;
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && path.is_file();
    let is_later = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        name.is_some_and(|name| part_of(&name).is_some_and(|(_, number, _)| number > 1))
    };
    let files = entries.into_iter().map(|entry| entry.path()).filter(is_gguf);
    Ok(files.filter(|path| !is_later(path)).collect())
}

/// Of the name of a part, `NAME-00002-of-00003.gguf`: what comes before the numbers, and the numbers.
fn part_of(name: &str) -> Option<(&str, u64, u64)> {
    let (stem, ending) = name.rsplit_once('.')?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (before, number) = rest.rsplit_once('-')?;
    let of = |digits: &str| digits.parse().ok().filter(|_| digits.len() == 5 && !digits.starts_with('+'));
    ending.eq_ignore_ascii_case("gguf").then_some((before, of(number)?, of(count)?))
}

/// A file with its header.
fn read(path: &Path) -> Result<(Mapping, Header)> {
    let map = Mapping::open(path)?;
    let header = parse(map.bytes(), path)?;
    Ok((map, header))
}

/// Adds the tensors of a file, and of those beside it that are parts of the same model. Those of a model that can be translated have
/// the names and the order of rows of Hugging Face's files; those of other architectures, and such as have no name there, keep theirs.
///
/// Errors: those of [`parse`] and, for such a model, of [`config_json`]; a part that is not the first, parts that are missing or do not
/// belong together.
pub(crate) fn open_file(path: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    let (map, header) = read(path)?;
    let (mut all, others) = joined(path, header)?;
    let known = Architecture::of_file(&all)?;
    let translation = match known {
        None => None,
        Some(known) => {
            let config = config_json(&all, map.bytes())?;
            let number = |field: &str| config.get(field).and_then(serde_json::Value::as_u64).map(|n| n as usize);
            let (heads, head_dim) = (number("num_attention_heads"), number("head_dim"));
            Some(Translation { known, heads: heads.unwrap_or(1), head_dim: head_dim.unwrap_or(1) })
        }
    };
    if translation.is_some() {
        refuse_other_scales(path, &all)?;
    }
    let first = checkpoint.add_file(MappedFile { path: path.to_owned(), map });
    let entries = std::mem::take(&mut all.tensors);
    let mut of_others = Vec::new();
    for (path, map, entries) in others {
        of_others.push((checkpoint.add_file(MappedFile { path, map }), entries));
    }
    let of_first = entries.len() - of_others.iter().map(|(_, entries)| entries.len()).sum::<usize>();
    for (file, entries) in [(first, entries[..of_first].to_vec())].into_iter().chain(of_others) {
        for entry in &entries {
            add(entry, file, translation.as_ref(), checkpoint)?;
        }
    }
    all.tensors = entries;
    checkpoint.set_container(Container::Gguf(all));
    Ok(())
}

/// Scales of whole tensors are read beside NVFP4, which llama.cpp writes them for. Error: one beside another type, which would be left out.
fn refuse_other_scales(path: &Path, header: &Header) -> Result<()> {
    for TensorEntry { name, .. } in &header.tensors {
        let weight = name.strip_suffix(".scale").and_then(|module| header.tensor(&format!("{module}.weight")));
        if let Some(weight) = weight.filter(|weight| weight.ggml_type != GgmlType::NVFP4) {
            let what = format!("tensor `{name}`: a scale is read beside NVFP4, got one beside {}", weight.ggml_type);
            return Err(Error::unsupported(path, what));
        }
    }
    Ok(())
}

/// A part that is not the first: its path, its bytes, its tensors.
type Part = (PathBuf, Mapping, Vec<TensorEntry>);

/// The header of a whole model, with the tensors of all parts, and the other parts.
fn joined(path: &Path, mut header: Header) -> Result<(Header, Vec<Part>)> {
    let count = header.number("split.count")?.unwrap_or(1);
    if count <= 1 {
        return Ok((header, Vec::new()));
    }
    if count > MOST_PARTS {
        return Err(header.unexpected("split.count", &format!("at most {MOST_PARTS} parts")));
    }
    if header.number("split.no")?.is_some_and(|number| number != 0) {
        return Err(header.unexpected("split.no", "0: the first part, which is to be opened"));
    }
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let Some((before, 1, in_name)) = part_of(&name) else {
        let what = format!("expected a name that ends in -00001-of-{count:05}.gguf, as it has `split.count` {count}");
        return Err(Error::malformed(path, what));
    };
    if in_name != count {
        return Err(header.unexpected("split.count", &format!("{in_name}, as the file's name says")));
    }
    let mut parts = Vec::new();
    for number in 1..count {
        let path = path.with_file_name(format!("{before}-{:05}-of-{count:05}.gguf", number + 1));
        if !path.is_file() {
            return Err(Error::missing(&path, format!("it is part {} of {count} of {name}", number + 1)));
        }
        let (map, part) = read(&path)?;
        for (key, expected) in [("split.no", number), ("split.count", count)] {
            if part.number(key)? != Some(expected) {
                return Err(part.unexpected(key, &format!("{expected}, by the file's name")));
            }
        }
        // The bytes of the first file alone say what a config does.
        if let Some(name) = IN_THE_CONFIG.iter().find(|name| part.tensor(name).is_some()) {
            return Err(Error::unsupported(&path, format!("tensor `{name}`: expected in the first part")));
        }
        header.tensors.extend(part.tensors.iter().cloned());
        parts.push((path, map, part.tensors));
    }
    let said = header.number("split.tensors.count")?;
    if said.is_some_and(|said| said != header.tensors.len() as u64) {
        let expected = format!("{}, as many as all parts have", header.tensors.len());
        return Err(header.unexpected("split.tensors.count", &expected));
    }
    header.metadata.retain(|(key, _)| !key.starts_with("split."));
    Ok((header, parts))
}

/// How tensors come into Hugging Face's terms.
struct Translation {
    known: &'static Architecture,
    heads: usize,
    head_dim: usize,
}

impl Translation {
    /// The order of a tensor's rows in the file, where that is another.
    fn order(&self, name: &str) -> Option<RowOrder> {
        let Self { known, heads, head_dim } = *self;
        match known.rows {
            Rows::Paired if has_paired_rows(name) => Some(RowOrder::Paired(head_dim)),
            Rows::Fused if has_fused_rows(name) => Some(RowOrder::Fused { heads, head_dim }),
            _ => None,
        }
    }
}

fn add(entry: &TensorEntry, file: usize, by: Option<&Translation>, checkpoint: &mut Checkpoint) -> Result<()> {
    let TensorEntry { name, ggml_type, shape, range } = entry;
    let path = || checkpoint.path().to_owned();
    let mut tensor = Tensor {
        name: name.clone(),
        dtype: (*ggml_type).into(),
        shape: shape.clone(),
        file,
        place: Place::Range(range.clone()),
    };
    let Some(translation) = by else { return checkpoint.add_tensor(tensor) };
    let names = translation.known.names;
    if IN_THE_CONFIG.contains(&name.as_str()) {
        return Ok(());
    }
    if let Some([before, after]) = names.experts(name) {
        let dimensions = match after.rsplit('.').next() {
            Some("bias") => 2,
            Some("scale" | "input_scale") => 1,
            _ => 3,
        };
        let (&experts, of_one) = match shape.split_first() {
            Some(split) if shape.len() == dimensions => split,
            _ => {
                let what = format!("tensor `{name}`: expected {dimensions} dimensions, experts first, got {shape:?}");
                return Err(Error::malformed(&path(), what));
            }
        };
        if experts > MOST_EXPERTS {
            let what = format!("tensor `{name}`: expected at most {MOST_EXPERTS} experts, got {experts}");
            return Err(Error::malformed(&path(), what));
        }
        let of_expert = range.len() / experts;
        for expert in 0..experts {
            let start = range.start + expert * of_expert;
            checkpoint.add_tensor(Tensor {
                name: format!("{before}.{expert}.{after}"),
                dtype: (*ggml_type).into(),
                shape: of_one.to_vec(),
                file,
                place: Place::Range(start..start + of_expert),
            })?;
        }
        return Ok(());
    }
    if let Some(order) = translation.order(name) {
        if !shape.first().is_some_and(|rows| rows.is_multiple_of(order.unit())) {
            let what = format!("tensor `{name}`: expected heads of {} rows, got {shape:?}", order.unit());
            return Err(Error::malformed(&path(), what));
        }
        tensor.place = Place::Rows(range.clone(), order);
    }
    if names.norms_hold_1 && name.ends_with("norm.weight") {
        if *ggml_type != GgmlType::F32 {
            return Err(Error::unsupported(&path(), format!("tensor `{name}`: expected F32, got {ggml_type}")));
        }
        let held = cast::<f32>(checkpoint.file_range(file, range.clone()));
        tensor.place = Place::Decoded(held.iter().flat_map(|held| (held - 1.0).to_le_bytes()).collect());
    }
    tensor.name = names.hf(name).unwrap_or(tensor.name);
    checkpoint.add_tensor(tensor)
}

#[cfg(test)]
mod tests {
    use super::part_of;

    #[test]
    fn names_of_parts_are_told() {
        assert_eq!(part_of("a-b-00002-of-00013.gguf"), Some(("a-b", 2, 13)));
        assert_eq!(part_of("x-00001-of-00002.GGUF"), Some(("x", 1, 2)));
        for other in
            ["a.gguf", "a-2-of-3.gguf", "a-00001-of-00002.bin", "a-+0001-of-00002.gguf", "00001-of-00002.gguf", ""]
        {
            assert_eq!(part_of(other), None, "{other}");
        }
    }
}
