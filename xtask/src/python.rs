//! `cargo xtask python`: the Python package, built in the profile of the tests, with its tests and the check of its types.

use std::path::Path;
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Run these tests only, as pytest names them, and no check of types.
    tests: Vec<String>,
}

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let package = root.join("crates/halfbyte-python");
    built(root, &package)?;
    let python = environment(root, &package)?;
    let path = package.join("python");
    let mut tests = Command::new(&python);
    tests.args(["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]).args(&args.tests).env("PYTHONPATH", &path);
    succeed(tests.current_dir(&package))?;
    if args.tests.is_empty() {
        let cache = root.join("target/mypy");
        succeed(Command::new(&python).args(["-m", "mypy", "--cache-dir"]).arg(cache).current_dir(&package))?;
    }
    Ok(())
}

/// Builds the extension module in the dev profile, and lays it where the package looks for it.
fn built(root: &Path, package: &Path) -> Result<(), String> {
    let mut build = Command::new(env!("CARGO"));
    succeed(build.args(["build", "--quiet", "--locked", "--package", "halfbyte-python"]).current_dir(root))?;
    let (from, to) = (root.join("target/debug/lib_halfbyte.so"), package.join("python/halfbyte/_halfbyte.abi3.so"));
    // Another file, not other bytes in one that a program may have mapped.
    let fresh = to.with_extension("so.tmp");
    std::fs::copy(&from, &fresh).map_err(|e| format!("{}: {e}", from.display()))?;
    std::fs::rename(&fresh, &to).map_err(|e| format!("{}: {e}", to.display()))
}

/// The interpreter of a small virtual environment, which has torch and transformers from that of the oracles.
fn environment(root: &Path, package: &Path) -> Result<std::path::PathBuf, String> {
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
