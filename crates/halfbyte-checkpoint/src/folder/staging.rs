//! The folder beside a target in which it is written, and how it takes its place.
//!
//! ```text
//! .<target>.tmp/
//!     lock    held while a process works here; its content says that the folder is ours
//!     new/    what is written; after an exchange of names what the target was, until it is removed
//!     old/    what the target was, on file systems that cannot exchange names, until the new one is in its place
//! ```
//!
//! A killed process leaves this folder. The next one that writes the same target finds nobody holding the lock, puts `old`
//! back if the target is missing, and removes the rest.

use super::remove_model;
use super::replaceable::{self, TEMPLATES, is_side_file, is_template, is_written_here, is_written_in_templates};
use crate::error::{Error, Result};
use crate::files::{self, Lock, OutputFile, sync_dir};
use crate::regular::open_regular;
use crate::scheme::Weights;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

const LOCK: &str = "lock";
const NEW: &str = "new";
const OLD: &str = "old";
const MARK: &str = "halfbyte writes a model here and removes this folder when it is done\n";

/// A temporary folder beside the target, removed when it is dropped before [`Staging::commit`].
#[derive(Debug)]
pub(super) struct Staging {
    room: Room,
    /// The folder to write in.
    path: PathBuf,
    target: PathBuf,
    /// Whose code may be replaced.
    source: PathBuf,
    overwrite: bool,
    /// The file of this name in the folder becomes the target; None: the folder itself does.
    only: Option<&'static str>,
    /// Folders above the target that were made for it.
    made: Vec<PathBuf>,
    committed: bool,
}

impl Staging {
    /// Makes the folder. Errors: a target that is not a folder, that is the source, that holds something and may not be
    /// replaced, or that holds more than a model; another process that writes it; the system's refusal.
    pub fn create(target: &Path, overwrite: bool, source: &Path) -> Result<Self> {
        let target = resolved(target)?;
        if files::is_same(source, &target) {
            return Err(is_source(&target));
        }
        Self::begin(target, overwrite, source.to_owned(), None)
    }

    /// Makes the folder for a single file `name`: the target, if that ends like it, else the only file in the target.
    /// Errors: as [`Staging::create`]; a file that may not be replaced or that is the source.
    pub fn create_for_file(target: &Path, overwrite: bool, source: &Weights, name: &'static str) -> Result<Self> {
        let ending = |path: &Path| path.extension().map(|e| e.to_ascii_lowercase());
        if ending(target) != ending(Path::new(name)) || target.is_dir() {
            return Self::create(target, overwrite, source.folder());
        }
        let beside = files::names(source.folder()).unwrap_or_default();
        let read = |name: &str| name == "config.json" || is_side_file(name);
        let beside =
            beside.iter().filter(|name| name.to_str().is_some_and(read)).map(|name| source.folder().join(name));
        let mut inputs = source.checkpoint().files().map(Path::to_owned).chain(beside);
        if inputs.any(|file| files::is_same(&file, target)) {
            return Err(is_source(target));
        }
        Self::for_any_file(target, overwrite, name)
    }

    /// Makes the folder for a single file, which is `name` there.
    pub fn for_any_file(target: &Path, overwrite: bool, name: &'static str) -> Result<Self> {
        Self::begin(resolved(target)?, overwrite, PathBuf::new(), Some(name))
    }

