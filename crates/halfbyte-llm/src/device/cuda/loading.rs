//! Weights on their way to a GPU.
//!
//! ```text
//! lane, one of several, each with a stream, pinned memory and room on the device:
//!     reads the parts of a layer that are no codes, checks them;  codes as they are ─ pinned memory ─ device ─ packed there
//! ```
//!
//! While a lane looks at numbers or waits for the device, others copy; the threads of all copy for each.

use super::kernels::Kernels;
use super::projection::Projection;
use super::run::function_of;
use super::vocabulary::{Embedding as Rows, Vocabulary};
use super::{OnCuda, PREFILL_TOKENS, experts};
use crate::arch::spec::{self, RopeSpec, Spec};
use crate::decoder::{FeedForward, LoadDevice, MlpOf};
use crate::device::rope::Rope;
use crate::error::{Error, Result};
use crate::load::{Embedding, Loader, alike};
use crate::random::RandomFloats;
use halfbyte::cuda::Caps;
use halfbyte::cuda::driver::{Buffer, Sent, Stream};
use halfbyte::cuda::matmul::{Grouped, Packed, Packer, select};
use halfbyte::cuda::nn::{self, Dense, FloatBuffer};
use halfbyte::cuda::roofline::Roofline;
use halfbyte::kernel::Problem;
use halfbyte::ops::Linear;
use halfbyte::{Act, Cuda, Float, Floats, Format, StoredTensor};
use halfbyte_checkpoint::{StoredLinear, StoredWeight};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Rows of a gate that lie together, before as many of what it lets through.
const EIGHT: usize = 8;

/// Lanes at most.
const MOST_LANES: usize = 6;

/// What the codes of a lane that are not packed yet take on the device.
const SLAB_BYTES: usize = 16 << 20;

/// Streams by which weights come, and what came.
#[derive(Debug)]
pub(super) struct Lanes {
    streams: Vec<Stream>,
    sent: Mutex<Sent>,
}

impl Lanes {
    /// As many as there are threads to keep them busy.
    pub(super) fn new(cuda: &Cuda) -> Result<Self> {
        let count = rayon::current_num_threads().clamp(1, MOST_LANES);
        let streams = (0..count).map(|_| cuda.gpu().stream()).collect::<halfbyte::Result<_>>()?;
        Ok(Self { streams, sent: Mutex::default() })
    }

    /// How many.
    pub(super) fn count(&self) -> usize {
        self.streams.len()
    }

    /// What came by all of them.
    pub(super) fn sent(&self) -> Sent {
        *self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What puts weights onto a GPU: a lane. What it returns lies there.
#[derive(Debug)]
pub(super) struct Loading<'a> {
    /// What will compute.
    cuda: &'a Cuda,
    /// Type of what products will read.
    activations: Float,
    lanes: &'a Lanes,
    kernels: &'a Kernels,
    packer: Packer<'a>,
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        let mut sent = self.lanes.sent.lock().unwrap_or_else(PoisonError::into_inner);
        *sent = sent.and(self.packer.sent());
    }
}

impl<'a> Loading<'a> {
    /// The first lane.
    pub(super) fn new(cuda: &'a Cuda, activations: Float, lanes: &'a Lanes, kernels: &'a Kernels) -> Self {
        Self::lane(cuda, activations, lanes, kernels, cuda.stream())
    }

    fn lane(cuda: &'a Cuda, activations: Float, lanes: &'a Lanes, kernels: &'a Kernels, stream: &'a Stream) -> Self {
        let packer = Packer::new(cuda.gpu(), stream).with_slab_bytes(SLAB_BYTES);
        Self { cuda, activations, lanes, kernels, packer }
    }

    /// A matrix of random floats, drawn on the device.
    fn draw(&self, floats: &RandomFloats) -> Result<Dense> {
        let (gpu, roofline) = (self.cuda.gpu(), Roofline::new(self.cuda.gpu())?);
        let mut values = gpu.context().allocate(floats.len()?)?;
        let mut rest = values.view_mut();
        for &(n, first) in &floats.parts {
            let (mut part, others) = rest.split_at(n * floats.k);
            roofline.uniform(self.cuda.stream(), &mut part, floats.step(), first)?;
            rest = others;
        }
        Ok(Dense::of(FloatBuffer::F16(values), floats.shape())?)
    }

    /// Of weights that are packed. With vectors in f16, which are rounded by 2⁻¹¹ themselves, so may weights be; bf16 would lose 2⁻⁸.
    fn linear(&self, mut packed: Packed) -> Result<Linear<Cuda>> {
        if self.activations == Float::F16 {
            packed.allow_rounded_weights(self.cuda.gpu(), self.packer.stream())?;
        }
        Ok(Linear::of_packed(self.cuda, packed))
    }

