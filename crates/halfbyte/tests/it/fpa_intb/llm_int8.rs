//! LLM.int8() against goldens, and against its formula in f64 at random.

use crate::cuda::{in_child, is_child};
use crate::data::Random;
use crate::golden::Golden;
use half::{bf16, f16};
use halfbyte::{Cpu, Float, Floats, FloatsMut, LlmInt8Linear};

/// Runs a layer, with outputs of a type.
fn forward(layer: &LlmInt8Linear, x: Floats<'_>, m: usize, threshold: f32, y: Float) -> Vec<f32> {
    let cpu = Cpu::all_threads().unwrap();
    let len = m * layer.n();
    match y {
        Float::F16 => {
            let mut y = vec![f16::ZERO; len];
            layer.forward(&cpu, x, m, threshold, &mut y).unwrap();
            y.iter().map(|y| y.to_f32()).collect()
        }
        Float::BF16 => {
            let mut y = vec![bf16::ZERO; len];
            layer.forward(&cpu, x, m, threshold, FloatsMut::from(&mut y)).unwrap();
            y.iter().map(|y| y.to_f32()).collect()
        }
        Float::F32 => {
            let mut y = vec![0f32; len];
            layer.forward(&cpu, x, m, threshold, &mut y).unwrap();
            y
        }
    }
}

#[test]
fn products_are_those_of_the_goldens() {
    for shape in ["32x64x128_out0", "4x128x48_out3", "1x64x32_out2"] {
        for (name, dtype) in [("fp16", Float::F16), ("bf16", Float::BF16)] {
            let file = Golden::read(&format!("llm_int8_linear/llm_int8_{shape}_{name}"));
            let (&[m, k], &[n, _]) = (file.shape("x"), file.shape("weight_int8")) else { panic!("matrices") };
            let codes: Vec<i8> = file.ints("weight_int8").iter().map(|&code| code as i8).collect();
            let layer = LlmInt8Linear::new(&codes, [n, k], &file.f32s("weight_scale")).unwrap();
            let layer = layer.with_bias(file.floats("bias").to_f32()).unwrap();
            let (x, expected) = (file.floats("x"), file.f64s("y_f64"));
            let largest = expected.iter().fold(0f64, |most, y| most.max(y.abs()));
            for y_type in [dtype, Float::F32] {
                let y = forward(&layer, x.as_floats(), m, 6.0, y_type);
                let tolerance = y_type.unit_roundoff().max(1e-6) * 1.01 * largest;
                let far = y.iter().zip(&expected).map(|(y, e)| (f64::from(*y) - e).abs()).fold(0.0, f64::max);
                assert!(far <= tolerance, "{shape} {name} to {y_type}: {far} of {tolerance}");
            }
        }
    }
}

/// What the layer says that it computes of x in halves, in f64, with the magnitude that its bound is a part of.
pub fn reference(x: &[f32], codes: &[i8], scales: &[f32], bias: &[f32], m: usize, threshold: f32) -> Vec<(f64, f64)> {
    let (n, k) = (scales.len(), x.len() / m);
    let outlier: Vec<bool> = (0..k).map(|j| (0..m).any(|r| x[r * k + j].abs() > threshold)).collect();
    let mut y = Vec::new();
    for row in x.chunks_exact(k) {
        let range = row.iter().map(|x| x.abs()).filter(|x| *x <= threshold).fold(0f32, f32::max);
        let inverse = 1.0 / range;
        for i in 0..n {
            let (mut sum, mut magnitude) = (f64::from(bias[i]), f64::from(bias[i].abs()));
            for j in 0..k {
                let w = f64::from(codes[i * k + j]) * f64::from(scales[i]);
                let (x, w) = match outlier[j] {
                    true => (f64::from(row[j]), f64::from(f16::from_f32(f32::from(codes[i * k + j]) * scales[i]))),
                    false if range == 0.0 => (0.0, w),
                    false => {
                        let code = (row[j] * 127.0 * inverse).round().clamp(-127.0, 127.0);
                        (f64::from(code) * f64::from(range) / 127.0, w)
                    }
                };
                (sum, magnitude) = (sum + x * w, magnitude + (x * w).abs());
            }
            y.push((sum, magnitude));
        }
    }
    y
}

#[test]
fn random_layers_lie_within_the_bound() {
    let mut random = Random(14);
    for round in 0..30 {
        let [m, n, k] = [1 + random.below(9), 1 + random.below(70), 1 + random.below(300)];
        let codes: Vec<i8> = (0..n * k).map(|_| random.bits() as i8).map(|code| code.max(-127)).collect();
        let scales: Vec<f32> = (0..n).map(|_| random.normal().abs() * 0.01).collect();
        let bias = random.normals(n);
        let threshold = [6.0, 0.5, 1e9, 0.0][round % 4];
        let x: Vec<f16> = random.activations(m * k).into_iter().map(f16::from_f32).collect();
        let wide: Vec<f32> = x.iter().map(|x| x.to_f32()).collect();
        let outliers = (0..k).filter(|&j| (0..m).any(|r| wide[r * k + j].abs() > threshold)).count();
        let layer = LlmInt8Linear::new(&codes, [n, k], &scales).unwrap().with_bias(bias.clone()).unwrap();
        let expected = reference(&wide, &codes, &scales, &bias, m, threshold);
        for dtype in [Float::F16, Float::BF16, Float::F32] {
            let y = forward(&layer, Floats::from(&x), m, threshold, dtype);
            let factor = dtype.unit_roundoff() + (outliers as f64 + 6.0) * 2f64.powi(-24);
            for (at, (y, (exact, magnitude))) in y.iter().zip(&expected).enumerate() {
                let far = (f64::from(*y) - exact).abs();
                let most = factor * magnitude + if dtype == Float::F16 { 2f64.powi(-25) } else { 0.0 };
                assert!(far <= most, "{dtype} [{m}, {n}, {k}] at {at}: {far} of {most}");
            }
        }
    }
}

