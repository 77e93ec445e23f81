//! Products of bytes: u8 activations × i8 weights, summed in int32, for linear layers and convolutions.
//!
//! ```text
//! for each task (a block of rows × a chunk of outputs):
//!     the block's rows of x: read where they lie, or written into a buffer that stays in the cache     (Rows)
//!     for each tile of outputs, for each tile of rows:                                    (in registers)
//!         c = Σ x·w                                    int32
//!         y = epilogue(c + what zero points and bias add)
//! ```
//!
//! Signed activations are made unsigned where a block is written, code and zero point plus 128. Sums wrap around and are
//! right all the same: an epilogue is made only where no sum, with zero points and bias, leaves int32.
//!
//! | file | sums by |
//! |---|---|
//! | `dot_avx512vnni` | vpdpbusd |
//! | `dot_avx2` | bytes widened to words, vpmaddwd |
//! | `dot_scalar` | plain Rust |

mod blocking;
#[cfg(target_arch = "x86_64")]
mod dot_avx2;
#[cfg(target_arch = "x86_64")]
mod dot_avx512vnni;
mod dot_scalar;
mod epilogue;
#[cfg(test)]
mod tests;

pub use epilogue::{Dequantize, Requantize};

use super::Cpu;
use super::disjoint::DisjointMut;
use super::isa::{Isa, per_isa};
use crate::format::int8::{Byte, BytesMut};
use crate::layout::Lines;
use crate::layout::cpu_int8::{CpuInt8, PANEL, QUAD};
use crate::tensor::FloatsMut;
use blocking::{TASKS_PER_THREAD, Tasks, even};
use epilogue::Output;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::PoisonError;

/// Panels of a tile at most.
const MAX_PANELS: usize = 4;

/// Sums of a tile at most: 24 registers of 16.
const MAX_SUMS: usize = 24 * PANEL;

/// Bytes past the last row that a tile of dot products may read, and multiplies by 0.
const SLACK_BYTES: usize = QUAD - 1;

/// Products below this many multiplications are left to the caller's thread: they take a few microseconds.
const PARALLEL_MULTIPLICATIONS: usize = 1 << 18;

/// Where the rows of x come from, each of k bytes.
pub(crate) enum Rows<'a> {
    /// Rows that lie in memory, the first at the start, each `stride` bytes after the one before.
    Strided(&'a [u8], usize),
    /// Rows that a function writes when they are wanted, one after the other.
    Written(&'a (dyn Fn(Range<usize>, &mut [u8]) + Sync)),
}

/// One product: `m` rows of x times a weight.
pub(crate) struct Call<'a> {
    /// Rows of x; signed bytes as their bits.
    pub x: Rows<'a>,
    /// Type of the bytes of x.
    pub byte: Byte,
    /// Rows.
    pub m: usize,
    /// Weight `[n, k]`.
    pub w: &'a CpuInt8,
    /// What becomes of the sums, and where it goes.
    pub y: Target<'a>,
    /// Elements from a row of y to the next.
    pub stride: usize,
    /// Where in a row of y the n outputs begin.
    pub column: usize,
}

/// What becomes of the sums, and the `[m, stride]` elements that they go to.
pub(crate) enum Target<'a> {
    /// Bytes.
    Bytes(&'a Requantize, BytesMut<'a>),
    /// Floats.
    Floats(&'a Dequantize, FloatsMut<'a>),
}

/// Multiplies a tile: `height` rows of x by some panels, to `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set. `c` holds the tile's sums, `w` its panels, and from the start of each row of
/// `x` on there are `quads · 4` bytes.
type TileFn = unsafe fn(tile: &Tile<'_>, c: &mut [i32]);

/// What a tile function multiplies.
struct Tile<'a> {
    /// Bytes from the first row on.
    x: &'a [u8],
    /// Bytes from a row to the next.
    stride: usize,
    /// Tiles along k, at least 1.
    quads: usize,
    /// Codes from the first panel on.
    w: &'a [i8],
    /// Bytes from a panel to the next.
    panel_len: usize,
}

/// The tile functions of an instruction set: widths in panels, widest first, the last of them 1; and for each width the
/// functions for 1, 2, 3 … rows.
type Tiles = [(usize, &'static [TileFn])];

fn tiles(isa: Isa) -> &'static Tiles {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => dot_avx512vnni::TILES,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => dot_avx2::TILES,
        _ => dot_scalar::TILES,
    }
}

/// Name of the dot products of a device: `int8_avx512vnni`, `int8_avx2` or `int8_scalar`.
pub(crate) fn kernel(cpu: &Cpu) -> &'static str {
    match cpu.caps().isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => "int8_avx512vnni",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => "int8_avx2",
        _ => "int8_scalar",
    }
}

thread_local! {
    static BLOCK: RefCell<Lines> = RefCell::default();
}

/// Multiplies. The same input gives the same bits, whatever the number of threads.
///
/// Panics if a length does not fit: callers have checked them.
pub(crate) fn multiply(cpu: &Cpu, call: Call<'_>) {
    let Call { x, byte, m, w, y, stride, column } = call;
    let (n, k) = (w.n(), w.k());
    assert!(column + n <= stride);
    let output = Output::new(cpu.caps().isa, w, y, m, stride, column);
    if m == 0 || n == 0 {
        return;
    }
    let small = m.saturating_mul(k).saturating_mul(n) < PARALLEL_MULTIPLICATIONS;
    let threads = if small { 1 } else { cpu.threads().count() };
    let product = Product { cpu, w, tiles: tiles(cpu.caps().isa), output, m, threads };
    product.run(x, byte);
}

