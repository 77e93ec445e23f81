//! Attention over a cache of keys and values: launches of `attention.cu`, and the choice between it, `attention_wgmma.cu` and
//! `attention_mma.cu` for many rows, and `flash_decoding_sm90.cu` and `flash_decoding.cu` for one row of each text.

use super::kv_cache::{KvCache, element_type};
use super::rope::{HeadNorms, Rope};
use super::{
    attention_mma, attention_wgmma, flash_decoding, flash_decoding_sm90, launch, narrow, rows_of, same_length,
};
use crate::checks::check_cap;
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Buffer, FloatViewMut, Stream, View};
use crate::cuda::parameters::{Parameters, float_type, parameters};
use crate::cuda::sources::{Arch, Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::Heads;
pub use crate::kv_pages::PAGE_LENGTH;

static SOURCE: Source =
    Source { path: "nn/attention.cu", text: include_str!("attention.cu"), parameters: &[Params::LAYOUT] };

/// As in the source.
const WARPS: usize = 4;
const THREADS: u32 = 32 * WARPS as u32;
const RUN: usize = 32;

/// Queries a warp, where there are few and where there are many.
const FEW: usize = 1;
const MANY: usize = 4;

/// Elements of the largest head.
pub const LARGEST_HEAD: usize = 256;

/// Queries a head of keys, rows times heads of a group, up to which the tensor cores would be left mostly idle.
pub const FEW_QUERIES: usize = 16;

/// Positions of a part, where the positions of a single row of one text are divided.
pub const PART_LENGTH: usize = 128;

pub(super) const OP: &str = "attention";

/// Size of a head as kernels are made for.
fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(32)
}

pub(super) fn instances(head_size: usize) -> [Instance; 4] {
    [(FEW, false), (FEW, true), (MANY, false), (MANY, true)]
        .map(|(queries, window)| instance(head_size, queries, window))
}

pub(super) fn combines() -> [Instance; 2] {
    [false, true].map(combine)
}

fn instance(head_size: usize, queries: usize, window: bool) -> Instance {
    Instance::new(&SOURCE, format!("attention<{}, {queries}, {window}>", padded(head_size)))
}

/// Whether shared memory holds the keys and the values of a run at once.
fn keys_and_values_apart(arch: Arch, head_size: usize) -> bool {
    arch.number >= 80 || padded(head_size) <= 192
}

/// Shared memory of a block whose warps have so many queries each.
fn shared_bytes(arch: Arch, head_size: usize, queries: usize) -> u32 {
    let head = padded(head_size);
    let values = if keys_and_values_apart(arch, head_size) { RUN * head } else { 0 };
    ((RUN * (head + 4) + values + WARPS * queries * head) * size_of::<f32>()) as u32
}

fn combine(window: bool) -> Instance {
    Instance::new(&SOURCE, format!("combine<{THREADS}, {window}>"))
}

/// Whose rows attend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Those of one text, at positions that follow each other.
    OfOneText,
    /// One of each text.
    OnePerText,
}

/// How rows become what attention reads, as [`Rope::apply`] does it.
#[derive(Clone, Copy, Debug)]
pub struct Append<'a> {
    /// The rotations of queries and keys.
    pub rope: &'a Rope,
    /// Norms of the heads, where the model has them.
    pub norms: Option<HeadNorms<'a>>,
}

/// What attends to what.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Rows of queries, keys and values, `[m, heads.row()]`. Only queries are read, unless the rows are appended: keys and values are in
    /// the cache.
    pub qkv: View<'a, f32>,
    /// The rows are as the product before leaves them, and their keys and values go to the cache, where [`appends`] says so. The queries
    /// stay as they are.
    pub append: Option<Append<'a>>,
    /// Whose they are.
    pub rows: Rows,
    /// Position of each row in its text, `[m]`.
    pub positions: View<'a, u32>,
    /// Pages of the cache that the positions of the texts lie in, [`PAGE_LENGTH`] in each, `[texts, pages]`. None: there is one
    /// text, whose positions lie in the cache in order.
    pub pages: Option<View<'a, u32>>,
    /// Positions of each text, its last, that the operation before this one in the stream may have written.
    pub fresh: usize,
    /// Positions that a row may see at most, as if there were no window: what one row's are divided by.
    pub longest: usize,
    /// Factor of the scores, as a rule `1/√head_size`.
    pub scale: f32,
    /// A row sees at most this many positions, its own included (sliding window).
    pub window: Option<usize>,
    /// A scaled score becomes `cap · tanh(score / cap)`; from 2⁻¹²⁶ to 2¹²⁵.
    pub cap: Option<f32>,
    /// Scores fall by this much with each position between query and key, `[heads]` (ALiBi).
    pub slopes: Option<View<'a, f32>>,
    /// Scores that count in the softmax and stand for no value, `[heads]`.
    pub sinks: Option<View<'a, f32>>,
    /// What may compute it.
    pub kernels: Kernels,
}

