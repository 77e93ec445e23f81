//! Attention over the cache, and what brings rows there: norms of heads and rotations.

use super::{Bench, TYPES, bits, close};
use crate::cuda::gpus;
use crate::data::Random;
use halfbyte::Float;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, ViewMut};
use halfbyte::cuda::nn::{self, Attention, HeadNorms, KvCache, NewRows, PART_LENGTH, Rope};
use halfbyte::kernel::Heads;

/// A text in one layer on the device and, rotated and rounded as there, in f64.
struct Text<'a> {
    bench: Bench<'a>,
    heads: Heads,
    window: Option<usize>,
    /// Weights of the norms of queries and of keys, and these on the device.
    norms: Option<[(Vec<f32>, Buffer<f32>); 2]>,
    rope: Rope,
    frequencies: Vec<f64>,
    cache: KvCache,
    partial: Buffer<f32>,
    /// Keys, then values, `[positions][kv_heads][head_size]`.
    seen: [Vec<Vec<f64>>; 2],
}

const CAPACITY: usize = 3 * PART_LENGTH + 5;
/// The layer that is used, of three.
const LAYER: usize = 1;
/// What head norms add to the mean of the squares.
const EPS: f32 = 1e-6;

impl<'a> Text<'a> {
    fn new(gpu: &'a Gpu, heads: Heads, rotated: usize, dtype: Float) -> Self {
        let bench = Bench::new(gpu);
        let frequencies: Vec<f64> =
            (0..rotated / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / rotated as f64)).collect();
        let rope = Rope::new(gpu, &bench.stream, &frequencies).unwrap();
        let cache = KvCache::new(gpu, 3, heads, CAPACITY, dtype).unwrap();
        // NaN wherever nothing was written: it must not be read.
        for view in cache.layer("test", LAYER).unwrap() {
            let (pointer, bytes) = (view.pointer(), view.len() * dtype.size_bytes());
            // SAFETY: nothing else uses the cache now.
            bench.stream.fill(unsafe { ViewMut::<u8>::from_raw(pointer, bytes) }, 0xff).unwrap();
        }
        let partial = gpu.context().allocate(nn::partial_len(heads, CAPACITY)).unwrap();
        let seen = Default::default();
        Self { bench, heads, window: None, norms: None, rope, frequencies, cache, partial, seen }
    }

    fn with_norms(mut self, random: &mut Random) -> Self {
        self.norms = Some([(); 2].map(|()| {
            let weight = random.normals(self.heads.head_size);
            let on_device = self.bench.upload(&weight);
            (weight, on_device)
        }));
        self
    }

    /// A query head (`kind` 0) or a key head (1) as attention reads it, and the bound of its elements' errors.
    fn expected(&self, head: &[f32], kind: usize, position: usize) -> (Vec<f64>, f64) {
        let mut out: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
        let mut units = 4.0;
        if let Some(norms) = &self.norms {
            let mean = out.iter().map(|v| v * v).sum::<f64>() / out.len() as f64;
            let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
            out.iter_mut().zip(&norms[kind].0).for_each(|(v, &w)| *v *= factor * f64::from(w));
            units = out.len() as f64 / 8.0 + 20.0;
        }
        // Of NaN and a number, `max` takes the number.
        let most = out.iter().map(|v| v.abs()).fold(0.0, f64::max);
        let pairs = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (out[i], out[i + pairs]);
            (out[i], out[i + pairs]) = (a * cos - b * sin, b * cos + a * sin);
        }
        (out, units * 2f64.powi(-24) * most)
    }

    /// Rows go in and are attended; checks the cache and the output, and returns the latter.
    fn read(&mut self, qkv: &[f32], out_type: Float) -> Vec<f32> {
        let (heads, size, row) = (self.heads, self.heads.head_size, self.heads.row());
        let (m, first) = (qkv.len() / row, self.seen[0].len());
        let position = self.bench.upload(&[first as u32]);
        let mut on_device = self.bench.upload(qkv);
        let stream = &self.bench.stream;
        let norms = self.norms.as_ref().map(|[queries, keys]| HeadNorms {
            queries: queries.1.view(),
            keys: keys.1.view(),
            eps: EPS,
        });
        let rows = NewRows { qkv: on_device.view_mut(), position: position.view(), norms };
        self.rope.apply(self.bench.gpu, stream, rows, &mut self.cache, LAYER).unwrap();
        let queries = self.bench.read(on_device.view());
        let [keys, values] = self.cache.layer("test", LAYER).unwrap().map(|view| self.bench.widened(view));
        let cached = |from: &[f32], head: usize, position: usize| -> Vec<f64> {
            from[(head * CAPACITY + position) * size..][..size].iter().map(|&v| f64::from(v)).collect()
        };
        for i in 0..m {
            let head = |h: usize| &qkv[i * row + h * size..][..size];
            for h in 0..heads.heads {
                let (want, bound) = self.expected(head(h), 0, first + i);
                close(&queries[i * row + h * size..][..size], &want, Float::F32, bound, 0.0, "q");
            }
            let (mut of_keys, mut of_values) = (Vec::new(), Vec::new());
            for h in 0..heads.kv_heads {
                let (key, value) = (head(heads.heads + h), head(heads.heads + heads.kv_heads + h));
                let got = cached(&keys, h, first + i);
                let (want, bound) = self.expected(key, 1, first + i);
                let narrow: Vec<f32> = got.iter().map(|&v| v as f32).collect();
                let dtype = self.cache.dtype();
                close(&narrow, &want, dtype, bound, 0.0, "k");
                of_keys.extend(got);
                let got = cached(&values, h, first + i);
                assert!(
                    got.iter().zip(value).all(|(&a, &b)| a == f64::from(dtype.round(b)) || a.is_nan() && b.is_nan())
                );
                of_values.extend(got);
            }
            self.seen[0].push(of_keys);
            self.seen[1].push(of_values);
        }
        let scale = 1.0 / (size as f32).sqrt();
        let Self { bench, cache, partial, window, .. } = self;
        let mut attend = |longest: usize| {
            bench.output(out_type, m * heads.heads * size, &mut |out| {
                let (qkv, position) = (on_device.view(), position.view());
                let what = Attention { qkv, position, first_row: 0, longest, scale, window: *window };
                nn::attention(bench.gpu, &bench.stream, &what, cache, LAYER, partial.view_mut(), out).unwrap();
            })
        };
        // Bounds on the positions that are larger than need be, as a recorded step has them.
        let got = attend((first + m).next_multiple_of(PART_LENGTH).min(CAPACITY));
        let recorded = attend(CAPACITY);
        assert!(bits(&got) == bits(&recorded) || got.iter().any(|v| v.is_nan()), "{first} positions and {m}");
        for i in 0..m {
            for h in 0..heads.heads {
                let query: Vec<f64> = queries[i * row + h * size..][..size].iter().map(|&v| f64::from(v)).collect();
                self.check(&query, h, first + i, &got[(i * heads.heads + h) * size..][..size], out_type);
            }
        }
        got
    }

    /// One output against f64, where everything that it sees is finite.
    fn check(&self, query: &[f64], h: usize, position: usize, got: &[f32], out_type: Float) {
        let (size, scale) = (self.heads.head_size, 1.0 / f64::from((self.heads.head_size as f32).sqrt()));
        let kv = h / self.heads.group() * size..(h / self.heads.group() + 1) * size;
        let (mut scores, mut t, mut largest) = (Vec::new(), 0f64, 0f64);
        let seen = self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
        for p in seen.clone() {
            let (key, value) = (&self.seen[0][p][kv.clone()], &self.seen[1][p][kv.clone()]);
            scores.push(scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>());
            t = t.max(scale * query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum::<f64>());
            largest = value.iter().fold(largest, |a, v| a.max(v.abs()));
            if query.iter().chain(key).chain(value).any(|v| !v.is_finite()) {
                assert!(got.iter().any(|v| v.is_nan()), "position {position}, head {h}: {got:?}");
                return;
            }
        }
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum();
        let want: Vec<f64> =
            kv.map(|d| seen.clone().zip(&weights).map(|(p, w)| w / total * self.seen[1][p][d]).sum()).collect();
        let n = seen.len() as f64;
        let bound = (n / 8.0 + size as f64 + 64.0 + 4.0 * t * size as f64) * 2f64.powi(-24) * largest;
        close(got, &want, out_type, bound, 0.0, &format!("position {position}, head {h} of {:?}", self.heads));
    }
}

