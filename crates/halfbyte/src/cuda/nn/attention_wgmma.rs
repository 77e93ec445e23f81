//! When `attention_wgmma.cu` runs, and how it is launched: attention of many rows by the tensor cores and the copy engine of Hopper.

use super::attention::{FEW_QUERIES, LARGEST_HEAD, OP, Params};
use super::attention_mma::MOST_POSITIONS;
use super::kv_cache::{KvCache, on_tensor_cores};
use super::launch;
use crate::cuda::driver::{Arg, Launch, Stream, TensorMap};
use crate::cuda::parameters::Parameters;
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::Result;
use crate::kernel::KvType;

static SOURCE: Source =
    Source { path: "nn/attention_wgmma.cu", text: include_str!("attention_wgmma.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const BLOCK: u32 = 3 * 128;
const QUERIES: usize = 2 * 64;
const CLEANING_WARPS: usize = 3;

/// Elements of the least head: shorter ones would leave most of a product's depth empty.
const LEAST_HEAD: usize = 64;

/// Those for heads of this size and the types among these that it takes; none for heads that it does not take. `changed`: those that
/// change scores.
pub(super) fn instances(head_size: usize, kv: &[KvType], changed: bool) -> Vec<Instance> {
    kv.iter().filter_map(|&kv| instance(head_size, kv, changed)).collect()
}

/// For heads of whole pieces of 8 elements, in floats.
fn instance(head_size: usize, kv: KvType, changed: bool) -> Option<Instance> {
    let takes = head_size.is_multiple_of(8) && (LEAST_HEAD..=LARGEST_HEAD).contains(&head_size) && kv != KvType::Int8;
    let kv = on_tensor_cores(kv).filter(|_| takes)?;
    Some(Instance::new(&SOURCE, format!("attention_wgmma<{}, {kv}, {changed}>", padded(head_size))))
}

/// Size of a head as kernels are made for.
fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// A launch of a kernel that the copy engine brings keys and values to.
pub(super) struct WithMaps {
    pub(super) instance: Instance,
    pub(super) form: Launch,
    /// Of the keys, and of the values of a layer.
    pub(super) maps: [TensorMap; 2],
}

impl WithMaps {
    /// Puts the kernel into a stream. The caller has checked what the parameters name.
    pub(super) fn launch(&self, gpu: &Gpu, stream: &Stream, params: &Params) -> Result<()> {
        let (function, [keys, values]) = (gpu.function(&self.instance)?, &self.maps);
        // SAFETY: the source's parameters; the maps are of whole matrices.
        unsafe { function.launch(stream, &self.form, &[Arg::new(params), Arg::new(keys), Arg::new(values)]) }
    }
}

/// The kernel for so many rows over this cache; none: another one is for them.
pub(super) fn instance_for(caps: Caps, rows: usize, changed: bool, cache: &KvCache) -> Option<Instance> {
    let (heads, capacity) = (cache.heads(), cache.capacity());
    let queries = rows.saturating_mul(heads.group());
    let many = rows > 1 && (FEW_QUERIES + 1..=MOST_POSITIONS).contains(&queries);
    let counted = capacity <= MOST_POSITIONS && i32::try_from(heads.kv_heads.saturating_mul(capacity)).is_ok();
    instance(heads.head_size, cache.kv(), changed).filter(|_| caps.arch.is_hopper() && many && counted)
}

/// The launch for so many rows over a layer of this cache; none: another one is for them.
pub(super) fn choice(
    caps: Caps,
    rows: usize,
    changed: bool,
    cache: &KvCache,
    layer: usize,
) -> Result<Option<WithMaps>> {
    let Some(instance) = instance_for(caps, rows, changed, cache) else { return Ok(None) };
    let heads = cache.heads();
    let tile = Tile::of(padded(heads.head_size));
    let blocks = rows.saturating_mul(heads.group()).div_ceil(QUERIES).saturating_mul(heads.kv_heads);
    let form = launch(OP, [blocks, 1, 1], BLOCK, tile.shared_bytes)?;
    Ok(Some(WithMaps { instance, form, maps: cache.maps_of_layer(OP, layer, tile.keys)? }))
}

/// As in the source.
struct Tile {
    keys: usize,
    shared_bytes: u32,
}

impl Tile {
    fn of(head: usize) -> Self {
        let (keys, boxes) = (if head <= 128 { 128 } else { 64 }, head.div_ceil(64));
        // Queries, and two stages of keys, of values, and of bits of these, in boxes of 64 elements of 2 bytes.
        let tiles = boxes * (QUERIES * 128 + 2 * keys * (2 * 128 + 8));
        let barriers = 80 + 2 * 4 * CLEANING_WARPS;
        Self { keys, shared_bytes: (tiles + barriers + 4 * QUERIES) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_is_what_the_source_has() {
        assert_eq!([128, 256].map(|head| Tile::of(head).shared_bytes), [168_552, 201_320]);
    }
}
