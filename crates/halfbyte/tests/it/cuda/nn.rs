//! What a language model needs besides quantised products, against f64, on every device of the machine.

use super::gpus;
use crate::data::{Random, rounded};
use bytemuck::Pod;
use half::{bf16, f16};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::{Buffer, FloatView, FloatViewMut, Stream, View, ViewMut};
use halfbyte::cuda::nn::{
    self, Attention, Dense, DenseCall, Draw, FloatBuffer, KvCache, Norm, PART_LENGTH, Rope, Step,
};
use halfbyte::format::reference::Bound;
use halfbyte::kernel::Heads;
use halfbyte::{Error, Float, Floats};

const TYPES: [Float; 3] = [Float::F16, Float::BF16, Float::F32];

/// Elements before and after every output, to see that a kernel writes nothing else.
const GUARD: usize = 64;

struct Bench<'a> {
    gpu: &'a Gpu,
    stream: Stream,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        Self { gpu, stream: gpu.stream().unwrap() }
    }

    fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = self.gpu.context().allocate(values.len()).unwrap();
        self.stream.upload(values, buffer.view_mut()).unwrap();
        buffer
    }

    /// Values that are exact in a type, as that type.
    fn floats(&self, values: &[f32], dtype: Float) -> FloatBuffer {
        match dtype {
            Float::F16 => FloatBuffer::F16(self.upload(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>())),
            Float::BF16 => {
                FloatBuffer::BF16(self.upload(&values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>()))
            }
            Float::F32 => FloatBuffer::F32(self.upload(values)),
        }
    }

    fn read<T: Pod>(&self, view: View<'_, T>) -> Vec<T> {
        let mut out = vec![T::zeroed(); view.len()];
        self.stream.download(view, &mut out).unwrap();
        out
    }

    fn widened(&self, view: FloatView<'_>) -> Vec<f32> {
        match view {
            FloatView::F16(v) => self.read(v).into_iter().map(f16::to_f32).collect(),
            FloatView::BF16(v) => self.read(v).into_iter().map(bf16::to_f32).collect(),
            FloatView::F32(v) => self.read(v),
        }
    }

    /// What `work` writes to an output of `len` elements, twice with the same bits and nothing around it.
    fn output(&self, dtype: Float, len: usize, work: &mut dyn FnMut(FloatViewMut<'_>)) -> Vec<f32> {
        let mut once = || {
            let poison = vec![1e4; len + 2 * GUARD];
            let mut out = self.floats(&rounded(&poison, dtype), dtype);
            work(out.view_mut(GUARD..GUARD + len));
            let all = self.widened(out.view(0..len + 2 * GUARD));
            let poison = dtype.round(1e4);
            assert!(all[..GUARD].iter().chain(&all[GUARD + len..]).all(|&v| v == poison), "wrote outside");
            all[GUARD..GUARD + len].to_vec()
        };
        let (first, second) = (once(), once());
        assert_eq!(bits(&first), bits(&second), "not the same bits twice");
        first
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn whole(buffer: &FloatBuffer) -> FloatView<'_> {
    buffer.view(0..buffer.len())
}

fn single(view: FloatViewMut<'_>) -> ViewMut<'_, f32> {
    match view {
        FloatViewMut::F32(view) => view,
        other => panic!("{other:?}"),
    }
}

/// Each value within `relative` of what is wanted, besides being rounded to `out`.
fn close(got: &[f32], want: &[f64], out: Float, absolute: f64, relative: f64, what: &str) {
    assert_eq!(got.len(), want.len());
    // Halfs below their normal range are rounded to a step of 2⁻²⁴.
    let smallest = if out == Float::F16 { 2f64.powi(-25) } else { 0.0 };
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        if want.is_nan() {
            assert!(got.is_nan(), "{what}: element {i} is {got}, expected NaN");
            continue;
        }
        let allowed = absolute + relative * want.abs();
        let allowed = allowed + out.unit_roundoff() * (want.abs() + allowed) + smallest;
        let error = (f64::from(got) - want).abs();
        assert!(error <= allowed, "{what}: element {i} is {got}, expected {want} ± {allowed:e}, off by {error:e}");
    }
}

#[test]
fn rows_of_the_embedding_are_exact() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(1));
        for (dtype, [vocab, hidden]) in TYPES.into_iter().zip([[7, 5], [100, 384], [3, 1000]]) {
            let table = rounded(&random.normals(vocab * hidden), dtype);
            let on_device = bench.floats(&table, dtype);
            let tokens: Vec<u32> = (0..20).map(|_| random.below(vocab) as u32).chain([0, vocab as u32 - 1]).collect();
            let ids = bench.upload(&tokens);
            let got = bench.output(Float::F32, tokens.len() * hidden, &mut |out| {
                nn::embed(&gpu, &bench.stream, whole(&on_device), hidden, ids.view(), single(out)).unwrap();
            });
            let want = tokens.iter().flat_map(|&t| &table[t as usize * hidden..][..hidden]).copied();
            assert_eq!(got, want.collect::<Vec<_>>());
        }
    }
}

