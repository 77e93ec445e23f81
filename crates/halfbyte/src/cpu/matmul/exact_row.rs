//! One row of exact activations as integers: the driver of `a16_avx512vnni`, `a16_avxvnni` and `a16_avx2madd`.
//!
//! A block of x, up to 64 columns of a group, becomes integers of 32 bits: numbers of fixed point, of which the greatest takes all bits.
//! Their digits, four of 8 bits or two of 16, share the unpacked codes; sums are exact in int32.
//!
//! ```text
//! for each block:  X = x·2^(31 − e), rounded                                                              (once)
//!     what is lost of elements so small that it is more than 2⁻²¹ of them is a block of its own          (and so on)
//! for each panel, for each block:
//!     low, high = Σ (code − zero)·(lower 16 bits of X), Σ (code − zero)·(upper 16 bits), both with sign
//!     y += scale·2^(e − 15)·(low/65536 + high) [+ offset·Σx]
//! ```
//!
//! So no element of x is further from what is multiplied than 2⁻²¹ of it, however much greater its neighbours are; halves are multiplied
//! exactly but where a block holds some that are 2²⁰ times as great as others. Float offsets are centred: whole multiples of the scale
//! go to the codes as zero points, so that sums of codes and offsets do not cancel each other where weights are small.

use super::blocking::{RowPanels, Steps, Tasks, with_buffers};
use super::{Input, Output, Packed, Scratch, exact, exact_act, needs};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::isa::{Caps, Isa};
use crate::kernel::{Problem, Reason};
use crate::layout::cpu_n16::{CpuN16, PANEL, PackedZeros, Span};

/// From so many rows on weights that became floats serve several.
pub(super) const MORE_ROWS: usize = 2;

/// Places of a block at most.
pub(super) const BLOCK: usize = 64;

/// Panels that a call takes at most: one a call costs small weights a tenth.
const CALL_PANELS: usize = 4;

/// Places of a row that a thread makes integers of at least.
const LEAST_PLACES: usize = 2048;

/// A run of places as integers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// First tile, and number of tiles.
    pub tile: usize,
    pub tiles: usize,
    /// The group whose scale and zero hold.
    pub group: usize,
    /// What the upper 16 bits are multiples of; NaN where x is not finite.
    pub scale: f32,
    /// Sum of x, for offsets, once for all blocks of these places.
    pub total: f32,
    /// Minus the sums of the lower and of the upper 16 bits, of symmetric weights times the middle code.
    pub less: [i32; 2],
}

/// A part of a row of x as integers, for the weight that it was made for.
#[derive(Debug, Default)]
pub(super) struct FixedPoint {
    /// Each within the weight's tiles and groups.
    pub blocks: Vec<Block>,
    /// Digits of the places of each block, four places after four, 16 bytes in the kernel's order.
    pub digits: Vec<i32>,
}

/// A block that becomes integers.
#[derive(Clone, Copy)]
pub(super) struct Places {
    /// First tile, number of tiles, group.
    pub tile: usize,
    pub tiles: usize,
    pub group: usize,
}

/// 2^(31 − `e`) is what makes integers of a block.
#[derive(Clone, Copy)]
pub(super) struct Exponent {
    pub e: i32,
    /// Whether all of x is.
    pub finite: bool,
}

impl Exponent {
    /// Of a block whose greatest element, without its sign, has these bits.
    pub fn of(greatest: u32) -> Self {
        // The integer is at most 0x7f7f_7f00, so that the uppermost digit has room for what is carried from those below (0x0080_8080): of a
        // mantissa from 0xfe_feff on, the next power of two. As multiples of 2⁻¹⁴⁹ all floats are exact.
        let e = (((greatest + 0x1_0101) >> 23) as i32 - 126).max(-118);
        Self { e, finite: greatest < f32::INFINITY.to_bits() }
    }

    /// A block of which x has this sum, the lower and the upper 16 bits these.
    pub fn block(self, w: &CpuN16, places: Places, total: f32, sums: [i32; 2]) -> Block {
        let middle = if let PackedZeros::Symmetric = w.zeros() { w.middle() as i32 } else { 1 };
        // Below 2⁻¹²⁶ too.
        let scale = if self.finite { f64::from_bits(((self.e - 15 + 1023) as u64) << 52) as f32 } else { f32::NAN };
        let Places { tile, tiles, group } = places;
        Block { tile, tiles, group, scale, total, less: sums.map(|sum| -middle * sum) }
    }
}

