//! Codes of 4 and 8 bits in fragments of the tensor cores, their scales beside them: what the `wna16` GPU kernels read.
//!
//! ```text
//! strip = 64 outputs;  super-strip = 4 strips, the last one 1 to 4;  atom = one strip × 128 columns
//! atoms in the order super-strip, then columns, then strip:    0: s0 s1 s2 s3 | 128: s0 s1 s2 s3 | …
//!     so that 1, 2 or 4 strips of the same columns are one piece, and 4 strips over a run of columns one stream
//! atom = codes [1024 · bits bytes] · scales [128/group][64], 2 bytes each · zero points [128/group][64 bytes], if any
//!
//! codes of 4 bits  [warp w 0..4][half h 0..2][lane 0..32][word j 0..4], a word the 8 codes of one lane and 16 columns:
//!     rows R = 16w + lane/4 and R + 8, column c = 64h + 16j + 2·(lane % 4)
//!     bits  6 (R, c)       22 (R, c+1)        register 0 of A in mma m16n8k16 and wgmma m64k16
//!     bits  2 (R+8, c)     18 (R+8, c+1)      register 1
//!     bits 14 (R, c+8)     30 (R, c+9)        register 2; what passes bit 31 goes on at bit 0
//!     bits 10 (R+8, c+8)   26 (R+8, c+9)      register 3
//! codes of 8 bits  [warp w 0..4][quarter i 0..4][lane 0..32][word j 0..4]:
//!     column c = 32i + 16·(j / 2) + 2·(lane % 4) + 8·(j % 2); bytes (R, c) (R+8, c) (R, c+1) (R+8, c+1)
//! scales and zero points of a group  [warp w 0..4][i 0..8]: rows 16w + i, 16w + i + 8
//!
//! one scale a row: the atoms hold codes only, and a table beside them has for each strip 64 scales and 64 zero points
//! scales on two levels: the table has the scales of the rows, and a group in an atom has, where its scale would lie, 2 bytes:
//!     its factor f, and 128 − zero point · f; so code · f + 128 − zero point · f is the byte that a weight is, plus 128
//! ```
//!
//! Rows are padded to 64 and columns to 128, with scales of zero. Groups of a multiple of 128, 64 or 32 columns lie as groups
//! of that size with the same scale. Columns that were quantised in another order (act-order) are sorted by their group, and
//! `order` tells which column of x belongs to each.

use super::stored::StoredTensor;
use crate::error::{Error, Result};
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::Float;
use half::{bf16, f16};
use rayon::prelude::*;

const OP: &str = "pack for tensor cores";

/// Rows of a strip, and columns of an atom.
pub const STRIP: usize = 64;
/// Columns of an atom.
pub const STEP: usize = 128;

/// Where the bits of a code of 4 bits begin, with its row and column from (R, c).
const FIELDS: [(usize, usize, u32); 8] =
    [(0, 0, 6), (0, 1, 22), (8, 0, 2), (8, 1, 18), (0, 8, 14), (0, 9, 30), (8, 8, 10), (8, 9, 26)];

/// The form of an atom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Atom {
    /// Bits a code: 4 or 8.
    pub bits: u32,
    /// Columns that share a scale: 32, 64 or 128; 0: all of a row.
    pub group: usize,
    /// With zero points.
    pub zero: bool,
    /// Type of the scales: fp16 or bf16.
    pub scale: Float,
    /// Scales on two levels: groups have factors (and zero points with them), rows have scales.
    pub factors: bool,
}

impl Atom {
    /// The form for a format and a number of columns, on one level of scales or two. Error: there is none, and why.
    pub fn of_levels(format: WeightFormat, k: usize) -> Result<Self> {
        let Some(scale) = format.channel_scale else { return Self::of(format, k) };
        if k == 0 {
            return Err(Error::invalid(OP, "at least one column, for two levels of scales", "none"));
        }
        match format.group {
            Group::Size(size) => match [128, 64, 32].into_iter().find(|&g| size.is_multiple_of(g)) {
                Some(group) => Ok(Self { bits: format.bits, group, zero: false, scale, factors: true }),
                None => Err(Error::invalid(OP, "groups of a multiple of 32", size.to_string())),
            },
            other => Err(Error::invalid(OP, "groups along k, for two levels of scales", other.to_string())),
        }
    }

