//! When `dense_tf32.cu` runs, and how it is launched: products of rows in f32 with dense weights of 16 bits.

use super::dense::{OP, Params};
use super::{launch, overlapping};
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

/// For products that fill a GPU with more blocks or fewer.
const TILES: [Tile; 2] = [Tile { down: 1, across: 1, ahead: 4 }, Tile { down: 2, across: 3, ahead: 1 }];

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

fn blocks([m, n]: [usize; 2], Tile { down, across, .. }: Tile) -> usize {
    m.div_ceil(8 * across).saturating_mul(n.div_ceil(16 * down))
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
    let [few, many] = TILES;
    // A multiprocessor has room for one block of either; up to 8 rows larger ones would read no less.
    let small = m <= 8 * few.across || blocks([m, n], few) <= gpu.caps().multiprocessors as usize;
    let tile = if small { few } else { many };
    let form = overlapping(gpu, launch(OP, [blocks([m, n], tile), 1, 1], THREADS, 0)?);
    let function = gpu.function(&instance(weights, tile, activates))?;
    // SAFETY: the one parameter is the source's `Params`, whose lengths were checked by the caller.
    unsafe { function.launch(stream, &form, &[Arg::new(params)]) }
}
