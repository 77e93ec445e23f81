//! Quantising a model block by block, each layer by the inputs that calibration text gives it.
//!
//! ```text
//! stream = embedding of all windows                              f32 [windows · window, hidden], kept in memory
//! for each block:
//!     load it as floats; let the method choose factors for input channels, fold them into norms and layers before
//!     for each group of layers that share an input (q k v, o, gate up, down):
//!         run the windows up to the group: Hessian of its inputs
//!         quantise; the block runs with the quantised group from now on
//!     stream = what the quantised block makes of it, and on the way what quantising its inputs would add to its errors
//!     put the block away
//! if the head is quantised too: by the norm of the stream, its inputs
//! ```
//!
//! So the inputs of a layer are those that it will have in the quantised model (true-sequential); without that, a
//! block's inputs are collected at once, before any of it is quantised. Every window is run on its own from position 0,
//! with exact activations. Memory holds the streams and one block.
//!
//! Finished blocks lie in a hidden folder beside the target, `.<target>.partial/`. A run that was stopped, in whatever
//! way, goes on from there: the stream is computed again through the finished blocks, and the result is the same, bit for
//! bit, as it is for any number of threads. Each block has checksums; one that is damaged on disk is refused.

mod activations;
mod blame;
mod block;
mod head;
mod inputs;
mod method;
mod outcomes;
mod piece;
mod plan;
mod report;
mod work;

pub use block::{Block, groups};
pub use head::Head;
pub use inputs::Inputs;
pub use method::{ByAwq, ByGptq, Layers, Method, Needs, Outcome, RoundToNearest};
pub use plan::{Estimate, estimate};
pub use report::{ActivationReport, LayerReport};

use crate::arch::spec::Shape;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::eval::first_tokens;
use crate::load;
use crate::tokenizer::Tokenizer;
use blame::blame;
use halfbyte::cpu::Cpu;
use halfbyte::{Act, Format, QTensor, WeightFormat};
use halfbyte_checkpoint::Weights;
use piece::{Piece, Streams};
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Instant, UNIX_EPOCH};
use work::WorkFolder;

const OP: &str = "calibration";

/// Version of the work folder's form.
const WORK_VERSION: u32 = 4;

/// A model to be quantised.
pub struct Job<'a> {
    /// The dense model.
    pub source: &'a Weights,
    /// Its shape.
    pub config: &'a Config,
    /// Where it runs.
    pub cpu: &'a Cpu,
    /// Calibration text: whole windows, one after the other, as [`windows`] makes them.
    pub tokens: &'a [u32],
    /// Tokens a window.
    pub window: usize,
    /// What the linear layers of the blocks become.
    pub format: WeightFormat,
    /// The output head, if that is quantised too, by the same method.
    pub head: Option<Head<'a>>,
    /// What the report tells the cost of, if it is quantised activations. Text runs with exact ones in any case.
    pub act: Act,
    /// How.
    pub method: &'a dyn Method,
    /// Whether a group's inputs are those that the quantised groups before it in the block give.
    pub true_sequential: bool,
    /// The folder that is going to be written; unfinished work lies beside it.
    pub target: &'a Path,
    /// Discard what an earlier run left unfinished.
    pub restart: bool,
}

impl std::fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Job")
            .field("source", &self.source.folder())
            .field("target", &self.target)
            .field("format", &self.format)
            .field("head", &self.head)
            .field("method", &self.method.settings())
            .finish_non_exhaustive()
    }
}

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// Blocks that are finished.
    pub block: usize,
    /// Blocks in all, the head one of them if it is quantised.
    pub blocks: usize,
    /// The first layer of the group that is worked on; empty between groups.
    pub layer: &'a str,
    /// What is being done.
    pub doing: Doing,
    /// How much of that is done, from 0 to 1.
    pub done: f64,
    /// Time left, once a block of this run has told how long one takes.
    pub seconds_left: Option<f64>,
}

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// Computing the stream through a block that was finished before.
    Replaying,
    /// Collecting inputs.
    Inputs,
    /// Choosing codes.
    Quantizing,
    /// Computing the stream through what is quantised.
    Outputs,
}

