//! A file that a command writes besides its result: a report, a plot.

use crate::failure::{Exit, Failure, Result};
use halfbyte_checkpoint::Replacement;
use std::path::{Path, PathBuf};

/// Whether it can be written there, asked before the work begins; nothing is left. `output` is what the command writes, if that is a
/// file or folder. Errors: it is the output or lies in it, its folder is missing, what [`Replacement::create`] refuses.
pub fn check(option: &str, path: &Path, overwrite: bool, inputs: &[PathBuf], output: Option<&Path>) -> Result<()> {
    if output.is_some_and(|output| lies_in(path, output)) {
        return Err(Failure::usage(
            format!("{option} {} is the output, or lies in it", path.display()),
            "the output is written as a whole, and holds nothing else",
            "choose another place",
        ));
    }
    let folder = folder_of(path);
    if !folder.is_dir() {
        return Err(Failure::new(
            Exit::Device,
            format!("cannot write {}", path.display()),
            format!("there is no folder {}", folder.display()),
            "make the folder first, or choose another place",
        ));
    }
    drop(Replacement::create(path, overwrite, inputs)?);
    Ok(())
}

/// The folder that a file lies in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a path is this file or folder, or one below it, by whatever links.
fn lies_in(path: &Path, output: &Path) -> bool {
    let resolved = |path: &Path| {
        let of_folder = || Some(folder_of(path).canonicalize().ok()?.join(path.file_name()?));
        path.canonicalize().ok().or_else(of_folder)
    };
    let within = |path: Option<PathBuf>, output: Option<PathBuf>| {
        path.is_some_and(|path| output.is_some_and(|output| path.starts_with(output)))
    };
    within(resolved(path), resolved(output)) || within(std::path::absolute(path).ok(), std::path::absolute(output).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_in_the_output_and_missing_folders_are_refused() {
        let here = tempfile::TempDir::new().unwrap();
        let path = |name: &str| here.path().join(name);
        let output = path("out");
        let refused = |name: &str| check("--report", &path(name), false, &[], Some(&output)).is_err();
        let all = ["out", "out/report.json", "out/a/report.json", "missing/report.json"];
        assert!(all.iter().all(|name| refused(name)) && !refused("out.json") && !refused("report.json"));
        std::fs::create_dir(&output).unwrap();
        assert!(all.iter().all(|name| refused(name)) && !refused("report.json"));
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&output, path("link")).unwrap();
            assert!(refused("link/report.json") && refused("link/../out/report.json"));
            std::fs::remove_file(path("link")).unwrap();
        }
        let left: Vec<_> = std::fs::read_dir(here.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["out"]);
    }
}
