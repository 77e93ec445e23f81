//! DLPack's `DLTensor`, looked at from all sides before anything is read: pointers, sizes, types, strides, places.
//!
//! The structs lie as `dlpack/dlpack.h` has them since its version 0.2; the header has them too for programs without that file.

use crate::handle::null;
use crate::status::{Failure, Result};
use half::{bf16, f16};
use halfbyte::cuda::driver::{FloatView, FloatViewMut, View, ViewMut};
use halfbyte::cuda::{AnyBytes, AnyBytesMut, AnyFloats, AnyFloatsMut};
use halfbyte::format::int8::{Byte, Bytes, BytesMut};
use halfbyte::{Float, Floats, FloatsMut};
use std::ffi::c_void;

/// Where memory lies: `kDLCPU` is 1, `kDLCUDA` 2.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDevice {
    /// Kind of device.
    pub device_type: i32,
    /// Its number.
    pub device_id: i32,
}

/// Type of elements.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DLDataType {
    /// Kind: 0 int, 1 uint, 2 float, 4 bfloat.
    pub code: u8,
    /// Bits of a lane.
    pub bits: u8,
    /// Lanes of an element.
    pub lanes: u16,
}

/// A tensor that somebody else owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DLTensor {
    /// Where its memory begins.
    pub data: *mut c_void,
    /// Where it lies.
    pub device: DLDevice,
    /// Number of dimensions.
    pub ndim: i32,
    /// Type of its elements.
    pub dtype: DLDataType,
    /// Length of each dimension.
    pub shape: *mut i64,
    /// Elements from one to the next of each dimension; null: row-major without gaps.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

// As dlpack.h has them.
const _: () = assert!(size_of::<DLTensor>() == 48 && std::mem::offset_of!(DLTensor, byte_offset) == 40);
const _: () = assert!(std::mem::offset_of!(DLTensor, ndim) == 16 && std::mem::offset_of!(DLTensor, shape) == 24);

/// `kDLCPU`, `kDLCUDA`, `kDLCUDAHost` and `kDLCUDAManaged`.
const CPU: i32 = 1;
const CUDA: i32 = 2;
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// More dimensions than anyone's tensors have.
const MOST_DIMENSIONS: i32 = 32;

/// Types of elements that tensors may have here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    Float(Float),
    Byte(Byte),
    I32,
}

impl Element {
    fn of(dtype: DLDataType) -> Option<Self> {
        match (dtype.code, dtype.bits, dtype.lanes) {
            (0, 8, 1) => Some(Self::Byte(Byte::I8)),
            (0, 32, 1) => Some(Self::I32),
            (1, 8, 1) => Some(Self::Byte(Byte::U8)),
            (2, 16, 1) => Some(Self::Float(Float::F16)),
            (2, 32, 1) => Some(Self::Float(Float::F32)),
            (4, 16, 1) => Some(Self::Float(Float::BF16)),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Float(float) => float.name(),
            Self::Byte(byte) => byte.name(),
            Self::I32 => "i32",
        }
    }

    fn size_bytes(self) -> usize {
        match self {
            Self::Float(float) => float.size_bytes(),
            Self::Byte(_) => 1,
            Self::I32 => 4,
        }
    }
}

/// Which memory a tensor lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    Gpu(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Host => f.write_str("memory of the host"),
            Self::Gpu(index) => write!(f, "memory of GPU {index}"),
        }
    }
}

/// A tensor whose sizes, type and place were looked at: row-major without gaps.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    /// Name of the parameter.
    what: &'static str,
    pub element: Element,
    pub shape: Vec<usize>,
    pub place: Place,
    /// Of the first element; without elements it may be anything.
    address: usize,
    len: usize,
}

