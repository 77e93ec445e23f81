//! A temporary folder in which one process at a time works.

use super::remove_model;
use super::replaceable::{TEMPLATES, is_written_here, is_written_in_templates};
use crate::error::{Error, Result};
use crate::files::{self, Lock, OutputFile};
use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const MARK: &str = "halfbyte writes a model here and removes this folder when it is done\n";

/// A temporary folder, locked against other processes.
#[derive(Debug)]
pub(super) struct Room {
    pub path: PathBuf,
    /// None: the file system has no locks.
    _lock: Option<File>,
}

impl Room {
    /// Makes the folder, or takes the one that a killed process has left. Errors: another process works there,
    /// something of this name that is not ours, the system's refusal.
    pub fn open(path: PathBuf) -> Result<Self> {
        const ATTEMPTS: usize = 100;
        let lock_path = path.join(LOCK);
        let foreign =
            || Error::Exists { path: path.clone(), why: ", and halfbyte has not made it: remove it".to_owned() };
        for _ in 0..ATTEMPTS {
            let is_new = match files::create_dir(&path) {
                Ok(()) => true,
                Err(e) if e.kind() == ErrorKind::AlreadyExists => false,
                Err(e) => return Err(Error::io("create", &path)(e)),
            };
            if !is_new {
                let is_folder = path.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
                let lock = lock_path.symlink_metadata();
                let is_lock = lock.is_ok_and(|lock| lock.is_file() && lock.len() <= MARK.len() as u64);
                if !is_folder || holds_something(&path) && !is_lock {
                    return Err(foreign());
                }
            }
            let lock = match files::lock(&lock_path) {
                Ok(Lock::Held(lock)) => Some(lock),
                Ok(Lock::Busy) => return Err(Error::Locked { path }),
                Ok(Lock::Unsupported) if is_new => None,
                Ok(Lock::Unsupported) => {
                    let why = ", and nobody can tell whether a process works there: remove it if none does".to_owned();
                    return Err(Error::Exists { path, why });
                }
                // Who worked here has just removed it.
                Err(e) if e.kind() == ErrorKind::NotFound => continue,
                Err(e) => {
                    let _ = is_new.then(|| files::remove_dir(&path));
                    return Err(Error::io("lock", &lock_path)(e));
                }
            };
            let this = Self { path: path.clone(), _lock: lock };
            match this.mark() {
                Ok(true) => return Ok(this),
                Ok(false) => return Err(foreign()),
                Err(e) => {
                    if files::names(&path).is_ok_and(|names| names.len() == 1) {
                        let _ = files::remove_file(&lock_path).and_then(|()| files::remove_dir(&path));
                    }
                    return Err(Error::io("write", &lock_path)(e));
                }
            }
        }
        Err(Error::Locked { path })
    }

    /// Writes into the lock that the folder is ours. False: it is not.
    fn mark(&self) -> std::io::Result<bool> {
        let lock = self.path.join(LOCK);
        let found = std::fs::read(&lock)?;
        if found == MARK.as_bytes() {
            return Ok(true);
        }
        // The process that made it was killed at once.
        let is_begun = MARK.as_bytes().starts_with(&found) && files::names(&self.path)?.len() == 1;
        if is_begun {
            let mut file = OutputFile::open(&lock)?;
            file.write_at(0, MARK.as_bytes())?;
            file.sync()?;
        }
        Ok(is_begun)
    }

    /// Error: something that is neither the lock nor has one of these names.
    pub fn refuse_others(&self, own: &[&str]) -> Result<()> {
        let names = files::names(&self.path).map_err(Error::io("list", &self.path))?;
        match names.iter().find(|name| *name != LOCK && own.iter().all(|own| own != name)) {
            Some(name) => Err(foreign(self.path.join(name))),
            None => Ok(()),
        }
    }

    /// Whether it has its lock still: a killed process may have removed that and no more.
    pub fn is_open(&self) -> bool {
        self.path.join(LOCK).exists()
    }

    /// Removes the lock and the folder.
    pub fn close(&self) -> Result<()> {
        let lock = self.path.join(LOCK);
        if self.is_open() {
            files::remove_file(&lock).map_err(Error::io("remove", &lock))?;
        }
        // Another process may have come into it by now.
        files::remove_dir(&self.path).or_else(of_nothing).map_err(Error::io("remove", &self.path))
    }
}

/// Removes a model's folder that was written or put into a temporary one. Error: something in it that was never written
/// here.
pub(super) fn remove_written(folder: &Path) -> Result<()> {
    let list = |folder: &Path| files::names(folder).map_err(Error::io("list", folder));
    let templates = folder.join(TEMPLATES);
    let has_templates = templates.symlink_metadata().is_ok_and(|metadata| metadata.is_dir());
    let is_ours = |name: &str| is_written_here(name) || has_templates && name == TEMPLATES;
    if let Some(name) = list(folder)?.iter().find(|name| !name.to_str().is_some_and(is_ours)) {
        return Err(foreign(folder.join(name)));
    }
    if has_templates {
        let names = list(&templates)?;
        if let Some(name) = names.iter().find(|name| !name.to_str().is_some_and(is_written_in_templates)) {
            return Err(foreign(templates.join(name)));
        }
    }
    remove_model(folder).map_err(Error::io("remove", folder))
}

/// Something in a temporary folder that is left alone.
pub(super) fn foreign(path: PathBuf) -> Error {
    Error::Exists { path, why: ", and halfbyte has not made it".to_owned() }
}

pub(super) fn holds_something(folder: &Path) -> bool {
    files::names(folder).is_ok_and(|names| !names.is_empty())
}

/// What is gone, or in use again, needs no removal.
fn of_nothing(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty => Ok(()),
        _ => Err(error),
    }
}
