//! A step of one token in one kernel against f64, with the roundings that it makes.

use super::Bench;
use crate::cuda::gpus;
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{self, Packed, Packer};
use halfbyte::cuda::nn::{
    HeadNorms, KvCache, PRODUCTS, PersistentDecode, PersistentPlan, Rope, StepLayer, StepOfText, StepProduct,
    StepSizes, StreamNorm,
};
use halfbyte::format::reference::dequantize;
use halfbyte::kernel::Heads;
use halfbyte::kv_pages::PAGE_LENGTH;
use halfbyte::{Float, QTensor, StoredTensor};

const EPS: f32 = 1e-5;

struct Product {
    w: Vec<f64>,
    /// Columns of x that are quantised together; None: x is multiplied as it is.
    quantized: Option<usize>,
    packed: Packed,
    bias: Option<(Vec<f32>, Buffer<f32>)>,
}

type Vector = (Vec<f32>, Buffer<f32>);

struct Layer {
    products: [Product; PRODUCTS],
    /// Rows of values, where they are not in the first product.
    values: Option<Product>,
    norms: [Vector; 2],
    head_norms: Option<[Vector; 2]>,
    window: Option<usize>,
    /// Keys, then values, `[positions][kv_heads][head_size]`.
    seen: [Vec<Vec<f64>>; 2],
}

struct Case {
    sizes: StepSizes,
    format: &'static str,
    /// Instead of the format: of each weight one of these.
    k_types: &'static [&'static str],
    dtype: Float,
    /// Tokens before the first that is looked at.
    before: usize,
    window: Option<usize>,
    head_norms: bool,
    biases: bool,
    /// Whether keys and values lie in pages.
    paged: bool,
}

fn norm(stream: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = stream.iter().map(|v| v * v).sum::<f64>() / stream.len() as f64;
    let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
    stream.iter().zip(weight).map(|(v, &w)| v * factor * f64::from(w)).collect()
}

fn round(v: f64, dtype: Float) -> f64 {
    f64::from(dtype.round(v as f32))
}

/// What codes of 8 bits stand for.
fn quantized(x: &[f64]) -> Vec<f64> {
    let scale = x.iter().fold(0f64, |most, v| most.max(v.abs())) / 127.0;
    x.iter().map(|v| (v / scale).round_ties_even() * scale).collect()
}

fn multiply(product: &Product, x: &[f64]) -> Vec<f64> {
    let codes = product.quantized.map(|group| x.chunks(group).flat_map(quantized).collect::<Vec<_>>());
    let x = codes.as_deref().unwrap_or(x);
    let mut y: Vec<f64> =
        product.w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
    if let Some((bias, _)) = &product.bias {
        y.iter_mut().zip(bias).for_each(|(y, &b)| *y += f64::from(b));
    }
    y
}

/// The tensor with scales that make outputs about as large as inputs.
fn of_order_one(w: &QTensor) -> QTensor {
    let factor = 300.0 / (w.format().max_code() as f32 * (w.k() as f32).sqrt());
    // What is a whole multiple of a half stays one.
    let factor = if w.format().channel_scale.is_some() { factor.log2().round().exp2() } else { factor };
    let scales = w.scales().iter().map(|&s| w.format().scale.round(s * factor)).collect();
    QTensor::new(w.format(), [w.n(), w.k()], w.codes().to_vec(), scales, w.zeros().clone(), None).unwrap()
}

impl Product {
    fn of_step(&self) -> StepProduct<'_> {
        (&self.packed, self.bias.as_ref().map(|(_, bias)| bias.view()))
    }
}

