//! Products of exact activations in AMX tiles: x as one to three bf16 that add up to it.
//!
//! ```text
//! x = 2ᵉ·(x₁ + x₂ + x₃)               e of the row; bf16 have 8 bits, f16 11 and f32 24: one, two or three of them are exact
//! buffer = code − zero                                      bf16, exact
//! sums = Σ x₃·buffer + Σ x₂·buffer + Σ x₁·buffer            f32, tdpbf16ps; the small ones first: they round least
//! y += sB·2ᵉ·sums
//! ```
//!
//! `tdpbf16ps` takes denormal numbers for zero: with the greatest magnitude of each row between 1 and 4, what is below 2⁻¹²⁶ of it
//! counts for nothing. Offsets would be added to sums of codes many times as large as the weights, which the bound leaves no room
//! for. Columns 0 and 2 of each four make a pair, and 1 and 3, as in `a16_avx512bf16`, which converts the weights.

use super::a16_avx512bf16::{Converted, convert};
use super::amx::{self, AddFn, Operands, Piece, Pieces, RowTile, TILE};
use super::blocking::with_buffers;
use super::{Input, Output, Packed, Rows, Scratch, at_least, exact, needs};
use crate::cpu::Cpu;
use crate::cpu::isa::{Caps, Isa, per_isa};
use crate::cpu::x86::amx::{ROWS, Sums};
use crate::format::Zero;
use crate::kernel::{Problem, Reason};
use crate::layout::cpu_n16::{CpuN16, FILLER, PANEL};
use crate::tensor::Float;
use std::ops::Range;

/// Its name in the table of kernels.
pub(super) const NAME: &str = "a16_amx";

/// Whether this kernel serves a problem; else why not.
pub(super) fn supports(caps: &Caps, problem: &Problem) -> Result<(), Reason> {
    exact(problem)?;
    needs(caps, Isa::Amx)?;
    let Some(format) = problem.format else {
        return Err(Reason("multiplies codes, the weights are dense".into()));
    };
    if format.weight.zero == Zero::Float {
        return Err(Reason("multiplies integers, the weights have float offsets".into()));
    }
    at_least(least_rows(problem), problem)
}

/// Fewer rows are served faster by multiply-adds of vectors.
///
/// A tile costs as much for one row as for 16, and each part of x as much again. Groups of 16 and 32 columns fill tiles with
/// less, and their sums are scaled the more often. (Measured on an Xeon: `docs/decisions/0023`.)
pub(super) fn least_rows(problem: &Problem) -> usize {
    let (parts, group) = (parts(problem.x), amx::group_len(problem));
    10 + 3 * parts + parts * 150 * 150 / (group * group)
}

/// Whether this kernel serves the windows of a convolution; else why not.
///
/// Vectors read windows where they lie. Here they are gathered, and each position is cut into its parts again for every window that sees it.
/// Only many outputs pay for that, and more of them, the more often sums are scaled. (Measured on a Xeon: `docs/decisions/0023`.)
pub(super) fn supports_windows(problem: &Problem) -> Result<(), Reason> {
    let (parts, group, outputs) = (parts(problem.x) as f32, amx::group_len(problem) as f32, problem.n as f32);
    // What gathering costs, and an output, in what an output costs by vectors.
    let (windows, output) = (30.0 + 19.0 * parts, 0.2 + 0.09 * parts + (8.0 + 6.0 * parts) / group);
    if windows + output * outputs <= outputs {
        return Ok(());
    }
    Err(Reason(match output < 1.0 {
        true => {
            format!("pays from {:.0} outputs of a group of channels on, there are {outputs}", windows / (1.0 - output))
        }
        false => "gathers windows, which vectors read where they lie".into(),
    }))
}

