//! When `flash_decoding.cu` runs, and how it is launched: attention of one row of each text on tensor cores.

use super::attention::{LARGEST_HEAD, PART_LENGTH, Params};
use super::kv_cache::{KvCache, on_tensor_cores};
use super::{launch, overlapping};
use crate::cuda::Gpu;
use crate::cuda::driver::Launch;
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Instance, Source};
use crate::error::Result;
use crate::kernel::{Heads, KvType};

static SOURCE: Source =
    Source { path: "nn/flash_decoding.cu", text: include_str!("flash_decoding.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const THREADS: u32 = 128;
const COLUMNS: usize = 8;

/// Those for heads of this size and the types among these that it takes; none for heads that it does not take.
pub(super) fn instances(head_size: usize, kv: &[KvType]) -> Vec<Instance> {
    let types = if takes(head_size) { kv } else { &[] };
    types.iter().filter_map(|&kv| instance(head_size, kv)).collect()
}

fn instance(head_size: usize, kv: KvType) -> Option<Instance> {
    let kv = on_tensor_cores(kv)?;
    Some(Instance::new(&SOURCE, format!("flash_decoding<{}, {kv}>", head_size.next_multiple_of(64))))
}

/// Whether rows of keys are whole pieces of 8 elements.
fn takes(head_size: usize) -> bool {
    head_size.is_multiple_of(8) && (1..=LARGEST_HEAD).contains(&head_size)
}

/// The kernel for this cache; none: it is not for the processor, the type or the heads.
pub(super) fn kernel(gpu: &Gpu, cache: &KvCache) -> Option<Instance> {
    let head_size = cache.heads().head_size;
    // Where a row lies among those of its head is counted in 32 bits.
    let counts = cache.capacity().saturating_mul(head_size) < 1 << 32;
    instance(head_size, cache.kv()).filter(|_| gpu.caps().arch.number >= 80 && takes(head_size) && counts)
}

/// Blocks that run at a time, as the source bounds its registers.
fn at_a_time(gpu: &Gpu, heads: Heads) -> usize {
    let of_multiprocessor = match heads.head_size {
        0..=64 => 4,
        65..=128 => 3,
        _ => 2,
    };
    gpu.caps().multiprocessors as usize * of_multiprocessor
}

/// Positions of a part of rows that see up to `longest` of them. Those of one text have a length of their own, so that its bits
/// depend on its position alone; those of several are so long that all blocks run at a time, where these are so few.
pub(super) fn part_length(gpu: &Gpu, heads: Heads, texts: usize, longest: usize) -> usize {
    if texts == 1 {
        return PART_LENGTH;
    }
    let parts = at_a_time(gpu, heads) / (texts * blocks_of_text(heads)).max(1);
    longest.div_ceil(parts.min(longest.div_ceil(PART_LENGTH)).max(1)).next_multiple_of(PART_LENGTH / 2)
}

/// Query heads times parts of several texts, at most, where there are several parts.
pub(super) fn most_parts(gpu: &Gpu, heads: Heads) -> usize {
    COLUMNS * at_a_time(gpu, heads)
}

/// Blocks that compute a part of a text's row.
pub(super) fn blocks_of_text(heads: Heads) -> usize {
    heads.kv_heads * heads.group().div_ceil(COLUMNS)
}

/// The launch for so many texts, each row in so many parts. Error: more blocks than a launch may have.
pub(super) fn form(gpu: &Gpu, heads: Heads, texts: usize, parts: usize) -> Result<Launch> {
    let grid = [texts, blocks_of_text(heads), parts];
    Ok(overlapping(gpu, launch("attention", grid, THREADS, 0)?))
}
