//! ONNX: goldens of onnxruntime, packing without loss, and a written model read back.

mod model;

use crate::support::{self, Random, assert_names, testdata, text_of};
use half::{bf16, f16};
use halfbyte::format::reference::{dequantize, matmul};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::onnx::{BlockLayout, Blocks, MatMulNBits, PackedBlocks, TensorBytes, describe, load, pack};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{Checkpoint, Error, Finding, StoredFormat, StoredModule, StoredWeight};
use std::path::Path;

/// A product `m` of tensors `weight`, `scales`, `zero_points`, `g_idx`.
pub fn product([n, k]: [usize; 2], bits: u32, block_size: usize) -> MatMulNBits {
    MatMulNBits {
        node: "node".into(),
        prefix: "m".into(),
        weight: "weight".into(),
        scales: "scales".into(),
        zero_points: None,
        g_idx: None,
        bias: None,
        n,
        k,
        bits,
        block_size,
        accuracy_level: 0,
    }
}

/// What was read, where its codes have a format.
pub fn quantized(module: StoredModule<'_>) -> (QTensor, Vec<Finding>) {
    match module.weight {
        StoredWeight::Quantized(tensor) => (tensor.to_qtensor().unwrap(), module.findings),
        StoredWeight::Dense { .. } => panic!("expected codes, got floats"),
    }
}

fn read(product: &MatMulNBits, blocks: &Blocks<'_>) -> (QTensor, Vec<Finding>) {
    let description = describe(Path::new("m.onnx"), product, blocks).unwrap();
    let loaded = quantized(load(Path::new("m.onnx"), product, blocks).unwrap());
    let q = &loaded.0;
    assert_eq!((description.format, description.shape), (StoredFormat::Codes(q.format()), [q.n(), q.k()]));
    assert_eq!((description.act_order, &description.findings), (q.group_index().is_some(), &loaded.1));
    loaded
}

/// The product and initialisers that a packed tensor is.
fn packed_blocks<'a>(packed: &'a PackedBlocks, shapes: &'a [Vec<usize>; 3]) -> (MatMulNBits, Blocks<'a>) {
    let layout = packed.layout;
    let mut product = product(layout.shape(), layout.bits(), layout.block_size());
    product.zero_points = packed.zero_points.as_ref().map(|_| "zero_points".into());
    let zero_points = packed.zero_points.as_ref();
    let blocks = Blocks {
        weight: TensorBytes { dtype: DType::U8, shape: &shapes[0], bytes: &packed.weight },
        scales: TensorBytes { dtype: layout.scale().into(), shape: &shapes[1], bytes: &packed.scales },
        zero_points: zero_points.map(|bytes| TensorBytes { dtype: DType::U8, shape: &shapes[2], bytes }),
        g_idx: None,
    };
    (product, blocks)
}

/// What a packed tensor is read as, whether its initialisers have a dimension for blocks or are flat.
fn read_packed(packed: &PackedBlocks) -> QTensor {
    let [n, k] = packed.layout.shape();
    let blocks = k.div_ceil(packed.layout.block_size());
    let zeros = packed.zero_points.as_ref().map_or(0, Vec::len);
    let full = [vec![n, blocks, packed.weight.len() / n / blocks], vec![n, blocks], vec![n, zeros / n]];
    let flat = [vec![packed.weight.len()], vec![n * blocks], vec![zeros]];
    let [q, of_flat] = [full, flat].map(|shapes| {
        let (product, blocks) = packed_blocks(packed, &shapes);
        read(&product, &blocks).0
    });
    assert_eq!(q, of_flat);
    q
}

