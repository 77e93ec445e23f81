//! A model in memory, and the state of one text in it.

use crate::check::{Contradictions, contradictions};
use crate::config::Config;
use crate::decoder::Decoder;
use crate::device::Device;
use crate::device::cpu::{CpuModel, OnCpu};
use crate::device::cuda::CudaModel;
use crate::device::{Batch, LoadTimes, Resident, Room, Text, Texts, room};
use crate::error::{Error, Result};
use crate::explain::Product;
use crate::load::{LoadOptions, Loader};
use crate::profile::Profile;
use crate::random::RandomWeights;
use crate::sampling::Sampler;
use crate::shard::{self, Shard};
use halfbyte::cpu::Cpu;
use halfbyte::kernel::{KvType, Reason};
use halfbyte_checkpoint::{Finding, Weights};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Logits computed at a time where they are wanted for every token, in elements (4 MiB).
const LOGITS_AT_A_TIME: usize = 1 << 20;

/// Loads a model that ranks share, if they have the same one; the others are told if this rank cannot. Errors also: a rank that has
/// left, or that has another model, which is told by what `digest` takes in, or other options.
fn as_a_rank(
    options: &LoadOptions,
    digest: impl FnOnce(&mut DefaultHasher),
    load: impl FnOnce() -> Result<Model>,
) -> Result<Model> {
    let LoadOptions { comm, act, quantize, kv, device } = options;
    if comm.size() > 1 {
        let mut hash = DefaultHasher::new();
        digest(&mut hash);
        comm.agree("model", &hash.finish().to_le_bytes())?;
        comm.agree("way of loading it", format!("{act:?} {quantize:?} {kv:?}").as_bytes())?;
        let kind = match device {
            Device::Cpu => "CPU".to_owned(),
            Device::Cuda(gpu) => format!("GPU {:?}", gpu.activations),
        };
        comm.agree("kind of device", kind.as_bytes())?;
    }
    let model = load().inspect_err(|why| {
        if !matches!(why, Error::Rank { .. }) {
            comm.leave(&format!("cannot load its part: {why}"));
        }
    })?;
    comm.wait()?;
    Ok(model)
}

/// A language model: its configuration and its packed weights, in memory or on a GPU.
#[derive(Debug)]
pub struct Model {
    config: Config,
    device: Device,
    resident: Box<dyn Resident>,
    kv: KvType,
    parameters: u64,
    findings: Vec<Finding>,
}

impl Model {
    /// Loads a folder in Hugging Face's form (`config.json` and safetensors, dense or quantised) or a GGUF file.
    ///
    /// Each tensor is read, packed and let go before the next. Errors: what [`Config::from_weights`] refuses; missing or
    /// malformed tensors, or such of another shape than the configuration says; layers that it does not count; weights that
    /// cannot be quantised.
    pub fn load(path: &Path, options: &LoadOptions) -> Result<Self> {
        let weights = Weights::open(path)?;
        Self::from_weights(Config::from_weights(&weights)?, &weights, options)
    }

    /// Loads the tensors of an open checkpoint. Errors: as [`Model::load`].
    pub fn from_weights(config: Config, weights: &Weights, options: &LoadOptions) -> Result<Self> {
        let Contradictions { uncounted, unused, .. } = contradictions(&config, weights);
        if let Some(Finding { subject, text }) = uncounted {
            return Err(Error::Weight {
                name: subject,
                expected: "a layer of the configuration for each".to_owned(),
                got: text,
            });
        }
        let (part, spec) = (weights.part()?, config.spec.clone());
        let digest = |hash: &mut DefaultHasher| match part {
            Some(part) => part.model.hash(hash),
            None => shard::name_of(&spec, weights).hash(hash),
        };
        let load = || Self::of(config, Loader::new(weights, options.clone())?, options);
        let mut model = as_a_rank(options, digest, load)?;
        model.findings.extend(unused);
        Ok(model)
    }

    /// A model of random weights, drawn where it will lie: for measurements. The same ones come out each time, on every device.
    ///
    /// Errors: formats that do not exist or that no kernel serves, memory that is short on a GPU, options that quantise.
    pub fn random(config: Config, weights: RandomWeights, options: &LoadOptions) -> Result<Self> {
        let digest = |hash: &mut DefaultHasher| format!("{weights:?}").hash(hash);
        as_a_rank(options, digest, || Self::of(config, Loader::random(weights, options.clone())?, options))
    }

    fn of(config: Config, mut loader: Loader<'_>, options: &LoadOptions) -> Result<Self> {
        let kv = options.kv_type();
        let shard = Shard::of(options.comm.as_ref());
        let resident: Box<dyn Resident> = match &options.device {
            Device::Cpu => {
                let decoder = Decoder::load(&config.spec, &mut loader, &mut OnCpu, shard)?;
                Box::new(CpuModel { decoder, comm: options.comm.clone(), kv })
            }
            Device::Cuda(gpu) => Box::new(CudaModel::load(&config.spec, &mut loader, gpu, options.comm.clone(), kv)?),
        };
        let (device, parameters) = (options.device.clone(), loader.parameters());
        Ok(Self { config, device, resident, kv, parameters, findings: loader.into_findings() })
    }

