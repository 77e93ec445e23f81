//! Launches of `argmax.cu`: the most likely token, on the device where the next step reads it.

use super::{cluster, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

static SOURCE: Source = Source { path: "nn/argmax.cu", text: include_str!("argmax.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 1024;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "argmax")
}

parameters! {
    /// As in the source.
    struct Params {
        logits: u64,
        choice: u64,
        token: u64,
        position: u64,
        length: u64,
        advance: u32,
        padding: u32,
    }
}

/// A text's step from its logits to its next token.
#[derive(Debug)]
pub struct Step<'a> {
    /// Logits `[v]`, at least one.
    pub logits: View<'a, f32>,
    /// Becomes the index of the greatest, then the bits of its value, `[2]`.
    pub choice: ViewMut<'a, u32>,
    /// Becomes the index, `[1]`: what the next step reads.
    pub token: ViewMut<'a, u32>,
    /// Grows by `advance`, `[1]`.
    pub position: ViewMut<'a, u32>,
    /// Tokens that the text has grown by.
    pub advance: usize,
}

/// Finds the greatest logit, the first of equals. NaN counts as greater than any number, as in NumPy and PyTorch; of minus
/// infinities alone the first is taken. *Errors:* lengths that do not fit.
pub fn argmax(gpu: &Gpu, stream: &Stream, step: Step<'_>) -> Result<()> {
    const OP: &str = "argmax";
    if step.logits.is_empty() {
        return Err(Error::invalid(OP, "at least one logit", "none"));
    }
    narrow(OP, "logits", step.logits.len())?;
    same_length(OP, "choice", Some(2), step.choice.len())?;
    same_length(OP, "token", Some(1), step.token.len())?;
    same_length(OP, "position", Some(1), step.position.len())?;
    let params = Params {
        logits: step.logits.pointer(),
        choice: step.choice.pointer(),
        token: step.token.pointer(),
        position: step.position.pointer(),
        length: step.logits.len() as u64,
        advance: narrow(OP, "tokens", step.advance)?,
        padding: 0,
    };
    let form = cluster(gpu, THREADS);
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
