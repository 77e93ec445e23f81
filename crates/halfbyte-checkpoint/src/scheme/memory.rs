//! Modules whose tensors a program has in memory, as another loader has read them: every scheme reads them like files.

use super::{Hint, Weights};
use crate::checkpoint::Checkpoint;
use crate::config;
use crate::error::{Error, Result};
use crate::safetensors::DType;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A tensor in memory, by the name that a file would have for it.
#[derive(Clone, Debug)]
pub struct MemoryTensor {
    /// Its name, as `model.layers.0.mlp.up_proj.qweight`.
    pub name: String,
    /// Type of its elements.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its elements, little-endian, row by row.
    pub bytes: Vec<u8>,
}

impl Weights {
    /// Modules of tensors in memory, with what `quantization_config` says of them, if there is such a thing. Errors call them by
    /// `origin`.
    ///
    /// *Errors:* bytes that do not fit their type and shape, two tensors of one name, a config that is refused as one in a file is.
    pub fn of_tensors(origin: &str, tensors: Vec<MemoryTensor>, config: Option<&Map<String, Value>>) -> Result<Self> {
        let path = Path::new(origin);
        for MemoryTensor { name, dtype, shape, bytes } in &tensors {
            let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
            let needed = elements.zip(dtype.size_bits()).and_then(|(elements, bits)| elements.checked_mul(bits));
            if needed.map(|bits| bits.div_ceil(8)) != Some(bytes.len()) {
                let what = format!("tensor `{name}`: expected bytes for {shape:?} of {dtype}, got {}", bytes.len());
                return Err(Error::malformed(path, what));
            }
        }
        let tensors = tensors.into_iter().map(|MemoryTensor { name, dtype, shape, bytes }| (name, dtype, shape, bytes));
        let checkpoint = Checkpoint::of_memory(path, tensors)?;
        let config = config.map(|fields| config::of_object(fields, path)).transpose()?;
        Ok(Self { checkpoint, config, folder: PathBuf::new(), hint: Hint::default() })
    }
}
