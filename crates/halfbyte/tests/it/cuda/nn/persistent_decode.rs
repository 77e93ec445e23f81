//! A step of one token in one kernel against f64, with the roundings that it makes.

use super::Bench;
use crate::cuda::gpus;
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use halfbyte::cuda::Gpu;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{self, Packed, Packer};
use halfbyte::cuda::nn::{
    FloatBuffer, Gate, HeadNorms, KvCache, PersistentDecode, PersistentPlan, Rope, StepExperts, StepLayer, StepMlp,
    StepOfText, StepProduct, StepSizes, StreamNorm,
};
use halfbyte::format::reference::dequantize;
use halfbyte::kernel::{Activation, Heads};
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

/// A router: its numbers, and how many of the experts a token has.
struct Router {
    w: Vec<f64>,
    on_device: FloatBuffer,
    mixture: Mixture,
}

#[derive(Clone, Copy, Debug)]
struct Mixture {
    experts: usize,
    top_k: usize,
    of_chosen: bool,
    router: Float,
}

/// Factors, and of a LayerNorm biases.
struct Norm {
    weight: Vector,
    bias: Option<Vector>,
}

struct Layer {
    /// Of q, k and v; the output.
    products: [Product; 2],
    /// Of gate and up; down: of the MLP, or of each expert.
    mlps: Vec<[Product; 2]>,
    router: Option<Router>,
    /// Rows of values, where they are not in the first product.
    values: Option<Product>,
    norms: [Norm; 2],
    head_norms: Option<[Vector; 2]>,
    alibi: Option<Vector>,
    window: Option<usize>,
    /// Keys, then values, `[positions][kv_heads][head_size]`.
    seen: [Vec<Vec<f64>>; 2],
}

struct Case {
    sizes: StepSizes,
    format: &'static str,
    /// Instead of the format: of each weight one of these.
    k_types: &'static [&'static str],
    mixture: Option<Mixture>,
    layer_norm: bool,
    alibi: bool,
    gate: Gate,
    dtype: Float,
    /// Tokens before the first that is looked at.
    before: usize,
    window: Option<usize>,
    head_norms: bool,
    biases: bool,
    /// Whether keys and values lie in pages.
    paged: bool,
}

impl Norm {
    fn new(bench: &Bench<'_>, random: &mut Random, hidden: usize, layer_norm: bool) -> Self {
        let mut vector = |around: f32| -> Vector {
            let values: Vec<f32> = random.normals(hidden).iter().map(|v| around + 0.2 * v).collect();
            let buffer = bench.upload(&values);
            (values, buffer)
        };
        Self { weight: vector(1.0), bias: layer_norm.then(|| vector(0.0)) }
    }

