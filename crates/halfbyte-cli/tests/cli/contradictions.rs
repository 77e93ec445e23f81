//! Models that are incomplete, contradict themselves or hold numbers that no model has: what `inspect` says of each, in one
//! sentence, and whether what writes a model of it refuses.

use crate::support::{fails, json, output, quiet, repository, text};
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, TensorInfo};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// A model folder in memory.
#[derive(Clone)]
struct Folder {
    tensors: Vec<(TensorSpec, Vec<u8>)>,
    config: Value,
    tokenizer: Option<Value>,
}

impl Folder {
    fn read(path: &Path) -> Self {
        let checkpoint = Checkpoint::open(path).unwrap();
        let spec = |info: &TensorInfo<'_>| TensorSpec {
            name: info.name.to_owned(),
            dtype: info.dtype,
            shape: info.shape.to_vec(),
        };
        let of = |info: TensorInfo<'_>| (spec(&info), checkpoint.bytes(info.name).unwrap().to_vec());
        let config = serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap();
        let vocab: serde_json::Map<String, Value> = (0..300).map(|id| (format!("t{id}"), json!(id))).collect();
        let tokenizer = json!({"version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null, "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        Self { tensors: checkpoint.tensors().map(of).collect(), config, tokenizer: Some(tokenizer) }
    }

    fn write(&self, dir: &Path) -> String {
        std::fs::create_dir(dir).unwrap();
        let specs: Vec<TensorSpec> = self.tensors.iter().map(|(spec, _)| spec.clone()).collect();
        let mut writer = create(dir, &specs, u64::MAX).unwrap();
        self.tensors.iter().for_each(|(spec, data)| writer.write(&spec.name, data).unwrap());
        writer.finish().unwrap();
        std::fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        if let Some(tokenizer) = &self.tokenizer {
            std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        }
        dir.display().to_string()
    }

    fn at(&mut self, name: &str) -> &mut (TensorSpec, Vec<u8>) {
        self.tensors.iter_mut().find(|(spec, _)| spec.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn drop(&mut self, part: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|(spec, _)| !spec.name.contains(part));
        assert!(self.tensors.len() < before, "no {part}");
    }

    fn rename(&mut self, from: &str, to: &str) {
        self.at(from).0.name = to.to_owned();
    }

    fn add(&mut self, name: &str, dtype: DType, shape: &[usize]) {
        let bytes = dtype.bytes_of(shape).unwrap();
        let spec = TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
        // Ones of f16, bytes above zero of others.
        self.tensors.push((spec, [0x00, 0x3c].into_iter().cycle().take(bytes).collect()));
    }

    fn cut(&mut self, name: &str, shape: &[usize]) {
        let (spec, data) = self.at(name);
        spec.shape = shape.to_vec();
        data.truncate(spec.dtype.bytes_of(shape).unwrap());
    }

    fn retyped(&mut self, name: &str, dtype: DType) {
        let (spec, data) = self.at(name);
        spec.dtype = dtype;
        *data = vec![1; dtype.bytes_of(&spec.shape).unwrap()];
    }

    fn poke(&mut self, name: &str, at: usize, bits: u16) {
        self.at(name).1[2 * at..2 * at + 2].copy_from_slice(&bits.to_le_bytes());
    }

    fn zero(&mut self, name: &str) {
        self.at(name).1.fill(0);
    }
}

const NAN: u16 = 0x7e00;
const INFINITE: u16 = 0xfc00;

/// What is changed, the parts of the sentence that tells of it, and whether nothing is written of it.
struct Case {
    change: fn(&mut Folder),
    parts: &'static [&'static str],
    refused: bool,
}

const fn case(refused: bool, parts: &'static [&'static str], change: fn(&mut Folder)) -> Case {
    Case { change, parts, refused }
}

