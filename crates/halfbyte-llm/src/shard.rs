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

use crate::arch::spec::{AttentionSpec, FeedForward, LinearSpec, Qkv, QkvOrder, Shape};
use crate::comm::Comm;
use crate::error::{Error, Result};
use halfbyte::kernel::Heads;
use halfbyte_checkpoint::{FloatData, StoredLinear, StoredWeight};
use std::borrow::Cow;
use std::ops::Range;

const OP: &str = "cut a model for ranks";

/// One of the ranks that share a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    size: usize,
}

/// What a rank holds of a linear layer's matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Rows, in the order in which the rank has them.
    pub rows: Vec<Range<usize>>,
    /// Columns, likewise.
    pub columns: Vec<Range<usize>>,
    /// Whether the rank adds the bias: of layers that are cut by columns only one does.
    pub bias: bool,
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

fn part(units: usize, rank: usize, size: usize) -> Range<usize> {
    let (each, more) = (units / size, units % size);
    let first = rank * each + rank.min(more);
    first..first + each + usize::from(rank < more)
}

impl Cut {
    /// All of a matrix.
    pub fn whole(shape: Shape) -> Self {
        Self::rows(std::iter::once(0..shape.n).collect(), shape)
    }

    /// Some rows of a matrix.
    pub fn rows(rows: Vec<Range<usize>>, Shape { k, .. }: Shape) -> Self {
        Self { rows, columns: std::iter::once(0..k).collect(), bias: true }
    }

    /// Some columns of a matrix.
    pub fn columns(columns: Vec<Range<usize>>, Shape { n, .. }: Shape, shard: Shard) -> Self {
        Self { rows: std::iter::once(0..n).collect(), columns, bias: shard.is_first() }
    }

    /// Whether it is all of a matrix, as it lies there.
    pub fn is_whole(&self, shape: Shape) -> bool {
        *self == Self::whole(shape)
    }
}

/// The linear layers of queries, keys and values, with what a rank holds of each: queries, then keys, then values.
pub fn qkv<'a>(attention: &'a AttentionSpec, all: Heads, of: &HeadsOf) -> Vec<(&'a LinearSpec, Cut)> {
    let d = all.head_size;
    let elements = |first: usize, heads: &Range<usize>| first + heads.start * d..first + heads.end * d;
    match &attention.qkv {
        Qkv::Split(layers) => {
            let [q, k, v] = &**layers;
            let cut = |layer: &'a LinearSpec, heads| (layer, Cut::rows(vec![elements(0, heads)], layer.shape));
            vec![cut(q, &of.queries), cut(k, &of.keys), cut(v, &of.keys)]
        }
        Qkv::Fused(layer, QkvOrder::Blocks) => {
            let (keys, values) = (all.heads * d, (all.heads + all.kv_heads) * d);
            let rows = vec![elements(0, &of.queries), elements(keys, &of.keys), elements(values, &of.keys)];
            vec![(layer, Cut::rows(joined(rows), layer.shape))]
        }
        Qkv::Fused(layer, QkvOrder::Groups) => {
            let (group, row) = (all.group(), (all.group() + 2) * d);
            let queries = of.queries.clone().map(|head| head / group * row + head % group * d);
            let keys = of.keys.clone().map(|head| head * row + group * d);
            let values = of.keys.clone().map(|head| head * row + (group + 1) * d);
            let rows = queries.chain(keys).chain(values).map(|first| first..first + d).collect();
            vec![(layer, Cut::rows(joined(rows), layer.shape))]
        }
    }
}

/// What a rank holds of the layer that follows attention.
pub fn output(attention: &AttentionSpec, of: &HeadsOf, shard: Shard) -> Cut {
    let d = of.heads.head_size;
    let columns = of.queries.start * d..of.queries.end * d;
    Cut::columns(vec![columns], attention.output.shape, shard)
}

/// What a rank that has these inner features holds of an MLP's layers, the last of them `down`.
pub fn feed_forward<'a>(mlp: &'a FeedForward, inner: &[Range<usize>], shard: Shard) -> Vec<(&'a LinearSpec, Cut)> {
    let up = mlp.up.iter().map(|layer| {
        // Gate and up may be one layer.
        let of = (0..layer.shape.n).step_by(mlp.inner());
        let rows = of.flat_map(|first| inner.iter().map(move |part| first + part.start..first + part.end)).collect();
        (layer, Cut::rows(joined(rows), layer.shape))
    });
    up.chain([(&mlp.down, Cut::columns(inner.to_vec(), mlp.down.shape, shard))]).collect()
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

/// A rank's part of a whole layer.
pub(crate) fn cut_linear<'a>(layer: StoredLinear<'a>, cut: &Cut, prefix: &str) -> Result<StoredLinear<'a>> {
    let named = |source: halfbyte::Error| Error::Weight {
        name: prefix.to_owned(),
        expected: "weights that can be cut for ranks".to_owned(),
        got: source.to_string(),
    };
    let StoredLinear { weight, bias, findings } = layer;
    let weight = match weight {
        StoredWeight::Dense { floats, shape: [_, k] } => {
            let shape = [&cut.rows, &cut.columns].map(|ranges| ranges.iter().map(Range::len).sum());
            StoredWeight::Dense { floats: cut_floats(&floats, k, cut), shape }
        }
        StoredWeight::Quantized(codes) => {
            StoredWeight::Quantized(codes.part(&cut.rows, &cut.columns).map_err(named)?.into())
        }
    };
    let of_rows = |bias: Vec<f32>| cut.rows.iter().flat_map(|rows| bias[rows.clone()].to_vec()).collect();
    Ok(StoredLinear { weight, bias: bias.filter(|_| cut.bias).map(of_rows), findings })
}

/// Some rows and columns of a matrix with rows of `k`.
pub(crate) fn cut_floats(floats: &FloatData<'_>, k: usize, cut: &Cut) -> FloatData<'static> {
    fn part<T: Copy>(values: &[T], k: usize, cut: &Cut) -> Cow<'static, [T]> {
        let row = |i: usize| cut.columns.iter().flat_map(move |part| &values[i * k + part.start..i * k + part.end]);
        Cow::Owned(cut.rows.iter().cloned().flatten().flat_map(row).copied().collect())
    }
    match floats {
        FloatData::F16(v) => FloatData::F16(part(v, k, cut)),
        FloatData::BF16(v) => FloatData::BF16(part(v, k, cut)),
        FloatData::F32(v) => FloatData::F32(part(v, k, cut)),
    }
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
}
