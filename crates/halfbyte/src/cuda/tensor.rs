//! Tensors that work on a GPU reads and writes, whichever memory they lie in.

use super::driver::{FloatView, FloatViewMut, View, ViewMut};
use super::nn::FloatBuffer;
use crate::format::int8::{Byte, Bytes, BytesMut};
use crate::tensor::{Float, Floats, FloatsMut};
use half::{bf16, f16};

/// Floats that work on a GPU reads.
#[derive(Clone, Copy, Debug)]
pub enum AnyFloats<'a> {
    /// Of the host.
    Host(Floats<'a>),
    /// In device memory.
    Device(FloatView<'a>),
}

/// Floats that work on a GPU writes.
#[derive(Debug)]
pub enum AnyFloatsMut<'a> {
    /// Of the host.
    Host(FloatsMut<'a>),
    /// In device memory.
    Device(FloatViewMut<'a>),
}

/// Bytes that work on a GPU reads.
#[derive(Clone, Copy, Debug)]
pub enum AnyBytes<'a> {
    /// Of the host.
    Host(Bytes<'a>),
    /// Unsigned, in device memory.
    U8(View<'a, u8>),
    /// Signed, in device memory.
    I8(View<'a, i8>),
}

/// Bytes that work on a GPU writes.
#[derive(Debug)]
pub enum AnyBytesMut<'a> {
    /// Of the host.
    Host(BytesMut<'a>),
    /// Unsigned, in device memory.
    U8(ViewMut<'a, u8>),
    /// Signed, in device memory.
    I8(ViewMut<'a, i8>),
}

/// Methods of a tensor that is read, and of one that is written.
macro_rules! for_both {
    ($read:ident, $written:ident $methods:tt) => {
        impl $read<'_> $methods
        impl $written<'_> $methods
    };
}

for_both! {
    AnyFloats, AnyFloatsMut {
        /// Number of elements.
        pub fn len(&self) -> usize {
            match self {
                Self::Host(v) => v.len(),
                Self::Device(v) => v.len(),
            }
        }

        /// Whether there is no element.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// Type of the elements.
        pub fn dtype(&self) -> Float {
            match self {
                Self::Host(v) => v.dtype(),
                Self::Device(v) => v.dtype(),
            }
        }
    }
}

for_both! {
    AnyBytes, AnyBytesMut {
        /// Number of elements.
        pub fn len(&self) -> usize {
            match self {
                Self::Host(v) => v.len(),
                Self::U8(v) => v.len(),
                Self::I8(v) => v.len(),
            }
        }

        /// Whether there is no element.
        pub fn is_empty(&self) -> bool {
            self.len() == 0
        }

        /// Type of the elements.
        pub fn byte(&self) -> Byte {
            match self {
                Self::Host(v) => v.byte(),
                Self::U8(_) => Byte::U8,
                Self::I8(_) => Byte::I8,
            }
        }
    }
}

/// Whatever becomes a tensor of the host, and views of device memory.
macro_rules! from_both {
    ($($any:ident($host:ident) { $($variant:ident($view:ty)),* })*) => {$(
        impl<'a, T: Into<$host<'a>>> From<T> for $any<'a> {
            fn from(values: T) -> Self {
                Self::Host(values.into())
            }
        }

        $(impl<'a> From<$view> for $any<'a> {
            fn from(view: $view) -> Self {
                Self::$variant(view.into())
            }
        })*
    )*};
}

from_both! {
    AnyFloats(Floats) {
        Device(FloatView<'a>), Device(View<'a, f16>), Device(View<'a, bf16>), Device(View<'a, f32>)
    }
    AnyFloatsMut(FloatsMut) {
        Device(FloatViewMut<'a>), Device(ViewMut<'a, f16>), Device(ViewMut<'a, bf16>), Device(ViewMut<'a, f32>)
    }
    AnyBytes(Bytes) { U8(View<'a, u8>), I8(View<'a, i8>) }
    AnyBytesMut(BytesMut) { U8(ViewMut<'a, u8>), I8(ViewMut<'a, i8>) }
}

impl<'a> From<&'a FloatBuffer> for AnyFloats<'a> {
    fn from(buffer: &'a FloatBuffer) -> Self {
        Self::Device(buffer.view(0..buffer.len()))
    }
}

impl<'a> From<&'a mut FloatBuffer> for AnyFloatsMut<'a> {
    fn from(buffer: &'a mut FloatBuffer) -> Self {
        let len = buffer.len();
        Self::Device(buffer.view_mut(0..len))
    }
}
