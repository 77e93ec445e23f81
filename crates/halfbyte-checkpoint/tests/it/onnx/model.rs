//! Whole models: those of onnxruntime, their listing, and one that is written and read back.

use super::{product, random, read};
use crate::support::{assert_names, listing, testdata, text_of};
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero};
use halfbyte_checkpoint::onnx::{BlockLayout, Blocks, MatMulNBits, Model, Place, Product, TensorBytes, create, pack};
use halfbyte_checkpoint::safetensors::{DType, TensorSpec};
use halfbyte_checkpoint::{Checkpoint, Error, Finding};
use std::path::{Path, PathBuf};

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

    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        // As caches have them: both files are links to such of other names. And the model's alone, far from its data.
        let (cache, lone) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for (name, blob) in [("model.onnx", "0a"), ("model.onnx.data", "1b")] {
            std::fs::copy(first.path().join(name), cache.path().join(blob)).unwrap();
            symlink(blob, cache.path().join(name)).unwrap();
        }
        symlink(first.path().join("model.onnx"), lone.path().join("other.onnx")).unwrap();
        for path in [cache.path().to_owned(), cache.path().join("model.onnx"), lone.path().join("other.onnx")] {
            let checkpoint = Checkpoint::open(&path).unwrap();
            assert_eq!(checkpoint.bytes("embed").unwrap(), [7; 12], "{}", path.display());
        }
    }

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
