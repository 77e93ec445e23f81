//! Sums of like terms: their roundings all go one way, so that they show whether sums are too long.

use crate::cpu::with_each_caps;
use crate::data::{Random, parse};
use half::bf16;
use halfbyte::conv::Geometry;
use halfbyte::cpu::Cpu;
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::ops::{Conv2d, Linear, Weight};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, QTensor, Zero, Zeros};

/// Roundings of like terms all go one way: the sums of long rows of them stay within the bound all the same.
#[test]
fn like_terms_do_not_drift_from_the_bound() {
    let mut random = Random(78);
    for cpu in with_each_caps(2) {
        for (m, k) in [(1, 5000), (2, 128), (2, 96), (14, 97), (5, 200), (2, 5000), (3, 16_384), (13, 1000), (40, 5000)]
        {
            let (x, w) = (random.normal().abs() + 0.1, random.normal().abs() + 0.1);
            let want = f64::from(x) * f64::from(w) * k as f64;
            let layer = Linear::on(&cpu, Weight::Dense((&vec![w; 40 * k]).into(), [40, k])).unwrap();
            let mut y = vec![0f32; m * 40];
            layer.forward(&cpu, &vec![x; m * k], m, &mut y).unwrap();
            let allowed = Bound::new(Float::F32, k).allowed(want);
            let worst = y.iter().map(|&y| (f64::from(y) - want).abs() / allowed).fold(0.0, f64::max);
            assert!(worst <= 1.0, "{:?}, {m} rows of {k} times {x} · {w}: {worst} of what is allowed", cpu.caps().isa);
            for name in ["w4a16", "w4a16-g32", "w8a16-g128", "w4a16-g32-float", "w2a16-g64"] {
                let format = parse(name);
                let groups = format.weight.group.count(k);
                let zeros = if format.weight.zero == Zero::Float {
                    Zeros::Float(vec![0.5; 40 * groups])
                } else {
                    Zeros::Symmetric
                };
                let scale = half::f16::from_f32(w).to_f32();
                let code = format.weight.middle() as u8 + 1;
                let q = QTensor::new(format.weight, [40, k], vec![code; 40 * k], vec![scale; 40 * groups], zeros, None)
                    .unwrap();
                let want: f64 = reference::dequantize(&q)[..k].iter().map(|w| w * f64::from(x)).sum();
                let layer = Linear::on(&cpu, Weight::Quantized(&q, format.act)).unwrap();
                layer.forward(&cpu, &vec![x; m * k], m, &mut y).unwrap();
                let allowed = Bound::new(Float::F32, k).allowed(want);
                let worst = |y: &[f32], want: f64, allowed: f64| {
                    y.iter().map(|&y| (f64::from(y) - want).abs() / allowed).fold(0.0, f64::max)
                };
                let of_f32 = worst(&y, want, allowed);
                assert!(of_f32 <= 1.0, "{name} on {:?}, {m} rows of {k}: {of_f32} of what is allowed", cpu.caps().isa);
                let x_half = bf16::from_f32(x);
                layer.forward(&cpu, &vec![x_half; m * k], m, &mut y).unwrap();
                let ratio = x_half.to_f64() / f64::from(x);
                let of_bf16 = worst(&y, want * ratio, allowed * ratio);
                let kernel = layer.kernel(&cpu, m, Float::BF16, Float::F32).unwrap();
                assert!(of_bf16 <= 1.0, "{name} by {kernel}, {m} rows of {k} in bf16: {of_bf16} of what is allowed");
            }
        }
    }
}

/// Groups are summed by themselves, and then their sums: of many small ones that is a long sum too.
#[test]
fn like_terms_of_many_groups_do_not_drift_from_the_bound() {
    const NAMES: [&str; 15] = [
        "w4a16-g32-float",
        "w4a16-g16-float",
        "w4a16-g16-asym",
        "w8a16-g16-sf32",
        "w2a16-g16-float-sf32",
        "w4a16-g32",
        "w4a16-g4",
        "w2a16-g3-float",
        "w4a8-g32",
        "w4a8-g16",
        "w8a8-g16-sf32",
        "w4a8-g32-float",
        "w4a8-g16-xasym",
        "w8a8-g32-xasym",
        "w4a8-g8-float-xasym",
    ];
    let mut random = Random(79);
    let cpus: Vec<Cpu> = with_each_caps(2).into_iter().collect();
    for name in NAMES {
        let format = parse(name);
        for k in [4608, 28_672] {
            for _ in 0..2 {
                let (x, w) = (random.normal().abs() + 0.1, random.normal().abs() + 0.1);
                let q = rtn((&vec![w; 16 * k]).into(), [16, k], format.weight, Rtn::default()).unwrap();
                let one = rtn((&vec![w; k]).into(), [1, k], format.weight, Rtn::default()).unwrap();
                let Product { value, magnitude } = reference::linear(&vec![x; k], 1, &one, format.act);
                let allowed = Bound::new(Float::F32, k).allowed(magnitude[0]);
                let of_halves = reference::linear(&vec![bf16::from_f32(x).to_f32(); k], 1, &one, format.act);
                let allowed_of_halves = Bound::new(Float::F32, k).allowed(of_halves.magnitude[0]);
                for cpu in &cpus {
                    let layer = Linear::on(cpu, Weight::Quantized(&q, format.act)).unwrap();
                    for m in [1, 5, 14, 33] {
                        let mut y = vec![0f32; m * 16];
                        let check = |layer: &Linear, dtype, value: f64, allowed: f64, y: &[f32]| {
                            let worst = y.iter().map(|&y| (f64::from(y) - value).abs() / allowed).fold(0.0, f64::max);
                            let kernel = layer.kernel(cpu, m, dtype, Float::F32).unwrap();
                            assert!(
                                worst <= 1.0,
                                "{name} by {kernel}, {m} rows of {k} in {dtype}: {worst} of the bound"
                            );
                        };
                        layer.forward(cpu, &vec![x; m * k], m, &mut y).unwrap();
                        check(&layer, Float::F32, value[0], allowed, &y);
                        layer.forward(cpu, &vec![bf16::from_f32(x); m * k], m, &mut y).unwrap();
                        check(&layer, Float::BF16, of_halves.value[0], allowed_of_halves, &y);
                    }
                }
            }
        }
    }
}

#[test]
fn like_terms_of_large_kernels_do_not_drift_from_the_bound() {
    let mut random = Random(80);
    for cpu in with_each_caps(2) {
        for kernel in [[7, 7], [31, 31], [51, 51], [1, 1024], [127, 127]] {
            for channels in [64, 5] {
                let (x, w) = (random.normal().abs() + 0.1, random.normal().abs() + 0.1);
                let k = kernel[0] * kernel[1];
                let geometry = Geometry { groups: channels, ..Geometry::new(channels, channels, kernel) };
                let layer =
                    Conv2d::on(&cpu, Weight::Dense((&vec![w; channels * k]).into(), [channels, k]), geometry).unwrap();
                let mut y = vec![0f32; channels];
                layer.forward(&cpu, &vec![x; channels * k], 1, kernel, &mut y).unwrap();
                let want = f64::from(x) * f64::from(w) * k as f64;
                let allowed = Bound::new(Float::F32, k).allowed(want);
                let worst = y.iter().map(|&y| (f64::from(y) - want).abs() / allowed).fold(0.0, f64::max);
                assert!(worst <= 1.0, "{:?}, {kernel:?} of {channels}: {worst} of what is allowed", cpu.caps().isa);
            }
        }
    }
}
