//! Quantised tensors of random numbers, for measurements: nothing is quantised, and a tensor of any size takes a few kilobytes until
//! it is packed.
//!
//! ```text
//! codes            uniform over all of the format's, drawn where they are packed (codes/random.rs)
//! scale (i, g)     element i + g of a table: k^−½ / (deviation of code − zero), times 0.75 … 1.25
//! zero (i, g)      element i + g of a table: uniform over the codes; an offset puts zero in the middle
//! ```
//!
//! So outputs of inputs of deviation 1 have about deviation 1, through as many layers as there are.

use super::codes::{Codes, random::first_of, random::word, random::words_of_row};
use super::cpu_n16::field_bits;
use super::stored::{StoredTensor, StoredZeros, Strides};
use crate::error::{Error, Result};
use crate::format::{Group, WeightFormat, Zero};
use crate::tensor::FloatData;
use std::borrow::Cow;
use std::ops::Range;

/// Numbers of a seed that no codes have: those of scales, and those of zeros.
const OF_SCALES: u64 = 1 << 39;
const OF_ZEROS: u64 = OF_SCALES + (1 << 38);

/// Factors up to this every zero point allows.
const MOST_FACTOR: u32 = 8;

/// From 0 to 1, 1 excluded.
fn uniform(number: u64) -> f32 {
    (word(number) >> 8) as f32 / (1 << 24) as f32
}

impl StoredTensor<'static> {
    /// A matrix of random weights, of deviation `k^−½`; of the seed 24 bits count. The same numbers come out wherever it is
    /// packed. Errors: a format that does not exist, a matrix that fits no memory.
    pub fn random(format: WeightFormat, [n, k]: [usize; 2], seed: u32) -> Result<Self> {
        Self::random_part(format, [n, k], seed, [0..n, 0..k])
    }

    /// Some rows and columns of such a matrix `[n, k]`: the numbers that it has there. Errors: as [`StoredTensor::random`]; what is not
    /// there, columns that begin within a word or a group.
    pub fn random_part(
        format: WeightFormat,
        [n, k]: [usize; 2],
        seed: u32,
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<Self> {
        const OP: &str = "part of random weights";
        format.validate()?;
        for (range, end) in [(&rows, n), (&columns, k)] {
            if range.start > range.end || range.end > end {
                return Err(Error::invalid(OP, format!("a range up to {end}"), format!("{range:?}")));
            }
        }
        let first_group = match format.group {
            Group::Size(size) => columns.start / size,
            Group::Tensor | Group::Channel => 0,
        };
        let per_word = 32 / field_bits(format.bits) as usize;
        let in_group = matches!(format.group, Group::Size(size) if first_group * size != columns.start);
        if !columns.start.is_multiple_of(per_word) || in_group {
            let expected = format!("columns from a multiple of {per_word} and of groups on");
            return Err(Error::invalid(OP, expected, columns.start.to_string()));
        }
        let (first, stride) = (first_of(seed), words_of_row(k, format.bits));
        let groups = format.group.count(columns.len());
        let (strides, len, of_part) = match format.group {
            Group::Tensor => (Strides::TENSOR, 1, 0),
            Group::Channel | Group::Size(_) => {
                (Strides { output: 1, group: 1 }, rows.len().saturating_add(groups), rows.start + first_group)
            }
        };
        let numbers = |of: u64| (0..len as u64).map(move |at| first + of + of_part as u64 + at);
        let codes = f64::from(format.max_code()) + 1.0;
        let of_zeros = if format.zero == Zero::Integer { 2.0 } else { 1.0 };
        let deviation = ((codes * codes - 1.0) / 12.0 * of_zeros).sqrt();
        let scale = ((k.max(1) as f64).powf(-0.5) / deviation) as f32;
        let scales: Vec<f32> = match format.channel_scale {
            Some(dtype) => {
                // The root mean square of 1 … 8 is 5.05.
                let channel = dtype.round(scale / 5.05);
                numbers(OF_SCALES).map(|at| channel * (1 + word(at) % MOST_FACTOR) as f32).collect()
            }
            None => numbers(OF_SCALES).map(|at| format.scale.round(scale * (0.75 + 0.5 * uniform(at)))).collect(),
        };
        let zeros = match format.zero {
            Zero::Symmetric => StoredZeros::Symmetric,
            Zero::Integer => {
                let points = numbers(OF_ZEROS).map(|at| (word(at) & format.max_code()) as u16);
                StoredZeros::Integer(Cow::Owned(points.collect()), strides)
            }
            Zero::Float => {
                let middle = format.max_code() as f32 / 2.0;
                let offsets = scales.iter().map(|scale| format.scale.round(-middle * scale));
                StoredZeros::Float(FloatData::F32(Cow::Owned(offsets.collect())), strides)
            }
        };
        let scales = (FloatData::F32(Cow::Owned(scales)), strides);
        let first = first + (rows.start * stride + columns.start / per_word) as u64;
        Self::new(format, [rows.len(), columns.len()], Codes::Random { first, stride }, scales, zeros, None)
    }
}
