//! The element types that a GGUF file may declare, with the size of their blocks.

use halfbyte::{Float, Group, WeightFormat, Zero};

macro_rules! types {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:literal, $bytes:literal;)*) => {
        /// Type of a tensor's elements: a number, or a block of several codes with their scales.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types, reason = "the names by which the field knows them")]
        #[non_exhaustive]
        pub enum GgmlType {
            $($(#[$doc])* $variant,)*
        }

        impl GgmlType {
            /// Every type there is.
            pub const ALL: &'static [GgmlType] = &[$(GgmlType::$variant,)*];

            /// The number by which files name it.
            pub fn id(self) -> u32 {
                match self {
                    $(GgmlType::$variant => $id,)*
                }
            }

            /// The name by which the field knows it.
            pub fn name(self) -> &'static str {
                match self {
                    $(GgmlType::$variant => $name,)*
                }
            }

            /// Elements of a block, neighbours along the last dimension; 1 for plain numbers.
            pub fn block_len(self) -> usize {
                match self {
                    $(GgmlType::$variant => $len,)*
                }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self {
                    $(GgmlType::$variant => $bytes,)*
                }
            }
        }
    };
}

types! {
    /// Single precision.
    F32 = 0, "F32", 1, 4;
    /// Half precision.
    F16 = 1, "F16", 1, 2;
    /// 4-bit codes with a scale.
    Q4_0 = 2, "Q4_0", 32, 18;
    /// 4-bit codes with scale and offset.
    Q4_1 = 3, "Q4_1", 32, 20;
    /// 5-bit codes with a scale.
    Q5_0 = 6, "Q5_0", 32, 22;
    /// 5-bit codes with scale and offset.
    Q5_1 = 7, "Q5_1", 32, 24;
    /// 8-bit codes with a scale.
    Q8_0 = 8, "Q8_0", 32, 34;
    /// 8-bit codes with a scale and the block's sum; for activations, not found in files.
    Q8_1 = 9, "Q8_1", 32, 40;
    /// 2-bit codes; 4-bit scales and offsets for 16 neighbours.
    Q2_K = 10, "Q2_K", 256, 84;
    /// 3-bit codes; 6-bit scales for 16 neighbours.
    Q3_K = 11, "Q3_K", 256, 110;
    /// 4-bit codes; 6-bit scales and offsets for 32 neighbours.
    Q4_K = 12, "Q4_K", 256, 144;
    /// 5-bit codes; 6-bit scales and offsets for 32 neighbours.
    Q5_K = 13, "Q5_K", 256, 176;
    /// 6-bit codes; 8-bit scales for 16 neighbours.
    Q6_K = 14, "Q6_K", 256, 210;
    /// 8-bit codes with sums; for activations, not found in files.
    Q8_K = 15, "Q8_K", 256, 292;
    /// 2-bit codebook.
    IQ2_XXS = 16, "IQ2_XXS", 256, 66;
    /// 2-bit codebook.
    IQ2_XS = 17, "IQ2_XS", 256, 74;
    /// 3-bit codebook.
    IQ3_XXS = 18, "IQ3_XXS", 256, 98;
    /// 1-bit codebook.
    IQ1_S = 19, "IQ1_S", 256, 50;
    /// 4-bit codes for 16 integers, with a scale.
    IQ4_NL = 20, "IQ4_NL", 32, 18;
    /// 3-bit codebook.
    IQ3_S = 21, "IQ3_S", 256, 110;
    /// 2-bit codebook.
    IQ2_S = 22, "IQ2_S", 256, 82;
    /// 4-bit codes for the same integers; 6-bit scales for 32 neighbours.
    IQ4_XS = 23, "IQ4_XS", 256, 136;
    /// Signed byte.
    I8 = 24, "I8", 1, 1;
    /// 16-bit signed integer.
    I16 = 25, "I16", 1, 2;
    /// 32-bit signed integer.
    I32 = 26, "I32", 1, 4;
    /// 64-bit signed integer.
    I64 = 27, "I64", 1, 8;
    /// Double precision.
    F64 = 28, "F64", 1, 8;
    /// 1-bit codebook.
    IQ1_M = 29, "IQ1_M", 256, 56;
    /// Brain float.
    BF16 = 30, "BF16", 1, 2;
    /// Ternary.
    TQ1_0 = 34, "TQ1_0", 256, 54;
    /// Ternary.
    TQ2_0 = 35, "TQ2_0", 256, 66;
    /// 4-bit floats, whose doubles are integers, with a power of two.
    MXFP4 = 39, "MXFP4", 32, 17;
    /// The same 4-bit floats; 8-bit floats as scales for 16 neighbours.
    NVFP4 = 40, "NVFP4", 64, 36;
    /// 1-bit codes with a scale.
    Q1_0 = 41, "Q1_0", 128, 18;
}

