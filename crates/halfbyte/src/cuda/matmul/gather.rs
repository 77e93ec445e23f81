//! Launches of `gather.cu`: columns of x in the order of weights that were sorted by their groups, or in wider rows.

use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Launch, Stream};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;

static SOURCE: Source = Source { path: "matmul/gather.cu", text: include_str!("gather.cu"), parameters: &[] };

/// Threads of a block, as in the source.
const THREADS: u32 = 256;

/// Rows that one launch takes at most.
pub(super) const ROWS: usize = 256;

/// Elements that one copy takes: rows of copies begin at multiples of so many.
pub(super) const PIECE: usize = 8;

/// Elements from row to row of copies of k columns.
pub(super) fn pitch(k: usize) -> usize {
    k.next_multiple_of(PIECE)
}

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "gather")
}

/// What is gathered: addresses on the device, of which `x` has `rows` rows of `k` elements of 16 bits, and `to` of `pitch`.
pub(super) struct Gather {
    pub x: u64,
    /// The column of x for each of k columns; 0: the same one.
    pub order: u64,
    pub to: u64,
    pub rows: usize,
    pub k: usize,
    pub pitch: usize,
}

impl Gather {
    /// Puts it into a stream.
    ///
    /// The caller vouches for the addresses; at most [`ROWS`] rows, and pitch within 31 bits.
    pub(super) fn run(&self, gpu: &Gpu, stream: &Stream) -> Result<()> {
        let (rows, k, pitch) = (self.rows.min(ROWS) as u32, self.k as u32, self.pitch as u32);
        let launch = Launch { grid: [pitch.div_ceil(THREADS), rows, 1], ..Launch::linear(1, THREADS) };
        let args = [Arg::new(&self.x), Arg::new(&self.order), Arg::new(&self.to), Arg::new(&k), Arg::new(&pitch)];
        let function = gpu.function_once(("gather", [0; 2]), instance)?;
        // SAFETY: the parameters are the source's; the launcher of a product gives addresses of whole matrices.
        unsafe { function.launch(stream, &launch, &args) }
    }
}
