//! `cargo xtask python`: the Python package, installed in the profile of the tests, its tests, and the check of its types.

use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Run these tests only, as pytest names them, and no check of types.
    tests: Vec<String>,
}

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let package = root.join("crates/halfbyte-python");
    let python = environment(root, &package)?;
    // As `pip install .` does, in the profile that the tests of the workspace have built.
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--force-reinstall", "."]);
    succeed(pip.arg("--config-settings=build-args=--profile=dev --locked").current_dir(root))?;
    let mut tests = Command::new(&python);
    tests.args(["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]).args(&args.tests);
    succeed(tests.current_dir(&package))?;
    if args.tests.is_empty() {
        let cache = root.join("target/mypy");
        succeed(Command::new(&python).args(["-m", "mypy", "--cache-dir"]).arg(cache).current_dir(&package))?;
    }
    Ok(())
}

/// The interpreter of a small virtual environment, which has torch and transformers from that of the oracles.
fn environment(root: &Path, package: &Path) -> Result<PathBuf, String> {
    let others = root.join("target/oracles-venv/lib");
    let version = std::fs::read_dir(&others).ok().and_then(|mut entries| entries.next()?.ok());
    let version = version.ok_or("there is no target/oracles-venv: run `cargo xtask oracles` first")?.file_name();
    let requirements = package.join("tests/requirements.txt");
    let wanted = std::fs::read_to_string(&requirements).map_err(|e| format!("{}: {e}", requirements.display()))?;
    let folder = root.join("target/python-venv");
    let (python, installed) = (folder.join("bin/python"), folder.join("installed.txt"));
    if std::fs::read_to_string(&installed).is_ok_and(|text| text == wanted) {
        return Ok(python);
    }
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&folder))?;
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"]);
    succeed(pip.arg(&requirements))?;
    let packages = others.join(&version).join("site-packages");
    let link = folder.join("lib").join(&version).join("site-packages/oracles.pth");
    std::fs::write(&link, format!("{}\n", packages.display())).map_err(|e| format!("{}: {e}", link.display()))?;
    std::fs::write(&installed, wanted).map_err(|e| format!("{}: {e}", installed.display()))?;
    Ok(python)
}

fn succeed(command: &mut Command) -> Result<(), String> {
    let status = command.status().map_err(|e| format!("{command:?}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}
