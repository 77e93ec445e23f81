//! Uploads by way of pinned memory: what several threads write there, the copy engine takes meanwhile.

use super::memory::ViewMut;
use super::stream::{Event, Stream};
use super::{Context, check_host_memory};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes of a piece: long enough for the full speed of the bus, short enough for the caches of the processor.
const PIECE_BYTES: usize = 4 << 20;

/// Host memory that the device copies from by itself.
#[derive(Debug)]
struct Pinned {
    context: Context,
    memory: *mut u8,
    bytes: usize,
    /// Recorded behind the last copy from here.
    copied: Event,
}

// SAFETY: owned memory, which is written through `&mut` only.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    fn new(context: &Context, bytes: usize) -> Result<Self> {
        const OP: &str = "allocate pinned memory";
        let copied = Event::new(context)?;
        context.bind()?;
        let mut memory = std::ptr::null_mut();
        // SAFETY: the context is current; no flags.
        check_host_memory(OP, bytes, unsafe { sys::cuMemHostAlloc(&mut memory, bytes, 0) })?;
        // SAFETY: there are so many bytes, which nothing else knows yet.
        unsafe { std::ptr::write_bytes(memory.cast::<u8>(), 0, bytes) };
        Ok(Self { context: context.clone(), memory: memory.cast(), bytes, copied })
    }

    /// The memory, once nothing copies from it any more.
    fn wait(&mut self) -> Result<&mut [u8]> {
        self.copied.synchronize()?;
        // SAFETY: owned and zeroed when it was allocated, and copies from it are done.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.memory, self.bytes) })
    }

    /// Puts a copy of its first bytes into a stream.
    fn copy(&mut self, stream: &Stream, to: ViewMut<'_, u8>) -> Result<()> {
        // SAFETY: as in `wait`; what is copied from here is written again, or freed, after `copied` only.
        let from = unsafe { std::slice::from_raw_parts(self.memory, self.bytes) };
        let Some(from) = from.get(..to.len()) else {
            return Err(Error::invalid("upload", format!("at most {} bytes", self.bytes), to.len().to_string()));
        };
        // SAFETY: as above.
        unsafe { stream.upload_async(from, to) }?;
        stream.record(&self.copied)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let done = self.copied.synchronize();
        // After a fault nothing copies any more, and the memory goes with the process.
        if done.is_ok() && self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed here once, and no copy from it is left.
            let _ = unsafe { sys::cuMemFreeHost(self.memory.cast()) };
        }
    }
}

/// What was brought to a device, and where the time of the thread that did it went.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    /// Bytes that went over the bus.
    pub bytes: u64,
    /// Time to write them to pinned memory.
    pub writing: Duration,
    /// Time that nothing could be written: pinned memory was still copied from, or the device worked on the last bytes.
    pub waiting: Duration,
}

impl Sent {
    /// What two threads did, together.
    pub fn and(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            writing: self.writing + other.writing,
            waiting: self.waiting + other.waiting,
        }
    }
}

/// Copies to a device at the speed of the bus, of what the caller writes piece by piece.
#[derive(Debug)]
pub struct Uploader {
    context: Context,
    /// Used in turn: one is written while the other is copied.
    pinned: [Option<Pinned>; 2],
    next: usize,
    sent: Sent,
}

impl Uploader {
    /// Takes memory when it is first used.
    pub fn new(context: &Context) -> Self {
        Self { context: context.clone(), pinned: [None, None], next: 0, sent: Sent::default() }
    }

    /// Copies to the device, in the queue, what `write` puts into the bytes that it is given, which are those of the range
    /// of `to`; ranges come in order, and are whole multiples of `unit` bytes.
    ///
    /// Errors: those of `write`; a length that is no multiple of `unit`; memory is short.
    pub fn upload(
        &mut self,
        stream: &Stream,
        to: ViewMut<'_, u8>,
        unit: usize,
        mut write: impl FnMut(Range<usize>, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let (len, unit) = (to.len(), unit.max(1));
        if !len.is_multiple_of(unit) {
            return Err(Error::invalid("upload", format!("a multiple of {unit} bytes"), len.to_string()));
        }
        let piece = len.min((PIECE_BYTES / unit).max(1) * unit);
        let mut to = to;
        let mut first = 0;
        while first < len {
            let bytes = piece.min(len - first);
            let pinned = &mut self.pinned[self.next];
            let pinned = match pinned {
                Some(pinned) if pinned.bytes >= bytes => pinned,
                // Of the power of two, so that growing ends soon.
                other => other.insert(Pinned::new(&self.context, bytes.next_power_of_two())?),
            };
            let begun = Instant::now();
            let room = &mut pinned.wait()?[..bytes];
            let free = Instant::now();
            write(first..first + bytes, room)?;
            self.sent = self.sent.and(Sent { bytes: bytes as u64, writing: free.elapsed(), waiting: free - begun });
            let (now, later) = to.split_at(bytes);
            pinned.copy(stream, now)?;
            to = later;
            first += bytes;
            self.next = 1 - self.next;
        }
        Ok(())
    }
    /// Waits for all work in the queue.
    pub fn finish(&mut self, stream: &Stream) -> Result<()> {
        let begun = Instant::now();
        stream.synchronize()?;
        self.sent.waiting += begun.elapsed();
        Ok(())
    }

    /// What was done so far.
    pub fn sent(&self) -> Sent {
        self.sent
    }
}
