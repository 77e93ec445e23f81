//! Products with quantised activations (w4a8, w8a8): what the kernels for them have in common.

use super::kernel::Answer;
use super::quantize_activations::Form as QuantizedForm;
use super::wna16;
use crate::cuda::tiled::Form;
use crate::format::Act;
use crate::kernel::{Problem, Reason};
use crate::layout::cuda_wna16::Atom;

/// What x has beside codes and scales.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// Sums of codes, for weights with zero points or offsets.
    pub sums: bool,
    /// Offsets.
    pub offsets: bool,
    /// They lie pixel by pixel, four numbers a group, and come in windows (HB_CONV).
    pub pixels: bool,
}

/// Columns of one scale that 32 bits of sums are sure to hold.
pub(super) const MOST_COLUMNS: usize = 1 << 16;

/// Columns up to which the sources divide by the ratio of two groups with one multiplication.
pub(in crate::cuda) const MOST_K: usize = 1 << 21;

/// The form of atoms (`held` if that is known) and terms, or why there is none.
pub fn form(held: Option<Atom>, problem: &Problem) -> std::result::Result<(Atom, Terms), Reason> {
    let refuse = |why: &str| Err(Reason(why.into()));
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense") };
    if !format.act.is_quantized() {
        return refuse("multiplies quantised activations (a8), the format says exact ones");
    }
    wna16::sized(problem)?;
    let atom = Atom::of_format(format, problem.k).map_err(|why| Reason(why.to_string()))?;
    let atom = held.unwrap_or(atom);
    Ok((atom, Terms { sums: atom.zero || atom.offset, offsets: format.act == Act::A8Asym, pixels: false }))
}

/// The form of a problem as the kernels have it, or why they do not multiply it.
pub(super) fn gemm_form(held: Option<Atom>, problem: &Problem) -> Answer<Form> {
    let (atom, terms) = form(held, problem)?;
    if atom.has_rows() && problem.k > MOST_COLUMNS {
        return Err(Reason(format!("adds up to {MOST_COLUMNS} columns of one scale, k is {}", problem.k)));
    }
    if problem.k > MOST_K {
        return Err(Reason(format!("multiplies up to {MOST_K} columns, k is {}", problem.k)));
    }
    // Whatever type x had, its codes are multiplied.
    Ok(Form { atom, terms, x: atom.scale, out: problem.y })
}

/// How the codes of x lie.
pub(super) fn x_form(problem: &Problem, Form { atom, terms, .. }: &Form) -> QuantizedForm {
    let group = problem.format.map_or(problem.k, |format| format.weight.activation_group().len(problem.k)).max(1);
    // Zero points and offsets need the sums of an atom's groups, which may be parts of one. So many groups of 16 are none that a
    // ratio counts.
    let piece = if (terms.sums && atom.group > 0) || atom.group == 16 { atom.group } else { group };
    QuantizedForm { m: problem.m, k: problem.k, group, piece, sums: terms.sums, offsets: terms.offsets, pixels: false }
}

/// What the sources divide the number of a group of atoms by to come to that of x: exact up to [`MOST_K`] columns in groups of 32.
/// 0: each has its own.
pub(super) fn ratio(x: QuantizedForm, atom: Atom) -> u32 {
    let ratio = x.piece.checked_div(atom.group).filter(|&ratio| ratio > 1);
    ratio.map_or(0, |ratio| ((1 << 32) / ratio + 1) as u32)
}
