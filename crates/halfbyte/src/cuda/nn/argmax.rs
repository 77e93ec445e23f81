//! Launches of `argmax.cu`: the most likely token of each text, on the device where the next step reads it.

use super::host_tokens::{HostTokens, HostTokensOperands};
use super::{MOST_BLOCKS_ACROSS, cluster, narrow, same_length};
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
        tokens: u64,
        positions: u64,
        length: u64,
        advance: u32,
        padding: u32,
        host: HostTokensOperands,
    }
}

/// The step of texts, each a row, from their logits to their next tokens.
#[derive(Debug)]
pub struct Step<'a> {
    /// Logits `[rows, v]`, at least one of each row.
    pub logits: View<'a, f32>,
    /// Becomes of each row the index of the greatest, then the bits of its value, `[rows, 2]`.
    pub choice: ViewMut<'a, u32>,
    /// Become the indices, `[rows]`: what the next step reads.
    pub tokens: ViewMut<'a, u32>,
    /// Grow by `advance`, `[rows]`.
    pub positions: ViewMut<'a, u32>,
    /// Tokens that each text has grown by.
    pub advance: usize,
    /// Where the host sees the tokens too.
    pub host: Option<&'a HostTokens>,
}

/// Finds the greatest logit of each row, the first of equals. NaN counts as greater than any number, as in NumPy and PyTorch; of minus
/// infinities alone the first is taken. *Errors:* lengths that do not fit.
pub fn argmax(gpu: &Gpu, stream: &Stream, step: Step<'_>) -> Result<()> {
    const OP: &str = "argmax";
    let rows = step.tokens.len();
    if rows == 0 {
        return Ok(());
    }
    let length = step.logits.len() / rows;
    if length == 0 || rows > MOST_BLOCKS_ACROSS {
        let expected = format!("at least one logit for each of at most {MOST_BLOCKS_ACROSS} rows");
        return Err(Error::invalid(OP, expected, format!("{} for {rows}", step.logits.len())));
    }
    narrow(OP, "logits", length)?;
    same_length(OP, "logits", Some(rows * length), step.logits.len())?;
    same_length(OP, "choice", Some(2 * rows), step.choice.len())?;
    same_length(OP, "positions", Some(rows), step.positions.len())?;
    let params = Params {
        logits: step.logits.pointer(),
        choice: step.choice.pointer(),
        tokens: step.tokens.pointer(),
        positions: step.positions.pointer(),
        length: length as u64,
        advance: narrow(OP, "tokens", step.advance)?,
        padding: 0,
        host: HostTokensOperands::of(step.host, 0, rows)?,
    };
    let form = cluster(gpu, THREADS, rows as u32);
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
