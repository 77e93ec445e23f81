//! `cargo xtask wheel`: the wheel of the Python package, whether it is small enough, and whether it runs where nothing else is installed.

use crate::python::succeed;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes that a wheel may take.
const MOST_BYTES: u64 = 20_000_000;

/// What has to run: a layer on the CPU, from the package as it was installed.
const PROGRAM: &str = "
import numpy, halfbyte
w = numpy.ones((64, 128), numpy.float32)
y = halfbyte.Linear(w, format='w8a16-g64')(numpy.ones((2, 128), numpy.float32))
assert y.shape == (2, 64) and abs(y - 128).max() < 0.5, y
print('halfbyte', halfbyte.__version__, 'imports and multiplies')
";

#[derive(clap::Args)]
pub struct Args {
    /// Profile to build with.
    #[arg(long, default_value = "release")]
    profile: String,
}

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let wheel = build(root, Path::new("python3"), &args.profile)?;
    let folder = root.join("target/wheel-venv");
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let python = folder.join("bin/python");
    let mut pip = Command::new(&python);
    succeed(pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).arg(&wheel))?;
    // -I: neither the working folder nor variables say where modules lie.
    succeed(Command::new(&python).args(["-I", "-c", PROGRAM]))
}

/// Builds the wheel in the profile that the tests of the workspace have built, and installs it beside what there is.
pub fn install(root: &Path, python: &Path) -> Result<(), String> {
    let wheel = build(root, python, "dev")?;
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall"]);
    succeed(pip.arg(wheel))
}

/// Builds the wheel in target/wheels/PROFILE, as `pip install .` does. Error also: it is too large.
pub fn build(root: &Path, python: &Path, profile: &str) -> Result<PathBuf, String> {
    let folder = root.join("target/wheels").join(profile);
    if folder.exists() {
        std::fs::remove_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let mut pip = Command::new(python);
    pip.args(["-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir"]).arg(&folder);
    pip.arg(format!("--config-settings=build-args=--profile={profile} --locked")).arg(".");
    succeed(pip.current_dir(root))?;
    let entries = std::fs::read_dir(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut wheels: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    let (Some(wheel), true) = (wheels.pop(), wheels.is_empty()) else {
        return Err(format!("expected one wheel in {}, got {}", folder.display(), wheels.len()));
    };
    let bytes = std::fs::metadata(&wheel).map_err(|e| format!("{}: {e}", wheel.display()))?.len();
    println!("{}: {bytes} bytes", wheel.display());
    if bytes > MOST_BYTES {
        return Err(format!("expected a wheel of at most {MOST_BYTES} bytes, got {bytes}"));
    }
    Ok(wheel)
}
