//! From an instance of a kernel to machine code: out of the cache, or compiled and kept.

use super::cache::{Cache, Key};
use super::driver::Version;
use super::nvrtc::{Compiled, Nvrtc};
use super::sources::{Arch, Instance};
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// The compiler with its cache, for one processor.
#[derive(Debug)]
pub struct Compiler {
    arch: Arch,
    /// Of the driver that the machine code is for.
    driver: Version,
    cache: Option<Cache>,
    refusal: Mutex<Option<String>>,
    compiled: AtomicUsize,
}

impl Compiler {
    /// For a processor, whose driver serves a version, with the cache of this user.
    pub fn new(arch: Arch, driver: Version) -> Self {
        match Cache::of_user() {
            Ok(cache) => Self::with_cache(arch, driver, Some(cache)),
            Err(why) => Self { refusal: Mutex::new(Some(why.to_string())), ..Self::with_cache(arch, driver, None) },
        }
    }

    /// With another cache, or none.
    pub fn with_cache(arch: Arch, driver: Version, cache: Option<Cache>) -> Self {
        Self { arch, driver, cache, refusal: Mutex::new(None), compiled: AtomicUsize::new(0) }
    }

    /// The processor.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// Why compiled kernels are not kept, if they are not: they will be compiled again by the next process.
    pub fn refusal(&self) -> Option<String> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Kernels that were compiled here, and not found in the cache.
    pub fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// The machine code of an instance.
    ///
    /// Errors: [`Error::LibraryMissing`] if it is not in the cache and there is no compiler, [`Error::Compile`].
    pub fn get(&self, instance: &Instance) -> Result<Compiled> {
        let key = Key::of(instance, self.arch)?;
        if let Some(kept) = self.cache.as_ref().and_then(|cache| cache.find(&key, self.driver)) {
            return Ok(kept);
        }
        let nvrtc = Nvrtc::open()?;
        if nvrtc.version().major > self.driver.major {
            let needed = format!("{}.0", nvrtc.version().major);
            return Err(Error::DriverTooOld { op: "NVRTC", needed, found: self.driver.to_string() });
        }
        let compiled = nvrtc.compile(instance, self.arch)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        if let Some(cache) = &self.cache
            && let Err(why) = cache.keep(&key, nvrtc.version(), &compiled)
        {
            let refusal = format!("{}: {why}", cache.folder().display());
            *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = Some(refusal);
        }
        Ok(compiled)
    }
}
