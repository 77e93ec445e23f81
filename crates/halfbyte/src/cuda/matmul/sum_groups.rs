//! Launches of `sum_groups.cu`: sums of x over the groups of weights with offsets, before a product in tiles.

use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::layout::cuda_wna16::STEP;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "matmul/sum_groups.cu", text: include_str!("sum_groups.cu"), parameters: &[Params::LAYOUT] };

/// Threads of a block, and columns of a thread, as in the source.
const THREADS: usize = 256;
const COLUMNS: usize = 8;

/// Blocks along the columns, at most: they take columns in turn.
const MOST_DOWN: usize = 65_535;

/// Bytes that a row has of an atom: four groups in two parts.
const ROW_BYTES: usize = 4 * 2 * size_of::<f32>();

/// Columns of a group.
const GROUPS: [usize; 2] = [32, 64];

/// Rows of a tile at most.
const MOST_TOKENS: usize = 128;

/// Bytes that the sums of so many rows of k columns take at most, whatever their tiles are.
pub(super) fn most_bytes([rows, k]: [usize; 2]) -> usize {
    k.div_ceil(STEP) * (rows + MOST_TOKENS) * ROW_BYTES
}

/// How the sums lie: `[tiles][atoms][2][tokens][4]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SumsOfX {
    /// Columns of a group.
    pub group: usize,
    /// Rows of a tile.
    pub tokens: usize,
}

impl SumsOfX {
    /// What is compiled.
    pub fn instance(self) -> Instance {
        of_group(self.group)
    }
}

fn of_group(group: usize) -> Instance {
    Instance::new(&SOURCE, format!("sum_groups<{group}>"))
}

/// Every kernel.
pub(super) fn instances() -> impl Iterator<Item = Instance> {
    GROUPS.into_iter().map(of_group)
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        sums: u64,
        pitch: u64,
        rows: u32,
        k: u32,
        atoms: u32,
        tokens: u32,
        x_type: u32,
        padding: u32,
    }
}

/// Rows of halves whose groups are summed: addresses on the device, of x at a multiple of 16 bytes.
pub(super) struct SumGroups {
    pub sums_of_x: SumsOfX,
    pub x: u64,
    pub dtype: Float,
    pub sums: u64,
    pub rows: usize,
    pub k: usize,
    /// Elements from row to row, a multiple of 8.
    pub pitch: usize,
}

impl SumGroups {
    /// Puts it into a stream; the caller vouches for the addresses.
    pub(super) fn run(&self, gpu: &Gpu, stream: &Stream) -> Result<()> {
        let Self { sums_of_x, x, dtype, sums, rows, k, pitch } = *self;
        let (tokens, atoms) = (sums_of_x.tokens, k.div_ceil(STEP));
        let params = Params {
            x,
            sums,
            pitch: pitch as u64,
            rows: rows as u32,
            k: k as u32,
            atoms: atoms as u32,
            tokens: tokens as u32,
            x_type: float_type(dtype),
            padding: 0,
        };
        let launch = gpu.overlapping(form(rows.next_multiple_of(tokens), atoms));
        let key = ("sum_groups", [sums_of_x.group as u32, 0]);
        let function = gpu.function_once(key, || sums_of_x.instance())?;
        function.launch_typed(stream, &launch, &params, &[])
    }
}

fn form(rows: usize, atoms: usize) -> Launch {
    let blocks = (atoms * STEP).div_ceil(THREADS * COLUMNS).min(MOST_DOWN);
    Launch { grid: [rows as u32, blocks as u32, 1], ..Launch::linear(1, THREADS as u32) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_rows_of_any_length_are_one_launch() {
        for (k, blocks) in
            [(1, 1), (2049, 2), (134_215_680, 65_535), (134_215_681, 65_535), (i32::MAX as usize, 65_535)]
        {
            assert_eq!(form(128, k.div_ceil(STEP)).grid, [128, blocks, 1]);
            // A block's place behind its last columns.
            assert!(u32::try_from(k.next_multiple_of(STEP) + blocks as usize * THREADS * COLUMNS).is_ok());
        }
    }
}
