//! Rounding to nearest, and the rule for activations.

use crate::data::{Random, parse};
use halfbyte::format::{FORMATS, reference};
use halfbyte::quantize::activations::quantize_activations;
use halfbyte::quantize::{Rtn, SymmetricScale, rtn};
use halfbyte::{Act, Error, Float, Floats, Group, WeightFormat, Zero};

fn squared_error(w: &[f32], format: WeightFormat, shape: [usize; 2], options: Rtn) -> f64 {
    let q = rtn(Floats::F32(w), shape, format, options).unwrap();
    reference::dequantize(&q).iter().zip(w).map(|(a, &b)| (a - f64::from(b)).powi(2)).sum()
}

#[test]
fn every_weight_is_within_half_a_step() {
    let mut random = Random(11);
    let (n, k) = (9, 300);
    let w = random.normals(n * k);
    for name in FORMATS {
        let format = parse(name).weight;
        let q = rtn(Floats::F32(&w), [n, k], format, Rtn::default()).unwrap();
        let step = |i: usize| f64::from(q.scales()[(i / k) * q.groups() + q.group_of(i % k)]);
        for (i, (a, &b)) in reference::dequantize(&q).iter().zip(&w).enumerate() {
            // The extremes may be off by what rounding the scale and the zero costs besides.
            let levels = f64::from(format.max_code());
            let rounding = step(i) * levels * 2.0 * format.scale.unit_roundoff();
            let zero = if format.zero == Zero::Integer { 0.5 * step(i) } else { 0.0 };
            let error = (a - f64::from(b)).abs();
            // On two levels a range may be cut where that pays.
            let cut = format.channel_scale.is_some() && matches!(q.codes()[i], 0 | 15);
            assert!(
                cut || error <= 0.5 * step(i) + rounding + zero,
                "{name} element {i}: {a} for {b}, step {}",
                step(i)
            );
        }
    }
}

/// Weights that lie close together, far from zero: where the type of offsets has none near the least of them.
#[test]
fn weights_far_from_zero_are_within_half_a_step() {
    let mut random = Random(12);
    for name in ["w8a16-float-sbf16", "w4a16-float", "w4a16-g32-float", "w2a16-float-sbf16"] {
        let format = parse(name).weight;
        for _ in 0..200 {
            let (middle, apart) = (random.normal() * 100.0, 10f32.powi(-(random.below(7) as i32)));
            let w: Vec<f32> = random.normals(64).iter().map(|v| middle + v * apart).collect();
            let q = rtn(Floats::F32(&w), [1, 64], format, Rtn::default()).unwrap();
            for (j, (&w, got)) in w.iter().zip(reference::dequantize(&q)).enumerate() {
                let step = f64::from(q.scales()[q.group_of(j)]);
                let rounding = step * f64::from(format.max_code()) * format.scale.unit_roundoff();
                let (error, most) = ((got - f64::from(w)).abs(), step / 2.0 + rounding + f64::from(w.abs()) * 1e-6);
                assert!(error <= most, "{name}, {w} near {middle} ± {apart}: {got}, {error} of {most}");
            }
        }
    }
}

