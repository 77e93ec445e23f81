//! The scores of a page on their way to weights: capped, with ALiBi, masked, then powers of two.

use super::PAGE_LENGTH;
use super::tile::{Tile, WEIGHTS_ROW};
use crate::cpu::lanes::{Kernel, Simd};
use crate::cpu::nn::{exp2, tanh};
use std::ops::Range;

/// What is known of up to 16 rows after some pages.
pub(super) struct SoFar {
    /// The greatest score.
    pub(super) max: [f32; 16],
    /// Σ 2^(score − greatest), in parts.
    pub(super) sum: [[f32; 16]; 16],
    /// What the last page made of what was summed before.
    pub(super) rescale: [f32; 16],
}

/// Turns the scores of a page into weights: the same for keys and values of every type.
pub(super) struct Weigh<'a> {
    pub(super) tile: &'a Tile<'a>,
    /// The page.
    pub(super) index: usize,
    /// Positions that each row sees in the page; rows beyond the tile's are like its last.
    pub(super) seen: &'a [Range<usize>],
    /// `[rows][WEIGHTS_ROW]`.
    pub(super) weights: &'a mut [f32],
    /// Scales of the page's values, where they are codes.
    pub(super) scales: Option<&'a [f32]>,
    pub(super) so_far: &'a mut SoFar,
}

impl Kernel for Weigh<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { tile, index, seen, weights, scales, so_far } = self;
        let before = so_far.max;
        for (row, seen) in seen.iter().enumerate() {
            let weights = &mut weights[row * WEIGHTS_ROW..][..PAGE_LENGTH];
            if let Some(cap) = tile.what.cap {
                cap_scores(s, weights, seen, cap * std::f32::consts::LOG2_E);
            }
            if tile.what.alibi.is_some() {
                add_alibi(s, weights, seen, index, tile.alibi(row.min(tile.rows - 1)));
            }
            let greatest = mask_and_find_greatest(s, weights, seen);
            so_far.max[row] = if greatest > so_far.max[row] { greatest } else { so_far.max[row] };
        }
        so_far.rescale = exp2_of_difference(s, &before, &so_far.max);
        for (row, seen) in seen.iter().enumerate() {
            let weights = &mut weights[row * WEIGHTS_ROW..][..PAGE_LENGTH];
            let sum = scores_to_weights(s, weights, seen, so_far.max[row]);
            let all = &mut so_far.sum[row];
            let new = s.mul_add(s.load(all), s.splat(so_far.rescale[row]), sum);
            s.store(all, new);
            if let Some(scales) = scales {
                scale_weights(s, weights, seen, scales);
            }
        }
    }
}

#[inline(always)]
fn exp2_of_difference<S: Simd>(s: S, a: &[f32; 16], b: &[f32; 16]) -> [f32; 16] {
    let mut result = [0.0; 16];
    for ((result, a), b) in
        result.chunks_exact_mut(S::LANES).zip(a.chunks_exact(S::LANES)).zip(b.chunks_exact(S::LANES))
    {
        s.store(result, exp2(s, s.sub(s.load(a), s.load(b))));
    }
    result
}

/// Replaces the scores in vectors that hold a position in `seen` by `cap · tanh(score / cap)`.
#[inline(always)]
fn cap_scores<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>, cap: f32) {
    let (factor, cap) = (s.splat(1.0 / cap), s.splat(cap));
    let whole = seen.start / S::LANES * S::LANES..seen.end.next_multiple_of(S::LANES);
    for part in scores[whole].chunks_exact_mut(S::LANES) {
        let capped = s.mul(cap, tanh(s, s.mul(s.load(part), factor)));
        s.store(part, capped);
    }
}

/// Adds `slope · (key's position − query's)` to the scores in vectors that hold a position in `seen`, of page `index`.
#[inline(always)]
fn add_alibi<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>, index: usize, (slope, query): (f32, usize)) {
    const LANES: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];
    if seen.is_empty() {
        return;
    }
    let (lanes, slope) = (s.load(&LANES), s.splat(slope));
    let first = seen.start / S::LANES * S::LANES;
    for (i, part) in scores[first..seen.end.next_multiple_of(S::LANES)].chunks_exact_mut(S::LANES).enumerate() {
        let distance = (index * PAGE_LENGTH + first + i * S::LANES) as i64 - query as i64;
        let distance = s.add(lanes, s.splat(distance as f32));
        let score = s.mul_add(distance, slope, s.load(part));
        s.store(part, score);
    }
}

/// Sets the scores of unseen positions, in vectors that hold a seen one, to −∞. Returns the greatest score that is no
/// NaN.
#[inline(always)]
fn mask_and_find_greatest<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>) -> f32 {
    if seen.is_empty() {
        return f32::MIN;
    }
    let whole = seen.start / S::LANES * S::LANES..seen.end.next_multiple_of(S::LANES);
    scores[whole.start..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..whole.end].fill(f32::NEG_INFINITY);
    let mut best = [s.splat(f32::MIN); 2];
    for (i, part) in scores[whole].chunks_exact(S::LANES).enumerate() {
        best[i % 2] = s.max(s.load(part), best[i % 2]);
    }
    s.greatest(s.max(best[0], best[1]))
}

/// Turns the scores of positions `seen` into weights; returns their sum, in parts.
#[inline(always)]
fn scores_to_weights<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>, max: f32) -> S::V {
    let mut sum = s.splat(0.0);
    if seen.is_empty() {
        return sum;
    }
    let max = s.splat(max);
    let whole = seen.start / S::LANES * S::LANES..seen.end.next_multiple_of(S::LANES);
    for part in scores[whole].chunks_exact_mut(S::LANES) {
        let weight = exp2(s, s.sub(s.load(part), max));
        sum = s.add(sum, weight);
        s.store(part, weight);
    }
    sum
}

/// Multiplies weights of positions `seen` by the scales of their values.
#[inline(always)]
fn scale_weights<S: Simd>(s: S, weights: &mut [f32], seen: &Range<usize>, scales: &[f32]) {
    if seen.is_empty() {
        return;
    }
    let whole = seen.start / S::LANES * S::LANES..seen.end.next_multiple_of(S::LANES);
    for (part, scales) in weights[whole.clone()].chunks_exact_mut(S::LANES).zip(scales[whole].chunks_exact(S::LANES)) {
        s.store(part, s.mul(s.load(part), s.load(scales)));
    }
}

/// What a row's sums of weighted values are multiplied by: one over its sum of weights, in which the weight of a sink counts too.
#[inline(always)]
pub(super) fn share<S: Simd>(s: S, max: f32, sum: f32, sink: Option<f32>) -> f32 {
    let two_to = |x: f32| s.to_array(exp2(s, s.splat(x)))[0];
    match sink {
        None => 1.0 / sum,
        Some(sink) if sink > max => {
            let weights = two_to(max - sink);
            weights / (sum * weights + 1.0)
        }
        Some(sink) => 1.0 / (sum + two_to(sink - max)),
    }
}
