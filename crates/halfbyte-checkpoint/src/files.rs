//! Changes of the file system: everything that writing does to it, one operation at a time.
//!
//! Nothing else in this crate, in halfbyte-llm or in the command line creates, writes, renames or removes files, so that a
//! test can stop each of these operations ([`faults`]) and look at what is left.

#[doc(hidden)]
pub mod faults;

use crate::error::{Error, Result};
use faults::Verdict;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Does an operation, again where a signal interrupted it.
fn operation<T>(change: impl Fn() -> io::Result<T>) -> io::Result<T> {
    loop {
        let done = match faults::next() {
            Verdict::Go | Verdict::Half => change(),
            Verdict::Refuse(error) => Err(error),
        };
        match done {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A file that is written.
#[derive(Debug)]
pub struct OutputFile(File);

impl OutputFile {
    /// Creates a file. Errors: it exists already, the system's refusal.
    pub fn create(path: &Path) -> io::Result<Self> {
        operation(|| File::create_new(path)).map(Self)
    }

    /// Opens what is there and is no regular file: a pipe, a terminal, a device. Errors: the system's refusal.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        operation(|| File::options().write(true).open(path)).map(Self)
    }

    /// Makes it this long. Errors: the system's refusal, as where the disk or a limit of the shell does not have it.
    pub fn set_len(&self, bytes: u64) -> io::Result<()> {
        operation(|| self.0.set_len(bytes))
    }

    /// Waits until the disk has all of it. Errors: the system's refusal.
    pub fn sync(&self) -> io::Result<()> {
        operation(|| if faults::syncs() { self.0.sync_all() } else { Ok(()) })
    }

    /// Writes all of it at this place. Errors: the system's refusal.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.seek(SeekFrom::Start(offset))?;
        self.write_all(bytes)
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match faults::next() {
            Verdict::Go => self.0.write(bytes),
            Verdict::Half => self.0.write(&bytes[..bytes.len().div_ceil(2)]),
            Verdict::Refuse(error) => Err(error),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What came of an attempt to lock a file.
#[derive(Debug)]
pub enum Lock {
    /// It is locked as long as this is open.
    Held(File),
    /// Another process, or another part of this one, has it.
    Busy,
    /// The file system has no locks.
    Unsupported,
}

/// Locks a file, which is made where it is not. Errors: the system's refusal to make it.
pub fn lock(path: &Path) -> io::Result<Lock> {
    const ATTEMPTS: usize = 100;
    for _ in 0..ATTEMPTS {
        let open = || File::options().create(true).truncate(false).read(true).write(true).open(path);
        let file = operation(open)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Lock::Busy),
            Err(TryLockError::Error(_)) => return Ok(Lock::Unsupported),
        }
        // Whoever had it before may have removed it between the two.
        if is_at(&file, path)? {
            return Ok(Lock::Held(file));
        }
    }
    Err(io::Error::other("is replaced all the time, or is a link"))
}

/// Whether the file that this path names is the one that is open.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let open = file.metadata()?;
        match path.symlink_metadata() {
            Ok(there) => Ok((there.dev(), there.ino()) == (open.dev(), open.ino())),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
    #[cfg(not(unix))]
    {
        let _ = (file, path);
        Ok(true)
    }
}

/// Whether two paths lead to one file, by whatever names and links.
pub fn is_same(a: &Path, b: &Path) -> bool {
    let same_path = a.canonicalize().is_ok_and(|a| b.canonicalize().is_ok_and(|b| a == b));
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let place = |path: &Path| path.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
        same_path || place(a).is_ok_and(|a| place(b).is_ok_and(|b| a == b))
    }
    #[cfg(not(unix))]
    same_path
}

/// Whether another file system, or another part of this one, begins at this path: a folder or file there cannot be
/// renamed. No where that cannot be told.
pub(crate) fn is_mount_point(path: &Path) -> bool {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        use rustix::fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx};
        let root = StatxAttributes::MOUNT_ROOT;
        if let Ok(found) = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::empty())
            && found.stx_attributes_mask.contains(root)
        {
            return found.stx_attributes.contains(root);
        }
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let device = |path: &Path| path.symlink_metadata().map(|metadata| metadata.dev());
        path.is_dir() && device(path).is_ok_and(|own| device(parent(path)).is_ok_and(|above| own != above))
    }
    #[cfg(not(unix))]
    {
        let _ = path;
        false
    }
}

/// Makes a folder. Errors: it exists, the system's refusal.
pub fn create_dir(path: &Path) -> io::Result<()> {
    operation(|| std::fs::create_dir(path))
}

