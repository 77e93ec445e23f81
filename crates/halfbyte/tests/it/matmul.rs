//! Every kernel × format × edge shape against the f64 reference, element by element.

mod bits;

use crate::cpu::{that_run_here, with_each_caps};
use crate::data::{ACTIVATIONS, Random, parse, rounded};
use crate::layout::planes::{NARROW, narrow};
use crate::layout::stored;
use crate::layout::{tables, three_bits};
use half::{bf16, f16};
use halfbyte::cpu::Cpu;
use halfbyte::cpu::isa::Isa;
use halfbyte::format::FORMATS;
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::ops::{Activation, Linear, Weight};
use halfbyte::{Float, Floats, FloatsMut, QTensor, Zero, Zeros};

/// What stands before and after every output, to see that a kernel writes nothing else.
const CANARY: f32 = -7.25e8;

fn forward(linear: &Linear, cpu: &Cpu, x: &[f32], x_type: Float, m: usize, out: Float) -> Vec<f32> {
    let f16s: Vec<f16> = x.iter().map(|&v| f16::from_f32(v)).collect();
    let bf16s: Vec<bf16> = x.iter().map(|&v| bf16::from_f32(v)).collect();
    let x = match x_type {
        Float::F16 => Floats::F16(&f16s),
        Float::BF16 => Floats::BF16(&bf16s),
        Float::F32 => Floats::F32(x),
    };
    let len = m * linear.n();
    macro_rules! guarded {
        ($variant:ident, $canary:expr, $widen:expr) => {{
            let mut y = vec![$canary; len + 64];
            linear.forward(cpu, x, m, FloatsMut::$variant(&mut y[32..32 + len])).unwrap();
            let intact = |v: &[_]| v.iter().all(|&v| v == $canary);
            assert!(intact(&y[..32]) && intact(&y[32 + len..]), "wrote outside of its output");
            y[32..32 + len].iter().map($widen).collect()
        }};
    }
    match out {
        Float::F32 => guarded!(F32, CANARY, |&v| v),
        Float::F16 => guarded!(F16, f16::from_f32(-31744.0), |v| v.to_f32()),
        Float::BF16 => guarded!(BF16, bf16::from_f32(CANARY), |v| v.to_f32()),
    }
}

