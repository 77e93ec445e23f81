//! Whole model folders: quantised, made dense again, interrupted, refused.

use crate::support::{Tensor, assert_names, listing, model, tensor, text_of, write_folder};
use half::{bf16, f16};
use halfbyte::format::reference::dequantize;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Float, Group, QTensor, WeightFormat, Zero, Zeros};
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Checkpoint, Conversion, Error, GptqVersion, Job, Linear, LinearWeight, Quantization, Result, Target, Untied,
    Weights, Written, convert, linears, write_dense, write_model,
};
use std::cell::Cell;
use std::path::Path;

const G128: WeightFormat =
    WeightFormat { bits: 4, group: Group::Size(128), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };

/// Quantises a module as it lies in the source.
fn rounded(weight: &LinearWeight<'_>, format: WeightFormat) -> halfbyte::Result<QTensor> {
    match weight {
        LinearWeight::Dense { floats, shape } => rtn(floats.as_floats(), *shape, format, Rtn::default()),
        LinearWeight::Quantized(q) => Ok(q.clone()),
    }
}

fn quantize(job: Job<'_>, format: impl Fn(&Linear<'_>) -> Option<WeightFormat>) -> Result<Written> {
    let quantization = Quantization {
        target: Target::Gptq(None),
        format: &mut |module| format(module),
        quantize: &mut |_, weight, format| rounded(weight, format),
        dense: &mut |_| None,
        untied: None,
    };
    write_model(job, quantization)
}

fn in_blocks(format: WeightFormat) -> impl Fn(&Linear<'_>) -> Option<WeightFormat> {
    move |module| module.in_block().then_some(format)
}

fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn loaded(weights: &Weights, name: &str) -> QTensor {
    let linear = weights.load_linear(name).unwrap();
    assert_eq!(linear.findings, [], "{name}");
    let LinearWeight::Quantized(q) = linear.weight else { panic!("{name} is dense") };
    q
}

