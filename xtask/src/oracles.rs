//! `cargo xtask oracles`: whether the software of each format reads the numbers that we wrote.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Check only the formats of these names, as gptq, onnx.
    formats: Vec<String>,
    /// The command line that writes the files; built if none is named.
    #[arg(long)]
    program: Option<PathBuf>,
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
    output_of(Command::new("bash").arg(root.join("oracles/install")))?;
    let python = root.join("target/oracles-venv/bin/python");
    let program = match &args.program {
        Some(program) => std::path::absolute(program).map_err(|e| format!("{}: {e}", program.display()))?,
        None => build(root)?,
    };
    let folder = root.join("target/oracles");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let writer = Writer { root, folder: &folder, program: &program };
    let wanted = |format: &str| args.formats.is_empty() || args.formats.iter().any(|f| f == format);
    for format in formats.into_iter().filter(|format| wanted(format)) {
        let mut check = Command::new(&python);
        check.arg(root.join("oracles").join(format!("check_{format}.py")));
        for model in MODELS.iter().filter(|model| model.format == format) {
            let reference = match model.verb {
                Verb::Quantize => model.name,
                Verb::Convert => model.source,
            };
            check.arg(writer.written(model.name)?).arg(writer.expected(reference)?);
        }
        // Without the variable the interpreter keeps what it compiles: the second run starts in half the time.
        print!("{}", output_of(check.env_remove("PYTHONDONTWRITEBYTECODE"))?);
    }
    Ok(())
}

/// Writes models, each once.
struct Writer<'a> {
    root: &'a Path,
    folder: &'a Path,
    program: &'a Path,
}

impl Writer<'_> {
    /// Where a model is, written now if it is not there yet.
    fn written(&self, name: &str) -> Result<PathBuf, String> {
        if name == DENSE {
            return Ok(self.root.join("models").join(DENSE));
        }
        let path = self.folder.join(name);
        if !path.exists() {
            let model = MODELS.iter().find(|model| model.name == name).ok_or_else(|| format!("no model {name}"))?;
            let verb = match model.verb {
                Verb::Quantize => "quantize",
                Verb::Convert => "convert",
            };
            self.halfbyte(verb, &self.written(model.source)?, &path, model.options)?;
        }
        Ok(path)
    }

    /// The dense model in f32 that a model stands for.
    fn expected(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.folder.join(format!("{name}.dense"));
        if !path.exists() {
            self.halfbyte("dequantize", &self.written(name)?, &path, &["--dtype", "f32"])?;
        }
        Ok(path)
    }

    /// Runs the command line of this repository.
    fn halfbyte(&self, verb: &str, model: &Path, output: &Path, options: &[&str]) -> Result<(), String> {
        let mut command = Command::new(self.program);
        command.arg(verb).arg(model).arg("--output").arg(output).args(options).args(["--quiet", "--json"]);
        output_of(command.current_dir(self.root)).map(drop)
    }
}

/// Builds the command line of this repository, in the profile of the tests.
pub fn build(root: &Path) -> Result<PathBuf, String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--package", "halfbyte-cli"]);
    output_of(cargo.current_dir(root))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join("debug/halfbyte"))
}

/// Runs a command; what it says on standard error is shown only if it fails.
pub fn output_of(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{command:?}: {}\n{said}{why}", output.status));
    }
    Ok(said)
}