impl Layer {
    fn new(bench: &Bench<'_>, random: &mut Random, case: &Case) -> Self {
        let StepSizes { hidden, inner, heads, .. } = case.sizes;
        let shapes =
            [[heads.row(), hidden], [hidden, heads.heads * heads.head_size], [2 * inner, hidden], [hidden, inner]];
        let format = parse(case.format);
        let vector = |random: &mut Random, len: usize, around: f32| -> Vector {
            let values: Vec<f32> = random.normals(len).iter().map(|v| around + 0.2 * v).collect();
            let buffer = bench.upload(&values);
            (values, buffer)
        };
        let product = |random: &mut Random, [n, k]: [usize; 2]| {
            let (w, packed, quantized) = if !case.k_types.is_empty() {
                let of = case.k_types[random.below(case.k_types.len())];
                let seed = random.bits() as u32;
                let w = StoredTensor::random_k_type(parse(of).weight, [n, k], seed).unwrap();
                let packed = Packer::new(bench.gpu, &bench.stream).pack(&[&w], format.act, case.dtype).unwrap();
                (w.to_qtensor().unwrap(), packed, None)
            } else {
                let mut weight = format.weight;
                match &mut weight.channel_scale {
                    Some(scale) => *scale = case.dtype,
                    None => weight.scale = case.dtype,
                }
                let w = of_order_one(&with_zeros_in_bytes(random.qtensor(weight, [n, k], false)));
                let packed = matmul::pack(bench.gpu, &bench.stream, &w, format.act, case.dtype).unwrap();
                let quantized = format.act.is_quantized().then(|| weight.activation_group().len(k));
                (w, packed, quantized)
            };
            let bias = case.biases.then(|| vector(random, n, 0.0));
            Product { w: dequantize(&w), quantized, packed, bias }
        };
        let of_values = heads.kv_heads * heads.head_size;
        let apart = !case.k_types.is_empty() && (heads.row() - of_values).is_multiple_of(256) && random.below(2) == 0;
        let values = apart.then(|| product(random, [of_values, hidden]));
        let mut shapes = shapes;
        shapes[0][0] -= if apart { of_values } else { 0 };
        let products = shapes.map(|shape| product(random, shape));
        let norms = [(); 2].map(|()| vector(random, hidden, 1.0));
        let head_norms = case.head_norms.then(|| [(); 2].map(|()| vector(random, heads.head_size, 1.0)));
        Self { products, values, norms, head_norms, window: case.window, seen: Default::default() }
    }

    fn step_layer(&self, scale: f32) -> StepLayer<'_> {
        let norms = self.norms.each_ref().map(|(_, weight)| StreamNorm { weight: weight.view(), eps: EPS });
        let head_norms = self.head_norms.as_ref();
        StepLayer {
            products: self.products.each_ref().map(Product::of_step),
            values: self.values.as_ref().map(Product::of_step),
            norms,
            head_norms: head_norms.map(|[q, k]| HeadNorms { queries: q.1.view(), keys: k.1.view(), eps: EPS }),
            scale,
            window: self.window,
        }
    }

    /// The same in f64: what attention gives and what the gate gives is rounded as it is in the kernel; the normed stream is not.
    fn step(&mut self, case: &Case, frequencies: &[f64], scale: f32, stream: &mut [f64]) {
        let (heads, dtype, position) = (case.sizes.heads, case.dtype, self.seen[0].len());
        let Heads { heads: query_heads, kv_heads, head_size } = heads;
        let normed = norm(stream, &self.norms[0].0);
        let parts = self.products.iter().take(1).chain(&self.values);
        let mut qkv: Vec<f64> = parts.flat_map(|part| multiply(part, &normed)).collect();
        for (h, head) in qkv.chunks_exact_mut(head_size).take(query_heads + kv_heads).enumerate() {
            if let Some(norms) = &self.head_norms {
                let weight = &norms[usize::from(h >= query_heads)].0;
                let mean = head.iter().map(|v| v * v).sum::<f64>() / head_size as f64;
                let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                head.iter_mut().zip(weight).for_each(|(v, &w)| *v *= factor * f64::from(w));
            }
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + frequencies.len()]);
                (head[i], head[i + frequencies.len()]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        let (queries, rest) = qkv.split_at(query_heads * head_size);
        for (seen, new) in self.seen.iter_mut().zip(rest.chunks_exact(kv_heads * head_size)) {
            seen.push(new.iter().map(|&v| round(v, dtype)).collect());
        }
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut attended = Vec::new();
        for (h, query) in queries.chunks_exact(head_size).enumerate() {
            let of = |all: &Vec<f64>| all[h / heads.group() * head_size..][..head_size].to_vec();
            let [keys, values] = self.seen.each_ref().map(|seen| seen[first..].iter().map(of).collect::<Vec<_>>());
            let score = |key: &Vec<f64>| f64::from(scale) * key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>();
            let scores: Vec<f64> = keys.iter().map(score).collect();
            let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            attended.extend(
                (0..head_size)
                    .map(|d| round(weights.iter().zip(&values).map(|(w, v)| w * v[d]).sum::<f64>() / total, dtype)),
            );
        }
        let output = multiply(&self.products[1], &attended);
        stream.iter_mut().zip(output).for_each(|(s, v)| *s += v);
        let up = multiply(&self.products[2], &norm(stream, &self.norms[1].0));
        let (gate, up) = up.split_at(case.sizes.inner);
        let gated: Vec<f64> = gate.iter().zip(up).map(|(g, u)| round(g / (1.0 + (-g).exp()) * u, dtype)).collect();
        let down = multiply(&self.products[3], &gated);
        stream.iter_mut().zip(down).for_each(|(s, v)| *s += v);
    }
}

