//! Attention over the cache, and what brings rows there: norms of heads and rotations.

mod cached;
mod changed;
mod texts;

use super::{Bench, TYPES, bits, close};
use crate::cuda::gpus;
use crate::data::Random;
use halfbyte::Float;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::nn::{
    self, Append, Attention, AttentionWorkspace, FEW_QUERIES, HeadNorms, Kernels, KvCache, NewRows, PAGE_LENGTH,
    PART_LENGTH, Rope, Rows,
};
use halfbyte::kernel::{Heads, KvType};

/// A text in one layer on the device and, rotated and rounded as there, in f64.
struct Text<'a> {
    bench: Bench<'a>,
    heads: Heads,
    capacity: usize,
    /// Pages of the text, where it does not lie in the cache in order.
    pages: Option<Vec<u32>>,
    window: Option<usize>,
    cap: Option<f32>,
    /// Of heads, and the same on the device.
    slopes: Option<(Vec<f32>, Buffer<f32>)>,
    sinks: Option<(Vec<f32>, Buffer<f32>)>,
    /// Weights of the norms of queries and of keys, and these on the device.
    norms: Option<[(Vec<f32>, Buffer<f32>); 2]>,
    rope: Rope,
    frequencies: Vec<f64>,
    cache: KvCache,
    workspace: AttentionWorkspace,
    /// Keys, then values, `[positions][kv_heads][head_size]`.
    seen: [Vec<Vec<f64>>; 2],
}

/// How attention is computed, as its documentation says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Computed {
    /// In f32.
    Exactly,
    /// On tensor cores, queries and weights rounded.
    Rounded,
    /// On tensor cores, queries and weights in two halves each.
    InTwoHalves,
}

const CAPACITY: usize = 3 * PART_LENGTH + 5;
/// The layer that is used, of three.
const LAYER: usize = 1;
/// Of a workspace.
const MOST_TEXTS: usize = 40;
/// What head norms add to the mean of the squares.
const EPS: f32 = 1e-6;

impl<'a> Text<'a> {
    fn new(gpu: &'a Gpu, heads: Heads, rotated: usize, kv: KvType) -> Self {
        Self::with_capacity(gpu, heads, rotated, kv, CAPACITY)
    }

    fn with_capacity(gpu: &'a Gpu, heads: Heads, rotated: usize, kv: KvType, capacity: usize) -> Self {
        let bench = Bench::new(gpu);
        let frequencies: Vec<f64> =
            (0..rotated / 2).map(|i| 10_000f64.powf(-2.0 * i as f64 / rotated as f64)).collect();
        let rope = Rope::new(gpu, &bench.stream, &frequencies).unwrap();
        let cache = KvCache::new(gpu, 3, heads, capacity, kv).unwrap();
        // NaN wherever nothing was written: it must not be read.
        cached::fill_with_nan(&bench, &cache);
        let workspace = AttentionWorkspace::new(gpu, &bench.stream, heads, MOST_TEXTS, capacity).unwrap();
        let (seen, pages) = Default::default();
        let (window, cap, slopes, sinks, norms) = (None, None, None, None, None);
        Self {
            bench,
            heads,
            capacity,
            pages,
            window,
            cap,
            slopes,
            sinks,
            norms,
            rope,
            frequencies,
            cache,
            workspace,
            seen,
        }
    }

    /// Its pages in any order.
    fn shuffled(mut self, random: &mut Random) -> Self {
        let count = self.capacity / PAGE_LENGTH;
        let mut pages: Vec<u32> = (0..count as u32).collect();
        (1..count).for_each(|i| pages.swap(i, random.below(i + 1)));
        self.pages = Some(pages);
        self
    }

    /// Where a position lies in the cache.
    fn slot(&self, position: usize) -> usize {
        let page = self.pages.as_ref().map(|pages| pages[position / PAGE_LENGTH] as usize);
        page.map_or(position, |page| page * PAGE_LENGTH + position % PAGE_LENGTH)
    }

