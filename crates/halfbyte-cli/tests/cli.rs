//! The built program, as a shell sees it.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const VERBS: &[&[&str]] = &[
    &["demo"],
    &["inspect"],
    &["quantize"],
    &["convert"],
    &["dequantize"],
    &["verify"],
    &["run"],
    &["eval"],
    &["eval", "ppl"],
    &["eval", "kl"],
    &["eval", "logits"],
    &["bench"],
    &["bench", "conv"],
    &["bench", "load"],
    &["bench", "matmul"],
    &["bench", "model"],
    &["explain"],
    &["doctor"],
    &["completions"],
];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn model() -> String {
    repository().join("models/stdlib-11m").display().to_string()
}

fn validation() -> String {
    format!("{}/validation.jsonl", model())
}

fn halfbyte(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halfbyte"));
    command.args(args).stdin(Stdio::null());
    // What is expected below are the CPU's numbers, also on a machine with a GPU.
    let computes = args == ["demo"] || args.len() > 1 && ["run", "eval", "demo", "bench"].contains(&args[0]);
    if computes && !args.contains(&"--device") {
        command.args(["--device", "cpu"]);
    }
    command
}

fn output(args: &[&str]) -> Output {
    halfbyte(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs it, expects success and silence on standard error, gives standard output.
fn quiet(args: &[&str]) -> String {
    let out = output(&[args, &["--quiet"]].concat());
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", text(&out.stderr));
    assert_eq!(text(&out.stderr), "", "{args:?}");
    text(&out.stdout)
}

/// The one JSON object that it prints.
fn json(args: &[&str]) -> Value {
    let out = quiet(&[args, &["--json"]].concat());
    let value: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}"));
    assert_eq!(value["schema"], 1, "{args:?}");
    value
}

/// Runs it, expects this status and the three lines of an error, gives them.
fn fails(status: i32, args: &[&str]) -> String {
    let out = output(args);
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(status), "{args:?}: {error}");
    assert_eq!(text(&out.stdout), "", "{args:?}");
    for start in ["error: ", "cause: ", "help: "] {
        assert_eq!(error.lines().filter(|line| line.starts_with(start)).count(), 1, "{args:?}: {error}");
    }
    error
}

fn number(value: &Value, field: &str) -> f64 {
    value[field].as_f64().unwrap_or_else(|| panic!("no number {field} in {value}"))
}

