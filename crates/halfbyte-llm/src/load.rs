//! From a checkpoint's tensors, or random ones, to what a device packs: checked, quantised if asked for, and cut for a rank.

use crate::arch::spec::{FeedForward, NormKind, Shape, Spec};
use crate::comm::{Alone, Comm};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::random::{self, RandomFloats, RandomWeights};
use crate::shard::{self, Shard};
use halfbyte::cpu::{Cpu, nn};
use halfbyte::kernel::KvType;
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Float, Floats, Group, StoredTensor, WeightFormat};
use halfbyte_checkpoint::{self as checkpoint, Cut, Finding, FloatData, ModuleKind, Part, StoredLinear, StoredWeight};
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it will lie and compute.
    pub device: Device,
    /// What becomes of the activations of quantised layers. Dense layers always take them as they are.
    pub act: Act,
    /// Quantise every dense linear layer of the blocks while loading; the embedding and the head stay as they are.
    pub quantize: Option<(WeightFormat, Rtn)>,
    /// What texts keep their keys and values as: on the CPU f32 unless another type is named; on a GPU the type of its
    /// activations.
    pub kv: Option<KvType>,
    /// The ranks that share the model; each loads its part.
    pub comm: Arc<dyn Comm>,
}

impl Default for LoadOptions {
    /// Weights as they are stored, activations exact, on the CPU.
    fn default() -> Self {
        Self { device: Device::Cpu, act: Act::A16, quantize: None, kv: None, comm: Arc::new(Alone) }
    }
}

impl LoadOptions {
    /// What texts will keep their keys and values as.
    pub fn kv_type(&self) -> KvType {
        self.kv.unwrap_or_else(|| match &self.device {
            Device::Cpu => KvType::default(),
            Device::Cuda(gpu) => gpu.activations.into(),
        })
    }
}

/// Where tensors come from.
#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Checkpoint(&'a checkpoint::Weights),
    Random(RandomWeights),
}

/// An embedding on its way to a device.
#[derive(Debug)]
pub(crate) enum Embedding<'a> {
    /// Rows of a file.
    Stored(FloatData<'a>),
    /// Rows of a file, as codes.
    Codes(Box<StoredTensor<'a>>),
    /// Rows that are drawn where they will lie.
    Random(RandomFloats),
}

/// Reads and checks the tensors that a model asks for, or draws them.
#[derive(Debug)]
pub struct Loader<'a> {
    source: Source<'a>,
    /// Whether the checkpoint has this rank's part already.
    is_part: bool,
    options: LoadOptions,
    parameters: u64,
    findings: Vec<Finding>,
}

impl<'a> Loader<'a> {
    /// Error: a format that does not exist.
    pub fn new(weights: &'a checkpoint::Weights, options: LoadOptions) -> Result<Self> {
        if let Some((format, _)) = options.quantize {
            format.validate()?;
        }
        let part = weights.part()?;
        if let Some(part) = &part {
            part_fits(part, &options)?;
        }
        let findings = weights.findings();
        let source = Source::Checkpoint(weights);
        Ok(Self { source, is_part: part.is_some(), options, parameters: 0, findings })
    }

    /// Of a part, whatever rank this is: to see how it is cut.
    pub(crate) fn of_any_part(weights: &'a checkpoint::Weights) -> Self {
        let (source, options) = (Source::Checkpoint(weights), LoadOptions::default());
        Self { source, is_part: true, options, parameters: 0, findings: Vec::new() }
    }

    /// Draws tensors instead. Errors: a format that does not exist; options that quantise, which is done here already.
    pub(crate) fn random(weights: RandomWeights, options: LoadOptions) -> Result<Self> {
        weights.validate()?;
        if options.quantize.is_some() {
            return Err(Error::invalid("random weights", "a format of their own", "one to quantise them to"));
        }
        Ok(Self { source: Source::Random(weights), is_part: false, options, parameters: 0, findings: Vec::new() })
    }

