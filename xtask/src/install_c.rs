//! `cargo xtask install-c PREFIX`: builds the C interface and puts libraries, headers and a file for pkg-config below a folder.

use crate::c_header::{FOLDER, HEADER, root};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(clap::Args)]
pub struct Args {
    /// Where to install: PREFIX/lib, PREFIX/include, PREFIX/lib/pkgconfig.
    prefix: PathBuf,
    /// Profile to build with.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Build nothing: the libraries lie in this folder.
    #[arg(long, conflicts_with = "profile")]
    from: Option<PathBuf>,
}

/// Libraries as cargo names them, and as programs that link them do.
const LIBRARIES: [[&str; 2]; 2] = [["libhalfbyte_c.so", "libhalfbyte.so"], ["libhalfbyte_c.a", "libhalfbyte.a"]];

/// Headers, in the folders where they belong.
const HEADERS: [&str; 3] = [HEADER, "halfbyte/dlpack.h", "halfbyte/conversions.cuh"];

pub fn run(args: &Args) -> Result<(), String> {
    if !cfg!(target_os = "linux") {
        return Err("expected Linux, whose names of libraries this knows".to_owned());
    }
    let root = root()?;
    let built = match &args.from {
        Some(folder) => folder.clone(),
        None => build(&root, &args.profile)?,
    };
    let prefix = std::path::absolute(&args.prefix).map_err(|e| format!("{}: {e}", args.prefix.display()))?;
    for [from, to] in LIBRARIES {
        copy(&built.join(from), &prefix.join("lib").join(to))?;
    }
    for header in HEADERS {
        copy(&root.join(FOLDER).join("include").join(header), &prefix.join("include").join(header))?;
    }
    let template = root.join(FOLDER).join("halfbyte.pc.in");
    let text = std::fs::read_to_string(&template).map_err(|e| format!("{}: {e}", template.display()))?;
    let text = text
        .replace("@PREFIX@", &prefix.display().to_string())
        .replace("@VERSION@", env!("CARGO_PKG_VERSION"))
        .replace("@LIBS_PRIVATE@", &native_libraries()?);
    let path = prefix.join("lib/pkgconfig/halfbyte.pc");
    folder_of(&path)?;
    std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("{}", path.display());
    Ok(())
}

/// Builds both libraries; gives the folder where they lie.
fn build(root: &Path, profile: &str) -> Result<PathBuf, String> {
    let mut cargo = Command::new(std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned()));
    cargo.current_dir(root).args(["build", "--locked", "--package", "halfbyte-c", "--lib", "--profile", profile]);
    let status = cargo.status().map_err(|e| format!("cargo: {e}"))?;
    if !status.success() {
        return Err(format!("cargo build: {status}"));
    }
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    Ok(target.join(if profile == "dev" { "debug" } else { profile }))
}

/// What a program that links the static library needs besides: what Rust's own library needs, as the compiler says of an empty one. No
/// crate that is linked into it brings another.
fn native_libraries() -> Result<String, String> {
    let folder = std::env::temp_dir().join(format!("halfbyte-install-c-{}", std::process::id()));
    folder_of(&folder.join("a"))?;
    let source = folder.join("empty.rs");
    let output = std::fs::write(&source, "").and_then(|()| {
        let mut rustc = Command::new(std::env::var("RUSTC").unwrap_or_else(|_| "rustc".to_owned()));
        rustc.args(["--crate-type", "staticlib", "--print", "native-static-libs", "--out-dir"]).arg(&folder);
        rustc.arg(&source).output()
    });
    let removed = std::fs::remove_dir_all(&folder);
    let output = output.map_err(|e| format!("rustc: {e}"))?;
    removed.map_err(|e| format!("{}: {e}", folder.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    let note = log.lines().find_map(|line| line.split_once("native-static-libs: "));
    let (_, libraries) = note.ok_or_else(|| format!("rustc: expected a note of native-static-libs, got\n{log}"))?;
    Ok(libraries.to_owned())
}

fn folder_of(path: &Path) -> Result<(), String> {
    let folder = path.parent().ok_or_else(|| format!("{} lies in no folder", path.display()))?;
    std::fs::create_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))
}

/// Copies under another name first: a program that runs keeps the library that it has open.
fn copy(from: &Path, to: &Path) -> Result<(), String> {
    folder_of(to)?;
    let beside = to.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::copy(from, &beside).map_err(|e| format!("{} to {}: {e}", from.display(), beside.display()))?;
    std::fs::rename(&beside, to).map_err(|e| format!("{}: {e}", to.display()))
}
