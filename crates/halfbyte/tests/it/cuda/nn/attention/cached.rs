//! What a cache on a device holds, and what it should.

use super::{LAYER, Text};
use crate::cuda::gpus;
use crate::cuda::nn::Bench;
use crate::data::Random;
use halfbyte::Float;
use halfbyte::cuda::driver::ViewMut;
use halfbyte::cuda::nn::{KvCache, KvView, PAGE_LENGTH};
use halfbyte::kernel::{Heads, KvType};

/// Keys, or values, of a layer, as they stand for numbers.
pub(super) struct Cached {
    kv: KvType,
    size: usize,
    /// Floats, or codes.
    elements: Vec<f32>,
    /// Of codes.
    scales: Vec<f32>,
}

impl Cached {
    fn of(bench: &Bench<'_>, view: KvView<'_>, kv: KvType, size: usize) -> Self {
        let (elements, scales) = match view {
            KvView::Floats(floats) => (bench.widened(floats), Vec::new()),
            KvView::Codes { codes, scales } => {
                (bench.read(codes).into_iter().map(f32::from).collect(), bench.read(scales))
            }
        };
        Self { kv, size, elements, scales }
    }

    /// Of a head and a slot.
    pub(super) fn vector(&self, vector: usize) -> Vec<f64> {
        let scale = self.scales.get(vector).map_or(1.0, |&scale| f64::from(scale));
        self.elements[vector * self.size..][..self.size].iter().map(|&v| f64::from(v) * scale).collect()
    }

    /// What the type makes of a vector, bit for bit: of a CPU's cache likewise.
    pub(super) fn rule(&self, of: &[f32]) -> Vec<f64> {
        let dtype = match self.kv {
            KvType::F32 => Float::F32,
            KvType::F16 => Float::F16,
            KvType::Bf16 => Float::BF16,
            KvType::Int8 => {
                if of.iter().any(|v| !v.is_finite()) {
                    return vec![f64::NAN; of.len()];
                }
                let scale = (of.iter().fold(0f32, |a, v| a.max(v.abs())) / 127.0).max(f32::MIN_POSITIVE);
                return of.iter().map(|v| f64::from((v / scale).round_ties_even()) * f64::from(scale)).collect();
            }
        };
        of.iter().map(|&v| f64::from(dtype.round(v))).collect()
    }

    /// A vector whose elements were within `bound` of `want` before they took their type.
    pub(super) fn checked(&self, vector: usize, want: &[f64], bound: f64) -> Vec<f64> {
        let got = self.vector(vector);
        if want.iter().any(|v| !v.is_finite()) {
            let all = self.kv == KvType::Int8;
            assert!(got.iter().any(|v| !v.is_finite()) && (!all || got.iter().all(|v| v.is_nan())), "{got:?}");
            if all {
                return got;
            }
        }
        let greatest = want.iter().fold(0f64, |a, v| a.max(v.abs()));
        let u = match self.kv {
            KvType::F32 => Float::F32.unit_roundoff(),
            KvType::F16 => Float::F16.unit_roundoff(),
            KvType::Bf16 => Float::BF16.unit_roundoff(),
            KvType::Int8 => {
                let scale = f64::from(self.scales[vector]);
                let off = (scale - greatest / 127.0).abs();
                assert!(off <= (bound + greatest * 2f64.powi(-23)) / 127.0 + 2f64.powi(-126), "{scale}, {greatest}");
                0.0
            }
        };
        // Half a scale, or half of the least number.
        let least = match self.kv {
            KvType::F16 => 2f64.powi(-25),
            KvType::Bf16 => 2f64.powi(-134),
            KvType::Int8 => f64::from(self.scales[vector]) * (0.5 + 2f64.powi(-16)),
            KvType::F32 => 2f64.powi(-150),
        };
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let allowed = bound + u * (want.abs() + bound) + least;
            let right = if want.is_nan() { got.is_nan() } else { (got - want).abs() <= allowed };
            assert!(right, "key: element {i} is {got}, expected {want} ± {allowed:e}");
        }
        got
    }
}

