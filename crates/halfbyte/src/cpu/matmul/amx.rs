//! Driver of products by AMX: tiles of 16 rows by 16 outputs, two side by side.
//!
//! ```text
//! x → tiles, [block][16 rows][piece][part][step][16][step bytes]                      (once, all threads)
//! for each task (outputs × rows), for each block of pieces that fits the cache:
//!     for each two panels of outputs:
//!         buffer[panel][step][step bytes / 4][16][4 bytes]  =  weights of the block
//!         for each 32 rows, for each piece, for each 16 of them:
//!             sums = Σ x · buffer         in tiles, while the sums before are stored
//!             y += scales · the sums before
//!     with more than 128 sums, after each 128:  all += y, y = 0
//! epilogue
//! ```
//!
//! A *piece* is a span, or a part of a long one. It takes whole steps along k, of as many bytes as the longest piece asks for;
//! past its end both operands hold 0. Sums of bf16 are those of a piece; sums of bytes are whole numbers, those of a span's pieces
//! together.

use super::blocking::{RowPanels, SPANS_TOGETHER, Tasks, take, with_buffers};
use super::{Output, Scratch};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::Isa;
use crate::cpu::x86::amx::{self, ROW_BYTES, ROWS, Set, Sums, Tiles};
use crate::kernel::Problem;
use crate::layout::cpu_n16::{CpuN16, PANEL, Span};
use std::ops::Range;

/// Bytes along k of a row that are multiplied before the next panels are converted.
const BLOCK_BYTES: usize = 512;

/// Rows that meet the same weights before the next do, and outputs of two panels.
pub(super) const TILE: usize = 2 * ROWS;

/// Pairs of panels whose outputs are stored together.
const STORED_PAIRS: usize = 8;

/// A span, or a part of a long one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// The span.
    pub span: usize,
    /// Whether a sum begins and ends with it.
    begins: bool,
    ends: bool,
    /// Sums before its own.
    number: usize,
    /// Group of the span.
    pub group: usize,
    /// Places along k, whole tiles of the layout.
    pub places: (usize, usize),
    /// First step.
    step: usize,
    /// Number of steps.
    steps: usize,
    /// First step of its block, and the block's number of steps.
    block: [usize; 2],
}

impl Piece {
    /// Places along k.
    pub fn range(&self) -> Range<usize> {
        self.places.0..self.places.1
    }

    /// Which of the runs of sums that are added up by themselves its own belongs to.
    fn run(&self) -> usize {
        self.number / SPANS_TOGETHER
    }
}

/// How a weight is cut along k.
#[derive(Clone, Debug)]
pub(super) struct Pieces {
    all: Vec<Piece>,
    /// Runs of pieces, each as long as a block at most, and none across sums of which [`SPANS_TOGETHER`] are added up.
    blocks: Vec<Range<usize>>,
    /// Bytes of a step in a row of x.
    step: usize,
    /// Bytes of a place in a row of x.
    place: usize,
    /// Tiles of x that are multiplied by the same weights.
    parts: usize,
}

impl Pieces {
    /// For x in `parts` numbers of `place` bytes each.
    pub fn new(w: &CpuN16, place: usize, parts: usize) -> Self {
        let (floats, most, per_tile) = (place > 1, BLOCK_BYTES / place, w.columns_per_tile());
        let mut all = Vec::with_capacity(w.spans().len());
        for (span, &Span { tile, tiles, group, .. }) in w.spans().iter().enumerate() {
            let (start, end) = (tile * per_tile, (tile + tiles) * per_tile);
            for from in (start..end).step_by(most) {
                let places = (from, (from + most).min(end));
                let (begins, ends) = (floats || from == start, floats || places.1 == end);
                let number = if floats { all.len() } else { span };
                all.push(Piece { span, begins, ends, number, group, places, step: 0, steps: 0, block: [0; 2] });
            }
        }
        let longest = all.iter().map(|piece| piece.range().len() * place).max().unwrap_or(0);
        let step = longest.next_power_of_two().clamp(ROW_BYTES / 4, ROW_BYTES);
        let mut next = 0;
        for piece in &mut all {
            (piece.step, piece.steps) = (next, (piece.range().len() * place).div_ceil(step));
            next += piece.steps;
        }
        let (mut blocks, mut first) = (Vec::new(), 0);
        while first < all.len() {
            let (start, run) = (all[first].step, all[first].run());
            let fits = |piece: &&Piece| piece.step + piece.steps - start <= BLOCK_BYTES / step && piece.run() == run;
            let end = first + all[first..].iter().take_while(fits).count().max(1);
            let steps = all[end - 1].step + all[end - 1].steps - start;
            all[first..end].iter_mut().for_each(|piece| piece.block = [start, steps]);
            blocks.push(first..end);
            first = end;
        }
        Self { all, blocks, step, place, parts }
    }

