//! What the numbers mean: formats as data, and how they are written down.
//!
//! A [`Format`] names a way to hold weights and to take activations:
//!
//! ```text
//! w4a16-g128            4-bit codes, half activations, groups of 128 along k, symmetric, f16 scales
//! w4a8-g32-asym         4-bit codes with integer zero points, activations quantised on the fly to 8 bits
//! w8a8                  8-bit codes, one scale an output channel, 8-bit activations
//! w4a8-g64-float-xasym  float offsets; activations with scale and offset
//! w8a32-tensor-sf32     one scale for the whole tensor, scales kept in f32
//! w4a8-g128-si8         scales of groups are 8-bit factors of one f16 scale an output channel; activations have one
//!                       scale a row, as if the weights were bytes with a scale a channel
//! ```
//!
//! Grammar: `w{2|3|4|8}a{8|16|32}[-g{N}|-tensor][-asym|-float][-xasym][-sbf16|-sf32][-si8]`. No group means one scale an
//! output channel; `-si8` is for 4 bits in groups, without float offsets.

mod express;
pub(crate) mod factors;
pub mod int8;
mod qtensor;
pub mod reference;

pub(crate) use qtensor::groups;
pub use qtensor::{QTensor, Zeros};

use crate::error::{Error, Result};
use crate::tensor::Float;
use std::fmt;
use std::str::FromStr;

/// How far one scale reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// One scale for the whole tensor.
    Tensor,
    /// One scale an output channel (a row of the weight).
    Channel,
    /// One scale for this many neighbours along k; the last group may be shorter.
    Size(usize),
}

impl Group {
    /// Number of groups along a k of this length. Panics for groups of 0 columns, which no format has.
    pub fn count(self, k: usize) -> usize {
        match self {
            Group::Tensor | Group::Channel => 1,
            Group::Size(g) => k.div_ceil(g).max(1),
        }
    }

    /// Length of a full group along a k of this length.
    pub fn len(self, k: usize) -> usize {
        match self {
            Group::Tensor | Group::Channel => k,
            Group::Size(g) => g,
        }
    }
}

/// `groups of 128`: in words, for people.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Tensor => f.write_str("one scale for the tensor"),
            Group::Channel => f.write_str("one scale an output channel"),
            Group::Size(size) => write!(f, "groups of {size}"),
        }
    }
}

/// Where zero lies among the codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Zero {
    /// In the middle: `w = scale · (code − 2^(bits−1))`.
    Symmetric,
    /// At an integer of its own for each group: `w = scale · (code − zero)`.
    Integer,
    /// Nowhere in particular: `w = scale · code + offset`.
    Float,
}

/// `integer zero points`: in words, for people.
impl fmt::Display for Zero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Zero::Symmetric => "no zero points",
            Zero::Integer => "integer zero points",
            Zero::Float => "float offsets",
        })
    }
}

/// What becomes of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Act {
    /// Multiplied as they are, f16 or bf16 by habit (any float type is taken).
    A16,
    /// Multiplied as they are, f32 by habit (any float type is taken).
    A32,
    /// Quantised on the fly to 8 bits, symmetric, one scale a row and [`WeightFormat::activation_group`].
    A8,
    /// Quantised on the fly to 8 bits with scale and offset, one of each a row and [`WeightFormat::activation_group`].
    A8Asym,
}

impl Act {
    /// Whether activations are quantised on the fly.
    pub fn is_quantized(self) -> bool {
        matches!(self, Act::A8 | Act::A8Asym)
    }
}

/// The weight's half of a format: codes, groups, zeros, scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WeightFormat {
    /// Bits a code: 2, 3, 4 or 8.
    pub bits: u32,
    /// How far one scale reaches.
    pub group: Group,
    /// Where zero lies among the codes.
    pub zero: Zero,
    /// Type that the scales (and float offsets) are exact in.
    pub scale: Float,
    /// Two levels: scales of groups are whole multiples of one scale a channel, which is exact in this type, f16 or bf16
    /// (`scale` is then f32, which holds every multiple). None: each group has a scale of its own.
    pub channel_scale: Option<Float>,
}

impl WeightFormat {
    /// The largest code, `2^bits − 1`, of bits that [`WeightFormat::validate`] takes.
    pub fn max_code(&self) -> u32 {
        (1 << self.bits) - 1
    }

    /// The code that stands for zero in a symmetric format, `2^(bits−1)`, of bits that [`WeightFormat::validate`] takes.
    pub fn middle(&self) -> u32 {
        1 << (self.bits - 1)
    }

    /// How far one scale of quantised activations reaches: as far as one of the weights, with two levels along all of k.
    pub fn activation_group(&self) -> Group {
        if self.channel_scale.is_some() { Group::Channel } else { self.group }
    }

    /// Checks that bits and group size are ones that exist, and that two levels have what they need. Error: the first of these
    /// that does not hold.
    pub fn validate(&self) -> Result<()> {
        if !matches!(self.bits, 2 | 3 | 4 | 8) {
            return Err(Error::invalid("format", "2, 3, 4 or 8 bits", self.bits.to_string()));
        }
        if self.group == Group::Size(0) {
            return Err(Error::invalid("format", "a group of at least 1", "0"));
        }
        if let Some(channel) = self.channel_scale {
            let refuse =
                |expected: &str, got: String| Err(Error::invalid("format with two levels of scales", expected, got));
            if self.bits != 4 {
                return refuse("4 bits", self.bits.to_string());
            }
            if !matches!(self.group, Group::Size(_)) {
                return refuse("groups along k", self.group.to_string());
            }
            if self.zero == Zero::Float {
                return refuse("zero points or none", "float offsets".into());
            }
            if channel == Float::F32 {
                return refuse("scales of channels in f16 or bf16", channel.to_string());
            }
            if self.scale != Float::F32 {
                return refuse("products of scales and factors in f32", self.scale.to_string());
            }
        }
        Ok(())
    }
}

