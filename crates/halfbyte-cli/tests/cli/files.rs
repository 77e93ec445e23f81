//! What reads and writes checkpoints: quantize, convert, dequantize, verify.

use crate::support::{copy_of_model, fails, halfbyte, json, model, number, quiet, text, validation};
use halfbyte_checkpoint::safetensors::{DType, TensorSpec, create};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

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
    let text = format!("{m}/calibration.jsonl");
    for more in [&[][..], &["--dry-run"], &["--calibration", &text], &["--calibration", &text, "--dry-run"]] {
        let error = fails(2, &[&["quantize", &m, "-o", name], more].concat());
        assert!(error.contains("or add --overwrite"), "{error}");
        let error = fails(2, &[&["quantize", &m, "-o", &m, "--overwrite"], more].concat());
        assert!(error.contains("other than the source"), "{error}");
    }
    assert_eq!(fs::read(target.join("config.json")).unwrap(), before);
    // A place that cannot be is the output's fault, and no bad input.
    fails(4, &["quantize", &m, "-o", &format!("{name}/config.json/out")]);
    quiet(&["quantize", &m, "-o", name, "--overwrite"]);
    assert_ne!(fs::read(target.join("config.json")).unwrap(), before);
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1);
}

#[test]
fn a_dry_run_takes_layers_of_few_outputs() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    for [n, k] in [[16, 64], [48, 40]] {
        let (model, out) = (path(&format!("model-{n}")), path(&format!("out-{n}")));
        fs::create_dir(&model).unwrap();
        fs::write(format!("{model}/config.json"), r#"{"model_type": "llama"}"#).unwrap();
        let name = "model.layers.0.mlp.up_proj.weight".to_owned();
        let spec = TensorSpec { name: name.clone(), dtype: DType::F32, shape: vec![n, k] };
        let mut writer = create(Path::new(&model), &[spec], u64::MAX).unwrap();
        let weights = (0..n * k).flat_map(|i| (i as f32 * 0.01).to_le_bytes()).collect::<Vec<_>>();
        writer.write(&name, &weights).unwrap();
        writer.finish().unwrap();
        let arguments = ["quantize", &model, "-o", &out, "--to", "native", "--group", "8"];
        let planned = json(&[&arguments[..], &["--dry-run"]].concat());
        assert!(number(&planned, "seconds") > 0.0 && !Path::new(&out).exists(), "{planned}");
        assert_eq!(json(&arguments)["bytes_after"], planned["bytes_after"]);
    }
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
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1, "what the killed one has left is removed");
}

#[test]
fn a_group_size_that_shapes_leave_open_is_asked_for() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    // 192 inputs in two groups: twice 96, or 128 and 64.
    let tensors: [(&str, DType, [usize; 2], Vec<u8>); 3] = [
        ("m.0.qweight", DType::I32, [24, 32], vec![0x53; 24 * 32 * 4]),
        ("m.0.qzeros", DType::I32, [2, 4], vec![0x77; 2 * 4 * 4]),
        ("m.0.scales", DType::F16, [2, 32], [0x00, 0x3c].repeat(64)),
    ];
    let folder = here.path().join("model");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("config.json"), "{}").unwrap();
    let specs = tensors.each_ref().map(|(name, dtype, shape, _)| TensorSpec {
        name: (*name).to_owned(),
        dtype: *dtype,
        shape: shape.to_vec(),
    });
    let mut writer = create(&folder, &specs, u64::MAX).unwrap();
    tensors.iter().for_each(|(name, .., data)| writer.write(name, data).unwrap());
    writer.finish().unwrap();
    let model = folder.display().to_string();

    let format = |args: &[&str]| json(&[&["inspect", &model], args].concat())["modules"][0]["format"].clone();
    assert_eq!(format(&[]), "unreadable");
    assert_eq!(format(&["--group", "96"]), "w4a16-g96");
    assert_eq!(format(&["--group", "128"]), "w4a16-g128");
    let (dense, native) = (path("dense"), path("native"));
    assert!(fails(3, &["dequantize", &model, "-o", &dense]).contains("groups of 96 and of 128"));
    quiet(&["dequantize", &model, "-o", &dense, "--group", "128"]);
    assert!(fails(3, &["convert", &model, "-o", &native, "--to", "native"]).contains("--group"));
    quiet(&["convert", &model, "-o", &native, "--to", "native", "--group", "128"]);
    assert_eq!(json(&["verify", &dense, &native])["equal"], true);
}