#[test]
fn goldens_of_onnxruntime_are_read_to_their_exact_values_and_packed_to_the_same_bytes() {
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(testdata("ort_matmulnbits/manifest.json")).unwrap()).unwrap();
    let entries = manifest["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 28);
    for entry in entries {
        let name = entry["file"].as_str().unwrap();
        let golden = Checkpoint::open(testdata(name)).unwrap();
        let tensor = |name: &str| {
            let info = golden.get(name)?;
            Some(TensorBytes { dtype: info.dtype, shape: info.shape, bytes: golden.bytes(name).unwrap() })
        };
        let param = |name: &str| entry["params"][name].as_u64().unwrap() as usize;
        let (n, k, bits, size) = (param("N"), param("K"), param("bits") as u32, param("block_size"));
        let mut product = product([n, k], bits, size);
        product.zero_points = golden.contains("zero_points").then(|| "zero_points".into());
        product.g_idx = golden.contains("g_idx").then(|| "g_idx".into());
        let mut blocks = Blocks {
            weight: tensor("B").unwrap(),
            scales: tensor("scales").unwrap(),
            zero_points: tensor("zero_points"),
            g_idx: tensor("g_idx"),
        };
        let halves = |name: &str| -> Vec<bf16> {
            golden.floats(name).unwrap().to_f32().into_iter().map(bf16::from_f32).collect()
        };
        let (scales, zeros, rounded_scales, rounded_zeros);
        if name.contains("float_zp") {
            // As they are, they are read as floats, below. Fractions and scales of 8 bits have exact products.
            (rounded_scales, rounded_zeros) = (halves("scales"), halves("zero_points"));
            scales = rounded_scales.iter().map(|s| s.to_f32()).collect();
            zeros = Some(rounded_zeros.iter().map(|z| z.to_f64()).collect::<Vec<_>>());
            blocks.scales =
                TensorBytes { dtype: DType::BF16, bytes: bytemuck::cast_slice(&rounded_scales), ..blocks.scales };
            let bytes = bytemuck::cast_slice(&rounded_zeros);
            blocks.zero_points = Some(TensorBytes { dtype: DType::BF16, bytes, ..blocks.zero_points.unwrap() });
        } else {
            scales = golden.floats("scales").unwrap().to_f32();
            zeros = None;
        }
        let (q, findings) = read(&product, &blocks);
        assert_eq!(findings, [], "{name}");
        assert_eq!((q.n(), q.k(), q.codes()), (n, k, golden.bytes("q").unwrap()), "{name}");
        assert_eq!(q.format().group, Group::Size(size), "{name}");
        assert_eq!(q.scales(), scales, "{name}");
        if let Some(zeros) = zeros {
            assert_eq!(q.format().zero, Zero::Float);
            for (i, w) in dequantize(&q).into_iter().enumerate() {
                let block = i / k * q.groups() + i % k / size;
                let exact = (f64::from(q.codes()[i]) - zeros[block]) * f64::from(scales[block]);
                assert!((w - exact).abs() <= 1e-15, "{name}: {w}, not {exact}");
            }
            continue;
        }
        let x: Vec<f64> = golden.floats("x").unwrap().to_f32().into_iter().map(f64::from).collect();
        let m = x.len() / k;
        let bias = golden.floats("bias").map_or(vec![0.0; n], |bias| bias.to_f32());
        let expected: Vec<f64> = bytemuck::pod_collect_to_vec(golden.bytes("y_f64").unwrap());
        // The weights of the golden product are rounded to f32.
        let weights: Vec<f64> = dequantize(&q).into_iter().map(|w| f64::from(w as f32)).collect();
        let product = matmul(&x, &weights, [m, n, k]).value;
        for (i, (got, expected)) in product.iter().zip(expected).enumerate() {
            let got = got + f64::from(bias[i % n]);
            assert!((got - expected).abs() <= 1e-9, "{name}: {got}, not {expected}");
        }
        if golden.contains("g_idx") {
            let index: Vec<u32> = golden.ints("g_idx").unwrap().iter().map(|&g| g as u32).collect();
            assert_eq!(q.group_index(), Some(index.as_slice()));
            assert_names(&text_of(pack("m", &q, Float::F32)), &["`m`", "MatMulNBits", "act-order"]);
            continue;
        }
        let packed = pack("m", &q, Float::F32).unwrap();
        assert_eq!(packed.weight, golden.bytes("B").unwrap(), "{name}");
        assert_eq!(packed.scales, golden.bytes("scales").unwrap(), "{name}");
        assert_eq!(packed.zero_points.as_deref(), golden.bytes("zero_points").ok(), "{name}");
    }
}

