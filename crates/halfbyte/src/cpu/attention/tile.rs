//! Attention of a few rows of queries to the keys and values of one head.

use super::Attention;
use super::cache::{Cached, Line, PANEL, Part, padded};
use super::element::Element;
use super::product::{Factor, product};
use super::scores::{SoFar, Weigh, share};
use super::{KvType, PAGE_LENGTH};
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Simd};
use crate::cpu::nn::exp2;
use half::{bf16, f16};
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

/// Elements from a row of weights to the next. The extra line keeps rows out of each other's cache sets.
pub(super) const WEIGHTS_ROW: usize = PAGE_LENGTH + 16;

/// Rows of a full tile: with two vectors of scores for each, they fill the registers.
pub(super) fn tile_rows(isa: Isa) -> usize {
    match isa {
        Isa::Avx512 | Isa::Amx => 12,
        Isa::Avx2 | Isa::AvxVnni => 6,
        Isa::Plain => 4,
    }
}

/// Consecutive rows of one key and value head. Row `i` is query `i / group` of head `i % group` in the group.
#[derive(Clone, Copy)]
pub(super) struct Tile<'a> {
    pub(super) what: Attention<'a>,
    pub(super) cached: Cached<'a>,
    pub(super) kv_head: usize,
    pub(super) first_row: usize,
    pub(super) rows: usize,
}

impl Tile<'_> {
    /// The pages in which some row sees a position.
    pub(super) fn pages(&self) -> Range<usize> {
        self.seen(0).start / PAGE_LENGTH..self.seen(self.rows - 1).end.div_ceil(PAGE_LENGTH)
    }

    fn query_of(&self, row: usize) -> usize {
        (self.first_row + row) / self.what.heads.group()
    }

    fn head_of(&self, row: usize) -> usize {
        let group = self.what.heads.group();
        self.kv_head * group + (self.first_row + row) % group
    }

    /// Positions that a row sees.
    fn seen(&self, row: usize) -> Range<usize> {
        let query = self.query_of(row);
        self.what.first_seen(query)..self.what.first_position + query + 1
    }

    /// A row's slope, as scores of powers of two have it, and its position.
    pub(super) fn alibi(&self, row: usize) -> (f32, usize) {
        let slope = self.what.alibi.map_or(0.0, |slopes| slopes[self.head_of(row)]);
        (slope * std::f32::consts::LOG2_E, self.what.first_position + self.query_of(row))
    }

    /// The sink of a row's head, as scores of powers of two have it.
    fn sink(&self, row: usize) -> Option<f32> {
        self.what.sinks.map(|sinks| sinks[self.head_of(row)] * std::f32::consts::LOG2_E)
    }

    /// Where a row's output goes.
    fn place(&self, row: usize) -> Range<usize> {
        let heads = self.what.heads;
        let start = (self.query_of(row) * heads.heads + self.head_of(row)) * heads.head_size;
        start..start + heads.head_size
    }
}

/// Buffers that a thread keeps for its tiles.
#[derive(Default)]
pub(super) struct Scratch {
    /// Scaled queries, `[head_size][tile height]`.
    queries: Vec<Line>,
    /// Scores, then weights, of a page: `[tile height][WEIGHTS_ROW]`.
    weights: Vec<Line>,
    /// Sums of weighted values, `[tile height][padded head size]`.
    sums: Vec<Line>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
    static PARTS: RefCell<Vec<Line>> = RefCell::default();
}

/// Calls `then` with this thread's buffers.
pub(super) fn with_scratch(then: impl FnOnce(&mut Scratch)) {
    SCRATCH.with_borrow_mut(then);
}

/// Calls `then` with `len` floats that this thread keeps.
pub(super) fn with_part_buffer(len: usize, then: impl FnOnce(&mut [f32])) {
    PARTS.with_borrow_mut(|buffer| then(floats(buffer, len)));
}

/// The first `len` floats of a buffer, which grows to hold them.
fn floats(buffer: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, bytemuck::Zeroable::zeroed());
    }
    &mut bytemuck::cast_slice_mut(buffer)[..len]
}

/// Attends to the positions in `pages`; leaves the sums of weighted values in `scratch`.
pub(super) struct Attend<'a> {
    pub(super) tile: Tile<'a>,
    pub(super) pages: Range<usize>,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = Totals;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Totals {
        match self.tile.cached.kv() {
            KvType::F32 => self.with::<S, f32>(s),
            KvType::F16 => self.with::<S, f16>(s),
            KvType::Bf16 => self.with::<S, bf16>(s),
            KvType::Int8 => self.with::<S, i8>(s),
        }
    }
}

