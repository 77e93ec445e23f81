//! Causal grouped-query attention, and the cache of keys and values that it reads.
//!
//! ```text
//! for each key/value head, for each tile of rows (a row is one query of one head of the group):
//!     for each page of 128 positions that a row of the tile sees:
//!         scores = queries · keysᵀ                            register-tiled products
//!         shift the running maximum, turn scores into 2^(score − maximum), add up
//!         sums of values = sums of values · 2^(old − new maximum) + weights · values
//!     out = sums of values / sum of weights
//! ```
//!
//! Keys and values of fewer bytes are converted in registers, once for all rows of a tile; scales of codes are taken after the
//! products of keys, and into the weights before those of values.
//!
//! All heads of a group are in the same tile, so they share the keys and values once loaded. Positions that only some
//! rows of a tile see are added row by row, so a value that is not finite never reaches a query that may not see it.
//! With few rows (decoding), a tile's pages are divided into parts that run side by side and are merged in order.

mod cache;
mod element;
mod product;
mod scores;
mod tile;

pub use crate::kernel::{Heads, KvType};
pub use crate::kv_pages::{PAGE_LENGTH, Sequence};
pub use cache::KvCache;

use super::Cpu;
use super::disjoint::DisjointMut;
use super::lanes::dispatch;
use crate::checks::check_cap;
use crate::error::{Error, Result};
use cache::Cached;
use tile::{Attend, Finish, Merge, PartLayout, Tile, tile_rows, with_part_buffer, with_scratch};

/// Pages that make a part when a tile's positions are divided.
const PAGES_PER_PART: usize = 2;
/// Jobs of fewer multiplications stay on the calling thread.
const SMALL_JOB: usize = 64 * 1024;

/// What attends to what.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Rows of queries, keys and values, `[m, heads.row()]`. Only the queries are read here: the keys and values are
    /// those in the cache, where those of these rows must be already.
    pub qkv: &'a [f32],
    /// What is in a row.
    pub heads: Heads,
    /// Position of the first row; row `i` sees positions up to `first_position + i`.
    pub first_position: usize,
    /// Factor of the scores, as a rule `1/√head_size`.
    pub scale: f32,
    /// A row sees at most this many positions, its own included (sliding window).
    pub window: Option<usize>,
    /// Slopes of the query heads, `[heads]`: a score loses the slope for each position between the key and the query
    /// (ALiBi).
    pub alibi: Option<&'a [f32]>,
    /// A score becomes `cap · tanh(score / cap)`, before ALiBi; from 2⁻¹²⁶ to 2¹²⁵.
    pub cap: Option<f32>,
    /// Scores of the query heads, `[heads]`, that count in the sum of weights and stand for no value: what a query need not spend.
    pub sinks: Option<&'a [f32]>,
}

/// `out = softmax(scale · Q·Kᵀ − slope · distance, causal) · V` for every query head, with the keys and values that `cache`
/// has of a layer of a sequence; without ALiBi the slopes are 0. A cap bounds the scaled scores; the softmax of a head with a
/// sink has one more term in its denominator.
///
/// *Shapes:* `out` `[m, heads·head_size]`. *Accuracy:* with `n` visible positions, head size `h` and
/// `t = max (|scale| · Σ|q·k| + |slope| · distance)` over them, each output is within
/// `(n/8 + h + 64 + 4·t·h)·2⁻²⁴ · max|v|` of the exact one, with a cap `64·t·2⁻²⁴ · max|v|` more; with ALiBi for positions
/// below 2²⁴. That is against the keys and values as the cache has them ([`KvType`]); what rounding them changes comes on top:
/// where it moves elements by `u` of themselves (f16: 2⁻¹¹, bf16: 2⁻⁸) a score moves by at most `s = u·t` and an output by
/// `(exp(2s) − 1 + u) · max|v|`; with codes of 8 bits a score by `s = |scale| · Σ|q| · max|k| / 254` and an output by
/// `(exp(2s) − 1 + 1/254) · max|v|`.
/// NaN in a query, or in a key or value that it sees, gives NaN in its output and touches no other query's; so do infinities in
/// codes of 8 bits. Of others a value leaves infinity or NaN in its element, and a key NaN, unless its score is −∞, which weighs
/// nothing, or a cap bounds it. In f16 elements beyond 65504 are infinite.
/// *Errors:* shapes that do not fit, a sequence or positions that the cache does not have, a window of 0, a cap that is not
/// from 2⁻¹²⁶ to 2¹²⁵, a sink that is not finite.
/// *Source:* online softmax of Milakov and Gimelshein, 2018; tiles as in Dao, "FlashAttention-2", 2023; parts of the
/// positions side by side as in "Flash-Decoding", 2023; slopes as in Press et al., "Train Short, Test Long", 2021.
pub fn attention(
    cpu: &Cpu,
    what: &Attention<'_>,
    cache: &KvCache,
    sequence: Sequence,
    layer: usize,
    out: &mut [f32],
) -> Result<()> {
    let (rows, cached) = what.check(cache, sequence, layer, out.len())?;
    if rows == 0 {
        return Ok(());
    }
    let heads = what.heads;
    let height = tile_rows(cpu.caps().isa);
    let rows_per_kv_head = rows * heads.group();
    let tiles = rows_per_kv_head.div_ceil(height);
    let out = DisjointMut::new(out);
    let tile = |kv_head: usize, index: usize| Tile {
        what: *what,
        cached,
        kv_head,
        first_row: index * height,
        rows: height.min(rows_per_kv_head - index * height),
    };
    let pages = tile(0, tiles - 1).pages();
    let parts = if tiles == 1 { pages.len().div_ceil(PAGES_PER_PART) } else { 1 };
    if parts == 1 {
        in_tasks(cpu, what, rows, tiles * heads.kv_heads, &|i| {
            // A later tile sees more positions: the long tasks first.
            let tile = tile(i / tiles, tiles - 1 - i % tiles);
            with_scratch(|scratch| {
                let totals = dispatch(cpu, Attend { tile, pages: tile.pages(), scratch });
                dispatch(cpu, Finish { tile, totals, scratch, out: &out });
            });
        });
        return Ok(());
    }
    let layout = PartLayout::new(rows_per_kv_head, heads.head_size);
    with_part_buffer(layout.len() * parts * heads.kv_heads, |buffer| {
        let shared = DisjointMut::new(&mut *buffer);
        in_tasks(cpu, what, rows, parts * heads.kv_heads, &|i| {
            let first = pages.start + i % parts * PAGES_PER_PART;
            // SAFETY: each task has its own part of the buffer.
            let state = unsafe { shared.range(i * layout.len()..(i + 1) * layout.len()) };
            let (tile, pages) = (tile(i / parts, 0), first..pages.end.min(first + PAGES_PER_PART));
            with_scratch(|scratch| {
                let totals = dispatch(cpu, Attend { tile, pages, scratch });
                layout.save(&totals, scratch, state);
            });
        });
        for (kv_head, states) in buffer.chunks_exact(layout.len() * parts).enumerate() {
            dispatch(cpu, Merge { tile: tile(kv_head, 0), layout, states, out: &out });
        }
    });
    Ok(())
}

