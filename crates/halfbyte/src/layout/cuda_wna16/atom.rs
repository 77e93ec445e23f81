//! What an atom holds: bits of codes, how far a scale reaches, what lies beside the codes and where.

use crate::error::{Error, Result};
use crate::format::{Act, Format, Group, WeightFormat, Zero};
use crate::layout::multiples::Multiples;
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;
use half::f16;

const OP: &str = "pack for tensor cores";

/// Rows of a strip, and columns of an atom.
pub const STRIP: usize = 64;
/// Columns of an atom.
pub const STEP: usize = 128;
/// Rows of a unit: what a warp multiplies of an atom.
pub const UNIT: usize = 16;

/// Where the bits of a code of 4 bits begin, with its row and column from (R, c).
const FIELDS: [(usize, usize, u32); 8] =
    [(0, 0, 0), (0, 1, 16), (8, 0, 4), (8, 1, 20), (0, 8, 8), (0, 9, 24), (8, 8, 12), (8, 9, 28)];

/// The form of an atom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Atom {
    /// Bits of a code's place: 2, 3, 4 or 8; where scales are multiples 4 or 6.
    pub bits: u32,
    /// Columns that share a scale: 16, 32, 64 or 128; 0: all of a row.
    pub group: usize,
    /// With zero points.
    pub zero: bool,
    /// With offsets, in the type of the scales: `w = scale · code + offset`.
    pub offset: bool,
    /// Type of the scales.
    pub scale: Float,
    /// Scales on two levels: groups have factors (and zero points with them), rows have scales.
    pub factors: bool,
    /// Scales and offsets are whole multiples of halves, one of each for a row of an atom: groups have their factors.
    pub multiples: bool,
}

/// Bytes of the factors and halves of a row of an atom.
const MULTIPLES_BYTES: usize = 10;

impl Atom {
    /// That of `w4a16-g128`: codes of 4 bits, groups of 128, half scales.
    pub const W4_G128: Self =
        Self { bits: 4, group: 128, zero: false, offset: false, scale: Float::F16, factors: false, multiples: false };

    /// The form for what becomes of activations: with exact ones scales of two levels are f32 ones; integer products have 32 columns.
    /// Error: there is none, and why.
    pub fn of_format(Format { weight, act }: Format, k: usize) -> Result<Self> {
        if act.is_quantized() && weight.channel_scale.is_some() {
            return Self::of_levels(weight, k);
        }
        let atom = Self::of_any(weight, k)?;
        match act.is_quantized() && atom.group == 16 {
            true => Err(Error::invalid(
                OP,
                "groups of a multiple of 32, for quantised activations",
                weight.group.to_string(),
            )),
            false => Ok(atom),
        }
    }

    /// The form for a format with scales in any type, offsets, and groups of a multiple of 16: [`Atom::is_wide`] tells whether it is
    /// more than [`Atom::of`] has. Error: there is none, and why.
    pub fn of_any(format: WeightFormat, k: usize) -> Result<Self> {
        if let Ok(atom) = Self::of(format, k) {
            return Ok(atom);
        }
        if k == 0 {
            return Err(Error::invalid(OP, "at least one column, for such scales", "none"));
        }
        let bits = match format.bits {
            bits @ (2..=4 | 8) => bits,
            other => return Err(Error::invalid(OP, "codes of 2, 3, 4 or 8 bits", other.to_string())),
        };
        // Sums of x, which offsets multiply, are those of a stage, and the shortest has 64 columns: a longer group would be added in as
        // many parts as a configuration has stages for it, and rows would not have the same bits with all.
        let most = if format.zero == Zero::Float { STEP / 2 } else { STEP };
        let group = match format.group {
            Group::Size(size) if format.group.count(k) > 1 => {
                let group = [128, 64, 32, 16].into_iter().find(|&g| g <= most && size.is_multiple_of(g));
                group.ok_or_else(|| Error::invalid(OP, "groups of a multiple of 16", size.to_string()))?
            }
            // Tables of rows have half scales, and no offsets.
            _ if format.scale == Float::F32 || format.zero == Zero::Float => most,
            _ => 0,
        };
        let (zero, offset) = (format.zero == Zero::Integer, format.zero == Zero::Float);
        Ok(Self { bits, group, zero, offset, scale: format.scale, factors: false, multiples: false })
    }