#[test]
fn a_model_is_quantised_into_a_complete_folder() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("deep/er/model-int4");
    let source = Weights::open(model()).unwrap();
    let mut seen = Vec::new();
    let mut progress = |p: halfbyte_checkpoint::Progress<'_>| seen.push((p.name.to_owned(), p.bytes, p.total_bytes));
    let mut job = Job::new(&source, &target);
    job.progress = Some(&mut progress);
    let written = quantize(job, in_blocks(G128)).unwrap();
    assert_eq!((written.path.as_path(), written.quantized), (target.canonicalize().unwrap().as_path(), 42));
    assert_eq!(listing(target.parent().unwrap()), ["model-int4"]);
    assert_eq!(listing(&target), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(
        std::fs::read(target.join("tokenizer.json")).unwrap(),
        std::fs::read(model().join("tokenizer.json")).unwrap()
    );

    // Progress goes from nothing to everything.
    assert!(seen.windows(2).all(|w| w[0].1 <= w[1].1));
    assert_eq!((seen[0].1, seen.last().unwrap()), (0, &(String::new(), written.tensor_bytes, written.tensor_bytes)));

    // The config: every field of the source in its order, then the new one.
    let (before, after) = (json(&model().join("config.json")), json(&target.join("config.json")));
    let (before, after) = (before.as_object().unwrap(), after.as_object().unwrap());
    assert!(before.iter().eq(after.iter().take(before.len())));
    assert_eq!(after.keys().nth(before.len()).unwrap(), "quantization_config");
    let config = &after["quantization_config"];
    for (key, value) in [
        ("quant_method", serde_json::json!("gptq")),
        ("checkpoint_format", "gptq".into()),
        ("bits", 4.into()),
        ("group_size", 128.into()),
        ("sym", true.into()),
        ("desc_act", false.into()),
        ("lm_head", false.into()),
        ("pack_dtype", "int32".into()),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert!(config.get("dynamic").is_none());

    // The tensors: modules as quantised, everything else untouched.
    let result = Weights::open(&target).unwrap();
    for module in linears(&source).unwrap() {
        let weight = source.load_linear(module.name).unwrap().weight;
        if module.in_block() {
            assert_eq!(loaded(&result, module.name), rounded(&weight, G128).unwrap(), "{}", module.name);
        }
    }
    for name in ["model.embed_tokens.weight", "model.norm.weight", "model.layers.3.input_layernorm.weight"] {
        assert_eq!(result.checkpoint().bytes(name).unwrap(), source.checkpoint().bytes(name).unwrap());
    }
    assert_eq!(result.checkpoint().tensor_names().count(), 56 - 42 + 4 * 42);
    let file = std::fs::read(target.join("model.safetensors")).unwrap();
    assert_eq!(::safetensors::SafeTensors::deserialize(&file).unwrap().len(), 56 - 42 + 4 * 42);
    for entry in std::fs::read_dir(&target).unwrap() {
        assert!(!entry.unwrap().metadata().unwrap().permissions().readonly());
    }
}

#[test]
fn mixed_formats_are_written_as_overrides() {
    let dir = tempfile::tempdir().unwrap();
    let target = dir.path().join("mixed");
    let source = Weights::open(model()).unwrap();
    let eight =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Integer, scale: Float::F16, channel_scale: None };
    let format = |module: &Linear<'_>| match module.name {
        name if name.ends_with("v_proj") => None,
        name if name.ends_with("down_proj") => Some(eight),
        _ => module.in_block().then_some(G128),
    };
    let mut job = Job::new(&source, &target);
    job.max_shard_bytes = 2_000_000;
    quantize(job, format).unwrap();
    let config = &json(&target.join("config.json"))["quantization_config"];
    // One asymmetric module is enough for the newer convention.
    assert_eq!((&config["checkpoint_format"], &config["bits"]), (&"gptq_v2".into(), &4.into()));
    let dynamic = config["dynamic"].as_object().unwrap();
    assert_eq!(dynamic.len(), 12);
    assert_eq!(
        dynamic[r"+:^model\.layers\.0\.mlp\.down_proj$"],
        serde_json::json!({"bits": 8, "group_size": -1, "sym": false})
    );
    assert_eq!(dynamic[r"-:^model\.layers\.5\.self_attn\.v_proj$"], serde_json::json!({}));
    assert!(target.join("model.safetensors.index.json").exists());
    let result = Weights::open(&target).unwrap();
    assert!(result.checkpoint().files().count() > 2);
    assert_eq!(loaded(&result, "model.layers.2.mlp.down_proj").format(), eight);
    assert_eq!(loaded(&result, "model.layers.2.mlp.up_proj").format(), G128);

    // Quantised modules without a format become the floats that they stand for; codes may be passed on.
    let floats = dir.path().join("floats");
    quantize(Job::new(&result, &floats), |m| m.name.ends_with("up_proj").then_some(G128)).unwrap();
    let (down, mixed) = ("model.layers.2.mlp.down_proj", Weights::open(&floats).unwrap());
    let expected: Vec<f32> = dequantize(&loaded(&result, down)).into_iter().map(|w| w as f32).collect();
    let LinearWeight::Dense { floats, .. } = mixed.load_linear(down).unwrap().weight else { panic!("{down}") };
    assert!(floats.to_f32() == expected);
    let again = dir.path().join("again");
    quantize(Job::new(&result, &again), |m| m.source?.codes()).unwrap();
    let (first, second) = (Checkpoint::open(&target).unwrap(), Checkpoint::open(&again).unwrap());
    assert_eq!(first.tensor_names().count(), second.tensor_names().count());
    for name in first.tensor_names() {
        assert_eq!(first.bytes(name).unwrap(), second.bytes(name).unwrap(), "{name}");
    }
    assert_eq!(json(&target.join("config.json")), json(&again.join("config.json")));
}

