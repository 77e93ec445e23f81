//! Models of a few layers: packed for the kernel, and computed in f64 with the roundings that it makes.

use super::super::Bench;
use super::super::experts::interleaved;
use crate::data::{Random, parse, rounded, with_zeros_in_bytes};
use crate::layout::types_of_files::Fewer;
use halfbyte::cuda::driver::Buffer;
use halfbyte::cuda::matmul::{Packed, Packer};
use halfbyte::cuda::nn::{
    FloatBuffer, Gate, HeadNorms, StepExperts, StepLayer, StepMlp, StepProduct, StepSizes, StreamNorm,
};
use halfbyte::format::reference::dequantize;
use halfbyte::kernel::{Activation, Heads};
use halfbyte::{Float, QTensor, StoredTensor};

pub(super) const EPS: f32 = 1e-5;

pub(super) struct Product {
    pub(super) w: Vec<f64>,
    /// Columns of x that are quantised together; None: x is multiplied as it is.
    pub(super) quantized: Option<usize>,
    pub(super) packed: Packed,
    pub(super) bias: Option<(Vec<f32>, Buffer<f32>)>,
}

pub(super) type Vector = (Vec<f32>, Buffer<f32>);

/// A router: its numbers, and how many of the experts a token has.
pub(super) struct Router {
    pub(super) w: Vec<f64>,
    pub(super) on_device: FloatBuffer,
    pub(super) mixture: Mixture,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Mixture {
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) of_chosen: bool,
    pub(super) router: Float,
    /// What makes numbers of the router larger: with 1 logits are of a few units.
    pub(super) scale: f32,
}

/// Factors, and of a LayerNorm biases.
pub(super) struct Norm {
    pub(super) weight: Vector,
    pub(super) bias: Option<Vector>,
}

pub(super) struct Layer {
    /// Of q, k and v; the output.
    pub(super) products: [Product; 2],
    /// Of gate and up; down: of the MLP, or of each expert.
    pub(super) mlps: Vec<[Product; 2]>,
    pub(super) router: Option<Router>,
    /// Rows of values, where they are not in the first product.
    pub(super) values: Option<Product>,
    pub(super) norms: [Norm; 2],
    pub(super) norms_behind: Option<[Norm; 2]>,
    pub(super) head_norms: Option<[Vector; 2]>,
    /// Which kind of rotations it has.
    pub(super) rope: usize,
    pub(super) alibi: Option<Vector>,
    pub(super) window: Option<usize>,
    /// Keys, then values, `[positions][kv_heads][head_size]`, of each kind of activations.
    pub(super) seen: [[Vec<Vec<f64>>; 2]; 2],
}

/// What products read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Activations {
    /// Codes, where the format has such.
    AsTheFormatHas,
    /// As they are, whatever the format has.
    Exact,
}

pub(super) struct Case {
    pub(super) sizes: StepSizes,
    pub(super) format: &'static str,
    /// Instead of the format: of each weight one of these.
    pub(super) k_types: &'static [&'static str],
    /// With codes that files hold in fewer bits than the format has.
    pub(super) fewer: Option<Fewer>,
    pub(super) mixture: Option<Mixture>,
    pub(super) layer_norm: bool,
    pub(super) alibi: bool,
    pub(super) gate: Gate,
    pub(super) dtype: Float,
    /// Whether gates are packed beside what they let through, where they may be or not.
    pub(super) beside: bool,
    /// Tokens before the first that is looked at.
    pub(super) before: usize,
    pub(super) window: Option<usize>,
    pub(super) head_norms: bool,
    pub(super) biases: bool,
    /// Whether keys and values lie in pages.
    pub(super) paged: bool,
    /// Whether what output and down give is normed before it is added.
    pub(super) norms_behind: bool,
    pub(super) cap: Option<f32>,
}