impl GgmlType {
    /// The type of this number, if there is one.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.id() == id)
    }

    /// The same type among those that weights and scales come in, if it is one.
    pub fn float(self) -> Option<Float> {
        match self {
            GgmlType::F16 => Some(Float::F16),
            GgmlType::BF16 => Some(Float::BF16),
            GgmlType::F32 => Some(Float::F32),
            _ => None,
        }
    }

    /// What its blocks are exactly, if they are codes with scales that this crate reads.
    ///
    /// Codes of 5 and 6 bits are codes of 8 that use a part of them, and so are those that stand for 16 values. The scales of the K
    /// types and of IQ4_XS are products of two numbers of the block, exact in f32; those of MXFP4 powers of two, exact in bf16. (Layouts
    /// may hold fewer bits, and the two numbers: `halfbyte::layout::cpu_n16`.) A tensor of NVFP4 with a scale of its own has f32.
    pub fn weight_format(self) -> Option<WeightFormat> {
        let (bits, group, zero, scale) = match self {
            GgmlType::Q4_0 => (4, 32, Zero::Symmetric, Float::F16),
            GgmlType::Q4_1 => (4, 32, Zero::Float, Float::F16),
            GgmlType::Q5_0 | GgmlType::Q8_0 => (8, 32, Zero::Symmetric, Float::F16),
            GgmlType::Q5_1 => (8, 32, Zero::Float, Float::F16),
            GgmlType::Q2_K => (2, 16, Zero::Float, Float::F32),
            GgmlType::Q3_K => (3, 16, Zero::Symmetric, Float::F32),
            GgmlType::Q4_K => (4, 32, Zero::Float, Float::F32),
            GgmlType::Q5_K => (8, 32, Zero::Float, Float::F32),
            GgmlType::Q6_K => (8, 16, Zero::Symmetric, Float::F32),
            GgmlType::IQ4_NL => (8, 32, Zero::Symmetric, Float::F16),
            GgmlType::IQ4_XS => (8, 32, Zero::Symmetric, Float::F32),
            GgmlType::MXFP4 => (8, 32, Zero::Symmetric, Float::BF16),
            GgmlType::NVFP4 => (8, 16, Zero::Symmetric, Float::F16),
            _ => return None,
        };
        Some(WeightFormat { bits, group: Group::Size(group), zero, scale, channel_scale: None })
    }

    /// Bytes of a tensor of this shape (outermost dimension first). None: the product overflows, or the last dimension
    /// is no multiple of the block.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        // A zero among the dimensions must not hide an overflow among the others: readers multiply in any order.
        let most = shape.iter().try_fold(1usize, |product, &d| product.checked_mul(d.max(1)))?;
        (most / self.block_len()).checked_mul(self.block_bytes())?;
        let row = shape.last().copied().unwrap_or(1);
        let elements: usize = shape.iter().product();
        row.is_multiple_of(self.block_len()).then(|| elements / self.block_len() * self.block_bytes())
    }
}

impl std::fmt::Display for GgmlType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