/// Query heads, key and value heads, elements of a head, and how many of these are rotated.
const HEADS: [(usize, usize, usize, usize); 7] =
    [(6, 2, 64, 64), (4, 4, 32, 32), (8, 1, 128, 128), (3, 3, 20, 12), (2, 1, 80, 80), (2, 2, 256, 256), (4, 2, 48, 0)];

#[test]
fn attention_over_the_cache_is_within_the_bound() {
    for gpu in gpus() {
        let mut random = Random(7);
        for (i, (heads, kv_heads, head_size, rotated)) in HEADS.into_iter().enumerate() {
            let heads = Heads { heads, kv_heads, head_size };
            // Blocks of sm_75 have 64 KB of shared memory: too little for the largest heads.
            if head_size > 128 && gpu.caps().shared_bytes < 100_000 {
                continue;
            }
            for (j, dtype) in TYPES.into_iter().enumerate() {
                let mut text = Text::new(&gpu, heads, rotated, dtype);
                // Prompts of several sizes with single steps between, over the borders of runs and parts.
                let steps = [1, 1, 30, 1, 7, 64, 21, 1, 1, 1, 1, 2, 120, 1, 1, 1, 100, 1];
                for (step, m) in steps.into_iter().enumerate() {
                    text.read(&random.normals(m * heads.row()), TYPES[(i + j + step) % 3]);
                }
                assert!(text.seen[0].len() > 2 * PART_LENGTH);
            }
        }
    }
}