#[test]
fn the_dense_model_is_what_the_codes_stand_for() {
    let dir = tempfile::tempdir().unwrap();
    let (quantized, dense) = (dir.path().join("q"), dir.path().join("d"));
    let source = Weights::open(model()).unwrap();
    let format = WeightFormat { zero: Zero::Integer, group: Group::Size(32), ..G128 };
    quantize(Job::new(&source, &quantized), in_blocks(format)).unwrap();
    let result = Weights::open(&quantized).unwrap();
    write_dense(Job::new(&result, &dense), Float::F32).unwrap();
    let config = json(&dense.join("config.json"));
    assert_eq!(config["dtype"], "float32");
    assert!(config.get("quantization_config").is_none() && config.get("torch_dtype").is_none());
    let read = Weights::open(&dense).unwrap();
    assert!(read.quantization().is_none());
    assert_eq!(read.checkpoint().tensor_names().count(), 56);
    for module in linears(&result).unwrap() {
        let linear = read.load_linear(module.name).unwrap();
        let LinearWeight::Dense { floats, shape } = &linear.weight else { panic!() };
        assert_eq!((floats.dtype(), *shape), (Float::F32, module.shape));
        if module.source.is_some() {
            let expected = dequantize(&loaded(&result, module.name));
            assert!(
                floats.to_f32().iter().zip(&expected).all(|(&got, &want)| f64::from(got) == want),
                "{}",
                module.name
            );
        }
    }
    assert_eq!(
        read.checkpoint().floats("model.norm.weight").unwrap().to_f32(),
        source.checkpoint().floats("model.norm.weight").unwrap().to_f32()
    );

    // To f32 and back to f16 is the model itself, shard by shard.
    let (wide, narrow) = (dir.path().join("wide"), dir.path().join("narrow"));
    write_dense(Job::new(&source, &wide), Float::F32).unwrap();
    write_dense(Job::new(&Weights::open(&wide).unwrap(), &narrow), Float::F16).unwrap();
    let narrow = Checkpoint::open(&narrow).unwrap();
    for info in source.checkpoint().tensors() {
        assert_eq!(narrow.bytes(info.name).unwrap(), source.checkpoint().bytes(info.name).unwrap(), "{}", info.name);
    }
}

/// A folder of one module in a block, and a norm.
fn small(dir: &Path, weight: &[f32]) -> Weights {
    let tensors: [Tensor; 3] = [
        tensor("h.0.fc.weight", DType::F32, &[32, 64], weight),
        tensor("h.0.fc.bias", DType::BF16, &[32], &[bf16::from_f32(1.25); 32]),
        tensor("ids", DType::I64, &[2], &[1i64, -1]),
    ];
    write_folder(dir, &tensors, r#"{"architectures": ["Small"], "torch_dtype": "float32"}"#);
    Weights::open(dir).unwrap()
}

#[test]
fn a_head_is_cut_from_the_embedding_that_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let source = Weights::open(model()).unwrap();
    let (eight, target) = (WeightFormat { bits: 8, ..G128 }, dir.path().join("out"));
    let untied = |embedding: &'static str, format: WeightFormat| {
        let quantization = Quantization {
            target: Target::CompressedTensors,
            format: &mut |module| module.in_block().then_some(G128),
            quantize: &mut |_, weight, format| rounded(weight, format),
            dense: &mut |_| None,
            untied: Some(Untied { embedding, format }),
        };
        write_model(Job::new(&source, &target), quantization)
    };
    assert_names(&untied("model.embedding", eight).unwrap_err().to_string(), &["no embedding `model.embedding`"]);
    let odd = WeightFormat { group: Group::Size(100), ..eight };
    assert_names(&untied("model.embed_tokens", odd).unwrap_err().to_string(), &["lm_head", "groups must divide"]);
    assert!(listing(dir.path()).is_empty());
    assert_eq!(untied("model.embed_tokens", eight).unwrap().quantized, 43);
    let result = Weights::open(&target).unwrap();
    let LinearWeight::Dense { floats, shape } = source.load_linear("model.embed_tokens").unwrap().weight else {
        panic!("the embedding is dense")
    };
    assert_eq!(loaded(&result, Untied::HEAD), rtn(floats.as_floats(), shape, eight, Rtn::default()).unwrap());
    let name = "model.embed_tokens.weight";
    assert_eq!(result.checkpoint().bytes(name).unwrap(), source.checkpoint().bytes(name).unwrap());
    assert_eq!(json(&target.join("config.json"))["tie_word_embeddings"], false);
}

