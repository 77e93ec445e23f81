//! Codes of 2 to 8 bits in fragments of the tensor cores, their scales beside them: what the `wna16` GPU kernels read.
//!
//! ```text
//! strip = 64 outputs;  super-strip = 4 strips, the last one 1 to 4;  atom = one strip × 128 columns
//! atoms in the order super-strip, then columns, then strip:    0: s0 s1 s2 s3 | 128: s0 s1 s2 s3 | …
//!     so that 1, 2 or 4 strips of the same columns are one piece, and 4 strips over a run of columns one stream
//! atom = codes of 4 units [256 · bits bytes each] · parameters of 4 units, one for each 16 outputs: what a warp multiplies
//! parameters = scales [128/group][16], 2 or 4 bytes each · zero points [128/group][16 bytes], if any, or
//!     offsets [128/group][16] in the type of the scales
//!
//! codes of 4 bits  [half h 0..2][lane 0..32][word j 0..4], a word the 8 codes of one lane and 16 columns:
//!     rows R = lane/4 and R + 8 of the unit, column c = 64h + 16j + 2·(lane % 4)
//!     bits  0 (R, c)       16 (R, c+1)        register 0 of A in mma m16n8k16 and wgmma m64k16
//!     bits  4 (R+8, c)     20 (R+8, c+1)      register 1
//!     bits  8 (R, c+8)     24 (R, c+9)        register 2
//!     bits 12 (R+8, c+8)   28 (R+8, c+9)      register 3
//! codes of 2, 3, 5 and 6 bits: in planes (`planes.rs`);   those of a table as codes of 4 bits: their numbers
//! codes of 8 bits  [quarter i 0..4][lane 0..32][word j 0..4]:
//!     column c = 32i + 16·(j / 2) + 2·(lane % 4) + 8·(j % 2); bytes (R, c) (R+8, c) (R, c+1) (R+8, c+1)
//! scales, zero points and offsets of a group  [i 0..8]: rows i and i + 8 of the unit
//!
//! one scale a row: the units have codes only, and a table beside them has for each strip 64 scales and 64 zero points, those of 16
//!     rows in the same order, one behind the other
//! scales on two levels: the table has the scales of the rows, and a group in a unit has, where its scale would lie, 2 bytes:
//!     its factor f, and 128 − zero point · f; so code · f + 128 − zero point · f is the byte that a weight is, plus 128
//! scales and offsets that are whole multiples of halves (GGUF's K types): 10 bytes a row and unit instead, of Q2_K 12 (`multiples.rs`)
//! ```
//!
//! Rows are padded to 64 and columns to 128, with scales of zero. Groups of a multiple of 128, 64, 32 or 16 columns lie as groups
//! of that size with the same scale, those with offsets as groups of 64 at most. Codes of 8 bits that a file holds in fewer lie in 5, or in 6 as
//! Q6_K's, symmetric ones with 112 or 96 taken off: zero is 16 or 32; those that it looks up in a table lie as their numbers there. Columns that were quantised in another order (act-order) are sorted by their group, and
//! `order` tells which column of x belongs to each.

mod atom;
mod multiples;
mod planes;

pub use atom::{Atom, STEP, STRIP, UNIT};

use crate::error::Result;
use crate::format::{Act, QTensor, WeightFormat, Zero, Zeros};
use crate::layout::stored::StoredTensor;
use crate::tensor::Float;
use half::{bf16, f16};
use rayon::prelude::*;

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

/// Writes a number of a type from byte `at` on.
fn put_float(value: f32, dtype: Float, at: usize, out: &mut [u8]) {
    let put = |bytes: &[u8], out: &mut [u8]| out[at..][..bytes.len()].copy_from_slice(bytes);
    match dtype {
        Float::F16 => put(&f16::from_f32(value).to_le_bytes(), out),
        Float::BF16 => put(&bf16::from_f32(value).to_le_bytes(), out),
        Float::F32 => put(&value.to_le_bytes(), out),
    }
}

