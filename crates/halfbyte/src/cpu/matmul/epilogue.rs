//! What happens to a product before it is stored: bias, activation function, rounding to the output's type.

use crate::kernel::Activation;
use crate::tensor::FloatsMut;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;

/// Bias and activation function of one product.
#[derive(Clone, Copy, Debug, Default)]
pub struct Epilogue<'a> {
    /// Added to every row, `[n]`.
    pub bias: Option<&'a [f32]>,
    /// Applied last.
    pub activation: Activation,
}

#[derive(Clone, Copy)]
enum Pointer {
    F16(*mut f16),
    BF16(*mut bf16),
    F32(*mut f32),
}

/// The output `[m, n]`, written by many tasks at once, each in a part of its own.
pub(crate) struct Output<'a> {
    pointer: Pointer,
    m: usize,
    n: usize,
    epilogue: Epilogue<'a>,
    buffer: PhantomData<&'a mut [u8]>,
}

// SAFETY: shared only between the tasks of one product, which write disjoint elements (see `store`).
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub fn new(y: FloatsMut<'a>, [m, n]: [usize; 2], epilogue: Epilogue<'a>) -> Self {
        assert_eq!(y.len(), m * n);
        let pointer = match y {
            FloatsMut::F16(y) => Pointer::F16(y.as_mut_ptr()),
            FloatsMut::BF16(y) => Pointer::BF16(y.as_mut_ptr()),
            FloatsMut::F32(y) => Pointer::F32(y.as_mut_ptr()),
        };
        Self { pointer, m, n, epilogue, buffer: PhantomData }
    }

    /// Applies the epilogue to the sums of row `row` from column `column` on and stores them; columns past the last are
    /// dropped.
    ///
    /// # Safety
    /// No other thread may store these elements during this product.
    pub unsafe fn store(&self, row: usize, column: usize, sums: &[f32]) {
        assert!(row < self.m && column < self.n);
        let len = sums.len().min(self.n - column);
        let at = row * self.n + column;
        if let Pointer::F32(p) = self.pointer {
            // SAFETY: row and column are within the buffer (asserted), and no one else writes here (caller).
            let out = unsafe { std::slice::from_raw_parts_mut(p.add(at), len) };
            out.copy_from_slice(&sums[..len]);
            self.finish(column, out);
            return;
        }
        let mut block = [0.0f32; 64];
        for (i, sums) in sums[..len].chunks(64).enumerate() {
            let values = &mut block[..sums.len()];
            values.copy_from_slice(sums);
            self.finish(column + i * 64, values);
            match self.pointer {
                // SAFETY: as above.
                Pointer::F16(p) => unsafe { std::slice::from_raw_parts_mut(p.add(at + i * 64), sums.len()) }
                    .convert_from_f32_slice(values),
                // SAFETY: as above.
                Pointer::BF16(p) => unsafe { std::slice::from_raw_parts_mut(p.add(at + i * 64), sums.len()) }
                    .convert_from_f32_slice(values),
                Pointer::F32(_) => {}
            }
        }
    }

    fn finish(&self, column: usize, values: &mut [f32]) {
        if let Some(bias) = self.epilogue.bias {
            for (v, b) in values.iter_mut().zip(&bias[column..]) {
                *v += b;
            }
        }
        if self.epilogue.activation != Activation::None {
            for v in values {
                *v = self.epilogue.activation.apply(*v);
            }
        }
    }
}
