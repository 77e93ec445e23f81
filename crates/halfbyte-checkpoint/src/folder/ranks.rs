//! The folders of all ranks of a model, which are replaced together.
//!
//! ```text
//! <target>/rank-0, rank-1 ...
//! <target>/.ranks.tmp/
//!     lock        held while a process works here; its content says that the folder is ours
//!     writing/    new parts, not all of them yet
//!     ready/      all new parts, while those that were there go to `old` one after the other
//!     placing/    all new parts, from rank 0 on given their names; all that were there are in `old`
//!     old/        the parts that were there, until all new ones have their names
//! ```
//!
//! `writing` becomes `ready` and that `placing` by a rename, so that at each moment their names say what lies where.
//! Who finds this folder with nobody in it puts the old parts back, or, where all new ones have their names, removes
//! the old.

use super::part::{Part, refuse_part};
use super::replaceable;
use super::room::{Room, foreign, holds_something, remove_written};
use super::staging::{discard, is_source, refuse_mount, resolved};
use crate::error::{Error, Result};
use crate::files::{self, sync_dir};
use crate::scheme::Weights;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

const ROOM: &str = ".ranks.tmp";
const WRITING: &str = "writing";
const READY: &str = "ready";
const PLACING: &str = "placing";
const OLD: &str = "old";

/// Folders for the parts of all ranks, written beside those that are there and replacing them together; no other
/// process writes there meanwhile. Dropped before [`RankFolders::commit`], it leaves what was there.
#[derive(Debug)]
pub struct RankFolders<'a> {
    source: &'a Weights,
    target: PathBuf,
    ranks: usize,
    overwrite: bool,
    room: Room,
    /// Folders that were made for it: the target, and those above it.
    made: Vec<PathBuf>,
    committed: bool,
}

impl<'a> RankFolders<'a> {
    /// Begins to write the parts of a model for so many ranks into a folder; what a killed process has left there is
    /// put in order first.
    ///
    /// *Errors:* a folder that is a model itself; a folder of a rank that holds something and may not be replaced, or
    /// more than a model, that is the source, a link or a mount point; one of further ranks that is no part; another process that writes there; a
    /// source that is a part; the system's refusal. Nothing is touched then.
    pub fn create(source: &'a Weights, target: &Path, ranks: usize, overwrite: bool) -> Result<Self> {
        refuse_part("cut a model for ranks", source)?;
        let target = resolved(target)?;
        if target.exists() && !target.is_dir() {
            return Err(Error::Exists { path: target, why: ", and is not a folder".to_owned() });
        }
        // Whoever opens the folder would take that model, not the parts.
        if target.join("config.json").symlink_metadata().is_ok() {
            let why = ", and holds a model; parts of ranks lie in a folder of their own".to_owned();
            return Err(Error::Exists { path: target, why });
        }
        let made = files::create_dirs(&target).map_err(Error::io("create", &target))?;
        let room = Room::open(target.join(ROOM)).inspect_err(|_| files::remove_dirs(&made))?;
        let this = Self { source, target, ranks, overwrite, room, made, committed: false };
        this.recover()?;
        for rank in ranks_in(&this.target)? {
            let place = this.target.join(Part::folder(rank));
            this.check(rank, &place, &place)?;
        }
        for folder in [WRITING, OLD].map(|name| this.room.path.join(name)) {
            files::create_dir(&folder).map_err(Error::io("create", &folder))?;
        }
        Ok(this)
    }

    /// Where the part of a rank is to be written.
    pub fn place(&self, rank: usize) -> PathBuf {
        self.room.path.join(WRITING).join(Part::folder(rank))
    }

    /// Gives all parts their names, in the place of those that were there, which are then removed. Errors: the system's
    /// refusal, something that came there meanwhile. The target is then what it was, unless only the removal was
    /// refused or the last sync.
    pub fn commit(mut self) -> Result<PathBuf> {
        self.replace()?;
        // The target is in them.
        self.made.clear();
        self.recover()?;
        self.room.close()?;
        self.committed = true;
        Ok(std::mem::take(&mut self.target))
    }

    fn replace(&self) -> Result<()> {
        let Self { target, ranks, room, .. } = self;
        let [writing, ready, placing, old] = self.folders();
        sync_dir(&writing)?;
        rename(&writing, &ready)?;
        sync_dir(&room.path)?;
        for rank in ranks_in(target)? {
            let (place, out) = (target.join(Part::folder(rank)), old.join(Part::folder(rank)));
            rename(&place, &out)?;
            // Again, for what came into it meanwhile: it is going to be removed.
            self.check(rank, &out, &place)?;
        }
        sync_dir(&old)?;
        sync_dir(target)?;
        rename(&ready, &placing)?;
        sync_dir(&room.path)?;
        for rank in 0..*ranks {
            rename(&placing.join(Part::folder(rank)), &target.join(Part::folder(rank)))?;
        }
        sync_dir(&placing)?;
        sync_dir(target)
    }

