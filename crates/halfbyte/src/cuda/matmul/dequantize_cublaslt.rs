//! Weights as floats in the workspace, then cuBLASLt: the time that no product need exceed.
//!
//! ```text
//! for some rows of W at a time:     W → floats of x's type, each rounded once             dequantize.cu
//!     y[:, rows] = x · Wᵀ           sums in f32, rounded once to y                        cuBLASLt
//!     or: sums in f32 to memory, then y[:, rows] = activation(sums + bias), rounded once  finish.cu
//! ```
//!
//! Sums go to memory where there is a bias or an activation, or y has a type that cuBLASLt does not give for x's; where y is
//! f32 they are finished in place. The workspace is bounded: [`SLAB_BYTES`] of weights and [`SUMS_BYTES`] of sums.
//!
//! *Accuracy:* [`Kernel::bound`](super::Kernel::bound); with x a half float weights are rounded to its type, those with scales in f32 or
//! offsets to f32 before. Of 512 terms or more of like size these
//! roundings, of either sign, average out and leave the bound of exact weights alone; fewer terms, and a y that is finer than
//! x where the weight does not allow it ([`Packed::allow_rounded_weights`](super::Packed::allow_rounded_weights)), are not served. f16 weights must be within f16's range, so that f16 x needs f16 scales. x in f32 is multiplied by weights
//! in f32, without TF32.
//!
//! It reads the layouts of other kernels and has none of its own: weights are never packed for it. When it is chosen: [`pays`].

use super::finish::{self, Finish};
use super::kernel::{Configuration, Configured, Kernel, is_same};
use super::{Call, dequantize, simt, wna16, wna16_mma, wna16_sm90, wna16_split};
use crate::cuda::cublaslt::{self, Matrices, alignment};
use crate::cuda::driver::{Stream, View};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::format::Format;
use crate::kernel::{Activation, Problem, Reason};
use crate::layout::cuda_wna16::STRIP;
use crate::tensor::Float;

const NAME: &str = "dequantize_cublaslt";

/// Of weights that were packed for the tensor cores.
pub(super) const WNA16: Kernel = Kernel {
    name: NAME,
    layout: wna16::LAYOUT,
    what: "weights to floats in the workspace, then cuBLASLt",
    packs: false,
    batch_invariant: false,
    serves: |arch| arch.number >= 75,
    instances: |_| dequantize::wna16_instances().into_iter().chain([finish::instance()]).collect(),
    every_instance: |_, format, [x, _]| every_instance(format, x, wna16::LAYOUT),
    choose: |caps, problem, _| choose(caps, problem, wna16::LAYOUT),
    candidates: |caps, problem| choose(caps, problem, wna16::LAYOUT).map(|_| Vec::new()),
    rows_form: |_| None,
    rounds_weights: |_, problem| problem.x != Float::F32,
    workspace_bytes: |_, problem| Division::new(problem, SLAB_BYTES).bytes(),
    holds: wna16_sm90::KERNEL.holds,
    pack: wna16_sm90::KERNEL.pack,
};

/// Of weights in the plain layout.
pub(super) const PLAIN: Kernel = Kernel {
    layout: simt::LAYOUT,
    instances: |_| dequantize::plain_instances().into_iter().chain([finish::instance()]).collect(),
    every_instance: |_, format, [x, _]| every_instance(format, x, simt::LAYOUT),
    choose: |caps, problem, _| choose(caps, problem, simt::LAYOUT),
    candidates: |caps, problem| choose(caps, problem, simt::LAYOUT).map(|_| Vec::new()),
    holds: simt::KERNEL.holds,
    pack: simt::KERNEL.pack,
    ..WNA16
};

/// Weights that are floats at a time, unless 64 rows take more.
pub const SLAB_BYTES: usize = 256 << 20;

/// Sums that lie in memory at a time, unless those of one row take more.
pub const SUMS_BYTES: usize = 128 << 20;

/// Terms from which on the roundings of weights average out.
const LEAST_TERMS: usize = 512;

/// Where parts of the workspace begin.
const ALIGNMENT: usize = 256;

/// Columns from which on it is faster than the plain kernel, whose time for few rows is theirs alone; below, two launches and
/// a workspace are not worth it.
const LEAST_COLUMNS: usize = 256;

/// Rows from which on it is faster than `wna16_mma`: with (21504, 14336) that takes 1.6 µs a row, the floor 300 and 0.77 a row.
const MOST_ROWS_OF_MMA: usize = 384;

/// What weights are made floats by, and what comes after the product of cuBLASLt.
fn every_instance(format: Format, x: Float, layout: &str) -> Vec<Instance> {
    if format.act.is_quantized() {
        return Vec::new();
    }
    let to_floats = dequantize::instances_of(format.weight, layout == wna16::LAYOUT, x);
    to_floats.into_iter().chain([finish::instance()]).collect()
}

