//! bitsandbytes modules against files of bitsandbytes.

use crate::support::{Tensor, assert_names, refusal, taken, tensor, testdata, write_folder};
use half::f16;
use halfbyte::format::reference::dequantize;
use halfbyte::{Float, Group, WeightFormat, Zero};
use halfbyte_checkpoint::Checkpoint;
use halfbyte_checkpoint::safetensors::DType;
use halfbyte_checkpoint::{
    Finding, FloatData, Job, LinearWeight, StoredFormat, Weights, inspect, linears, write_dense,
};

/// Name, kind, block, whether scales are nested, type, shape.
type Golden = (&'static str, &'static str, usize, bool, Float, [usize; 2]);

const GOLDENS: [Golden; 7] = [
    ("nf4_b64_nested_bf16", "nf4", 64, true, Float::BF16, [96, 192]),
    ("nf4_b64_f16", "nf4", 64, false, Float::F16, [24, 128]),
    ("nf4_b4096_f32_ragged", "nf4", 4096, false, Float::F32, [33, 250]),
    ("nf4_b32_bf16_odd", "nf4", 32, true, Float::BF16, [5, 77]),
    ("nf4_b64_f16_stored_as_bf16", "nf4", 64, true, Float::F16, [16, 128]),
    ("fp4_b64_nested_f16", "fp4", 64, true, Float::F16, [96, 192]),
    ("fp4_b128_f32", "fp4", 128, false, Float::F32, [16, 256]),
];

pub fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(testdata(&format!("bitsandbytes/{name}.safetensors"))).unwrap()
}

/// The module of a golden file under another name.
pub fn tensors(file: &Checkpoint, module: &str) -> Vec<Tensor> {
    let names = file.tensor_names().filter(|name| name.starts_with("m."));
    names.map(|name| taken(file, name, &format!("{module}{}", &name[1..]))).collect()
}

fn config(kind: &str, nested: bool) -> String {
    let how = match kind {
        "int8" => r#""load_in_8bit": true"#.to_owned(),
        _ => format!(r#""load_in_4bit": true, "bnb_4bit_quant_type": "{kind}", "bnb_4bit_use_double_quant": {nested}"#),
    };
    format!(r#"{{"quantization_config": {{"quant_method": "bitsandbytes", {how}}}}}"#)
}

fn bytes_of(floats: &FloatData<'_>) -> Vec<u8> {
    match floats {
        FloatData::F16(v) => bytemuck::cast_slice(v).to_vec(),
        FloatData::BF16(v) => bytemuck::cast_slice(v).to_vec(),
        FloatData::F32(v) => bytemuck::cast_slice(v).to_vec(),
    }
}

/// The bytes of the floats that a module becomes, and what is odd about it.
fn load(tensors: &[Tensor], config: &str) -> (Vec<u8>, Vec<Finding>) {
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), tensors, config);
    let weights = Weights::open(dir.path()).unwrap();
    let loaded = weights.load_linear("m").unwrap();
    let LinearWeight::Dense { floats, .. } = loaded.weight else { panic!("expected floats") };
    (bytes_of(&floats), loaded.findings)
}

#[test]
fn codes_of_4_bits_become_the_floats_that_the_program_makes_of_them_bit_by_bit() {
    for (name, kind, block, nested, dtype, shape) in GOLDENS {
        let file = golden(name);
        let dir = tempfile::tempdir().unwrap();
        write_folder(dir.path(), &tensors(&file, "m"), &config(kind, nested));
        let weights = Weights::open(dir.path()).unwrap();
        let loaded = weights.load_linear("m").unwrap();
        assert_eq!(loaded.findings, [], "{name}");
        let LinearWeight::Dense { floats, shape: read } = loaded.weight else { panic!("{name}: expected floats") };
        assert_eq!((read, floats.dtype()), (shape, dtype), "{name}");
        assert_eq!(bytes_of(&floats), file.bytes("dequantized").unwrap(), "{name}");

        let listed = linears(&weights).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!((listed[0].name, listed[0].shape), ("m", shape));
        assert_eq!(listed[0].source, Some(StoredFormat::Floats { name: kind_of(kind), bits: 4, block }), "{name}");
        let inspection = inspect(&weights).unwrap();
        assert_eq!(inspection.findings, [], "{name}");
        let module = &inspection.modules[0];
        assert_eq!((module.scheme, module.format.as_str()), ("bitsandbytes", format!("{kind}-g{block}").as_str()));
        assert_eq!(inspection.parameters, (shape[0] * shape[1]) as u64);
        assert_eq!((inspection.modules.len(), module.bytes), (1, inspection.total_bytes), "{name}");

        // Nothing of this needs the config.
        assert_eq!(load(&tensors(&file, "m"), ""), (file.bytes("dequantized").unwrap().to_vec(), vec![]), "{name}");
    }
}