#[test]
fn act_order_is_declared_and_other_tensors_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("in")).unwrap();
    let source = small(&dir.path().join("in"), &[0.5; 2048]);
    let format =
        WeightFormat { bits: 3, group: Group::Size(32), zero: Zero::Symmetric, scale: Float::F16, channel_scale: None };
    let index: Vec<u32> = (0..64).map(|j| j % 2).collect();
    let q = QTensor::new(format, [32, 64], vec![5; 2048], vec![0.5; 64], Zeros::Symmetric, Some(index)).unwrap();
    let target = dir.path().join("out");
    let quantization = Quantization {
        target: Target::Gptq(Some(GptqVersion::V2)),
        format: &mut |_| Some(format),
        quantize: &mut |_, _, _| Ok(q.clone()),
        dense: &mut |_| None,
        untied: None,
    };
    write_model(Job::new(&source, &target), quantization).unwrap();
    let config = &json(&target.join("config.json"))["quantization_config"];
    assert_eq!(
        (&config["desc_act"], &config["bits"], &config["checkpoint_format"]),
        (&true.into(), &3.into(), &"gptq_v2".into())
    );
    let result = Weights::open(&target).unwrap();
    assert_eq!(loaded(&result, "h.0.fc"), q);
    assert_eq!(result.load_linear("h.0.fc").unwrap().bias, Some(vec![1.25; 32]));
    assert_eq!(result.checkpoint().bytes("ids").unwrap(), source.checkpoint().bytes("ids").unwrap());

    let dense = dir.path().join("dense");
    write_dense(Job::new(&result, &dense), Float::BF16).unwrap();
    let read = Checkpoint::open(&dense).unwrap();
    assert_eq!(read.floats("h.0.fc.weight").unwrap().to_f32(), [0.5; 2048]);
    assert_eq!((read.info("h.0.fc.bias").unwrap().dtype, read.info("ids").unwrap().dtype), (DType::BF16, DType::I64));
    assert_eq!(json(&dense.join("config.json"))["torch_dtype"], "bfloat16");
}

#[test]
fn weights_that_are_not_finite_or_too_large_name_their_tensor() {
    for (at, value, part) in
        [(70, f32::NAN, "NaN at row 1, column 6"), (0, f32::NEG_INFINITY, "-inf at row 0, column 0")]
    {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("in")).unwrap();
        let mut weight = [0.5; 2048];
        weight[at] = value;
        let source = small(&dir.path().join("in"), &weight);
        let format = WeightFormat { group: Group::Channel, ..G128 };
        let text = text_of(quantize(Job::new(&source, &dir.path().join("out")), in_blocks(format)));
        assert_names(&text, &["`h.0.fc`", part]);
        assert_eq!(listing(dir.path()), ["in"], "nothing is left");
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("in")).unwrap();
    let source = small(&dir.path().join("in"), &[70000.0; 2048]);
    let text = text_of(write_dense(Job::new(&source, &dir.path().join("out")), Float::F16));
    assert_names(&text, &["`h.0.fc.weight`", "f16", "70000"]);
    assert_eq!(listing(dir.path()), ["in"]);
}

