//! What a machine allows a model at most: bytes that a token's step must read against the bandwidth, and products of a prompt against
//! the peak, both measured in the same run.

use super::speed::{Speed, Work};
use crate::commands::bench::replays::replay;
use crate::failure::Result;
use half::f16;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::roofline::Roofline as CpuRoofline;
use halfbyte::cuda::Gpu;
use halfbyte::cuda::cublaslt::CublasLt;
use halfbyte::cuda::driver::{FloatView, FloatViewMut};
use halfbyte::cuda::roofline::Roofline;
use halfbyte::{Act, Float};
use halfbyte_llm::arch::spec::{MlpKind, Spec};
use halfbyte_llm::{Device, Model};
use serde::Serialize;
use std::time::Duration;

/// Bytes that are read for the bandwidth of a GPU, at most and at least.
const MOST_BYTES: usize = 2 << 30;
const LEAST_BYTES: usize = 256 << 20;

/// Side of the matrices that the rate of the tensor cores is measured with.
const SIDE: usize = 8192;

/// After so long memory that was freed takes nothing of the bandwidth any more.
const AFTER_FREEING: Duration = Duration::from_millis(100);

/// What a machine can do at most.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Machine {
    /// Reads of memory.
    pub read_bytes_per_second: f64,
    /// Multiplications and additions; None where nothing measures them.
    pub flop_per_second: Option<f64>,
    /// What does them.
    pub peak: &'static str,
}

/// What it allows a model.
#[derive(Debug, Serialize)]
pub struct Limits {
    #[serde(flatten)]
    machine: Machine,
    /// Bytes of weights that a token's step reads.
    weight_bytes_per_step: f64,
    /// Bytes of keys and values that it reads, on average over the tokens written.
    kv_bytes_per_step: f64,
    decode_limit_tokens_per_second: f64,
    decode_share: f64,
    /// Multiplications and additions of the products with weights that a prompt takes, all of it.
    prefill_flop: f64,
    prefill_limit_tokens_per_second: Option<f64>,
    prefill_share: Option<f64>,
}

impl Limits {
    /// Of a model on a machine, beside the speed that was measured; of one of `ranks`, each of which does its part.
    pub fn new(machine: Machine, model: &Model, work: Work, speed: &Speed, ranks: usize) -> Self {
        let spec = &model.config().spec;
        let weight_bytes_per_step = model.bytes_of_step(1) as f64;
        let kv_bytes_per_step = kv_bytes(spec, model.kv_bytes_per_token(), work.depth, work.generate);
        let decode = machine.read_bytes_per_second / (weight_bytes_per_step + kv_bytes_per_step);
        let prefill_flop = flop(spec, work.prompt, 1) / ranks as f64;
        let prefill = machine.flop_per_second.map(|rate| rate * work.prompt as f64 / prefill_flop);
        Self {
            machine,
            weight_bytes_per_step,
            kv_bytes_per_step,
            decode_limit_tokens_per_second: decode,
            decode_share: speed.decode_tokens_per_second / decode,
            prefill_flop,
            prefill_limit_tokens_per_second: prefill,
            prefill_share: prefill.map(|limit| speed.prefill_tokens_per_second / limit),
        }
    }

    /// `71 % of 132 tok/s: …`, of prefill; None where its limit was not measured.
    pub fn of_prefill(&self) -> Option<String> {
        let (limit, share) = (self.prefill_limit_tokens_per_second?, self.prefill_share?);
        Some(format!(
            "{:.0} % of {}: {} of products with weights at {}/s ({})",
            100.0 * share,
            super::per_second(limit),
            flop_in_units(self.prefill_flop),
            flop_in_units(self.machine.flop_per_second?),
            self.machine.peak
        ))
    }

    /// The same of decoding.
    pub fn of_decoding(&self) -> String {
        let bytes = |count: f64| crate::text::bytes(count as u64);
        format!(
            "{:.0} % of {}: {} of weights, {} of keys and values a token at {}/s",
            100.0 * self.decode_share,
            super::per_second(self.decode_limit_tokens_per_second),
            bytes(self.weight_bytes_per_step),
            bytes(self.kv_bytes_per_step),
            bytes(self.machine.read_bytes_per_second)
        )
    }
}

/// What a machine allows a step of one token of each of some texts.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepLimit {
    /// Of weights, keys and values, each once.
    bytes_per_step: f64,
    /// Of products with weights and of those of attention.
    flop_per_step: f64,
    /// The longer of the times that these take.
    pub limit_seconds: f64,
    /// The same of products, then of attention, which take turns.
    pub limit_in_turn_seconds: f64,
}

impl StepLimit {
    /// After so many tokens of each text, on average over some steps; of one of `ranks`.
    pub fn new(machine: &Machine, model: &Model, [texts, steps, ranks]: [usize; 3], depth: f64) -> Self {
        let spec = &model.config().spec;
        let of_text = kv_bytes(spec, model.kv_bytes_per_token(), depth as usize, steps);
        let (weights, cached) = (model.bytes_of_step(texts) as f64, texts as f64 * of_text);
        // A query meets each key and each value that its text has: two operations an element of each head.
        let elements = of_text / model.kv_bytes_per_token() as f64 * spec.layers.len() as f64;
        let attention = 4.0 * elements * (spec.heads.heads * spec.heads.head_size * texts) as f64 / ranks as f64;
        let products = flop(spec, texts, texts) / ranks as f64;
        let seconds = |bytes: f64, flop: f64| {
            (bytes / machine.read_bytes_per_second).max(machine.flop_per_second.map_or(0.0, |rate| flop / rate))
        };
        Self {
            bytes_per_step: weights + cached,
            flop_per_step: products + attention,
            limit_seconds: seconds(weights + cached, products + attention),
            limit_in_turn_seconds: seconds(weights, products) + seconds(cached, attention),
        }
    }