#[test]
fn norms_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(2));
        for [m, d] in [[1, 1], [3, 33], [2, 384], [5, 1000], [2, 8192]] {
            let (x, update, weight) = (random.activations(m * d), random.normals(m * d), random.normals(d));
            let (added, factors) = (bench.upload(&update), bench.upload(&weight));
            for (out_type, with) in TYPES.into_iter().zip([false, true, true]) {
                let mut sums = Vec::new();
                let got = bench.output(out_type, m * d, &mut |out| {
                    let mut residual = bench.upload(&x);
                    let update = with.then(|| added.view());
                    let norm = Norm { residual: residual.view_mut(), update, weight: factors.view(), eps: 1e-5, out };
                    nn::rms_norm(&gpu, &bench.stream, norm).unwrap();
                    sums = bench.read(residual.view());
                });
                let stream: Vec<f32> = x.iter().zip(&update).map(|(x, u)| if with { x + u } else { *x }).collect();
                assert_eq!(bits(&sums), bits(&stream));
                let want: Vec<f64> = stream
                    .chunks_exact(d)
                    .flat_map(|row| {
                        let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / d as f64;
                        let factor = 1.0 / (mean + f64::from(1e-5f32)).sqrt();
                        row.iter().zip(&weight).map(move |(&v, &w)| f64::from(v) * factor * f64::from(w))
                    })
                    .collect();
                close(&got, &want, out_type, 0.0, (d as f64 / 8.0 + 16.0) * 2f64.powi(-24), &format!("{m} × {d}"));
            }
        }
    }
}

#[test]
fn swiglu_is_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(3));
        for (out_type, [m, inner]) in TYPES.into_iter().zip([[1, 1], [3, 1000], [7, 333]]) {
            let mut gate_up: Vec<f32> = random.normals(2 * m * inner).iter().map(|v| v * 6.0).collect();
            gate_up[0] = -80.0;
            let on_device = bench.upload(&gate_up);
            let got = bench.output(out_type, m * inner, &mut |out| {
                nn::swiglu(&gpu, &bench.stream, on_device.view(), inner, out).unwrap();
            });
            let want: Vec<f64> = (0..m * inner)
                .map(|i| {
                    let row = &gate_up[i / inner * 2 * inner..];
                    let [gate, up] = [row[i % inner], row[i % inner + inner]].map(f64::from);
                    gate / (1.0 + (-gate).exp()) * up
                })
                .collect();
            close(&got, &want, out_type, 0.0, 2f64.powi(-21), "swiglu");
        }
    }
}

