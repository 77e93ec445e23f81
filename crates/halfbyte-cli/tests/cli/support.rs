//! The program, run with arguments, and what it is run on.

use halfbyte_checkpoint::safetensors::{TensorSpec, create};
use halfbyte_checkpoint::{Checkpoint, TensorInfo};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

pub fn model() -> String {
    repository().join("models/stdlib-11m").display().to_string()
}

pub fn validation() -> String {
    format!("{}/validation.jsonl", model())
}

pub fn halfbyte(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_halfbyte"));
    command.args(args).stdin(Stdio::null());
    // What is expected below are the CPU's numbers, also on a machine with a GPU.
    let computes = args == ["demo"] || args.len() > 1 && ["run", "eval", "demo", "bench"].contains(&args[0]);
    if computes && !args.contains(&"--device") {
        command.args(["--device", "cpu"]);
    }
    command
}

pub fn output(args: &[&str]) -> Output {
    halfbyte(args).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Runs it, expects success and silence on standard error, gives standard output.
pub fn quiet(args: &[&str]) -> String {
    let out = output(&[args, &["--quiet"]].concat());
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", text(&out.stderr));
    assert_eq!(text(&out.stderr), "", "{args:?}");
    text(&out.stdout)
}

/// The one JSON object that it prints.
pub fn json(args: &[&str]) -> Value {
    let out = quiet(&[args, &["--json"]].concat());
    let value: Value = serde_json::from_str(&out).unwrap_or_else(|e| panic!("{args:?}: {e}: {out}"));
    assert_eq!(value["schema"], 1, "{args:?}");
    value
}

/// Runs it, expects this status and the three lines of an error, gives them.
pub fn fails(status: i32, args: &[&str]) -> String {
    let out = output(args);
    let error = text(&out.stderr);
    assert_eq!(out.status.code(), Some(status), "{args:?}: {error}");
    assert_eq!(text(&out.stdout), "", "{args:?}");
    for start in ["error: ", "cause: ", "help: "] {
        assert_eq!(error.lines().filter(|line| line.starts_with(start)).count(), 1, "{args:?}: {error}");
    }
    error
}

pub fn number(value: &Value, field: &str) -> f64 {
    value[field].as_f64().unwrap_or_else(|| panic!("no number {field} in {value}"))
}

/// A folder with the model's small files, its weights linked.
pub fn copy_of_model(folder: &Path) -> PathBuf {
    let copy = folder.join("copy");
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(model()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
    }
    copy
}

/// The model's first layers as a model of their own: calibration of all takes minutes and says no more.
pub fn first_layers(folder: &Path, layers: usize) -> String {
    let cut = folder.join("cut");
    fs::create_dir(&cut).unwrap();
    let path = |name: &str| Path::new(&model()).join(name);
    fs::copy(path("tokenizer.json"), cut.join("tokenizer.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(path("config.json")).unwrap()).unwrap();
    config["num_hidden_layers"] = layers.into();
    fs::write(cut.join("config.json"), config.to_string()).unwrap();
    let whole = Checkpoint::open(model()).unwrap();
    let of_later = |name: &str| {
        let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next());
        layer.is_some_and(|layer| layer.parse::<usize>().unwrap() >= layers)
    };
    let kept = whole.tensors().filter(|info| !of_later(info.name));
    let spec =
        |info: TensorInfo<'_>| TensorSpec { name: info.name.to_owned(), dtype: info.dtype, shape: info.shape.to_vec() };
    let specs: Vec<TensorSpec> = kept.map(spec).collect();
    let mut writer = create(&cut, &specs, u64::MAX).unwrap();
    specs.iter().for_each(|spec| writer.write(&spec.name, whole.bytes(&spec.name).unwrap()).unwrap());
    writer.finish().unwrap();
    cut.display().to_string()
}