/// Numbers of bf16 that a number of x is the sum of.
fn parts(x: Float) -> usize {
    match x {
        Float::BF16 => 1,
        Float::F16 => 2,
        Float::F32 => 3,
    }
}

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>) {
    let Packed::Quantized(w, _) = input.w else { unreachable!("selected for quantised weights only") };
    let parts = parts(input.x.dtype());
    let operands = Parts { isa: cpu.caps().isa, x: input.x, w, parts };
    amx::run(cpu, scratch, input.m, w, y, (&Pieces::new(w, 2, parts), &operands));
}

/// x as parts in bf16, w as bf16.
struct Parts<'a> {
    isa: Isa,
    x: Rows<'a>,
    w: &'a CpuN16,
    parts: usize,
}

impl Operands for Parts<'_> {
    const FLOAT: bool = true;
    /// 2ᵉ.
    type Row = f32;
    /// Scales.
    type Outputs = [[f32; PANEL]; 2];

    fn pack(&self, rows: Range<usize>, x: &RowTile<'_>, scales: &mut [f32]) {
        let (w, k, places) = (self.w, self.w.k(), self.w.places());
        with_buffers([k + k.div_ceil(2) + places, places.div_ceil(2)], |room, line| {
            let (row, room) = room.split_at_mut(k);
            let (room, ordered) = room.split_at_mut(k.div_ceil(2));
            let ordered = &mut ordered[..places];
            let line: &mut [u32] = bytemuck::cast_slice_mut(line);
            for r in 0..ROWS {
                let Some(at) = rows.clone().nth(r) else {
                    line.fill(0);
                    (0..self.parts).for_each(|part| x.put(bytemuck::cast_slice(line), r, part));
                    continue;
                };
                self.x.widen(at, row, room);
                match w.columns() {
                    None => {
                        ordered[..k].copy_from_slice(row);
                        ordered[k..].fill(0.0);
                    }
                    Some(columns) => {
                        for (v, &c) in ordered.iter_mut().zip(columns) {
                            *v = if c == FILLER { 0.0 } else { row[c as usize] };
                        }
                    }
                }
                let exponent = exponent(self.isa, ordered).clamp(1, 253);
                scales[r..].iter_mut().step_by(ROWS).for_each(|scale| *scale = f32::from_bits(exponent << 23));
                scale(self.isa, ordered, f32::from_bits((254 - exponent) << 23));
                for part in (0..self.parts).rev() {
                    take_part(self.isa, ordered, line);
                    x.put(bytemuck::cast_slice(line), r, part);
                }
            }
        });
    }

    unsafe fn convert(&self, panel: usize, piece: &Piece, out: &mut [u8]) {
        let (mut scales, pairs) = ([0.0; PANEL], bytemuck::cast_slice_mut(out));
        let out = Converted { pairs, scales: &mut scales, stride: PANEL };
        // SAFETY: promised to this function.
        unsafe { convert(self.w)(self.w, panel, piece.range(), out) };
    }

    unsafe fn outputs(&self, panels: [usize; 2], piece: &Piece) -> [[f32; PANEL]; 2] {
        // SAFETY: promised to this function.
        unsafe { x86::outputs(self.w, panels, piece) }
    }

    fn add(&self) -> AddFn<Self> {
        x86::add
    }
}

per_isa! {
    /// The biased exponent of the greatest magnitude.
    fn exponent(x: &[f32]) -> u32 {
        x.iter().fold(0, |greatest: u32, v| greatest.max(v.to_bits() & 0x7fff_ffff)) >> 23
    }
}

per_isa! {
    fn scale(x: &mut [f32], by: f32) {
        x.iter_mut().for_each(|v| *v *= by);
    }
}