#[test]
fn a_cancelled_run_leaves_nothing_at_whatever_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let source = Weights::open(model()).unwrap();
    for after in [0, 1, 30, 56] {
        let asked = Cell::new(0);
        let cancel = || {
            asked.set(asked.get() + 1);
            asked.get() > after
        };
        let target = dir.path().join("out");
        let mut job = Job::new(&source, &target);
        job.cancel = Some(&cancel);
        let error = quantize(job, in_blocks(G128)).unwrap_err();
        assert!(matches!(error, Error::Cancelled));
        assert_eq!(listing(dir.path()), [""; 0], "after {after}");
    }
}

#[test]
fn a_target_is_replaced_only_on_request_and_only_if_it_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let source_dir = dir.path().join("in");
    std::fs::create_dir(&source_dir).unwrap();
    let source = small(&source_dir, &[0.5; 2048]);
    let format = WeightFormat { group: Group::Channel, ..G128 };
    let write = |target: &Path, overwrite: bool| {
        let mut job = Job::new(&source, target);
        job.overwrite = overwrite;
        quantize(job, in_blocks(format))
    };
    // An empty folder is taken.
    let target = dir.path().join("out");
    std::fs::create_dir(&target).unwrap();
    write(&target, false).unwrap();
    let before = std::fs::read(target.join("model.safetensors")).unwrap();
    // One with a model in it only if asked.
    let error = write(&target, false).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }));
    assert_names(&error.to_string(), &["out", "not empty", "overwrite"]);
    std::fs::write(target.join("model.onnx"), "of an older model").unwrap();
    write(&target, true).unwrap();
    assert_eq!(listing(&target), ["config.json", "model.safetensors"]);
    assert_eq!(std::fs::read(target.join("model.safetensors")).unwrap(), before, "the same input gives the same file");
    // A failure leaves the old one.
    let quantization = Quantization {
        target: Target::Gptq(None),
        format: &mut |_| Some(format),
        quantize: &mut |_, weight, _| rounded(weight, WeightFormat { bits: 8, ..format }),
        dense: &mut |_| None,
        untied: None,
    };
    let mut job = Job::new(&source, &target);
    job.overwrite = true;
    assert_names(&text_of(write_model(job, quantization)), &["`h.0.fc`", "bits: 4", "bits: 8"]);
    assert_eq!(std::fs::read(target.join("model.safetensors")).unwrap(), before);
    // What is not a model is never replaced.
    std::fs::create_dir(target.join("folder")).unwrap();
    assert_names(&text_of(write(&target, true)), &["folders in it"]);
    std::fs::remove_dir(target.join("folder")).unwrap();
    std::fs::remove_file(target.join("config.json")).unwrap();
    assert_names(&text_of(write(&target, true)), &["no config.json"]);
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    assert_names(&text_of(write(&file, true)), &["not a folder"]);
    assert_names(&text_of(write(&source_dir, true)), &["other than the source"]);
    assert_names(&text_of(write(&source_dir.join("../in"), true)), &["other than the source"]);
    assert_eq!(listing(dir.path()), ["file", "in", "out"]);
    assert_eq!(listing(&source_dir), ["config.json", "model.safetensors"]);
}

#[test]
fn jobs_that_make_no_sense_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source_dir = dir.path().join("in");
    std::fs::create_dir(&source_dir).unwrap();
    let source = small(&source_dir, &[0.5; 2048]);
    let target = dir.path().join("out");
    assert_names(&text_of(quantize(Job::new(&source, &target), |_| None)), &["at least one module", "none of 1"]);
    let float = WeightFormat { zero: Zero::Float, ..G128 };
    assert_names(&text_of(quantize(Job::new(&source, &target), in_blocks(float))), &["`h.0.fc`", "float offsets"]);
    let zero = WeightFormat { group: Group::Size(0), ..G128 };
    assert_names(&text_of(quantize(Job::new(&source, &target), in_blocks(zero))), &["`h.0.fc`", "group"]);
    std::fs::remove_file(source_dir.join("config.json")).unwrap();
    assert_names(&text_of(quantize(Job::new(&source, &target), in_blocks(G128))), &["config.json", "no such file"]);
    assert_eq!(listing(dir.path()), ["in"]);
    // A weight whose shape the files cannot hold.
    let odd = dir.path().join("odd");
    std::fs::create_dir(&odd).unwrap();
    write_folder(&odd, &[tensor("h.0.fc.weight", DType::F16, &[20, 32], &[f16::ONE; 640])], "{}");
    let odd = Weights::open(&odd).unwrap();
    let text = text_of(quantize(Job::new(&odd, &target), in_blocks(WeightFormat { group: Group::Channel, ..G128 })));
    assert_names(&text, &["`h.0.fc`", "multiples of 32, got 32 and 20"]);
}