    fn of_step(&self) -> StreamNorm<'_> {
        StreamNorm { weight: self.weight.1.view(), bias: self.bias.as_ref().map(|(_, bias)| bias.view()), eps: EPS }
    }

    fn apply(&self, stream: &[f64]) -> Vec<f64> {
        let len = stream.len() as f64;
        let mean = self.bias.as_ref().map_or(0.0, |_| stream.iter().sum::<f64>() / len);
        let square = stream.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / len;
        let factor = 1.0 / (square + f64::from(EPS)).sqrt();
        let bias = |i: usize| self.bias.as_ref().map_or(0.0, |(bias, _)| f64::from(bias[i]));
        let normed = |(i, v): (usize, &f64)| (v - mean) * factor * f64::from(self.weight.0[i]) + bias(i);
        stream.iter().enumerate().map(normed).collect()
    }
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
        let format = parse(case.format);
        let vector = |random: &mut Random, len: usize, around: f32| -> Vector {
            let values: Vec<f32> = random.normals(len).iter().map(|v| around + 0.2 * v).collect();
            let buffer = bench.upload(&values);
            (values, buffer)
        };
        let product = |random: &mut Random, [n, k]: [usize; 2], gated: bool| {
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
                let mut packer = Packer::new(bench.gpu, &bench.stream);
                let packed = if gated {
                    let [gate, up] = [0..inner, inner..n].map(|rows| w.rows(rows).unwrap());
                    packer.pack_gated(&(&gate).into(), &(&up).into(), format.act).unwrap()
                } else {
                    packer.pack(&[&(&w).into()], format.act, case.dtype).unwrap()
                };
                let quantized = format.act.is_quantized().then(|| weight.activation_group().len(k));
                (w, packed, quantized)
            };
            let bias = case.biases.then(|| vector(random, n, 0.0));
            Product { w: dequantize(&w), quantized, packed, bias }
        };
        let of_values = heads.kv_heads * heads.head_size;
        let apart = !case.k_types.is_empty() && (heads.row() - of_values).is_multiple_of(256) && random.below(2) == 0;
        let values = apart.then(|| product(random, [of_values, hidden], false));
        let of_qkv = heads.row() - if apart { of_values } else { 0 };
        let shapes = [[of_qkv, hidden], [hidden, heads.heads * heads.head_size]];
        let products = shapes.map(|shape| product(random, shape, false));
        let count = case.mixture.map_or(1, |mixture| mixture.experts);
        let gated = case.mixture.is_some();
        let up = if case.gate.gated { 2 * inner } else { inner };
        let mlp = |_| [product(random, [up, hidden], gated), product(random, [hidden, inner], false)];
        let mlps = (0..count).map(mlp).collect();
        let router = case.mixture.map(|mixture| {
            // Logits of a few units: shares of which none is all.
            let scale = 2.0 / (hidden as f32).sqrt();
            let drawn: Vec<f32> = random.normals(mixture.experts * hidden).iter().map(|v| v * scale).collect();
            let values = rounded(&drawn, mixture.router);
            let on_device = bench.floats(&values, mixture.router);
            Router { w: values.into_iter().map(f64::from).collect(), on_device, mixture }
        });
        let norms = [(); 2].map(|()| Norm::new(bench, random, hidden, case.layer_norm));
        let alibi = case.alibi.then(|| {
            let slopes: Vec<f32> = (1..=heads.heads).map(|i| 0.5 / i as f32).collect();
            let buffer = bench.upload(&slopes);
            (slopes, buffer)
        });
        let head_norms = case.head_norms.then(|| [(); 2].map(|()| vector(random, heads.head_size, 1.0)));
        let window = case.window;
        Self { products, mlps, router, values, norms, head_norms, alibi, window, seen: Default::default() }
    }

    fn step_layer(&self, case: &Case, scale: f32) -> StepLayer<'_> {
        let norms = self.norms.each_ref().map(Norm::of_step);
        let head_norms = self.head_norms.as_ref();
        StepLayer {
            products: self.products.each_ref().map(Product::of_step),
            mlp: match &self.router {
                None => StepMlp::Dense(self.mlps[0].each_ref().map(Product::of_step)),
                Some(Router { w, on_device, mixture: Mixture { top_k, of_chosen, .. } }) => {
                    StepMlp::Experts(StepExperts {
                        experts: self.mlps.iter().map(|mlp| mlp.each_ref().map(|product| &product.packed)).collect(),
                        router: on_device.view(0..w.len()),
                        top_k: *top_k,
                        of_chosen: *of_chosen,
                    })
                }
            },
            gate: case.gate,
            values: self.values.as_ref().map(Product::of_step),
            norms,
            alibi: self.alibi.as_ref().map(|(_, slopes)| slopes.view()),
            head_norms: head_norms.map(|[q, k]| HeadNorms { queries: q.1.view(), keys: k.1.view(), eps: EPS }),
            scale,
            window: self.window,
        }
    }

    /// The same in f64: what attention gives and what the gate gives is rounded as it is in the kernel; the normed stream is not. Gives by
    /// how much the last logit of a router that is chosen is above the first that is not.
    fn step(&mut self, case: &Case, frequencies: &[f64], scale: f32, stream: &mut [f64]) -> f64 {
        let (heads, dtype, position) = (case.sizes.heads, case.dtype, self.seen[0].len());
        let Heads { heads: query_heads, kv_heads, head_size } = heads;
        let normed = self.norms[0].apply(stream);
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
            let slope = self.alibi.as_ref().map_or(0.0, |(slopes, _)| f64::from(slopes[h]));
            let scores: Vec<f64> =
                keys.iter().enumerate().map(|(i, key)| score(key) + slope * (first + i) as f64).collect();
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
        let normed = self.norms[1].apply(stream);
        let (chosen, margin) =
            self.router.as_ref().map_or((vec![(0, 1.0)], f64::INFINITY), |router| router.of(&normed));
        for (expert, share) in chosen {
            let [of_up, of_down] = &self.mlps[expert];
            let up = multiply(of_up, &normed);
            let function = |v: f64| match case.gate.activation {
                Activation::Silu => v / (1.0 + (-v).exp()),
                Activation::Relu => v.max(0.0),
                _ => 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh()),
            };
            let (gate, up) = up.split_at(case.sizes.inner);
            let of_gate = |i: usize| function(gate[i]) * if case.gate.gated { up[i] } else { 1.0 };
            let gated: Vec<f64> = (0..gate.len()).map(|i| round(of_gate(i), dtype)).collect();
            stream.iter_mut().zip(multiply(of_down, &gated)).for_each(|(s, v)| *s += share * v);
        }
        margin
    }
}

