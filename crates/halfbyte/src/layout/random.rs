//! Quantised tensors of random numbers, for measurements: nothing is quantised, and a tensor of any size takes a few kilobytes until
//! it is packed.
//!
//! ```text
//! codes            uniform over all of the format's, drawn where they are packed (codes/random.rs)
//! scale (i, g)     element i + g of a table: k^−½ / (deviation of code − zero), times 0.75 … 1.25; of symmetric codes, but for scales
//!                  on two levels, half of them negative
//! zero (i, g)      element i + g of a table: uniform over the codes; an offset puts zero in the middle
//! ```
//!
//! or, as GGUF's K types have them: scale = half (i, block) · factor (i, g); offset = −half (i, block) · factor (i, g), of blocks of 256
//! columns; factors of 6 bits and of a signed byte where there are no offsets; codes of at most 6 bits
//!
//! So outputs of inputs of deviation 1 have about deviation 1, through as many layers as there are.

use super::codes::{BlockForm, Codes, Fields, field_bits, random::first_of, random::word, random::words_of_row};
use super::cuda_wna16::Atom;
use super::multiples::Multiples;
use super::stored::{StoredTensor, StoredZeros, Strides};
use crate::error::{Error, Result};
use crate::format::{Group, WeightFormat, Zero};
use crate::tensor::{Float, FloatData};
use half::f16;
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;

/// Numbers of a seed that no codes have: those of scales, and those of zeros.
const OF_SCALES: u64 = 1 << 39;
const OF_ZEROS: u64 = OF_SCALES + (1 << 38);

/// Factors up to this every zero point allows.
const MOST_FACTOR: u32 = 8;

/// Codes that share a half in a K type.
const BLOCK: usize = 256;