    /// Weights loaded so far, in numbers.
    pub fn parameters(&self) -> u64 {
        self.parameters
    }

    /// What was odd about the tensors, and which reading was taken.
    pub fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    /// Loads parts of a model that do not depend on each other, as many at a time as there are threads: most of the time
    /// is the system's, which hands out memory, so that threads that share a layer wait for each other.
    ///
    /// Errors: the first part's that has one.
    pub fn side_by_side<T: Send>(
        &mut self,
        parts: usize,
        load: impl Fn(&mut Loader<'a>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (source, is_part, options) = (self.source, self.is_part, &self.options);
        let parts: Vec<_> = (0..parts)
            .into_par_iter()
            .map(|i| {
                let mut own = Loader { source, is_part, options: options.clone(), parameters: 0, findings: Vec::new() };
                (load(&mut own, i), own)
            })
            .collect();
        let mut loaded = Vec::with_capacity(parts.len());
        for (part, mut own) in parts {
            loaded.push(part?);
            self.parameters += own.parameters;
            self.findings.append(&mut own.findings);
        }
        Ok(loaded)
    }

    /// Loads parts in their order by several threads, each with something of its own that `begin` makes. The threads of rayon are
    /// left to the work within a part: one that took another part while it waits would hold two of them.
    ///
    /// Errors: the first part's that has one.
    pub(crate) fn in_lanes<L, T: Send>(
        &mut self,
        lanes: usize,
        parts: usize,
        begin: impl Fn(usize) -> L + Sync,
        load: impl Fn(&mut L, &mut Loader<'a>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (source, is_part, options) = (self.source, self.is_part, &self.options);
        let (next, failed, loaded) = (AtomicUsize::new(0), AtomicBool::new(false), Mutex::new(Vec::new()));
        let run = |lane: usize| {
            let mut lane = begin(lane);
            while !failed.load(Ordering::Relaxed) {
                let part = next.fetch_add(1, Ordering::Relaxed);
                if part >= parts {
                    break;
                }
                let mut own = Loader { source, is_part, options: options.clone(), parameters: 0, findings: Vec::new() };
                let result = load(&mut lane, &mut own, part);
                failed.fetch_or(result.is_err(), Ordering::Relaxed);
                loaded.lock().unwrap_or_else(PoisonError::into_inner).push((part, result, own));
            }
        };
        // A thread of rayon that waited for lanes would not be there for the work that they give it.
        let lanes = if rayon::current_thread_index().is_some() { 1 } else { lanes.clamp(1, parts.max(1)) };
        std::thread::scope(|scope| {
            let run = &run;
            // Where the system gives no more threads, those that there are do it all.
            (1..lanes).for_each(|lane| drop(Builder::new().spawn_scoped(scope, move || run(lane))));
            run(0);
        });
        let mut loaded = std::mem::take(&mut *loaded.lock().unwrap_or_else(PoisonError::into_inner));
        loaded.sort_by_key(|(part, ..)| *part);
        let take = |(_, result, mut own): (usize, Result<T>, Loader<'a>)| {
            self.parameters += own.parameters;
            self.findings.append(&mut own.findings);
            result
        };
        loaded.into_iter().map(take).collect()
    }

    /// A vector of `len` floats, widened.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let vector = match self.source {
            Source::Checkpoint(weights) => {
                let vector = weights.floats(name, &[len])?.to_f32();
                weights.checkpoint().release(name);
                vector
            }
            Source::Random(_) => random::vector(name, len, if name.ends_with(".bias") { 0.0 } else { 1.0 }, 0.05),
        };
        self.parameters += len as u64;
        Ok(vector)
    }

    /// What becomes of the activations of quantised layers.
    pub(crate) fn act(&self) -> Act {
        self.options.act
    }

    /// Lets go of a layer's tensors: their pages are not needed again.
    pub(crate) fn release(&self, prefix: &str) {
        if let Source::Checkpoint(weights) = self.source {
            weights.release(prefix);
        }
    }