fn float_at(bytes: &[u8], dtype: Float, at: usize) -> f32 {
    let half = |b: &[u8]| [b[at], b[at + 1]];
    match dtype {
        Float::F16 => f16::from_le_bytes(half(bytes)).to_f32(),
        Float::BF16 => bf16::from_le_bytes(half(bytes)).to_f32(),
        Float::F32 => f32::from_le_bytes([0, 1, 2, 3].map(|i| bytes[at + i])),
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
    pub fn pack(w: &QTensor, act: Act) -> Result<Self> {
        Self::pack_as(Atom::holding(&w.into(), act)?, w, None)
    }

    /// The same of a tensor of which more may be known than its numbers: that its scales are multiples of halves, or how many bits its
    /// codes have.
    pub fn pack_stored(w: &StoredTensor<'_>, act: Act) -> Result<Self> {
        let of = w.scale_multiples().map(|scales| (scales, w.offset_multiples()));
        Self::pack_as(Atom::holding_all(&[w], act)?, &w.to_qtensor()?, of)
    }

    fn pack_as(atom: Atom, w: &QTensor, of: Option<multiples::OfTensor<'_>>) -> Result<Self> {
        let (n, k) = (w.n(), w.k());
        let order = w.group_index().map(order_of);
        let (strips, steps) = (n.div_ceil(STRIP), k.div_ceil(STEP));
        let mut atoms = vec![0u8; atom.bytes_of([n, k])?];
        let source = Source { w, atom, order: order.as_deref() };
        atoms.par_chunks_mut(atom.bytes()).enumerate().for_each(|(at, out)| {
            let [strip, step] = place_of_atom(at, [strips, steps]);
            source.codes(strip, step, out);
            if let Some(of) = of.filter(|_| atom.multiples) {
                return multiples::pack(atom, of, [n, w.groups()], [strip, step], out);
            }
            for g in 0..atom.groups() {
                source.params(strip, step * STEP + g * atom.group, |at| atom.params_of(g, at), out);
            }
        });
        let mut rows = vec![0u8; atom.bytes_of_rows(n)];
        rows.par_chunks_mut(atom.params_bytes()).enumerate().for_each(|(strip, out)| match w.channel_scales() {
            Some(scales) if atom.factors => {
                for at in 0..STRIP {
                    let scale = scales.get(strip * STRIP + row_at(at)).copied().unwrap_or(0.0);
                    put_float(scale, atom.scale, atom.row_params_of(at)[0], out);
                }
            }
            _ => source.params(strip, 0, |at| atom.row_params_of(at), out),
        });
        Ok(Self { n, k, format: w.format(), atom, atoms, rows, order })
    }

    /// The canonical tensor again.
    pub fn unpack(&self) -> Result<QTensor> {
        let (n, k, atom) = (self.n, self.k, self.atom);
        let (strips, steps, groups) = (n.div_ceil(STRIP), k.div_ceil(STEP), self.format.group.count(k));
        let (mut codes, mut scales, mut zeros) = (vec![0u8; n * k], vec![0f32; n * groups], vec![0u16; n * groups]);
        let mut offsets = vec![0f32; if atom.offset { n * groups } else { 0 }];
        let column = |c: usize| self.order.as_ref().map_or(c, |order| order[c] as usize);
        let mut params = |strip: usize, group: usize, places: &dyn Fn(usize) -> [usize; 2], bytes: &[u8]| {
            for at in 0..STRIP {
                let row = strip * STRIP + row_at(at);
                if row < n && group < groups {
                    let (to, [scale_at, zero_at]) = (row * groups + group, places(at));
                    if atom.multiples {
                        let [scale, offset] = multiples::unpack(atom, bytes, at, group % atom.groups());
                        scales[to] = scale;
                        offsets.get_mut(to).into_iter().for_each(|to| *to = offset);
                        continue;
                    }
                    if atom.factors {
                        let (factor, zero) = (bytes[scale_at], bytes[scale_at + 1]);
                        scales[to] = f32::from(factor);
                        zeros[to] = u16::from((128 - zero).checked_div(factor).unwrap_or(0));
                        continue;
                    }
                    scales[to] = float_at(bytes, atom.scale, scale_at);
                    if atom.zero {
                        zeros[to] = u16::from(bytes[zero_at]);
                    }
                    if atom.offset {
                        offsets[to] = float_at(bytes, atom.scale, zero_at);
                    }
                }
            }
        };
        for (at, bytes) in self.atoms.chunks_exact(atom.bytes()).enumerate() {
            let [strip, step] = place_of_atom(at, [strips, steps]);
            let in_bytes = bytes[..atom.codes_bytes()].chunks_exact(4);
            let mut words: Vec<u32> = in_bytes.map(|w| u32::from_le_bytes([w[0], w[1], w[2], w[3]])).collect();
            match atom.bits {
                2 | 3 => words = planes::unfold_nibbles(&words, atom.bits).into(),
                5 | 6 => words = planes::unfold(&words, atom.bits).into(),
                _ => (),
            }
            for (i, word) in words.into_iter().enumerate() {
                for f in 0..atom.fields() {
                    let (row, c) = atom.place(i, f);
                    let (row, c) = (strip * STRIP + row, step * STEP + c);
                    if row < n && c < k {
                        let code = word >> atom.shift(f) & atom.mask();
                        codes[row * k + column(c)] = atom.code_of(code, atom.base(self.format));
                    }
                }
            }
            for g in 0..atom.groups() {
                let first = step * STEP + g * atom.group;
                if first < k {
                    params(strip, first / self.format.group.len(k), &|at| atom.params_of(g, at), bytes);
                }
            }
        }
        if atom.factors {
            for at in 0..self.rows.len() / 2 {
                let row = at / STRIP * STRIP + row_at(at % STRIP);
                if row < n {
                    let channel = float_at(&self.rows, atom.scale, at * atom.scale.size_bytes());
                    scales[row * groups..(row + 1) * groups].iter_mut().for_each(|scale| *scale *= channel);
                }
            }
        } else {
            for (strip, bytes) in self.rows.chunks_exact(atom.params_bytes()).enumerate() {
                params(strip, 0, &|at| atom.row_params_of(at), bytes);
            }
        }
        let zeros = match self.format.zero {
            Zero::Symmetric => Zeros::Symmetric,
            Zero::Integer => Zeros::Integer(zeros),
            Zero::Float => Zeros::Float(offsets),
        };
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
        let base = self.atom.base(self.w.format());
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
        let word = |at: usize| {
            (0..self.atom.fields()).fold(0u32, |word, f| {
                let (row, c) = self.atom.place(at, f);
                word | self.atom.number_of(tile[row * STEP + c], base) << self.atom.shift(f)
            })
        };
        let out = out[..self.atom.codes_bytes()].chunks_exact_mut(4);
        match self.atom.bits {
            bits @ (2 | 3) => {
                let words = planes::fold_nibbles(&std::array::from_fn(word), bits);
                out.zip(words).for_each(|(out, word)| out.copy_from_slice(&word.to_le_bytes()));
            }
            bits @ (5 | 6) => {
                let words = planes::fold(&std::array::from_fn(word), bits);
                out.zip(words).for_each(|(out, word)| out.copy_from_slice(&word.to_le_bytes()));
            }
            _ => out.enumerate().for_each(|(at, out)| out.copy_from_slice(&word(at).to_le_bytes())),
        }
    }

    /// Scales and zero points of the group that a column lies in, each to its place.
    fn params(&self, strip: usize, column: usize, places: impl Fn(usize) -> [usize; 2], out: &mut [u8]) {
        let (n, k, groups) = (self.w.n(), self.w.k(), self.w.groups());
        let group = if self.atom.group == 0 { 0 } else { column / self.w.format().group.len(k) };
        for at in 0..STRIP {
            let row = strip * STRIP + row_at(at);
            let [scale_at, zero_at] = places(at);
            let there = row < n && group < groups && (column < k || self.atom.group == 0);
            if there {
                let i = row * groups + group;
                match (self.w.factors(), self.w.zero_point(row, group)) {
                    (Some(factors), Some(zero)) if self.atom.factors => {
                        out[scale_at] = factors[i];
                        out[scale_at + 1] = (128 - zero * u32::from(factors[i])) as u8;
                    }
                    _ => put_float(self.w.scales()[i], self.atom.scale, scale_at, out),
                }
                if let Zeros::Float(o) = self.w.zeros() {
                    put_float(o[i], self.atom.scale, zero_at, out);
                }
            }
            if self.atom.zero {
                out[zero_at] = match self.w.zeros() {
                    Zeros::Integer(z) if there => z[row * groups + group] as u8,
                    _ => self.w.format().middle() as u8,
                };
            }
        }
    }
}
