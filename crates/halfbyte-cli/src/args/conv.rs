//! Options of commands that tell of convolutions.

use super::WeightKind;
use crate::failure::{Failure, Result};
use clap::ValueEnum;
use halfbyte::conv::{Geometry, Layout2d};
use halfbyte::format::int8::Byte;
use std::str::FromStr;

/// Sizes of a convolution and its images.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Sizes {
    /// Input channels.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub ci: usize,
    /// Output channels.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub co: usize,
    /// Rows and columns of the input: 56, or 56x48.
    #[arg(long, value_name = "H[xW]", value_parser = pair, default_value = "56")]
    pub size: [usize; 2],
    /// Rows and columns of the kernel.
    #[arg(long, value_name = "H[xW]", value_parser = pair, default_value = "3")]
    pub kernel_size: [usize; 2],
    /// Pixels from output to output.
    #[arg(long, value_name = "H[xW]", value_parser = pair, default_value = "1")]
    pub stride: [usize; 2],
    /// Pixels of zeros above and below, left and right.
    #[arg(long, value_name = "H[xW]", value_parser = pair, default_value = "1")]
    pub padding: [usize; 2],
    /// Pixels from position to position of the kernel.
    #[arg(long, value_name = "H[xW]", value_parser = pair, default_value = "1")]
    pub dilation: [usize; 2],
    /// Groups of channels.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub groups: usize,
}

impl Sizes {
    /// The options by their names.
    pub const NAMES: [&'static str; 8] = ["ci", "co", "size", "kernel_size", "stride", "padding", "dilation", "groups"];

    /// What the layer fixes.
    pub fn geometry(&self) -> Geometry {
        let Self { ci, co, kernel_size: kernel, stride, padding: [down, across], dilation, groups, .. } = *self;
        Geometry { ci, co, kernel, stride, padding: [down, across, down, across], dilation, groups }
    }
}

/// Two numbers, down and across, or one for both.
fn pair(text: &str) -> std::result::Result<[usize; 2], String> {
    let number = |text: &str| text.parse().map_err(|_| "expected a number, or two as 3x5".to_owned());
    match text.split_once('x') {
        Some((down, across)) => Ok([number(down)?, number(across)?]),
        None => number(text).map(|both| [both; 2]),
    }
}

/// An order of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    /// Channels first.
    Nchw,
    /// Channels last.
    Nhwc,
}

impl From<LayoutArg> for Layout2d {
    fn from(layout: LayoutArg) -> Self {
        match layout {
            LayoutArg::Nchw => Layout2d::Nchw,
            LayoutArg::Nhwc => Layout2d::Nhwc,
        }
    }
}

/// A type of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ByteArg {
    /// 0 to 255.
    U8,
    /// −128 to 127.
    I8,
}

impl From<ByteArg> for Byte {
    fn from(byte: ByteArg) -> Self {
        match byte {
            ByteArg::U8 => Byte::U8,
            ByteArg::I8 => Byte::I8,
        }
    }
}

/// A kind of convolution.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Of floats by a weight in some format.
    Floats(WeightKind),
    /// Of bytes by bytes, to bytes.
    Int8,
}

impl Kind {
    /// Refuses options of floats where all kinds are of bytes, and `--bytes` where none is.
    pub fn refuse_unused(kinds: &[Self], of_floats: &[(&str, bool)], bytes: Option<ByteArg>) -> Result<()> {
        let int8 = |kind: &Self| matches!(kind, Self::Int8);
        let given = of_floats.iter().find(|(_, given)| *given);
        let (option, cause) = match (given, bytes) {
            (Some((option, _)), _) if kinds.iter().all(int8) => (*option, "int8 has bytes in and bytes out"),
            (_, Some(_)) if !kinds.iter().any(int8) => ("--bytes", "it is of the format int8 alone"),
            _ => return Ok(()),
        };
        Err(Failure::usage(
            format!("{option} changes nothing"),
            cause,
            format!("leave out {option}, or name another format"),
        ))
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "int8" => Ok(Kind::Int8),
            _ => text.parse().map(Kind::Floats).map_err(|e| format!("{e}; bytes in, bytes out is int8")),
        }
    }
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Kind::Floats(kind) => kind.fmt(f),
            Kind::Int8 => f.write_str("int8"),
        }
    }
}