fn kind_of(kind: &str) -> &'static str {
    if kind == "nf4" { "nf4" } else { "fp4" }
}

#[test]
fn signed_bytes_become_codes_with_a_scale_an_output() {
    let file = golden("int8");
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &tensors(&file, "m"), &config("int8", false));
    let weights = Weights::open(dir.path()).unwrap();
    let loaded = weights.load_linear("m").unwrap();
    assert_eq!(loaded.findings, []);
    let LinearWeight::Quantized(q) = &loaded.weight else { panic!("expected codes") };
    let format =
        WeightFormat { bits: 8, group: Group::Channel, zero: Zero::Symmetric, scale: Float::F32, channel_scale: None };
    assert_eq!((q.format(), [q.n(), q.k()]), (format, [32, 64]));
    assert_eq!(loaded.bias.unwrap(), file.floats("m.bias").unwrap().to_f32());
    let scb = file.floats("m.SCB").unwrap().to_f32();
    for (i, scb) in scb.iter().enumerate() {
        assert_eq!(q.scales()[i], scb / 127.0);
    }
    // The program rounds SCB · q and then the product with 1 / 127, which is rounded itself; here one rounding is left,
    // that of the scale.
    let expected = file.floats("dequantized").unwrap().to_f32();
    let mut different = 0;
    for (at, (&value, &expected)) in dequantize(q).iter().zip(&expected).enumerate() {
        let error = (value - f64::from(expected)).abs();
        assert!(error <= 2.0 * 2f64.powi(-24) * 2.0 * value.abs(), "at {at}: {value}, expected {expected}");
        different += usize::from(value as f32 != expected);
    }
    assert!(different > 0, "the two ways of rounding should differ somewhere");
    // Said once, however many modules there are.
    let mut several = tensors(&file, "a");
    several.extend(tensors(&file, "b"));
    let dir = tempfile::tempdir().unwrap();
    write_folder(dir.path(), &several, &config("int8", false));
    let inspection = inspect(&Weights::open(dir.path()).unwrap()).unwrap();
    assert_eq!(inspection.findings.len(), 1, "{:?}", inspection.findings);
    assert_names(&inspection.findings[0].to_string(), &["SCB / 127", "rounded to f32"]);
    let formats: Vec<&str> = inspection.modules.iter().map(|m| m.format.as_str()).collect();
    assert_eq!((formats, inspection.modules[0].scheme), (vec!["w8a16-sf32", "w8a16-sf32"], "bitsandbytes"));
}

