//! Keys and values of past positions of many sequences, in pages, laid out for the kernels.

use super::Heads;
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Positions in a page.
pub const PAGE_LENGTH: usize = 128;
/// Positions that lie side by side in the keys: a cache line.
pub(super) const PANEL: usize = 16;
/// Appending fewer elements than this stays on the calling thread.
const SMALL_APPEND: usize = 32 * 1024;

/// A cache line of floats: what buffers for kernels are made of, so that no vector straddles two lines.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// The keys and values of all layers, of any number of sequences.
///
/// They lie in pages of [`PAGE_LENGTH`] positions, each for all layers. A sequence has a table of its pages, which others may share
/// ([`KvCache::share`]): what would write to a shared page copies it first. A page that no sequence has any more goes to the next
/// that needs one. Memory is taken page by page, up to the budget, and kept. In a
/// page, for a layer and a head:
///
/// ```text
/// keys    [128/16 panels][head_size][16 positions]     a row of 16 scores is Σ q[i] · panel[i][..]
/// values  [128 positions][head_size, rounded up to 16]
/// ```
///
/// *Source:* Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
pub struct KvCache {
    layers: usize,
    heads: Heads,
    /// Pages that there may be.
    budget: usize,
    /// Those whose memory has been taken.
    pages: Vec<Box<[Line]>>,
    /// Of these, those that no sequence has.
    free: Vec<usize>,
    /// Of each page, the sequences that have it.
    owners: Vec<u32>,
    sequences: BTreeMap<Sequence, Positions>,
}

/// The name of a sequence of positions in a [`KvCache`]. No two of a process are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sequence(u64);

/// What a cache has of a sequence.
#[derive(Default)]
struct Positions {
    /// Positions of each layer; nothing before the first come.
    lens: Vec<usize>,
    /// Of position `p`, the page is `pages[p / PAGE_LENGTH]`.
    pages: Vec<usize>,
}

impl Positions {
    /// Positions that every layer has.
    fn of_all_layers(&self) -> usize {
        self.lens.iter().copied().min().unwrap_or(0)
    }

    /// Positions that some layer has.
    fn of_any_layer(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }
}

/// What attention reads: one layer of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Cached<'a> {
    cache: &'a KvCache,
    pages: &'a [usize],
    layer: usize,
    /// Number of positions.
    pub(super) len: usize,
}

impl<'a> Cached<'a> {
    /// Keys and values of a head in a page of the sequence.
    #[inline]
    pub(super) fn page(&self, kv_head: usize, index: usize) -> (&'a [f32], &'a [f32]) {
        let (cache, len) = (self.cache, self.cache.head_page());
        let all: &[f32] = bytemuck::cast_slice(&cache.pages[self.pages[index]]);
        let of_head = &all[(self.layer * cache.heads.kv_heads + kv_head) * len..][..len];
        of_head.split_at(PAGE_LENGTH * cache.heads.head_size)
    }
}

const OP: &str = "kv cache";

impl KvCache {
    /// An empty cache with a budget of `positions`, rounded up to whole pages. *Errors:* heads that make no sense, sizes
    /// beyond the address space.
    pub fn new(layers: usize, heads: Heads, positions: usize) -> Result<Self> {
        let heads = heads.checked(OP)?;
        let padded = heads.head_size.checked_next_multiple_of(16);
        let page = [2 * PAGE_LENGTH, heads.kv_heads, layers, size_of::<f32>()];
        let bytes = padded.and_then(|padded| page.iter().try_fold(padded, |bytes, &n| bytes.checked_mul(n)));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let got = format!("{layers} layers, {} heads of {}", heads.kv_heads, heads.head_size);
            return Err(Error::invalid(OP, "a page that fits in memory", got));
        }
        let budget = positions.div_ceil(PAGE_LENGTH);
        let (pages, free, owners, sequences) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        Ok(Self { layers, heads, budget, pages, free, owners, sequences })
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Key heads, and value heads, of a layer.
    pub fn kv_heads(&self) -> usize {
        self.heads.kv_heads
    }

    /// Elements of a head.
    pub fn head_size(&self) -> usize {
        self.heads.head_size
    }

    /// Positions that all sequences together can have: those of the budget.
    pub fn capacity(&self) -> usize {
        self.budget.saturating_mul(PAGE_LENGTH)
    }

    /// Positions in pages that no sequence has.
    pub fn free(&self) -> usize {
        self.free_pages().saturating_mul(PAGE_LENGTH)
    }

    /// Bytes of keys and values that are allocated.
    pub fn bytes(&self) -> usize {
        self.pages.iter().map(|page| size_of_val(&**page)).sum()
    }

    /// A new sequence, without positions.
    pub fn begin(&mut self) -> Sequence {
        static BEGUN: AtomicU64 = AtomicU64::new(0);
        let sequence = Sequence(BEGUN.fetch_add(1, Ordering::Relaxed));
        self.sequences.insert(sequence, Positions::default());
        sequence
    }

    /// Forgets a sequence; its pages are free. *Errors:* it is none of this cache.
    pub fn end(&mut self, sequence: Sequence) -> Result<()> {
        let positions = self.sequences.remove(&sequence).ok_or_else(|| unknown(sequence))?;
        self.release(positions.pages);
        Ok(())
    }

