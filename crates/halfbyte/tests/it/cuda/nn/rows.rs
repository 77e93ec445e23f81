//! Rows of the embedding, norms, gates, and columns that come to lie side by side.

use super::{Bench, TYPES, bits, close, single};
use crate::cuda::gpus;
use crate::data::{Random, rounded};
use halfbyte::Float;
use halfbyte::cuda::driver::ViewMut;
use halfbyte::cuda::nn::{self, Gate, LayerNorm, Norm, Table};
use halfbyte::kernel::Activation;

#[test]
fn rows_of_the_embedding_are_exact() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(1));
        for (dtype, [vocab, hidden]) in TYPES.into_iter().zip([[7, 5], [100, 384], [3, 1000]]) {
            let table = rounded(&random.normals(vocab * hidden), dtype);
            let on_device = bench.floats(&table, dtype);
            let tokens: Vec<u32> = (0..20).map(|_| random.below(vocab) as u32).chain([0, vocab as u32 - 1]).collect();
            let ids = bench.upload(&tokens);
            // A part of the table has the vectors of some tokens.
            for (scale, part) in [(1.0, 0..vocab), (19.6, 0..vocab), (2.0, 1..vocab - 1), (1.0, 2..2)] {
                let rows = on_device.view(part.start * hidden..part.end * hidden);
                let got = bench.output(Float::F32, tokens.len() * hidden, &mut |out| {
                    let rows = (Table::Floats(rows), part.start);
                    nn::embed(&gpu, &bench.stream, rows, hidden, ids.view(), scale, single(out)).unwrap();
                });
                let vector = |&token: &u32| {
                    let there = if part.contains(&(token as usize)) { scale } else { 0.0 };
                    table[token as usize * hidden..][..hidden].iter().map(move |v| v * there)
                };
                let want: Vec<f32> = tokens.iter().flat_map(vector).collect();
                assert_eq!(got, want);
            }
        }
    }
}

#[test]
fn norms_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(2));
        for [m, d] in [[1, 1], [3, 33], [2, 384], [5, 1000], [2, 8192]] {
            let (x, update, weight) = (random.activations(m * d), random.normals(m * d), random.normals(d));
            let (added, factors) = (bench.upload(&update), bench.upload(&weight));
            for (out_type, with) in TYPES.into_iter().zip([false, true, true]) {
                let (mut sums, mut in_f32) = (Vec::new(), bench.upload(&vec![0f32; m * d]));
                let got = bench.output(out_type, m * d, &mut |out| {
                    let mut residual = bench.upload(&x);
                    let update = with.then(|| added.view().into());
                    let (to_residual, weight) = (residual.view_mut(), factors.view());
                    let exact = with.then(|| in_f32.view_mut());
                    let norm = Norm { residual: to_residual, update, weight, eps: 1e-5, out, exact, next: None };
                    nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
                    sums = bench.read(residual.view());
                });
                let stream: Vec<f32> = x.iter().zip(&update).map(|(x, u)| if with { x + u } else { *x }).collect();
                assert_eq!(bits(&sums), bits(&stream));
                // The output is what is left in f32, rounded.
                if with {
                    let rounded: Vec<f32> = bench.read(in_f32.view()).iter().map(|&v| out_type.round(v)).collect();
                    assert_eq!(bits(&got), bits(&rounded), "{m} × {d}");
                }
                let want: Vec<f64> = stream
                    .chunks_exact(d)
                    .flat_map(|row| {
                        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / d as f64;
                        let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
                        row.iter().zip(&weight).map(move |(&v, &w)| f64::from(v) * factor * f64::from(w))
                    })
                    .collect();
                close(&got, &want, out_type, 0.0, (d as f64 / 8.0 + 16.0) * 2f64.powi(-24), &format!("{m} × {d}"));
            }
        }
    }
}

