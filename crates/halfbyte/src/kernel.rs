//! Problems, what is done to their results, and the reasons for which a kernel is not taken: the vocabulary of dispatch;
//! and what heads attention has, wherever it runs.

use crate::error::{Error, Result};
use crate::format::Format;
use crate::format::int8::Affine;
use crate::tensor::Float;

/// One product to be computed: what, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Weights and what becomes of the activations; none for dense weights.
    pub format: Option<Format>,
    /// Type of the activations as handed in.
    pub x: Float,
    /// Type of the result.
    pub y: Float,
    /// Rows of x.
    pub m: usize,
    /// Outputs.
    pub n: usize,
    /// Length of the reduction.
    pub k: usize,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.format {
            Some(format) => write!(f, "{format}")?,
            None => f.write_str("dense")?,
        }
        write!(f, " with x {}, y {} at m={} n={} k={}", self.x, self.y, self.m, self.n, self.k)
    }
}

/// Why a kernel does not serve a problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason(pub String);

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A kernel and why it was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rejection {
    /// Name of the kernel.
    pub kernel: &'static str,
    /// Why not.
    pub reason: Reason,
}

/// A row of a table of kernels.
pub(crate) trait Row {
    /// Name of the kernel.
    fn name(&self) -> &'static str;
}