    fn folders(&self) -> [PathBuf; 4] {
        [WRITING, READY, PLACING, OLD].map(|name| self.room.path.join(name))
    }

    /// Errors: the folder of a rank, which is here now, may not be replaced.
    fn check(&self, rank: usize, here: &Path, place: &Path) -> Result<()> {
        let refuse = |why: &str| Err(Error::Exists { path: place.to_owned(), why: why.to_owned() });
        if !here.symlink_metadata().is_ok_and(|metadata| metadata.is_dir()) {
            return refuse(", and is not a folder");
        }
        refuse_mount(here)?;
        if files::is_same(self.source.folder(), here) {
            return Err(is_source(place));
        }
        replaceable::check(here, place, self.overwrite, self.source.folder())?;
        let is_part = || Weights::open(here).is_ok_and(|model| model.part().is_ok_and(|part| part.is_some()));
        if rank >= self.ranks && holds_something(here) && !is_part() {
            return refuse(", and is no part of a model, though it is named like one of a rank's");
        }
        Ok(())
    }

    /// Puts the parts that were there back, unless all new ones have their names, and removes the others.
    fn recover(&self) -> Result<()> {
        let Self { target, room, .. } = self;
        let [writing, ready, placing, old] = self.folders();
        room.refuse_others(&[WRITING, READY, PLACING, OLD])?;
        if placing.is_dir() {
            match ranks_in(&placing)?.first() {
                None => files::remove_dir(&placing).map_err(Error::io("remove", &placing))?,
                Some(&first) => {
                    for rank in (0..first).rev() {
                        put_back(&target.join(Part::folder(rank)), &placing.join(Part::folder(rank)))?;
                    }
                    sync_dir(&placing)?;
                    sync_dir(target)?;
                    rename(&placing, &ready)?;
                }
            }
            sync_dir(&room.path)?;
        }
        if ready.is_dir() {
            for rank in ranks_in(&old)? {
                put_back(&old.join(Part::folder(rank)), &target.join(Part::folder(rank)))?;
            }
            sync_dir(&old)?;
            sync_dir(target)?;
            rename(&ready, &writing)?;
            sync_dir(&room.path)?;
        }
        [writing, old].iter().filter(|folder| folder.is_dir()).try_for_each(|folder| remove_parts(folder))
    }
}

impl Drop for RankFolders<'_> {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done here about a failure; the next run on this target tries again.
            let _ = self.recover().and_then(|()| self.room.close());
            files::remove_dirs(&self.made);
        }
    }
}

/// The ranks of which a folder has something by their names, in order.
fn ranks_in(folder: &Path) -> Result<Vec<usize>> {
    let names = files::names(folder).map_err(Error::io("list", folder))?;
    let rank = |name: &str| {
        let rank = name.strip_prefix("rank-")?.parse().ok()?;
        (Part::folder(rank) == name).then_some(rank)
    };
    let mut ranks: Vec<usize> = names.iter().filter_map(|name| rank(name.to_str()?)).collect();
    ranks.sort_unstable();
    Ok(ranks)
}

/// Error: the new name is taken.
fn rename(from: &Path, to: &Path) -> Result<()> {
    files::rename_new(from, to).map_err(|e| match e.kind() {
        ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty => {
            let why = format!(": it came there while {} was to take its name", from.display());
            Error::Exists { path: to.to_owned(), why }
        }
        _ => Error::io("rename", from)(e),
    })
}

/// Renames a part that may have been taken away meanwhile.
fn put_back(from: &Path, to: &Path) -> Result<()> {
    if from.symlink_metadata().is_err() { Ok(()) } else { rename(from, to) }
}

/// Removes a folder of parts, with what a killed process left of one that it was writing.
fn remove_parts(folder: &Path) -> Result<()> {
    let ranks = ranks_in(folder)?;
    for name in files::names(folder).map_err(Error::io("list", folder))? {
        let (path, shown) = (folder.join(&name), name.to_str().unwrap_or_default());
        let unfinished = shown.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp"));
        match unfinished.filter(|name| name.starts_with("rank-")) {
            Some(part) => discard(path, &folder.join(part))?,
            None if ranks.iter().any(|&rank| Part::folder(rank) == shown) => remove_written(&path)?,
            None => return Err(foreign(path)),
        }
    }
    files::remove_dir(folder).map_err(Error::io("remove", folder))
}