/// A row has the same bits alone, among few and among many rows, and wherever the matrices begin.
#[test]
fn norms_have_the_same_bits_for_any_number_of_rows() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(12));
        for (i, (d, m)) in [(1, 3), (384, 200), (1028, 300), (4096, 150), (4099, 5), (8192, 140), (20_000, 135)]
            .into_iter()
            .enumerate()
        {
            let mut x = random.activations(m * d);
            x[(m - 1) * d] = f32::NAN;
            let (update, weight) = (random.normals(m * d), random.normals(d));
            let (out_type, with) = (TYPES[i % 3], i % 2 == 0);
            // Rows of all matrices, which begin `before` elements behind a multiple of 16 bytes.
            let run = |rows: std::ops::Range<usize>, before: usize| {
                let (of_rows, len) = (rows.start * d..rows.end * d, rows.len() * d);
                let behind = |values: &[f32]| bench.upload(&[&[0.5; 3][..before], values].concat());
                let (added, factors) = (behind(&update[of_rows.clone()]), behind(&weight));
                let mut sums = Vec::new();
                let got = bench.output(out_type, len, &mut |out| {
                    let mut residual = behind(&x[of_rows.clone()]);
                    let norm = Norm {
                        residual: residual.view_mut().slice(before..before + len),
                        update: with.then(|| added.view().slice(before..before + len).into()),
                        weight: factors.view().slice(before..before + d),
                        eps: 1e-5,
                        out,
                        exact: None,
                        next: None,
                    };
                    nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
                    sums = bench.read(residual.view().slice(before..before + len));
                });
                (bits(&got), bits(&sums))
            };
            let (all, of_stream) = run(0..m, 0);
            assert!(run(0..m, 1) == (all.clone(), of_stream.clone()), "{m} × {d}, elsewhere in memory");
            for rows in [0..1, 1..3, m - 1..m] {
                let (got, sums) = run(rows.clone(), 0);
                let part = rows.start * d..rows.end * d;
                assert!(got == all[part.clone()] && sums == of_stream[part], "rows {rows:?} of {m} × {d}");
            }
            let nan = |at: usize| f32::from_bits(all[at]).is_nan();
            assert!((0..m * d).all(|at| nan(at) == (at >= (m - 1) * d)), "{m} × {d}: NaN in other rows");
        }
    }
}

#[test]
fn layer_norms_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(13));
        for (i, [m, d]) in [[1, 1], [3, 33], [2, 384], [200, 1024], [5, 1027], [2, 8192], [3, 14_336], [2, 20_001]]
            .into_iter()
            .enumerate()
        {
            let mut x: Vec<f32> = random.activations(m * d).iter().map(|v| v + 2.0).collect();
            let [update, weight, bias] = [m * d, d, d].map(|len| random.normals(len));
            let [added, factors, terms] = [&update, &weight, &bias].map(|values| bench.upload(values));
            let (out_type, with) = (TYPES[i % 3], i % 2 == 0);
            let norm = LayerNorm { weight: factors.view(), bias: terms.view(), eps: 1e-5 };
            let mut sums = Vec::new();
            let run = |x: &[f32], sums: &mut Vec<f32>, rows: usize| {
                bench.output(out_type, rows * d, &mut |out| {
                    let mut residual = bench.upload(x);
                    let update = with.then(|| added.view().slice(0..rows * d).into());
                    norm.apply(&gpu, &bench.stream, residual.view_mut(), update, out).unwrap();
                    *sums = bench.read(residual.view());
                })
            };
            let got = run(&x, &mut sums, m);
            let stream: Vec<f32> = x.iter().zip(&update).map(|(x, u)| if with { x + u } else { *x }).collect();
            assert_eq!(bits(&sums), bits(&stream));
            let alone = run(&x[..d], &mut sums, 1);
            assert!(bits(&alone) == bits(&got[..d]), "a row alone, {m} × {d}");
            // In its place: the same before it is rounded.
            let mut rows = bench.upload(&stream);
            norm.apply_in_place(&gpu, &bench.stream, rows.view_mut()).unwrap();
            let in_place = bench.read(rows.view());
            for (row, (stream, got)) in stream.chunks_exact(d).zip(got.chunks_exact(d)).enumerate() {
                let mean = stream.iter().map(|&v| f64::from(v)).sum::<f64>() / d as f64;
                let variance = stream.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / d as f64;
                let deviation = (variance + f64::from(1e-5f32)).sqrt();
                let most = stream.iter().fold(0.0f64, |most, v| most.max(f64::from(v.abs())));
                for (c, &v) in stream.iter().enumerate() {
                    let (weight, bias) = (f64::from(weight[c]), f64::from(bias[c]));
                    let normed = (f64::from(v) - mean) / deviation;
                    let units = (d as f64 / 256.0 + 40.0) * (normed.abs() + most / deviation) * weight.abs();
                    let want = normed * weight + bias;
                    let bound = (units + want.abs()) * 2f64.powi(-24);
                    let what = format!("row {row} of {m} × {d}");
                    close(&got[c..=c], &[want], out_type, bound, 0.0, &what);
                    close(&in_place[row * d + c..][..1], &[want], Float::F32, bound, 0.0, &what);
                }
            }
            x[d / 2] = f32::NAN;
            let got = run(&x, &mut sums, m);
            assert!((0..m * d).all(|at| got[at].is_nan() == (at < d)), "{m} × {d}: NaN in other rows");
        }
    }
}

