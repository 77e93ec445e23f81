//! Matrix products in f64: a right-hand side repacked once, multiplied by many rows.
//!
//! Each element is a sum in one fixed order, whatever rows it is computed with: results do not depend on how rows are
//! divided among threads. They depend on the processor as far as one that multiplies and adds with one rounding does so.

use pulp::{Arch, Simd, WithSimd};
use std::ops::Range;

/// Columns that the innermost loop handles at a time: a vector of AVX-512, two of AVX2.
const COLUMNS: usize = 8;
/// Rows that it handles at a time: as many sums on their way as hide how long an addition takes.
const ROWS: usize = 4;
/// Terms of a sum that are added up before the sum goes back to memory: a strip of this length stays in the cache.
const DEPTH: usize = 256;

/// A matrix `[depth, width]`, in strips of `COLUMNS`.
pub(super) struct Panel {
    /// Chunks of `DEPTH` rows one after the other; in a chunk its strips; in a strip its rows.
    packed: Vec<[f64; COLUMNS]>,
    depth: usize,
    width: usize,
}

impl Panel {
    /// Repacks a matrix given by its rows, each of at least `width` elements.
    pub(super) fn from_rows<'a, T: Copy + Into<f64> + 'a>(
        [depth, width]: [usize; 2],
        row: impl Fn(usize) -> &'a [T],
    ) -> Self {
        let mut panel = Self::zeros([depth, width]);
        for chunk in panel.chunks() {
            for d in chunk.clone() {
                for (s, columns) in row(d)[..width].chunks(COLUMNS).enumerate() {
                    let at = panel.strip(&chunk, s).start + d - chunk.start;
                    for (to, &from) in panel.packed[at].iter_mut().zip(columns) {
                        *to = from.into();
                    }
                }
            }
        }
        panel
    }

    /// Repacks a matrix given by its columns, each of at least `depth` elements.
    pub(super) fn from_columns<'a>([depth, width]: [usize; 2], column: impl Fn(usize) -> &'a [f64]) -> Self {
        let mut panel = Self::zeros([depth, width]);
        for chunk in panel.chunks() {
            for c in 0..width {
                let strip = panel.strip(&chunk, c / COLUMNS);
                for (to, &from) in panel.packed[strip].iter_mut().zip(&column(c)[chunk.clone()]) {
                    to[c % COLUMNS] = from;
                }
            }
        }
        panel
    }

    /// Repacks a matrix given by its elements.
    pub(super) fn from_fn([depth, width]: [usize; 2], element: impl Fn(usize, usize) -> f64) -> Self {
        let mut panel = Self::zeros([depth, width]);
        for chunk in panel.chunks() {
            for c in 0..width {
                let strip = panel.strip(&chunk, c / COLUMNS);
                for (to, d) in panel.packed[strip].iter_mut().zip(chunk.clone()) {
                    to[c % COLUMNS] = element(d, c);
                }
            }
        }
        panel
    }

    fn zeros([depth, width]: [usize; 2]) -> Self {
        Self { packed: vec![[0.0; COLUMNS]; depth * width.div_ceil(COLUMNS)], depth, width }
    }

    fn chunks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let depth = self.depth;
        (0..depth).step_by(DEPTH).map(move |d| d..(d + DEPTH).min(depth))
    }

    /// Where strip `s` of a chunk lies.
    fn strip(&self, chunk: &Range<usize>, s: usize) -> Range<usize> {
        let from = chunk.start * self.width.div_ceil(COLUMNS) + s * chunk.len();
        from..from + chunk.len()
    }

    /// `x[.., to..to + width] −= x[.., from..from + depth] · panel`, for x in rows of `stride`.
    pub(super) fn subtract_from(&self, x: &mut [f64], stride: usize, from: usize, to: usize) {
        // Rows a power of two apart fall on the same lines of a cache: few of them at a time are used for all strips.
        for chunk in self.chunks() {
            for rows in x.chunks_mut(ROWS * stride) {
                let last = rows.len() / stride - 1;
                for (s, to) in (to..to + self.width).step_by(COLUMNS).enumerate() {
                    let strip = &self.packed[self.strip(&chunk, s)];
                    let left = std::array::from_fn(|i| &rows[i.min(last) * stride + from..][chunk.start..chunk.end]);
                    let product = tile(left, strip);
                    let columns = COLUMNS.min(self.width - s * COLUMNS);
                    for (row, product) in rows.chunks_mut(stride).zip(product) {
                        row[to..to + columns].iter_mut().zip(product).for_each(|(x, p)| *x -= p);
                    }
                }
            }
        }
    }

    /// `y[i, j] += (left · panel)[first + i, j]` for `j ≤ first + i`, with y in rows of `width`, row `i` of it row
    /// `first + i` of the whole, and `left` `[.., depth]` the whole left-hand side.
    pub(super) fn add_lower_to(&self, y: &mut [f64], first: usize, left: &[f64]) {
        self.add(y, first, left, |row| row + 1);
    }

    /// The same for all j.
    pub(super) fn add_to(&self, y: &mut [f64], first: usize, left: &[f64]) {
        self.add(y, first, left, |_| self.width);
    }

    /// The same for the tiles that hold any of the first `reach(i)` elements of a row i; reach does not fall with i.
    fn add(&self, y: &mut [f64], first: usize, left: &[f64], reach: impl Fn(usize) -> usize) {
        for chunk in self.chunks() {
            for s in 0..reach(first + y.len() / self.width - 1).div_ceil(COLUMNS) {
                let strip = &self.packed[self.strip(&chunk, s)];
                let columns = s * COLUMNS..((s + 1) * COLUMNS).min(self.width);
                for (t, rows) in y.chunks_mut(ROWS * self.width).enumerate() {
                    let (row, count) = (first + t * ROWS, rows.len() / self.width);
                    if columns.start >= reach(row + count - 1) {
                        continue;
                    }
                    let left =
                        std::array::from_fn(|i| &left[(row + i.min(count - 1)) * self.depth..][chunk.start..chunk.end]);
                    let product = tile(left, strip);
                    for (row, product) in rows.chunks_mut(self.width).zip(product) {
                        row[columns.clone()].iter_mut().zip(product).for_each(|(y, p)| *y += p);
                    }
                }
            }
        }
    }
}

