//! Between the forms of files: the same numbers, the same bytes, or a refusal; and the proof.

use crate::support::{
    Random, Tensor, assert_names, format, listing, quantized, taken, tensor, testdata, text_of, write_folder,
};
use half::f16;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Group, QTensor, WeightFormat};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, Error, GptqVersion, Job, LinearWeight, ModuleKind, Quantization, Target, Untied,
    Verification, Weights, convert, verify, write_dense, write_model,
};
use std::path::Path;

const V1: Target = Target::Gptq(Some(GptqVersion::V1));
const V2: Target = Target::Gptq(Some(GptqVersion::V2));

const SHAPES: [(&str, [usize; 2]); 3] = [
    ("model.layers.0.q_proj", [64, 256]),
    ("model.layers.0.down_proj", [32, 256]),
    ("model.layers.1.up_proj", [96, 256]),
];

/// Writes a model of random weights in a form, and returns them.
fn write(dir: &Path, target: Target, format: WeightFormat, zeros: std::ops::RangeInclusive<usize>) -> Vec<QTensor> {
    let dense = dir.with_extension("dense");
    std::fs::create_dir(&dense).unwrap();
    let mut tensors: Vec<Tensor> = SHAPES
        .iter()
        .map(|(name, [n, k])| tensor(&format!("{name}.weight"), DType::F16, &[*n, *k], &vec![f16::ONE; n * k]))
        .collect();
    tensors.push(tensor("model.norm.weight", DType::F16, &[128], &vec![f16::from_f32(0.75); 128]));
    tensors.push(tensor("lm_head.weight", DType::F16, &[8, 128], &vec![f16::from_f32(0.25); 8 * 128]));
    write_folder(&dense, &tensors, r#"{"model_type": "llama"}"#);
    // A seed for which no tensor's only zero point is the middle: those are read as symmetric.
    let mut generator = Random(9);
    let weights: Vec<QTensor> =
        SHAPES.iter().map(|(_, shape)| quantized(&mut generator, format, *shape, zeros.clone(), false)).collect();
    let quantization = Quantization {
        target,
        format: &mut |module| module.in_block().then_some(format),
        quantize: &mut |module, _, _| {
            Ok(weights[SHAPES.iter().position(|(name, _)| *name == module.name).unwrap()].clone())
        },
        dense: &mut |name| (name == "model.norm.weight").then(|| vec![0.5; 128]),
        untied: None,
    };
    write_model(Job::new(&Weights::open(&dense).unwrap(), dir), quantization).unwrap();
    weights
}

fn read(dir: &Path) -> Vec<QTensor> {
    let weights = Weights::open(dir).unwrap();
    let load = |name: &str| {
        let linear = weights.load_linear(name).unwrap();
        assert_eq!(linear.findings, [], "{name}");
        let LinearWeight::Quantized(q) = linear.weight else { panic!("{name} is dense") };
        q
    };
    SHAPES.iter().map(|(name, _)| load(name)).collect()
}

fn change(from: &Path, to: &Path, target: Target) -> halfbyte_checkpoint::Result<()> {
    let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
    let converted = convert(Job::new(&Weights::open(from).unwrap(), to), conversion)?;
    assert_eq!(converted.requantized, []);
    Ok(())
}

fn compare(a: &Path, b: &Path) -> Verification {
    verify(&Weights::open(a).unwrap(), &Weights::open(b).unwrap(), &mut |_, _, _| true).unwrap()
}

fn assert_same_files(a: &Path, b: &Path) {
    assert_eq!(listing(a), listing(b));
    for name in listing(a) {
        assert!(std::fs::read(a.join(&name)).unwrap() == std::fs::read(b.join(&name)).unwrap(), "{name}");
    }
}

#[test]
fn every_lossless_way_leads_back_to_the_same_tensors_and_bytes() {
    let symmetric = ["w4a16-g128", "w8a16", "w2a16-g32"];
    let asymmetric = ["w4a16-asym", "w8a16-g64-asym", "w3a16-g128-asym"];
    let dir = tempfile::tempdir().unwrap();
    let mut ways = 0;
    for (i, name) in symmetric.into_iter().chain(asymmetric).enumerate() {
        let format = format(name);
        // Zero points that every form can hold.
        let zeros = 1..=format.max_code() as usize;
        let targets: &[Target] = match format.bits {
            4 => &[V1, V2, Target::Awq, Target::CompressedTensors, Target::Onnx],
            3 => &[V1, V2, Target::CompressedTensors],
            _ => &[V1, V2, Target::CompressedTensors, Target::Onnx],
        };
        for (a, &from) in targets.iter().enumerate() {
            let start = dir.path().join(format!("{i}-{a}"));
            let weights = write(&start, from, format, zeros.clone());
            assert!(read(&start) == weights, "{name} in {from:?}");
            for (b, &through) in targets.iter().enumerate() {
                let (there, back) =
                    (dir.path().join(format!("{i}-{a}-{b}")), dir.path().join(format!("{i}-{a}-{b}-{a}")));
                change(&start, &there, through).unwrap();
                assert!(read(&there) == weights, "{name} from {from:?} to {through:?}");
                let proof = compare(&start, &there);
                assert!(proof.equal() && proof.compared == 5, "{proof:?}");
                change(&there, &back, from).unwrap();
                assert_same_files(&start, &back);
                ways += 1;
            }
        }
    }
    assert_eq!(ways, 2 * 25 + 9 + 3 * 16);
}

#[test]
fn a_model_of_onnxruntime_becomes_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let onnx: Vec<_> = listing(&testdata("onnx")).into_iter().filter(|name| name.ends_with(".onnx")).collect();
    assert_eq!(onnx.len(), 4);
    for name in onnx {
        let path = testdata("onnx").join(&name);
        let source = Weights::open(&path).unwrap();
        let modules: Vec<&str> =
            source.modules().into_iter().filter(|m| matches!(source.kind(m), Ok(ModuleKind::Quantized(_)))).collect();
        assert!(!modules.is_empty(), "{name}");
        for module in modules {
            let LinearWeight::Quantized(q) = source.load_linear(module).unwrap().weight else { panic!("{module}") };
            assert_eq!(q.codes().len(), q.n() * q.k());
        }
        // A model folder needs a config, which these do not have; a folder with one is a model.
        let folder = dir.path().join(&name);
        std::fs::create_dir(&folder).unwrap();
        for file in listing(&testdata("onnx")).iter().filter(|file| file.starts_with(&name)) {
            let new_name = file.replace(&*name, "model.onnx");
            std::fs::copy(testdata("onnx").join(file), folder.join(new_name)).unwrap();
        }
        if source.checkpoint().files().count() == 1 {
            std::fs::write(folder.join("config.json"), "{}").unwrap();
            let to = dir.path().join(format!("{name}-ct"));
            let conversion = Conversion {
                target: Target::Gptq(Some(GptqVersion::V2)),
                bits: None,
                group: None,
                channel_scale: None,
                requantize: false,
            };
            match convert(Job::new(&Weights::open(&folder).unwrap(), &to), conversion) {
                Ok(_) => assert!(compare(&folder, &to).equal(), "{name}"),
                Err(error) => assert!(matches!(error, Error::Unrepresentable { .. }), "{name}: {error}"),
            }
        }
    }
}