/// A folder with the model's small files, its weights linked.
fn copy_of_model(folder: &Path) -> PathBuf {
    let copy = folder.join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(model()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    copy
}

#[test]
fn every_verb_has_help_and_the_common_options() {
    for verb in VERBS {
        for flag in ["--help", "-h"] {
            let help = quiet(&[verb, &[flag][..]].concat());
            assert!(help.starts_with(|c: char| c.is_ascii_uppercase()), "{verb:?}: {help}");
            for wanted in ["Usage: halfbyte", "--json", "--device", "--threads", "--quiet"] {
                assert!(help.contains(wanted), "{verb:?}: {wanted}");
            }
        }
    }
    let all = quiet(&["--help"]);
    for verb in VERBS {
        assert!(all.contains(&format!("\n  {} ", verb[0])), "{verb:?}");
    }
    assert_eq!(quiet(&["--version"]).trim(), format!("halfbyte {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_usage_is_told_and_has_status_2() {
    let m = model();
    let here = TempDir::new().unwrap();
    let target = here.path().join("out").display().to_string();
    let quantize = |more: &[&str]| fails(2, &[&["quantize", &m, "-o", &target], more].concat());
    for (option, value, there_is) in [
        ("--method", "guess", "gptq"),
        ("--to", "paper", "gptq"),
        ("--bits", "5", "2, 3, 4 or 8"),
        ("--group", "0", "-1"),
    ] {
        let error = quantize(&[option, value]);
        assert!(error.contains(value) && error.contains(there_is), "{error}");
        assert!(error.contains("halfbyte quantize --help"), "{error}");
    }
    quantize(&["--sym", "--asym"]);
    assert!(!Path::new(&target).exists());
    fails(2, &["fly"]);
    fails(2, &["quantize", &m]);
    fails(2, &["run", &m]);
    fails(2, &["run", &m, "-p", "a", "-f", "b"]);
    fails(2, &["run", &m, "-p", "a", "--temperature", "-1"]);
    fails(2, &["run", &m, "-p", "a", "--act", "a8"]);
    fails(2, &["run", &m, "-p", "a", "--search"]);
    fails(2, &["run", &m, "-p", "a", "--quantize", "w4a8-g128", "--act", "a16"]);
    fails(2, &["run", &m, "-p", &"word ".repeat(2000)]);
    fails(2, &["doctor", "--threads", "0"]);
    fails(2, &["doctor", "--device", "tpu"]);
    fails(2, &["explain", "w5a8", "1", "2", "3"]);
    fails(2, &["eval", "ppl", &m, "--text", &validation(), "--window", "1"]);
    fails(2, &["eval", "ppl", &m, "--text", &validation(), "--window", "100000"]);
    fails(2, &["bench", "matmul", "-m", "0"]);
    fails(2, &["bench", "conv", "--kernel", "60"]);
    fails(2, &["bench", "conv", "--size", "7x"]);
    fails(2, &["bench", "conv", "--batch", "0"]);
    fails(2, &["bench", "conv", "--groups", "3"]);
    fails(2, &["bench", "model", &m, "--generate", "0"]);
    fails(2, &["bench", "model"]);
    fails(2, &["bench", "load"]);
    fails(2, &["bench", "load", &m, "--to", "gptq"]);
    let out = halfbyte(&["doctor"]).env("HALFBYTE_ISA", "sse9").output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    for bare in [&[][..], &["eval"], &["bench"]] {
        let out = output(bare);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(2), 0));
        assert!(text(&out.stderr).contains("Usage:"), "{bare:?}");
    }
}

#[test]
fn devices_that_are_not_there_and_memory_have_status_4() {
    for device in ["cuda", "cuda:1"] {
        let error = fails(4, &["inspect", &model(), "--device", device]);
        assert!(error.contains("not supported"), "{error}");
    }
    // No machine has as many.
    let bench = |what| ["bench", what, "--format", "w4a16"];
    for command in [&bench("matmul")[..], &bench("conv"), &["explain", "w4a16", "1", "64", "64"]] {
        let error = fails(4, &[command, &["--device", "cuda:1000"]].concat());
        assert!(error.contains("driver") || error.contains("device number"), "{error}");
    }
    let error = fails(4, &["run", &model(), "-p", "a", "--device", "cuda:1000"]);
    assert!(error.contains("driver is not found") || error.contains("expected a device number"), "{error}");
    quiet(&["doctor", "--device", "cpu"]);
    if cfg!(target_os = "linux") {
        // Four terabytes.
        let error = fails(4, &["bench", "matmul", "--format", "f32", "-m", "1", "-n", "1048576", "-k", "1048576"]);
        assert!(error.contains("available"), "{error}");
    }
}

#[test]
fn missing_and_damaged_files_have_status_3() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, none) = (model(), path("none"));
    fails(3, &["inspect", &none]);
    fails(3, &["quantize", &none, "-o", &path("out")]);
    fails(3, &["dequantize", &none, "-o", &path("out")]);
    fails(3, &["run", &none, "-p", "a"]);
    fails(3, &["run", &m, "-f", &none]);
    fails(3, &["eval", "ppl", &m, "--text", &none]);
    fails(3, &["eval", "logits", &m, "--ids", &none, "-o", &path("logits")]);
    fails(3, &["bench", "model", "--random-weights", &none]);
    fails(3, &["bench", "load", &none]);
    fails(3, &["bench", "matmul", "--case", &none]);

    let bad = |name: &str, content: &[u8]| {
        fs::write(here.path().join(name), content).unwrap();
        path(name)
    };
    assert!(fails(3, &["inspect", &bad("model.gguf", b"hello")]).contains("begins with `GGUF`"));
    assert!(fails(3, &["inspect", &bad("model.onnx", b"hello")]).contains("not an ONNX model"));
    let case = bad("case.toml", b"origin = 'x'\nformats = ['w9a9']\nm = [1]\n[[shape]]\norigin = ''\nn = 1\nk = 1\n");
    assert!(fails(3, &["bench", "matmul", "--case", &case]).contains("w9a9"));
    assert!(fails(3, &["bench", "conv", "--case", &case]).contains("not a case file of convolutions"));
    let lines = bad("lines.jsonl", b"{\"text\": \"a\"}\n{\"words\": \"a\"}\n");
    assert!(fails(3, &["eval", "ppl", &m, "--text", &lines]).contains("line 2"));
    let ids = bad("ids.safetensors", b"\xff\xff\xff\xff\xff\xff\xff\x7f");
    fails(3, &["eval", "logits", &m, "--ids", &ids, "-o", &path("logits")]);
    assert!(!Path::new(&path("logits")).exists());

    let copy = copy_of_model(here.path());
    let shard = copy.join("model-00002-of-00002.safetensors");
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 100]).unwrap();
    let folder = copy.display().to_string();
    for args in [
        &["inspect", &folder][..],
        &["run", &folder, "-p", "a"],
        &["quantize", &folder, "-o", &path("out")],
        &["dequantize", &folder, "-o", &path("out")],
    ] {
        assert!(fails(3, args).contains("model-00002-of-00002.safetensors"));
    }
    fs::write(&shard, &whole).unwrap();
    fs::write(copy.join("config.json"), "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": \"x\"}").unwrap();
    assert!(fails(3, &["run", &folder, "-p", "a"]).contains("hidden_size"));
    let inspected = json(&["inspect", &folder]);
    assert_eq!(inspected["runs"], false);
    assert!(inspected["obstacle"].as_str().unwrap().contains("hidden_size"));
    assert!(!Path::new(&path("out")).exists());
}

#[test]
fn weights_that_are_not_finite_are_named_and_nothing_is_written() {
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let shard = copy.join("model-00001-of-00002.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let name = "model.layers.0.self_attn.q_proj.weight";
    let at = 8 + header + tensors[name]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at + 20..at + 22].copy_from_slice(&0x7e00u16.to_le_bytes());
    fs::write(&shard, bytes).unwrap();
    let (folder, target) = (copy.display().to_string(), here.path().join("out"));
    for args in [
        &["quantize", &folder, "-o", target.to_str().unwrap()][..],
        &["eval", "ppl", &folder, "--text", &validation(), "--quantize", "w4a8-g128", "--max-windows", "1"],
    ] {
        let error = fails(3, args);
        assert!(error.contains("layers.0.self_attn.q_proj") && error.contains("NaN"), "{error}");
    }
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1, "only the copy is there");
}

