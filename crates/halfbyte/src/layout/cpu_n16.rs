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
//! Scales, zero points and offsets lie as `[panel][group][16]`.

use super::Lines;
use crate::format::{QTensor, WeightFormat, Zeros};
use crate::tensor::Float;
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
}

impl PerGroup {
    fn new(values: Vec<f32>, dtype: Float) -> Self {
        match dtype {
            Float::F16 => Self::F16(values.into_iter().map(f16::from_f32).collect()),
            Float::BF16 => Self::BF16(values.into_iter().map(bf16::from_f32).collect()),
            Float::F32 => Self::F32(values),
        }
    }

    /// Element `i`, widened.
    pub fn get(&self, i: usize) -> f32 {
        match self {
            Self::F16(v) => v[i].to_f32(),
            Self::BF16(v) => v[i].to_f32(),
            Self::F32(v) => v[i],
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::F16(v) => v.len() * 2,
            Self::BF16(v) => v.len() * 2,
            Self::F32(v) => v.len() * 4,
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

    /// Packs a tensor; `code_sums` for kernels that take activations with offsets.
    pub fn pack(w: &QTensor, code_sums: bool) -> Self {
        let format = w.format();
        let per_tile = columns_per_tile(format.bits);
        let (n, k, groups) = (w.n(), w.k(), w.groups());
        let mut of_group: Vec<Vec<u32>> = vec![Vec::new(); groups];
        for j in 0..k {
            of_group[w.group_of(j)].push(j as u32);
        }
        let mut places = Vec::with_capacity(k);
        let mut spans = Vec::new();
        for (group, columns) in of_group.iter().enumerate() {
            let first = places.len() / per_tile;
            places.extend_from_slice(columns);
            places.resize(places.len().next_multiple_of(per_tile), FILLER);
            let end = places.len() / per_tile;
            for (piece, tile) in (first..end).step_by(SPAN_COLUMNS / per_tile).enumerate() {
                let tiles = (end - tile).min(SPAN_COLUMNS / per_tile);
                let columns = (columns.len() - piece * SPAN_COLUMNS).min(SPAN_COLUMNS);
                spans.push(Span { tile, tiles, columns, group });
            }
        }
        let tiles = places.len() / per_tile;
        let panels = n.div_ceil(PANEL);
        let mut codes = Lines::zeroed(panels * tiles * 64 + Self::READABLE_AFTER);
        let field = field_bits(format.bits);
        codes.as_mut_slice::<u8>().par_chunks_mut((tiles * 64).max(64)).enumerate().for_each(|(panel, bytes)| {
            for i in panel * PANEL..((panel + 1) * PANEL).min(n) {
                let row = &w.codes()[i * k..(i + 1) * k];
                let lane = (i % PANEL) * 4;
                for (tile, places) in places.chunks_exact(per_tile).enumerate() {
                    let mut word = 0u32;
                    for (within, &column) in places.iter().enumerate() {
                        if column != FILLER {
                            word |= u32::from(row[column as usize]) << (within % 4 * 8 + within / 4 * field as usize);
                        }
                    }
                    bytes[tile * 64 + lane..][..4].copy_from_slice(&word.to_le_bytes());
                }
            }
        });
        let spread = |value: &dyn Fn(usize, usize) -> f32| -> Vec<f32> {
            let mut out = vec![0.0; panels * groups * PANEL];
            for i in 0..n {
                for g in 0..groups {
                    out[((i / PANEL) * groups + g) * PANEL + i % PANEL] = value(i, g);
                }
            }
            out
        };
        let scales = PerGroup::new(spread(&|i, g| w.scales()[i * groups + g]), format.scale);
        let zeros = match w.zeros() {
            Zeros::Symmetric => PackedZeros::Symmetric,
            Zeros::Integer(z) => PackedZeros::Integer(
                spread(&|i, g| f32::from(z[i * groups + g])).into_iter().map(|z| z as u16).collect(),
            ),
            Zeros::Float(o) => PackedZeros::Float(PerGroup::new(spread(&|i, g| o[i * groups + g]), format.scale)),
        };
        let code_sums = if code_sums { sums(w, &places, &spans, per_tile) } else { Vec::new() };
        let identity = places.iter().enumerate().all(|(p, &c)| c == p as u32 || (c == FILLER && p >= k));
        let columns = (!identity).then_some(places);
        Self { format, n, k, groups, tiles, spans, codes, scales, zeros, code_sums, columns }
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

fn sums(w: &QTensor, places: &[u32], spans: &[Span], per_tile: usize) -> Vec<f32> {
    let mut out = vec![0.0; w.n().div_ceil(PANEL) * spans.len() * PANEL];
    for i in 0..w.n() {
        for (s, span) in spans.iter().enumerate() {
            let zero = w.zero_point(i, span.group).unwrap_or(0) as i32;
            let sum: i32 = places[span.tile * per_tile..][..span.columns]
                .iter()
                .map(|&c| i32::from(w.codes()[i * w.k() + c as usize]) - zero)
                .sum();
            out[((i / PANEL) * spans.len() + s) * PANEL + i % PANEL] = sum as f32;
        }
    }
    out
}
