//! `cargo xtask oracles`: whether the software of each format reads the numbers that we wrote.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Check only the formats of these names, as gptq, onnx.
    formats: Vec<String>,
}

/// A model that the command line writes in target/oracles.
struct Model {
    name: &'static str,
    /// The script that reads it: `oracles/check_<format>.py`.
    format: &'static str,
    verb: Verb,
    /// Another model of the table, or the dense one.
    source: &'static str,
    options: &'static [&'static str],
}

#[derive(Clone, Copy, PartialEq)]
enum Verb {
    /// New numbers: those that `halfbyte dequantize` gives for the model itself are expected.
    Quantize,
    /// The numbers of its source.
    Convert,
}

const DENSE: &str = "stdlib-11m";

const fn quantized(name: &'static str, options: &'static [&'static str]) -> Model {
    quantized_to("gptq", name, options)
}

const fn quantized_to(format: &'static str, name: &'static str, options: &'static [&'static str]) -> Model {
    Model { name, format, verb: Verb::Quantize, source: DENSE, options }
}

const fn converted(
    name: &'static str,
    format: &'static str,
    source: &'static str,
    options: &'static [&'static str],
) -> Model {
    Model { name, format, verb: Verb::Convert, source, options }
}

/// Groups of columns in another order than they lie in; little calibration is enough for that.
const ACT_ORDER: &[&str] = &[
    "--method",
    "gptq",
    "--act-order",
    "--calibration",
    "models/stdlib-11m/calibration.jsonl",
    "--samples",
    "2",
    "--window",
    "64",
];

const MODELS: &[Model] = &[
    quantized("gptq-w2-g32", &["--bits", "2", "--group", "32"]),
    quantized("gptq-w2-g32-asym", &["--bits", "2", "--group", "32", "--asym"]),
    quantized("gptq-w3-g32", &["--bits", "3", "--group", "32"]),
    quantized("gptq-w3-g128-asym", &["--bits", "3", "--group", "128", "--asym"]),
    quantized("gptq-w4-g32", &["--bits", "4", "--group", "32"]),
    quantized("gptq-w4-g128", &["--bits", "4", "--group", "128"]),
    quantized("gptq-w4-g32-asym", &["--bits", "4", "--group", "32", "--asym"]),
    quantized("gptq-w4-asym", &["--bits", "4", "--group", "-1", "--asym"]),
    quantized("gptq-w8-g32", &["--bits", "8", "--group", "32"]),
    quantized("gptq-w8-asym", &["--bits", "8", "--group", "-1", "--asym"]),
    quantized("gptq-w4-g128-act-order", ACT_ORDER),
    quantized("gptq-w4-g128-head8", &["--head", "8"]),
    quantized("gptq-w4-g32-asym-head4", &["--group", "32", "--asym", "--head", "4"]),
    converted("gptq_v1-w3-g128-asym", "gptq", "gptq-w3-g128-asym", &["--to", "gptq_v1"]),
    converted("gptq_v1-w4-g32-asym", "gptq", "gptq-w4-g32-asym", &["--to", "gptq_v1"]),
    converted("gptq_v1-w8-asym", "gptq", "gptq-w8-asym", &["--to", "gptq_v1"]),
    converted("gptq_v2-w3-g32", "gptq", "gptq-w3-g32", &["--to", "gptq_v2"]),
    converted("gptq_v2-w4-g128", "gptq", "gptq-w4-g128", &["--to", "gptq_v2"]),
    converted("awq-w4-g128", "awq", "gptq-w4-g128", &["--to", "awq"]),
    converted("awq-w4-g32-asym", "awq", "gptq-w4-g32-asym", &["--to", "awq"]),
    converted("awq-w4-asym", "awq", "gptq-w4-asym", &["--to", "awq"]),
    converted("awq-w4-g32-asym-head4", "awq", "gptq-w4-g32-asym-head4", &["--to", "awq"]),
    converted("ct-w2-g32", "compressed_tensors", "gptq-w2-g32", &["--to", "compressed-tensors"]),
    converted("ct-w3-g128-asym", "compressed_tensors", "gptq-w3-g128-asym", &["--to", "compressed-tensors"]),
    converted("ct-w4-g128", "compressed_tensors", "gptq-w4-g128", &["--to", "compressed-tensors"]),
    converted("ct-w4-g32-asym", "compressed_tensors", "gptq-w4-g32-asym", &["--to", "compressed-tensors"]),
    converted("ct-w4-asym", "compressed_tensors", "gptq-w4-asym", &["--to", "compressed-tensors"]),
    converted("ct-w8-g32", "compressed_tensors", "gptq-w8-g32", &["--to", "compressed-tensors"]),
    converted("ct-w8-asym", "compressed_tensors", "gptq-w8-asym", &["--to", "compressed-tensors"]),
    converted("ct-w4-g128-head8", "compressed_tensors", "gptq-w4-g128-head8", &["--to", "compressed-tensors"]),
    converted("ct-w4-g32-asym-head4", "compressed_tensors", "gptq-w4-g32-asym-head4", &["--to", "compressed-tensors"]),
    converted("onnx-w2-g32", "onnx", "gptq-w2-g32", &["--to", "onnx"]),
    converted("onnx-w4-g128", "onnx", "gptq-w4-g128", &["--to", "onnx"]),
    converted("onnx-w4-g32-asym", "onnx", "gptq-w4-g32-asym", &["--to", "onnx"]),
    converted("onnx-w8-g32", "onnx", "gptq-w8-g32", &["--to", "onnx"]),
    converted("gguf-q4_0", "gguf", "gptq-w4-g32", &["--to", "gguf"]),
    converted("gguf-q4_0-g128", "gguf", "gptq-w4-g128", &["--to", "gguf"]),
    quantized_to("gguf", "gguf-q4_1", &["--to", "gguf", "--bits", "4", "--asym"]),
    quantized_to("gguf", "gguf-q4_0-head8", &["--to", "gguf", "--head", "8"]),
    converted("gguf-q8_0", "gguf", "gptq-w8-g32", &["--to", "gguf"]),
    converted("gguf-f16", "gguf", DENSE, &["--to", "gguf"]),
];

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let formats: BTreeSet<&str> = MODELS.iter().map(|model| model.format).collect();
    if let Some(unknown) = args.formats.iter().find(|format| !formats.contains(format.as_str())) {
        return Err(format!("no format {unknown}: there are {}", Vec::from_iter(formats).join(", ")));
    }
    let python = environment(root)?;
    let folder = root.join("target/oracles");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let wanted = |format: &str| args.formats.is_empty() || args.formats.iter().any(|f| f == format);
    for format in formats.into_iter().filter(|format| wanted(format)) {
        let mut check = Command::new(&python);
        check.arg(root.join("oracles").join(format!("check_{format}.py")));
        for model in MODELS.iter().filter(|model| model.format == format) {
            let reference = match model.verb {
                Verb::Quantize => model.name,
                Verb::Convert => model.source,
            };
            check.arg(written(root, &folder, model.name)?).arg(expected(root, &folder, reference)?);
        }
        // Without the variable the interpreter keeps what it compiles: the second run starts in half the time.
        print!("{}", output_of(check.env_remove("PYTHONDONTWRITEBYTECODE"))?);
    }
    Ok(())
}