/// It says something of codes in a layout that no config names, of one of two models at least.
#[test]
fn an_architecture_is_refused_where_it_changes_nothing() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, gptq, lies, text) = (model(), path("gptq"), path("lies"), validation());
    quiet(&["quantize", &m, "-o", &gptq, "--group", "64"]);
    quiet(&["convert", &gptq, "-o", &lies, "--to", "fpa_intb"]);
    let file = here.path().join("lies/config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    config["quantization_config"].as_object_mut().unwrap().remove("arch").unwrap();
    fs::write(&file, config.to_string()).unwrap();
    assert!(fails(3, &["verify", &gptq, &lies]).contains("--arch"));
    let arch = ["--arch", "80"];
    assert_eq!(json(&[&["verify", &gptq, &lies][..], &arch].concat())["equal"], true);
    let kl = ["eval", "kl", &gptq, &lies, "--text", &text, "--max-windows", "1", "--window", "32"];
    let found = json(&[&kl[..], &arch].concat());
    assert_eq!((&found["kl_max"], &found["reference_format"]), (&0.0.into(), &"w4a16-g64".into()), "{found}");
    for args in [
        &["inspect", &gptq][..],
        &["convert", &gptq, "-o", &path("out"), "--to", "native"],
        &["dequantize", &gptq, "-o", &path("out")],
        &["verify", &gptq, &m],
        &["run", &m, "-p", "a"],
        &["eval", "kl", &gptq, &m, "--text", &text],
        &["serve", &gptq, &m],
        &["bench", "model", "--random-weights", &path("lies/config.json")],
    ] {
        let error = fails(2, &[args, &arch].concat());
        assert!(error.contains("--arch changes nothing here"), "{args:?}: {error}");
    }
    assert!(!here.path().join("out").exists());
}

/// As where a model is run: a bad value is the file's fault, and not that of the form that was asked for.
#[test]
fn bad_values_of_a_config_are_bad_input_where_gguf_is_written() {
    let here = TempDir::new().unwrap();
    let (folder, target) = (here.path().join("model"), here.path().join("model.gguf").display().to_string());
    fs::create_dir(&folder).unwrap();
    for entry in fs::read_dir(model()).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let config = fs::read_to_string(folder.join("config.json")).unwrap();
    let bad = config.replace("\"head_dim\": 64", "\"head_dim\": -64");
    assert_ne!(bad, config);
    fs::write(folder.join("config.json"), bad).unwrap();
    let folder = folder.display().to_string();
    for args in [&["quantize", &folder, "-o", &target, "--to", "gguf"][..], &["run", &folder, "-p", "a"]] {
        let error = fails(3, args);
        assert!(error.contains("head_dim") && error.contains("-64"), "{error}");
    }
    assert!(!Path::new(&target).exists());
}

#[test]
fn a_pickle_that_asks_for_a_call_is_named_and_nothing_is_run() {
    let here = TempDir::new().unwrap();
    let (file, made) = (here.path().join("model.bin"), here.path().join("made"));
    let command = format!("touch {}", made.display());
    let length = u8::try_from(command.len()).unwrap();
    let pickle = [b"\x80\x02cposix\nsystem\nU", &[length][..], command.as_bytes(), b"\x85R."].concat();
    fs::write(&file, pickle).unwrap();
    let error = fails(3, &["inspect", &file.display().to_string()]);
    assert!(error.contains("asks to call `posix.system`"), "{error}");
    assert!(!made.exists());
}
