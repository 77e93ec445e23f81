//! Streams: work in order, and the events that mark places in it.

use super::memory::{View, ViewMut};
use super::{Context, check};
use crate::error::{Error, Result};
use bytemuck::Pod;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::time::Duration;

/// A queue of work of a device.
///
/// *Errors* of its calls: the device's, which may be of work before; of copies lengths that are not equal.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    handle: sys::CUstream,
    owned: bool,
}

// SAFETY: the driver takes calls on a stream from every thread; each call makes the context current first.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new queue, which does not wait for the default stream.
    pub fn new(context: &Context) -> Result<Self> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the context is current.
        check("stream", unsafe { sys::cuStreamCreate(&mut handle, flags) })?;
        Ok(Self { context: context.clone(), handle, owned: true })
    }

    /// A queue that something else owns: a `cudaStream_t` or `CUstream`; null is the default stream.
    ///
    /// # Safety
    /// `handle` is a stream of the primary context of this device and stays open as long as the result is used.
    pub unsafe fn from_raw(context: &Context, handle: *mut c_void) -> Self {
        Self { context: context.clone(), handle: handle.cast(), owned: false }
    }

    /// The driver's handle, a `CUstream`, for other libraries; closed with this stream.
    pub fn raw(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Waits for all work in the queue. Error: the work failed, or work before it.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the stream is open.
        check("synchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// Whether all work in the queue is done. Error: it failed, or work before it.
    pub fn is_done(&self) -> Result<bool> {
        self.context.bind()?;
        // SAFETY: the stream is open.
        match unsafe { sys::cuStreamQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("look at a stream", result).map(|()| true),
        }
    }

    /// Whether work is being recorded instead of done.
    pub fn is_recorded(&self) -> Result<bool> {
        self.context.bind()?;
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is open.
        check("capture", unsafe { sys::cuStreamIsCapturing(self.handle, &mut status) })?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Copies to the device and waits for it.
    pub fn upload<T: Pod>(&self, from: &[T], to: ViewMut<'_, T>) -> Result<()> {
        // SAFETY: `from` is borrowed until the copy is done.
        unsafe { self.upload_async(from, to) }?;
        self.synchronize()
    }

    /// Copies to the device in the queue.
    ///
    /// # Safety
    /// `from` stays as it is until the copy is done, each time that it is done if it is captured in a graph.
    pub unsafe fn upload_async<T: Pod>(&self, from: &[T], to: ViewMut<'_, T>) -> Result<()> {
        same_length("upload", from.len(), to.len())?;
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let bytes = size_of_val(from);
        // SAFETY: both sides have this many bytes; the caller keeps `from`.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to.pointer(), from.as_ptr().cast(), bytes, self.handle) };
        check("upload", result)
    }

    /// Copies from the device and waits for it.
    pub fn download<T: Pod>(&self, from: View<'_, T>, to: &mut [T]) -> Result<()> {
        // SAFETY: `to` is borrowed until the copy is done.
        unsafe { self.download_async(from, to) }?;
        self.synchronize()
    }

    /// Copies from the device in the queue.
    ///
    /// # Safety
    /// `to` is neither read nor written nor freed until the copy is done, each time that it is done if it is captured in a
    /// graph.
    pub unsafe fn download_async<T: Pod>(&self, from: View<'_, T>, to: &mut [T]) -> Result<()> {
        same_length("download", from.len(), to.len())?;
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let bytes = size_of_val(to);
        // SAFETY: both sides have this many bytes; the caller keeps `to`.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.pointer(), bytes, self.handle) };
        check("download", result)
    }

    /// Copies within the device in the queue.
    pub fn copy<T: Pod>(&self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<()> {
        same_length("copy", from.len(), to.len())?;
        if from.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        let bytes = from.len() * size_of::<T>();
        // SAFETY: both sides have this many bytes.
        check("copy", unsafe { sys::cuMemcpyDtoDAsync_v2(to.pointer(), from.pointer(), bytes, self.handle) })
    }

    /// Sets every byte in the queue.
    pub fn fill<T: Pod>(&self, to: ViewMut<'_, T>, byte: u8) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.context.bind()?;
        // SAFETY: the view has this many bytes.
        check("fill", unsafe { sys::cuMemsetD8Async(to.pointer(), byte, to.len() * size_of::<T>(), self.handle) })
    }

    /// Lets the queue wait this long, so that the host can put in what comes next before it begins: for measurements.
    pub fn delay(&self, time: Duration) -> Result<()> {
        unsafe extern "C" fn sleep(microseconds: *mut c_void) {
            std::thread::sleep(Duration::from_micros(microseconds as u64));
        }
        self.context.bind()?;
        let microseconds = usize::try_from(time.as_micros()).unwrap_or(usize::MAX);
        let number = std::ptr::without_provenance_mut(microseconds);
        // SAFETY: the stream is open; the function takes a number in the place of a pointer, and calls nothing of the driver.
        check("delay", unsafe { sys::cuLaunchHostFunc(self.handle, Some(sleep), number) })
    }

    /// Puts an event at this place of the queue.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: stream and event are open.
        check("record", unsafe { sys::cuEventRecord(event.handle, self.handle) })
    }

    /// Lets the queue wait for an event that another queue has recorded.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: stream and event are open.
        check("wait", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.context.bind().is_ok() {
            // SAFETY: made in `new`, closed here once; the driver finishes its work first.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

fn same_length(op: &'static str, from: usize, to: usize) -> Result<()> {
    if from == to {
        return Ok(());
    }
    Err(Error::invalid(op, format!("room for {from} elements"), to.to_string()))
}

/// A mark in a stream's work. *Errors* of its calls: the device's, which may be of work before.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: sys::CUevent,
}

// SAFETY: the driver takes calls on an event from every thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// A mark that keeps the time.
    pub fn new(context: &Context) -> Result<Self> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the context is current; no flags: time is kept.
        check("event", unsafe { sys::cuEventCreate(&mut handle, 0) })?;
        Ok(Self { context: context.clone(), handle })
    }

    /// Waits until the work before it is done.
    pub fn synchronize(&self) -> Result<()> {
        self.context.bind()?;
        // SAFETY: the event is open.
        check("synchronize", unsafe { sys::cuEventSynchronize(self.handle) })
    }

    /// Seconds from an earlier event to this one. Error: one of them is not reached yet.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64> {
        self.context.bind()?;
        let mut milliseconds = 0.0;
        let elapsed = self.context.driver().elapsed;
        // SAFETY: both events are open, and the function is the driver's.
        check("elapsed time", unsafe { elapsed(&mut milliseconds, earlier.handle, self.handle) })?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, closed here once.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