impl Tensor {
    /// Looks at a tensor.
    pub fn new(what: &'static str, tensor: Option<&DLTensor>) -> Result<Self> {
        let fail = |expected: &str, got: String| Err(Failure::invalid(what, expected, got));
        let Some(tensor) = tensor else { return Err(null(what)) };
        let DLTensor { data, device, ndim, dtype, byte_offset, .. } = *tensor;
        let Some(element) = Element::of(dtype) else {
            let DLDataType { code, bits, lanes } = dtype;
            return fail(
                "elements of f16, bf16, f32, i8, u8 or i32",
                format!("DLPack's type code {code}, {bits} bits, {lanes} lanes"),
            );
        };
        let place = match (device.device_type, u32::try_from(device.device_id)) {
            (CPU | CUDA_HOST, _) => Place::Host,
            (CUDA | CUDA_MANAGED, Ok(index)) => Place::Gpu(index),
            (CUDA | CUDA_MANAGED, Err(_)) => return fail("a GPU's number of at least 0", device.device_id.to_string()),
            (other, _) => return fail("memory of the host or of CUDA", format!("DLPack's device type {other}")),
        };
        if !(0..=MOST_DIMENSIONS).contains(&ndim) {
            return fail(&format!("0 to {MOST_DIMENSIONS} dimensions"), ndim.to_string());
        }
        let ndim = ndim.unsigned_abs() as usize;
        // SAFETY: the caller's shape has a number for each dimension; null is looked for in `numbers`.
        let Some(shape) = (unsafe { numbers(tensor.shape, ndim) }) else {
            return fail(&format!("a shape of {ndim} dimensions"), "null".to_owned());
        };
        let Some(shape) = shape.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<Vec<usize>>>() else {
            return fail("dimensions of at least 0", format!("{shape:?}"));
        };
        let len = if shape.contains(&0) {
            Some(0)
        } else {
            shape.iter().try_fold(1usize, |product, &n| product.checked_mul(n))
        };
        let bytes = len.and_then(|len| len.checked_mul(element.size_bytes()));
        let (Some(len), Some(bytes)) = (len, bytes.filter(|&bytes| isize::try_from(bytes).is_ok())) else {
            return fail("a tensor that fits memory", format!("shape {shape:?}"));
        };
        if !tensor.strides.is_null() {
            // SAFETY: as of the shape.
            let strides = unsafe { numbers(tensor.strides, ndim) }.unwrap_or_default();
            if let Some(expected) = gap(&shape, strides) {
                return fail(&format!("strides {expected:?}, row-major without gaps"), format!("{strides:?}"));
            }
        }
        let address = usize::try_from(byte_offset).ok().and_then(|offset| (data as usize).checked_add(offset));
        let Some(address) = address.filter(|address| address.checked_add(bytes).is_some()) else {
            return fail("bytes that lie within memory", format!("an offset of {byte_offset} bytes"));
        };
        if len > 0 && data.is_null() {
            return fail(&format!("data of {len} elements"), "null".to_owned());
        }
        if len > 0 && !address.is_multiple_of(element.size_bytes()) {
            let expected = format!("elements of {} at a multiple of {} bytes", element.name(), element.size_bytes());
            return fail(&expected, format!("address {address:#x}"));
        }
        Ok(Self { what, element, shape, place, address, len })
    }

    /// One that may be left out.
    pub fn optional(what: &'static str, tensor: Option<&DLTensor>) -> Result<Option<Self>> {
        tensor.map(|tensor| Self::new(what, Some(tensor))).transpose()
    }

    fn fail<T>(&self, expected: impl AsRef<str>, got: impl AsRef<str>) -> Result<T> {
        Err(Failure::invalid(self.what, expected, got))
    }

    /// Refuses another shape.
    pub fn expect_shape(&self, expected: &[usize]) -> Result<()> {
        if self.shape == expected {
            return Ok(());
        }
        self.fail(format!("shape {expected:?}"), format!("{:?}", self.shape))
    }

    /// The shape, if it has so many dimensions.
    pub fn dimensions<const N: usize>(&self) -> Result<[usize; N]> {
        match self.shape.as_slice().try_into() {
            Ok(shape) => Ok(shape),
            Err(_) => self.fail(format!("{N} dimensions"), format!("shape {:?}", self.shape)),
        }
    }

    /// Rows of `columns` elements: all dimensions but the last together.
    fn rows_of(&self, columns: usize) -> Result<usize> {
        match self.shape.split_last() {
            Some((&last, rows)) if last == columns => {
                let rows = rows.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
                rows.map_or_else(|| self.fail("rows that can be counted", format!("shape {:?}", self.shape)), Ok)
            }
            _ => self.fail(format!("shape [.., {columns}]"), format!("{:?}", self.shape)),
        }
    }

    /// Rows of k elements, and n in each row of `y`, which is to be written and has memory of its own.
    pub fn rows_to(&self, y: &Tensor, [n, k]: [usize; 2]) -> Result<usize> {
        let m = self.rows_of(k)?;
        y.expect_shape(&[&self.shape[..self.shape.len() - 1], &[n]].concat())?;
        y.expect_apart(self)?;
        Ok(m)
    }

    /// Refuses two tensors that share memory, one of which is written.
    pub fn expect_apart(&self, read: &Tensor) -> Result<()> {
        let end = |tensor: &Tensor| tensor.address + tensor.len * tensor.element.size_bytes();
        let apart = self.len == 0 || read.len == 0 || self.address >= end(read) || read.address >= end(self);
        if apart || self.place != read.place {
            return Ok(());
        }
        self.fail(format!("memory of its own, which {} does not share", read.what), "memory that both have")
    }

    fn expect_host(&self) -> Result<()> {
        if self.place == Place::Host { Ok(()) } else { self.fail(Place::Host.to_string(), self.place.to_string()) }
    }

