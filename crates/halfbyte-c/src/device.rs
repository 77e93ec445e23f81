//! CPUs, GPUs, and streams of callers.

use crate::handle::{Out, given};
use crate::status::{Failure, Result, guard, guard_quietly, halfbyte_status};
use halfbyte::cuda::driver::Stream;
use halfbyte::cuda::{Cuda, Gpu};
use halfbyte::{Cpu, Error};
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::Arc;

/// What layers are made for and run on: a CPU with a team of threads, or a GPU with a queue of work.
#[derive(Debug)]
pub struct halfbyte_device(pub(crate) Device);

/// The two kinds.
#[derive(Clone, Debug)]
pub(crate) enum Device {
    Cpu(Arc<Cpu>),
    Cuda(Cuda),
}

impl Device {
    pub fn name(&self) -> String {
        match self {
            Self::Cpu(_) => "a CPU".to_owned(),
            Self::Cuda(cuda) => format!("GPU {}", index(cuda)),
        }
    }
}

/// A layer of the kind of device that its weight was packed for.
#[derive(Debug)]
pub(crate) enum On<C, G> {
    Cpu(C),
    Cuda(G),
}

/// The number of a queue's GPU.
pub(crate) fn index(cuda: &Cuda) -> u32 {
    cuda.gpu().context().info().index
}

/// Error: a layer on one kind of device, called with the other.
pub(crate) fn other_device<T>(layer: &str, device: &Device) -> Result<T> {
    Err(Failure::invalid("device", format!("the kind of device that the layer was made for, {layer}"), device.name()))
}

/// Opens the CPU with a team of `threads` threads; 0: as many as the system offers to this process. Work of one device is done by one
/// call at a time; calls of others wait.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_device_cpu(
    threads: usize,
    out: Option<&mut MaybeUninit<*mut halfbyte_device>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let cpu = if threads == 0 { Cpu::all_threads()? } else { Cpu::new(threads)? };
        out.give(halfbyte_device(Device::Cpu(Arc::new(cpu))))
    })
}

/// Opens GPU `index` of those that the process may see, in its primary context, which the CUDA runtime uses too, with a new stream that
/// does not wait for the default stream.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_device_cuda(
    index: u32,
    out: Option<&mut MaybeUninit<*mut halfbyte_device>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        out.give(halfbyte_device(Device::Cuda(Cuda::open(index)?)))
    })
}

/// The GPU of `device` with a stream of the caller's, a `cudaStream_t` or `CUstream` of the GPU's primary context; null is the default
/// stream. It must stay open until the new device is freed. Kernels that were loaded for `device` serve the new one too, and layers that
/// were made with one run on the other. Opening one is cheap, so that a program may have one for each of its streams; each has memory
/// that its products work in.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_device_with_stream(
    device: Option<&halfbyte_device>,
    stream: *mut c_void,
    out: Option<&mut MaybeUninit<*mut halfbyte_device>>,
) -> halfbyte_status {
    guard(|| {
        let out = Out::new(out)?;
        let cuda = match &given("device", device)?.0 {
            Device::Cuda(cuda) => cuda,
            cpu @ Device::Cpu(_) => return Err(Failure::invalid("device", "a GPU, which has streams", cpu.name())),
        };
        // SAFETY: that the stream is one of this context, and stays open, is the caller's promise.
        let stream = unsafe { Stream::from_raw(cuda.gpu().context(), stream) };
        out.give(halfbyte_device(Device::Cuda(Cuda::new(cuda.gpu().clone(), stream)?)))
    })
}

/// Writes to `out` how many GPUs the process may see; 0 also without a driver.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_cuda_count(out: Option<&mut MaybeUninit<usize>>) -> halfbyte_status {
    guard(|| {
        let out = out.ok_or_else(|| crate::handle::null("out"))?;
        out.write(0);
        out.write(Gpu::count());
        Ok(())
    })
}

/// Waits for all work in the device's queue; on a CPU there is none to wait for. What failed on a GPU since the last wait is told here.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_device_synchronize(device: Option<&halfbyte_device>) -> halfbyte_status {
    guard(|| match &given("device", device)?.0 {
        Device::Cpu(_) => Ok(()),
        Device::Cuda(cuda) => cuda.synchronize().map_err(|error: Error| error.into()),
    })
}

/// Frees a device; null is nothing. Layers that were made for it go on.
#[unsafe(no_mangle)]
pub extern "C" fn halfbyte_device_free(device: Option<Box<halfbyte_device>>) {
    guard_quietly((), || drop(device));
}
