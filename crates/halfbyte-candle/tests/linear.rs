//! `QLinear` beside candle's own product of the weight that the codes stand for.

use candle_core::{DType, Device, Module, Tensor, Var};
use halfbyte::format::reference;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Floats, Format, Weight};
use halfbyte_candle::QLinear;
use halfbyte_checkpoint::Weights;
use std::path::Path;

/// The devices of this machine; a GPU only where the feature is on and there is one, which is said.
fn devices() -> Vec<Device> {
    let mut devices = vec![Device::Cpu];
    if cfg!(feature = "cuda") {
        match Device::new_cuda(0) {
            Ok(device) => devices.push(device),
            Err(why) => {
                assert!(
                    std::env::var("HALFBYTE_REQUIRE_CUDA").as_deref() != Ok("1"),
                    "HALFBYTE_REQUIRE_CUDA=1, but {why}"
                );
                eprintln!("skipped: no GPU: {why}");
            }
        }
    }
    devices
}

/// Numbers of both signs without a pattern that matters.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// Compares a result with the f64 reference, element by element, within the bound of the library.
fn check(y: &Tensor, x: &[f32], bias: &[f32], quantized: &halfbyte::QTensor, format: Format, unit: f64, what: &str) {
    let (n, k) = (quantized.n(), quantized.k());
    let m = x.len() / k;
    let want = reference::linear(x, m, quantized, format.act);
    let got = y.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert_eq!(got.len(), m * n, "{what}");
    let c = 16.0 + (k as f64).sqrt();
    for (i, &got) in got.iter().enumerate() {
        let bias = f64::from(bias[i % n]);
        let (want, magnitude) = (want.value[i] + bias, want.magnitude[i] + bias.abs());
        let off = (f64::from(got) - want).abs();
        assert!(off <= (unit + c * 2f64.powi(-24)) * magnitude, "{what}: element {i} is {got}, expected {want}");
    }
}

#[test]
fn products_are_within_the_bound_of_every_type_shape_and_format() {
    let (n, k) = (96, 256);
    let (w, bias) = (numbers(n * k, 1), numbers(n, 2));
    for device in devices() {
        for name in ["w4a16-g128", "w4a8-g32-asym", "w8a16", "w8a8", "w3a16-g64", "w4a16-g32-float-sf32"] {
            let format: Format = name.parse().unwrap();
            let quantized = rtn(Floats::from(&w), [n, k], format.weight, Rtn::default()).unwrap();
            let layer = QLinear::new(Weight::Quantized(&quantized, format.act), Some(bias.clone()), &device).unwrap();
            assert_eq!([layer.n(), layer.k()], [n, k]);
            // One unit roundoff of y; kernels of GPUs may round weights to a half type, once more.
            for (dtype, unit) in [(DType::F32, 24), (DType::F16, 11), (DType::BF16, 8)] {
                let unit = 2f64.powi(-unit) * if device.is_cuda() { 2.0 } else { 1.0 };
                for dims in [&[k][..], &[1, k], &[5, k], &[2, 3, k], &[33, 1, k]] {
                    let x = Tensor::from_vec(numbers(dims.iter().product(), 3), dims, &device).unwrap();
                    let x = x.to_dtype(dtype).unwrap();
                    let y = layer.forward(&x).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_eq!(y.dims(), [&dims[..dims.len() - 1], &[n]].concat());
                    let rounded = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                    check(&y, &rounded, &bias, &quantized, format, unit, &format!("{name}, {dtype:?}, {dims:?}"));
                }
            }
        }
    }
}

