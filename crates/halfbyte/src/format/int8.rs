//! Eight bits in: bytes with a scale and a zero point, and the matrices of bytes that they are multiplied by.
//!
//! ```text
//! x[r, j] = sI · (qI[r, j] − zI)            one scale and zero point a tensor
//! w[i, j] = sW[i] · (qW[i, j] − zW[i])      one of each an output, or a tensor; zW is 0 almost everywhere
//! sum[r, i] = Σⱼ (qI − zI)(qW − zW) + bias[i]                      int32, exact; the bias has the scale sI·sW[i]
//! y[r, i] = clamp(round(sum · M[i]) + zO)    M[i] = (sI · sW[i]) / sO
//! ```
//!
//! The scales, M and the product `sum · M` are f32, each rounded once, in this order; `round` goes to the nearest
//! integer, halves to the even one. These are the bits of onnxruntime's QLinearMatMul and QLinearConv: with M in f64, or
//! its factors in another order, sums that come close to a half fall to the other side.

use crate::error::{Error, Result};
use crate::memory::check_empty;
use crate::tensor::from_slices;
use std::ops::RangeInclusive;

/// The two types of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Byte {
    /// 0 to 255.
    U8,
    /// −128 to 127.
    I8,
}

impl Byte {
    /// The codes of this type.
    pub fn codes(self) -> RangeInclusive<i32> {
        match self {
            Byte::U8 => 0..=255,
            Byte::I8 => -128..=127,
        }
    }

    /// The name as error texts write it: `u8`, `i8`.
    pub fn name(self) -> &'static str {
        match self {
            Byte::U8 => "u8",
            Byte::I8 => "i8",
        }
    }
}

/// Borrowed bytes of either type.
#[derive(Clone, Copy, Debug)]
pub enum Bytes<'a> {
    /// Unsigned.
    U8(&'a [u8]),
    /// Signed.
    I8(&'a [i8]),
}

impl Bytes<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Bytes::U8(v) => v.len(),
            Bytes::I8(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn byte(&self) -> Byte {
        match self {
            Bytes::U8(_) => Byte::U8,
            Bytes::I8(_) => Byte::I8,
        }
    }

    /// Element `i`. Panics if it is not there.
    pub fn get(&self, i: usize) -> i32 {
        match self {
            Bytes::U8(v) => v[i].into(),
            Bytes::I8(v) => v[i].into(),
        }
    }
}

/// Writable bytes of either type.
#[derive(Debug)]
pub enum BytesMut<'a> {
    /// Unsigned.
    U8(&'a mut [u8]),
    /// Signed.
    I8(&'a mut [i8]),
}

impl BytesMut<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            BytesMut::U8(v) => v.len(),
            BytesMut::I8(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Type of the elements.
    pub fn byte(&self) -> Byte {
        match self {
            BytesMut::U8(_) => Byte::U8,
            BytesMut::I8(_) => Byte::I8,
        }
    }
}

from_slices!(Bytes, BytesMut: U8(u8), I8(i8));

/// What a tensor's bytes stand for: `scale · (code − zero)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Affine {
    byte: Byte,
    scale: f32,
    zero: i32,
}

impl Affine {
    /// A scale and a zero point for bytes of a type. Errors: a scale that is not finite or not above 0, a zero point that
    /// is no code of the type.
    pub fn new(byte: Byte, scale: f32, zero: i32) -> Result<Self> {
        if !(scale.is_finite() && scale > 0.0) {
            return Err(Error::invalid("int8 scale", "a finite scale above 0", scale.to_string()));
        }
        check_zero(byte, zero)?;
        Ok(Self { byte, scale, zero })
    }

    /// Type of the bytes.
    pub fn byte(&self) -> Byte {
        self.byte
    }

    /// What one step of the codes stands for.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The code of 0.
    pub fn zero(&self) -> i32 {
        self.zero
    }

    /// The code nearest to a number (halves to even), at the type's ends if it lies beyond them. NaN becomes the zero
    /// point.
    pub fn code(&self, value: f32) -> i32 {
        let (low, high) = self.byte.codes().into_inner();
        // Beyond ±256 every zero point saturates; this far from the ends, adding one to it is exact.
        let steps = (value / self.scale).clamp(-256.0, 256.0).round_ties_even() as i32;
        (steps + self.zero).clamp(low, high)
    }
}

/// A weight in bytes, as it is given to a layer: codes `[n, k]`, scales and zero points an output or a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Int8Weight<'a> {
    codes: Bytes<'a>,
    n: usize,
    k: usize,
    scales: &'a [f32],
    zeros: &'a [i32],
}

impl<'a> Int8Weight<'a> {
    /// Puts a weight together.
    ///
    /// *Shapes:* codes `[n, k]`; scales `[n]`, or one; zeros `[n]`, or one, or none where all are 0. *Errors:* a length that
    /// does not fit, a scale that is negative or not finite, a zero point that is no code of the type.
    pub fn new(codes: Bytes<'a>, [n, k]: [usize; 2], scales: &'a [f32], zeros: &'a [i32]) -> Result<Self> {
        const OP: &str = "int8 weight";
        if n.checked_mul(k) != Some(codes.len()) {
            return Err(Error::invalid(OP, format!("{n} × {k} codes"), codes.len().to_string()));
        }
        check_empty(OP, [n, k])?;
        if scales.len() != n && scales.len() != 1 {
            return Err(Error::invalid(OP, format!("1 or {n} scales"), scales.len().to_string()));
        }
        if zeros.len() > 1 && zeros.len() != n {
            return Err(Error::invalid(OP, format!("no, 1 or {n} zero points"), zeros.len().to_string()));
        }
        if let Some(scale) = scales.iter().find(|s| !(s.is_finite() && **s >= 0.0)) {
            return Err(Error::invalid(OP, "finite scales of at least 0", scale.to_string()));
        }
        zeros.iter().try_for_each(|&zero| check_zero(codes.byte(), zero))?;
        Ok(Self { codes, n, k, scales, zeros })
    }