#[test]
fn rows_of_zeros_and_rows_with_nan_are_their_own() {
    let (n, k) = (3, 64);
    let codes: Vec<i8> = (0..n * k).map(|at| (at % 200) as i8).map(|code| code.max(-127)).collect();
    let layer = LlmInt8Linear::new(&codes, [n, k], &[0.5; 3]).unwrap();
    let mut x = vec![0f32; 3 * k];
    (x[k], x[2 * k]) = (f32::NAN, 2.0);
    let y = forward(&layer, Floats::from(&x), 3, 6.0, Float::F32);
    assert_eq!(y[..n], [0.0; 3]);
    assert!(y[n..2 * n].iter().all(|y| y.is_nan()));
    let expected: Vec<f32> = (0..n).map(|i| f32::from(codes[i * k]) * 0.5 * 2.0).collect();
    let far = y[2 * n..].iter().zip(&expected).map(|(y, e)| (y - e).abs()).fold(0.0, f32::max);
    assert!(far < 1e-4, "{far}");
    assert!(forward(&layer, Floats::from(&[0f32; 0]), 0, 6.0, Float::F32).is_empty());
}

#[test]
fn what_does_not_fit_is_an_error() {
    let cpu = Cpu::all_threads().unwrap();
    assert!(LlmInt8Linear::new(&[0; 64], [1, 63], &[1.0]).is_err());
    assert!(LlmInt8Linear::new(&[0; 64], [1, 64], &[1.0, 1.0]).is_err());
    assert!(LlmInt8Linear::new(&[0; 64], [1, 64], &[f32::NAN]).is_err());
    let layer = LlmInt8Linear::new(&[1; 64], [1, 64], &[1.0]).unwrap();
    let (x, mut y) = ([1f32; 64], [0f32; 1]);
    assert!(layer.forward(&cpu, &x, 2, 6.0, &mut y).is_err());
    assert!(layer.forward(&cpu, &x, 1, f32::NAN, &mut y).is_err());
    assert!(layer.forward(&cpu, &x, 1, -1.0, &mut y).is_err());
    assert!(layer.forward(&cpu, &x, 1, 6.0, &mut [0f32; 2]).is_err());
    layer.forward(&cpu, &x, 1, 6.0, &mut y).unwrap();
    assert!(layer.clone().with_bias(vec![0.0; 2]).is_err());
}

/// Rows at the ends of the range of f32, where 127 times them, or one over them, is none of its numbers.
#[test]
fn the_least_and_the_greatest_rows_have_their_codes() {
    for (x, codes, scale) in [
        ([2e-39f32, 1e-41], [100i8, 100], 1.0f32),
        ([1e-39, 5e-40], [100, 100], 1.0),
        ([1e-44, 3e-45], [100, 100], 1.0),
        ([3e38, 2.8e36], [1, 2], 1e-6),
        ([f32::MAX, -f32::MAX], [3, 1], 0.1),
        ([2.7e36, 1e36], [7, 9], 1.0),
        ([3e30, 2.8e28], [1, 2], 1e-6),
    ] {
        let range = f64::from(x[0]);
        let x_hat = x.map(|x| (f64::from(x) * 127.0 / range).round() * range / 127.0);
        let terms = [0, 1].map(|j| x_hat[j] * f64::from(codes[j]) * f64::from(scale));
        let layer = LlmInt8Linear::new(&codes, [1, 2], &[scale]).unwrap();
        let y = forward(&layer, Floats::from(&x), 1, f32::INFINITY, Float::F32);
        let (far, magnitude) = ((f64::from(y[0]) - terms[0] - terms[1]).abs(), terms[0].abs() + terms[1].abs());
        assert!(far <= 7.0 * 2f64.powi(-24) * magnitude + 2f64.powi(-149), "{x:?}: {y:?} for {terms:?}");
    }
}

/// The team of the device computes, and no other thread: that of the pool is busy until it has.
#[test]
fn the_threads_of_the_device_compute() {
    if !is_child() {
        return in_child("fpa_intb::llm_int8::the_threads_of_the_device_compute", &[]);
    }
    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().unwrap();
    let layer = LlmInt8Linear::new(&[1; 4 * 64], [4, 64], &[1.0; 4]).unwrap();
    let (done, wait) = std::sync::mpsc::channel::<()>();
    rayon::spawn(move || assert!(wait.recv().is_err()));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || tell.send(forward(&layer, Floats::from(&[1f32; 8 * 64]), 8, 6.0, Float::F32)));
    let y = told.recv_timeout(std::time::Duration::from_secs(60)).expect("the pool's threads are not waited for");
    assert_eq!(y, [64.0; 32]);
    drop(done);
}
