//! The types whose blocks are 32 codes with one scale.
//!
//! ```text
//! Q4_0  f16 d │ 16 B nibbles                     w = d · (q − 8)
//! Q4_1  f16 d │ f16 m │ 16 B nibbles             w = d · q + m
//! Q5_0  f16 d │ u32 fifth bits │ 16 B nibbles    w = d · (q − 16)
//! Q5_1  f16 d │ f16 m │ u32 │ 16 B nibbles       w = d · q + m
//! Q8_0  f16 d │ 32 i8                            w = d · q
//!
//! byte j of the nibbles = q[j] & 15 | (q[j + 16] & 15) << 4          bit j of the fifth bits = q[j] >> 4
//! ```

use super::split;

pub(super) fn q4_0(block: &[u8; 18], codes: &mut [u8; 32]) {
    spread(split(&block[2..]).0, codes);
}

pub(super) fn q4_1(block: &[u8; 20], codes: &mut [u8; 32]) {
    spread(split(&block[4..]).0, codes);
}

pub(super) fn q5_0(block: &[u8; 22], codes: &mut [u8; 32]) {
    let (fifth, nibbles) = split(&block[2..]);
    spread(split(nibbles).0, codes);
    // From the middle of 5 bits to the middle of 8.
    add_fifth_bits(fifth, codes, 128 - 16);
}

pub(super) fn q5_1(block: &[u8; 24], codes: &mut [u8; 32]) {
    let (fifth, nibbles) = split(&block[4..]);
    spread(split(nibbles).0, codes);
    add_fifth_bits(fifth, codes, 0);
}

pub(super) fn q8_0(block: &[u8; 34], codes: &mut [u8; 32]) {
    for (code, byte) in codes.iter_mut().zip(&block[2..]) {
        *code = byte ^ 0x80;
    }
}

/// Low nibbles to the first half, high ones to the second; sixteen at once, as the compiler makes no vectors of so few.
fn spread(nibbles: &[u8; 16], codes: &mut [u8; 32]) {
    const LOW: u128 = u128::from_le_bytes([15; 16]);
    let both = u128::from_le_bytes(*nibbles);
    let (low, high) = codes.split_at_mut(16);
    low.copy_from_slice(&(both & LOW).to_le_bytes());
    high.copy_from_slice(&(both >> 4 & LOW).to_le_bytes());
}

/// Sets bit 4 of each code, eight codes at once, and adds `shift`, which must not carry.
fn add_fifth_bits(fifth: &[u8; 4], codes: &mut [u8; 32], shift: u8) {
    const EACH: u64 = 0x0101_0101_0101_0101;
    for (eight, &bits) in codes.as_chunks_mut::<8>().0.iter_mut().zip(fifth) {
        // Byte i keeps bit i; adding 0x7f carries it to the byte's top.
        let own = (u64::from(bits) * EACH) & 0x8040_2010_0804_0201;
        let fifth = ((own + 0x7f * EACH) >> 3) & (0x10 * EACH);
        *eight = (u64::from_le_bytes(*eight) + fifth + u64::from(shift) * EACH).to_le_bytes();
    }
}
