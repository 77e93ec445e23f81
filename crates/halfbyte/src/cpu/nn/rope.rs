//! Rotary position embedding.

use super::{in_tasks, rows_of};
use crate::cpu::Cpu;
use crate::cpu::attention::Heads;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::lanes::{Kernel, Simd, dispatch};
use crate::error::{Error, Result};
use crate::memory::{short, zeroed};
use std::sync::{Arc, PoisonError, RwLock};

/// Positions whose cosines and sines are computed together.
const BLOCK: usize = 128;

type Block = Arc<[f32]>;

/// Rotations of query and key heads by their positions, in the convention of Hugging Face Llama: element `i` is
/// paired with element `i + rotated/2`, where the first `rotated` elements of a head are rotated.
///
/// Cosines and sines are computed in f64, rounded to f32, and kept.
///
/// *Source:* Su et al., "RoFormer", 2021; the pairs are halves as in GPT-NeoX.
#[derive(Debug)]
pub struct Rope {
    inv_freq: Vec<f64>,
    attention_factor: f64,
    max_positions: usize,
    /// A block has, for each of its positions, a cosine for each frequency, then a sine for each.
    /// The lock is never held while the team is waited for: a task that wants it would wait for ever.
    blocks: RwLock<Arc<[Block]>>,
}

impl Rope {
    /// `inv_freq[i]`: the angle, in radians a position, of pair `i`; `attention_factor`: what cosines and sines are
    /// multiplied by; positions are below `max_positions`. *Errors:* a number that is not finite.
    pub fn new(inv_freq: Vec<f64>, attention_factor: f64, max_positions: usize) -> Result<Self> {
        if let Some(bad) = inv_freq.iter().chain([&attention_factor]).find(|x| !x.is_finite()) {
            return Err(Error::invalid("rope", "finite frequencies and a finite factor", bad.to_string()));
        }
        Ok(Self { inv_freq, attention_factor, max_positions, blocks: RwLock::default() })
    }

    /// The first position that is out of range.
    pub fn max_positions(&self) -> usize {
        self.max_positions
    }

    /// Elements of a head that are rotated.
    pub fn rotated(&self) -> usize {
        2 * self.inv_freq.len()
    }

    /// Rotates the query and key heads in the rows of `qkv`; row `i` is at position `first_position + i`.
    ///
    /// *Shapes:* `qkv` `[m, heads.row()]`. *Accuracy:* absolute error ≤ 3·2⁻²⁴ of the pair's norm times the attention
    /// factor. *Errors:* a length that does not fit, heads smaller than what is rotated, positions out of range, memory
    /// that is short for cosines and sines up to the last position.
    pub fn apply(&self, cpu: &Cpu, qkv: &mut [f32], heads: Heads, first_position: usize) -> Result<()> {
        let row = heads.checked("rope")?.row();
        let rows = rows_of("rope", qkv.len(), row)?;
        if heads.head_size < self.rotated() {
            let expected = format!("heads of at least {} elements", self.rotated());
            return Err(Error::invalid("rope", expected, heads.head_size.to_string()));
        }
        let end = first_position.checked_add(rows).filter(|&end| end <= self.max_positions).ok_or_else(|| {
            Error::invalid(
                "rope",
                format!("positions below {}", self.max_positions),
                format!("{rows} positions from {first_position}"),
            )
        })?;
        let blocks = self.blocks(cpu, end)?;
        let rotated_heads = heads.heads + heads.kv_heads;
        let qkv = DisjointMut::new(qkv);
        in_tasks(cpu, rows, rotated_heads * heads.head_size, &|range| {
            // SAFETY: ranges of rows are disjoint.
            let qkv = unsafe { qkv.range(range.start * row..range.end * row) };
            let position = first_position + range.start;
            dispatch(cpu, Rotate { qkv, row, rotated_heads, head_size: heads.head_size, position, blocks: &blocks });
        });
        Ok(())
    }

    /// The blocks up to position `end` at least; those that are missing are computed. Error: memory is short.
    fn blocks(&self, cpu: &Cpu, end: usize) -> Result<Arc<[Block]>> {
        let wanted = end.div_ceil(BLOCK);
        let old = Arc::clone(&self.blocks.read().unwrap_or_else(PoisonError::into_inner));
        if old.len() >= wanted {
            return Ok(old);
        }
        let (pairs, more) = (self.inv_freq.len(), wanted - old.len());
        // Asked for as a whole first: block after block, the system might grant more than it has.
        let numbers = more.saturating_mul(BLOCK * 2 * pairs);
        drop(zeroed::<f32>("rope", numbers)?);
        let mut all: Vec<Block> = Vec::new();
        all.try_reserve_exact(wanted).map_err(|_| short::<f32>("rope", numbers))?;
        all.extend(old.iter().cloned());
        all.resize(wanted, Block::default());
        let new = DisjointMut::new(&mut all[old.len()..]);
        cpu.threads().run(more, &|i| {
            let mut block = vec![0.0; BLOCK * 2 * pairs];
            for j in 0..BLOCK {
                let (cos, sin) = block[j * 2 * pairs..(j + 1) * 2 * pairs].split_at_mut(pairs);
                for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                    let angle = ((old.len() + i) * BLOCK + j) as f64 * frequency;
                    *cos = (angle.cos() * self.attention_factor) as f32;
                    *sin = (angle.sin() * self.attention_factor) as f32;
                }
            }
            // SAFETY: each task has its own block.
            unsafe { new.range(i..i + 1)[0] = block.into() };
        });
        let all: Arc<[Block]> = all.into();
        let mut blocks = self.blocks.write().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have computed more meanwhile.
        if blocks.len() < all.len() {
            *blocks = Arc::clone(&all);
        }
        Ok(all)
    }
}

struct Rotate<'a> {
    qkv: &'a mut [f32],
    row: usize,
    rotated_heads: usize,
    head_size: usize,
    position: usize,
    blocks: &'a [Block],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (i, row) in self.qkv.chunks_exact_mut(self.row).enumerate() {
            let position = self.position + i;
            let block = &self.blocks[position / BLOCK];
            let per_position = block.len() / BLOCK;
            let angles = &block[position % BLOCK * per_position..][..per_position];
            let (cos, sin) = angles.split_at(per_position / 2);
            for head in row[..self.rotated_heads * self.head_size].chunks_exact_mut(self.head_size) {
                rotate(s, &mut head[..per_position], cos, sin);
            }
        }
    }
}

#[inline(always)]
fn rotate<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(head.len() / 2);
    let (mut first, mut second) = (first.chunks_exact_mut(S::LANES), second.chunks_exact_mut(S::LANES));
    let (mut cos, mut sin) = (cos.chunks_exact(S::LANES), sin.chunks_exact(S::LANES));
    for (((first, second), cos), sin) in (&mut first).zip(&mut second).zip(&mut cos).zip(&mut sin) {
        let (a, b, cos, sin) = (s.load(first), s.load(second), s.load(cos), s.load(sin));
        s.store(first, s.sub(s.mul(a, cos), s.mul(b, sin)));
        s.store(second, s.mul_add(b, cos, s.mul(a, sin)));
    }
    let rest = first.into_remainder().iter_mut().zip(second.into_remainder());
    for (((first, second), cos), sin) in rest.zip(cos.remainder()).zip(sin.remainder()) {
        let (a, b) = (*first, *second);
        *first = a * cos - b * sin;
        *second = b * cos + a * sin;
    }
}
