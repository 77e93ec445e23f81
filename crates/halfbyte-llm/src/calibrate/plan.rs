//! What a run would take, from sizes and a small sample of the work.

use super::activations::ActivationError;
use super::block::{self, Block};
use super::inputs::{DriftOf, Inputs};
use super::method::{Layers, tensor_bytes};
use super::report::reports;
use super::work::row_bytes;
use super::{Job, check, head};
use crate::arch::spec::{LinearGroup, Shape};
use crate::error::{Error, Result};
use crate::load::{self, LoadOptions, Loader};
use halfbyte::WeightFormat;
use std::ops::ControlFlow;
use std::time::Instant;

/// Outputs and inputs of the layer that is quantised to see how long that takes.
const SAMPLE: [usize; 2] = [512, 512];

/// What every process takes.
const PROCESS_BYTES: u64 = 24 << 20;

/// What a run would take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Time, without the final writing of the model.
    pub seconds: f64,
    /// Bytes of the work folder before it is removed.
    pub work_bytes: u64,
    /// Bytes of the vectors between two blocks, which are part of the peak.
    pub stream_bytes: u64,
    /// Bytes of memory at most, the source's pages not counted, which the system may drop.
    pub peak_memory_bytes: u64,
}

/// Runs one window through the first block and quantises a small layer; the rest is arithmetic.
///
/// Errors: as those of [`super::quantize`] before its first block.
pub fn estimate(job: &Job<'_>) -> Result<Estimate> {
    check(job)?;
    let spec = &job.config.spec;
    let groups = block::groups(spec, 0)?;
    let mut block = Block::load(spec, &mut Loader::new(job.source, LoadOptions::default())?, 0)?;
    let mut stream = vec![0.0; job.window * job.config.spec.hidden];
    load::embed(spec, job.source, &job.tokens[..job.window], &mut stream)?;

    let windows = (job.tokens.len() / job.window) as f64;
    let runs = Runs::measure(job, &mut block, &groups, &stream)?;
    let sample = Sample::measure(job)?;
    let of_block = windows * runs.seconds(job, &groups) + sample.seconds(job, &groups);
    let blocks = job.config.spec.layers.len();
    // The head's inputs are there when the blocks are done: what it takes is summing them up and quantising.
    let head = job.head.map(|head| (vec![head::group(job, head)], head.format));
    let of_head = head.as_ref().map_or(0.0, |(groups, _)| sample.seconds(job, groups));
    let work_of_head = head.as_ref().map_or(0, |(groups, format)| work_bytes(groups, *format));
    Ok(Estimate {
        seconds: of_block * blocks as f64 + of_head,
        work_bytes: work_bytes(&groups, job.format) * blocks as u64 + work_of_head,
        stream_bytes: stream_bytes(job),
        peak_memory_bytes: peak_memory(job, &groups)
            .max(head.map_or(0, |(groups, format)| head_memory(job, &groups, format))),
    })
}

/// Seconds that a window takes.
struct Runs {
    /// From the beginning of its step up to each group.
    to: Vec<f64>,
    /// Through each step.
    through: Vec<f64>,
}

impl Runs {
    fn measure(job: &Job<'_>, block: &mut Block, groups: &[LinearGroup], stream: &[f32]) -> Result<Self> {
        let steps = groups.last().map_or(0, |group| group.step + 1);
        let mut this = Self { to: vec![f64::INFINITY; groups.len()], through: vec![f64::INFINITY; steps] };
        // The first run touches memory for the first time.
        for _ in 0..2 {
            let mut stream = stream.to_vec();
            for step in 0..steps {
                let begun = Instant::now();
                let to = &mut this.to;
                let _ = block.forward(job.cpu, step, &mut stream, &mut |group, _| {
                    to[group] = to[group].min(begun.elapsed().as_secs_f64());
                    Ok(ControlFlow::Continue(()))
                })?;
                this.through[step] = this.through[step].min(begun.elapsed().as_secs_f64());
            }
        }
        // No token of the window chose these experts.
        for (to, group) in this.to.iter_mut().zip(groups).filter(|(to, _)| to.is_infinite()) {
            *to = this.through[group.step];
        }
        Ok(this)
    }