impl Case {
    /// A text's first steps through layers such as Llama has.
    pub(super) fn new(sizes: StepSizes, format: &'static str) -> Self {
        Self {
            sizes,
            format,
            k_types: &[],
            fewer: None,
            mixture: None,
            layer_norm: false,
            alibi: false,
            gate: Gate::SWIGLU,
            dtype: Float::F16,
            beside: false,
            before: 0,
            window: None,
            head_norms: false,
            biases: false,
            paged: false,
            norms_behind: false,
            cap: None,
        }
    }

    /// Whether gates are packed beside what they let through: of experts always, of K types never.
    fn are_gates_beside(&self) -> bool {
        self.mixture.is_some() || self.beside && self.gate.gated && self.k_types.is_empty()
    }
}

impl Norm {
    pub(super) fn new(bench: &Bench<'_>, random: &mut Random, hidden: usize, layer_norm: bool) -> Self {
        let mut vector = |around: f32| -> Vector {
            let values: Vec<f32> = random.normals(hidden).iter().map(|v| around + 0.2 * v).collect();
            let buffer = bench.upload(&values);
            (values, buffer)
        };
        Self { weight: vector(1.0), bias: layer_norm.then(|| vector(0.0)) }
    }

    pub(super) fn of_step(&self) -> StreamNorm<'_> {
        StreamNorm { weight: self.weight.1.view(), bias: self.bias.as_ref().map(|(_, bias)| bias.view()), eps: EPS }
    }

    pub(super) fn apply(&self, stream: &[f64]) -> Vec<f64> {
        let len = stream.len() as f64;
        let mean = self.bias.as_ref().map_or(0.0, |_| stream.iter().sum::<f64>() / len);
        let square = stream.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / len;
        let factor = 1.0 / (square + f64::from(EPS)).sqrt();
        let bias = |i: usize| self.bias.as_ref().map_or(0.0, |(bias, _)| f64::from(bias[i]));
        let normed = |(i, v): (usize, &f64)| (v - mean) * factor * f64::from(self.weight.0[i]) + bias(i);
        stream.iter().enumerate().map(normed).collect()
    }
}

pub(super) fn round(v: f64, dtype: Float) -> f64 {
    f64::from(dtype.round(v as f32))
}

/// What codes of 8 bits stand for.
pub(super) fn quantized(x: &[f64]) -> Vec<f64> {
    let scale = x.iter().fold(0f64, |most, v| most.max(v.abs())) / 127.0;
    x.iter().map(|v| (v / scale).round_ties_even() * scale).collect()
}

pub(super) fn multiply(product: &Product, x: &[f64], activations: Activations) -> Vec<f64> {
    let group = product.quantized.filter(|_| matches!(activations, Activations::AsTheFormatHas));
    let codes = group.map(|group| x.chunks(group).flat_map(quantized).collect::<Vec<_>>());
    let x = codes.as_deref().unwrap_or(x);
    let mut y: Vec<f64> =
        product.w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect();
    if let Some((bias, _)) = &product.bias {
        y.iter_mut().zip(bias).for_each(|(y, &b)| *y += f64::from(b));
    }
    y
}

/// The tensor with scales that make outputs about as large as inputs.
pub(super) fn of_order_one(w: &QTensor) -> QTensor {
    let factor = 300.0 / (w.format().max_code() as f32 * (w.k() as f32).sqrt());
    // What is a whole multiple of a half stays one.
    let factor = if w.format().channel_scale.is_some() { factor.log2().round().exp2() } else { factor };
    let scales = w.scales().iter().map(|&s| w.format().scale.round(s * factor)).collect();
    QTensor::new(w.format(), [w.n(), w.k()], w.codes().to_vec(), scales, w.zeros().clone(), None).unwrap()
}

impl Product {
    pub(super) fn of_step(&self) -> StepProduct<'_> {
        (&self.packed, self.bias.as_ref().map(|(_, bias)| bias.view()))
    }
}

