//! Refining against its definition, and at its edges.

use crate::data::{Random, parse};
use crate::gptq::{correlated, formats, hessian_of, identity, mean_diagonal, objective};
use halfbyte::format::reference;
use halfbyte::quantize::{Calibrated, Gptq, Hessian, Refine, Rtn, gptq, refine, rtn};
use halfbyte::{Error, Floats, Group, QTensor, WeightFormat, Zero, Zeros};

/// Round to nearest, GPTQ, and GPTQ with a group index.
fn starts(w: &[f32], shape: [usize; 2], format: WeightFormat, hessian: &Hessian) -> [QTensor; 3] {
    let gptq = |options| gptq(Floats::F32(w), shape, format, hessian, options).unwrap().weights;
    let act_order = Gptq { act_order: true, ..Gptq::default() };
    [rtn(Floats::F32(w), shape, format, Rtn::default()).unwrap(), gptq(Gptq::default()), gptq(act_order)]
}

#[test]
fn no_sweep_raises_the_loss() {
    let mut random = Random(51);
    let (n, k) = (4, 170);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 600, k), k);
    let damping = 0.01 * mean_diagonal(&hessian);
    let mut ratios = Vec::new();
    for format in formats() {
        for start in starts(&w, [n, k], format, &hessian) {
            let mut last = objective(&w, &start, &hessian, damping);
            let first = last;
            for sweeps in 0..4 {
                let options = Refine { sweeps, ..Refine::default() };
                let Calibrated { weights, damping: used, dead, loss } =
                    refine(Floats::F32(&w), &start, &hessian, options).unwrap();
                assert_eq!((used, dead), (0.01, 0));
                let true_loss = objective(&w, &weights, &hessian, damping);
                assert!((loss / true_loss - 1.0).abs() < 1e-9, "{format:?}: {loss} or {true_loss}");
                assert!(loss <= last * (1.0 + 1e-12), "{format:?}, sweep {sweeps}: {loss} after {last}");
                assert_eq!(weights.group_index(), start.group_index());
                if sweeps == 0 {
                    assert_eq!(weights, start);
                }
                if format.zero == Zero::Integer {
                    assert_eq!(weights.zeros(), start.zeros());
                }
                if format.group == Group::Tensor {
                    assert_eq!(weights.scales(), start.scales());
                }
                last = loss;
            }
            ratios.push(last / first);
        }
    }
    let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
    assert!(mean < 0.8, "refined to {mean} on average");
}

/// The definition as it stands: the pull of a column from all errors, anew for every move.
fn textbook(w: &[f32], start: &QTensor, hessian: &Hessian, sweeps: usize) -> QTensor {
    let (format, n, k) = (start.format(), start.n(), start.k());
    let damping = 0.01 * mean_diagonal(hessian);
    let h = |i: usize, j: usize| hessian.get(i, j) + if i == j { damping } else { 0.0 };
    let Zeros::Integer(zeros) = start.zeros() else { panic!("for integer zeros") };
    let (mut codes, mut scales) = (start.codes().to_vec(), start.scales().to_vec());
    let groups = start.groups();
    for i in 0..n {
        for _ in 0..sweeps {
            for g in 0..groups {
                let columns: Vec<usize> = (0..k).filter(|&j| start.group_of(j) == g).collect();
                let zero = f64::from(zeros[i * groups + g]);
                let error = |codes: &[u8], scales: &[f32], j: usize| {
                    let g = start.group_of(j);
                    let code = f64::from(codes[i * k + j]) - f64::from(zeros[i * groups + g]);
                    f64::from(scales[i * groups + g]) * code - f64::from(w[i * k + j])
                };
                let pull = |codes: &[u8], scales: &[f32], j: usize| -> f64 {
                    (0..k).map(|a| -error(codes, scales, a) * h(a, j)).sum()
                };
                let step = |j: usize| f64::from(codes[i * k + j]) - zero;
                let slope: f64 = columns.iter().map(|&j| step(j) * pull(&codes, &scales, j)).sum();
                let curvature: f64 =
                    columns.iter().map(|&a| columns.iter().map(|&b| step(a) * h(a, b) * step(b)).sum::<f64>()).sum();
                let old = f64::from(scales[i * groups + g]);
                let next = format.scale.round((old + slope / curvature) as f32);
                // Rounding may overshoot.
                let by = f64::from(next) - old;
                if by * (by * curvature - 2.0 * slope) < 0.0 {
                    scales[i * groups + g] = next;
                }
                let scale = f64::from(scales[i * groups + g]);
                for &j in &columns {
                    let value = scale * (f64::from(codes[i * k + j]) - zero);
                    let target = value + pull(&codes, &scales, j) / h(j, j);
                    codes[i * k + j] =
                        (target / scale + zero).round_ties_even().clamp(0.0, format.max_code() as f64) as u8;
                }
            }
        }
    }
    let index = start.group_index().map(<[u32]>::to_vec);
    QTensor::new(format, [n, k], codes, scales, start.zeros().clone(), index).unwrap()
}

