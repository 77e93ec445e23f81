//! Products of dense weights.

use super::{Bench, TYPES, whole};
use crate::cuda::gpus;
use crate::data::{Random, rounded};
use half::{bf16, f16};
use halfbyte::Floats;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::nn::{Dense, DenseCall, FloatBuffer};
use halfbyte::format::reference::Bound;

#[test]
fn dense_products_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(5));
        for (s, [n, k]) in [[1, 1], [9, 24], [70, 33], [65, 384], [130, 300], [5, 0]].into_iter().enumerate() {
            for (i, m) in [0, 1, 2, 5, 16, 17, 64, 65, 130].into_iter().enumerate() {
                let [x_type, w_type, out_type] = [TYPES[(i + s) % 3], TYPES[s % 3], TYPES[(i / 3 + s) % 3]];
                let x = rounded(&random.activations(m * k), x_type);
                let w = rounded(&random.normals(n * k), w_type);
                let bias = (i % 2 == 0).then(|| random.normals(n));
                let weight = match bench.floats(&w, w_type) {
                    FloatBuffer::F32(_) => Dense::new(&gpu, &bench.stream, Floats::F32(&w), [n, k]),
                    FloatBuffer::F16(_) => {
                        let w: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
                        Dense::new(&gpu, &bench.stream, Floats::F16(&w), [n, k])
                    }
                    FloatBuffer::BF16(_) => {
                        let w: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
                        Dense::new(&gpu, &bench.stream, Floats::BF16(&w), [n, k])
                    }
                };
                let weight = weight.unwrap();
                let (on_device, bias_on_device) = (bench.floats(&x, x_type), bias.as_ref().map(|b| bench.upload(b)));
                let got = bench.output(out_type, m * n, &mut |y| {
                    let bias = bias_on_device.as_ref().map(Buffer::view);
                    weight.forward(&gpu, &bench.stream, DenseCall { x: whole(&on_device), m, bias, y }).unwrap();
                });
                let bound = Bound::new(out_type, k);
                for (at, &got) in got.iter().enumerate() {
                    let (row, output) = (at / n, at % n);
                    let terms = x[row * k..][..k].iter().zip(&w[output * k..][..k]);
                    let terms: Vec<f64> = terms.map(|(&x, &w)| f64::from(x) * f64::from(w)).collect();
                    let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
                    let want = terms.iter().sum::<f64>() + bias;
                    let allowed = bound.allowed(terms.iter().map(|t| t.abs()).sum::<f64>() + bias.abs());
                    let what = format!("{m} × {n} × {k}, {x_type} · {w_type} to {out_type}");
                    assert!((f64::from(got) - want).abs() <= allowed, "{what}: {got}, expected {want} ± {allowed:e}");
                }
            }
        }
    }
}