/// Called before each window and each group; may stop the run, which then fails with [`Error::Cancelled`] and can be
/// gone on with.
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// The first windows of a text: at most `most`, fewer if there is no more.
///
/// The stream of tokens is that of [`crate::eval::token_stream`]: the token that begins a text in front of each
/// document. What is left over after the last window is dropped.
///
/// *Shapes:* `[windows, window]`. *Errors:* a window of no tokens; what the tokenizer refuses.
pub fn windows(
    tokenizer: &Tokenizer,
    documents: &[String],
    bos: Option<u32>,
    window: usize,
    most: usize,
) -> Result<Vec<u32>> {
    if window == 0 {
        return Err(Error::invalid(OP, "a window of at least 1 token", "0"));
    }
    let wanted = window.saturating_mul(most);
    let mut tokens = first_tokens(tokenizer, documents, bos, wanted)?;
    tokens.truncate(tokens.len() / window * window);
    Ok(tokens)
}

/// All blocks quantised, in a folder of work that is locked until it is removed.
#[derive(Debug)]
pub struct Finished {
    work: WorkFolder,
    layers: Vec<QuantizedLayer>,
    /// Other tensors that changed.
    changed: Vec<(String, Vec<f32>)>,
    report: Vec<LayerReport>,
}

/// Where a quantised layer lies in a folder of work.
#[derive(Debug)]
struct QuantizedLayer {
    name: String,
    block: usize,
    shape: [usize; 2],
    format: WeightFormat,
}

impl Finished {
    /// The format of a quantised layer by its name; None if it is not one of them.
    pub fn format(&self, name: &str) -> Option<WeightFormat> {
        self.layers.iter().find(|layer| layer.name == name).map(|layer| layer.format)
    }

    /// A quantised layer by its name; None if it is not one of them. Error: the work folder was damaged meanwhile.
    pub fn tensor(&self, name: &str) -> Result<Option<QTensor>> {
        let layer = self.layers.iter().find(|layer| layer.name == name);
        layer.map(|layer| self.work.tensor(layer.block, name, layer.shape, layer.format)).transpose()
    }

    /// The values of a tensor that is no linear layer and changed (a norm, a bias), exact in its type in the source.
    pub fn changed(&self, name: &str) -> Option<&[f32]> {
        self.changed.iter().find(|(known, _)| known == name).map(|(_, values)| values.as_slice())
    }

    /// What became of each layer, in the order of data.
    pub fn report(&self) -> &[LayerReport] {
        &self.report
    }

    /// The folder of work.
    pub fn folder(&self) -> &Path {
        self.work.path()
    }

    /// Removes the work, once the model is written.
    pub fn remove(self) -> Result<()> {
        self.work.remove()
    }
}

/// The folder in which unfinished work on a target lies. Error: a target without a name.
pub fn work_folder(target: &Path) -> Result<PathBuf> {
    WorkFolder::path_of(target)
}

/// Quantises the linear layers of all blocks, or goes on with an earlier run.
///
/// *Errors:* an architecture without blocks, tokens that are not whole windows or not known, a window beyond the model's
/// context; weights that are not dense, NaN or infinity in weights or inputs, with the layer's name; what the method
/// refuses; [`Error::Unfinished`] where earlier work was begun with something else, [`Error::Locked`] where another
/// process is at it; [`Error::Cancelled`].
pub fn quantize(job: &Job<'_>, progress: &mut OnProgress<'_>) -> Result<Finished> {
    check(job)?;
    let work = WorkFolder::open(job.target, manifest(job)?, job.restart)?;
    let blocks = job.config.spec.layers.len();
    let all = blocks + usize::from(job.head.is_some());
    let windows = job.tokens.len() / job.window;
    let mut watch = Watch { progress, block: 0, blocks: all, windows, here: 0, seconds: 0.0, begun: Instant::now() };
    // Without any block left to do, nobody needs the stream.
    if (0..all).any(|i| !work.has(i)) {
        let mut streams = streams(job)?;
        for i in 0..blocks {
            watch.block = i;
            let mut piece = Piece::load(job, i)?;
            if work.has(i) {
                piece.restore(work.load(i, &piece.groups, job.format)?)?;
                for step in 0..piece.steps() {
                    piece.advance(&mut streams, step, &mut |done| watch.tell("", Doing::Replaying, done))?;
                }
            } else {
                watch.begun = Instant::now();
                let done = quantize_block(job, &mut piece, &mut streams, &mut watch);
                done.map_err(|error| blame(error, job.source, &piece.groups, job.format))?;
                work.save(i, &piece.finished)?;
                watch.here += 1;
                watch.seconds += watch.begun.elapsed().as_secs_f64();
            }
        }
        if let Some(head) = job.head.filter(|_| !work.has(blocks)) {
            (watch.block, watch.begun) = (blocks, Instant::now());
            work.save(blocks, &head::quantize(job, head, &streams, &mut watch)?)?;
        }
    }
    finished(job, work)
}

