//! The K types, whose blocks are 256 codes: groups of 16 or 32 with scales that are small integers times one half.
//!
//! ```text
//! Q2_K  16 B scales │ 64 B codes │ f16 d │ f16 dmin                   w = d·sc · q − dmin·m
//! Q3_K  32 B third bits │ 64 B codes │ 12 B scales │ f16 d            w = d·(sc − 32) · (q − 4)
//! Q4_K  f16 d │ f16 dmin │ 12 B scales │ 128 B nibbles                w = d·sc · q − dmin·m
//! Q5_K  f16 d │ f16 dmin │ 12 B scales │ 32 B fifth bits │ 128 B      w = d·sc · q − dmin·m
//! Q6_K  128 B nibbles │ 64 B upper bits │ 16 i8 scales │ f16 d        w = d·sc · (q − 32)
//! ```
//!
//! `d·sc` and `dmin·m` have at most 11 + 8 bits: f32 holds them exactly.

use super::split;

/// Factors of a block's groups, for scales and for offsets, and the bits of the halves that they are multiplied by.
pub(super) mod multiples {
    use super::split;

    /// Groups of a block at most.
    pub(in crate::gguf) const GROUPS: usize = 16;

    pub(in crate::gguf) fn q2_k(block: &[u8; 84], scales: &mut [i8; GROUPS], offsets: &mut [i8; GROUPS]) -> [u16; 2] {
        let (packed, rest) = split::<16>(block);
        for ((scale, offset), byte) in scales.iter_mut().zip(offsets).zip(packed) {
            (*scale, *offset) = ((byte & 15) as i8, (byte >> 4) as i8);
        }
        with_minus(&rest[64..])
    }

    pub(in crate::gguf) fn q3_k(block: &[u8; 110], scales: &mut [i8; GROUPS]) -> [u16; 2] {
        let (packed, rest) = split::<12>(&block[96..]);
        for (i, scale) in scales.iter_mut().enumerate() {
            let low = packed[i % 8] >> (4 * (i / 8)) & 15;
            let high = packed[8 + i % 4] >> (2 * (i / 4)) & 3;
            *scale = (high << 4 | low) as i8 - 32;
        }
        [u16::from_le_bytes(*split(rest).0), 0]
    }

    /// Of Q4_K and Q5_K: the first four of each lie in the low 6 bits of bytes 0..4 and 4..8, whose upper two bits belong to
    /// the last four, with nibbles of bytes 8..12 below them.
    pub(in crate::gguf) fn first<const BYTES: usize>(
        block: &[u8; BYTES],
        scales: &mut [i8; 8],
        offsets: &mut [i8; 8],
    ) -> [u16; 2] {
        let (halves, rest) = split::<4>(block);
        let packed = split::<12>(rest).0;
        for i in 0..4 {
            let (scale, offset, rest) = (packed[i], packed[4 + i], packed[8 + i]);
            (scales[i], offsets[i]) = ((scale & 63) as i8, (offset & 63) as i8);
            (scales[4 + i], offsets[4 + i]) =
                ((rest & 15 | scale >> 6 << 4) as i8, (rest >> 4 | offset >> 6 << 4) as i8);
        }
        with_minus(halves)
    }

    pub(in crate::gguf) fn q6_k(block: &[u8; 210], scales: &mut [i8; GROUPS]) -> [u16; 2] {
        let (packed, rest) = split::<16>(&block[192..]);
        scales.iter_mut().zip(packed).for_each(|(scale, &byte)| *scale = byte as i8);
        [u16::from_le_bytes(*split(rest).0), 0]
    }

    /// The two halves that four bytes are, the second with its sign changed.
    fn with_minus(bytes: &[u8]) -> [u16; 2] {
        let (first, rest) = split(bytes);
        [u16::from_le_bytes(*first), u16::from_le_bytes(*split(rest).0) ^ 0x8000]
    }
}

pub(super) fn q2_k(block: &[u8; 84], codes: &mut [u8; 256]) {
    two_bits(split(&block[16..]).0, codes);
}

pub(super) fn q3_k(block: &[u8; 110], codes: &mut [u8; 256]) {
    let (third, rest) = split::<32>(block);
    two_bits(split(rest).0, codes);
    for (i, part) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, bits) in part.iter_mut().zip(third) {
            *code |= (bits >> i & 1) << 2;
        }
    }
}

pub(super) fn q4_k(block: &[u8; 144], codes: &mut [u8; 256]) {
    pairs_of_32(&block[16..], codes);
}

pub(super) fn q5_k(block: &[u8; 176], codes: &mut [u8; 256]) {
    let (fifth, nibbles) = split::<32>(&block[16..]);
    pairs_of_32(nibbles, codes);
    for (i, part) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (code, bits) in part.iter_mut().zip(fifth) {
            *code |= (bits >> i & 1) << 4;
        }
    }
}

pub(super) fn q6_k(block: &[u8; 210], codes: &mut [u8; 256]) {
    // From the middle of 6 bits to the middle of 8.
    const SHIFT: u8 = 128 - 32;
    let (nibbles, upper) = (&block[..128], &block[128..192]);
    // Each half of a block: nibbles 0..64 low, then high; upper bits two at a time for 32 codes.
    let halves = nibbles.as_chunks::<64>().0.iter().zip(upper.as_chunks::<32>().0);
    for ((nibbles, upper), codes) in halves.zip(codes.as_chunks_mut::<128>().0) {
        for i in 0..32 {
            let (first, second, upper) = (nibbles[i], nibbles[32 + i], upper[i]);
            codes[i] = (first & 15 | (upper & 3) << 4) + SHIFT;
            codes[32 + i] = (second & 15 | (upper >> 2 & 3) << 4) + SHIFT;
            codes[64 + i] = (first >> 4 | (upper >> 4 & 3) << 4) + SHIFT;
            codes[96 + i] = (second >> 4 | (upper >> 6) << 4) + SHIFT;
        }
    }
}

/// Codes of two bits: 32 bytes hold the lowest bits of 32 codes, then of the next 32, four times.
fn two_bits(pairs: &[u8; 64], codes: &mut [u8; 256]) {
    for (pairs, codes) in pairs.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<128>().0) {
        for (i, part) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (code, bits) in part.iter_mut().zip(pairs) {
                *code = bits >> (2 * i) & 3;
            }
        }
    }
}

/// Codes of four bits: 32 bytes hold 32 codes in their low nibbles and the next 32 in their high ones.
fn pairs_of_32(nibbles: &[u8], codes: &mut [u8; 256]) {
    for (nibbles, codes) in nibbles.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<64>().0) {
        let (low, high) = codes.split_at_mut(32);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
            *low = byte & 15;
            *high = byte >> 4;
        }
    }
}
