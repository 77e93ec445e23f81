//! Exponentials of vectors.

use crate::cpu::lanes::Simd;

/// 1.5·2²³ + 127: added to x, it leaves round(x) + 127 in the low bits of the mantissa.
const ROUND_AND_BIAS: f32 = 12_583_039.0;

/// `2ˣ` with a relative error ≤ 2⁻²²; 0 below x = −126, ∞ above x = 127.4.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, x: S::V) -> S::V {
    let biased = s.add(x, s.splat(ROUND_AND_BIAS));
    let n = s.sub(biased, s.splat(ROUND_AND_BIAS));
    let r = s.mul(s.sub(x, n), s.splat(std::f32::consts::LN_2));
    let y = s.mul(exp_near_zero(s, r), s.shift_to_exponent(biased));
    let y = s.if_less(x, s.splat(-126.0), s.splat(0.0), y);
    s.if_less(s.splat(127.4), x, s.splat(f32::INFINITY), y)
}

/// `eˣ` with a relative error ≤ 2⁻²²; 0 below x = −87.3, ∞ above x = 88.3.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // x = n·ln 2 + r, with ln 2 in two parts (Cody and Waite): n times the first is exact.
    const LN_2_FIRST: f32 = 355.0 / 512.0;
    const LN_2_REST: f32 = -2.121_944_4e-4;
    let biased = s.mul_add(x, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND_AND_BIAS));
    let n = s.sub(biased, s.splat(ROUND_AND_BIAS));
    let r = s.mul_add(n, s.splat(-LN_2_FIRST), x);
    let r = s.mul_add(n, s.splat(-LN_2_REST), r);
    let y = s.mul(exp_near_zero(s, r), s.shift_to_exponent(biased));
    let y = s.if_less(x, s.splat(-87.3), s.splat(0.0), y);
    s.if_less(s.splat(88.3), x, s.splat(f32::INFINITY), y)
}

/// `eʳ` for |r| ≤ ln 2 / 2. Coefficients: `expf` of the Cephes library, Moshier.
#[inline(always)]
fn exp_near_zero<S: Simd>(s: S, r: S::V) -> S::V {
    let mut p = s.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = s.mul_add(p, r, s.splat(c));
    }
    s.add(s.mul_add(p, s.mul(r, r), r), s.splat(1.0))
}

/// `tanh x` with a relative error ≤ 2⁻²⁰. Coefficients near 0: `tanhf` of the Cephes library, Moshier.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let square = s.mul(x, x);
    let mut p = s.splat(-5.704_988_7e-3);
    for c in [2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = s.mul_add(p, square, s.splat(c));
    }
    let near = s.mul_add(s.mul(p, square), x, x);
    let e = exp(s, s.add(x, x));
    let far = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    s.if_less(square, s.splat(0.625 * 0.625), near, far)
}

/// `x / (1 + e⁻ˣ)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::V) -> S::V {
    let e = exp(s, s.sub(s.splat(0.0), x));
    s.div(x, s.add(s.splat(1.0), e))
}

/// `eˣ` for x ≤ 0 in double precision, error ≤ 2 units in the last place; 0 below x = −708.
#[inline(always)]
pub(super) fn exp_f64<const N: usize>(x: [f64; N]) -> [f64; N] {
    /// 1.5·2⁵² + 1023: as [`ROUND_AND_BIAS`].
    const ROUND_AND_BIAS: f64 = 6_755_399_441_056_767.0;
    const LN_2_FIRST: f64 = 6.931_471_803_691_238e-1;
    const LN_2_REST: f64 = 1.908_214_929_270_587_7e-10;
    let mut y = [0.0; N];
    for (y, x) in y.iter_mut().zip(x) {
        let biased = x * std::f64::consts::LOG2_E + ROUND_AND_BIAS;
        let n = biased - ROUND_AND_BIAS;
        let r = (x - n * LN_2_FIRST) - n * LN_2_REST;
        // The Taylor series: the first term left out is below 2⁻⁵² for |r| ≤ ln 2 / 2.
        let mut p = 1.0 / 479_001_600.0;
        for factorial in
            [39_916_800.0, 3_628_800.0, 362_880.0, 40_320.0, 5_040.0, 720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0]
        {
            p = p * r + 1.0 / factorial;
        }
        let value = p * f64::from_bits(biased.to_bits() << 52);
        *y = if x < -708.0 { 0.0 } else { value };
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Cpu;
    use crate::cpu::isa::{Caps, Isa};
    use crate::cpu::lanes::{Kernel, dispatch};

    /// `exp` and `exp2` of each number in turn.
    struct Exponentials<'a>(&'a [f32]);

    impl Kernel for Exponentials<'_> {
        type Output = Vec<f32>;

        #[inline(always)]
        fn run<S: Simd>(self, s: S) -> Vec<f32> {
            let mut results = Vec::new();
            for &x in self.0 {
                results.push(s.to_array(exp(s, s.splat(x)))[0]);
                results.push(s.to_array(exp2(s, s.splat(x)))[0]);
            }
            results
        }
    }

    #[test]
    fn exponentials_are_within_their_bound() {
        let x: Vec<f32> =
            (-87_200..88_300).map(|i| i as f32 * 1e-3).chain((-9_999..9_999).map(|i| i as f32 * 1e-4)).collect();
        let ends = [f32::NEG_INFINITY, f32::MIN, -200.0, 200.0, f32::MAX, f32::INFINITY];
        let nans = [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffff_ffff)];
        for isa in [Isa::Plain, Isa::Avx2, Isa::Avx512] {
            let Ok(caps) = Caps::detect().limited_to(isa) else { continue };
            let cpu = Cpu::with_caps(1, caps).unwrap();
            for (&x, got) in x.iter().zip(dispatch(&cpu, Exponentials(&x)).chunks(2)) {
                let exact = [f64::from(x).exp(), f64::from(x).exp2()];
                for (got, exact) in got.iter().zip(exact) {
                    let error = f64::from(*got) / exact - 1.0;
                    assert!(error.abs() <= 2f64.powi(-22), "{isa:?}: at {x}: {got}, expected {exact}: {error:e}");
                }
            }
            let got = dispatch(&cpu, Exponentials(&ends));
            assert!(got[..6].iter().all(|&x| x == 0.0), "{isa:?}: {got:?}");
            assert!(got[6..].iter().all(|&x| x == f32::INFINITY), "{isa:?}: {got:?}");
            assert!(dispatch(&cpu, Exponentials(&nans)).iter().all(|x| x.is_nan()), "{isa:?}");
        }
    }
}
