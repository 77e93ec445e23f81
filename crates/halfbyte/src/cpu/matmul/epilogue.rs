//! What happens to a product before it is stored: bias, activation function, rounding to the output's type.

use crate::kernel::Activation;
use crate::tensor::FloatsMut;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

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

/// The output `[m, n]`, or a part of one, written by many tasks at once, each in a part of its own.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    pointer: Pointer,
    /// Rows and columns of the whole.
    whole: [usize; 2],
    /// Rows that lie beside each other where columns do not: those of an image whose columns are planes. 0 if columns lie
    /// beside each other.
    plane: usize,
    /// First row and column of this part.
    first: [usize; 2],
    /// Rows and columns of this part.
    shape: [usize; 2],
    epilogue: Epilogue<'a>,
    buffer: PhantomData<&'a mut [u8]>,
}

// SAFETY: shared only between the tasks of one product, which write disjoint elements (see `store`).
unsafe impl Sync for Output<'_> {}

/// Columns that are finished and rounded together.
const BLOCK: usize = 64;

impl<'a> Output<'a> {
    /// Row by row.
    pub fn new(y: FloatsMut<'a>, [m, n]: [usize; 2], epilogue: Epilogue<'a>) -> Self {
        assert_eq!(y.len(), m * n);
        let pointer = match y {
            FloatsMut::F16(y) => Pointer::F16(y.as_mut_ptr()),
            FloatsMut::BF16(y) => Pointer::BF16(y.as_mut_ptr()),
            FloatsMut::F32(y) => Pointer::F32(y.as_mut_ptr()),
        };
        Self { pointer, whole: [m, n], plane: 0, first: [0; 2], shape: [m, n], epilogue, buffer: PhantomData }
    }

    /// Image by image of `pixels` rows each, and in an image column by column.
    pub fn planes(y: FloatsMut<'a>, [m, n]: [usize; 2], pixels: usize, epilogue: Epilogue<'a>) -> Self {
        assert!(pixels > 0 && m % pixels == 0);
        Self { plane: pixels, ..Self::new(y, [m, n], epilogue) }
    }

    /// Some rows and columns of it, with rows and columns counted from the first of them.
    pub fn part(&self, rows: Range<usize>, columns: Range<usize>) -> Self {
        assert!(rows.end <= self.shape[0] && columns.end <= self.shape[1]);
        let first = [self.first[0] + rows.start, self.first[1] + columns.start];
        Self { first, shape: [rows.len(), columns.len()], ..*self }
    }

    /// Applies the epilogue to the sums of row `row` from column `column` on and stores them; columns past the last are
    /// dropped.
    ///
    /// # Safety
    /// No other thread may store these elements during this product.
    pub unsafe fn store(&self, row: usize, column: usize, sums: &[f32]) {
        assert!(row < self.shape[0] && column < self.shape[1]);
        let len = sums.len().min(self.shape[1] - column);
        let (row, column) = (self.first[0] + row, self.first[1] + column);
        if self.plane > 0 {
            // SAFETY: as promised to this function.
            unsafe { self.store_across(row, column, &sums[..len]) };
            return;
        }
        let at = row * self.whole[1] + column;
        if let Pointer::F32(p) = self.pointer {
            // SAFETY: row and column are within the buffer (asserted), and no one else writes here (caller).
            let out = unsafe { std::slice::from_raw_parts_mut(p.add(at), len) };
            out.copy_from_slice(&sums[..len]);
            self.finish(column, out);
            return;
        }
        let mut block = [0.0f32; BLOCK];
        for (i, sums) in sums[..len].chunks(BLOCK).enumerate() {
            let values = &mut block[..sums.len()];
            values.copy_from_slice(sums);
            self.finish(column + i * BLOCK, values);
            match self.pointer {
                // SAFETY: as above.
                Pointer::F16(p) => unsafe { std::slice::from_raw_parts_mut(p.add(at + i * BLOCK), sums.len()) }
                    .convert_from_f32_slice(values),
                // SAFETY: as above.
                Pointer::BF16(p) => unsafe { std::slice::from_raw_parts_mut(p.add(at + i * BLOCK), sums.len()) }
                    .convert_from_f32_slice(values),
                Pointer::F32(_) => {}
            }
        }
    }

    /// The same where columns lie a plane apart.
    ///
    /// # Safety
    /// Row and columns are within the whole; no other thread may store these elements during this product.
    unsafe fn store_across(&self, row: usize, column: usize, sums: &[f32]) {
        let (image, pixel) = (row / self.plane, row % self.plane);
        let mut block = [0.0f32; BLOCK];
        for (i, sums) in sums.chunks(BLOCK).enumerate() {
            let (values, column) = (&mut block[..sums.len()], column + i * BLOCK);
            values.copy_from_slice(sums);
            self.finish(column, values);
            let at = (image * self.whole[1] + column) * self.plane + pixel;
            // SAFETY: column `j` of a row within the whole lies at `at + j·plane` (promised to this function).
            unsafe {
                match self.pointer {
                    Pointer::F16(p) => {
                        let mut halves = [f16::ZERO; BLOCK];
                        halves[..values.len()].convert_from_f32_slice(values);
                        scatter(p.add(at), self.plane, &halves[..values.len()]);
                    }
                    Pointer::BF16(p) => {
                        let mut halves = [bf16::ZERO; BLOCK];
                        halves[..values.len()].convert_from_f32_slice(values);
                        scatter(p.add(at), self.plane, &halves[..values.len()]);
                    }
                    Pointer::F32(p) => scatter(p.add(at), self.plane, values),
                }
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

/// Writes values `stride` elements apart.
///
/// # Safety
/// Each place may be written.
unsafe fn scatter<T: Copy>(out: *mut T, stride: usize, values: &[T]) {
    for (j, &value) in values.iter().enumerate() {
        // SAFETY: promised by the caller.
        unsafe { out.add(j * stride).write(value) };
    }
}
