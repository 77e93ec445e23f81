//! What layers run on, and what a device computes for them.

use super::{on_cpu, on_cuda};
use crate::cpu::Cpu;
use crate::cuda::{AnyBytes, AnyBytesMut, AnyFloats, AnyFloatsMut, Cuda};
use crate::format::int8::{Byte, Bytes, BytesMut};
use crate::tensor::{Float, Floats, FloatsMut};
use std::fmt::Debug;

/// What layers are made for and run on: [`Cpu`], or [`Cuda`], which is one GPU with a queue of work.
///
/// | device | tensors | when `forward` returns |
/// |---|---|---|
/// | [`Cpu`] | slices, vectors, [`Floats`], [`Bytes`] | y is computed |
/// | [`Cuda`] | the same, which are copied to and from the GPU | y is computed |
/// | | views of device memory, as [`FloatView`](crate::cuda::driver::FloatView) | the work is in the queue |
///
/// No other type can be a device.
pub trait Device: sealed::Sealed + Debug + Sized {
    /// Floats that are read.
    type X<'a>: Tensor<Element = Float> + From<Floats<'a>>;
    /// Floats that are written.
    type Y<'a>: Tensor<Element = Float> + From<FloatsMut<'a>>;
    /// Bytes that are read.
    type XBytes<'a>: Tensor<Element = Byte> + From<Bytes<'a>>;
    /// Bytes that are written.
    type YBytes<'a>: Tensor<Element = Byte> + From<BytesMut<'a>>;
    #[doc(hidden)]
    type Linear: layers::Linear<Self>;
    #[doc(hidden)]
    type Conv2d: layers::Conv2d<Self>;
    #[doc(hidden)]
    type LinearInt8: layers::LinearInt8<Self>;
    #[doc(hidden)]
    type Conv2dInt8: layers::Conv2dInt8<Self>;
    #[doc(hidden)]
    type LlmInt8: layers::LlmInt8<Self>;
}

impl Device for Cpu {
    type X<'a> = Floats<'a>;
    type Y<'a> = FloatsMut<'a>;
    type XBytes<'a> = Bytes<'a>;
    type YBytes<'a> = BytesMut<'a>;
    type Linear = on_cpu::Linear;
    type Conv2d = on_cpu::Conv2d;
    type LinearInt8 = on_cpu::LinearInt8;
    type Conv2dInt8 = on_cpu::Conv2dInt8;
    type LlmInt8 = on_cpu::LlmInt8;
}

impl Device for Cuda {
    type X<'a> = AnyFloats<'a>;
    type Y<'a> = AnyFloatsMut<'a>;
    type XBytes<'a> = AnyBytes<'a>;
    type YBytes<'a> = AnyBytesMut<'a>;
    type Linear = on_cuda::Linear;
    type Conv2d = on_cuda::Conv2d;
    type LinearInt8 = on_cuda::LayerInt8;
    type Conv2dInt8 = on_cuda::LayerInt8;
    type LlmInt8 = on_cuda::LlmInt8;
}

/// A tensor that a layer reads or writes.
pub trait Tensor: sealed::Sealed + Debug {
    /// Types that elements may have.
    type Element;

    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there is no element.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    fn element(&self) -> Self::Element;
}

mod sealed {
    pub trait Sealed {}
}

impl sealed::Sealed for Cpu {}
impl sealed::Sealed for Cuda {}

macro_rules! tensors {
    ($($type:ident: $element:ident $of:ident),*) => {$(
        impl sealed::Sealed for $type<'_> {}

        impl Tensor for $type<'_> {
            type Element = $element;

            fn len(&self) -> usize {
                $type::len(self)
            }

            fn element(&self) -> $element {
                self.$of()
            }
        }
    )*};
}

tensors! {
    Floats: Float dtype, FloatsMut: Float dtype, AnyFloats: Float dtype, AnyFloatsMut: Float dtype,
    Bytes: Byte byte, BytesMut: Byte byte, AnyBytes: Byte byte, AnyBytesMut: Byte byte
}

/// What a device has to do for each kind of layer. Lengths and types were checked by the layer.
pub mod layers {
    use super::Device;
    use crate::conv::{Conv2dShape, Geometry, Layout2d};
    use crate::error::Result;
    use crate::format::Format;
    use crate::format::int8::{Affine, Int8Weight};
    use crate::format::reference::Bound;
    use crate::kernel::{Activation, Problem};
    use crate::ops::Weight;
    use crate::tensor::Float;
    use std::fmt::Debug;

    /// A weight with its bias.
    pub trait Linear<D: Device>: Debug + Sized {
        /// Packs a weight; `x` is the type that activations will have, if that is known.
        fn pack(device: &D, w: Weight<'_>, x: Option<Float>) -> Result<Self>;
        /// Rows and length of the reduction.
        fn shape(&self) -> [usize; 2];
        /// Outputs.
        fn outputs(&self) -> usize {
            self.shape()[0]
        }
        /// Format; none if it is dense.
        fn format(&self) -> Option<Format>;
        /// Bytes that the weight takes.
        fn bytes(&self) -> usize;
        /// Sets the bias `[n]`.
        fn set_bias(&mut self, bias: Vec<f32>) -> Result<()>;
        /// Name of the kernel that serves a problem.
        fn kernel(&self, device: &D, problem: &Problem) -> Result<&'static str>;
        /// How far its results lie from the reference at most.
        fn bound(&self, device: &D, problem: &Problem) -> Result<Bound>;
        /// Multiplies.
        fn forward(&self, device: &D, x: D::X<'_>, m: usize, y: D::Y<'_>, activation: Activation) -> Result<()>;
    }