/// Quantises a block and takes the streams through it.
fn quantize_block(
    job: &Job<'_>,
    piece: &mut Piece<'_>,
    streams: &mut Streams,
    watch: &mut Watch<'_, '_>,
) -> Result<()> {
    let (needs, groups) = (job.method.needs(), piece.groups.len());
    let names: Vec<String> = piece.groups.iter().map(|group| group.layers[0].0.clone()).collect();
    if needs.scales {
        let inputs = piece.collect(streams, 0..groups, needs, &mut |done| watch.tell("", Doing::Inputs, done))?;
        watch.tell("", Doing::Quantizing, 0)?;
        piece.choose_scales(&inputs, job.method, job.format)?;
    }
    let mut collected = VecDeque::new();
    if !job.true_sequential {
        collected.extend(piece.collect(streams, 0..groups, needs, &mut |done| watch.tell("", Doing::Inputs, done))?);
    }
    for (group, name) in names.iter().enumerate() {
        if collected.is_empty() {
            let on_window = &mut |done| watch.tell(name, Doing::Inputs, done);
            let stage = piece.groups[group].stage;
            let of_stage = piece.groups[group..].iter().take_while(|other| other.stage == stage).count();
            collected.extend(piece.collect(streams, group..group + of_stage, needs, on_window)?);
        }
        // One for each group asked for.
        let Some(inputs) = collected.pop_front() else { break };
        watch.tell(name, Doing::Quantizing, 0)?;
        piece.quantize(group, &inputs, job.method, job.format)?;
        let step = piece.groups[group].step;
        let next_step = piece.groups.get(group + 1).map(|next| next.step);
        if job.true_sequential && next_step != Some(step) {
            piece.advance(streams, step, &mut |done| watch.tell("", Doing::Outputs, done))?;
        }
    }
    if !job.true_sequential {
        for step in 0..piece.steps() {
            piece.advance(streams, step, &mut |done| watch.tell("", Doing::Outputs, done))?;
        }
    }
    Ok(())
}

fn finished(job: &Job<'_>, work: WorkFolder) -> Result<Finished> {
    let (mut layers, mut changed, mut report) = (Vec::new(), Vec::new(), Vec::new());
    let blocks = 0..job.config.spec.layers.len();
    let mut parts = blocks.map(|i| Ok((groups(&job.config.spec, i)?, job.format))).collect::<Result<Vec<_>>>()?;
    parts.extend(job.head.map(|head| (vec![head::group(job, head)], head.format)));
    for (block, (groups, format)) in parts.into_iter().enumerate() {
        let of_block = work.load(block, &groups, format)?;
        changed.extend(of_block.changed);
        report.extend(of_block.report);
        let of_groups = groups.into_iter().flat_map(|group| group.layers);
        layers.extend(of_groups.map(|(name, Shape { n, k, .. })| QuantizedLayer {
            name,
            block,
            shape: [n, k],
            format,
        }));
    }
    Ok(Finished { work, layers, changed, report })
}