    fn of_heads(&self, values: Vec<f32>) -> Option<(Vec<f32>, Buffer<f32>)> {
        let on_device = self.bench.upload(&values);
        Some((values, on_device))
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

    /// Rows go into the cache, which is checked; their queries, here and on the device.
    fn append(&mut self, qkv: &[f32]) -> (Vec<f32>, Buffer<f32>) {
        let (heads, size, row) = (self.heads, self.heads.head_size, self.heads.row());
        let (m, first) = (qkv.len() / row, self.seen[0].len());
        let mut on_device = self.bench.upload(qkv);
        let stream = &self.bench.stream;
        let norms = self.norms.as_ref().map(|[queries, keys]| HeadNorms {
            queries: queries.1.view(),
            keys: keys.1.view(),
            eps: EPS,
        });
        let [positions, slots] = [false, true].map(|slots| {
            let of_rows = (first..first + m).map(|position| if slots { self.slot(position) } else { position } as u32);
            self.bench.upload(&of_rows.collect::<Vec<_>>())
        });
        let (qkv_on_device, [positions, slots]) = (on_device.view_mut(), [&positions, &slots].map(Buffer::view));
        let rows = NewRows { qkv: qkv_on_device, positions, slots, norms };
        self.rope.apply(self.bench.gpu, stream, rows, &mut self.cache, LAYER).unwrap();
        let queries = self.bench.read(on_device.view());
        let [keys, values] = cached::layer(&self.bench, &self.cache);
        for i in 0..m {
            let head = |h: usize| &qkv[i * row + h * size..][..size];
            for h in 0..heads.heads {
                let (want, bound) = self.expected(head(h), 0, first + i);
                close(&queries[i * row + h * size..][..size], &want, Float::F32, bound, 0.0, "q");
            }
            let (slot, mut of_keys, mut of_values) = (self.slot(first + i), Vec::new(), Vec::new());
            for h in 0..heads.kv_heads {
                let (key, value) = (head(heads.heads + h), head(heads.heads + heads.kv_heads + h));
                let vector = h * self.capacity + slot;
                let (want, bound) = self.expected(key, 1, first + i);
                of_keys.extend(keys.checked(vector, &want, bound));
                let (got, want) = (values.vector(vector), values.rule(value));
                let same = |(&a, &b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                assert!(got.iter().zip(&want).all(same), "value {got:?}, expected {want:?}");
                of_values.extend(got);
            }
            self.seen[0].push(of_keys);
            self.seen[1].push(of_values);
        }
        (queries, on_device)
    }

    /// Rows go in and are attended; checks the cache and the output, and returns the latter.
    fn read(&mut self, qkv: &[f32], out_type: Float) -> Vec<f32> {
        let (heads, size, row) = (self.heads, self.heads.head_size, self.heads.row());
        let (m, first) = (qkv.len() / row, self.seen[0].len());
        let (queries, on_device) = self.append(qkv);
        let positions: Vec<u32> = (first as u32..).take(m).collect();
        let positions = self.bench.upload(&positions);
        let pages = self.pages.as_ref().map(|pages| self.bench.upload(pages));
        let scale = 1.0 / (size as f32).sqrt();
        let without = m / 3;
        let [computed, last] = [m, m - without].map(|rows| self.computed(rows));
        let Self { bench, cache, workspace, window, cap, slopes, sinks, capacity, .. } = self;
        let [slopes, sinks] = [slopes, sinks].map(|of_heads| of_heads.as_ref().map(|(_, on_device)| on_device.view()));
        let mut attend = |kernels: Kernels, longest: usize, first_row: usize| {
            bench.output(out_type, (m - first_row) * heads.heads * size, &mut |out| {
                let what = Attention {
                    qkv: on_device.view().slice(first_row * row..m * row),
                    append: None,
                    rows: Rows::OfOneText,
                    positions: positions.view().slice(first_row..m),
                    pages: pages.as_ref().map(Buffer::view),
                    fresh: m,
                    longest,
                    scale,
                    window: *window,
                    cap: *cap,
                    slopes,
                    sinks,
                    kernels,
                };
                nn::attention(bench.gpu, &bench.stream, &what, cache, LAYER, workspace, out).unwrap();
            })
        };
        let alone = computed == Computed::Rounded && last == computed;
        let near = (first + m).next_multiple_of(PART_LENGTH).min(*capacity);
        let got = [Kernels::All, Kernels::OfAmpere].map(|kernels| {
            let got = attend(kernels, near, 0);
            // Bounds on the positions that are larger than need be, as a recorded step has them.
            let recorded = attend(kernels, *capacity, 0);
            assert!(bits(&got) == bits(&recorded) || got.iter().any(|v| v.is_nan()), "{first} positions and {m}");
            // On tensor cores the bits of a row are those that it has without the rows before it.
            if alone {
                let (last, of_all) = (attend(kernels, *capacity, without), &got[without * heads.heads * size..]);
                let same = bits(&last) == bits(of_all) || got.iter().any(|v| v.is_nan());
                assert!(same, "{first} positions and {m}, {kernels:?}");
            }
            got
        });
        for got in &got {
            for i in 0..m {
                for h in 0..heads.heads {
                    let query: Vec<f64> = queries[i * row + h * size..][..size].iter().map(|&v| f64::from(v)).collect();
                    self.check(query, computed, h, first + i, &got[(i * heads.heads + h) * size..][..size], out_type);
                }
            }
        }
        let [got, _] = got;
        got
    }

    /// How so many rows are attended.
    fn computed(&self, rows: usize) -> Computed {
        let (heads, arch, kv) = (self.heads, self.bench.gpu.caps().arch, self.cache.kv());
        // Before sm_80 tensor cores multiply f16, and heads are as large as 64 KB of shared memory allow.
        let largest = match arch.number {
            80.. => 256,
            _ if kv != KvType::F16 => 0,
            _ => {
                if rows == 1 {
                    192
                } else {
                    160
                }
            }
        };
        let on_tensor_cores = kv != KvType::F32 && heads.head_size.is_multiple_of(8) && heads.head_size <= largest;
        match rows {
            1 if on_tensor_cores => Computed::InTwoHalves,
            _ if on_tensor_cores && rows * heads.group() > FEW_QUERIES => Computed::Rounded,
            _ => Computed::Exactly,
        }
    }

    /// The types that queries and weights are rounded to on tensor cores.
    fn rounded_to(&self) -> [Float; 2] {
        match self.cache.kv() {
            KvType::F32 => [Float::F32; 2],
            KvType::F16 => [Float::F16; 2],
            KvType::Bf16 => [Float::BF16; 2],
            KvType::Int8 => [Float::F16, Float::BF16],
        }
    }

    /// A query in the type of those in products, after a power of two has brought it to where halves are normal.
    fn rounded(&self, mut query: Vec<f64>) -> Vec<f64> {
        let ([dtype, _], most) = (self.rounded_to(), query.iter().fold(0f64, |a, v| a.max(v.abs())));
        let up = if dtype == Float::F16 && most > 0.0 { (14.0 - most.log2().floor()).exp2() } else { 1.0 };
        query.iter_mut().for_each(|v| *v = f64::from(dtype.round((*v * up) as f32)) / up);
        query
    }

    /// One output against f64, where everything that it sees is finite.
    fn check(&self, query: Vec<f64>, computed: Computed, h: usize, position: usize, got: &[f32], out_type: Float) {
        let query = &if computed == Computed::Rounded { self.rounded(query) } else { query };
        let (size, scale) = (self.heads.head_size, 1.0 / f64::from((self.heads.head_size as f32).sqrt()));
        let kv = h / self.heads.group() * size..(h / self.heads.group() + 1) * size;
        let (mut scores, mut t, mut largest) = (Vec::new(), 0f64, 0f64);
        let seen = self.window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
        for p in seen.clone() {
            let (key, value) = (&self.seen[0][p][kv.clone()], &self.seen[1][p][kv.clone()]);
            let mut score = scale * query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
            score = self.cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            let less = self.slopes.as_ref().map_or(0.0, |(of, _)| f64::from(of[h]) * (position - p) as f64);
            scores.push(score - less);
            t = t.max(scale * query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum::<f64>() + less);
            largest = value.iter().fold(largest, |a, v| a.max(v.abs()));
            if query.iter().chain(key).chain(value).any(|v| !v.is_finite()) {
                assert!(got.iter().any(|v| v.is_nan()), "position {position}, head {h}: {got:?}");
                return;
            }
        }
        let sink = self.sinks.as_ref().map(|(of, _)| f64::from(of[h]));
        let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - most).exp());
        let changes = self.cap.is_some() || self.slopes.is_some();
        let of_changes = if changes { 8.0 * (t + f64::from(self.cap.unwrap_or(0.0)) + 16.0) } else { 0.0 };
        let n = seen.len() as f64;
        let of_sums = n / 8.0 + size as f64 + 64.0 + 4.0 * t * size as f64;
        let [q, u] = self.rounded_to().map(Float::unit_roundoff);
        let on_tensor_cores = 2.0 * n + size as f64 + 64.0 + 8.0 * t * size as f64;
        let (units, roundoff, absolute) = match computed {
            Computed::Exactly => (of_sums, 0.0, 0.0),
            Computed::Rounded => (on_tensor_cores, u, 0.0),
            Computed::InTwoHalves => (on_tensor_cores, 0.0, 2.0 * u * u + (4.0 * q * q * t).exp_m1()),
        };
        let what = format!("position {position}, head {h} of {:?}", self.heads);
        for (d, &got) in kv.zip(got) {
            let terms = seen.clone().zip(&weights).map(|(p, w)| w / total * self.seen[1][p][d]);
            let (want, most) = terms.fold((0.0, 0.0), |(sum, most), term| (sum + term, most + term.abs()));
            let bound = ((units + of_changes) * 2f64.powi(-24) + absolute) * largest + roundoff * most;
            close(&[got], &[want], out_type, bound, 0.0, &what);
        }
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
            for (j, kv) in KvType::ALL.into_iter().enumerate() {
                let mut text = match (i + j) % 3 {
                    0 => Text::with_capacity(&gpu, heads, rotated, kv, 5 * PAGE_LENGTH).shuffled(&mut random),
                    _ => Text::new(&gpu, heads, rotated, kv),
                };
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
        let windows = [1, 2, 31, 32, 33, 127, 128, 129, 130, 200, 300, usize::MAX];
        for (i, (window, kv)) in windows.into_iter().flat_map(|window| KvType::ALL.map(|kv| (window, kv))).enumerate() {
            let (heads, kv_heads, head_size, rotated) = [HEADS[0], HEADS[3], HEADS[6]][i / 4 % 3];
            let mut text = Text::new(&gpu, Heads { heads, kv_heads, head_size }, rotated, kv);
            text.window = Some(window);
            if i / 4 % 2 == 0 {
                text = text.with_norms(&mut random);
            }
            for (step, m) in [1, 30, 1, 97, 1, 1, 60, 1, 1, 130, 1, 1, 50, 1].into_iter().enumerate() {
                text.read(&random.normals(m * text.heads.row()), TYPES[(i + step) % 3]);
            }
            assert!(text.seen[0].len() > 2 * PART_LENGTH);
        }
    }
}

/// Heads for tests of NaN: of the kernel without and of that with tensor cores.
const OF_NAN: [(usize, KvType); 6] = [
    (20, KvType::F32),
    (20, KvType::F16),
    (24, KvType::F16),
    (64, KvType::Bf16),
    (20, KvType::Int8),
    (64, KvType::Int8),
];

#[test]
fn nan_reaches_nobody_whose_window_it_has_left() {
    for gpu in gpus() {
        let mut random = Random(11);
        for (size, kv) in OF_NAN {
            let heads = Heads { heads: 4, kv_heads: 2, head_size: size };
            for place in [4 * size + 5, 6 * size + 9] {
                let mut text = Text::new(&gpu, heads, size, kv);
                text.window = Some(40);
                let mut rows = random.normals(20 * heads.row());
                rows[17 * heads.row() + place] = f32::NAN;
                let row_length = heads.heads * heads.head_size;
                let prompt = text.read(&rows, Float::F32);
                let more = text.read(&random.normals(150 * heads.row()), Float::F32);
                let all = [prompt, more].concat();
                for (position, row) in all.chunks_exact(row_length).enumerate() {
                    let seen = (17..17 + 40).contains(&position);
                    assert_eq!(row.iter().any(|v| v.is_nan()), seen, "{kv} {size}, position {position}");
                }
                // The last step is past the window by far, and in another part.
                for _ in 0..60 {
                    assert!(text.read(&random.normals(heads.row()), Float::F32).iter().all(|v| v.is_finite()));
                }
            }
        }
    }
}

#[test]
fn nan_reaches_those_that_see_it() {
    for gpu in gpus() {
        let mut random = Random(8);
        for (size, kv) in OF_NAN {
            let heads = Heads { heads: 4, kv_heads: 2, head_size: size };
            let places = [("a query", size + 3), ("a key", 4 * size + 5), ("a value", 6 * size + 9)];
            for (what, place) in places {
                let mut text = Text::new(&gpu, heads, size, kv);
                text.read(&random.normals(40 * heads.row()), Float::F32);
                let mut rows = random.normals(250 * heads.row());
                rows[17 * heads.row() + place] = f32::NAN;
                let out = text.read(&rows, Float::F32);
                let row_length = heads.heads * heads.head_size;
                let bad = |row: usize| out[row * row_length..][..row_length].iter().filter(|v| v.is_nan()).count();
                // A whole head for queries, both heads of the group for keys and codes, one element of each for other values.
                let of_one = match what {
                    "a query" => size,
                    "a value" if kv != KvType::Int8 => 2,
                    _ => 2 * size,
                };
                for row in 0..250 {
                    let sees = row == 17 || row > 17 && what != "a query";
                    assert_eq!(bad(row), if sees { of_one } else { 0 }, "{what}, {kv} {size}, row {row}");
                }
                let after = text.read(&random.normals(heads.row()), Float::F32);
                assert_eq!(after.iter().any(|v| v.is_nan()), what != "a query");
            }
        }
    }
}

#[test]
fn many_rows_of_any_shape_are_within_the_bound() {
    for gpu in gpus() {
        let mut random = Random(21);
        for case in 0..36 {
            let head_size = 8 * (1 + random.below(32));
            let kv_heads = 1 + random.below(3);
            let heads = Heads { heads: kv_heads * (1 + random.below(7)), kv_heads, head_size };
            let (kv, capacity) = (KvType::ALL[1 + case % 3], 200 + random.below(500));
            let capacity = if case % 4 == 1 { capacity.next_multiple_of(PAGE_LENGTH) } else { capacity };
            if head_size > 128 && gpu.caps().shared_bytes < 100_000 {
                continue;
            }
            let mut text = Text::with_capacity(&gpu, heads, 0, kv, capacity);
            text.window = (case % 5 < 2).then(|| 1 + random.below(300));
            if case % 4 == 1 {
                text = text.shuffled(&mut random);
            }
            // Up to the last position that there is.
            let (first, last) = (random.below(capacity - 150), 1 + random.below(150));
            for (step, m) in [first, capacity - first - last, last].into_iter().filter(|&m| m > 0).enumerate() {
                text.read(&random.normals(m * heads.row()), TYPES[(case + step) % 3]);
            }
        }
    }
}

#[test]
fn queries_that_no_half_holds_are_within_the_bound() {
    for gpu in gpus() {
        let (heads, mut random) = (Heads { heads: 8, kv_heads: 2, head_size: 64 }, Random(22));
        let factors = [1e6, 1e-6, 0.0].map(|factor| [KvType::F16, KvType::Bf16, KvType::Int8].map(|kv| (factor, kv)));
        for (factor, kv) in factors.concat() {
            let mut text = Text::new(&gpu, heads, 0, kv);
            let mut rows = random.normals(90 * heads.row());
            for row in rows.chunks_exact_mut(heads.row()) {
                let (queries, others) = row.split_at_mut(8 * 64);
                queries.iter_mut().for_each(|v| *v *= factor);
                // Scores as of normal queries, but for keys that would be no normal halves.
                let keys = if factor > 1.0 { 1e-4 } else { 1e3 };
                others[..2 * 64].iter_mut().for_each(|v| *v *= keys);
            }
            text.read(&rows, Float::F32);
        }
    }
}
