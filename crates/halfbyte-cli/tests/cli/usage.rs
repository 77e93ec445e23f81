//! Help, wrong usage and what fails: messages and exit statuses.

use crate::support::{copy_of_model, fails, halfbyte, json, model, output, quiet, text, validation};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use tempfile::TempDir;

const VERBS: &[&[&str]] = &[
    &["demo"],
    &["inspect"],
    &["quantize"],
    &["convert"],
    &["dequantize"],
    &["verify"],
    &["run"],
    &["serve"],
    &["eval"],
    &["eval", "ppl"],
    &["eval", "kl"],
    &["eval", "logits"],
    &["bench"],
    &["bench", "conv"],
    &["bench", "launch"],
    &["bench", "load"],
    &["bench", "matmul"],
    &["bench", "model"],
    &["bench", "models"],
    &["bench", "serve"],
    &["explain"],
    &["explain", "conv"],
    &["doctor"],
    &["completions"],
];

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
    for (asked, of) in [
        (&["help", "--help"][..], &["--help"][..]),
        (&["help", "-h"], &["--help"]),
        (&["help", "run", "--help"], &["run", "--help"]),
        (&["explain", "help", "--help"], &["explain", "--help"]),
    ] {
        assert_eq!(text(&output(asked).stdout), text(&output(of).stdout), "{asked:?}");
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
    assert!(
        fails(2, &["run", &m, "-p", "a", "--symmetric-range", "full"]).contains("--symmetric-range changes nothing")
    );
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
    for bare in [&[][..], &["eval"], &["bench"]] {
        let out = output(bare);
        assert_eq!((out.status.code(), out.stdout.len()), (Some(2), 0));
        assert!(text(&out.stderr).contains("Usage:"), "{bare:?}");
    }
}

/// Numbers are told by the range that is expected, as people write it; what begins with a sign is a number there.
#[test]
fn numbers_that_are_refused_are_told_what_is_expected() {
    let run = |more: &[&str]| fails(2, &[&["run", &model(), "-p", "a"], more].concat());
    for (option, value, expected) in [
        ("--seed", "-1", "invalid value '-1' for '--seed <SEED>': expected a whole number, 0 or more"),
        ("--max-tokens", "-1", "expected a whole number, 0 or more"),
        ("--threads", "-1", "expected a whole number from 1 to 1024"),
        ("--threads", "x", "expected a whole number from 1 to 1024"),
        ("--tp", "65", "expected a whole number from 1 to 64"),
        ("--context", "0", "expected a whole number of at least 1"),
        ("--temperature", "x", "expected a number"),
    ] {
        let error = run(&[option, value]);
        assert!(error.contains(expected) && !error.contains("tip:"), "{error}");
    }
    assert!(!run(&["-1"]).contains("tip:"));
    for args in [&["bench", "matmul", "-m", "-3"][..], &["explain", "w4a16", "-1", "3", "4"]] {
        assert!(fails(2, args).contains("expected a whole number, 0 or more"), "{args:?}");
    }
}