impl Layer {
    pub(super) fn new(bench: &Bench<'_>, random: &mut Random, case: &Case, rope: usize) -> Self {
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
                let w = with_zeros_in_bytes(random.qtensor(weight, [n, k], false));
                let w = of_order_one(&case.fewer.map_or(w.clone(), |fewer| fewer.of(&w)));
                let mut packer = Packer::new(bench.gpu, &bench.stream);
                let stored = |w: &QTensor| match case.fewer {
                    Some(fewer) => fewer.stored(w),
                    None => w.clone().into(),
                };
                let packed = if gated {
                    let [gate, up] = [0..inner, inner..n].map(|rows| stored(&w.rows(rows).unwrap()));
                    packer.pack_gated([&gate, &up], format.act, case.gate).unwrap()
                } else {
                    packer.pack(&[&stored(&w)], format.act, case.dtype).unwrap()
                };
                let quantized = format.act.is_quantized().then(|| weight.activation_group().len(k));
                (w, packed, quantized)
            };
            let bias = case.biases.then(|| {
                let (values, buffer) = vector(random, n, 0.0);
                let in_turns = || interleaved(&[0..inner, inner..n].map(|rows| values[rows].to_vec()));
                let buffer = if gated { bench.upload(&in_turns()) } else { buffer };
                (values, buffer)
            });
            Product { w: dequantize(&w), quantized, packed, bias }
        };
        let of_values = heads.kv_heads * heads.head_size;
        let apart = !case.k_types.is_empty() && (heads.row() - of_values).is_multiple_of(256) && random.below(2) == 0;
        let values = apart.then(|| product(random, [of_values, hidden], false));
        let of_qkv = heads.row() - if apart { of_values } else { 0 };
        let shapes = [[of_qkv, hidden], [hidden, heads.heads * heads.head_size]];
        let products = shapes.map(|shape| product(random, shape, false));
        let count = case.mixture.map_or(1, |mixture| mixture.experts);
        let gated = case.are_gates_beside();
        let up = if case.gate.gated { 2 * inner } else { inner };
        let mlp = |_| [product(random, [up, hidden], gated), product(random, [hidden, inner], false)];
        let mlps = (0..count).map(mlp).collect();
        let router = case.mixture.map(|mixture| {
            // With a scale of 1 shares of which none is all.
            let scale = mixture.scale * 2.0 / (hidden as f32).sqrt();
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
        let norms_behind = case.norms_behind.then(|| [(); 2].map(|()| Norm::new(bench, random, hidden, false)));
        let (window, seen) = (case.window, Default::default());
        Self { products, mlps, router, values, norms, norms_behind, head_norms, rope, alibi, window, seen }
    }

    pub(super) fn step_layer(&self, case: &Case, scale: f32) -> StepLayer<'_> {
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
            norms_behind: self.norms_behind.as_ref().map(|norms| norms.each_ref().map(Norm::of_step)),
            rope: self.rope,
            cap: case.cap,
            alibi: self.alibi.as_ref().map(|(_, slopes)| slopes.view()),
            head_norms: head_norms.map(|[q, k]| HeadNorms { queries: q.1.view(), keys: k.1.view(), eps: EPS }),
            scale,
            window: self.window,
        }
    }

    /// The same in f64: what attention gives and what the gate gives is rounded as it is in the kernel; the normed stream is not. Gives by
    /// how much the last logit of a router that is chosen is above the first that is not, of a router with a scale of 1.
    pub(super) fn step(
        &mut self,
        case: &Case,
        frequencies: &[Vec<f64>],
        scale: f32,
        activations: Activations,
        stream: &mut [f64],
    ) -> f64 {
        let of_activations = &mut self.seen[activations as usize];
        let (heads, dtype, position) = (case.sizes.heads, case.dtype, of_activations[0].len());
        let Heads { heads: query_heads, kv_heads, head_size } = heads;
        let normed = self.norms[0].apply(stream);
        let parts = self.products.iter().take(1).chain(&self.values);
        let mut qkv: Vec<f64> = parts.flat_map(|part| multiply(part, &normed, activations)).collect();
        for (h, head) in qkv.chunks_exact_mut(head_size).take(query_heads + kv_heads).enumerate() {
            if let Some(norms) = &self.head_norms {
                let weight = &norms[usize::from(h >= query_heads)].0;
                let mean = head.iter().map(|v| v * v).sum::<f64>() / head_size as f64;
                let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
                head.iter_mut().zip(weight).for_each(|(v, &w)| *v *= factor * f64::from(w));
            }
            let frequencies = &frequencies[self.rope];
            for (i, frequency) in frequencies.iter().enumerate() {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + frequencies.len()]);
                (head[i], head[i + frequencies.len()]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        let (queries, rest) = qkv.split_at(query_heads * head_size);
        for (seen, new) in of_activations.iter_mut().zip(rest.chunks_exact(kv_heads * head_size)) {
            seen.push(new.iter().map(|&v| round(v, dtype)).collect());
        }
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let mut attended = Vec::new();
        for (h, query) in queries.chunks_exact(head_size).enumerate() {
            let of = |all: &Vec<f64>| all[h / heads.group() * head_size..][..head_size].to_vec();
            let [keys, values] = of_activations.each_ref().map(|seen| seen[first..].iter().map(of).collect::<Vec<_>>());
            let capped = |score: f64| case.cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh());
            let score =
                |key: &Vec<f64>| capped(f64::from(scale) * key.iter().zip(query).map(|(k, q)| k * q).sum::<f64>());
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
        let output = multiply(&self.products[1], &attended, activations);
        let add = |stream: &mut [f64], added: Vec<f64>, at: usize| {
            let added = self.norms_behind.as_ref().map(|norms| norms[at].apply(&added)).unwrap_or(added);
            stream.iter_mut().zip(added).for_each(|(s, v)| *s += v);
        };
        add(stream, output, 0);
        let normed = self.norms[1].apply(stream);
        let (chosen, margin) =
            self.router.as_ref().map_or((vec![(0, 1.0)], f64::INFINITY), |router| router.of(&normed));
        let mut down = vec![0.0; stream.len()];
        for (expert, share) in chosen {
            let [of_up, of_down] = &self.mlps[expert];
            let up = multiply(of_up, &normed, activations);
            let function = |v: f64| match case.gate.activation {
                Activation::Silu => v / (1.0 + (-v).exp()),
                Activation::Relu => v.max(0.0),
                _ => 0.5 * v * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3))).tanh()),
            };
            let (gate, up) = up.split_at(case.sizes.inner);
            let of_gate = |i: usize| function(gate[i]) * if case.gate.gated { up[i] } else { 1.0 };
            let gated: Vec<f64> = (0..gate.len()).map(|i| round(of_gate(i), dtype)).collect();
            down.iter_mut().zip(multiply(of_down, &gated, activations)).for_each(|(s, v)| *s += share * v);
        }
        add(stream, down, 1);
        margin
    }
}

impl Router {
    /// The experts of a token with their shares; by how much the last is ahead of the next.
    pub(super) fn of(&self, normed: &[f64]) -> (Vec<(usize, f64)>, f64) {
        let Mixture { top_k, of_chosen, scale, .. } = self.mixture;
        let rows = self.w.chunks_exact(normed.len());
        let logits: Vec<f64> = rows.map(|row| row.iter().zip(normed).map(|(w, x)| w * x).sum()).collect();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let of_all = if of_chosen { &order[..top_k] } else { &order };
        let weight = |expert: usize| (logits[expert] - logits[order[0]]).exp();
        let sum: f64 = of_all.iter().map(|&expert| weight(expert)).sum();
        let chosen = order[..top_k].iter().map(|&expert| (expert, weight(expert) / sum)).collect();
        let next = order.get(top_k).map_or(f64::NEG_INFINITY, |&next| logits[next]);
        (chosen, (logits[order[top_k - 1]] - next) / f64::from(scale))
    }
}