/// A scheme of the field, as `w4a16-g128`: what the weights are and what becomes of the activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Format {
    /// The weights.
    pub weight: WeightFormat,
    /// The activations.
    pub act: Act,
}

/// The formats that the project tests, measures and documents; any other that parses works too.
pub const FORMATS: &[&str] = &[
    "w4a16-g128",
    "w4a16-g128-asym",
    "w4a16-g64",
    "w4a16-g32-asym",
    "w4a16-g32-float",
    "w4a16",
    "w4a16-g32-sf32",
    "w8a16-g128",
    "w8a16",
    "w8a16-g32-asym",
    "w8a16-tensor",
    "w8a16-g16-sf32",
    "w3a16-g128",
    "w3a16-g128-asym",
    "w2a16-g64-asym",
    "w2a16-g32-float",
    "w4a8-g128",
    "w4a8-g128-asym",
    "w4a8-g32-asym",
    "w4a8-g64-xasym",
    "w4a8-g128-asym-xasym",
    "w4a8-g32-float-xasym",
    "w4a8",
    "w8a8-g128",
    "w8a8",
    "w8a8-xasym",
    "w8a8-tensor",
    "w8a8-g32-asym-xasym",
    "w8a8-g16-sf32",
    "w3a8-g128-asym",
    "w2a8-g64-asym",
    "w4a32-g128",
    "w8a32-g64-float-sbf16",
    "w4a16-g20-asym",
    "w4a8-g100-asym",
    "w4a8-g128-si8",
    "w4a8-g64-asym-si8",
    "w4a8-g32-xasym-sbf16-si8",
    "w4a16-g128-asym-si8",
];

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.weight.write(f, Some(self.act))
    }
}

/// `w4-g128-asym`: a format's name without the activations' half.
impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, None)
    }
}

impl WeightFormat {
    fn write(&self, f: &mut fmt::Formatter<'_>, act: Option<Act>) -> fmt::Result {
        write!(f, "w{}", self.bits)?;
        f.write_str(match act {
            None => "",
            Some(Act::A16) => "a16",
            Some(Act::A32) => "a32",
            Some(Act::A8 | Act::A8Asym) => "a8",
        })?;
        match self.group {
            Group::Tensor => f.write_str("-tensor")?,
            Group::Channel => {}
            Group::Size(g) => write!(f, "-g{g}")?,
        }
        match self.zero {
            Zero::Symmetric => {}
            Zero::Integer => f.write_str("-asym")?,
            Zero::Float => f.write_str("-float")?,
        }
        if act == Some(Act::A8Asym) {
            f.write_str("-xasym")?;
        }
        match self.channel_scale.unwrap_or(self.scale) {
            Float::F16 => {}
            Float::BF16 => f.write_str("-sbf16")?,
            Float::F32 => f.write_str("-sf32")?,
        }
        if self.channel_scale.is_some() { f.write_str("-si8") } else { Ok(()) }
    }
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let fail = |expected: &str| Error::invalid("format", expected, format!("\"{text}\""));
        let mut parts = text.split('-');
        let head = parts.next().unwrap_or_default();
        let (bits, act) = head
            .strip_prefix('w')
            .and_then(|rest| rest.split_once('a'))
            .ok_or_else(|| fail("a name like w4a16-g128 or w8a8"))?;
        let bits = match bits {
            "2" => 2,
            "3" => 3,
            "4" => 4,
            "8" => 8,
            _ => return Err(fail("weights of 2, 3, 4 or 8 bits (w2, w3, w4, w8)")),
        };
        let mut act = match act {
            "8" => Act::A8,
            "16" => Act::A16,
            "32" => Act::A32,
            _ => return Err(fail("activations of 8, 16 or 32 bits (a8, a16, a32)")),
        };
        let (mut group, mut zero, mut scale, mut factors) = (None, None, None, None);
        for part in parts {
            let repeated = match part {
                "tensor" => group.replace(Group::Tensor).is_some(),
                "asym" => zero.replace(Zero::Integer).is_some(),
                "float" => zero.replace(Zero::Float).is_some(),
                "sbf16" => scale.replace(Float::BF16).is_some(),
                "sf32" => scale.replace(Float::F32).is_some(),
                "si8" => factors.replace(()).is_some(),
                "xasym" if act == Act::A8 => {
                    act = Act::A8Asym;
                    false
                }
                "xasym" => return Err(fail("-xasym once, and only with a8")),
                _ => match part.strip_prefix('g').and_then(|g| g.parse::<usize>().ok()) {
                    Some(g) if g > 0 && !part.starts_with("g+") => group.replace(Group::Size(g)).is_some(),
                    _ => {
                        return Err(fail(
                            "parts of -g{N} with N from 1 on, -tensor, -asym, -float, -xasym, -sbf16, -sf32, -si8",
                        ));
                    }
                },
            };
            if repeated {
                return Err(fail("each property once"));
            }
        }
        let scale = scale.unwrap_or(Float::F16);
        let weight = WeightFormat {
            bits,
            group: group.unwrap_or(Group::Channel),
            zero: zero.unwrap_or(Zero::Symmetric),
            scale: if factors.is_some() { Float::F32 } else { scale },
            channel_scale: factors.map(|()| scale),
        };
        if factors.is_some() && weight.validate().is_err() {
            return Err(fail("-si8 with w4, a group and zero points or none, scales in f16 or bf16"));
        }
        Ok(Format { weight, act })
    }
}