impl<'a> Attend<'a> {
    #[inline(always)]
    fn with<S: Simd, E: Element>(self, s: S) -> Totals {
        match self.tile.rows {
            1 => s.apart(self.rows::<E, 1>()),
            2 => s.apart(self.rows::<E, 2>()),
            3 => s.apart(self.rows::<E, 3>()),
            4 => s.apart(self.rows::<E, 4>()),
            5..=6 if const { S::LANES >= 8 } => s.apart(self.rows::<E, 6>()),
            7..=8 if const { S::LANES == 16 } => s.apart(self.rows::<E, 8>()),
            9..=12 if const { S::LANES == 16 } => s.apart(self.rows::<E, 12>()),
            rows => unreachable!("a tile of {rows} rows with vectors of {}", S::LANES),
        }
    }

    fn rows<E, const R: usize>(self) -> AttendRows<'a, E, R> {
        AttendRows { attend: self, element: PhantomData }
    }
}

/// [`Attend`] for elements of a type and tiles of up to `R` rows, a function of its own: all of them in one took the compiler longest of
/// all functions.
struct AttendRows<'a, E, const R: usize> {
    attend: Attend<'a>,
    element: PhantomData<E>,
}

impl<E: Element, const R: usize> Kernel for AttendRows<'_, E, R> {
    type Output = Totals;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Totals {
        let Attend { tile, pages, scratch } = self.attend;
        attend::<S, E, R>(s, &tile, pages, scratch)
    }
}

/// What is known of each row after attending: the greatest score, and Σ 2^(score − greatest).
pub(super) struct Totals {
    max: [f32; 16],
    sum: [f32; 16],
}

/// Divides the sums of weighted values by the sums of weights, into the outputs.
pub(super) struct Finish<'a> {
    pub(super) tile: Tile<'a>,
    pub(super) totals: Totals,
    pub(super) scratch: &'a Scratch,
    pub(super) out: &'a DisjointMut<'a, f32>,
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let stride = padded(self.tile.what.heads.head_size);
        let sums: &[f32] = bytemuck::cast_slice(&self.scratch.sums);
        for (row, sums) in sums.chunks_exact(stride).take(self.tile.rows).enumerate() {
            // SAFETY: each row of each head is in one tile.
            let out = unsafe { self.out.range(self.tile.place(row)) };
            let factor = share(s, self.totals.max[row], self.totals.sum[row], self.tile.sink(row));
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = sum * factor;
            }
        }
    }
}

/// Where a part's state lies in a buffer: the maxima, the sums of weights, the sums of weighted values.
#[derive(Clone, Copy)]
pub(super) struct PartLayout {
    rows: usize,
    stride: usize,
}

impl PartLayout {
    pub(super) fn new(rows: usize, head_size: usize) -> Self {
        Self { rows, stride: padded(head_size) }
    }

    /// Elements of a state.
    pub(super) fn len(self) -> usize {
        32 + self.rows * self.stride
    }

    /// Keeps what a part's tile came to.
    pub(super) fn save(self, totals: &Totals, scratch: &Scratch, state: &mut [f32]) {
        state[..16].copy_from_slice(&totals.max);
        state[16..32].copy_from_slice(&totals.sum);
        state[32..].copy_from_slice(&bytemuck::cast_slice(&scratch.sums)[..self.rows * self.stride]);
    }
}

/// Puts the states of the parts of a tile together and writes the outputs.
pub(super) struct Merge<'a> {
    pub(super) tile: Tile<'a>,
    pub(super) layout: PartLayout,
    pub(super) states: &'a [f32],
    pub(super) out: &'a DisjointMut<'a, f32>,
}

impl Kernel for Merge<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let states = || self.states.chunks_exact(self.layout.len());
        for row in 0..self.tile.rows {
            // SAFETY: this thread alone writes now.
            let out = unsafe { self.out.range(self.tile.place(row)) };
            let max = states().map(|state| state[row]).fold(f32::MIN, |a, b| if b > a { b } else { a });
            out.fill(0.0);
            let mut total = 0.0;
            for state in states() {
                let weight = s.to_array(exp2(s, s.splat(state[row] - max)))[0];
                total += weight * state[16 + row];
                let sums = &state[32 + row * self.layout.stride..];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += weight * sum);
            }
            let factor = share(s, max, total, self.tile.sink(row));
            out.iter_mut().for_each(|out| *out *= factor);
        }
    }
}

