//! Products of dense weights.

use super::{Bench, TYPES, bits, whole};
use crate::cuda::{gpus, in_child, is_child};
use crate::data::{Random, rounded};
use half::{bf16, f16};
use halfbyte::cuda::Workspace;
use halfbyte::cuda::driver::{Buffer, FloatView};
use halfbyte::cuda::nn::{Dense, DenseCall, FloatBuffer};
use halfbyte::format::reference::Bound;
use halfbyte::{Activation, Error, Float, Floats};

fn dense(bench: &Bench<'_>, w: &[f32], dtype: Float, shape: [usize; 2]) -> Dense {
    let halfs: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
    let brains: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
    let floats = match dtype {
        Float::F16 => Floats::F16(&halfs),
        Float::BF16 => Floats::BF16(&brains),
        Float::F32 => Floats::F32(w),
    };
    Dense::new(bench.gpu, &bench.stream, floats, shape).unwrap()
}

/// One product against f64.
struct Case {
    shape: [usize; 3],
    /// Of x, of W, of y.
    types: [Float; 3],
    biased: bool,
    activation: Activation,
    /// Elements of x before its first, so that rows do not begin at 16 bytes.
    before: usize,
    /// With a workspace.
    room: bool,
}

impl Case {
    fn check(&self, bench: &Bench<'_>, random: &mut Random) {
        let Self { shape: [m, n, k], types: [x_type, w_type, y_type], biased, activation, before, room } = *self;
        let x = rounded(&random.activations(m * k), x_type);
        let w = rounded(&random.normals(n * k), w_type);
        let bias = biased.then(|| random.normals(n));
        let weight = dense(bench, &w, w_type, [n, k]);
        let padded = [vec![f32::NAN; before], x.clone(), vec![f32::NAN; 8]].concat();
        let (on_device, of_bias) = (bench.floats(&padded, x_type), bias.as_ref().map(|b| bench.upload(b)));
        let bytes = weight.workspace_bytes(bench.gpu, m, [x_type, y_type]);
        let mut workspace = room.then(|| Workspace::new(bench.gpu, &bench.stream, bytes.max(1)).unwrap());
        let got = bench.output(y_type, m * n, &mut |y| {
            let bias = of_bias.as_ref().map(Buffer::view);
            let call = DenseCall { x: on_device.view(before..before + m * k), m, bias, y };
            weight.forward_activated(bench.gpu, &bench.stream, call, activation, workspace.as_mut()).unwrap();
        });
        let bound = Bound::new(y_type, k);
        let kernel = weight.kernel(bench.gpu, m, x_type);
        for (at, &got) in got.iter().enumerate() {
            let (row, output) = (at / n, at % n);
            let terms = x[row * k..][..k].iter().zip(&w[output * k..][..k]);
            let terms: Vec<f64> = terms.map(|(&x, &w)| f64::from(x) * f64::from(w)).collect();
            let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
            let sum = terms.iter().sum::<f64>() + bias;
            // A relu moves no two numbers apart.
            let want = if activation == Activation::Relu { sum.max(0.0) } else { sum };
            let allowed = bound.allowed(terms.iter().map(|t| t.abs()).sum::<f64>() + bias.abs());
            let what = format!("{kernel}, {m} × {n} × {k}, {x_type} · {w_type} to {y_type}, {before} before");
            assert!((f64::from(got) - want).abs() <= allowed, "{what}: {at} is {got}, expected {want} ± {allowed:e}");
        }
    }
}

#[test]
fn dense_products_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(5));
        for (s, [n, k]) in [[1, 1], [9, 24], [70, 33], [65, 384], [130, 300], [5, 0]].into_iter().enumerate() {
            for (i, m) in [0, 1, 2, 5, 16, 17, 64, 65, 130].into_iter().enumerate() {
                let types = [TYPES[(i + s) % 3], TYPES[s % 3], TYPES[(i / 3 + s) % 3]];
                let (biased, activation) = (i % 2 == 0, Activation::None);
                let case = Case { shape: [m, n, k], types, biased, activation, before: 0, room: false };
                case.check(&bench, &mut random);
            }
        }
    }
}

