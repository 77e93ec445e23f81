//! The scores of a page on their way to weights: capped, with ALiBi, masked, then powers of two.

use super::cache::PAGE_LENGTH;
use crate::cpu::lanes::Simd;
use crate::cpu::nn::{exp2, tanh};
use std::ops::Range;

/// Replaces the scores in vectors that hold a position in `seen` by `cap · tanh(score / cap)`.
#[inline(always)]
pub(super) fn cap_scores<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>, cap: f32) {
    let (factor, cap) = (s.splat(1.0 / cap), s.splat(cap));
    let whole = seen.start / S::LANES * S::LANES..seen.end.next_multiple_of(S::LANES);
    for part in scores[whole].chunks_exact_mut(S::LANES) {
        let capped = s.mul(cap, tanh(s, s.mul(s.load(part), factor)));
        s.store(part, capped);
    }
}

/// Adds `slope · (key's position − query's)` to the scores in vectors that hold a position in `seen`, of page `index`.
#[inline(always)]
pub(super) fn add_alibi<S: Simd>(
    s: S,
    scores: &mut [f32],
    seen: &Range<usize>,
    index: usize,
    (slope, query): (f32, usize),
) {
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
pub(super) fn mask_and_find_greatest<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>) -> f32 {
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
pub(super) fn scores_to_weights<S: Simd>(s: S, scores: &mut [f32], seen: &Range<usize>, max: f32) -> S::V {
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
