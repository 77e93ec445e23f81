//! From a checkpoint's tensors to packed layers, one at a time.

use crate::config::Config;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::models::room;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::matmul::Packed;
use halfbyte::layout::cpu_n16::PANEL;
use halfbyte::ops::{Linear, Weight};
use halfbyte::quantize::{Rtn, rtn};
use halfbyte::{Act, Float, Floats, FloatsMut, QTensor, StoredTensor, WeightFormat, Zeros};
use halfbyte_checkpoint::{self as checkpoint, Finding, FloatData, ModuleKind, StoredLinear, StoredWeight};
use rayon::prelude::*;
use std::borrow::Cow;

/// How a model is loaded.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Where it will lie and compute.
    pub device: Device,
    /// What becomes of the activations of quantised layers. Dense layers always take them as they are.
    pub act: Act,
    /// Quantise every dense linear layer of the blocks while loading; the embedding and the head stay as they are.
    pub quantize: Option<(WeightFormat, Rtn)>,
}

impl Default for LoadOptions {
    /// Weights as they are stored, activations exact, on the CPU.
    fn default() -> Self {
        Self { device: Device::Cpu, act: Act::A16, quantize: None }
    }
}

/// What a configuration says of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Whether it must have a bias. One that the file holds is applied in any case.
    pub bias: bool,
}