    /// The form for a format with one level of scales and a number of columns. Error: there is none, and why.
    pub fn of(format: WeightFormat, k: usize) -> Result<Self> {
        let refuse = |expected: &str, got: String| Err(Error::invalid(OP, expected, got));
        if !matches!(format.bits, 4 | 8) {
            return refuse("codes of 4 or 8 bits", format.bits.to_string());
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
        Ok(Self { bits: format.bits, group, zero: format.zero == Zero::Integer, scale: format.scale, factors: false })
    }

    /// The form for a tensor: its numbers matter too.
    ///
    /// Errors: those of [`Atom::of_levels`]; zero points of 256; scales whose products with a code pass fp16; an order of columns
    /// whose groups are not full.
    pub fn holding(w: &StoredTensor<'_>) -> Result<Self> {
        let (format, k) = (w.format(), w.k());
        let atom = Self::of_levels(format, k)?;
        if let Some((z, _)) = w.zero_points()
            && let Some(z) = z.iter().max()
            && *z > 255
        {
            return Err(Error::invalid(OP, "zero points of 8 bits", z.to_string()));
        }
        if atom.scale == Float::F16 && atom.group > 0 && !atom.factors {
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
        self.codes_bytes() + self.groups() * self.params_bytes()
    }

    fn codes_bytes(self) -> usize {
        1024 * self.bits as usize
    }

    /// Bytes of 64 scales and zero points, which is also what a strip has in the table of rows.
    fn params_bytes(self) -> usize {
        if self.zero { 3 * STRIP } else { 2 * STRIP }
    }

    /// Where the scales and zero points of a group of an atom begin: all scales lie before all zero points.
    fn params_of(self, g: usize) -> [usize; 2] {
        let scales = self.codes_bytes();
        [scales + g * 2 * STRIP, scales + self.groups() * 2 * STRIP + g * STRIP]
    }

    /// Row and column, from the atom's first, of the code in field `f` of word `at`; 8 fields a word, or 4.
    fn place(self, at: usize, f: usize) -> (usize, usize) {
        let (j, lane) = (at % 4, at / 4 % 32);
        let (row, column) = (lane / 4, 2 * (lane % 4));
        if self.bits == 4 {
            let (down, right, _) = FIELDS[f];
            (16 * (at / 256) + row + down, 64 * (at / 128 % 2) + 16 * j + column + right)
        } else {
            let quarter = at / 128 % 4;
            (16 * (at / 512) + row + 8 * (f % 2), 32 * quarter + 16 * (j / 2) + 8 * (j % 2) + column + f / 2)
        }
    }

    /// Lowest bit of field `f`.
    fn shift(self, f: usize) -> u32 {
        if self.bits == 4 { FIELDS[f].2 } else { 8 * f as u32 }
    }
}

/// Columns sorted by their groups: the column of x for each packed one.
pub fn order_of(group_index: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..group_index.len() as u32).collect();
    order.sort_by_key(|&j| group_index[j as usize]);
    order
}

/// The row of a strip whose scale lies at `at`.
fn row_at(at: usize) -> usize {
    at / 16 * 16 + at % 16 / 2 + 8 * (at % 2)
}

fn bits_of(value: f32, dtype: Float) -> u16 {
    match dtype {
        Float::BF16 => bf16::from_f32(value).to_bits(),
        _ => f16::from_f32(value).to_bits(),
    }
}

fn float_of(bits: u16, dtype: Float) -> f32 {
    match dtype {
        Float::BF16 => bf16::from_bits(bits).to_f32(),
        _ => f16::from_bits(bits).to_f32(),
    }
}

/// A quantised tensor packed for the tensor cores.
#[derive(Clone, Debug)]
pub struct CudaWna16 {
    n: usize,
    k: usize,
    format: WeightFormat,
    atom: Atom,
    atoms: Vec<u8>,
    rows: Vec<u8>,
    order: Option<Vec<u32>>,
}

impl CudaWna16 {
    /// Packs a tensor, on the CPU: what the GPU's packing is tested against. Errors: those of [`Atom::holding`].
    pub fn pack(w: &QTensor) -> Result<Self> {
        let atom = Atom::holding(&w.into())?;
        let (n, k) = (w.n(), w.k());
        let order = w.group_index().map(order_of);
        let (strips, steps) = (n.div_ceil(STRIP), k.div_ceil(STEP));
        let mut atoms = vec![0u8; atom.bytes_of([n, k])?];
        let source = Source { w, atom, order: order.as_deref() };
        atoms.par_chunks_mut(atom.bytes()).enumerate().for_each(|(at, out)| {
            let [strip, step] = place_of_atom(at, [strips, steps]);
            source.codes(strip, step, &mut out[..atom.codes_bytes()]);
            for g in 0..atom.groups() {
                source.params(strip, step * STEP + g * atom.group, atom.params_of(g), out);
            }
        });
        let mut rows = vec![0u8; atom.bytes_of_rows(n)];
        rows.par_chunks_mut(atom.params_bytes()).enumerate().for_each(|(strip, out)| match w.channel_scales() {
            None => source.params(strip, 0, [0, 2 * STRIP], out),
            Some(scales) => {
                for (at, out) in out.chunks_exact_mut(2).enumerate() {
                    let scale = scales.get(strip * STRIP + row_at(at)).copied().unwrap_or(0.0);
                    out.copy_from_slice(&bits_of(scale, atom.scale).to_le_bytes());
                }
            }
        });
        Ok(Self { n, k, format: w.format(), atom, atoms, rows, order })
    }

