//! Dense floats in panels of 16 outputs: `[n/16][k][16]`, in the type that they came in.

use super::Lines;
use super::cpu_n16::PANEL;
use crate::error::{Error, Result};
use crate::memory::{check_empty, short};
use crate::tensor::{Float, Floats};
use half::{bf16, f16};
use rayon::prelude::*;

/// A dense float matrix packed for the CPU kernels.
#[derive(Clone, Debug)]
pub struct CpuDenseN16 {
    n: usize,
    k: usize,
    dtype: Float,
    data: Lines,
}

impl CpuDenseN16 {
    /// Packs `w` `[n, k]`; the last panel is filled with zeros. Errors: a length that does not fit, memory that is short.
    pub fn pack(w: Floats<'_>, [n, k]: [usize; 2]) -> Result<Self> {
        const OP: &str = "pack dense weights";
        if n.checked_mul(k) != Some(w.len()) {
            return Err(Error::invalid(OP, format!("{n} × {k} weights"), w.len().to_string()));
        }
        check_empty(OP, [n, k])?;
        let dtype = w.dtype();
        let bytes = n.next_multiple_of(PANEL) * k * dtype.size_bytes();
        let mut data = Lines::try_zeroed(bytes).ok_or_else(|| short::<u8>(OP, bytes))?;
        match w {
            Floats::F16(w) => spread(w, data.as_mut_slice::<f16>(), k),
            Floats::BF16(w) => spread(w, data.as_mut_slice::<bf16>(), k),
            Floats::F32(w) => spread(w, data.as_mut_slice::<f32>(), k),
        }
        Ok(Self { n, k, dtype, data })
    }

    /// The matrix `[n, k]` again, widened.
    pub fn unpack(&self) -> Vec<f32> {
        let data = self.data();
        (0..self.n * self.k)
            .map(|at| (at / self.k, at % self.k))
            .map(|(i, j)| data.get(((i / PANEL) * self.k + j) * PANEL + i % PANEL))
            .collect()
    }

    /// The weights of an output, widened: row `i` below [`CpuDenseN16::n`], into k elements.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        // Element j of output i lies at [i / 16][j][i % 16].
        let first = i / PANEL * self.k * PANEL + i % PANEL;
        let data = self.data();
        out.iter_mut().take(self.k).enumerate().for_each(|(j, out)| *out = data.get(first + j * PANEL));
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Type of the weights.
    pub fn dtype(&self) -> Float {
        self.dtype
    }

    /// Panels of 16 outputs.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Floats, `[panel][k][16]`.
    pub fn data(&self) -> Floats<'_> {
        let len = self.panels() * self.k * PANEL;
        match self.dtype {
            Float::F16 => Floats::F16(&self.data.as_slice::<f16>()[..len]),
            Float::BF16 => Floats::BF16(&self.data.as_slice::<bf16>()[..len]),
            Float::F32 => Floats::F32(&self.data.as_slice::<f32>()[..len]),
        }
    }

    /// Bytes that the packed matrix takes.
    pub fn bytes(&self) -> usize {
        self.panels() * self.k * PANEL * self.dtype.size_bytes()
    }
}

/// Columns of a panel that are spread together: their lines stay in the first cache.
const COLUMNS: usize = 64;

fn spread<T: Copy + Send + Sync>(w: &[T], out: &mut [T], k: usize) {
    if w.is_empty() {
        return;
    }
    out.par_chunks_mut(PANEL * k).zip(w.par_chunks(PANEL * k)).for_each(|(out, rows)| {
        for (at, out) in out.chunks_mut(COLUMNS * PANEL).enumerate() {
            for (lane, row) in rows.chunks_exact(k).enumerate() {
                let row = row[at * COLUMNS..].iter();
                out.iter_mut().skip(lane).step_by(PANEL).zip(row).for_each(|(to, &value)| *to = value);
            }
        }
    });
}