    /// A rank's inner features of an MLP: whole groups of `down`.
    pub(crate) fn features(&self, mlp: &FeedForward, shard: Shard) -> Result<Vec<Range<usize>>> {
        if shard == Shard::WHOLE {
            return Ok(shard::features(None, 0..mlp.inner()));
        }
        let places = shard.inner(mlp.inner(), self.columns_of_a_group(&mlp.down.name)?)?;
        // A part's features are those that it has, in the order that it has them in.
        let order = if self.is_part { None } else { self.order_of_columns(&mlp.down.name)? };
        Ok(shard::features(order.as_deref(), places))
    }

    /// Columns along which a layer's weights may be cut: those that share a scale.
    fn columns_of_a_group(&self, prefix: &str) -> Result<usize> {
        let group = |format: WeightFormat| match format.group {
            Group::Size(size) => size,
            Group::Channel | Group::Tensor => 1,
        };
        let weights = match self.source {
            Source::Checkpoint(weights) => weights,
            Source::Random(RandomWeights { format, .. }) => return Ok(format.map_or(1, group)),
        };
        Ok(match (weights.kind(prefix)?, self.options.quantize) {
            (ModuleKind::Quantized(_), _) => match &weights.stored_linear(prefix)?.weight {
                StoredWeight::Quantized(codes) => group(codes.format()),
                StoredWeight::Dense { .. } => 1,
            },
            (_, Some((format, _))) => group(format),
            (_, None) => 1,
        })
    }

    /// The columns of a layer group by group, where they were quantised in another order (act-order).
    fn order_of_columns(&self, prefix: &str) -> Result<Option<Vec<u32>>> {
        let Source::Checkpoint(weights) = self.source else { return Ok(None) };
        let ModuleKind::Quantized(_) = weights.kind(prefix)? else { return Ok(None) };
        let StoredWeight::Quantized(codes) = weights.stored_linear(prefix)?.weight else { return Ok(None) };
        Ok(codes.group_index().map(|index| {
            let mut order: Vec<u32> = (0..index.len() as u32).collect();
            order.sort_by_key(|&j| index[j as usize]);
            order
        }))
    }

    /// Module of a head that is not the embedding.
    pub(crate) fn head(&self, spec: &Spec) -> Option<String> {
        let own = matches!(self.source, Source::Random(RandomWeights { head: Some(_), .. }));
        spec.head.clone().or(own.then(|| "lm_head".to_owned()))
    }