#[test]
fn sweeps_are_the_textbooks() {
    let mut random = Random(52);
    let (n, k) = (3, 210);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 500, k), k);
    for name in ["w3a16-g20-asym", "w4a16-g64-asym", "w2a16-g150-asym", "w4a16-asym"] {
        for start in starts(&w, [n, k], parse(name).weight, &hessian) {
            let options = Refine { sweeps: 2, damping: 0.01 };
            let ours = refine(Floats::F32(&w), &start, &hessian, options).unwrap().weights;
            assert_eq!(ours, textbook(&w, &start, &hessian, 2), "{name}");
            assert_ne!(ours, start, "{name}");
        }
    }
}

#[test]
fn in_the_end_no_move_lowers_the_loss() {
    let mut random = Random(53);
    let (n, k) = (2, 40);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 300, k), k);
    for name in ["w3a16-g16", "w4a16-g16-asym", "w3a16-g20-float", "w2a16-sf32", "w4a16-sbf16"] {
        let format = parse(name).weight;
        let start = rtn(Floats::F32(&w), [n, k], format, Rtn::default()).unwrap();
        let options = Refine { sweeps: 500, damping: 0.0 };
        let done = refine(Floats::F32(&w), &start, &hessian, options).unwrap();
        let again = refine(Floats::F32(&w), &done.weights, &hessian, Refine { sweeps: 1, ..options }).unwrap();
        assert_eq!(again, done, "{name}: moves are left after 500 sweeps");
        let best = objective(&w, &done.weights, &hessian, 0.0);
        let q = &done.weights;
        let mut tried = 0;
        let mut no_better = |codes: Vec<u8>, scales: Vec<f32>, zeros: Zeros| {
            let other = QTensor::new(format, [n, k], codes, scales, zeros, None).unwrap();
            let loss = objective(&w, &other, &hessian, 0.0);
            assert!(loss >= best * (1.0 - 1e-9), "{name}: {loss}, below {best}");
            tried += 1;
        };
        for at in 0..n * k {
            for code in [q.codes()[at].wrapping_sub(1), q.codes()[at] + 1] {
                if u32::from(code) <= format.max_code() {
                    let mut codes = q.codes().to_vec();
                    codes[at] = code;
                    no_better(codes, q.scales().to_vec(), q.zeros().clone());
                }
            }
        }
        for at in 0..q.scales().len() {
            for factor in [0.99, 1.01] {
                let mut scales = q.scales().to_vec();
                scales[at] = format.scale.round(scales[at] * factor);
                no_better(q.codes().to_vec(), scales, q.zeros().clone());
                if let Zeros::Float(offsets) = q.zeros() {
                    let mut offsets = offsets.clone();
                    offsets[at] = format.scale.round(offsets[at] * factor);
                    no_better(q.codes().to_vec(), q.scales().to_vec(), Zeros::Float(offsets));
                }
            }
        }
        assert!(tried > n * k);
    }
}

