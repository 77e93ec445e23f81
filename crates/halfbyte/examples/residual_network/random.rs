//! Random numbers that are the same everywhere.

use halfbyte::random::splitmix64;

/// From a seed.
pub struct Random(pub u64);

impl Random {
    /// From 0 (included) to 1 (excluded).
    pub fn uniform(&mut self) -> f32 {
        (splitmix64(&mut self.0) >> 40) as f32 / (1 << 24) as f32
    }

    /// Near to normal, mean 0, deviation 1: the sum of twelve uniform numbers, each of variance 1/12, less its mean.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }
}
