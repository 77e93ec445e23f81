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

use super::replaceable::{self, TEMPLATES, is_side_file, is_template};
use super::room::{Room, holds_something, remove_written};
use crate::error::{Error, Result};
use crate::files::{self, OutputFile, sync_dir};
use crate::regular::open_regular;
use crate::scheme::Weights;
use std::ffi::{OsStr, OsString};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

const NEW: &str = "new";
const OLD: &str = "old";

/// A target, and what may become of what is there.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// As it was given, for who reads of it.
    named: PathBuf,
    target: PathBuf,
    overwrite: bool,
    /// Whose code may be replaced.
    source: PathBuf,
    /// The file of this name in the folder becomes the target; None: the folder itself does.
    only: Option<&'static str>,
}

impl Place {
    /// Errors: it is the source, or has a file of it; it has the name of a file, and is no folder yet.
    pub fn of_folder(target: &Path, overwrite: bool, source: &Weights) -> Result<Self> {
        let of_file = |end: &OsStr| ["gguf", "onnx", "safetensors"].iter().any(|file| end.eq_ignore_ascii_case(file));
        if target.extension().is_some_and(of_file) && !target.is_dir() {
            let got = format!("{}, the name of a file: this form is written as a folder", target.display());
            return Err(Error::invalid("write a model", "the name of a folder", got));
        }
        let (named, target) = (target.to_owned(), resolved(target)?);
        let is_in_it = |file: PathBuf| file.canonicalize().is_ok_and(|file| file.parent() == Some(&target));
        if files::is_same(source.folder(), &target) || inputs(source).any(is_in_it) {
            return Err(is_source(&named));
        }
        Ok(Self { named, target, overwrite, source: source.folder().to_owned(), only: None })
    }

    /// The target itself where that ends like `name`, else the only file in it. Errors: it is the source, or a file of
    /// it.
    pub fn of_file(target: &Path, overwrite: bool, source: &Weights, name: &'static str) -> Result<Self> {
        let ending = |path: &Path| path.extension().map(|e| e.to_ascii_lowercase());
        if ending(target) != ending(Path::new(name)) || target.is_dir() {
            return Self::of_folder(target, overwrite, source);
        }
        if inputs(source).any(|file| files::is_same(&file, target)) {
            return Err(is_source(target));
        }
        Self::of_any_file(target, overwrite, name)
    }

    /// A file, whatever it is made of.
    fn of_any_file(target: &Path, overwrite: bool, name: &'static str) -> Result<Self> {
        let (named, target) = (target.to_owned(), resolved(target)?);
        Ok(Self { named, target, overwrite, source: PathBuf::new(), only: Some(name) })
    }

    /// Where it lies, and its name there. Error: it has none.
    fn parts(&self) -> Result<(&Path, &OsStr)> {
        self.target.parent().zip(self.target.file_name()).ok_or_else(|| {
            let expected = "a file or folder with a name";
            Error::invalid("write a model", expected, self.named.display().to_string())
        })
    }

    fn is_there(&self) -> bool {
        self.target.symlink_metadata().is_ok()
    }

    /// Errors: something is there that may not be replaced, or cannot be; it has no name.
    pub fn check(&self) -> Result<()> {
        let Self { named, target, overwrite, source, only } = self;
        self.parts()?;
        if !self.is_there() {
            return Ok(());
        }
        refuse_mount(target)?;
        let refuse = |why: &str| Err(Error::Exists { path: named.clone(), why: why.to_owned() });
        match only {
            None => replaceable::check(target, named, *overwrite, source),
            Some(_) if target.is_dir() => refuse(", and is a folder"),
            Some(_) if !overwrite => refuse(": choose another file, or ask to overwrite it"),
            Some(_) => Ok(()),
        }
    }
}

/// Files that a model is read from.
fn inputs(source: &Weights) -> impl Iterator<Item = PathBuf> {
    let is_read = |name: &OsStr| name.to_str().is_some_and(|name| name == "config.json" || is_side_file(name));
    let beside = files::names(source.folder()).unwrap_or_default().into_iter().filter(move |name| is_read(name));
    source.checkpoint().files().map(Path::to_owned).chain(beside.map(|name| source.folder().join(name)))
}

/// Error: a mount point, or the folder that this process is in, which nothing can take the name of.
pub(super) fn refuse_mount(target: &Path) -> Result<()> {
    let here = || std::env::current_dir().is_ok_and(|here| files::is_same(&here, target));
    let what = match files::is_mount_point(target) {
        true => "a mount point",
        false if here() => "the folder that this runs in",
        false => return Ok(()),
    };
    let got = format!("{}, {what}: choose a folder in it", target.display());
    Err(Error::invalid("write a model", "a target whose name a new one can take", got))
}

