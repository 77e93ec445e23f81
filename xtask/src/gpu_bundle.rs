//! `cargo xtask gpu-bundle`: what a machine with a GPU but without Rust needs to run the tests and the command line.

use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Profile that the programs are built in.
    #[arg(long, default_value = "release")]
    profile: String,
    /// The folder that is filled.
    #[arg(short, long, default_value = "gpu-bundle")]
    output: PathBuf,
}

/// Folders of the repository that the tests read.
const DATA: [&str; 9] = [
    "crates/halfbyte/testdata",
    "crates/halfbyte-checkpoint/testdata/awq",
    "crates/halfbyte-checkpoint/testdata/compressed_tensors",
    "crates/halfbyte-checkpoint/testdata/gguf",
    "crates/halfbyte-checkpoint/testdata/gptq",
    "crates/halfbyte-checkpoint/testdata/weight_only_linear",
    "crates/halfbyte-llm/testdata/architectures",
    "crates/halfbyte-llm/testdata/gpt-oss-mxfp4",
    "models/stdlib-11m",
];

/// Runs a program of the bundle there: the libraries of a Python environment with CUDA, or of a toolkit, are on its path.
const RUN: &str = r#"#!/usr/bin/env bash
# Runs a program of this folder with the CUDA libraries of the python3 on the path, or of a toolkit:
#     ./run.sh it cuda              the GPU tests; no GPU is a failure
#     ./run.sh checkpoint cuda      golden modules of other software, multiplied
#     ./run.sh llm                  whole models
#     ./run.sh halfbyte doctor
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
packages=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)
export LD_LIBRARY_PATH="${packages:+$packages/cu13/lib:}/usr/local/cuda/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export HALFBYTE_REQUIRE_CUDA=1 HALFBYTE_REQUIRE_NVRTC=1 HALFBYTE_ROOT="$here/root"
program=$1
shift
exec "$here/$program" "$@"
"#;

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let output = root.join(&args.output);
    let io = |path: &Path| {
        let path = path.display().to_string();
        move |e: std::io::Error| format!("{path}: {e}")
    };
    std::fs::create_dir_all(&output).map_err(io(&output))?;
    let executables = built(root, &args.profile)?;
    let programs = [
        ("it", "halfbyte", "it"),
        ("checkpoint", "halfbyte-checkpoint", "it"),
        ("llm", "halfbyte-llm", "cuda"),
        ("halfbyte", "halfbyte-cli", "halfbyte"),
    ];
    let mut bytes = 0;
    for (name, package, target) in programs {
        let of =
            |built: &&Built| built.target == target && built.manifest.ends_with(Path::new(package).join("Cargo.toml"));
        let from =
            &executables.iter().find(of).ok_or_else(|| format!("cargo has built no {target} of {package}"))?.path;
        let to = output.join(name);
        std::fs::copy(from, &to).map_err(io(from))?;
        let strip = Command::new("strip").arg(&to).status().map_err(|e| format!("strip: {e}"))?;
        if !strip.success() {
            return Err(format!("strip {}: {strip}", to.display()));
        }
        bytes += std::fs::metadata(&to).map_err(io(&to))?.len();
    }
    for folder in DATA {
        bytes += copied(&root.join(folder), &output.join("root").join(folder))?;
    }
    let script = output.join("run.sh");
    std::fs::write(&script, RUN).map_err(io(&script))?;
    executable(&script).map_err(io(&script))?;
    let names = programs.map(|(name, ..)| name).join(", ");
    println!("{}: {names}, run.sh and their data, {:.1} MB", output.display(), bytes as f64 / 1e6);
    Ok(())
}

/// Copies a folder with its folders, and gives the bytes of its files.
fn copied(from: &Path, to: &Path) -> Result<u64, String> {
    let io = |e: std::io::Error| format!("{}: {e}", from.display());
    std::fs::create_dir_all(to).map_err(io)?;
    let mut bytes = 0;
    for entry in std::fs::read_dir(from).map_err(io)? {
        let entry = entry.map_err(io)?;
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        bytes += if from.is_dir() { copied(&from, &to)? } else { std::fs::copy(&from, &to).map_err(io)? };
    }
    Ok(bytes)
}

/// A program that cargo has built.
struct Built {
    manifest: PathBuf,
    target: String,
    path: PathBuf,
}

/// Builds tests and the command line, at once: one by one their libraries would be built with other features, each anew.
fn built(root: &Path, profile: &str) -> Result<Vec<Built>, String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--locked", "--profile", profile, "--message-format=json-render-diagnostics"]);
    for package in ["halfbyte", "halfbyte-checkpoint", "halfbyte-llm", "halfbyte-cli"] {
        cargo.args(["--package", package]);
    }
    cargo.args(["--test", "it", "--test", "cuda", "--bin", "halfbyte"]);
    let output = cargo.current_dir(root).stderr(std::process::Stdio::inherit()).output();
    let output = output.map_err(|e| format!("{cargo:?}: {e}"))?;
    if !output.status.success() {
        return Err(format!("{cargo:?}: {}", output.status));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let messages = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let program = |message: serde_json::Value| {
        let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
        Some(Built {
            manifest: text(&message["manifest_path"])?.into(),
            target: text(&message["target"]["name"])?,
            path: text(&message["executable"])?.into(),
        })
    };
    Ok(messages.filter_map(program).collect())
}

#[cfg(unix)]
fn executable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn executable(_: &Path) -> std::io::Result<()> {
    Ok(())
}