    /// Its shape.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Where it lies and computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Number of weights, a tied head counted once.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// What was odd about the checkpoint, and which reading was taken.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// What the kernel that computes all layers of one token (on a GPU) would need and the model lacks, so that its steps go kernel by
    /// kernel; None where one kernel computes them, and on a CPU.
    pub fn one_kernel_needs(&self) -> Option<&Reason> {
        self.resident.one_kernel_needs()
    }

    /// Where the time went that loading took; None in memory.
    pub fn load_times(&self) -> Option<LoadTimes> {
        self.resident.load_times()
    }

    /// Bytes that the weights take in memory: packed layers, embedding, norms.
    pub fn weight_bytes(&self) -> usize {
        self.resident.bytes()
    }

    /// Bytes of weights that a step of one token of each of so many texts reads: all but other rows of the embedding, where that is
    /// not the head, and the experts that do not compute, where each token chooses them by chance.
    pub fn bytes_of_step(&self, texts: usize) -> usize {
        self.resident.bytes_of_step(texts)
    }

    /// Makes ready what is otherwise made when it is first needed: on a GPU the kernels, which take seconds to compile for
    /// the first time on a machine. `progress` is told how much of how much is done, from any thread. Errors: a compiler or memory that
    /// is not to be had.
    pub fn prepare(&self, progress: &(dyn Fn(usize, usize) + Sync)) -> Result<()> {
        self.resident.prepare(progress)
    }

    /// What its quantised products are computed by; `cpu` computes if the model lies in memory. Error: a product that no
    /// kernel serves.
    pub fn explain(&self, cpu: &Cpu) -> Result<Vec<Product>> {
        self.resident.explain(cpu)
    }

    /// Room for many texts: see [`crate::schedule`].
    pub(crate) fn begin_many<'m>(&'m self, cpu: &'m Cpu, room: Room) -> Result<Box<dyn Texts + 'm>> {
        self.resident.begin_many(cpu, room)
    }

    /// What texts keep their keys and values as.
    pub fn kv_type(&self) -> KvType {
        self.kv
    }

    /// Bytes that keys and values of one token take over all layers.
    pub fn kv_bytes_per_token(&self) -> usize {
        self.resident.kv_bytes_per_token()
    }
}

/// One text in a model: what it has read so far, as keys and values.
#[derive(Debug)]
pub struct Session<'m> {
    model: &'m Model,
    text: Box<dyn Text + 'm>,
    /// The tokens that it has read.
    tokens: Vec<u32>,
    /// Whether the tokens read last are still there, so that something can follow them.
    follows: bool,
    logits: Vec<f32>,
}

impl<'m> Session<'m> {
    /// Begins a text with room for `context` tokens, where the model lies; `cpu` computes if that is in memory, where
    /// room for keys and values is taken as they come. With longrope the room decides which rotary positions serve. Errors: more than
    /// the model was made for, too little memory on a GPU.
    pub fn new(model: &'m Model, cpu: &'m Cpu, context: usize) -> Result<Self> {
        let limit = model.config.spec.max_context;
        if context > limit {
            return Err(Error::ContextFull { limit, got: context });
        }
        let text = model.resident.begin(cpu, context)?;
        Ok(Self { model, text, tokens: Vec::new(), follows: false, logits: Vec::new() })
    }

