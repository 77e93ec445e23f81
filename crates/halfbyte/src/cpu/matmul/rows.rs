//! Where rows of x come from: a matrix, or the windows of a convolution, gathered row by row.

use super::encode::EncodedPixels;
use super::placed::Placed;
use crate::cpu::patches::Patches;
#[cfg(target_arch = "x86_64")]
use crate::tensor::Float;
use crate::tensor::Floats;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::Range;

/// Rows of activations.
#[derive(Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// A matrix `[m, k]`.
    Matrix(Floats<'a>),
    /// Windows on images that lie pixel by pixel.
    Patches(Floats<'a>, Patches<'a>),
    /// Windows on images with their padding, in f32, for products with exact activations alone.
    Placed(Placed<'a>),
    /// Windows on images whose pixels are quantised already, for products with quantised activations alone.
    Encoded(EncodedPixels<'a>),
}

impl Rows<'_> {
    /// Type of the activations, f32 if they are quantised already.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn dtype(&self) -> Float {
        match self {
            Rows::Matrix(x) | Rows::Patches(x, _) => x.dtype(),
            Rows::Placed(_) | Rows::Encoded(_) => Float::F32,
        }
    }

    /// Brings row `row` to f32 in `out` `[k]`; `room` is for half as many floats as `out`.
    pub(super) fn widen(&self, row: usize, out: &mut [f32], room: &mut [f32]) {
        let k = out.len();
        match *self {
            Rows::Matrix(x) => widen(x, row * k..(row + 1) * k, out),
            Rows::Patches(Floats::F32(x), patches) => patches.copy(x, row, 0.0, out),
            Rows::Patches(Floats::F16(x), patches) => {
                let room: &mut [f16] = &mut bytemuck::cast_slice_mut(room)[..k];
                patches.copy(x, row, f16::ZERO, room);
                room.convert_to_f32_slice(out);
            }
            Rows::Patches(Floats::BF16(x), patches) => {
                let room: &mut [bf16] = &mut bytemuck::cast_slice_mut(room)[..k];
                patches.copy(x, row, bf16::ZERO, room);
                room.convert_to_f32_slice(out);
            }
            Rows::Placed(x) => x.copy(row, out),
            Rows::Encoded(_) => unreachable!("pixels are quantised for kernels that multiply codes"),
        }
    }
}

/// Brings elements `range` of x to f32 in `out`.
pub(crate) fn widen(x: Floats<'_>, range: Range<usize>, out: &mut [f32]) {
    match x {
        Floats::F32(x) => out.copy_from_slice(&x[range]),
        Floats::F16(x) => x[range].convert_to_f32_slice(out),
        Floats::BF16(x) => x[range].convert_to_f32_slice(out),
    }
}
