//! Activations of MLPs, plain and gated.

use super::exp::{exp, silu, tanh};
use super::{in_tasks, rows_of, same_length};
use crate::checks::check_cap;
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
    gated(cpu, "swiglu", Silu, gate_up, inner, out)
}

/// `out = gelu(gate) · up`, with [`gelu`].
///
/// *Shapes:* as [`swiglu`]. *Accuracy:* a relative error of 2⁻²⁴ besides that of [`gelu`]. *Errors:* lengths that do not
/// fit.
pub fn geglu(cpu: &Cpu, gate_up: &[f32], inner: usize, out: &mut [f32]) -> Result<()> {
    gated(cpu, "geglu", Gelu, gate_up, inner, out)
}

/// `out = gelu_tanh(gate) · up`, with [`gelu_tanh`].
///
/// *Shapes:* as [`swiglu`]. *Accuracy:* a relative error of 2⁻²⁴ besides that of [`gelu_tanh`]. *Errors:* lengths that do
/// not fit.
pub fn geglu_tanh(cpu: &Cpu, gate_up: &[f32], inner: usize, out: &mut [f32]) -> Result<()> {
    gated(cpu, "geglu_tanh", GeluTanh, gate_up, inner, out)
}

/// Replaces each `x` by `x · Φ(x)`, with the distribution function `Φ` of the normal distribution.
///
/// *Accuracy:* relative error ≤ (16 + x²)·2⁻²⁴ above x = −13; below, the result goes to −0 with an absolute error under
/// 10⁻³⁵. −∞ gives NaN, as `−∞ · 0` does. *Source:* Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
pub fn gelu(cpu: &Cpu, x: &mut [f32]) {
    in_place(cpu, Gelu, x);
}

/// Replaces each `x` by `x/2 · (1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
///
/// *Accuracy:* with `a` twice the magnitude of the tangent's argument, relative error ≤ (16 + 6·a)·2⁻²⁴ where x is above
/// −10; below, the result goes to −0 with an absolute error under 10⁻³⁵. −∞ gives NaN. *Source:* as [`gelu`].
pub fn gelu_tanh(cpu: &Cpu, x: &mut [f32]) {
    in_place(cpu, GeluTanh, x);
}

/// `out = gate · σ(alpha · gate) · (up + 1)`, of a gate at most `limit` and up from `−limit` to `limit`.
///
/// *Shapes:* as [`swiglu`]. *Accuracy:* relative error ≤ (8 + |alpha · gate|)·2⁻²⁴, where the result's and the gate's magnitudes are
/// above 10⁻³⁰ and alpha times the gate is above −87. *Errors:* lengths that do not fit. *Source:* OpenAI, "gpt-oss model card", 2025, and its
/// published code.
pub fn clamped_swiglu(
    cpu: &Cpu,
    gate_up: &[f32],
    inner: usize,
    (alpha, limit): (f32, f32),
    out: &mut [f32],
) -> Result<()> {
    gated(cpu, "clamped_swiglu", Clamped { alpha, limit }, gate_up, inner, out)
}

/// Replaces each `x` by `limit · tanh(x / limit)`.
///
/// *Accuracy:* relative error ≤ 2⁻¹⁹ where the result and `x / limit` are at least 2⁻¹²⁶ in magnitude; below, an absolute error under
/// 2⁻¹²⁶ and `2⁻¹²⁶ · limit`, whichever is more. *Errors:* a limit that is not from 2⁻¹²⁶ to 2¹²⁵.
pub fn soft_cap(cpu: &Cpu, x: &mut [f32], limit: f32) -> Result<()> {
    check_cap("soft_cap", limit)?;
    in_place(cpu, SoftCap(limit), x);
    Ok(())
}

fn gated<F: GateOf>(
    cpu: &Cpu,
    op: &'static str,
    function: F,
    gate_up: &[f32],
    inner: usize,
    out: &mut [f32],
) -> Result<()> {
    let rows = rows_of(op, out.len(), inner)?;
    same_length(op, "gate_up", out.len().checked_mul(2), gate_up.len())?;
    // An `inner` that there is no row of may be of any size.
    if rows == 0 {
        return Ok(());
    }
    let out = DisjointMut::new(out);
    in_tasks(cpu, rows, inner.saturating_mul(4), &|range| {
        // SAFETY: ranges of rows are disjoint.
        let out = unsafe { out.range(range.start * inner..range.end * inner) };
        let gate_up = &gate_up[range.start * 2 * inner..range.end * 2 * inner];
        dispatch(cpu, Gated { function, gate_up, inner, out });
    });
    Ok(())
}

fn in_place<F: Function>(cpu: &Cpu, function: F, x: &mut [f32]) {
    let (len, x) = (x.len(), DisjointMut::new(x));
    in_tasks(cpu, len, 4, &|range| {
        // SAFETY: the ranges are disjoint.
        let x = unsafe { x.range(range) };
        dispatch(cpu, InPlace { function, x });
    });
}

/// A function of one variable. Implementations are `#[inline(always)]`.
trait Function: Copy + Sync {
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V;
}