    /// Error: memory that GPU `index` does not reach, as far as it says.
    fn expect_gpu(&self, index: u32) -> Result<()> {
        match self.place {
            Place::Gpu(other) if other != index => self.fail(Place::Gpu(index).to_string(), self.place.to_string()),
            Place::Gpu(_) | Place::Host => Ok(()),
        }
    }

    /// Elements of the host, to be read.
    ///
    /// # Safety
    /// The memory stays, and is not written, for `'a`.
    unsafe fn slice<'a, T>(&self) -> &'a [T] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: `new` has looked at null, alignment and size, which the type of `element` decides; the rest is promised.
        unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(self.address), self.len) }
    }

    /// Elements of the host, to be written.
    ///
    /// # Safety
    /// The memory stays, and nobody else reads or writes it, for `'a`.
    unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: as of `slice`.
        unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(self.address), self.len) }
    }

    /// Floats of the host.
    ///
    /// # Safety
    /// The memory stays, and is not written, for `'a`.
    pub unsafe fn floats<'a>(&self) -> Result<Floats<'a>> {
        self.expect_host()?;
        // SAFETY: the types are those of the elements; the memory is promised.
        unsafe {
            match self.element {
                Element::Float(Float::F16) => Ok(Floats::F16(self.slice::<f16>())),
                Element::Float(Float::BF16) => Ok(Floats::BF16(self.slice::<bf16>())),
                Element::Float(Float::F32) => Ok(Floats::F32(self.slice::<f32>())),
                other => self.fail("floats: f16, bf16 or f32", other.name()),
            }
        }
    }

    /// Floats of the host, to be written.
    ///
    /// # Safety
    /// The memory stays, and nobody else reads or writes it, for `'a`.
    pub unsafe fn floats_mut<'a>(&self) -> Result<FloatsMut<'a>> {
        self.expect_host()?;
        // SAFETY: as above.
        unsafe {
            match self.element {
                Element::Float(Float::F16) => Ok(FloatsMut::F16(self.slice_mut::<f16>())),
                Element::Float(Float::BF16) => Ok(FloatsMut::BF16(self.slice_mut::<bf16>())),
                Element::Float(Float::F32) => Ok(FloatsMut::F32(self.slice_mut::<f32>())),
                other => self.fail("floats: f16, bf16 or f32", other.name()),
            }
        }
    }

    /// Floats of either memory, for GPU `index`.
    ///
    /// # Safety
    /// As of [`Tensor::floats`], and as long as work that reads them is in the queue.
    pub unsafe fn any_floats<'a>(&self, index: u32) -> Result<AnyFloats<'a>> {
        self.expect_gpu(index)?;
        if self.place == Place::Host {
            // SAFETY: promised.
            return Ok(AnyFloats::Host(unsafe { self.floats() }?));
        }
        let (address, len) = (self.address as u64, self.len);
        // SAFETY: address, length and alignment were looked at; that memory lies there is promised.
        let view = unsafe {
            match self.element {
                Element::Float(Float::F16) => FloatView::F16(View::from_raw(address, len)),
                Element::Float(Float::BF16) => FloatView::BF16(View::from_raw(address, len)),
                Element::Float(Float::F32) => FloatView::F32(View::from_raw(address, len)),
                other => return self.fail("floats: f16, bf16 or f32", other.name()),
            }
        };
        Ok(AnyFloats::Device(view))
    }

    /// Floats of either memory, to be written, for GPU `index`.
    ///
    /// # Safety
    /// As of [`Tensor::floats_mut`], and as long as work that writes them is in the queue.
    pub unsafe fn any_floats_mut<'a>(&self, index: u32) -> Result<AnyFloatsMut<'a>> {
        self.expect_gpu(index)?;
        if self.place == Place::Host {
            // SAFETY: promised.
            return Ok(AnyFloatsMut::Host(unsafe { self.floats_mut() }?));
        }
        let (address, len) = (self.address as u64, self.len);
        // SAFETY: as above.
        let view = unsafe {
            match self.element {
                Element::Float(Float::F16) => FloatViewMut::F16(ViewMut::from_raw(address, len)),
                Element::Float(Float::BF16) => FloatViewMut::BF16(ViewMut::from_raw(address, len)),
                Element::Float(Float::F32) => FloatViewMut::F32(ViewMut::from_raw(address, len)),
                other => return self.fail("floats: f16, bf16 or f32", other.name()),
            }
        };
        Ok(AnyFloatsMut::Device(view))
    }

    /// Bytes of the host.
    ///
    /// # Safety
    /// As of [`Tensor::floats`].
    pub unsafe fn bytes<'a>(&self) -> Result<Bytes<'a>> {
        self.expect_host()?;
        // SAFETY: the types are those of the elements; the memory is promised.
        unsafe {
            match self.element {
                Element::Byte(Byte::U8) => Ok(Bytes::U8(self.slice::<u8>())),
                Element::Byte(Byte::I8) => Ok(Bytes::I8(self.slice::<i8>())),
                other => self.fail("bytes: u8 or i8", other.name()),
            }
        }
    }

    /// Bytes of the host, to be written.
    ///
    /// # Safety
    /// As of [`Tensor::floats_mut`].
    pub unsafe fn bytes_mut<'a>(&self) -> Result<BytesMut<'a>> {
        self.expect_host()?;
        // SAFETY: as above.
        unsafe {
            match self.element {
                Element::Byte(Byte::U8) => Ok(BytesMut::U8(self.slice_mut::<u8>())),
                Element::Byte(Byte::I8) => Ok(BytesMut::I8(self.slice_mut::<i8>())),
                other => self.fail("bytes: u8 or i8", other.name()),
            }
        }
    }

    /// Bytes of either memory, for GPU `index`.
    ///
    /// # Safety
    /// As of [`Tensor::any_floats`].
    pub unsafe fn any_bytes<'a>(&self, index: u32) -> Result<AnyBytes<'a>> {
        self.expect_gpu(index)?;
        let (address, len) = (self.address as u64, self.len);
        // SAFETY: as of floats.
        unsafe {
            match (self.place, self.element) {
                (Place::Host, _) => Ok(AnyBytes::Host(self.bytes()?)),
                (_, Element::Byte(Byte::U8)) => Ok(AnyBytes::U8(View::from_raw(address, len))),
                (_, Element::Byte(Byte::I8)) => Ok(AnyBytes::I8(View::from_raw(address, len))),
                (_, other) => self.fail("bytes: u8 or i8", other.name()),
            }
        }
    }

    /// Bytes of either memory, to be written, for GPU `index`.
    ///
    /// # Safety
    /// As of [`Tensor::any_floats_mut`].
    pub unsafe fn any_bytes_mut<'a>(&self, index: u32) -> Result<AnyBytesMut<'a>> {
        self.expect_gpu(index)?;
        let (address, len) = (self.address as u64, self.len);
        // SAFETY: as of floats.
        unsafe {
            match (self.place, self.element) {
                (Place::Host, _) => Ok(AnyBytesMut::Host(self.bytes_mut()?)),
                (_, Element::Byte(Byte::U8)) => Ok(AnyBytesMut::U8(ViewMut::from_raw(address, len))),
                (_, Element::Byte(Byte::I8)) => Ok(AnyBytesMut::I8(ViewMut::from_raw(address, len))),
                (_, other) => self.fail("bytes: u8 or i8", other.name()),
            }
        }
    }

    /// A copy of 32-bit floats of the host, in one dimension.
    ///
    /// # Safety
    /// The memory is not written meanwhile.
    pub unsafe fn to_f32(&self) -> Result<Vec<f32>> {
        let [_] = self.dimensions()?;
        // SAFETY: promised; the copy needs no more.
        Ok(unsafe { self.floats() }?.to_f32())
    }

    /// A copy of 32-bit integers of the host, in one dimension.
    ///
    /// # Safety
    /// The memory is not written meanwhile.
    pub unsafe fn to_i32(&self) -> Result<Vec<i32>> {
        let [_] = self.dimensions()?;
        self.expect_host()?;
        if self.element != Element::I32 {
            return self.fail("i32", self.element.name());
        }
        // SAFETY: promised, and the type is that of the elements.
        Ok(unsafe { self.slice::<i32>() }.to_vec())
    }
}

/// Numbers of a caller; None: null where there are some.
///
/// # Safety
/// `pointer` is null, or `len` numbers lie there that stay for `'a`.
unsafe fn numbers<'a>(pointer: *const i64, len: usize) -> Option<&'a [i64]> {
    match (len, pointer.is_null()) {
        (0, _) => Some(&[]),
        (_, true) => None,
        // SAFETY: not null; the caller vouches for the length.
        (_, false) => Some(unsafe { std::slice::from_raw_parts(pointer, len) }),
    }
}

/// The strides that a tensor without gaps has, if it has others where it matters: not along dimensions of one element, nor without
/// elements.
fn gap(shape: &[usize], strides: &[i64]) -> Option<Vec<i64>> {
    if shape.contains(&0) {
        return None;
    }
    let mut expected = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        expected[i - 1] = expected[i].saturating_mul(i64::try_from(shape[i]).unwrap_or(i64::MAX));
    }
    let fits = |i: usize| shape[i] == 1 || strides[i] == expected[i];
    if (0..shape.len()).all(fits) { None } else { Some(expected) }
}