/// Which kernels may compute attention of several rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernels {
    /// The fastest that a processor has.
    #[default]
    All,
    /// Those that are not of Hopper alone.
    OfAmpere,
}

impl Attention<'_> {
    /// Whether scores are more than scaled products.
    fn changes_scores(&self) -> bool {
        self.cap.is_some() || self.slopes.is_some() || self.sinks.is_some()
    }

    /// Checks all but the cache; returns the number of rows.
    fn check(&self, heads: Heads, capacity: usize) -> Result<usize> {
        let rows = rows_of(OP, self.qkv.len(), heads.row())?;
        same_length(OP, "positions", Some(rows), self.positions.len())?;
        if rows == 0 {
            return Ok(0);
        }
        let texts = if self.rows == Rows::OfOneText { 1 } else { rows };
        let room = match self.pages {
            None if texts > 1 => return Err(Error::invalid(OP, "pages, where there are several texts", "none")),
            None => capacity,
            Some(_) if !capacity.is_multiple_of(PAGE_LENGTH) => {
                return Err(Error::invalid(OP, "a cache of whole pages", format!("one of {capacity} positions")));
            }
            Some(pages) => rows_of(OP, pages.len(), texts)? * PAGE_LENGTH,
        };
        if self.longest > room || rows / texts > self.longest {
            let expected = format!("at least {} and at most {room} positions, which there are", rows / texts);
            return Err(Error::invalid(OP, expected, self.longest.to_string()));
        }
        if self.window == Some(0) {
            return Err(Error::invalid(OP, "a window of at least one position", "0"));
        }
        for (name, of_heads) in [("slopes", self.slopes), ("sinks", self.sinks)] {
            if let Some(of_heads) = of_heads {
                same_length(OP, name, Some(heads.heads), of_heads.len())?;
            }
        }
        if let Some(Append { rope, norms }) = &self.append {
            rope.check(OP, heads, norms.as_ref())?;
        }
        self.cap.map_or(Ok(()), |cap| check_cap(OP, cap))?;
        Ok(rows)
    }
}

/// What attention leaves between the blocks that share a row. One serves all attention in a queue.
#[derive(Debug)]
pub struct AttentionWorkspace {
    /// Sums of parts.
    partial: Buffer<f32>,
    /// Parts that have come; zeros between launches.
    counters: Buffer<u32>,
}

impl AttentionWorkspace {
    /// For so many texts of up to `longest` positions each. *Errors:* memory that is short.
    pub fn new(gpu: &Gpu, stream: &Stream, heads: Heads, texts: usize, longest: usize) -> Result<Self> {
        let of_one = heads.heads * longest.div_ceil(PART_LENGTH);
        let parts = if texts > 1 {
            of_one.max(flash_decoding::most_parts(gpu.caps().multiprocessors as usize, heads))
        } else {
            of_one
        };
        let mut counters = gpu.context().allocate(texts * flash_decoding::blocks_of_text(heads))?;
        stream.fill(counters.view_mut(), 0)?;
        Ok(Self { partial: gpu.context().allocate(parts * (heads.head_size + 2))?, counters })
    }
}

