//! Lengths by chance, the same for the same seed.

use halfbyte::random::splitmix64;
use std::str::FromStr;

/// How long prompts or answers are, in tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// All alike.
    Fixed(usize),
    /// Each of these as often as any other, both ends included.
    Uniform(usize, usize),
    /// Around a mean, with a standard deviation.
    Normal(f64, f64),
    /// Many short ones and few long ones, with this mean.
    Exponential(f64),
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || "expected a length as 512, 128..512, normal:512,64 or exponential:512".to_owned();
        let positive =
            |text: &str| text.parse().ok().filter(|&mean: &f64| mean.is_finite() && mean >= 1.0).ok_or_else(expected);
        let count = |text: &str| text.parse().ok().filter(|&n: &usize| n > 0).ok_or_else(expected);
        if let Some(mean) = text.strip_prefix("exponential:") {
            return positive(mean).map(Self::Exponential);
        }
        if let Some((mean, deviation)) = text.strip_prefix("normal:").and_then(|rest| rest.split_once(',')) {
            let deviation = deviation.parse().ok().filter(|&d: &f64| d.is_finite() && d >= 0.0).ok_or_else(expected)?;
            return Ok(Self::Normal(positive(mean)?, deviation));
        }
        match text.split_once("..") {
            Some((low, high)) => match (count(low)?, count(high)?) {
                (low, high) if low <= high => Ok(Self::Uniform(low, high)),
                _ => Err(expected()),
            },
            None => count(text).map(Self::Fixed),
        }
    }
}

impl Lengths {
    /// The next, at least 1.
    pub fn next(self, random: &mut Random) -> usize {
        match self {
            Self::Fixed(length) => length,
            Self::Uniform(low, high) => low + random.below(high - low + 1),
            Self::Normal(mean, deviation) => (mean + deviation * random.normal()).round().max(1.0) as usize,
            Self::Exponential(mean) => (mean * random.exponential()).round().max(1.0) as usize,
        }
    }
}

/// Random numbers of a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A whole number from 0 to below this.
    pub fn below(&mut self, n: usize) -> usize {
        (splitmix64(&mut self.0) % n.max(1) as u64) as usize
    }

    /// Above 0, at most 1.
    fn unit(&mut self) -> f64 {
        ((splitmix64(&mut self.0) >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// With mean 1.
    pub fn exponential(&mut self) -> f64 {
        -self.unit().ln()
    }

    /// Around 0 with deviation 1: Box and Muller, 1958.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_the_means_that_they_say() {
        for (text, mean, most) in [
            ("512", 512.0, 0.0),
            ("100..300", 200.0, 2.0),
            ("normal:512,64", 512.0, 2.0),
            ("exponential:50", 50.0, 1.5),
        ] {
            let (lengths, mut random): (Lengths, _) = (text.parse().unwrap(), Random::new(7));
            let all: Vec<usize> = (0..20_000).map(|_| lengths.next(&mut random)).collect();
            let got = all.iter().sum::<usize>() as f64 / all.len() as f64;
            assert!((got - mean).abs() <= most && all.iter().all(|&n| n > 0), "{text}: {got}");
        }
        for bad in ["", "0", "-1", "5..3", "0..3", "normal:512", "normal:1e999,1", "exponential:0", "x", "1.5"] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }
}
