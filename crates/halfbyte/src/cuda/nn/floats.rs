//! Floats that stay on a device, of one of the three types.

use crate::cuda::Gpu;
use crate::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, View};
use crate::error::Result;
use crate::tensor::{Float, Floats};
use bytemuck::Pod;
use half::{bf16, f16};
use std::ops::Range;

/// Owned floats on a device.
#[derive(Debug)]
pub enum FloatBuffer {
    /// Half precision.
    F16(Buffer<f16>),
    /// Brain float.
    BF16(Buffer<bf16>),
    /// Single precision.
    F32(Buffer<f32>),
}

impl FloatBuffer {
    /// Memory for `len` elements, with whatever bits lie there. Error: it is short.
    pub fn allocate(gpu: &Gpu, dtype: Float, len: usize) -> Result<Self> {
        let context = gpu.context();
        Ok(match dtype {
            Float::F16 => Self::F16(context.allocate(len)?),
            Float::BF16 => Self::BF16(context.allocate(len)?),
            Float::F32 => Self::F32(context.allocate(len)?),
        })
    }

    /// A copy on the device. Error: memory is short.
    pub fn upload(gpu: &Gpu, stream: &Stream, values: Floats<'_>) -> Result<Self> {
        let mut buffer = Self::allocate(gpu, values.dtype(), values.len())?;
        match (&mut buffer, values) {
            (Self::F16(to), Floats::F16(from)) => stream.upload(from, to.view_mut())?,
            (Self::BF16(to), Floats::BF16(from)) => stream.upload(from, to.view_mut())?,
            (Self::F32(to), Floats::F32(from)) => stream.upload(from, to.view_mut())?,
            _ => unreachable!("the buffer was made for these values"),
        }
        Ok(buffer)
    }

    /// Another buffer with the same content, once the stream is done. Error: memory is short.
    pub fn duplicate(&self, stream: &Stream) -> Result<Self> {
        Ok(match self {
            Self::F16(v) => Self::F16(v.duplicate(stream)?),
            Self::BF16(v) => Self::BF16(v.duplicate(stream)?),
            Self::F32(v) => Self::F32(v.duplicate(stream)?),
        })
    }

    /// A copy on the host of some of it, widened (exact), once the stream is done. Panics if the range does not lie within.
    pub fn to_f32(&self, stream: &Stream, range: Range<usize>) -> Result<Vec<f32>> {
        fn download<T: Pod>(stream: &Stream, from: View<'_, T>) -> Result<Vec<T>> {
            let mut to = vec![T::zeroed(); from.len()];
            stream.download(from, &mut to)?;
            Ok(to)
        }
        Ok(match self.view(range) {
            FloatView::F16(v) => Floats::F16(&download(stream, v)?).to_f32(),
            FloatView::BF16(v) => Floats::BF16(&download(stream, v)?).to_f32(),
            FloatView::F32(v) => download(stream, v)?,
        })
    }

    /// As [`Buffer::copy_within`].
    pub fn copy_within(&mut self, stream: &Stream, from: Range<usize>, to: usize) -> Result<()> {
        match self {
            Self::F16(v) => v.copy_within(stream, from, to),
            Self::BF16(v) => v.copy_within(stream, from, to),
            Self::F32(v) => v.copy_within(stream, from, to),
        }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> Float {
        self.view(0..0).dtype()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(v) => v.len(),
            Self::BF16(v) => v.len(),
            Self::F32(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes that it takes.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype().size_bytes()
    }

    /// All of it.
    pub fn all(&self) -> FloatView<'_> {
        self.view(0..self.len())
    }

    /// All of it, to be written.
    pub fn all_mut(&mut self) -> FloatViewMut<'_> {
        self.view_mut(0..self.len())
    }

    /// Some of it; panics if the range does not lie within.
    pub fn view(&self, range: Range<usize>) -> FloatView<'_> {
        match self {
            Self::F16(v) => FloatView::F16(v.view().slice(range)),
            Self::BF16(v) => FloatView::BF16(v.view().slice(range)),
            Self::F32(v) => FloatView::F32(v.view().slice(range)),
        }
    }

    /// Some of it, to be written; panics if the range does not lie within.
    pub fn view_mut(&mut self, range: Range<usize>) -> FloatViewMut<'_> {
        match self {
            Self::F16(v) => FloatViewMut::F16(v.view_mut().slice(range)),
            Self::BF16(v) => FloatViewMut::BF16(v.view_mut().slice(range)),
            Self::F32(v) => FloatViewMut::F32(v.view_mut().slice(range)),
        }
    }
}
