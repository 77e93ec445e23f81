//! Codes in tiles of 64 bytes: 16 outputs side by side, 32 bits of each.
//!
//! ```text
//! panel p = outputs 16p … 16p+15         a panel is one contiguous run of tiles along k
//! ┌ tile: 16 lanes of 32 bits ────────────────┐   lane l belongs to output 16p + l
//! │ lane 0 │ lane 1 │ lane 2 │  …   │ lane 15 │
//! └────────┴────────┴────────┴──────┴─────────┘
//! 8 bits:  byte b = code of column 4t + b                                     4 columns a tile
//! 4 bits:  byte b = column 8t + b (low nibble), 8t + 4 + b (high)             8 columns a tile
//! 2 bits:  byte b, bits 2i…2i+1 = column 16t + 4i + b                        16 columns a tile
//! ```
//!
//! So one load and a shift and a mask for each 32/bits gives a register of bytes whose lanes each hold four neighbours
//! along k of one output: the operand of an int8 dot product; and a lane shifted right by `field·bits` has one code in
//! its lowest bits: the index of a table lookup that makes it a float. m = 1 and large m read the same bytes.
//! Codes of 3 bits lie in fields of 4.
//!
//! Columns are sorted by group (stably), and each group begins a new tile, the rest of its last tile filled with code 0.
//! Kernels sum within a *span*, a group or a piece of at most [`SPAN_COLUMNS`] columns of one, and scale span by span.
//! Scales, zero points and offsets lie as `[panel][group][16]`. Those that are known to be whole multiples of halves of several
//! groups (GGUF's K types) lie so, a byte a group and a half a block, and are multiplied when a group's are loaded.

use super::Lines;
use super::multiples::Multiples;
use super::places::{Places, runs};
use super::stored::{StoredTensor, Strides};
use crate::format::{QTensor, WeightFormat, Zero, Zeros};
use crate::tensor::{Float, FloatData};
use half::{bf16, f16};
use rayon::prelude::*;

/// Outputs a panel.
pub const PANEL: usize = 16;

/// The longest run of columns summed before scaling: 4096 · 255 · 128 stays far below 2³¹.
pub const SPAN_COLUMNS: usize = 4096;

/// A run of tiles of one group, summed before it is scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First tile.
    pub tile: usize,
    /// Number of tiles, at least 1.
    pub tiles: usize,
    /// Places that hold a column; filler follows them.
    pub columns: usize,
    /// The group whose scale and zero hold.
    pub group: usize,
}

/// One number for each panel, group and lane, as narrow as its type allows.
#[derive(Clone, Debug)]
pub enum PerGroup {
    /// Half floats.
    F16(Vec<f16>),
    /// Brain floats.
    BF16(Vec<bf16>),
    /// Singles.
    F32(Vec<f32>),
    /// Whole multiples of halves.
    Multiples(Box<PanelMultiples>),
}

/// Numbers as whole multiples of halves that neighbouring groups share.
#[derive(Clone, Debug)]
pub struct PanelMultiples {
    /// `[panel][block][16]`.
    halves: Vec<f16>,
    /// `[panel][group][16]`.
    factors: Vec<i8>,
    /// Binary logarithm of the number of groups of a block. Panels have whole blocks.
    log2_block: u32,
}

impl PanelMultiples {
    /// The halves and the factors of 16 outputs, from element `at` of `[panel][group][16]` on: a multiple of 16.
    #[inline(always)]
    pub fn sixteen(&self, at: usize) -> (&[f16], &[i8]) {
        (&self.halves[((at / PANEL) >> self.log2_block) * PANEL..][..PANEL], &self.factors[at..][..PANEL])
    }

    fn get(&self, i: usize) -> f32 {
        let (halves, factors) = self.sixteen(i / PANEL * PANEL);
        halves[i % PANEL].to_f32() * f32::from(factors[i % PANEL])
    }
}

