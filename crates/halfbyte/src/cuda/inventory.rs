//! What of CUDA this machine has: found where, or looked for where.

use super::cache::Cache;
use super::driver::{Context, DeviceInfo, Driver, Version};
use super::library::{self, CUBLASLT};
use super::nvrtc::Nvrtc;
use crate::error::Result;
use std::path::PathBuf;

/// A library that was found.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its version.
    pub version: Version,
    /// The file, if the system tells.
    pub path: Option<PathBuf>,
}

/// A device with its memory.
#[derive(Clone, Debug)]
pub struct FoundDevice {
    /// What it is.
    pub info: DeviceInfo,
    /// Bytes of its memory that are free.
    pub free_bytes: usize,
}

/// The folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct FoundCache {
    /// Where it is.
    pub folder: PathBuf,
    /// Kernels in it.
    pub kernels: usize,
    /// Bytes that they take.
    pub bytes: u64,
    /// Why nothing can be written there, if nothing can.
    pub refusal: Option<String>,
}

/// The driver.
pub fn driver() -> Result<Found> {
    let driver = Driver::open()?;
    Ok(Found { version: driver.version(), path: driver.path().map(Into::into) })
}

/// The devices, each opened once.
pub fn devices() -> Result<Vec<FoundDevice>> {
    let devices = Driver::open()?.devices()?;
    devices
        .into_iter()
        .map(|info| {
            let [free_bytes, _] = Context::open(info.index)?.memory()?;
            Ok(FoundDevice { info, free_bytes })
        })
        .collect()
}

/// The run-time compiler.
pub fn nvrtc() -> Result<Found> {
    let nvrtc = Nvrtc::open()?;
    Ok(Found { version: nvrtc.version(), path: Some(nvrtc.path().into()) })
}

/// The library of dense products.
pub fn cublaslt() -> Result<Found> {
    let newest = Driver::open().ok().map(|driver| driver.version().major);
    let opened = library::open(&CUBLASLT, newest)?;
    let number = library::number(&opened, "cublasLtGetVersion")?;
    // 130100 for 13.1.0, since version 11.
    let version = Version { major: (number / 10_000) as u32, minor: (number / 100 % 100) as u32 };
    Ok(Found { version, path: Some(opened.path().into()) })
}

/// The cache of this user.
pub fn cache() -> Result<FoundCache> {
    let cache = Cache::of_user()?;
    let (kernels, bytes) = cache.size();
    let refusal = cache.probe().err().map(|why| why.to_string());
    Ok(FoundCache { folder: cache.folder().into(), kernels, bytes, refusal })
}
