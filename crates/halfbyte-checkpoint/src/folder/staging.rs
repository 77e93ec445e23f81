//! The folder of a temporary name in which a model is written, and its renaming.

use crate::error::{Error, Result};
use crate::scheme::Weights;
use crate::writer::{sync_dir, temporary_name};
use std::fs::File;
use std::path::{Path, PathBuf};

/// What belongs to a model besides its weights and `config.json`.
const SIDE_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tekken.json",
    "generation_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE",
    "LICENSE.txt",
    "LICENSE.md",
    "NOTICE",
    "NOTICE.txt",
];

/// A folder beside the target, removed when it is dropped before [`Staging::commit`].
#[derive(Debug)]
pub(super) struct Staging {
    path: PathBuf,
    target: PathBuf,
    /// The file of this name in the folder becomes the target; None: the folder itself does.
    only: Option<&'static str>,
    committed: bool,
}

impl Staging {
    /// Makes the folder. Errors: a target that is not a folder, that is the source, that holds something and may not be
    /// replaced, or that holds more than a model; the system's refusal.
    pub fn create(target: &Path, overwrite: bool, source: &Path) -> Result<Self> {
        // A link is followed, so that what it points to is replaced and not the link.
        let target = match target.canonicalize() {
            Ok(resolved) => resolved,
            Err(_) => std::path::absolute(target).map_err(Error::io("resolve", target))?,
        };
        let (Some(parent), Some(name)) = (target.parent(), target.file_name()) else {
            return Err(Error::invalid("write a model", "a folder with a name", target.display().to_string()));
        };
        if source.canonicalize().is_ok_and(|source| source == target) {
            return Err(Error::invalid(
                "write a model",
                "a target other than the source",
                target.display().to_string(),
            ));
        }
        if target.exists() {
            Self::may_replace(&target, overwrite)?;
        }
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        let path = temporary_name(parent, &name.to_string_lossy());
        std::fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path, target, only: None, committed: false })
    }

    /// Makes the folder for a single file `name`: the target, if that ends like it, else the only file in the target.
    /// Errors: as [`Staging::create`]; a file that may not be replaced or that is the source.
    pub fn create_for_file(target: &Path, overwrite: bool, source: &Weights, name: &'static str) -> Result<Self> {
        let ending = |path: &Path| path.extension().map(|e| e.to_ascii_lowercase());
        if ending(target) != ending(Path::new(name)) || target.is_dir() {
            return Self::create(target, overwrite, source.folder());
        }
        let target = std::path::absolute(target).map_err(Error::io("resolve", target))?;
        if source.checkpoint().files().any(|file| file.canonicalize().ok() == target.canonicalize().ok()) {
            let got = target.display().to_string();
            return Err(Error::invalid("write a model", "a target other than the source", got));
        }
        if target.symlink_metadata().is_ok() && !overwrite {
            let why = ": choose another file, or ask to overwrite it".to_owned();
            return Err(Error::Exists { path: target, why });
        }
        let (Some(parent), Some(file)) = (target.parent(), target.file_name()) else {
            return Err(Error::invalid("write a model", "a file with a name", target.display().to_string()));
        };
        std::fs::create_dir_all(parent).map_err(Error::io("create", parent))?;
        let path = temporary_name(parent, &file.to_string_lossy());
        std::fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(Self { path, target, only: Some(name), committed: false })
    }

    fn may_replace(target: &Path, overwrite: bool) -> Result<()> {
        let refuse = |why: &str| Err(Error::Exists { path: target.to_owned(), why: why.to_owned() });
        if !target.is_dir() {
            return refuse(", and is not a folder");
        }
        let entries: Vec<_> =
            std::fs::read_dir(target).and_then(Iterator::collect).map_err(Error::io("list", target))?;
        if entries.is_empty() {
            return Ok(());
        }
        if !overwrite {
            return refuse(" and is not empty: choose another folder, or ask to overwrite it");
        }
        // Replacing a folder deletes what is in it, so that it must be sure to be a model.
        if !["config.json", "model.gguf"].iter().any(|name| target.join(name).is_file()) {
            return refuse(", and is not overwritten: it has no config.json, so it is not a model folder");
        }
        if entries.iter().any(|e| e.path().is_dir()) {
            return refuse(", and is not overwritten: it has folders in it, so it holds more than a model");
        }
        Ok(())
    }

    /// The folder to write in.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies tokenizer, generation settings, licence, code of the model's own and the like, as far as the source has
    /// them.
    pub fn copy_side_files(&self, source: &Path) -> Result<()> {
        let entries: Vec<_> =
            std::fs::read_dir(source).and_then(Iterator::collect).map_err(Error::io("list", source))?;
        for entry in entries {
            let name = entry.file_name();
            let is_side_file = name.to_str().is_some_and(|name| SIDE_FILES.contains(&name) || name.ends_with(".py"));
            let (from, to) = (entry.path(), self.path.join(&name));
            if is_side_file && from.is_file() {
                let mut input = File::open(&from).map_err(Error::io("open", &from))?;
                let mut output = File::create_new(&to).map_err(Error::io("create", &to))?;
                std::io::copy(&mut input, &mut output)
                    .and_then(|_| output.sync_all())
                    .map_err(Error::io("write", &to))?;
            }
        }
        Ok(())
    }

    /// Gives the folder the target's name; a model that was there is deleted after that.
    pub fn commit(mut self) -> Result<PathBuf> {
        let Self { path, target, only, .. } = &self;
        let parent = target.parent().unwrap_or(Path::new("."));
        sync_dir(path)?;
        if let Some(name) = only {
            // The folder that is left is removed when this is dropped.
            std::fs::rename(path.join(name), target).map_err(Error::io("rename", target))?;
            sync_dir(parent)?;
            return Ok(target.clone());
        }
        let old = if !target.exists() {
            None
        } else if std::fs::remove_dir(target).is_ok() {
            // It was empty.
            None
        } else {
            let old = temporary_name(parent, &target.file_name().unwrap_or_default().to_string_lossy());
            std::fs::rename(target, &old).map_err(Error::io("rename", target))?;
            Some(old)
        };
        if let Err(e) = std::fs::rename(path, target) {
            if let Some(old) = &old {
                // If this fails too, the old model is still there under its temporary name.
                let _ = std::fs::rename(old, target);
            }
            return Err(Error::io("rename", path)(e));
        }
        sync_dir(parent)?;
        if let Some(old) = old {
            std::fs::remove_dir_all(&old).map_err(Error::io("remove", &old))?;
        }
        self.committed = true;
        Ok(std::mem::take(&mut self.target))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.committed {
            // Nothing can be done here about a failure.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
