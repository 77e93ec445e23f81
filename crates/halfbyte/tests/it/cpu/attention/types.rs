//! Keys and values in types of fewer bytes.

use super::*;
use half::{bf16, f16};

/// What stands for a key or a value, by the rule of its type, in f64.
fn rounded(kv: KvType, vector: &[f32]) -> Vec<f64> {
    match kv {
        KvType::F32 => vector.iter().map(|&v| v.into()).collect(),
        KvType::F16 => vector.iter().map(|&v| f16::from_f32(v).into()).collect(),
        KvType::Bf16 => vector.iter().map(|&v| bf16::from_f32(v).into()).collect(),
        KvType::Int8 => {
            let scale = vector.iter().fold(0f32, |a, v| a.max(v.abs())) / 127.0;
            vector.iter().map(|v| f64::from((v / scale).round_ties_even()) * f64::from(scale)).collect()
        }
    }
}

/// Rows whose keys and values are rounded.
fn rounded_rows(kv: KvType, qkv: &[f32], heads: Heads) -> Vec<f64> {
    let of_row = |row: &[f32]| {
        let (queries, others) = row.split_at(heads.heads * heads.head_size);
        let others = others.chunks(heads.head_size).flat_map(|vector| rounded(kv, vector));
        queries.iter().map(|&q| q.into()).chain(others).collect::<Vec<f64>>()
    };
    qkv.chunks(heads.row()).flat_map(of_row).collect()
}

/// By how much rounding may move each output, as the docs of [`attention`] say.
fn moved(kv: KvType, qkv: &[f32], heads: Heads) -> Vec<f64> {
    let u = [0.0, 2f64.powi(-11), 2f64.powi(-8), 1.0 / 254.0][KvType::ALL.iter().position(|&k| k == kv).unwrap()];
    let greatest = |vector: &[f32]| vector.iter().fold(0f64, |a, &v| a.max(f64::from(v).abs()));
    let (mut out, scale) = (Vec::new(), f64::from(scale(heads)));
    for position in 0..qkv.len() / heads.row() {
        for query_head in 0..heads.heads {
            let (kv_head, q) = (query_head / heads.group(), head(qkv, heads, position, query_head));
            let score = |p: usize| {
                let k = head(qkv, heads, p, heads.heads + kv_head);
                let of = |&k: &f32| {
                    if kv == KvType::Int8 {
                        greatest(head(qkv, heads, p, heads.heads + kv_head))
                    } else {
                        f64::from(k.abs()).max(2f64.powi(-14))
                    }
                };
                u * scale * q.iter().zip(k).map(|(&q, k)| f64::from(q.abs()) * of(k)).sum::<f64>()
            };
            let s = (0..=position).map(score).fold(0.0, f64::max);
            let value = |p: usize| greatest(head(qkv, heads, p, heads.heads + heads.kv_heads + kv_head));
            let most = (0..=position).map(value).fold(2f64.powi(-14), f64::max);
            out.extend(std::iter::repeat_n((2.0 * s).exp_m1() * most + u * most, heads.head_size));
        }
    }
    out
}

#[test]
fn outputs_are_within_the_bound_of_rounded_keys_and_values() {
    let mut state = 17u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for case in 0..24 {
        let (kv_heads, head_size) = (1 + below(3), [64, 128, 16, 1 + below(40), 2 + below(90)][below(5)]);
        let heads = Heads { heads: kv_heads * (1 + below(7)), kv_heads, head_size };
        let chunks = [1 + below(150), 1, below(40), 1, 1 + below(4)];
        let positions: usize = chunks.iter().sum();
        let slopes: Vec<f32> = (0..heads.heads).map(|h| 0.5f32.powf(h as f32 + 0.7)).collect();
        let sinks: Vec<f32> = (0..heads.heads).map(|h| [-3.0, 0.3, 40.0][h % 3]).collect();
        let sight = Sight {
            window: (below(2) == 0).then(|| 1 + below(positions)),
            alibi: (below(3) == 0).then_some(&slopes),
            cap: (below(3) == 0).then_some(1.5),
            sinks: (below(3) == 0).then_some(&sinks),
        };
        let factor = [0.5, 1.0, 3.0][below(3)];
        let qkv: Vec<f32> = noise(case, positions * heads.row()).iter().map(|x| x * factor).collect();
        let unrounded = reference(&qkv, heads, sight);
        for kv in KvType::ALL {
            let expected = reference(&rounded_rows(kv, &qkv, heads), heads, sight);
            let say = format!("case {case}, {kv}, {heads:?}, {sight:?}, chunks {chunks:?}");
            for ((&(a, _), (b, _)), moved) in expected.iter().zip(&unrounded).zip(moved(kv, &qkv, heads)) {
                assert!(
                    (a - b).abs() <= moved * (1.0 + 1e-6) + 1e-12,
                    "{say}: {a}, of unrounded {b}, may move {moved:e}"
                );
            }
            on_every_cpu(
                |cpu| attend_in(kv, cpu, &qkv, heads, sight, &chunks),
                |isa, got| {
                    assert_eq!(got.len(), expected.len());
                    for (i, (&got, &(expected, bound))) in got.iter().zip(&expected).enumerate() {
                        let error = (f64::from(got) - expected).abs();
                        assert!(error <= bound, "{isa:?}, {say}, element {i}: {got}, expected {expected} ± {bound:e}");
                    }
                },
            );
        }
    }
}

#[test]
fn what_a_type_cannot_hold_is_not_finite_for_those_who_see_it() {
    let heads = Heads { heads: 4, kv_heads: 2, head_size: 20 };
    for (kv, value) in [(KvType::F16, 1e5), (KvType::Int8, f32::INFINITY), (KvType::Int8, f32::NEG_INFINITY)] {
        for part in [heads.heads + 1, heads.heads + heads.kv_heads + 1] {
            let mut qkv = vec![0.5; 200 * heads.row()];
            qkv[140 * heads.row() + part * heads.head_size + 3] = value;
            on_every_cpu(
                |cpu| attend_in(kv, cpu, &qkv, heads, ALL, &[150, 1, 49]),
                |isa, got| {
                    for (i, head) in got.chunks(heads.head_size).enumerate() {
                        let sees = i / heads.heads >= 140 && i % heads.heads >= 2;
                        assert_eq!(head.iter().any(|x| !x.is_finite()), sees, "{isa:?}, {kv} of {value}, head {i}");
                    }
                },
            );
        }
    }
}

#[test]
fn names_of_types_parse_and_print() {
    for kv in KvType::ALL {
        assert_eq!(kv.to_string().parse::<KvType>().unwrap(), kv);
    }
    let refused = "fp8".parse::<KvType>().unwrap_err().to_string();
    assert_eq!(refused, "kv cache: expected f32, f16, bf16 or int8, got fp8");
    assert_eq!(KvType::ALL.map(|kv| kv.bytes(64)), [256, 128, 128, 68]);
}
