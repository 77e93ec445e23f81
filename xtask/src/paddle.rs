//! `cargo xtask paddle`: `halfbyte.paddle` beside paddlepaddle's CPU wheel, and Paddle's own unit tests with our functions in the place of
//! its kernels.

use crate::python::succeed;
use crate::wheel;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What it is installed with: 0.9 GB, 40 s on two cores.
const PACKAGES: [&str; 4] = ["paddlepaddle==3.3.1", "numpy==2.4.6", "pytest==9.2.0", "safetensors==0.8.0"];

#[derive(clap::Args)]
pub struct Args {
    /// Folder with copies of Paddle's tests (`test/quantization/test_weight_only_linear.py` and others), to be run too.
    tests: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let package = root.join("crates/halfbyte-python");
    let mut build = Command::new(env!("CARGO"));
    succeed(build.args(["build", "--quiet", "--locked", "--package", "halfbyte-cli"]).current_dir(root))?;
    let python = environment(root)?;
    wheel::install(root, &python)?;
    let run = |arguments: &[&Path]| {
        let mut command = Command::new(&python);
        succeed(command.env("HALFBYTE_REQUIRE_PADDLE", "1").current_dir(&package).args(arguments))
    };
    let [with, without] = ["test_with_paddle.py", "test_paddle.py"].map(|name| package.join("tests").join(name));
    run(&["-m", "pytest", "-q", "-p", "no:cacheprovider"]
        .map(Path::new)
        .into_iter()
        .chain([&*with, &*without])
        .collect::<Vec<_>>())?;
    match &args.tests {
        None => Ok(()),
        Some(tests) => {
            let tests = tests.canonicalize().map_err(|e| format!("{}: {e}", tests.display()))?;
            run(&[&package.join("tests/paddle_unit_tests.py"), &tests])
        }
    }
}

/// The interpreter of a virtual environment of its own.
fn environment(root: &Path) -> Result<PathBuf, String> {
    let folder = root.join("target/paddle-venv");
    let (python, installed, wanted) = (folder.join("bin/python"), folder.join("installed.txt"), PACKAGES.join("\n"));
    if std::fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(python);
    }
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    succeed(pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(PACKAGES))?;
    std::fs::write(&installed, wanted).map_err(|e| format!("{}: {e}", installed.display()))?;
    Ok(python)
}
