//! Tensor parallelism: what of a model's weights each rank holds. This is the one place where weights are cut.
//!
//! ```text
//! q, k, v        by heads            rows, so that a rank's heads of queries find their keys and values there
//! o              by the same heads   columns: ranks' outputs are parts of a sum
//! gate, up       by inner features   rows
//! down           by the same         columns, along the groups of a scale
//! experts        as gate, up, down: every rank holds a part of each
//! embedding, head  by tokens         rows
//! norms, router  whole on every rank
//! ```
//!
//! Parts need not be equal: of 231 groups four ranks hold 58, 58, 58 and 57. Where there are fewer key and value heads than
//! ranks, several ranks hold the same one. Where columns were quantised in another order (act-order), inner features are dealt in
//! the order of `down`'s groups, so that each group is one rank's; heads stay whole, so that a group of `o` may be cut: both ranks have
//! its scales then.

use crate::arch::spec::{AttentionSpec, FeedForward, LinearSpec, MlpKind, Qkv, QkvOrder, Shape, Spec};
use crate::comm::Comm;
use crate::error::{Error, Result};
use crate::load::{LoadOptions, Loader};
use halfbyte::kernel::Heads;
use halfbyte_checkpoint::{Cut, Part, Weights};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

const OP: &str = "cut a model for ranks";

/// What of each tensor ranks compare: runs of so many bytes, a page of memory, that lie evenly from its first byte to its last.
const HASHED_BYTES: usize = 4096;
const HASHED_RUNS: usize = 8;

/// One of the ranks that share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

/// The heads of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadsOf {
    /// How many.
    pub heads: Heads,
    /// Which query heads.
    pub queries: Range<usize>,
    /// Which key and value heads.
    pub keys: Range<usize>,
}

impl Shard {
    /// All of it.
    pub const WHOLE: Self = Self { rank: 0, size: 1 };

    /// The part of a rank.
    pub fn of(comm: &dyn Comm) -> Self {
        Self { rank: comm.rank(), size: comm.size() }
    }

    /// This rank's part of so many units: parts differ by one at most, and the first are the larger ones.
    pub fn part(self, units: usize) -> Range<usize> {
        part(units, self.rank, self.size)
    }

    /// This rank's heads. Error: fewer query heads than ranks that share their key head.
    pub fn heads(self, all: Heads) -> Result<HeadsOf> {
        let group = all.group();
        let (queries, keys) = if all.kv_heads >= self.size {
            let keys = self.part(all.kv_heads);
            (keys.start * group..keys.end * group, keys)
        } else {
            // Ranks are dealt out to key heads, and those of one key head share its query heads.
            let shares = |head: &usize| part(self.size, *head, all.kv_heads).contains(&self.rank);
            let key = (0..all.kv_heads).find(shares).unwrap_or(0);
            let sharers = part(self.size, key, all.kv_heads);
            let of_group = part(group, self.rank - sharers.start, sharers.len());
            (key * group + of_group.start..key * group + of_group.end, key..key + 1)
        };
        if queries.is_empty() {
            let expected = format!("at least one of {} query heads for each rank", all.heads);
            return Err(Error::invalid(OP, expected, format!("{} ranks", self.size)));
        }
        let heads = Heads { heads: queries.len(), kv_heads: keys.len(), ..all };
        Ok(HeadsOf { heads, queries, keys })
    }

    /// This rank's part of a vector inside an MLP, in whole units but for the last. Error: fewer units than ranks.
    pub fn inner(self, len: usize, unit: usize) -> Result<Range<usize>> {
        let units = self.part(len.div_ceil(unit));
        if units.is_empty() {
            let expected = format!("at least one group of {unit} inner features for each rank, of {len}");
            return Err(Error::invalid(OP, expected, format!("{} ranks", self.size)));
        }
        Ok(units.start * unit..(units.end * unit).min(len))
    }

    /// The one rank that adds what all would.
    fn is_first(self) -> bool {
        self.rank == 0
    }
}

/// A rank's part of so many units.
pub(crate) fn part(units: usize, rank: usize, size: usize) -> Range<usize> {
    let (each, more) = (units / size, units % size);
    let first = rank * each + rank.min(more);
    first..first + each + usize::from(rank < more)
}

/// The parts of so many ranks, with what each holds of the layers. Errors: a model that cannot be cut for so many, or that is a part
/// itself.
pub fn parts(spec: &Spec, weights: &Weights, size: usize) -> Result<Vec<(Part, HashMap<String, Cut>)>> {
    let (loader, model) = (Loader::new(weights, LoadOptions::default())?, name_of(spec, weights));
    let part = |shard: Shard| {
        let part = Part { rank: shard.rank, size, model: model.clone() };
        Ok((part, cuts(spec, &loader, shard)?))
    };
    (0..size).map(|rank| part(Shard { rank, size })).collect()
}

