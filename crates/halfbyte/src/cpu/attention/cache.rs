//! Keys and values of past positions, in blocks, laid out for the kernels.

use super::Heads;
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::error::{Error, Result};
use bytemuck::{Pod, Zeroable};
use std::ops::Range;

/// Positions in a block.
pub(super) const POSITIONS_PER_BLOCK: usize = 128;
/// Positions that lie side by side in the keys: a cache line.
pub(super) const PANEL: usize = 16;
/// Appending fewer elements than this stays on the calling thread.
const SMALL_APPEND: usize = 32 * 1024;

/// A cache line of floats: what buffers for kernels are made of, so that no vector straddles two lines.
#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
pub(super) struct Line([f32; 16]);

/// The keys and values of all layers.
///
/// Memory grows by blocks of 128 positions, each for all layers. In a block, for a layer and a head:
///
/// ```text
/// keys    [128/16 panels][head_size][16 positions]     a row of 16 scores is Σ q[i] · panel[i][..]
/// values  [128 positions][head_size, rounded up to 16]
/// ```
pub struct KvCache {
    layers: usize,
    heads: Heads,
    capacity: usize,
    /// Positions of each layer.
    lens: Vec<usize>,
    blocks: Vec<Box<[Line]>>,
}

impl KvCache {
    /// An empty cache for up to `capacity` positions. *Errors:* heads that make no sense, sizes beyond the
    /// address space.
    pub fn new(layers: usize, heads: Heads, capacity: usize) -> Result<Self> {
        let heads = heads.checked("kv cache")?;
        let too_big = || {
            let got = format!("{layers} layers, {} heads of {}", heads.kv_heads, heads.head_size);
            Error::invalid("kv cache", "a block that fits in memory", got)
        };
        let padded = heads.head_size.checked_next_multiple_of(16).ok_or_else(too_big)?;
        let block = [2 * POSITIONS_PER_BLOCK, heads.kv_heads, layers, size_of::<f32>()];
        let bytes = block.iter().try_fold(padded, |bytes, &n| bytes.checked_mul(n));
        bytes.filter(|&bytes| bytes <= isize::MAX as usize).ok_or_else(too_big)?;
        let mut lens = Vec::new();
        lens.try_reserve_exact(layers).map_err(|_| too_big())?;
        lens.resize(layers, 0);
        Ok(Self { layers, heads, capacity, lens, blocks: Vec::new() })
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

    /// Positions that it can grow to.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Positions that every layer has.
    pub fn len(&self) -> usize {
        self.lens.iter().copied().min().unwrap_or(0)
    }

    /// Whether some layer has no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Positions that `layer` has.
    pub fn len_of(&self, layer: usize) -> usize {
        self.lens[layer]
    }

    /// Bytes of keys and values that are allocated.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|block| size_of_val(&**block)).sum()
    }

    /// Forgets positions from `len` on, in every layer. The memory is kept.
    pub fn truncate(&mut self, len: usize) {
        self.lens.iter_mut().for_each(|l| *l = len.min(*l));
    }

    /// Allocates memory for `positions` positions. *Errors:* more than the capacity; no memory.
    pub fn reserve(&mut self, positions: usize) -> Result<()> {
        if positions > self.capacity {
            let expected = format!("at most {} positions, its capacity", self.capacity);
            return Err(Error::invalid("kv cache", expected, positions.to_string()));
        }
        while self.blocks.len() * POSITIONS_PER_BLOCK < positions {
            let lines = self.layers * self.heads.kv_heads * self.head_block() / 16;
            let block = bytemuck::allocation::try_zeroed_slice_box(lines).map_err(|()| Error::Device {
                op: "kv cache",
                cause: format!("expected {} bytes of memory for the next positions, got none", lines * 64),
            })?;
            self.blocks.push(block);
        }
        Ok(())
    }

    /// Appends the keys and values in the rows of `qkv` to `layer`; `position`, that of the first row, must be
    /// the next one.
    ///
    /// *Shapes:* `qkv` `[m, heads.row()]`, with the heads that the cache was made for. *Errors:* a length that does
    /// not fit, a layer or position out of range, no memory.
    pub fn append(&mut self, cpu: &Cpu, layer: usize, position: usize, qkv: &[f32]) -> Result<()> {
        let row = self.heads.row();
        if !qkv.len().is_multiple_of(row) {
            return Err(Error::invalid("kv cache", format!("rows of {row} elements"), qkv.len().to_string()));
        }
        if layer >= self.layers {
            return Err(Error::invalid("kv cache", format!("a layer below {}", self.layers), layer.to_string()));
        }
        if position != self.lens[layer] {
            let expected = format!("position {}, the next of layer {layer}", self.lens[layer]);
            return Err(Error::invalid("kv cache", expected, position.to_string()));
        }
        let end = position + qkv.len() / row;
        self.reserve(end)?;
        let (heads, head_block) = (self.heads, self.head_block());
        let of_layer = layer * heads.kv_heads * head_block..(layer + 1) * heads.kv_heads * head_block;
        let first = position / POSITIONS_PER_BLOCK;
        let touched = &mut self.blocks[first..end.div_ceil(POSITIONS_PER_BLOCK).max(first)];
        let (count, touched) = (touched.len(), DisjointMut::new(touched));
        let task = |i: usize| {
            // SAFETY: each task has its own block.
            let block = unsafe { &mut touched.range(i..i + 1)[0] };
            let base = (first + i) * POSITIONS_PER_BLOCK;
            let positions = position.max(base)..end.min(base + POSITIONS_PER_BLOCK);
            let rows = &qkv[(positions.start - position) * row..(positions.end - position) * row];
            let block = &mut bytemuck::cast_slice_mut(block)[of_layer.clone()];
            for (kv_head, block) in block.chunks_exact_mut(head_block).enumerate() {
                write(block, heads, kv_head, rows, positions.start - base..positions.end - base);
            }
        };
        if qkv.len() < SMALL_APPEND {
            (0..count).for_each(task);
        } else {
            cpu.threads().run(count, &task);
        }
        self.lens[layer] = end;
        Ok(())
    }

    /// Keys and values of a head in block `block`.
    #[inline]
    pub(super) fn block(&self, layer: usize, kv_head: usize, block: usize) -> (&[f32], &[f32]) {
        let len = self.head_block();
        let all: &[f32] = bytemuck::cast_slice(&self.blocks[block]);
        all[(layer * self.heads.kv_heads + kv_head) * len..][..len].split_at(POSITIONS_PER_BLOCK * self.head_size())
    }

    /// Elements of a block for one head.
    fn head_block(&self) -> usize {
        POSITIONS_PER_BLOCK * (self.heads.head_size + padded(self.heads.head_size))
    }
}

/// Elements from a value to the value of the next position.
pub(super) fn padded(head_size: usize) -> usize {
    head_size.next_multiple_of(16)
}

/// Writes the keys and values in `rows` to `positions` of a block.
fn write(block: &mut [f32], heads: Heads, kv_head: usize, rows: &[f32], positions: Range<usize>) {
    let size = heads.head_size;
    let (keys, values) = block.split_at_mut(POSITIONS_PER_BLOCK * size);
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
        write!(f, "a cache of {} layers with {} of {} positions", self.layers, self.len(), self.capacity)
    }
}