    /// One convolution of floats.
    #[derive(Debug)]
    pub struct Convolution<'a> {
        /// Every size.
        pub shape: &'a Conv2dShape,
        /// Order of the elements of x and of y.
        pub layouts: [Layout2d; 2],
        /// Applied last.
        pub activation: Activation,
    }

    /// A weight with its bias.
    pub trait Conv2d<D: Device>: Debug + Sized {
        /// Packs a weight of a shape that fits the geometry.
        fn pack(device: &D, w: Weight<'_>, geometry: Geometry, x: Option<Float>) -> Result<Self>;
        /// Format; none if it is dense.
        fn format(&self) -> Option<Format>;
        /// Bytes that the weight takes.
        fn bytes(&self) -> usize;
        /// Sets the bias `[co]`.
        fn set_bias(&mut self, bias: Vec<f32>) -> Result<()>;
        /// Name of the kernel that serves a convolution of x to y of these types.
        fn kernel(&self, device: &D, call: &Convolution<'_>, types: [Float; 2]) -> Result<&'static str>;
        /// How far its results lie from the reference at most.
        fn bound(&self, device: &D, call: &Convolution<'_>, types: [Float; 2]) -> Result<Bound>;
        /// Convolves.
        fn forward(&self, device: &D, call: &Convolution<'_>, x: D::X<'_>, y: D::Y<'_>) -> Result<()>;
    }

    /// What becomes of sums of bytes.
    #[derive(Clone, Debug)]
    pub struct EpilogueInt8 {
        /// What the bytes of x stand for.
        pub x: Affine,
        /// And those of y; none if y is floats.
        pub y: Option<Affine>,
        /// Added to the sums.
        pub bias: Option<Vec<i32>>,
        /// Added to outputs in floats.
        pub float_bias: Option<Vec<f32>>,
        /// Applied last.
        pub activation: Activation,
    }

    /// A weight in bytes, and what becomes of its sums.
    pub trait LinearInt8<D: Device>: Debug + Sized {
        /// Packs a weight.
        fn pack(device: &D, w: &Int8Weight<'_>, epilogue: &EpilogueInt8) -> Result<Self>;
        /// Sets all that comes after the sums; x and y are those that it was packed with.
        fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()>;
        /// Bytes that the weight takes.
        fn bytes(&self) -> usize;
        /// Multiplies, to bytes.
        fn forward(&self, device: &D, x: D::XBytes<'_>, m: usize, y: D::YBytes<'_>) -> Result<()>;
        /// Multiplies, to floats.
        fn forward_floats(&self, device: &D, x: D::XBytes<'_>, m: usize, y: D::Y<'_>) -> Result<()>;
    }

    /// A weight in bytes, and what becomes of its sums.
    pub trait Conv2dInt8<D: Device>: Debug + Sized {
        /// Packs a weight of a shape that fits the geometry.
        fn pack(device: &D, w: &Int8Weight<'_>, geometry: Geometry, epilogue: &EpilogueInt8) -> Result<Self>;
        /// Sets all that comes after the sums; x and y are those that it was packed with.
        fn set_epilogue(&mut self, epilogue: &EpilogueInt8) -> Result<()>;
        /// Bytes that the weight takes.
        fn bytes(&self) -> usize;
        /// Convolves, to bytes.
        fn forward(&self, device: &D, call: ImagesInt8<'_>, x: D::XBytes<'_>, y: D::YBytes<'_>) -> Result<()>;
        /// Convolves, to floats.
        fn forward_floats(&self, device: &D, call: ImagesInt8<'_>, x: D::XBytes<'_>, y: D::Y<'_>) -> Result<()>;
    }

    /// A weight in signed bytes, which outlier columns of x meet as it is.
    pub trait LlmInt8<D: Device>: Debug + Sized {
        /// Packs codes `[n, k]` with scales `[n]`.
        fn pack(device: &D, codes: &[i8], shape: [usize; 2], scales: &[f32]) -> Result<Self>;
        /// Bytes that the weight takes.
        fn bytes(&self) -> usize;
        /// Sets the bias `[n]`.
        fn set_bias(&mut self, bias: Vec<f32>) -> Result<()>;
        /// Multiplies; the threshold is one of x's type.
        fn forward(&self, device: &D, x: D::X<'_>, m: usize, threshold: f32, y: D::Y<'_>) -> Result<()>;
    }

    /// One convolution of bytes.
    #[derive(Clone, Copy, Debug)]
    pub struct ImagesInt8<'a> {
        /// Every size.
        pub shape: &'a Conv2dShape,
        /// Order of the elements of x and of y.
        pub layouts: [Layout2d; 2],
    }
}