    /// Codes `[n, k]`.
    pub fn codes(&self) -> Bytes<'a> {
        self.codes
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Scale of output `i`. Panics if there is no such output, where each has its own.
    pub fn scale(&self, i: usize) -> f32 {
        if self.scales.len() == 1 { self.scales[0] } else { self.scales[i] }
    }

    /// Zero point of output `i`. Panics if there is no such output, where each has its own.
    pub fn zero(&self, i: usize) -> i32 {
        match self.zeros {
            [] => 0,
            [zero] => *zero,
            zeros => zeros[i],
        }
    }
}

fn check_zero(byte: Byte, zero: i32) -> Result<()> {
    if byte.codes().contains(&zero) {
        return Ok(());
    }
    Err(Error::invalid("int8 zero point", format!("a code of {}", byte.name()), zero.to_string()))
}

/// What a sum is multiplied by on its way to the codes of y: `M = (sI · sW) / sO`.
pub fn multiplier(x: Affine, w_scale: f32, y: Affine) -> f32 {
    x.scale * w_scale / y.scale
}

/// How the sum of two tensors of bytes becomes codes of a third, in integers alone:
///
/// ```text
/// y = clamp(((fA · (qA − zA) + fB · (qB − zB) + 2¹⁵) >> 16) + zO)        fA = round(sA / sO · 2¹⁶), fB likewise
/// ```
///
/// A factor is off by at most 2⁻¹⁷ of a step, 255 times that by 0.002. Every device computes these bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sum {
    bytes: [Byte; 3],
    factors: [i32; 2],
    constant: i32,
    zero: i32,
    range: [i32; 2],
}

impl Sum {
    /// The sum of tensors of these scales and zero points, with a relu behind it or without. *Errors:* a scale of a or b more than
    /// 64 times that of y, whose sums would leave int32.
    pub fn new([a, b]: [Affine; 2], y: Affine, relu: bool) -> Result<Self> {
        const OP: &str = "int8 sum";
        const MOST: f32 = 64.0;
        let factor = |x: Affine| {
            let ratio = x.scale / y.scale;
            if ratio > MOST {
                return Err(Error::invalid(OP, format!("scales up to {MOST} times that of y"), ratio.to_string()));
            }
            Ok((ratio * 65536.0).round() as i32)
        };
        let factors = [factor(a)?, factor(b)?];
        let constant = (1 << 15) - factors[0] * a.zero - factors[1] * b.zero;
        let (least, greatest) = y.byte.codes().into_inner();
        let range = [if relu { y.zero } else { least }, greatest];
        Ok(Self { bytes: [a.byte, b.byte, y.byte], factors, constant, zero: y.zero, range })
    }

    /// The code of y for codes of a and b.
    pub fn code(&self, a: i32, b: i32) -> i32 {
        // The whole is within int32, its parts may not be.
        let sum = (self.factors[0].wrapping_mul(a)).wrapping_add(self.factors[1].wrapping_mul(b));
        ((sum.wrapping_add(self.constant) >> 16) + self.zero).clamp(self.range[0], self.range[1])
    }

    /// Types of the bytes of a, b and y.
    pub fn bytes(&self) -> [Byte; 3] {
        self.bytes
    }

    /// What codes of a and b are multiplied by, what is added to that, the zero point of y, its least and its greatest code.
    pub(crate) fn terms(&self) -> [i32; 6] {
        let Self { factors: [a, b], constant, zero, range: [least, greatest], .. } = *self;
        [a, b, constant, zero, least, greatest]
    }
}

/// How the mean of bytes becomes a code: the sum of codes is exact, is rounded to f32, multiplied by `f32(sX / count)`, and goes
/// to the code of y that is nearest, as [`Affine::code`] has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    count: usize,
    x: Byte,
    zeros: i32,
    scale: f32,
    y: Affine,
}

impl Mean {
    /// The mean of `count` bytes. *Errors:* none, or more than 2²³, whose sum would leave int32.
    pub fn new(x: Affine, count: usize, y: Affine) -> Result<Self> {
        if !(1..=1 << 23).contains(&count) {
            return Err(Error::invalid("int8 mean", "1 to 2²³ bytes", count.to_string()));
        }
        Ok(Self { count, x: x.byte, zeros: count as i32 * x.zero, scale: x.scale / count as f32, y })
    }

    /// The code of y for a sum of codes of x.
    pub fn code(&self, sum: i32) -> i32 {
        // The difference of a sum of so many codes is within int32; that of another sum may not be.
        self.y.code((i64::from(sum) - i64::from(self.zeros)) as f32 * self.scale)
    }

    /// How many bytes it is of.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Type of the bytes of x.
    pub fn x(&self) -> Byte {
        self.x
    }

    /// What the codes of y stand for.
    pub fn y(&self) -> Affine {
        self.y
    }

    /// The sum of zero points, and what is left of a sum is multiplied by.
    pub(crate) fn terms(&self) -> (i32, f32) {
        (self.zeros, self.scale)
    }
}