    /// Some rows of the embedding `[vocab, hidden]`: they are read, not multiplied, so that codes become what they stand for.
    pub(crate) fn embedding(
        &mut self,
        prefix: &str,
        vocab: usize,
        hidden: usize,
        tokens: &Range<usize>,
    ) -> Result<Embedding<'a>> {
        let shape = Shape { n: vocab, k: hidden, bias: false };
        let cut = shard::of_rows(vec![tokens.clone()], shape);
        let weights = match self.source {
            Source::Checkpoint(weights) => weights,
            Source::Random(_) => {
                self.parameters += tokens.len() as u64 * hidden as u64;
                if let Some(part) = RandomFloats::of_rows(hidden, prefix, tokens) {
                    return Ok(Embedding::Random(RandomFloats { k: hidden, parts: vec![part] }));
                }
                let whole = RandomFloats::new(hidden, std::iter::once((prefix, vocab))).draw()?;
                let whole = FloatData::F16(Cow::Owned(whole));
                return Ok(Embedding::Stored(cut.of_floats(&whole, hidden)));
            }
        };
        if !matches!(weights.kind(prefix)?, ModuleKind::Quantized(_)) {
            self.parameters += tokens.len() as u64 * hidden as u64;
            let rows = if self.is_part { tokens.len() } else { vocab };
            let floats = weights.floats(&format!("{prefix}.weight"), &[rows, hidden])?;
            return Ok(Embedding::Stored(match self.is_part || cut.is_whole(shape.matrix()) {
                true => floats,
                false => cut.of_floats(&floats, hidden),
            }));
        }
        Ok(match self.stored(prefix, shape, &cut)?.weight {
            StoredWeight::Dense { floats, .. } => Embedding::Stored(floats),
            StoredWeight::Quantized(codes) => Embedding::Codes(Box::new(codes)),
        })
    }

    /// A rank's part of a layer of a block, quantised if the options say so.
    pub(crate) fn layer(&mut self, prefix: &str, shape: Shape, cut: &Cut) -> Result<StoredLinear<'a>> {
        if let Source::Random(random) = self.source {
            return self.drawn(prefix, shape, cut, random.format);
        }
        let whole = Cut::whole(shape.matrix());
        // The part of what the whole is quantised to: ranks together have the numbers that one would have.
        let quantize = self.options.quantize.is_some();
        let mut layer = self.stored(prefix, shape, if quantize { &whole } else { cut })?;
        if let (StoredWeight::Dense { floats, shape }, Some((format, options))) = (&layer.weight, self.options.quantize)
        {
            let quantized = rtn(floats.as_floats(), *shape, format, options)
                .map_err(|source| Error::Quantize { name: prefix.to_owned(), source })?;
            layer.weight = StoredWeight::Quantized(quantized.into());
            self.release(prefix);
        }
        if quantize && *cut != whole {
            layer = cut.of(layer, prefix)?;
        }
        Ok(layer)
    }

    /// A rank's part of a layer as the file holds it, the whole one's shape checked.
    pub(crate) fn stored(&mut self, prefix: &str, shape: Shape, cut: &Cut) -> Result<StoredLinear<'a>> {
        let weights = match self.source {
            Source::Checkpoint(weights) => weights,
            Source::Random(random) => return self.drawn(prefix, shape, cut, random.head),
        };
        let mut layer = weights.stored_linear(prefix)?;
        let got = layer.weight.shape();
        let [n, k] = if self.is_part { cut.shape() } else { shape.matrix() };
        if got != [n, k] {
            return Err(Error::Weight {
                name: prefix.to_owned(),
                expected: format!("a matrix of {n} × {k}, by the configuration"),
                got: format!("{} × {}", got[0], got[1]),
            });
        }
        if shape.bias && (cut.bias || !self.is_part) && !weights.checkpoint().contains(&format!("{prefix}.bias")) {
            return Err(Error::Weight {
                name: format!("{prefix}.bias"),
                expected: "a bias, by the configuration".to_owned(),
                got: "no such tensor".to_owned(),
            });
        }
        self.findings.append(&mut layer.findings);
        self.part(layer, prefix, shape, cut)
    }

    /// A whole layer as it is stored, whatever the options say: a router, on which it hangs who computes a token.
    pub(crate) fn router(&mut self, prefix: &str, shape: Shape) -> Result<StoredLinear<'a>> {
        match self.source {
            Source::Checkpoint(_) => self.stored(prefix, shape, &Cut::whole(shape.matrix())),
            Source::Random(_) => self.drawn(prefix, shape, &Cut::whole(shape.matrix()), None),
        }
    }

    /// A rank's part of a layer, counted.
    fn part(&mut self, mut layer: StoredLinear<'a>, prefix: &str, shape: Shape, cut: &Cut) -> Result<StoredLinear<'a>> {
        if !self.is_part && !cut.is_whole(shape.matrix()) {
            layer = cut.of(layer, prefix)?;
        }
        let [n, k] = layer.weight.shape();
        self.parameters += n as u64 * k as u64 + layer.bias.as_ref().map_or(0, |b| b.len() as u64);
        Ok(layer)
    }
}

