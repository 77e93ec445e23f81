//! Launches of `dense.cu`: products of weights that are floats; where cuBLASLt is there, of many rows by it.
//!
//! | name | rows | what it takes |
//! |---|---|---|
//! | `dense_rows_sm90` | 1 to 32 | Hopper, 128 outputs for each multiprocessor or more; else as `dense_rows_mma` |
//! | `dense_tf32` | all | from sm_80 on: x in f32, W of 16 bits, whose rows begin at 16 bytes |
//! | `dense_rows_mma` | 1 to 16 | tensor cores: x and W of one type of 16 bits, whose rows begin at 16 bytes; f16 from sm_75 on, bf16 from sm_80 |
//! | `dense_rows` | 1 to 16 | everything |
//! | `dense_cublaslt` | more | as `dense_rows_mma` |
//! | `dense_mma` | more | as `dense_rows_mma`, where cuBLASLt was not found |
//! | `dense_tiles` | more | everything |
//!
//! Up to 16 rows weights are read once, and a row has the same bits whatever the others are and however many; by `dense_rows_sm90` up to 32, by `dense_tf32`
//! always. All multiply without rounding and add up in f32, so that one bound holds for all. Each can be put into a stream that is being recorded.

use super::floats::FloatBuffer;
use super::{dense_rows_sm90, dense_tf32, launch, same_length};
use crate::cuda::cublaslt::{self, Matrices, alignment};
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Stream, View};
use crate::cuda::matmul::finish::Finish;
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu, Workspace, matmul};
use crate::error::{Error, Result};
use crate::kernel::Activation;
use crate::tensor::{Float, Floats};

pub(super) const OP: &str = "dense";

static SOURCE: Source = Source { path: "nn/dense.cu", text: include_str!("dense.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 256;
const OUTPUTS: usize = THREADS as usize / 32;
const TILE: usize = 64;
const MMA_OUTPUTS: usize = 16;
const MMA_TILE: usize = 128;
const MMA_STAGE_BYTES: u32 = 2 * 128 * 128;

/// Blocks of a multiprocessor that take outputs in turn.
const BLOCKS: usize = 2;

/// Rows up to which weights are read once on every processor.
const MOST_FEW_ROWS: usize = 16;

/// Sums of cuBLASLt that lie in the workspace at a time, unless those of one row take more.
const SUMS_BYTES: usize = 128 << 20;

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// `rows`: 1 or 16.
fn rows_instance(rows: usize, weights: Float, activates: bool) -> Instance {
    let weights = match weights {
        Float::F16 => "F16",
        Float::BF16 => "BF16",
        Float::F32 => "F32",
    };
    Instance::new(&SOURCE, format!("dense_rows<{rows}, {weights}, {activates}>"))
}

/// `rows`: 8 or 16.
fn rows_mma_instance(rows: usize, weights: Float, activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_rows_mma<{}, {rows}, {activates}>", weights == Float::BF16))
}

fn mma_instance(weights: Float, activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_mma<{}, {activates}>", weights == Float::BF16))
}

fn tiles_instance(activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_tiles<{TILE}, {activates}>"))
}

/// Those of products with an activation, or without, on a processor.
pub(super) fn instances(arch: Arch, activates: bool) -> Vec<Instance> {
    let of_any = TYPES.map(|weights| [1, MOST_FEW_ROWS].map(|rows| rows_instance(rows, weights, activates)));
    let of_halfs = [Float::F16, Float::BF16].into_iter().filter(|&weights| arch.multiplies(weights)).map(|weights| {
        let [few, more] = [8, MOST_FEW_ROWS].map(|rows| rows_mma_instance(rows, weights, activates));
        [few, more, mma_instance(weights, activates)]
    });
    let all = of_any.into_iter().flatten().chain(of_halfs.flatten());
    let of_files =
        dense_rows_sm90::instances(arch, activates).into_iter().chain(dense_tf32::instances(arch, activates));
    all.chain([tiles_instance(activates)]).chain(of_files).collect()
}

/// What computes a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    RowsSm90,
    Tf32,
    RowsMma,
    Rows,
    CublasLt,
    Mma,
    Tiles,
}

/// A matrix of floats on a device.
#[derive(Debug)]
pub struct Dense {
    data: FloatBuffer,
    n: usize,
    k: usize,
}

/// One product.
#[derive(Debug)]
pub struct Call<'a> {
    /// Activations `[m, k]`.
    pub x: FloatView<'a>,
    /// Rows of x.
    pub m: usize,
    /// Added to every row, `[n]`.
    pub bias: Option<View<'a, f32>>,
    /// Output `[m, n]`.
    pub y: FloatViewMut<'a>,
}