#[test]
fn variables_that_are_refused_are_named() {
    let refused = |variable: &str, value: &str| {
        let out = halfbyte(&["serve", &model()]).env(variable, value).output().unwrap();
        assert_eq!(out.status.code(), Some(2));
        text(&out.stderr)
    };
    for (variable, value, expected) in [
        ("HALFBYTE_PORT", "x", "expected a whole number from 0 to 65535"),
        ("HALFBYTE_PARALLEL", "", "expected a whole number from 1 to 4096"),
        ("HALFBYTE_MAX_REQUESTS", "0", "expected a whole number of at least 1"),
        ("HALFBYTE_BATCH_INVARIANT", "maybe", "expected one of true, false"),
        ("HALFBYTE_HOST", "here", "expected an IP address"),
        ("HALFBYTE_MEMORY", "much", "expected bytes, as 24GB"),
        ("HALFBYTE_DRAIN_SECONDS", "-1", "expected seconds, 0 or more"),
    ] {
        let error = refused(variable, value);
        let told = format!("invalid value '{value}' for {variable} in the environment");
        assert!(error.contains(&told) && error.contains(expected), "{error}");
    }
    let error = refused("HALFBYTE_ISA", "sse9");
    assert!(error.contains("HALFBYTE_ISA in the environment is refused") && error.contains("unset it"), "{error}");
    assert!(error.contains("expected plain, avx2, avxvnni, avx512 or amx, got \"sse9\""), "{error}");
    // An option that is given hides the variable.
    let out = halfbyte(&["serve", &model(), "--port", "y"]).env("HALFBYTE_PORT", "x").output().unwrap();
    let error = text(&out.stderr);
    assert!(error.contains("invalid value 'y' for '--port <N>': expected"), "{error}");
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
    let missing =
        error.contains("driver is not found") && error.contains("libcuda.so.1") && error.contains("--device cpu");
    assert!(missing || error.contains("expected a device number"), "{error}");
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
    fails(3, &["bench", "models", "--case", &none]);

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

    // Tensors alone are no model, and no damaged one.
    let header = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  "#;
    let tensors = [&(header.len() as u64).to_le_bytes(), &header[..], &[0; 4]].concat();
    let alone = bad("alone.safetensors", &tensors);
    fs::create_dir(path("weights")).unwrap();
    let (tensors_in, bare) = (bad("weights/model.safetensors", &tensors), path("weights"));
    for args in [
        &["run", &alone, "-p", "a"][..],
        &["eval", "ppl", &bare, "--text", &validation()],
        &["run", &tensors_in, "-p", "a"],
    ] {
        let error = fails(3, args);
        assert!(
            error.contains("is not a model folder") && error.contains("help: a MODEL is a folder with config.json"),
            "{error}"
        );
    }
    assert!(fails(3, &["dequantize", &bare, "-o", &path("out")]).contains("config.json is missing"));
    assert!(json(&["inspect", &alone])["obstacle"].as_str().unwrap().starts_with("there is no "));
    let words = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    let metadata = [words("general.architecture"), 8u32.to_le_bytes().to_vec(), words("mamba")].concat();
    for (count, metadata) in [(0, &[][..]), (1, &metadata)] {
        let header = [&b"GGUF"[..], &3u32.to_le_bytes(), &[0; 8], &u64::to_le_bytes(count), metadata].concat();
        let error = fails(3, &["run", &bad("alone.gguf", &header), "-p", "a"]);
        assert!(
            error.contains("holds what this version does not read") && error.contains("general.architecture"),
            "{error}"
        );
    }

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
    for (format, layout, chosen) in [("w8a8", "nhwc", None), ("int8", "nchw", None), ("f32", "nhwc", Some("depthwise"))]
    {
        let groups = if chosen.is_some() { "64" } else { "1" };
        let sizes =
            ["--ci", "64", "--co", "64", "--kernel-size", "3x3", "--stride", "2", "--padding", "1", "--size", "28"];
        let others = ["--batch", "4", "--layout", layout, "--groups", groups];
        let explained = json(&[&["explain", "conv", format][..], &sizes, &others].concat());
        assert_eq!(explained["schema"], 1);
        assert!(explained["problem"].as_str().unwrap().contains(layout), "{explained}");
        let lines = explained["kernels"].as_array().unwrap();
        let taken: Vec<&Value> = lines.iter().filter(|line| line["chosen"] == true).collect();
        assert_eq!((taken.len(), &taken[0]["kernel"]), (1, &explained["chosen"]));
        assert!(chosen.is_none_or(|chosen| explained["chosen"] == chosen), "{explained}");
    }
    fails(2, &["explain", "conv", "w4a16-g9", "--ci", "64"]);
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = quiet(&["completions", shell]);
        assert!(script.contains("halfbyte") && script.contains("dequantize"), "{shell}");
    }
    assert_eq!(json(&["completions", "bash"])["script"], quiet(&["completions", "bash"]));
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
#[cfg(unix)]
fn words_that_are_no_text_are_wrong_usage_like_others() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"folder\xff");
    for (verb, more) in [("inspect", "--no-such-option"), ("run", "--no-such-option")] {
        let out = halfbyte(&[verb]).arg(odd).arg(more).output().unwrap();
        let error = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{error}");
        assert!(error.starts_with("error: wrong usage"), "{error}");
    }
    // Results name their places, which JSON cannot.
    let out = halfbyte(&["inspect", "--json"]).arg(odd).output().unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("an argument is not UTF-8"), "{}", text(&out.stderr));
}
