//! Activations of MLPs, plain and gated.

use super::exp::silu;
use super::{in_tasks, rows_of, same_length};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::cpu::lanes::{Kernel, Simd, dispatch};
use crate::error::Result;

/// `out = silu(gate) · up` with `silu(x) = x / (1 + e⁻ˣ)`.
///
/// *Shapes:* `gate_up` `[m, 2·inner]`, each row the gate first, then up; `out` `[m, inner]`.
/// *Accuracy:* relative error ≤ 2⁻²¹, where the result's and the gate's magnitudes are above 10⁻³⁰ and the gate is
/// above −87; below, silu goes to −0 with an absolute error under 10⁻³⁵. *Errors:* lengths that do not fit.
pub fn swiglu(cpu: &Cpu, gate_up: &[f32], inner: usize, out: &mut [f32]) -> Result<()> {
    let rows = rows_of("swiglu", out.len(), inner)?;
    same_length("swiglu", "gate_up", 2 * out.len(), gate_up.len())?;
    let out = DisjointMut::new(out);
    in_tasks(cpu, rows, 4 * inner, &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.start * inner..range.end * inner) };
        dispatch(cpu, SwiGlu { gate_up: &gate_up[range.start * 2 * inner..range.end * 2 * inner], inner, out });
    });
    Ok(())
}

struct SwiGlu<'a> {
    gate_up: &'a [f32],
    inner: usize,
    out: &'a mut [f32],
}

impl Kernel for SwiGlu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (from, out) in self.gate_up.chunks_exact(2 * self.inner).zip(self.out.chunks_exact_mut(self.inner)) {
            let (gate, up) = from.split_at(self.inner);
            let mut to = out.chunks_exact_mut(S::LANES);
            let (mut gate, mut up) = (gate.chunks_exact(S::LANES), up.chunks_exact(S::LANES));
            for ((to, gate), up) in (&mut to).zip(&mut gate).zip(&mut up) {
                s.store(to, s.mul(silu(s, s.load(gate)), s.load(up)));
            }
            let (gate, up) = (s.load_part(gate.remainder(), 0.0), s.load_part(up.remainder(), 0.0));
            s.store_part(to.into_remainder(), s.mul(silu(s, gate), up));
        }
    }
}
