//! GPTQ against a textbook, against rounding to nearest, and at its edges.

use crate::data::{Random, parse};
use halfbyte::format::reference;
use halfbyte::quantize::{Calibrated, Gptq, Hessian, Rtn, SymmetricScale, gptq, rtn};
use halfbyte::{Error, Float, Floats, Group, QTensor, WeightFormat, Zero, Zeros};

/// Inputs `[rows, k]` whose channels depend on each other and differ in size.
pub fn correlated(random: &mut Random, rows: usize, k: usize) -> Vec<f32> {
    let sizes: Vec<f32> = (0..k).map(|_| 0.2 + 2.0 * random.normal().abs()).collect();
    let mut x = vec![0.0f32; rows * k];
    for row in x.chunks_mut(k) {
        let common = random.normal();
        let mut last = 0.0;
        for (v, size) in row.iter_mut().zip(&sizes) {
            last = 0.8 * last + 0.6 * random.normal();
            *v = (last + 0.5 * common) * size;
        }
    }
    x
}

pub fn hessian_of(x: &[f32], k: usize) -> Hessian {
    let mut hessian = Hessian::new(k).unwrap();
    hessian.add(x, x.len() / k).unwrap();
    hessian
}

pub fn identity(k: usize) -> Hessian {
    let x: Vec<f32> = (0..k * k).map(|i| if i / k == i % k { 1.0 } else { 0.0 }).collect();
    hessian_of(&x, k)
}

/// `tr((W − Q) · (H + damping) · (W − Q)ᵀ)`, damping being absolute.
pub fn objective(w: &[f32], q: &QTensor, hessian: &Hessian, damping: f64) -> f64 {
    let k = q.k();
    let error: Vec<f64> = reference::dequantize(q).iter().zip(w).map(|(q, &w)| q - f64::from(w)).collect();
    let mut sum = 0.0;
    for row in error.chunks(k) {
        for i in 0..k {
            let of_row: f64 = (0..k).map(|j| row[j] * hessian.get(i, j)).sum();
            sum += row[i] * (of_row + damping * row[i]);
        }
    }
    sum
}

pub fn mean_diagonal(hessian: &Hessian) -> f64 {
    (0..hessian.k()).map(|j| hessian.get(j, j)).sum::<f64>() / hessian.k() as f64
}

pub fn formats() -> Vec<WeightFormat> {
    let mut formats = Vec::new();
    for bits in [2, 3, 4, 8] {
        for zero in [Zero::Symmetric, Zero::Integer, Zero::Float] {
            for group in [Group::Channel, Group::Tensor, Group::Size(32), Group::Size(20), Group::Size(150)] {
                formats.push(WeightFormat { bits, group, zero, scale: Float::F16, channel_scale: None });
            }
        }
    }
    formats
}

fn variants() -> [Gptq; 4] {
    let plain = Gptq::default();
    [
        plain,
        Gptq { act_order: true, ..plain },
        Gptq { static_groups: true, ..plain },
        Gptq { act_order: true, static_groups: true, symmetric: SymmetricScale::Full, search: false, ..plain },
    ]
}