/// Name of what computes some rows up to `longest`: one kernel, or two where a row's positions are divided. Error: more
/// blocks than a launch may have.
pub fn attention_kernel(
    gpu: &Gpu,
    rows: usize,
    longest: usize,
    window: Option<usize>,
    cache: &KvCache,
) -> Result<&'static str> {
    if rows > 1 {
        if attention_wgmma::instance_for(gpu.caps(), rows, false, cache).is_some() {
            return Ok("attention_wgmma");
        }
        let on_tensor_cores = attention_mma::choice(gpu.caps(), rows, false, cache)?.is_some();
        return Ok(if on_tensor_cores { "attention_mma" } else { "attention" });
    }
    if flash_decoding_sm90::takes(gpu.caps(), cache) {
        return Ok("flash_decoding_sm90");
    }
    Ok(match (flash_decoding::kernel(gpu, cache), parts_of(longest, window, PART_LENGTH)) {
        (Some(_), _) => "flash_decoding",
        (None, 1) => "attention",
        (None, _) => "attention, combine",
    })
}

/// Whether attention of so many rows appends them itself ([`Attention::append`]): one of each text, on Hopper.
pub fn appends(gpu: &Gpu, cache: &KvCache, of: Rows, rows: usize) -> bool {
    (rows == 1 || of == Rows::OnePerText) && flash_decoding_sm90::takes(gpu.caps(), cache)
}

/// Parts of this length that a row's positions lie in, wherever the window begins.
fn parts_of(longest: usize, window: Option<usize>, length: usize) -> usize {
    let parts = longest.div_ceil(length);
    window.map_or(parts, |window| parts.min((window - 1).div_ceil(length) + 1))
}

parameters! {
    /// As in `include/attention.cuh`.
    pub(super) struct Params {
        qkv: u64,
        keys: u64,
        values: u64,
        key_scales: u64,
        value_scales: u64,
        partial: u64,
        out: u64,
        positions: u64,
        pages: u64,
        row_length: u64,
        capacity: u64,
        rows: u32,
        pages_of_text: u32,
        heads: u32,
        kv_heads: u32,
        head_size: u32,
        parts: u32,
        part_length: u32,
        scale: f32,
        kind: u32,
        out_type: u32,
        window: u32,
        cap: f32,
        slopes: u64,
        sinks: u64,
        counters: u64,
        fresh: u32,
        stages: u32,
        turns: u64,
        query_norm: u64,
        key_norm: u64,
        appends: u32,
        pairs: u32,
        eps: f32,
        group: u32,
    }
}

