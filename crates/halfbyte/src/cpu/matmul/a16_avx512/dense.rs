//! Dense weights of every type: widened where they are multiplied, or to a buffer.

use super::x86::add_to;
use super::{RUN, Weights};
use crate::cpu::x86::avx512::{load_bf16, load_f16, load_f32};
use crate::layout::cpu_n16::PANEL;
use crate::tensor::Floats;
use std::arch::x86_64::*;
use std::ops::Range;

/// Types of dense weights, as constants that a function can be generic over.
pub(super) const F16: usize = 0;
pub(super) const BF16: usize = 1;
pub(super) const F32: usize = 2;

#[target_feature(enable = "avx512f,avx512dq,f16c")]
pub(super) fn direct<const DTYPE: usize, const R: usize, const P: usize>(
    w: Weights<'_>,
    panel: usize,
    x: &[f32],
    c: &mut [f32],
) {
    let Weights::Dense(w) = w else { unreachable!("asked for with dense weights") };
    let k = w.k();
    assert!(x.len() == k * R && c.len() == R * P * PANEL);
    let mut data = [w.data().slice(0..0); P];
    for p in 0..P {
        data[p] = w.data().slice((panel + p) * k * PANEL..(panel + p + 1) * k * PANEL);
    }
    c.fill(0.0);
    for start in (0..k).step_by(2 * RUN) {
        // Two sums for each output of one row: else a sum would wait for the one before it.
        let mut y = [[[_mm512_setzero_ps(); P]; R]; 2];
        for j in start..(start + 2 * RUN).min(k) {
            for p in 0..P {
                let at = j * PANEL;
                let weight = match (DTYPE, &data[p]) {
                    (F16, Floats::F16(v)) => {
                        prefetch(v, at + 1024);
                        load_f16(&v[at..])
                    }
                    (BF16, Floats::BF16(v)) => {
                        prefetch(v, at + 1024);
                        load_bf16(&v[at..])
                    }
                    (F32, Floats::F32(v)) => {
                        prefetch(v, at + 512);
                        load_f32(&v[at..])
                    }
                    _ => unreachable!("asked for with another type"),
                };
                for r in 0..R {
                    let v = _mm512_set1_ps(x[j * R + r]);
                    y[j % 2][r][p] = _mm512_fmadd_ps(v, weight, y[j % 2][r][p]);
                }
            }
        }
        for r in 0..R {
            for p in 0..P {
                y[0][r][p] = _mm512_add_ps(y[0][r][p], y[1][r][p]);
            }
        }
        add_to(&y[0], c);
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn prefetch<T>(v: &[T], at: usize) {
    _mm_prefetch::<_MM_HINT_T0>(v.as_ptr().wrapping_add(at).cast());
}

#[target_feature(enable = "avx512f,f16c")]
pub(super) fn convert(w: Weights<'_>, panel: usize, places: Range<usize>, out: &mut [f32], stride: usize) {
    let Weights::Dense(w) = w else { unreachable!("asked for with dense weights") };
    let data = w.data().slice((panel * w.k() + places.start) * PANEL..(panel * w.k() + places.end) * PANEL);
    for j in 0..places.len() {
        let weight = match data {
            Floats::F16(v) => load_f16(&v[j * PANEL..]),
            Floats::BF16(v) => load_bf16(&v[j * PANEL..]),
            Floats::F32(v) => load_f32(&v[j * PANEL..]),
        };
        let out = &mut out[j * stride..][..PANEL];
        // SAFETY: `out` is 16 floats.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), weight) };
    }
}