    fn begin(target: PathBuf, overwrite: bool, source: PathBuf, only: Option<&'static str>) -> Result<Self> {
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            let expected = "a file or folder with a name";
            return Err(Error::invalid("write a model", expected, target.display().to_string()));
        };
        let may_replace = || match only {
            None => replaceable::check(&target, &target, overwrite, &source),
            Some(_) if target.is_dir() => Err(Error::Exists { path: target.clone(), why: ", and is a folder".into() }),
            Some(_) if !overwrite => Err(Error::Exists {
                path: target.clone(),
                why: ": choose another file, or ask to overwrite it".to_owned(),
            }),
            Some(_) => Ok(()),
        };
        let is_there = || target.symlink_metadata().is_ok();
        let was_there = is_there();
        if was_there {
            may_replace()?;
        }
        let made = files::create_dirs(parent).map_err(Error::io("create", parent))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".tmp");
        let room = Room::open(parent.join(hidden)).inspect_err(|_| files::remove_dirs(&made))?;
        let path = room.path.join(NEW);
        let (of_target, source) = (target.clone(), source.clone());
        let this = Self { room, path, target: of_target, source, overwrite, only, made, committed: false };
        this.room.recover(&target)?;
        if !was_there && is_there() {
            may_replace()?;
        }
        files::create_dir(&this.path).map_err(Error::io("create", &this.path))?;
        Ok(this)
    }

    /// The folder to write in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies tokenizer, generation settings, templates, licence, code of the model's own and the like, as far as the source
    /// has them.
    pub fn copy_side_files(&self, source: &Path) -> Result<()> {
        let SideFiles { files, templates } = side_files(source)?;
        for file in files {
            copy_into(&file, &self.path)?;
        }
        if templates.is_empty() {
            return Ok(());
        }
        let folder = self.create_templates()?;
        for file in templates {
            copy_into(&file, &folder)?;
        }
        sync_dir(&folder)
    }

    /// Writes the templates of a source that has them in its own file.
    pub fn write_templates(&self, source: &Weights) -> Result<()> {
        if let Some(template) = source.chat_template()? {
            files::write_synced(&self.path.join("chat_template.jinja"), template.as_bytes())?;
        }
        let templates = source.named_templates()?;
        if templates.is_empty() {
            return Ok(());
        }
        let folder = self.create_templates()?;
        for (name, template) in templates {
            files::write_synced(&folder.join(format!("{name}.jinja")), template.as_bytes())?;
        }
        sync_dir(&folder)
    }

    fn create_templates(&self) -> Result<PathBuf> {
        let folder = self.path.join(TEMPLATES);
        files::create_dir(&folder).map_err(Error::io("create", &folder))?;
        Ok(folder)
    }

    /// Gives what was written the target's name, in one step; then removes what was there. Errors: the system's refusal,
    /// something that came to the target meanwhile. The target is then what it was, unless only the removal was refused or
    /// the last sync.
    pub fn commit(mut self) -> Result<PathBuf> {
        let Self { path, target, overwrite, .. } = &self;
        sync_dir(path)?;
        let exists = |e: std::io::Error| match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                Error::Exists { path: target.clone(), why: ": it came there meanwhile".to_owned() }
            }
            _ => Error::io("rename", target)(e),
        };
        match self.only {
            Some(name) if *overwrite => files::rename(&path.join(name), target).map_err(exists)?,
            Some(name) => files::rename_new(&path.join(name), target).map_err(exists)?,
            // An empty folder is replaced in the same step.
            None if !*overwrite || !holds_something(target) => files::rename(path, target).map_err(exists)?,
            None => self.swap()?,
        }
        // The target is in them.
        self.made.clear();
        sync_dir(files::parent(&self.target))?;
        self.room.clear(&self.target)?;
        self.committed = true;
        Ok(std::mem::take(&mut self.target))
    }

    /// Puts the new folder in the place of one that is there.
    fn swap(&self) -> Result<()> {
        let Self { room, path, target, source, .. } = self;
        let check = |old: &Path| replaceable::check(old, target, true, source);
        match files::exchange(path, target) {
            // Again, for what came into it meanwhile: it is going to be removed.
            Ok(()) => check(path).inspect_err(|_| _ = files::exchange(path, target)),
            Err(e) if files::is_unsupported(&e) => {
                let old = room.path.join(OLD);
                files::rename(target, &old).map_err(Error::io("rename", target))?;
                let done = check(&old).and_then(|()| files::rename(path, target).map_err(Error::io("rename", path)));
                // If this is refused too, the next run on this target does it.
                done.inspect_err(|_| _ = files::rename(&old, target))
            }
            Err(e) => Err(Error::io("exchange", target)(e)),
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done here about a failure; the next run on this target tries again.
            let _ = self.room.clear(&self.target);
            files::remove_dirs(&self.made);
        }
    }
}

/// What goes with a model besides its weights and config.
pub(super) struct SideFiles {
    files: Vec<PathBuf>,
    templates: Vec<PathBuf>,
}