#[test]
fn the_greatest_logit_is_the_first_of_equals_and_the_text_goes_on() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(4));
        let run = |logits: &[f32]| {
            let values = bench.upload(logits);
            let (mut choice, mut token, mut position) =
                (bench.upload(&[9u32; 2]), bench.upload(&[9u32]), bench.upload(&[40u32]));
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut(),
                token: token.view_mut(),
                position: position.view_mut(),
                advance: 3,
            };
            nn::argmax(&gpu, &bench.stream, step).unwrap();
            let choice = bench.read(choice.view());
            assert_eq!((bench.read(token.view())[0], bench.read(position.view())[0]), (choice[0], 43));
            (choice[0] as usize, f32::from_bits(choice[1]))
        };
        for len in [1, 31, 33, 1000, 4096, 128_256] {
            let mut logits = random.normals(len);
            let at = random.below(len);
            logits[at] = 50.0;
            assert_eq!(run(&logits), (at, 50.0));
            let (first, second) = (random.below(len), random.below(len));
            logits[first] = 60.0;
            logits[second] = 60.0;
            assert_eq!(run(&logits), (first.min(second), 60.0));
            logits[at] = f32::NAN;
            let (index, value) = run(&logits);
            assert!(index == at && value.is_nan());
            assert_eq!(run(&vec![f32::NEG_INFINITY; len]), (0, f32::NEG_INFINITY));
        }
    }
}

/// The token that a draw must give, in f64, and how far `random` is from where another begins.
fn drawn(logits: &[f32], temperature: f32, top_k: usize, top_p: f32, random: f64) -> (usize, f64) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| f64::from((logits[i] - most) * (1.0 / temperature)).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if top_k > 0 {
        order.truncate(top_k);
    }
    let mut slack = f64::INFINITY;
    if top_p < 1.0 {
        let wanted = order.iter().map(|&i| weight(i)).sum::<f64>() * f64::from(top_p);
        let mut sum = 0.0;
        let count = order.iter().position(|&i| {
            sum += weight(i);
            slack = slack.min((sum / wanted - 1.0).abs());
            sum >= wanted
        });
        order.truncate(count.map_or(order.len(), |last| last + 1));
    } else {
        order.sort_unstable();
    }
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let (mut sum, mut token) = (0.0, None);
    for &i in &order {
        sum += weight(i);
        slack = slack.min((sum / total - random).abs());
        if sum > random * total && token.is_none() {
            token = Some(i);
        }
    }
    (token.unwrap_or(0), slack)
}

#[test]
fn draws_are_those_of_the_definition() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(9));
        for (round, len) in [1, 2, 33, 600, 4096, 50_000].into_iter().enumerate() {
            let mut logits: Vec<f32> = random.normals(len).iter().map(|v| v * 3.0).collect();
            if len > 100 {
                // Equals at the top, and tokens that never come.
                let top = 12.0;
                (0..5).for_each(|i| logits[i * 7] = top);
                (0..20).for_each(|i| logits[i * 3 + 1] = f32::NEG_INFINITY);
            }
            let values = bench.upload(&logits);
            let (mut choice, mut token, mut position) =
                (bench.upload(&[0u32; 2]), bench.upload(&[0u32]), bench.upload(&[0u32]));
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut(),
                token: token.view_mut(),
                position: position.view_mut(),
                advance: 1,
            };
            nn::argmax(&gpu, &bench.stream, step).unwrap();
            let mut distinct = std::collections::BTreeSet::new();
            for i in 0..60 {
                let temperature = [1.0, 0.7, 1.8, 1e-30][(i + round) % 4];
                let (top_k, top_p) = [(0, 1.0), (40, 1.0), (0, 0.9), (50, 0.95), (3, 0.6), (1, 0.5)][i % 6];
                let at = if i < 6 { 0.0 } else { (random.bits() >> 11) as f64 / (1u64 << 53) as f64 };
                let (want, slack) = drawn(&logits, temperature, top_k, top_p, at);
                let mut drawn = bench.upload(&[9u32; 2]);
                let draw = Draw {
                    logits: values.view(),
                    choice: choice.view(),
                    drawn: drawn.view_mut(),
                    token: token.view_mut(),
                    temperature,
                    top_k,
                    top_p,
                    random: at,
                };
                nn::sample(&gpu, &bench.stream, draw).unwrap();
                let got = bench.read(drawn.view());
                let what = format!("{len} logits, {temperature} {top_k} {top_p} {at}: {got:?}, expected {want}");
                assert_eq!(bench.read(token.view())[0], got[0]);
                assert!(got[0] as usize == want || slack < 1e-5, "{what}, {slack:e} from a border");
                assert!(logits[got[0] as usize] > f32::NEG_INFINITY, "{what}");
                distinct.insert(got[0]);
            }
            // The definition itself draws 1, 2, 6, 6, 16 and 20 different ones.
            assert!(distinct.len() >= [1, 2, 5, 5, 12, 15][round], "{distinct:?}");
        }
    }
}