/// Shapes that no tile divides, in every combination of types, with rows at any address, finished in every way.
fn any_shapes(bench: &Bench<'_>) {
    let mut random = Random(6);
    for i in 0..120 {
        let m = if i % 4 == 3 { 17 + random.below(300) } else { 1 + random.below(20) };
        let (n, k) = (1 + random.below(400), 1 + random.below(1500));
        // Tensor cores take columns in eights, and x and W of one type.
        let k = if i % 3 == 0 { k } else { k.next_multiple_of(8) };
        let x_type = TYPES[random.below(3)];
        let w_type = if i % 5 == 0 { TYPES[random.below(3)] } else { x_type };
        let case = Case {
            shape: [m, n, k],
            types: [x_type, w_type, TYPES[random.below(3)]],
            biased: random.below(2) == 0,
            activation: [Activation::None, Activation::Relu][random.below(2)],
            before: [0, 0, 1, 3][random.below(4)],
            room: random.below(2) == 0,
        };
        case.check(bench, &mut random);
    }
    // Long sums, more outputs than blocks take at once, and a head of a small model.
    for shape in [[1, 9000, 64], [16, 5000, 200], [3, 40, 14_336], [200, 24, 14_336], [1, 32_000, 512]] {
        let types = [Float::F16, Float::F16, Float::F32];
        let case = Case { shape, types, biased: false, activation: Activation::None, before: 0, room: false };
        case.check(bench, &mut random);
    }
}

#[test]
fn dense_products_of_any_shape_are_within_the_bound() {
    gpus().iter().for_each(|gpu| any_shapes(&Bench::new(gpu)));
}

/// Outputs enough for every multiprocessor to have many of its own, as heads have.
#[test]
fn products_of_few_rows_with_many_outputs_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(11));
        let least = 128 * gpu.caps().multiprocessors as usize;
        for (i, m) in [1, 3, 8, 12, 16, 17, 25, 32].into_iter().enumerate() {
            let dtype = TYPES[i % 2];
            let case = Case {
                shape: [m, least + random.below(3000), 8 * (1 + random.below(40))],
                types: [dtype, dtype, TYPES[random.below(3)]],
                biased: i % 2 == 0,
                activation: [Activation::None, Activation::Relu][i / 2 % 2],
                before: 0,
                room: false,
            };
            case.check(&bench, &mut random);
            Case { before: 3, room: true, ..case }.check(&bench, &mut random);
        }
    }
}

/// More tiles of rows than a launch has blocks but in its first direction.
#[test]
fn products_of_millions_of_rows_are_within_the_bound() {
    for gpu in gpus() {
        let case = Case {
            shape: [64 * 65_536 + 1, 2, 3],
            types: [Float::F32; 3],
            biased: true,
            activation: Activation::None,
            before: 0,
            room: false,
        };
        case.check(&Bench::new(&gpu), &mut Random(17));
    }
}

/// Products whose terms have one sign: sums that are not rounded to nearest drift.
fn of_one_sign(bench: &Bench<'_>, n: usize, rows: &[usize]) {
    let (mut random, k) = (Random(7), 4096);
    let mut positive =
        |len: usize| -> Vec<f32> { rounded(&random.normals(len), Float::F16).iter().map(|v| v.abs()).collect() };
    let w = positive(n * k);
    let weight = dense(bench, &w, Float::F16, [n, k]);
    for &m in rows {
        let x = positive(m * k);
        let on_device = bench.floats(&x, Float::F16);
        let got = bench.output(Float::F32, m * n, &mut |y| {
            let call = DenseCall { x: whole(&on_device), m, bias: None, y };
            weight.forward(bench.gpu, &bench.stream, call).unwrap();
        });
        for (at, &got) in got.iter().enumerate() {
            let terms = x[at / n * k..][..k].iter().zip(&w[at % n * k..][..k]);
            let want: f64 = terms.map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            let allowed = Bound::new(Float::F32, k).allowed(want);
            assert!((f64::from(got) - want).abs() <= allowed, "{m} rows: {got}, expected {want} ± {allowed:e}");
        }
    }
}

#[test]
fn sums_of_few_rows_do_not_drift() {
    for gpu in gpus() {
        of_one_sign(&Bench::new(&gpu), 33, &[1, 3, 16]);
        // By the copy engine, where there is one.
        of_one_sign(&Bench::new(&gpu), 128 * gpu.caps().multiprocessors as usize, &[2]);
    }
}

/// Many rows where cuBLASLt was not found.
#[test]
fn without_cublaslt_a_kernel_of_ours_multiplies() {
    const TEST: &str = "cuda::nn::dense::without_cublaslt_a_kernel_of_ours_multiplies";
    if !is_child() {
        let empty = tempfile::tempdir().unwrap();
        return in_child(TEST, &[("HALFBYTE_CUBLASLT", empty.path().to_str().unwrap())]);
    }
    for gpu in gpus() {
        assert!(!gpu.caps().cublaslt);
        let bench = Bench::new(&gpu);
        any_shapes(&bench);
        of_one_sign(&bench, 33, &[17, 200]);
        nan_stays(&bench);
    }
}