    /// The first layer of an MLP without gates, if it is multiplied by a kernel that activates what it leaves.
    fn activated_alone(
        &mut self,
        layer: &StoredLinear<'_>,
        act: Act,
        mlp: &spec::FeedForward,
        exact: bool,
    ) -> Result<Option<Projection>> {
        let Some(up) = codes(layer) else { return Ok(None) };
        let format = Format { weight: up.format(), act };
        let caps = self.cuda.gpu().caps();
        if exact || mlp.clamp.is_some() || makes_floats(&caps, format, self.activations, [up.n(), up.k()]) {
            return Ok(None);
        }
        let Some(mut packed) = taken(self.packer.pack(&[up], act, self.activations))? else { return Ok(None) };
        if !act.is_quantized() && !packed.allow_rounded_weights(self.cuda.gpu(), self.packer.stream())? {
            return Ok(None);
        }
        let linear = Linear::of_packed(self.cuda, packed).with_activation(mlp.activation);
        let linear = match &layer.bias {
            Some(bias) => linear.with_bias(bias.clone())?,
            None => linear,
        };
        let projection = Projection::activated(linear, self.activations, false);
        self.kernels.want(self.cuda, &projection, self.activations);
        Ok(Some(projection))
    }

    fn part(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Linear<Cuda>> {
        let named = |source: halfbyte::Error| Error::Weight {
            name: prefix.to_owned(),
            expected: "weights that can be packed".to_owned(),
            got: source.to_string(),
        };
        let outputs = |layer: &StoredLinear<'_>| layer.weight.shape()[0];
        let linear = match &layers[0].weight {
            StoredWeight::Quantized(_) => {
                let parts: Vec<&StoredTensor<'_>> = layers.iter().filter_map(codes).collect();
                match self.packer.pack(&parts, act, self.activations) {
                    Err(source @ halfbyte::Error::Invalid { .. }) => return Err(named(source)),
                    packed => self.linear(packed?)?,
                }
            }
            StoredWeight::Dense { shape: [_, k], .. } => {
                let parts: Vec<Floats<'_>> = layers.iter().filter_map(dense).collect();
                let shape = [layers.iter().map(outputs).sum(), *k];
                Linear::of_dense(self.cuda, Dense::of(self.packer.floats(&parts)?, shape)?)
            }
        };
        if layers.iter().all(|layer| layer.bias.is_none()) {
            return Ok(linear);
        }
        let of = |layer: &StoredLinear<'_>| layer.bias.clone().unwrap_or_else(|| vec![0.0; outputs(layer)]);
        Ok(linear.with_bias(layers.iter().flat_map(of).collect())?)
    }
}

/// Whether weights of any number of rows are best made floats first, which leaves gates to another kernel.
fn makes_floats(caps: &Caps, format: Format, x: Float, [n, k]: [usize; 2]) -> bool {
    let caps = Caps { rounded_weights: true, ..*caps };
    let problem = Problem { format: Some(format), x, y: Float::F32, m: PREFILL_TOKENS, n, k };
    select(&caps, &problem, None).is_ok_and(|kernel| !kernel.packs)
}

fn codes<'a, 'b>(layer: &'a StoredLinear<'b>) -> Option<&'a StoredTensor<'b>> {
    if let StoredWeight::Quantized(codes) = &layer.weight { Some(codes) } else { None }
}

fn dense<'a>(layer: &'a StoredLinear<'_>) -> Option<Floats<'a>> {
    if let StoredWeight::Dense { floats, .. } = &layer.weight { Some(floats.as_floats()) } else { None }
}

/// What was packed, or None where the weights are refused; memory that is short and a device that is lost are errors.
fn taken<T>(packed: halfbyte::Result<T>) -> Result<Option<T>> {
    use halfbyte::Error::{Invalid, NoKernel, NotFinite};
    match packed {
        Ok(packed) => Ok(Some(packed)),
        Err(Invalid { .. } | NoKernel { .. } | NotFinite { .. }) => Ok(None),
        Err(other) => Err(other.into()),
    }
}

impl LoadDevice for Loading<'_> {
    type Device = OnCuda;