/// Columns that are settled, or carried to, at a time.
pub(super) const BLOCK: usize = 128;

/// `range` in pieces of a block.
pub(super) fn pieces(range: Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    let end = range.end;
    range.step_by(BLOCK).map(move |from| from..(from + BLOCK).min(end))
}

/// How many of n rows that do not depend on each other a thread takes at a time: enough to make use of a panel, few
/// enough to keep all threads busy.
pub(super) fn rows_at_a_time(n: usize) -> usize {
    (n / (4 * rayon::current_num_threads())).clamp(16, 128)
}

/// Some rows times one strip.
fn tile(left: [&[f64]; ROWS], strip: &[[f64; COLUMNS]]) -> [[f64; COLUMNS]; ROWS] {
    let left = left.map(|row| &row[..strip.len()]);
    match Arch::new() {
        // Without the instruction, a multiplication and an addition with one rounding are many.
        Arch::Scalar => {
            let mut sums = [[0.0; COLUMNS]; ROWS];
            for (d, right) in strip.iter().enumerate() {
                for (sums, row) in sums.iter_mut().zip(left) {
                    sums.iter_mut().zip(right).for_each(|(sum, r)| *sum += row[d] * r);
                }
            }
            sums
        }
        arch => arch.dispatch(Fused { left, strip }),
    }
}

/// [`tile`] by vectors, each sum in one of its own.
struct Fused<'a> {
    left: [&'a [f64]; ROWS],
    strip: &'a [[f64; COLUMNS]],
}

impl WithSimd for Fused<'_> {
    type Output = [[f64; COLUMNS]; ROWS];

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
        match S::F64_LANES {
            8 => self.by::<S, 1>(simd),
            4 => self.by::<S, 2>(simd),
            2 => self.by::<S, 4>(simd),
            _ => self.by::<S, COLUMNS>(simd),
        }
    }
}

impl Fused<'_> {
    /// With `VECTORS` a strip is wide.
    #[inline(always)]
    fn by<S: Simd, const VECTORS: usize>(self, simd: S) -> [[f64; COLUMNS]; ROWS] {
        let mut sums = [[simd.splat_f64s(0.0); VECTORS]; ROWS];
        for (d, right) in self.strip.iter().enumerate() {
            let right = S::as_simd_f64s(right).0;
            for row in 0..ROWS {
                let left = simd.splat_f64s(self.left[row][d]);
                for v in 0..VECTORS {
                    sums[row][v] = simd.mul_add_f64s(left, right[v], sums[row][v]);
                }
            }
        }
        let mut product = [[0.0; COLUMNS]; ROWS];
        for row in 0..ROWS {
            S::as_mut_simd_f64s(&mut product[row]).0.copy_from_slice(&sums[row]);
        }
        product
    }
}