/// A row has the same bits among one to sixteen rows, wherever it lies among them, and NaN reaches no other row.
#[test]
fn few_rows_have_the_bits_of_each_alone() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(8));
        let many = 128 * gpu.caps().multiprocessors as usize + 200;
        let [f16, bf16, f32] = TYPES;
        let alike = [(37, 1032, f16), (300, 2048, bf16), (20, 515, f16), (19, 640, f32), (many, 344, bf16)];
        let alike = alike.map(|(n, k, dtype)| ([n, k], [dtype; 2]));
        for ([n, k], [x_type, w_type]) in alike.into_iter().chain([([130, 2056], [f32, f16]), ([40, 384], [f32, bf16])])
        {
            let weight = dense(&bench, &rounded(&random.normals(n * k), w_type), w_type, [n, k]);
            let mut x = rounded(&random.activations(16 * k), x_type);
            x[5 * k + 17] = f32::NAN;
            let on_device = bench.floats(&x, x_type);
            let run = |x: FloatView<'_>, m: usize| {
                bench.output(Float::F32, m * n, &mut |y| {
                    weight.forward(&gpu, &bench.stream, DenseCall { x, m, bias: None, y }).unwrap();
                })
            };
            let alone: Vec<Vec<f32>> = (0..16).map(|row| run(on_device.view(row * k..(row + 1) * k), 1)).collect();
            for (row, y) in alone.iter().enumerate() {
                assert!(y.iter().all(|v| v.is_nan() == (row == 5)), "row {row} of {n} × {k}");
            }
            for m in [2, 5, 8, 9, 16] {
                let together = run(on_device.view(0..m * k), m);
                for (row, y) in together.chunks_exact(n).enumerate().filter(|(row, _)| *row != 5) {
                    assert_eq!(bits(y), bits(&alone[row]), "row {row} of {m}, {n} × {k}");
                }
            }
        }
    }
}

/// NaN in a row of x reaches that row, NaN in a row of W that output, and neither any other, beyond the ends of tiles too.
fn nan_stays(bench: &Bench<'_>) {
    let mut random = Random(10);
    for (i, [m, n, k]) in
        [[3, 20, 72], [16, 33, 130], [40, 50, 72], [131, 140, 200], [20, 70, 33], [9, 20_000, 72], [30, 18_001, 136]]
            .into_iter()
            .enumerate()
    {
        let dtype = TYPES[i % 2];
        let (mut x, mut w) = (random.activations(m * k), random.normals(n * k));
        (x[(m - 1) * k + k - 1], w[(n - 1) * k]) = (f32::NAN, f32::NAN);
        let weight = dense(bench, &w, dtype, [n, k]);
        let on_device = bench.floats(&x, dtype);
        let y = bench.output(Float::F32, m * n, &mut |y| {
            let call = DenseCall { x: whole(&on_device), m, bias: None, y };
            weight.forward(bench.gpu, &bench.stream, call).unwrap();
        });
        for (at, y) in y.iter().enumerate() {
            let expected = at / n == m - 1 || at % n == n - 1;
            assert_eq!(y.is_nan(), expected, "{} of {m} × {n} × {k}: {at}", weight.kernel(bench.gpu, m, dtype));
        }
    }
}

#[test]
fn nan_stays_in_its_row_and_its_output() {
    gpus().iter().for_each(|gpu| nan_stays(&Bench::new(gpu)));
}

