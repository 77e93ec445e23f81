//! When `attention_mma.cu` runs, and how it is launched: attention of many rows on tensor cores.

use super::attention::{FEW_QUERIES, KvCache, LARGEST_HEAD, Params};
use super::launch;
use crate::cuda::Caps;
use crate::cuda::driver::Launch;
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Arch, Instance, Source};
use crate::error::Result;
use crate::tensor::Float;

static SOURCE: Source =
    Source { path: "nn/attention_mma.cu", text: include_str!("attention_mma.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const STRIPS: usize = 4;
const THREADS: u32 = 2 * 32 * STRIPS as u32;

/// Positions up to which the kernel counts.
const MOST_POSITIONS: usize = 1 << 30;

/// Those for heads of this size: of either type; none for heads that it does not take.
pub(super) fn instances(head_size: usize) -> Vec<Instance> {
    let types = if takes(head_size) { vec![false, true] } else { vec![] };
    types.into_iter().map(|bf16| instance(head_size, bf16, false)).collect()
}

/// Those that change scores, for heads of this size.
pub(super) fn changed_instances(head_size: usize) -> Vec<Instance> {
    let types = if takes(head_size) { vec![false, true] } else { vec![] };
    types.into_iter().map(|bf16| instance(head_size, bf16, true)).collect()
}

fn instance(head_size: usize, bf16: bool, changed: bool) -> Instance {
    Instance::new(&SOURCE, format!("attention_mma<{}, {bf16}, {changed}>", padded(head_size)))
}

/// Whether rows of keys are whole pieces of 16 bytes.
fn takes(head_size: usize) -> bool {
    head_size.is_multiple_of(8) && (1..=LARGEST_HEAD).contains(&head_size)
}

/// Size of a head as kernels are made for.
fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// The kernel and its launch for so many rows over this cache; none: the other one is for them.
pub(super) fn choice(caps: Caps, rows: usize, changed: bool, cache: &KvCache) -> Result<Option<(Instance, Launch)>> {
    let heads = cache.heads();
    let (queries, head) = (rows.saturating_mul(heads.group()), padded(heads.head_size));
    let bf16 = match cache.dtype() {
        Float::F16 => false,
        Float::BF16 => true,
        Float::F32 => return Ok(None),
    };
    let shape = Shape::new(caps.arch, head, changed);
    let has = caps.arch.number >= 80 && shape.shared_bytes <= caps.shared_bytes as usize;
    let many = rows > 1 && (FEW_QUERIES + 1..=MOST_POSITIONS).contains(&queries);
    if !has || !many || !takes(heads.head_size) || cache.capacity() > MOST_POSITIONS {
        return Ok(None);
    }
    let blocks = queries.div_ceil(shape.queries).saturating_mul(heads.kv_heads);
    let form = launch("attention", [blocks, 1, 1], THREADS, shape.shared_bytes as u32)?;
    Ok(Some((instance(heads.head_size, bf16, changed), form)))
}

/// What a block has, as `Shape` in the source.
struct Shape {
    queries: usize,
    shared_bytes: usize,
}

impl Shape {
    fn new(arch: Arch, head: usize, changed: bool) -> Self {
        let queries = if head <= 128 { 32 * STRIPS } else { 16 * STRIPS };
        let roomy = matches!(arch.number, 80 | 87 | 90..120);
        let keys = if head <= 128 { 64 } else { 32 };
        let keys = if roomy && !(changed && head > 128) { keys } else { keys / 2 };
        let row = if head.is_multiple_of(64) { 2 * head } else { 2 * head + 16 };
        // Queries and two stages of keys and values for each half of the warps; a factor and a position for each query.
        Self { queries, shared_bytes: (queries + 8 * keys) * row + 8 * queries }
    }
}