parameters! {
    /// As in `include/dense.cuh`.
    pub(super) struct Params {
        x: u64,
        w: u64,
        bias: u64,
        y: u64,
        m: u64,
        n: u64,
        k: u64,
        x_type: u32,
        w_type: u32,
        y_type: u32,
        by_eight: u32,
        by_two: u32,
        activation: u32,
        low: f32,
        high: f32,
    }
}

impl Dense {
    /// Copies a matrix `[n, k]` to the device. Errors: a length that does not fit, memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, w: Floats<'_>, [n, k]: [usize; 2]) -> Result<Self> {
        same_length(OP, "the matrix", n.checked_mul(k), w.len())?;
        Ok(Self { data: FloatBuffer::upload(gpu, stream, w)?, n, k })
    }

    /// A matrix `[n, k]` that lies on the device already. Error: a length that does not fit.
    pub fn of(data: FloatBuffer, [n, k]: [usize; 2]) -> Result<Self> {
        same_length("dense", "the matrix", n.checked_mul(k), data.len())?;
        Ok(Self { data, n, k })
    }

    /// Outputs and length of the reduction.
    pub fn shape(&self) -> [usize; 2] {
        [self.n, self.k]
    }

    /// Bytes that it takes on the device.
    pub fn bytes(&self) -> usize {
        self.data.bytes()
    }

    /// Its rows, one after the other.
    pub fn rows(&self) -> FloatView<'_> {
        self.data.view(0..self.data.len())
    }

    /// Name of what multiplies m rows of a type, whose memory begins at 16 bytes.
    pub fn kernel(&self, gpu: &Gpu, m: usize, x: Float) -> &'static str {
        match self.way(&gpu.caps(), m, x) {
            Way::RowsSm90 => "dense_rows_sm90",
            Way::Tf32 => "dense_tf32",
            Way::RowsMma => "dense_rows_mma",
            Way::Rows => "dense_rows",
            Way::CublasLt => "dense_cublaslt",
            Way::Mma => "dense_mma",
            Way::Tiles => "dense_tiles",
        }
    }

    /// Bytes of a workspace for [`Dense::forward_activated`] of m rows; 0 where none is of use.
    pub fn workspace_bytes(&self, gpu: &Gpu, m: usize, [x, y]: [Float; 2]) -> usize {
        if self.way(&gpu.caps(), m, x) != Way::CublasLt {
            return 0;
        }
        let sums = if y == Float::F32 { 0 } else { 4 * m.min(self.rows_of_sums()) * self.n };
        Workspace::COUNTER_BYTES + cublaslt::WORKSPACE_BYTES + sums
    }

    /// Rows whose sums lie in the workspace at a time.
    fn rows_of_sums(&self) -> usize {
        (SUMS_BYTES / 4 / self.n.max(1)).max(1)
    }

    fn way(&self, caps: &Caps, m: usize, x: Float) -> Way {
        let halfs = x == self.data.dtype() && self.k.is_multiple_of(8) && caps.arch.multiplies(x);
        let split = x == Float::F32 && self.data.dtype() != Float::F32 && self.k.is_multiple_of(8);
        let of_library = self.k > 0 && [m, self.n, self.k].iter().all(|&size| i32::try_from(size).is_ok());
        match (m, halfs) {
            (_, true) if dense_rows_sm90::takes(caps, [m, self.n, self.k]) => Way::RowsSm90,
            _ if split && dense_tf32::serves(caps.arch) => Way::Tf32,
            (..=MOST_FEW_ROWS, true) => Way::RowsMma,
            (..=MOST_FEW_ROWS, false) => Way::Rows,
            (_, true) if caps.cublaslt && of_library => Way::CublasLt,
            (_, true) => Way::Mma,
            (_, false) => Way::Tiles,
        }
    }

    /// `y = x · Wᵀ + bias`.
    ///
    /// *Accuracy:* see [`crate::format::reference::Bound`], that of weights which are exact. *Errors:* a length that does not fit.
    pub fn forward(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        self.forward_activated(gpu, stream, call, Activation::None, None)
    }

    /// `y = activation(x · Wᵀ + bias)`, as [`Dense::forward`].
    ///
    /// With a workspace, of [`Dense::workspace_bytes`], cuBLASLt chooses among all of its algorithms; without one among those that
    /// need none, and `dense_mma` multiplies where sums would have to lie in it: where y has 16 bits, and a bias, an activation or
    /// another type than x. *Errors:* a workspace that is too small.
    pub fn forward_activated(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        call: Call<'_>,
        activation: Activation,
        workspace: Option<&mut Workspace>,
    ) -> Result<()> {
        let (n, k, m) = (self.n, self.k, call.m);
        same_length(OP, "x", m.checked_mul(k), call.x.len())?;
        same_length(OP, "y", m.checked_mul(n), call.y.len())?;
        if let Some(bias) = call.bias {
            same_length(OP, "a bias", Some(n), bias.len())?;
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        let (x, y) = (call.x.dtype(), call.y.dtype());
        let aligned = call.x.pointer().is_multiple_of(16) && self.rows().pointer().is_multiple_of(16);
        let plain = call.bias.is_none() && activation == Activation::None;
        match self.way(&gpu.caps(), m, x) {
            Way::RowsSm90 | Way::Tf32 | Way::RowsMma if !aligned && m <= MOST_FEW_ROWS => {
                self.by_kernel(gpu, stream, &call, activation, Way::Rows)
            }
            Way::RowsSm90 | Way::Tf32 | Way::CublasLt | Way::Mma if !aligned => {
                self.by_kernel(gpu, stream, &call, activation, Way::Tiles)
            }
            Way::CublasLt if workspace.is_some() || y == Float::F32 || plain && y == x => {
                self.by_library(gpu, stream, &call, activation, workspace)
            }
            Way::CublasLt => self.by_kernel(gpu, stream, &call, activation, Way::Mma),
            way => self.by_kernel(gpu, stream, &call, activation, way),
        }
    }

    /// By a kernel of the source, which takes x and W as they lie.
    fn by_kernel(&self, gpu: &Gpu, stream: &Stream, call: &Call<'_>, activation: Activation, way: Way) -> Result<()> {
        let (w, n, k, m) = (self.rows(), self.n, self.k, call.m);
        let activates = activation != Activation::None;
        let (activation, low, high) = matmul::activation(activation);
        let aligned = call.x.pointer().is_multiple_of(16) && w.pointer().is_multiple_of(16);
        let params = Params {
            x: call.x.pointer(),
            w: w.pointer(),
            bias: call.bias.map_or(0, |bias| bias.pointer()),
            y: call.y.pointer(),
            m: m as u64,
            n: n as u64,
            k: k as u64,
            x_type: float_type(call.x.dtype()),
            w_type: float_type(w.dtype()),
            y_type: float_type(call.y.dtype()),
            by_eight: (aligned && k.is_multiple_of(8)).into(),
            by_two: (n.is_multiple_of(2) && call.y.pointer().is_multiple_of(8)).into(),
            activation,
            low,
            high,
        };
        let (instance, grid, shared_bytes) = match way {
            Way::RowsSm90 => return dense_rows_sm90::run(gpu, stream, &params, [call.x, w], [m, n, k], activates),
            Way::Tf32 => return dense_tf32::run(gpu, stream, &params, w.dtype(), [m, n], activates),
            Way::RowsMma => {
                let blocks = BLOCKS * gpu.caps().multiprocessors as usize;
                let rows = if m <= 8 { 8 } else { MOST_FEW_ROWS };
                let instance = rows_mma_instance(rows, w.dtype(), activates);
                (instance, [n.div_ceil(MMA_OUTPUTS).min(blocks), 1, 1], 0)
            }
            Way::Rows => {
                let rows = if m == 1 { 1 } else { MOST_FEW_ROWS };
                (rows_instance(rows, w.dtype(), activates), [n.div_ceil(OUTPUTS), 1, 1], 0)
            }
            Way::CublasLt | Way::Mma => {
                let stages = if gpu.caps().arch.number < 80 { 2 } else { 3 };
                (mma_instance(w.dtype(), activates), tiles([m, n], MMA_TILE), stages * MMA_STAGE_BYTES)
            }
            Way::Tiles => (tiles_instance(activates), tiles([m, n], TILE), 0),
        };
        let form = launch(OP, grid, THREADS, shared_bytes)?;
        let form = if way == Way::Tiles { form } else { gpu.overlapping(form) };
        let function = gpu.function(&instance)?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked by the caller.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }

    /// By cuBLASLt: to y, and finished there; or sums of some rows to the workspace, and from there to y.
    fn by_library(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        call: &Call<'_>,
        activation: Activation,
        workspace: Option<&mut Workspace>,
    ) -> Result<()> {
        let (w, n, k, m) = (self.rows(), self.n, self.k, call.m);
        let (x, y) = (call.x.dtype(), call.y.dtype());
        let least = self.workspace_bytes(gpu, m, [x, y]);
        let (to_work_in, workspace_bytes) = match workspace {
            None => (0, 0),
            Some(workspace) if workspace.bytes() >= least => {
                (workspace.view().pointer() + Workspace::COUNTER_BYTES as u64, cublaslt::WORKSPACE_BYTES)
            }
            Some(other) => {
                let got = format!("one of {}", other.bytes());
                return Err(Error::invalid(OP, format!("a workspace of {least} bytes"), got));
            }
        };
        let products = gpu.products()?;
        let address =
            |base: u64, row: usize, width: usize, dtype: Float| base + (row * width * dtype.size_bytes()) as u64;
        let multiply = |row: usize, rows: usize, out: Float, to: u64| {
            let addresses = [address(call.x.pointer(), row, k, x), w.pointer(), to];
            let alignments = addresses.map(alignment);
            let shape = [rows, n, k];
            let matrices = Matrices { shape, input: x, out, w_pitch: k, y_pitch: n, alignments, workspace_bytes };
            products.run(stream, matrices, addresses, to_work_in)
        };
        let finish = |row: usize, rows: usize, sums: u64| {
            let bias = call.bias.map_or(0, |bias| bias.pointer());
            let to = address(call.y.pointer(), row, n, y);
            let finish =
                Finish { sums, sums_pitch: n, parts: [1, 0], bias, activation, y: to, y_pitch: n, y_type: y, rows, n };
            finish.run(gpu, stream)
        };
        let plain = call.bias.is_none() && activation == Activation::None;
        if y == Float::F32 || plain && y == x {
            multiply(0, m, y, call.y.pointer())?;
            return if plain { Ok(()) } else { finish(0, m, call.y.pointer()) };
        }
        let sums = to_work_in + cublaslt::WORKSPACE_BYTES as u64;
        for row in (0..m).step_by(self.rows_of_sums()) {
            let rows = self.rows_of_sums().min(m - row);
            multiply(row, rows, Float::F32, sums)?;
            finish(row, rows, sums)?;
        }
        Ok(())
    }
}

/// A block for each tile of rows and outputs, in the direction in which a launch has most.
fn tiles([m, n]: [usize; 2], tile: usize) -> [usize; 3] {
    [m.div_ceil(tile).saturating_mul(n.div_ceil(tile)), 1, 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Many rows of few outputs, many outputs of few rows, and what nobody has memory for.
    #[test]
    fn tiles_of_any_shape_are_one_launch() {
        for (tile, [m, n]) in
            [TILE, MMA_TILE].into_iter().flat_map(|tile| [[5_000_000, 70], [70, 9_000_000]].map(|shape| (tile, shape)))
        {
            let form = launch(OP, tiles([m, n], tile), THREADS, 0).unwrap();
            assert_eq!(form.grid, [(m.div_ceil(tile) * n.div_ceil(tile)) as u32, 1, 1]);
        }
        assert!(launch(OP, tiles([usize::MAX; 2], TILE), THREADS, 0).is_err());
    }
}