/// Tiles of up to `R` rows. Rows beyond the tile's are like its last with a query of zeros.
#[inline(always)]
fn attend<S: Simd, E: Element, const R: usize>(
    s: S,
    tile: &Tile<'_>,
    pages: Range<usize>,
    scratch: &mut Scratch,
) -> Totals {
    let heads = tile.what.heads;
    let stride = padded(heads.head_size);
    let queries = floats(&mut scratch.queries, heads.head_size * R);
    let weights = floats(&mut scratch.weights, R * WEIGHTS_ROW);
    let sums = floats(&mut scratch.sums, R * stride);
    pack_queries::<R>(tile, queries);
    sums.fill(0.0);
    let seen: [Range<usize>; R] = std::array::from_fn(|row| tile.seen(row.min(tile.rows - 1)));
    // Later rows neither start nor end earlier.
    let (seen_by_one, seen_by_all) = (seen[0].start..seen[R - 1].end, seen[R - 1].start..seen[0].end);
    let mut so_far = SoFar { max: [f32::MIN; 16], sum: [[0.0; 16]; 16], rescale: [1.0; 16] };
    for index in pages {
        let page = within_page(&seen_by_one, index);
        if page.is_empty() {
            continue;
        }
        let [keys, values] = tile.cached.page::<E>(tile.kv_head, index);
        let columns = page.start / S::LANES..page.end.div_ceil(S::LANES);
        scores::<S, E, R>(s, queries, keys, columns, weights);
        let seen: [Range<usize>; R] = std::array::from_fn(|row| within_page(&seen[row], index));
        let scales = E::SCALED.then_some(values.scales);
        s.apart(Weigh { tile, index, seen: &seen, weights: &mut *weights, scales, so_far: &mut so_far });

        let common = within_page(&seen_by_all, index);
        add_values::<S, E, R>(s, weights, values.elements, common.clone(), &so_far.rescale, sums);
        for row in 0..R {
            let seen = &seen[row];
            let (before, after) = match common.is_empty() {
                true => (seen.clone(), 0..0),
                false => (seen.start..common.start, common.end..seen.end),
            };
            for edge in [before, after] {
                if !edge.is_empty() {
                    let (weights, sums) = (&weights[row * WEIGHTS_ROW..], &mut sums[row * stride..][..stride]);
                    s.apart(AddEdge { weights, values: values.elements, positions: edge, sums });
                }
            }
        }
    }
    let mut sum = [0.0; 16];
    for row in 0..R {
        sum[row] = s.sum(s.load(&so_far.sum[row]));
    }
    Totals { max: so_far.max, sum }
}

/// Adds the values of positions that not all rows see to the sums of one.
struct AddEdge<'a, E> {
    weights: &'a [f32],
    values: &'a [E],
    positions: Range<usize>,
    sums: &'a mut [f32],
}

impl<E: Element> Kernel for AddEdge<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        add_values::<S, E, 1>(s, self.weights, self.values, self.positions, &[1.0; 16], self.sums);
    }
}

/// The part of `positions` in page `index`, counted from the page's start.
#[inline(always)]
fn within_page(positions: &Range<usize>, index: usize) -> Range<usize> {
    let base = index * PAGE_LENGTH;
    let cut = |position: usize| position.max(base).min(base + PAGE_LENGTH) - base;
    cut(positions.start)..cut(positions.end)
}

/// Queries times the scale and log₂ e, so that weights are powers of two.
#[inline(always)]
fn pack_queries<const R: usize>(tile: &Tile<'_>, queries: &mut [f32]) {
    let heads = tile.what.heads;
    let scale = tile.what.scale * std::f32::consts::LOG2_E;
    for row in 0..R {
        let to = queries[row..].iter_mut().step_by(R);
        if row < tile.rows {
            let from = &tile.what.qkv[tile.query_of(row) * heads.row() + tile.head_of(row) * heads.head_size..];
            to.zip(&from[..heads.head_size]).for_each(|(to, from)| *to = from * scale);
        } else {
            to.for_each(|to| *to = 0.0);
        }
    }
}

