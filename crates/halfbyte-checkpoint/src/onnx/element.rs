//! The element types of ONNX tensors, as data.

use crate::safetensors::DType;

/// Type of a tensor's elements.
#[derive(Debug, PartialEq, Eq)]
pub struct ElementType {
    /// The number that stands for it in a file.
    pub number: u32,
    /// Its name in ONNX.
    pub name: &'static str,
    /// Bits an element takes; narrower ones than a byte are packed from the lowest bit up.
    pub bits: usize,
    /// The same type among those of checkpoints, if it is one.
    pub dtype: Option<DType>,
    /// The field of `TensorProto` that holds elements which are not stored as raw bytes.
    pub(super) typed_field: u32,
}

/// Fields of `TensorProto` that hold elements of one type or another.
pub(super) const FLOAT_DATA: u32 = 4;
pub(super) const INT32_DATA: u32 = 5;
pub(super) const INT64_DATA: u32 = 7;
pub(super) const DOUBLE_DATA: u32 = 10;
pub(super) const UINT64_DATA: u32 = 11;

/// Number of the type of strings, whose elements have no fixed size.
pub(super) const STRING: u64 = 8;

macro_rules! element_types {
    ($($number:literal $name:ident $bits:literal $field:ident $($dtype:ident)?;)*) => {
        &[$(ElementType {
            number: $number,
            name: stringify!($name),
            bits: $bits,
            dtype: element_types!(@ $($dtype)?),
            typed_field: $field,
        },)*]
    };
    (@) => { None };
    (@ $dtype:ident) => { Some(DType::$dtype) };
}

/// Every type there is but strings.
pub static ELEMENT_TYPES: &[ElementType] = element_types! {
    1 FLOAT 32 FLOAT_DATA F32;
    2 UINT8 8 INT32_DATA U8;
    3 INT8 8 INT32_DATA I8;
    4 UINT16 16 INT32_DATA U16;
    5 INT16 16 INT32_DATA I16;
    6 INT32 32 INT32_DATA I32;
    7 INT64 64 INT64_DATA I64;
    9 BOOL 8 INT32_DATA Bool;
    10 FLOAT16 16 INT32_DATA F16;
    11 DOUBLE 64 DOUBLE_DATA F64;
    12 UINT32 32 UINT64_DATA U32;
    13 UINT64 64 UINT64_DATA U64;
    14 COMPLEX64 64 FLOAT_DATA C64;
    15 COMPLEX128 128 DOUBLE_DATA;
    16 BFLOAT16 16 INT32_DATA BF16;
    17 FLOAT8E4M3FN 8 INT32_DATA F8E4M3;
    18 FLOAT8E4M3FNUZ 8 INT32_DATA F8E4M3Fnuz;
    19 FLOAT8E5M2 8 INT32_DATA F8E5M2;
    20 FLOAT8E5M2FNUZ 8 INT32_DATA F8E5M2Fnuz;
    21 UINT4 4 INT32_DATA;
    22 INT4 4 INT32_DATA;
    23 FLOAT4E2M1 4 INT32_DATA F4;
    24 FLOAT8E8M0 8 INT32_DATA F8E8M0;
    25 UINT2 2 INT32_DATA;
    26 INT2 2 INT32_DATA;
};

impl ElementType {
    /// The type of this number, if there is one.
    pub fn from_number(number: u64) -> Option<&'static Self> {
        ELEMENT_TYPES.iter().find(|element| u64::from(element.number) == number)
    }

    /// The type that stands for one of a checkpoint's, if there is one.
    pub fn from_dtype(dtype: DType) -> Option<&'static Self> {
        ELEMENT_TYPES.iter().find(|element| element.dtype == Some(dtype))
    }

    /// Bytes of a tensor of this shape, the last of them perhaps not full. None: the product overflows.
    pub fn bytes_of(&self, shape: &[usize]) -> Option<usize> {
        // A zero among the dimensions must not hide an overflow among the others.
        let elements = shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d))?;
        Some(elements.checked_mul(self.bits)?.div_ceil(8))
    }
}

impl std::fmt::Display for ElementType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}