/// Where a model is, written now if it is not there yet.
fn written(root: &Path, folder: &Path, name: &str) -> Result<PathBuf, String> {
    if name == DENSE {
        return Ok(root.join("models").join(DENSE));
    }
    let path = folder.join(name);
    if !path.exists() {
        let model = MODELS.iter().find(|model| model.name == name).ok_or_else(|| format!("no model {name}"))?;
        let verb = match model.verb {
            Verb::Quantize => "quantize",
            Verb::Convert => "convert",
        };
        halfbyte(root, verb, &written(root, folder, model.source)?, &path, model.options)?;
    }
    Ok(path)
}

/// The dense model in f32 that a model stands for.
fn expected(root: &Path, folder: &Path, name: &str) -> Result<PathBuf, String> {
    let path = folder.join(format!("{name}.dense"));
    if !path.exists() {
        halfbyte(root, "dequantize", &written(root, folder, name)?, &path, &["--dtype", "f32"])?;
    }
    Ok(path)
}

/// Runs the command line of this repository, in the profile that the tests have built it in.
fn halfbyte(root: &Path, verb: &str, model: &Path, output: &Path, options: &[&str]) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["run", "--quiet", "--locked", "--package", "halfbyte-cli", "--", verb]).arg(model);
    command.arg("--output").arg(output).args(options).args(["--quiet", "--json"]);
    output_of(command.current_dir(root)).map(drop)
}

/// The interpreter of the virtual environment, made anew where what it should hold has changed.
fn environment(root: &Path) -> Result<PathBuf, String> {
    let requirements = ["requirements-build.txt", "requirements.txt"].map(|name| root.join("oracles").join(name));
    let mut wanted = String::new();
    for file in &requirements {
        wanted += &std::fs::read_to_string(file).map_err(|e| format!("{}: {e}", file.display()))?;
    }
    let folder = root.join("target/oracles-venv");
    let (python, installed) = (folder.join("bin/python"), folder.join("installed.txt"));
    if std::fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(python);
    }
    eprintln!("installing {} from PyPI, 4.3 GB unpacked", requirements[1].display());
    output_of(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    for file in &requirements {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-compile"]);
        // AutoGPTQ as sources, without its kernels: its wheels end with Python 3.11.
        pip.args(["--use-pep517", "--no-build-isolation", "--no-binary", "auto-gptq", "--requirement"]).arg(file);
        output_of(pip.env("BUILD_CUDA_EXT", "0"))?;
    }
    // Last, so that what was interrupted begins again.
    std::fs::write(&installed, wanted).map_err(|e| format!("{}: {e}", installed.display()))?;
    Ok(python)
}

/// Runs a command; what it says on standard error is shown only if it fails.
fn output_of(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?}: {}\n{said}{why}", output.status));
    }
    Ok(said)
}
