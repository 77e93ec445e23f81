//! When `attention_mma.cu` runs, and how it is launched: attention of many rows on tensor cores.

use super::attention::{FEW_QUERIES, LARGEST_HEAD, Params};
use super::kv_cache::{KvCache, multiplies, on_tensor_cores};
use super::launch;
use crate::cuda::Caps;
use crate::cuda::driver::Launch;
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::error::Result;
use crate::kernel::KvType;

static SOURCE: Source =
    Source { path: "nn/attention_mma.cu", text: include_str!("attention_mma.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const STRIPS: usize = 4;
const THREADS: u32 = 2 * 32 * STRIPS as u32;

/// Positions up to which the kernel counts.
pub(super) const MOST_POSITIONS: usize = 1 << 30;

/// Those that a processor runs for heads of this size and the types among these that it takes; none for heads that it does not take.
/// `changed`: those that change scores.
pub(super) fn instances(arch: Arch, head_size: usize, kv: &[KvType], changed: bool) -> Vec<Instance> {
    let fits = |&kv: &KvType| {
        Shape::new(arch, padded(head_size, kv), kv, changed).shared_bytes <= arch.shared_bytes() as usize
    };
    let types = kv.iter().copied().filter(|&kv| takes(head_size) && multiplies(arch, kv)).filter(fits);
    types.filter_map(|kv| instance(head_size, kv, changed)).collect()
}

fn instance(head_size: usize, kv: KvType, changed: bool) -> Option<Instance> {
    let (head, kv) = (padded(head_size, kv), on_tensor_cores(kv)?);
    Some(Instance::new(&SOURCE, format!("attention_mma<{head}, {kv}, {changed}>")))
}

/// Whether rows of keys are whole pieces of 8 elements.
fn takes(head_size: usize) -> bool {
    head_size.is_multiple_of(8) && (1..=LARGEST_HEAD).contains(&head_size)
}

/// Size of a head as kernels are made for.
fn padded(head_size: usize, kv: KvType) -> usize {
    head_size.next_multiple_of(if kv == KvType::Int8 { 32 } else { 16 })
}

/// The kernel and its launch for so many rows over this cache; none: the other one is for them.
pub(super) fn choice(caps: Caps, rows: usize, changed: bool, cache: &KvCache) -> Result<Option<(Instance, Launch)>> {
    let heads = cache.heads();
    let (queries, kv) = (rows.saturating_mul(heads.group()), cache.kv());
    let Some(instance) = instance(heads.head_size, kv, changed) else { return Ok(None) };
    let shape = Shape::new(caps.arch, padded(heads.head_size, kv), kv, changed);
    let has = multiplies(caps.arch, kv) && shape.shared_bytes <= caps.shared_bytes as usize;
    let many = rows > 1 && (FEW_QUERIES + 1..=MOST_POSITIONS).contains(&queries);
    if !has || !many || !takes(heads.head_size) || cache.capacity() > MOST_POSITIONS {
        return Ok(None);
    }
    let blocks = queries.div_ceil(shape.queries).saturating_mul(heads.kv_heads);
    let form = launch("attention", [blocks, 1, 1], THREADS, shape.shared_bytes as u32)?;
    Ok(Some((instance, form)))
}

/// What a block has, as `Shape` in the source.
struct Shape {
    queries: usize,
    shared_bytes: usize,
}

impl Shape {
    fn new(arch: Arch, head: usize, kv: KvType, changed: bool) -> Self {
        let before_sm_80 = arch.number < 80;
        let queries = if head <= if before_sm_80 { 64 } else { 128 } { 32 * STRIPS } else { 16 * STRIPS };
        let roomy = matches!(arch.number, 80 | 87 | 90..120);
        let keys = match (roomy, head) {
            _ if before_sm_80 => {
                if head <= 64 {
                    32
                } else {
                    16
                }
            }
            (true, 0..=96) => 64,
            (true, 97..=128) if kv != KvType::Int8 => 64,
            (_, 0..=128) => 32,
            (roomy, _) => {
                if roomy && !changed {
                    32
                } else {
                    16
                }
            }
        };
        let row = row_bytes(2 * head);
        // Keys and values, and the scales of codes.
        let stage = if kv == KvType::Int8 { 2 * keys * (row_bytes(head) + size_of::<f32>()) } else { 2 * keys * row };
        // Queries and two stages for each half of the warps, or all sums; a factor, a position and a slope for each query.
        let sums = queries * (head + 8) * size_of::<f32>();
        Self { queries, shared_bytes: (queries * row + 4 * stage).max(sums) + 12 * queries }
    }
}

/// Bytes from a row in shared memory to the next, as `Rows` in the source.
fn row_bytes(bytes: usize) -> usize {
    let chunks = bytes / 16;
    16 * if chunks.is_multiple_of(8) { chunks } else { chunks | 1 }
}
