//! Attention over cached keys and values against sums in f64.

mod pages;
mod types;

use super::{noise, on_every_cpu};
use halfbyte::cpu::attention::{Attention, Heads, KvCache, KvType, PAGE_LENGTH, Sequence, attention};
use halfbyte::kernel::CAPS;
use halfbyte::{Cpu, Error, Result};
use std::ops::Range;

/// What a query sees, and how far away.
#[derive(Clone, Copy, Debug)]
struct Sight<'a> {
    window: Option<usize>,
    alibi: Option<&'a [f32]>,
    cap: Option<f32>,
    sinks: Option<&'a [f32]>,
}

const ALL: Sight<'static> = Sight { window: None, alibi: None, cap: None, sinks: None };

/// Attends to all of `qkv`, which comes in chunks of the given numbers of rows.
fn attend(cpu: &Cpu, qkv: &[f32], heads: Heads, sight: Sight<'_>, chunks: &[usize]) -> Vec<f32> {
    attend_in(KvType::F32, cpu, qkv, heads, sight, chunks)
}

/// The same with keys and values of any type.
fn attend_in(kv: KvType, cpu: &Cpu, qkv: &[f32], heads: Heads, sight: Sight<'_>, chunks: &[usize]) -> Vec<f32> {
    let mut cache = KvCache::new(2, heads, chunks.iter().sum(), kv).unwrap();
    let (sequence, Sight { window, alibi, cap, sinks }) = (cache.begin(), sight);
    let (row, out_row) = (heads.row(), heads.heads * heads.head_size);
    let mut out = vec![7.0; qkv.len() / row * out_row];
    let mut first = 0;
    for &m in chunks {
        let qkv = &qkv[first * row..(first + m) * row];
        cache.append(cpu, sequence, 1, first, qkv).unwrap();
        let (first_position, scale) = (first, scale(heads));
        let what = Attention { qkv, heads, first_position, scale, window, alibi, cap, sinks };
        attention(cpu, &what, &cache, sequence, 1, &mut out[first * out_row..(first + m) * out_row]).unwrap();
        first += m;
    }
    out
}

fn scale(heads: Heads) -> f32 {
    1.0 / (heads.head_size as f32).sqrt()
}

/// The elements of a head in row `position`; heads are counted through queries, keys, values.
fn head<T>(qkv: &[T], heads: Heads, position: usize, head: usize) -> &[T] {
    &qkv[position * heads.row() + head * heads.head_size..][..heads.head_size]
}

/// The outputs in f64, and the bound of each one's error.
fn reference<T: Copy + Into<f64>>(qkv: &[T], heads: Heads, sight: Sight<'_>) -> Vec<(f64, f64)> {
    let (mut out, Sight { window, alibi, cap, sinks }) = (Vec::new(), sight);
    for position in 0..qkv.len() / heads.row() {
        for query_head in 0..heads.heads {
            let kv_head = query_head / heads.group();
            let seen: Range<usize> = window.map_or(0, |w| (position + 1).saturating_sub(w))..position + 1;
            let q = head(qkv, heads, position, query_head);
            let (mut scores, mut most) = (Vec::new(), 0f64);
            let slope = alibi.map_or(0.0, |slopes| f64::from(slopes[query_head]));
            for p in seen.clone() {
                let bias = -slope * (position - p) as f64;
                let k = head(qkv, heads, p, heads.heads + kv_head);
                let products = q.iter().zip(k).map(|(&q, &k)| f64::from(scale(heads)) * q.into() * k.into());
                let score = products.clone().sum::<f64>();
                let score = cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
                scores.push(score + bias);
                most = most.max(products.map(f64::abs).sum::<f64>() + bias.abs());
            }
            let sink = sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[query_head]));
            let max = scores.iter().copied().fold(sink, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum::<f64>() + (sink - max).exp();
            let values = || seen.clone().map(|p| head(qkv, heads, p, heads.heads + heads.kv_heads + kv_head));
            let greatest = values().flatten().fold(0f64, |a, &v| a.max(v.into().abs()));
            let size = heads.head_size as f64;
            let of_cap = if cap.is_some() { 64.0 * most } else { 0.0 };
            let bound = (seen.len() as f64 + size + 64.0 + 4.0 * most * size + of_cap) / 16_777_216.0 * greatest;
            for d in 0..heads.head_size {
                let sum: f64 = values().zip(&weights).map(|(v, w)| v[d].into() * w).sum();
                out.push((sum / total, bound));
            }
        }
    }
    out
}