/// The paper's equations 2 and 3 as they stand: an explicit inverse, from which each column is eliminated once it is
/// quantised. Scales by their definition. Returns codes and scales.
fn textbook(
    w: &[f32],
    [n, k]: [usize; 2],
    format: WeightFormat,
    hessian: &Hessian,
    options: Gptq,
) -> (Vec<u8>, Vec<f32>) {
    let mut order: Vec<usize> = (0..k).collect();
    if options.act_order {
        order.sort_by(|&a, &b| hessian.get(b, b).partial_cmp(&hessian.get(a, a)).unwrap());
    }
    let damping = options.damping * mean_diagonal(hessian);
    let mut inverse = vec![vec![0.0f64; k]; k];
    let mut h: Vec<Vec<f64>> = (0..k)
        .map(|a| {
            let of = |b: usize| hessian.get(order[a], order[b]) + if a == b { damping } else { 0.0 };
            (0..k).map(of).collect()
        })
        .collect();
    for (j, row) in inverse.iter_mut().enumerate() {
        row[j] = 1.0;
    }
    // Gauss-Jordan; a positive definite matrix needs no pivoting.
    for p in 0..k {
        let pivot = h[p][p];
        h[p].iter_mut().chain(inverse[p].iter_mut()).for_each(|v| *v /= pivot);
        let (h_p, inverse_p) = (h[p].clone(), inverse[p].clone());
        for r in (0..k).filter(|&r| r != p) {
            let factor = h[r][p];
            h[r].iter_mut().zip(&h_p).for_each(|(v, f)| *v -= factor * f);
            inverse[r].iter_mut().zip(&inverse_p).for_each(|(v, f)| *v -= factor * f);
        }
    }

    let max = ((1u32 << format.bits) - 1) as f32;
    let middle = (1u32 << (format.bits - 1)) as f32;
    let params = |group: &[f32]| -> (f32, f32) {
        let low = group.iter().fold(0.0f32, |a, &v| a.min(v));
        let high = group.iter().fold(0.0f32, |a, &v| a.max(v));
        match (format.zero, options.symmetric) {
            (Zero::Symmetric, SymmetricScale::Narrow) => (format.scale.round(high.max(-low) / (middle - 1.0)), middle),
            (Zero::Symmetric, SymmetricScale::Full) => (format.scale.round(high.max(-low) / (max / 2.0)), middle),
            _ => {
                let scale = format.scale.round((high - low) / max);
                (scale, (-low / scale).round_ties_even())
            }
        }
    };
    let len = format.group.len(k);
    let groups = format.group.count(k);
    let mut weights: Vec<Vec<f64>> = (0..n).map(|i| order.iter().map(|&j| f64::from(w[i * k + j])).collect()).collect();
    let mut chosen = vec![(0.0, 0.0); n * groups];
    for i in 0..n {
        for g in 0..groups {
            chosen[i * groups + g] = params(&w[i * k + g * len..i * k + ((g + 1) * len).min(k)]);
        }
    }
    let mut codes = vec![0u8; n * k];
    for p in 0..k {
        let group = if options.static_groups { order[p] / len } else { p / len };
        for (i, row) in weights.iter_mut().enumerate() {
            if !options.static_groups && p % len == 0 {
                let updated: Vec<f32> = row[p..(p + len).min(k)].iter().map(|&v| v as f32).collect();
                chosen[i * groups + group] = params(&updated);
            }
            let (scale, zero) = chosen[i * groups + group];
            let code = (row[p] as f32 / scale + zero).round_ties_even().clamp(0.0, max);
            codes[i * k + order[p]] = code as u8;
            let error = (row[p] - f64::from(scale) * f64::from(code - zero)) / inverse[p][p];
            for l in p..k {
                row[l] -= error * inverse[p][l];
            }
        }
        let eliminated = inverse[p].clone();
        for r in p + 1..k {
            let factor = eliminated[r] / eliminated[p];
            inverse[r].iter_mut().zip(&eliminated).for_each(|(v, e)| *v -= factor * e);
        }
    }
    (codes, chosen.into_iter().map(|(scale, _)| scale).collect())
}

#[test]
fn codes_and_scales_are_the_textbooks() {
    let mut random = Random(31);
    let (n, k) = (21, 301);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 700, k), k);
    let mut compared = 0;
    for format in formats() {
        if format.zero == Zero::Float || format.group == Group::Tensor {
            continue;
        }
        for options in variants() {
            let ours = gptq(Floats::F32(&w), [n, k], format, &hessian, options).unwrap();
            let (codes, scales) = textbook(&w, [n, k], format, &hessian, options);
            assert_eq!(ours.weights.scales(), scales, "{format:?} {options:?}");
            let differing = ours.weights.codes().iter().zip(&codes).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "{format:?} {options:?}");
            compared += 1;
        }
    }
    assert_eq!(compared, 4 * 2 * 4 * 4);
}