    /// `12.3 GB, 1.03 Tflop a step`.
    pub fn in_words(&self) -> String {
        format!("{}, {} a step", crate::text::bytes(self.bytes_per_step as u64), flop_in_units(self.flop_per_step))
    }
}

/// `7.70 Tflop`.
fn flop_in_units(flop: f64) -> String {
    if flop < 1e12 { format!("{:.2} Gflop", flop / 1e9) } else { format!("{:.2} Tflop", flop / 1e12) }
}

/// Bytes of keys and values that a step of a text reads on average over some steps that follow `depth` tokens, of so many that a token
/// leaves.
fn kv_bytes(spec: &Spec, bytes_of_token: usize, depth: usize, steps: usize) -> f64 {
    let of_layer = bytes_of_token as f64 / spec.layers.len().max(1) as f64;
    let positions = |window: Option<usize>| -> f64 {
        let seen = |step: usize| (depth + step + 1).min(window.unwrap_or(usize::MAX)) as f64;
        (0..steps).map(seen).sum::<f64>() / steps.max(1) as f64
    };
    spec.layers.iter().map(|layer| of_layer * positions(layer.attention.window)).sum()
}

/// Multiplications and additions of the products with weights that some tokens take: of every one with the blocks, of those that
/// another follows with the head.
fn flop(spec: &Spec, tokens: usize, followed: usize) -> f64 {
    let idle: f64 = spec
        .layers
        .iter()
        .map(|layer| match &layer.mlp.kind {
            MlpKind::Dense(_) => 0.0,
            MlpKind::Experts(experts) => {
                let idle = experts.experts.len().saturating_sub(experts.top_k);
                let layers = experts.experts.iter().take(idle).flat_map(|mlp| mlp.up.iter().chain([&mlp.down]));
                layers.map(|layer| layer.shape.n as f64 * layer.shape.k as f64).sum()
            }
        })
        .sum();
    let blocks: f64 = spec.linears().map(|layer| layer.shape.n as f64 * layer.shape.k as f64).sum();
    2.0 * ((blocks - idle) * tokens as f64 + spec.vocab as f64 * spec.hidden as f64 * followed as f64)
}

impl Machine {
    /// `bytes at 4.3 TB/s; products, those of attention too, at 723 Tflop/s (dense f16, …)`.
    pub fn in_words(&self) -> String {
        let moving = format!("bytes at {}/s", crate::text::bytes(self.read_bytes_per_second as u64));
        match self.flop_per_second {
            None => moving,
            Some(rate) => {
                format!("{moving}; products, those of attention too, at {}/s ({})", flop_in_units(rate), self.peak)
            }
        }
    }

    /// Measures the device of a model, which takes its activations so; None: it has no memory left to measure with.
    pub fn measure(model: &Model, cpu: &Cpu, act: Act) -> Result<Option<Self>> {
        match model.device() {
            Device::Cpu => Ok(Some(Self::of_cpu(cpu, act))),
            Device::Cuda(gpu) => Self::of_gpu(&gpu.gpu),
        }
    }

    fn of_cpu(cpu: &Cpu, act: Act) -> Self {
        let measured = CpuRoofline::measure(cpu);
        let (rate, peak) = match act.is_quantized() {
            true => (measured.int8_ops_per_second, "int8 peak"),
            // As a model has them on a CPU.
            false => measured.exact_flops_per_second(Float::F32),
        };
        Self { read_bytes_per_second: measured.read_bytes_per_second, flop_per_second: Some(rate), peak }
    }

    fn of_gpu(gpu: &Gpu) -> Result<Option<Self>> {
        let [free, _] = gpu.context().memory()?;
        let bytes = (free / 2).min(MOST_BYTES) & !0xff;
        if bytes < LEAST_BYTES {
            return Ok(None);
        }
        // For 10 ms after 4.6 GB were freed, keys and values of 64 texts, an H100 read 2.58 TB/s instead of 3.07.
        std::thread::sleep(AFTER_FREEING);
        let (stream, roofline) = (gpu.stream()?, Roofline::new(gpu)?);
        let mut all = gpu.context().allocate::<f16>(bytes / 2)?;
        roofline.normal(&stream, &mut FloatViewMut::F16(all.view_mut()), 1.0, 1)?;
        let mut sink = gpu.context().allocate::<u32>(1)?;
        let seconds =
            replay(&stream, 1, |stream, _| roofline.read(stream, all.view().cast::<u8>(), &mut sink.view_mut()))?
                .median;
        let flop_per_second = match CublasLt::open(gpu) {
            Ok(blas) if all.len() >= 2 * SIDE * SIDE => {
                let plan = blas.plan(gpu, [SIDE; 3], Float::F16, Float::F16)?;
                let [x, w] = [0, 1].map(|i| FloatView::F16(all.view().slice(i * SIDE * SIDE..(i + 1) * SIDE * SIDE)));
                let mut y = gpu.context().allocate::<f16>(SIDE * SIDE)?;
                let y = FloatViewMut::F16(y.view_mut());
                Some(2.0 * (SIDE as f64).powi(3) / replay(&stream, 1, |stream, _| plan.run(stream, x, w, &y))?.median)
            }
            _ => None,
        };
        let peak = "dense f16, cuBLASLt on 8192³";
        Ok(Some(Self { read_bytes_per_second: bytes as f64 / seconds, flop_per_second, peak }))
    }
}
