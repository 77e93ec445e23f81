//! When `dense_rows_sm90.cu` runs, and how it is launched: products of few rows with large dense weights, with the copy engine of Hopper.

use super::dense::{OP, Params};
use super::launch;
use crate::cuda::driver::{FloatView, Launch, Promotion, Stream, Swizzle, TensorMap, Tiles};
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/dense_rows_sm90.cu", text: include_str!("dense_rows_sm90.cu"), parameters: &[Params::LAYOUT] };

/// Rows at most.
pub(super) const MOST_ROWS: usize = 32;

/// As in the source: outputs of a warp, warps that multiply, columns of a unit, units of the ring.
const OUTPUTS: usize = 16;
const WARPS: usize = 8;
const COLUMNS: usize = 64;
const STAGES: usize = 11;

/// Rows of x that kernels are made for.
const TOKENS: [usize; 2] = [16, MOST_ROWS];

/// Those of products with an activation, or without, on a processor.
pub(super) fn instances(arch: Arch, activates: bool) -> Vec<Instance> {
    let types = [Float::F16, Float::BF16].into_iter().filter(|_| arch.is_hopper());
    types.flat_map(|dtype| TOKENS.map(|tokens| instance(dtype, tokens, activates))).collect()
}

fn instance(dtype: Float, tokens: usize, activates: bool) -> Instance {
    Instance::new(&SOURCE, format!("dense_rows_sm90<{}, {tokens}, {activates}>", dtype == Float::BF16))
}

/// Whether m rows are multiplied by it with n outputs of k columns: of halves whose rows begin at 16 bytes, with a whole tile for each
/// multiprocessor.
pub(super) fn takes(caps: &Caps, [m, n, k]: [usize; 3]) -> bool {
    let whole = n >= OUTPUTS * WARPS * caps.multiprocessors as usize;
    let counted = [n, k].iter().all(|&size| i32::try_from(size).is_ok());
    caps.arch.is_hopper() && (1..=MOST_ROWS).contains(&m) && k > 0 && whole && counted
}

/// Puts the product of such rows into a stream. The caller has checked what the parameters name.
pub(super) fn run(
    gpu: &Gpu,
    stream: &Stream,
    params: &Params,
    [x, w]: [FloatView<'_>; 2],
    [m, n, k]: [usize; 3],
    activates: bool,
) -> Result<()> {
    let map = |of: FloatView<'_>, rows: usize, at_once: usize| {
        let tile = [at_once as u32, COLUMNS as u32];
        let (swizzle, promotion) = (Swizzle::Bytes128, Promotion::default());
        TensorMap::of_matrix(of, &Tiles { shape: [rows, k], stride: k, tile, swizzle, promotion })
    };
    let maps = [map(w, n, OUTPUTS * WARPS)?, map(w, n, OUTPUTS)?, map(x, m, m)?];
    let tokens = if m <= TOKENS[0] { TOKENS[0] } else { TOKENS[1] };
    let function = gpu.function(&instance(w.dtype(), tokens, activates))?;
    function.launch_typed(stream, &form(gpu, tokens)?, params, &maps)
}

fn form(gpu: &Gpu, tokens: usize) -> Result<Launch> {
    let blocks = gpu.caps().multiprocessors as usize;
    Ok(gpu.overlapping(launch(OP, [blocks, 1, 1], 32 * (WARPS as u32 + 1), shared_bytes(tokens))?))
}

/// Shared memory of a block: the ring, and two barriers a stage.
fn shared_bytes(tokens: usize) -> u32 {
    (STAGES * ((OUTPUTS * WARPS + tokens) * 2 * COLUMNS + 2 * 8)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_fit_a_multiprocessor() {
        assert!(TOKENS.map(shared_bytes).iter().all(|&bytes| bytes <= Caps::H200.shared_bytes));
    }

    #[test]
    fn every_block_has_outputs() {
        let caps = Caps::H200;
        let least = OUTPUTS * WARPS * caps.multiprocessors as usize;
        assert!(takes(&caps, [1, least, 8]) && takes(&caps, [MOST_ROWS, least, 8]));
        assert!(!takes(&caps, [1, least - 1, 8]) && !takes(&caps, [MOST_ROWS + 1, least, 8]));
    }
}