/// Of a dense Llama of two layers.
const DENSE: &[Case] = &[
    case(true, &["layers.1.mlp.up_proj", "is missing", "256 × 128"], |m| m.drop("layers.1.mlp.up_proj")),
    case(true, &["layers.0.self_attn.q_proj", "is missing"], |m| m.drop("layers.0.self_attn.q_proj")),
    case(true, &["layers.1.input_layernorm.weight", "is missing"], |m| m.drop("layers.1.input_layernorm")),
    case(true, &["layer 1", "is missing", "of the 2 layers", "1 are there"], |m| m.drop("layers.1.")),
    case(true, &["layer 0", "is missing"], |m| m.drop("layers.0.")),
    case(true, &["layers 2 to 29", "are missing"], |m| m.config["num_hidden_layers"] = json!(30)),
    case(true, &["num_hidden_layers", "is 1", "layers up to 1"], |m| m.config["num_hidden_layers"] = json!(1)),
    case(true, &["model.norm.weight", "is missing"], |m| m.drop("model.norm")),
    case(true, &["lm_head", "is missing", "320 × 128"], |m| m.drop("lm_head")),
    case(true, &["model.embed_tokens", "is missing"], |m| m.drop("embed_tokens")),
    case(true, &["q_proj", "has no bias", "by the configuration"], |m| m.config["attention_bias"] = json!(true)),
    case(true, &["gate_proj", "has no bias"], |m| m.config["mlp_bias"] = json!(true)),
    case(true, &["model.embed_tokens", "[320, 128]", "321 × 128"], |m| m.config["vocab_size"] = json!(321)),
    case(true, &["k_proj", "[64, 128]", "128 × 128"], |m| m.config["num_key_value_heads"] = json!(4)),
    case(true, &["q_proj", "[128, 128]", "64 × 128"], |m| m.config["num_attention_heads"] = json!(2)),
    case(true, &["q_proj", "[128, 128]", "256 × 128"], |m| m.config["head_dim"] = json!(64)),
    case(true, &["gate_proj", "[256, 128]", "512 × 128"], |m| m.config["intermediate_size"] = json!(512)),
    case(true, &["input_layernorm.weight", "[128]", "256 numbers"], |m| {
        m.config["hidden_size"] = json!(256);
        m.config["head_dim"] = json!(32);
    }),
    case(false, &["lm_head.weight", "tie_word_embeddings"], |m| m.config["tie_word_embeddings"] = json!(true)),
    case(false, &["self_attn.q_norm.weight", "not a tensor of LlamaForCausalLM"], |m| {
        m.add("model.layers.0.self_attn.q_norm.weight", DType::F16, &[32]);
    }),
    case(false, &["model.layers.*.extra", "are 2 tensors"], |m| {
        m.add("model.layers.0.extra", DType::F16, &[3]);
        m.add("model.layers.1.extra", DType::F16, &[3]);
    }),
    case(false, &["vision_tower.patch.weight", "not a tensor of"], |m| {
        m.add("vision_tower.patch.weight", DType::F16, &[3])
    }),
    case(true, &["model.layers.1.mlp.up_proj", "is missing"], |m| {
        m.rename("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.wieght");
    }),
    case(false, &["num_hidden_layers", "is 2", "up to 7"], |m| {
        m.add("model.layers.7.mlp.up_proj.weight", DType::F16, &[2, 2])
    }),
    case(true, &["down_proj", "[64, 256]", "128 × 256"], |m| m.cut("model.layers.0.mlp.down_proj.weight", &[64, 256])),
    case(true, &["model.norm.weight", "[64]", "128 numbers"], |m| m.cut("model.norm.weight", &[64])),
    case(true, &["q_proj", "has a bias of shape [64]", "128 outputs"], |m| {
        m.add("model.layers.0.self_attn.q_proj.bias", DType::F16, &[64]);
    }),
    case(true, &["up_proj.weight", "F8_E4M3", "not read"], |m| {
        m.retyped("model.layers.1.mlp.up_proj.weight", DType::F8E4M3)
    }),
    case(true, &["up_proj.weight", "F64", "not read"], |m| m.retyped("model.layers.1.mlp.up_proj.weight", DType::F64)),
    case(true, &["up_proj.weight", "I64", "not read"], |m| m.retyped("model.layers.1.mlp.up_proj.weight", DType::I64)),
    case(true, &["lm_head.weight", "F8_E5M2"], |m| m.retyped("lm_head.weight", DType::F8E5M2)),
    case(true, &["input_layernorm.weight", "F64", "not read"], |m| {
        m.retyped("model.layers.0.input_layernorm.weight", DType::F64);
    }),
    case(false, &["layers.0.mlp.up_proj.weight", "of 32768 values 1 are NaN", "first at 77"], |m| {
        m.poke("model.layers.0.mlp.up_proj.weight", 77, NAN);
    }),
    case(false, &["model.norm.weight", "1 are NaN"], |m| m.poke("model.norm.weight", 127, NAN)),
    case(false, &["model.embed_tokens.weight", "1 are infinite"], |m| m.poke("model.embed_tokens.weight", 5, INFINITE)),
    case(false, &["lm_head.weight", "1 are NaN and 1 are infinite"], |m| {
        m.poke("lm_head.weight", 5, INFINITE);
        m.poke("lm_head.weight", 9, NAN);
    }),
    case(false, &["layers.1.self_attn.o_proj.weight", "all 16384 values are zero"], |m| {
        m.zero("model.layers.1.self_attn.o_proj.weight");
    }),
    case(false, &["post_attention_layernorm.weight", "all 128 values are zero"], |m| {
        m.zero("model.layers.0.post_attention_layernorm.weight");
    }),
    case(false, &["the tokenizer", "cannot be read"], |m| m.tokenizer = None),
    case(false, &["the tokenizer", "cannot be read"], |m| m.tokenizer = Some(json!({"model": 5}))),
    case(false, &["the tokenizer", "ids up to 400", "vocabulary of 320"], |m| {
        m.tokenizer.as_mut().unwrap()["model"]["vocab"]["t299"] = json!(400);
    }),
    case(false, &["hidden_act", "silu", "gelu"], |m| m.config["hidden_act"] = json!("gelu")),
    case(false, &["architectures", "BertModel"], |m| m.config["architectures"] = json!(["BertModel"])),
    case(false, &["rope_type", "dynamic"], |m| {
        m.config["rope_parameters"] = json!({"rope_type": "dynamic", "factor": 4.0})
    }),
    case(false, &["eos_token_id", "below 320"], |m| m.config["eos_token_id"] = json!(5000)),
    case(false, &["num_hidden_layers", "whole number"], |m| m.config["num_hidden_layers"] = json!(-2)),
    case(false, &["quantization_config", "no module is quantised"], |m| {
        m.config["quantization_config"] = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true});
    }),
];