    /// The model.
    pub fn model(&self) -> &'m Model {
        self.model
    }

    /// Tokens it has room for.
    pub fn context(&self) -> usize {
        self.text.capacity()
    }

    /// Tokens read so far.
    pub fn len(&self) -> usize {
        self.text.position()
    }

    /// Whether no token was read.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets everything; the room stays. Error: the device's.
    pub fn clear(&mut self) -> Result<()> {
        self.forget(0)
    }

    /// Forgets tokens from a position on, if there are such; the room stays. Error: the device's.
    pub fn forget(&mut self, position: usize) -> Result<()> {
        self.follows = false;
        self.tokens.truncate(position);
        self.text.truncate(position)
    }

    /// Makes ready for a text that may begin as the one that was read: forgets what differs, and returns how many of `tokens` need
    /// not be read again. The last one is read always, for the logits after it. Error: the device's.
    pub fn keep_beginning(&mut self, tokens: &[u32]) -> Result<usize> {
        let same = self.tokens.iter().zip(tokens).take_while(|(read, token)| read == token).count();
        let kept = same.min(tokens.len().saturating_sub(1));
        self.forget(kept)?;
        Ok(kept)
    }

    /// Reads tokens, many at a time; returns the logits `[vocab]` after the last.
    ///
    /// Errors, all before anything is read: no tokens, ids beyond the vocabulary, more tokens than there is room for.
    pub fn prefill(&mut self, tokens: &[u32]) -> Result<&[f32]> {
        self.read_unless(tokens, None)?;
        self.logits()
    }

    /// The logits `[vocab]` after the token that was read last. Errors: nothing was read, or what was read last is forgotten.
    pub fn logits(&mut self) -> Result<&[f32]> {
        if !self.follows {
            return Err(Error::EmptyPrompt);
        }
        let logits = room(&mut self.logits, self.model.config.spec.vocab);
        self.text.logits(0..1, logits)?;
        Ok(logits)
    }

    /// The tokens that it has read.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads one token; returns the logits `[vocab]` after it. Errors: as [`Session::prefill`].
    pub fn decode(&mut self, token: u32) -> Result<&[f32]> {
        self.prefill(&[token])
    }

    /// Reads tokens as [`Session::prefill`] does, for [`Session::next`]: the logits stay where they are computed.
    ///
    /// Looks at the flag between batches, forgets these tokens and fails with [`Error::Cancelled`] when it is set.
    pub fn read_unless(&mut self, tokens: &[u32], cancel: Option<&AtomicBool>) -> Result<()> {
        self.check(tokens)?;
        let before = self.len();
        for tokens in tokens.chunks(self.model.resident.prefill_tokens()) {
            if cancel.is_some_and(|flag| flag.load(Ordering::Relaxed)) {
                self.forget(before)?;
                return Err(Error::Cancelled);
            }
            let read = self.text.read(Batch { tokens, all_rows: false });
            self.or_forget(read, before)?;
            self.tokens.extend_from_slice(tokens);
        }
        self.follows = true;
        Ok(())
    }

    /// Reads tokens as [`Session::read_unless`] does, each step of each layer timed by itself, and chooses the most likely token
    /// after each batch. On a GPU kernels run one by one: nothing is recorded, and no two layers are one kernel.
    ///
    /// Errors: as [`Session::prefill`].
    pub fn profile(&mut self, tokens: &[u32]) -> Result<Profile> {
        self.check(tokens)?;
        let before = self.len();
        let mut all = Profile::default();
        for tokens in tokens.chunks(self.model.resident.prefill_tokens()) {
            let read = self.text.profile(tokens);
            if read.is_err() {
                self.forget(before)?;
            }
            all.append(read?);
            self.tokens.extend_from_slice(tokens);
        }
        self.follows = true;
        Ok(all)
    }

    /// The token that a sampler chooses to follow what was read. Errors: nothing was read, or what was read last is
    /// forgotten; those of [`Sampler::next`].
    pub fn next(&mut self, sampler: &mut Sampler) -> Result<u32> {
        if !self.follows {
            return Err(Error::EmptyPrompt);
        }
        self.text.next(sampler, false)
    }

    /// The same for a caller that reads this token next, as a rule: a GPU begins to read it before it is known here, so that it waits for
    /// nobody. What was begun in vain costs a step. Until something is read nothing follows: there are no logits, and no other token.
    pub fn next_to_read(&mut self, sampler: &mut Sampler) -> Result<u32> {
        if !self.follows {
            return Err(Error::EmptyPrompt);
        }
        self.follows = false;
        self.text.next(sampler, true)
    }

    /// Reads tokens and hands on the logits after each of them, `[some tokens, vocab]` at a time, in order.
    ///
    /// Errors: as [`Session::prefill`], and whatever `take` returns; these tokens are forgotten then.
    pub fn logits_of_all(&mut self, tokens: &[u32], take: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.check(tokens)?;
        let before = self.len();
        let read = self.each_logits(tokens, take);
        self.or_forget(read, before)?;
        self.tokens.extend_from_slice(tokens);
        self.follows = true;
        Ok(())
    }

    /// What came of reading; after an error what was read from `position` on is forgotten.
    fn or_forget(&mut self, read: Result<()>, position: usize) -> Result<()> {
        if read.is_err() {
            self.forget(position)?;
        }
        read
    }

    fn each_logits(&mut self, tokens: &[u32], take: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let Self { model, text, logits, .. } = self;
        let vocab = model.config.spec.vocab;
        let at_a_time = (LOGITS_AT_A_TIME / vocab).max(16);
        for tokens in tokens.chunks(model.resident.prefill_tokens()) {
            text.read(Batch { tokens, all_rows: true })?;
            for first in (0..tokens.len()).step_by(at_a_time) {
                let rows = first..(first + at_a_time).min(tokens.len());
                let logits = room(logits, rows.len() * vocab);
                text.logits(rows, logits)?;
                take(logits)?;
            }
        }
        Ok(())
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.model.config.spec.vocab;
        if tokens.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        if let Some(&id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(Error::UnknownToken { id, vocab });
        }
        if tokens.len() > self.context() - self.len() {
            return Err(Error::ContextFull { limit: self.context(), got: self.len() + tokens.len() });
        }
        Ok(())
    }
}