/// What a checkpoint that is a rank's part holds of each layer; nothing is named where it is none, or no such part can be.
pub(crate) fn cuts_of_part(spec: &Spec, weights: &Weights) -> HashMap<String, Cut> {
    let Ok(Some(Part { rank, size, .. })) = weights.part() else { return HashMap::new() };
    cuts(spec, &Loader::of_any_part(weights), Shard { rank, size }).unwrap_or_default()
}

/// What tells a model from others: its recipe, its tensors, and numbers at some places of each, in which weights of another training differ,
/// or of a copy that broke off. Of a tensor of up to 32 KiB these are all its numbers.
pub(crate) fn name_of(spec: &Spec, weights: &Weights) -> String {
    let (checkpoint, mut hash) = (weights.checkpoint(), DefaultHasher::new());
    format!("{spec:?}").hash(&mut hash);
    for tensor in checkpoint.tensors() {
        format!("{} {:?} {:?}", tensor.name, tensor.dtype, tensor.shape).hash(&mut hash);
        let bytes = checkpoint.stored_bytes(tensor.name).unwrap_or_default();
        hashed(bytes.len()).for_each(|places| hash.write(&bytes[places]));
    }
    format!("{:016x}", hash.finish())
}

/// The places of so many bytes that ranks compare.
fn hashed(len: usize) -> impl Iterator<Item = Range<usize>> {
    let whole = len <= HASHED_RUNS * HASHED_BYTES;
    let (runs, last) = if whole { (1, 0) } else { (HASHED_RUNS, len - HASHED_BYTES) };
    let size = if whole { len } else { HASHED_BYTES };
    // The first and the last run are the ends.
    (0..runs)
        .map(move |run| (run as u128 * last as u128 / (HASHED_RUNS - 1) as u128) as usize)
        .map(move |at| at..at + size)
}

/// Whether every one of so many ranks has a part of a model; of a layer's inner features those of the first layer are looked at. Error:
/// there are too many ranks.
pub fn check_ranks(spec: &Spec, weights: &Weights, options: &LoadOptions, size: usize) -> Result<()> {
    for rank in 0..size {
        Shard { rank, size }.heads(spec.heads)?;
    }
    let mlp = match spec.layers.first().map(|layer| &layer.mlp.kind) {
        Some(MlpKind::Dense(mlp)) => Some(mlp),
        Some(MlpKind::Experts(experts)) => experts.experts.first(),
        None => None,
    };
    match (mlp, weights.part()?) {
        // The last rank's part is the smallest one.
        (Some(mlp), None) => {
            Loader::new(weights, options.clone())?.features(mlp, Shard { rank: size - 1, size }).map(drop)
        }
        _ => Ok(()),
    }
}

/// What a rank holds of each linear layer, embedding and head of a model; of what is not named it holds all.
fn cuts(spec: &Spec, loader: &Loader<'_>, shard: Shard) -> Result<HashMap<String, Cut>> {
    let (heads, tokens) = (shard.heads(spec.heads)?, shard.part(spec.vocab));
    let table = Shape { n: spec.vocab, k: spec.hidden, bias: false };
    let tables = [Some(&spec.embedding), spec.head.as_ref()].into_iter().flatten();
    let mut all: HashMap<String, Cut> =
        tables.map(|name| (name.clone(), of_rows(vec![tokens.clone()], table))).collect();
    for layer in &spec.layers {
        let attention = &layer.attention;
        let mut layers = qkv(attention, spec.heads, &heads);
        layers.push((&attention.output, output(attention, &heads, shard)));
        let mlps = match &layer.mlp.kind {
            MlpKind::Dense(mlp) => std::slice::from_ref(mlp),
            MlpKind::Experts(experts) => &experts.experts,
        };
        for mlp in mlps {
            layers.extend(feed_forward(mlp, &loader.features(mlp, shard)?, shard));
        }
        all.extend(layers.into_iter().map(|(layer, cut)| (layer.name.clone(), cut)));
    }
    Ok(all)
}

/// Some rows of a matrix.
pub(crate) fn of_rows(rows: Vec<Range<usize>>, Shape { k, .. }: Shape) -> Cut {
    Cut { rows, columns: std::iter::once(0..k).collect(), bias: true }
}

/// Some columns of a matrix.
fn of_columns(columns: Vec<Range<usize>>, Shape { n, .. }: Shape, shard: Shard) -> Cut {
    Cut { rows: std::iter::once(0..n).collect(), columns, bias: shard.is_first() }
}

