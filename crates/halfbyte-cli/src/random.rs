//! Reproducible random numbers and weights for measurements: timing zeros would flatter every kernel.

use half::{bf16, f16};
use halfbyte::random::splitmix64;
use halfbyte::{Float, FloatData, Group, QTensor, WeightFormat, Zero, Zeros};
use rayon::prelude::*;

/// Random numbers of a seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        splitmix64(&mut self.0)
    }

    /// From −1 (included) to 1 (excluded).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Near to normal, mean 0, deviation 1: the sum of three uniform numbers, each of variance 1/3.
    pub fn normal(&mut self) -> f32 {
        self.uniform() + self.uniform() + self.uniform()
    }
}

/// Elements that share a seed, so that the same numbers come out whatever the number of threads.
const CHUNK: usize = 1 << 14;

/// `len` elements, each made from the generator of its chunk.
fn fill<T: Copy + Send>(len: usize, zero: T, seed: u64, make: impl Fn(&mut Random) -> T + Sync) -> Vec<T> {
    let mut out = vec![zero; len];
    out.par_chunks_mut(CHUNK).enumerate().for_each(|(i, chunk)| {
        let mut random = Random(seed ^ (i as u64).wrapping_mul(0xd134_2543_de82_ef95));
        chunk.iter_mut().for_each(|v| *v = make(&mut random));
    });
    out
}

/// Normal floats.
pub fn normals(len: usize, seed: u64) -> Vec<f32> {
    fill(len, 0.0, seed, Random::normal)
}

/// Uniform bytes, as their bits.
pub fn bytes(len: usize, seed: u64) -> Vec<u8> {
    fill(len, 0, seed, |random| (random.bits() >> 56) as u8)
}

/// Uniform floats of this deviation, in half precision.
pub fn uniform_f16(len: usize, deviation: f32, seed: u64) -> Vec<f16> {
    let width = deviation * 3f32.sqrt();
    fill(len, f16::ZERO, seed, |random| f16::from_f32(random.uniform() * width))
}

/// Normal floats of a type.
pub fn floats(len: usize, seed: u64, dtype: Float) -> FloatData<'static> {
    let values = normals(len, seed);
    match dtype {
        Float::F16 => FloatData::F16(to_f16(&values).into()),
        Float::BF16 => FloatData::BF16(values.into_iter().map(bf16::from_f32).collect()),
        Float::F32 => FloatData::F32(values.into()),
    }
}

/// Floats in half precision.
pub fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|&v| f16::from_f32(v)).collect()
}

/// A quantised matrix `[n, k]` whose codes take every value.
pub fn qtensor(format: WeightFormat, [n, k]: [usize; 2], seed: u64) -> halfbyte::Result<QTensor> {
    let params = n * format.group.count(k);
    let mask = format.max_code() as u8;
    let codes = bytes(n * k, seed).into_iter().map(|code| code & mask).collect();
    let scale = |v: f32| format.scale.round(v);
    let scales = match (format.group, format.channel_scale) {
        (Group::Tensor, _) => vec![scale(0.01); params],
        // Factors up to 8, which every zero point allows.
        (_, Some(channel)) => {
            let channels = fill(n, 0.0, seed + 1, |random| channel.round(0.002 + 0.001 * random.uniform()));
            let factors = fill(params, 0u8, seed + 3, |random| 1 + (random.bits() >> 61) as u8);
            let row = params / n.max(1);
            factors.iter().enumerate().map(|(i, &factor)| channels[i / row] * f32::from(factor)).collect()
        }
        _ => fill(params, 0.0, seed + 1, |random| scale(0.01 + 0.005 * random.uniform())),
    };
    let zeros = match format.zero {
        Zero::Symmetric => Zeros::Symmetric,
        Zero::Integer => {
            Zeros::Integer(fill(params, 0, seed + 2, |random| (random.bits() >> 56) as u16 & u16::from(mask)))
        }
        Zero::Float => Zeros::Float(fill(params, 0.0, seed + 2, |random| scale(0.05 * random.uniform()))),
    };
    QTensor::new(format, [n, k], codes, scales, zeros, None)
}
