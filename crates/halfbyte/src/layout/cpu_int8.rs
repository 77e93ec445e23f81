//! Signed bytes in tiles of 64: 16 outputs side by side, 4 columns of each.
//!
//! ```text
//! panel p = outputs 16p … 16p+15             a panel is one contiguous run of tiles along k
//! ┌ tile t: 16 lanes of 4 bytes ──────────────┐   lane l belongs to output 16p + l
//! │ lane 0 │ lane 1 │ lane 2 │  …   │ lane 15 │   byte b of a lane = column 4t + b
//! └────────┴────────┴────────┴──────┴─────────┘
//! ```
//!
//! Unsigned codes lie here less 128, their zero points too: kernels see signed weights alone. Outputs past the last and
//! columns past the last hold 0, so that whatever x has there counts for nothing.

use super::Lines;
use crate::error::{Error, Result};
use crate::format::int8::{Bytes, Int8Weight};
use crate::memory::{short, zeroed};
use bytemuck::Zeroable;
use rayon::prelude::*;

/// Outputs a panel.
pub const PANEL: usize = 16;

/// Columns a tile.
pub const QUAD: usize = 4;

/// Weights in bytes, packed for the CPU kernels.
#[derive(Clone, Debug)]
pub struct CpuInt8 {
    n: usize,
    k: usize,
    codes: Lines,
    scales: Vec<f32>,
    zeros: Option<Vec<i32>>,
    totals: Vec<Totals>,
}

/// The weights of an output less their zero point, summed: what its sums of products depend on besides the products.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Zeroable)]
pub struct Totals {
    /// Sum of those above 0.
    pub positive: i64,
    /// Sum of those below 0.
    pub negative: i64,
}

impl CpuInt8 {
    /// Packs a weight. Error: a packed weight that no memory holds, or less memory than it takes.
    pub fn pack(w: &Int8Weight<'_>) -> Result<Self> {
        const OP: &str = "pack int8";
        let (n, k) = (w.n(), w.k());
        let bytes = n.checked_next_multiple_of(PANEL).zip(k.checked_next_multiple_of(QUAD));
        let bytes = bytes.and_then(|(n, k)| n.checked_mul(k)).filter(|&bytes| {
            n.checked_mul(size_of::<Totals>()).is_some_and(|totals| bytes.max(totals) <= isize::MAX as usize)
        });
        let bytes =
            bytes.ok_or_else(|| Error::invalid(OP, "a packed weight that fits memory", format!("{n} × {k}")))?;
        let (source, shift): (&[u8], u8) = match w.codes() {
            Bytes::U8(codes) => (codes, 128),
            Bytes::I8(codes) => (bytemuck::cast_slice(codes), 0),
        };
        let zeros: Vec<i32> = (0..n).map(|i| w.zero(i) - i32::from(shift)).collect();
        let mut codes = Lines::try_zeroed(bytes).ok_or_else(|| short::<u8>(OP, bytes))?;
        let mut totals = zeroed::<Totals>(OP, n)?;
        if k > 0 {
            codes
                .as_mut_slice::<u8>()
                .par_chunks_exact_mut(k.div_ceil(QUAD) * QUAD * PANEL)
                .zip(source.par_chunks(PANEL * k))
                .zip(totals.par_chunks_mut(PANEL).zip(zeros.par_chunks(PANEL)))
                .for_each(|((out, rows), (totals, zeros))| {
                    for (lane, row) in rows.chunks_exact(k).enumerate() {
                        for (quad, row) in row.chunks(QUAD).enumerate() {
                            let out = &mut out[(quad * PANEL + lane) * QUAD..][..row.len()];
                            out.iter_mut().zip(row).for_each(|(to, &code)| *to = code.wrapping_sub(shift));
                        }
                        for &code in row {
                            let value = i64::from(code.wrapping_sub(shift) as i8) - i64::from(zeros[lane]);
                            totals[lane].positive += value.max(0);
                            totals[lane].negative += value.min(0);
                        }
                    }
                });
        }
        let zeros = zeros.iter().any(|&zero| zero != 0).then_some(zeros);
        Ok(Self { n, k, codes, scales: (0..n).map(|i| w.scale(i)).collect(), zeros, totals })
    }

    /// Codes as they lie here, in the order `[n, k]` again, less 128 if they were unsigned.
    pub fn unpack(&self) -> Vec<i8> {
        let at = |i: usize, j: usize| (i / PANEL) * self.panel_len() + (j / QUAD * PANEL + i % PANEL) * QUAD + j % QUAD;
        (0..self.n * self.k).map(|e| self.codes()[at(e / self.k, e % self.k)]).collect()
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Tiles along k.
    pub fn quads(&self) -> usize {
        self.k.div_ceil(QUAD)
    }

    /// Panels of 16 outputs.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Bytes from a panel to the next.
    pub fn panel_len(&self) -> usize {
        self.quads() * QUAD * PANEL
    }

    /// Codes, `[panel][tile][16][4]`.
    pub fn codes(&self) -> &[i8] {
        &self.codes.as_slice()[..self.panels() * self.panel_len()]
    }

    /// Scale of each output.
    pub fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Zero point of each output, as codes lie here; None where all are 0.
    pub fn zeros(&self) -> Option<&[i32]> {
        self.zeros.as_deref()
    }

    /// Sums of each output's weights.
    pub fn totals(&self) -> &[Totals] {
        &self.totals
    }

    /// Bytes that the packed weight takes.
    pub fn bytes(&self) -> usize {
        let zeros = self.zeros.as_ref().map_or(0, |zeros| size_of_val(zeros.as_slice()));
        self.codes().len() + size_of_val(self.scales()) + zeros + size_of_val(self.totals())
    }
}