#[test]
fn windows_and_norms_of_heads_are_within_the_bound() {
    for gpu in gpus() {
        let mut random = Random(10);
        for (i, window) in [1, 2, 31, 32, 33, 127, 128, 129, 130, 200, 300, usize::MAX].into_iter().enumerate() {
            let (heads, kv_heads, head_size, rotated) = [HEADS[0], HEADS[3], HEADS[6]][i % 3];
            let mut text = Text::new(&gpu, Heads { heads, kv_heads, head_size }, rotated, TYPES[i / 2 % 3]);
            text.window = Some(window);
            if i % 2 == 0 {
                text = text.with_norms(&mut random);
            }
            for (step, m) in [1, 30, 1, 97, 1, 1, 60, 1, 1, 130, 1, 1, 50, 1].into_iter().enumerate() {
                text.read(&random.normals(m * text.heads.row()), TYPES[(i + step) % 3]);
            }
            assert!(text.seen[0].len() > 2 * PART_LENGTH);
        }
    }
}

#[test]
fn nan_reaches_nobody_whose_window_it_has_left() {
    for gpu in gpus() {
        let (heads, mut random) = (Heads { heads: 4, kv_heads: 2, head_size: 20 }, Random(11));
        for place in [4 * 20 + 5, 6 * 20 + 9] {
            let mut text = Text::new(&gpu, heads, 20, Float::F32);
            text.window = Some(40);
            let mut rows = random.normals(20 * heads.row());
            rows[17 * heads.row() + place] = f32::NAN;
            let row_length = heads.heads * heads.head_size;
            let prompt = text.read(&rows, Float::F32);
            let more = text.read(&random.normals(60 * heads.row()), Float::F32);
            let all = [prompt, more].concat();
            for (position, row) in all.chunks_exact(row_length).enumerate() {
                assert_eq!(row.iter().any(|v| v.is_nan()), (17..17 + 40).contains(&position), "position {position}");
            }
            // The last step is past the window by far, and in another part.
            for _ in 0..60 {
                assert!(text.read(&random.normals(heads.row()), Float::F32).iter().all(|v| v.is_finite()));
            }
        }
    }
}

#[test]
fn nan_reaches_those_that_see_it() {
    for gpu in gpus() {
        let (heads, mut random) = (Heads { heads: 4, kv_heads: 2, head_size: 20 }, Random(8));
        for (what, place) in [("a query", 20 + 3), ("a key", 4 * 20 + 5), ("a value", 6 * 20 + 9)] {
            let mut text = Text::new(&gpu, heads, 20, Float::F32);
            text.read(&random.normals(40 * heads.row()), Float::F32);
            let mut rows = random.normals(50 * heads.row());
            rows[17 * heads.row() + place] = f32::NAN;
            let out = text.read(&rows, Float::F32);
            let row_length = heads.heads * heads.head_size;
            let bad = |row: usize| out[row * row_length..][..row_length].iter().filter(|v| v.is_nan()).count();
            assert!((0..17).all(|row| bad(row) == 0), "{what}");
            // A whole head for queries, both heads of the group for keys, one element of each for values.
            assert_eq!(
                bad(17),
                if what == "a query" {
                    20
                } else if what == "a key" {
                    40
                } else {
                    2
                },
                "{what}"
            );
            assert_eq!(bad(18), if what == "a query" { 0 } else { bad(17) }, "{what}");
            let after = text.read(&random.normals(heads.row()), Float::F32);
            assert_eq!(after.iter().any(|v| v.is_nan()), what != "a query");
        }
    }
}