/// Runs some steps, of which those after `before` are compared. Gives the largest error as a share of the stream's deviation.
fn run(gpu: &Gpu, case: &Case, random: &mut Random) {
    const LAYERS: usize = 2;
    const VOCAB: usize = 32;
    let bench = Bench::new(gpu);
    let StepSizes { hidden, heads, pairs, .. } = case.sizes;
    let mut layers: Vec<Layer> = (0..LAYERS).map(|_| Layer::new(&bench, random, case)).collect();
    let scale = (heads.head_size as f32).powf(-0.5);
    let frequencies: Vec<f64> = (0..pairs).map(|i| 10_000f64.powf(-(i as f64) / pairs as f64)).collect();
    let rope = Rope::new(gpu, &bench.stream, &frequencies).unwrap();
    let steps = case.before + 3;
    // Every other page, the last one first.
    let pages: Vec<u32> = (0..steps.div_ceil(PAGE_LENGTH) as u32).rev().map(|page| 2 * page + 1).collect();
    let capacity = if case.paged { 2 * pages.len() * PAGE_LENGTH } else { steps };
    let pages_on_device = bench.upload(&pages);
    let mut cache = KvCache::new(gpu, LAYERS, heads, capacity, case.dtype.into()).unwrap();
    let embedding_values = rounded(&random.normals(VOCAB * hidden), case.dtype);
    let embedding = bench.floats(&embedding_values, case.dtype);
    let last: Vec<f32> = random.normals(hidden).iter().map(|v| 1.0 + 0.2 * v).collect();
    let last_on_device = bench.upload(&last);
    let of_layers: Vec<_> = layers.iter().map(|layer| layer.step_layer(scale)).collect();
    let plan = PersistentPlan::of(&gpu.caps(), case.sizes, &of_layers, case.dtype).unwrap();
    let plan = if case.paged { plan.paged() } else { plan };
    let kernel = PersistentDecode::new(gpu, &bench.stream, plan, &of_layers, &cache).unwrap();
    let mut normed = bench.floats(&vec![0.0; hidden], case.dtype);
    for position in 0..steps {
        let token = random.below(VOCAB);
        let [token_on_device, position_on_device] = [token, position].map(|n| bench.upload(&[n as u32]));
        let step = StepOfText {
            token: token_on_device.view(),
            position: position_on_device.view(),
            pages: case.paged.then(|| pages_on_device.view()),
            embedding: embedding.view(0..embedding.len()),
            first_token: 0,
            norm: StreamNorm { weight: last_on_device.view(), eps: EPS },
            rope: &rope,
            cache: &mut cache,
            normed: normed.view_mut(0..hidden),
        };
        kernel.step(gpu, &bench.stream, step).unwrap();
        let got = bench.widened(normed.view(0..hidden));
        let mut stream: Vec<f64> = embedding_values[token * hidden..][..hidden].iter().map(|&v| f64::from(v)).collect();
        layers.iter_mut().for_each(|layer| layer.step(case, &frequencies, scale, &mut stream));
        let want: Vec<f64> = norm(&stream, &last).into_iter().map(|v| round(v, case.dtype)).collect();
        if parse(case.format).act.is_quantized() {
            // Where a number lies at the middle between two codes, the kernel may take the other, and with it other codes of later
            // layers and steps: elements differ by what codes lose, which their mean square bounds.
            let errors = got.iter().zip(&want).map(|(&got, &want)| (f64::from(got) - want).powi(2));
            let error = (errors.sum::<f64>() / hidden as f64).sqrt();
            assert!(error <= 0.04, "{:?} {} position {position}: off by {error}", case.sizes, case.format);
            continue;
        }
        // Where a sum of f32 lies at the middle between two halves, the kernel may round the other way, and what follows differs
        // by a unit or two: of normed numbers, whose mean square is about 1.
        let allowed = 8.0 * case.dtype.unit_roundoff();
        for (i, (&got, &want)) in got.iter().zip(&want).enumerate() {
            let error = (f64::from(got) - want).abs();
            assert!(
                error <= allowed * want.abs().max(1.0),
                "{:?} {} position {position}: element {i} is {got}, expected {want}",
                case.sizes,
                case.format
            );
        }
    }
}

