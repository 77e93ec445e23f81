//! Codes in tiles: 16 outputs side by side, a few columns of each.
//!
//! ```text
//! panel p = outputs 16p … 16p+15         a panel is one contiguous run of tiles along k
//! ┌ 64 bytes: 16 lanes of 32 bits ────────────┐   lane l belongs to output 16p + l
//! │ lane 0 │ lane 1 │ lane 2 │  …   │ lane 15 │
//! └────────┴────────┴────────┴──────┴─────────┘
//! 8 bits:  byte b = code of column 4t + b                                     4 columns a tile
//! 4 bits:  byte b = column 8t + b (low nibble), 8t + 4 + b (high)             8 columns a tile
//! 2 bits:  byte b, bits 2i…2i+1 = column 16t + 4i + b                        16 columns a tile
//!
//! ┌ 3 bits ─────┬───────┐   16 columns a tile, two tiles of 4 bits pressed together, A and B:
//! │ 64 B: bits  │ 32 B: │   byte b: low 2 bits of a nibble of A, of B, of the other of A, of B
//! │ 0 and 1     │ bit 2 │   16 bits h a lane: in byte b of h | h << 18 bits 2 and 6 are A's, 3 and 7 B's
//! └─────────────┴───────┘
//!
//! ┌ 6 bits ─────┬─────────────┬─────────────┐
//! │ 64 B: 8 low │ 64 B: 8 low │ 64 B: bits  │   low 4 bits as tiles of 4 bits, the upper 2 as one of 2 bits
//! │ nibbles     │ nibbles     │ 4 and 5     │   16 columns a tile
//! └─────────────┴─────────────┴─────────────┘
//! ┌ 5 bits ─────┬─────────────┬─────────────┬─────────────┬─────────────┐
//! │ 64 B: 8 low nibbles, four times                       │ 64 B: bit 4 │   byte b, bit i = column 32t + 4i + b
//! └─────────────┴─────────────┴─────────────┴─────────────┴─────────────┘   32 columns a tile
//! ```
//!
//! So one load and a shift and a mask for each 32/bits gives a register of bytes whose lanes each hold four neighbours
//! along k of one output, a *quad*: the operand of an int8 dot product; and a lane shifted right by `field·bits` has one code
//! in its lowest bits: the index of a table lookup that makes it a float. In two planes a quad is the OR of two such; of 3 bits two
//! shifts, two masks and two ORs make the lanes of A and B. m = 1 and large m read the same bytes. Codes of 8 bits of which a file holds
//! only 5 or 6, around the middle or from 0 on, are held in as many; those of a file's table of sixteen by their numbers, as codes
//! of 4 bits, which kernels look up as bytes ([`Held`]).
//!
//! Columns are sorted by group (stably), and each group begins a new tile, the rest of its last tile filled with 0, where x is 0 too.
//! Kernels sum within a *span*, a group or a piece of at most [`SPAN_COLUMNS`] columns of one, and scale span by span.
//! Scales, zero points and offsets lie as `[panel][group][16]`. Those that are known to be whole multiples of halves of several
//! groups (GGUF's K types) lie so, a byte or a nibble a group and a half a block, and are multiplied when a group's are loaded.

mod per_group;
mod tile;

pub use per_group::{PanelMultiples, PerGroup, Sixteen};
pub use tile::{Held, NARROW_TABLE, TABLE, WIDE_TABLE, columns_per_tile, planes, quads, tile_bytes, value_bits};
pub(crate) use tile::{code, pressed, quad};

use super::Lines;
use super::places::Places;
use super::stored::{StoredTensor, Strides};
use crate::error::Result;
use crate::format::{Group, QTensor, WeightFormat, Zero, Zeros};
use crate::memory::{short, zeroed};
use per_group::{heights, spread};
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
    held: Held,
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

/// What errors name.
pub(super) const OP: &str = "pack";

/// Marks a place that belongs to no column.
pub const FILLER: u32 = u32::MAX;

impl CpuN16 {
    /// Bytes after the last tile that kernels may read, so that a vector may be loaded from the middle of a lane.
    pub const READABLE_AFTER: usize = 64;