#[test]
fn what_multiplies_is_told_and_a_workspace_that_is_too_small_is_refused() {
    for gpu in gpus() {
        let bench = Bench::new(&gpu);
        let caps = gpu.caps();
        let tensor = caps.arch.multiplies(Float::F16);
        let halfs = dense(&bench, &[0.5; 24 * 16], Float::F16, [24, 16]);
        let odd = dense(&bench, &[0.5; 24 * 15], Float::F16, [24, 15]);
        let single = dense(&bench, &[0.5; 24 * 16], Float::F32, [24, 16]);
        let (few, many) =
            (["dense_rows", "dense_rows_mma"][usize::from(tensor)], |dense: &Dense, x| dense.kernel(&gpu, 17, x));
        assert_eq!([1, 16].map(|m| halfs.kernel(&gpu, m, Float::F16)), [few; 2]);
        let of_many = if !tensor {
            "dense_tiles"
        } else if caps.cublaslt {
            "dense_cublaslt"
        } else {
            "dense_mma"
        };
        assert_eq!(many(&halfs, Float::F16), of_many);
        for (weight, x) in [(&halfs, Float::BF16), (&odd, Float::F16), (&single, Float::F32)] {
            assert_eq!((weight.kernel(&gpu, 16, x), many(weight, x)), ("dense_rows", "dense_tiles"));
            assert_eq!(weight.workspace_bytes(&gpu, 17, [x, Float::F32]), 0);
        }
        let of_singles = if caps.arch.number >= 80 { ["dense_tf32"; 2] } else { ["dense_rows", "dense_tiles"] };
        assert_eq!([16, 17].map(|m| halfs.kernel(&gpu, m, Float::F32)), of_singles);
        assert_eq!(halfs.workspace_bytes(&gpu, 16, [Float::F16; 2]), 0);
        if of_many == "dense_cublaslt" {
            let x = bench.floats(&[1.0; 17 * 16], Float::F16);
            let mut y: FloatBuffer = bench.floats(&[0.0; 17 * 24], Float::F32);
            let mut small = Workspace::new(&gpu, &bench.stream, Workspace::COUNTER_BYTES).unwrap();
            let call = DenseCall { x: whole(&x), m: 17, bias: None, y: y.view_mut(0..17 * 24) };
            let error = halfs.forward_activated(&gpu, &bench.stream, call, Activation::None, Some(&mut small));
            assert!(matches!(error, Err(Error::Invalid { op: "dense", .. })), "{error:?}");
        }
    }
}

/// Rows of f32 with weights of 16 bits: of any shape, numbers of any size among each other, the same bits however many rows there are, and
/// what is infinite stays so.
#[test]
fn rows_of_singles_with_weights_of_16_bits_lose_nothing() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(11));
        for i in 0..60 {
            let (m, n, k) = (1 + random.below(90), 1 + random.below(200), 8 * (1 + random.below(400)));
            let types = [Float::F32, TYPES[i % 2], TYPES[random.below(3)]];
            let (biased, activation) = (random.below(2) == 0, [Activation::None, Activation::Relu][random.below(2)]);
            let before = [0, 0, 0, 2][random.below(4)];
            Case { shape: [m, n, k], types, biased, activation, before, room: false }.check(&bench, &mut random);
        }
        // Rows enough for large tiles, of which the first are alone, too.
        let [m, n, k] = [3000, 136, 520];
        let weight = dense(&bench, &rounded(&random.normals(n * k), Float::F16), Float::F16, [n, k]);
        let mut x: Vec<f32> =
            random.normals(m * k).iter().map(|v| v * (random.below(60) as f32 - 30.0).exp2()).collect();
        x[k] = f32::INFINITY;
        let on_device = bench.floats(&x, Float::F32);
        let run = |m: usize| {
            bench.output(Float::F32, m * n, &mut |y| {
                let call = DenseCall { x: on_device.view(0..m * k), m, bias: None, y };
                weight.forward(&gpu, &bench.stream, call).unwrap();
            })
        };
        let (few, all) = (run(3), run(m));
        assert!(few[n..2 * n].iter().all(|v| v.is_infinite()), "{:?}", &few[n..n + 8]);
        if gpu.caps().arch.number >= 80 {
            assert_eq!(bits(&few), bits(&all[..3 * n]));
        }
    }
}

/// Products of few and of many rows in a stream that is being recorded, as a model's steps are.
#[test]
fn dense_products_can_be_recorded() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(9));
        let [n, k] = [200, 256];
        let weight = dense(&bench, &rounded(&random.normals(n * k), Float::F16), Float::F16, [n, k]);
        for m in [1, 16, 40] {
            let x = bench.floats(&rounded(&random.activations(m * k), Float::F16), Float::F16);
            let want = bench.output(Float::F32, m * n, &mut |y| {
                weight.forward(&gpu, &bench.stream, DenseCall { x: whole(&x), m, bias: None, y }).unwrap();
            });
            let mut y = bench.floats(&vec![0.0; m * n], Float::F32);
            let work = |stream: &_| {
                let call = DenseCall { x: whole(&x), m, bias: None, y: y.view_mut(0..m * n) };
                weight.forward(&gpu, stream, call)
            };
            bench.stream.time_replays(1, 2, work).unwrap();
            assert_eq!(bits(&bench.widened(whole(&y))), bits(&want), "{m} rows");
        }
    }
}
