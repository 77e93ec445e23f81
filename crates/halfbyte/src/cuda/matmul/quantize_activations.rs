//! Launches of `quantize_activations.cu`: activations to codes of 8 bits, as [`crate::quantize::activations`] has them.

use crate::cuda::Gpu;
use crate::cuda::driver::{FloatView, Launch, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};

static SOURCE: Source = Source {
    path: "matmul/quantize_activations.cu",
    text: include_str!("quantize_activations.cu"),
    parameters: &[Params::LAYOUT],
};

const OP: &str = "quantize activations";

/// Threads of a block, columns that each of them has at once, and threads of a group that is not the whole block's.
pub(in crate::cuda) const THREADS: usize = 256;
const COLUMNS: usize = 16;
const OF_A_GROUP: [usize; 6] = [1, 2, 4, 8, 16, 32];

/// Threads of a block that has one group, at most: with few rows each thread has its columns at once, with many
/// multiprocessors have several blocks.
const MOST_THREADS: usize = 1024;
const FEW_ROWS: usize = 128;

/// Columns of a group's parts.
const PARTS: [usize; 4] = [16, 32, 64, 128];

/// Columns that codes are padded to, and those of pixels.
const STEP: usize = 128;
const BOX: usize = 64;

/// Quantised activations in memory: how they lie.
///
/// Codes are `[m][pitch]` bytes with sign, zeros from k on; those of 16 columns lie in the order of [`Form::place`]. Terms are
/// `[pieces][terms][m_pitch]` numbers; of pixels `[m][pieces][4]`, of which the first are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Rows.
    pub m: usize,
    /// Columns.
    pub k: usize,
    /// Columns of a group: a multiple of 16, or all of a row.
    pub group: usize,
    /// Columns that each set of terms is for: the group, or 16, 32, 64 or 128 columns that divide it, where terms of parts of a
    /// group are asked for. Their scales and offsets are those of the group.
    pub piece: usize,
    /// With the sums of codes.
    pub sums: bool,
    /// With offsets beside scales.
    pub offsets: bool,
    /// Rows are pixels of images, which are read in windows.
    pub pixels: bool,
}

/// Numbers that the terms of a pixel's piece take: the copy engine brings 16 bytes at least.
const TERMS_OF_PIXELS: usize = 4;

impl Form {
    /// Bytes from row to row of codes.
    pub fn pitch(self) -> usize {
        self.k.next_multiple_of(if self.pixels { BOX } else { STEP })
    }

    /// Groups of a row.
    pub fn groups(self) -> usize {
        self.k.div_ceil(self.group.max(1))
    }

    /// Pieces of a row.
    pub fn pieces(self) -> usize {
        self.k.div_ceil(self.piece.max(1))
    }

    /// Whether groups are so long that a block quantises one, and reads what its threads do not hold twice.
    pub fn is_long(self) -> bool {
        threads(self.span()) == THREADS
    }

    /// Columns of codes from a group to the next.
    fn span(self) -> usize {
        if self.groups() == 1 { self.pitch() } else { self.group }
    }

    /// Numbers between the terms of a piece and the next, and of a row and the next.
    fn term_pitches(self) -> [usize; 2] {
        match self.pixels {
            true => [TERMS_OF_PIXELS, self.pieces() * TERMS_OF_PIXELS],
            false => [self.terms() * self.m_pitch(), 1],
        }
    }

    /// Numbers of one term of a piece: one a row, and some that nobody reads.
    pub fn m_pitch(self) -> usize {
        self.m.next_multiple_of(4)
    }

    /// Terms of a piece: scales, sums of codes, offsets, as far as there are any.
    pub fn terms(self) -> usize {
        1 + usize::from(self.sums) + usize::from(self.offsets)
    }

    /// Where a term of a row's piece lies: 0 is the scale.
    pub fn term_at(self, row: usize, piece: usize, term: usize) -> usize {
        let [of_piece, of_row] = self.term_pitches();
        piece * of_piece + row * of_row + term * if self.pixels { 1 } else { self.m_pitch() }
    }

