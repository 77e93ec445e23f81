//! Keys and values of past positions of many sequences, in pages, laid out for the kernels.

use super::element::Element;
use super::{Heads, KvType};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::error::{Error, Result};
use crate::kv_pages::{Copied, PAGE_LENGTH, Pages, Sequence, unknown};
use crate::memory::short;
use bytemuck::{Pod, Zeroable};
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
/// They lie in pages of [`PAGE_LENGTH`] positions, each for all layers. A sequence has a table of its pages, which others may share
/// ([`KvCache::share`]): what would write to a shared page copies it first. A page that no sequence has any more goes to the next
/// that needs one. Memory is taken page by page, up to the budget, and kept. In a
/// page, for a layer and a head:
///
/// ```text
/// keys    [128/16 panels][head_size][16 positions]     a row of 16 scores is Σ q[i] · panel[i][..]
/// values  [128 positions][head_size, rounded up to 16]
/// scales  [128 of keys, 128 of values]                 f32, where elements are codes of 8 bits
/// ```
///
/// *Source:* Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
pub struct KvCache {
    layers: usize,
    heads: Heads,
    kv: KvType,
    pages: Pages,
    /// The pages whose memory has been taken.
    memory: Vec<Box<[Line]>>,
    /// Of each sequence, the positions of each layer; nothing before the first come.
    lens: BTreeMap<Sequence, Vec<usize>>,
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

/// The keys, or the values, of a head in a page.
#[derive(Clone, Copy)]
pub(super) struct Part<'a, E> {
    pub(super) elements: &'a [E],
    /// Of each position, where elements have scales.
    pub(super) scales: &'a [f32],
}

impl<'a> Cached<'a> {
    /// The type of the elements.
    pub(super) fn kv(&self) -> KvType {
        self.cache.kv
    }

    /// Keys and values of a head in a page of the sequence; the elements are of the cache's type.
    #[inline]
    pub(super) fn page<E: Element>(&self, kv_head: usize, index: usize) -> [Part<'a, E>; 2] {
        let (cache, len) = (self.cache, self.cache.head_page());
        let all: &[u8] = bytemuck::cast_slice(&cache.memory[self.pages[index] as usize]);
        let of_head = &all[(self.layer * cache.heads.kv_heads + kv_head) * len..][..len];
        let [keys, elements] = parts(cache.heads.head_size);
        let (of_head, scales) = of_head.split_at(elements * size_of::<E>());
        let (keys, values) = bytemuck::cast_slice(of_head).split_at(keys);
        let (of_keys, of_values) = bytemuck::cast_slice(scales).split_at(if E::SCALED { PAGE_LENGTH } else { 0 });
        [Part { elements: keys, scales: of_keys }, Part { elements: values, scales: of_values }]
    }
}

/// Elements of the keys of a head in a page, and of keys and values.
fn parts(head_size: usize) -> [usize; 2] {
    [PAGE_LENGTH * head_size, PAGE_LENGTH * (head_size + padded(head_size))]
}

const OP: &str = "kv cache";

impl KvCache {
    /// An empty cache with a budget of `positions`, rounded up to whole pages, whose keys and values lie in `kv`. *Errors:* heads
    /// that make no sense, sizes beyond the address space.
    pub fn new(layers: usize, heads: Heads, positions: usize, kv: KvType) -> Result<Self> {
        let heads = heads.checked(OP)?;
        let padded = heads.head_size.checked_next_multiple_of(16);
        // Codes with their scales take less than f32.
        let page = [2 * PAGE_LENGTH, heads.kv_heads, layers, size_of::<f32>()];
        let bytes = padded.and_then(|padded| page.iter().try_fold(padded, |bytes, &n| bytes.checked_mul(n)));
        if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
            let got = format!("{layers} layers, {} heads of {}", heads.kv_heads, heads.head_size);
            return Err(Error::invalid(OP, "a page that fits in memory", got));
        }
        let pages = Pages::new(positions.div_ceil(PAGE_LENGTH));
        Ok(Self { layers, heads, kv, pages, memory: Vec::new(), lens: BTreeMap::new() })
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

    /// The type that keys and values lie in.
    pub fn kv(&self) -> KvType {
        self.kv
    }

    /// Positions that all sequences together can have: those of the budget.
    pub fn capacity(&self) -> usize {
        self.pages.budget().saturating_mul(PAGE_LENGTH)
    }

    /// Positions in pages that no sequence has.
    pub fn free(&self) -> usize {
        self.pages.free().saturating_mul(PAGE_LENGTH)
    }