#[test]
fn outputs_are_within_the_bound() {
    let shapes =
        [(1, 1, 1), (2, 1, 5), (6, 2, 64), (3, 3, 16), (4, 2, 96), (2, 2, 24), (16, 1, 17), (5, 1, 48), (8, 1, 32)];
    let chunkings: [&[usize]; 6] =
        [&[1], &[3], &[0, 17, 1, 1], &[130, 1, 15, 1, 2, 3, 4, 5], &[300, 1, 1], &[13, 1, 500, 2, 1]];
    for (heads, kv_heads, head_size) in shapes {
        let heads = Heads { heads, kv_heads, head_size };
        for (i, chunks) in chunkings.into_iter().enumerate() {
            for window in [None, Some(1), Some(7), Some(100), Some(290)] {
                let positions: usize = chunks.iter().sum();
                let long = positions > 200;
                if window.is_some_and(|w| w > positions || (long && w == 7))
                    || (long && head_size > 17 && heads.heads != 6)
                {
                    continue;
                }
                // Small and large scores.
                let factor = [1.0, 3.0][i % 2];
                let qkv: Vec<f32> = noise(i as u32, positions * heads.row()).iter().map(|x| x * factor).collect();
                // Every other with ALiBi.
                let slopes: Vec<f32> = (0..heads.heads).map(|h| 0.5f32.powf(h as f32 + 0.7)).collect();
                // Some with a cap that scores reach, some with sinks below and far above all scores.
                let sinks: Vec<f32> = (0..heads.heads).map(|h| [-3.0, 0.3, 40.0][h % 3]).collect();
                let sight = Sight {
                    window,
                    alibi: (i % 2 == 1).then_some(&slopes),
                    cap: (i % 3 == 1).then_some(1.5),
                    sinks: (i >= 3).then_some(&sinks),
                };
                let expected = reference(&qkv, heads, sight);
                on_every_cpu(
                    |cpu| attend(cpu, &qkv, heads, sight, chunks),
                    |isa, got| {
                        assert_eq!(got.len(), expected.len());
                        for (i, (&got, &(expected, bound))) in got.iter().zip(&expected).enumerate() {
                            let error = (f64::from(got) - expected).abs();
                            assert!(
                                error <= bound,
                                "{isa:?}, {heads:?}, {sight:?}, chunks {chunks:?}, element {i}: {got}, expected \
                                 {expected}, off by {error:e} > {bound:e}"
                            );
                        }
                    },
                );
            }
        }
    }
}

#[test]
fn long_prompts_use_all_threads_and_stay_within_the_bound() {
    let heads = Heads { heads: 4, kv_heads: 2, head_size: 16 };
    let qkv = noise(3, 1100 * heads.row());
    let expected = reference(&qkv, heads, ALL);
    on_every_cpu(
        |cpu| attend(cpu, &qkv, heads, ALL, &[700, 1, 398, 1]),
        |isa, got| {
            for (i, (&got, &(expected, bound))) in got.iter().zip(&expected).enumerate() {
                assert!((f64::from(got) - expected).abs() <= bound, "{isa:?}, element {i}: {got}, expected {expected}");
            }
        },
    );
}