    /// Where the code of a column lies in its row.
    pub fn place(column: usize) -> usize {
        let c = column % 16;
        column - c + c % 8 / 2 * 4 + c % 2 * 2 + c / 8
    }

    /// Error: groups or pieces of them that are not as said.
    pub(super) fn check(self) -> Result<()> {
        let even = self.group.is_multiple_of(COLUMNS) || self.group >= self.k;
        let part = PARTS.contains(&self.piece) && self.group.is_multiple_of(self.piece);
        if self.group == 0 || !even || !(self.piece == self.group || part) {
            let expected = format!(
                "groups of a multiple of {COLUMNS} columns, or of all, whole or in pieces of {PARTS:?} columns"
            );
            return Err(Error::invalid(OP, expected, format!("{self:?}")));
        }
        Ok(())
    }

    /// Bytes of all codes.
    pub fn codes_bytes(self) -> usize {
        self.m * self.pitch()
    }

    /// Bytes of all terms.
    pub fn terms_bytes(self) -> usize {
        match self.pixels {
            true => 4 * self.m * self.pieces() * TERMS_OF_PIXELS,
            false => 4 * self.pieces() * self.terms() * self.m_pitch(),
        }
    }
}

parameters! {
    /// Where codes and terms go, and how rows are dealt to blocks: as in the source.
    #[derive(Debug)]
    pub(in crate::cuda) struct Target {
        codes: u64,
        scales: u64,
        sums: u64,
        offsets: u64,
        m: u64,
        k: u64,
        pitch: u64,
        piece_pitch: u64,
        row_pitch: u64,
        group: u32,
        groups: u32,
        piece: u32,
        pieces: u32,
        threads: u32,
        rows: u32,
        blocks: u32,
        padding: u32,
    }
}

impl Target {
    /// Of matrices at these addresses, codes and terms as the form says. A block has one row at most.
    pub(in crate::cuda) fn new(form: Form, [codes, terms]: [u64; 2]) -> Self {
        // From a term to the next.
        let term = if form.pixels { 4 } else { 4 * form.m_pitch() as u64 };
        let [piece_pitch, row_pitch] = form.term_pitches();
        let span = form.span();
        Self {
            codes,
            scales: terms,
            sums: if form.sums { terms + term } else { 0 },
            offsets: if form.offsets { terms + term * (1 + u64::from(form.sums)) } else { 0 },
            m: form.m as u64,
            k: form.k as u64,
            pitch: form.pitch() as u64,
            piece_pitch: piece_pitch as u64,
            row_pitch: row_pitch as u64,
            group: span as u32,
            groups: form.groups() as u32,
            // Of a row that is one group whole, all that its codes take.
            piece: if form.piece == form.group { span } else { form.piece } as u32,
            pieces: form.pieces() as u32,
            threads: if form.is_long() { MOST_THREADS } else { THREADS } as u32,
            rows: 1,
            blocks: if form.is_long() { form.groups() } else { threads_of_a_row(form).div_ceil(THREADS) } as u32,
            padding: 0,
        }
    }

    /// Short rows share blocks.
    fn sharing(self, form: Form) -> Self {
        if form.is_long() {
            return self;
        }
        let of_a_row = threads_of_a_row(form).min(THREADS);
        Self { threads: of_a_row as u32, rows: (THREADS / of_a_row) as u32, ..self }
    }

    /// The launch in which each block, of so many threads, has the rows that it is dealt. Error: more rows or blocks than a
    /// launch has.
    pub(in crate::cuda) fn launch(&self, gpu: &Gpu, threads: usize) -> Result<Launch> {
        if self.m > i32::MAX as u64 || self.blocks > 65_535 {
            let expected = "fewer than 2³¹ rows, and at most 65 535 blocks to a row";
            return Err(Error::invalid(OP, expected, format!("{} and {}", self.m, self.blocks)));
        }
        let grid = [(self.m as u32).div_ceil(self.rows), self.blocks, 1];
        Ok(gpu.overlapping(Launch { grid, ..Launch::linear(1, threads as u32) }))
    }
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        order: u64,
        to: Target,
        x_type: u32,
        aligned: u32,
    }
}

