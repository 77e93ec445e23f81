//! Mapped host memory: words that a device writes, and the host looks at while it does.

use super::{Context, check_host_memory};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words in pinned host memory. A device writes them as a whole, so that the host sees what was there before or what is there now.
#[derive(Debug)]
pub struct HostWords {
    context: Context,
    words: *mut AtomicU64,
    len: usize,
}

// SAFETY: words that are read and written atomically.
unsafe impl Send for HostWords {}
// SAFETY: as above.
unsafe impl Sync for HostWords {}

impl HostWords {
    /// So many words, at least one, all of one value. Error: memory is short.
    pub fn new(context: &Context, len: usize, value: u64) -> Result<Self> {
        const OP: &str = "allocate pinned memory";
        let len = len.max(1);
        let bytes = len.checked_mul(size_of::<AtomicU64>());
        let bytes = bytes.ok_or_else(|| Error::invalid(OP, "a size that fits memory", format!("{len} words")))?;
        context.bind()?;
        let mut words = std::ptr::null_mut();
        // SAFETY: the context is current; memory of the host has the same address on the device.
        check_host_memory(OP, bytes, unsafe { sys::cuMemHostAlloc(&mut words, bytes, 0) })?;
        let words = words.cast::<AtomicU64>();
        for i in 0..len {
            // SAFETY: there is room for so many, which nothing else knows yet.
            unsafe { words.add(i).write(AtomicU64::new(value)) };
        }
        Ok(Self { context: context.clone(), words, len })
    }

    /// The device's address of the first.
    pub fn pointer(&self) -> u64 {
        self.words as u64
    }

    fn words(&self) -> &[AtomicU64] {
        // SAFETY: owned, and written as whole words only.
        unsafe { std::slice::from_raw_parts(self.words, self.len) }
    }

    /// What stands there now.
    pub fn get(&self, i: usize) -> u64 {
        self.words()[i].load(Ordering::Relaxed)
    }

    /// Writes a word that the device does not write meanwhile.
    pub fn set(&self, i: usize, value: u64) {
        self.words()[i].store(value, Ordering::Relaxed);
    }
}

impl Drop for HostWords {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed here once; the driver waits for what still writes it.
            let _ = unsafe { sys::cuMemFreeHost(self.words.cast()) };
        }
    }
}