impl Router {
    /// The experts of a token with their shares; by how much the last is ahead of the next.
    fn of(&self, normed: &[f64]) -> (Vec<(usize, f64)>, f64) {
        let Mixture { top_k, of_chosen, .. } = self.mixture;
        let rows = self.w.chunks_exact(normed.len());
        let logits: Vec<f64> = rows.map(|row| row.iter().zip(normed).map(|(w, x)| w * x).sum()).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let of_all = if of_chosen { &order[..top_k] } else { &order };
        let sum: f64 = of_all.iter().map(|&expert| logits[expert].exp()).sum();
        let chosen = order[..top_k].iter().map(|&expert| (expert, logits[expert].exp() / sum)).collect();
        let next = order.get(top_k).map_or(f64::NEG_INFINITY, |&next| logits[next]);
        (chosen, logits[order[top_k - 1]] - next)
    }
}

/// Runs some steps, which are compared. Gives how many were: where two experts are about as good as each other, either may be chosen, and
/// what follows in the text hangs on it.
fn run(gpu: &Gpu, case: &Case, random: &mut Random) -> usize {
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
    let last = Norm::new(&bench, random, hidden, case.layer_norm);
    let of_layers: Vec<_> = layers.iter().map(|layer| layer.step_layer(case, scale)).collect();
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
            norm: last.of_step(),
            rope: &rope,
            cache: &mut cache,
            normed: normed.view_mut(0..hidden),
        };
        kernel.step(gpu, &bench.stream, step).unwrap();
        let got = bench.widened(normed.view(0..hidden));
        let mut stream: Vec<f64> = embedding_values[token * hidden..][..hidden].iter().map(|&v| f64::from(v)).collect();
        let margins = layers.iter_mut().map(|layer| layer.step(case, &frequencies, scale, &mut stream));
        let uncertain = if parse(case.format).act.is_quantized() { 0.1 } else { 4.0 * case.dtype.unit_roundoff() };
        if margins.fold(f64::INFINITY, f64::min) < uncertain {
            return position;
        }
        let want: Vec<f64> = last.apply(&stream).into_iter().map(|v| round(v, case.dtype)).collect();
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
    steps
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
                mixture: None,
                layer_norm: false,
                alibi: false,
                gate: Gate::SWIGLU,
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
                mixture: None,
                layer_norm: false,
                alibi: false,
                gate: Gate::SWIGLU,
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

#[test]
fn steps_of_mixtures_of_experts_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let (mut random, mut compared) = (Random(79), [0; 2]);
        for round in 0..16 {
            let kv_heads = 2 * (1 + random.below(2));
            let heads = Heads { heads: kv_heads * (2 + random.below(3)), kv_heads, head_size: 64 };
            let sizes = StepSizes {
                hidden: 128 * (2 + random.below(5)),
                // A row has several groups.
                inner: 128 * (2 + random.below(3)),
                heads,
                pairs: [16, 32][random.below(2)],
            };
            let formats = [
                "w4a16-g128",
                "w4a16-g32-asym",
                "w8a16-g128",
                "w4a16-g64",
                "w8a16-g32-asym",
                "w4a8-g128",
                "w8a8-g128-asym",
            ];
            // More than there are multiprocessors, too.
            let experts = [2, 8, 33, 160][round % 4];
            let mixture = Mixture {
                experts,
                top_k: 1 + random.below(experts.min(8)),
                of_chosen: random.below(2) == 0,
                router: [Float::F16, Float::BF16, Float::F32][random.below(3)],
            };
            let case = Case {
                sizes,
                format: formats[round % formats.len()],
                k_types: &[],
                mixture: Some(mixture),
                layer_norm: false,
                alibi: false,
                gate: Gate::SWIGLU,
                dtype: [Float::F16, Float::BF16][random.below(2)],
                before: [0, 8][random.below(2)],
                window: None,
                head_norms: random.below(2) == 0,
                biases: false,
                paged: random.below(2) == 0,
            };
            println!("{round}: {sizes:?} {mixture:?} {} {} {}", case.format, case.dtype, case.paged);
            compared[0] += run(&gpu, &case, &mut random);
            compared[1] += case.before + 3;
        }
        assert!(2 * compared[0] >= compared[1], "{} of {} steps were compared", compared[0], compared[1]);
    }
}