#[test]
fn labels_that_are_not_those_of_the_tensors_are_findings() {
    let file = golden("nf4_b64_nested_bf16");
    let good = tensors(&file, "m");
    let expected = file.bytes("dequantized").unwrap();
    let plain = config("nf4", true);
    let cases: &[(String, &[&str])] = &[
        (config("fp4", true), &["says fp4", "those of nf4", "read as nf4"]),
        (config("int8", false), &["says int8", "read as nf4"]),
        (config("nf4", false), &["bnb_4bit_use_double_quant", "read as nested"]),
        (
            plain.replace("\"load", r#""llm_int8_skip_modules": ["m"], "load"#),
            &["llm_int8_skip_modules has `m`", "read as quantised"],
        ),
        (
            r#"{"quantization_config": {"quant_method": "gptq", "bits": 4}}"#.into(),
            &["says gptq", "read as bitsandbytes"],
        ),
    ];
    for (config, parts) in cases {
        let (read, findings) = load(&good, config);
        assert_eq!(read, expected, "{config}");
        assert_eq!(findings.len(), 1, "{config}: {findings:?}");
        assert_names(&findings[0].text, parts);
    }
    let (_, findings) = load(&tensors(&golden("nf4_b64_f16"), "m"), &plain);
    assert_names(&findings[0].text, &["bnb_4bit_use_double_quant", "stored as floats"]);
    // The program has tables of its own and does not read the file's.
    let mut other_table = good.clone();
    replace(&mut other_table, tensor("m.weight.quant_map", DType::F32, &[16], &[0.5f32; 16]));
    let (read, findings) = load(&other_table, &plain);
    assert_eq!(read, expected);
    assert_names(&findings[0].text, &["quant_map", "nf4"]);
}

/// Puts a tensor in the place of the one with its name.
fn replace(tensors: &mut [Tensor], new: Tensor) {
    let old = tensors.iter_mut().find(|(name, ..)| *name == new.0).unwrap();
    *old = new;
}

#[test]
fn tensors_that_do_not_fit_each_other_are_errors_that_name_them() {
    const STATE: &str = "m.weight.quant_state.bitsandbytes__nf4";
    let file = golden("nf4_b64_nested_bf16");
    let good = tensors(&file, "m");
    let state = String::from_utf8(file.bytes(STATE).unwrap().to_vec()).unwrap();
    let json = |text: &str| tensor(STATE, DType::U8, &[text.len()], text.as_bytes());
    let edited = |from: &str, to: &str| {
        assert!(state.contains(from), "{state}");
        json(&state.replace(from, to))
    };
    let bytes = |name: &str, len: usize| tensor(name, DType::U8, &[len], &vec![0u8; len]);
    let floats = |name: &str, len: usize| tensor(name, DType::F32, &[len], &vec![1f32; len]);
    let cases: Vec<(Tensor, &[&str])> = vec![
        (json(""), &["quant_state", "JSON"]),
        (json("[1]"), &["quant_state", "JSON"]),
        (json(&"[".repeat(60_000)), &["quant_state", "JSON", "invalid type"]),
        (json(&" ".repeat(70_000)), &["quant_state", "at most 65536 bytes"]),
        (tensor(STATE, DType::F32, &[2], &[0f32; 2]), &["quant_state", "got F32 [2]"]),
        (edited("nf4", "fp4"), &["quant_state", "quant_type `nf4`", "got `fp4`"]),
        (edited("bfloat16", "float64"), &["quant_state", "dtype", "`float64`"]),
        (edited("[96, 192]", "[96]"), &["quant_state", "[outputs, inputs]", "[96]"]),
        (edited("[96, 192]", "[96, -192]"), &["quant_state", "-192"]),
        (edited("[96, 192]", "null"), &["quant_state", "null"]),
        (edited("[96, 192]", "[0, 192]"), &["quant_state", "[0, 192]"]),
        (edited("[96, 192]", "[4294967296, 4294967296]"), &["quant_state", "4294967296"]),
        (edited("[96, 192]", "[96, 194]"), &["`m.weight`", "expected 9312 bytes", "got 9216"]),
        (edited("\"blocksize\": 64", "\"blocksize\": 0"), &["quant_state", "blocksize", "got 0"]),
        (edited("\"blocksize\": 64", "\"blocksize\": 128"), &["`m.weight.absmax`", "[144]", "[288]"]),
        (edited("\"nested_blocksize\": 256", "\"nested_blocksize\": 0"), &["quant_state", "nested_blocksize"]),
        (edited("\"nested_blocksize\": 256", "\"nested_blocksize\": 64"), &["nested_absmax`", "[5]", "[2]"]),
        (edited("float32", "float16"), &["quant_state", "nested_dtype float32"]),
        (edited("\"nested_offset\"", "\"offset\""), &["quant_state", "nested_offset"]),
        (bytes("m.weight", 9215), &["`m.weight`", "9216 bytes"]),
        (bytes("m.weight.absmax", 287), &["`m.weight.absmax`", "U8 [288]", "[287]"]),
        (floats("m.weight.absmax", 288), &["`m.weight.absmax`", "U8 [288]", "F32"]),
        (floats("m.weight.nested_absmax", 3), &["nested_absmax`", "F32 [2]", "[3]"]),
        (floats("m.weight.nested_quant_map", 255), &["nested_quant_map`", "[256]", "[255]"]),
    ];
    for (replacement, parts) in cases {
        let mut tensors = good.clone();
        replace(&mut tensors, replacement);
        assert_names(&refusal(&tensors, ""), parts);
    }
    let without = |name: &str| -> Vec<Tensor> { good.iter().filter(|t| t.0 != name).cloned().collect() };
    assert_names(&refusal(&without(STATE), ""), &[STATE, "there is no tensor"]);
    assert_names(&refusal(&without("m.weight.nested_absmax"), ""), &["`m.weight.absmax`", "F32 [288]", "U8"]);
    assert_names(&refusal(&without("m.weight.nested_quant_map"), ""), &["nested_quant_map"]);
    let mut both = good.clone();
    both.push(tensor("m.weight.quant_state.bitsandbytes__fp4", DType::U8, &[2], b"{}"));
    assert_names(&refusal(&both, ""), &["`m`", "one of nf4 and one of fp4"]);

    let int8 = tensors(&golden("int8"), "m");
    let cases: Vec<(Tensor, &[&str])> = vec![
        (floats("m.SCB", 31), &["`m.SCB`", "F32 [32]", "[31]"]),
        (tensor("m.SCB", DType::F16, &[32], &[f16::ONE; 32]), &["`m.SCB`", "F32 [32]", "F16"]),
        (tensor("m.SCB", DType::F32, &[32], &[f32::NAN; 32]), &["`m`", "finite"]),
        (tensor("m.weight", DType::I8, &[2048], &[0i8; 2048]), &["`m.weight`", "matrix of I8"]),
        (tensor("m.weight", DType::I8, &[32, 0], &[0i8; 0]), &["[32, 0]", "dimension of 0"]),
        (tensor("m.weight_format", DType::U8, &[], &[1u8]), &["`m.weight_format`", "row by row", "got 1"]),
        (tensor("m.weight_format", DType::F32, &[], &[0f32]), &["`m.weight_format`", "F32"]),
    ];
    for (replacement, parts) in cases {
        let mut tensors = int8.clone();
        replace(&mut tensors, replacement);
        assert_names(&refusal(&tensors, ""), parts);
    }
}

#[test]
fn a_model_of_all_kinds_is_made_dense() {
    let [nf4, fp4, int8] = ["nf4_b64_nested_bf16", "fp4_b128_f32", "int8"].map(golden);
    let mut all = tensors(&nf4, "model.layers.0.mlp.down_proj");
    all.extend(tensors(&int8, "model.layers.0.mlp.up_proj"));
    all.extend(tensors(&fp4, "lm_head"));
    all.push(tensor("model.layers.0.self_attn.q_proj.weight", DType::F16, &[2, 2], &[f16::ONE; 4]));
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    write_folder(&source, &all, &config("nf4", true));
    let weights = Weights::open(&source).unwrap();
    let texts: Vec<String> = inspect(&weights).unwrap().findings.iter().map(|f| f.to_string()).collect();
    let all_texts = texts.join("\n");
    assert_eq!(texts.len(), 5, "{all_texts}");
    assert_names(&all_texts, &["q_proj: the config says nf4, and its llm_int8_skip_modules", "read as dense"]);
    assert_names(&all_texts, &["up_proj: the config says nf4", "read as int8", "lm_head: the config says nf4"]);

    let target = dir.path().join("dense");
    write_dense(Job::new(&weights, &target), Float::F32).unwrap();
    let dense = Checkpoint::open(&target).unwrap();
    let mut names: Vec<&str> = dense.tensor_names().collect();
    names.sort_unstable();
    let block = "model.layers.0";
    let expected = [
        "lm_head.weight".to_owned(),
        format!("{block}.mlp.down_proj.weight"),
        format!("{block}.mlp.up_proj.bias"),
        format!("{block}.mlp.up_proj.weight"),
        format!("{block}.self_attn.q_proj.weight"),
    ];
    assert_eq!(names, expected);
    for (file, name) in [(&nf4, &expected[1]), (&fp4, &expected[0])] {
        let written = dense.floats(name).unwrap().to_f32();
        assert_eq!(written, file.floats("dequantized").unwrap().to_f32(), "{name}");
    }
    let written = Weights::open(&target).unwrap();
    assert_eq!(written.quantization(), None);
    assert_eq!(inspect(&written).unwrap().findings, []);
}