/// What the first row of a table that takes a problem makes of it. Error: none takes it, and every row's reason.
pub(crate) fn first<'a, K: Row + 'a, T>(
    op: &'static str,
    problem: &dyn std::fmt::Display,
    table: impl IntoIterator<Item = &'a K>,
    mut take: impl FnMut(&'a K) -> std::result::Result<T, Reason>,
) -> Result<T> {
    let mut rejections = Vec::new();
    for row in table {
        match take(row) {
            Ok(taken) => return Ok(taken),
            Err(reason) => rejections.push(Rejection { kernel: row.name(), reason }),
        }
    }
    Err(Error::NoKernel { op, problem: problem.to_string(), rejections })
}

/// Every row of a table with the reason against it: its own, or that another row comes first.
pub(crate) fn explain<'a, K: Row + 'a>(
    table: impl IntoIterator<Item = &'a K>,
    mut against: impl FnMut(&'a K) -> Option<Reason>,
) -> Vec<(&'a K, Option<Reason>)> {
    let mut chosen: Option<&str> = None;
    let explained = table.into_iter().map(|row| {
        let reason = against(row).or_else(|| chosen.map(|other| Reason(format!("{other} comes first"))));
        if reason.is_none() {
            chosen = Some(row.name());
        }
        (row, reason)
    });
    explained.collect()
}

/// Functions applied to a product, element by element. NaN stays NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `max(v, 0)`.
    Relu,
    /// `min(max(v, 0), 6)`.
    Relu6,
    /// `min(max(v, low), high)`. Layers refuse it unless low ≤ high.
    Clamp(f32, f32),
    /// `v · Φ(v)` with the error function.
    Gelu,
    /// The hyperbolic-tangent approximation of [`Activation::Gelu`].
    GeluTanh,
    /// `v / (1 + exp(−v))`.
    Silu,
}

impl Activation {
    /// The function's value.
    pub fn apply(self, v: f32) -> f32 {
        match self {
            Activation::None => v,
            Activation::Relu => clamp(v, 0.0, f32::INFINITY),
            Activation::Relu6 => clamp(v, 0.0, 6.0),
            Activation::Clamp(low, high) => clamp(v, low, high),
            Activation::Gelu => 0.5 * v * (1.0 + libm::erff(v * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::GeluTanh => {
                let inner = 0.797_884_6 * (v + 0.044_715 * v * v * v);
                0.5 * v * (1.0 + inner.tanh())
            }
            Activation::Silu => v / (1.0 + (-v).exp()),
        }
    }

    /// Error: a clamp to nothing.
    pub(crate) fn check(self, op: &'static str) -> Result<()> {
        match self {
            Activation::Clamp(low, high) if low <= high => Ok(()),
            Activation::Clamp(low, high) => {
                Err(Error::invalid(op, "a clamp whose low is at most its high", format!("{low} and {high}")))
            }
            _ => Ok(()),
        }
    }

    /// The least and the greatest code of y that it leaves. Error: it is more than a clamp, or clamps to nothing.
    pub(crate) fn range_of_codes(self, op: &'static str, y: Affine) -> Result<[i32; 2]> {
        self.check(op)?;
        let (least, greatest) = y.byte().codes().into_inner();
        Ok(match self {
            Activation::None => [least, greatest],
            Activation::Relu => [y.zero(), greatest],
            Activation::Relu6 => [y.zero(), y.code(6.0)],
            Activation::Clamp(low, high) => [y.code(low), y.code(high)],
            other => {
                let expected = "none, relu, relu6 or a clamp for codes of 8 bits";
                return Err(Error::invalid(op, expected, format!("{other:?}")));
            }
        })
    }
}

/// Unlike `f32::max` and `min`, keeps NaN.
fn clamp(v: f32, low: f32, high: f32) -> f32 {
    if v < low {
        low
    } else if v > high {
        high
    } else {
        v
    }
}

/// Caps of scores and logits: from 2⁻¹²⁶ to 2¹²⁵. Within these a cap, its reciprocal and both in powers of two are normal floats.
pub const CAPS: std::ops::RangeInclusive<f32> = f32::MIN_POSITIVE..=4.253_529_6e37;

/// The heads in a row of a fused query, key and value matrix: `heads` query heads, `kv_heads` key heads, `kv_heads`
/// value heads, each of `head_size` elements. Query head `i` reads key and value head `i / (heads / kv_heads)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Number of query heads: a multiple of `kv_heads`.
    pub heads: usize,
    /// Number of key heads, and of value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_size: usize,
}

impl Heads {
    /// Elements of a row: `(heads + 2·kv_heads)·head_size`, or `usize::MAX` if there are more.
    pub fn row(&self) -> usize {
        self.kv_heads.saturating_mul(2).saturating_add(self.heads).saturating_mul(self.head_size)
    }

    /// Query heads that share a key and value head; 0 if there are no key and value heads.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Itself, if the numbers make sense.
    pub(crate) fn checked(self, op: &'static str) -> Result<Self> {
        let Self { heads, kv_heads, head_size } = self;
        let whole = heads > 0 && kv_heads > 0 && head_size > 0 && heads % kv_heads == 0;
        let row = kv_heads.checked_mul(2).and_then(|n| n.checked_add(heads)).and_then(|n| n.checked_mul(head_size));
        if whole && row.is_some() {
            return Ok(self);
        }
        let expected = "heads in whole groups, one group for each key/value head, of at least one element";
        Err(Error::invalid(op, expected, format!("{heads} heads, {kv_heads} key/value heads, head size {head_size}")))
    }
}

/// What keys and values lie in, in a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE single precision.
    #[default]
    F32,
    /// IEEE half precision: each element within 2⁻¹¹ of itself, from 2⁻¹⁴ to 65504 in magnitude; infinite beyond.
    F16,
    /// The upper half of a single: each element within 2⁻⁸ of itself.
    Bf16,
    /// Codes of 8 bits, −127 … 127, times a scale in f32 for each position and head, of keys and of values: the greatest magnitude
    /// over 127, so that each element is within half a scale. A key or value that holds NaN or infinity is NaN throughout.
    Int8,
}

impl KvType {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::F32, Self::F16, Self::Bf16, Self::Int8];

    /// The name: `f32`, `f16`, `bf16`, `int8`.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// Bytes that a key, or a value, of one head and position takes, with its scale.
    pub fn bytes(self, head_size: usize) -> usize {
        match self {
            Self::F32 => 4 * head_size,
            Self::F16 | Self::Bf16 => 2 * head_size,
            Self::Int8 => head_size + size_of::<f32>(),
        }
    }
}

impl From<Float> for KvType {
    fn from(float: Float) -> Self {
        match float {
            Float::F32 => Self::F32,
            Float::F16 => Self::F16,
            Float::BF16 => Self::Bf16,
        }
    }
}

impl std::str::FromStr for KvType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let named = Self::ALL.into_iter().find(|kv| kv.name() == name);
        named.ok_or_else(|| Error::invalid("kv cache", "f32, f16, bf16 or int8", name))
    }
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