impl PerGroup {
    /// Values of tensors one below the other, which are exact in `dtype`; `multiples` of those whose are known.
    fn of(
        (values, multiples): (Vec<(&FloatData<'_>, Strides)>, Vec<&Multiples<'_>>),
        parts: &[&StoredTensor<'_>],
        groups: usize,
        dtype: Float,
    ) -> Self {
        let heights = heights(parts);
        if let [first, ..] = multiples[..]
            && multiples.len() == parts.len()
            && multiples.iter().all(|multiples| multiples.block() == first.block())
        {
            let blocks = groups / first.block();
            let halves: Vec<_> = multiples.iter().map(|m| (m.halves(), Strides::of_outputs(blocks))).collect();
            let factors: Vec<_> = multiples.iter().map(|m| (m.factors(), Strides::of_outputs(groups))).collect();
            return Self::Multiples(Box::new(PanelMultiples {
                halves: spread(&halves, &heights, blocks),
                factors: spread(&factors, &heights, groups),
                log2_block: first.block().ilog2(),
            }));
        }
        macro_rules! in_their_type {
            ($variant:ident) => {{
                let tables: Option<Vec<_>> = values
                    .iter()
                    .map(|(v, strides)| if let FloatData::$variant(v) = v { Some((&**v, *strides)) } else { None })
                    .collect();
                if let Some(tables) = tables {
                    return Self::$variant(spread(&tables, &heights, groups));
                }
            }};
        }
        match dtype {
            Float::F16 => in_their_type!(F16),
            Float::BF16 => in_their_type!(BF16),
            Float::F32 => in_their_type!(F32),
        }
        let wide: Vec<(Vec<f32>, Strides)> = values.iter().map(|(v, strides)| (v.to_f32(), *strides)).collect();
        let tables: Vec<_> = wide.iter().map(|(v, strides)| (v.as_slice(), *strides)).collect();
        let spread = spread(&tables, &heights, groups);
        match dtype {
            Float::F16 => Self::F16(spread.into_iter().map(f16::from_f32).collect()),
            Float::BF16 => Self::BF16(spread.into_iter().map(bf16::from_f32).collect()),
            Float::F32 => Self::F32(spread),
        }
    }

    /// Element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F16(v) => v[i].to_f32(),
            Self::BF16(v) => v[i].to_f32(),
            Self::F32(v) => v[i],
            Self::Multiples(multiples) => multiples.get(i),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F16(v) => v.len() * 2,
            Self::BF16(v) => v.len() * 2,
            Self::F32(v) => v.len() * 4,
            Self::Multiples(multiples) => multiples.halves.len() * 2 + multiples.factors.len(),
        }
    }
}

/// Zeros in packed order.
#[derive(Clone, Debug)]
pub enum PackedZeros {
    /// The middle code.
    Symmetric,
    /// Zero points from 0 to 256.
    Integer(Vec<u16>),
    /// Offsets.
    Float(PerGroup),
}

/// A quantised tensor packed for the CPU kernels.
#[derive(Clone, Debug)]
pub struct CpuN16 {
    format: WeightFormat,
    n: usize,
    k: usize,
    groups: usize,
    tiles: usize,
    spans: Vec<Span>,
    codes: Lines,
    scales: PerGroup,
    zeros: PackedZeros,
    /// Sums of codes less their zero point `[panel][span][16]`, for activations with offsets.
    code_sums: Vec<f32>,
    /// Column of each place along the tiles; `u32::MAX` where a place is filler. None: place p is column p.
    columns: Option<Vec<u32>>,
}

/// Marks a place that belongs to no column.
pub const FILLER: u32 = u32::MAX;

impl CpuN16 {
    /// Bytes after the last tile that kernels may read, so that a vector may be loaded from the middle of a lane.
    pub const READABLE_AFTER: usize = 64;

    /// Packs a tensor, code by code: what the layout means. [`crate::cpu::pack`] does the same fast.
    ///
    /// `code_sums` for kernels that take activations with offsets.
    pub fn pack(w: &QTensor, code_sums: bool) -> Self {
        let (n, k, format) = (w.n(), w.k(), w.format());
        let (per_tile, field) = (columns_per_tile(format.bits), field_bits(format.bits));
        Self::assemble(&[&w.into()], code_sums, |places, codes| {
            for place in 0..places.tiles * per_tile {
                let column = places.columns.as_ref().map_or(place, |columns| columns[place] as usize);
                let (tile, within) = (place / per_tile, place % per_tile);
                for i in (0..n).filter(|_| column < k) {
                    let at = ((i / PANEL) * places.tiles + tile) * 64 + (i % PANEL) * 4 + within % 4;
                    codes[at] |= w.codes()[i * k + column] << (within / 4 * field as usize);
                }
            }
        })
    }

