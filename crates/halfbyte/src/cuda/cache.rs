//! Compiled kernels kept on disk, so that they are compiled once a machine and not once a process.
//!
//! ```text
//! <folder>/<content>.<processor>.nvrtc<version>.cubin
//!     content = SHA-256 of: instantiation, options, definitions, source with its assertions, headers that it includes
//! file: "HBCUBIN1" · SHA-256 of what follows · length of the name (4 bytes, little-endian) · name · machine code
//! ```
//!
//! The folder is `HALFBYTE_CACHE`, else `XDG_CACHE_HOME/halfbyte/cubin`, else `~/.cache/halfbyte/cubin`.
//!
//! * A file is written under a temporary name, synced and renamed: other processes see all of it or none. Who loses a race
//!   has replaced a file by the same file.
//! * A file whose checksum is wrong is removed and the kernel compiled again.
//! * When all files together pass [`LIMIT_BYTES`], those go first that were used longest ago; a use sets the file's time.
//! * A folder that cannot be written is read all the same; [`Cache::keep`] says why nothing was kept.
//!
//! The compiler's version stands in the name and not in the hash. So a kernel is found without opening the compiler, which
//! takes a tenth of a second, and a set of kernels made elsewhere serves a machine without one. A newer compiler makes what is
//! not there yet; to have everything made anew, remove the folder.

use super::driver::Version;
use super::nvrtc::{Compiled, FLAGS};
use super::sources::{Arch, Instance};
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// All files together, at most.
pub const LIMIT_BYTES: u64 = 512 << 20;

/// The environment variable that names the folder.
pub const VARIABLE: &str = "HALFBYTE_CACHE";

const MAGIC: &[u8; 8] = b"HBCUBIN1";
const HEADER_BYTES: usize = 8 + 32 + 4;
const TEMPORARY: &str = ".writing-";

/// What is left behind by a process that was killed while writing may go after this time.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    limit_bytes: u64,
}

/// What identifies a compiled kernel, but for the compiler's version.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    content: String,
    arch: Arch,
}

impl Key {
    /// The key of an instance. Error: sources that cannot be read.
    pub fn of(instance: &Instance, arch: Arch) -> Result<Self> {
        let mut hash = Sha256::new();
        let mut part = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        part(&instance.expression);
        part(&FLAGS.join("\n"));
        part(&instance.defines.join("\n"));
        for source in [instance.source].into_iter().chain(instance.source.headers()?) {
            part(source.path);
            part(&source.checked()?);
        }
        Ok(Self { content: hex(&hash.finalize()), arch })
    }

    /// What its source, headers and options hash to, in hexadecimal digits.
    pub fn content(&self) -> &str {
        &self.content
    }

    fn stem(&self) -> String {
        format!("{}.{}.nvrtc", self.content, self.arch)
    }

    fn file(&self, compiler: Version) -> String {
        format!("{}{compiler}.cubin", self.stem())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// The cache of this user. Error: no environment variable says where it may lie.
    pub fn of_user() -> Result<Self> {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = set(VARIABLE)
            .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("halfbyte/cubin")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/halfbyte/cubin")));
        let folder = folder.ok_or_else(|| Error::Device {
            op: "kernel cache",
            cause: format!("expected one of {VARIABLE}, XDG_CACHE_HOME and HOME to be set, got none"),
        })?;
        Ok(Self::at(folder))
    }

    /// The cache in a folder, which need not be there yet.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), limit_bytes: LIMIT_BYTES }
    }

    /// The same with another limit for all files together.
    pub fn with_limit(self, limit_bytes: u64) -> Self {
        Self { limit_bytes, ..self }
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Files and bytes that are kept.
    pub fn size(&self) -> (usize, u64) {
        let files = self.files();
        (files.len(), files.iter().map(|file| file.bytes).sum())
    }

    /// Tries to write into the folder. Error: the system's refusal.
    pub fn probe(&self) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        self.temporary().map(drop)
    }

    /// A kernel, if it is kept: that of the newest compiler whose major version is not above the driver's.
    pub fn find(&self, key: &Key, driver: Version) -> Option<Compiled> {
        let stem = key.stem();
        let mut versions: Vec<Version> = fs::read_dir(&self.folder)
            .ok()?
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name();
                let (major, minor) = name.to_str()?.strip_prefix(&stem)?.strip_suffix(".cubin")?.split_once('.')?;
                Some(Version { major: major.parse().ok()?, minor: minor.parse().ok()? })
            })
            .filter(|version| version.major <= driver.major)
            .collect();
        versions.sort();
        versions.iter().rev().find_map(|&version| self.read(&self.folder.join(key.file(version))))
    }

    fn read(&self, path: &Path) -> Option<Compiled> {
        let bytes = fs::read(path).ok()?;
        let compiled = parse(&bytes);
        match &compiled {
            // Only a wish: in a folder that cannot be written, age matters to nobody.
            Some(_) => drop(File::open(path).and_then(|file| file.set_modified(SystemTime::now()))),
            None => drop(fs::remove_file(path)),
        }
        compiled
    }

    /// Keeps a kernel, and removes those used longest ago while there are too many bytes.
    ///
    /// Error: the system's refusal; nothing half-written is left.
    pub fn keep(&self, key: &Key, compiler: Version, compiled: &Compiled) -> io::Result<()> {
        fs::create_dir_all(&self.folder)?;
        let mut file = self.temporary()?;
        file.write_all(&encode(compiled))?;
        file.as_file().sync_all()?;
        let path = self.folder.join(key.file(compiler));
        file.persist(&path).map_err(|refused| refused.error)?;
        self.shrink(&path);
        Ok(())
    }

    fn temporary(&self) -> io::Result<tempfile::NamedTempFile> {
        tempfile::Builder::new().prefix(TEMPORARY).tempfile_in(&self.folder)
    }

    /// Removes what was used longest ago, but not `newest`, until the rest is within the limit.
    fn shrink(&self, newest: &Path) {
        let mut files = self.files();
        files.sort_by_key(|file| file.used);
        let mut bytes: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files.iter().filter(|file| file.path != newest) {
            if bytes <= self.limit_bytes {
                break;
            }
            // Another process may have removed it already.
            let _ = fs::remove_file(&file.path);
            bytes -= file.bytes;
        }
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(TEMPORARY)) {
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|time| time.elapsed().unwrap_or_default());
            if age.is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn files(&self) -> Vec<Kept> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Vec::new() };
        entries
            .flatten()
            .filter(|entry| entry.path().extension().is_some_and(|extension| extension == "cubin"))
            .filter_map(|entry| {
                let meta = entry.metadata().ok()?;
                Some(Kept { path: entry.path(), bytes: meta.len(), used: meta.modified().ok()? })
            })
            .collect()
    }
}

struct Kept {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn encode(compiled: &Compiled) -> Vec<u8> {
    let mut body = (compiled.name.len() as u32).to_le_bytes().to_vec();
    body.extend_from_slice(compiled.name.as_bytes());
    body.extend_from_slice(&compiled.code);
    [MAGIC.as_slice(), &Sha256::digest(&body), &body].concat()
}

/// What a file holds; None: it is not whole.
fn parse(bytes: &[u8]) -> Option<Compiled> {
    if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
        return None;
    }
    let (sum, body) = bytes[MAGIC.len()..].split_at(32);
    if Sha256::digest(body).as_slice() != sum {
        return None;
    }
    let (len, rest) = body.split_first_chunk::<4>()?;
    let (name, code) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    Some(Compiled { name: String::from_utf8(name.to_vec()).ok()?, code: code.to_vec() })
}