#[test]
fn a_model_goes_through_gguf_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let source = Weights::open(crate::support::model()).unwrap();
    for (name, blocks) in [("w4a16-g128", "Q4_0"), ("w8a16-g64", "Q8_0")] {
        let format = format(name);
        let quantization = Quantization {
            target: V1,
            format: &mut |module| module.in_block().then_some(format),
            quantize: &mut |_, weight, format| match weight {
                LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
                LinearWeight::Quantized(_) => unreachable!("the model is dense"),
            },
            dense: &mut |_| None,
            untied: None,
        };
        write_model(Job::new(&source, &path(name)), quantization).unwrap();
        let file = path(&format!("{name}.gguf"));
        change(&path(name), &file, Target::Gguf).unwrap();
        let gguf = Weights::open(&file).unwrap();
        let info = gguf.checkpoint().info("model.layers.3.self_attn.q_proj.weight").unwrap();
        assert_eq!((info.dtype.name(), info.shape), (blocks, &[384, 384][..]));
        let proof = compare(&path(name), &file);
        assert!(proof.equal() && proof.compared == 56, "{proof:?}");
        // Groups are divided in blocks, and joined again if asked for.
        let conversion =
            Conversion { target: V1, bits: None, group: Some(format.group), channel_scale: None, requantize: false };
        let back = path(&format!("{name}-back"));
        convert(Job::new(&gguf, &back), conversion).unwrap();
        let (first, second) = (Weights::open(path(name)).unwrap(), Weights::open(&back).unwrap());
        for tensor in first.checkpoint().tensors() {
            let same = second.checkpoint().bytes(tensor.name).unwrap();
            if tensor.dtype == DType::F16 && tensor.shape.len() == 1 {
                // Vectors are f32 in GGUF.
                let floats = second.checkpoint().floats(tensor.name).unwrap().to_f32();
                assert_eq!(floats, first.checkpoint().floats(tensor.name).unwrap().to_f32());
            } else {
                assert!(first.checkpoint().bytes(tensor.name).unwrap() == same, "{}", tensor.name);
            }
        }
        // From one GGUF file to another: the same file.
        let again = path(&format!("{name}-again.gguf"));
        change(&file, &again, Target::Gguf).unwrap();
        assert!(std::fs::read(&file).unwrap() == std::fs::read(&again).unwrap());
        assert!(matches!(change(&file, &again, Target::Gguf), Err(Error::Exists { .. })));
    }
    // A dense model, into a folder.
    change(&crate::support::model(), &path("dense"), Target::Gguf).unwrap();
    assert_eq!(listing(&path("dense")), ["model.gguf"]);
    assert!(compare(&crate::support::model(), &path("dense")).equal());
    let leftovers: Vec<String> = listing(dir.path()).into_iter().filter(|name| name.contains("tmp")).collect();
    assert_eq!(leftovers, Vec::<String>::new());
}

