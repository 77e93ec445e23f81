//! `cargo xtask python`: the Python package, its wheel built in the profile of the tests and installed, its tests, and the check of its
//! types.
//!
//! The stubs are checked each time, by mypy and against the module that was built: 10 s of one core. What imports torch and
//! transformers is checked where no tests are named: that reads all types of theirs.

use crate::wheel;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Run these tests only, as pytest names them, and no check of types but of the stubs.
    tests: Vec<String>,
    /// Install what the tests need and run nothing.
    #[arg(long)]
    install: bool,
}

/// What imports neither torch nor transformers: the stubs, what stands on them alone, and a program that uses them.
const STUBBED: [&str; 4] = [
    "python/halfbyte/_halfbyte.pyi",
    "python/halfbyte/__init__.py",
    "python/halfbyte/paddle.py",
    "tests/typing_example.py",
];

pub fn run(args: &Args) -> Result<(), String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("xtask lies in no folder")?;
    let package = root.join("crates/halfbyte-python");
    let python = environment(root, &package)?;
    if args.install {
        return Ok(());
    }
    wheel::install(root, &python)?;
    check_types(root, &package, &python, &STUBBED)?;
    // Names, parameters and defaults of the stubs are those of the module.
    let mut stubs = Command::new(&python);
    stubs.args(["-m", "mypy.stubtest", "halfbyte._halfbyte", "--concise", "--ignore-disjoint-bases"]);
    succeed(stubs.args(["--allowlist", "tests/stubtest_allowlist.txt"]).current_dir(&package))?;
    let mut tests = Command::new(&python);
    tests.args(["-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider"]).args(&args.tests);
    succeed(tests.current_dir(&package))?;
    if args.tests.is_empty() { check_types(root, &package, &python, &[]) } else { Ok(()) }
}

/// Runs mypy over some files, or over all that pyproject.toml names.
fn check_types(root: &Path, package: &Path, python: &Path, files: &[&str]) -> Result<(), String> {
    let cache = root.join("target/mypy");
    let mut mypy = Command::new(python);
    succeed(mypy.args(["-m", "mypy", "--cache-dir"]).arg(cache).args(files).current_dir(package))
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

/// Runs a command; an error if it fails.
pub fn succeed(command: &mut Command) -> Result<(), String> {
    let status = command.status().map_err(|e| format!("{command:?}: {e}"))?;
    if status.success() { Ok(()) } else { Err(format!("{command:?}: {status}")) }
}
