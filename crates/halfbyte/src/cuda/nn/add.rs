//! Launches of `add.cu`: sums of what two paths of a network have come to.

use super::{launch, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::format::int8::{Byte, Sum};
use crate::tensor::Float;
use bytemuck::Pod;

static SOURCE: Source =
    Source { path: "nn/add.cu", text: include_str!("add.cu"), parameters: &[Params::LAYOUT, CodeParams::LAYOUT] };

const OP: &str = "add";

const THREADS: usize = 256;
/// Elements of a thread.
const EACH: usize = 4;

pub(super) fn instances() -> [Instance; 2] {
    ["add", "add_codes"].map(|kernel| Instance::new(&SOURCE, kernel))
}

parameters! {
    /// As in the source.
    struct Params {
        a: u64,
        b: u64,
        y: u64,
        elements: u64,
        a_type: u32,
        b_type: u32,
        y_type: u32,
        relu: u32,
    }

    /// As in the source.
    struct CodeParams {
        a: u64,
        b: u64,
        y: u64,
        elements: u64,
        factor_a: i32,
        factor_b: i32,
        constant: i32,
        zero: i32,
        least: i32,
        greatest: i32,
        flip_a: u32,
        flip_b: u32,
        words: u32,
        padding: u32,
    }
}

/// `y = a + b`, or `max(a + b, 0)` with a relu.
///
/// *Shapes:* all three have as many elements. *Accuracy:* one rounding to f32, and one to the type of y. *Errors:* lengths that are not
/// equal.
pub fn add(gpu: &Gpu, stream: &Stream, [a, b]: [FloatView<'_>; 2], relu: bool, y: FloatViewMut<'_>) -> Result<()> {
    same_length(OP, "a", Some(y.len()), a.len())?;
    same_length(OP, "b", Some(y.len()), b.len())?;
    let params = Params {
        a: a.pointer(),
        b: b.pointer(),
        y: y.pointer(),
        elements: y.len() as u64,
        a_type: float_type(a.dtype()),
        b_type: float_type(b.dtype()),
        y_type: float_type(y.dtype()),
        relu: relu.into(),
    };
    put(gpu, stream, 0, y.len(), &params)
}

/// `x += update`.
///
/// *Shapes:* both have as many elements. *Accuracy:* one rounding. *Errors:* lengths that are not equal.
pub fn add_to(gpu: &Gpu, stream: &Stream, x: ViewMut<'_, f32>, update: View<'_, f32>) -> Result<()> {
    same_length(OP, "update", Some(x.len()), update.len())?;
    let [a_type, b_type, y_type] = [float_type(Float::F32); 3];
    let (a, b, elements) = (x.pointer(), update.pointer(), x.len() as u64);
    put(gpu, stream, 0, x.len(), &Params { a, b, y: a, elements, a_type, b_type, y_type, relu: 0 })
}

/// The codes of a sum of codes.
///
/// *Shapes:* all three have as many elements, of the types that `sum` was made for. *Accuracy:* to the bit as [`Sum`] says. *Errors:*
/// lengths that are not equal.
pub fn add_codes(gpu: &Gpu, stream: &Stream, sum: &Sum, [a, b]: [View<'_, u8>; 2], y: ViewMut<'_, u8>) -> Result<()> {
    same_length(OP, "a", Some(y.len()), a.len())?;
    same_length(OP, "b", Some(y.len()), b.len())?;
    let flip = |byte: Byte| if byte == Byte::I8 { 0x80 } else { 0 };
    let [of_a, of_b, _] = sum.bytes();
    let [factor_a, factor_b, constant, zero, least, greatest] = sum.terms();
    let params = CodeParams {
        a: a.pointer(),
        b: b.pointer(),
        y: y.pointer(),
        elements: y.len() as u64,
        factor_a,
        factor_b,
        constant,
        zero,
        least,
        greatest,
        flip_a: flip(of_a),
        flip_b: flip(of_b),
        words: [a.pointer(), b.pointer(), y.pointer()].iter().all(|at| at.is_multiple_of(4)).into(),
        padding: 0,
    };
    put(gpu, stream, 1, y.len(), &params)
}

/// Puts one of the kernels into a stream, with its parameters.
fn put<P: Pod>(gpu: &Gpu, stream: &Stream, kernel: usize, elements: usize, params: &P) -> Result<()> {
    if elements == 0 {
        return Ok(());
    }
    let form = launch(OP, [elements.div_ceil(THREADS * EACH), 1, 1], THREADS as u32, 0)?;
    let function = gpu.function(&instances()[kernel])?;
    // SAFETY: the one parameter is the kernel's, whose lengths the callers have checked.
    unsafe { function.launch(stream, &form, &[Arg::new(params)]) }
}
