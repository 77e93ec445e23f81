//! Keys and values of past positions of many sequences, in pages, laid out for the kernels.

use super::element::{Element, widen};
use super::{Heads, KvType};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::lanes::Simd;
use crate::error::{Error, Result};
use crate::kv_pages::{Copied, Pages};
pub use crate::kv_pages::{PAGE_LENGTH, Sequence};
use bytemuck::{Pod, Zeroable, cast_slice, cast_slice_mut};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::ops::Range;

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
/// They lie in pages of [`PAGE_LENGTH`] positions, each for all layers; [`Pages`] says which of them a sequence has, and which it
/// shares ([`KvCache::share`]). Memory is taken page by page, up to the budget, and kept. In a page, for a layer and a head:
///
/// ```text
/// keys    [128/16 panels][head_size][16 positions]     a row of 16 scores is Σ q[i] · panel[i][..]
/// values  [128 positions][head_size, rounded up to 16]
/// scales  [128 positions] of the keys, [128] of the values           of codes of 8 bits only
/// ```
pub struct KvCache {
    layers: usize,
    heads: Heads,
    kv: KvType,
    pages: Pages,
    /// Of the pages that a sequence ever had, at least.
    memory: Vec<Box<[Line]>>,
    /// Positions of each layer of a sequence; nothing before the first come.
    lens: BTreeMap<Sequence, Vec<usize>>,
}

/// Positions that every layer has.
fn of_all_layers(lens: &[usize]) -> usize {
    lens.iter().copied().min().unwrap_or(0)
}

/// What attention reads: one layer of one sequence.
#[derive(Clone, Copy)]
pub(super) struct Cached<'a> {
    cache: &'a KvCache,
    pages: &'a [u32],
    layer: usize,
    /// Number of positions.
    pub(super) len: usize,
}

impl Cached<'_> {
    /// Keys and values of a head in a page of the sequence, as f32; those of the panels of positions `seen` are right. What is not
    /// kept as f32 goes to `scratch`.
    #[inline(always)]
    pub(super) fn page<'a, S: Simd>(
        &'a self,
        s: S,
        (kv_head, index): (usize, usize),
        seen: &Range<usize>,
        scratch: &'a mut Vec<Line>,
    ) -> (&'a [f32], &'a [f32]) {
        let (cache, bytes) = (self.cache, self.cache.head_bytes());
        let all: &[u8] = cast_slice(&cache.memory[self.pages[index] as usize]);
        let stored = &all[(self.layer * cache.heads.kv_heads + kv_head) * bytes..][..bytes];
        let size = cache.heads.head_size;
        match cache.kv {
            KvType::F32 => {
                let (keys, values, _) = parts::<f32>(stored, size);
                (keys, values)
            }
            KvType::F16 => widen_page::<S, f16>(s, parts(stored, size), size, seen, scratch),
            KvType::Bf16 => widen_page::<S, bf16>(s, parts(stored, size), size, seen, scratch),
            KvType::Int8 => widen_page::<S, i8>(s, parts(stored, size), size, seen, scratch),
        }
    }
}

/// Keys, values and scales of a head in a page.
#[inline(always)]
fn parts<T: Element>(stored: &[u8], head_size: usize) -> (&[T], &[T], &[f32]) {
    let (keys, rest) = stored.split_at(PAGE_LENGTH * head_size * size_of::<T>());
    let (values, scales) = rest.split_at(PAGE_LENGTH * padded(head_size) * size_of::<T>());
    (cast_slice(keys), cast_slice(values), cast_slice(scales))
}

/// The panels of keys, and the values, of positions `seen` of a page, as f32 where they lie in a page of such.
#[inline(always)]
fn widen_page<'a, S: Simd, T: Element>(
    s: S,
    (keys, values, scales): (&[T], &[T], &[f32]),
    head_size: usize,
    seen: &Range<usize>,
    scratch: &'a mut Vec<Line>,
) -> (&'a [f32], &'a [f32]) {
    let stride = padded(head_size);
    let (wide_keys, wide_values) =
        floats(scratch, PAGE_LENGTH * (head_size + stride)).split_at_mut(PAGE_LENGTH * head_size);
    let (scales_of_keys, scales_of_values) = scales.split_at(scales.len() / 2);
    for panel in seen.start / PANEL..seen.end.div_ceil(PANEL) {
        let factors = scales_of_keys.get(panel * PANEL..).and_then(<[f32]>::first_chunk);
        let part = panel * PANEL * head_size..(panel + 1) * PANEL * head_size;
        widen(s, &keys[part.clone()], factors, &mut wide_keys[part]);
    }
    for position in seen.clone() {
        let factors = scales_of_values.get(position).map(|scale| [*scale; 16]);
        let part = position * stride..(position + 1) * stride;
        widen(s, &values[part.clone()], factors.as_ref(), &mut wide_values[part]);
    }
    (wide_keys, wide_values)
}

/// The first `len` floats of a buffer, which grows to hold them.
pub(super) fn floats(buffer: &mut Vec<Line>, len: usize) -> &mut [f32] {
    let lines = len.div_ceil(16);
    if buffer.len() < lines {
        buffer.resize(lines, Line::zeroed());
    }
    &mut cast_slice_mut(buffer)[..len]
}