/// `out = softmax(scale · Q·Kᵀ, causal) · V` for every query head, with the keys and values of `layer` in `cache`.
///
/// Scores may be capped, then fall with the distance (ALiBi), then be joined by a sink in the softmax.
///
/// A row sees the positions of its text up to its own, those of the window or all; its own must be in the cache and below `longest`.
/// The positions of a text's single row are divided into parts that run side by side.
///
/// Tensor cores compute where there are any that take a cache's type (all but f32; before sm_80 f16 only) and its heads (a multiple of 8
/// elements; before sm_80 up to 160 and of single rows 192, as shared memory allows): single rows of texts, and several rows of more than [`FEW_QUERIES`] queries a head of keys. Queries of the latter are
/// rounded to the cache's type, after a power of two has brought each where halves are normal, and so are the weights; queries and
/// weights of single rows become two such numbers each. Beside codes of 8 bits queries become f16; weights, times the scales of their
/// values, bf16. Without tensor cores the rows of several texts are computed one after the other.
///
/// *Shapes:* `out` `[m, heads·head_size]`. *Accuracy:* with `n` visible positions, head
/// size `h` and `t = max |scale| · Σ|q·k|` over them, each output is within `(n/8 + h + 64 + 4·t·h)·2⁻²⁴ · max|v|` of the
/// exact one of the keys and values as the cache has them, before it is rounded to out's type; on the tensor cores, with the unit
/// roundoffs `u` of the type that weights are rounded to and `q` of that of queries, several rows
/// of a text within `u · Σ w·|v| + (2·n + h + 64 + 8·t·h)·2⁻²⁴ · max|v|` of the one that the rounded queries have with the exact
/// weights `w`, which is within `(exp(2·q·t) - 1) · max|v|` of the exact one; single rows within
/// `((2·n + h + 64 + 8·t·h)·2⁻²⁴ + 2·u² + exp(4·q²·t) - 1) · max|v|` of it. NaN in a query, or in a key or value that it sees, gives
/// NaN in its output and touches no other query's. A cap and slopes add `(t + cap + 16)·2⁻²¹ · max|v|`. *Errors:* shapes that do
/// not fit, more positions than the cache has, a window of 0, a cap that is not from 2⁻¹²⁶ to 2¹²⁵, a workspace for fewer texts or positions.
///
/// *Source:* as [the one for CPUs](crate::cpu::attention::attention).
pub fn attention(
    gpu: &Gpu,
    stream: &Stream,
    what: &Attention<'_>,
    cache: &mut KvCache,
    layer: usize,
    workspace: &mut AttentionWorkspace,
    out: FloatViewMut<'_>,
) -> Result<()> {
    let heads = cache.heads();
    let rows = what.check(heads, cache.capacity())?;
    same_length(OP, "out", Some(rows * heads.heads * heads.head_size), out.len())?;
    let [keys, values] = cache.layer(OP, layer)?;
    if rows == 0 {
        return Ok(());
    }
    let single = rows == 1 || what.rows == Rows::OnePerText;
    let of_hopper = single && what.kernels == Kernels::All && flash_decoding_sm90::takes(gpu.caps(), cache);
    if what.append.is_some() && !of_hopper {
        let got = format!("{rows} rows, {:?}, over {:?}", what.rows, cache.kv());
        return Err(Error::invalid(OP, "rows that `Rope::apply` has appended, where `appends` says no", got));
    }
    let decoding = flash_decoding::kernel(gpu, cache).filter(|_| single);
    if single && rows > 1 && decoding.is_none() {
        return one_by_one(gpu, stream, what, cache, layer, workspace, out);
    }
    let multiprocessors = gpu.caps().multiprocessors as usize;
    let longest = what.window.map_or(what.longest, |window| window.min(what.longest));
    let division = match rows {
        _ if !single => flash_decoding::of_one_text(1),
        1 => flash_decoding::of_one_text(parts_of(what.longest, what.window, PART_LENGTH)),
        _ if of_hopper => flash_decoding_sm90::of_texts(multiprocessors, heads, rows, longest),
        _ => flash_decoding::of_texts(multiprocessors, heads, rows, longest),
    };
    let of_hopper = of_hopper.then(|| flash_decoding_sm90::form(gpu.caps(), heads, rows, division, longest));
    let parts = division.parts;
    let AttentionWorkspace { partial, counters } = workspace;
    let needed = [rows * heads.heads * parts * (heads.head_size + 2), rows * flash_decoding::blocks_of_text(heads)];
    if parts > 1 && (partial.len() < needed[0] || counters.len() < needed[1]) {
        let expected = format!("a workspace for {rows} texts of {} positions", what.longest);
        return Err(Error::invalid(OP, expected, format!("{} and {} elements", partial.len(), counters.len())));
    }
    let pages_of_text = what.pages.map_or(0, |pages| if single { pages.len() / rows } else { pages.len() });
    let norms = what.append.and_then(|append| append.norms);
    let params = Params {
        qkv: what.qkv.pointer(),
        keys: keys.pointer(),
        values: values.pointer(),
        key_scales: keys.scales(),
        value_scales: values.scales(),
        partial: partial.pointer(),
        out: out.pointer(),
        positions: what.positions.pointer(),
        pages: what.pages.map_or(0, |pages| pages.pointer()),
        row_length: heads.row() as u64,
        capacity: cache.capacity() as u64,
        rows: narrow(OP, "rows", rows)?,
        pages_of_text: narrow(OP, "pages", pages_of_text)?,
        heads: narrow(OP, "heads", heads.heads)?,
        kv_heads: narrow(OP, "heads", heads.kv_heads)?,
        head_size: narrow(OP, "a head", heads.head_size)?,
        parts: narrow(OP, "parts", parts)?,
        part_length: narrow(OP, "positions", if single { division.part_length } else { what.longest })?,
        scale: what.scale,
        kind: element_type(cache.kv()),
        out_type: float_type(out.dtype()),
        // No text is longer than positions have bits for.
        window: what.window.and_then(|window| u32::try_from(window).ok()).unwrap_or(u32::MAX),
        cap: what.cap.unwrap_or(0.0),
        slopes: what.slopes.map_or(0, |slopes| slopes.pointer()),
        sinks: what.sinks.map_or(0, |sinks| sinks.pointer()),
        counters: counters.pointer(),
        // Nothing of the cache that is read, where the kernel appends.
        fresh: if what.append.is_some() { 0 } else { u32::try_from(what.fresh).unwrap_or(u32::MAX) },
        stages: of_hopper.map_or(0, |form| form.stages as u32),
        turns: what.append.map_or(0, |append| append.rope.pointer()),
        query_norm: norms.map_or(0, |norms| norms.queries.pointer()),
        key_norm: norms.map_or(0, |norms| norms.keys.pointer()),
        appends: what.append.is_some().into(),
        pairs: narrow(OP, "pairs", what.append.map_or(0, |append| append.rope.pairs()))?,
        eps: norms.map_or(0.0, |norms| norms.eps),
        group: heads.group() as u32,
    };
    if let Some(form) = of_hopper {
        return flash_decoding_sm90::launch(gpu, stream, &params, form, (cache, layer));
    }
    let joins = decoding.is_some();
    if decoding.is_none() && what.kernels == Kernels::All {
        let many_rows = attention_wgmma::choice(gpu.caps(), rows, what.changes_scores(), cache, layer)?;
        if let Some(many_rows) = many_rows {
            return many_rows.launch(gpu, stream, &params);
        }
    }
    let attend = match (decoding, attention_mma::choice(gpu.caps(), rows, what.changes_scores(), cache)?) {
        (Some(instance), _) => (instance, flash_decoding::form(gpu, heads, rows, division)?),
        (None, Some(many_rows)) => many_rows,
        (None, None) => {
            let queries = rows * heads.group();
            let each = if queries <= 2 * WARPS * FEW { FEW } else { MANY };
            let shared = shared_bytes(gpu.caps().arch, heads.head_size, each);
            let grid = [queries.div_ceil(WARPS * each), heads.kv_heads, parts];
            (instance(heads.head_size, each, what.window.is_some()), launch(OP, grid, THREADS, shared)?)
        }
    };
    let add_up = gpu.overlapping(launch(OP, [rows * heads.heads, 1, 1], THREADS, 0)?);
    let add_up = (combine(what.window.is_some()), add_up);
    for (instance, form) in [attend, add_up].into_iter().take(if parts > 1 && !joins { 2 } else { 1 }) {
        let function = gpu.function(&instance)?;
        // SAFETY: all take the sources' `Params`, whose lengths were checked above.
        unsafe { function.launch(stream, &form, &[Arg::new(&params)]) }?;
    }
    Ok(())
}

