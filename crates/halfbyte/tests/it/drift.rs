//! Second moments and the correction for drift, against their definitions.

use crate::data::Random;
use crate::gptq::{correlated, hessian_of, identity, mean_diagonal};
use halfbyte::quantize::{CrossMoment, Drift, Hessian, correct};
use halfbyte::{Error, Floats};

fn moment_of(e: &[f32], m: usize, x: &[f32], k: usize) -> CrossMoment {
    let mut moment = CrossMoment::new(m, k).unwrap();
    moment.add(e, x, x.len() / k).unwrap();
    moment
}

#[test]
fn cross_moments_are_the_sums_over_all_batches() {
    let mut random = Random(61);
    for (rows, m, k) in [(1, 1, 1), (3, 5, 2), (300, 7, 67), (530, 70, 3)] {
        let (e, x) = (random.normals(rows * m), random.activations(rows * k));
        let whole = moment_of(&e, m, &x, k);
        let mut parts = CrossMoment::new(m, k).unwrap();
        let cut = rows / 3;
        parts.add(&e[..cut * m], &x[..cut * k], cut).unwrap();
        parts.add(&e[cut * m..], &x[cut * k..], rows - cut).unwrap();
        assert_eq!((whole.m(), whole.k()), (m, k));
        for i in 0..m {
            for j in 0..k {
                let terms = (0..rows).map(|r| f64::from(e[r * m + i]) * f64::from(x[r * k + j]));
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                assert!((whole.row(i)[j] - sum).abs() <= 1e-13 * magnitude, "{rows} {m} {k} [{i}, {j}]");
                assert!((parts.row(i)[j] - sum).abs() <= 1e-13 * magnitude, "{rows} {m} {k} [{i}, {j}]");
            }
        }
    }
}

#[test]
fn squares_and_scaled_hessians_are_those_of_the_inputs() {
    let mut random = Random(62);
    for (rows, k) in [(1, 1), (40, 7), (60, 131), (300, 260)] {
        let x = random.activations(rows * k);
        let factors: Vec<f32> = (0..k).map(|_| 0.1 + random.normal().abs()).collect();
        let scaled: Vec<f32> = x.iter().enumerate().map(|(i, v)| v * factors[i % k]).collect();
        let hessian = hessian_of(&x, k).scaled(&factors).unwrap();
        assert_eq!(hessian.rows(), rows as u64);
        let errors: Vec<f64> = random.normals(21 * k).into_iter().map(f64::from).collect();
        let squares = hessian.squares(&errors);
        assert_eq!(squares.len(), 21);
        for (square, error) in squares.iter().zip(errors.chunks(k)) {
            let outputs = scaled.chunks(k).map(|x| x.iter().zip(error).map(|(&x, e)| f64::from(x) * e).sum::<f64>());
            let expected: f64 = outputs.map(|y| y * y).sum();
            assert!((square / expected - 1.0).abs() < 1e-5, "{rows} {k}: {square}, expected {expected}");
        }
    }
    assert!(identity(3).scaled(&[1.0; 2]).is_err());
    let error = identity(3).scaled(&[1.0, f32::NAN, 1.0]).unwrap_err();
    assert!(matches!(error, Error::NotFinite { row: 0, column: 1, .. }));
    assert!(Hessian::new(0).unwrap().squares(&[]).is_empty());
}

#[test]
fn corrected_weights_solve_the_normal_equations() {
    let mut random = Random(63);
    for (n, k, rows) in [(1, 1, 4), (9, 40, 200), (50, 150, 300), (3, 257, 900)] {
        let x = correlated(&mut random, rows, k);
        let drift: Vec<f32> = random.normals(rows * k).into_iter().map(|v| 0.1 * v).collect();
        let w = random.normals(n * k);
        let missing: Vec<f32> = drift
            .chunks(k)
            .flat_map(|d| w.chunks(k).map(move |w| d.iter().zip(w).map(|(a, b)| a * b).sum::<f32>()))
            .collect();
        let hessian = hessian_of(&x, k);
        let (inputs, outputs) = (moment_of(&drift, k, &x, k), moment_of(&missing, n, &x, k));
        let from = |drift| correct(Floats::F32(&w), [n, k], &hessian, drift, 0.1).unwrap();
        let (of_inputs, of_outputs) = (from(Drift::Inputs(&inputs)), from(Drift::Outputs(&outputs)));
        let damping = 0.1 * mean_diagonal(&hessian);
        for i in 0..n {
            for j in 0..k {
                let at = i * k + j;
                assert!((of_inputs[at] - of_outputs[at]).abs() < 1e-5, "{n} {k}: {} {}", of_inputs[at], of_outputs[at]);
                let terms = (0..k).map(|a| {
                    let h = hessian.get(a, j) + if a == j { damping } else { 0.0 };
                    (f64::from(of_outputs[i * k + a]) - f64::from(w[i * k + a])) * h
                });
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
                let wanted = outputs.row(i)[j];
                let size = magnitude + wanted.abs() + hessian.get(j, j);
                assert!((sum - wanted).abs() < 1e-5 * size, "{n} {k} [{i}, {j}]: {sum}, expected {wanted}");
            }
        }
        // What it is for: outputs closer to those of the inputs that have not drifted.
        let error = |corrected: &[f32]| -> f64 {
            let of = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(a, b)| f64::from(a * b)).sum::<f64>();
            let rows = x.chunks(k).zip(missing.chunks(n));
            rows.map(|(x, missing)| -> f64 {
                let of_row = |i: usize| {
                    of(&w[i * k..(i + 1) * k], x) + f64::from(missing[i]) - of(&corrected[i * k..(i + 1) * k], x)
                };
                (0..n).map(|i| of_row(i).powi(2)).sum()
            })
            .sum()
        };
        assert!(error(&of_outputs) < error(&w), "{n} {k}");
    }
}

