//! Tensors of other libraries, in and out, without copies.
//!
//! ```text
//! Python tensor ──Input──▶ address, place, type, shape ──▶ slices, or views of device memory
//! Output::like(x) ──▶ a tensor of x's library, written in place ──finish──▶ Python tensor
//! ```
//!
//! A tensor comes in by DLPack's C exchange where its type has that, else by `__dlpack__`, else by `__array_interface__`. What goes
//! out is made by the library that x is of. All calls of foreign functions are made in this folder.

pub mod dlpack;
mod elements;
mod exchange;
mod input;
mod output;
mod owned;

pub use dlpack::DataType;
pub use elements::{copied, widened, zeroed};
pub use input::Input;
pub use output::{Output, numpy_array};
pub use owned::Tensor;

use crate::error::invalid;
use halfbyte::Float;
use halfbyte::format::int8::Byte;
use pyo3::exceptions::PyTypeError;
use pyo3::{PyErr, PyResult};
use std::ops::Deref;

/// Dimensions that a tensor has at most.
const MOST_DIMENSIONS: usize = 8;

/// Elements that a tensor has at most: of 16 bytes, as complex numbers have, they still lie within memory.
const MOST_ELEMENTS: usize = isize::MAX as usize / 16;

/// Where a tensor lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In memory of the host.
    Cpu,
    /// In memory of the GPU of this number.
    Cuda(u32),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

/// Sizes along each dimension, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    sizes: [usize; MOST_DIMENSIONS],
    len: usize,
}

impl Shape {
    /// Error: more dimensions than any tensor here has, or more elements than memory has bytes (those of size 0 do not count: products of
    /// some of the sizes are within memory, too).
    pub fn new(sizes: &[usize]) -> PyResult<Self> {
        if sizes.len() > MOST_DIMENSIONS {
            return crate::error::invalid("tensor", format_args!("at most {MOST_DIMENSIONS} dimensions"), sizes.len());
        }
        let mut shape = Self { sizes: [0; MOST_DIMENSIONS], len: sizes.len() };
        shape.sizes[..sizes.len()].copy_from_slice(sizes);
        shape.checked()
    }

    fn checked(self) -> PyResult<Self> {
        let product = self.iter().filter(|&&size| size > 0).try_fold(1usize, |all, &size| all.checked_mul(size));
        match product.is_some_and(|product| product <= MOST_ELEMENTS) {
            true => Ok(self),
            false => crate::error::invalid("tensor", "a shape that fits memory", self),
        }
    }

    /// The same with another innermost size. Error: as of [`Shape::new`].
    pub fn with_last(mut self, size: usize) -> PyResult<Self> {
        if let Some(last) = self.len.checked_sub(1) {
            self.sizes[last] = size;
        }
        self.checked()
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.iter().product()
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.sizes[..self.len]
    }
}

/// As Python writes a tuple.
impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(")?;
        for (i, size) in self.iter().enumerate() {
            write!(f, "{}{size}", if i == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.len == 1 { ",)" } else { ")" })
    }
}

/// The float type that elements have, if it is one that layers take.
pub fn float_of(dtype: DataType) -> Option<Float> {
    match dtype {
        DataType::F16 => Some(Float::F16),
        DataType::BF16 => Some(Float::BF16),
        DataType::F32 => Some(Float::F32),
        _ => None,
    }
}

/// The type of tensors with these floats.
pub fn type_of(float: Float) -> DataType {
    match float {
        Float::F16 => DataType::F16,
        Float::BF16 => DataType::BF16,
        Float::F32 => DataType::F32,
    }
}

/// The type of tensors with these bytes.
pub fn type_of_byte(byte: Byte) -> DataType {
    match byte {
        Byte::U8 => DataType::U8,
        Byte::I8 => DataType::I8,
    }
}

/// TypeError: elements of another type than an operation takes.
pub fn wrong_type(op: &str, expected: &str, got: DataType) -> PyErr {
    PyTypeError::new_err(format!("{op}: expected {expected}, got {got}"))
}

/// Rows of k elements: all dimensions but the last together. ValueError: another last dimension.
pub fn rows_of(op: &str, x: &Input<'_>, k: usize) -> PyResult<usize> {
    match x.shape().split_last() {
        Some((&last, rows)) if last == k => Ok(rows.iter().product()),
        _ => invalid(op, format_args!("an x of shape (..., {k})"), format_args!("shape {}", x.shape())),
    }
}

/// ValueError: x lies elsewhere than something else, as "the weight lies".
pub fn same_place(op: &str, x: &Input<'_>, place: Place, of: &str) -> PyResult<()> {
    if x.place() == place {
        return Ok(());
    }
    invalid(op, format_args!("an x on {place}, where {of}"), format_args!("one on {}", x.place()))
}
