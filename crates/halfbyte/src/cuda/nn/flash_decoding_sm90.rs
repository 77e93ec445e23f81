//! When `flash_decoding_sm90.cu` runs, and how it is launched: attention of one row of each of several texts, with the copy engine of
//! Hopper.

use super::attention::{LARGEST_HEAD, OP, Params};
use super::attention_wgmma::WithMaps;
use super::flash_decoding::{COLUMNS, Division, TILE, blocks_of_text};
use super::kv_cache::{KvCache, on_tensor_cores};
use super::rope::MOST_PAIRS;
use crate::cuda::driver::Stream;
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::kernel::{Heads, KvType};

static SOURCE: Source = Source {
    path: "nn/flash_decoding_sm90.cu",
    text: include_str!("flash_decoding_sm90.cu"),
    parameters: &[Params::LAYOUT],
};

/// As in the source: warps of a block.
const MOST_WARPS: usize = 8;

/// Blocks that share a multiprocessor at most: more would have rings of one stage, or a last round that is less full.
const MOST_BLOCKS: usize = 3;

/// Those that registers have room for, and stages that they must have: so many share one if then all blocks are there at once.
const ALL_BLOCKS: usize = 4;
const FEW_STAGES: usize = 2;

/// Multiprocessors that together bring in what memory gives, and bytes that memory gives while parts are joined: from 2 to 64 texts of
/// 518 positions on an H100.
const AT_ONCE: usize = 40;
const OF_JOIN: f64 = 7.6e6;

/// Stages of a ring at most: each is first filled by a lane.
const LANES: usize = 32;

/// Elements of the least head: of shorter ones boxes would be mostly empty.
const LEAST_HEAD: usize = 64;

/// Those that a processor runs for heads of this size and the types among these that it takes; none for heads that it does not take.
pub(super) fn instances(arch: Arch, head_size: usize, kv: &[KvType]) -> Vec<Instance> {
    if !arch.is_hopper() {
        return Vec::new();
    }
    kv.iter().filter_map(|&kv| instance(head_size, kv)).collect()
}

/// For heads of whole pieces of 8 elements, in floats.
fn instance(head_size: usize, kv: KvType) -> Option<Instance> {
    let takes = head_size.is_multiple_of(8) && (LEAST_HEAD..=LARGEST_HEAD).contains(&head_size) && kv != KvType::Int8;
    let kv = on_tensor_cores(kv).filter(|_| takes)?;
    Some(Instance::new(&SOURCE, format!("flash_decoding_sm90<{}, {kv}>", head_size.next_multiple_of(64))))
}

/// Whether the kernel is for this cache.
pub(super) fn takes(caps: Caps, cache: &KvCache) -> bool {
    let heads = cache.heads();
    let counted = i32::try_from(heads.kv_heads.saturating_mul(cache.capacity())).is_ok();
    caps.arch.is_hopper() && counted && instance(heads.head_size, cache.kv()).is_some()
}

/// The division of several texts whose rows see up to `longest` positions each: into parts where few multiprocessors would bring in
/// less than memory gives, if that takes longer than joining them.
pub(super) fn of_texts(multiprocessors: usize, heads: Heads, texts: usize, longest: usize) -> Division {
    let blocks = (texts * blocks_of_text(heads)).max(1);
    // A recorded step serves lengths from half of the longest on.
    let expected = (longest / 4 * 3).max(1);
    let bytes = expected * 4 * heads.head_size;
    let time = |&parts: &usize| {
        let of_all = (blocks * bytes) as f64;
        let of_one = (bytes.div_ceil(parts) * multiprocessors.min(AT_ONCE)) as f64;
        of_all.max(of_one) + if parts > 1 { OF_JOIN } else { 0.0 }
    };
    let warps = if blocks > multiprocessors { MOST_WARPS / 2 } else { MOST_WARPS };
    let most = (multiprocessors / blocks).min(expected.div_ceil(warps * TILE)).max(1);
    let parts = (1..=most).min_by(|a, b| time(a).total_cmp(&time(b))).unwrap_or(1);
    Division { warps, parts, part_length: 0 }
}

/// Blocks in each direction, and stages of a warp's ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    grid: [usize; 3],
    warps: usize,
    pub stages: usize,
}

/// The form for so many texts that see up to `longest` positions each: rings of what shared memory has room for, where as many blocks share a
/// multiprocessor as there are, up to [`MOST_BLOCKS`], or all.
pub(super) fn form(caps: Caps, heads: Heads, texts: usize, division: Division, longest: usize) -> Form {
    let Division { warps, parts, part_length } = division;
    let grid = [texts, blocks_of_text(heads), parts];
    let blocks: usize = grid.iter().product();
    let of_part = if part_length > 0 { part_length } else { longest.div_ceil(parts) };
    let needed = (of_part.div_ceil(warps * TILE) + 1).min(LANES);
    // A block takes 1 KB more than it asks for, and a multiprocessor has as much more than a block may have.
    let room = |blocks: usize| ((caps.shared_bytes as usize + 1024) / blocks).saturating_sub(1024);
    let fits = |stages: usize, blocks: usize| shared_bytes(heads.head_size, warps, stages) <= room(blocks);
    let all = blocks.div_ceil(caps.multiprocessors.max(1) as usize).max(1);
    let at_once = if all <= ALL_BLOCKS && fits(FEW_STAGES, all) { all } else { all.min(MOST_BLOCKS) };
    Form { grid, warps, stages: (1..=needed).take_while(|&stages| fits(stages, at_once)).last().unwrap_or(1) }
}