#[test]
fn views_of_tensors_are_read_right() {
    let (n, k) = (48, 64);
    for device in devices() {
        let w = Tensor::from_vec(numbers(n * k, 4), (n, k), &device).unwrap();
        let layer = QLinear::quantize(&w, None, "w8a32-g32").unwrap();
        let x = Tensor::from_vec(numbers(6 * k, 5), (6, k), &device).unwrap();
        let all = layer.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        // Rows from the middle: contiguous, with an offset.
        let rows = x.narrow(0, 2, 3).unwrap();
        assert!(rows.is_contiguous());
        let some = layer.forward(&rows).unwrap().to_vec2::<f32>().unwrap();
        // Bits depend on the number of rows: the same rows in a storage of their own.
        let copied = Tensor::from_vec(rows.flatten_all().unwrap().to_vec1::<f32>().unwrap(), (3, k), &device).unwrap();
        assert_eq!(some, layer.forward(&copied).unwrap().to_vec2::<f32>().unwrap());
        let near = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-4;
        assert!(some.concat().iter().zip(&all[2..5].concat()).all(near));
        // Columns first, made contiguous on the way; refused by the op itself.
        let turned = x.t().unwrap().contiguous().unwrap().t().unwrap();
        assert!(!turned.is_contiguous());
        assert_eq!(layer.forward(&turned).unwrap().to_vec2::<f32>().unwrap(), all);
        let refused = turned.apply_op1_no_bwd(&layer).unwrap_err().to_string();
        assert!(refused.contains("expected a contiguous x"), "{refused}");
        // No rows.
        let none = Tensor::zeros((0, k), DType::F32, &device).unwrap();
        assert_eq!(layer.forward(&none).unwrap().dims(), [0, n]);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = Device::Cpu;
    let w = Tensor::from_vec(numbers(8 * 32, 6), (8, 32), &device).unwrap();
    let refused = |result: candle_core::Result<QLinear>, words: &str| {
        let Err(error) = result else { panic!("{words}") };
        let error = error.to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(QLinear::quantize(&w, None, "w5a16"), "weights of 2, 3, 4 or 8 bits");
    refused(QLinear::quantize(&w.flatten_all().unwrap(), None, "w4a16"), "rank");
    refused(QLinear::quantize(&w.to_dtype(DType::F64).unwrap(), None, "w4a16"), "f32, f16 or bf16");
    let short = Tensor::zeros(7, DType::F32, &device).unwrap();
    refused(QLinear::quantize(&w, Some(&short), "w4a16"), "a bias of 8");
    let nan = w.affine(f64::NAN, 0.0).unwrap();
    refused(QLinear::quantize(&nan, None, "w4a16"), "finite");

    let layer = QLinear::quantize(&w, None, "w4a16").unwrap();
    let forward = |x: Tensor| layer.forward(&x).unwrap_err().to_string();
    assert!(forward(Tensor::zeros((2, 31), DType::F32, &device).unwrap()).contains("[.., 32], got [2, 31]"));
    assert!(forward(Tensor::zeros((), DType::F32, &device).unwrap()).contains("[.., 32], got []"));
    assert!(forward(Tensor::zeros((2, 32), DType::F64, &device).unwrap()).contains("f32, f16 or bf16"));
    assert!(forward(Tensor::zeros((2, 32), DType::U8, &device).unwrap()).contains("f32, f16 or bf16"));
    // Gradients are refused, not left out.
    let x = Var::zeros((2, 32), DType::F32, &device).unwrap();
    let y = layer.forward(&x).unwrap().sum_all().unwrap();
    let error = y.backward().unwrap_err().to_string();
    assert!(error.contains("halfbyte-linear"), "{error}");
}

#[test]
fn layers_come_out_of_checkpoints() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
    let weights = Weights::open(&folder).unwrap();
    let name = "model.layers.0.mlp.down_proj";
    let files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let tensor = format!("{name}.weight");
    let theirs = files
        .iter()
        .find_map(|file| candle_core::safetensors::load(folder.join(file), &Device::Cpu).unwrap().remove(&tensor));
    let theirs = theirs.unwrap().to_dtype(DType::F32).unwrap();
    for device in devices() {
        let layer = QLinear::load(&weights, name, halfbyte::Act::A16, &device).unwrap();
        assert_eq!(theirs.dims(), [layer.n(), layer.k()]);
        let x = Tensor::from_vec(numbers(3 * layer.k(), 8), (3, layer.k()), &device).unwrap();
        let y = layer.forward(&x).unwrap().to_device(&Device::Cpu).unwrap();
        let want = x.to_device(&Device::Cpu).unwrap().matmul(&theirs.t().unwrap()).unwrap();
        let off = (y - &want).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap();
        assert!(off < 1e-4, "{off}");
        let missing = QLinear::load(&weights, "nobody", halfbyte::Act::A16, &device).unwrap_err().to_string();
        assert!(missing.contains("nobody"), "{missing}");
    }
}

#[test]
fn threads_share_a_layer() {
    let w = Tensor::from_vec(numbers(64 * 128, 9), (64, 128), &Device::Cpu).unwrap();
    let layer = QLinear::quantize(&w, None, "w4a16-g32").unwrap();
    let x = Tensor::from_vec(numbers(4 * 128, 10), (4, 128), &Device::Cpu).unwrap();
    let want = layer.forward(&x).unwrap().to_vec2::<f32>().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20 {
                    assert_eq!(layer.forward(&x).unwrap().to_vec2::<f32>().unwrap(), want);
                }
            });
        }
    });
}