/// What becomes of gate and up. Implementations are `#[inline(always)]`.
trait GateOf: Copy + Sync {
    fn of_both<S: Simd>(self, s: S, gate: S::V, up: S::V) -> S::V;
}

impl<F: Function> GateOf for F {
    #[inline(always)]
    fn of_both<S: Simd>(self, s: S, gate: S::V, up: S::V) -> S::V {
        s.mul(self.of(s, gate), up)
    }
}

#[derive(Clone, Copy)]
struct Clamped {
    alpha: f32,
    limit: f32,
}

impl GateOf for Clamped {
    /// Comparisons with NaN are false, which leaves it.
    #[inline(always)]
    fn of_both<S: Simd>(self, s: S, gate: S::V, up: S::V) -> S::V {
        let (most, least) = (s.splat(self.limit), s.splat(-self.limit));
        let gate = s.if_less(most, gate, most, gate);
        let up = s.if_less(most, up, most, s.if_less(up, least, least, up));
        let e = exp(s, s.mul(gate, s.splat(-self.alpha)));
        s.mul(s.div(gate, s.add(s.splat(1.0), e)), s.add(up, s.splat(1.0)))
    }
}

#[derive(Clone, Copy)]
struct SoftCap(f32);

impl Function for SoftCap {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        s.mul(s.splat(self.0), tanh(s, s.mul(x, s.splat(1.0 / self.0))))
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        silu(s, x)
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Function for Gelu {
    /// With `z = |x|/√2` and `q = erfc(z)/2`, `Φ(x)` is `q` below 0 and `1 − q` above.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        let magnitude = s.max(x, s.sub(s.splat(0.0), x));
        let z = s.mul(magnitude, s.splat(std::f32::consts::FRAC_1_SQRT_2));
        let half_square = s.mul(s.mul(magnitude, magnitude), s.splat(-0.5));
        let q = s.mul(s.mul(exp(s, half_square), s.splat(0.5)), scaled_erfc(s, z));
        s.mul(x, s.if_less(x, s.splat(0.0), q, s.sub(s.splat(1.0), q)))
    }
}

/// `e^(z²) · erfc(z)` for z from 0 to 9.4, relative error ≤ 6·2⁻²⁴.
///
/// A polynomial of `t = 1/(1 + 0.3·z)`, which interpolates `e^(z²)·erfc(z)/t` at Chebyshev nodes: relative error 0.4·2⁻²⁴
/// before rounding.
#[inline(always)]
fn scaled_erfc<S: Simd>(s: S, z: S::V) -> S::V {
    let t = s.div(s.splat(1.0), s.mul_add(z, s.splat(0.3), s.splat(1.0)));
    let mut p = s.splat(-0.130_419_33);
    for c in
        [0.490_205_14, -0.522_536, 0.560_327_4, -0.104_055_15, 0.219_276_24, 0.147_123_14, 0.170_902_72, 0.169_175_8]
    {
        p = s.mul_add(p, t, s.splat(c));
    }
    s.mul(p, t)
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl Function for GeluTanh {
    /// `(1 + tanh y)/2 = 1/(1 + e⁻²ʸ)`.
    #[inline(always)]
    fn of<S: Simd>(self, s: S, x: S::V) -> S::V {
        /// 2·√(2/π).
        const FACTOR: f32 = 1.595_769;
        let inner = s.mul_add(s.mul(x, x), s.splat(0.044_715), s.splat(1.0));
        let e = exp(s, s.mul(s.mul(x, s.splat(-FACTOR)), inner));
        s.div(x, s.add(s.splat(1.0), e))
    }
}

struct Gated<'a, F> {
    function: F,
    gate_up: &'a [f32],
    inner: usize,
    out: &'a mut [f32],
}

impl<F: GateOf> Kernel for Gated<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let f = self.function;
        for (from, out) in self.gate_up.chunks_exact(2 * self.inner).zip(self.out.chunks_exact_mut(self.inner)) {
            let (gate, up) = from.split_at(self.inner);
            let mut to = out.chunks_exact_mut(S::LANES);
            let (mut gate, mut up) = (gate.chunks_exact(S::LANES), up.chunks_exact(S::LANES));
            for ((to, gate), up) in (&mut to).zip(&mut gate).zip(&mut up) {
                s.store(to, f.of_both(s, s.load(gate), s.load(up)));
            }
            let (gate, up) = (s.load_part(gate.remainder(), 0.0), s.load_part(up.remainder(), 0.0));
            s.store_part(to.into_remainder(), f.of_both(s, gate, up));
        }
    }
}

struct InPlace<'a, F> {
    function: F,
    x: &'a mut [f32],
}

impl<F: Function> Kernel for InPlace<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut parts = self.x.chunks_exact_mut(S::LANES);
        for part in &mut parts {
            s.store(part, self.function.of(s, s.load(part)));
        }
        let rest = parts.into_remainder();
        s.store_part(rest, self.function.of(s, s.load_part(rest, 0.0)));
    }
}
