//! ONNX: goldens of onnxruntime, packing without loss, and a written model read back.

use crate::support::{Random, assert_names, listing, testdata, text_of};
use half::{bf16, f16};
use halfbyte::format::reference::{dequantize, matmul};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::onnx::{
    BlockLayout, Blocks, MatMulNBits, Model, PackedBlocks, Place, Product, TensorBytes, create, describe, load, pack,
};
use halfbyte_checkpoint::safetensors::{DType, TensorSpec};
use halfbyte_checkpoint::{Checkpoint, Error, Finding, StoredFormat, StoredModule, StoredWeight};
use std::path::{Path, PathBuf};

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
fn random(seed: u64, format: WeightFormat, [n, k]: [usize; 2]) -> QTensor {
    let mut random = Random(seed);
    let groups = format.group.count(k);
    let codes = (0..n * k).map(|_| random.below(1 << format.bits) as u8).collect();
    let scales = (0..n * groups).map(|_| format.scale.round((random.below(2000) + 1) as f32 / 1000.0)).collect();
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        _ => Zeros::Integer((0..n * groups).map(|_| random.below(1 << format.bits) as u16).collect()),
    };
    QTensor::new(format, [n, k], codes, scales, zeros, None).unwrap()
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

/// A model file with those that its tensors lie in.
struct Files {
    model: Model,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Files {
    fn open(path: PathBuf) -> Self {
        let bytes = std::fs::read(&path).unwrap();
        Self { model: Model::parse(&bytes, &path).unwrap(), path, bytes }
    }

    fn bytes(&self, name: &str) -> Vec<u8> {
        let tensor = self.model.initializer(name).unwrap();
        match &tensor.place {
            Place::Inline(range) => self.bytes[range.clone()].to_vec(),
            Place::Decoded(bytes) => bytes.clone(),
            Place::External { location, .. } => {
                let file = std::fs::read(self.path.with_file_name(location)).unwrap();
                file[tensor.external_range(file.len(), &self.path).unwrap()].to_vec()
            }
        }
    }

    fn read(&self, product: &MatMulNBits) -> (QTensor, Vec<Finding>) {
        let names =
            [Some(&product.weight), Some(&product.scales), product.zero_points.as_ref(), product.g_idx.as_ref()];
        let data = names.map(|name| name.map(|name| (self.model.initializer(name).unwrap(), self.bytes(name))));
        let [weight, scales, zero_points, g_idx] = data.each_ref().map(|tensor| {
            tensor.as_ref().map(|(tensor, bytes)| TensorBytes {
                dtype: tensor.element.dtype.unwrap(),
                shape: &tensor.shape,
                bytes,
            })
        });
        read(product, &Blocks { weight: weight.unwrap(), scales: scales.unwrap(), zero_points, g_idx })
    }
}

#[test]
fn models_of_onnxruntime_are_read_to_the_weights_that_it_multiplies_by() {
    let identity = Checkpoint::open(testdata("onnx/identity.safetensors")).unwrap();
    let (mut compared, mut files) = (0, 0);
    for name in listing(&testdata("onnx")).iter().filter(|name| name.ends_with(".onnx")) {
        files += 1;
        let file = Files::open(testdata(&format!("onnx/{name}")));
        for product in file.model.products() {
            let key = format!("{name}:{}", product.prefix);
            let (q, findings) = file.read(product);
            assert_eq!(findings, [], "{key}");
            let expected = identity.floats(&key).unwrap().to_f32();
            assert_eq!(identity.info(&key).unwrap().shape, [q.n(), q.k()]);
            // With an index, the program scales and adds in one step.
            let slack = if product.g_idx.is_some() { 1e-7 } else { 0.0 };
            for (i, (w, expected)) in dequantize(&q).into_iter().zip(expected).enumerate() {
                assert!((w as f32 - expected).abs() <= slack, "{key} at {i}: {w}, not {expected}");
            }
            compared += 1;
        }
    }
    assert_eq!((files, compared), (4, identity.tensor_names().count()));
}

#[test]
fn a_model_tells_its_products_and_all_tensors_in_any_encoding() {
    let file = Files::open(testdata("onnx/quantizer_w4_asym.onnx"));
    let prefix = "model.layers.0.self_attn.q_proj";
    let name = |ending: &str| format!("{prefix}.weight_{ending}");
    let product = MatMulNBits {
        node: format!("{prefix}/MatMul_Q4"),
        prefix: prefix.into(),
        weight: name("Q4"),
        scales: name("scales"),
        zero_points: Some(name("zero_points")),
        accuracy_level: 1,
        ..product([24, 200], 4, 32)
    };
    assert_eq!(file.model.products()[0], product);
    assert_eq!(file.model.metadata(), [("note".into(), "a value".into()), ("empty".into(), String::new())]);
    assert!(file.model.initializer("text").is_none());
    let tensor = |name: &str| {
        let tensor = file.model.initializer(name).unwrap();
        (tensor.element.name, tensor.shape.clone(), file.bytes(name))
    };
    let bytes = |elements: &[f32]| bytemuck::cast_slice(elements).to_vec();
    assert_eq!(tensor("typed.float"), ("FLOAT", vec![3], bytes(&[1.5, -2.25, 0.0])));
    assert_eq!(tensor("scalar"), ("FLOAT", vec![], bytes(&[2.0])));
    assert_eq!(tensor("typed.half"), ("FLOAT16", vec![2], vec![0x00, 0x3e, 0x00, 0xb4]));
    assert_eq!(tensor("typed.int64"), ("INT64", vec![3], bytemuck::cast_slice(&[-1i64, 0, 1 << 40]).to_vec()));
    assert_eq!(tensor("typed.int8"), ("INT8", vec![2], vec![0x80, 0x7f]));
    assert_eq!(tensor("typed.uint8"), ("UINT8", vec![2], vec![0, 255]));
    assert_eq!(tensor("typed.int4"), ("INT4", vec![3], vec![0x78, 0x01]));
    assert_eq!(tensor("typed.double"), ("DOUBLE", vec![1], 0.1f64.to_le_bytes().to_vec()));
    assert_eq!(tensor("typed.uint32"), ("UINT32", vec![1], vec![255; 4]));
    let embedding = file.model.initializer("model.embed_tokens.weight").unwrap();
    assert_eq!((embedding.element.dtype, embedding.shape.as_slice()), (Some(DType::F16), [4, 6].as_slice()));
    assert!(matches!(&embedding.place, Place::Inline(range) if range.len() == 48 && range.end <= file.bytes.len()));
    // Two branches that multiply by the same weight are one product.
    let file = Files::open(testdata("onnx/branches_w4_g_idx.onnx"));
    let [product] = file.model.products() else { panic!("expected one product") };
    assert_eq!((product.node.as_str(), product.prefix.as_str()), ("b_else", "b"));
}

fn layout(q: &QTensor) -> BlockLayout {
    BlockLayout::of("m", q.format(), [q.n(), q.k()], q.format().scale).unwrap()
}

#[test]
fn a_written_model_is_read_back() {
    let format =
        WeightFormat { bits: 4, group: Group::Size(32), zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let channel =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let modules = [("layers.0.up", random(5, format, [6, 70])), ("layers.0.down", random(6, channel, [3, 40]))];
    let product = |(prefix, q): &(&str, QTensor), bias, accuracy_level| Product {
        prefix: (*prefix).into(),
        layout: layout(q),
        bias,
        accuracy_level,
    };
    let products = [product(&modules[0], false, 4), product(&modules[1], true, 0)];
    let dense =
        [("embed", DType::BF16, vec![2, 3], 12), ("one", DType::I64, vec![], 8), ("none", DType::F32, vec![0], 0)];
    let specs = dense.clone().map(|(name, dtype, shape, _)| TensorSpec { name: name.into(), dtype, shape });
    let metadata = [("config.json".to_owned(), "{\"a\": \"ä\"}".to_owned()), ("b".to_owned(), String::new())];
    let write = |dir: &Path, order: [usize; 2]| {
        let mut writer = create(dir, &products, &specs, &metadata).unwrap();
        writer.write("layers.0.down.bias", bytemuck::cast_slice(&[1f32, 2.0, 3.0])).unwrap();
        for at in order {
            let (prefix, q) = &modules[at];
            let packed = pack(prefix, q, q.format().scale).unwrap();
            for ((ending, ..), bytes) in packed.layout.tensors().zip(packed.parts()) {
                writer.write(&format!("{prefix}.{ending}"), bytes).unwrap();
            }
        }
        for (name, _, _, bytes) in &dense {
            writer.write(name, &vec![7; *bytes]).unwrap();
        }
        assert_eq!(writer.tensor_bytes(), writer.finish().unwrap().tensor_bytes);
        ["model.onnx", "model.onnx.data"].map(|name| std::fs::read(dir.join(name)).unwrap())
    };
    let [first, second] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let files = write(first.path(), [0, 1]);
    assert_eq!(files, write(second.path(), [1, 0]));
    assert_eq!(listing(first.path()), ["model.onnx", "model.onnx.data"]);

    let file = Files::open(first.path().join("model.onnx"));
    assert_eq!(file.model.metadata(), metadata);
    for (product, (prefix, q)) in file.model.products().iter().zip(&modules) {
        assert_eq!(product.prefix, *prefix);
        assert_eq!(file.read(product), (q.clone(), vec![]));
    }
    let told = |product: &MatMulNBits| (product.accuracy_level, product.bias.clone());
    assert_eq!(told(&file.model.products()[0]), (4, None));
    assert_eq!(told(&file.model.products()[1]), (0, Some("layers.0.down.bias".into())));
    assert_eq!(file.bytes("layers.0.down.bias"), bytemuck::cast_slice::<f32, u8>(&[1.0, 2.0, 3.0]));
    for (name, dtype, shape, bytes) in &dense {
        let tensor = file.model.initializer(name).unwrap();
        assert_eq!((tensor.element.dtype, &tensor.shape), (Some(*dtype), shape));
        assert_eq!(file.bytes(name), vec![7; *bytes]);
        assert!(matches!(tensor.place, Place::External { offset, .. } if offset % 4096 == 0));
    }
    assert_eq!(file.model.initializers().len(), 9);

    // Neither file is replaced.
    for name in ["model.onnx", "model.onnx.data"] {
        std::fs::remove_file(second.path().join(name)).unwrap();
        let error = create(second.path(), &products, &specs, &metadata).unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error}");
        std::fs::write(second.path().join(name), "").unwrap();
    }
}

#[test]
fn a_model_that_is_not_complete_leaves_nothing() {
    let format =
        WeightFormat { bits: 2, group: Group::Size(16), zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    let q = random(7, format, [2, 16]);
    let products = [Product { prefix: "m".into(), layout: layout(&q), bias: false, accuracy_level: 0 }];
    let spec = |name: &str, dtype, shape: &[usize]| TensorSpec { name: name.into(), dtype, shape: shape.into() };
    let dir = tempfile::tempdir().unwrap();
    let create = |specs: &[TensorSpec]| create(dir.path(), &products, specs, &[]);
    let mut writer = create(&[spec("a", DType::U8, &[2])]).unwrap();
    assert_names(&text_of(writer.write("b", &[])), &["declared", "`b`"]);
    assert_names(&text_of(writer.write("a", &[1])), &["2 bytes for `a`", "got 1"]);
    writer.write("a", &[1, 2]).unwrap();
    assert_names(&text_of(writer.write("a", &[1, 2])), &["once", "`a` again"]);
    assert_eq!(listing(dir.path()).len(), 1);
    assert_names(&text_of(writer.finish()), &["every declared tensor", "2 without", "`m.scales`"]);
    assert_eq!(listing(dir.path()), [""; 0]);
    drop(create(&[]).unwrap());
    assert_eq!(listing(dir.path()), [""; 0]);
    for (specs, part) in [
        (vec![spec("a", DType::U8, &[1]), spec("a", DType::U8, &[1])], "`a`"),
        (vec![spec("", DType::U8, &[1])], "``"),
        (vec![spec("m.scales", DType::U8, &[1])], "`m.scales`"),
        (vec![spec("m.output", DType::U8, &[1])], "`m.output`"),
        (vec![spec("a", DType::F6E2M3, &[4])], "`a` of F6_E2M3"),
        (vec![spec("a", DType::F8E8M0, &[4])], "`a` of F8_E8M0"),
        (vec![spec("a", DType::U8, &[usize::MAX])], "`a` of U8"),
        (vec![spec("a", DType::F64, &[usize::MAX / 2])], "`a` of F64"),
    ] {
        assert_names(&text_of(create(&specs)), &["write ONNX", part]);
        assert_eq!(listing(dir.path()), [""; 0]);
    }
}