    fn projection(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Projection> {
        let parts = layers.chunk_by(alike).map(|alike| self.part(alike, act, prefix)).collect::<Result<_>>()?;
        let projection = Projection::of(parts);
        self.kernels.want(self.cuda, &projection, self.activations);
        Ok(projection)
    }

    fn activated(
        &mut self,
        layers: &[StoredLinear<'_>],
        act: Act,
        mlp: &spec::FeedForward,
        of: MlpOf,
    ) -> Result<Option<Projection>> {
        let (alone, rounds) = (of == MlpOf::Layer, !act.is_quantized());
        // Products that leave the type of x round weights to it, of many rows.
        let exact = rounds && self.activations != Float::F16;
        let layers = match layers {
            [gate, up] if mlp.is_gated() => [gate, up],
            [up] if !mlp.is_gated() => return self.activated_alone(up, act, mlp, exact || !alone),
            _ => return Ok(None),
        };
        let [Some(gate), Some(up)] = layers.map(codes) else { return Ok(None) };
        let shape = [gate.n() + up.n(), gate.k()];
        let format = Format { weight: gate.format(), act };
        let alike = gate.continues(up) && gate.n() == up.n() && gate.n().is_multiple_of(EIGHT);
        let in_order = gate.group_index().is_none();
        let caps = self.cuda.gpu().caps();
        if !alike || !in_order || Grouped::supports(&caps, format, self.activations, shape).is_err() {
            return Ok(None);
        }
        if alone && (exact || makes_floats(&caps, format, self.activations, shape)) {
            return Ok(None);
        }
        let function = function_of(mlp.activation, true, mlp.clamp);
        let Some(mut packed) = taken(self.packer.pack_gated([gate, up], act, function))? else { return Ok(None) };
        if alone && rounds && !packed.allow_rounded_weights(self.cuda.gpu(), self.packer.stream())? {
            return Ok(None);
        }
        let linear = Linear::of_packed(self.cuda, packed);
        let [of_gate, of_up] = layers.map(|layer| &layer.bias);
        let linear = match (of_gate, of_up) {
            (None, None) => linear,
            (of_gate, of_up) => {
                let zeros = vec![0.0; gate.n()];
                let [gates, ups] = [of_gate, of_up].map(|bias| bias.as_ref().unwrap_or(&zeros).chunks_exact(EIGHT));
                linear.with_bias(gates.zip(ups).flat_map(|(gate, up)| [gate, up].concat()).collect())?
            }
        };
        let projection = Projection::activated(linear, self.activations, !alone);
        self.kernels.want(self.cuda, &projection, self.activations);
        Ok(Some(projection))
    }

    fn agree(&self, all: &[FeedForward<OnCuda>]) -> Result<bool> {
        let of = |mlp: &FeedForward<OnCuda>| mlp.up.single().map(|(w, _)| (w.gate(), w.format(), w.shape()));
        let down = |mlp: &FeedForward<OnCuda>| mlp.down.single().map(|(w, _)| (w.layout(), w.format(), w.in_order()));
        let is_gated = |mlp: &FeedForward<OnCuda>| of(mlp).is_some_and(|(gate, ..)| gate.is_some());
        let Some(first) = all.iter().find(|mlp| is_gated(mlp)) else { return Ok(true) };
        let alike = all.iter().all(|mlp| of(mlp) == of(first) && down(mlp) == down(first));
        Ok(alike && experts::layer(self.cuda, all, 1, self.activations)?.is_some())
    }

    fn random(&mut self, floats: &RandomFloats, bias: Option<Vec<f32>>) -> Result<Projection> {
        let linear = Linear::of_dense(self.cuda, self.draw(floats)?);
        Ok(Projection::of(vec![match bias {
            Some(bias) => linear.with_bias(bias)?,
            None => linear,
        }]))
    }

    fn vector(&mut self, values: Vec<f32>) -> Result<Buffer<f32>> {
        let mut buffer = self.cuda.gpu().context().allocate(values.len())?;
        self.cuda.stream().upload(&values, buffer.view_mut())?;
        Ok(buffer)
    }

    fn rope(&mut self, rope: &RopeSpec, _: usize) -> Result<Rope<nn::Rope>> {
        if rope.factor != 1.0 {
            let expected = "a factor of 1 where a part of each head rotates, on a GPU";
            return Err(Error::invalid("rotary positions", expected, rope.factor.to_string()));
        }
        Rope::new(rope, |frequencies| nn::Rope::new(self.cuda.gpu(), self.cuda.stream(), frequencies))
    }

    fn vocabulary(
        &mut self,
        embedding: Embedding<'_>,
        tokens: Range<usize>,
        spec: &Spec,
        head: Option<Projection>,
        act: Act,
    ) -> Result<Vocabulary> {
        let shape = [tokens.len(), spec.hidden];
        let embedding = match embedding {
            Embedding::Stored(rows) => Rows::Floats(Dense::of(self.packer.floats(&[rows.as_floats()])?, shape)?),
            Embedding::Codes(codes) => {
                // Rows of scales on two levels are not read where products of quantised activations have them.
                let multiplies = head.is_none() && codes.format().channel_scale.is_none();
                let packed = self.packer.pack(&[&codes], if multiplies { act } else { Act::A16 }, self.activations)?;
                Rows::of_packed(Linear::of_packed(self.cuda, packed))
            }
            Embedding::Random(floats) => Rows::Floats(self.draw(&floats)?),
        };
        let scale = spec.embedding_scale.unwrap_or(1.0);
        let vocabulary = Vocabulary { embedding, first: tokens.start, scale, head, logit_cap: spec.logit_cap };
        vocabulary.product().into_iter().for_each(|head| self.kernels.want(self.cuda, head, self.activations));
        Ok(vocabulary)
    }

    /// Each by a lane, several at a time.
    fn layers<T: Send>(
        &mut self,
        loader: &mut Loader<'_>,
        count: usize,
        load: impl Fn(&mut Self, &mut Loader<'_>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let (cuda, activations, lanes, kernels) = (self.cuda, self.activations, self.lanes, self.kernels);
        let lane = |i: usize| Self::lane(cuda, activations, lanes, kernels, &lanes.streams[i]);
        loader.in_lanes(lanes.count(), count, lane, load)
    }
}
