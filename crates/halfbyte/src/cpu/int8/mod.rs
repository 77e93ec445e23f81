//! Products of bytes: u8 activations × i8 weights, summed in int32, for linear layers and convolutions.
//!
//! ```text
//! for each task (a block of rows × a chunk of outputs):
//!     the block's rows of x: read where they lie, or written into a buffer that stays in the cache     (Rows, Placed)
//!     for each span of tiles of outputs, for each tile of rows, for each tile of outputs:         (in registers)
//!         c = Σ x·w                                    int32
//!         y = epilogue(c + what zero points and bias add)
//! ```
//!
//! Signed activations are made unsigned where a block is written, code and zero point plus 128. Sums wrap around and are
//! right all the same: an epilogue is made only where no sum, with zero points and bias, leaves int32.
//!
//! | file | sums by |
//! |---|---|
//! | `dot_amx` | tdpbusd, where there are rows enough; else as the next |
//! | `dot_avx512vnni` | vpdpbusd |
//! | `dot_avxvnni` | vpdpbusd of 256 bits |
//! | `dot_avx2` | bytes widened to words, vpmaddwd |
//! | `dot_scalar` | plain Rust |

mod blocking;
#[cfg(target_arch = "x86_64")]
mod dot_amx;
#[cfg(target_arch = "x86_64")]
mod dot_avx2;
#[cfg(target_arch = "x86_64")]
mod dot_avx512vnni;
#[cfg(target_arch = "x86_64")]
mod dot_avxvnni;
mod dot_scalar;
mod epilogue;
#[cfg(test)]
mod tests;
mod tile;

pub use epilogue::{Dequantize, Requantize};
pub(crate) use tile::{Placed, Runs};

use super::Cpu;
use super::disjoint::DisjointMut;
use super::isa::{Isa, per_isa};
use super::matmul;
use crate::format::int8::{Byte, BytesMut};
use crate::layout::Lines;
use crate::layout::cpu_int8::{CpuInt8, PANEL, QUAD};
use blocking::{TASKS_PER_THREAD, Tasks, even};
use epilogue::Output;
use std::cell::RefCell;
use std::ops::Range;
use tile::Tile;

/// Panels of a tile at most.
const MAX_PANELS: usize = 4;

/// Sums of a tile at most: 24 registers of 16.
const MAX_SUMS: usize = 24 * PANEL;

/// Bytes of weights that every tile of rows goes across before the next does: they stay in a level-2 cache, and the outputs of a
/// row are stored together.
const SPAN_BYTES: usize = 128 << 10;

/// Bytes past the last row that a tile of dot products may read, and multiplies by 0.
const SLACK_BYTES: usize = QUAD - 1;

/// Products below this many multiplications are left to the caller's thread: they take a few microseconds.
const PARALLEL_MULTIPLICATIONS: usize = 1 << 18;

/// Where the rows of x come from, each of k bytes.
pub(crate) enum Rows<'a> {
    /// Rows that lie in memory, the first at the start, each `stride` bytes after the one before.
    Strided(&'a [u8], usize),
    /// Rows that lie in memory in any way, of unsigned bytes already.
    Placed(Placed<'a>),
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

/// What becomes of the sums, and where they go, `[m, stride]`.
pub(crate) enum Target<'a> {
    /// Bytes, row by row.
    Bytes(&'a Requantize, BytesMut<'a>),
    /// Floats, in the order of an output that [`Dequantize::output`] or [`Dequantize::planes`] has made.
    Floats(&'a Dequantize, matmul::Output<'a>),
}

/// Multiplies a tile: `height` rows of x by some panels, to `c` `[height][panels · 16]`.
///
/// # Safety
/// The processor has the instruction set. `c` holds the tile's sums, and the tile was made by [`Tile::new`].
type TileFn = unsafe fn(tile: &Tile<'_>, c: &mut [i32]);

/// The tile functions of an instruction set: widths in panels, widest first, the last of them 1; and for each width the
/// functions for 1, 2, 3 … rows.
type Tiles = [(usize, &'static [TileFn])];

fn tiles(isa: Isa) -> &'static Tiles {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => dot_avx512vnni::TILES,
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => dot_avxvnni::TILES,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => dot_avx2::TILES,
        _ => dot_scalar::TILES,
    }
}

/// Name of the dot products of a device: `int8_amx`, `int8_avx512vnni`, `int8_avxvnni`, `int8_avx2` or `int8_scalar`.
pub(crate) fn kernel(cpu: &Cpu) -> &'static str {
    match cpu.caps().isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => "int8_amx",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => "int8_avx512vnni",
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => "int8_avxvnni",
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => "int8_avx2",
        _ => "int8_scalar",
    }
}