/// Makes a folder and those above it, as far as they are missing; gives those that were made, the topmost first. Errors: the
/// system's refusal; then none is left.
pub fn create_dirs(path: &Path) -> io::Result<Vec<PathBuf>> {
    let missing: Vec<&Path> = path.ancestors().take_while(|p| !p.as_os_str().is_empty() && !p.exists()).collect();
    let mut made = Vec::new();
    for folder in missing.into_iter().rev() {
        match create_dir(folder) {
            Ok(()) => made.push(folder.to_owned()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists && folder.is_dir() => {}
            Err(e) => {
                remove_dirs(&made);
                return Err(e);
            }
        }
    }
    Ok(made)
}

/// Removes folders that [`create_dirs`] made, as far as they are empty.
pub(crate) fn remove_dirs(made: &[PathBuf]) {
    for folder in made.iter().rev() {
        // One that holds something by now stays.
        let _ = remove_dir(folder);
    }
}

/// Gives a file or folder another name; a file, or an empty folder, that has it is replaced. Errors: the system's refusal.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    operation(|| std::fs::rename(from, to))
}

/// Gives a file a name that nothing has. Errors: something has it, the system's refusal.
///
/// Where the system cannot do both in one step, something of that name that comes between the two is replaced.
pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    match operation(|| system::rename_new(from, to)) {
        Err(e) if is_unsupported(&e) => match to.symlink_metadata() {
            Ok(_) => Err(ErrorKind::AlreadyExists.into()),
            Err(_) => rename(from, to),
        },
        done => done,
    }
}

/// Two files or folders take each other's names in one step. Errors: the system or file system cannot
/// ([`is_unsupported`]), or refuses.
pub(crate) fn exchange(a: &Path, b: &Path) -> io::Result<()> {
    operation(|| if faults::exchanges() { system::exchange(a, b) } else { Err(ErrorKind::Unsupported.into()) })
}

/// Whether the system has no such operation, or the file system has not.
pub(crate) fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported)
}

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
mod system {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    use std::io;
    use std::path::Path;

    pub fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
        Ok(renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
    }

    pub fn exchange(a: &Path, b: &Path) -> io::Result<()> {
        Ok(renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)?)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod system {
    use std::io::{self, ErrorKind};
    use std::path::Path;

    pub fn rename_new(_: &Path, _: &Path) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }

    pub fn exchange(_: &Path, _: &Path) -> io::Result<()> {
        Err(ErrorKind::Unsupported.into())
    }
}

/// Removes a file or link. Errors: the system's refusal.
pub fn remove_file(path: &Path) -> io::Result<()> {
    operation(|| std::fs::remove_file(path))
}

/// Removes an empty folder. Errors: it is not empty, the system's refusal.
pub fn remove_dir(path: &Path) -> io::Result<()> {
    operation(|| std::fs::remove_dir(path))
}

/// Removes a folder of files. Errors: it has folders in it, the system's refusal.
pub fn remove_folder(path: &Path) -> io::Result<()> {
    for name in names(path)? {
        remove_file(&path.join(name))?;
    }
    remove_dir(path)
}

/// Names of everything in a folder, sorted. Errors: the system's refusal.
pub fn names(folder: &Path) -> io::Result<Vec<std::ffi::OsString>> {
    let names = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Makes renames in a folder durable, where the system has a way to. Errors: its refusal.
pub fn sync_dir(dir: &Path) -> Result<()> {
    #[cfg(unix)]
    operation(|| if faults::syncs() { File::open(dir)?.sync_all() } else { Ok(()) }).map_err(Error::io("sync", dir))?;
    #[cfg(not(unix))]
    let _ = dir;
    Ok(())
}

/// The folder that a file is in.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A name in `dir` that no other process and no other call uses.
pub(crate) fn temporary_name(dir: &Path, name: &str) -> PathBuf {
    use std::sync::atomic::{AtomicU64, Ordering};
    static COUNT: AtomicU64 = AtomicU64::new(0);
    dir.join(format!(".{name}.{}-{}.tmp", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)))
}

/// Writes a whole file under a temporary name, syncs it, and gives it its own. Errors: the system's refusal; then nothing
/// is left of it.
pub fn write_synced(path: &Path, content: &[u8]) -> Result<()> {
    let Some(name) = path.file_name() else {
        return Err(Error::invalid("write", "the path of a file", path.display().to_string()));
    };
    let temporary = temporary_name(parent(path), &name.to_string_lossy());
    let written = OutputFile::create(&temporary)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync()))
        .and_then(|()| rename(&temporary, path));
    written.map_err(|e| {
        let _ = remove_file(&temporary);
        Error::io("write", path)(e)
    })
}