/// A temporary folder beside the target, removed when it is dropped before [`Staging::commit`].
#[derive(Debug)]
pub(super) struct Staging {
    room: Room,
    /// The folder to write in.
    path: PathBuf,
    /// As it was given, for who reads of it.
    named: PathBuf,
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
    /// Makes the folder. Errors: a target that is not a folder, that is the source, a mount point, that holds something
    /// and may not be replaced, or that holds more than a model; another process that writes it; the system's refusal.
    pub fn create(target: &Path, overwrite: bool, source: &Weights) -> Result<Self> {
        Self::begin(Place::of_folder(target, overwrite, source)?)
    }

    /// Makes the folder for a single file `name`: the target, if that ends like it, else the only file in the target.
    /// Errors: as [`Staging::create`]; a file that may not be replaced or that is the source.
    pub fn create_for_file(target: &Path, overwrite: bool, source: &Weights, name: &'static str) -> Result<Self> {
        Self::begin(Place::of_file(target, overwrite, source, name)?)
    }

    /// Makes the folder for a single file, which is `name` there.
    pub fn for_any_file(target: &Path, overwrite: bool, name: &'static str) -> Result<Self> {
        Self::begin(Place::of_any_file(target, overwrite, name)?)
    }

    fn begin(place: Place) -> Result<Self> {
        let (parent, name) = place.parts()?;
        let was_there = place.is_there();
        place.check()?;
        let made = files::create_dirs(parent).map_err(Error::io("create", parent))?;
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(".tmp");
        let room = Room::open(parent.join(hidden)).inspect_err(|_| files::remove_dirs(&made))?;
        let path = room.path.join(NEW);
        let Place { named, target, source, overwrite, only } = place.clone();
        let this = Self { room, path, named, target, source, overwrite, only, made, committed: false };
        recover(&this.room, &this.target)?;
        if !was_there {
            place.check()?;
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
        let Self { path, named, target, overwrite, .. } = &self;
        sync_dir(path)?;
        let exists = |e: std::io::Error| match e.kind() {
            ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
                Error::Exists { path: named.clone(), why: ": it came there meanwhile".to_owned() }
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
        clear(&self.room, &self.target)?;
        self.committed = true;
        Ok(std::mem::take(&mut self.named))
    }

    /// Puts the new folder in the place of one that is there.
    fn swap(&self) -> Result<()> {
        let Self { room, path, named, target, source, .. } = self;
        let check = |old: &Path| replaceable::check(old, named, true, source);
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
            let _ = clear(&self.room, &self.target);
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

/// The target without links, so that what a link points to is replaced and not the link. Error: a link that points to nothing.
pub(super) fn resolved(target: &Path) -> Result<PathBuf> {
    let is_link = target.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink());
    if is_link && !target.exists() {
        let why = " as a link to what is not there".to_owned();
        return Err(Error::Exists { path: target.to_owned(), why });
    }
    let absolute = || std::path::absolute(target).map(|path| path.components().collect());
    target.canonicalize().or_else(|_| absolute()).map_err(Error::io("resolve", target))
}

pub(super) fn is_source(target: &Path) -> Error {
    Error::invalid("write a model", "a target other than the source", target.display().to_string())
}

/// Removes the temporary folder of a target that a killed process has left, and puts back what it holds of the target.
pub(super) fn discard(room: PathBuf, target: &Path) -> Result<()> {
    clear(&Room::open(room)?, target)
}

/// Puts back what was taken out of the target's place if nothing came there, and removes the rest.
fn recover(room: &Room, target: &Path) -> Result<()> {
    let old = room.path.join(OLD);
    if old.is_dir() && target.symlink_metadata().is_err() {
        files::rename(&old, target).map_err(Error::io("rename", &old))?;
        sync_dir(files::parent(target))?;
    }
    room.refuse_others(&[NEW, OLD])?;
    let folders = [NEW, OLD].map(|name| room.path.join(name));
    folders.iter().filter(|folder| folder.is_dir()).try_for_each(|folder| remove_written(folder))
}

/// Removes the temporary folder with all that is in it, but for the only copy of what the target was.
fn clear(room: &Room, target: &Path) -> Result<()> {
    if room.is_open() {
        recover(room, target)?;
    }
    room.close()
}