#[test]
fn what_was_changed_on_the_way_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m");
    write(&path, V1, format("w4a16-g32"), 0..=0);
    let weights = Weights::open(&path).unwrap();
    assert_eq!(weights.floats("model.norm.weight", &[128]).unwrap().to_f32(), vec![0.5; 128]);
    assert_eq!(weights.checkpoint().info("model.norm.weight").unwrap().dtype, DType::F16);
}

#[test]
fn scales_of_every_type_and_reach_go_into_compressed_tensors() {
    let dir = tempfile::tempdir().unwrap();
    for name in [
        "w4a16-g32-asym-sbf16",
        "w8a16-sf32",
        "w8a16-tensor",
        "w4a16-tensor-sf32",
        "w4a16-tensor-asym",
        "w8a16-tensor-asym",
        "w3a16-asym",
    ] {
        let (a, b) = (dir.path().join(name), dir.path().join(format!("{name}-2")));
        let format = format(name);
        let weights = write(&a, Target::CompressedTensors, format, 0..=format.max_code() as usize);
        assert!(read(&a) == weights, "{name}");
        change(&a, &b, Target::CompressedTensors).unwrap();
        assert_same_files(&a, &b);
    }
}

#[test]
fn what_a_form_cannot_hold_is_refused_and_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write(&path("zero"), V2, format("w4a16-g32-asym"), 0..=15);
    write(&path("sixteen"), V1, format("w4a16-g32-asym"), 1..=16);
    write(&path("eight"), V1, format("w8a16-g32"), 0..=0);
    let before = listing(dir.path());
    let refused = |from: &str, target| text_of(change(&path(from), &path("to"), target));
    assert_names(&refused("zero", V1), &["q_proj", "gptq cannot hold", "zero points of gptq go from 1 to 16, got 0"]);
    assert_names(&refused("sixteen", V2), &["zero points of gptq_v2 go from 0 to 15, got 16"]);
    assert_names(&refused("sixteen", Target::Awq), &["zero points go from 0 to 15, got 16"]);
    assert_names(&refused("sixteen", Target::CompressedTensors), &["zero points go from 0 to 15, got 16"]);
    assert_names(&refused("eight", Target::Awq), &["q_proj", "awq cannot hold", "codes of 4 bits"]);
    assert_eq!(listing(dir.path()), before);
    // Groups that no form joins, unless they are asked to be rounded again.
    let joined = |requantize| {
        let conversion =
            Conversion { target: V1, bits: None, group: Some(Group::Size(64)), channel_scale: None, requantize };
        convert(Job::new(&Weights::open(path("eight")).unwrap(), &path("joined")), conversion)
    };
    assert_names(&text_of(joined(false)), &["q_proj", "equal scales where they are joined"]);
    let converted = joined(true).unwrap();
    assert_eq!(converted.requantized.len(), 3);
    let proof = compare(&path("eight"), &path("joined"));
    assert_eq!(proof.differing.len(), 3);
    assert!(!proof.equal() && proof.differing[0].largest.unwrap() < 0.2, "{proof:?}");
    // Nothing to convert.
    write_dense(Job::new(&Weights::open(path("zero")).unwrap(), &path("plain")), Float::F32).unwrap();
    assert_names(&text_of(change(&path("plain"), &path("to"), V1)), &["expected a model with quantised layers"]);
}

