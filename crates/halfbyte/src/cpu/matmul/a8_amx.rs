//! Products of int8 by int8 in AMX tiles, x quantised on the fly.
//!
//! ```text
//! buffer = code − zero                                      int8; of codes of 8 bits code − 128
//! sums = Σ qA·buffer                                        int32, exact                                        tdpbssd
//! y += sB·sA·(sums + (zero − 128)·−ΣqA) [+ sB·oA·ΣqB'] [+ oB·ΣxA]          the second summand with codes of 8 bits alone
//! ```
//!
//! The sums are those of a whole span, and y has the bits that `a8_avx512vnni` gives.

use super::amx::{self, AddFn, Operands, Piece, Pieces, RowTile, TILE};
use super::blocking::with_buffers;
use super::encode::{Pixels, encode_row};
use super::quantized_act::RowSpan;
use super::{Input, Output, Packed, Rows, Scratch, at_least, needs, quantized};
use crate::cpu::Cpu;
use crate::cpu::isa::{Caps, Isa};
use crate::cpu::x86::amx::{ROWS, Sums};
use crate::format::{Act, Zero};
use crate::kernel::{Problem, Reason};
use crate::layout::cpu_n16::{CpuN16, PANEL, TABLE};
use std::ops::Range;

/// Whether this kernel serves a problem; else why not.
pub(super) fn supports(caps: &Caps, problem: &Problem) -> Result<(), Reason> {
    quantized(problem)?;
    needs(caps, Isa::Amx)?;
    at_least(least_rows(problem), problem)
}

/// Fewer rows are served faster by dot products of vectors: a tile costs as much for one row as for 16, and sums of short groups
/// are scaled the more often. (Measured on an Xeon: `docs/decisions/0023`.)
pub(super) fn least_rows(problem: &Problem) -> usize {
    28 + 192 / amx::group_len(problem)
}

pub(super) fn run(cpu: &Cpu, scratch: &mut Scratch, input: &Input<'_>, y: &Output<'_>) {
    let Packed::Quantized(w, act) = input.w else { unreachable!("selected for quantised weights only") };
    let operands = Bytes { cpu, x: input.x, w, act: *act, whole: Pixels::new(w, *act, 1) };
    amx::run(cpu, scratch, input.m, w, y, (&Pieces::new(w, 1, 1), &operands));
}

/// x and w as bytes.
struct Bytes<'a> {
    cpu: &'a Cpu,
    x: Rows<'a>,
    w: &'a CpuN16,
    act: Act,
    /// Whole rows as if they were pixels of one position.
    whole: Pixels<'a>,
}

impl Operands for Bytes<'_> {
    const FLOAT: bool = false;
    type Row = RowSpan;
    type Outputs = Outputs;

    fn pack(&self, rows: Range<usize>, x: &RowTile<'_>, numbers: &mut [RowSpan]) {
        let (k, places) = (self.whole.channels, self.whole.places);
        with_buffers([k.max(places), places / 4], |room, line| {
            let line: &mut [u32] = bytemuck::cast_slice_mut(line);
            for r in 0..ROWS {
                match (self.x, rows.clone().nth(r)) {
                    (_, None) => {
                        line.fill(0);
                        numbers[r..].iter_mut().step_by(ROWS).for_each(|numbers| *numbers = RowSpan::default());
                    }
                    (Rows::Matrix(x), Some(row)) => {
                        let row = self.whole.ordered(x, row, room);
                        encode_row(self.cpu, &self.whole, row, bytemuck::cast_slice_mut(line), &mut numbers[r..], ROWS);
                    }
                    (Rows::Encoded(pixels), Some(row)) => pixels.row(row, line, ROWS, &mut numbers[r..]),
                    (Rows::Patches(..) | Rows::Placed(_), _) => {
                        unreachable!("pixels are quantised before their windows are gathered")
                    }
                }
                x.put(bytemuck::cast_slice(line), r, 0);
            }
        });
    }

    unsafe fn convert(&self, panel: usize, piece: &Piece, out: &mut [u8]) {
        // SAFETY: promised to this function.
        unsafe {
            match self.w.held().form() {
                2 => x86::convert::<2>(self.w, panel, piece, out),
                3 => x86::convert::<3>(self.w, panel, piece, out),
                4 => x86::convert::<4>(self.w, panel, piece, out),
                5 => x86::convert::<5>(self.w, panel, piece, out),
                6 => x86::convert::<6>(self.w, panel, piece, out),
                8 => x86::convert::<8>(self.w, panel, piece, out),
                _ => x86::convert::<TABLE>(self.w, panel, piece, out),
            }
        }
    }

    unsafe fn outputs(&self, panels: [usize; 2], piece: &Piece) -> Outputs {
        // SAFETY: promised to this function.
        unsafe { x86::outputs(self.w, panels, piece, self.act == Act::A8Asym) }
    }

    fn add(&self) -> AddFn<Self> {
        let format = self.w.format();
        let zeros = self.w.bits() == 8 && format.zero != Zero::Symmetric;
        match (zeros, self.act == Act::A8Asym, format.zero == Zero::Float) {
            (false, false, false) => x86::add::<false, false, false>,
            (false, false, true) => x86::add::<false, false, true>,
            (false, true, false) => x86::add::<false, true, false>,
            (true, false, false) => x86::add::<true, false, false>,
            (true, true, false) => x86::add::<true, true, false>,
            // What is not there is zero.
            _ => x86::add::<true, true, true>,
        }
    }
}

