//! Opening files by their names: regular ones only, so that a pipe, a socket or a device neither hangs nor never ends.

use crate::error::{Error, Result};
use std::fs::{File, FileType};
use std::io::Read;
use std::path::Path;

/// Opens a regular file, or a link to one; returns it with its length. Errors: none there; a folder, a pipe, a socket or a
/// device, which is not even opened; the system's refusal.
pub fn open_regular(path: &Path) -> Result<(File, u64)> {
    let check = |kind: FileType| match kind.is_file() {
        true => Ok(()),
        false => Err(Error::malformed(path, format!("expected a regular file, got {}", name(kind)))),
    };
    check(std::fs::metadata(path).map_err(Error::io("open", path))?.file_type())?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    // Another file may have come under this name since.
    let metadata = file.metadata().map_err(Error::io("read the size of", path))?;
    check(metadata.file_type())?;
    Ok((file, metadata.len()))
}

/// Reads a regular file whole. Errors: those of [`open_regular`]; more than `most` bytes, whatever its length was said to be.
pub fn read_at_most(path: &Path, most: u64) -> Result<Vec<u8>> {
    let (file, length) = open_regular(path)?;
    let too_long = |got: String| Error::malformed(path, format!("expected at most {most} bytes, got {got}"));
    if length > most {
        return Err(too_long(length.to_string()));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    let read = file.take(most + 1).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if read as u64 > most {
        return Err(too_long("more".to_owned()));
    }
    Ok(bytes)
}

fn name(kind: FileType) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
        if kind.is_char_device() || kind.is_block_device() {
            return "a device";
        }
    }
    if kind.is_dir() { "a folder" } else { "something else" }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    #[test]
    fn only_regular_files_and_links_to_them_are_opened() {
        let here = tempfile::tempdir().unwrap();
        let path = |name: &str| here.path().join(name);
        std::fs::write(path("file"), b"12345").unwrap();
        symlink(path("file"), path("link")).unwrap();
        assert_eq!(read_at_most(&path("link"), 5).unwrap(), b"12345");
        assert!(read_at_most(&path("file"), 4).unwrap_err().to_string().contains("at most 4 bytes, got 5"));

        assert!(Command::new("mkfifo").arg(path("pipe")).status().unwrap().success());
        symlink("/dev/zero", path("endless")).unwrap();
        let _listener = UnixListener::bind(path("socket")).unwrap();
        for (name, kind) in [("pipe", "a pipe"), ("endless", "a device"), ("socket", "a socket"), (".", "a folder")] {
            for most in [0, u64::MAX - 1] {
                let error = read_at_most(&path(name), most).unwrap_err().to_string();
                assert!(error.contains(&format!("expected a regular file, got {kind}")), "{error}");
            }
        }
        // Files of the system have content beyond the length that they state.
        if cfg!(target_os = "linux") {
            let error = read_at_most(Path::new("/proc/self/status"), 10).unwrap_err().to_string();
            assert!(error.contains("at most 10 bytes, got more"), "{error}");
        }
    }
}