    /// A new sequence that has the first positions of another, in the same pages. *Errors:* the other is none of this cache, or
    /// has not so many in every layer.
    pub fn share(&mut self, from: Sequence, positions: usize) -> Result<Sequence> {
        let of = self.sequences.get(&from).ok_or_else(|| unknown(from))?;
        if positions > of.of_all_layers() {
            let expected = format!("at most {} positions, which the other has", of.of_all_layers());
            return Err(Error::invalid(OP, expected, positions.to_string()));
        }
        let pages = of.pages[..positions.div_ceil(PAGE_LENGTH)].to_vec();
        pages.iter().for_each(|&page| self.owners[page] += 1);
        let sequence = self.begin();
        self.sequences.insert(sequence, Positions { lens: vec![positions; self.layers], pages });
        Ok(sequence)
    }

    /// Takes the pages for positions below `end`, so that appending up to there does not fail for want of them. *Errors:* the
    /// sequence is none of this cache, no page free, no memory; then it has what it had.
    pub fn reserve(&mut self, sequence: Sequence, end: usize) -> Result<()> {
        let len = self.sequences.get(&sequence).ok_or_else(|| unknown(sequence))?.of_all_layers();
        if end > len { self.take_pages(sequence, len, end) } else { Ok(()) }
    }

    /// Pages that [`KvCache::reserve`] would take.
    pub fn missing_pages(&self, sequence: Sequence, end: usize) -> usize {
        self.missing(sequence, self.len(sequence), end)
    }

    /// Pages for positions from `first` to below `end`: new ones, and a copy of the first if others have it too.
    fn missing(&self, sequence: Sequence, first: usize, end: usize) -> usize {
        let has = self.sequences.get(&sequence).map_or(0, |positions| positions.pages.len());
        let copied = end > first && self.shared(sequence, first / PAGE_LENGTH).is_some();
        end.div_ceil(PAGE_LENGTH).saturating_sub(has) + usize::from(copied)
    }

    /// A page of a sequence, if others have it too.
    fn shared(&self, sequence: Sequence, index: usize) -> Option<usize> {
        let page = *self.sequences.get(&sequence)?.pages.get(index)?;
        (self.owners[page] > 1).then_some(page)
    }

    /// Positions that every layer has of a sequence; 0 if it is none of this cache.
    pub fn len(&self, sequence: Sequence) -> usize {
        self.sequences.get(&sequence).map_or(0, Positions::of_all_layers)
    }

    /// Forgets positions from `len` on, in every layer; pages without positions are free. *Errors:* the sequence is none of
    /// this cache.
    pub fn truncate(&mut self, sequence: Sequence, len: usize) -> Result<()> {
        let positions = self.sequences.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        positions.lens.iter_mut().for_each(|l| *l = len.min(*l));
        let pages = positions.of_any_layer().div_ceil(PAGE_LENGTH);
        let released = positions.pages.split_off(pages.min(positions.pages.len()));
        self.release(released);
        Ok(())
    }

    /// Appends the keys and values in the rows of `qkv` to `layer` of a sequence; `position`, that of the first row, must
    /// be the next one.
    ///
    /// *Shapes:* `qkv` `[m, heads.row()]`, with the heads that the cache was made for. *Errors:* a sequence that is none of
    /// this cache, a length that does not fit, a layer or position out of range, no page free, no memory; then nothing is
    /// appended.
    pub fn append(&mut self, cpu: &Cpu, sequence: Sequence, layer: usize, position: usize, qkv: &[f32]) -> Result<()> {
        let row = self.heads.row();
        if !qkv.len().is_multiple_of(row) {
            return Err(Error::invalid(OP, format!("rows of {row} elements"), qkv.len().to_string()));
        }
        let len = self.cached(OP, sequence, layer)?.len;
        if position != len {
            let expected = format!("position {len}, the next of layer {layer}");
            return Err(Error::invalid(OP, expected, position.to_string()));
        }
        if qkv.is_empty() {
            return Ok(());
        }
        let end = position + qkv.len() / row;
        self.take_pages(sequence, position, end)?;
        let (layers, heads, head_page) = (self.layers, self.heads, self.head_page());
        let positions = self.sequences.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        positions.lens.resize(layers, 0);
        positions.lens[layer] = end;
        let of_layer = layer * heads.kv_heads * head_page..(layer + 1) * heads.kv_heads * head_page;
        let first = position / PAGE_LENGTH;
        let touched = &positions.pages[first..end.div_ceil(PAGE_LENGTH)];
        let pages = DisjointMut::new(&mut self.pages);
        let task = |i: usize| {
            // SAFETY: no page stands twice in a table, so that each task has its own.
            let page = unsafe { &mut pages.range(touched[i]..touched[i] + 1)[0] };
            let base = (first + i) * PAGE_LENGTH;
            let written = position.max(base)..end.min(base + PAGE_LENGTH);
            let rows = &qkv[(written.start - position) * row..(written.end - position) * row];
            let page = &mut bytemuck::cast_slice_mut(page)[of_layer.clone()];
            for (kv_head, page) in page.chunks_exact_mut(head_page).enumerate() {
                write(page, heads, kv_head, rows, written.start - base..written.end - base);
            }
        };
        if qkv.len() < SMALL_APPEND {
            (0..touched.len()).for_each(task);
        } else {
            cpu.threads().run(touched.len(), &task);
        }
        Ok(())
    }

