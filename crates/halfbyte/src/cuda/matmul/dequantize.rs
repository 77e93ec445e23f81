//! Launches of `dequantize.cu`: rows of quantised weights as floats.

use super::wna16::words_of_table;
use super::{Packed, PlainWeights, Wna16Weights, simt};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, FloatViewMut, Function, Launch, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::WeightFormat;
use crate::layout::codes::field_bits;
use crate::layout::cuda_wna16::{STEP, STRIP};
use crate::tensor::Float;
use std::ops::Range;

static SOURCE: Source = Source {
    path: "matmul/dequantize.cu",
    text: include_str!("dequantize.cu"),
    parameters: &[Output::LAYOUT, Chosen::LAYOUT, Plain::LAYOUT, Wna16::LAYOUT],
};

const OP: &str = "dequantize";

/// As in the source.
const THREADS: u32 = 256;

/// Columns of a row that a block of either kernel has, in bytes.
const PLAIN_WINDOW_BYTES: usize = 256;
const WINDOW_BYTES: usize = 512;

/// Rows R with rows R + 8 in a strip.
const PAIRS: u32 = 32;

/// Bytes behind each row in shared memory, which keep columns of threads in different banks.
const PADDING_BYTES: usize = 16;

/// Most rows of one launch, and most columns: both are far within a grid.
pub(super) const MOST_ROWS: usize = 1 << 20;
pub(super) const MOST_COLUMNS: usize = 1 << 22;

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Bits of a code's place, and what scales, offsets and codes are, as in the source.
type Held = (u32, &'static str);

/// What there is of that.
const HELD: [Held; 11] = [
    (2, "NUMBERS"),
    (2, "MULTIPLES"),
    (3, "NUMBERS"),
    (3, "MULTIPLES"),
    (4, "NUMBERS"),
    (4, "MULTIPLES"),
    (4, "TABLES"),
    (5, "NUMBERS"),
    (5, "MULTIPLES"),
    (6, "MULTIPLES"),
    (8, "NUMBERS"),
];

/// Whether columns may have been sorted: of what files hold in fewer bits than the format has they are not.
fn orders((bits, kinds): Held) -> &'static [bool] {
    if kinds == "NUMBERS" && bits != 5 { &[false, true] } else { &[false] }
}

fn held(w: &Wna16Weights) -> Held {
    let atom = w.atom();
    let kinds = match atom.table {
        Some(_) => "TABLES",
        None if atom.multiples => "MULTIPLES",
        None => "NUMBERS",
    };
    (atom.bits, kinds)
}

fn name(to: Float) -> &'static str {
    match to {
        Float::F16 => "F16",
        Float::BF16 => "BF16",
        Float::F32 => "F32",
    }
}

fn plain_instance(field_bits: u32, to: Float) -> Instance {
    Instance::new(&SOURCE, format!("dequantize_plain<{field_bits}, {}>", name(to)))
}

fn wna16_instance((bits, kinds): Held, to: Float, sorted: bool) -> Instance {
    Instance::new(&SOURCE, format!("dequantize_wna16<{bits}, {}, {sorted}, {kinds}>", name(to)))
}

/// What weights of a format are made floats by, whose columns may have been sorted.
pub(super) fn instances_of(format: WeightFormat, tensor_cores: bool, to: Float) -> Vec<Instance> {
    match tensor_cores {
        true => {
            // Codes of 8 bits may lie in 5 or 6, or be those of a table.
            let may = |&(bits, kinds): &Held| {
                if format.bits > 4 { bits > 4 || kinds == "TABLES" } else { bits == format.bits }
            };
            let held = HELD.into_iter().filter(may);
            held.flat_map(|held| orders(held).iter().map(move |&sorted| wna16_instance(held, to, sorted))).collect()
        }
        false => vec![plain_instance(field_bits(format.bits), to)],
    }
}

/// What rows that are chosen are made floats by.
pub(super) fn chosen_instances() -> Vec<Instance> {
    let plain = [2, 4, 8].map(plain_rows_instance);
    plain.into_iter().chain(HELD.map(wna16_rows_instance)).collect()
}

fn plain_rows_instance(field_bits: u32) -> Instance {
    Instance::new(&SOURCE, format!("dequantize_rows_plain<{field_bits}>"))
}

fn wna16_rows_instance((bits, kinds): Held) -> Instance {
    Instance::new(&SOURCE, format!("dequantize_rows_wna16<{bits}, {kinds}>"))
}

pub(super) fn plain_instances() -> Vec<Instance> {
    [2, 4, 8].into_iter().flat_map(|field| TYPES.map(|to| plain_instance(field, to))).collect()
}

pub(super) fn wna16_instances() -> Vec<Instance> {
    let forms = HELD.into_iter().flat_map(|held| orders(held).iter().map(move |&sorted| (held, sorted)));
    forms.flat_map(|(held, sorted)| TYPES.map(|to| wna16_instance(held, to, sorted))).collect()
}