/// Rows of several texts, each by itself.
fn one_by_one(
    gpu: &Gpu,
    stream: &Stream,
    what: &Attention<'_>,
    cache: &mut KvCache,
    layer: usize,
    workspace: &mut AttentionWorkspace,
    mut out: FloatViewMut<'_>,
) -> Result<()> {
    let heads = cache.heads();
    let texts = what.positions.len();
    for text in 0..texts {
        let row = Attention {
            qkv: what.qkv.slice(text * heads.row()..(text + 1) * heads.row()),
            rows: Rows::OfOneText,
            positions: what.positions.slice(text..text + 1),
            pages: what.pages.map(|pages| {
                let of_text = pages.len() / texts;
                pages.slice(text * of_text..(text + 1) * of_text)
            }),
            ..*what
        };
        let width = heads.heads * heads.head_size;
        let (of_text, others) = out.split_at(width);
        attention(gpu, stream, &row, cache, layer, workspace, of_text)?;
        out = others;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_processor_has_the_shared_memory_of_a_block_whatever_the_head() {
        for arch in ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"].map(|name| name.parse::<Arch>().unwrap()) {
            for (head_size, queries) in (1..=LARGEST_HEAD).flat_map(|size| [(size, FEW), (size, MANY)]) {
                let needed = shared_bytes(arch, head_size, queries);
                assert!(needed <= arch.shared_bytes(), "{arch}, heads of {head_size}, {queries} queries: {needed}");
            }
        }
    }
}
