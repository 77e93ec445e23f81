//! The element types of tensors: those that a safetensors file may declare, and the blocks of GGUF.

use crate::gguf::GgmlType;
use halfbyte::Float;
use serde::{Serialize, Serializer};

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $bits:literal;)*) => {
        /// Type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $($(#[$doc])* $variant,)*
            /// Blocks of codes with their scales, as only GGUF files have them.
            Block(GgmlType),
        }

        impl DType {
            /// Every type that a safetensors file may declare.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The name as the header spells it.
            pub fn name(self) -> &'static str {
                match self {
                    DType::Block(block) => block.name(),
                    $(DType::$variant => $name,)*
                }
            }

            /// Bits an element takes; None for blocks, whose elements share some.
            pub fn size_bits(self) -> Option<usize> {
                match self {
                    DType::Block(_) => None,
                    $(DType::$variant => Some($bits),)*
                }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = "BOOL", 8;
    /// 4-bit float, E2M1.
    F4 = "F4", 4;
    /// 6-bit float, E2M3.
    F6E2M3 = "F6_E2M3", 6;
    /// 6-bit float, E3M2.
    F6E3M2 = "F6_E3M2", 6;
    /// Unsigned byte.
    U8 = "U8", 8;
    /// Signed byte.
    I8 = "I8", 8;
    /// 8-bit float, E5M2.
    F8E5M2 = "F8_E5M2", 8;
    /// 8-bit float, E4M3.
    F8E4M3 = "F8_E4M3", 8;
    /// 8-bit power of two.
    F8E8M0 = "F8_E8M0", 8;
    /// 8-bit float, E4M3 without negative zero.
    F8E4M3Fnuz = "F8_E4M3FNUZ", 8;
    /// 8-bit float, E5M2 without negative zero.
    F8E5M2Fnuz = "F8_E5M2FNUZ", 8;
    /// 16-bit signed integer.
    I16 = "I16", 16;
    /// 16-bit unsigned integer.
    U16 = "U16", 16;
    /// Half precision.
    F16 = "F16", 16;
    /// Brain float.
    BF16 = "BF16", 16;
    /// 32-bit signed integer.
    I32 = "I32", 32;
    /// 32-bit unsigned integer.
    U32 = "U32", 32;
    /// Single precision.
    F32 = "F32", 32;
    /// Complex of two singles.
    C64 = "C64", 64;
    /// Double precision.
    F64 = "F64", 64;
    /// 64-bit signed integer.
    I64 = "I64", 64;
    /// 64-bit unsigned integer.
    U64 = "U64", 64;
}

impl DType {
    /// The type of this name that a safetensors file may declare, if there is one.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|dtype| dtype.name() == name)
    }

    /// The same type among those that weights and scales come in, if it is one.
    pub fn float(self) -> Option<Float> {
        match self {
            DType::F16 => Some(Float::F16),
            DType::BF16 => Some(Float::BF16),
            DType::F32 => Some(Float::F32),
            _ => None,
        }
    }

    /// Bytes of a tensor of this shape. None: the product overflows, or the last byte or block is not full.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let size_bits = match self {
            DType::Block(block) => return block.bytes_of(shape),
            _ => self.size_bits()?,
        };
        // A zero among the dimensions must not hide an overflow among the others: readers multiply in any order.
        let others = shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d.max(1)))?;
        let elements = if shape.contains(&0) { 0 } else { others };
        let bits = elements.checked_mul(size_bits)?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

impl From<GgmlType> for DType {
    fn from(kind: GgmlType) -> Self {
        match kind {
            GgmlType::F16 => DType::F16,
            GgmlType::BF16 => DType::BF16,
            GgmlType::F32 => DType::F32,
            GgmlType::F64 => DType::F64,
            GgmlType::I8 => DType::I8,
            GgmlType::I16 => DType::I16,
            GgmlType::I32 => DType::I32,
            GgmlType::I64 => DType::I64,
            block => DType::Block(block),
        }
    }
}

impl TryFrom<DType> for GgmlType {
    type Error = String;

    fn try_from(dtype: DType) -> Result<Self, String> {
        match dtype {
            DType::Block(block) => Ok(block),
            _ => GgmlType::ALL
                .iter()
                .copied()
                .find(|&kind| DType::from(kind) == dtype)
                .ok_or_else(|| format!("it has no type {dtype}")),
        }
    }
}

impl From<Float> for DType {
    fn from(float: Float) -> Self {
        match float {
            Float::F16 => DType::F16,
            Float::BF16 => DType::BF16,
            Float::F32 => DType::F32,
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_tensor_hides_no_overflow() {
        assert_eq!(DType::F16.bytes_of(&[0, 3, 5]), Some(0));
        for shape in [[0, 1 << 40, 1 << 40], [1 << 40, 0, 1 << 40], [1 << 40, 1 << 40, 0]] {
            assert_eq!(DType::F16.bytes_of(&shape), None, "{shape:?}");
        }
    }
}