#[test]
fn the_proof_finds_what_differs() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write(&path("a"), V1, format("w4a16-g32"), 0..=0);
    write_dense(Job::new(&Weights::open(path("a")).unwrap(), &path("dense")), Float::F32).unwrap();
    let proof = compare(&path("a"), &path("dense"));
    assert!(proof.equal() && proof.elements == ((64 + 32 + 96) * 256 + 128 + 8 * 128) as u64, "{proof:?}");

    // One element of two tensors is changed, one tensor is missing, one is new, one has another shape.
    let source = Weights::open(path("dense")).unwrap();
    let mut tensors: Vec<Tensor> = Vec::new();
    for info in source.checkpoint().tensors() {
        let mut values = source.checkpoint().floats(info.name).unwrap().to_f32();
        match info.name {
            "model.layers.0.q_proj.weight" => values[130] += 0.5,
            "model.layers.1.up_proj.weight" => values[7] = f32::NAN,
            "model.norm.weight" => continue,
            _ => {}
        }
        let shape = if info.name == "lm_head.weight" { vec![128, 8] } else { info.shape.to_vec() };
        tensors.push(tensor(info.name, DType::F32, &shape, &values));
    }
    tensors.push(tensor("new", DType::I32, &[1], &[1i32]));
    std::fs::create_dir(path("b")).unwrap();
    write_folder(&path("b"), &tensors, "");
    let proof = compare(&path("a"), &path("b"));
    assert!(!proof.equal());
    assert_eq!(
        (proof.only_in_first, proof.only_in_second),
        (vec!["model.norm.weight".to_owned()], vec!["new".to_owned()])
    );
    let names: Vec<&str> = proof.differing.iter().map(|d| d.name.as_str()).collect();
    assert_eq!(names, ["lm_head.weight", "model.layers.1.up_proj.weight", "model.layers.0.q_proj.weight"]);
    assert_eq!(proof.differing[0].shapes, [vec![8, 128], vec![128, 8]]);
    let q = &proof.differing[2];
    assert_eq!((q.elements, q.at.map(|at| at.0)), (1, Some(130)));
    assert!((q.largest.unwrap() - 0.5).abs() < 1e-6);
    // It can be stopped.
    let (a, b) = (Weights::open(path("a")).unwrap(), Weights::open(path("b")).unwrap());
    assert!(matches!(verify(&a, &b, &mut |_, done, _| done < 1), Err(Error::Cancelled)));
}