    /// Packs tensors one below the other, which must be alike; `fill` writes the codes, `[panel][tile][64]`, over zeros.
    pub(crate) fn assemble(
        parts: &[&StoredTensor<'_>],
        code_sums: bool,
        fill: impl FnOnce(&Places, &mut [u8]),
    ) -> Self {
        let first = parts[0];
        let (format, k, groups) = (first.format(), first.k(), first.groups());
        let n: usize = parts.iter().map(|part| part.n()).sum();
        let places = Places::of(first);
        let bytes = n.div_ceil(PANEL) * places.tiles * 64;
        let mut codes = Lines::zeroed(bytes + Self::READABLE_AFTER);
        fill(&places, &mut codes.as_mut_slice::<u8>()[..bytes]);
        let tables = parts.iter().map(|part| part.scales()).collect();
        let multiples = parts.iter().filter_map(|part| part.scale_multiples()).collect();
        let scales = PerGroup::of((tables, multiples), parts, groups, format.scale);
        let zeros = match format.zero {
            Zero::Symmetric => PackedZeros::Symmetric,
            Zero::Integer => {
                let tables: Vec<(&[u16], Strides)> = parts.iter().filter_map(|part| part.zero_points()).collect();
                PackedZeros::Integer(spread(&tables, &heights(parts), groups))
            }
            Zero::Float => {
                let tables = parts.iter().filter_map(|part| part.offsets()).collect();
                let multiples = parts.iter().filter_map(|part| part.offset_multiples()).collect();
                PackedZeros::Float(PerGroup::of((tables, multiples), parts, groups, format.scale))
            }
        };
        let Places { tiles, spans, columns } = places;
        let mut this =
            Self { format, n, k, groups, tiles, spans, codes, scales, zeros, code_sums: Vec::new(), columns };
        if code_sums {
            this.code_sums = this.sums();
        }
        this
    }

    /// Sums of codes less their zero point; filler is 0.
    fn sums(&self) -> Vec<f32> {
        let (field, spans) = (field_bits(self.format.bits), self.spans.len());
        let mask = ((1u32 << field) - 1) as u8;
        let panel_bytes = (self.tiles * 64).max(64);
        let mut out = vec![0.0; self.panels() * spans * PANEL];
        let panels = self.codes().par_chunks_exact(panel_bytes);
        out.par_chunks_mut((spans * PANEL).max(1)).zip(panels).enumerate().for_each(|(panel, (out, codes))| {
            for (out, span) in out.chunks_exact_mut(PANEL).zip(&self.spans) {
                let mut sums = [0i32; PANEL];
                for tile in codes[span.tile * 64..][..span.tiles * 64].chunks_exact(64) {
                    for (at, &byte) in tile.iter().enumerate() {
                        let fields = (0..8).step_by(field as usize).map(|shift| i32::from(byte >> shift & mask));
                        sums[at / 4] += fields.sum::<i32>();
                    }
                }
                for (lane, (out, sum)) in out.iter_mut().zip(sums).enumerate().take(self.n - panel * PANEL) {
                    let zero = match &self.zeros {
                        PackedZeros::Symmetric => self.format.middle() as i32,
                        PackedZeros::Integer(z) => i32::from(z[(panel * self.groups + span.group) * PANEL + lane]),
                        PackedZeros::Float(_) => 0,
                    };
                    *out = (sum - zero * span.columns as i32) as f32;
                }
            }
        });
        out
    }

    /// The canonical tensor again.
    pub fn unpack(&self) -> QTensor {
        let per_tile = columns_per_tile(self.format.bits);
        let field = field_bits(self.format.bits);
        let mut codes = vec![0u8; self.n * self.k];
        let mut index = vec![0u32; self.k];
        for span in &self.spans {
            for p in span.tile * per_tile..(span.tile + span.tiles) * per_tile {
                let column = self.column(p);
                if column < self.k {
                    index[column] = span.group as u32;
                    for i in 0..self.n {
                        let at = ((i / PANEL) * self.tiles + p / per_tile) * 64 + (i % PANEL) * 4 + p % 4;
                        let shift = ((p % per_tile) / 4) as u32 * field;
                        codes[i * self.k + column] = (self.codes()[at] >> shift) & ((1u32 << field) - 1) as u8;
                    }
                }
            }
        }
        let gather = |get: &dyn Fn(usize) -> f32| -> Vec<f32> {
            (0..self.n * self.groups)
                .map(|at| (at / self.groups, at % self.groups))
                .map(|(i, g)| get(((i / PANEL) * self.groups + g) * PANEL + i % PANEL))
                .collect()
        };
        let scales = gather(&|at| self.scales.get(at));
        let zeros = match &self.zeros {
            PackedZeros::Symmetric => Zeros::Symmetric,
            PackedZeros::Integer(z) => {
                Zeros::Integer(gather(&|at| f32::from(z[at])).into_iter().map(|z| z as u16).collect())
            }
            PackedZeros::Float(o) => Zeros::Float(gather(&|at| o.get(at))),
        };
        QTensor::new(self.format, [self.n, self.k], codes, scales, zeros, Some(index))
            .unwrap_or_else(|e| unreachable!("a packed tensor was valid before it was packed: {e}"))
    }

    /// What the codes of an output stand for, each rounded to f32 once, as [`StoredTensor::values`] has them: row `i` below
    /// [`CpuN16::n`], into k elements.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        let (per_tile, field) = (columns_per_tile(self.format.bits), field_bits(self.format.bits));
        let (panel, lane, mask) = (i / PANEL, i % PANEL, ((1u32 << field) - 1) as u8);
        let tiles = &self.codes()[panel * self.tiles * 64..][..self.tiles * 64];
        for span in &self.spans {
            let at = (panel * self.groups + span.group) * PANEL + lane;
            let scale = f64::from(self.scales.get(at));
            let (zero, offset) = match &self.zeros {
                PackedZeros::Symmetric => (f64::from(self.format.middle()), 0.0),
                PackedZeros::Integer(z) => (f64::from(z[at]), 0.0),
                PackedZeros::Float(o) => (0.0, f64::from(o.get(at))),
            };
            let first = span.tile * per_tile;
            for place in first..first + span.columns {
                let (tile, within) = (place / per_tile, place % per_tile);
                let code = tiles[tile * 64 + lane * 4 + within % 4] >> (within / 4 * field as usize) & mask;
                if let Some(out) = out.get_mut(self.column(place)) {
                    *out = (scale * (f64::from(code) - zero) + offset) as f32;
                }
            }
        }
    }