    /// Sums of a row and an output.
    fn sums(&self) -> usize {
        self.all.last().map_or(0, |last| last.number + 1)
    }

    /// Whether some of them are of several pieces.
    fn has_long_sums(&self) -> bool {
        !self.all.iter().all(|piece| piece.begins)
    }

    /// Steps in all.
    fn steps(&self) -> usize {
        self.all.last().map_or(0, |last| last.step + last.steps)
    }

    /// Bytes of a tile of either operand.
    fn tile(&self) -> usize {
        ROWS * self.step
    }

    /// Where x of a piece lies, for one of `row_tiles` tiles of rows.
    fn x(&self, piece: &Piece, [row_tile, row_tiles]: [usize; 2]) -> Range<usize> {
        let [block, steps] = piece.block;
        let first = (block * row_tiles + row_tile * steps + piece.step - block) * self.parts;
        first * self.tile()..(first + piece.steps * self.parts) * self.tile()
    }
}

/// Where a tile of 16 rows of x goes.
pub(super) struct RowTile<'a> {
    pieces: &'a Pieces,
    x: &'a DisjointMut<'a, u8>,
    /// Its number, of how many.
    number: [usize; 2],
}

impl RowTile<'_> {
    /// Writes row `row` of 16 to its places: `part` of each number, given place by place.
    pub fn put(&self, line: &[u8], row: usize, part: usize) {
        // Copies of a length that the compiler knows are a move each.
        match self.pieces.step {
            16 => self.put_steps::<16>(line, row, part),
            32 => self.put_steps::<32>(line, row, part),
            _ => self.put_steps::<64>(line, row, part),
        }
    }

    fn put_steps<const STEP: usize>(&self, line: &[u8], row: usize, part: usize) {
        let Pieces { all, place, .. } = self.pieces;
        for piece in all {
            let (whole, rest) = line[piece.places.0 * place..piece.places.1 * place].as_chunks::<STEP>();
            // SAFETY: each tile of rows is written by one task.
            let out = unsafe { self.x.range(self.pieces.x(piece, self.number)) };
            let out = &mut out.as_chunks_mut::<STEP>().0[part * piece.steps * ROWS..];
            for (step, bytes) in whole.iter().enumerate() {
                out[step * ROWS + row] = *bytes;
            }
            if !rest.is_empty() {
                let out = &mut out[whole.len() * ROWS + row];
                *out = [0; STEP];
                out[..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Columns of a group; of dense weights, all.
pub(super) fn group_len(problem: &Problem) -> usize {
    problem.format.map_or(problem.k, |format| format.weight.group.len(problem.k)).clamp(1, problem.k.max(1))
}

/// What a kernel tells the driver.
pub(super) trait Operands: Sync {
    /// Whether operands are bf16; else they are int8.
    const FLOAT: bool;

    /// Numbers of a row and a span, by which sums are scaled.
    type Row: bytemuck::Pod + Send + Sync;

    /// Numbers of a piece and two panels: what sums are scaled by besides.
    type Outputs: bytemuck::Pod;

    /// Brings rows of x, 16 at most, to a tile, and their numbers to `[span][16]`. Rows that are not there are zero.
    fn pack(&self, rows: Range<usize>, x: &RowTile<'_>, numbers: &mut [Self::Row]);

    /// Converts the weights of a panel in a piece, `[place · bytes / 4][16][4 bytes]`.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn convert(&self, panel: usize, piece: &Piece, out: &mut [u8]);

    /// The numbers of a piece and two panels.
    ///
    /// # Safety
    /// The processor has AVX-512.
    unsafe fn outputs(&self, panels: [usize; 2], piece: &Piece) -> Self::Outputs;

    /// What adds sums to y.
    fn add(&self) -> AddFn<Self>;
}

/// Adds the sums of 16 rows, scaled, to `c` `[16][2][16]`.
///
/// # Safety
/// The processor has AVX-512.
pub(super) type AddFn<O> = unsafe fn(
    &Sums,
    outputs: &<O as Operands>::Outputs,
    rows: &[<O as Operands>::Row; ROWS],
    c: &mut [f32; ROWS * TILE],
);

/// Multiplies `m` rows.
pub(super) fn run<O: Operands>(
    cpu: &Cpu,
    scratch: &mut Scratch,
    m: usize,
    w: &CpuN16,
    y: &Output<'_>,
    (pieces, operands): (&Pieces, &O),
) {
    let (numbers_len, row_tiles) = (w.spans().len() * ROWS, m.div_ceil(ROWS));
    let x_len = pieces.steps() * pieces.parts * pieces.tile();
    scratch.x.ensure(row_tiles * x_len);
    scratch.meta.ensure(row_tiles * numbers_len * size_of::<O::Row>());
    let x_out = DisjointMut::new(scratch.x.as_mut_slice::<u8>());
    let row_tiles_to_pack = if pieces.all.is_empty() { 0 } else { row_tiles };
    let numbers_out = DisjointMut::new(scratch.meta.as_mut_slice::<O::Row>());
    cpu.threads().run(row_tiles_to_pack, &|t| {
        // SAFETY: each tile of rows has a part of its own.
        let numbers = unsafe { numbers_out.range(t * numbers_len..(t + 1) * numbers_len) };
        let x = RowTile { pieces, x: &x_out, number: [t, row_tiles] };
        operands.pack(t * ROWS..((t + 1) * ROWS).min(m), &x, numbers);
    });

    let (x, numbers) = (scratch.x.as_slice::<u8>(), scratch.meta.as_slice::<O::Row>());
    let product = Product {
        pieces,
        spans: w.spans().len(),
        row_tiles,
        operands,
        m,
        x: &x[..row_tiles * x_len],
        numbers: &numbers[..row_tiles * numbers_len],
        add: operands.add(),
    };
    let x_block = TILE * pieces.parts * BLOCK_BYTES.min(pieces.steps() * pieces.step);
    let tasks = Tasks::new(RowPanels::new(m, &[TILE]), x_block, w.panels(), 2, cpu.threads().count());
    cpu.threads().run(tasks.count, &|i| {
        let (rows, panels) = tasks.get(i);
        product.task(rows, panels, y);
    });
}

/// A product whose x is packed.
struct Product<'a, O: Operands> {
    pieces: &'a Pieces,
    /// Spans of the weight, and tiles of 16 rows.
    spans: usize,
    row_tiles: usize,
    operands: &'a O,
    m: usize,
    x: &'a [u8],
    numbers: &'a [O::Row],
    add: AddFn<O>,
}

impl<O: Operands> Product<'_, O> {
    /// Blocks of 32 rows by panels of 16 outputs.
    fn task(&self, rows: Range<usize>, panels: Range<usize>, y: &Output<'_>) {
        let pairs = panels.clone().step_by(2);
        let pair = |first: usize| [first, (first + 1).min(panels.end - 1)];
        let most = self.pieces.blocks.iter().map(|block| block.len()).max().unwrap_or(0);
        let (w_len, outputs_len) = (2 * BLOCK_BYTES * PANEL / 4, most * size_of::<O::Outputs>() / 4);
        let (c_len, in_runs) = (rows.len() * pairs.len() * TILE * TILE, self.pieces.sums() > SPANS_TOGETHER);
        let begun_len = if self.pieces.has_long_sums() { c_len } else { 0 };
        with_buffers([begun_len + if in_runs { 2 * c_len } else { c_len }, w_len + outputs_len], |c, buffer| {
            let (begun, c) = c.split_at_mut(begun_len);
            let begun = bytemuck::cast_slice_mut::<f32, Sums>(begun);
            let (c, all) = c.split_at_mut(c_len);
            let (buffer, outputs) = buffer.split_at_mut(w_len);
            let outputs: &mut [O::Outputs] = bytemuck::cast_slice_mut(outputs);
            c.fill(0.0);
            all.fill(0.0);
            // SAFETY: `select` found AMX.
            let tiles = unsafe { Tiles::new(self.pieces.step) };
            for range in &self.pieces.blocks {
                let block = &self.pieces.all[range.clone()];
                let (mut tiles_of_c, mut begun) = (c.chunks_exact_mut(TILE * TILE), begun.chunks_exact_mut(2));
                for panels in pairs.clone().map(pair) {
                    let w = self.convert(block, panels, bytemuck::cast_slice_mut(buffer));
                    for (outputs, piece) in outputs.iter_mut().zip(block) {
                        // SAFETY: `select` found AMX, which no processor has without AVX-512.
                        *outputs = unsafe { self.operands.outputs(panels, piece) };
                    }
                    for (rows, c) in rows.clone().zip(&mut tiles_of_c) {
                        self.block(&tiles, (block, outputs), w, rows, (begun.next().unwrap_or_default(), c));
                    }
                }
                if self.pieces.all.get(range.end).is_some_and(|next| next.run() != block[0].run()) {
                    take(Isa::Avx512, c, all);
                }
            }
            drop(tiles);
            if in_runs {
                take(Isa::Avx512, all, c);
            }
            // A row's outputs of some pairs are stored at once.
            let mut line = [0.0; STORED_PAIRS * TILE];
            for first in (0..pairs.len()).step_by(STORED_PAIRS) {
                let width = STORED_PAIRS.min(pairs.len() - first);
                let outputs = (width * TILE).min((panels.len() - 2 * first) * PANEL);
                for (at, row) in (rows.start * TILE..self.m.min(rows.end * TILE)).enumerate() {
                    for pair in 0..width {
                        let c = &c[((first + pair) * rows.len() * TILE + at) * TILE..][..TILE];
                        line[pair * TILE..][..TILE].copy_from_slice(c);
                    }
                    // SAFETY: tasks cover disjoint rows and outputs.
                    unsafe { y.store(row, (panels.start + 2 * first) * PANEL, &line[..outputs]) };
                }
            }
        });
    }

    /// Converts two panels of a block.
    fn convert<'w>(&self, block: &[Piece], panels: [usize; 2], buffer: &'w mut [u8]) -> [&'w [u8]; 2] {
        let (tile, first) = (self.pieces.tile(), block[0].step);
        let halves: [&mut [u8]; 2] = buffer.split_at_mut(buffer.len() / 2).into();
        let mut converted = panels.into_iter().zip(halves).map(|(panel, out)| {
            for piece in block {
                let out = &mut out[(piece.step - first) * tile..][..piece.steps * tile];
                let (weights, after) = out.split_at_mut(piece.range().len() * self.pieces.place * ROWS);
                // SAFETY: `select` found AMX, which no processor has without AVX-512.
                unsafe { self.operands.convert(panel, piece, weights) };
                after.fill(0);
            }
            &*out
        });
        std::array::from_fn(|_| converted.next().unwrap_or_else(|| unreachable!("two panels")))
    }

    /// Adds a block of 32 rows by two panels to `c`, or to sums that have begun, of which there are two where sums are long.
    fn block(
        &self,
        tiles: &Tiles,
        (block, outputs): (&[Piece], &[O::Outputs]),
        w: [&[u8]; 2],
        rows: usize,
        (begun, c): (&mut [Sums], &mut [f32]),
    ) {
        let row_tiles = 2 * rows..self.row_tiles.min(2 * rows + 2);
        let (mut sums, mut set) = (Sums([[0; 16]; 2 * ROWS]), Set::First);
        let (mut before, (halves, _)) = (None, c.as_chunks_mut::<{ ROWS * TILE }>());
        let mut finish = |set: Set, begun: &mut [Sums], (piece, outputs, at, half): (&Piece, _, _, usize)| {
            if piece.ends {
                tiles.store(set, &mut sums);
                self.add(&sums, outputs, at, &mut halves[half]);
            } else {
                tiles.store(set, &mut begun[half]);
            }
        };
        for (piece, outputs) in block.iter().zip(outputs) {
            for (half, row_tile) in row_tiles.clone().enumerate() {
                // No two pieces of a sum lie in one block: it was stored.
                if piece.begins {
                    tiles.zero(set)
                } else {
                    tiles.load(set, &begun[half])
                }
                self.multiply(tiles, piece, (row_tile, w, block[0].step), set);
                set = set.other();
                let at = (row_tile * self.spans + piece.span) * ROWS;
                if let Some(before) = before.replace((piece, outputs, at, half)) {
                    finish(set, begun, before);
                }
            }
        }
        if let Some(before) = before {
            finish(set.other(), begun, before);
        }
    }

    /// Adds the products of 16 rows and a piece to a set of sums; w begins with step `first`.
    #[inline]
    fn multiply(&self, tiles: &Tiles, piece: &Piece, (row_tile, w, first): (usize, [&[u8]; 2], usize), set: Set) {
        let (tile, parts) = (self.pieces.tile(), self.pieces.parts);
        let (len, at) = (piece.steps * tile, (piece.step - first) * tile);
        let x = &self.x[self.pieces.x(piece, [row_tile, self.row_tiles])];
        let w = [w[0][at..at + len].as_ptr(), w[1][at..at + len].as_ptr()];
        for part in 0..parts {
            let x = x[part * len..(part + 1) * len].as_ptr();
            // SAFETY: the slices above hold as many tiles; every piece has a place, and so a step.
            unsafe { tiles.multiply(O::FLOAT, amx::Operands { x, w, steps: piece.steps }, set) };
        }
    }

    /// Adds sums of 16 rows, whose numbers begin with `at`, to y.
    #[inline]
    fn add(&self, sums: &Sums, outputs: &O::Outputs, at: usize, c: &mut [f32; ROWS * TILE]) {
        let rows = self.numbers[at..].first_chunk().unwrap_or_else(|| unreachable!("16 rows of every tile"));
        // SAFETY: `select` found AMX, which no processor has without AVX-512.
        unsafe { (self.add)(sums, outputs, rows, c) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Format, QTensor, Zeros};

    #[test]
    fn pieces_cover_every_place_once_in_blocks_that_fit() {
        for (name, k) in
            [("w4a8-g128", 1000usize), ("w8a8-g16", 100), ("w4a8-g20", 4099), ("w2a8", 5000), ("w4a8-g32", 0)]
        {
            let format: Format = name.parse().unwrap();
            let groups = k.div_ceil(format.weight.group.len(k).max(1)).max(1);
            let w =
                QTensor::new(format.weight, [16, k], vec![0; 16 * k], vec![1.0; 16 * groups], Zeros::Symmetric, None);
            let w = CpuN16::pack(&w.unwrap(), false);
            for (place, parts) in [(1, 1), (2, 3)] {
                let pieces = Pieces::new(&w, place, parts);
                let (mut next, mut step) = (0, 0);
                for piece in &pieces.all {
                    assert_eq!((piece.places.0, piece.step), (next, step), "{name}");
                    (next, step) = (piece.places.1, step + piece.steps);
                    assert!(piece.range().len() * place <= piece.steps * pieces.step);
                    assert!(piece.block[1] * pieces.step <= BLOCK_BYTES, "{name}: {piece:?}");
                }
                assert_eq!((next, step), (w.places(), pieces.steps()));
                assert_eq!(pieces.blocks.iter().map(|block| block.len()).sum::<usize>(), pieces.all.len());
                let runs = |block: &Range<usize>| pieces.all[block.start].run() == pieces.all[block.end - 1].run();
                assert!(pieces.blocks.iter().all(runs), "{name}: {:?}", pieces.blocks);
                let ends = pieces.all.iter().filter(|piece| piece.ends).count();
                let begins = pieces.all.iter().filter(|piece| piece.begins).count();
                assert_eq!([begins, ends], [pieces.sums(); 2], "{name}");
                assert!(place > 1 || pieces.sums() == w.spans().len(), "{name}");
                let is_once = |block: &Range<usize>| {
                    block.clone().all(|i| i == block.start || pieces.all[i].number > pieces.all[i - 1].number)
                };
                assert!(pieces.blocks.iter().all(is_once), "no two pieces of a sum lie in one block: {name}");
                let mut x: Vec<Range<usize>> = (0..3)
                    .flat_map(|t| pieces.all.iter().map(move |piece| (t, piece)))
                    .map(|(t, piece)| pieces.x(piece, [t, 3]))
                    .collect();
                x.sort_by_key(|range| range.start);
                assert!(x.is_sorted_by(|a, b| a.end == b.start), "tiles of x lie side by side");
            }
        }
    }
}