/// Scores of `columns` (vectors of positions) of a page, into the rows of `weights`.
#[inline(always)]
fn scores<S: Simd, E: Element, const R: usize>(
    s: S,
    queries: &[f32],
    keys: Part<'_, E>,
    columns: Range<usize>,
    weights: &mut [f32],
) {
    match (S::LANES, R) {
        (16, 1 | 2) => score_columns::<S, E, R, 1, 4>(s, queries, keys, columns, weights),
        (16, 3 | 4) => score_columns::<S, E, R, 1, 2>(s, queries, keys, columns, weights),
        (_, 1 | 2) => score_columns::<S, E, R, 2, 2>(s, queries, keys, columns, weights),
        _ => score_columns::<S, E, R, 2, 1>(s, queries, keys, columns, weights),
    }
}

/// `C` columns at a time, each sum in `U` parts.
#[inline(always)]
fn score_columns<S: Simd, E: Element, const R: usize, const C: usize, const U: usize>(
    s: S,
    queries: &[f32],
    keys: Part<'_, E>,
    columns: Range<usize>,
    weights: &mut [f32],
) {
    let mut column = columns.start;
    while column + C <= columns.end {
        score_some::<S, E, R, C, U>(s, queries, keys, column, weights);
        column += C;
    }
    while column < columns.end {
        score_some::<S, E, R, 1, U>(s, queries, keys, column, weights);
        column += 1;
    }
}

#[inline(always)]
fn score_some<S: Simd, E: Element, const R: usize, const C: usize, const U: usize>(
    s: S,
    queries: &[f32],
    keys: Part<'_, E>,
    column: usize,
    weights: &mut [f32],
) {
    let head_size = queries.len() / R;
    let b = std::array::from_fn(|c| {
        let position = (column + c) * S::LANES;
        &keys.elements[position / PANEL * PANEL * head_size + position % PANEL..]
    });
    let acc = product::<S, E, R, C, U>(s, Factor { of: queries, row: 1, step: R }, b, PANEL, head_size);
    for row in 0..R {
        for c in 0..C {
            let position = (column + c) * S::LANES;
            let score = if E::SCALED { s.mul(acc[row][c], s.load(&keys.scales[position..])) } else { acc[row][c] };
            s.store(&mut weights[row * WEIGHTS_ROW + position..], score);
        }
    }
}

/// `sums = sums · rescale + weights · values` over `positions` of a page.
#[inline(always)]
fn add_values<S: Simd, E: Element, const R: usize>(
    s: S,
    weights: &[f32],
    values: &[E],
    positions: Range<usize>,
    rescale: &[f32; 16],
    sums: &mut [f32],
) {
    let weights = &weights[positions.start..];
    let values = &values[positions.start * (sums.len() / R)..];
    match (S::LANES, R) {
        (_, 1) => add_columns::<S, E, R, 4, 2>(s, weights, values, positions.len(), rescale, sums),
        (16, 2..=6) | (8, 2) => add_columns::<S, E, R, 4, 1>(s, weights, values, positions.len(), rescale, sums),
        _ => add_columns::<S, E, R, 2, 1>(s, weights, values, positions.len(), rescale, sums),
    }
}

/// `C` vectors of a row at a time, each sum in `U` parts.
#[inline(always)]
fn add_columns<S: Simd, E: Element, const R: usize, const C: usize, const U: usize>(
    s: S,
    weights: &[f32],
    values: &[E],
    positions: usize,
    rescale: &[f32; 16],
    sums: &mut [f32],
) {
    let columns = sums.len() / R / S::LANES;
    let mut column = 0;
    while column + C <= columns {
        add_some::<S, E, R, C, U>(s, weights, values, positions, rescale, (column, sums));
        column += C;
    }
    while column < columns {
        add_some::<S, E, R, 1, U>(s, weights, values, positions, rescale, (column, sums));
        column += 1;
    }
}

#[inline(always)]
fn add_some<S: Simd, E: Element, const R: usize, const C: usize, const U: usize>(
    s: S,
    weights: &[f32],
    values: &[E],
    positions: usize,
    rescale: &[f32; 16],
    (column, sums): (usize, &mut [f32]),
) {
    let stride = sums.len() / R;
    let b = std::array::from_fn(|c| &values[((column + c) * S::LANES).min(values.len())..]);
    let acc = product::<S, E, R, C, U>(s, Factor { of: weights, row: WEIGHTS_ROW, step: 1 }, b, stride, positions);
    for row in 0..R {
        for c in 0..C {
            let sum = &mut sums[row * stride + (column + c) * S::LANES..];
            let new = s.mul_add(s.load(sum), s.splat(rescale[row]), acc[row][c]);
            s.store(sum, new);
        }
    }
}
