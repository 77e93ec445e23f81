//! Launches of `rope.cu`: positions come into queries and keys, and keys and values into the cache.

use super::kv_cache::{KvCache, element_type};
use super::{launch, narrow, rows_of, same_length};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, Stream, View, ViewMut};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::Heads;
use std::f64::consts::TAU;

static SOURCE: Source = Source { path: "nn/rope.cu", text: include_str!("rope.cu"), parameters: &[Params::LAYOUT] };

/// As in the source: heads of a block, and blocks that a multiprocessor holds at once.
const WARPS: usize = 4;
const BLOCKS: usize = 7;
pub(super) const MOST_PAIRS: usize = 128;

pub(super) fn instances() -> [Instance; 2] {
    [false, true].map(instance)
}

fn instance(norms: bool) -> Instance {
    Instance::new(&SOURCE, format!("rope<{norms}>"))
}

parameters! {
    /// As in the source.
    struct Params {
        qkv: u64,
        keys: u64,
        values: u64,
        key_scales: u64,
        value_scales: u64,
        turns: u64,
        positions: u64,
        slots: u64,
        capacity: u64,
        heads: u32,
        kv_heads: u32,
        head_size: u32,
        pairs: u32,
        kind: u32,
        eps: f32,
        query_norm: u64,
        key_norm: u64,
        at_once: u32,
        padding: u32,
    }
}

/// Rotations of query and key heads by their positions, in the convention of Hugging Face Llama: element `i` is paired
/// with element `i + rotated/2`, where the first `rotated` elements of a head are rotated.
///
/// Without frequencies nothing is rotated, for models that know positions otherwise: [`Rope::apply`] then brings keys and
/// values into the cache as they are.
///
/// *Source:* Su et al., "RoFormer", 2021; the pairs are halves as in GPT-NeoX.
#[derive(Debug)]
pub struct Rope {
    turns: Buffer<f64>,
}

/// Root-mean-square norms of each query head and each key head, before they are rotated.
///
/// *Source:* Henry et al., "Query-Key Normalization for Transformers", 2020; with RMS norms as in Qwen3.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Factors of a query head's elements, `[head_size]`.
    pub queries: View<'a, f32>,
    /// Factors of a key head's elements, `[head_size]`.
    pub keys: View<'a, f32>,
    /// Added to the mean of the squares.
    pub eps: f32,
}

/// Rows of queries, keys and values on their way to attention.
#[derive(Debug)]
pub struct NewRows<'a> {
    /// `[m, heads.row()]` with the heads of the cache. The queries are rotated in place.
    pub qkv: ViewMut<'a, f32>,
    /// Position of each row in its text, `[m]`.
    pub positions: View<'a, u32>,
    /// Where its key and value go in the cache, `[m]`: of one text that lies there in order, the positions.
    pub slots: View<'a, u32>,
    /// Norms of the heads, where the model has them.
    pub norms: Option<HeadNorms<'a>>,
}

impl Rope {
    /// `inv_freq[i]`: the angle, in radians a position, of pair `i`. *Errors:* a number that is not finite, more pairs than
    /// heads have.
    pub fn new(gpu: &Gpu, stream: &Stream, inv_freq: &[f64]) -> Result<Self> {
        if let Some(bad) = inv_freq.iter().find(|frequency| !frequency.is_finite()) {
            return Err(Error::invalid("rope", "finite frequencies", bad.to_string()));
        }
        if inv_freq.len() > MOST_PAIRS {
            return Err(Error::invalid("rope", format!("at most {MOST_PAIRS} pairs"), inv_freq.len().to_string()));
        }
        let values: Vec<f64> = inv_freq.iter().map(|frequency| frequency / TAU).collect();
        let mut turns = gpu.context().allocate(values.len())?;
        stream.upload(&values, turns.view_mut())?;
        Ok(Self { turns })
    }

    /// Pairs that are rotated.
    pub fn pairs(&self) -> usize {
        self.turns.len()
    }

    /// Address of the turns of a position.
    pub(super) fn pointer(&self) -> u64 {
        self.turns.pointer()
    }

    /// Checks that heads have room for the rotations, and norms their length.
    pub(super) fn check(&self, op: &'static str, heads: Heads, norms: Option<&HeadNorms<'_>>) -> Result<()> {
        if heads.head_size < 2 * self.turns.len() {
            let expected = format!("heads of at least {} elements", 2 * self.turns.len());
            return Err(Error::invalid(op, expected, heads.head_size.to_string()));
        }
        for (name, weight) in norms.iter().flat_map(|norms| [("queries", norms.queries), ("keys", norms.keys)]) {
            same_length(op, name, Some(heads.head_size), weight.len())?;
        }
        Ok(())
    }

    /// Norms the query and key heads of `rows` where norms are given, rotates the query heads in place and the key heads into
    /// `layer` of the cache, where the value heads go too. No two rows have the same slot.
    ///
    /// Rows beyond the cache's capacity are left out. *Accuracy:* absolute error ≤ 3·2⁻²⁴ of the pair's norm, before it is
    /// rounded to the cache's type (codes of 8 bits by the rule of [`crate::kernel::KvType::Int8`]); with head norms,
    /// (head_size/8 + 19)·2⁻²⁴ of the normed pair's norm, as long as the squares stay in the range of f32. *Errors:* lengths
    /// that do not fit, heads smaller than what is rotated, a layer that the cache does not have.
    pub fn apply(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        rows: NewRows<'_>,
        cache: &mut KvCache,
        layer: usize,
    ) -> Result<()> {
        const OP: &str = "rope";
        let (heads, NewRows { qkv, positions, slots, norms }) = (cache.heads(), rows);
        let rows = rows_of(OP, qkv.len(), heads.row())?;
        same_length(OP, "positions", Some(rows), positions.len())?;
        same_length(OP, "slots", Some(rows), slots.len())?;
        self.check(OP, heads, norms.as_ref())?;
        let [keys, values] = cache.layer(OP, layer)?;
        if rows == 0 {
            return Ok(());
        }
        let blocks = (heads.heads + 2 * heads.kv_heads).div_ceil(WARPS);
        let at_once = rows * blocks <= BLOCKS * gpu.caps().multiprocessors as usize;
        let params = Params {
            qkv: qkv.pointer(),
            keys: keys.pointer(),
            values: values.pointer(),
            key_scales: keys.scales(),
            value_scales: values.scales(),
            turns: self.turns.pointer(),
            positions: positions.pointer(),
            slots: slots.pointer(),
            capacity: cache.capacity() as u64,
            heads: narrow(OP, "heads", heads.heads)?,
            kv_heads: narrow(OP, "heads", heads.kv_heads)?,
            head_size: narrow(OP, "a head", heads.head_size)?,
            pairs: narrow(OP, "pairs", self.turns.len())?,
            kind: element_type(cache.kv()),
            eps: norms.map_or(0.0, |norms| norms.eps),
            query_norm: norms.map_or(0, |norms| norms.queries.pointer()),
            key_norm: norms.map_or(0, |norms| norms.keys.pointer()),
            at_once: at_once.into(),
            padding: 0,
        };
        let form = gpu.overlapping(launch(OP, [rows, blocks, 1], 32 * WARPS as u32, 0)?);
        let function = gpu.function(&instance(norms.is_some()))?;
        // SAFETY: the one parameter is the source's `Params`, whose lengths were checked above; the cache is borrowed to be
        // written.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }
    }
}