#[test]
fn caps_may_be_the_least_and_the_greatest_of_their_range() {
    let heads = Heads { heads: 2, kv_heads: 1, head_size: 16 };
    let qkv = noise(5, 150 * heads.row());
    for cap in [*CAPS.start(), 1e-30, 1e30, *CAPS.end()] {
        let sight = Sight { cap: Some(cap), ..ALL };
        let expected = reference(&qkv, heads, sight);
        on_every_cpu(
            |cpu| attend(cpu, &qkv, heads, sight, &[140, 1, 9]),
            |isa, got| {
                for (&got, &(expected, bound)) in got.iter().zip(&expected) {
                    let close = (f64::from(got) - expected).abs() <= bound;
                    assert!(close, "{isa:?}, cap {cap:e}: {got}, expected {expected}");
                }
            },
        );
    }
}

#[test]
fn great_scores_do_not_overflow() {
    let heads = Heads { heads: 1, kv_heads: 1, head_size: 16 };
    let mut qkv = noise(4, 40 * heads.row());
    for row in qkv.chunks_mut(heads.row()) {
        row[..32].iter_mut().for_each(|x| *x *= 1e4);
    }
    on_every_cpu(
        |cpu| attend(cpu, &qkv, heads, ALL, &[30, 10]),
        |isa, got| assert!(got.iter().all(|x| x.abs() <= 1.001), "{isa:?}"),
    );
}

/// Which (position, head) have NaN in their output.
fn with_nan(out: &[f32], heads: Heads) -> Vec<(usize, usize)> {
    let row = heads.heads * heads.head_size;
    let heads_of = |(i, row): (usize, &[f32])| {
        let nan = row.chunks(heads.head_size).map(|head| head.iter().any(|x| x.is_nan())).collect::<Vec<_>>();
        nan.into_iter().enumerate().filter(|(_, nan)| *nan).map(move |(h, _)| (i, h)).collect::<Vec<_>>()
    };
    out.chunks(row).enumerate().flat_map(heads_of).collect()
}

#[test]
fn nan_reaches_those_that_see_it_and_nobody_else() {
    let heads = Heads { heads: 4, kv_heads: 2, head_size: 20 };
    let clean = noise(5, 300 * heads.row());
    for (nan_position, chunks, window) in
        [(7, [20, 0, 0], None), (140, [150, 1, 1], None), (18, [40, 1, 60], Some(30)), (290, [289, 1, 10], None)]
    {
        let positions: usize = chunks.iter().sum();
        // In a key, a value, a query of head group 1.
        for part in [heads.heads + 1, heads.heads + heads.kv_heads + 1, 2] {
            let mut qkv = clean[..positions * heads.row()].to_vec();
            qkv[nan_position * heads.row() + part * heads.head_size + 3] = f32::NAN;
            let until = if part == 2 { nan_position } else { positions - 1 };
            let until = until.min(nan_position + window.unwrap_or(positions) - 1);
            let touched: &[usize] = if part == 2 { &[2] } else { &[2, 3] };
            let expected: Vec<_> = (nan_position..=until).flat_map(|p| touched.iter().map(move |&h| (p, h))).collect();
            for kv in KvType::ALL {
                on_every_cpu(
                    |cpu| attend_in(kv, cpu, &qkv, heads, Sight { window, ..ALL }, &chunks),
                    |isa, got| assert_eq!(with_nan(got, heads), expected, "{isa:?}, {kv}, part {part}, {chunks:?}"),
                );
            }
        }
    }
}

