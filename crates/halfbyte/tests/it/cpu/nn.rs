//! Norms, activations, rotations, routes and what reads logits, against sums in f64.

mod activation;
mod norm;
mod route;

use super::{noise, on_every_cpu};
use halfbyte::cpu::attention::Heads;
use halfbyte::cpu::isa::Isa;
use halfbyte::cpu::nn::*;
use halfbyte::{Cpu, Error, Result};

const U: f64 = 1.0 / 16_777_216.0;
const ROWS: [usize; 4] = [0, 1, 3, 17];
const SIZES: [usize; 8] = [1, 5, 16, 31, 64, 96, 384, 1000];
/// Rows enough that all threads get some.
const MANY: usize = 900;

fn sizes() -> impl Iterator<Item = (usize, usize)> {
    ROWS.into_iter().flat_map(|m| SIZES.map(|d| (m, d))).chain([(MANY, 96), (MANY, 131)])
}

#[track_caller]
fn assert_close(isa: Isa, got: &[f32], expected: &[f64], bound: impl Fn(usize) -> f64) {
    assert_eq!(got.len(), expected.len());
    for (i, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        assert!(
            error <= bound(i),
            "{isa:?}, element {i}: {got}, expected {expected}, off by {error:e} > {:e}",
            bound(i)
        );
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn softmax_is_within_its_bound() {
    for (m, d) in sizes() {
        let x: Vec<f32> = noise(6, m * d).iter().map(|x| x * 30.0).collect();
        let mut bounds = Vec::new();
        let expected: Vec<f64> = x
            .chunks(d)
            .flat_map(|row| {
                let max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
                let sum: f64 = row.iter().map(|&x| (f64::from(x) - max).exp()).sum();
                row.iter().map(move |&x| (max - f64::from(x), (f64::from(x) - max).exp() / sum)).collect::<Vec<_>>()
            })
            .map(|(below, p)| {
                bounds.push(p * (d as f64 / 4.0 + 16.0 + below) * U);
                p
            })
            .collect();
        on_every_cpu(
            |cpu| {
                let mut out = x.clone();
                softmax_in_place(cpu, &mut out, d).unwrap();
                out
            },
            |isa, got| assert_close(isa, got, &expected, |i| bounds[i]),
        );
    }
}

#[test]
fn log_sum_exp_is_within_its_bound() {
    for (m, v) in sizes().filter(|&(m, _)| m > 0) {
        for scale in [1.0, 30.0, 1e4] {
            let x: Vec<f32> = noise(7, m * v).iter().map(|x| x * scale).collect();
            on_every_cpu(
                |cpu| {
                    let mut out = vec![7.0; m];
                    log_sum_exp(cpu, &x, &mut out).unwrap();
                    for (row, got) in x.chunks(v).zip(&out) {
                        let max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
                        let expected = max + row.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
                        let bound = (v as f64 / 8.0 + 16.0 + max.abs()) * f64::EPSILON;
                        assert!((got - expected).abs() <= bound, "{:?}: {got}, expected {expected}", cpu.caps().isa);
                    }
                    out.iter().map(|&x| x as f32).collect()
                },
                |_, _| {},
            );
        }
    }
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let special = [[1.0, -inf, 1.0], [-inf, -inf, -inf], [inf, -inf, 0.0], [nan, inf, 0.0], [0.0, 0.0, nan]].concat();
    on_every_cpu(
        |cpu| {
            let mut out = [7.0; 5];
            log_sum_exp(cpu, &special, &mut out).unwrap();
            assert!((out[0] - (1.0 + 2f64.ln())).abs() < 1e-15);
            out[1..].iter().map(|&x| x as f32).collect()
        },
        |_, got| assert_eq!(format!("{got:?}"), "[-inf, inf, NaN, NaN]"),
    );
}

#[test]
fn kl_divergence_is_within_its_bound() {
    for (m, v) in sizes().filter(|&(m, _)| m > 0) {
        // From nearly equal rows to such that share no likely element.
        for (scale, apart) in [(1.0, 1e-3), (3.0, 1.0), (300.0, 300.0)] {
            let p: Vec<f32> = noise(11, m * v).iter().map(|x| x * scale).collect();
            let q: Vec<f32> = p.iter().zip(noise(12, m * v)).map(|(x, y)| x + y * apart).collect();
            let ln = |row: &[f32]| -> Vec<f64> {
                let max = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
                let sum: f64 = row.iter().map(|&x| (f64::from(x) - max).exp()).sum();
                row.iter().map(|&x| f64::from(x) - max - sum.ln()).collect()
            };
            let norm = |cpu: &Cpu, x: &[f32]| {
                let mut out = vec![7.0; m];
                log_sum_exp(cpu, x, &mut out).unwrap();
                out
            };
            on_every_cpu(
                |cpu| {
                    let (p_norm, q_norm) = (norm(cpu, &p), norm(cpu, &q));
                    let mut out = vec![7.0; m];
                    kl_divergence(cpu, &p, &p_norm, &q, &q_norm, &mut out).unwrap();
                    for ((p, q), &got) in p.chunks(v).zip(q.chunks(v)).zip(&out) {
                        let expected: f64 = ln(p).iter().zip(ln(q)).map(|(p, q)| p.exp() * (p - q)).sum();
                        let most = p.iter().chain(q).fold(0.0f32, |most, x| most.max(x.abs()));
                        let bound = (v as f64 + 64.0) * f64::EPSILON * (1.0 + f64::from(most)).powi(2);
                        assert!((got - expected).abs() <= bound && got >= 0.0, "{got}, expected {expected}");
                    }
                    kl_divergence(cpu, &p, &p_norm, &p, &p_norm, &mut out).unwrap();
                    assert!(out.iter().all(|&x| x == 0.0), "{out:?}");
                    Vec::new()
                },
                |_, _| {},
            );
        }
    }
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let p = [[-inf, 0.0], [-inf, 0.0], [0.0, 0.0], [0.0, 0.0], [nan, 0.0]].concat();
    let q = [[0.0, 0.0], [-inf, 5.0], [-inf, 0.0], [0.0, nan], [0.0, 0.0]].concat();
    on_every_cpu(
        |cpu| {
            let (mut p_norm, mut q_norm, mut out) = ([0.0; 5], [0.0; 5], [7.0; 5]);
            log_sum_exp(cpu, &p, &mut p_norm).unwrap();
            log_sum_exp(cpu, &q, &mut q_norm).unwrap();
            kl_divergence(cpu, &p, &p_norm, &q, &q_norm, &mut out).unwrap();
            out.iter().map(|&x| x as f32).collect()
        },
        |_, got| assert_eq!(format!("{got:?}"), format!("[{:?}, 0.0, inf, NaN, NaN]", std::f32::consts::LN_2)),
    );
}

#[test]
fn argmax_is_the_first_of_equals_and_nan_the_greatest() {
    for (m, v) in sizes().filter(|&(m, _)| m > 0) {
        // Few different values: many equals.
        let x: Vec<f32> = noise(8, m * v).iter().map(|x| (x * 4.0).round()).collect();
        let expected: Vec<f32> =
            x.chunks(v).map(|row| (0..v).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as f32).collect();
        on_every_cpu(
            |cpu| {
                let mut out = vec![usize::MAX; m];
                argmax(cpu, &x, &mut out).unwrap();
                out.iter().map(|&i| i as f32).collect()
            },
            |isa, got| assert_eq!(got, expected, "{isa:?}, {m} rows of {v}"),
        );
    }
    let mut x = vec![f32::NEG_INFINITY; 4 * 40];
    x[40 + 33] = f32::INFINITY;
    x[80 + 7] = f32::INFINITY;
    x[80 + 39] = f32::NAN;
    x[120 + 2] = -f32::NAN;
    x[120 + 3] = f32::NAN;
    on_every_cpu(
        |cpu| {
            let mut out = [usize::MAX; 4];
            argmax(cpu, &x, &mut out).unwrap();
            out.map(|i| i as f32).to_vec()
        },
        |isa, got| assert_eq!(got, [0.0, 33.0, 39.0, 2.0], "{isa:?}"),
    );
}

#[test]
fn rope_rotates_halves_by_position() {
    for (heads, kv_heads, head_size, pairs) in
        [(1, 1, 2, 1), (2, 1, 10, 5), (6, 2, 64, 32), (4, 2, 96, 20), (3, 3, 7, 0)]
    {
        let heads = Heads { heads, kv_heads, head_size };
        let inv_freq: Vec<f64> = (0..pairs).map(|i| 10_000f64.powf(-(i as f64) / pairs as f64)).collect();
        for (m, first) in [(0, 0), (1, 0), (1, 200), (17, 120), (3, 997), (150, 3)] {
            let x = noise(9, m * heads.row());
            let (mut expected, mut norms) = (wide(&x), vec![0.0; x.len()]);
            for (i, row) in expected.chunks_mut(heads.row()).enumerate() {
                for head in 0..heads.heads + heads.kv_heads {
                    for pair in 0..pairs {
                        let (a, b) = (head * head_size + pair, head * head_size + pair + pairs);
                        let (sin, cos) = ((first + i) as f64 * inv_freq[pair]).sin_cos();
                        let norm = row[a].hypot(row[b]) * 1.5;
                        (row[a], row[b]) = (1.5 * (row[a] * cos - row[b] * sin), 1.5 * (row[b] * cos + row[a] * sin));
                        norms[i * heads.row() + a] = norm;
                        norms[i * heads.row() + b] = norm;
                    }
                }
            }
            on_every_cpu(
                |cpu| {
                    let mut out = x.clone();
                    let rope = Rope::new(inv_freq.clone(), 1.5, 1000).unwrap();
                    rope.apply(cpu, &mut out, heads, first).unwrap();
                    out
                },
                |isa, got| assert_close(isa, got, &expected, |i| 3.0 * U * norms[i]),
            );
        }
    }
}

#[test]
fn nan_comes_out() {
    let x: Vec<f32> = (0..3 * 20).map(|i| if i == 37 { f32::NAN } else { 0.5 }).collect();
    on_every_cpu(
        |cpu| {
            let (mut normed, mut added, mut soft) = (vec![0.0; 60], vec![0.0; 60], x.clone());
            rms_norm(cpu, &x, &[1.0; 20], 1e-5, &mut normed).unwrap();
            add_rms_norm(cpu, &mut [1.0; 60], &x, &[1.0; 20], 1e-5, &mut added).unwrap();
            softmax_in_place(cpu, &mut soft, 20).unwrap();
            let (mut layer, mut layer_added) = (vec![0.0; 60], vec![0.0; 60]);
            layer_norm(cpu, &x, &[1.0; 20], Some(&[0.5; 20]), 1e-5, &mut layer).unwrap();
            add_layer_norm(cpu, &mut [1.0; 60], &x, &[1.0; 20], None, 1e-5, &mut layer_added).unwrap();
            [normed, added, soft, layer, layer_added].concat()
        },
        |isa, got| {
            for got in got.chunks(60) {
                for (i, x) in got.iter().enumerate() {
                    assert_eq!(x.is_nan(), (20..40).contains(&i), "{isa:?}, element {i}: {x}");
                }
            }
        },
    );
}

#[test]
fn rows_of_heads_that_are_none_have_a_length() {
    let heads = Heads { heads: usize::MAX, kv_heads: usize::MAX / 2, head_size: 3 };
    assert_eq!((heads.row(), heads.group()), (usize::MAX, 2));
    let none = Heads { heads: 4, kv_heads: 0, head_size: 3 };
    assert_eq!((none.row(), none.group()), (12, 0));
}

#[test]
fn what_does_not_fit_is_refused() {
    let cpu = Cpu::new(1).unwrap();
    let heads = Heads { heads: 2, kv_heads: 1, head_size: 4 };
    let rope = Rope::new(vec![1.0, 0.1], 1.0, 10).unwrap();
    let mut out = [0.0; 12];
    let texts = [
        rms_norm(&cpu, &[0.0; 12], &[0.0; 5], 0.0, &mut out),
        rms_norm(&cpu, &[0.0; 12], &[], 0.0, &mut out),
        rms_norm(&cpu, &[], &[], 0.0, &mut []),
        rms_norm(&cpu, &[0.0; 6], &[0.0; 3], 0.0, &mut out),
        add_rms_norm(&cpu, &mut [0.0; 12], &[0.0; 11], &[0.0; 3], 0.0, &mut out),
        add(&cpu, &mut out, &[0.0; 11]),
        head_rms_norm(&cpu, &mut [0.0; 15], heads, &[0.0; 4], &[0.0; 4], 0.0),
        head_rms_norm(&cpu, &mut [0.0; 16], heads, &[0.0; 3], &[0.0; 4], 0.0),
        head_rms_norm(&cpu, &mut [0.0; 16], heads, &[0.0; 4], &[0.0; 5], 0.0),
        head_rms_norm(&cpu, &mut [0.0; 16], Heads { kv_heads: 0, ..heads }, &[0.0; 4], &[0.0; 4], 0.0),
        layer_norm(&cpu, &[0.0; 12], &[0.0; 5], None, 0.0, &mut [0.0; 12]),
        layer_norm(&cpu, &[0.0; 12], &[0.0; 4], Some(&[0.0; 3]), 0.0, &mut [0.0; 12]),
        layer_norm(&cpu, &[0.0; 12], &[0.0; 4], None, 0.0, &mut [0.0; 8]),
        add_layer_norm(&cpu, &mut [0.0; 12], &[0.0; 11], &[0.0; 4], None, 0.0, &mut [0.0; 12]),
        add_layer_norm(&cpu, &mut [0.0; 12], &[0.0; 12], &[0.0; 4], Some(&[]), 0.0, &mut [0.0; 12]),
        swiglu(&cpu, &[0.0; 23], 4, &mut [0.0; 12]),
        swiglu(&cpu, &[], 0, &mut []),
        geglu(&cpu, &[0.0; 24], 5, &mut [0.0; 12]),
        geglu_tanh(&cpu, &[0.0; 23], 4, &mut [0.0; 12]),
        softmax_in_place(&cpu, &mut out, 5),
        softmax_in_place(&cpu, &mut [], 0),
        log_sum_exp(&cpu, &[0.0; 5], &mut [0.0; 2]),
        kl_divergence(&cpu, &[0.0; 5], &[0.0; 2], &[0.0; 5], &[0.0; 2], &mut [0.0; 2]),
        kl_divergence(&cpu, &[0.0; 4], &[0.0; 2], &[0.0; 6], &[0.0; 2], &mut [0.0; 2]),
        kl_divergence(&cpu, &[0.0; 4], &[0.0; 1], &[0.0; 4], &[0.0; 2], &mut [0.0; 2]),
        kl_divergence(&cpu, &[0.0; 4], &[0.0; 2], &[0.0; 4], &[0.0; 3], &mut [0.0; 2]),
        argmax(&cpu, &[], &mut [0; 2]),
        argmax(&cpu, &[0.0], &mut []),
        rope.apply(&cpu, &mut [0.0; 15], heads, 0),
        rope.apply(&cpu, &mut [0.0; 32], heads, 9),
        rope.apply(&cpu, &mut [0.0; 16], heads, usize::MAX),
        rope.apply(&cpu, &mut [0.0; 8], Heads { head_size: 2, ..heads }, 0),
        rope.apply(&cpu, &mut [0.0; 8], Heads { heads: 3, kv_heads: 2, head_size: 4 }, 0),
        rope.apply(&cpu, &mut [0.0; 8], Heads { kv_heads: 0, ..heads }, 0),
        rope.apply(&cpu, &mut [], Heads { heads: usize::MAX, ..heads }, 0),
        Rope::new(vec![f64::NAN], 1.0, 1).map(|_| ()),
    ];
    for (i, text) in texts.into_iter().enumerate() {
        let text = text.expect_err(&format!("case {i}")).to_string();
        assert!(text.contains(": expected ") && text.contains(", got "), "{text}");
    }
}
