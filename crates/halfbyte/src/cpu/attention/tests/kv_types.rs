//! Keys and values in fewer bytes.

use super::*;
use half::{bf16, f16};

/// A vector as a cache of this type keeps it.
fn rounded(vector: &mut [f32], kv: KvType) {
    match kv {
        KvType::F32 => {}
        KvType::F16 => vector.iter_mut().for_each(|x| *x = f16::from_f32(*x).to_f32()),
        KvType::Bf16 => vector.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32()),
        KvType::Int8 => {
            let greatest = vector.iter().fold(0f32, |m, x| m.max(x.abs()));
            let (scale, factor) = match greatest < 2f32.powi(-100) {
                true => (0.0, 0.0),
                false => (greatest / 127.0, 127.0 / greatest),
            };
            for x in vector {
                let near = (*x * factor).round_ties_even() * scale;
                assert!((near - *x).abs() <= 0.500_01 * scale + 2f32.powi(-100), "{x} as {near}, {scale} apart");
                *x = near;
            }
        }
    }
}

/// Rows whose keys and values are as a cache of this type keeps them.
fn rounded_rows(qkv: &[f32], heads: Heads, kv: KvType) -> Vec<f32> {
    let mut rows = qkv.to_vec();
    for row in rows.chunks_exact_mut(heads.row()) {
        let vectors = row.chunks_exact_mut(heads.head_size).skip(heads.heads);
        vectors.for_each(|vector| rounded(vector, kv));
    }
    rows
}

#[test]
fn outputs_are_within_the_bound_over_rounded_keys_and_values() {
    let mut state = 77u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for case in 0..40 {
        let kv = KvType::ALL[case % 4];
        let (kv_heads, group, head_size) =
            (1 + below(3), [1, 2, 3, 4, 8][below(5)], [1, 5, 12, 16, 24, 33, 64, 96][below(8)]);
        let heads = Heads { heads: kv_heads * group, kv_heads, head_size };
        let chunks: Vec<usize> = (0..1 + below(5)).map(|_| [0, 1, 1, 2, 13, 16, 40, 129, 200][below(9)]).collect();
        let positions: usize = chunks.iter().sum();
        let mut qkv = noise(case as u32, positions * heads.row());
        // Vectors of different magnitudes, some of zeros, some whose range counts as none.
        for vector in qkv.chunks_exact_mut(head_size) {
            let factor = [1.0, 0.01, 3.0, 0.7, 0.0, 1e-33][below(6)];
            vector.iter_mut().for_each(|x| *x *= factor);
        }
        let slopes: Vec<f32> = (0..heads.heads).map(|h| 0.5f32.powf(h as f32 + 0.7)).collect();
        let window = [None, Some(1 + below(150))][below(2)];
        let sight = Sight { window, alibi: [None, Some(slopes.as_slice())][below(2)], ..ALL };
        let expected = reference(&rounded_rows(&qkv, heads, kv), heads, sight);
        on_every_cpu(
            |cpu| attend_with(cpu, &qkv, heads, sight, &chunks, kv),
            |isa, got| {
                assert_eq!(got.len(), expected.len());
                for (i, (&got, &(expected, bound))) in got.iter().zip(&expected).enumerate() {
                    let error = (f64::from(got) - expected).abs();
                    assert!(
                        error <= bound,
                        "{isa:?}, {kv}, {heads:?}, {sight:?}, chunks {chunks:?}, element {i}: {got}, expected {expected}, \
                         off by {error:e} > {bound:e}"
                    );
                }
            },
        );
    }
}

#[test]
fn nan_reaches_those_that_see_it_in_every_type() {
    let heads = Heads { heads: 4, kv_heads: 2, head_size: 20 };
    let clean = noise(5, 160 * heads.row());
    for kv in KvType::ALL {
        for (at, chunks, window) in [(7, [20, 0, 0], None), (140, [150, 1, 1], None), (18, [40, 1, 60], Some(30))] {
            let positions: usize = chunks.iter().sum();
            for part in [heads.heads + 1, heads.heads + heads.kv_heads + 1] {
                // Infinities have no code; as floats they may give a weight of 0.
                let bad: &[f32] =
                    if kv == KvType::Int8 { &[f32::NAN, f32::INFINITY, f32::NEG_INFINITY] } else { &[f32::NAN] };
                for &bad in bad {
                    let mut qkv = clean[..positions * heads.row()].to_vec();
                    qkv[at * heads.row() + part * heads.head_size + 3] = bad;
                    let until = (positions - 1).min(at + window.unwrap_or(positions) - 1);
                    let expected: Vec<_> = (at..=until).flat_map(|p| [2, 3].map(|h| (p, h))).collect();
                    on_every_cpu(
                        |cpu| attend_with(cpu, &qkv, heads, Sight { window, ..ALL }, &chunks, kv),
                        |isa, got| assert_eq!(with_nan(got, heads), expected, "{isa:?}, {kv}, part {part}, {bad}"),
                    );
                }
            }
        }
    }
}

#[test]
fn a_cache_takes_the_bytes_that_it_says() {
    let (cpu, heads) = (Cpu::new(1).unwrap(), Heads { heads: 2, kv_heads: 2, head_size: 24 });
    for (kv, of_position) in KvType::ALL.into_iter().zip([1344, 672, 672, 384]) {
        assert_eq!(KvCache::bytes_per_position(3, heads, kv), Some(of_position), "{kv}");
        let mut cache = KvCache::new(3, heads, 500, kv).unwrap();
        let sequence = cache.begin();
        cache.append(&cpu, sequence, 0, 0, &noise(1, 129 * heads.row())).unwrap();
        assert_eq!((cache.kv(), cache.bytes()), (kv, 2 * PAGE_LENGTH * of_position));
        assert!(KvCache::new(usize::MAX / 2, heads, 10, kv).is_err());
    }
}