#[test]
fn steps_of_random_models_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(77);
        for round in 0..24 {
            let head_size = [64, 128][random.below(2)];
            let kv_heads = 1 + random.below(4);
            let heads = Heads { heads: kv_heads * (1 + random.below(8)), kv_heads, head_size };
            // Whole steps of 128 columns for what attention gives, and more than one: a row has several groups then.
            let whole = (heads.heads * head_size).is_multiple_of(128) && heads.heads * head_size > 128;
            let heads = if whole { heads } else { Heads { heads: 4 * kv_heads, kv_heads: 2 * kv_heads, ..heads } };
            let sizes = StepSizes {
                hidden: 128 * (2 + random.below(7)),
                inner: 128 * (2 + random.below(9)),
                heads,
                pairs: head_size / [2, 4][random.below(2)],
            };
            let formats = [
                "w4a16-g128",
                "w4a16-g64",
                "w4a16-g32-asym",
                "w4a16",
                "w8a16-g128",
                "w8a16-g32-asym",
                "w8a16",
                "w4a8-g128-asym",
                "w4a8-g128-si8",
                "w4a8-g32-asym-si8",
                "w4a8",
                "w8a8",
            ];
            let case = Case {
                sizes,
                format: formats[round % formats.len()],
                k_types: &[],
                dtype: [Float::F16, Float::BF16][random.below(2)],
                before: [0, 20, 150][random.below(3)],
                window: [None, Some(17)][random.below(2)],
                head_norms: random.below(2) == 0,
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
            };
            println!("{round}: {sizes:?} {} {} {:?} {}", case.format, case.dtype, case.window, case.paged);
            run(&gpu, &case, &mut random);
        }
    }
}

/// Tensors of several K types, values among them in a tensor of their own.
#[test]
fn steps_of_models_in_k_types_are_those_of_f64() {
    const K_TYPES: [&[&str]; 7] = [
        &["w4a16-g32-float-sf32", "w8a16-g16-sf32"],
        &["w8a16-g32-float-sf32", "w8a16-g16-sf32"],
        &["w4a16-g32-float-sf32"],
        &["w8a16-g16-sf32"],
        &["w3a16-g16-sf32", "w4a16-g32-float-sf32"],
        &["w3a16-g16-sf32"],
        &["w3a16-g16-sf32", "w4a16-g32-float-sf32", "w8a16-g16-sf32", "w8a16-g32-float-sf32"],
    ];
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(78);
        for round in 0..14 {
            let head_size = [64, 128][random.below(2)];
            let kv_heads = 256 / head_size * (1 + random.below(2));
            let heads = Heads { heads: kv_heads * (1 + random.below(4)), kv_heads, head_size };
            let sizes = StepSizes {
                hidden: 256 * (1 + random.below(5)),
                inner: 256 * (1 + random.below(5)),
                heads,
                pairs: head_size / 2,
            };
            let case = Case {
                sizes,
                format: "w4a16-g32",
                k_types: K_TYPES[round % K_TYPES.len()],
                dtype: [Float::F16, Float::BF16][random.below(2)],
                before: [0, 20][random.below(2)],
                window: None,
                head_norms: false,
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
            };
            println!("{round}: {sizes:?} {:?} {} {}", case.k_types, case.dtype, case.paged);
            run(&gpu, &case, &mut random);
        }
    }
}

/// A text that is divided into parts, which blocks join.
#[test]
fn long_texts_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let heads = Heads { heads: 8, kv_heads: 2, head_size: 128 };
        let sizes = StepSizes { hidden: 256, inner: 384, heads, pairs: 64 };
        for (paged, window) in [(false, None), (true, None), (true, Some(701))] {
            let case = Case {
                sizes,
                format: "w4a16-g128",
                k_types: &[],
                dtype: Float::F16,
                before: 900,
                window,
                head_norms: false,
                biases: false,
                paged,
            };
            run(&gpu, &case, &mut Random(5));
        }
    }
}

#[test]
fn models_that_it_does_not_take_are_refused_with_the_reason() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let bench = Bench::new(&gpu);
        let sizes =
            StepSizes { hidden: 128, inner: 128, heads: Heads { heads: 2, kv_heads: 1, head_size: 64 }, pairs: 32 };
        let w = Random(1).qtensor(parse("w4a16-g32").weight, [128, 128], false);
        let packed = matmul::pack(&gpu, &bench.stream, &w, halfbyte::Act::A16, Float::F16).unwrap();
        let weight = bench.upload(&[1.0; 128]);
        let norms = [(); 2].map(|()| StreamNorm { weight: weight.view(), eps: EPS });
        let of = |w| StepLayer {
            products: [(w, None); PRODUCTS],
            values: None,
            norms,
            head_norms: None,
            scale: 1.0,
            window: None,
        };
        let refused = |layers: &[StepLayer<'_>]| {
            PersistentPlan::of(&gpu.caps(), sizes, layers, Float::F16).unwrap_err().to_string()
        };
        let why = refused(&[of(&packed)]);
        assert!(why.contains("a product of [256, 128]"), "{why}");
        let apart = StepLayer { values: Some((&packed, None)), ..of(&packed) };
        let why = refused(&[apart]);
        assert!(why.contains("a product of [192, 128]"), "{why}");
        assert!(PersistentPlan::of(&gpu.caps(), sizes, &[], Float::F16).is_err());
    }
}