/// The linear layers of queries, keys and values, with what a rank holds of each: queries, then keys, then values.
pub fn qkv<'a>(attention: &'a AttentionSpec, all: Heads, of: &HeadsOf) -> Vec<(&'a LinearSpec, Cut)> {
    let d = all.head_size;
    let elements = |first: usize, heads: &Range<usize>| first + heads.start * d..first + heads.end * d;
    match &attention.qkv {
        Qkv::Split(layers) => {
            let [q, k, v] = &**layers;
            let cut = |layer: &'a LinearSpec, heads| (layer, of_rows(vec![elements(0, heads)], layer.shape));
            vec![cut(q, &of.queries), cut(k, &of.keys), cut(v, &of.keys)]
        }
        Qkv::Fused(layer, QkvOrder::Blocks) => {
            let (keys, values) = (all.heads * d, (all.heads + all.kv_heads) * d);
            let rows = vec![elements(0, &of.queries), elements(keys, &of.keys), elements(values, &of.keys)];
            vec![(layer, of_rows(joined(rows), layer.shape))]
        }
        Qkv::Fused(layer, QkvOrder::Groups) => {
            let (group, row) = (all.group(), (all.group() + 2) * d);
            let queries = of.queries.clone().map(|head| head / group * row + head % group * d);
            let keys = of.keys.clone().map(|head| head * row + group * d);
            let values = of.keys.clone().map(|head| head * row + (group + 1) * d);
            let rows = queries.chain(keys).chain(values).map(|first| first..first + d).collect();
            vec![(layer, of_rows(joined(rows), layer.shape))]
        }
    }
}

/// What a rank holds of the layer that follows attention.
pub fn output(attention: &AttentionSpec, of: &HeadsOf, shard: Shard) -> Cut {
    let d = of.heads.head_size;
    let columns = of.queries.start * d..of.queries.end * d;
    of_columns(vec![columns], attention.output.shape, shard)
}

/// What a rank that has these inner features holds of an MLP's layers, the last of them `down`.
pub fn feed_forward<'a>(mlp: &'a FeedForward, inner: &[Range<usize>], shard: Shard) -> Vec<(&'a LinearSpec, Cut)> {
    let up = mlp.up.iter().map(|layer| {
        // Gate and up may be one layer.
        let of = (0..layer.shape.n).step_by(mlp.inner());
        let rows = of.flat_map(|first| inner.iter().map(move |part| first + part.start..first + part.end)).collect();
        (layer, of_rows(joined(rows), layer.shape))
    });
    up.chain([(&mlp.down, of_columns(inner.to_vec(), mlp.down.shape, shard))]).collect()
}

/// A rank's inner features, which are dealt in an order: by default in that of the model.
pub fn features(order: Option<&[u32]>, places: Range<usize>) -> Vec<Range<usize>> {
    match order {
        None => vec![places],
        Some(order) => joined(order[places].iter().map(|&j| j as usize..j as usize + 1).collect()),
    }
}

/// Ranges that follow each other as one.
fn joined(ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_do_not_divide_are_dealt_out_to_all() {
        // Qwen2.5-72B: 231 groups of 128.
        for (size, want) in [(2, vec![116, 115]), (3, vec![77, 77, 77]), (4, vec![58, 58, 58, 57])] {
            let parts = (0..size).map(|rank| Shard { rank, size }.inner(29_568, 128).unwrap()).collect::<Vec<_>>();
            let groups = parts.iter().map(|part| part.len().div_ceil(128)).collect::<Vec<_>>();
            assert_eq!(groups, want);
            let all: Vec<usize> = parts.into_iter().flatten().collect();
            assert!(all.into_iter().eq(0..29_568));
        }
        assert!(Shard { rank: 1, size: 2 }.inner(128, 128).unwrap_err().to_string().contains("for each rank"));
    }

    #[test]
    fn a_model_is_told_by_numbers_all_over_its_tensors() {
        for len in [0, 1, 4096, 32_768] {
            assert!(hashed(len).flatten().eq(0..len), "{len}");
        }
        for len in [32_769, 1 << 20, 12_345_678_901] {
            let runs: Vec<Range<usize>> = hashed(len).collect();
            assert_eq!((runs.len(), runs[0].start, runs[7].end), (8, 0, len));
            let steps: Vec<usize> = runs.windows(2).map(|two| two[1].start - two[0].start).collect();
            assert!(steps.iter().all(|&step| step.abs_diff(steps[0]) <= 1) && steps[0] >= 4096, "{steps:?}");
        }
    }
}