    /// All runs of a window that a block takes, inputs summed up elsewhere.
    fn seconds(&self, job: &Job<'_>, groups: &[LinearGroup]) -> f64 {
        let needs = job.method.needs();
        let once: f64 = self.through.iter().sum();
        let collecting = if job.true_sequential {
            // Steps are taken apart: nothing before a group's own step is run again, and a stage is run once.
            let last = |stage: usize| groups.iter().rposition(|group| group.stage == stage);
            let stages = 0..groups.last().map_or(0, |group| group.stage + 1);
            stages.filter_map(last).map(|group| self.to[group]).sum()
        } else {
            groups.last().map_or(0.0, |last| self.through[..last.step].iter().sum::<f64>() + self.to[groups.len() - 1])
        };
        let models = if needs.drift { 2.0 } else { 1.0 };
        models * (collecting + once + if needs.scales { once } else { 0.0 })
    }
}

/// Seconds of the work on a small layer.
struct Sample {
    inputs: f64,
    rows: usize,
    quantizing: f64,
    reporting: f64,
    /// What quantising the inputs would add.
    activations: f64,
}

impl Sample {
    fn measure(job: &Job<'_>) -> Result<Self> {
        let [n, k] = SAMPLE;
        // Any numbers do, as long as no inputs are alike.
        let number = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        let rows = 2 * k;
        let x: Vec<f32> = (0..rows * k).map(|i| number(i * 7 + 3)).collect();
        let weights: Vec<f32> = (0..n * k).map(number).collect();
        let name = "a sample".to_owned();
        let group = LinearGroup {
            layers: vec![(name.clone(), Shape { n, k, bias: false })],
            step: 0,
            stage: 0,
            routed: false,
            adds: false,
            fold: None,
        };
        let named = |source| Error::Quantize { name: name.clone(), source };

        let begun = Instant::now();
        let mut inputs = Inputs::new([n, k], rows, job.method.needs(), DriftOf::Inputs).map_err(named)?;
        inputs.add(&x, job.method.needs().drift.then_some(&x)).map_err(named)?;
        let of_inputs = begun.elapsed().as_secs_f64();
        let layers = Layers { group: &group, weights: &weights, inputs: &inputs };
        let begun = Instant::now();
        let outcomes = job.method.quantize(&layers, job.format).map_err(named)?;
        let quantizing = begun.elapsed().as_secs_f64();
        let begun = Instant::now();
        reports(&layers, &outcomes);
        let reporting = begun.elapsed().as_secs_f64();
        let mut activations = 0.0;
        if job.act.is_quantized() {
            let weights = || outcomes.iter().map(|outcome| &outcome.weights);
            let mut error = ActivationError::new(weights().zip([1.0]), job.act).map_err(named)?;
            let begun = Instant::now();
            error.add(job.cpu, &x, weights()).map_err(named)?;
            activations = begun.elapsed().as_secs_f64();
        }
        Ok(Self { inputs: of_inputs, rows, quantizing, reporting, activations })
    }

    fn seconds(&self, job: &Job<'_>, groups: &[LinearGroup]) -> f64 {
        let [n, k] = SAMPLE;
        let (sample, operations) = ((n * k * k) as f64, job.method.operations(n, k));
        let times = if job.method.needs().scales { 2.0 } else { 1.0 };
        let of_group = |group: &LinearGroup| {
            let square = group.k() as f64 * group.k() as f64;
            let tokens = job.tokens.len() as f64 / self.rows as f64;
            let inputs = self.inputs * tokens * square / (k * k) as f64;
            let activations = self.activations * tokens * (group.n() * group.k()) as f64 / (n * k) as f64;
            let quantizing = self.quantizing * job.method.operations(group.n(), group.k()) / operations;
            times * inputs + quantizing + activations + self.reporting * group.n() as f64 * square / sample
        };
        groups.iter().map(of_group).sum()
    }
}

fn stream_bytes(job: &Job<'_>) -> u64 {
    let streams = if job.method.needs().drift { 2 } else { 1 };
    streams * (job.tokens.len() * job.config.spec.hidden * size_of::<f32>()) as u64
}