#[test]
fn quantize_inspect_eval_dequantize_belong_together() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, quantized, dense) = (model(), path("above/quantized"), path("dense"));
    let arguments = ["quantize", &m, "-o", &quantized, "--group", "32", "--asym"];

    let planned = json(&[&arguments[..], &["--dry-run"]].concat());
    assert!(!Path::new(&quantized).exists() && !Path::new(&path("above")).exists());
    assert_eq!(planned["dry_run"], true);
    assert!(number(&planned, "seconds") > 0.0 && number(&planned, "peak_memory_bytes") > 1e5);
    let made = json(&arguments);
    assert_eq!(
        (&made["format"], &made["method"], &made["to"]),
        (&"w4a16-g32-asym".into(), &"rtn".into(), &"gptq".into())
    );
    assert_eq!(made["modules"], 42);
    for field in ["bytes_before", "bytes_after", "bits_per_weight"] {
        assert_eq!(made[field], planned[field], "{field}");
    }
    assert_eq!(made["bytes_before"], 22_030_080);
    assert!(number(&made, "bits_per_weight") > 4.6 && number(&made, "bits_per_weight") < 4.8);

    let inspected = json(&["inspect", &quantized]);
    assert_eq!(inspected["total_bytes"], made["bytes_after"]);
    assert_eq!(inspected["parameters"], 11_015_040);
    assert_eq!((&inspected["runs"], &inspected["architecture"]), (&true.into(), &"LlamaForCausalLM".into()));
    assert_eq!(inspected["findings"].as_array().unwrap().len(), 0, "{}", inspected["findings"]);
    let modules = inspected["modules"].as_array().unwrap();
    let of_gptq: Vec<&Value> = modules.iter().filter(|module| module["scheme"] == "gptq").collect();
    assert_eq!((of_gptq.len(), modules.len()), (42, 43));
    assert!(of_gptq.iter().all(|module| module["format"] == "w4a16-g32-asym"));
    assert!(quiet(&["inspect", &quantized]).contains("no problems found"));

    let ppl = |model: &str, more: &[&str]| {
        let found = json(&[&["eval", "ppl", model, "--text", &validation(), "--max-windows", "2"], more].concat());
        assert_eq!((&found["windows"], &found["tokens"]), (&2.into(), &1024.into()));
        assert!(number(&found, "seconds") > 0.0 && number(&found, "tokens_per_second") > 0.0);
        number(&found, "perplexity")
    };
    let original = ppl(&m, &[]);
    let from_file = ppl(&quantized, &[]);
    assert!(from_file > original * 1.001 && from_file < original * 1.1, "{original} {from_file}");
    // In memory and through a file the same codes are multiplied.
    assert_eq!(from_file, ppl(&m, &["--quantize", "w4a16-g32-asym"]));
    let eight = ppl(&quantized, &["--act", "a8"]);
    assert!(eight != from_file && (eight / from_file - 1.0).abs() < 0.01, "{from_file} {eight}");
    assert_ne!(from_file, ppl(&m, &["--quantize", "w4a16-g32-asym", "--search"]));

    let written = json(&["dequantize", &quantized, "-o", &dense]);
    assert_eq!((&written["dtype"], &written["bytes_after"]), (&"f32".into(), &44_060_160.into()));
    let dequantized = ppl(&dense, &[]);
    assert!((dequantized / from_file - 1.0).abs() < 1e-5, "{from_file} {dequantized}");

    assert!(fails(2, &["quantize", &quantized, "-o", &path("twice")]).contains("quantised already"));
    fails(2, &["run", &quantized, "-p", "a", "--quantize", "w4a8-g128"]);
}