/// Keys and values of the layer that is used.
pub(super) fn layer(bench: &Bench<'_>, cache: &KvCache) -> [Cached; 2] {
    let views = cache.layer("test", LAYER).unwrap();
    views.map(|view| Cached::of(bench, view, cache.kv(), cache.heads().head_size))
}

/// What the layer that is used holds, bit for bit.
pub(super) fn bits_of_layer(bench: &Bench<'_>, cache: &KvCache) -> [Vec<u32>; 2] {
    layer(bench, cache).map(|cached| cached.elements.iter().chain(&cached.scales).map(|v| v.to_bits()).collect())
}

/// NaN in all of the layer that is used.
pub(super) fn fill_with_nan(bench: &Bench<'_>, cache: &KvCache) {
    for view in cache.layer("test", LAYER).unwrap() {
        let parts = match view {
            KvView::Floats(floats) => vec![(floats.pointer(), floats.len() * floats.dtype().size_bytes())],
            KvView::Codes { codes, scales } => {
                vec![(codes.pointer(), codes.len()), (scales.pointer(), size_of::<f32>() * scales.len())]
            }
        };
        for (pointer, bytes) in parts {
            // SAFETY: nothing else uses the cache now.
            bench.stream.fill(unsafe { ViewMut::<u8>::from_raw(pointer, bytes) }, 0xff).unwrap();
        }
    }
}

#[test]
fn what_goes_into_a_cache_is_rounded_by_the_rule_of_its_type() {
    for gpu in gpus() {
        let mut random = Random(31);
        for kv in KvType::ALL {
            // Nothing rotates: keys and values are those of the rows.
            let heads = Heads { heads: 3, kv_heads: 3, head_size: 40 };
            let mut text = Text::new(&gpu, heads, 0, kv);
            let mut rows = random.normals(150 * heads.row());
            for (i, row) in rows.chunks_exact_mut(heads.row()).enumerate() {
                // From subnormal numbers to large ones, and rows of zeros, infinities and middles between codes.
                let most = if kv == KvType::F16 { 12 } else { 82 };
                let factor = if i == 40 { 0.0 } else { 2f32.powi((i as i32 % 75 * 3 - 140).min(most)) };
                row[3 * 40..].iter_mut().for_each(|v| *v *= factor);
                match i {
                    90 if matches!(kv, KvType::F32 | KvType::Int8) => row[3 * 40 + 7] = f32::MAX,
                    91 => row[6 * 40 + 7] = f32::INFINITY,
                    92 => row[6 * 40..7 * 40].iter_mut().enumerate().for_each(|(j, v)| *v = j as f32 / 2.0 - 127.0),
                    _ => {}
                }
            }
            text.append(&rows);
            let cached = layer(&text.bench, &text.cache);
            for (i, row) in rows.chunks_exact(heads.row()).enumerate() {
                for (h, vector) in row[3 * 40..].chunks_exact(40).enumerate() {
                    let of = &cached[h / 3];
                    let (got, want) = (of.vector(h % 3 * text.capacity + i), of.rule(vector));
                    let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                    assert!(got.iter().zip(&want).all(same), "{kv}, row {i}, head {h}: {got:?}, expected {want:?}");
                }
            }
        }
    }
}

#[test]
fn a_copied_page_holds_what_the_other_does() {
    for gpu in gpus() {
        let mut random = Random(32);
        for kv in KvType::ALL {
            let heads = Heads { heads: 4, kv_heads: 2, head_size: 24 };
            let mut text = Text::with_capacity(&gpu, heads, 0, kv, 3 * PAGE_LENGTH);
            text.append(&random.normals(2 * PAGE_LENGTH * heads.row()));
            let before = layer(&text.bench, &text.cache);
            text.cache.copy_page(&text.bench.stream, 0, 2).unwrap();
            let after = layer(&text.bench, &text.cache);
            for (before, after) in before.iter().zip(&after) {
                for vector in 0..heads.kv_heads * text.capacity {
                    let from = if vector % text.capacity < 2 * PAGE_LENGTH { vector } else { vector - 2 * PAGE_LENGTH };
                    assert_eq!(after.vector(vector), before.vector(from), "{kv}, vector {vector}");
                }
            }
            assert!(text.cache.copy_page(&text.bench.stream, 0, 3).is_err());
        }
    }
}