/// Of the same, quantised to GPTQ's files.
const GPTQ: &[Case] = &[
    case(true, &["layers.1.mlp.up_proj", "no codes", "incomplete"], |m| m.drop("layers.1.mlp.up_proj.qweight")),
    case(true, &["layers.1.mlp.up_proj", "scales"], |m| m.drop("layers.1.mlp.up_proj.scales")),
    case(false, &["layers.1.mlp.up_proj", "qzeros"], |m| m.drop("layers.1.mlp.up_proj.qzeros")),
    case(true, &["layers.0.self_attn.k_proj", "is missing"], |m| m.drop("layers.0.self_attn.k_proj")),
    case(true, &["layer 1", "is missing"], |m| m.drop("layers.1.")),
    case(false, &["up_proj.scales", "1 are NaN, the first at 3"], |m| {
        m.poke("model.layers.1.mlp.up_proj.scales", 3, NAN)
    }),
    case(false, &["up_proj.scales", "1 are infinite"], |m| m.poke("model.layers.1.mlp.up_proj.scales", 3, INFINITE)),
    case(false, &["down_proj.scales", "values are zero"], |m| m.zero("model.layers.0.mlp.down_proj.scales")),
    case(true, &["up_proj", "`weight`", "qweight"], |m| {
        m.add("model.layers.1.mlp.up_proj.weight", DType::F16, &[256, 128])
    }),
    case(false, &["up_proj", "leaves it out", "read as quantised"], |m| {
        m.config["quantization_config"]["dynamic"] = json!({"-:.*up_proj.*": {}});
    }),
    case(false, &["config says awq", "gptq"], |m| {
        m.config["quantization_config"] =
            json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": false});
    }),
    case(true, &["q_proj", "[128, 128]", "256 × 128"], |m| m.config["head_dim"] = json!(64)),
];