fn choose(caps: &Caps, problem: &Problem, layout: &'static str) -> std::result::Result<Configuration, Reason> {
    computes(caps, problem, layout)?;
    pays(caps, problem, layout)?;
    Ok(Configuration::new(Slabs { bytes: SLAB_BYTES, layout }))
}

/// Bytes of weights that are floats at a time, and where they come from.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Slabs {
    bytes: usize,
    layout: &'static str,
}

/// `slabs of 256 MiB`.
impl std::fmt::Display for Slabs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "slabs of {} MiB", self.bytes >> 20)
    }
}

impl Configured for Slabs {
    fn is(&self, other: &dyn Configured) -> bool {
        is_same(self, other)
    }

    fn instances(&self, problem: &Problem, _: Activation) -> Vec<Instance> {
        problem.format.map_or_else(Vec::new, |format| every_instance(format, problem.x, self.layout))
    }

    fn workspace_bytes(&self, _: &Caps, problem: &Problem, _: bool) -> usize {
        Division::new(problem, self.bytes).bytes()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
        run(self.bytes, gpu, stream, call)
    }
}

/// Whether it is faster than the other kernels of a layout, or why not: a pure function of what was measured on an H200
/// (`docs/decisions/0008-the-floor.md`).
///
/// Weights for the tensor cores: where `wna16_sm90` serves, of some hundred rows on with small groups whose scales or offsets apply to sums, else never; from
/// 384 on where `wna16_mma` does; with x in f32 where `wna16_split` does not, else never. Plain weights: always, from one row on.
pub fn pays(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    if layout != wna16::LAYOUT {
        return match problem.k {
            ..LEAST_COLUMNS => Err(Reason(format!("is faster from {LEAST_COLUMNS} columns on, k is {}", problem.k))),
            _ => Ok(()),
        };
    }
    if problem.x == Float::F32 && wna16_split::KERNEL.supports(caps, problem).is_ok() {
        return Err(Reason("is slower than wna16_split for every number of rows".into()));
    }
    if wna16_sm90::KERNEL.supports(caps, problem).is_ok() {
        return Err(Reason("is slower than wna16_sm90 for every number of rows".into()));
    }
    if problem.m < MOST_ROWS_OF_MMA && wna16_mma::KERNEL.supports(caps, problem).is_ok() {
        return Err(Reason(format!("is faster than wna16_mma from {MOST_ROWS_OF_MMA} rows on")));
    }
    Ok(())
}

/// Whether the result would be right, however long it takes.
fn computes(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let Problem { x, y, m, n, k, .. } = *problem;
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense".into()) };
    if format.act.is_quantized() {
        return refuse("multiplies exact activations (a16, a32), the format says quantised ones".into());
    }
    if layout == wna16::LAYOUT {
        wna16::atom(caps.atom, problem)?;
    }
    if caps.gate.is_some() {
        return refuse("leaves sums as they are, where rows are gates and what they let through".into());
    }
    if !caps.cublaslt {
        return refuse("cuBLASLt was not found".into());
    }
    if x != Float::F32 && !caps.arch.multiplies(x) {
        return refuse(format!("multiplies x in f16 or f32 on {}; x is {x}", caps.arch));
    }
    if x != Float::F32 && y.unit_roundoff() < x.unit_roundoff() && !caps.rounded_weights {
        return refuse(format!("rounds weights to {x}, which a result in {y} does not allow"));
    }
    if x != Float::F32 && k < LEAST_TERMS {
        return refuse(format!("rounds weights, which averages out from {LEAST_TERMS} columns on; k is {k}"));
    }
    let scale = format.weight.scale;
    if x == Float::F16 && scale != Float::F16 && !caps.rounded_weights {
        return refuse(format!(
            "weights with scales in {scale} may lie outside the range of f16, to which it rounds them"
        ));
    }
    if k == 0 || k > dequantize::MOST_COLUMNS || [m, n].iter().any(|&size| size > i32::MAX as usize) {
        return refuse(format!("takes 1 to {} columns, and rows and outputs of 31 bits", dequantize::MOST_COLUMNS));
    }
    Ok(())
}

/// How a product is divided, and what the workspace holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Division {
    /// Outputs at a time: all slabs but the last have as many.
    outputs: usize,
    /// Rows of x at a time, where sums go to memory.
    rows: usize,
    weights_bytes: usize,
    /// 0: sums are never in the workspace.
    sums_bytes: usize,
}

