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
    /// Bits of a code's place: 2, 3, 4, 5 or 8; where scales are multiples 2 to 6.
    pub bits: u32,
    /// The codes of 8 bits that places of 4 stand for, as many files have them.
    pub table: Option<[u8; 16]>,
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

/// What has scales (and offsets) that are multiples of halves, GGUF's K types: bits of a code, columns of a group, whether there are offsets.
/// Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
const OF_MULTIPLES: [(u32, usize, bool); 5] =
    [(2, 16, true), (3, 16, false), (4, 32, true), (5, 32, true), (6, 16, false)];

impl Atom {
    /// That of `w4a16-g128`: codes of 4 bits, groups of 128, half scales.
    pub const W4_G128: Self = Self {
        bits: 4,
        table: None,
        group: 128,
        zero: false,
        offset: false,
        scale: Float::F16,
        factors: false,
        multiples: false,
    };

    /// The form for what becomes of activations: with exact ones scales of two levels are f32 ones.
    /// Error: there is none, and why.
    pub fn of_format(Format { weight, act }: Format, k: usize) -> Result<Self> {
        if act.is_quantized() && weight.channel_scale.is_some() {
            return Self::of_levels(weight, k);
        }
        Self::of_any(weight, k)
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
        Ok(Self { bits, group, zero, offset, scale: format.scale, ..Self::W4_G128 })
    }