/// Runs the tasks on the team, or here if there is little to do.
fn in_tasks(cpu: &Cpu, what: &Attention<'_>, rows: usize, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
    let end = what.first_position + rows;
    let multiplications = 2 * rows * (end - what.first_seen(0)) * what.heads.heads * what.heads.head_size;
    if multiplications < SMALL_JOB {
        return (0..tasks).for_each(task);
    }
    cpu.threads().run(tasks, task);
}

impl Attention<'_> {
    /// The first position that row `row` sees.
    fn first_seen(&self, row: usize) -> usize {
        self.window.map_or(0, |window| (self.first_position + row + 1).saturating_sub(window))
    }

    /// Checks everything; returns the number of rows, and what they see.
    fn check<'c>(
        &self,
        cache: &'c KvCache,
        sequence: Sequence,
        layer: usize,
        out: usize,
    ) -> Result<(usize, Cached<'c>)> {
        const OP: &str = "attention";
        let heads = self.heads.checked(OP)?;
        if (heads.kv_heads, heads.head_size) != (cache.kv_heads(), cache.head_size()) {
            return Err(Error::invalid(
                OP,
                format!("the cache's {} key/value heads of {}", cache.kv_heads(), cache.head_size()),
                format!("{} of {}", heads.kv_heads, heads.head_size),
            ));
        }
        if !self.qkv.len().is_multiple_of(heads.row()) {
            return Err(Error::invalid(OP, format!("rows of {} elements", heads.row()), self.qkv.len().to_string()));
        }
        let rows = self.qkv.len() / heads.row();
        if out != rows * heads.heads * heads.head_size {
            let expected = format!("{} elements in out", rows * heads.heads * heads.head_size);
            return Err(Error::invalid(OP, expected, out.to_string()));
        }
        if let Some(slopes) = self.alibi.filter(|slopes| slopes.len() != heads.heads) {
            return Err(Error::invalid(OP, format!("{} slopes", heads.heads), slopes.len().to_string()));
        }
        if let Some(sinks) = self.sinks
            && (sinks.len() != heads.heads || sinks.iter().any(|sink| !sink.is_finite()))
        {
            return Err(Error::invalid(OP, format!("{} finite sinks", heads.heads), format!("{sinks:?}")));
        }
        self.cap.map_or(Ok(()), |cap| check_cap(OP, cap))?;
        if self.window == Some(0) {
            return Err(Error::invalid(OP, "a window of at least one position", "0"));
        }
        let cached = cache.cached(OP, sequence, layer)?;
        if self.first_position.checked_add(rows).is_none_or(|end| end > cached.len) {
            return Err(Error::invalid(
                OP,
                format!("positions below {}, those in the cache", cached.len),
                format!("{rows} positions from {}", self.first_position),
            ));
        }
        Ok((rows, cached))
    }
}