#[test]
fn further_templates_go_along_and_are_replaced_with_the_model() {
    const TEMPLATES: &str = "additional_chat_templates";
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir_all(path("in").join(TEMPLATES)).unwrap();
    let source = small(&path("in"), &[0.5; 2048]);
    for (name, text) in [("tool_use.jinja", "tools"), ("rag.jinja", "texts"), ("notes.txt", "not of a model")] {
        std::fs::write(path("in").join(TEMPLATES).join(name), text).unwrap();
    }
    let format = WeightFormat { group: Group::Channel, ..G128 };
    let write =
        |target: &Path, overwrite: bool| quantize(Job { overwrite, ..Job::new(&source, target) }, in_blocks(format));
    write(&path("quantized"), false).unwrap();
    let quantized = Weights::open(path("quantized")).unwrap();
    let conversion = Conversion {
        target: Target::CompressedTensors,
        bits: None,
        group: None,
        channel_scale: None,
        requantize: false,
    };
    convert(Job::new(&quantized, &path("converted")), conversion).unwrap();
    write_dense(Job::new(&quantized, &path("dense")), Float::F32).unwrap();
    for name in ["quantized", "converted", "dense"] {
        assert_eq!(listing(&path(name).join(TEMPLATES)), ["rag.jinja", "tool_use.jinja"], "{name}");
        assert_eq!(Weights::open(path(name)).unwrap().tool_template().unwrap().as_deref(), Some("tools"), "{name}");
    }
    // Such a folder is replaced, unless something else is in it.
    let (target, templates) = (path("quantized"), path("quantized").join(TEMPLATES));
    drop(quantized);
    std::fs::write(templates.join("older.jinja"), "older").unwrap();
    write(&target, true).unwrap();
    assert_eq!(listing(&templates), ["rag.jinja", "tool_use.jinja"]);
    std::fs::write(templates.join("notes.txt"), "mine").unwrap();
    assert_names(
        &text_of(write(&target, true)),
        &["`additional_chat_templates/notes.txt` in it is no file of a model"],
    );
    std::fs::remove_file(templates.join("notes.txt")).unwrap();
    std::fs::create_dir(templates.join("folder.jinja")).unwrap();
    assert_names(&text_of(write(&target, true)), &["`additional_chat_templates/folder.jinja`"]);
    assert_eq!(listing(&templates), ["folder.jinja", "rag.jinja", "tool_use.jinja"]);
    // What a killed process has left is removed, unless something else is in it.
    let left = path(".new.tmp");
    std::fs::create_dir_all(left.join("new").join(TEMPLATES)).unwrap();
    std::fs::write(left.join("lock"), "halfbyte writes a model here and removes this folder when it is done\n")
        .unwrap();
    std::fs::write(left.join("new").join(TEMPLATES).join("rag.jinja"), "te").unwrap();
    std::fs::write(left.join("new").join(TEMPLATES).join("notes.txt"), "mine").unwrap();
    assert_names(&text_of(write(&path("new"), false)), &["notes.txt", "halfbyte has not made it"]);
    std::fs::remove_file(left.join("new").join(TEMPLATES).join("notes.txt")).unwrap();
    write(&path("new"), false).unwrap();
    assert_eq!(listing(dir.path()), ["converted", "dense", "in", "new", "quantized"]);
}