/// What `inspect --data` says.
fn findings(model: &str) -> (Vec<String>, Value) {
    let found = json(&["inspect", model, "--data"]);
    let of = |f: &Value| format!("{}: {}", f["subject"].as_str().unwrap(), f["text"].as_str().unwrap());
    let all = found["findings"].as_array().unwrap().iter().map(of);
    let obstacle = found["obstacle"].as_str().map(str::to_owned);
    (all.chain(obstacle).collect(), found)
}

fn check(cases: &[Case], whole: &Folder, writes: &[&[&str]]) {
    let dir = tempfile::tempdir().unwrap();
    for (number, case) in cases.iter().enumerate() {
        let mut model = whole.clone();
        (case.change)(&mut model);
        let path = model.write(&dir.path().join(number.to_string()));
        let (findings, _) = findings(&path);
        let told = findings.iter().any(|finding| case.parts.iter().all(|part| finding.contains(part)));
        assert!(told, "{number}: {:?} in {findings:#?}", case.parts);
        let strict = output(&["inspect", &path, "--data", "--strict"]);
        assert_eq!(strict.status.code(), Some(1), "{number}: {}", text(&strict.stderr));
        for arguments in writes {
            let target = dir.path().join("out").display().to_string();
            let out = output(&[*arguments, &[path.as_str(), "-o", &target, "--quiet"]].concat());
            if case.refused {
                assert_eq!(out.status.code(), Some(3), "{number} {arguments:?}: {}", text(&out.stderr));
                assert!(!Path::new(&target).exists(), "{number} {arguments:?}");
            }
            let _ = std::fs::remove_dir_all(&target);
        }
    }
}

fn dense() -> PathBuf {
    repository().join("crates/halfbyte-llm/testdata/architectures/llama")
}

#[test]
fn each_contradiction_of_a_dense_model_is_told_in_a_sentence() {
    let whole = Folder::read(&dense());
    let dir = tempfile::tempdir().unwrap();
    let path = whole.write(&dir.path().join("whole"));
    let (none, report) = findings(&path);
    assert_eq!((none, &report["runs"]), (Vec::new(), &json!(true)));
    quiet(&["inspect", &path, "--data", "--strict"]);
    check(DENSE, &whole, &[&["dequantize"], &["quantize", "--group", "32"]]);
}

#[test]
fn each_contradiction_of_a_quantised_model_is_told_in_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let source = Folder::read(&dense()).write(&dir.path().join("dense"));
    let target = dir.path().join("gptq");
    quiet(&["quantize", &source, "-o", &target.display().to_string(), "--group", "32"]);
    let whole = Folder::read(&target);
    let (none, _) = findings(&target.display().to_string());
    assert_eq!(none, Vec::<String>::new());
    check(GPTQ, &whole, &[&["dequantize"], &["convert", "--to", "native"]]);
}

