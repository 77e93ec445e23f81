//! Launches of `dense.cu`: products of weights that are floats.

use super::floats::{FloatBuffer, float_type};
use super::{launch, same_length};
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Stream, View};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Gpu, matmul};
use crate::error::Result;
use crate::kernel::Activation;
use crate::tensor::Floats;

static SOURCE: Source = Source { path: "nn/dense.cu", text: include_str!("dense.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 256;
const OUTPUTS: usize = THREADS as usize / 32;
const TILE: usize = 64;

/// Rows that a warp takes together where there are more than one.
const ROWS: usize = 4;

/// From more rows than this on, tiles are faster.
const MOST_FEW_ROWS: usize = 16;

fn rows_instance(rows: usize, activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_rows<{rows}, {activates}>"))
}

fn tiles_instance(activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_tiles<{TILE}, {activates}>"))
}

/// Those of products with an activation, or without.
pub(super) fn instances(activates: bool) -> [Instance; 3] {
    [rows_instance(1, activates), rows_instance(ROWS, activates), tiles_instance(activates)]
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
    /// As in the source.
    struct Params {
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
        activation: u32,
        low: f32,
        high: f32,
        padding: u32,
    }
}

impl Dense {
    /// Copies a matrix `[n, k]` to the device. Errors: a length that does not fit, memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, w: Floats<'_>, [n, k]: [usize; 2]) -> Result<Self> {
        same_length("dense", "the matrix", n.checked_mul(k), w.len())?;
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

    /// `y = x · Wᵀ + bias`.
    ///
    /// *Accuracy:* see [`crate::format::reference::Bound`]. *Errors:* a length that does not fit.
    pub fn forward(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        self.forward_activated(gpu, stream, call, Activation::None)
    }

    /// `y = activation(x · Wᵀ + bias)`, as [`Dense::forward`].
    pub fn forward_activated(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>, activation: Activation) -> Result<()> {
        const OP: &str = "dense";
        let (n, k, m) = (self.n, self.k, call.m);
        same_length(OP, "x", m.checked_mul(k), call.x.len())?;
        same_length(OP, "y", m.checked_mul(n), call.y.len())?;
        if let Some(bias) = call.bias {
            same_length(OP, "a bias", Some(n), bias.len())?;
        }
        if m == 0 || n == 0 {
            return Ok(());
        }
        let w = self.rows();
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
            activation,
            low,
            high,
            padding: 0,
        };
        let (instance, grid) = match m {
            1 => (rows_instance(1, activates), [n.div_ceil(OUTPUTS), 1, 1]),
            2..=MOST_FEW_ROWS => (rows_instance(ROWS, activates), [n.div_ceil(OUTPUTS), m.div_ceil(ROWS), 1]),
            _ => (tiles_instance(activates), [n.div_ceil(TILE), m.div_ceil(TILE), 1]),
        };
        let form = launch(OP, grid, THREADS, 0)?;
        let function = gpu.function(&instance)?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
