//! When `flash_decoding.cu` runs, and how it is launched: attention of one row of each text on tensor cores.

use super::attention::{LARGEST_HEAD, PART_LENGTH, Params};
use super::kv_cache::{KvCache, multiplies, on_tensor_cores};
use super::launch;
use crate::cuda::Gpu;
use crate::cuda::driver::Launch;
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::error::Result;
use crate::kernel::{Heads, KvType};

static SOURCE: Source =
    Source { path: "nn/flash_decoding.cu", text: include_str!("flash_decoding.cu"), parameters: &[Params::LAYOUT] };

/// As in the source: heads of a block, positions of a tile.
pub(super) const COLUMNS: usize = 8;
pub(super) const TILE: usize = 16;

/// Times, of what memory takes to bring a tile for each warp that a GPU holds: a block before its first tile is there and after its
/// last one, with one warp and more with few; a tile at least, and more where a multiprocessor is full; parts that are joined. From an
/// H100, where memory takes 4.3 µs.
const OF_BLOCK: [f64; 2] = [0.8, 2.0];
const OF_TILE: [f64; 2] = [0.25, 0.14];
const OF_JOIN: f64 = 1.0;
/// Warps of a block where there are more blocks than run at a time.
const WARPS_OF_MANY: usize = 4;

/// Those that a processor runs for heads of this size and the types among these that it takes; none for heads that it does not take.
pub(super) fn instances(arch: Arch, head_size: usize, kv: &[KvType]) -> Vec<Instance> {
    let types = kv.iter().copied().filter(|&kv| takes(head_size) && serves(arch, head_size, kv));
    types.filter_map(|kv| instance(head_size, kv)).collect()
}

/// Whether a processor multiplies such keys and values, and has the shared memory for heads of this size.
fn serves(arch: Arch, head_size: usize, kv: KvType) -> bool {
    multiplies(arch, kv) && shared_bytes(head_size, most_warps(head_size)) <= arch.shared_bytes()
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
    let serves = serves(gpu.caps().arch, head_size, cache.kv());
    instance(head_size, cache.kv()).filter(|_| serves && takes(head_size) && counts)
}

/// Warps that a multiprocessor holds, as the source bounds its registers.
fn most_warps(head_size: usize) -> usize {
    match head_size {
        0..=64 => 16,
        65..=128 => 12,
        _ => 8,
    }
}

/// How rows are divided among blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Division {
    /// Of a block.
    pub warps: usize,
    /// Blocks that share a row's positions.
    pub parts: usize,
    /// Positions of a part; 0: as follows from each row's positions.
    pub part_length: usize,
}

/// The division of the only row of a text, so that its bits depend on its position alone.
pub(super) fn of_one_text(parts: usize) -> Division {
    Division { warps: WARPS_OF_MANY, parts, part_length: PART_LENGTH }
}

/// The division that takes least, of several texts whose rows see up to `longest` positions each.
pub(super) fn of_texts(multiprocessors: usize, heads: Heads, texts: usize, longest: usize) -> Division {
    let most = most_warps(heads.head_size);
    let of_row = (texts * blocks_of_text(heads)).max(1);
    // Blocks that end make room for the next kernel's, which then begins piece by piece.
    if of_row >= multiprocessors * (most / WARPS_OF_MANY) {
        return Division { warps: WARPS_OF_MANY, parts: 1, part_length: 0 };
    }
    // A recorded step serves lengths from half of the longest on.
    let expected = (longest / 4 * 3).max(1);
    let time = |&Division { warps, parts, .. }: &Division| {
        let (blocks, of_multiprocessor) = (of_row * parts, most / warps);
        let at_a_time = blocks.min(multiprocessors * of_multiprocessor);
        let full = |of: usize, all: usize| (of * warps) as f64 / (all * most) as f64;
        let of_one = OF_TILE[0] + OF_TILE[1] * full(blocks.div_ceil(multiprocessors).min(of_multiprocessor), 1);
        let of_tile = full(at_a_time, multiprocessors).max(of_one);
        let of_tiles = expected.div_ceil(parts * warps * TILE) as f64 * of_tile;
        let join = if parts > 1 { OF_JOIN } else { 0.0 };
        blocks.div_ceil(at_a_time) as f64 * (OF_BLOCK[0] + OF_BLOCK[1] / warps as f64 + of_tiles) + join
    };
    let divisions = (1..=4).flat_map(|of_multiprocessor| {
        let warps = most / of_multiprocessor;
        let most_parts = (multiprocessors * most / of_row).min(expected.div_ceil(warps * TILE)).max(1);
        let tried =
            std::iter::successors(Some(1), |parts| Some(2 * parts)).take_while(move |&tried| tried <= most_parts);
        tried.map(move |parts| Division { warps, parts, part_length: 0 })
    });
    divisions.min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or_else(|| of_one_text(1))
}

/// Query heads times parts of several texts, at most, where there are several parts.
pub(super) fn most_parts(multiprocessors: usize, heads: Heads) -> usize {
    COLUMNS * multiprocessors * most_warps(heads.head_size)
}

/// Blocks that compute a part of a text's row.
pub(super) fn blocks_of_text(heads: Heads) -> usize {
    heads.kv_heads * heads.group().div_ceil(COLUMNS)
}

/// The launch for so many texts. Error: more blocks than a launch may have.
pub(super) fn form(gpu: &Gpu, heads: Heads, texts: usize, division: Division) -> Result<Launch> {
    let grid = [texts, blocks_of_text(heads), division.parts];
    let threads = 32 * division.warps as u32;
    Ok(gpu.overlapping(launch("attention", grid, threads, shared_bytes(heads.head_size, division.warps))?))
}

/// Shared memory of a block, as in the source: queries as two halves; sums of warps, greatest scores and weights.
fn shared_bytes(head_size: usize, warps: usize) -> u32 {
    let head = head_size.next_multiple_of(64);
    (4 * COLUMNS * (head + 32) + 4 * warps * COLUMNS * (head + 4 + 2)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_division_fits_a_multiprocessor_and_the_workspace() {
        // The least that processors with tensor cores from sm_80 on let a block have.
        const SHARED_BYTES: u32 = 99 << 10;
        for multiprocessors in [1, 16, 58, 108, 132, 144] {
            for head_size in [8, 64, 72, 128, 136, 256] {
                for (kv_heads, group) in [(1, 1), (1, 71), (2, 9), (8, 4), (32, 1)] {
                    let heads = Heads { heads: kv_heads * group, kv_heads, head_size };
                    for (texts, longest) in
                        (2..80).flat_map(|texts| [1, 17, 256, 1000, 1 << 17].map(|longest| (texts, longest)))
                    {
                        let division = of_texts(multiprocessors, heads, texts, longest);
                        let Division { warps, parts, .. } = division;
                        let case = format!("{division:?} of {texts} × {longest}, {heads:?}, {multiprocessors}");
                        assert!((1..=most_warps(head_size)).contains(&warps), "{case}");
                        assert!(shared_bytes(head_size, warps) <= SHARED_BYTES, "{case}");
                        let partial = texts * heads.heads * parts;
                        assert!(parts == 1 || partial <= most_parts(multiprocessors, heads), "{case}");
                        assert!(parts == 1 || parts * TILE <= longest.next_multiple_of(TILE), "{case}");
                    }
                }
            }
        }
    }
}