#[test]
fn divergence_from_a_model_is_measured() {
    let (m, text) = (model(), validation());
    let kl = |more: &[&str]| json(&[&["eval", "kl", &m, &m, "--text", &text, "--max-windows", "2"], more].concat());
    let itself = kl(&[]);
    for field in ["kl_mean", "kl_standard_error", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"] {
        assert_eq!(itself[field], 0.0, "{field}");
    }
    assert_eq!((&itself["top1_agreement"], &itself["perplexity_ratio"]), (&1.0.into(), &1.0.into()));
    assert_eq!((&itself["windows"], &itself["tokens"], &itself["positions"]), (&2.into(), &1024.into(), &1022.into()));

    let found = kl(&["--quantize", "w4a16-g32-asym", "--window", "256"]);
    let help = quiet(&["eval", "kl", "--help"]);
    for field in found.as_object().unwrap().keys().filter(|field| *field != "schema") {
        assert!(help.contains(field), "{field}");
    }
    assert_eq!((&found["format"], &found["reference_format"]), (&"w4a16-g32-asym".into(), &"f16".into()));
    assert_eq!((&found["positions"], &found["window"]), (&510.into(), &256.into()));
    let quantiles = ["kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"].map(|field| number(&found, field));
    assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{quantiles:?}");
    assert!((0.001..0.1).contains(&number(&found, "kl_mean")), "{found}");
    assert!((0.8..1.0).contains(&number(&found, "top1_agreement")), "{found}");
    for (field, more) in [("perplexity", &["--quantize", "w4a16-g32-asym"][..]), ("reference_perplexity", &[])] {
        let options = ["eval", "ppl", &m, "--text", &text, "--max-windows", "2", "--window", "256"];
        assert_eq!(found[field], json(&[&options[..], more].concat())["perplexity"], "{field}");
    }
    let shown = quiet(&["eval", "kl", &m, &m, "--text", &text, "--max-windows", "1", "--quantize", "w8a16-g128"]);
    assert!(shown.contains("w8a16-g128 from f16") && shown.contains("top-1 agreement"), "{shown}");

    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let (path, other) = (copy.join("tokenizer.json"), copy.display().to_string());
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (first, second) = (vocabulary["0"].clone(), vocabulary["1"].clone());
    (vocabulary["0"], vocabulary["1"]) = (second.clone(), first.clone());
    fs::write(&path, tokenizer.to_string()).unwrap();
    let error = fails(2, &["eval", "kl", &m, &other, "--text", &text]);
    for wanted in ["tokenizers", "\"0\"", &format!("id {first} in the model"), &format!("id {second} in the reference")]
    {
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
    let tiny = repository().join("crates/halfbyte-llm/testdata/architectures/llama");
    fails(3, &["eval", "kl", &m, tiny.to_str().unwrap(), "--text", &text]);
    fails(2, &["eval", "kl", &m, &m, "--text", &text, "--window", "1"]);
    fails(2, &["eval", "kl", &m, "--text", &text]);
}

#[test]
fn convert_changes_the_container_and_verify_proves_it() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    quiet(&["quantize", &model(), "-o", &path("gptq"), "--group", "64", "--asym"]);
    let mut from = path("gptq");
    for form in ["awq", "compressed-tensors", "native", "gptq_v2"] {
        let made = json(&["convert", &from, "-o", &path(form), "--to", form]);
        assert_eq!((&made["modules"], made["requantized"].as_array().unwrap().len()), (&42.into(), 0), "{form}");
        let proof = json(&["verify", &path("gptq"), &path(form)]);
        assert_eq!((&proof["equal"], &proof["compared"]), (&true.into(), &56.into()), "{form}");
        assert_eq!(json(&["inspect", &path(form)])["findings"].as_array().unwrap().len(), 0, "{form}");
        from = path(form);
    }
    let ppl = |model: &str| {
        let text = validation();
        number(&json(&["eval", "ppl", model, "--text", &text, "--max-windows", "1"]), "perplexity")
    };
    assert_eq!(ppl(&path("awq")), ppl(&path("gptq")));
    // What does not fit is refused, and said.
    let refused = fails(2, &["convert", &path("gptq"), "-o", &path("wide"), "--to", "awq", "--group", "128"]);
    assert!(refused.contains("where they are joined") && refused.contains("--requantize"), "{refused}");
    assert!(!Path::new(&path("wide")).exists());
    let made = json(&["convert", &path("gptq"), "-o", &path("wide"), "--to", "awq", "--group", "128", "--requantize"]);
    assert_eq!(made["requantized"].as_array().unwrap().len(), 42);
    let no = halfbyte(&["verify", &path("gptq"), &path("wide")]).output().unwrap();
    let (out, err) = (text(&no.stdout), text(&no.stderr));
    assert_eq!(no.status.code(), Some(1), "{err}");
    assert!(out.starts_with("different: 42 of 56 tensors") && out.contains("and 32 more"), "{out}");
    assert!(err.contains("differ"), "{err}");
    fails(2, &["convert", &model(), "-o", &path("none"), "--to", "awq"]);
    fails(2, &["convert", &path("gptq"), "-o", &path("none"), "--to", "paper"]);
    fails(3, &["verify", &path("gptq"), &path("nowhere")]);
}

#[test]
fn quantize_writes_every_form() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let m = model();
    for (form, more, format) in [
        ("awq", &["--asym", "--group", "64"][..], "w4a16-g64-asym"),
        ("compressed-tensors", &["--bits", "8", "--group", "-1"], "w8a16"),
        ("onnx", &["--bits", "2", "--group", "32"], "w2a16-g32"),
        ("gguf", &["--asym"], "w4a16-g32-float"),
        ("gptq_v2", &["--bits", "3"], "w3a16-g128"),
        ("native", &["--two-level", "--asym"], "w4a16-g128-asym-si8"),
    ] {
        let out = path(form);
        let arguments = [&["quantize", &m, "-o", &out, "--to", form], more].concat();
        let planned = json(&[&arguments[..], &["--dry-run"]].concat());
        let made = json(&arguments);
        assert_eq!((&made["format"], &made["bytes_after"]), (&format.into(), &planned["bytes_after"]), "{form}");
        let inspected = json(&["inspect", &out]);
        assert_eq!(inspected["findings"].as_array().unwrap().len(), 0, "{}", inspected["findings"]);
        let modules = inspected["modules"].as_array().unwrap();
        assert_eq!(modules.iter().filter(|module| module["format"] == format).count(), 42, "{form}");
    }
    for arguments in [
        &["--to", "awq", "--bits", "8"][..],
        &["--to", "gguf", "--group", "128"],
        &["--to", "onnx", "--bits", "3"],
        &["--to", "gptq", "--two-level"],
        &["--to", "awq", "--method", "gptq", "--calibration", "x.jsonl", "--act-order"],
    ] {
        let refused = fails(2, &[&["quantize", &m, "-o", &path("none")], arguments].concat());
        assert!(refused.contains("does not fit the form"), "{refused}");
    }
    let refused = fails(2, &["quantize", &m, "-o", &path("none"), "--to", "native", "--two-level", "--bits", "8"]);
    assert!(refused.contains("two levels") && refused.contains("4 bits"), "{refused}");
    // Two levels run, and become one where the form has scales in f32.
    let ppl = |model: &str| {
        let text = validation();
        number(&json(&["eval", "ppl", model, "--text", &text, "--max-windows", "1"]), "perplexity")
    };
    quiet(&["convert", &path("native"), "-o", &path("one"), "--to", "compressed-tensors"]);
    assert!(json(&["verify", &path("native"), &path("one")])["equal"] == true);
    assert_eq!(ppl(&path("native")), ppl(&path("one")));
    quiet(&["convert", &path("one"), "-o", &path("two"), "--to", "native", "--two-level"]);
    assert_eq!(json(&["inspect", &path("two")])["modules"], json(&["inspect", &path("native")])["modules"]);
    let refused = fails(2, &["convert", &path("awq"), "-o", &path("none"), "--to", "native", "--two-level"]);
    assert!(refused.contains("whole multiples of one f16 number"), "{refused}");
}

