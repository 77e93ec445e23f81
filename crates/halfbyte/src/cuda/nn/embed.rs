//! Launches of `embed.cu`: vectors of tokens.

use super::{launch, narrow, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, Stream, View, ViewMut};
use crate::cuda::matmul::{Packed, dequantize};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

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

/// The vectors of all tokens, `[n, hidden]`.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// Floats.
    Floats(FloatView<'a>),
    /// A weight that may be multiplied by, too.
    Codes(&'a Packed),
}

impl Table<'_> {
    /// The kernel that reads it.
    pub fn instance(&self) -> Instance {
        match self {
            Self::Floats(_) => instance(),
            Self::Codes(packed) => dequantize::instance_of_rows(packed),
        }
    }
}

/// Vectors of tokens: `out[i] = scale · table[tokens[i] − first]`, rounded once; of codes after what they stand for was rounded to f32.
///
/// *Shapes:* table `[n, hidden]`, out `[tokens, hidden]`. The table has the vectors of n tokens from `first` on; others give zeros.
/// *Errors:* lengths that do not fit, codes with scales on two levels that lie as products of quantised activations have them.
pub fn embed(
    gpu: &Gpu,
    stream: &Stream,
    (table, first): (Table<'_>, usize),
    hidden: usize,
    tokens: View<'_, u32>,
    scale: f32,
    out: ViewMut<'_, f32>,
) -> Result<()> {
    const OP: &str = "embed";
    same_length(OP, "out", tokens.len().checked_mul(hidden), out.len())?;
    let (first, table) = match table {
        Table::Floats(table) => (narrow(OP, "a first token", first)?, table),
        Table::Codes(packed) if packed.shape()[1] != hidden => {
            let got = format!("rows of {}", packed.shape()[1]);
            return Err(Error::invalid(OP, format!("rows of {hidden} elements"), got));
        }
        Table::Codes(packed) => {
            let first = narrow(OP, "a first token", first)?;
            return dequantize::rows(gpu, stream, (packed, first), tokens, scale, out);
        }
    };
    let vocab = super::rows_of(OP, table.len(), hidden)?;
    if tokens.is_empty() {
        return Ok(());
    }
    let params = Params {
        table: table.pointer(),
        tokens: tokens.pointer(),
        out: out.pointer(),
        hidden: hidden as u64,
        vocab: narrow(OP, "a vocabulary", vocab)?,
        first,
        kind: float_type(table.dtype()),
        scale,
    };
    let form = launch(OP, [tokens.len(), 1, 1], THREADS, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