/// More rows than a launch has room for, one after the other of a few.
#[test]
fn layer_norms_of_very_many_rows_are_those_of_few() {
    const FEW: usize = 7;
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(18));
        let (d, m) = (1028, 65_535 + 2 * FEW + 1);
        let [x, update] = [(); 2].map(|()| random.activations(FEW * d));
        let [weight, bias] = [(); 2].map(|()| bench.upload(&random.normals(d)));
        let norm = LayerNorm { weight: weight.view(), bias: bias.view(), eps: 1e-5 };
        let run = |rows: usize, out_type| {
            let all = |values: &[f32]| values.iter().copied().cycle().take(rows * d).collect::<Vec<_>>();
            let added = bench.upload(&all(&update));
            let mut sums = Vec::new();
            let normed = bench.output(out_type, rows * d, &mut |out| {
                let mut residual = bench.upload(&all(&x));
                norm.apply(&gpu, &bench.stream, residual.view_mut(), Some(added.view().into()), out).unwrap();
                sums = bench.read(residual.view());
            });
            [normed, sums]
        };
        for out_type in [Float::F16, Float::F32] {
            for (got, few) in run(m, out_type).iter().zip(run(FEW, out_type)) {
                assert!(got.chunks(FEW * d).all(|rows| bits(rows) == bits(&few[..rows.len()])), "{out_type}");
            }
        }
    }
}

#[test]
fn rms_norms_in_place_have_the_bits_of_others() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(14));
        for [m, d] in [[1, 5], [3, 384], [2, 5000], [300, 1028]] {
            let (x, weight) = (random.activations(m * d), bench.upload(&random.normals(d)));
            let want = bench.output(Float::F32, m * d, &mut |out| {
                let mut residual = bench.upload(&x);
                let (residual, weight) = (residual.view_mut(), weight.view());
                let norm = Norm { residual, update: None, weight, eps: 1e-6, out, exact: None, next: None };
                nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
            });
            let mut rows = bench.upload(&x);
            nn::rms_norm_in_place(&gpu, &bench.stream, rows.view_mut(), weight.view(), 1e-6).unwrap();
            assert_eq!(bits(&bench.read(rows.view())), bits(&want));
        }
    }
}

#[test]
fn what_is_added_and_capped_lies_where_it_was() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(15));
        for len in [1, 5, 1024, 77_777] {
            let (x, update) = (random.activations(len), random.normals(len));
            let mut sum = bench.upload(&x);
            nn::add_to(&gpu, &bench.stream, sum.view_mut(), bench.upload(&update).view()).unwrap();
            let want: Vec<f32> = x.iter().zip(&update).map(|(x, u)| x + u).collect();
            assert_eq!(bits(&bench.read(sum.view())), bits(&want));
            let limit = 3.5;
            nn::soft_cap(&gpu, &bench.stream, sum.view_mut(), limit).unwrap();
            let capped: Vec<f64> =
                want.iter().map(|&v| f64::from(limit) * (f64::from(v) / f64::from(limit)).tanh()).collect();
            close(&bench.read(sum.view()), &capped, Float::F32, 0.0, 2f64.powi(-20), "capped");
            for limit in [0.0, 1e-39, f32::MAX, f32::NAN] {
                assert!(nn::soft_cap(&gpu, &bench.stream, sum.view_mut(), limit).is_err());
            }
        }
    }
}

