//! Launches of `swiglu.cu`: what a gated MLP does between its products.

use super::floats::float_type;
use super::{launch, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Stream, View};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use bytemuck::{Pod, Zeroable};

static SOURCE: Source = Source { path: "nn/swiglu.cu", text: include_str!("swiglu.cu") };

const THREADS: u32 = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "swiglu")
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    gate_up: u64,
    out: u64,
    inner: u64,
    elements: u64,
    out_type: u32,
    padding: u32,
}

/// `out = silu(gate) · up` with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// *Shapes:* `gate_up` `[m, 2·inner]`, each row the gate first, then up; `out` `[m, inner]`. *Accuracy:* relative error
/// ≤ 2⁻²¹ before it is rounded to out's type, where the gate is above −87; below, the result goes to −0.
/// *Errors:* lengths that do not fit.
pub fn swiglu(gpu: &Gpu, stream: &Stream, gate_up: View<'_, f32>, inner: usize, out: FloatViewMut<'_>) -> Result<()> {
    const OP: &str = "swiglu";
    rows_of(OP, out.len(), inner)?;
    same_length(OP, "gate_up", out.len().checked_mul(2), gate_up.len())?;
    if out.is_empty() {
        return Ok(());
    }
    let params = Params {
        gate_up: gate_up.pointer(),
        out: out.pointer(),
        inner: inner as u64,
        elements: out.len() as u64,
        out_type: float_type(out.dtype()),
        padding: 0,
    };
    let form = launch(OP, [out.len().div_ceil(THREADS as usize), 1, 1], THREADS, 0)?;
    let function = gpu.function(&instance())?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
    unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
}