const OP: &str = "kv cache";

impl KvCache {
    /// An empty cache with a budget of `positions`, rounded up to whole pages. *Errors:* heads that make no sense, sizes
    /// beyond the address space.
    pub fn new(layers: usize, heads: Heads, positions: usize, kv: KvType) -> Result<Self> {
        let heads = heads.checked(OP)?;
        let page = Self::bytes_per_position(layers, heads, kv).and_then(|bytes| bytes.checked_mul(PAGE_LENGTH));
        if page.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let got = format!("{layers} layers, {} heads of {}", heads.kv_heads, heads.head_size);
            return Err(Error::invalid(OP, "a page that fits in memory", got));
        }
        let pages = Pages::new(positions.div_ceil(PAGE_LENGTH));
        Ok(Self { layers, heads, kv, pages, memory: Vec::new(), lens: BTreeMap::new() })
    }

    /// Bytes that a position takes over all layers. None: beyond the address space.
    pub fn bytes_per_position(layers: usize, heads: Heads, kv: KvType) -> Option<usize> {
        let elements = heads.head_size.checked_next_multiple_of(16)?.checked_add(heads.head_size)?;
        let of_head = elements.checked_mul(kv.element_bytes())?.checked_add(2 * kv.scale_bytes())?;
        of_head.checked_mul(heads.kv_heads)?.checked_mul(layers)
    }

    /// What keys and values are kept as.
    pub fn kv(&self) -> KvType {
        self.kv
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
        self.pages.budget().saturating_mul(PAGE_LENGTH)
    }

    /// Positions in pages that no sequence has.
    pub fn free(&self) -> usize {
        self.pages.free().saturating_mul(PAGE_LENGTH)
    }

    /// Bytes of keys and values that are allocated.
    pub fn bytes(&self) -> usize {
        self.memory.iter().map(|page| size_of_val(&**page)).sum()
    }

    /// A new sequence, without positions.
    pub fn begin(&mut self) -> Sequence {
        let sequence = self.pages.begin();
        self.lens.insert(sequence, Vec::new());
        sequence
    }

    /// Forgets a sequence; its pages are free. *Errors:* it is none of this cache.
    pub fn end(&mut self, sequence: Sequence) -> Result<()> {
        self.pages.end(sequence)?;
        self.lens.remove(&sequence);
        Ok(())
    }

    /// A new sequence that has the first positions of another, in the same pages. *Errors:* the other is none of this cache, or
    /// has not so many in every layer.
    pub fn share(&mut self, from: Sequence, positions: usize) -> Result<Sequence> {
        self.pages.of(from)?;
        let len = self.len(from);
        if positions > len {
            let expected = format!("at most {len} positions, which the other has");
            return Err(Error::invalid(OP, expected, positions.to_string()));
        }
        let sequence = self.pages.share(from, positions.div_ceil(PAGE_LENGTH))?;
        self.lens.insert(sequence, vec![positions; self.layers]);
        Ok(sequence)
    }

    /// Takes the pages for positions below `end`, so that appending up to there does not fail for want of them. *Errors:* the
    /// sequence is none of this cache, no page free, no memory; then it has what it had.
    pub fn reserve(&mut self, sequence: Sequence, end: usize) -> Result<()> {
        self.take_pages(sequence, self.len(sequence), end)
    }

    /// Pages that [`KvCache::reserve`] would take.
    pub fn missing_pages(&self, sequence: Sequence, end: usize) -> usize {
        self.pages.missing(sequence, self.len(sequence), end)
    }

    /// Positions that every layer has of a sequence; 0 if it is none of this cache.
    pub fn len(&self, sequence: Sequence) -> usize {
        self.lens.get(&sequence).map_or(0, |lens| of_all_layers(lens))
    }

    /// Forgets positions from `len` on, in every layer; pages without positions are free. *Errors:* the sequence is none of
    /// this cache.
    pub fn truncate(&mut self, sequence: Sequence, len: usize) -> Result<()> {
        let mut of_any_layer = 0;
        for l in self.lens.get_mut(&sequence).into_iter().flatten() {
            *l = len.min(*l);
            of_any_layer = of_any_layer.max(*l);
        }
        self.pages.keep(sequence, of_any_layer.div_ceil(PAGE_LENGTH))
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
        let (layers, heads, bytes) = (self.layers, self.heads, self.head_bytes());
        let write = match self.kv {
            KvType::F32 => write::<f32>,
            KvType::F16 => write::<f16>,
            KvType::Bf16 => write::<bf16>,
            KvType::Int8 => write::<i8>,
        };
        let lens = self.lens.entry(sequence).or_default();
        lens.resize(layers, 0);
        lens[layer] = end;
        let of_layer = layer * heads.kv_heads * bytes..(layer + 1) * heads.kv_heads * bytes;
        let first = position / PAGE_LENGTH;
        let touched = &self.pages.of(sequence)?[first..end.div_ceil(PAGE_LENGTH)];
        let memory = DisjointMut::new(&mut self.memory);
        let task = |i: usize| {
            // SAFETY: no page stands twice in a table, so that each task has its own.
            let page = unsafe { &mut memory.range(touched[i] as usize..touched[i] as usize + 1)[0] };
            let base = (first + i) * PAGE_LENGTH;
            let written = position.max(base)..end.min(base + PAGE_LENGTH);
            let rows = &qkv[(written.start - position) * row..(written.end - position) * row];
            let page = &mut cast_slice_mut(page)[of_layer.clone()];
            for (kv_head, stored) in page.chunks_exact_mut(bytes).enumerate() {
                write(stored, heads, kv_head, rows, written.start - base..written.end - base);
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
        let pages = self.pages.of(sequence)?;
        if layer >= self.layers {
            return Err(Error::invalid(op, format!("a layer below {}", self.layers), layer.to_string()));
        }
        let len = self.lens.get(&sequence).and_then(|lens| lens.get(layer)).copied().unwrap_or(0);
        Ok(Cached { cache: self, pages, layer, len })
    }

    /// Gives a sequence pages of its own for positions from `first` to below `end`. Error: the budget is spent, or memory.
    fn take_pages(&mut self, sequence: Sequence, first: usize, end: usize) -> Result<()> {
        let missing = self.pages.missing(sequence, first, end);
        if missing <= self.pages.free() {
            self.allocate(self.pages.numbered(missing))?;
        }
        if let Some(Copied { from, to }) = self.pages.take(sequence, first, end)? {
            let mut copy = std::mem::take(&mut self.memory[to as usize]);
            copy.copy_from_slice(&self.memory[from as usize]);
            self.memory[to as usize] = copy;
        }
        Ok(())
    }

    /// Takes memory until so many pages have some. Error: there is no memory.
    fn allocate(&mut self, pages: usize) -> Result<()> {
        let lines = self.layers * self.heads.kv_heads * self.head_bytes() / size_of::<Line>();
        while self.memory.len() < pages {
            let page = bytemuck::allocation::try_zeroed_slice_box(lines).map_err(|()| Error::Device {
                op: OP,
                cause: format!(
                    "expected {} bytes of memory for the next positions, got none",
                    lines * size_of::<Line>()
                ),
            })?;
            self.memory.push(page);
        }
        Ok(())
    }

    /// Bytes of a page for one head: whole lines.
    fn head_bytes(&self) -> usize {
        let Heads { head_size, .. } = self.heads;
        PAGE_LENGTH * ((head_size + padded(head_size)) * self.kv.element_bytes() + 2 * self.kv.scale_bytes())
    }
}

/// Elements from a value to the value of the next position.
pub(super) fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// Writes the keys and values in `rows` to `positions` of a page.
fn write<T: Element>(stored: &mut [u8], heads: Heads, kv_head: usize, rows: &[f32], positions: Range<usize>) {
    let size = heads.head_size;
    let (keys, rest) = stored.split_at_mut(PAGE_LENGTH * size * size_of::<T>());
    let (values, scales) = rest.split_at_mut(PAGE_LENGTH * padded(size) * size_of::<T>());
    let (keys, values, scales): (&mut [T], &mut [T], &mut [f32]) =
        (cast_slice_mut(keys), cast_slice_mut(values), cast_slice_mut(scales));
    let key_of = |i: usize| &rows[i * heads.row() + (heads.heads + kv_head) * size..][..size];
    let value_of = |i: usize| &rows[i * heads.row() + (heads.heads + heads.kv_heads + kv_head) * size..][..size];
    for (i, position) in positions.clone().enumerate() {
        let [of_key, of_value] = [key_of(i), value_of(i)].map(T::range);
        let to = &mut values[position * padded(size)..][..size];
        to.iter_mut().zip(value_of(i)).for_each(|(to, &x)| *to = T::of(x, of_value));
        if let Some((of_key, of_value)) = T::scale(of_key).zip(T::scale(of_value)) {
            (scales[position], scales[PAGE_LENGTH + position]) = (of_key, of_value);
        }
    }
    let mut position = positions.start;
    while position < positions.end {
        let panel = &mut keys[position / PANEL * PANEL * size..][..PANEL * size];
        let i = position - positions.start;
        if position.is_multiple_of(PANEL) && position + PANEL <= positions.end {
            let from: [&[f32]; PANEL] = std::array::from_fn(|j| key_of(i + j));
            let ranges = from.map(T::range);
            for (d, to) in panel.chunks_exact_mut(PANEL).enumerate() {
                for j in 0..PANEL {
                    to[j] = T::of(from[j][d], ranges[j]);
                }
            }
            position += PANEL;
        } else {
            let range = T::range(key_of(i));
            for (to, &from) in panel[position % PANEL..].iter_mut().step_by(PANEL).zip(key_of(i)) {
                *to = T::of(from, range);
            }
            position += 1;
        }
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (count, free, capacity) = (self.lens.len(), self.free(), self.capacity());
        write!(f, "a cache of {} layers with {count} sequences, {free} of {capacity} positions free", self.layers)
    }
}
