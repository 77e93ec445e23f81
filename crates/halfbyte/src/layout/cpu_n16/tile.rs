//! How a tile holds codes.

use super::PANEL;
use crate::format::{Group, Zero};
use crate::layout::stored::StoredTensor;

/// What of each code tiles hold: its *value*, the code less `base`, or the number of that in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Bits in a tile: 2, 3, 4, 5, 6 or 8.
    pub bits: u32,
    /// What is taken off each code.
    pub base: u8,
    /// The values that numbers of 4 bits stand for.
    pub table: Option<[u8; 16]>,
}

/// Added to the bits of values where a tile has their numbers in a table.
pub const TABLE: u32 = 16;
/// The form of numbers whose values have 5 bits, and of those whose values have 8.
pub const NARROW_TABLE: u32 = TABLE + 5;
pub const WIDE_TABLE: u32 = TABLE + 8;

/// Bits of the values of a form.
pub const fn value_bits(form: u32) -> u32 {
    form % TABLE
}

impl Held {
    /// All bits of the format's codes, or as many as the codes of tensors one below the other use.
    pub(super) fn of(parts: &[&StoredTensor<'_>]) -> Self {
        let format = parts[0].format();
        let all = Self { bits: format.bits, base: 0, table: None };
        if format.bits != 8 || format.zero == Zero::Integer {
            return all;
        }
        let table = parts[0].codes().table().filter(|_| format.zero == Zero::Symmetric);
        // Less the middle no value is -128.
        let table = table.filter(|codes| !codes.contains(&0));
        if let Some(codes) = table.filter(|_| parts.iter().all(|part| part.codes().table() == table)) {
            // Around the middle, where five bits hold them.
            let base = (format.middle() - 16) as u8;
            let base = if codes.iter().all(|code| (base..base + 32).contains(code)) { base } else { 0 };
            return Self { bits: 4, base, table: Some(codes.map(|code| code - base)) };
        }
        let ranges = parts.iter().map(|part| part.codes().range(format.bits));
        let Some((least, most)) = ranges.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) else { return all };
        // Of symmetric codes the middle stays in the middle.
        let held = [5, 6].map(|bits| Self {
            bits,
            table: None,
            base: if format.zero == Zero::Symmetric { (format.middle() - (1 << (bits - 1))) as u8 } else { 0 },
        });
        let holds = |held: &Self| held.base <= least && u32::from(most) < u32::from(held.base) + (1 << held.bits);
        // Groups begin with a tile, which has 32 columns of 5 bits and 16 of 6.
        let short = matches!(format.group, Group::Size(..=16));
        held.into_iter().filter(|held| held.bits != 5 || !short).find(holds).unwrap_or(all)
    }

    /// What kernels are compiled for: the bits in a tile, or, of numbers in a table, those of its values and [`TABLE`].
    pub fn form(&self) -> u32 {
        match self.table {
            None => self.bits,
            Some(values) if values.iter().all(|&value| value < 32) => NARROW_TABLE,
            Some(_) => WIDE_TABLE,
        }
    }

    /// The value of what a tile holds.
    pub fn value(&self, held: u8) -> u8 {
        self.table.map_or(held, |values| values[held as usize % 16])
    }

    /// What a tile holds of each code; two numbers of one value are the first of them.
    pub(crate) fn of_codes(&self) -> [u8; 256] {
        std::array::from_fn(|code| {
            let value = (code as u8).wrapping_sub(self.base);
            let number = |values: [u8; 16]| values.iter().position(|&of| of == value).unwrap_or(0) as u8;
            self.table.map_or(value, number)
        })
    }
}

/// Bits of a code that lie in the words that a tile begins with, and those that lie in the plane after them; of most none do.
pub const fn planes(form: u32) -> (u32, u32) {
    match form {
        3 => (2, 1),
        5 => (4, 1),
        6 => (4, 2),
        TABLE.. => (4, 0),
        _ => (form, 0),
    }
}

/// Columns that a tile holds.
pub const fn columns_per_tile(form: u32) -> usize {
    match planes(form) {
        // Groups begin with a tile: half a plane of single bits wastes less in short ones.
        (2, _) => 16,
        (low, 0) => (32 / low) as usize,
        (_, high) => (32 / high) as usize,
    }
}

/// Runs of four columns that a tile holds.
pub const fn quads(form: u32) -> usize {
    columns_per_tile(form) / 4
}

/// Bytes of a tile.
pub const fn tile_bytes(form: u32) -> usize {
    let (low, high) = planes(form);
    PANEL * columns_per_tile(form) * (low + high) as usize / 8
}

/// What a tile holds of columns 4·quad … 4·quad + 3, `[16][4]`.
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

/// What a tile holds of a lane and a column.
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
