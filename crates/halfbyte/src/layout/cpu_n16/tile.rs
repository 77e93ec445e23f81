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

/// Bits that a code's field takes in a tile.
pub const fn field_bits(bits: u32) -> u32 {
    if bits == 3 { 4 } else { bits }
}

/// Bits of a code that lie in the tile's first words, and those that lie in its last 64 bytes; of most none do.
pub const fn planes(bits: u32) -> (u32, u32) {
    match bits {
        5 => (4, 1),
        6 => (4, 2),
        _ => (field_bits(bits), 0),
    }
}

/// Columns that a tile holds.
pub const fn columns_per_tile(bits: u32) -> usize {
    match planes(bits) {
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
    let (low, high) = planes(bits);
    columns_per_tile(bits) * low as usize / 32 * 64 + if high > 0 { 64 } else { 0 }
}

/// Codes of columns 4·quad … 4·quad + 3 of a tile, `[16][4]`.
#[inline(always)]
pub(crate) fn quad(tile: &[u8], bits: u32, quad: usize) -> [u8; 4 * PANEL] {
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
    let (low, high) = planes(bits);
    let (quad, at, per_byte) = (column / 4, lane * 4 + column % 4, 8 / low as usize);
    let code = tile[quad / per_byte * 64 + at] >> (quad % per_byte * low as usize) & ((1u32 << low) - 1) as u8;
    if high == 0 {
        return code;
    }
    code | (tile[tile_bytes(bits) - 64 + at] >> (quad * high as usize) & ((1 << high) - 1)) << low
}