/// What of this a folder has. Errors: a link to nothing, a folder, a pipe or the like under the name of such a file.
pub(super) fn side_files(source: &Path) -> Result<SideFiles> {
    let templates = source.join(TEMPLATES);
    let has_templates = templates.symlink_metadata().is_ok();
    let templates = if has_templates { chosen(&templates, is_template)? } else { Vec::new() };
    Ok(SideFiles { files: chosen(source, is_side_file)?, templates })
}

/// The files of a folder whose names are chosen. Error: something of such a name that is no regular file.
fn chosen(folder: &Path, is_chosen: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let names = files::names(folder).map_err(Error::io("list", folder))?;
    let names = names.iter().filter(|name| name.to_str().is_some_and(&is_chosen));
    names.map(|name| folder.join(name)).map(|file| open_regular(&file).map(|_| file)).collect()
}

/// Copies a file under its name.
fn copy_into(from: &Path, folder: &Path) -> Result<()> {
    const BUFFER_BYTES: usize = 1 << 20;
    let to = folder.join(from.file_name().unwrap_or_default());
    let (mut input, _) = open_regular(from)?;
    let output = OutputFile::create(&to).map_err(Error::io("create", &to))?;
    let mut output = BufWriter::with_capacity(BUFFER_BYTES, output);
    std::io::copy(&mut input, &mut output)
        .and_then(|_| output.flush())
        .and_then(|()| output.get_ref().sync())
        .map_err(Error::io("write", &to))
}

/// The target without links, so that what a link points to is replaced and not the link.
fn resolved(target: &Path) -> Result<PathBuf> {
    target.canonicalize().or_else(|_| std::path::absolute(target)).map_err(Error::io("resolve", target))
}

fn is_source(target: &Path) -> Error {
    Error::invalid("write a model", "a target other than the source", target.display().to_string())
}

fn holds_something(folder: &Path) -> bool {
    files::names(folder).is_ok_and(|names| !names.is_empty())
}

/// A temporary folder, locked against other processes.
#[derive(Debug)]
struct Room {
    path: PathBuf,
    /// None: the file system has no locks.
    _lock: Option<File>,
}

impl Room {
    /// Makes the folder, or takes the one that a killed process has left. Errors: another process works there, something of
    /// this name that is not ours, the system's refusal.
    fn open(path: PathBuf) -> Result<Self> {
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

    /// Puts back what was taken out of the target's place if nothing came there, and removes the rest.
    fn recover(&self, target: &Path) -> Result<()> {
        let old = self.path.join(OLD);
        if old.is_dir() && target.symlink_metadata().is_err() {
            files::rename(&old, target).map_err(Error::io("rename", &old))?;
            sync_dir(files::parent(target))?;
        }
        self.remove_folders()
    }

    /// Removes both folders. Error: something in them or beside them that was never written here.
    fn remove_folders(&self) -> Result<()> {
        let list = |folder: &Path| files::names(folder).map_err(Error::io("list", folder));
        let foreign = |path: PathBuf| Error::Exists { path, why: ", and halfbyte has not made it".to_owned() };
        if let Some(name) = list(&self.path)?.iter().find(|name| [LOCK, NEW, OLD].iter().all(|own| own != name)) {
            return Err(foreign(self.path.join(name)));
        }
        for folder in [NEW, OLD].map(|name| self.path.join(name)).iter().filter(|folder| folder.is_dir()) {
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
            remove_model(folder).map_err(Error::io("remove", folder))?;
        }
        Ok(())
    }

    /// Removes the folder with all that is in it, but for the only copy of what the target was.
    fn clear(&self, target: &Path) -> Result<()> {
        let lock = self.path.join(LOCK);
        if !lock.exists() {
            return files::remove_dir(&self.path).or_else(of_nothing).map_err(Error::io("remove", &self.path));
        }
        self.recover(target)?;
        files::remove_file(&lock).map_err(Error::io("remove", &lock))?;
        // Another process may have come into it by now.
        files::remove_dir(&self.path).or_else(of_nothing).map_err(Error::io("remove", &self.path))
    }
}

/// What is gone, or in use again, needs no removal.
fn of_nothing(error: std::io::Error) -> std::io::Result<()> {
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::DirectoryNotEmpty => Ok(()),
        _ => Err(error),
    }
}