fn check(y: &[f32], reference: &Product, k: usize, out: Float, what: &str) {
    let bound = Bound::new(out, k);
    for (i, &y) in y.iter().enumerate() {
        let (want, magnitude) = (reference.value[i], reference.magnitude[i]);
        let error = (f64::from(y) - want).abs();
        let allowed = bound.allowed(magnitude);
        assert!(error <= allowed, "{what}: element {i} is {y}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

const SHAPES: &[[usize; 2]] = &[[1, 1], [16, 128], [17, 33], [48, 256], [130, 300], [37, 20], [5, 0], [80, 129]];

#[test]
fn every_kernel_format_and_edge_shape_is_within_the_bound() {
    let cpus = with_each_caps(2);
    let mut random = Random(1);
    let mut seen = std::collections::BTreeSet::new();
    for (i, name) in FORMATS.iter().enumerate() {
        let format = parse(name);
        for (s, &[n, k]) in SHAPES.iter().enumerate() {
            let act_order = (i + s) % 3 == 0;
            let w = random.qtensor(format.weight, [n, k], act_order);
            let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
            for m in [0, 1, 2, 3, 5, 7, 8, 11, 12, 16, 17, 25, 63, 64, 65] {
                if m > 20 && (i + s + m) % 4 != 0 {
                    continue;
                }
                let types = [Float::F32, Float::F16, Float::BF16];
                let (x_type, out) = (types[(i + m) % 3], types[(i + m / 2 + s) % 3]);
                let x = rounded(&random.activations(m * k), x_type);
                let reference = reference::linear(&x, m, &w, format.act);
                for cpu in &cpus {
                    let y = forward(&linear, cpu, &x, x_type, m, out);
                    let problem = halfbyte::kernel::Problem { format: Some(format), x: x_type, y: Float::F32, m, n, k };
                    let kernel = halfbyte::cpu::matmul::select(&cpu.caps(), &problem).unwrap().name;
                    seen.insert(kernel);
                    check(&y, &reference, k, out, &format!("{kernel}: {problem}, act-order {act_order}"));
                }
            }
        }
    }
    let all = that_run_here(halfbyte::cpu::matmul::KERNELS.iter().map(|k| k.name));
    assert!(all.iter().all(|name| seen.contains(name)), "kernels that no case reached: {all:?} but {seen:?}");
}

#[test]
fn long_reductions_and_many_rows_cross_every_block() {
    let mut random = Random(2);
    for (name, n, k, m) in [
        ("w4a8-g128", 300, 9000, 30),
        ("w4a8", 40, 9001, 13),
        ("w8a8-xasym", 40, 9001, 13),
        ("w4a16-g128-asym", 300, 1400, 100),
        ("w4a16", 40, 9001, 50),
        ("w8a16-g32-asym", 70, 1100, 300),
        ("w2a8-g64-asym", 530, 700, 130),
        ("w4a8-g64-asym-si8", 70, 9001, 30),
        ("w4a16-g32", 70, 9000, 1),
        ("w4a16-g48-float-sf32", 70, 9001, 1),
        ("w8a16", 40, 9001, 1),
    ] {
        let format = parse(name);
        let w = random.qtensor(format.weight, [n, k], false);
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        for x_type in [Float::F32, Float::BF16] {
            let x = rounded(&random.activations(m * k), x_type);
            let reference = reference::linear(&x, m, &w, format.act);
            for cpu in with_each_caps(3).iter().filter(|cpu| cpu.caps().isa != Isa::Plain || m < 40) {
                let y = forward(&linear, cpu, &x, x_type, m, Float::F32);
                check(&y, &reference, k, Float::F32, &format!("{name} m={m} on {:?}", cpu.caps()));
            }
        }
    }
}

#[test]
fn codes_in_two_planes_are_within_the_bound() {
    let mut random = Random(9);
    for (i, name) in NARROW.iter().enumerate() {
        let format = parse(name);
        for (s, [n, k]) in [[1, 16], [17, 48], [80, 304], [33, 1040]].into_iter().enumerate() {
            for bits in [5, 6] {
                let (w, codes) = narrow(&mut random, format.weight, bits, [n, k], (i + s) % 3 == 0);
                let stored = stored(&w, codes, false, false);
                let linear = Linear::new(Weight::Stored(&[&stored], format.act)).unwrap();
                for m in [1, 2, 3, 5, 7, 8, 9, 11, 12, 17, 25, 64] {
                    if m > 9 && (i + s + m) % 3 != 0 {
                        continue;
                    }
                    let x_type = [Float::F32, Float::BF16][(m + s) % 2];
                    let x = rounded(&random.activations(m * k), x_type);
                    let reference = reference::linear(&x, m, &w, format.act);
                    for cpu in with_each_caps(2) {
                        let y = forward(&linear, &cpu, &x, x_type, m, Float::F32);
                        check(
                            &y,
                            &reference,
                            k,
                            Float::F32,
                            &format!("{name} of {bits} bits, m={m} on {:?}", cpu.caps()),
                        );
                    }
                }
            }
        }
    }
}

/// Codes of a file's table, as numbers in tiles; with columns in any order groups end within a tile.
#[test]
fn codes_of_tables_are_within_the_bound() {
    let mut random = Random(12);
    let cpus = with_each_caps(2);
    for (i, act) in ["a16", "a8", "a32", "a8"].into_iter().cycle().take(24).enumerate() {
        let group = ["-g32", "-g16", "", "-g64", "-g128"][i % 5];
        let name = format!("w8{act}{group}{}{}", ["-sbf16", "-sf32", ""][i % 3], ["", "-xasym"][i / 3 % 2 * (i % 2)]);
        let format = parse(&name);
        let k = 64 * (1 + random.below(20));
        let shape = [1 + random.below(90), k];
        for (q, codes) in tables::tabled(&mut random, format.weight, shape) {
            let groups = q.groups();
            let index = (i % 3 == 1).then(|| (0..k).map(|_| random.below(groups) as u32).collect());
            let q =
                QTensor::new(format.weight, shape, q.codes().to_vec(), q.scales().to_vec(), q.zeros().clone(), index);
            let q = q.unwrap();
            let stored = stored(&q, codes, false, false);
            let linear = Linear::new(Weight::Stored(&[&stored], format.act)).unwrap();
            let m = [1, 2, 3, 5, 8, 11, 17, 40][random.below(8)];
            let x_type = [Float::F32, Float::F16, Float::BF16][random.below(3)];
            let x = rounded(&random.activations(m * k), x_type);
            let reference = reference::linear(&x, m, &q, format.act);
            for cpu in &cpus {
                let y = forward(&linear, cpu, &x, x_type, m, Float::F32);
                check(&y, &reference, k, Float::F32, &format!("{name} {shape:?}, m={m} on {:?}", cpu.caps()));
            }
        }
    }
}

#[test]
fn drawn_formats_of_3_bits_are_within_the_bound() {
    let mut random = Random(10);
    let cpus = with_each_caps(2);
    for round in 0..150 {
        let (name, k) = three_bits::drawn(&mut random, ["a16", "a8", "a32"][round % 3]);
        let name = if round % 6 == 1 { format!("{name}-xasym") } else { name };
        let format = parse(&name);
        let (n, m) = (1 + random.below(70), 1 + random.below(40));
        let m = if round % 4 == 0 { 1 } else { m };
        let w = random.qtensor(format.weight, [n, k], round % 5 == 0);
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        let x_type = [Float::F32, Float::F16, Float::BF16][round / 3 % 3];
        let x = rounded(&random.activations(m * k), x_type);
        let reference = reference::linear(&x, m, &w, format.act);
        for cpu in &cpus {
            let y = forward(&linear, cpu, &x, x_type, m, Float::F32);
            let what = format!("{name}, {m} × {n} × {k}, x {x_type} on {:?}", cpu.caps());
            check(&y, &reference, k, Float::F32, &what);
        }
    }
}

#[test]
fn rows_of_any_magnitude_keep_their_digits() {
    let mut random = Random(8);
    let (n, k, exponents) = (33, 300, [-100, 90, 0, -70, 105, -20]);
    for name in ["w4a16-g128", "w8a16-g32-asym", "w4a16-g64-float", "w4a8-g128", "w3a16-g16"] {
        let format = parse(name);
        let w = random.qtensor(format.weight, [n, k], false);
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        let m = 8 * exponents.len();
        let mut x = random.activations(m * k);
        for (i, row) in x.chunks_exact_mut(k).enumerate() {
            row.iter_mut().for_each(|v| *v *= 2f32.powi(exponents[i % exponents.len()]));
        }
        let reference = reference::linear(&x, m, &w, format.act);
        for cpu in with_each_caps(2) {
            let y = forward(&linear, &cpu, &x, Float::F32, m, Float::F32);
            check(&y, &reference, k, Float::F32, &format!("{name} on {:?}", cpu.caps()));
        }
    }
}

#[test]
fn each_element_counts_however_great_its_neighbours_are() {
    let mut random = Random(34);
    let [n, k] = [35, 300];
    for name in ["w4a16-g32", "w4a16", "w8a16-g128", "w3a16-g64-asym", "w4a16-g32-float", "w8a16-g64-float-sf32"] {
        let format = parse(name);
        let exponents: Vec<i32> = (0..k).map(|_| random.below(120) as i32 - 60).collect();
        let x: Vec<f32> = exponents.iter().map(|&e| (1.0 + random.normal().abs()) * 2f32.powi(e)).collect();
        // Of output i only the elements below some power of two count: other weights are zero.
        let groups = format.weight.group.count(k);
        let zero = format.weight.middle().min(5) as u8;
        let scales: Vec<f32> = (0..n * groups).map(|i| 2f32.powi(i as i32 % 5 - 8) * 1.25).collect();
        let zeros = match format.weight.zero {
            Zero::Symmetric => Zeros::Symmetric,
            Zero::Integer => Zeros::Integer(vec![u16::from(zero); n * groups]),
            Zero::Float => Zeros::Float(scales.iter().map(|s| -s * f32::from(zero)).collect()),
        };
        let zero = if zeros == Zeros::Symmetric { format.weight.middle() as u8 } else { zero };
        let code = |i: usize| {
            if exponents[i % k] > 60 - 4 * (i / k) as i32 {
                return zero;
            }
            random.below(format.weight.max_code() as usize + 1) as u8
        };
        let codes = (0..n * k).map(code).collect();
        let w = QTensor::new(format.weight, [n, k], codes, scales, zeros, None).unwrap();
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        for x_type in [Float::F32, Float::BF16] {
            let x = rounded(&x, x_type);
            let reference = reference::linear(&x, 1, &w, format.act);
            for cpu in with_each_caps(2) {
                let y = forward(&linear, &cpu, &x, x_type, 1, Float::F32);
                check(&y, &reference, k, Float::F32, &format!("{name} on {:?}", cpu.caps()));
            }
        }
    }
}

#[test]
fn dense_weights_of_every_type() {
    let mut random = Random(3);
    for &[n, k] in SHAPES {
        for dtype in [Float::F16, Float::BF16, Float::F32] {
            let w = rounded(&random.normals(n * k), dtype);
            let f16s: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
            let bf16s: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
            let floats = match dtype {
                Float::F16 => Floats::F16(&f16s),
                Float::BF16 => Floats::BF16(&bf16s),
                Float::F32 => Floats::F32(&w),
            };
            let linear = Linear::new(Weight::Dense(floats, [n, k])).unwrap();
            let wide: Vec<f64> = w.iter().map(|&v| f64::from(v)).collect();
            for m in [0, 1, 2, 7, 12, 17, 64] {
                for x_type in [Float::F32, Float::BF16] {
                    let x = rounded(&random.activations(m * k), x_type);
                    let x64: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
                    let reference = reference::matmul(&x64, &wide, [m, n, k]);
                    for cpu in with_each_caps(2) {
                        let y = forward(&linear, &cpu, &x, x_type, m, Float::F32);
                        check(&y, &reference, k, Float::F32, &format!("dense {dtype} {n}×{k} m={m}"));
                    }
                }
            }
        }
    }
}

/// A weight without offsets adds none of them, also where what they would be multiplied by lies beyond floats.
#[test]
fn sums_of_x_beyond_floats_count_for_nothing_without_offsets() {
    for name in ["w4a8-g32", "w8a8-g32-asym-xasym", "w4a8", "w2a8-g32-asym"] {
        let format = parse(name);
        let zeros = if format.weight.zero == Zero::Integer {
            Zeros::Integer(vec![1; 64 / format.weight.group.len(64)])
        } else {
            Zeros::Symmetric
        };
        let scales = vec![2f32.powi(-10); 64 / format.weight.group.len(64)];
        // Weights of both signs, but one: products add up to little.
        let zero = if format.weight.zero == Zero::Integer { 1 } else { format.weight.middle() as u8 };
        let codes = (0..64).map(|j| if j == 1 { zero } else { zero + 1 - 2 * (j % 2) }).collect();
        let w = QTensor::new(format.weight, [1, 64], codes, scales, zeros, None).unwrap();
        let x = vec![2e37; 16 * 64];
        let want = reference::linear(&x, 16, &w, format.act).value[0];
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        for cpu in &with_each_caps(1) {
            let y = forward(&linear, cpu, &x, Float::F32, 16, Float::F32);
            assert!(y.iter().all(|&y| (f64::from(y) - want).abs() <= 1e-5 * want.abs()), "{name} {:?}", cpu.caps());
        }
    }
}

#[test]
fn bias_and_activation_come_last() {
    let mut random = Random(5);
    let format = parse("w4a16-g32-asym");
    let w = random.qtensor(format.weight, [21, 64], false);
    let bias = random.normals(21);
    let x = random.normals(3 * 64);
    let cpu = Cpu::new(2).unwrap();
    let plain = reference::linear(&x, 3, &w, format.act);
    for activation in ACTIVATIONS {
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
        let linear = linear.with_bias(bias.clone()).unwrap().with_activation(activation);
        let y = forward(&linear, &cpu, &x, Float::F32, 3, Float::F32);
        for (i, &y) in y.iter().enumerate() {
            let v = plain.value[i] + f64::from(bias[i % 21]);
            let phi = |v: f64| 0.5 * (1.0 + libm::erf(v / std::f64::consts::SQRT_2));
            let want = match activation {
                Activation::None => v,
                Activation::Relu => v.max(0.0),
                Activation::Relu6 => v.clamp(0.0, 6.0),
                Activation::Clamp(low, high) => v.clamp(low.into(), high.into()),
                Activation::Gelu => v * phi(v),
                Activation::GeluTanh => {
                    0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh())
                }
                Activation::Silu => v / (1.0 + (-v).exp()),
            };
            assert!((f64::from(y) - want).abs() < 1e-5, "{activation:?}: {y} and {want}");
        }
    }
}

#[test]
fn nan_and_infinity_in_x_reach_y_and_only_their_row() {
    let mut random = Random(6);
    for name in ["w4a8-g32", "w4a8-g32-asym-xasym", "w4a16-g32", "w8a16-g32-float", "w4a8", "w4a8-g32-si8"] {
        let format = parse(name);
        let w = random.qtensor(format.weight, [33, 96], false);
        let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap().with_activation(Activation::Relu);
        for bad in [f32::NAN, f32::INFINITY] {
            for m in [1, 20] {
                let mut x = random.normals(m * 96);
                x[(m - 1) * 96 + 40] = bad;
                for (cpu, x_type) in with_each_caps(2).iter().flat_map(|cpu| [(cpu, Float::F32), (cpu, Float::BF16)]) {
                    let y = forward(&linear, cpu, &x, x_type, m, Float::F32);
                    assert!(y[..(m - 1) * 33].iter().all(|v| v.is_finite()), "{name} {bad}: leaked into other rows");
                    let row = &y[(m - 1) * 33..];
                    if bad.is_nan() || format.act.is_quantized() {
                        assert!(row.iter().all(|v| v.is_nan()), "{name} {bad}: {row:?}");
                    } else {
                        assert!(row.iter().any(|v| !v.is_finite()), "{name} {bad}: {row:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn wrong_lengths_are_errors() {
    let mut random = Random(7);
    let format = parse("w4a16-g32");
    let w = random.qtensor(format.weight, [4, 32], false);
    let cpu = Cpu::new(1).unwrap();
    let linear = Linear::new(Weight::Quantized(&w, format.act)).unwrap();
    let mut y = [0.0; 8];
    let error = linear.forward(&cpu, Floats::F32(&[0.0; 63]), 2, FloatsMut::F32(&mut y)).unwrap_err();
    assert_eq!(error.to_string(), "linear: expected x of 2 × 32, got 63 elements");
    let error = linear.forward(&cpu, Floats::F32(&[0.0; 64]), 2, FloatsMut::F32(&mut y[..7])).unwrap_err();
    assert_eq!(error.to_string(), "linear: expected y of 2 × 4, got 7 elements");
    assert!(linear.forward(&cpu, Floats::F32(&[]), usize::MAX, FloatsMut::F32(&mut y)).is_err());
    assert!(linear.with_bias(vec![0.0; 3]).is_err());
}

/// Rows become integers by the greatest element of a block: whatever its bits are, no digit runs over.
#[test]
fn a_greatest_element_of_any_bits_is_multiplied_as_it_is() {
    let mut random = Random(77);
    for name in ["w4a16", "w4a16-g32", "w8a16-g128", "w4a16-g32-float", "w2a16-g64-asym"] {
        let format = parse(name);
        let q = random.qtensor(format.weight, [16, 128], false);
        let weights = reference::dequantize(&q);
        for cpu in with_each_caps(1) {
            let layer = Linear::on(&cpu, Weight::Quantized(&q, format.act)).unwrap();
            let others: Vec<u32> = (0..50).map(|_| random.below(1 << 23) as u32).collect();
            for mantissa in (0x7e_fe00..=0x7f_0002).chain(others) {
                let mut x: Vec<f32> = random.normals(128).iter().map(|v| v * 1e-3).collect();
                let sign = (mantissa & 1) << 31;
                x[random.below(128)] = f32::from_bits(sign | (100 + random.below(60) as u32) << 23 | mantissa);
                let mut y = [0f32; 16];
                layer.forward(&cpu, &x, 1, &mut y).unwrap();
                for (row, &y) in weights.chunks_exact(128).zip(&y) {
                    let terms = || row.iter().zip(&x).map(|(&w, &x)| w * f64::from(x));
                    let (want, all): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                    let error = (f64::from(y) - want).abs();
                    assert!(error <= 4e-6 * all, "{name} on {:?}, {mantissa:#x}: {y}, expected {want}", cpu.caps().isa);
                }
            }
        }
    }
}