/// Reads, checks and packs the tensors that a graph asks for.
#[derive(Debug)]
pub struct Loader<'a> {
    weights: &'a checkpoint::Weights,
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
        let findings = weights.findings();
        Ok(Self { weights, options, parameters: 0, findings })
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
        let (weights, options) = (self.weights, &self.options);
        let parts: Vec<_> = (0..parts)
            .into_par_iter()
            .map(|i| {
                let mut own = Loader { weights, options: options.clone(), parameters: 0, findings: Vec::new() };
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

    /// A vector of `len` floats, widened.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>> {
        let vector = self.weights.floats(name, &[len])?.to_f32();
        self.weights.checkpoint().release(name);
        self.parameters += len as u64;
        Ok(vector)
    }

    /// Linear layers that read the same vector, as one product where they are stored alike.
    ///
    /// Errors: missing or malformed tensors, another shape than asked for, weights that cannot be quantised.
    pub fn joined(&mut self, layers: &[(String, Shape)]) -> Result<Projection> {
        self.joined_by(layers, Projection::new)
    }

    /// The same for another device: `pack` is handed the layers, what becomes of their activations, and the name of the
    /// first.
    pub(crate) fn joined_by<T>(
        &mut self,
        layers: &[(String, Shape)],
        pack: impl FnOnce(&[StoredLinear<'_>], Act, &str) -> Result<T>,
    ) -> Result<T> {
        let mut loaded = Vec::with_capacity(layers.len());
        for (prefix, shape) in layers {
            loaded.push(self.layer(prefix, *shape)?);
        }
        let packed = pack(&loaded, self.options.act, &layers[0].0)?;
        drop(loaded);
        layers.iter().for_each(|(prefix, _)| self.weights.release(prefix));
        Ok(packed)
    }

    /// The embedding `[vocab, hidden]` and the head; one matrix for both where they are tied. A quantised embedding
    /// is held as f32.
    pub fn head(&mut self, embedding: &str, head: &str, config: &Config) -> Result<Head> {
        let shape = [config.vocab_size, config.hidden_size];
        if config.tied_embeddings {
            let linear =
                self.embedding_by(embedding, shape, |rows| Ok(Linear::new(Weight::Dense(rows.as_floats(), shape))?))?;
            return Ok(Head { linear, embedding: None });
        }
        let embedding = Some(self.embedding_by(embedding, shape, |rows| Ok(owned(rows)))?);
        let linear = self.untied_head_by(head, shape, |stored, act| pack(&[stored], act, head))?;
        Ok(Head { linear, embedding })
    }

    /// Hands the rows of the embedding to `take`; a quantised one as f32.
    pub(crate) fn embedding_by<T>(
        &mut self,
        prefix: &str,
        [n, k]: [usize; 2],
        take: impl FnOnce(FloatData<'a>) -> Result<T>,
    ) -> Result<T> {
        let name = format!("{prefix}.weight");
        let taken = take(self.embedding(prefix, &name, Shape { n, k, bias: false })?)?;
        self.weights.checkpoint().release(&name);
        Ok(taken)
    }

    /// Hands a head that is not the embedding to `pack`, with what becomes of its activations; it is quantised only if the
    /// file holds it so.
    pub(crate) fn untied_head_by<T>(
        &mut self,
        prefix: &str,
        [n, k]: [usize; 2],
        pack: impl FnOnce(StoredLinear<'_>, Act) -> Result<T>,
    ) -> Result<T> {
        let act = self.options.act;
        let packed = pack(self.stored(prefix, Shape { n, k, bias: false })?, act)?;
        self.weights.release(prefix);
        Ok(packed)
    }

    /// The embedding as floats. Rows of it are read, not multiplied, so that codes become what they stand for.
    fn embedding(&mut self, prefix: &str, name: &str, shape: Shape) -> Result<FloatData<'a>> {
        if !matches!(self.weights.kind(prefix)?, ModuleKind::Quantized(_)) {
            self.parameters += shape.n as u64 * shape.k as u64;
            return Ok(self.weights.floats(name, &[shape.n, shape.k])?);
        }
        let floats = match self.stored(prefix, shape)?.weight {
            StoredWeight::Dense { floats, .. } => floats,
            StoredWeight::Quantized(codes) => FloatData::F32(Cow::Owned(values(&codes.to_qtensor()?))),
        };
        self.weights.release(prefix);
        Ok(floats)
    }

    /// A layer of a block, quantised if the options say so.
    fn layer(&mut self, prefix: &str, shape: Shape) -> Result<StoredLinear<'a>> {
        let mut layer = self.stored(prefix, shape)?;
        if let (StoredWeight::Dense { floats, shape }, Some((format, options))) = (&layer.weight, self.options.quantize)
        {
            let quantized = rtn(floats.as_floats(), *shape, format, options)
                .map_err(|source| Error::Quantize { name: prefix.to_owned(), source })?;
            layer.weight = StoredWeight::Quantized(quantized.into());
            self.weights.release(prefix);
        }
        Ok(layer)
    }

    /// A layer as the file holds it, its shape checked.
    fn stored(&mut self, prefix: &str, shape: Shape) -> Result<StoredLinear<'a>> {
        let mut layer = self.weights.stored_linear(prefix)?;
        let got = layer.weight.shape();
        if got != [shape.n, shape.k] {
            return Err(Error::Weight {
                name: prefix.to_owned(),
                expected: format!("a matrix of {} × {}, by the configuration", shape.n, shape.k),
                got: format!("{} × {}", got[0], got[1]),
            });
        }
        if shape.bias && !self.weights.checkpoint().contains(&format!("{prefix}.bias")) {
            return Err(Error::Weight {
                name: format!("{prefix}.bias"),
                expected: "a bias, by the configuration".to_owned(),
                got: "no such tensor".to_owned(),
            });
        }
        self.findings.append(&mut layer.findings);
        self.parameters += shape.n as u64 * shape.k as u64 + layer.bias.as_ref().map_or(0, |b| b.len() as u64);
        Ok(layer)
    }
}

/// What codes stand for, each rounded to f32 once.
fn values(q: &QTensor) -> Vec<f32> {
    let (k, groups, middle) = (q.k(), q.groups(), f64::from(q.format().middle()));
    let value = |i: usize, j: usize| {
        let at = i * groups + q.group_of(j);
        let (code, scale) = (f64::from(q.codes()[i * k + j]), f64::from(q.scales()[at]));
        let value = match q.zeros() {
            Zeros::Symmetric => scale * (code - middle),
            Zeros::Integer(z) => scale * (code - f64::from(z[at])),
            Zeros::Float(offsets) => scale * code + f64::from(offsets[at]),
        };
        value as f32
    };
    (0..q.n()).flat_map(|i| (0..k).map(move |j| (i, j))).map(|(i, j)| value(i, j)).collect()
}

/// Packs layers that are alike, one below the other; errors name `prefix`.
fn pack(layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Linear> {
    let named = |source| Error::Weight {
        name: prefix.to_owned(),
        expected: "weights that can be packed".to_owned(),
        got: format!("{source}"),
    };
    let outputs = |layer: &StoredLinear<'_>| layer.weight.shape()[0];
    let linear = match &layers[0].weight {
        StoredWeight::Quantized(_) => {
            let parts: Vec<&StoredTensor<'_>> = layers
                .iter()
                .filter_map(|l| if let StoredWeight::Quantized(w) = &l.weight { Some(w) } else { None })
                .collect();
            Linear::new(Weight::Stored(&parts, act))
        }
        StoredWeight::Dense { floats, shape: [_, k] } => {
            let parts: Vec<Floats<'_>> = layers
                .iter()
                .filter_map(|l| {
                    if let StoredWeight::Dense { floats, .. } = &l.weight { Some(floats.as_floats()) } else { None }
                })
                .collect();
            let n = layers.iter().map(outputs).sum();
            match parts.as_slice() {
                [single] => Linear::new(Weight::Dense(*single, [n, *k])),
                several => Linear::new(Weight::Dense(below_each_other(several, floats.dtype()).as_floats(), [n, *k])),
            }
        }
    };
    let linear = linear.map_err(named)?;
    if layers.iter().all(|l| l.bias.is_none()) {
        return Ok(linear);
    }
    let bias = layers.iter().flat_map(|l| l.bias.clone().unwrap_or_else(|| vec![0.0; outputs(l)])).collect();
    linear.with_bias(bias).map_err(named)
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

fn owned(data: FloatData<'_>) -> FloatData<'static> {
    match data {
        FloatData::F16(v) => FloatData::F16(Cow::Owned(v.into_owned())),
        FloatData::BF16(v) => FloatData::BF16(Cow::Owned(v.into_owned())),
        FloatData::F32(v) => FloatData::F32(Cow::Owned(v.into_owned())),
    }
}

/// Linear layers that read the same vector; their outputs lie side by side.
#[derive(Debug)]
pub struct Projection {
    /// More than one only where the checkpoint stores them in different formats.
    parts: Vec<Linear>,
}

impl Projection {
    /// Packs layers of the same k, as one product where they are stored alike. Errors name `prefix`.
    pub fn new(layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Self> {
        let parts = layers.chunk_by(alike).map(|alike| pack(alike, act, prefix)).collect::<Result<_>>()?;
        Ok(Self { parts })
    }

    /// Outputs of all parts.
    pub fn n(&self) -> usize {
        self.parts.iter().map(Linear::n).sum()
    }

    /// Bytes that the packed weights take.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Linear::bytes).sum()
    }

    /// The products that it is.
    pub fn parts(&self) -> &[Linear] {
        &self.parts
    }

    /// Multiplies. Shapes: x `[m, k]`, y `[m, n]`; `part` is room for the outputs of one part.
    pub fn forward(&self, cpu: &Cpu, x: &[f32], m: usize, y: &mut [f32], part: &mut Vec<f32>) -> Result<()> {
        if let [only] = self.parts.as_slice() {
            return Ok(only.forward(cpu, Floats::F32(x), m, FloatsMut::F32(y))?);
        }
        let (n, mut from) = (self.n(), 0);
        for linear in &self.parts {
            let of_part = linear.n();
            let part = room(part, m * of_part);
            linear.forward(cpu, Floats::F32(x), m, FloatsMut::F32(part))?;
            for (y, part) in y.chunks_exact_mut(n).zip(part.chunks_exact(of_part)) {
                y[from..from + of_part].copy_from_slice(part);
            }
            from += of_part;
        }
        Ok(())
    }
}

/// The layer from vectors to logits, and the way back: the embedding.
#[derive(Debug)]
pub struct Head {
    linear: Linear,
    /// `[vocab, hidden]`; None where the head's weight is the embedding, which then is held once.
    embedding: Option<FloatData<'static>>,
}

impl Head {
    /// Logits. Shapes: x `[m, hidden]`, y `[m, vocab]`.
    pub fn logits(&self, cpu: &Cpu, x: &[f32], m: usize, y: &mut [f32]) -> Result<()> {
        Ok(self.linear.forward(cpu, Floats::F32(x), m, FloatsMut::F32(y))?)
    }

    /// Vectors of tokens, whose ids are below the vocabulary. Shape: out `[tokens, hidden]`.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) {
        let hidden = self.linear.k();
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
            let token = token as usize;
            match (&self.embedding, self.linear.packed()) {
                (Some(rows), _) => widen(rows.as_floats().slice(token * hidden..(token + 1) * hidden), 1, out),
                (None, Packed::Dense(packed)) => {
                    // Element j of output i lies at [i / 16][j][i % 16].
                    let data = packed.data();
                    let first = token / PANEL * hidden * PANEL + token % PANEL;
                    widen(data.slice(first..first + (hidden - 1) * PANEL + 1), PANEL, out);
                }
                (None, Packed::Quantized(..)) => unreachable!("a tied head is packed dense"),
            }
        }
    }

    /// Bytes that embedding and head take.
    pub fn bytes(&self) -> usize {
        let embedding = self.embedding.as_ref().map_or(0, |e| e.len() * e.dtype().size_bytes());
        self.linear.bytes() + embedding
    }
}

/// Every `step`th element.
fn widen(from: Floats<'_>, step: usize, to: &mut [f32]) {
    match from {
        Floats::F16(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = v.to_f32()),
        Floats::BF16(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = v.to_f32()),
        Floats::F32(v) => to.iter_mut().zip(v.iter().step_by(step)).for_each(|(to, v)| *to = *v),
    }
}