#[test]
fn symmetric_scales_follow_their_rule() {
    let w = [0.5f32, -1.0, 0.25, 0.75];
    let format =
        WeightFormat { bits: 4, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let scale = |symmetric| rtn(Floats::F32(&w), [1, 4], format, Rtn { symmetric, search: false }).unwrap().scales()[0];
    assert_eq!(scale(SymmetricScale::Narrow), 1.0 / 7.0);
    assert_eq!(scale(SymmetricScale::Full), 1.0 / 7.5);
}

#[test]
fn searching_never_makes_the_error_larger_and_helps_at_few_bits() {
    let mut random = Random(12);
    let w = random.normals(4 * 512);
    for name in FORMATS {
        let format = parse(name).weight;
        let plain = squared_error(&w, format, [4, 512], Rtn::default());
        let searched = squared_error(&w, format, [4, 512], Rtn { search: true, ..Rtn::default() });
        assert!(searched <= plain, "{name}: {searched} > {plain}");
        if format.bits <= 3 && format.group != Group::Tensor {
            assert!(searched < 0.98 * plain, "{name}: {searched} of {plain}");
        }
    }
}

/// Values are compared as they are: in f32 those of weights far from zero would be off by a good part of a step.
#[test]
fn searching_never_makes_the_error_of_a_group_larger_far_from_zero() {
    let (mut random, k) = (Random(17), 16);
    let format = WeightFormat { group: Group::Channel, ..parse("w4a16-g128-float-sf32").weight };
    let mut lower = 0;
    for _ in 0..200 {
        let w: Vec<f32> = random.normals(k).into_iter().map(|v| 1000.0 + 1e-3 * v).collect();
        let plain = squared_error(&w, format, [1, k], Rtn::default());
        let searched = squared_error(&w, format, [1, k], Rtn { search: true, ..Rtn::default() });
        assert!(searched <= plain, "{searched:e} > {plain:e}");
        lower += usize::from(searched < plain);
    }
    assert!(lower > 50, "{lower}");
}

#[test]
fn constant_groups_and_zeros_are_kept() {
    for name in ["w4a16-g4", "w4a16-g4-asym", "w4a16-g4-float", "w2a16-g4-asym-sf32"] {
        let w = [0.0f32, 0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5, -2.0, -2.0, -2.0, -2.0];
        let q = rtn(Floats::F32(&w), [1, 12], parse(name).weight, Rtn::default()).unwrap();
        for (a, b) in reference::dequantize(&q).iter().zip(w) {
            assert!((a - f64::from(b)).abs() <= f64::from(b.abs()) * 2f64.powi(-10), "{name}: {a} for {b}");
        }
    }
}

#[test]
fn nan_infinity_and_too_large_weights_are_errors_that_say_where() {
    let format = parse("w4a16-g2").weight;
    for bad in [f32::NAN, f32::INFINITY] {
        let mut w = [1.0f32; 12];
        w[9] = bad;
        match rtn(Floats::F32(&w), [3, 4], format, Rtn::default()).unwrap_err() {
            Error::NotFinite { row: 2, column: 1, .. } => {}
            other => panic!("{other}"),
        }
    }
    let error = rtn(Floats::F32(&[1e9; 4]), [2, 2], format, Rtn::default()).unwrap_err();
    assert!(error.to_string().contains("weights too large"), "{error}");
    let refused = |w: &[f32], name: &str| {
        rtn(Floats::F32(w), [1, w.len()], parse(name).weight, Rtn::default()).unwrap_err().to_string()
    };
    assert!(refused(&[1e7; 4], "w4a16-g2-si8").contains("expected scales within the range of f16"));
    for name in ["w4a16-asym-sf32", "w4a16-float-sf32"] {
        let error = refused(&[f32::MAX, -f32::MAX], name);
        assert!(error.contains("differ by no more than f32 holds, got weights too large for that in row 0"), "{error}");
    }
    assert!(rtn(Floats::F32(&[1.0; 3]), [2, 2], format, Rtn::default()).is_err());
    assert!(rtn(Floats::F32(&[]), [usize::MAX, 2], format, Rtn::default()).is_err());
}

#[test]
fn weights_near_the_end_of_f32_have_offsets() {
    let w = [3e38f32, 3.1e38, 3.04e38];
    let q = rtn(Floats::F32(&w), [1, 3], parse("w4a16-float-sf32").weight, Rtn::default()).unwrap();
    for (got, w) in reference::dequantize(&q).iter().zip(w) {
        assert!((got - f64::from(w)).abs() <= f64::from(q.scales()[0]) * 0.501, "{got} for {w}");
    }
}

#[test]
fn activations_are_within_half_a_step_of_what_their_codes_stand_for() {
    let mut random = Random(13);
    let w = random.qtensor(parse("w4a8-g32").weight, [2, 100], true);
    for act in [Act::A8, Act::A8Asym] {
        for scale in [1.0f32, 1e-20, 1e20] {
            let x: Vec<f32> = random.activations(3 * 100).iter().map(|v| v * scale + scale).collect();
            let q = quantize_activations(&x, 3, &w, act);
            for (i, (a, &b)) in reference::dequantize_activations(&q, &w).iter().zip(&x).enumerate() {
                let step = f64::from(q.scales[(i / 100) * w.groups() + w.group_of(i % 100)]);
                assert!(
                    (a - f64::from(b)).abs() <= step * 0.5001 + f64::from(b).abs() * 1e-6,
                    "{act:?} {i}: {a} for {b}"
                );
            }
        }
        let q = quantize_activations(&[0.0; 100], 1, &w, act);
        assert!(q.codes.iter().all(|&c| c == 0) && q.scales.iter().all(|&s| s == 0.0), "{act:?}");
        let mut x = [1.0; 100];
        x[3] = f32::NAN;
        let q = quantize_activations(&x, 1, &w, act);
        assert_eq!(q.scales.iter().filter(|s| s.is_nan()).count(), 1, "{act:?}");
    }
}

/// Two levels cost little: factors are used up to their limit, and the squared error is near that of free scales.
#[test]
fn factors_use_their_range_and_come_near_free_scales() {
    let mut random = Random(15);
    let (n, k) = (16, 1024);
    // Groups of all sizes.
    let w: Vec<f32> = (0..n * k).map(|i| random.normal() * (1.0 + (i / 64 % 5) as f32)).collect();
    for (name, free) in [("w4a8-g64-si8", "w4a8-g64"), ("w4a8-g64-asym-si8", "w4a8-g64-asym")] {
        for search in [false, true] {
            let options = Rtn { search, ..Rtn::default() };
            let [two, one] = [name, free].map(|name| squared_error(&w, parse(name).weight, [n, k], options));
            assert!(two < 1.1 * one, "{name}, search {search}: {two} against {one}");
            let q = rtn(Floats::F32(&w), [n, k], parse(name).weight, options).unwrap();
            let most = q.factors().unwrap().chunks(k / 64).map(|row| *row.iter().max().unwrap());
            assert!(most.clone().all(|most| most >= 7), "{name}: {:?}", most.collect::<Vec<_>>());
        }
    }
    // Rows of zeros, of one large weight, of the least halfs and of what passes f16.
    let mut w = vec![0.0f32; 4 * 64];
    w[64 + 9] = 3.0;
    w[128..192].fill(6e-8);
    let q = rtn(Floats::F32(&w[..192]), [3, 64], parse("w4a8-g32-asym-si8").weight, Rtn::default()).unwrap();
    let back = reference::dequantize(&q);
    assert!(back[..64].iter().all(|&v| v == 0.0) && (back[64 + 9] - 3.0).abs() < 0.01, "{back:?}");
    w[192] = 1e9;
    let error = rtn(Floats::F32(&w), [4, 64], parse("w4a8-g32-si8").weight, Rtn::default()).unwrap_err();
    assert!(error.to_string().contains("row 3"), "{error}");
}