parameters! {
    /// As in the source.
    struct Output {
        to: u64,
        pitch: u64,
        n: u32,
        k: u32,
        first: u32,
        rows: u32,
    }

    /// As in the source.
    struct Chosen {
        tokens: u64,
        out: u64,
        n: u32,
        k: u32,
        first: u32,
        scale: f32,
    }

    struct Plain {
        codes: u64,
        scales: u64,
        zeros: u64,
        group_of: u64,
        group: u32,
        middle: u32,
        scale_type: u32,
        zero_kind: u32,
    }

    struct Wna16 {
        atoms: u64,
        rows: u64,
        order: u64,
        steps: u32,
        groups: u32,
        shift: u32,
        params_bytes: u32,
        scale_type: u32,
        zero_kind: u32,
        table: [u32; 4],
        window: u32,
        twice: u32,
    }
}

/// Puts some rows of a weight, each value rounded once to the type of `to`, into a stream.
///
/// *Shapes:* `to` is `[rows, pitch]` with a pitch of k rounded up to a multiple of 8; what lies behind column k has no
/// meaning. Columns are those of the matrix, whatever order the layout has them in. *Accuracy:* the bits of
/// [`crate::format::reference::dequantize`], rounded to nearest. Values beyond the range of `to` become infinite.
/// *Errors:* scales on two levels as products of quantised activations have them; rows that do not begin at a multiple of 64 or do not lie within the matrix, a length that does not fit, memory
/// that does not begin at a multiple of 16 bytes, more than 2²⁰ rows or 2²² columns at once.
pub fn run(gpu: &Gpu, stream: &Stream, w: &Packed, rows: Range<usize>, to: &mut FloatViewMut<'_>) -> Result<()> {
    let [n, k] = w.shape();
    let fits = rows.start.is_multiple_of(STRIP) && rows.start <= rows.end && rows.end <= n;
    if !fits || rows.len() > MOST_ROWS || k > MOST_COLUMNS {
        let expected =
            format!("at most {MOST_ROWS} rows of {n}, from a multiple of {STRIP} on, of {MOST_COLUMNS} columns");
        return Err(Error::invalid(OP, expected, format!("{rows:?} of {k} columns")));
    }
    let pitch = pitch(k);
    if to.len() != rows.len() * pitch || !to.pointer().is_multiple_of(16) {
        let got = format!("{} elements at {:#x}", to.len(), to.pointer());
        return Err(Error::invalid(OP, format!("{} × {pitch} elements at a multiple of 16 bytes", rows.len()), got));
    }
    launch(gpu, stream, w, rows, (to.dtype(), to.pointer()), false)
}

/// Elements from row to row.
pub(super) fn pitch(k: usize) -> usize {
    k.next_multiple_of(8)
}

/// As [`run`], to an address; the caller has checked what that checks. `twice`: for tensor cores values that f32 does not hold may round to
/// it before they round to the type, which is faster.
pub(super) fn launch(
    gpu: &Gpu,
    stream: &Stream,
    w: &Packed,
    rows: Range<usize>,
    (to, at): (Float, u64),
    twice: bool,
) -> Result<()> {
    let [n, k] = w.shape();
    if rows.is_empty() || k == 0 {
        return Ok(());
    }
    let pitch = pitch(k);
    let output = Output {
        to: at,
        pitch: pitch as u64,
        n: n as u32,
        k: k as u32,
        first: rows.start as u32,
        rows: rows.len() as u32,
    };
    let strips = rows.len().div_ceil(STRIP) as u32;
    let (function, form, args) = match w {
        Packed::Plain(w) => {
            let windows = (pitch * to.size_bytes()).div_ceil(PLAIN_WINDOW_BYTES) as u32;
            let form = Launch { grid: [windows, strips, 1], ..Launch::linear(1, THREADS) };
            let field_bits = w.parts().field_bits;
            let key = ("dequantize_plain", [field_bits, float_type(to)]);
            (gpu.function_once(key, || plain_instance(field_bits, to))?, form, Args::plain(w))
        }
        Packed::Wna16(w) => {
            let sorted = w.order() != 0;
            let window = window(sorted, k, to, gpu.caps().shared_bytes as usize);
            let windows = pitch.div_ceil(window) as u32;
            // Rows of a block, and blocks.
            let (rows, grid) = match sorted {
                false => (STRIP, [windows, strips, 1]),
                true => (2, [strips * PAIRS, windows, 1]),
            };
            let shared_bytes = (rows * (window * to.size_bytes() + PADDING_BYTES)) as u32;
            let form = Launch { grid, shared_bytes, ..Launch::linear(1, THREADS) };
            let (args, held) = (Args::wna16(w, k, window, twice)?, held(w));
            let key = [
                HELD.iter().position(|of| *of == held).unwrap_or(HELD.len()) as u32,
                2 * float_type(to) + u32::from(sorted),
            ];
            let function = gpu.function_once(("dequantize_wna16", key), || wna16_instance(held, to, sorted))?;
            (function, form, args)
        }
    };
    put(stream, &function, &form, Arg::new(&output), &args)
}