    /// What the codes mean.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Length of the reduction.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Panels of 16 outputs.
    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// Groups along k.
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Tiles along k.
    pub fn tiles(&self) -> usize {
        self.tiles
    }

    /// Columns a tile, filler included.
    pub fn columns_per_tile(&self) -> usize {
        columns_per_tile(self.format.bits)
    }

    /// Places along k, filler included: the length that activations are brought to.
    pub fn places(&self) -> usize {
        self.tiles * self.columns_per_tile()
    }

    /// Spans in the order of their tiles; they cover every tile once.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Codes, `[panel][tile][64]`, and [`CpuN16::READABLE_AFTER`] bytes that mean nothing.
    pub fn codes(&self) -> &[u8] {
        self.codes.as_slice()
    }

    /// Scales, `[panel][group][16]`.
    pub fn scales(&self) -> &PerGroup {
        &self.scales
    }

    /// Zeros, `[panel][group][16]`.
    pub fn zeros(&self) -> &PackedZeros {
        &self.zeros
    }

    /// Sums of codes, less the zero point where there is one, `[panel][span][16]`; empty if they were not asked for.
    pub fn code_sums(&self) -> &[f32] {
        &self.code_sums
    }

    /// Columns by place ([`FILLER`] for none), or None where place p is column p.
    pub fn columns(&self) -> Option<&[u32]> {
        self.columns.as_deref()
    }

    /// Column at place `p`; k or more if it is filler.
    pub fn column(&self, p: usize) -> usize {
        self.columns.as_ref().map_or(p, |c| c[p] as usize)
    }

    /// Bytes that the packed tensor takes.
    pub fn bytes(&self) -> usize {
        let zeros = match &self.zeros {
            PackedZeros::Symmetric => 0,
            PackedZeros::Integer(z) => z.len() * 2,
            PackedZeros::Float(o) => o.bytes(),
        };
        let columns = self.columns.as_ref().map_or(0, |c| c.len() * 4);
        self.panels() * self.tiles * 64 + self.scales.bytes() + zeros + self.code_sums.len() * 4 + columns
    }
}

/// Bits that a code's field takes in a tile.
pub const fn field_bits(bits: u32) -> u32 {
    if bits == 3 { 4 } else { bits }
}

/// Columns that a tile holds.
pub fn columns_per_tile(bits: u32) -> usize {
    (32 / field_bits(bits)) as usize
}

fn heights(parts: &[&StoredTensor<'_>]) -> Vec<usize> {
    parts.iter().map(|part| part.n()).collect()
}

/// Values of tensors of these heights, one below the other, in packed order, `[panel][group][16]`.
fn spread<T: Copy + Default + Send + Sync>(tables: &[(&[T], Strides)], heights: &[usize], groups: usize) -> Vec<T> {
    let n: usize = heights.iter().sum();
    let mut out = vec![T::default(); n.div_ceil(PANEL) * groups * PANEL];
    out.par_chunks_mut((groups * PANEL).max(1)).enumerate().for_each(|(panel, out)| {
        let mut lane = 0;
        for (part, first, rows) in runs(heights, panel * PANEL..(panel + 1) * PANEL) {
            let (values, strides) = tables[part];
            if strides.output == 1 {
                for (g, out) in out.chunks_exact_mut(PANEL).enumerate() {
                    out[lane..lane + rows].copy_from_slice(&values[strides.at(first, g)..][..rows]);
                }
            } else {
                for i in 0..rows {
                    for (g, out) in out.chunks_exact_mut(PANEL).enumerate() {
                        out[lane + i] = values[strides.at(first + i, g)];
                    }
                }
            }
            lane += rows;
        }
    });
    out
}