/// Who writes or compares hears how a model is read that leaves it open, and what could not be checked.
#[test]
fn what_is_guessed_or_not_checked_is_noted_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let model = crate::support::model();
    let (quantized, native) = (path("quantized"), path("native"));
    quiet(&["quantize", &model, "-o", &quantized, "--asym", "--to", "gptq"]);
    let change = |folder: &str, with: &dyn Fn(&mut Value)| {
        let file = Path::new(folder).join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        with(&mut config);
        std::fs::write(file, config.to_string()).unwrap();
    };
    change(&quantized, &|config| drop(config.as_object_mut().unwrap().remove("quantization_config")));
    let guessed = "says how zero points are stored; read as gptq";
    for arguments in [
        vec!["convert", &quantized, "-o", &native, "--to", "native"],
        vec!["verify", &quantized, &native],
        vec!["dequantize", &quantized, "-o", &path("dense")],
        vec!["convert", &quantized, "-o", &path("parts"), "--tp", "2"],
    ] {
        let out = output(&arguments);
        let told = text(&out.stderr);
        assert!(
            out.status.success() && told.contains(guessed) && told.contains("and 41 more"),
            "{arguments:?}: {told}"
        );
    }
    // Parts beside a whole model would not be looked at.
    let error = fails(2, &["convert", &quantized, "-o", &native, "--tp", "2"]);
    assert!(error.contains("holds a model"), "{error}");
    // A config that says too little to know what should be there.
    let unread = crate::support::copy_of_model(dir.path()).display().to_string();
    change(&unread, &|config| config["num_hidden_layers"] = json!("6"));
    let out = output(&["quantize", &unread, "-o", &path("again")]);
    assert!(text(&out.stderr).contains("was not checked") && text(&out.stderr).contains("num_hidden_layers"));
    // What Git LFS has not fetched, and a link to nothing.
    for (name, config) in [("pointer", true), ("link", false)] {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::copy(Path::new(&native).join("model.safetensors"), folder.join("model.safetensors")).unwrap();
        let file = folder.join("config.json");
        match config {
            true => std::fs::write(file, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap(),
            false => std::os::unix::fs::symlink(folder.join("gone"), file).unwrap(),
        }
        let error = fails(3, &["verify", &native, &folder.display().to_string()]);
        assert!(error.contains(if config { "pointer of Git LFS" } else { "config.json" }), "{error}");
    }
}

#[test]
fn half_a_model_does_not_run_in_silence() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Folder::read(&dense());
    model.config["num_hidden_layers"] = json!(1);
    let path = model.write(&dir.path().join("half"));
    let error =
        fails(3, &["eval", "logits", &path, "--ids", &ids(), "-o", &dir.path().join("l").display().to_string()]);
    assert!(error.contains("num_hidden_layers") && error.contains("layers up to 1"), "{error}");
}

#[test]
fn scales_of_nan_are_blamed_when_a_model_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let source = Folder::read(&dense()).write(&dir.path().join("dense"));
    let target = dir.path().join("gptq");
    quiet(&["quantize", &source, "-o", &target.display().to_string(), "--group", "32"]);
    let mut model = Folder::read(&target);
    model.poke("model.layers.1.mlp.up_proj.scales", 3, NAN);
    let path = model.write(&dir.path().join("nan"));
    let out = dir.path().join("out").display().to_string();
    for arguments in
        [&["eval", "logits", &path, "--ids", &ids(), "-o", &out][..], &["convert", &path, "--to", "native", "-o", &out]]
    {
        let error = fails(3, arguments);
        assert!(error.contains("model.layers.1.mlp.up_proj.scales") && error.contains("NaN"), "{error}");
    }
}

#[test]
fn numbers_that_no_type_holds_are_not_blamed_on_options_that_are_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let source = Folder::read(&dense()).write(&dir.path().join("dense"));
    let target = dir.path().join("gptq");
    quiet(&["quantize", &source, "-o", &target.display().to_string(), "--group", "32"]);
    let mut model = Folder::read(&target);
    let (spec, data) = model.at("model.layers.1.mlp.up_proj.scales");
    (spec.dtype, *data) = (DType::F32, 3e38f32.to_le_bytes().repeat(data.len() / 2));
    let path = model.write(&dir.path().join("large"));
    for (dtype, advice) in [("f32", "no --dtype reaches further"), ("f16", "choose --dtype f32 or bf16")] {
        let out = dir.path().join("out").display().to_string();
        let error = fails(2, &["dequantize", &path, "-o", &out, "--dtype", dtype]);
        assert!(error.contains("beyond its range") && error.contains(advice), "{error}");
    }
}

#[test]
fn what_is_written_with_nan_in_it_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = Folder::read(&dense());
    model.poke("model.norm.weight", 7, NAN);
    let path = model.write(&dir.path().join("nan"));
    let out = dir.path().join("out").display().to_string();
    let done = output(&["quantize", &path, "-o", &out, "--group", "32"]);
    assert_eq!(done.status.code(), Some(0), "{}", text(&done.stderr));
    let notes = text(&done.stderr);
    assert!(notes.contains("note: model.norm.weight: of 128 values 1 are NaN, the first at 7"), "{notes}");
}

fn ids() -> String {
    dense().join("expected.safetensors").display().to_string()
}