/// Codes of 5 or 6 bits in a block: the lower 4 of all, then the upper ones.
fn of_bits(bits: usize, add: u8) -> BlockForm {
    BlockForm {
        codes: BLOCK,
        bytes: BLOCK * bits / 8,
        low: Fields { at: 0, run: 64, bits: 4 },
        high: Fields { at: BLOCK / 2, run: BLOCK / 8 * (bits - 4), bits: bits as u32 - 4 },
        add,
        flip: 0,
        table: None,
        unpack: None,
    }
}

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

    /// A matrix of random weights whose scales, and offsets where there are such, are whole multiples of halves, as those of GGUF's K types:
    /// Q4_K is `w4a16-g32-float-sf32`, Q5_K the same with 8 bits, Q2_K `w2a16-g16-float-sf32`, Q3_K `w3a16-g16-sf32`, Q6_K `w8a16-g16-sf32`.
    /// Error: another format, columns that are no multiple of 256, a matrix that fits no memory.
    pub fn random_k_type(format: WeightFormat, [n, k]: [usize; 2], seed: u32) -> Result<Self> {
        const OP: &str = "random weights of a K type";
        let has_offsets = format.zero == Zero::Float;
        let of_16 = format.group == Group::Size(16);
        let is_k_type = match (format.zero, format.bits) {
            (Zero::Symmetric, 3 | 8) | (Zero::Float, 2) => of_16,
            (Zero::Float, 4 | 8) => format.group == Group::Size(32),
            _ => false,
        };
        if !is_k_type || format.scale != Float::F32 || format.channel_scale.is_some() || !k.is_multiple_of(BLOCK) {
            let expected = "the format of Q2_K, Q3_K, Q4_K, Q5_K or Q6_K, and columns in multiples of 256";
            return Err(Error::invalid(OP, expected, format!("{format:?} of {k} columns")));
        }
        let fits = n.checked_mul(k).filter(|&len| len <= isize::MAX as usize / 4);
        fits.ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))?;
        let (groups, blocks, first) = (format.group.count(k), k / BLOCK, first_of(seed));
        let bits = if format.bits < 8 {
            format.bits as usize
        } else if has_offsets {
            5
        } else {
            6
        };
        let (codes, most_factor) = (f64::from(1 << bits), if of_16 { 15 } else { 63 });
        // What a weight would be on average, squared, with halves of 1: of factors 0 … 15 or 63 and offsets that take the middle of codes off,
        // or of factors −128 … 127.
        let (middle, variance) = ((codes - 1.0) / 2.0, (codes * codes - 1.0) / 12.0);
        let squared = match has_offsets {
            true => {
                let most = f64::from(most_factor);
                most * (2.0 * most + 1.0) / 6.0 * (variance + 2.0 * middle * middle)
                    - 2.0 * (most / 2.0 * middle).powi(2)
            }
            false => 65535.0 / 12.0 * variance,
        };
        let scale = (k as f64).powf(-0.5) / squared.sqrt();
        let halves = |of: u64, times: f64| -> Vec<f16> {
            let drawn =
                |at: usize| f16::from_f64(scale * times * (0.75 + 0.5 * f64::from(uniform(first + of + at as u64))));
            (0..n * blocks).into_par_iter().map(drawn).collect()
        };
        let factors = |of: u64| -> Vec<i8> {
            let drawn = |at: usize| {
                let bits = word(first + of + at as u64);
                if has_offsets { (bits & most_factor) as i8 } else { bits as i8 }
            };
            (0..n * groups).into_par_iter().map(drawn).collect()
        };
        let scales = Multiples::new(groups / blocks.max(1), halves(OF_SCALES, 1.0), factors(OF_ZEROS))?;
        let negative = |of: Vec<i8>| of.into_iter().map(|factor| -factor).collect::<Vec<_>>();
        let offsets = has_offsets.then(|| {
            let halves = halves(OF_SCALES + (1 << 37), middle);
            Multiples::new(scales.block(), halves, negative(factors(OF_ZEROS + (1 << 37))))
        });
        let (offsets, strides) = (offsets.transpose()?, Strides::of_outputs(groups));
        let zeros = match &offsets {
            Some(offsets) => StoredZeros::Float(FloatData::F32(offsets.products().into()), strides),
            None => StoredZeros::Symmetric,
        };
        let codes = match format.bits {
            8 => {
                let form = of_bits(bits, if has_offsets { 0 } else { 96 });
                let words = n * blocks * form.bytes / 4;
                let bytes = (0..words).into_par_iter().flat_map_iter(|at| word(first + at as u64).to_le_bytes());
                Codes::Blocks { bytes: bytes.collect::<Vec<u8>>().into(), form: form.into() }
            }
            bits => Codes::Random { first, stride: words_of_row(k, bits) },
        };
        let numbers = (FloatData::F32(scales.products().into()), strides);
        Self::new(format, [n, k], codes, numbers, zeros, None)?.with_multiples(scales, offsets)
    }

    /// A matrix of random weights whose codes of 8 bits are those of a table, as MXFP4's are: symmetric ones, in groups. Error: another
    /// format, columns that are no multiple of 32, a matrix that fits no memory.
    pub fn random_of_table(format: WeightFormat, [n, k]: [usize; 2], seed: u32) -> Result<Self> {
        const OP: &str = "random weights of a table";
        const CODES: usize = 32;
        let of_table = format.bits == 8 && format.zero == Zero::Symmetric && format.channel_scale.is_none();
        if !of_table || !matches!(format.group, Group::Size(_)) || !k.is_multiple_of(CODES) {
            let expected = "symmetric codes of 8 bits in groups, and columns in multiples of 32";
            return Err(Error::invalid(OP, expected, format!("{format:?} of {k} columns")));
        }
        let fits = n.checked_mul(k).filter(|&len| len <= isize::MAX as usize / 4);
        fits.ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))?;
        let (groups, first, table) = (format.group.count(k), first_of(seed), Atom::A_TABLE);
        let squared = table.iter().map(|&code| f64::from(code.abs_diff(128)).powi(2)).sum::<f64>() / 16.0;
        let scale = ((k.max(1) as f64).powf(-0.5) / squared.sqrt()) as f32;
        let drawn = |at: usize| format.scale.round(scale * (0.75 + 0.5 * uniform(first + OF_SCALES + at as u64)));
        let scales: Vec<f32> = (0..n * groups).into_par_iter().map(drawn).collect();
        let bytes = (0..n * k / 8).into_par_iter().flat_map_iter(|at| word(first + at as u64).to_le_bytes());
        let form = BlockForm {
            codes: CODES,
            bytes: CODES / 2,
            low: Fields { at: 0, run: CODES / 2, bits: 4 },
            high: Fields::NONE,
            add: 0,
            flip: 0,
            table: Some(table),
            unpack: None,
        };
        let codes = Codes::Blocks { bytes: bytes.collect::<Vec<u8>>().into(), form: form.into() };
        let scales = (FloatData::F32(scales.into()), Strides::of_outputs(groups));
        Self::new(format, [n, k], codes, scales, StoredZeros::Symmetric, None)
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
            // Symmetric codes are −0.5 on average. Were all scales positive, the outputs of a layer would have a mean, layers would make it
            // grow, and attention would be to single positions.
            None => {
                let negative = |at| format.zero == Zero::Symmetric && word(at) & 1 == 1;
                let drawn = |at| scale * (0.75 + 0.5 * uniform(at)) * if negative(at) { -1.0 } else { 1.0 };
                numbers(OF_SCALES).map(|at| format.scale.round(drawn(at))).collect()
            }
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