#[test]
fn zero_points_whose_products_no_single_holds_are_read_as_floats() {
    let golden = Checkpoint::open(testdata("ort_matmulnbits/nbits_w4_b32_float_zp.safetensors")).unwrap();
    let (n, k, size) = (16, 256, 32);
    let tensor = |name: &str| {
        let info = golden.info(name).unwrap();
        TensorBytes { dtype: info.dtype, shape: info.shape, bytes: golden.bytes(name).unwrap() }
    };
    let product = MatMulNBits { zero_points: Some("zero_points".into()), ..product([n, k], 4, size) };
    let zero_points = Some(tensor("zero_points"));
    let blocks = Blocks { weight: tensor("B"), scales: tensor("scales"), zero_points, g_idx: None };
    let file = Path::new("m.onnx");
    let description = describe(file, &product, &blocks).unwrap();
    assert_eq!(description.format, StoredFormat::Floats { name: "w4-float-zero-points", bits: 4, block: size });
    assert_eq!(description.format.to_string(), "w4-float-zero-points-g32");
    let module = load(file, &product, &blocks).unwrap();
    assert_eq!(module.findings, description.findings);
    assert_names(&module.findings[0].text, &["zero points are fractions", "not exact in f32"]);
    let StoredWeight::Dense { floats, shape } = module.weight else { panic!("expected floats") };
    assert_eq!(shape, [n, k]);
    let weights = floats.to_f32();
    let [scales, zeros, x] = ["scales", "zero_points", "x"].map(|name| golden.floats(name).unwrap().to_f32());
    for (i, (weight, &code)) in weights.iter().zip(golden.bytes("q").unwrap()).enumerate() {
        assert_eq!(*weight, (f32::from(code) - zeros[i / size]) * scales[i / size]);
    }
    let [x, weights] = [x, weights].map(|v| v.into_iter().map(f64::from).collect::<Vec<_>>());
    let expected: Vec<f64> = bytemuck::pod_collect_to_vec(golden.bytes("y_f64").unwrap());
    // Those were computed in f64 throughout.
    for (got, expected) in matmul(&x, &weights, [x.len() / k, n, k]).value.iter().zip(expected) {
        assert!((got - expected).abs() <= 1e-7, "{got}, not {expected}");
    }
    // A scale too large for any weight is refused, not passed on as infinity.
    let scales = TensorBytes { bytes: bytemuck::cast_slice(&[f32::MAX; 128]), ..blocks.scales };
    let text = text_of(load(file, &product, &Blocks { scales, ..blocks }));
    assert_names(&text, &["m.onnx", "tensor `scales`", "finite weights", "inf in row 0, column 0"]);
}

/// A tensor of random codes, scales and zero points.
fn random(seed: u64, format: WeightFormat, shape: [usize; 2]) -> QTensor {
    support::quantized(&mut Random(seed), format, shape, 0..=format.max_code() as usize, false)
}

#[test]
fn what_is_packed_is_read_again() {
    let mut seed = 0;
    for bits in [2, 4, 8] {
        for zero in [Zero::Symmetric, Zero::Integer] {
            for scale in [Float::F16, Float::BF16, Float::F32] {
                for (group, k) in [(16, 17), (16, 64), (32, 33), (64, 199), (128, 256), (128, 129)] {
                    seed += 1;
                    let format = WeightFormat { bits, group: Group::Size(group), zero, scale, channel_scale: None };
                    let q = random(seed, format, [5, k]);
                    assert_eq!(read_packed(&pack("m", &q, scale).unwrap()), q, "{format:?}, {k}");
                }
                for k in [1, 16, 17, 100, 128] {
                    seed += 1;
                    let q = random(
                        seed,
                        WeightFormat { bits, group: Group::Channel, zero, scale, channel_scale: None },
                        [3, k],
                    );
                    let packed = pack("m", &q, scale).unwrap();
                    assert_eq!(packed.layout.block_size(), k.max(16).next_power_of_two());
                    assert_eq!(read_packed(&packed), q, "{k}");
                }
            }
        }
    }
}

#[test]
fn scales_are_widened_and_one_group_is_one_a_row() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let q = random(1, format, [4, 70]);
    let wide = read_packed(&pack("m", &q, Float::F32).unwrap());
    assert_eq!(wide.format(), WeightFormat { scale: Float::F32, ..format });
    assert_eq!((wide.codes(), wide.scales(), wide.zeros()), (q.codes(), q.scales(), q.zeros()));
    for group in [Group::Tensor, Group::Size(100), Group::Size(512)] {
        let q = random(2, WeightFormat { group, ..format }, [4, 70]);
        let packed = pack("m", &q, Float::F16).unwrap();
        assert_eq!(packed.layout.block_size(), 128);
        let read = read_packed(&packed);
        assert_eq!(read.format().group, Group::Channel);
        assert_eq!(dequantize(&read), dequantize(&q));
    }
}