#[test]
fn dense_products_are_within_the_bound() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(5));
        for (s, [n, k]) in [[1, 1], [9, 24], [70, 33], [65, 384], [130, 300], [5, 0]].into_iter().enumerate() {
            for (i, m) in [0, 1, 2, 5, 16, 17, 64, 65, 130].into_iter().enumerate() {
                let [x_type, w_type, out_type] = [TYPES[(i + s) % 3], TYPES[s % 3], TYPES[(i / 3 + s) % 3]];
                let x = rounded(&random.activations(m * k), x_type);
                let w = rounded(&random.normals(n * k), w_type);
                let bias = (i % 2 == 0).then(|| random.normals(n));
                let weight = match bench.floats(&w, w_type) {
                    FloatBuffer::F32(_) => Dense::new(&gpu, &bench.stream, Floats::F32(&w), [n, k]),
                    FloatBuffer::F16(_) => {
                        let w: Vec<f16> = w.iter().map(|&v| f16::from_f32(v)).collect();
                        Dense::new(&gpu, &bench.stream, Floats::F16(&w), [n, k])
                    }
                    FloatBuffer::BF16(_) => {
                        let w: Vec<bf16> = w.iter().map(|&v| bf16::from_f32(v)).collect();
                        Dense::new(&gpu, &bench.stream, Floats::BF16(&w), [n, k])
                    }
                };
                let weight = weight.unwrap();
                let (on_device, bias_on_device) = (bench.floats(&x, x_type), bias.as_ref().map(|b| bench.upload(b)));
                let got = bench.output(out_type, m * n, &mut |y| {
                    let bias = bias_on_device.as_ref().map(Buffer::view);
                    weight.forward(&gpu, &bench.stream, DenseCall { x: whole(&on_device), m, bias, y }).unwrap();
                });
                let bound = Bound::new(out_type, k);
                for (at, &got) in got.iter().enumerate() {
                    let (row, output) = (at / n, at % n);
                    let terms = x[row * k..][..k].iter().zip(&w[output * k..][..k]);
                    let terms: Vec<f64> = terms.map(|(&x, &w)| f64::from(x) * f64::from(w)).collect();
                    let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[output]));
                    let want = terms.iter().sum::<f64>() + bias;
                    let allowed = bound.allowed(terms.iter().map(|t| t.abs()).sum::<f64>() + bias.abs());
                    let what = format!("{m} × {n} × {k}, {x_type} · {w_type} to {out_type}");
                    assert!((f64::from(got) - want).abs() <= allowed, "{what}: {got}, expected {want} ± {allowed:e}");
                }
            }
        }
    }
}

#[test]
fn columns_come_to_lie_side_by_side() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(6));
        let (left, right) = (random.normals(3 * 5), random.normals(3 * 300));
        let [a, b] = [&left, &right].map(|values| bench.upload(values));
        let got = bench.output(Float::F32, 3 * 305, &mut |out| {
            let mut out = single(out);
            let pointer = out.pointer();
            for (from, range) in [(a.view(), 0..5), (b.view(), 5..305)] {
                nn::columns(&gpu, &bench.stream, from, out, 305, range).unwrap();
                out = reborrow(pointer, 3 * 305);
            }
        });
        for row in 0..3 {
            assert_eq!(got[row * 305..][..5], left[row * 5..][..5]);
            assert_eq!(got[row * 305 + 5..][..300], right[row * 300..][..300]);
        }
    }
}

