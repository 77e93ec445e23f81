//! When `dense_tf32.cu` runs, and how it is launched: products of rows in f32 with dense weights of 16 bits.

use super::dense::{OP, Params};
use super::launch;
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Stream};
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::error::Result;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/dense_tf32.cu", text: include_str!("dense_tf32.cu"), parameters: &[Params::LAYOUT] };

const THREADS: u32 = 256;

/// A block's outputs, in sixteens, its rows, in eights, and runs of columns that are on their way to a warp.
#[derive(Clone, Copy)]
struct Tile {
    down: usize,
    across: usize,
    ahead: usize,
}

/// For few products and for many.
const TILES: [Tile; 2] = [Tile { down: 1, across: 1, ahead: 4 }, Tile { down: 2, across: 3, ahead: 1 }];

impl Tile {
    fn blocks(self, [m, n]: [usize; 2]) -> usize {
        m.div_ceil(8 * self.across).saturating_mul(n.div_ceil(16 * self.down))
    }

    /// Bytes that a multiprocessor, which has room for one block, reads for each column: those of its blocks, one after the other.
    fn bytes_of_column(self, shape: [usize; 2], multiprocessors: usize) -> usize {
        let of_block = 16 * self.down * 2 + 8 * self.across * 4;
        self.blocks(shape).div_ceil(multiprocessors.max(1)).saturating_mul(of_block)
    }

    /// The one that reads least.
    fn of(shape: [usize; 2], multiprocessors: usize) -> Self {
        let [few, many] = TILES;
        let [of_few, of_many] = TILES.map(|tile| tile.bytes_of_column(shape, multiprocessors));
        if of_few <= of_many { few } else { many }
    }
}

/// Whether a processor has TF32.
pub(super) fn serves(arch: Arch) -> bool {
    arch.number >= 80
}

/// Those of products with an activation, or without, on a processor.
pub(super) fn instances(arch: Arch, activates: bool) -> Vec<Instance> {
    let types = [Float::F16, Float::BF16].into_iter().filter(|_| serves(arch));
    types.flat_map(|dtype| TILES.map(|tile| instance(dtype, tile, activates))).collect()
}

fn instance(dtype: Float, Tile { down, across, ahead }: Tile, activates: bool) -> Instance {
    let bf16 = dtype == Float::BF16;
    Instance::new(&SOURCE, format!("dense_tf32<{bf16}, {down}, {across}, {ahead}, {activates}>"))
}

/// Puts the product of m rows with n outputs into a stream, of weights of a type of 16 bits. The caller has checked what the parameters
/// name, and that rows begin at 16 bytes and have eights of columns.
pub(super) fn run(
    gpu: &Gpu,
    stream: &Stream,
    params: &Params,
    weights: Float,
    [m, n]: [usize; 2],
    activates: bool,
) -> Result<()> {
    let tile = Tile::of([m, n], gpu.caps().multiprocessors as usize);
    let form = gpu.overlapping(launch(OP, [tile.blocks([m, n]), 1, 1], THREADS, 0)?);
    let function = gpu.function(&instance(weights, tile, activates))?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked by the caller.
    unsafe { function.launch(stream, &form, &[Arg::new(params)]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A router of 128 experts: small tiles up to some rounds of them; of few rows also where outputs are many.
    #[test]
    fn tiles_are_small_where_there_are_few_products() {
        let rows = |shape| 8 * Tile::of(shape, 132).across;
        assert_eq!([1, 16, 64, 256].map(|m| rows([m, 128])), [8; 4]);
        assert_eq!([512, 4096].map(|m| rows([m, 128])), [24; 2]);
        assert_eq!([[1, 14_336], [8, 128_256], [100, 14_336]].map(rows), [8, 8, 24]);
        for tile in TILES {
            assert!(tile.blocks([25, 33]) * 8 * tile.across * 16 * tile.down >= 25 * 33);
        }
    }
}
