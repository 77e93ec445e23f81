//! Signed bytes as tensor cores take them from shared memory: what the `int8` GPU kernels read.
//!
//! ```text
//! strip = 64 outputs of a group;  atom = one strip × 128 columns, a row of it 128 bytes
//! atoms in the order group, strip, columns:    a strip over all columns is one stream
//! row r of an atom: 8 pieces of 16 columns, piece c at place c XOR (r mod 8)       128-byte swizzle
//! ```
//!
//! Unsigned codes lie here less 128, their zero points too. Outputs past the last of a group and columns past the last hold 0.

use crate::error::{Error, Result};
use crate::format::int8::{Bytes, Int8Weight};
use rayon::prelude::*;

const OP: &str = "pack int8 for the GPU";

/// Outputs of a strip.
pub const STRIP: usize = 64;
/// Columns of an atom.
pub const STEP: usize = 128;

/// Weights in bytes, packed for the GPU kernels.
#[derive(Clone, Debug)]
pub struct CudaInt8 {
    outputs: usize,
    k: usize,
    codes: Vec<i8>,
    zeros: Vec<i32>,
    scales: Vec<f32>,
}

impl CudaInt8 {
    /// Packs a weight whose rows belong to so many groups, one behind the other.
    ///
    /// *Errors:* groups that do not divide the rows, a packed weight that no memory holds.
    pub fn pack(w: &Int8Weight<'_>, groups: usize) -> Result<Self> {
        let (n, k) = (w.n(), w.k());
        if groups == 0 || !n.is_multiple_of(groups) {
            return Err(Error::invalid(OP, format!("groups that divide {n} rows"), groups.to_string()));
        }
        let outputs = n / groups;
        let strips = outputs.div_ceil(STRIP).checked_mul(groups);
        let row = k.div_ceil(STEP).checked_mul(STEP * STRIP);
        let bytes = strips.zip(row).and_then(|(strips, row)| strips.checked_mul(row));
        let bytes = bytes.filter(|&bytes| bytes <= isize::MAX as usize);
        let bytes =
            bytes.ok_or_else(|| Error::invalid(OP, "a packed weight that fits memory", format!("{n} × {k}")))?;
        let (source, shift): (&[u8], u8) = match w.codes() {
            Bytes::U8(codes) => (codes, 128),
            Bytes::I8(codes) => (bytemuck::cast_slice(codes), 0),
        };
        let mut codes = vec![0i8; bytes];
        let of_strip = k.div_ceil(STEP) * STEP * STRIP;
        if of_strip > 0 {
            codes.par_chunks_exact_mut(of_strip).enumerate().for_each(|(strip, out)| {
                let (group, first) = (strip / outputs.div_ceil(STRIP), strip % outputs.div_ceil(STRIP) * STRIP);
                for r in 0..STRIP.min(outputs - first) {
                    let row = &source[(group * outputs + first + r) * k..][..k];
                    row.iter().enumerate().for_each(|(j, &code)| out[place(r, j)] = code.wrapping_sub(shift) as i8);
                }
            });
        }
        let zeros = (0..n).map(|i| w.zero(i) - i32::from(shift)).collect();
        Ok(Self { outputs, k, codes, zeros, scales: (0..n).map(|i| w.scale(i)).collect() })
    }

    /// Signed code of a row and column.
    pub fn code(&self, row: usize, column: usize) -> i8 {
        let strips = self.outputs.div_ceil(STRIP);
        let (group, r) = (row / self.outputs, row % self.outputs);
        let strip = group * strips + r / STRIP;
        self.codes[strip * self.k.div_ceil(STEP) * STEP * STRIP + place(r % STRIP, column)]
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.zeros.len()
    }

    /// Columns.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Atoms.
    pub fn codes(&self) -> &[i8] {
        &self.codes
    }

    /// Zero points of the signed codes, `[n]`.
    pub fn zeros(&self) -> &[i32] {
        &self.zeros
    }

    /// Scales, `[n]`.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }
}

/// Where a column of a row lies in its strip.
fn place(row: usize, column: usize) -> usize {
    let (atom, c) = (column / STEP, column % STEP);
    atom * STEP * STRIP + row * STEP + (((c / 16) ^ (row % 8)) * 16) + c % 16
}
