//! AWQ's searches against their definitions.

use crate::data::{Random, parse};
use crate::gptq::{correlated, formats, hessian_of, identity, objective};
use halfbyte::format::reference;
use halfbyte::quantize::{AwqScales, Hessian, Rtn, SymmetricScale, awq_scales, rtn, rtn_clipped};
use halfbyte::{Error, Floats, Group, QTensor, WeightFormat, Zero};

const NARROW: SymmetricScale = SymmetricScale::Narrow;

/// Inputs with a few channels much larger than the others.
fn outlying(random: &mut Random, rows: usize, k: usize) -> Vec<f32> {
    let mut x = correlated(random, rows, k);
    x.iter_mut().enumerate().filter(|(i, _)| i % k % 29 == 4).for_each(|(_, v)| *v *= 30.0);
    x
}

#[test]
fn the_exponent_is_the_one_of_least_error() {
    let mut random = Random(71);
    let k = 120;
    let x = outlying(&mut random, 400, k);
    let hessian = hessian_of(&x, k);
    let matrices: Vec<(Vec<f32>, usize)> = [5, 2].into_iter().map(|n| (random.normals(n * k), n)).collect();
    let shared: Vec<(Floats<'_>, usize)> = matrices.iter().map(|(w, n)| (Floats::F32(w), *n)).collect();
    for format in formats() {
        let AwqScales { scales, exponent, loss, plain_loss } =
            awq_scales(&shared, k, format, &hessian, NARROW).unwrap();
        let size = |j: usize| (x.chunks(k).map(|x| f64::from(x[j]).powi(2)).sum::<f64>() / 400.0).sqrt();
        let powers = |exponent: f64| -> Vec<f32> {
            let powers: Vec<f64> = (0..k).map(|j| size(j).powf(exponent)).collect();
            let (low, high) = powers.iter().fold((f64::MAX, 0.0f64), |(l, h), &p| (l.min(p), h.max(p)));
            powers.iter().map(|p| (p / (low * high).sqrt()) as f32).collect()
        };
        for (ours, expected) in scales.iter().zip(powers(exponent)) {
            assert!((ours / expected - 1.0).abs() < 1e-5, "{format:?}: {ours}, expected {expected}");
        }
        let error = |scales: &[f32]| -> f64 {
            let of = |(w, n): &(Vec<f32>, usize)| {
                let scaled: Vec<f32> = w.iter().enumerate().map(|(i, w)| w * scales[i % k]).collect();
                let q = rtn(Floats::F32(&scaled), [*n, k], format, Rtn::default()).unwrap();
                // Inputs divided by the scales: the Hessian on both sides.
                let inverse: Vec<f32> = scales.iter().map(|s| 1.0 / s).collect();
                objective(&scaled, &q, &hessian.clone().scaled(&inverse).unwrap(), 0.0)
            };
            matrices.iter().map(of).sum()
        };
        assert!((loss / error(&scales) - 1.0).abs() < 1e-5, "{format:?}: {loss}");
        assert!((plain_loss / error(&vec![1.0; k]) - 1.0).abs() < 1e-9, "{format:?}: {plain_loss}");
        let least = (0..20).map(|step| error(&powers(f64::from(step) / 20.0))).fold(f64::INFINITY, f64::min);
        // Scales are not the same to the last bit, and a code may fall to the other side.
        assert!(loss < least * 1.01, "{format:?}: {loss}, {least} can be had");
        if format.bits == 4 {
            assert!(loss < 0.7 * plain_loss, "{format:?}: {loss}, without scales {plain_loss}");
        }
    }
}

#[test]
fn large_matrices_are_sampled_and_dead_channels_left_alone() {
    let mut random = Random(72);
    let (n, k) = (1100, 32);
    let mut x = outlying(&mut random, 200, k);
    x.iter_mut().enumerate().filter(|(i, _)| i % k == 9).for_each(|(_, v)| *v = 0.0);
    let hessian = hessian_of(&x, k);
    let w = random.normals(n * k);
    let format = parse("w3a16-g16-asym").weight;
    let whole = awq_scales(&[(Floats::F32(&w), n)], k, format, &hessian, NARROW).unwrap();
    assert_eq!(whole.scales[9], 1.0);
    assert!(whole.exponent > 0.0 && whole.loss < whole.plain_loss);
    let rows: Vec<f32> = (0..256).flat_map(|i| w[i * n / 256 * k..][..k].to_vec()).collect();
    let sample = awq_scales(&[(Floats::F32(&rows), 256)], k, format, &hessian, NARROW).unwrap();
    assert_eq!(whole, sample);
}

/// Loss of one row as far as it comes from the columns of a group.
fn group_loss(error: &[f64], first: usize, hessian: &Hessian) -> f64 {
    let h = |a: usize, b: usize| hessian.get(first + a, first + b);
    let of = |a: usize| error.iter().enumerate().map(|(b, e)| e * h(a, b)).sum::<f64>();
    error.iter().enumerate().map(|(a, e)| e * of(a)).sum()
}

/// What a search may choose from, by definition: a group's range times 41 factors, rounded to nearest.
fn choices(group: &[f32], format: WeightFormat) -> Vec<Vec<f64>> {
    let max = f64::from(format.max_code());
    let middle = max.div_euclid(2.0) + 1.0;
    let choice = |step: i32| {
        let factor = 1.0 - 0.5 * step as f32 / 40.0;
        let low = group.iter().fold(0.0f32, |a, &v| a.min(v)) * factor;
        let high = group.iter().fold(0.0f32, |a, &v| a.max(v)) * factor;
        let (scale, zero) = match format.zero {
            Zero::Symmetric => (format.scale.round(high.max(-low) / (middle - 1.0) as f32), middle as f32),
            _ => {
                let scale = format.scale.round((high - low) / max as f32);
                (scale, (-low / scale).round_ties_even())
            }
        };
        let value = |&v: &f32| {
            let code = (v / scale + zero).round_ties_even().clamp(0.0, max as f32);
            f64::from(scale) * (f64::from(code) - f64::from(zero)) - f64::from(v)
        };
        group.iter().map(value).collect()
    };
    (0..=40).map(choice).collect()
}

#[test]
fn clipped_ranges_are_those_of_least_error() {
    let mut random = Random(73);
    let (n, k) = (4, 170);
    let w = random.normals(n * k);
    let hessian = hessian_of(&outlying(&mut random, 500, k), k);
    for format in formats() {
        let done = rtn_clipped(Floats::F32(&w), [n, k], format, &hessian, NARROW).unwrap();
        assert_eq!((done.damping, done.dead), (0.0, 0));
        let loss = objective(&w, &done.weights, &hessian, 0.0);
        assert!((done.loss / loss - 1.0).abs() < 1e-9, "{format:?}: {} or {loss}", done.loss);
        let errors: Vec<f64> =
            reference::dequantize(&done.weights).iter().zip(&w).map(|(q, &w)| q - f64::from(w)).collect();
        if format.zero == Zero::Float {
            continue;
        }
        if format.group == Group::Tensor {
            let losses = choices(&w, format)
                .into_iter()
                .map(|errors| -> f64 { errors.chunks(k).map(|row| group_loss(row, 0, &hessian)).sum() });
            let least = losses.fold(f64::INFINITY, f64::min);
            assert!((loss / least - 1.0).abs() < 1e-9, "{format:?}: {loss}, {least} can be had");
            continue;
        }
        let len = format.group.len(k);
        for (w, errors) in w.chunks(k).zip(errors.chunks(k)) {
            for (g, (group, errors)) in w.chunks(len).zip(errors.chunks(len)).enumerate() {
                let loss = |errors: &[f64]| group_loss(errors, g * len, &hessian);
                let least = choices(group, format).iter().map(|e| loss(e)).fold(f64::INFINITY, f64::min);
                assert!(loss(errors) <= least * (1.0 + 1e-9), "{format:?} group {g}: {least} can be had");
            }
        }
    }
}

#[test]
fn clipping_helps_the_outputs() {
    let mut random = Random(74);
    let (n, k) = (20, 256);
    let w = random.normals(n * k);
    let hessian = hessian_of(&outlying(&mut random, 700, k), k);
    for name in ["w3a16-g128-asym", "w4a16-g128", "w2a16-g64-float"] {
        let format = parse(name).weight;
        let done = rtn_clipped(Floats::F32(&w), [n, k], format, &hessian, NARROW).unwrap();
        for search in [false, true] {
            let nearest = rtn(Floats::F32(&w), [n, k], format, Rtn { search, ..Rtn::default() }).unwrap();
            let nearest = objective(&w, &nearest, &hessian, 0.0);
            assert!(done.loss < 0.9 * nearest, "{name}: {}, nearest {nearest}", done.loss);
        }
    }
    // Inputs that do not depend on each other and are of one size: the error of the weights is all that counts.
    let format = parse("w4a16-g32-asym").weight;
    let search = Rtn { search: true, ..Rtn::default() };
    let nearest = rtn(Floats::F32(&w), [n, k], format, search).unwrap();
    assert_eq!(rtn_clipped(Floats::F32(&w), [n, k], format, &identity(k), NARROW).unwrap().weights, nearest);
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut random = Random(75);
    let (n, k) = (101, 150);
    let w = random.normals(n * k);
    let hessian = hessian_of(&outlying(&mut random, 400, k), k);
    let run = |threads: usize| -> Vec<(QTensor, u64, AwqScales)> {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let of = |name: &&str| {
                let format = parse(name).weight;
                let clipped = rtn_clipped(Floats::F32(&w), [n, k], format, &hessian, NARROW).unwrap();
                let scales = awq_scales(&[(Floats::F32(&w), n)], k, format, &hessian, NARROW).unwrap();
                (clipped.weights, clipped.loss.to_bits(), scales)
            };
            ["w4a16-g64-asym", "w2a16", "w3a16-tensor-float"].iter().map(of).collect()
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
    let hessian = identity(4);
    let mut w = [0.5f32; 8];
    let both = |w: &[f32], n: usize, hessian: &Hessian| {
        let scales = awq_scales(&[(Floats::F32(w), n)], 4, format, hessian, NARROW).unwrap_err();
        [scales, rtn_clipped(Floats::F32(w), [n, 4], format, hessian, NARROW).unwrap_err()]
    };
    for error in both(&w, 3, &hessian) {
        assert!(error.to_string().contains("expected 3 × 4 weights, got 8"), "{error}");
    }
    for error in both(&w, 2, &identity(5)) {
        assert!(error.to_string().contains("expected a Hessian of k 4, got k 5"), "{error}");
    }
    for error in both(&w, 2, &Hessian::new(4).unwrap()) {
        assert!(error.to_string().contains("got 0 inputs"), "{error}");
    }
    w[5] = 1e9;
    for error in both(&w, 2, &hessian) {
        assert!(error.to_string().contains("too large for that"), "{error}");
    }
    w[5] = f32::NEG_INFINITY;
    for error in both(&w, 2, &hessian) {
        assert!(matches!(error, Error::NotFinite { row: 1, column: 1, .. }), "{error}");
    }
    assert!(awq_scales(&[], 4, format, &hessian, NARROW).unwrap_err().to_string().contains("at least one matrix"));
    let nothing = awq_scales(&[(Floats::F32(&[]), 0)], 4, format, &Hessian::new(4).unwrap(), NARROW).unwrap();
    assert_eq!(nothing.scales, [1.0; 4]);
    let nothing = rtn_clipped(Floats::F32(&[]), [0, 4], format, &Hessian::new(4).unwrap(), NARROW).unwrap();
    assert_eq!((nothing.weights.n(), nothing.loss), (0, 0.0));
}