#[test]
fn dead_columns_become_zero_and_groups_of_zeros_stay() {
    let mut random = Random(54);
    let (n, k) = (3, 96);
    let dead = |j: usize| j % 7 == 3;
    let mut x = correlated(&mut random, 300, k);
    x.iter_mut().enumerate().filter(|(i, _)| dead(i % k)).for_each(|(_, v)| *v = 0.0);
    let hessian = hessian_of(&x, k);
    let mut w = random.normals(n * k);
    w[k..k + 32].fill(0.0);
    for name in ["w4a16-g32", "w3a16-g32-asym"] {
        let start = rtn(Floats::F32(&w), [n, k], parse(name).weight, Rtn::default()).unwrap();
        let done = refine(Floats::F32(&w), &start, &hessian, Refine::default()).unwrap();
        assert_eq!(done.dead, (0..k).filter(|&j| dead(j)).count());
        assert!(done.loss.is_finite() && done.loss > 0.0);
        let values = reference::dequantize(&done.weights);
        for (i, v) in values.iter().enumerate().filter(|(i, _)| dead(i % k) || (k..k + 32).contains(i)) {
            assert_eq!(*v, 0.0, "{name} element {i}");
        }
        assert_eq!(done.weights.scales()[start.groups()], 0.0);
        let mut other = w.clone();
        other.iter_mut().enumerate().filter(|(i, _)| dead(i % k)).for_each(|(_, v)| *v = 1e6);
        assert_eq!(refine(Floats::F32(&other), &start, &hessian, Refine::default()).unwrap(), done);
    }
}

#[test]
fn inputs_without_correlation_leave_the_codes_of_rounding_to_nearest() {
    let mut random = Random(55);
    let (n, k) = (3, 64);
    let w = random.normals(n * k);
    let start = rtn(Floats::F32(&w), [n, k], parse("w4a16-tensor").weight, Rtn::default()).unwrap();
    let done = refine(Floats::F32(&w), &start, &identity(k), Refine::default()).unwrap();
    assert_eq!(done.weights, start);
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut random = Random(56);
    let (n, k) = (101, 190);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 600, k), k);
    let run = |threads: usize| -> Vec<(QTensor, u64)> {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let refined = |name: &&str| {
                let start = rtn(Floats::F32(&w), [n, k], parse(name).weight, Rtn::default()).unwrap();
                let done = refine(Floats::F32(&w), &start, &hessian, Refine::default()).unwrap();
                (done.weights, done.loss.to_bits())
            };
            ["w4a16-g64-asym", "w2a16", "w3a16-g20-float"].iter().map(refined).collect()
        })
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

#[test]
fn bad_input_is_an_error_that_says_where() {
    let format = parse("w4a16-g2").weight;
    let w = [0.5f32; 8];
    let start = rtn(Floats::F32(&w), [2, 4], format, Rtn::default()).unwrap();
    let run = |w: &[f32], hessian: &Hessian, damping| {
        refine(Floats::F32(w), &start, hessian, Refine { damping, sweeps: 1 }).unwrap_err()
    };
    let hessian = identity(4);
    assert!(run(&w[1..], &hessian, 0.1).to_string().contains("expected 2 × 4 weights, got 7"));
    assert!(run(&w, &identity(5), 0.1).to_string().contains("expected a Hessian of k 4, got k 5"));
    for damping in [-0.1, f64::NAN, f64::INFINITY] {
        assert!(run(&w, &hessian, damping).to_string().contains("damping"));
    }
    assert!(run(&w, &Hessian::new(4).unwrap(), 0.1).to_string().contains("got 0 inputs"));
    let mut bad = w;
    bad[6] = f32::NAN;
    assert!(matches!(run(&bad, &hessian, 0.1), Error::NotFinite { row: 1, column: 2, .. }));
    let nothing = rtn(Floats::F32(&[]), [0, 4], format, Rtn::default()).unwrap();
    let done = refine(Floats::F32(&[]), &nothing, &Hessian::new(4).unwrap(), Refine::default()).unwrap();
    assert_eq!((done.weights, done.dead, done.loss), (nothing, 4, 0.0));
}