#[test]
fn infinite_scores_give_nan() {
    let heads = Heads { heads: 2, kv_heads: 1, head_size: 16 };
    for (infinity, expected) in [(f32::INFINITY, true), (f32::NEG_INFINITY, false)] {
        let mut qkv = vec![0.5; 20 * heads.row()];
        qkv[9 * heads.row() + 2 * heads.head_size] = infinity;
        on_every_cpu(
            |cpu| attend(cpu, &qkv, heads, ALL, &[20]),
            |isa, got| {
                assert!(got[..9 * 32].iter().all(|x| x.is_finite()), "{isa:?}");
                assert!(got[9 * 32..].iter().all(|x| x.is_nan() == expected), "{isa:?}, {infinity}");
            },
        );
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let heads = Heads { heads: 2, kv_heads: 1, head_size: 4 };
    let mut cache = KvCache::new(2, heads, 10, KvType::F32).unwrap();
    let (mut other, qkv) = (KvCache::new(2, heads, 10, KvType::F32).unwrap(), [0.0; 32]);
    let (sequence, ended, foreign) = (cache.begin(), cache.begin(), other.begin());
    cache.end(ended).unwrap();
    cache.append(&cpu, sequence, 0, 0, &qkv).unwrap();
    other.append(&cpu, foreign, 0, 0, &qkv).unwrap();
    let fine = Attention {
        qkv: &qkv,
        heads,
        first_position: 0,
        scale: 0.5,
        window: None,
        alibi: None,
        cap: None,
        sinks: None,
    };
    let run =
        |what: Attention<'_>, layer, out: usize| attention(&cpu, &what, &cache, sequence, layer, &mut [0.0; 32][..out]);
    run(fine, 0, 16).unwrap();
    run(Attention { qkv: &[], ..fine }, 0, 0).unwrap();
    let mut results = vec![
        run(fine, 1, 16),
        run(fine, 2, 16),
        run(fine, 0, 15),
        run(Attention { qkv: &qkv[..31], ..fine }, 0, 16),
        run(Attention { first_position: 1, ..fine }, 0, 16),
        run(Attention { first_position: usize::MAX, ..fine }, 0, 16),
        run(Attention { window: Some(0), ..fine }, 0, 16),
        run(Attention { alibi: Some(&[0.5]), ..fine }, 0, 16),
        run(Attention { sinks: Some(&[0.5]), ..fine }, 0, 16),
        run(Attention { sinks: Some(&[0.5, f32::NAN]), ..fine }, 0, 16),
        run(Attention { cap: Some(0.0), ..fine }, 0, 16),
        run(Attention { cap: Some(f32::INFINITY), ..fine }, 0, 16),
        run(Attention { cap: Some(f32::MAX), ..fine }, 0, 16),
        run(Attention { cap: Some(1e-39), ..fine }, 0, 16),
        run(Attention { heads: Heads { head_size: 2, ..heads }, ..fine }, 0, 16),
        run(Attention { heads: Heads { heads: 3, kv_heads: 2, head_size: 4 }, ..fine }, 0, 16),
        run(Attention { heads: Heads { head_size: usize::MAX / 3, ..heads }, ..fine }, 0, 16),
        attention(&cpu, &fine, &cache, ended, 0, &mut [0.0; 16]),
        attention(&cpu, &fine, &cache, foreign, 0, &mut [0.0; 16]),
    ];
    results.extend([
        cache.append(&cpu, sequence, 0, 3, &qkv),
        cache.append(&cpu, sequence, 2, 0, &qkv),
        cache.append(&cpu, sequence, 0, 2, &qkv[..17]),
        cache.append(&cpu, sequence, 0, 2, &[0.0; 127 * 16]),
        cache.append(&cpu, ended, 0, 0, &qkv),
        cache.append(&cpu, foreign, 0, 2, &qkv),
        cache.truncate(ended, 0),
        cache.truncate(foreign, 0),
        cache.end(ended),
        cache.end(foreign),
        KvCache::new(1, Heads { head_size: usize::MAX / 1024, ..heads }, 10, KvType::F32).map(|_| ()),
        KvCache::new(usize::MAX, heads, 10, KvType::F32).map(|_| ()),
        KvCache::new(1 << 50, Heads { heads: 1, kv_heads: 1, head_size: 1 }, 10, KvType::F32).map(|_| ()),
    ]);
    for (i, result) in results.into_iter().enumerate() {
        let text = result.expect_err(&format!("case {i}")).to_string();
        assert!(text.contains(": expected ") && text.contains(", got "), "{text}");
    }
    // Nothing of what was refused is there: the first layer takes position 2 next, the second 0.
    cache.append(&cpu, sequence, 0, 2, &qkv[..16]).unwrap();
    cache.append(&cpu, sequence, 1, 0, &qkv).unwrap();
    assert_eq!((cache.len(ended), cache.len(foreign)), (0, 0));
}
