//! Launches of `finish.cu`: bias, activation and rounding of sums that lie in memory.

use super::activation;
use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::kernel::Activation;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "matmul/finish.cu", text: include_str!("finish.cu"), parameters: &[Params::LAYOUT] };

/// As in the source: threads of a block, and columns that it has.
const THREADS: u32 = 256;
const COLUMNS: u32 = 4 * THREADS;

/// Blocks along the rows, at most.
const MOST_DOWN: usize = 65_535;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "finish")
}

/// What is finished: `rows` rows of n sums in f32 become rows of y, which may lie in the same place. Addresses on the device.
pub(in crate::cuda) struct Finish {
    pub sums: u64,
    pub sums_pitch: usize,
    /// Parts whose sums are added, and elements from one to the next.
    pub parts: [usize; 2],
    /// 0: none.
    pub bias: u64,
    pub activation: Activation,
    pub y: u64,
    pub y_pitch: usize,
    pub y_type: Float,
    pub rows: usize,
    pub n: usize,
}

parameters! {
    /// As in the source.
    struct Params {
        sums: u64,
        bias: u64,
        y: u64,
        sums_pitch: u64,
        y_pitch: u64,
        part: u64,
        rows: u32,
        n: u32,
        y_type: u32,
        activation: u32,
        low: f32,
        high: f32,
        parts: u32,
        padding: u32,
    }
}

impl Finish {
    /// Puts it into a stream. The caller vouches for the addresses; rows and n are within 31 bits.
    pub(in crate::cuda) fn run(&self, gpu: &Gpu, stream: &Stream) -> Result<()> {
        let (activation, low, high) = activation(self.activation);
        let params = Params {
            sums: self.sums,
            bias: self.bias,
            y: self.y,
            sums_pitch: self.sums_pitch as u64,
            y_pitch: self.y_pitch as u64,
            part: self.parts[1] as u64,
            rows: self.rows as u32,
            n: self.n as u32,
            y_type: float_type(self.y_type),
            activation,
            low,
            high,
            parts: self.parts[0] as u32,
            padding: 0,
        };
        let grid = [params.n.div_ceil(COLUMNS), self.rows.min(MOST_DOWN) as u32, 1];
        let function = gpu.function_once(("finish", [0; 2]), instance)?;
        let launch = Launch { grid, ..Launch::linear(1, THREADS) };
        function.launch_typed(stream, &launch, &params, &[])
    }
}
