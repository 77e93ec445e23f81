//! How a tile holds codes.

use super::PANEL;
use crate::format::{Group, Zero};
use crate::layout::stored::StoredTensor;

/// What of each code tiles hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Bits of a code less `base`: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// What is taken off each code.
    pub base: u8,
}

impl Held {
    /// All bits of the format's codes, or as many as the codes of tensors one below the other use.
    pub(super) fn of(parts: &[&StoredTensor<'_>]) -> Self {
        let format = parts[0].format();
        let all = Self { bits: format.bits, base: 0 };
        if format.bits != 8 || format.zero == Zero::Integer {
            return all;
        }
        let ranges = parts.iter().map(|part| part.codes().range(format.bits));
        let Some((least, most)) = ranges.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else { return all };
        // Of symmetric codes the middle stays in the middle.
        let held = [5, 6].map(|bits| Self {
            bits,
            base: if format.zero == Zero::Symmetric { (format.middle() - (1 << (bits - 1))) as u8 } else { 0 },
        });
        let holds = |held: &Self| held.base <= least && u32::from(most) < u32::from(held.base) + (1 << held.bits);
        // Groups begin with a tile, which has 32 columns of 5 bits and 16 of 6.
        let short = matches!(format.group, Group::Size(..=16));
        held.into_iter().filter(|held| held.bits != 5 || !short).find(holds).unwrap_or(all)
    }
}

/// Bits of a code that lie in the words that a tile begins with, and those that lie in the plane after them; of most none do.
pub const fn planes(bits: u32) -> (u32, u32) {
    match bits {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        _ => (bits, 0),
    }
}

/// Columns that a tile holds.
pub const fn columns_per_tile(bits: u32) -> usize {
    match planes(bits) {
        // Groups begin with a tile: half a plane of single bits wastes less in short ones.
        (2, _) => 16,
        (low, 0) => (32 / low) as usize,
        (_, high) => (32 / high) as usize,
    }
}

/// Runs of four columns that a tile holds.
pub const fn quads(bits: u32) -> usize {
    columns_per_tile(bits) / 4
}

/// Bytes of a tile.
pub const fn tile_bytes(bits: u32) -> usize {
    PANEL * columns_per_tile(bits) * bits as usize / 8
}

/// Codes of columns 4·quad … 4·quad + 3 of a tile, `[16][4]`.
#[inline(always)]
pub(crate) fn quad(tile: &[u8], bits: u32, quad: usize) -> [u8; 4 * PANEL] {
    if bits == 3 {
        let mut codes = [0; 4 * PANEL];
        for (lane, codes) in codes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            *codes = (nibbles(tile, lane)[quad / 2] >> (quad % 2 * 4) & 0x0f0f_0f0f).to_le_bytes();
        }
        return codes;
    }
    let (low, high) = planes(bits);
    let (per_byte, mask) = (8 / low as usize, ((1u32 << low) - 1) as u8);
    let (lows, shift) = (&tile[quad / per_byte * 64..][..64], quad % per_byte * low as usize);
    let mut codes: [u8; 4 * PANEL] = std::array::from_fn(|at| lows[at] >> shift & mask);
    if high > 0 {
        let highs = &tile[tile_bytes(bits) - 64..][..64];
        let (shift, mask) = (quad * high as usize, (1u8 << high) - 1);
        codes.iter_mut().zip(highs).for_each(|(code, high)| *code |= (high >> shift & mask) << low);
    }
    codes
}

/// The code of a lane and a column of a tile.
#[inline(always)]
pub(crate) fn code(tile: &[u8], bits: u32, lane: usize, column: usize) -> u8 {
    if bits == 3 {
        return (nibbles(tile, lane)[column / 8] >> (column % 4 * 8 + column / 4 % 2 * 4)) as u8 & 7;
    }
    let (low, high) = planes(bits);
    let (quad, at, per_byte) = (column / 4, lane * 4 + column % 4, 8 / low as usize);
    let code = tile[quad / per_byte * 64 + at] >> (quad % per_byte * low as usize) & ((1u32 << low) - 1) as u8;
    if high == 0 {
        return code;
    }
    code | (tile[tile_bytes(bits) - 64 + at] >> (quad * high as usize) & ((1 << high) - 1)) << low
}

/// Sets a code of 2, 3, 4 or 8 bits in a tile of zeros.
pub(super) fn set(tile: &mut [u8], bits: u32, lane: usize, column: usize, code: u8) {
    let (quad, byte) = (column / 4, column % 4);
    if bits != 3 {
        tile[lane * 4 + byte] |= code << (quad * bits as usize);
        return;
    }
    tile[lane * 4 + byte] |= (code & 3) << (quad % 2 * 4 + quad / 2 * 2);
    let bit = match byte * 8 + 2 + quad % 2 * 4 + quad / 2 {
        bit @ ..16 => bit,
        bit => bit - 18,
    };
    tile[64 + lane * 2 + bit / 8] |= (code >> 2) << (bit % 8);
}

/// A lane of a tile of 3 bits as lanes of two tiles of 4 bits.
#[inline(always)]
fn nibbles(tile: &[u8], lane: usize) -> [u32; 2] {
    let low = u32::from_le_bytes(std::array::from_fn(|i| tile[lane * 4 + i]));
    let high = u32::from(u16::from_le_bytes(std::array::from_fn(|i| tile[64 + lane * 2 + i])));
    let high = high | high << 18;
    [low & 0x3333_3333 | high & 0x4444_4444, low >> 2 & 0x3333_3333 | high >> 1 & 0x4444_4444]
}

/// Lanes of two tiles of 4 bits that hold 3, as a lane of a tile of 3 bits: its word, and its half of a word.
#[inline(always)]
pub(crate) fn pressed([a, b]: [u32; 2]) -> (u32, u16) {
    let high = a & 0x4444_4444 | (b & 0x4444_4444) << 1;
    (a & 0x3333_3333 | (b & 0x3333_3333) << 2, (high & 0xffff | high >> 18) as u16)
}
