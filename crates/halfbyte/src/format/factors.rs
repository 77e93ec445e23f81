//! Scales on two levels: those of groups as integer multiples of one scale a channel.
//!
//! ```text
//! scale[i, g] = channel[i] · factor[i, g]        factor a whole number, 1 and more
//! −128 ≤ (code − zero) · factor ≤ 127            for every code of 4 bits
//! ```
//!
//! so that a weight is a byte times the scale of its channel, and a product sums bytes along the whole of k before it scales.
//! *Source:* the progressive group quantisation of QServe (Lin et al., 2024).
//!
//! Of the pairs that give the same scales the one with the greatest channel scale is kept; it is found, or shown not to
//! exist, by dividing the least scale of a row by 1, 2, … 16, since that quotient is the channel scale for some factor.

use super::{WeightFormat, Zeros};
use crate::error::{Error, Result};
use crate::memory::room;
use crate::tensor::Float;

/// Factors are at most this, whatever the zero point.
pub const MOST_FACTOR: u32 = 16;

/// The greatest factor of a group with this zero point: all 16 codes times it are bytes with sign.
pub fn most_factor(zero: u32) -> u32 {
    let down = 128u32.checked_div(zero).unwrap_or(MOST_FACTOR);
    let up = 127u32.checked_div(15u32.saturating_sub(zero)).unwrap_or(MOST_FACTOR);
    down.min(up).min(MOST_FACTOR)
}

/// Scales of channels, and factors of groups.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Factors {
    /// `[n]`.
    pub channel: Vec<f32>,
    /// `[n, groups]`.
    pub factors: Vec<u8>,
}

impl Factors {
    /// Takes scales `[n, groups]` apart; `zero` gives the zero point of a row and group. Errors: the first row whose scales are
    /// no such multiples, memory that is short.
    pub fn of(
        op: &'static str,
        [n, groups]: [usize; 2],
        scale: impl Fn(usize, usize) -> f32,
        zero: impl Fn(usize, usize) -> u32,
        dtype: Float,
    ) -> Result<Self> {
        let (mut channel, mut factors) = (room(op, n)?, room(op, n * groups)?);
        let (mut scales, mut most) = (vec![0f32; groups], vec![0f32; groups]);
        for i in 0..n {
            for g in 0..groups {
                (scales[g], most[g]) = (scale(i, g), most_factor(zero(i, g)) as f32);
            }
            let Some(of_row) = channel_scale(&scales, &most, dtype) else {
                let bounds = |a: (f32, f32), &s: &f32| (a.0.min(s), a.1.max(s));
                let (low, high) = scales.iter().fold((f32::INFINITY, f32::NEG_INFINITY), bounds);
                let expected = format!(
                    "scales that are whole multiples of one {dtype} number for each row, so that (code − zero) · multiple is within −128 … 127"
                );
                return Err(Error::invalid(op, expected, format!("scales from {low} to {high} in row {i}")));
            };
            channel.push(of_row);
            factors.extend(scales.iter().map(|&s| if of_row == 0.0 { 1 } else { (s / of_row) as u8 }));
        }
        Ok(Self { channel, factors })
    }
}

/// The greatest number of a type of which all scales are whole multiples of at most `most`.
fn channel_scale(scales: &[f32], most: &[f32], dtype: Float) -> Option<f32> {
    let nearer = |a: f32, &b: &f32| if b.abs() < a.abs() { b } else { a };
    let least = scales.iter().fold(f32::INFINITY, nearer);
    if least == 0.0 || least.is_infinite() {
        return scales.iter().all(|&s| s == 0.0).then_some(0.0);
    }
    (1..=MOST_FACTOR).map(|divisor| (divisor as f32, least / divisor as f32)).find_map(|(divisor, channel)| {
        // Products of 11 bits and 5 are exact.
        let multiple = |(&s, &most): (&f32, &f32)| {
            let factor = s / channel;
            factor.fract() == 0.0 && (1.0..=most).contains(&factor) && channel * factor == s
        };
        let exact = dtype.round(channel) == channel && channel * divisor == least;
        (exact && scales.iter().zip(most).all(multiple)).then_some(channel)
    })
}

/// What zero points a tensor of the format has, as a function of row and group.
pub(crate) fn zero_points<'a>(
    format: WeightFormat,
    zeros: &'a Zeros,
    groups: usize,
) -> impl Fn(usize, usize) -> u32 + 'a {
    move |i, g| match zeros {
        Zeros::Integer(z) => u32::from(z[i * groups + g]),
        Zeros::Symmetric | Zeros::Float(_) => format.middle(),
    }
}
