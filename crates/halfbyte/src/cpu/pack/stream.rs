//! Stores past the caches.

use crate::cpu::isa::Isa;

/// Copies; past the caches where `to` is whole lines of 64 bytes. [`finish`] must follow before other threads may look.
#[inline(always)]
pub(super) fn copy(isa: Isa, from: &[u32], to: &mut [u8]) {
    assert!(from.len() * 4 == to.len());
    #[cfg(target_arch = "x86_64")]
    if to.len().is_multiple_of(64) && to.as_ptr().addr().is_multiple_of(64) {
        match isa {
            // SAFETY: a device with this family is made only where the processor was found to have it; as long, in whole
            // lines, and aligned, checked here.
            Isa::Avx512 | Isa::Amx => return unsafe { x86::copy_avx512(from, to) },
            // SAFETY: as above.
            Isa::Avx2 | Isa::AvxVnni => return unsafe { x86::copy_avx2(from, to) },
            Isa::Plain => {}
        }
    }
    let _ = isa;
    to.copy_from_slice(bytemuck::cast_slice(from));
}

/// Makes what this thread has stored visible to those that it tells of it.
pub(super) fn finish(isa: Isa) {
    #[cfg(target_arch = "x86_64")]
    if isa != Isa::Plain {
        // SAFETY: part of SSE, which every processor of this architecture has; orders stores and does nothing else.
        unsafe { std::arch::x86_64::_mm_sfence() };
    }
    let _ = isa;
}

/// Asks for the line of `words[at]`, if there is one.
#[inline(always)]
pub(super) fn prefetch(words: &[u32], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: part of SSE, which every processor of this architecture has; a hint, for whatever address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(words.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (words, at);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// # Safety
    /// `to` is as long as `from`, in whole lines, and aligned to 64.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn copy_avx512(from: &[u32], to: &mut [u8]) {
        for (from, to) in from.chunks_exact(16).zip(to.chunks_exact_mut(64)) {
            // SAFETY: 64 bytes each, by the chunks; aligned, by the caller's promise.
            unsafe { _mm512_stream_si512(to.as_mut_ptr().cast(), _mm512_loadu_si512(from.as_ptr().cast())) };
        }
    }

    /// # Safety
    /// As [`copy_avx512`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn copy_avx2(from: &[u32], to: &mut [u8]) {
        for (from, to) in from.chunks_exact(8).zip(to.chunks_exact_mut(32)) {
            // SAFETY: 32 bytes each, by the chunks; aligned, by the caller's promise.
            unsafe { _mm256_stream_si256(to.as_mut_ptr().cast(), _mm256_loadu_si256(from.as_ptr().cast())) };
        }
    }
}