/// Errors: the part of another rank, or options that need the whole.
fn part_fits(part: &Part, options: &LoadOptions) -> Result<()> {
    const OP: &str = "load a rank's part";
    let Part { rank, size, .. } = *part;
    if (rank, size) != (options.comm.rank(), options.comm.size()) {
        let got = format!("rank {} of {}", options.comm.rank(), options.comm.size());
        return Err(Error::invalid(OP, format!("rank {rank} of {size}, whose part the folder holds"), got));
    }
    match options.quantize {
        Some(_) => Err(Error::invalid(OP, "weights as they are stored", "a format to quantise them to")),
        None => Ok(()),
    }
}

/// Whether two layers can be packed as one.
pub(crate) fn alike(a: &StoredLinear<'_>, b: &StoredLinear<'_>) -> bool {
    match (&a.weight, &b.weight) {
        (StoredWeight::Quantized(a), StoredWeight::Quantized(b)) => a.continues(b),
        (StoredWeight::Dense { floats: a, .. }, StoredWeight::Dense { floats: b, .. }) => a.dtype() == b.dtype(),
        _ => false,
    }
}

/// Rows of matrices of one type, one below the other.
pub(crate) fn below_each_other(parts: &[Floats<'_>], dtype: Float) -> FloatData<'static> {
    macro_rules! concat {
        ($variant:ident) => {
            FloatData::$variant(Cow::Owned(
                parts.iter().flat_map(|p| if let Floats::$variant(v) = p { *v } else { &[] }).copied().collect(),
            ))
        };
    }
    match dtype {
        Float::F16 => concat!(F16),
        Float::BF16 => concat!(BF16),
        Float::F32 => concat!(F32),
    }
}

/// What enters the first layer for some tokens: rows of the embedding, multiplied and normed as the model has it.
///
/// *Shapes:* out `[tokens, hidden]`. *Errors:* another length, an id that is not below the vocabulary, tensors that lack or do not fit.
pub fn embed(spec: &Spec, weights: &checkpoint::Weights, tokens: &[u32], out: &mut [f32]) -> Result<()> {
    const OP: &str = "embed";
    if let Some(id) = tokens.iter().find(|&&id| id as usize >= spec.vocab) {
        return Err(Error::invalid(OP, format!("ids below {}", spec.vocab), id.to_string()));
    }
    if tokens.len().checked_mul(spec.hidden) != Some(out.len()) {
        let expected = format!("{} vectors of {}", tokens.len(), spec.hidden);
        return Err(Error::invalid(OP, expected, format!("{} elements", out.len())));
    }
    let (hidden, name) = (spec.hidden, format!("{}.weight", spec.embedding));
    let rows = weights.floats(&name, &[spec.vocab, hidden])?;
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
        let row = rows.as_floats().slice(token as usize * hidden..(token as usize + 1) * hidden);
        out.iter_mut().enumerate().for_each(|(j, out)| *out = row.get(j));
    }
    weights.checkpoint().release(&name);
    if let Some(scale) = spec.embedding_scale {
        out.iter_mut().for_each(|v| *v *= scale);
    }
    if let Some(norm) = &spec.embedding_norm {
        let part = |part: &str| weights.floats(&format!("{}.{part}", norm.name), &[hidden]).map(|v| v.to_f32());
        let weight: Vec<f32> = part("weight")?.into_iter().map(|v| v + norm.offset).collect();
        let bias = (norm.kind == NormKind::Layer).then(|| part("bias")).transpose()?;
        let (cpu, mut before) = (Cpu::new(1)?, Vec::new());
        for rows in out.chunks_mut(hidden << 8) {
            before.clear();
            before.extend_from_slice(rows);
            match norm.kind {
                NormKind::Rms => nn::rms_norm(&cpu, &before, &weight, norm.eps, rows)?,
                NormKind::Layer => nn::layer_norm(&cpu, &before, &weight, bias.as_deref(), norm.eps, rows)?,
            }
        }
    }
    Ok(())
}

mod drawn;
#[cfg(test)]
mod tests;
