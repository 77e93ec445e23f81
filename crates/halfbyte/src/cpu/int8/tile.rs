//! What a tile function multiplies: some rows of x, wherever they lie, by some panels of a weight.

use crate::layout::cpu_int8::{CpuInt8, QUAD};
use std::ops::Range;

/// How each row of x lies: in runs of bytes, one after the other in the row, at these places from the row's start on.
#[derive(Clone, Debug)]
pub(crate) struct Runs {
    starts: Vec<usize>,
    /// Tiles of 4 columns in each.
    quads: usize,
    /// Bytes from the row's start to the end of the furthest run.
    reach: usize,
}

impl Runs {
    /// Rows of `k` bytes that lie together. Tiles read up to 3 bytes past the last row, and multiply them by 0.
    pub fn one(k: usize) -> Self {
        let quads = k.div_ceil(QUAD);
        Self { starts: vec![0], quads, reach: quads * QUAD }
    }

    /// Runs of `len` bytes, a multiple of 4, at these places.
    pub fn new(starts: Vec<usize>, len: usize) -> Self {
        assert!(len.is_multiple_of(QUAD), "runs of {len} bytes");
        let reach = starts.iter().max().map_or(0, |start| start + len);
        Self { starts, quads: len / QUAD, reach }
    }

    /// The sum of the `k` bytes of a row.
    #[inline(always)]
    pub fn sum(&self, x: &[u8], row: usize, k: usize) -> i32 {
        let bytes = (self.quads * QUAD).min(k);
        let sum = |sum: i32, &code: &u8| sum.wrapping_add(code.into());
        self.starts.iter().fold(0, |all, start| x[row + start..][..bytes].iter().fold(all, sum))
    }

    /// The runs of a row, one after the other.
    #[cfg(target_arch = "x86_64")]
    pub fn bytes<'x>(&self, x: &'x [u8], row: usize) -> impl Iterator<Item = &'x [u8]> {
        self.starts.iter().map(move |start| &x[row + start..][..self.quads * QUAD])
    }

    /// Tiles of 4 columns of a row.
    pub fn quads(&self) -> usize {
        self.starts.len() * self.quads
    }
}

/// Rows of unsigned bytes that lie in memory.
#[derive(Clone, Copy)]
pub(crate) struct Placed<'a> {
    /// What they lie in.
    pub x: &'a [u8],
    /// How each of them lies.
    pub runs: &'a Runs,
    /// Says where rows begin: as many as the slice holds, from a row on.
    pub starts: &'a (dyn Fn(usize, &mut [usize]) + Sync),
}

/// What a tile function multiplies.
pub(super) struct Tile<'a> {
    /// x.
    pub x: &'a [u8],
    /// Where each row begins.
    pub rows: &'a [usize],
    /// Where each run of a row begins, from the row's start on.
    pub runs: &'a [usize],
    /// Tiles of 4 columns in each run.
    pub quads: usize,
    /// Bytes from each row to one of the next tile, which may be asked for; 0 if it has been read already.
    pub ahead: usize,
    /// Codes from the first panel on.
    pub w: &'a [i8],
    /// Bytes from a panel to the next.
    #[cfg_attr(not(target_arch = "x86_64"), expect(dead_code, reason = "plain tiles have one panel"))]
    pub panel_len: usize,
}

impl<'a> Tile<'a> {
    /// Some rows by some panels. All bytes that a tile function reads are checked to be there.
    pub fn new(x: &Placed<'a>, rows: &'a [usize], w: &'a CpuInt8, panels: Range<usize>) -> Self {
        let Placed { x, runs, .. } = *x;
        let last = rows.iter().max().map_or(0, |row| row + runs.reach);
        assert!(last <= x.len() && runs.quads() == w.quads(), "rows to byte {last} of {}", x.len());
        let panel_len = w.panel_len();
        let w = &w.codes()[panels.start * panel_len..panels.end * panel_len];
        Self { x, rows, runs: &runs.starts, quads: runs.quads, ahead: 0, w, panel_len }
    }
}
