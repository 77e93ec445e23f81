//! The GPU driver, opened at run time: devices, contexts, memory, streams, graphs, launches.
//!
//! All calls of the driver's interface are made in this file and its folder. What the driver answers becomes an
//! [`Error`]: a missing library, a driver too old, memory that is short, a device that is gone each have a variant of
//! their own. A context is the device's *primary* one, which the CUDA runtime uses too, so that pointers and streams of
//! other libraries in the process can be handed in.

mod graph;
mod host_words;
mod launch;
mod memory;
mod peer;
mod stream;
mod tensor_map;
mod upload;

pub use graph::Graph;
pub(super) use graph::beside_capture;
pub use host_words::HostWords;
pub use launch::{Arg, Function, Launch, Module, Resources};
pub use memory::{Buffer, FloatView, FloatViewMut, View, ViewMut};
pub use peer::{Inbox, Peer};
pub use stream::{Event, Stream};
pub use tensor_map::{Promotion, Swizzle, TensorMap, Tiles, Windows};
pub use upload::{Sent, Uploader};

use super::library;
use crate::error::{Error, Result};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use std::ffi::{CStr, c_int};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// The oldest driver that has every function called here: tensor maps came with it.
const OLDEST: Version = Version { major: 12, minor: 0 };

/// A version of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes when interfaces break.
    pub major: u32,
    /// Changes when something is added.
    pub minor: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The driver, opened and started.
#[derive(Debug)]
pub struct Driver {
    version: Version,
    path: Option<PathBuf>,
    elapsed: ElapsedTime,
    /// Where `elapsed` lies.
    _library: library::Opened,
}

/// The driver's names, which are among those that cudarc opens it by.
const NAMES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// `cuEventElapsedTime`, which drivers of every age have under this name.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

static DRIVER: OnceLock<Driver> = OnceLock::new();

impl Driver {
    /// Opens the driver, once a process.
    ///
    /// Errors: no library of the driver, a driver older than CUDA 12.0, a driver that does not start.
    pub fn open() -> Result<&'static Self> {
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let opened = NAMES.iter().find_map(|name| library::open_file(Path::new(name)).ok());
        let Some(opened) = opened else {
            let looked = vec![format!("the loader's path, for {}", NAMES.join(", "))];
            return Err(Error::LibraryMissing { library: "the NVIDIA driver", looked });
        };
        let mut number: c_int = 0;
        // SAFETY: every driver has this function, and it may be called first.
        check("driver", unsafe { sys::cuDriverGetVersion(&mut number) })?;
        let number = u32::try_from(number).unwrap_or(0);
        let version = Version { major: number / 1000, minor: number % 1000 / 10 };
        if version < OLDEST {
            return Err(Error::DriverTooOld { op: "driver", needed: OLDEST.to_string(), found: version.to_string() });
        }
        // SAFETY: the library is there, and no flags are defined.
        check("driver", unsafe { sys::cuInit(0) })?;
        // SAFETY: the type is that of the driver's header; the library stays open as long as the function is kept.
        let elapsed = unsafe { opened.function::<ElapsedTime>("cuEventElapsedTime") }?;
        let path = library::mapped("libcuda.so");
        Ok(DRIVER.get_or_init(|| Driver { version, path, elapsed, _library: opened }))
    }

    /// The newest CUDA version that the driver serves.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The file that was opened, if the system tells.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// All devices that this process may see.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        let mut count: c_int = 0;
        // SAFETY: the driver is started.
        check("devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        (0..u32::try_from(count).unwrap_or(0)).map(|index| self.device(index)).collect()
    }

    /// One device. Error: there is none of this number.
    pub fn device(&self, index: u32) -> Result<DeviceInfo> {
        let mut count: c_int = 0;
        // SAFETY: the driver is started.
        check("devices", unsafe { sys::cuDeviceGetCount(&mut count) })?;
        if i64::from(index) >= i64::from(count) {
            let cause = format!("expected a device number below {count}, got {index}");
            return Err(Error::Device { op: "device", cause });
        }
        let device = handle(index)?;
        let attribute = |attribute: Attribute| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: `device` is a device and `value` takes one number.
            check("device", unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, device) })?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let mut name = [0; 256];
        // SAFETY: the driver writes at most 256 bytes, a zero last.
        check("device", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 256, device) })?;
        // SAFETY: as above, `name` ends with a zero.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let mut memory_bytes = 0;
        // SAFETY: `device` is a device.
        check("device", unsafe { sys::cuDeviceTotalMem_v2(&mut memory_bytes, device) })?;
        Ok(DeviceInfo {
            index,
            name,
            compute: [
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ],
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            l2_bytes: attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
            clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE).unwrap_or(0),
            memory_clock_khz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0),
            memory_bus_bits: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0),
            memory_bytes,
        })
    }
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its number among the visible ones.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute: [u32; 2],
    /// Multiprocessors (SMs).
    pub multiprocessors: u32,
    /// Shared memory that one block may have at most.
    pub shared_bytes: u32,
    /// Size of the second-level cache.
    pub l2_bytes: u32,
    /// Clock of the multiprocessors at most.
    pub clock_khz: u32,
    /// Clock of the memory at most, which has two transfers a clock.
    pub memory_clock_khz: u32,
    /// Width of the bus to memory.
    pub memory_bus_bits: u32,
    /// Size of its memory.
    pub memory_bytes: usize,
}

