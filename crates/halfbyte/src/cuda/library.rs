//! Libraries opened at run time: where they are looked for, and what is said when they are not there.
//!
//! In this order, the first that can be opened wins:
//!
//! 1. an environment variable that names the file or its folder; nothing else is looked at then
//! 2. the loader's path: `LD_LIBRARY_PATH`, `ld.so.cache`
//! 3. `lib64` and `lib` of `CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda` and `/usr/local/cuda-*`
//! 4. the `nvidia` packages of Python: of `VIRTUAL_ENV`, of `CONDA_PREFIX`, of the `python3` on the `PATH`, of
//!    `/usr/local`, and the user's own in `~/.local`

use crate::error::{Error, Result};
use std::env;
use std::path::{Path, PathBuf};

/// A library as it is looked for.
#[derive(Debug)]
pub struct Wanted {
    /// Its name for people.
    pub name: &'static str,
    /// `nvrtc` of `libnvrtc.so.13`.
    pub stem: &'static str,
    /// Numbers behind `.so.`, the best first.
    pub versions: &'static [u32],
    /// The environment variable that says where it lies.
    pub variable: &'static str,
    /// Folders of Python packages under `site-packages/nvidia`.
    pub packages: &'static [&'static str],
}

/// The run-time compiler.
pub const NVRTC: Wanted = Wanted {
    name: "NVRTC",
    stem: "nvrtc",
    versions: &[13, 12],
    variable: "HALFBYTE_NVRTC",
    packages: &["cu13/lib", "cuda_nvrtc/lib"],
};

/// Dense products.
pub const CUBLASLT: Wanted = Wanted {
    name: "cuBLASLt",
    stem: "cublasLt",
    versions: &[13, 12],
    variable: "HALFBYTE_CUBLASLT",
    packages: &["cu13/lib", "cublas/lib"],
};

/// Sums over ranks whose devices do not reach each other.
pub const NCCL: Wanted = Wanted {
    name: "NCCL",
    stem: "nccl",
    versions: &[2],
    variable: "HALFBYTE_NCCL",
    packages: &["nccl/lib", "cu13/lib"],
};

/// An open library.
#[derive(Debug)]
pub struct Opened {
    library: libloading::Library,
    path: PathBuf,
}

impl Opened {
    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of it.
    ///
    /// # Safety
    /// `F` is the type of the C function of this name, and the library stays open while it is called.
    pub unsafe fn function<F: Copy>(&self, name: &'static str) -> Result<F> {
        // SAFETY: the caller vouches for the type.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.map(|f| *f).map_err(|e| Error::Device {
            op: "open library",
            cause: format!("{} has no function {name}: {e}", self.path.display()),
        })
    }
}

/// Opens a library whose number is not above `newest`.
///
/// Error: [`Error::LibraryMissing`] with every place.
pub fn open(wanted: &Wanted, newest: Option<u32>) -> Result<Opened> {
    let names = names(wanted, newest);
    let mut looked = Vec::new();
    if let Some(place) = env::var_os(wanted.variable).filter(|place| !place.is_empty()) {
        let place = PathBuf::from(place);
        let files = if place.is_dir() { names.iter().map(|name| place.join(name)).collect() } else { vec![place] };
        for file in files {
            match open_file(&file) {
                Ok(opened) => return Ok(opened),
                Err(why) => looked.push(format!("{}: {} ({why})", wanted.variable, file.display())),
            }
        }
        return Err(Error::LibraryMissing { library: wanted.name, looked });
    }
    for name in &names {
        match open_file(Path::new(name)) {
            Ok(Opened { library, path }) => return Ok(Opened { library, path: mapped(name).unwrap_or(path) }),
            Err(_) => looked.push(format!("{name} in the loader's path")),
        }
    }
    for folder in toolkits().into_iter().chain(python_packages(wanted.packages)) {
        let mut found = false;
        for file in names.iter().map(|name| folder.join(name)).filter(|file| file.exists()) {
            found = true;
            match open_file(&file) {
                Ok(opened) => return Ok(opened),
                Err(why) => looked.push(format!("{} ({why})", file.display())),
            }
        }
        if !found {
            looked.push(format!("{}", folder.join(format!("lib{}.so.*", wanted.stem)).display()));
        }
    }
    looked.push(format!("{} is not set", wanted.variable));
    Err(Error::LibraryMissing { library: wanted.name, looked })
}

