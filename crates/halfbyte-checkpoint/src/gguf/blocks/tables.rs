//! The types whose codes of 4 bits stand for 16 values, all of them integers.
//!
//! ```text
//! IQ4_NL  f16 d │ 16 B nibbles                                               w = d · t[q]
//! IQ4_XS  f16 d │ u16 upper bits │ 4 B lower bits │ 8 runs of 16 B nibbles   w = d·(sc − 32) · t[q]        sc: 6 bits for 32 codes
//! MXFP4   E8M0 e │ 16 B nibbles                                              w = e/2 · 2·E2M1[q]
//! NVFP4   4 UE4M3 s, one for 16 codes │ 4 runs of 8 B nibbles                w = s/2 · 2·E2M1[q]
//!
//! byte j of r bytes of nibbles = q[j] | q[j + r] << 4
//! ```

use super::split;
use crate::small_floats::{E2M1, half_of_e8m0, half_of_ue4m3};

/// Codes around 128 for IQ4_NL and IQ4_XS: 128 more than the values that ggml's table has.
pub(super) const IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];

pub(super) fn iq4_nl(block: &[u8; 18], codes: &mut [u8; 32]) {
    looked_up::<16>(&IQ4, &block[2..], codes);
}

pub(super) fn iq4_xs(block: &[u8; 136], codes: &mut [u8; 256]) {
    looked_up::<16>(&IQ4, &block[8..], codes);
}

pub(super) fn mxfp4(block: &[u8; 17], codes: &mut [u8; 32]) {
    looked_up::<16>(&E2M1, &block[1..], codes);
}

pub(super) fn nvfp4(block: &[u8; 36], codes: &mut [u8; 64]) {
    looked_up::<8>(&E2M1, &block[4..], codes);
}

/// What a table has for nibbles in runs of `RUN` bytes.
fn looked_up<const RUN: usize>(table: &[u8; 16], nibbles: &[u8], codes: &mut [u8]) {
    for (nibbles, codes) in nibbles.as_chunks::<RUN>().0.iter().zip(codes.chunks_exact_mut(2 * RUN)) {
        let (low, high) = codes.split_at_mut(RUN);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
            *low = table[usize::from(byte & 15)];
            *high = table[usize::from(byte >> 4)];
        }
    }
}

/// The half that scales of a block of IQ4_XS are multiples of, and the factors of its groups: 4 bits of each in a nibble, two groups a
/// byte, the upper two in a word.
pub(super) fn iq4_xs_multiples(block: &[u8; 136], scales: &mut [i8; 8]) -> [u16; 2] {
    let (half, rest) = split(block);
    let (upper, rest) = split(rest);
    let (upper, lower) = (u16::from_le_bytes(*upper), split::<4>(rest).0);
    for (i, scale) in scales.iter_mut().enumerate() {
        let low = lower[i / 2] >> (4 * (i % 2)) & 15;
        let high = (upper >> (2 * i)) as u8 & 3;
        *scale = (high << 4 | low) as i8 - 32;
    }
    [u16::from_le_bytes(*half), 0]
}

/// The scale of a block of MXFP4, as bits of a bf16.
pub(super) fn mxfp4_scale(block: &[u8; 17], scale: &mut [u16; 1]) {
    scale[0] = half_of_e8m0(block[0]).to_bits();
}

/// The scales of a block of NVFP4, as bits of f16.
pub(super) fn nvfp4_scales(block: &[u8; 36], scales: &mut [u16; 4]) {
    scales.iter_mut().zip(block).for_each(|(scale, &byte)| *scale = half_of_ue4m3(byte).to_bits());
}