    /// Pages that these sequences have together, one that several have counted once.
    pub fn pages_of(&self, sequences: &[Sequence]) -> usize {
        self.pages.of_all(sequences)
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
        let len = of_all_layers(self.lens.get(&from).ok_or_else(|| unknown(from))?);
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
        let lens = self.lens.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        lens.iter_mut().for_each(|l| *l = len.min(*l));
        let of_any_layer = lens.iter().copied().max().unwrap_or(0);
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
        let (layers, heads, head_page) = (self.layers, self.heads, self.head_page());
        let write = match self.kv {
            KvType::F32 => write::<f32>,
            KvType::F16 => write::<f16>,
            KvType::Bf16 => write::<bf16>,
            KvType::Int8 => write::<i8>,
        };
        let lens = self.lens.get_mut(&sequence).ok_or_else(|| unknown(sequence))?;
        lens.resize(layers, 0);
        lens[layer] = end;
        let of_layer = layer * heads.kv_heads * head_page..(layer + 1) * heads.kv_heads * head_page;
        let first = position / PAGE_LENGTH;
        let touched = &self.pages.of(sequence)?[first..end.div_ceil(PAGE_LENGTH)];
        let memory = DisjointMut::new(&mut self.memory);
        let task = |i: usize| {
            // SAFETY: no page stands twice in a table, so that each task has its own.
            let page = unsafe { &mut memory.range(touched[i] as usize..touched[i] as usize + 1)[0] };
            let base = (first + i) * PAGE_LENGTH;
            let written = position.max(base)..end.min(base + PAGE_LENGTH);
            let rows = &qkv[(written.start - position) * row..(written.end - position) * row];
            let page: &mut [u8] = &mut bytemuck::cast_slice_mut(page)[of_layer.clone()];
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
            self.allocate(self.pages.used_with(missing))?;
        }
        if let Some(Copied { from, to }) = self.pages.take(sequence, first, end)? {
            let mut copy = std::mem::take(&mut self.memory[to as usize]);
            copy.copy_from_slice(&self.memory[from as usize]);
            self.memory[to as usize] = copy;
        }
        Ok(())
    }

    /// Takes memory for the pages below a number. Error: there is no memory.
    fn allocate(&mut self, pages: usize) -> Result<()> {
        let lines = self.layers * self.heads.kv_heads * self.head_page() / size_of::<Line>();
        while self.memory.len() < pages {
            let page = bytemuck::allocation::try_zeroed_slice_box(lines).map_err(|()| short::<Line>(OP, lines))?;
            self.memory.push(page);
        }
        Ok(())
    }

    /// Bytes of a page for one head: whole lines.
    fn head_page(&self) -> usize {
        let [_, elements] = parts(self.heads.head_size);
        match self.kv {
            KvType::F32 => elements * size_of::<f32>(),
            KvType::F16 | KvType::Bf16 => elements * size_of::<u16>(),
            KvType::Int8 => elements + 2 * PAGE_LENGTH * size_of::<f32>(),
        }
    }
}

/// Positions that every layer has.
fn of_all_layers(lens: &[usize]) -> usize {
    lens.iter().copied().min().unwrap_or(0)
}

/// Elements from a value to the value of the next position.
pub(super) fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// Writes the keys and values in `rows` to `positions` of a page.
fn write<E: Element>(page: &mut [u8], heads: Heads, kv_head: usize, rows: &[f32], positions: Range<usize>) {
    let size = heads.head_size;
    let [keys, elements] = parts(size);
    let (page, scales) = page.split_at_mut(elements * size_of::<E>());
    let (keys, values) = bytemuck::cast_slice_mut::<u8, E>(page).split_at_mut(keys);
    let scales: &mut [f32] = bytemuck::cast_slice_mut(scales);
    let mut scale = |position: usize, of: &[f32]| {
        let scale = E::scale(of);
        if E::SCALED {
            scales[position] = scale;
        }
        scale
    };
    let key_of = |i: usize| &rows[i * heads.row() + (heads.heads + kv_head) * size..][..size];
    let value_of = |i: usize| &rows[i * heads.row() + (heads.heads + heads.kv_heads + kv_head) * size..][..size];
    for (i, position) in positions.clone().enumerate() {
        let scale = scale(PAGE_LENGTH + position, value_of(i));
        let to = &mut values[position * padded(size)..][..size];
        to.iter_mut().zip(value_of(i)).for_each(|(to, &from)| *to = E::of(from, scale));
    }
    let mut position = positions.start;
    while position < positions.end {
        let panel = &mut keys[position / PANEL * PANEL * size..][..PANEL * size];
        let i = position - positions.start;
        if position.is_multiple_of(PANEL) && position + PANEL <= positions.end {
            let from: [&[f32]; PANEL] = std::array::from_fn(|j| key_of(i + j));
            let scales: [f32; PANEL] = std::array::from_fn(|j| scale(position + j, from[j]));
            for (d, to) in panel.chunks_exact_mut(PANEL).enumerate() {
                for j in 0..PANEL {
                    to[j] = E::of(from[j][d], scales[j]);
                }
            }
            position += PANEL;
        } else {
            let scale = scale(position, key_of(i));
            for (to, &from) in panel[position % PANEL..].iter_mut().step_by(PANEL).zip(key_of(i)) {
                *to = E::of(from, scale);
            }
            position += 1;
        }
    }
}

