//! Memory of a device: buffers that are owned, and views of them or of a caller's own memory.

use super::{Context, Stream, check};
use crate::error::{Error, Result};
use crate::tensor::Float;
use bytemuck::Pod;
use cudarc::driver::sys;
use half::{bf16, f16};
use std::marker::PhantomData;
use std::ops::Range;

/// Owned memory of a device that holds elements of a plain type.
///
/// Freeing waits for the device's work, so that nothing still runs on it; only graphs can outlive what they use, see
/// [`super::Graph::launch`].
#[derive(Debug)]
pub struct Buffer<T> {
    context: Context,
    pointer: u64,
    len: usize,
    /// Whether it is freed here.
    owned: bool,
    elements: PhantomData<T>,
}

impl Context {
    /// Memory for `len` elements, with whatever bits lie there. Error: it is short.
    pub fn allocate<T: Pod>(&self, len: usize) -> Result<Buffer<T>> {
        const OP: &str = "allocate";
        let bytes = len.checked_mul(size_of::<T>());
        let bytes = bytes.ok_or_else(|| Error::invalid(OP, "a size that fits memory", format!("{len} elements")))?;
        self.bind()?;
        let mut pointer = 0;
        if bytes > 0 {
            // SAFETY: the context is current.
            check(OP, unsafe { sys::cuMemAlloc_v2(&mut pointer, bytes) }).map_err(|error| match error {
                Error::DeviceMemory { op, free_bytes, .. } => {
                    Error::DeviceMemory { op, requested_bytes: bytes, free_bytes }
                }
                other => other,
            })?;
        }
        Ok(Buffer { context: self.clone(), pointer, len, owned: true, elements: PhantomData })
    }
}

impl<T: Pod> Buffer<T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.len * size_of::<T>()
    }

    /// The device's address of the first element.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// The elements before one as a buffer that frees nothing, for as long as this one is borrowed, and the others; panics if there
    /// are fewer.
    pub(in crate::cuda) fn split_at(&mut self, at: usize) -> (Self, View<'_, T>) {
        (self.first(at), self.view().slice(at..self.len))
    }

    /// The first elements, which are freed with the others; panics if there are fewer.
    pub(in crate::cuda) fn first(&self, len: usize) -> Self {
        checked_range(&(0..len), self.len);
        Self { context: self.context.clone(), pointer: self.pointer, len, owned: false, elements: PhantomData }
    }

    /// Another buffer with the same content, once the stream is done.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self> {
        let mut copy = self.context.allocate(self.len)?;
        stream.copy(self.view(), copy.view_mut())?;
        Ok(copy)
    }

    /// Copies some elements to others of it, from `to` on, in the queue. Panics if the ranges do not lie within. *Errors:* they
    /// overlap.
    pub fn copy_within(&mut self, stream: &Stream, from: Range<usize>, to: usize) -> Result<()> {
        let (len, range) = (from.len(), to..to.saturating_add(from.len()));
        checked_range(&from, self.len);
        checked_range(&range, self.len);
        if from.start < range.end && range.start < from.end {
            return Err(Error::invalid("copy", "two ranges that share nothing", format!("{from:?} and {range:?}")));
        }
        let at = |first: usize| self.pointer + (first * size_of::<T>()) as u64;
        let to = ViewMut::<T> { pointer: at(to), len, elements: PhantomData };
        stream.copy(View::<T> { pointer: at(from.start), len, elements: PhantomData }, to)
    }

    /// All of it.
    pub fn view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, elements: PhantomData }
    }

    /// All of it, to be written.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { pointer: self.pointer, len: self.len, elements: PhantomData }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.owned && self.pointer != 0 && self.context.bind().is_ok() {
            // SAFETY: allocated in this context, freed here once. After a fault the memory is gone with the context.
            let _ = unsafe { sys::cuMemFree_v2(self.pointer) };
        }
    }
}

/// Borrowed elements on a device.
#[derive(Debug)]
pub struct View<'a, T> {
    pointer: u64,
    len: usize,
    elements: PhantomData<&'a [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

/// No elements.
impl<T> Default for View<'_, T> {
    fn default() -> Self {
        Self { pointer: 0, len: 0, elements: PhantomData }
    }
}

/// Borrowed elements on a device, to be written.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    pointer: u64,
    len: usize,
    elements: PhantomData<&'a mut [T]>,
}

fn checked_range(range: &Range<usize>, len: usize) {
    assert!(range.start <= range.end && range.end <= len, "elements {range:?} of {len}");
}

impl<'a, T: Pod> View<'a, T> {
    /// A view of memory that something else owns, as another library's tensor.
    ///
    /// # Safety
    /// `pointer` is the device's address of `len` elements, aligned for them, which stay there for `'a` and as long as
    /// work that was given the view runs; nothing writes them meanwhile.
    pub unsafe fn from_raw(pointer: u64, len: usize) -> Self {
        Self { pointer, len, elements: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device's address of the first element.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Some of it; panics if the range does not lie within.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        checked_range(&range, self.len);
        let pointer = self.pointer + (range.start * size_of::<T>()) as u64;
        View { pointer, len: range.len(), elements: PhantomData }
    }

    /// The same bytes as elements of another type; panics if they are no whole number of those, or not aligned for them.
    pub fn cast<U: Pod>(self) -> View<'a, U> {
        let bytes = self.len * size_of::<T>();
        let whole = bytes.is_multiple_of(size_of::<U>()) && self.pointer.is_multiple_of(align_of::<U>() as u64);
        assert!(whole, "{bytes} bytes at {:#x} as elements of {}", self.pointer, size_of::<U>());
        View { pointer: self.pointer, len: bytes / size_of::<U>(), elements: PhantomData }
    }
}

