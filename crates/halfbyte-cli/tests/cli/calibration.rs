//! `halfbyte quantize` with calibration text, as a shell sees it.

use crate::support::{self, fails, first_layers, halfbyte, json, number, quiet, text, validation};
use halfbyte_checkpoint::Checkpoint;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Arguments that calibrate with little text.
fn by_gptq(model: &str, target: &str) -> Vec<String> {
    let text = format!("{}/calibration.jsonl", support::model());
    ["quantize", model, "-o", target, "--method", "gptq", "--calibration", &text, "--samples", "3", "--window", "64"]
        .map(str::to_owned)
        .to_vec()
}

/// The files of a folder and what is in them.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().into(), fs::read(&path).unwrap())).collect()
}

/// The names in a folder.
fn files_of(folder: &Path) -> Vec<PathBuf> {
    let mut names: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into()).collect();
    names.sort();
    names
}

#[test]
fn quantize_by_gptq_reports_each_layer_and_the_loss_is_less() {
    let (here, whole) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = |name: &str| here.path().join(name).display().to_string();
    let model = first_layers(whole.path(), 2);
    let all = |target: &str, more: &[&str]| -> Vec<String> {
        by_gptq(&model, &path(target)).into_iter().chain(more.iter().map(|&arg| arg.to_owned())).collect()
    };
    let quantize = |target: &str, more: &[&str]| {
        let arguments = all(target, more);
        json(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let planned = quantize("plain", &["--asym", "--dry-run"]);
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0, "nothing was written");
    assert!(number(&planned, "seconds") > 0.0 && number(&planned, "work_bytes") > 1.8e6);
    assert!(planned["work"].as_str().unwrap().ends_with(".plain.partial"));

    let done = quantize("plain", &["--asym", "--report", &path("report.json")]);
    assert_eq!((&done["method"], &done["windows"], &done["window"]), (&"gptq".into(), &3.into(), &64.into()));
    assert_eq!((&done["modules"], &done["format"]), (&14.into(), &"w4a16-g128-asym".into()));
    let peak = number(&planned, "peak_memory_bytes");
    assert!(!cfg!(target_os = "linux") || number(&done, "peak_resident_bytes") < peak + 24e6, "{peak}: {done}");
    let report: Value = serde_json::from_slice(&fs::read(path("report.json")).unwrap()).unwrap();
    assert_eq!(report["layers"], done["layers"]);
    assert_eq!((report["layers"].as_array().unwrap().len(), &report["report_act"]), (14, &"a8".into()));
    for layer in report["layers"].as_array().unwrap() {
        let activations = &layer["activations"];
        let [error, whole] = ["error", "whole_error"].map(|field| number(activations, field));
        assert!((0.002..0.02).contains(&error) && whole > error, "{layer}");
        assert_eq!(activations["stays_a16"], false, "{layer}");
    }
    assert_eq!(files_of(here.path()), ["plain", "report.json"].map(PathBuf::from), "the folder of work is gone");
    let config = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(here.path().join(name).join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(config("plain")["quantization_config"]["desc_act"], false);

    let rounded: Vec<String> = all("rounded", &["--asym"]).into_iter().map(|arg| arg.replace("gptq", "rtn")).collect();
    let rounded = json(&rounded.iter().map(String::as_str).collect::<Vec<_>>());
    let ordered = quantize("ordered", &["--asym", "--act-order"]);
    assert_eq!(config("ordered")["quantization_config"]["desc_act"], true);
    let errors = |done: &Value| {
        let layers = done["layers"].as_array().unwrap().iter();
        layers.map(|layer| number(layer, "output_error")).sum::<f64>()
    };
    let refined = quantize("refined", &["--asym", "--search", "--sweeps", "2", "--correct"]);
    assert!(errors(&refined) < errors(&rounded));
    for better in [&done, &ordered] {
        assert!(errors(better) < 0.9 * errors(&rounded), "{} {}", errors(better), errors(&rounded));
    }
    let plain_rtn = ["quantize", &model, "-o", &path("rtn"), "--asym"];
    quiet(&plain_rtn);
    assert!(files(&here.path().join("rtn")) == files(&here.path().join("rounded")), "rtn looks at no inputs");

    let arguments: Vec<String> = all("table", &["--no-true-sequential", "--report-act", "a8-xasym"])
        .into_iter()
        .map(|arg| arg.replace("gptq", "awq"))
        .collect();
    let table = quiet(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    for part in ["a16 error", "a8-xasym adds", "with scale and offset", "0 of 14 layers", "1.mlp.down_proj", "AWQ"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    // Factors of channels were folded into the norms.
    let norm = |folder: &Path| -> Vec<u8> {
        let weights = Checkpoint::open(folder).unwrap();
        weights.bytes("model.layers.0.input_layernorm.weight").unwrap().to_vec()
    };
    assert!(norm(&here.path().join("table")) != norm(Path::new(&model)));
    assert!(norm(&here.path().join("plain")) == norm(Path::new(&model)));
    let scored =
        json(&["eval", "ppl", &path("ordered"), "--text", &validation(), "--max-windows", "2", "--device", "cpu"]);
    assert!((5.0..2000.0).contains(&number(&scored, "perplexity")), "{scored}");
}

#[test]
fn calibration_refuses_what_cannot_be_meant() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let (m, out) = (support::model(), path("out"));
    let text = format!("{m}/calibration.jsonl");
    let refused = |status: i32, more: &[&str]| fails(status, &[&["quantize", &m, "-o", &out], more].concat());
    assert!(refused(2, &["--method", "gptq"]).contains("--calibration"));
    assert!(refused(2, &["--act-order"]).contains("--act-order changes nothing"));
    assert!(refused(2, &["--method", "awq"]).contains("--calibration"));
    let idle = refused(2, &["--method", "awq", "--search", "--calibration", &text]);
    assert!(idle.contains("--search changes nothing"), "{idle}");
    assert!(refused(2, &["--damping", "0.1", "--calibration", &text]).contains("--damping changes nothing"));
    for needs_text in [
        &["--report", "x"][..],
        &["--report-act", "a8"],
        &["--restart"],
        &["--samples", "1"],
        &["--no-true-sequential"],
    ] {
        assert!(refused(2, needs_text).contains("--calibration"), "{needs_text:?}");
    }
    let gptq = ["--method", "gptq", "--calibration", &text];
    refused(2, &[&gptq[..], &["--damping", "-1"]].concat());
    refused(2, &[&gptq[..], &["--window", "0"]].concat());
    refused(2, &[&gptq[..], &["--window", "100000"]].concat());
    assert!(refused(2, &[&gptq[..], &["--window", "2000"]].concat()).contains("context"));
    fs::write(path("short"), "{\"text\": \"too short\"}\n").unwrap();
    refused(3, &["--method", "gptq", "--calibration", &path("short")]);
    refused(3, &["--method", "gptq", "--calibration", &path("none")]);
    // A report in the output, or in no folder, is told of at once: nothing is begun.
    let reported =
        |status: i32, place: &str| refused(status, &[&gptq[..], &["--overwrite", "--report", &path(place)]].concat());
    for place in ["out", "out/report.json"] {
        assert!(reported(2, place).contains("lies in it"), "{place}");
    }
    assert!(reported(4, "missing/report.json").contains("there is no folder"));
    fs::create_dir(&out).unwrap();
    fs::write(path("out/config.json"), "{}").unwrap();
    assert!(reported(2, "out/report.json").contains("lies in it"));
    assert!(refused(2, &gptq).contains("already exists"));
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 2);
}

#[cfg(unix)]
#[test]
fn a_killed_quantize_goes_on_to_the_same_bits() {
    let (here, whole) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let model = first_layers(whole.path(), 3);
    let path = |name: &str| here.path().join(name).display().to_string();
    let quantize = |target: &str| {
        let arguments = by_gptq(&model, &path(target));
        halfbyte(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    };
    assert!(quantize("whole").output().unwrap().status.success());
    for (blocks, signal) in [(1, "-INT"), (2, "-KILL")] {
        let mut child = quantize("killed").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let block = here.path().join(format!(".killed.partial/block-{:05}", blocks - 1));
        let begun = Instant::now();
        while !block.is_dir() {
            assert!(begun.elapsed() < Duration::from_secs(100) && child.try_wait().unwrap().is_none());
            std::thread::sleep(Duration::from_millis(5));
        }
        let kill = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
        assert!(kill.success());
        let out = child.wait_with_output().unwrap();
        if signal == "-INT" {
            let error = text(&out.stderr);
            assert_eq!(out.status.code(), Some(130), "{error}");
            assert!(error.contains(".killed.partial") && error.contains("to go on"), "{error}");
        } else {
            assert_eq!(out.status.code(), None);
        }
        assert!(!Path::new(&path("killed")).exists());
    }
    // With other options it is somebody else's work.
    let other: Vec<String> = by_gptq(&model, &path("killed")).into_iter().chain(["--asym".to_owned()]).collect();
    let error = fails(2, &other.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(error.contains("format") && error.contains("--restart"), "{error}");
    assert!(quantize("killed").output().unwrap().status.success());
    assert_eq!(files_of(here.path()), ["killed", "whole"].map(PathBuf::from));
    assert!(files(&here.path().join("killed")) == files(&here.path().join("whole")));
}