#[test]
fn a_gguf_file_is_a_model() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (gptq, gguf) = (path("gptq"), path("model.gguf"));
    quiet(&["quantize", &model(), "-o", &gptq]);
    let made = json(&["convert", &gptq, "-o", &gguf, "--to", "gguf"]);
    assert_eq!(made["requantized"].as_array().unwrap().len(), 0);
    assert!(Path::new(&gguf).is_file());
    assert_eq!(json(&["verify", &gptq, &gguf])["equal"], true);
    let inspected = json(&["inspect", &gguf]);
    assert_eq!((&inspected["runs"], &inspected["architecture"]), (&true.into(), &"LlamaForCausalLM".into()));
    // The same tokens, the same weights, so the same text.
    let run = |model: &str| quiet(&["run", model, "-p", "def main(", "-n", "24"]);
    assert_eq!(run(&gguf), run(&gptq));
    assert!(fails(2, &["convert", &gptq, "-o", &gguf, "--to", "gguf"]).contains("--overwrite"));
    // Back to a folder that has all that a model needs.
    quiet(&["convert", &gguf, "-o", &path("back"), "--to", "gptq", "--group", "128"]);
    assert_eq!(run(&path("back")), run(&gptq));
    assert_eq!(json(&["verify", &gptq, &path("back")])["equal"], true);
}

#[test]
fn nothing_is_replaced_unless_asked_for() {
    let here = TempDir::new().unwrap();
    let m = model();
    let target = here.path().join("out");
    let name = target.to_str().unwrap();
    fs::create_dir(&target).unwrap();
    fs::write(target.join("mine.txt"), "mine").unwrap();
    for verb in ["quantize", "dequantize"] {
        assert!(fails(2, &[verb, &m, "-o", name]).contains("already exists"));
        // It is no model, so that it is not deleted even then.
        fails(2, &[verb, &m, "-o", name, "--overwrite"]);
    }
    assert_eq!(fs::read_to_string(target.join("mine.txt")).unwrap(), "mine");
    fs::remove_dir_all(&target).unwrap();
    quiet(&["quantize", &m, "-o", name, "--bits", "8"]);
    let before = fs::read(target.join("config.json")).unwrap();
    fails(2, &["quantize", &m, "-o", name]);
    assert_eq!(fs::read(target.join("config.json")).unwrap(), before);
    quiet(&["quantize", &m, "-o", name, "--overwrite"]);
    assert_ne!(fs::read(target.join("config.json")).unwrap(), before);
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1);
}

