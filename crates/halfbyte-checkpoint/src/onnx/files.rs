//! Opening an ONNX model: its file, the files of its external data, and the names of its tensors.

use super::model::Model;
use super::tensor::{Initializer, Place as Stored};
use crate::checkpoint::{Checkpoint, Container, MappedFile, Place, Tensor};
use crate::error::Result;
use crate::files;
use crate::finding::Finding;
use crate::mapping::Mapping;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Adds the tensors of a model. The initialisers of a quantised product have the names that [`Part`] gives them, each
/// product's its own where they share one; others keep theirs.
///
/// Tensors of types that no other file has are left out, which is a finding; a product cannot have any. Errors: those
/// of [`Model::parse`]; external data that is not there or too short; names that fall together.
pub(crate) fn open_file(path: &Path, checkpoint: &mut Checkpoint) -> Result<()> {
    let map = Mapping::open(path)?;
    let model = Model::parse(map.bytes(), path)?;
    let mut renamed: HashMap<&str, Vec<String>> = HashMap::new();
    for product in model.products() {
        for part in Part::ALL {
            if let Some(initializer) = part.initializer_of(product) {
                renamed.entry(initializer).or_default().push(part.name(&product.prefix));
            }
        }
    }
    let model_file = checkpoint.add_file(MappedFile { path: path.to_owned(), map });
    let mut external: HashMap<String, usize> = HashMap::new();
    for initializer in model.initializers() {
        let Initializer { name, element, shape, place, .. } = initializer;
        let Some(dtype) = element.dtype else {
            let text = format!("is of the type {}, which is not read; it was left out", element.name);
            checkpoint.add_finding(Finding::new(name, text));
            checkpoint.add_unread(name);
            continue;
        };
        let (file, place) = &match place {
            Stored::Inline(range) => (model_file, Place::Range(range.clone())),
            Stored::Decoded(bytes) => (model_file, Place::Decoded(bytes.clone())),
            Stored::External { location, .. } => {
                let (file, bytes) = match external.get(location) {
                    Some(&file) => (file, checkpoint.file_bytes(file)),
                    None => {
                        let path = external_file(path, location);
                        let map = Mapping::open(&path)?;
                        let bytes = map.bytes().len();
                        let file = checkpoint.add_file(MappedFile { path, map });
                        external.insert(location.clone(), file);
                        (file, bytes)
                    }
                };
                (file, Place::Range(initializer.external_range(bytes, path)?))
            }
        };
        for name in renamed.get(name.as_str()).map_or(std::slice::from_ref(name), Vec::as_slice) {
            let tensor = Tensor { name: name.clone(), dtype, shape: shape.clone(), file: *file, place: place.clone() };
            checkpoint.add_tensor(tensor)?;
        }
    }
    checkpoint.set_container(Container::Onnx(model));
    Ok(())
}

/// A file of a model's external data: beside the model, or, where a link leads to that and nothing lies beside the link, beside what it
/// leads to.
fn external_file(model: &Path, location: &str) -> PathBuf {
    let beside = files::parent(model).join(location);
    let behind = || Some(model.canonicalize().ok()?.parent()?.join(location));
    match beside.symlink_metadata() {
        Ok(_) => beside,
        Err(_) => behind().filter(|behind| behind.exists()).unwrap_or(beside),
    }
}

/// An initialiser of a product, by its place among the node's inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Weight,
    Scales,
    ZeroPoints,
    GroupIndex,
    Bias,
}

impl Part {
    const ALL: [Part; 5] = [Part::Weight, Part::Scales, Part::ZeroPoints, Part::GroupIndex, Part::Bias];

    /// The ending of the name that the tensor has in a [`Checkpoint`], whatever the file calls it.
    pub(crate) const fn ending(self) -> &'static str {
        match self {
            Part::Weight => "nbits_weight",
            Part::Scales => "nbits_scales",
            Part::ZeroPoints => "nbits_zero_points",
            Part::GroupIndex => "nbits_g_idx",
            Part::Bias => "bias",
        }
    }

    /// The name in a [`Checkpoint`].
    pub(crate) fn name(self, prefix: &str) -> String {
        format!("{prefix}.{}", self.ending())
    }

    fn initializer_of(self, product: &super::MatMulNBits) -> Option<&str> {
        match self {
            Part::Weight => Some(&product.weight),
            Part::Scales => Some(&product.scales),
            Part::ZeroPoints => product.zero_points.as_deref(),
            Part::GroupIndex => product.g_idx.as_deref(),
            Part::Bias => product.bias.as_deref(),
        }
    }
}
