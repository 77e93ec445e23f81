//! Launches of `soft_cap.cu`: caps of logits.

use super::launch;
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

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
/// *Accuracy:* relative error ≤ 2⁻²⁰. *Errors:* a limit that is not above 0.
pub fn soft_cap(gpu: &Gpu, stream: &Stream, x: ViewMut<'_, f32>, limit: f32) -> Result<()> {
    const OP: &str = "soft_cap";
    if limit <= 0.0 || !limit.is_finite() {
        return Err(Error::invalid(OP, "a limit above 0", limit.to_string()));
    }
    if x.is_empty() {
        return Ok(());
    }
    let params = Params { x: x.pointer(), elements: x.len() as u64, limit, padding: 0 };
    let form = launch(OP, [x.len().div_ceil(THREADS), 1, 1], THREADS as u32, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose length is that of what is lent.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