#[test]
fn outputs_are_closer_than_after_rounding_to_nearest() {
    let mut random = Random(32);
    let (n, k) = (6, 230);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 900, k), k);
    for format in formats() {
        for options in variants() {
            for search in [false, true] {
                let options = Gptq { search, ..options };
                let nearest = Rtn { symmetric: options.symmetric, search };
                let nearest = rtn(Floats::F32(&w), [n, k], format, nearest).unwrap();
                let nearest = objective(&w, &nearest, &hessian, 0.0);
                let ours = gptq(Floats::F32(&w), [n, k], format, &hessian, options).unwrap();
                let damping = options.damping * mean_diagonal(&hessian);
                let loss = objective(&w, &ours.weights, &hessian, damping);
                assert!((ours.loss / loss - 1.0).abs() < 1e-9, "{format:?} {options:?}: {} or {loss}", ours.loss);
                assert_eq!((ours.damping, ours.dead), (0.01, 0));
                let ours = objective(&w, &ours.weights, &hessian, 0.0);
                assert!(ours < 0.8 * nearest, "{format:?} {options:?}: {ours}, nearest {nearest}");
            }
        }
    }
}

#[test]
fn a_search_weighs_errors_as_the_loss_does() {
    let mut random = Random(40);
    let (n, k) = (30, 256);
    let w = random.normals(n * k);
    let hessian = hessian_of(&correlated(&mut random, 900, k), k);
    for name in ["w2a16-g64-asym", "w3a16-g64", "w3a16-g128-asym", "w4a16-g128-asym", "w3a16-tensor"] {
        for options in variants() {
            let loss = |search| {
                let options = Gptq { search, ..options };
                gptq(Floats::F32(&w), [n, k], parse(name).weight, &hessian, options).unwrap().loss
            };
            let (plain, search) = (loss(false), loss(true));
            assert!(search < 0.97 * plain, "{name} {options:?}: {search}, without {plain}");
        }
    }
}

#[test]
fn inputs_without_correlation_give_rounding_to_nearest() {
    let mut random = Random(33);
    let (n, k) = (7, 290);
    let w = random.normals(n * k);
    let hessian = identity(k);
    for format in formats() {
        for options in variants() {
            for search in [false, true] {
                let options = Gptq { search, ..options };
                let ours = gptq(Floats::F32(&w), [n, k], format, &hessian, options).unwrap();
                let nearest = Rtn { symmetric: options.symmetric, search };
                assert_eq!(ours.weights, rtn(Floats::F32(&w), [n, k], format, nearest).unwrap(), "{format:?}");
            }
        }
    }
}

#[test]
fn act_order_takes_the_largest_diagonal_first() {
    let k = 8;
    let mut x = vec![0.0f32; k * k];
    for (j, size) in [1.0, 8.0, 3.0, 6.0, 2.0, 7.0, 5.0, 4.0].into_iter().enumerate() {
        x[j * k + j] = size;
    }
    let hessian = hessian_of(&x, k);
    let w = Random(34).normals(3 * k);
    let act = |static_groups| {
        let options = Gptq { act_order: true, static_groups, ..Gptq::default() };
        gptq(Floats::F32(&w), [3, k], parse("w4a16-g2-asym").weight, &hessian, options).unwrap().weights
    };
    assert_eq!(act(false).group_index(), Some(&[3, 0, 2, 1, 3, 0, 1, 2][..]));
    assert_eq!(act(true).group_index(), None);
    let nearest = rtn(Floats::F32(&w), [3, k], parse("w4a16-g2-asym").weight, Rtn::default()).unwrap();
    assert_eq!(act(true), nearest);
}

#[test]
fn the_hessian_is_the_sum_over_all_batches() {
    let mut random = Random(35);
    for (rows, k) in [(1, 1), (3, 5), (300, 7), (1030, 67), (20, 133)] {
        let x = random.activations(rows * k);
        let whole = hessian_of(&x, k);
        let mut parts = Hessian::new(k).unwrap();
        let cut = rows / 3 * k;
        parts.add(&x[..cut], rows / 3).unwrap();
        parts.add(&x[cut..], rows - rows / 3).unwrap();
        assert_eq!((whole.rows(), parts.rows(), whole.k()), (rows as u64, rows as u64, k));
        for i in 0..k {
            for j in 0..k {
                let terms = (0..rows).map(|r| f64::from(x[r * k + i]) * f64::from(x[r * k + j]));
                let (sum, magnitude) = terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()));
                assert!((whole.get(i, j) - sum).abs() <= 1e-13 * magnitude, "{rows} {k} [{i}, {j}]");
                assert!((parts.get(i, j) - sum).abs() <= 1e-13 * magnitude, "{rows} {k} [{i}, {j}]");
                assert_eq!(whole.get(i, j), whole.get(j, i));
            }
        }
    }
}