/// What an MLP does between its products, in f64, and the bound of its error.
fn gate_in_f64(gate: Gate, x: &[f32], inner: usize, i: usize) -> (f64, f64) {
    let row = &x[i / inner * inner * (1 + usize::from(gate.gated))..];
    let (a, up) = (f64::from(row[i % inner]), if gate.gated { f64::from(row[i % inner + inner]) } else { 1.0 });
    let relative = 2f64.powi(-21);
    if let Some([alpha, limit]) = gate.clamp.map(|clamp| clamp.map(f64::from)) {
        let (a, up) = (a.min(limit), up.clamp(-limit, limit));
        let want = a / (1.0 + (-alpha * a).exp()) * (up + 1.0);
        // Where up is near −1, what rounding leaves of the sum.
        return (want, relative * want.abs() + 2f64.powi(-23) * a.abs());
    }
    let f = match gate.activation {
        Activation::Silu => a / (1.0 + (-a).exp()),
        Activation::Gelu => 0.5 * a * (1.0 + libm::erf(a / std::f64::consts::SQRT_2)),
        Activation::GeluTanh => 0.5 * a * (1.0 + (0.797_884_560_802_865_4 * (a + 0.044715 * a.powi(3))).tanh()),
        Activation::Relu => a.max(0.0),
        other => panic!("{other:?}"),
    };
    let bound = match gate.activation {
        Activation::Gelu | Activation::GeluTanh => 2f64.powi(-20) * (a * up).abs(),
        _ => relative * (f * up).abs(),
    };
    (f * up, bound)
}

#[test]
fn gates_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(3));
        let of = |activation, gated| Gate { activation, gated, clamp: None };
        let gates = [
            Gate::SWIGLU,
            of(Activation::GeluTanh, true),
            of(Activation::Gelu, false),
            Gate { clamp: Some([1.702, 7.0]), ..Gate::SWIGLU },
            of(Activation::Gelu, true),
            of(Activation::GeluTanh, false),
            of(Activation::Relu, false),
        ];
        let shapes = [[1, 1], [3, 1000], [7, 333], [1, 14_336], [70_000, 4], [2, 1026]];
        for (i, ([m, inner], gate)) in shapes.into_iter().flat_map(|shape| gates.map(|gate| (shape, gate))).enumerate()
        {
            let (out_type, before) = (TYPES[i % 3], i % 2);
            let len = m * inner * (1 + usize::from(gate.gated));
            let mut x: Vec<f32> = random.normals(len).iter().map(|v| v * 6.0).collect();
            x[0] = -80.0;
            // Every other one does not begin at a multiple of 16 bytes.
            let on_device = bench.upload(&[&[0.5][..before], &x].concat());
            let rows = on_device.view().slice(before..before + len);
            let got = bench.output(out_type, m * inner, &mut |out| {
                nn::gate(&gpu, &bench.stream, gate, rows, inner, out).unwrap();
            });
            for (at, got) in got.iter().enumerate() {
                let (want, bound) = gate_in_f64(gate, &x, inner, at);
                close(&[*got], &[want], out_type, bound + 1e-37, 0.0, &format!("{gate:?}, {at}"));
            }
        }
        let mut out = bench.upload(&[0.0; 4]);
        let x = bench.upload(&[0.0; 4]);
        let bad = Gate { gated: false, clamp: Some([1.0, 1.0]), ..Gate::SWIGLU };
        assert!(nn::gate(&gpu, &bench.stream, bad, x.view(), 4, out.view_mut().into()).is_err());
        assert!(nn::gate(&gpu, &bench.stream, Gate::SWIGLU, x.view(), 4, out.view_mut().into()).is_err());
    }
}

#[test]
fn columns_come_to_lie_side_by_side() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(6));
        let (left, right) = (random.normals(3 * 5), random.normals(3 * 300));
        let [a, b] = [&left, &right].map(|values| bench.upload(values));
        let got = bench.output(Float::F32, 3 * 305, &mut |out| {
            let mut out = single(out);
            let pointer = out.pointer();
            for (from, range) in [(a.view(), 0..5), (b.view(), 5..305)] {
                nn::columns(&gpu, &bench.stream, from, out, 305, range).unwrap();
                out = reborrow(pointer, 3 * 305);
            }
        });
        for row in 0..3 {
            assert_eq!(got[row * 305..][..5], left[row * 5..][..5]);
            assert_eq!(got[row * 305 + 5..][..300], right[row * 300..][..300]);
        }
    }
}

fn reborrow<'a>(pointer: u64, len: usize) -> ViewMut<'a, f32> {
    // SAFETY: the caller has just been handed these elements, to write them one part after the other.
    unsafe { ViewMut::from_raw(pointer, len) }
}
