//! A writable slice that the tasks of a team share, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A `&mut [T]` lent to several tasks that write disjoint ranges of it.
pub(crate) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

// SAFETY: parts are handed out by `range` only, whose callers promise that they do not overlap; so sharing this is no
// more than sending the parts.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    /// Lends `slice`.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), lifetime: PhantomData }
    }

    /// Elements `range`. Panics if they are not in the slice.
    ///
    /// # Safety
    /// No two ranges that are in use at a time may overlap.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts disjoint")]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the borrowed slice, checked just now; disjoint from the others by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