impl std::fmt::Debug for KvCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (count, free, capacity) = (self.lens.len(), self.free(), self.capacity());
        write!(
            f,
            "a cache of {} layers in {} with {count} sequences, {free} of {capacity} positions free",
            self.layers, self.kv
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a cache has of keys and values, `[position][key, then value]`.
    fn stored<E: Element + Copy + Into<f64>>(cache: &KvCache, sequence: Sequence, positions: usize) -> Vec<f64> {
        let (cached, size) = (cache.cached("test", sequence, 0).unwrap(), cache.head_size());
        let mut out = Vec::new();
        for p in 0..positions {
            let [keys, values] = cached.page::<E>(0, p / PAGE_LENGTH);
            let (p, scaled) = (p % PAGE_LENGTH, E::SCALED);
            let [of_key, of_value] = [keys, values].map(|part| if scaled { f64::from(part.scales[p]) } else { 1.0 });
            out.extend((0..size).map(|d| keys.elements[p / 16 * 16 * size + d * 16 + p % 16].into() * of_key));
            out.extend((0..size).map(|d| values.elements[p * padded(size) + d].into() * of_value));
        }
        out
    }

    #[test]
    fn elements_are_rounded_to_the_nearest() {
        let (cpu, heads) = (Cpu::new(1).unwrap(), Heads { heads: 1, kv_heads: 1, head_size: 24 });
        let (positions, row) = (150, heads.row());
        // From subnormal numbers to the greatest, and a row of zeros.
        let factor = |p: usize| {
            if p == 40 { 0.0 } else { 2f32.powi((p as i32 % 75) * 3 - 140) * if p < 75 { 1.0 } else { 1e-5 } }
        };
        let mut qkv: Vec<f32> = (0..positions * row).map(|i| (i * 40_503 % 65_521) as f32 / 32_760.5 - 1.0).collect();
        qkv.chunks_mut(row).enumerate().for_each(|(p, row)| row.iter_mut().for_each(|v| *v *= factor(p)));
        qkv[90 * row + 30] = f32::MAX;
        let of_kv: Vec<f64> = qkv.chunks(row).flat_map(|row| &row[24..]).map(|&v| v.into()).collect();
        for kv in KvType::ALL {
            let mut cache = KvCache::new(1, heads, positions, kv).unwrap();
            let sequence = cache.begin();
            // Whole panels and single positions.
            for rows in [0..37, 37..38, 38..positions] {
                cache.append(&cpu, sequence, 0, rows.start, &qkv[rows.start * row..rows.end * row]).unwrap();
            }
            let got = match kv {
                KvType::F32 => stored::<f32>(&cache, sequence, positions),
                KvType::F16 => stored::<f16>(&cache, sequence, positions),
                KvType::Bf16 => stored::<bf16>(&cache, sequence, positions),
                KvType::Int8 => stored::<i8>(&cache, sequence, positions),
            };
            for (got, vector) in got.chunks(24).zip(of_kv.chunks(24)) {
                let greatest = vector.iter().fold(0f64, |a, v| a.max(v.abs()));
                for (&got, &v) in got.iter().zip(vector) {
                    let fine = match kv {
                        KvType::F32 => got == v,
                        KvType::F16 if v.abs() >= 65520.0 => got.is_infinite(),
                        KvType::F16 => (got - v).abs() <= (v.abs() * 2f64.powi(-11)).max(2f64.powi(-25)),
                        KvType::Bf16 if v.abs() > 3.38e38 => got.is_infinite(),
                        KvType::Bf16 => (got - v).abs() <= (v.abs() * 2f64.powi(-8)).max(2f64.powi(-134)),
                        // Half a scale, and what dividing by it rounds.
                        KvType::Int8 => {
                            (got - v).abs() <= (greatest / 254.0).max(2f64.powi(-127)) * (1.0 + 2f64.powi(-15))
                        }
                    };
                    assert!(fine, "{kv}: {v:e} became {got:e}, the greatest is {greatest:e}");
                }
            }
            assert_eq!(cache.bytes(), 2 * 128 * (kv.bytes(24) + kv.bytes(32)), "{kv}");
        }
    }
}