/// A product that is being computed.
struct Product<'a> {
    cpu: &'a Cpu,
    w: &'a CpuInt8,
    tiles: &'static Tiles,
    output: Output<'a>,
    m: usize,
    threads: usize,
}

impl Product<'_> {
    /// Multiplies rows from anywhere: unsigned ones that lie in memory in place, if the last has a whole number of quads.
    fn run(&self, x: Rows<'_>, byte: Byte) {
        let (x, stride) = match x {
            Rows::Written(write) => return self.written(write, byte),
            Rows::Strided(x, stride) => (x, stride),
        };
        let (m, w, k) = (self.m, self.w, self.w.k());
        let last = (m - 1).checked_mul(stride).and_then(|start| x.len().checked_sub(start));
        assert!(last.is_some_and(|last| last >= k), "{m} rows of {k}, stride {stride}, in {} bytes", x.len());
        if byte == Byte::I8 || last < Some(w.quads() * QUAD) {
            let copy = |rows: Range<usize>, out: &mut [u8]| {
                if stride == k {
                    out.copy_from_slice(&x[rows.start * k..rows.end * k]);
                    return;
                }
                for (row, out) in rows.zip(out.chunks_exact_mut(k)) {
                    out.copy_from_slice(&x[row * stride..][..k]);
                }
            };
            return self.run(Rows::Written(&copy), byte);
        }
        let tasks = Tasks::shared(m, w, self.tiles[0].0, self.threads);
        tasks.run(self.cpu, |rows, panels| self.block(&x[rows.start * stride..], stride, rows, panels));
    }

    /// Multiplies rows that a function writes: block by block, each with all outputs; or, if the blocks are too few for the
    /// team, all rows are written first.
    fn written(&self, write: &(dyn Fn(Range<usize>, &mut [u8]) + Sync), byte: Byte) {
        let (m, w, k, threads) = (self.m, self.w, self.w.k(), self.threads);
        let write = |rows: Range<usize>, out: &mut [u8]| {
            if k > 0 {
                write(rows, out);
            }
            if byte == Byte::I8 {
                make_unsigned(self.cpu.caps().isa, out);
            }
        };
        let tasks = Tasks::of_rows(m, w, threads);
        if threads == 1 || tasks.count() >= threads * TASKS_PER_THREAD {
            return tasks.run(self.cpu, |rows, panels| {
                BLOCK.with_borrow_mut(|block| {
                    block.ensure(rows.len() * k + SLACK_BYTES);
                    let x = block.as_mut_slice::<u8>();
                    write(rows.clone(), &mut x[..rows.len() * k]);
                    self.block(x, k, rows, panels);
                });
            });
        }
        let mut scratch = self.cpu.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        scratch.x.ensure(m * k + SLACK_BYTES);
        let x = DisjointMut::new(&mut scratch.x.as_mut_slice::<u8>()[..m * k]);
        let pieces = (threads * TASKS_PER_THREAD).min(m);
        self.cpu.threads().run(pieces, &|i| {
            let rows = even(m, pieces, i);
            // SAFETY: pieces are disjoint rows.
            write(rows.clone(), unsafe { x.range(rows.start * k..rows.end * k) });
        });
        let x = scratch.x.as_slice::<u8>();
        let tasks = Tasks::shared(m, w, self.tiles[0].0, threads);
        tasks.run(self.cpu, |rows, panels| self.block(&x[rows.start * k..], k, rows, panels));
    }

    /// Multiplies rows of x, which begin with `x`, by panels of the weight. No other task has these elements of y.
    fn block(&self, x: &[u8], stride: usize, rows: Range<usize>, panels: Range<usize>) {
        let w = self.w;
        let mut c = Sums([0; MAX_SUMS]);
        let mut panel = panels.start;
        while panel < panels.end {
            let fits = self.tiles.iter().find(|(width, _)| *width <= panels.end - panel);
            let (width, heights) = fits.unwrap_or_else(|| unreachable!("tiles of one panel exist"));
            let tiles = rows.len().div_ceil(heights.len());
            for tile in (0..tiles).map(|t| even(rows.len(), tiles, t)) {
                let x = &x[tile.start * stride..];
                let c = &mut c.0[..tile.len() * width * PANEL];
                if w.quads() == 0 {
                    c.fill(0);
                } else {
                    let operands = Tile {
                        x,
                        stride,
                        quads: w.quads(),
                        w: &w.codes()[panel * w.panel_len()..],
                        panel_len: w.panel_len(),
                    };
                    assert!((tile.len() - 1) * stride + w.quads() * QUAD <= x.len());
                    // SAFETY: the instruction set is the device's; `c` was cut to the tile, `w` has `width` panels, and x
                    // was checked just now.
                    unsafe { heights[tile.len() - 1](&operands, c) };
                }
                let (corner, size) = ([rows.start + tile.start, panel * PANEL], [tile.len(), width * PANEL]);
                // SAFETY: tasks cover disjoint rows and panels.
                unsafe { self.output.store(corner, size, (x, stride), c) };
            }
            panel += width;
        }
    }
}

per_isa! {
    fn make_unsigned(codes: &mut [u8]) {
        codes.iter_mut().for_each(|code| *code ^= 0x80);
    }
}

/// Sums of a tile, aligned as vectors are.
#[repr(C, align(64))]
struct Sums([i32; MAX_SUMS]);