/// Launches a kernel of the source with its parameters; the caller has checked that the output has room for the rows.
fn put(stream: &Stream, function: &Function, form: &Launch, output: Arg<'_>, weight: &Args) -> Result<()> {
    // SAFETY: the parameters are the source's; the output has room for the rows, and the rest is that of a packed weight.
    unsafe { function.launch(stream, form, &weight.after(output)) }
}

/// The second parameter.
enum Args {
    Plain(Plain),
    Wna16(Wna16),
}

impl Args {
    fn plain(w: &PlainWeights) -> Self {
        let simt::Parts { codes, scales, zeros, group_of, group, middle, scale_type, zero_kind, .. } = w.parts();
        Self::Plain(Plain { codes, scales, zeros, group_of, group, middle, scale_type, zero_kind })
    }

    /// Error: scales on two levels.
    fn wna16(w: &Wna16Weights, k: usize, window: usize, twice: bool) -> Result<Self> {
        let atom = w.atom();
        if atom.factors {
            return Err(Error::invalid(OP, "weights with one level of scales, or in layout cuda_plain", "two levels"));
        }
        Ok(Self::Wna16(Wna16 {
            atoms: w.atoms(),
            rows: w.rows(),
            order: w.order(),
            steps: k.div_ceil(STEP) as u32,
            groups: atom.groups() as u32,
            shift: if atom.group > 0 { atom.group.trailing_zeros() } else { STEP.trailing_zeros() },
            params_bytes: atom.unit_params_bytes() as u32,
            scale_type: float_type(atom.scale),
            zero_kind: simt::zero_kind(w.format().weight.zero),
            table: atom.table.map_or([0; 4], words_of_table),
            window: window as u32,
            twice: twice.into(),
        }))
    }

    fn after<'a>(&'a self, first: Arg<'a>) -> [Arg<'a>; 2] {
        match self {
            Self::Plain(plain) => [first, Arg::new(plain)],
            Self::Wna16(wna16) => [first, Arg::new(wna16)],
        }
    }
}

/// The kernel that [`rows`] launches.
pub(in crate::cuda) fn instance_of_rows(w: &Packed) -> Instance {
    match w {
        Packed::Plain(w) => plain_rows_instance(w.parts().field_bits),
        Packed::Wna16(w) => wna16_rows_instance(held(w)),
    }
}

/// Rows of a weight by their numbers, less `first`: `out[i] = scale · W[tokens[i] − first]`, each value rounded to f32 as [`run`] rounds
/// it and then times the scale; zeros for tokens that the weight has not.
///
/// *Shapes:* out `[tokens, k]`. *Errors:* scales on two levels as [`run`], lengths that do not fit.
pub(in crate::cuda) fn rows(
    gpu: &Gpu,
    stream: &Stream,
    (w, first): (&Packed, u32),
    tokens: View<'_, u32>,
    scale: f32,
    out: ViewMut<'_, f32>,
) -> Result<()> {
    let [n, k] = w.shape();
    if w.gate().is_some()
        || tokens.len().checked_mul(k) != Some(out.len())
        || k > MOST_COLUMNS
        || tokens.len() > MOST_ROWS
    {
        let expected = format!("{} rows of {k} elements, not of gates", tokens.len());
        return Err(Error::invalid(OP, expected, format!("{} elements", out.len())));
    }
    if out.is_empty() {
        return Ok(());
    }
    let chosen = Chosen { tokens: tokens.pointer(), out: out.pointer(), n: n as u32, k: k as u32, first, scale };
    let args = match w {
        Packed::Plain(w) => Args::plain(w),
        Packed::Wna16(w) => Args::wna16(w, k, 0, false)?,
    };
    let grid = [tokens.len() as u32, k.div_ceil(THREADS as usize) as u32, 1];
    let form = Launch { grid, ..Launch::linear(1, THREADS) };
    let function = gpu.function(&instance_of_rows(w))?;
    put(stream, &function, &form, Arg::new(&chosen), &args)
}

/// Columns that a block has at once of a weight for the tensor cores.
///
/// Where they lie in their order, a block has all 64 rows of a strip and few columns. Where they were sorted, it has two rows
/// and as many columns as fit in half of a multiprocessor's memory: all of them up to about 29 000 halfs on Hopper. With more,
/// each window goes through all codes.
fn window(sorted: bool, k: usize, to: Float, shared_bytes: usize) -> usize {
    let bytes = if sorted { shared_bytes / 4 - PADDING_BYTES } else { WINDOW_BYTES };
    let most = bytes / to.size_bytes() / 8 * 8;
    if sorted { pitch(k).min(most) } else { most }
}