/// Checks what can be checked beforehand.
fn check(job: &Job<'_>) -> Result<()> {
    let Job { config, tokens, window, .. } = *job;
    (0..config.spec.layers.len()).try_for_each(|i| groups(&config.spec, i).map(|_| ()))?;
    job.format.validate()?;
    job.head.map_or(Ok(()), |head| head.format.validate())?;
    if window == 0 || tokens.is_empty() || !tokens.len().is_multiple_of(window) {
        let expected = format!("at least one window of {window} tokens, and whole windows");
        return Err(Error::invalid(OP, expected, format!("{} tokens", tokens.len())));
    }
    if window > config.spec.max_context {
        return Err(Error::ContextFull { limit: config.spec.max_context, got: window });
    }
    if let Some(&id) = tokens.iter().find(|&&id| id as usize >= config.spec.vocab) {
        return Err(Error::UnknownToken { id, vocab: config.spec.vocab });
    }
    Ok(())
}

/// Everything that the result depends on.
fn manifest(job: &Job<'_>) -> Result<Map<String, Value>> {
    let tokens: Vec<u8> = job.tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let mut files = Vec::new();
    for path in job.source.checkpoint().files() {
        let io = |source| Error::io(path, source);
        let metadata = std::fs::metadata(path).map_err(io)?;
        let modified = metadata.modified().map_err(io)?;
        let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
        files.push(json!({
            "name": path.file_name().map(|name| name.to_string_lossy()),
            "bytes": metadata.len(),
            "modified_ns": u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
        }));
    }
    let mut manifest = json!({
        "version": WORK_VERSION,
        "program": concat!("halfbyte ", env!("CARGO_PKG_VERSION")),
        "method": job.method.settings(),
        "format": Format { weight: job.format, act: Act::A16 }.to_string(),
        "reported_activations": format!("{:?}", job.act),
        "true_sequential": job.true_sequential,
        "window": job.window,
        "windows": job.tokens.len() / job.window,
        "tokens_fnv1a": fnv1a(&tokens),
        "instructions": format!("{:?}", job.cpu.caps()),
        "config_fnv1a": fnv1a(format!("{:?}", job.config).as_bytes()),
        "files": files,
    });
    if let (Some(head), Some(fields)) = (job.head, manifest.as_object_mut()) {
        fields.insert("head".into(), Format { weight: head.format, act: Act::A16 }.to_string().into());
    }
    match manifest {
        Value::Object(map) => Ok(map),
        other => Err(Error::invalid(OP, "a JSON object", other.to_string())),
    }
}

/// A hash that is the same everywhere and always.
fn fnv1a(bytes: &[u8]) -> String {
    let with = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, with))
}

/// The embedding of all windows.
fn streams(job: &Job<'_>) -> Result<Streams> {
    let hidden = job.config.spec.hidden;
    let len = job.tokens.len().checked_mul(hidden);
    let mut stream = Vec::new();
    let reserved = len.map(|len| stream.try_reserve_exact(len).map(|()| stream.resize(len, 0.0f32)));
    if !matches!(reserved, Some(Ok(()))) {
        let expected = "fewer windows: all vectors between two blocks are kept in memory";
        return Err(Error::invalid(OP, expected, format!("{} tokens × {hidden}", job.tokens.len())));
    }
    load::embed(&job.config.spec, job.source, job.tokens, &mut stream)?;
    let dense = job.method.needs().drift.then(|| stream.clone());
    Ok(Streams { hidden, window: job.window * hidden, quantized: stream, dense })
}

/// Tells how far a run is, and hears whether to stop.
struct Watch<'a, 'b> {
    progress: &'a mut OnProgress<'b>,
    block: usize,
    blocks: usize,
    windows: usize,
    /// Blocks that this run has quantised, and what that took.
    here: usize,
    seconds: f64,
    /// When the current block was begun.
    begun: Instant,
}

impl Watch<'_, '_> {
    fn tell(&mut self, layer: &str, doing: Doing, windows_done: usize) -> Result<()> {
        let seconds_left = (self.here > 0).then(|| {
            let of_block = self.seconds / self.here as f64;
            let of_this = (of_block - self.begun.elapsed().as_secs_f64()).max(0.0);
            of_this + of_block * (self.blocks - self.block - 1) as f64
        });
        let done = windows_done as f64 / self.windows as f64;
        let at = Progress { block: self.block, blocks: self.blocks, layer, doing, done, seconds_left };
        if (self.progress)(at).is_break() { Err(Error::Cancelled) } else { Ok(()) }
    }
}