#[test]
fn dead_columns_become_zero_and_leave_the_others_alone() {
    let mut random = Random(36);
    let (n, k) = (5, 96);
    let dead = |j: usize| j % 7 == 3 || (40..50).contains(&j);
    let mut x = correlated(&mut random, 300, k);
    x.iter_mut().enumerate().filter(|(i, _)| dead(i % k)).for_each(|(_, v)| *v = 0.0);
    let hessian = hessian_of(&x, k);
    let mut w = random.normals(n * k);
    for name in ["w4a16-g32", "w3a16-g32-asym", "w2a16"] {
        for options in variants() {
            let quantize = |w: &[f32]| gptq(Floats::F32(w), [n, k], parse(name).weight, &hessian, options).unwrap();
            let Calibrated { weights, damping, dead: count, loss } = quantize(&w);
            assert_eq!((count, damping), ((0..k).filter(|&j| dead(j)).count(), 0.01));
            assert!(loss.is_finite() && loss > 0.0);
            for (i, v) in reference::dequantize(&weights).iter().enumerate().filter(|(i, _)| dead(i % k)) {
                assert_eq!(*v, 0.0, "{name} element {i}");
            }
            // Not even an enormous weight there changes anything.
            let before = w.clone();
            w.iter_mut().enumerate().filter(|(i, _)| dead(i % k)).for_each(|(_, v)| *v = 1e6);
            assert_eq!(quantize(&w).weights, weights, "{name}");
            w = before;
        }
    }
}

#[test]
fn a_singular_hessian_is_damped_until_it_can_be_factored() {
    let mut random = Random(37);
    let (n, k) = (4, 200);
    let w = random.normals(n * k);
    let format = parse("w3a16-g64").weight;
    let nearest = rtn(Floats::F32(&w), [n, k], format, Rtn::default()).unwrap();
    for rows in [1, 2, 150] {
        let hessian = hessian_of(&random.normals(rows * k), k);
        for damping in [0.0, 0.01] {
            let options = Gptq { damping, ..Gptq::default() };
            let ours = gptq(Floats::F32(&w), [n, k], format, &hessian, options).unwrap();
            assert_eq!(ours.damping, if damping == 0.0 { 1e-6 } else { 0.01 }, "rank {rows}");
            let (a, b) = (objective(&w, &ours.weights, &hessian, 0.0), objective(&w, &nearest, &hessian, 0.0));
            assert!(a < 0.7 * b, "rank {rows}, damping {damping}: {a}, nearest {b}");
        }
    }
}

#[test]
fn empty_matrices_have_empty_results() {
    let format = parse("w4a16-g32-asym").weight;
    let nothing = gptq(Floats::F32(&[]), [0, 40], format, &Hessian::new(40).unwrap(), Gptq::default()).unwrap();
    assert_eq!((nothing.weights.n(), nothing.weights.k(), nothing.weights.scales().len()), (0, 40, 0));
    let mut hessian = Hessian::new(0).unwrap();
    hessian.add(&[], 9).unwrap();
    assert_eq!(hessian.rows(), 9);
    let nothing = gptq(Floats::F32(&[]), [3, 0], format, &hessian, Gptq::default()).unwrap();
    assert_eq!(nothing.weights, rtn(Floats::F32(&[]), [3, 0], format, Rtn::default()).unwrap());
    let one = gptq(Floats::F32(&[0.5]), [1, 1], format, &identity(1), Gptq::default()).unwrap();
    assert!((reference::dequantize(&one.weights)[0] - 0.5).abs() < 1e-3);
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let mut random = Random(38);
    let (n, k) = (101, 270);
    let w = random.normals(n * k);
    let x = correlated(&mut random, 600, k);
    let run = |threads: usize| {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
            let hessian = hessian_of(&x, k);
            let results: Vec<(QTensor, u64)> = ["w4a16-g64-asym", "w2a16", "w3a16-g20-float"]
                .into_iter()
                .flat_map(|name| variants().map(|options| (name, options)))
                .map(|(name, options)| {
                    let done = gptq(Floats::F32(&w), [n, k], parse(name).weight, &hessian, options).unwrap();
                    (done.weights, done.loss.to_bits())
                })
                .collect();
            let bits: Vec<u64> = (0..k * k).map(|i| hessian.get(i / k, i % k).to_bits()).collect();
            (bits, results)
        })
    };
    let one = run(1);
    for threads in [2, 3, 8] {
        assert!(run(threads) == one, "{threads} threads");
    }
}

