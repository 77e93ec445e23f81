//! Checkpoints: what layers they hold.

use crate::handle::{Out, given, null};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use crate::text::text;
use ::halfbyte_checkpoint::{ModuleKind, Weights};
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;

/// A model folder or a file of tensors, open: safetensors, GGUF, ONNX, PyTorch.
#[derive(Debug)]
pub struct halfbyte_checkpoint {
    weights: Weights,
    names: Vec<CString>,
}

impl halfbyte_checkpoint {
    /// The weights, if a layer of this name is among them.
    pub(crate) fn layer(&self, name: &str) -> Result<&Weights> {
        match self.weights.kind(name)? {
            ModuleKind::Quantized(_) | ModuleKind::Dense => Ok(&self.weights),
            ModuleKind::Absent => Err(Failure::invalid("name", "a layer of the checkpoint", format!("\"{name}\""))),
        }
    }
}

/// Opens a model folder in Hugging Face's form, or one file of tensors. `path`: in UTF-8.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_checkpoint_open(
    path: *const c_char,
    out: Option<&mut MaybeUninit<*mut halfbyte_checkpoint>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        // SAFETY: null or a string, as the header says.
        let weights = Weights::open(unsafe { text("path", path) }?)?;
        // A name with a zero byte could not be asked for either.
        let names = weights.modules().into_iter().filter_map(|name| CString::new(name).ok()).collect();
        out.give(halfbyte_checkpoint { weights, names })
    })
}

/// How many layers it holds whose weight is a matrix of floats (embeddings among them) or quantised; 0 of null.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_checkpoint_layers(checkpoint: Option<&halfbyte_checkpoint>) -> usize {
    checkpoint.map_or(0, |checkpoint| checkpoint.names.len())
}

/// The name of one of them, in the order of the files; null of null, and of a number that is none. It stays as long as the checkpoint is
/// open.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_checkpoint_layer(checkpoint: Option<&halfbyte_checkpoint>, index: usize) -> *const c_char {
    let name = checkpoint.and_then(|checkpoint| checkpoint.names.get(index));
    name.map_or(std::ptr::null(), |name| name.as_ptr())
}

/// Writes to `out` 1 if the layer `name` is quantised, 0 if it is dense. A name that is none is HALFBYTE_STATUS_INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_checkpoint_is_quantized(
    checkpoint: Option<&halfbyte_checkpoint>,
    name: *const c_char,
    out: Option<&mut MaybeUninit<i32>>,
) -> halfbyte_status {
    guard(|| {
        let out = out.ok_or_else(|| null("out"))?;
        out.write(0);
        let checkpoint = given("checkpoint", checkpoint)?;
        // SAFETY: null or a string, as the header says.
        let name = unsafe { text("name", name) }?;
        let kind = checkpoint.layer(name)?.kind(name)?;
        out.write(i32::from(matches!(kind, ModuleKind::Quantized(_))));
        Ok(())
    })
}

/// Closes a checkpoint; null is nothing. Layers and weights out of it go on.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_checkpoint_free(checkpoint: Option<Box<halfbyte_checkpoint>>) {
    guard_quietly((), || drop(checkpoint));
}
