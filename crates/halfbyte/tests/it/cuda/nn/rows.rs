//! Rows of the embedding, norms, gates, and columns that come to lie side by side.

use super::{Bench, TYPES, bits, close, single, whole};
use crate::cuda::gpus;
use crate::data::{Random, rounded};
use halfbyte::Float;
use halfbyte::cuda::driver::ViewMut;
use halfbyte::cuda::nn::{self, Norm};

#[test]
fn rows_of_the_embedding_are_exact() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(1));
        for (dtype, [vocab, hidden]) in TYPES.into_iter().zip([[7, 5], [100, 384], [3, 1000]]) {
            let table = rounded(&random.normals(vocab * hidden), dtype);
            let on_device = bench.floats(&table, dtype);
            let tokens: Vec<u32> = (0..20).map(|_| random.below(vocab) as u32).chain([0, vocab as u32 - 1]).collect();
            let ids = bench.upload(&tokens);
            let got = bench.output(Float::F32, tokens.len() * hidden, &mut |out| {
                nn::embed(&gpu, &bench.stream, whole(&on_device), hidden, ids.view(), single(out)).unwrap();
            });
            let want = tokens.iter().flat_map(|&t| &table[t as usize * hidden..][..hidden]).copied();
            assert_eq!(got, want.collect::<Vec<_>>());
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
                let mut sums = Vec::new();
                let got = bench.output(out_type, m * d, &mut |out| {
                    let mut residual = bench.upload(&x);
                    let update = with.then(|| added.view());
                    let norm = Norm { residual: residual.view_mut(), update, weight: factors.view(), eps: 1e-5, out };
                    nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
                    sums = bench.read(residual.view());
                });
                let stream: Vec<f32> = x.iter().zip(&update).map(|(x, u)| if with { x + u } else { *x }).collect();
                assert_eq!(bits(&sums), bits(&stream));
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
                        update: with.then(|| added.view().slice(before..before + len)),
                        weight: factors.view().slice(before..before + d),
                        eps: 1e-5,
                        out,
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
fn swiglu_is_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(3));
        let shapes = [[1, 1], [3, 1000], [7, 333], [1, 14_336], [70_000, 4], [2, 1026]];
        for (i, [m, inner]) in shapes.into_iter().enumerate() {
            let (out_type, before) = (TYPES[i % 3], i % 2);
            let mut gate_up: Vec<f32> = random.normals(2 * m * inner).iter().map(|v| v * 6.0).collect();
            gate_up[0] = -80.0;
            // Every other one does not begin at a multiple of 16 bytes.
            let on_device = bench.upload(&[&[0.5][..before], &gate_up].concat());
            let gate_and_up = on_device.view().slice(before..before + gate_up.len());
            let got = bench.output(out_type, m * inner, &mut |out| {
                nn::swiglu(&gpu, &bench.stream, gate_and_up, inner, out).unwrap();
            });
            let want: Vec<f64> = (0..m * inner)
                .map(|i| {
                    let row = &gate_up[i / inner * 2 * inner..];
                    let [gate, up] = [row[i % inner], row[i % inner + inner]].map(f64::from);
                    gate / (1.0 + (-gate).exp()) * up
                })
                .collect();
            close(&got, &want, out_type, 0.0, 2f64.powi(-21), "swiglu");
        }
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