#[test]
fn half_weights_mean_what_their_values_mean() {
    let mut random = Random(39);
    let (n, k) = (3, 64);
    let halves: Vec<half::f16> = random.normals(n * k).into_iter().map(half::f16::from_f32).collect();
    let w: Vec<f32> = halves.iter().map(|v| v.to_f32()).collect();
    let hessian = hessian_of(&correlated(&mut random, 100, k), k);
    let format = parse("w4a16-g32").weight;
    let a = gptq(Floats::F16(&halves), [n, k], format, &hessian, Gptq::default()).unwrap();
    assert_eq!(a, gptq(Floats::F32(&w), [n, k], format, &hessian, Gptq::default()).unwrap());
}

#[test]
fn bad_input_is_an_error_that_says_where() {
    let format = parse("w4a16-g2").weight;
    let mut hessian = identity(4);
    let before = hessian.clone();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = [1.0f32; 12];
        x[9] = bad;
        let error = hessian.add(&x, 3).unwrap_err();
        assert!(matches!(error, Error::NotFinite { row: 2, column: 1, .. }), "{error}");
        let error = gptq(Floats::F32(&x), [3, 4], format, &hessian, Gptq::default()).unwrap_err();
        assert!(matches!(error, Error::NotFinite { row: 2, column: 1, .. }), "{error}");
    }
    assert!(hessian.add(&[1.0; 5], 1).is_err() && hessian.add(&[1.0; 4], usize::MAX).is_err());
    assert_eq!(hessian, before, "a refused batch must leave nothing behind");
    assert!(Hessian::new(usize::MAX).is_err() && Hessian::new(1 << 31).is_err());

    let w = [0.5f32; 8];
    let run = |w: &[f32], shape, hessian: &Hessian, options| {
        gptq(Floats::F32(w), shape, format, hessian, options).unwrap_err().to_string()
    };
    let plain = Gptq::default();
    assert!(run(&w, [3, 4], &hessian, plain).contains("expected 3 × 4 weights, got 8"));
    assert!(run(&w, [4, 2], &hessian, plain).contains("expected a Hessian of k 2, got k 4"));
    for damping in [-0.1, f64::NAN, f64::INFINITY] {
        assert!(run(&w, [2, 4], &hessian, Gptq { damping, ..plain }).contains("damping"));
    }
    assert!(run(&w, [2, 4], &Hessian::new(4).unwrap(), plain).contains("got 0 inputs"));
    let mut zeros = Hessian::new(4).unwrap();
    zeros.add(&[0.0; 12], 3).unwrap();
    assert!(run(&w, [2, 4], &zeros, plain).contains("got 3 inputs, all of them zero"));
    let mut large = vec![0.5f32; 400];
    large[4 * 77 + 3] = 1e9;
    large[4 * 90] = 1e9;
    assert!(run(&large, [100, 4], &hessian, plain).contains("too large for that in row 77"));
    assert!(run(&large, [100, 4], &hessian, Gptq { static_groups: true, ..plain }).contains("in row 77"));
    let no_bits = WeightFormat { bits: 5, ..format };
    assert!(gptq(Floats::F32(&w), [2, 4], no_bits, &hessian, plain).is_err());
    let whole = gptq(Floats::F32(&w), [2, 4], format, &hessian, plain).unwrap().weights;
    assert_eq!(whole.zeros(), &Zeros::Symmetric);
}