/// Bytes of a block's layers in the work folder, and of what else can change.
fn work_bytes(groups: &[LinearGroup], format: WeightFormat) -> u64 {
    const REST: u64 = 4096;
    let of_layer = |(_, shape): &(String, Shape)| {
        let of_groups = shape.n * format.group.count(shape.k) * 8;
        (shape.n * row_bytes(shape.k, format) + of_groups + 4 * shape.k) as u64
    };
    groups.iter().flat_map(|group| &group.layers).map(of_layer).sum::<u64>() + REST
}

/// The streams, a block as it runs and as it is put away, and the most that any group takes beside them.
fn peak_memory(job: &Job<'_>, groups: &[LinearGroup]) -> u64 {
    let needs = job.method.needs();
    let weights: u64 = groups.iter().map(|group| (group.n() * group.k()) as u64).sum();
    // Weights that were rescaled run as f32.
    let width = if needs.scales { 4 } else { job.config.dtype.map_or(4, |dtype| dtype.size_bytes() as u64) };
    let dense_model = if needs.drift { 2 } else { 0 };
    let codes: u64 = groups.iter().map(|group| tensor_bytes(group.n(), group.k(), job.format)).sum();
    let block = weights * (width + dense_model) + codes;

    // Layers of a step are packed once more to measure what quantised activations would add.
    let packed = if job.act.is_quantized() { weights * u64::from(job.format.bits.max(4)) / 8 } else { 0 };

    // In a window: the stream and its copies, the widest group's inputs and outputs, both again as errors, keys and values.
    let widest = groups.iter().map(|group| group.k() + group.n()).max().unwrap_or(0);
    let window = (job.window * (4 * job.config.spec.hidden + 4 * widest) * size_of::<f32>()) as u64;

    let all: u64 = groups.iter().map(|group| statistics(job, group)).sum();
    let of_group = |group: &LinearGroup| {
        let of_stage = groups.iter().filter(|other| other.stage == group.stage);
        let own = if job.true_sequential { of_stage.map(|other| statistics(job, other)).sum() } else { all };
        own + quantizing(job, group, job.format)
    };
    let quantizing = groups.iter().map(of_group).max().unwrap_or(0);
    let scaling = if needs.scales { all + 4 * weights } else { 0 };
    PROCESS_BYTES + stream_bytes(job) + block + packed + window + quantizing.max(scaling)
}

/// Bytes of what is summed up over the inputs of a group.
fn statistics(job: &Job<'_>, group: &LinearGroup) -> u64 {
    let (n, k, needs) = (group.n(), group.k(), job.method.needs());
    // The drift of outputs needs the weights once more.
    let drift = 8 * k * if group.adds { n } else { k } + if group.adds { 4 * n * k } else { 0 };
    (8 * k * k + 4 * needs.rows * k + if needs.drift { drift } else { 0 }) as u64
}

/// Bytes of a group's weights, and of the most that is done with them.
fn quantizing(job: &Job<'_>, group: &LinearGroup, format: WeightFormat) -> u64 {
    let (n, k) = (group.n(), group.k());
    let adding = 2 * 8 * 256 * k as u64;
    // A thousand rows of weights and of differences are compared in f64.
    let comparing = 4 * 8 * 1024 * k as u64;
    let work = job.method.memory_bytes(n, k, format).max(comparing.min(32 * (n * k) as u64)).max(adding);
    work + 4 * (n * k) as u64
}

/// The head without any block: the streams, its codes, packed too where activations are looked at, and a window's inputs and outputs.
fn head_memory(job: &Job<'_>, groups: &[LinearGroup], format: WeightFormat) -> u64 {
    let of_group = |group: &LinearGroup| {
        let (n, k) = (group.n(), group.k());
        let window = (job.window * (2 * k + if job.act.is_quantized() { n } else { 0 }) * size_of::<f32>()) as u64;
        let packed = if job.act.is_quantized() { (n * k) as u64 * u64::from(format.bits.max(4)) / 8 } else { 0 };
        let after = tensor_bytes(n, k, format) + packed;
        statistics(job, group) + quantizing(job, group, format).max(after) + window
    };
    PROCESS_BYTES + stream_bytes(job) + groups.iter().map(of_group).sum::<u64>()
}