fn reborrow<'a>(pointer: u64, len: usize) -> ViewMut<'a, f32> {
    // SAFETY: the caller has just been handed these elements, to write them one part after the other.
    unsafe { ViewMut::from_raw(pointer, len) }
}

/// A text in one layer on the device and, rotated and rounded as there, in f64.
struct Text<'a> {
    bench: Bench<'a>,
    heads: Heads,
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
        Self { bench, heads, rope, frequencies, cache, partial, seen: Default::default() }
    }

    fn rotate(&self, head: &[f32], position: usize) -> Vec<f64> {
        let mut out: Vec<f64> = head.iter().map(|&v| f64::from(v)).collect();
        let pairs = self.frequencies.len();
        for (i, frequency) in self.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * frequency).sin_cos();
            let (a, b) = (out[i], out[i + pairs]);
            (out[i], out[i + pairs]) = (a * cos - b * sin, b * cos + a * sin);
        }
        out
    }

    /// Rows go in and are attended; checks the cache and the output, and returns the latter.
    fn read(&mut self, qkv: &[f32], out_type: Float) -> Vec<f32> {
        let (heads, size, row) = (self.heads, self.heads.head_size, self.heads.row());
        let (m, first) = (qkv.len() / row, self.seen[0].len());
        let position = self.bench.upload(&[first as u32]);
        let mut on_device = self.bench.upload(qkv);
        let stream = &self.bench.stream;
        self.rope.apply(self.bench.gpu, stream, on_device.view_mut(), position.view(), &mut self.cache, LAYER).unwrap();
        let queries = self.bench.read(on_device.view());
        let [keys, values] = self.cache.layer("test", LAYER).unwrap().map(|view| self.bench.widened(view));
        let cached = |from: &[f32], head: usize, position: usize| -> Vec<f64> {
            from[(head * CAPACITY + position) * size..][..size].iter().map(|&v| f64::from(v)).collect()
        };
        for i in 0..m {
            let head = |h: usize| &qkv[i * row + h * size..][..size];
            for h in 0..heads.heads {
                // Of NaN and a number, `max` takes the number.
                let norm = head(h).iter().map(|v| v.abs()).fold(0.0, f32::max);
                let got = &queries[i * row + h * size..][..size];
                close(
                    got,
                    &self.rotate(head(h), first + i),
                    Float::F32,
                    4.0 * 2f64.powi(-24) * f64::from(norm),
                    0.0,
                    "q",
                );
            }
            let (mut of_keys, mut of_values) = (Vec::new(), Vec::new());
            for h in 0..heads.kv_heads {
                let (key, value) = (head(heads.heads + h), head(heads.heads + heads.kv_heads + h));
                let got = cached(&keys, h, first + i);
                let norm = f64::from(key.iter().map(|v| v.abs()).fold(0.0, f32::max));
                let narrow: Vec<f32> = got.iter().map(|&v| v as f32).collect();
                let dtype = self.cache.dtype();
                close(&narrow, &self.rotate(key, first + i), dtype, 4.0 * 2f64.powi(-24) * norm, 0.0, "k");
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
        // A bound on the positions that is larger than need be, as a recorded step has it.
        let longest = (first + m).next_multiple_of(PART_LENGTH).min(CAPACITY);
        let Self { bench, cache, partial, .. } = self;
        let got = bench.output(out_type, m * heads.heads * size, &mut |out| {
            let what = Attention { qkv: on_device.view(), position: position.view(), first_row: 0, longest, scale };
            nn::attention(bench.gpu, &bench.stream, &what, cache, LAYER, partial.view_mut(), out).unwrap();
        });
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
        for p in 0..=position {
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
            kv.map(|d| weights.iter().enumerate().map(|(p, w)| w / total * self.seen[1][p][d]).sum()).collect();
        let n = position as f64 + 1.0;
        let bound = (n / 8.0 + size as f64 + 64.0 + 4.0 * t * size as f64) * 2f64.powi(-24) * largest;
        close(got, &want, out_type, bound, 0.0, &format!("position {position}, head {h} of {:?}", self.heads));
    }
}

const HEADS: [(usize, usize, usize, usize); 6] =
    [(6, 2, 64, 64), (4, 4, 32, 32), (8, 1, 128, 128), (3, 3, 20, 12), (2, 1, 80, 80), (2, 2, 256, 256)];

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

#[test]
fn wrong_shapes_are_errors() {
    for gpu in gpus() {
        let bench = Bench::new(&gpu);
        let heads = Heads { heads: 4, kv_heads: 2, head_size: 16 };
        let mut cache = KvCache::new(&gpu, 2, heads, 8, Float::F16).unwrap();
        assert_eq!(cache.bytes(), 2 * 2 * 2 * 8 * 16 * 2);
        let rope = Rope::new(&gpu, &bench.stream, &[1.0; 8]).unwrap();
        let (position, mut qkv) = (bench.upload(&[0u32]), bench.upload(&vec![0f32; 2 * heads.row()]));
        let mut partial = bench.upload(&[0f32; 4]);
        let mut out = bench.floats(&[0.0; 2 * 64], Float::F16);
        let mut attend = |rows: usize, longest, layer, out_len| {
            let qkv = qkv.view().slice(0..rows);
            let what = Attention { qkv, position: position.view(), first_row: 0, longest, scale: 1.0 };
            let out = out.view_mut(0..out_len);
            nn::attention(&gpu, &bench.stream, &what, &cache, layer, partial.view_mut(), out)
        };
        attend(2 * heads.row(), 8, 1, 128).unwrap();
        let row = heads.row();
        for (rows, longest, layer, out_len) in
            [(row + 1, 8, 1, 64), (row, 9, 1, 64), (row, 8, 2, 64), (row, 8, 1, 63), (2 * row, 1, 1, 128)]
        {
            let error = attend(rows, longest, layer, out_len).unwrap_err();
            assert!(matches!(error, Error::Invalid { op: "attention", .. }), "{error}");
        }
        let stream = &bench.stream;
        assert!(rope.apply(&gpu, stream, qkv.view_mut().slice(0..row + 1), position.view(), &mut cache, 0).is_err());
        assert!(rope.apply(&gpu, stream, qkv.view_mut(), position.view(), &mut cache, 2).is_err());
        let large = Rope::new(&gpu, stream, &[1.0; 9]).unwrap();
        assert!(large.apply(&gpu, stream, qkv.view_mut(), position.view(), &mut cache, 0).is_err());
        assert!(Rope::new(&gpu, stream, &[f64::NAN]).is_err() && Rope::new(&gpu, stream, &[1.0; 129]).is_err());
        for (heads, capacity) in [
            (Heads { kv_heads: 3, ..heads }, 8),
            (Heads { head_size: 257, ..heads }, 8),
            (heads, usize::MAX / 2),
            (heads, 1 << 31),
        ] {
            assert!(KvCache::new(&gpu, 1 << 20, heads, capacity, Float::F32).is_err());
        }
        let (ids, two) = (bench.upload(&[0u32]), bench.upload(&[0f32; 2]));
        let table = bench.floats(&[0.0; 6], Float::F32);
        let mut to = bench.upload(&[0f32; 6]);
        assert!(nn::embed(&gpu, stream, whole(&table), 4, ids.view(), to.view_mut().slice(0..4)).is_err());
        assert!(nn::embed(&gpu, stream, whole(&table), 3, ids.view(), to.view_mut().slice(0..4)).is_err());
        assert!(nn::embed(&gpu, stream, table.view(0..0), 3, ids.view(), to.view_mut().slice(0..3)).is_err());
        assert!(nn::columns(&gpu, stream, two.view(), to.view_mut(), 3, 2..4).is_err());
        assert!(Dense::new(&gpu, stream, Floats::F32(&[0.0; 5]), [2, 3]).is_err());
        stream.synchronize().unwrap();
    }
}