impl<'a, T: Pod> ViewMut<'a, T> {
    /// A view of memory that something else owns, as another library's tensor.
    ///
    /// # Safety
    /// `pointer` is the device's address of `len` elements, aligned for them, which stay there for `'a` and as long as
    /// work that was given the view runs; nothing else reads or writes them meanwhile.
    pub unsafe fn from_raw(pointer: u64, len: usize) -> Self {
        Self { pointer, len, elements: PhantomData }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The device's address of the first element.
    pub fn pointer(&self) -> u64 {
        self.pointer
    }

    /// Some of it; panics if the range does not lie within.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        checked_range(&range, self.len);
        let pointer = self.pointer + (range.start * size_of::<T>()) as u64;
        ViewMut { pointer, len: range.len(), elements: PhantomData }
    }

    /// The same memory, borrowed from this borrow.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { ..*self }
    }

    /// The same memory, to be read.
    pub fn view(&self) -> View<'_, T> {
        View { pointer: self.pointer, len: self.len, elements: PhantomData }
    }

    /// The elements before one, and the others; panics if there are fewer.
    pub fn split_at(self, at: usize) -> (ViewMut<'a, T>, ViewMut<'a, T>) {
        checked_range(&(at..self.len), self.len);
        let pointer = self.pointer + (at * size_of::<T>()) as u64;
        let later = ViewMut { pointer, len: self.len - at, elements: PhantomData };
        (ViewMut { len: at, ..self }, later)
    }

    /// As [`View::cast`].
    pub fn cast<U: Pod>(self) -> ViewMut<'a, U> {
        let View { pointer, len, .. } =
            View::<T> { pointer: self.pointer, len: self.len, elements: PhantomData }.cast::<U>();
        ViewMut { pointer, len, elements: PhantomData }
    }
}

/// Borrowed floats on a device, of one of the three types.
#[derive(Clone, Copy, Debug)]
pub enum FloatView<'a> {
    /// Half precision.
    F16(View<'a, f16>),
    /// Brain float.
    BF16(View<'a, bf16>),
    /// Single precision.
    F32(View<'a, f32>),
}

/// Borrowed floats on a device, of one of the three types, to be written.
#[derive(Debug)]
pub enum FloatViewMut<'a> {
    /// Half precision.
    F16(ViewMut<'a, f16>),
    /// Brain float.
    BF16(ViewMut<'a, bf16>),
    /// Single precision.
    F32(ViewMut<'a, f32>),
}

macro_rules! from_views {
    ($($variant:ident($type:ty)),*) => {$(
        impl<'a> From<View<'a, $type>> for FloatView<'a> {
            fn from(view: View<'a, $type>) -> Self {
                Self::$variant(view)
            }
        }

        impl<'a> From<ViewMut<'a, $type>> for FloatViewMut<'a> {
            fn from(view: ViewMut<'a, $type>) -> Self {
                Self::$variant(view)
            }
        }
    )*};
}

from_views!(F16(f16), BF16(bf16), F32(f32));

macro_rules! each_type {
    ($view:ident, $v:ident, $body:expr) => {
        match $view {
            Self::F16($v) => $body,
            Self::BF16($v) => $body,
            Self::F32($v) => $body,
        }
    };
}

impl<'a> FloatView<'a> {
    /// The same memory, as bytes.
    pub(in crate::cuda) fn into_bytes(self) -> View<'a, u8> {
        each_type!(self, v, v.cast())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each_type!(self, v, v.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device's address of the first element.
    pub fn pointer(&self) -> u64 {
        each_type!(self, v, v.pointer())
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        match self {
            Self::F16(_) => Float::F16,
            Self::BF16(_) => Float::BF16,
            Self::F32(_) => Float::F32,
        }
    }
}

impl<'a> FloatViewMut<'a> {
    /// The elements before `at`, and the others. Panics if there are not so many.
    pub fn split_at(self, at: usize) -> (Self, Self) {
        fn both<'a, T: Pod>((a, b): (ViewMut<'a, T>, ViewMut<'a, T>)) -> (FloatViewMut<'a>, FloatViewMut<'a>)
        where
            FloatViewMut<'a>: From<ViewMut<'a, T>>,
        {
            (a.into(), b.into())
        }
        each_type!(self, v, both(v.split_at(at)))
    }

    /// The same memory, as bytes.
    pub(in crate::cuda) fn into_bytes(self) -> ViewMut<'a, u8> {
        each_type!(self, v, v.cast())
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        each_type!(self, v, v.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The device's address of the first element.
    pub fn pointer(&self) -> u64 {
        each_type!(self, v, v.pointer())
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        match self {
            Self::F16(_) => Float::F16,
            Self::BF16(_) => Float::BF16,
            Self::F32(_) => Float::F32,
        }
    }
}
