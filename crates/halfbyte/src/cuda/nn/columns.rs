//! Launches of `columns.cu`: outputs of products that could not be joined come to lie side by side.

use super::{launch, rows_of};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use std::ops::Range;

static SOURCE: Source =
    Source { path: "nn/columns.cu", text: include_str!("columns.cu"), parameters: &[Params::LAYOUT] };

const THREADS: u32 = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "columns")
}

parameters! {
    /// As in the source.
    struct Params {
        from: u64,
        to: u64,
        width: u64,
        row_length: u64,
        first: u64,
        elements: u64,
    }
}

/// Copies `from` into some columns of `to`.
///
/// *Shapes:* `to` `[m, row]`, `from` `[m, columns]`. *Errors:* lengths or columns that do not fit.
pub fn columns(
    gpu: &Gpu,
    stream: &Stream,
    from: View<'_, f32>,
    to: ViewMut<'_, f32>,
    row: usize,
    columns: Range<usize>,
) -> Result<()> {
    const OP: &str = "columns";
    let rows = rows_of(OP, to.len(), row)?;
    if columns.start > columns.end || columns.end > row || from.len() != rows * columns.len() {
        let expected = format!("{rows} rows of columns within {row}");
        return Err(Error::invalid(OP, expected, format!("{} elements for columns {columns:?}", from.len())));
    }
    if from.is_empty() {
        return Ok(());
    }
    let params = Params {
        from: from.pointer(),
        to: to.pointer(),
        width: columns.len() as u64,
        row_length: row as u64,
        first: columns.start as u64,
        elements: from.len() as u64,
    };
    let form = launch(OP, [from.len().div_ceil(THREADS as usize), 1, 1], THREADS, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
