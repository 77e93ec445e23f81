//! Launches of `soft_cap.cu`: caps of logits.

use super::launch;
use crate::checks::check_cap;
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;

static SOURCE: Source =
    Source { path: "nn/soft_cap.cu", text: include_str!("soft_cap.cu"), parameters: &[Params::LAYOUT] };

const THREADS: usize = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "soft_cap")
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        elements: u64,
        limit: f32,
        padding: u32,
    }
}

/// Replaces each `x` by `limit · tanh(x / limit)`.
///
/// *Accuracy:* relative error ≤ 2⁻²⁰ where the result and `x / limit` are at least 2⁻¹²⁶ in magnitude; below, an absolute error under
/// 2⁻¹²⁶ and `2⁻¹²⁶ · limit`, whichever is more. *Errors:* a limit that is not from 2⁻¹²⁶ to 2¹²⁵.
pub fn soft_cap(gpu: &Gpu, stream: &Stream, x: ViewMut<'_, f32>, limit: f32) -> Result<()> {
    const OP: &str = "soft_cap";
    check_cap(OP, limit)?;
    if x.is_empty() {
        return Ok(());
    }
    let params = Params { x: x.pointer(), elements: x.len() as u64, limit, padding: 0 };
    let form = launch(OP, [x.len().div_ceil(THREADS), 1, 1], THREADS as u32, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose length is that of what is lent.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