/// Begins a slow quantisation and waits until its files are being written.
fn slow_quantisation(folder: &Path) -> std::process::Child {
    let target = folder.join("out");
    let mut child = halfbyte(&["quantize", &model(), "-o", target.to_str().unwrap(), "--search", "--threads", "1"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    while fs::read_dir(folder).unwrap().count() == 0 {
        assert!(child.try_wait().unwrap().is_none() && begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

#[cfg(unix)]
#[test]
fn an_interrupted_quantisation_leaves_nothing_and_has_status_130() {
    let here = TempDir::new().unwrap();
    let child = slow_quantisation(here.path());
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    assert!(text(&out.stderr).contains("error: interrupted"));
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0);
}

#[test]
fn a_killed_quantisation_leaves_nothing_under_the_final_name_and_can_be_repeated() {
    let here = TempDir::new().unwrap();
    let mut child = slow_quantisation(here.path());
    child.kill().unwrap();
    child.wait().unwrap();
    let target = here.path().join("out");
    assert!(!target.exists());
    quiet(&["quantize", &model(), "-o", target.to_str().unwrap()]);
    assert!(target.join("config.json").is_file());
}

#[test]
fn run_streams_the_reference_continuation() {
    let reference: Value =
        serde_json::from_str(&fs::read_to_string(format!("{}/reference.json", model())).unwrap()).unwrap();
    let case = &reference["greedy"][0];
    let (prompt, ids) = (case["prompt"].as_str().unwrap(), case["new_ids"].as_array().unwrap());
    let found = json(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(found["tokens"].as_array().unwrap(), &ids[..16]);
    assert_eq!(found["finish"], "length");
    assert_eq!(found["format"], "f16");
    assert_eq!(found["prompt_tokens"], case["prompt_ids"].as_array().unwrap().len());
    assert!(number(&found, "prefill_tokens_per_second") > 0.0 && number(&found, "decode_tokens_per_second") > 0.0);

    let streamed = quiet(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(streamed, format!("{}\n", found["text"].as_str().unwrap()));
    let noisy = output(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(text(&noisy.stdout), streamed);
    assert!(text(&noisy.stderr).contains("prefill 3 tokens") && text(&noisy.stderr).contains("tok/s"));

    let here = TempDir::new().unwrap();
    let file = here.path().join("prompt.txt");
    fs::write(&file, prompt).unwrap();
    assert_eq!(quiet(&["run", &model(), "-f", file.to_str().unwrap(), "-n", "16"]), streamed);
    let stopped = json(&["run", &model(), "-p", prompt, "-n", "16", "--stop", "return"]);
    assert_eq!(
        (stopped["finish"].as_str(), stopped["text"].as_str()),
        (Some("stop text"), streamed.split("return").next())
    );

    let sampled =
        |seed: &str| quiet(&["run", &model(), "-p", prompt, "-n", "16", "--temperature", "1", "--seed", seed]);
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
}

#[test]
fn a_closed_pipe_is_no_failure() {
    for args in [&["completions", "bash"][..], &["run", &model(), "-p", "def ", "-n", "64", "--quiet"], &["doctor"]] {
        let mut child = halfbyte(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        assert_eq!((out.status.code(), text(&out.stderr).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn logits_are_written_as_declared_and_agree_with_the_reference() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let reference: Value =
        serde_json::from_str(&fs::read_to_string(format!("{}/reference.json", model())).unwrap()).unwrap();
    let case = &reference["greedy"][0];
    let ids: Vec<i32> = case["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect();
    let positions = ids.len();
    let write = |name: &str, dtype: &str, shape: &[usize], data: &[u8]| {
        let header = format!(
            "{{\"input_ids\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[0,{}]}}}}",
            data.len()
        );
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path(name), [&length, header.as_bytes(), data].concat()).unwrap();
    };
    let rows: Vec<u8> = [&ids[..], &ids].concat().iter().flat_map(|id| id.to_le_bytes()).collect();
    write("ids", "I32", &[2, positions], &rows);
    let arguments = ["eval", "logits", &model(), "--ids", &path("ids"), "-o", &path("logits")];
    let found = json(&arguments);
    assert_eq!((&found["rows"], &found["positions"], &found["vocab"]), (&2.into(), &positions.into(), &4096.into()));

    let bytes = fs::read(path("logits")).unwrap();
    assert_eq!(found["bytes"], bytes.len());
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let declared: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    assert_eq!(declared["logits"]["shape"], serde_json::json!([2, positions, 4096]));
    assert_eq!(declared["logits"]["dtype"], "F32");
    let values: Vec<f32> =
        bytes[8 + header..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values.len(), 2 * positions * 4096);
    for last in [&values[(positions - 1) * 4096..positions * 4096], &values[(2 * positions - 1) * 4096..]] {
        for top in case["last_logits_top5"].as_array().unwrap() {
            let (token, logit) = (top[0].as_u64().unwrap() as usize, top[1].as_f64().unwrap());
            assert!((f64::from(last[token]) - logit).abs() < 2e-3, "{token}: {} for {logit}", last[token]);
        }
    }

    assert!(fails(2, &arguments).contains("already exists"));
    quiet(&[&arguments[..], &["--overwrite"]].concat());
    write("flat", "I32", &[2 * positions], &rows);
    fails(3, &["eval", "logits", &model(), "--ids", &path("flat"), "-o", &path("other")]);
    write("floats", "F32", &[2, positions], &rows);
    fails(3, &["eval", "logits", &model(), "--ids", &path("floats"), "-o", &path("other")]);
    write("unknown", "I32", &[1, 1], &5000i32.to_le_bytes());
    fails(3, &["eval", "logits", &model(), "--ids", &path("unknown"), "-o", &path("other")]);
    assert!(!Path::new(&path("other")).exists());
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 5, "no temporary file is left");
}

#[test]
fn doctor_explain_and_completions_say_what_there_is() {
    let doctor = json(&["doctor", "--threads", "2"]);
    assert_eq!(doctor["threads"], 2);
    assert!(doctor["cpu"].is_string() && doctor["memory_bytes"].is_u64());
    for part in ["driver", "nvrtc", "cublaslt", "cache"] {
        let part = &doctor["cuda"][part];
        let missing = part["missing"].as_str().is_some_and(|why| why.contains("expected"));
        assert!(missing || part["path"].is_string(), "{part}");
    }
    let refused =
        halfbyte(&["doctor"]).env("HALFBYTE_NVRTC", "/nonexistent").env("HALFBYTE_CACHE", "/proc/none").output();
    let refused = text(&refused.unwrap().stdout);
    assert!(refused.contains("HALFBYTE_NVRTC: /nonexistent") && refused.contains("/proc/none, 0 kernels"), "{refused}");
    assert!(refused.contains("each process compiles its kernels"), "{refused}");
    let kernels = doctor["kernels"].as_array().unwrap();
    assert!(kernels.iter().any(|kernel| kernel["serves"].as_u64().unwrap() > 0));

    let plain = halfbyte(&["doctor", "--json"]).env("HALFBYTE_ISA", "plain").output().unwrap();
    let plain: Value = serde_json::from_slice(&plain.stdout).unwrap();
    assert_eq!(plain["isa_used"], "plain");
    let serving: Vec<&Value> = plain["kernels"].as_array().unwrap().iter().filter(|k| k["serves"] != 0).collect();
    assert_eq!(serving.len(), 1);
    assert_eq!((&serving[0]["name"], &serving[0]["serves"]), (&"any_scalar".into(), &serving[0]["of"]));

    for format in ["w4a8-g128", "w4a16-g32-asym", "f16"] {
        let explained = json(&["explain", format, "1", "4096", "4096", "--x", "bf16"]);
        let lines = explained["kernels"].as_array().unwrap();
        assert_eq!(lines.len(), kernels.len());
        let chosen: Vec<&Value> = lines.iter().filter(|line| line["chosen"] == true).collect();
        assert_eq!((chosen.len(), &chosen[0]["kernel"]), (1, &explained["chosen"]));
        assert!(lines.iter().all(|line| !line["reason"].as_str().unwrap().is_empty()));
        let human = quiet(&["explain", format, "1", "4096", "4096", "--x", "bf16"]);
        assert!(human.contains("chosen") && human.contains(explained["chosen"].as_str().unwrap()));
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = quiet(&["completions", shell]);
        assert!(script.contains("halfbyte") && script.contains("dequantize"), "{shell}");
    }
    assert_eq!(json(&["completions", "bash"])["script"], quiet(&["completions", "bash"]));
}

#[test]
fn bench_matmul_reports_and_checks() {
    let here = TempDir::new().unwrap();
    let case = here.path().join("small.toml");
    fs::write(
        &case,
        "origin = 'a test'\nformats = ['w4a8-g128', 'w4a16-g32-asym', 'w8a8-tensor', 'f32']\nm = [1, 3]\n\
         [[shape]]\norigin = 'one shape'\nn = 1000\nk = 1008\n",
    )
    .unwrap();
    let found = json(&["bench", "matmul", "--case", case.to_str().unwrap(), "--check", "--no-baseline"]);
    assert_eq!((&found["passed"], &found["origin"]), (&true.into(), &"a test".into()));
    for when in ["roofline_before", "roofline_after"] {
        for limit in ["read_gb_per_s", "int8_gop_per_s", "f32_gflop_per_s"] {
            assert!(number(&found[when], limit) > 0.0);
        }
    }
    let results = found["results"].as_array().unwrap();
    assert_eq!(results.len(), 8);
    for line in results {
        assert_eq!((&line["n"], &line["k"], &line["origin"]), (&1000.into(), &1008.into(), &"one shape".into()));
        for field in ["median_us", "least_us", "gflop_per_s", "weights_gb_per_s", "roofline_percent", "runs"] {
            assert!(number(line, field) > 0.0, "{field}");
        }
        assert!(number(line, "runs") >= 10.0 && number(line, "weight_bytes") * number(line, "copies") >= 1.6e8);
        assert!(line["baseline_us"].is_null() && !line["limit"].as_str().unwrap().is_empty());
        assert_eq!(
            (&line["check"]["passed"], &line["check"]["elements"]),
            (&true.into(), &(64 * line["m"].as_u64().unwrap()).into())
        );
        assert!(number(&line["check"], "worst") <= 1.0);
    }
    let table =
        quiet(&["bench", "matmul", "--format", "w4a8-g128", "-m", "2", "-n", "512", "-k", "512", "--x", "bf16"]);
    assert!(table.contains("roofline") && table.contains("GB/s") && table.contains("machine before"), "{table}");
    let shipped = repository().join("bench/cases");
    for entry in fs::read_dir(shipped).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let case: toml::Value = toml::from_str(&text).unwrap();
        assert!(case["shape"].as_array().is_some_and(|shapes| !shapes.is_empty()));
    }
}

#[test]
fn bench_conv_reports_checks_and_says_what_it_leaves_out() {
    let here = TempDir::new().unwrap();
    let case = here.path().join("small.toml");
    fs::write(
        &case,
        "origin = 'a test'\nformats = ['w8a8', 'w4a16-g16-asym', 'f32', 'int8']\nbatch = [1, 2]\n\
         [[shape]]\norigin = 'strided'\nci = 16\nco = 24\nsize = [9, 10]\nkernel = [3, 3]\nstride = [2, 1]\npadding = [1, 1, 1, 1]\n\
         [[shape]]\norigin = 'grouped'\nci = 8\nco = 8\nsize = [9, 10]\nkernel = [3, 6]\ngroups = 8\n",
    )
    .unwrap();
    let case = case.to_str().unwrap();
    for (layout, bytes) in [("nchw", "i8"), ("nhwc", "u8")] {
        let options = ["--check", "--no-baseline", "--layout", layout, "--bytes", bytes];
        let found = json(&[&["bench", "conv", "--case", case][..], &options].concat());
        assert_eq!((&found["passed"], &found["origin"]), (&true.into(), &"a test".into()));
        let (results, left_out) = (found["results"].as_array().unwrap(), found["left_out"].as_array().unwrap());
        assert_eq!((results.len(), left_out.len()), (4 * 2 + 3 * 2, 2));
        assert!(left_out.iter().all(|left| left["format"] == "w4a16-g16-asym" && left["cause"].is_string()));
        for line in results {
            for field in ["median_us", "least_us", "gflop_per_s", "peak_percent", "runs", "weight_bytes", "copies"] {
                assert!(number(line, field) > 0.0, "{field}");
            }
            assert!(line["baseline_us"].is_null() && line["layout"] == layout);
            let pixels = line["batch"].as_u64().unwrap() * if line["groups"] == 1 { 4 * 5 * 10 } else { 8 * 7 * 5 };
            assert_eq!((&line["check"]["passed"], &line["check"]["elements"]), (&true.into(), &pixels.into()));
            let int8 = line["format"] == "int8";
            assert!(number(&line["check"], "worst") <= if int8 { 0.0 } else { 1.0 });
            assert_eq!(line["x"], if int8 { bytes } else { "f32" });
            let depthwise = line["kernel"] == if int8 { "int8_depthwise" } else { "depthwise" };
            assert_eq!(depthwise, line["groups"] == 8);
        }
    }
    let one = ["bench", "conv", "--ci", "8", "--co", "8", "--size", "6x5", "--format", "w8a16", "--x", "bf16"];
    let table = quiet(&one);
    assert!(table.contains("8→8 3×3 6×5") && table.contains("of peak") && table.contains("machine before"), "{table}");
}

#[test]
fn the_demo_fits_a_screen_and_shows_what_quantising_costs() {
    let screen = quiet(&["demo", "--max-windows", "2"]);
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines.len() <= 24 && lines.iter().all(|line| line.chars().count() <= 100), "{screen}");
    for wanted in ["f16", "w4a8-g128", "weights in memory", "perplexity", "prefill", "decode", "def read_lines"] {
        assert!(screen.contains(wanted), "{wanted}: {screen}");
    }
    let demo = json(&["demo", "--max-windows", "2"]);
    let (before, after) = (&demo["before"], &demo["after"]);
    assert_eq!((&demo["windows"], &demo["windows_in_all"]), (&2.into(), &257.into()));
    assert!(number(after, "weight_bytes") < 0.4 * number(before, "weight_bytes"));
    let cost = number(after, "perplexity") / number(before, "perplexity");
    assert!(cost > 1.0 && cost < 1.15, "{cost}");
    for side in [before, after] {
        assert!(number(side, "prefill_tokens_per_second") > 0.0 && number(side, "decode_tokens_per_second") > 0.0);
        assert!(!side["sample"].as_str().unwrap().trim().is_empty());
    }
}

#[test]
fn bench_model_times_folders_and_random_weights() {
    let config = format!("{}/config.json", model());
    for from in [&["--random-weights", &config][..], &[&model()]] {
        let arguments =
            ["bench", "model", "--prompt", "8", "--generate", "2", "--repetitions", "1", "--quantize", "w4a8-g128"];
        let found = json(&[&arguments[..], from].concat());
        assert_eq!((&found["format"], &found["parameters"]), (&"w4a8-g128".into(), &11_015_040.into()));
        assert_eq!((&found["prompt_tokens"], &found["generated_tokens"]), (&8.into(), &2.into()));
        assert_eq!(found["random_weights"], from.len() == 2);
        for field in ["prefill_tokens_per_second", "decode_tokens_per_second", "weight_bytes", "kv_bytes_per_token"] {
            assert!(number(&found, field) > 0.0, "{field}");
        }
        if cfg!(target_os = "linux") {
            let (peak, weights) = (number(&found, "peak_resident_bytes"), number(&found, "weight_bytes"));
            let allowed = 1.3 * weights + 10.0 * number(&found, "kv_bytes_per_token") + 64e6;
            assert!(peak > weights && peak <= allowed, "{peak} of {allowed} bytes");
        }
    }
}

#[test]
fn bench_load_times_dense_and_random_quantized_checkpoints() {
    let config = format!("{}/config.json", model());
    let model = model();
    let cases = [
        (&[model.as_str()][..], "f16"),
        (&["--random", config.as_str(), "--to", "gptq"], "w4a16-g128"),
        (&["--random", config.as_str(), "--to", "awq", "--group", "64"], "w4a16-g64-asym"),
        (&["--random", config.as_str(), "--to", "compressed-tensors", "--bits", "8", "--group", "-1"], "w8a16"),
    ];
    for (from, format) in cases {
        let found = json(&[&["bench", "load", "--repetitions", "2"][..], from].concat());
        let formats = found["formats"].as_array().unwrap();
        assert_eq!((formats.len(), &formats[0]["format"]), (1, &format.into()));
        assert!(formats[0]["layers"].as_u64().unwrap() > 0);
        for field in ["file_bytes", "best_bytes_per_second", "median_bytes_per_second", "best_share"] {
            assert!(number(&found, field) > 0.0 && number(&formats[0], field) > 0.0, "{field}");
        }
        assert!(number(&found, "best_bytes_per_second") >= number(&found, "median_bytes_per_second"));
        assert!(number(&found, "read_bytes_per_second") > 0.0);
        assert_eq!(found["random"], from.len() > 1);
    }
}