/// What is added to the sums of two panels, and what they are scaled by.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Outputs {
    scales: [[f32; PANEL]; 2],
    /// Zero points less 128, times `−ΣqA`.
    zeros: [[i32; PANEL]; 2],
    /// Sums of codes times their scale, times the offset of x.
    sums: [[f32; PANEL]; 2],
    /// Offsets, times the sum of x.
    offsets: [[f32; PANEL]; 2],
}

mod x86 {
    use super::{CpuN16, Outputs, Piece, ROWS, RowSpan, Sums, TILE};
    use crate::cpu::x86::avx512::{codes_as_bytes, load_f32, load_per_group, load_u16};
    use crate::layout::cpu_n16::{PANEL, PackedZeros};
    use std::arch::x86_64::*;

    /// What is subtracted from codes of 8 bits, so that they are int8 whatever their zero point.
    const MIDDLE: i32 = 128;

    #[target_feature(enable = "avx512f,avx512bw")]
    pub(super) fn convert<const FORM: u32>(w: &CpuN16, panel: usize, piece: &Piece, out: &mut [u8]) {
        let zero = match w.zeros() {
            _ if FORM == 8 => _mm512_set1_epi8(MIDDLE as i8),
            PackedZeros::Symmetric => _mm512_set1_epi8(w.middle() as i8),
            PackedZeros::Integer(zeros) => {
                let zero = load_u16(&zeros[(panel * w.groups() + piece.group) * PANEL..]);
                let two = _mm512_or_si512(zero, _mm512_slli_epi32::<8>(zero));
                _mm512_or_si512(two, _mm512_slli_epi32::<16>(two))
            }
            PackedZeros::Float(_) => _mm512_setzero_si512(),
        };
        codes_as_bytes::<FORM>(w, panel, piece.range(), zero, out);
    }

    /// See [`super::Operands::outputs`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,f16c")]
    pub(super) fn outputs(w: &CpuN16, panels: [usize; 2], piece: &Piece, x_offsets: bool) -> Outputs {
        let mut outputs: Outputs = bytemuck::Zeroable::zeroed();
        for p in 0..2 {
            let at = (panels[p] * w.groups() + piece.group) * PANEL;
            let scales = load_per_group(w.scales(), at);
            let mut zero = _mm512_setzero_si512();
            let (mut offsets, mut sums) = (_mm512_setzero_ps(), _mm512_setzero_ps());
            match w.zeros() {
                PackedZeros::Symmetric => zero = _mm512_set1_epi32(MIDDLE),
                PackedZeros::Integer(zeros) => zero = load_u16(&zeros[at..]),
                PackedZeros::Float(of_groups) => offsets = load_per_group(of_groups, at),
            }
            zero = _mm512_sub_epi32(zero, _mm512_set1_epi32(MIDDLE));
            if x_offsets {
                let at = (panels[p] * w.spans().len() + piece.span) * PANEL;
                sums = _mm512_mul_ps(scales, load_f32(&w.code_sums()[at..]));
            }
            // Codes of fewer bits come less their zero point.
            if w.bits() < 8 {
                zero = _mm512_setzero_si512();
            }
            // SAFETY: 16 numbers each.
            unsafe {
                _mm512_storeu_ps(outputs.scales[p].as_mut_ptr(), scales);
                _mm512_storeu_si512(outputs.zeros[p].as_mut_ptr().cast(), zero);
                _mm512_storeu_ps(outputs.sums[p].as_mut_ptr(), sums);
                _mm512_storeu_ps(outputs.offsets[p].as_mut_ptr(), offsets);
            }
        }
        outputs
    }

    /// See [`super::AddFn`].
    #[target_feature(enable = "avx512f")]
    pub(super) fn add<const ZEROS: bool, const X_OFFSETS: bool, const OFFSETS: bool>(
        sums: &Sums,
        outputs: &Outputs,
        rows: &[RowSpan; ROWS],
        c: &mut [f32; ROWS * TILE],
    ) {
        for p in 0..2 {
            // SAFETY: 16 numbers each, of the 16 of each row and panel.
            unsafe {
                let scales = _mm512_loadu_ps(outputs.scales[p].as_ptr());
                let zeros = _mm512_loadu_si512(outputs.zeros[p].as_ptr().cast());
                let code_sums = _mm512_loadu_ps(outputs.sums[p].as_ptr());
                let offsets = _mm512_loadu_ps(outputs.offsets[p].as_ptr());
                for r in 0..ROWS {
                    let (row, c) = (&rows[r], c.as_mut_ptr().add((r * 2 + p) * PANEL));
                    let mut sum = _mm512_loadu_si512(sums.0.as_ptr().add(p * ROWS + r).cast());
                    if ZEROS {
                        sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(zeros, _mm512_set1_epi32(row.minus_sum)));
                    }
                    let sum = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(row.scale));
                    let mut y = _mm512_fmadd_ps(sum, scales, _mm512_loadu_ps(c));
                    if X_OFFSETS {
                        y = _mm512_fmadd_ps(code_sums, _mm512_set1_ps(row.offset), y);
                    }
                    if OFFSETS {
                        y = _mm512_fmadd_ps(offsets, _mm512_set1_ps(row.total), y);
                    }
                    _mm512_storeu_ps(c, y);
                }
            }
        }
    }
}