#[test]
fn groups_that_are_no_blocks_are_divided() {
    let format =
        WeightFormat { bits: 4, group: Group::Channel, zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let cases = [
        (Group::Channel, 256, 256),
        (Group::Channel, 257, 128),
        (Group::Tensor, 1500, 128),
        (Group::Size(512), 1500, 128),
        (Group::Size(192), 500, 64),
        (Group::Size(96), 500, 32),
        (Group::Size(48), 100, 16),
        (Group::Size(256), 300, 256),
    ];
    for (seed, (group, k, block)) in cases.into_iter().enumerate() {
        let q = random(seed as u64, WeightFormat { group, ..format }, [3, k]);
        let packed = pack("m", &q, Float::F16).unwrap();
        assert_eq!(packed.layout.block_size(), block, "{group:?}");
        let read = read_packed(&packed);
        assert_eq!((read.codes(), dequantize(&read)), (q.codes(), dequantize(&q)), "{group:?}");
    }
}

#[test]
fn zero_points_are_read_in_any_type() {
    let format =
        WeightFormat { bits: 2, group: Group::Size(16), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let q = random(3, format, [3, 40]);
    let packed = pack("m", &q, Float::F16).unwrap();
    let shapes = [vec![3, 3, 4], vec![3, 3], vec![3, 1]];
    let (product, blocks) = packed_blocks(&packed, &shapes);
    let Zeros::Integer(zeros) = q.zeros() else { panic!("expected zero points") };
    let with = |zeros: &[f32]| {
        let zeros: Vec<f16> = zeros.iter().copied().map(f16::from_f32).collect();
        let bytes = bytemuck::cast_slice(&zeros);
        let blocks = Blocks { zero_points: Some(TensorBytes { dtype: DType::F16, shape: &[3, 3], bytes }), ..blocks };
        load(Path::new("m.onnx"), &product, &blocks).map(|loaded| quantized(loaded).0)
    };
    let mut floats: Vec<f32> = zeros.iter().map(|&z| f32::from(z)).collect();
    assert_eq!(with(&floats).unwrap(), q);
    // The middle everywhere is none; 2^bits is the last that codes are subtracted from as they are.
    assert_eq!(with(&[2.0; 9]).unwrap().zeros(), &Zeros::Symmetric);
    floats[4] = 4.0;
    assert_eq!(with(&floats).unwrap().zero_point(1, 1), Some(4));
    for other in [-1.0, 5.0, 1.5] {
        floats[4] = other;
        let q = with(&floats).unwrap();
        let Zeros::Float(offsets) = q.zeros() else { panic!("expected offsets") };
        assert_eq!(offsets[4], -other * q.scales()[4]);
        assert!(matches!(q.format().scale, Float::F16 | Float::F32));
    }
    floats[4] = f32::INFINITY;
    assert_names(&text_of(with(&floats)), &["m.onnx", "tensor `zero_points`", "finite", "inf at 4"]);
}

#[test]
fn what_matmulnbits_cannot_hold_is_refused() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F32, channel_scale: None };
    let q = |format: WeightFormat| random(4, format, [2, 64]);
    let refusal = |q: &QTensor, scale| {
        let error = pack("m", q, scale).unwrap_err();
        assert!(matches!(error, Error::Unrepresentable { .. }), "{error:?}");
        error.to_string()
    };
    assert_names(&refusal(&q(WeightFormat { bits: 3, ..format }), Float::F32), &["`m`", "2, 4 or 8 bits, not 3"]);
    for group in [8, 20, 40] {
        let format = WeightFormat { group: Group::Size(group), ..format };
        assert_names(&refusal(&q(format), Float::F32), &["blocks are of 16, 32", &format!("not {group}")]);
    }
    assert_names(&refusal(&q(format), Float::F16), &["its scales are f16", "not exact"]);
    let tensor = |format, zeros, index| QTensor::new(format, [1, 64], vec![0; 64], vec![1.0; 2], zeros, index).unwrap();
    let sixteen = tensor(format, Zeros::Integer(vec![3, 16]), None);
    assert_names(&refusal(&sixteen, Float::F32), &["from 0 to 15, got 16"]);
    let float = tensor(WeightFormat { zero: Zero::Float, ..format }, Zeros::Float(vec![0.5; 2]), None);
    assert_names(&refusal(&float, Float::F32), &["no float offsets"]);
    let index = (0..64).map(|j| j % 2).collect();
    let reordered = tensor(WeightFormat { zero: Zero::Symmetric, ..format }, Zeros::Symmetric, Some(index));
    assert_names(&refusal(&reordered, Float::F32), &["act-order"]);
    for shape in [[0, 64], [2, 0]] {
        assert_names(&text_of(BlockLayout::of("m", format, shape, Float::F32)), &["`m`", "is empty"]);
    }
    for shape in [[usize::MAX, 64], [1, usize::MAX], [1 << 40, 1 << 30]] {
        assert_names(&text_of(BlockLayout::of("m", format, shape, Float::F32)), &["`m`", "does not fit memory"]);
    }
}
