//! Floats of 4 and 8 bits as integers and as scales that other floats hold exactly.
//!
//! ```text
//! E2M1   sign, 2 bits of exponent, 1 of fraction: ±0, ½, 1, 1½, 2, 3, 4, 6; twice the value is an integer
//! E8M0   2^(byte − 127), 255 is NaN
//! E4M3   sign, 4 bits of exponent with bias 7, 3 of fraction; 0x7f and 0xff are NaN, nothing is infinite
//! ```
//!
//! A scale here is half of the float's value, as the integers are twice theirs.
//!
//! Source: "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.

use half::{bf16, f16};

/// Codes around 128 for each number of 4 bits: 128 more than twice what it is as E2M1.
pub(crate) const E2M1: [u8; 16] = [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116];

/// Half of what a byte is as E8M0. bf16 holds all of them, the two least as subnormal numbers.
pub(crate) fn half_of_e8m0(byte: u8) -> bf16 {
    // 2^(e − 128): from 2^-128, bit 5 of the subnormal numbers, which are multiples of 2^-133.
    match byte {
        255 => bf16::NAN,
        0 | 1 => bf16::from_bits(0x20 << byte),
        exponent => bf16::from_bits((u16::from(exponent) - 1) << 7),
    }
}

/// Half of what a byte is as E4M3 without a sign. f16 holds all of them. A byte with the bit of the sign set is NaN: no scale has one.
pub(crate) fn half_of_ue4m3(byte: u8) -> f16 {
    let (exponent, fraction) = (u16::from(byte >> 3), u16::from(byte & 7));
    match exponent {
        _ if byte >= 0x7f => f16::NAN,
        // Multiples of 2^-10, normal numbers of f16 but for zero.
        0 => f16::from_f32(f32::from(fraction) / 1024.0),
        // The biases are 15 and 7, and one less for the half.
        _ => f16::from_bits((exponent + 15 - 7 - 1) << 10 | fraction << 7),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_are_half_of_what_the_bytes_are() {
        for byte in 0..255u8 {
            assert_eq!(half_of_e8m0(byte).to_f64(), 2f64.powi(i32::from(byte) - 128), "{byte}");
        }
        assert!(half_of_e8m0(255).is_nan());
        for byte in 0..0x7fu8 {
            let (exponent, fraction) = (i32::from(byte >> 3), f64::from(byte & 7));
            let value = match exponent {
                0 => fraction / 8.0 * 2f64.powi(-6),
                _ => (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7),
            };
            assert_eq!(half_of_ue4m3(byte).to_f64(), value / 2.0, "{byte:#x}");
        }
        assert!((0x7f..=0xff).all(|byte| half_of_ue4m3(byte).is_nan()));
    }

    #[test]
    fn codes_are_twice_the_values_around_128() {
        for (number, code) in (0u8..).zip(E2M1) {
            let (exponent, fraction) = (i32::from(number >> 1 & 3), f64::from(number & 1));
            let magnitude =
                if exponent == 0 { fraction / 2.0 } else { (1.0 + fraction / 2.0) * 2f64.powi(exponent - 1) };
            let value = if number & 8 != 0 { -magnitude } else { magnitude };
            assert_eq!(f64::from(code) - 128.0, 2.0 * value, "{number}");
        }
    }
}