/// Puts the kernel into a stream. The caller has checked what the parameters name, which are of this form. *Errors:* more blocks than a
/// launch may have.
pub(super) fn launch(
    gpu: &Gpu,
    stream: &Stream,
    params: &Params,
    Form { grid, warps, stages }: Form,
    (cache, layer): (&KvCache, usize),
) -> Result<()> {
    let head_size = cache.heads().head_size;
    let Some(instance) = instance(head_size, cache.kv()) else {
        return Err(Error::invalid(OP, "keys and values in halves", format!("{:?}", cache.kv())));
    };
    let shared = shared_bytes(head_size, warps, stages) - static_bytes(head_size);
    let form = gpu.overlapping(super::launch(OP, grid, 32 * warps as u32, shared as u32)?);
    WithMaps { instance, form, maps: cache.maps_of_layer(OP, layer, TILE)? }.launch(gpu, stream, params)
}

/// Shared memory of a block, as in the source: the rings, queries, a barrier a stage, and for each warp greatest scores and weights; and
/// what does not depend on the launch.
fn shared_bytes(head_size: usize, warps: usize, stages: usize) -> usize {
    let head = head_size.next_multiple_of(64);
    let stage = 2 * TILE * head * 2;
    warps * stages * stage + 4 * COLUMNS * (head + 8) + warps * (2 * 4 * COLUMNS + 8 * stages) + static_bytes(head_size)
}

/// What does not depend on the launch, up to where the rings begin: a row that is appended, factors of queries, and a word.
fn static_bytes(head_size: usize) -> usize {
    let head = head_size.next_multiple_of(64);
    (2 * 2 * head + 4 * COLUMNS * head + 8 * MOST_PAIRS + 4 * COLUMNS + 4).next_multiple_of(1024)
}

#[cfg(test)]
mod tests {
    use super::super::flash_decoding::most_parts;
    use super::*;

    #[test]
    fn shared_memory_is_what_the_source_has() {
        assert_eq!([64, 128, 256].map(static_bytes), [4096, 6144, 11264]);
    }

    /// Warps, stages, and blocks that there is room for.
    #[test]
    fn rings_are_shared_out_among_blocks() {
        let of = |head_size, texts| {
            let heads = Heads { heads: 32, kv_heads: 8, head_size };
            let division = of_texts(132, heads, texts, 1024);
            let Form { warps, stages, .. } = form(Caps::H200, heads, texts, division, 1024);
            let blocks = (Caps::H200.shared_bytes as usize + 1024) / (shared_bytes(head_size, warps, stages) + 1024);
            (warps, stages, blocks)
        };
        assert_eq!([16, 32, 64, 96].map(|texts| of(64, texts)), [(8, 6, 1), (4, 6, 2), (4, 3, 4), (4, 4, 3)]);
        assert_eq!([16, 32, 64, 96].map(|texts| of(128, texts)), [(8, 3, 1), (4, 3, 2), (4, 2, 3), (4, 2, 3)]);
        assert_eq!([16, 32, 64, 96].map(|texts| of(256, texts)), [(8, 1, 1), (4, 1, 2), (4, 1, 2), (4, 1, 2)]);
    }

    #[test]
    fn every_division_fits_a_multiprocessor_and_the_workspace() {
        for (multiprocessors, head_size) in
            [132, 114, 16].into_iter().flat_map(|count| [64, 72, 128, 256].map(|size| (count, size)))
        {
            let caps = Caps { multiprocessors, ..Caps::H200 };
            for (kv_heads, group) in [(1, 1), (1, 71), (2, 9), (8, 4), (32, 1)] {
                let heads = Heads { heads: kv_heads * group, kv_heads, head_size };
                for (texts, longest) in
                    (1..80).flat_map(|texts| [1, 17, 256, 1000, 1 << 17].map(|longest| (texts, longest)))
                {
                    let division = of_texts(multiprocessors as usize, heads, texts, longest);
                    let Form { stages, .. } = form(caps, heads, texts, division, longest);
                    let case = format!("{division:?} in {stages} of {texts} × {longest}, {heads:?}");
                    assert!((1..=MOST_WARPS).contains(&division.warps) && stages >= 1, "{case}");
                    assert!(shared_bytes(head_size, division.warps, stages) <= caps.shared_bytes as usize, "{case}");
                    let partial = texts * heads.heads * division.parts;
                    assert!(division.parts == 1 || partial <= most_parts(multiprocessors as usize, heads), "{case}");
                }
            }
        }
    }
}