    /// The form with scales and offsets as multiples of halves, and codes in as few bits as they have, if there is one for all of some
    /// tensors one below the other, of which this is the form without.
    fn of_multiples(self, parts: &[&StoredTensor<'_>]) -> Option<Self> {
        let format = parts.first()?.format();
        let of_scales = |part: &&StoredTensor<'_>| {
            let whole = |multiples: &Multiples<'_>| (multiples.block() * self.group).is_multiple_of(STEP);
            // A factor is found by its group, and groups lie in order.
            let ordered = part.group_index().is_none() && format.group == Group::Size(self.group);
            let small = |multiples: &Multiples<'_>| multiples.sign_of_small().is_some();
            let scales = part.scale_multiples().filter(|&multiples| whole(multiples));
            let offsets = part.offset_multiples().filter(|&multiples| whole(multiples));
            match (self.group, self.offset) {
                (32, true) => ordered && scales.is_some_and(small) && offsets.is_some_and(small),
                (16, false) => ordered && scales.is_some(),
                _ => false,
            }
        };
        if self.zero || self.factors || !parts.iter().all(of_scales) {
            return None;
        }
        let atom = Self { bits: if self.bits <= 4 { 4 } else { 6 }, multiples: true, ..self };
        let base = atom.base(format);
        let holds = |part: &&StoredTensor<'_>| {
            let (least, most) = part.codes().range(format.bits);
            i32::from(least) >= base && i32::from(most) < base + (1 << atom.bits)
        };
        parts.iter().all(holds).then_some(atom)
    }

    /// The forms that tensors of this one may have where more is known of them than their format.
    pub fn forms_of_multiples(self) -> Vec<Self> {
        let has_form = self.scale == Float::F32
            && !self.zero
            && !self.factors
            && matches!((self.group, self.offset), (32, true) | (16, false));
        let bits = if self.bits <= 4 { 4 } else { 6 };
        if has_form { vec![Self { bits, multiples: true, ..self }] } else { Vec::new() }
    }

    /// Whether kernels for x of a type multiply codes by the factors of their scales before, as whole numbers, which f16 holds.
    pub fn takes_factors_in(self, x: Float) -> bool {
        self.multiples && self.offset && self.bits == 4 && x != Float::BF16
    }

    /// Whether it has scales in f32, offsets or groups of 16: those are multiplied one weight at a time.
    pub fn is_wide(self) -> bool {
        self.scale == Float::F32 || self.offset || self.group == 16
    }

    /// The form for a format and a number of columns, on one level of scales or two. Error: there is none, and why.
    pub fn of_levels(format: WeightFormat, k: usize) -> Result<Self> {
        let Some(scale) = format.channel_scale else { return Self::of(format, k) };
        if k == 0 {
            return Err(Error::invalid(OP, "at least one column, for two levels of scales", "none"));
        }
        match format.group {
            Group::Size(size) => match [128, 64, 32].into_iter().find(|&g| size.is_multiple_of(g)) {
                Some(group) => {
                    let (zero, offset, multiples) = (false, false, false);
                    Ok(Self { bits: format.bits, group, zero, offset, scale, factors: true, multiples })
                }
                None => Err(Error::invalid(OP, "groups of a multiple of 32", size.to_string())),
            },
            other => Err(Error::invalid(OP, "groups along k, for two levels of scales", other.to_string())),
        }
    }

    /// The form for a format with one level of scales in a half type, without offsets, and a number of columns. Error: there is none,
    /// and why.
    pub fn of(format: WeightFormat, k: usize) -> Result<Self> {
        let refuse = |expected: &str, got: String| Err(Error::invalid(OP, expected, got));
        if !matches!(format.bits, 2..=4 | 8) {
            return refuse("codes of 2, 3, 4 or 8 bits", format.bits.to_string());
        }
        if format.zero == Zero::Float {
            return refuse("zero points or none", "float offsets".into());
        }
        if format.channel_scale.is_some() {
            return refuse("one level of scales", "two".into());
        }
        if format.scale == Float::F32 {
            return refuse("scales in f16 or bf16", "f32".into());
        }
        let group = match format.group {
            Group::Size(size) if format.group.count(k) > 1 => match [128, 64, 32].iter().find(|&&g| size % g == 0) {
                Some(&group) => group,
                None => return refuse("groups of a multiple of 32", size.to_string()),
            },
            _ => 0,
        };
        let zero = format.zero == Zero::Integer;
        let (offset, factors, multiples) = (false, false, false);
        Ok(Self { bits: format.bits, group, zero, offset, scale: format.scale, factors, multiples })
    }

    /// The form for tensors one below the other: their numbers matter too. Error: as [`Atom::holding`], or no tensor.
    pub fn holding_all(parts: &[&StoredTensor<'_>], act: Act) -> Result<Self> {
        let none = Err(Error::invalid(OP, "at least one tensor", "none"));
        let atom = parts.iter().map(|part| Self::holding(part, act)).reduce(Result::and).unwrap_or(none)?;
        Ok(atom.of_multiples(parts).unwrap_or(atom))
    }

    /// The form for a tensor of which nothing but its numbers is known.
    ///
    /// Errors: those of [`Atom::of_format`]; zero points of 256; scales whose products with a code pass fp16; an order of columns
    /// whose groups are not full.
    pub fn holding(w: &StoredTensor<'_>, act: Act) -> Result<Self> {
        let (format, k) = (w.format(), w.k());
        let atom = Self::of_format(Format { weight: format, act }, k)?;
        if let Some((z, _)) = w.zero_points()
            && let Some(z) = z.iter().max()
            && *z > 255
        {
            return Err(Error::invalid(OP, "zero points of 8 bits", z.to_string()));
        }
        if atom.scale == Float::F16 && atom.group > 0 && !atom.factors && !atom.is_wide() {
            let most = f16::MAX.to_f32() / (1 << atom.bits) as f32;
            let largest = w.scales().0.largest();
            if largest > most {
                return Err(Error::invalid(OP, format!("f16 scales up to {most}"), largest.to_string()));
            }
        }
        if let (Some(index), Group::Size(size)) = (w.group_index(), format.group) {
            let mut columns = vec![0usize; w.groups()];
            index.iter().for_each(|&g| columns[g as usize] += 1);
            for (g, &count) in columns.iter().enumerate() {
                let expected = size.min(k.saturating_sub(g * size));
                if count != expected {
                    return Err(Error::invalid(OP, format!("{expected} columns in group {g}"), count.to_string()));
                }
            }
        }
        Ok(atom)
    }

    /// Bytes of all atoms of a matrix. Error: they fit no memory.
    pub fn bytes_of(self, [n, k]: [usize; 2]) -> Result<usize> {
        let atoms = n.div_ceil(STRIP).checked_mul(k.div_ceil(STEP));
        let bytes = atoms.and_then(|atoms| atoms.checked_mul(self.bytes()));
        bytes.ok_or_else(|| Error::invalid(OP, "a matrix that fits memory", format!("{n} × {k}")))
    }

    /// Bytes of the table of rows, where a row has one scale.
    pub fn bytes_of_rows(self, n: usize) -> usize {
        if self.has_rows() { n.div_ceil(STRIP) * self.params_bytes() } else { 0 }
    }

    /// Whether a row has one scale, alone or above the factors of its groups: so that sums of all columns are scaled once.
    pub fn has_rows(self) -> bool {
        self.group == 0 || self.factors
    }

    /// Groups in an atom whose sums are scaled apart.
    pub fn sums(self) -> usize {
        if self.has_rows() { 0 } else { self.groups() }
    }

    /// Groups in an atom.
    pub fn groups(self) -> usize {
        STEP.checked_div(self.group).unwrap_or(0)
    }

    /// Bytes of an atom.
    pub fn bytes(self) -> usize {
        self.codes_bytes() + STRIP / UNIT * self.unit_params_bytes()
    }

    /// Bytes of the scales of a unit, and of its zero points or offsets.
    pub fn unit_params_bytes(self) -> usize {
        let params = if self.multiples { self.multiples_bytes() } else { self.groups() * self.params_bytes() };
        params / (STRIP / UNIT)
    }

    /// Bytes of a unit: of its codes, and of what belongs to them.
    pub fn unit_bytes(self) -> usize {
        self.bytes() / (STRIP / UNIT)
    }

    /// Bytes of an atom's codes, with which it begins.
    pub(super) fn codes_bytes(self) -> usize {
        STRIP * STEP * self.bits as usize / 8
    }

    /// Bytes of the factors and halves of an atom.
    pub fn multiples_bytes(self) -> usize {
        STRIP * MULTIPLES_BYTES
    }

    /// Bytes of 64 scales and zero points or offsets, which is also what a strip has in the table of rows.
    pub fn params_bytes(self) -> usize {
        STRIP * (self.scale.size_bytes() + self.zero_bytes())
    }

    /// Bytes of a zero point or offset.
    fn zero_bytes(self) -> usize {
        match (self.zero, self.offset) {
            (true, _) => 1,
            (_, true) => self.scale.size_bytes(),
            _ => 0,
        }
    }

    /// Where scale and zero point number `at` of a strip, as they are counted along its units, lie for a group of an atom: a unit has
    /// all scales before all zero points, behind the codes of all units.
    pub(crate) fn params_of(self, g: usize, at: usize) -> [usize; 2] {
        let (first, scale, zero) = (self.codes_bytes(), self.scale.size_bytes(), self.zero_bytes());
        let at_zeros = first + self.groups() * UNIT * scale;
        [first + (g * UNIT + at % UNIT) * scale, at_zeros + (g * UNIT + at % UNIT) * zero]
            .map(|place| at / UNIT * self.unit_params_bytes() + place)
    }

    /// The same in the table of rows.
    pub(super) fn row_params_of(self, at: usize) -> [usize; 2] {
        let scale = self.scale.size_bytes();
        [at * scale, STRIP * scale + at * self.zero_bytes()]
    }

    /// What is taken off a code in its place, so that zero of a symmetric format is in the middle of the place.
    pub fn base(self, format: WeightFormat) -> i32 {
        if format.zero == Zero::Symmetric { format.middle() as i32 - (1 << (self.bits - 1)) } else { 0 }
    }

    /// Bits of a code in the words that are multiplied: codes of 2 and 3 bits become those of 4, those of 6 bits bytes.
    pub fn field_bits(self) -> u32 {
        if self.bits <= 4 { 4 } else { 8 }
    }

    /// Codes of such a word.
    pub(super) fn fields(self) -> usize {
        32 / self.field_bits() as usize
    }

    /// The bits of a code.
    pub(super) fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Row and column, from the atom's first, of the code in field `f` of word `at`; 8 fields a word, or 4.
    pub(super) fn place(self, at: usize, f: usize) -> (usize, usize) {
        let (j, lane) = (at % 4, at / 4 % 32);
        let (row, column) = (lane / 4, 2 * (lane % 4));
        if self.field_bits() == 4 {
            let (down, right, _) = FIELDS[f];
            (16 * (at / 256) + row + down, 64 * (at / 128 % 2) + 16 * j + column + right)
        } else {
            let quarter = at / 128 % 4;
            (16 * (at / 512) + row + 8 * (f % 2), 32 * quarter + 16 * (j / 2) + 8 * (j % 2) + column + f / 2)
        }
    }

    /// Lowest bit of field `f`.
    pub(super) fn shift(self, f: usize) -> u32 {
        if self.field_bits() == 4 { FIELDS[f].2 } else { 8 * f as u32 }
    }
}