#[test]
fn without_drift_nothing_changes() {
    let mut random = Random(64);
    let (n, k) = (5, 90);
    let w = random.normals(n * k);
    let x = correlated(&mut random, 200, k);
    let hessian = hessian_of(&x, k);
    let none = |m: usize| moment_of(&vec![0.0; 200 * m], m, &x, k);
    let (inputs, outputs) = (none(k), none(n));
    for drift in [Drift::Inputs(&inputs), Drift::Outputs(&outputs)] {
        assert_eq!(correct(Floats::F32(&w), [n, k], &hessian, drift, 0.01).unwrap(), w);
    }
}

#[test]
fn dead_columns_keep_their_weights() {
    let mut random = Random(65);
    let (n, k, rows) = (4, 50, 30);
    let w = random.normals(n * k);
    let mut x = correlated(&mut random, rows, k);
    x.iter_mut().enumerate().filter(|(i, _)| i % k % 6 == 1).for_each(|(_, v)| *v = 0.0);
    let missing = random.normals(rows * n);
    // Fewer inputs than channels: without damping there would be no factor.
    let corrected =
        correct(Floats::F32(&w), [n, k], &hessian_of(&x, k), Drift::Outputs(&moment_of(&missing, n, &x, k)), 0.0)
            .unwrap();
    for (at, (a, b)) in corrected.iter().zip(&w).enumerate() {
        assert_eq!(a == b, at % k % 6 == 1, "element {at}: {a}, was {b}");
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut random = Random(66);
    let (n, k, rows) = (97, 200, 400);
    let (w, e) = (random.normals(n * k), random.normals(rows * n));
    let x = correlated(&mut random, rows, k);
    let run = |threads: usize| -> Vec<u32> {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let (hessian, moment) = (hessian_of(&x, k), moment_of(&e, n, &x, k));
            let corrected = correct(Floats::F32(&w), [n, k], &hessian, Drift::Outputs(&moment), 0.1).unwrap();
            let squares = hessian.squares(&corrected.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>());
            corrected.into_iter().map(f32::to_bits).chain(squares.into_iter().map(|v| (v as f32).to_bits())).collect()
        })
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

#[test]
fn bad_input_is_an_error_that_says_where() {
    let mut moment = CrossMoment::new(2, 3).unwrap();
    let before = moment.clone();
    assert!(moment.add(&[1.0; 4], &[1.0; 5], 2).is_err() && moment.add(&[1.0; 3], &[1.0; 6], 2).is_err());
    let error = moment.add(&[1.0, 1.0, f32::NAN, 1.0], &[1.0; 6], 2).unwrap_err();
    assert!(matches!(error, Error::NotFinite { row: 1, column: 0, .. }), "{error}");
    let error = moment.add(&[1.0; 4], &[1.0, 1.0, 1.0, 1.0, 1.0, f32::INFINITY], 2).unwrap_err();
    assert!(matches!(error, Error::NotFinite { row: 1, column: 2, .. }), "{error}");
    assert_eq!(moment, before, "a refused batch must leave nothing behind");
    assert!(CrossMoment::new(usize::MAX, 2).is_err() && CrossMoment::new(1 << 40, 1 << 20).is_err());

    let hessian = identity(3);
    let run = |w: &[f32], shape, hessian: &Hessian, drift, damping| {
        correct(Floats::F32(w), shape, hessian, drift, damping).unwrap_err().to_string()
    };
    let w = [0.5f32; 6];
    let drift = Drift::Outputs(&moment);
    assert!(run(&w, [3, 3], &hessian, drift, 0.1).contains("expected 3 × 3 weights, got 6"));
    assert!(run(&w, [2, 3], &identity(4), drift, 0.1).contains("expected a Hessian of k 3, got k 4"));
    assert!(run(&w, [2, 3], &hessian, drift, f64::NAN).contains("damping"));
    assert!(run(&w, [2, 3], &hessian, Drift::Inputs(&moment), 0.1).contains("expected a cross moment of 3 × 3"));
    assert!(run(&w[..3], [1, 3], &hessian, drift, 0.1).contains("expected a cross moment of 1 × 3, got 2 × 3"));
    assert!(run(&w, [2, 3], &Hessian::new(3).unwrap(), drift, 0.1).contains("got 0 inputs"));
    let mut large = CrossMoment::new(2, 3).unwrap();
    large.add(&[1e38; 2], &[1e30, 0.0, 0.0], 1).unwrap();
    assert!(run(&w, [2, 3], &hessian, Drift::Outputs(&large), 0.0).contains("within the range of f32"));
    let none = CrossMoment::new(0, 3).unwrap();
    assert!(correct(Floats::F32(&[]), [0, 3], &hessian, Drift::Outputs(&none), 0.1).unwrap().is_empty());
}
