//! A read-only memory mapping of a whole file: the only unsafe code of the crate.
#![allow(unsafe_code)]

use crate::error::{Error, Result};
use crate::regular::open_regular;
use memmap2::Mmap;
use std::ops::Range;
use std::path::Path;

/// The bytes of a file, paged in when they are touched.
#[derive(Debug)]
pub(crate) struct Mapping(Option<Mmap>);

impl Mapping {
    /// Of no file.
    pub fn none() -> Self {
        Self(None)
    }

    /// Maps a regular file. Errors: none there, not a regular file, the system's refusal.
    pub fn open(path: &Path) -> Result<Self> {
        let (file, _) = open_regular(path).map_err(|error| match error {
            Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
                Error::missing(path, "there is no such file")
            }
            other => other,
        })?;
        // SAFETY: the mapping is read-only and private to this value, which hands out only `&[u8]`. That the file does
        // not change under it cannot be enforced: as with every program that maps weights, another process that
        // rewrites the file in place changes the bytes, and one that truncates it raises a signal. No invariant of
        // this crate rests on the bytes staying the same after validation: headers are parsed once into owned values,
        // and tensor data is only ever read as integers and floats, for which every bit pattern is valid.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        Ok(Self(Some(map)))
    }

    /// The whole file.
    pub fn bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Tells the system that these bytes will not be read soon, so that they stop counting as resident. They are read
    /// from the file again when they are touched again.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Some(map) = &self.0
            && !range.is_empty()
            && range.end <= map.len()
        {
            // SAFETY: dropping pages of a read-only mapping of a file never loses data: the next access reads them
            // from the file, so that slices which were handed out stay valid. The range lies within the mapping.
            // A refusal changes nothing but the memory in use, so that it is no error.
            let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