#[test]
fn a_file_of_autoawq_comes_back_byte_by_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let config = r#"{"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}}"#;
    let source = Checkpoint::open(testdata("awq/awq_w4_256x64_g128.safetensors")).unwrap();
    let tensors = [("gemm.qweight", "qweight"), ("gemm.qzeros", "qzeros"), ("scales", "scales")]
        .map(|(name, part)| taken(&source, name, &format!("h.0.m.{part}")));
    std::fs::create_dir(path("awq")).unwrap();
    write_folder(&path("awq"), &tensors, config);
    change(&path("awq"), &path("ct"), Target::CompressedTensors).unwrap();
    change(&path("ct"), &path("gptq"), V2).unwrap();
    change(&path("gptq"), &path("back"), Target::Awq).unwrap();
    let (before, after) = (Weights::open(path("awq")).unwrap(), Weights::open(path("back")).unwrap());
    for part in ["qweight", "qzeros", "scales"] {
        let name = format!("h.0.m.{part}");
        assert_eq!(before.checkpoint().bytes(&name).unwrap(), after.checkpoint().bytes(&name).unwrap(), "{part}");
    }
}

#[test]
fn bits_and_groups_that_are_asked_for_are_there_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    write(&path("four"), V1, format("w4a16-g32"), 0..=0);
    write(&path("three"), V1, format("w3a16-g128-asym"), 1..=8);
    let before = listing(dir.path());
    let asked = |from: &str, to: &str, target, bits, group| {
        let conversion = Conversion { target, bits, group, channel_scale: None, requantize: true };
        convert(Job::new(&Weights::open(path(from)).unwrap(), &path(to)), conversion)
    };
    let group = Some(Group::Size(128));
    let first = "model.layers.0.q_proj";
    for (target, bits, group, parts) in [
        (Target::Gguf, None, group, ["gguf cannot hold", "it has groups of 32, not groups of 128"]),
        (Target::Gguf, Some(3), None, ["gguf cannot hold", "its codes have 4 bits, not 3"]),
        (Target::Awq, Some(8), None, ["awq cannot hold", "its codes have 4 bits, not 8"]),
        (Target::Onnx, Some(3), group, ["onnx cannot hold", "its codes have 4 bits, not 3"]),
    ] {
        let refused = text_of(asked("four", "to", target, bits, group));
        assert_names(&refused, &[first, parts[0], parts[1]]);
    }
    assert_eq!(listing(dir.path()), before);
    // As a model is refused that is quantised so.
    let eight = WeightFormat { bits: 8, ..format("w4a16-g32") };
    let quantization = Quantization {
        target: Target::Awq,
        format: &mut |module| module.in_block().then_some(eight),
        quantize: &mut |_, _, _| unreachable!("it is refused before"),
        dense: &mut |_| None,
        untied: None,
    };
    let quantized = text_of(write_model(Job::new(&Weights::open(path("four")).unwrap(), &path("to")), quantization));
    assert_eq!(quantized, text_of(asked("four", "to", Target::Awq, Some(8), None)));
    // What was not asked for is the nearest.
    asked("three", "nearest", Target::Onnx, None, group).unwrap();
    let read = read(&path("nearest"));
    assert!(read.iter().all(|q| (q.format().bits, q.format().group) == (4, Group::Size(128))));
}