    /// The canonical tensor again.
    pub fn unpack(&self) -> Result<QTensor> {
        let (n, k, atom) = (self.n, self.k, self.atom);
        let (strips, steps, groups) = (n.div_ceil(STRIP), k.div_ceil(STEP), self.format.group.count(k));
        let (mut codes, mut scales, mut zeros) = (vec![0u8; n * k], vec![0f32; n * groups], vec![0u16; n * groups]);
        let column = |c: usize| self.order.as_ref().map_or(c, |order| order[c] as usize);
        let mut params = |strip: usize, group: usize, [scales_at, zeros_at]: [usize; 2], bytes: &[u8]| {
            for at in 0..STRIP {
                let row = strip * STRIP + row_at(at);
                if row < n && group < groups {
                    let pair = [bytes[scales_at + 2 * at], bytes[scales_at + 2 * at + 1]];
                    if atom.factors {
                        let [factor, zero] = pair;
                        scales[row * groups + group] = f32::from(factor);
                        zeros[row * groups + group] = u16::from((128 - zero).checked_div(factor).unwrap_or(0));
                        continue;
                    }
                    let bits = u16::from_le_bytes(pair);
                    scales[row * groups + group] = float_of(bits, atom.scale);
                    zeros[row * groups + group] = if atom.zero { u16::from(bytes[zeros_at + at]) } else { 0 };
                }
            }
        };
        for (at, bytes) in self.atoms.chunks_exact(atom.bytes()).enumerate() {
            let [strip, step] = place_of_atom(at, [strips, steps]);
            for (i, word) in bytes[..atom.codes_bytes()].chunks_exact(4).enumerate() {
                let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                for f in 0..32 / atom.bits as usize {
                    let (row, c) = atom.place(i, f);
                    let (row, c) = (strip * STRIP + row, step * STEP + c);
                    if row < n && c < k {
                        codes[row * k + column(c)] = (word.rotate_right(atom.shift(f)) & ((1 << atom.bits) - 1)) as u8;
                    }
                }
            }
            for g in 0..atom.groups() {
                let first = step * STEP + g * atom.group;
                if first < k {
                    params(strip, first / self.format.group.len(k), atom.params_of(g), bytes);
                }
            }
        }
        if atom.factors {
            for (at, bits) in self.rows.chunks_exact(2).enumerate() {
                let row = at / STRIP * STRIP + row_at(at % STRIP);
                if row < n {
                    let channel = float_of(u16::from_le_bytes([bits[0], bits[1]]), atom.scale);
                    scales[row * groups..(row + 1) * groups].iter_mut().for_each(|scale| *scale *= channel);
                }
            }
        } else {
            for (strip, bytes) in self.rows.chunks_exact(atom.params_bytes()).enumerate() {
                params(strip, 0, [0, 2 * STRIP], bytes);
            }
        }
        let zeros = if self.format.zero == Zero::Integer { Zeros::Integer(zeros) } else { Zeros::Symmetric };
        let index = self.order.as_ref().map(|order| {
            let mut index = vec![0u32; k];
            order.iter().zip(0..).for_each(|(&j, c)| index[j as usize] = c / self.format.group.len(k) as u32);
            index
        });
        QTensor::new(self.format, [n, k], codes, scales, zeros, index)
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// What the codes mean.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// The form of the atoms.
    pub fn atom(&self) -> Atom {
        self.atom
    }

    /// All atoms.
    pub fn atoms(&self) -> &[u8] {
        &self.atoms
    }

    /// Scales and zero points of rows, where a row has one of each.
    pub fn rows(&self) -> &[u8] {
        &self.rows
    }

    /// The column of x that belongs to each packed column, if not the same one.
    pub fn order(&self) -> Option<&[u32]> {
        self.order.as_deref()
    }
}

/// Strip and step along k of an atom.
fn place_of_atom(at: usize, [strips, steps]: [usize; 2]) -> [usize; 2] {
    let first = at / (4 * steps) * 4;
    let (within, wide) = (at - first * steps, (strips - first).min(4));
    [first + within % wide, within / wide]
}

/// What atoms are made of.
struct Source<'a> {
    w: &'a QTensor,
    atom: Atom,
    order: Option<&'a [u32]>,
}

impl Source<'_> {
    fn codes(&self, strip: usize, step: usize, out: &mut [u8]) {
        let (n, k) = (self.w.n(), self.w.k());
        let (rows, columns) = (strip * STRIP..n.min((strip + 1) * STRIP), step * STEP..k.min((step + 1) * STEP));
        // Codes beyond the edges meet x of zero, or go to outputs that nobody stores.
        let mut tile = [self.w.format().middle() as u8; STRIP * STEP];
        for (line, row) in tile.chunks_exact_mut(STEP).zip(rows) {
            let row = &self.w.codes()[row * k..(row + 1) * k];
            match self.order {
                None => line[..columns.len()].copy_from_slice(&row[columns.clone()]),
                Some(order) => {
                    line.iter_mut().zip(&order[columns.clone()]).for_each(|(code, &j)| *code = row[j as usize]);
                }
            }
        }
        let fields = 32 / self.atom.bits as usize;
        for (at, out) in out.chunks_exact_mut(4).enumerate() {
            let word = (0..fields).fold(0u32, |word, f| {
                let (row, c) = self.atom.place(at, f);
                word | u32::from(tile[row * STEP + c]).rotate_left(self.atom.shift(f))
            });
            out.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Scales and zero points of the group that a column lies in, put where they begin.
    fn params(&self, strip: usize, column: usize, [scales_at, zeros_at]: [usize; 2], out: &mut [u8]) {
        let (n, k, groups) = (self.w.n(), self.w.k(), self.w.groups());
        let group = if self.atom.group == 0 { 0 } else { column / self.w.format().group.len(k) };
        for at in 0..STRIP {
            let row = strip * STRIP + row_at(at);
            let there = row < n && group < groups && (column < k || self.atom.group == 0);
            if there {
                let i = row * groups + group;
                let bits = match (self.w.factors(), self.w.zero_point(row, group)) {
                    (Some(factors), Some(zero)) => {
                        u16::from_le_bytes([factors[i], (128 - zero * u32::from(factors[i])) as u8])
                    }
                    _ => bits_of(self.w.scales()[i], self.atom.scale),
                };
                out[scales_at + 2 * at..][..2].copy_from_slice(&bits.to_le_bytes());
            }
            if self.atom.zero {
                out[zeros_at + at] = match self.w.zeros() {
                    Zeros::Integer(z) if there => z[row * groups + group] as u8,
                    _ => self.w.format().middle() as u8,
                };
            }
        }
    }
}
