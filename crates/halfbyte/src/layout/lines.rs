//! A byte buffer whose every line of 64 bytes is aligned, so that a vector load never crosses a cache line.

use bytemuck::allocation::try_zeroed_vec;
use bytemuck::{Pod, Zeroable};
use memmap2::MmapMut;
use std::alloc::{Layout, handle_alloc_error};

#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// From this size on a buffer is mapped by itself, with a wish for huge pages: going through it once, a processor would
/// else spend a good part of the time looking pages up, and the system a good part of loading on handing them out. Its
/// pages are zeroed by the thread that first writes them.
const MAPPED_BYTES: usize = 1 << 20;

/// Of a huge page.
const HUGE_BYTES: usize = 2 << 20;

/// What may be left unused of the last huge page; a shorter end of a buffer gets small pages.
#[cfg(target_os = "linux")]
const WASTED_BYTES: usize = HUGE_BYTES / 4;

/// Zero-initialised bytes, aligned to 64, in whole lines of 64.
#[derive(Default)]
pub struct Lines(Memory);

enum Memory {
    Heap(Vec<Line>),
    /// The mapping, and how much of it is the buffer.
    Mapped(MmapMut, usize),
}

impl Default for Memory {
    fn default() -> Self {
        Memory::Heap(Vec::new())
    }
}

impl Lines {
    /// Zeroed lines that hold at least `bytes`. Ends the process if memory is short.
    pub fn zeroed(bytes: usize) -> Self {
        Self::try_zeroed(bytes).unwrap_or_else(|| handle_alloc_error(Layout::new::<Line>()))
    }

    /// The same; None if memory is short.
    pub fn try_zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.checked_next_multiple_of(64)?;
        if bytes >= MAPPED_BYTES
            // In whole huge pages, or the system might not begin the mapping with one. What is not touched takes no memory.
            && let Ok(map) = MmapMut::map_anon(bytes.checked_next_multiple_of(HUGE_BYTES)?)
        {
            // Only a wish: without huge pages everything works, slower.
            #[cfg(target_os = "linux")]
            let _ = map.advise_range(memmap2::Advice::HugePage, 0, (bytes + WASTED_BYTES) / HUGE_BYTES * HUGE_BYTES);
            return Some(Self(Memory::Mapped(map, bytes)));
        }
        Some(Self(Memory::Heap(try_zeroed_vec(bytes / 64).ok()?)))
    }

    /// Grows to hold at least `bytes`; what was there may be lost.
    pub fn ensure(&mut self, bytes: usize) {
        if self.as_slice::<u8>().len() < bytes {
            *self = Self::zeroed(bytes);
        }
    }

    /// The buffer as elements of a plain type whose size divides 64.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        match &self.0 {
            Memory::Heap(lines) => bytemuck::cast_slice(lines),
            Memory::Mapped(map, bytes) => bytemuck::cast_slice(&map[..*bytes]),
        }
    }

    /// The buffer as writable elements of a plain type whose size divides 64.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        match &mut self.0 {
            Memory::Heap(lines) => bytemuck::cast_slice_mut(lines),
            Memory::Mapped(map, bytes) => bytemuck::cast_slice_mut(&mut map[..*bytes]),
        }
    }
}

impl Clone for Lines {
    fn clone(&self) -> Self {
        let bytes = self.as_slice::<u8>();
        let mut copy = Self::zeroed(bytes.len());
        copy.as_mut_slice::<u8>().copy_from_slice(bytes);
        copy
    }
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} lines of 64 bytes", self.as_slice::<u8>().len() / 64)
    }
}