/// Adds a block of places, which x holds in their order, and blocks of what is lost.
///
/// # Safety
/// The processor has the kernel's instruction set.
type AddBlockFn = unsafe fn(w: &CpuN16, places: Places, x: &[f32], out: &mut FixedPoint);

/// Writes the products of a row, in its parts, with some panels, which follow each other, to `c` `[panel][16]`, and prefetches codes so many
/// bytes ahead.
///
/// # Safety
/// The processor has the kernel's instruction set; x was made for this weight.
pub(super) type PanelsFn = unsafe fn(w: &CpuN16, first: usize, x: &[FixedPoint], ahead: usize, c: &mut [f32]);

/// What a kernel does with its instruction set.
pub(super) struct Functions {
    pub add_block: AddBlockFn,
    /// That of a form.
    pub panels: fn(form: u32) -> PanelsFn,
    /// Bytes ahead that codes of a form are prefetched.
    pub ahead: fn(cpu: &Cpu, form: u32) -> usize,
}

/// Whether a kernel of an instruction set serves a problem; else why not.
pub(super) fn supports(caps: &Caps, problem: &Problem, isa: Isa) -> Result<(), Reason> {
    exact(problem)?;
    needs(caps, isa)?;
    if problem.format.is_none() {
        return Err(Reason("multiplies codes, the weights are dense".into()));
    }
    match problem.m {
        0 | 1 => Ok(()),
        m => Err(Reason(format!("multiplies one row, x has {m}"))),
    }
}

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>, functions: &Functions) {
    let Packed::Quantized(w, _) = input.w else { unreachable!("selected for quantised weights only") };
    if input.m == 0 {
        return;
    }
    let rows = RowPanels::new(1, &[1]);
    scratch.x.ensure(w.places() * 4);
    let x = scratch.x.as_mut_slice::<f32>();
    let x = &mut x[..w.places()];
    exact_act::pack(cpu, input, exact_act::Weights::Quantized(w), rows, 0, x);
    let (spans, x) = (w.spans(), &*x);
    let parts = (w.places() / LEAST_PLACES).min(cpu.threads().count()).clamp(1, spans.len().max(1));
    scratch.row.resize_with(parts.max(scratch.row.len()), FixedPoint::default);
    let row = &mut scratch.row[..parts];
    let out = DisjointMut::new(row);
    cpu.threads().run(parts, &|i| {
        let spans = &spans[spans.len() * i / parts..spans.len() * (i + 1) / parts];
        // SAFETY: each part is one task's.
        fixed_point(w, spans, x, &mut unsafe { out.range(i..i + 1) }[0], functions.add_block);
    });
    let form = w.held().form();
    let (x, panels, ahead) = (&*row, (functions.panels)(form), (functions.ahead)(cpu, form));
    let tasks = Tasks::new(rows, w.places() * 4, w.panels(), CALL_PANELS, cpu.threads().count());
    cpu.threads().run(tasks.count, &|i| {
        let steps = Steps { panels: tasks.get(i).1, wide: CALL_PANELS };
        with_buffers([CALL_PANELS * PANEL, 0], |c, _| {
            for step in 0..steps.count() {
                let (panel, width) = steps.get(step);
                let c = &mut c[..width * PANEL];
                // SAFETY: `select` found the instruction set, x was made for this weight; tasks cover disjoint outputs.
                unsafe {
                    panels(w, panel, x, ahead, c);
                    y.store(0, panel * PANEL, c);
                }
            }
        });
    });
}

/// Those places of x, which is in their order, that belong to some spans as integers.
fn fixed_point(w: &CpuN16, spans: &[Span], x: &[f32], out: &mut FixedPoint, add_block: AddBlockFn) {
    let per_tile = w.columns_per_tile();
    out.blocks.clear();
    out.digits.clear();
    for span in spans {
        for tile in (0..span.tiles).step_by(BLOCK / per_tile) {
            let tiles = (BLOCK / per_tile).min(span.tiles - tile);
            let x = &x[(span.tile + tile) * per_tile..][..tiles * per_tile];
            let places = Places { tile: span.tile + tile, tiles, group: span.group };
            // SAFETY: `select` found the instruction set.
            unsafe { add_block(w, places, x, out) };
        }
    }
}
