//! Launches of `embed.cu`: vectors of tokens.

use super::floats::float_type;
use super::{launch, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;

static SOURCE: Source = Source { path: "nn/embed.cu", text: include_str!("embed.cu"), parameters: &[Params::LAYOUT] };

const THREADS: u32 = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "embed")
}

parameters! {
    /// As in the source.
    struct Params {
        table: u64,
        tokens: u64,
        out: u64,
        hidden: u64,
        vocab: u32,
        first: u32,
        kind: u32,
        scale: f32,
    }
}

/// Vectors of tokens: `out[i] = scale · table[tokens[i] − first]`, rounded once.
///
/// *Shapes:* table `[n, hidden]`, out `[tokens, hidden]`. The table has the vectors of n tokens from `first` on; others give zeros.
/// *Errors:* lengths that do not fit.
pub fn embed(
    gpu: &Gpu,
    stream: &Stream,
    (table, first): (FloatView<'_>, usize),
    hidden: usize,
    tokens: View<'_, u32>,
    scale: f32,
    out: ViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "embed";
    let vocab = super::rows_of(OP, table.len(), hidden)?;
    same_length(OP, "out", tokens.len().checked_mul(hidden), out.len())?;
    if tokens.is_empty() {
        return Ok(());
    }
    let params = Params {
        table: table.pointer(),
        tokens: tokens.pointer(),
        out: out.pointer(),
        hidden: hidden as u64,
        vocab: narrow(OP, "a vocabulary", vocab)?,
        first: narrow(OP, "a first token", first)?,
        kind: float_type(table.dtype()),
        scale,
    };
    let form = launch(OP, [tokens.len(), 1, 1], THREADS, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