/// LayerNorms, scores that fall with the distance, MLPs without gates, gates by other functions: each by itself and with others.
#[test]
fn steps_of_other_layers_are_those_of_f64() {
    for gpu in gpus() {
        if !gpu.caps().arch.is_hopper() {
            continue;
        }
        let mut random = Random(80);
        for round in 0..16 {
            let kv_heads = 2 * (1 + random.below(4));
            let heads =
                Heads { heads: kv_heads * (2 + random.below(2)), kv_heads, head_size: [64, 128][random.below(2)] };
            // Norms of few columns, and of more than registers hold beside their weights.
            let hidden = [128 * (2 + random.below(5)), 6400][usize::from(round % 8 == 7)];
            let sizes = StepSizes { hidden, inner: 128 * (2 + random.below(6)), heads, pairs: 32 * random.below(2) };
            let formats = ["w4a16-g128", "w8a16-g32-asym", "w4a8-g128", "w8a8", "w4a16", "w4a16-g64"];
            let gate = Gate {
                activation: [Activation::GeluTanh, Activation::Relu, Activation::Silu][random.below(3)],
                gated: random.below(3) == 0,
                clamp: None,
            };
            let case = Case {
                sizes,
                format: formats[round % formats.len()],
                k_types: &[],
                mixture: None,
                layer_norm: round % 4 != 3 || hidden == 6400,
                alibi: random.below(3) > 0,
                gate,
                dtype: [Float::F16, Float::BF16][random.below(2)],
                before: [0, 20, 150][random.below(3)],
                window: [None, Some(17)][random.below(2)],
                head_norms: false,
                biases: random.below(2) == 0,
                paged: random.below(2) == 0,
            };
            println!("{round}: {sizes:?} {} {} {gate:?} {:?} {}", case.format, case.dtype, case.window, case.paged);
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
                mixture: None,
                layer_norm: false,
                alibi: false,
                gate: Gate::SWIGLU,
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
        let norms = [(); 2].map(|()| StreamNorm { weight: weight.view(), bias: None, eps: EPS });
        let of = |w| StepLayer {
            products: [(w, None); 2],
            mlp: StepMlp::Dense([(w, None); 2]),
            gate: Gate::SWIGLU,
            values: None,
            norms,
            head_norms: None,
            alibi: None,
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
        // Experts that are no such: gates and what they let through do not take turns, and a router of fewer.
        let wide = Random(2).qtensor(parse("w4a16-g32").weight, [256, 128], false);
        let wide = matmul::pack(&gpu, &bench.stream, &wide, halfbyte::Act::A16, Float::F16).unwrap();
        let router = bench.floats(&vec![0.0; 3 * 128], Float::F16);
        let experts = |count| StepExperts {
            experts: vec![[&wide, &packed]; count],
            router: router.view(0..3 * 128),
            top_k: 2,
            of_chosen: true,
        };
        let of = |count| StepLayer {
            products: [(&wide, None), (&packed, None)],
            mlp: StepMlp::Experts(experts(count)),
            ..of(&packed)
        };
        let why = refused(&[of(3)]);
        assert!(why.contains("take turns"), "{why}");
        let why = refused(&[of(4)]);
        assert!(why.contains("a router of all experts"), "{why}");
        let why = refused(&[of(3), StepLayer { mlp: StepMlp::Dense([(&wide, None), (&packed, None)]), ..of(3) }]);
        assert!(why.contains("as many experts in all layers"), "{why}");
    }
}