impl Division {
    fn new(problem: &Problem, slab_bytes: usize) -> Self {
        let (m, n) = (problem.m.max(1), problem.n.max(1));
        let row_bytes = dequantize::pitch(problem.k) * problem.x.size_bytes();
        let most = (slab_bytes / row_bytes.max(1)).min(dequantize::MOST_ROWS);
        // Slabs of one size, in whole tiles of products where they are large.
        let whole = if most >= 1024 { 256 } else { STRIP };
        let most = (most / whole * whole).max(STRIP);
        let outputs = n.div_ceil(n.div_ceil(most)).next_multiple_of(whole).min(n);
        let most = (SUMS_BYTES / (4 * outputs)).max(1);
        let rows = m.div_ceil(m.div_ceil(most));
        // Room for as many rows as there may be, so that fewer rows in all never need more.
        let sums_bytes = match problem.y {
            Float::F32 => 0,
            _ => (4 * most.min(m) * outputs).next_multiple_of(ALIGNMENT),
        };
        Self { outputs, rows, weights_bytes: (outputs * row_bytes).next_multiple_of(ALIGNMENT), sums_bytes }
    }

    /// Of the workspace: counters, which this kernel leaves alone, what cuBLASLt works in, weights, sums.
    fn bytes(self) -> usize {
        Workspace::COUNTER_BYTES + cublaslt::WORKSPACE_BYTES + self.weights_bytes + self.sums_bytes
    }
}

/// Puts a product into a stream, whether it is faster so or not, with so many bytes of weights as floats at a time: for
/// measurements and tests.
///
/// Errors: those of [`super::run`], a product whose result would not be right.
pub fn run_as(slab_bytes: usize, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    super::check_lengths(call)?;
    let problem = super::problem(call);
    computes(&call.w.caps(gpu), &problem, call.w.layout())
        .map_err(|why| Error::invalid(NAME, "a product that it computes", format!("{problem}: it {why}")))?;
    if call.y.is_empty() {
        return Ok(());
    }
    run(slab_bytes, gpu, stream, call)
}

/// Bytes of workspace for [`run_as`].
pub fn workspace_bytes_as(slab_bytes: usize, problem: &Problem) -> usize {
    Division::new(problem, slab_bytes).bytes()
}

fn run(slab_bytes: usize, gpu: &Gpu, stream: &Stream, call: &Call<'_>) -> Result<()> {
    let ([n, k], m) = (call.w.shape(), call.m);
    let (x, y) = (call.x.dtype(), call.y.dtype());
    let division = Division::new(&super::problem(call), slab_bytes);
    let workspace = match call.workspace.as_deref() {
        Some(workspace) if workspace.bytes() >= division.bytes() => workspace.view().pointer(),
        other => {
            return Err(Error::invalid(
                NAME,
                format!("a workspace of {} bytes", division.bytes()),
                format!("{other:?}"),
            ));
        }
    };
    let products = gpu.products()?;
    let to_work_in = workspace + Workspace::COUNTER_BYTES as u64;
    let weights = to_work_in + cublaslt::WORKSPACE_BYTES as u64;
    let sums = weights + division.weights_bytes as u64;
    let finished = call.epilogue.bias.is_none() && call.epilogue.activation == Activation::None;
    for first in (0..n).step_by(division.outputs) {
        let outputs = division.outputs.min(n - first);
        dequantize::launch(gpu, stream, call.w, first..first + outputs, (x, weights), x != Float::F32)?;
        let y_at = |row: usize| call.y.pointer() + ((row * n + first) * y.size_bytes()) as u64;
        // x · Wᵀ for some rows of x, in a type, to an address.
        let multiply = |row: usize, rows: usize, out: Float, to: u64, y_pitch: usize| {
            let x_at = call.x.pointer() + (row * k * x.size_bytes()) as u64;
            let matrices = Matrices {
                shape: [rows, outputs, k],
                input: x,
                out,
                w_pitch: dequantize::pitch(k),
                y_pitch,
                alignments: [x_at, weights, to].map(alignment),
                workspace_bytes: cublaslt::WORKSPACE_BYTES,
            };
            products.run(stream, matrices, [x_at, weights, to], to_work_in)
        };
        let finish = |row: usize, rows: usize, sums: u64, sums_pitch: usize| {
            let bias = call.epilogue.bias.map_or(0, |bias: View<'_, f32>| bias.pointer() + 4 * first as u64);
            let activation = call.epilogue.activation;
            let (y, y_type) = (y_at(row), y);
            let finish =
                Finish { sums, sums_pitch, parts: [1, 0], bias, activation, y, y_pitch: n, y_type, rows, n: outputs };
            finish.run(gpu, stream)
        };
        if finished && y == x {
            multiply(0, m, y, y_at(0), n)?;
        } else if y == Float::F32 {
            multiply(0, m, y, y_at(0), n)?;
            finish(0, m, y_at(0), n)?;
        } else {
            for row in (0..m).step_by(division.rows) {
                let rows = division.rows.min(m - row);
                multiply(row, rows, Float::F32, sums, outputs)?;
                finish(row, rows, sums, outputs)?;
            }
        }
    }
    Ok(())
}