thread_local! {
    /// Rows of a block that were written.
    static BLOCK: RefCell<Lines> = RefCell::default();
    /// Where the rows of a block begin.
    static STARTS: RefCell<Vec<usize>> = RefCell::default();
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

/// Where rows begin that lie `stride` bytes apart, row `first` at 0.
fn strided(first: usize, stride: usize) -> impl Fn(usize, &mut [usize]) + Sync {
    move |row, starts| starts.iter_mut().zip(row - first..).for_each(|(start, row)| *start = row * stride)
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
            Rows::Placed(x) => {
                assert_eq!(byte, Byte::U8, "rows that lie in memory are unsigned");
                return self.placed(x);
            }
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
        self.placed(Placed { x, runs: &Runs::one(k), starts: &strided(0, stride) });
    }

    /// Multiplies rows that lie in memory.
    fn placed(&self, x: Placed<'_>) {
        let tasks = Tasks::shared(self.m, self.w, self.tiles[0].0, self.threads);
        tasks.run(self.cpu, |rows, panels| self.block(&x, rows, panels));
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
        let runs = &Runs::one(k);
        let tasks = Tasks::of_rows(m, w, threads);
        if threads == 1 || tasks.count() >= threads * TASKS_PER_THREAD {
            return tasks.run(self.cpu, |rows, panels| {
                BLOCK.with_borrow_mut(|block| {
                    block.ensure(rows.len() * k + SLACK_BYTES);
                    let x = block.as_mut_slice::<u8>();
                    write(rows.clone(), &mut x[..rows.len() * k]);
                    self.block(&Placed { x, runs, starts: &strided(rows.start, k) }, rows, panels);
                });
            });
        }
        self.cpu.scratch.with(|scratch| {
            scratch.x.ensure(m * k + SLACK_BYTES);
            let x = DisjointMut::new(&mut scratch.x.as_mut_slice::<u8>()[..m * k]);
            let pieces = (threads * TASKS_PER_THREAD).min(m);
            self.cpu.threads().run(pieces, &|i| {
                let rows = even(m, pieces, i);
                // SAFETY: pieces are disjoint rows.
                write(rows.clone(), unsafe { x.range(rows.start * k..rows.end * k) });
            });
            self.placed(Placed { x: scratch.x.as_slice::<u8>(), runs, starts: &strided(0, k) });
        });
    }

    /// Multiplies rows of x by panels of the weight. No other task has these elements of y.
    fn block(&self, x: &Placed<'_>, rows: Range<usize>, panels: Range<usize>) {
        STARTS.with_borrow_mut(|starts| {
            starts.resize(rows.len(), 0);
            (x.starts)(rows.start, starts);
            #[cfg(target_arch = "x86_64")]
            if self.cpu.caps().isa == Isa::Amx && dot_amx::pays(rows.len(), self.w.quads()) {
                return dot_amx::tiles(self, x, starts, rows.start, panels);
            }
            self.tiles(x, starts, rows.start, panels);
        });
    }

    /// The same, of the rows that begin at `starts`, `first` the number of the first of them.
    fn tiles(&self, x: &Placed<'_>, starts: &[usize], first: usize, panels: Range<usize>) {
        let w = self.w;
        let mut c = Sums([0; MAX_SUMS]);
        let mut panel = panels.start;
        while panel < panels.end {
            let fits = self.tiles.iter().find(|(width, _)| *width <= panels.end - panel);
            let (width, heights) = fits.unwrap_or_else(|| unreachable!("tiles of one panel exist"));
            let across = ((panels.end - panel) / width).min(SPAN_BYTES / (width * w.panel_len()).max(1)).max(1);
            let span = panel..panel + across * width;
            // Of even heights: so many more rows than the least in the first ones.
            let count = starts.len().div_ceil(heights.len());
            let (least, more) = (starts.len() / count, starts.len() % count);
            let mut row = 0;
            for tile in 0..count {
                let height = least + usize::from(tile < more);
                let (rows, rest) = starts[row..].split_at(height);
                let c = &mut c.0[..height * width * PANEL];
                for panel in span.clone().step_by(*width) {
                    if w.quads() == 0 {
                        c.fill(0);
                    } else {
                        let mut operands = Tile::new(x, rows, w, panel..panel + width);
                        if panel == panels.start {
                            operands.ahead = rest.first().map_or(0, |next| next.saturating_sub(rows[0]));
                        }
                        // SAFETY: the instruction set is the device's, and `c` was cut to the tile.
                        unsafe { heights[height - 1](&operands, c) };
                    }
                    let (corner, size) = ([first + row, panel * PANEL], [height, width * PANEL]);
                    // SAFETY: tasks cover disjoint rows and panels.
                    unsafe { self.output.store(corner, size, (x, rows), c) };
                }
                row += height;
            }
            panel = span.end;
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