    /// The form for tensors one below the other, of which this is the one that their format has, by what else is known of them: that
    /// scales and offsets are multiples of halves, that codes are those of a table, or that they have fewer bits.
    fn narrowed(self, parts: &[&StoredTensor<'_>], act: Act) -> Self {
        let is_of = |form: &Self| parts.iter().all(|part| form.holds(part));
        self.narrower(parts, act).into_iter().find(is_of).unwrap_or(self)
    }

    /// Forms that take less than this one, of which tensors may have one. Beside quantised activations codes of Q5_0 and Q5_1 and of tables
    /// lie as bytes: kernels would take twice as long to make bytes of them as to read these (`docs/decisions/0029`).
    fn narrower(self, parts: &[&StoredTensor<'_>], act: Act) -> Vec<Self> {
        let table = parts.first().and_then(|part| part.codes().table());
        let (table, five) = (table.map(|table| Self { bits: 4, table: Some(table), ..self }), Self { bits: 5, ..self });
        let of_bytes = self.bits == 8 && !self.zero && !self.factors && !act.is_quantized();
        let of_bytes = of_bytes.then(|| table.filter(|_| !self.offset).into_iter().chain([five]));
        self.forms_of_multiples().into_iter().chain(of_bytes.into_iter().flatten()).collect()
    }

    /// Whether a tensor of a format that this is a form for has the numbers that it has room for.
    fn holds(&self, part: &StoredTensor<'_>) -> bool {
        let format = part.format();
        let (base, (least, most)) = (self.base(format), part.codes().range(format.bits));
        let codes = match self.table {
            Some(_) => part.codes().table() == self.table,
            None => i32::from(least) >= base && i32::from(most) < base + (1 << self.bits),
        };
        let whole = |multiples: &&Multiples<'_>| (multiples.block() * self.group).is_multiple_of(STEP);
        let most_factor = if self.group == 16 { 15 } else { 63 };
        let small = |of: &Multiples<'_>| of.without_sign().is_some_and(|(_, most)| most <= most_factor);
        let scales = part.scale_multiples().filter(whole);
        let offsets = part.offset_multiples().filter(whole);
        let numbers = match (self.multiples, self.offset) {
            (false, _) => true,
            (true, false) => scales.is_some(),
            (true, true) => scales.is_some_and(small) && offsets.is_some_and(small),
        };
        // A factor is found by its group.
        let by_group = !self.multiples || format.group == Group::Size(self.group);
        codes && numbers && by_group && part.group_index().is_none()
    }

    /// The forms with multiples of halves that tensors of this one may have.
    fn forms_of_multiples(self) -> Vec<Self> {
        let may = self.scale == Float::F32 && !self.zero && !self.factors;
        let of = |&(bits, group, offset): &(u32, usize, bool)| {
            let same =
                group == self.group && offset == self.offset && (bits == self.bits || bits > 4 && self.bits == 8);
            same.then_some(Self { bits, multiples: true, ..self })
        };
        OF_MULTIPLES.iter().filter_map(of).filter(|_| may).collect()
    }

    /// The forms that tensors of this one may have where more is known of them than their format, as files have them: GGUF's K types, its
    /// Q5_0 and Q5_1, and one of a table.
    pub fn forms_of_files(self, act: Act) -> Vec<Self> {
        let bytes = self.bits == 8 && !self.zero && !self.factors && !act.is_quantized();
        let five = bytes && self.group == 32 && self.scale != Float::F32;
        let tabled = bytes && !self.offset && matches!(self.group, 16 | 32);
        let five = five.then_some(Self { bits: 5, ..self });
        let tabled = tabled.then_some(Self { bits: 4, table: Some(Self::A_TABLE), ..self });
        self.forms_of_multiples().into_iter().chain(five).chain(tabled).collect()
    }

    /// A table, twice an E2M1 and 128: what kernels take does not depend on what is in it.
    pub const A_TABLE: [u8; 16] = [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116];

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
                Some(group) => Ok(Self { bits: format.bits, group, scale, factors: true, ..Self::W4_G128 }),
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
        Ok(Self { bits: format.bits, group, zero, scale: format.scale, ..Self::W4_G128 })
    }

    /// The form for tensors one below the other: their numbers matter too. Error: as [`Atom::holding`], or no tensor.
    pub fn holding_all(parts: &[&StoredTensor<'_>], act: Act) -> Result<Self> {
        let none = Err(Error::invalid(OP, "at least one tensor", "none"));
        let atom = parts.iter().map(|part| Self::holding(part, act)).reduce(Result::and).unwrap_or(none)?;
        Ok(atom.narrowed(parts, act))
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
        STRIP * if self.has_nibbles() { 12 } else { 10 }
    }

    /// Whether factors have 4 bits, and lie beside those of offsets, a byte a group.
    pub(super) fn has_nibbles(self) -> bool {
        self.multiples && self.offset && self.group == 16
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
        let in_middle = format.zero == Zero::Symmetric && self.table.is_none();
        if in_middle { format.middle() as i32 - (1 << (self.bits - 1)) } else { 0 }
    }

    /// What lies in a code's place.
    pub(crate) fn number_of(self, code: u8, base: i32) -> u32 {
        match self.table {
            Some(table) => table.iter().position(|&of| of == code).unwrap_or(0) as u32,
            None => (i32::from(code) - base) as u32 & self.mask(),
        }
    }

    /// The code that it stands for.
    pub(super) fn code_of(self, number: u32, base: i32) -> u8 {
        self.table.map_or((number as i32 + base) as u8, |table| table[number as usize & 15])
    }

    /// How far a code may lie from its zero, where that is known of all codes.
    pub(crate) fn most_from_zero(self) -> Option<u32> {
        let of_table =
            self.table.map(|table| table.iter().map(|&code| u32::from(code.abs_diff(128))).max().unwrap_or(0));
        of_table.or((self.multiples || self.bits == 5).then_some(1 << self.bits))
    }

    /// Bits of a code in the words that are multiplied: codes of 2 and 3 bits become those of 4, those of 5 and 6 bits and of tables bytes.
    pub fn field_bits(self) -> u32 {
        if self.table.is_some() { 8 } else { self.bits_of_word() }
    }

    /// Bits of a code in the words that places are drawn for.
    fn bits_of_word(self) -> u32 {
        if self.bits <= 4 { 4 } else { 8 }
    }

    /// Codes of such a word.
    pub(super) fn fields(self) -> usize {
        32 / self.bits_of_word() as usize
    }

    /// The bits of a code.
    pub(super) fn mask(self) -> u32 {
        (1 << self.bits) - 1
    }

    /// Row and column, from the atom's first, of the code in field `f` of word `at`; 8 fields a word, or 4.
    pub(super) fn place(self, at: usize, f: usize) -> (usize, usize) {
        let (j, lane) = (at % 4, at / 4 % 32);
        let (row, column) = (lane / 4, 2 * (lane % 4));
        if self.bits_of_word() == 4 {
            let (down, right, _) = FIELDS[f];
            (16 * (at / 256) + row + down, 64 * (at / 128 % 2) + 16 * j + column + right)
        } else {
            let quarter = at / 128 % 4;
            (16 * (at / 512) + row + 8 * (f % 2), 32 * quarter + 16 * (j / 2) + 8 * (j % 2) + column + f / 2)
        }
    }

    /// Lowest bit of field `f`.
    pub(super) fn shift(self, f: usize) -> u32 {
        if self.bits_of_word() == 4 { FIELDS[f].2 } else { 8 * f as u32 }
    }
}