    /// Packs a tensor, code by code: what the layout means. [`crate::cpu::pack`] does the same fast.
    ///
    /// `code_sums` for kernels that take activations with offsets. Panics if memory is short.
    pub fn pack(w: &QTensor, code_sums: bool) -> Self {
        let (n, k, bits) = (w.n(), w.k(), w.format().bits);
        let (per_tile, tile_bytes) = (columns_per_tile(bits), tile_bytes(bits));
        let packed = Self::assemble(&[&w.into()], code_sums, |places, _, codes| {
            for place in 0..places.tiles * per_tile {
                let column = places.columns.as_ref().map_or(place, |columns| columns[place] as usize);
                let (tile, within) = (place / per_tile, place % per_tile);
                for i in (0..n).filter(|_| column < k) {
                    let at = ((i / PANEL) * places.tiles + tile) * tile_bytes;
                    tile::set(&mut codes[at..][..tile_bytes], bits, i % PANEL, within, w.codes()[i * k + column]);
                }
            }
        });
        packed.expect("memory for the packed weight")
    }

    /// Packs tensors one below the other, which must be alike; `fill` writes what is held of the codes, `[panel][tile]`, over
    /// zeros. Error: memory is short.
    pub(crate) fn assemble(
        parts: &[&StoredTensor<'_>],
        code_sums: bool,
        fill: impl FnOnce(&Places, Held, &mut [u8]),
    ) -> Result<Self> {
        let first = parts[0];
        let (format, k, groups) = (first.format(), first.k(), first.groups());
        let n: usize = parts.iter().map(|part| part.n()).sum();
        let held = Held::of(parts);
        let places = Places::of(first, columns_per_tile(held.bits))?;
        let bytes = n.div_ceil(PANEL) * places.tiles * tile_bytes(held.bits);
        let room = bytes + Self::READABLE_AFTER;
        let mut codes = Lines::try_zeroed(room).ok_or_else(|| short::<u8>(OP, room))?;
        fill(&places, held, &mut codes.as_mut_slice::<u8>()[..bytes]);
        let tables = parts.iter().map(|part| part.scales()).collect();
        let multiples = parts.iter().filter_map(|part| part.scale_multiples()).collect();
        let scales = PerGroup::of((tables, multiples), parts, groups, format.scale)?;
        let zeros = match format.zero {
            Zero::Symmetric => PackedZeros::Symmetric,
            Zero::Integer => {
                let tables: Vec<(&[u16], Strides)> = parts.iter().filter_map(|part| part.zero_points()).collect();
                PackedZeros::Integer(spread(&tables, &heights(parts), groups)?)
            }
            Zero::Float => {
                let tables = parts.iter().filter_map(|part| part.offsets()).collect();
                let multiples = parts.iter().filter_map(|part| part.offset_multiples()).collect();
                PackedZeros::Float(PerGroup::of((tables, multiples), parts, groups, format.scale)?)
            }
        };
        let Places { tiles, spans, columns } = places;
        let mut this =
            Self { format, held, n, k, groups, tiles, spans, codes, scales, zeros, code_sums: Vec::new(), columns };
        if code_sums {
            this.code_sums = this.sums()?;
        }
        Ok(this)
    }

    /// Sums of values less their zero point. Error: memory is short.
    fn sums(&self) -> Result<Vec<f32>> {
        let (bits, spans) = (self.held.bits, self.spans.len());
        let filler = i32::from(self.held.value(0));
        let mut out = zeroed::<f32>(OP, self.panels() * spans * PANEL)?;
        let panels = self.codes().par_chunks_exact(self.panel_bytes().max(64));
        out.par_chunks_mut((spans * PANEL).max(1)).zip(panels).enumerate().for_each(|(panel, (out, codes))| {
            for (out, span) in out.chunks_exact_mut(PANEL).zip(&self.spans) {
                let mut sums = [0i32; PANEL];
                let tiles = &codes[span.tile * tile_bytes(bits)..][..span.tiles * tile_bytes(bits)];
                for tile in tiles.chunks_exact(tile_bytes(bits)) {
                    for i in 0..quads(bits) {
                        for (sum, codes) in sums.iter_mut().zip(quad(tile, bits, i).as_chunks::<4>().0) {
                            *sum += codes.iter().map(|&held| i32::from(self.held.value(held))).sum::<i32>();
                        }
                    }
                }
                for (lane, (out, sum)) in out.iter_mut().zip(sums).enumerate().take(self.n - panel * PANEL) {
                    let zero = match &self.zeros {
                        PackedZeros::Symmetric => self.middle() as i32,
                        PackedZeros::Integer(z) => i32::from(z[(panel * self.groups + span.group) * PANEL + lane]),
                        PackedZeros::Float(_) => 0,
                    };
                    let filled = span.tiles * columns_per_tile(bits) - span.columns;
                    *out = (sum - zero * span.columns as i32 - filler * filled as i32) as f32;
                }
            }
        });
        Ok(out)
    }

    /// The canonical tensor again; of tensors that have one scale each, one below the other, it is one with a scale a row.
    pub fn unpack(&self) -> QTensor {
        let (bits, per_tile) = (self.held.bits, self.columns_per_tile());
        let mut codes = vec![0u8; self.n * self.k];
        let mut index = vec![0u32; self.k];
        for span in &self.spans {
            for p in span.tile * per_tile..(span.tile + span.tiles) * per_tile {
                let column = self.column(p);
                if column < self.k {
                    index[column] = span.group as u32;
                    for i in 0..self.n {
                        let at = (i / PANEL) * self.panel_bytes() + p / per_tile * self.tile_bytes();
                        let held = code(&self.codes()[at..], bits, i % PANEL, p % per_tile);
                        codes[i * self.k + column] = self.held.value(held).wrapping_add(self.held.base);
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
        let one = |values: &[f32]| values.iter().all(|v| *v == values[0]);
        let is_one = match &zeros {
            Zeros::Symmetric => one(&scales),
            Zeros::Integer(z) => one(&scales) && z.iter().all(|v| *v == z[0]),
            Zeros::Float(o) => one(&scales) && one(o),
        };
        let format = match self.format.group {
            Group::Tensor if !is_one => WeightFormat { group: Group::Channel, ..self.format },
            _ => self.format,
        };
        QTensor::new(format, [self.n, self.k], codes, scales, zeros, Some(index))
            .unwrap_or_else(|e| unreachable!("a packed tensor was valid before it was packed: {e}"))
    }

    /// What the codes of an output stand for, each rounded to f32 once, as [`StoredTensor::values`] has them: row `i` below
    /// [`CpuN16::n`], into k elements.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        let (bits, per_tile, panel, lane) = (self.held.bits, self.columns_per_tile(), i / PANEL, i % PANEL);
        let tiles = &self.codes()[panel * self.panel_bytes()..][..self.panel_bytes()];
        for span in &self.spans {
            let at = (panel * self.groups + span.group) * PANEL + lane;
            let scale = f64::from(self.scales.get(at));
            let (zero, offset) = match &self.zeros {
                PackedZeros::Symmetric => (f64::from(self.middle()), 0.0),
                PackedZeros::Integer(z) => (f64::from(z[at]), 0.0),
                PackedZeros::Float(o) => (0.0, f64::from(o.get(at))),
            };
            let first = span.tile * per_tile;
            for place in first..first + span.columns {
                let (tile, within) = (place / per_tile, place % per_tile);
                let code = self.held.value(code(&tiles[tile * self.tile_bytes()..], bits, lane, within));
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

    /// What tiles hold of the codes.
    pub fn held(&self) -> Held {
        self.held
    }

    /// Bits of a code in a tile, or of its number in a table.
    #[inline]
    pub fn bits(&self) -> u32 {
        self.held.bits
    }

    /// The values of such numbers.
    pub fn table(&self) -> Option<[u8; 16]> {
        self.held.table
    }

    /// The value of the code that stands for zero in a symmetric format.
    #[inline]
    pub fn middle(&self) -> u32 {
        self.format.middle() - u32::from(self.held.base)
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
    #[inline]
    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Tiles along k.
    pub fn tiles(&self) -> usize {
        self.tiles
    }

    /// Columns a tile, filler included.
    #[inline]
    pub fn columns_per_tile(&self) -> usize {
        columns_per_tile(self.held.bits)
    }

    /// Bytes of a tile.
    pub fn tile_bytes(&self) -> usize {
        tile_bytes(self.held.bits)
    }

    /// Bytes of the tiles of a panel.
    #[inline]
    pub fn panel_bytes(&self) -> usize {
        self.tiles * self.tile_bytes()
    }

    /// Places along k, filler included: the length that activations are brought to.
    pub fn places(&self) -> usize {
        self.tiles * self.columns_per_tile()
    }

    /// Spans in the order of their tiles; they cover every tile once.
    #[inline]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Tiles, `[panel][tile]`, and [`CpuN16::READABLE_AFTER`] bytes that mean nothing.
    #[inline]
    pub fn codes(&self) -> &[u8] {
        self.codes.as_slice()
    }

    /// Scales, `[panel][group][16]`.
    #[inline]
    pub fn scales(&self) -> &PerGroup {
        &self.scales
    }

    /// Zeros, `[panel][group][16]`.
    #[inline]
    pub fn zeros(&self) -> &PackedZeros {
        &self.zeros
    }

    /// Sums of codes, less the zero point where there is one, `[panel][span][16]`; empty if they were not asked for.
    #[inline]
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
        self.panels() * self.panel_bytes() + self.scales.bytes() + zeros + self.code_sums.len() * 4 + columns
    }
}