per_isa! {
    /// Takes from each number the bf16 that begins its bits, and leaves what it lacks; two of them, 0 and 2 of each four columns,
    /// or 1 and 3, make an element of `out`.
    fn take_part(x: &mut [f32], out: &mut [u32]) {
        let part = |v: &mut f32| {
            let bits = v.to_bits();
            let special = bits & 0x7f80_0000 == 0x7f80_0000;
            // A NaN stays one without its lower bits.
            let taken = bits & 0xffff_0000 | if bits & 0x7fff_ffff > 0x7f80_0000 { 0x0040_0000 } else { 0 };
            *v = if special { 0.0 } else { *v - f32::from_bits(taken) };
            taken
        };
        for (x, out) in x.as_chunks_mut::<4>().0.iter_mut().zip(out.as_chunks_mut::<2>().0) {
            let [a, b, c, d] = x;
            *out = [part(a) >> 16 | part(c), part(b) >> 16 | part(d)];
        }
    }
}

mod x86 {
    use super::{CpuN16, Piece, ROWS, Sums, TILE};
    use crate::cpu::x86::avx512::load_per_group;
    use crate::layout::cpu_n16::PANEL;
    use std::arch::x86_64::*;

    /// See [`super::Operands::outputs`].
    #[target_feature(enable = "avx512f,f16c")]
    pub(super) fn outputs(w: &CpuN16, panels: [usize; 2], piece: &Piece) -> [[f32; PANEL]; 2] {
        let mut scales = [[0.0; PANEL]; 2];
        for p in 0..2 {
            let of_panel = load_per_group(w.scales(), (panels[p] * w.groups() + piece.group) * PANEL);
            // SAFETY: 16 numbers.
            unsafe { _mm512_storeu_ps(scales[p].as_mut_ptr(), of_panel) };
        }
        scales
    }

    /// See [`super::AddFn`].
    #[target_feature(enable = "avx512f")]
    pub(super) fn add(sums: &Sums, scales: &[[f32; PANEL]; 2], rows: &[f32; ROWS], c: &mut [f32; ROWS * TILE]) {
        for p in 0..2 {
            // SAFETY: 16 numbers each, of the 16 of each row and panel.
            unsafe {
                let scales = _mm512_loadu_ps(scales[p].as_ptr());
                for r in 0..ROWS {
                    let c = c.as_mut_ptr().add((r * 2 + p) * PANEL);
                    let sum = _mm512_loadu_ps(sums.0.as_ptr().add(p * ROWS + r).cast());
                    // In this order nothing leaves the range of f32 that y does not leave.
                    let sum = _mm512_mul_ps(sum, scales);
                    _mm512_storeu_ps(c, _mm512_fmadd_ps(sum, _mm512_set1_ps(rows[r]), _mm512_loadu_ps(c)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_number() {
        let mut x = [1.0f32, -3.25, 0.1, f32::MIN_POSITIVE * 1e10, -1.999_999_9, 0.333_333_34, 0.0, 1.5e-20];
        let whole = x;
        let mut sums = [0.0f64; 8];
        for _ in 0..3 {
            let mut pairs = [0; 4];
            take_part(Isa::Plain, &mut x, &mut pairs);
            for (four, two) in pairs.as_chunks::<2>().0.iter().enumerate() {
                for (i, column) in [0, 2, 1, 3].into_iter().enumerate() {
                    let bits = if i % 2 == 0 { two[i / 2] << 16 } else { two[i / 2] & 0xffff_0000 };
                    sums[four * 4 + column] += f64::from(f32::from_bits(bits));
                }
            }
        }
        assert_eq!(sums, whole.map(f64::from));
        assert_eq!(x, [0.0; 8]);
    }

    #[test]
    fn infinity_and_nan_are_in_the_first_part_alone() {
        let mut x = [f32::INFINITY, f32::from_bits(0x7f80_0001), f32::NEG_INFINITY, f32::NAN];
        let mut pairs = [0; 2];
        take_part(Isa::Plain, &mut x, &mut pairs);
        let part = |bits: u32| f32::from_bits(bits);
        assert_eq!([part(pairs[0] << 16), part(pairs[0] & 0xffff_0000)], [f32::INFINITY, f32::NEG_INFINITY]);
        assert!(part(pairs[1] << 16).is_nan() && part(pairs[1] & 0xffff_0000).is_nan());
        assert_eq!(x, [0.0; 4]);
    }
}