#[test]
fn modules_that_become_dense_are_told_and_heads_of_whole_blocks_do_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let source = Weights::open(crate::support::model()).unwrap();
    let change = |from: &Path, to: &str, target| {
        let conversion = Conversion { target, bits: None, group: None, channel_scale: None, requantize: false };
        convert(Job::new(&Weights::open(from).unwrap(), &path(to)), conversion).unwrap().made_dense
    };
    // Codes with zero points have no blocks of 8 bits.
    for (head, blocks) in [("w8a16-g128", "Q8_0"), ("w4a16", "Q4_0"), ("w8a16-g128-asym", "F32")] {
        let (layers, head_format) = (format("w4a16-g128"), format(head));
        let quantization = Quantization {
            target: Target::CompressedTensors,
            format: &mut |module| module.in_block().then_some(layers),
            quantize: &mut |_, weight, format| match weight {
                LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
                LinearWeight::Quantized(_) => unreachable!("the model is dense"),
            },
            dense: &mut |_| None,
            untied: Some(Untied { embedding: "model.embed_tokens", format: head_format }),
        };
        write_model(Job::new(&source, &path(head)), quantization).unwrap();
        let file = format!("{head}.gguf");
        let made_dense = change(&path(head), &file, Target::Gguf);
        let gguf = Weights::open(path(&file)).unwrap();
        assert_eq!(gguf.checkpoint().info("lm_head.weight").unwrap().dtype.name(), blocks, "{head}");
        assert_eq!(made_dense.is_empty(), blocks != "F32", "{head}");
        assert!(made_dense.iter().all(|name| name == "lm_head"), "{made_dense:?}");
        assert!(compare(&path(head), &path(&file)).equal(), "{head}");
    }
    assert_eq!(change(&path("w4a16.gguf"), "same.gguf", Target::Gguf), [""; 0]);
    // The embedding of a GGUF file, which our own form holds too.
    let gguf = testdata("gguf/tiny_llama.gguf");
    assert_eq!(change(&gguf, "native", Target::Native), [""; 0]);
    assert!(compare(&gguf, &path("native")).equal());
    // Other bits are asked for layers, not for tables.
    let conversion =
        Conversion { target: Target::Native, bits: Some(4), group: None, channel_scale: None, requantize: true };
    let converted = convert(Job::new(&Weights::open(&gguf).unwrap(), &path("four")), conversion).unwrap();
    assert_eq!(converted.made_dense, ["model.embed_tokens"]);
}

#[test]
fn what_becomes_dense_is_exact_in_f32_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let (layers, head) = (format("w4a16-g128"), format("w4a16-g128-sf32"));
    let quantization = Quantization {
        target: Target::Native,
        format: &mut |module| module.in_block().then_some(layers),
        quantize: &mut |_, weight, format| match weight {
            LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
            LinearWeight::Quantized(_) => unreachable!("the model is dense"),
        },
        dense: &mut |_| None,
        untied: Some(Untied { embedding: "model.embed_tokens", format: head }),
    };
    write_model(Job::new(&Weights::open(crate::support::model()).unwrap(), &path("f32")), quantization).unwrap();
    let source = Weights::open(path("f32")).unwrap();
    let before = listing(dir.path());
    let to = |requantize| {
        let conversion = Conversion { target: Target::Awq, bits: None, group: None, channel_scale: None, requantize };
        convert(Job::new(&source, &path("awq")), conversion)
    };
    assert_names(&text_of(to(false)), &["awq cannot hold", "lm_head", "dense, in f32", "is not exact in it"]);
    assert_eq!(listing(dir.path()), before);
    let converted = to(true).unwrap();
    assert_eq!(converted.made_dense, ["lm_head"]);
    let [(module, reason)] = converted.requantized.as_slice() else { panic!("{:?}", converted.requantized) };
    assert_names(reason, &["is not exact in it"]);
    let differing: Vec<_> = compare(&path("f32"), &path("awq")).differing.into_iter().map(|d| d.name).collect();
    assert_eq!(differing, [format!("{module}.weight")]);
}