    /// One layer of a sequence. Error, which names `op`: there is none.
    pub(super) fn cached(&self, op: &'static str, sequence: Sequence, layer: usize) -> Result<Cached<'_>> {
        let positions = self.sequences.get(&sequence).ok_or_else(|| unknown(sequence))?;
        if layer >= self.layers {
            return Err(Error::invalid(op, format!("a layer below {}", self.layers), layer.to_string()));
        }
        let len = positions.lens.get(layer).copied().unwrap_or(0);
        Ok(Cached { cache: self, pages: &positions.pages, layer, len })
    }

    /// Gives a sequence pages of its own for positions from `first` to below `end`. Error: the budget is spent, or memory.
    fn take_pages(&mut self, sequence: Sequence, first: usize, end: usize) -> Result<()> {
        let missing = self.missing(sequence, first, end);
        if missing > self.free_pages() {
            return Err(Error::CacheFull { needed: missing.saturating_mul(PAGE_LENGTH), free: self.free() });
        }
        self.allocate(missing)?;
        let mut taken = self.free.split_off(self.free.len() - missing);
        taken.iter().for_each(|&page| self.owners[page] = 1);
        let shared = self.shared(sequence, first / PAGE_LENGTH);
        let Some(positions) = self.sequences.get_mut(&sequence) else { return Err(unknown(sequence)) };
        if let Some((shared, page)) = shared.and_then(|shared| Some((shared, taken.pop()?))) {
            positions.pages[first / PAGE_LENGTH] = page;
            let mut copy = std::mem::take(&mut self.pages[page]);
            copy.copy_from_slice(&self.pages[shared]);
            self.pages[page] = copy;
            self.owners[shared] -= 1;
        }
        positions.pages.append(&mut taken);
        Ok(())
    }

    /// Pages that one sequence less has.
    fn release(&mut self, pages: Vec<usize>) {
        for page in pages {
            self.owners[page] -= 1;
            if self.owners[page] == 0 {
                self.free.push(page);
            }
        }
    }

    /// Takes memory until so many pages are free; the budget has them. Error: there is no memory.
    fn allocate(&mut self, free: usize) -> Result<()> {
        let lines = self.layers * self.heads.kv_heads * self.head_page() / 16;
        while self.free.len() < free {
            let page = bytemuck::allocation::try_zeroed_slice_box(lines).map_err(|()| Error::Device {
                op: OP,
                cause: format!("expected {} bytes of memory for the next positions, got none", lines * 64),
            })?;
            self.free.push(self.pages.len());
            self.pages.push(page);
            self.owners.push(0);
        }
        Ok(())
    }

    /// Pages that no sequence has.
    fn free_pages(&self) -> usize {
        self.budget - (self.pages.len() - self.free.len())
    }

    /// Elements of a page for one head.
    fn head_page(&self) -> usize {
        PAGE_LENGTH * (self.heads.head_size + padded(self.heads.head_size))
    }
}

fn unknown(sequence: Sequence) -> Error {
    Error::invalid(OP, "a sequence that was begun in this cache and has not ended", format!("{sequence:?}"))
}

/// Elements from a value to the value of the next position.
pub(super) fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// Writes the keys and values in `rows` to `positions` of a page.
fn write(page: &mut [f32], heads: Heads, kv_head: usize, rows: &[f32], positions: Range<usize>) {
    let size = heads.head_size;
    let (keys, values) = page.split_at_mut(PAGE_LENGTH * size);
    let key_of = |i: usize| &rows[i * heads.row() + (heads.heads + kv_head) * size..][..size];
    let value_of = |i: usize| &rows[i * heads.row() + (heads.heads + heads.kv_heads + kv_head) * size..][..size];
    for (i, position) in positions.clone().enumerate() {
        values[position * padded(size)..][..size].copy_from_slice(value_of(i));
    }
    let mut position = positions.start;
    while position < positions.end {
        let panel = &mut keys[position / PANEL * PANEL * size..][..PANEL * size];
        let i = position - positions.start;
        if position.is_multiple_of(PANEL) && position + PANEL <= positions.end {
            let from: [&[f32]; PANEL] = std::array::from_fn(|j| key_of(i + j));
            for (d, to) in panel.chunks_exact_mut(PANEL).enumerate() {
                for j in 0..PANEL {
                    to[j] = from[j][d];
                }
            }
            position += PANEL;
        } else {
            for (to, &from) in panel[position % PANEL..].iter_mut().step_by(PANEL).zip(key_of(i)) {
                *to = from;
            }
            position += 1;
        }
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (count, free, capacity) = (self.sequences.len(), self.free(), self.capacity());
        write!(f, "a cache of {} layers with {count} sequences, {free} of {capacity} positions free", self.layers)
    }
}