/// Whether a library lies in one of the places where [`open`] looks, which does not open it.
pub fn is_there(wanted: &Wanted, newest: Option<u32>) -> bool {
    let names = names(wanted, newest);
    let lies_in = |folder: &Path| names.iter().any(|name| folder.join(name).is_file());
    if let Some(place) = env::var_os(wanted.variable).filter(|place| !place.is_empty()) {
        let place = PathBuf::from(place);
        return place.is_file() || lies_in(&place);
    }
    let path = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::split_paths(&path).chain(["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(PathBuf::from));
    let cached = || {
        let files = loader_cache();
        names.iter().any(|name| files.iter().any(|file| file.ends_with(name) && file.is_file()))
    };
    names.iter().any(|name| mapped(name).is_some())
        || folders.chain(toolkits()).any(|folder| lies_in(&folder))
        || cached()
        || python_packages(wanted.packages).iter().any(|folder| lies_in(folder))
}

/// The files that the loader's cache names: absolute paths that each end with a zero, among other things.
fn loader_cache() -> Vec<PathBuf> {
    let bytes = std::fs::read("/etc/ld.so.cache").unwrap_or_default();
    let texts = bytes.split(|&byte| byte == 0).filter(|text| text.starts_with(b"/"));
    texts.filter_map(|text| std::str::from_utf8(text).ok().map(PathBuf::from)).collect()
}

fn names(wanted: &Wanted, newest: Option<u32>) -> Vec<String> {
    let versions = wanted.versions.iter().filter(|&&version| newest.is_none_or(|newest| version <= newest));
    versions.map(|version| format!("lib{}.so.{version}", wanted.stem)).collect()
}

/// What a library's function without arguments answers.
pub(super) fn number(library: &Opened, function: &'static str) -> Result<usize> {
    // SAFETY: called only for functions of cuBLASLt that take nothing and give a `size_t`.
    let get: unsafe extern "C" fn() -> usize = unsafe { library.function(function) }?;
    // SAFETY: as above; the library is open.
    Ok(unsafe { get() })
}

/// Opens a file, or a name along the loader's path.
pub(super) fn open_file(path: &Path) -> std::result::Result<Opened, String> {
    // SAFETY: opening runs the library's initialisers; these are the maker's own, which the user has installed.
    let library = unsafe { libloading::Library::new(path) };
    Ok(Opened { library: library.map_err(|e| e.to_string())?, path: path.to_owned() })
}

/// The file that the loader has taken for a name, as this process's memory map tells.
pub(super) fn mapped(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let files = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let mut named = files.filter(|path| path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(name)));
    named.next().map(Path::to_owned)
}

fn toolkits() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = ["CUDA_HOME", "CUDA_PATH"]
        .iter()
        .filter_map(env::var_os)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
        .collect();
    roots.push("/usr/local/cuda".into());
    let mut numbered: Vec<PathBuf> = entries(Path::new("/usr/local"), "cuda-");
    numbered.reverse();
    roots.extend(numbered);
    roots.iter().flat_map(|root| [root.join("lib64"), root.join("lib")]).collect()
}

fn python_packages(packages: &[&str]) -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = ["VIRTUAL_ENV", "CONDA_PREFIX"]
        .iter()
        .filter_map(env::var_os)
        .filter(|v| !v.is_empty())
        .map(PathBuf::from)
        .collect();
    let path = env::var_os("PATH").unwrap_or_default();
    let python = env::split_paths(&path).find(|folder| folder.join("python3").exists());
    prefixes.extend(python.and_then(|bin| Some(bin.parent()?.to_owned())));
    prefixes.push("/usr/local".into());
    prefixes.extend(env::var_os("HOME").filter(|v| !v.is_empty()).map(|home| Path::new(&home).join(".local")));
    let mut folders: Vec<PathBuf> = prefixes
        .iter()
        .flat_map(|prefix| entries(&prefix.join("lib"), "python3."))
        .flat_map(|python| ["site-packages/nvidia", "dist-packages/nvidia"].map(|name| python.join(name)))
        // Without the folder itself its packages need not be named one by one.
        .flat_map(|nvidia| match nvidia.is_dir() {
            true => packages.iter().map(|package| nvidia.join(package)).collect(),
            false => vec![nvidia],
        })
        .collect();
    let mut seen = std::collections::HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// What lies in a folder under names that begin so, sorted.
fn entries(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix)))
        .collect();
    paths.sort();
    paths
}