impl DeviceInfo {
    /// Megabytes (10⁶) a second between memory and multiprocessors, as the data sheet has it; 0: the driver does not tell.
    pub fn memory_mb_per_s(&self) -> u32 {
        let bytes_a_clock = u64::from(self.memory_bus_bits) / 8 * 2;
        u32::try_from(u64::from(self.memory_clock_khz) * bytes_a_clock / 1000).unwrap_or(u32::MAX)
    }
}

/// The primary context of a device, held as long as anything made from it.
#[derive(Clone, Debug)]
pub struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    driver: &'static Driver,
    handle: sys::CUcontext,
    device: sys::CUdevice,
    info: DeviceInfo,
}

// SAFETY: a context may be used from every thread (each call makes it current first), and the fields never change.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Context {
    /// The context of device `index`. Errors: those of [`Driver::open`], a number that no device has, no memory for it.
    pub fn open(index: u32) -> Result<Self> {
        let driver = Driver::open()?;
        let info = driver.device(index)?;
        let device = handle(index)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: `device` is a device.
        check("context", unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) })?;
        Ok(Self(Arc::new(Retained { driver, handle: context, device, info })))
    }

    /// The device.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// The driver.
    pub fn driver(&self) -> &'static Driver {
        self.0.driver
    }

    /// Bytes of memory that are free, and all of them.
    pub fn memory(&self) -> Result<[usize; 2]> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context is current.
        check("memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok([free, total])
    }

    /// Makes the context this thread's current one, as the driver's functions need it.
    pub(in crate::cuda) fn bind(&self) -> Result<()> {
        let mut current = std::ptr::null_mut();
        // SAFETY: may be called at any time; looking is cheaper than setting.
        let looked = unsafe { sys::cuCtxGetCurrent(&mut current) };
        if looked == CUresult::CUDA_SUCCESS && current == self.0.handle {
            return Ok(());
        }
        // SAFETY: the context is retained.
        check("context", unsafe { sys::cuCtxSetCurrent(self.0.handle) })
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained in `open`, released here once; what it says matters to nobody any more.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

fn handle(index: u32) -> Result<sys::CUdevice> {
    let mut device = 0;
    let ordinal = c_int::try_from(index).unwrap_or(c_int::MAX);
    // SAFETY: the driver is started by whoever has an index.
    check("device", unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    Ok(device)
}

/// The driver's answer to a request for memory of the host that kernels and copies reach.
fn check_host_memory(op: &'static str, bytes: usize, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => Err(Error::Memory { op, requested_bytes: bytes }),
        _ => check(op, result),
    }
}

/// The driver's answer as a result.
fn check(op: &'static str, result: CUresult) -> Result<()> {
    use CUresult::*;
    let cause = || format!("{result:?}: {}", description(result));
    match result {
        CUDA_SUCCESS => Ok(()),
        CUDA_ERROR_OUT_OF_MEMORY => {
            let (mut free_bytes, mut total) = (0, 0);
            // SAFETY: without a current context it fails and writes nothing.
            let _ = unsafe { sys::cuMemGetInfo_v2(&mut free_bytes, &mut total) };
            Err(Error::DeviceMemory { op, requested_bytes: 0, free_bytes })
        }
        CUDA_ERROR_STUB_LIBRARY => Err(Error::LibraryMissing {
            library: "the NVIDIA driver",
            looked: vec![
                "libcuda.so in the loader's path is a stub for linking: take its folder out of LD_LIBRARY_PATH".into(),
            ],
        }),
        CUDA_ERROR_ILLEGAL_ADDRESS
        | CUDA_ERROR_LAUNCH_TIMEOUT
        | CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUDA_ERROR_ASSERT
        | CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUDA_ERROR_MISALIGNED_ADDRESS
        | CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUDA_ERROR_INVALID_PC
        | CUDA_ERROR_LAUNCH_FAILED
        | CUDA_ERROR_ECC_UNCORRECTABLE
        | CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUDA_ERROR_TENSOR_MEMORY_LEAK
        | CUDA_ERROR_CONTAINED
        | CUDA_ERROR_EXTERNAL_DEVICE
        | CUDA_ERROR_MPS_CLIENT_TERMINATED
        | CUDA_ERROR_UNKNOWN => Err(Error::DeviceLost { op, cause: cause() }),
        _ => Err(Error::Device { op, cause: cause() }),
    }
}

fn description(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: may be called at any time; the text is the driver's own and stays.
    if unsafe { sys::cuGetErrorString(result, &mut text) } != CUresult::CUDA_SUCCESS || text.is_null() {
        return "the driver has no words for it".to_owned();
    }
    // SAFETY: the driver gave a text that ends with a zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