/// Threads that share a group whose codes take so many columns.
fn threads(span: usize) -> usize {
    OF_A_GROUP.into_iter().find(|threads| threads * COLUMNS >= span).unwrap_or(THREADS)
}

/// Threads of a block; of one that has a group for itself, as many as its columns keep busy.
fn block_of(form: Form) -> usize {
    if !form.is_long() {
        return THREADS;
    }
    let most = if form.m <= FEW_ROWS { MOST_THREADS } else { THREADS };
    form.span().div_ceil(COLUMNS).next_multiple_of(32).min(most)
}

/// Threads of a row with short groups, those of codes behind the last group among them.
fn threads_of_a_row(form: Form) -> usize {
    form.pitch().div_ceil(form.span().max(1)) * threads(form.span())
}

/// A kernel that quantises rows, for a form.
pub(in crate::cuda) fn quantizer(source: &'static Source, kernel: &str, form: Form) -> Instance {
    of_threads(source, kernel, threads(form.span()), form.offsets)
}

/// The same for every number of columns.
pub(in crate::cuda) fn quantizers(source: &'static Source, kernel: &str) -> Vec<Instance> {
    let all = OF_A_GROUP.into_iter().chain([THREADS]);
    all.flat_map(|threads| [false, true].map(|offsets| of_threads(source, kernel, threads, offsets))).collect()
}

fn of_threads(source: &'static Source, kernel: &str, threads: usize, offsets: bool) -> Instance {
    Instance::new(source, format!("{kernel}<{threads}, {offsets}>"))
}

/// The kernel for a form.
pub(in crate::cuda) fn instance(form: Form) -> Instance {
    quantizer(&SOURCE, "quantize_activations", form)
}

pub(super) fn instances() -> Vec<Instance> {
    quantizers(&SOURCE, "quantize_activations")
}

/// Puts it into a stream. Shapes: x `[m, k]`, order `[k]` (the column of x for each place, if not the same), codes and terms as
/// [`Form`] says. Errors: lengths that do not fit.
pub fn quantize_activations(
    gpu: &Gpu,
    stream: &Stream,
    form: Form,
    x: FloatView<'_>,
    order: Option<View<'_, u32>>,
    codes: ViewMut<'_, u8>,
    terms: ViewMut<'_, f32>,
) -> Result<()> {
    let fits = |what: &str, expected: Option<usize>, got: usize| match expected == Some(got) {
        true => Ok(()),
        false => Err(Error::invalid(OP, format!("{expected:?} elements of {what}"), got.to_string())),
    };
    form.check()?;
    fits("x", form.m.checked_mul(form.k), x.len())?;
    fits("codes", form.m.checked_mul(form.pitch()), codes.len())?;
    fits("terms", Some(form.terms_bytes() / 4), terms.len())?;
    if let Some(order) = order {
        fits("order", Some(form.k), order.len())?;
    }
    if form.m == 0 || form.k == 0 {
        return Ok(());
    }
    run(gpu, stream, form, x, order.map_or(0, |order| order.pointer()), [codes.pointer(), terms.pointer()])
}

/// Puts it into a stream: `codes` and `terms` are addresses of whole matrices, as is `order` `[k]`, or 0.
pub(in crate::cuda) fn run(
    gpu: &Gpu,
    stream: &Stream,
    form: Form,
    x: FloatView<'_>,
    order: u64,
    [codes, terms]: [u64; 2],
) -> Result<()> {
    let params = Params {
        x: x.pointer(),
        order,
        to: Target::new(form, [codes, terms]).sharing(form),
        x_type: float_type(x.dtype()),
        aligned: (x.pointer().is_multiple_of(16) && (form.k * x.dtype().size_bytes()).is_multiple_of(16)).into(),
    };
    let launch = params.to.launch(gpu, block_of(form))?;
    let key = ("quantize_activations", [threads(form.span()) as u32, form.offsets.into()]);
    let function = gpu.function_once(key, || instance(form))?;
    function.launch_typed(stream, &launch, &params, &[])
}
