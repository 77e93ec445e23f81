//! The one loop over layers: it runs a [`Spec`](crate::arch::Spec) on every device.
//!
//! ```text
//! stream = embedding of the tokens (normed)
//! for each layer:   attention: norm ─ q, k, v ─ (norms of heads, positions) append ─ attend ─ output (normed)
//!                   MLP:       norm ─ up (gate) ─ activation ─ down (normed)          or experts
//! norm
//! ```
//!
//! What a layer adds to the stream lies in [`Slot::Update`] until the next norm takes it, so that a device adds and norms in
//! one kernel; where ranks share a model, the sum over ranks belongs to that step. A device is a [`ModelDevice`], and what runs
//! there is its [`Steps`]; calibration sees the inputs of layers by [`Steps::reads`], and [`Profiled`] times each step.

mod load;
mod profile;
#[cfg(test)]
mod tests;

use crate::arch::spec::{GateClamp, NormKind, Residual, Routing};
use crate::error::Result;
use halfbyte::kernel::{Activation, Heads};
use std::fmt::Debug;
use std::ops::ControlFlow;
use std::sync::Arc;

pub(crate) use load::{LoadDevice, MlpOf, layer, projection, vocabulary};
pub(crate) use profile::{Clock, Describe, Product, Profiled, Sizes, Step, What};

/// Where weights lie and are multiplied.
pub(crate) trait ModelDevice: Debug + Sized + Send + Sync + 'static {
    /// Linear layers that read the same vector; their outputs lie side by side.
    type Projection: Debug + Send + Sync;
    /// The weights of a norm.
    type Vector: Debug + Send + Sync;
    /// Rotary positions, made ready.
    type Rope: Debug + Send + Sync;
    /// Embedding and head.
    type Vocabulary: Debug + Send + Sync;
    /// Rows on their way through the layers.
    type Run<'m>: Steps<Self>;
}

/// What passes between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// The norm of the residual stream `[m, hidden]`.
    Normed,
    /// Queries, keys and values `[m, (heads + 2 kv_heads) · head_size]`.
    Qkv,
    /// What attention gives `[m, heads · head_size]`.
    Attended,
    /// Gate and up `[m, 2 · inner]`, or up alone `[m, inner]`.
    Up,
    /// What the activation makes of them `[m, inner]`.
    Inner,
    /// What is added to the stream `[m, hidden]`.
    Update,
}

/// What is normed where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InPlace {
    /// The residual stream.
    Stream,
    /// What is added to it.
    Update,
}

/// What reads the stream next: a norm, and the one projection that reads that.
#[derive(Debug)]
pub(crate) struct Behind<'a, D: ModelDevice> {
    pub norm: &'a Norm<D>,
    pub reader: &'a D::Projection,
}

/// What a device does with the rows that go through the layers together.
pub(crate) trait Steps<D: ModelDevice> {
    /// The tokens' vectors become the stream.
    fn embed(&mut self, vocabulary: &D::Vocabulary) -> Result<()>;

    /// Adds the update of all ranks to the stream, if there is one, and norms the stream for a layer that reads it.
    fn norm(&mut self, add: bool, norm: &Norm<D>, reader: Option<&D::Projection>) -> Result<()>;

    /// Norms the stream, or the update of all ranks, where it lies.
    fn norm_in_place(&mut self, what: InPlace, norm: &Norm<D>) -> Result<()>;

    /// Adds the update of all ranks to the stream.
    fn add(&mut self) -> Result<()>;

    /// Multiplies.
    fn project(&mut self, by: &D::Projection, from: Slot, to: Slot) -> Result<()>;

    /// Multiplies to what is added to the stream. Where it is known what reads the stream next, a device may do that norm with it.
    fn update(&mut self, by: &D::Projection, from: Slot, behind: Option<Behind<'_, D>>) -> Result<()> {
        let _ = behind;
        self.project(by, from, Slot::Update)
    }

    /// Norms heads and brings positions in, as far as there are such, and appends keys and values to the cache.
    fn append(&mut self, layer: usize, attention: &Attention<D>) -> Result<()>;

    /// From here on only the last row of each text goes on.
    fn last_rows(&mut self) -> Result<()>;

    /// What the queries see.
    fn attend(&mut self, layer: usize, attention: &Attention<D>) -> Result<()>;

    /// The activation between the layers of an MLP, for the one that reads it.
    fn activate(&mut self, mlp: &FeedForward<D>) -> Result<()>;

    /// The experts of each row, from normed rows to the update. Breaks as [`Steps::reads`] does.
    fn experts(&mut self, experts: &Experts<D>) -> Result<ControlFlow<()>>;

    /// Called before a group of linear layers reads a slot; a break ends the step there.
    fn reads(&mut self, group: usize, slot: Slot, by: &D::Projection) -> Result<ControlFlow<()>> {
        let _ = (group, slot, by);
        Ok(ControlFlow::Continue(()))
    }
}

/// A model's weights on a device.
#[derive(Debug)]
pub(crate) struct Decoder<D: ModelDevice> {
    /// Length of the stream's vectors.
    pub hidden: usize,
    /// Tokens in all.
    pub vocab: usize,
    /// The heads of this rank.
    pub heads: Heads,
    pub embedding_norm: Option<Norm<D>>,
    pub layers: Vec<Layer<D>>,
    pub norm: Norm<D>,
    pub vocabulary: D::Vocabulary,
}

#[derive(Debug)]
pub(crate) struct Layer<D: ModelDevice> {
    pub attention: Attention<D>,
    /// None: the MLP reads what attention does.
    pub mlp_norm: Option<Norm<D>>,
    pub mlp: Mlp<D>,
    /// Over what the MLP adds.
    pub mlp_post_norm: Option<Norm<D>>,
    pub residual: Residual,
}

#[derive(Debug)]
pub(crate) struct Norm<D: ModelDevice> {
    pub kind: NormKind,
    pub eps: f32,
    /// As it multiplies, whatever the file lacks of it.
    pub weight: D::Vector,
    /// Of a LayerNorm.
    pub bias: Option<D::Vector>,
}

#[derive(Debug)]
pub(crate) struct Attention<D: ModelDevice> {
    pub norm: Norm<D>,
    pub qkv: D::Projection,
    pub heads: Heads,
    /// Over query heads, over key heads.
    pub head_norms: Option<[Norm<D>; 2]>,
    pub rope: Option<Arc<D::Rope>>,
    /// Slopes of this rank's query heads.
    pub alibi: Option<D::Vector>,
    pub window: Option<usize>,
    pub scale: f32,
    pub cap: Option<f32>,
    /// Of this rank's query heads.
    pub sinks: Option<D::Vector>,
    pub output: D::Projection,
    /// Over what it adds.
    pub post_norm: Option<Norm<D>>,
}

#[derive(Debug)]
pub(crate) enum Mlp<D: ModelDevice> {
    Dense(FeedForward<D>),
    Experts(Experts<D>),
}

#[derive(Debug)]
pub(crate) struct FeedForward<D: ModelDevice> {
    /// Gate, then up; or up alone.
    pub up: D::Projection,
    pub down: D::Projection,
    pub activation: Activation,
    pub clamp: Option<GateClamp>,
    pub gated: bool,
    /// Length of the vector inside, of this rank.
    pub inner: usize,
}

#[derive(Debug)]
pub(crate) struct Experts<D: ModelDevice> {
    pub router: D::Projection,
    pub top_k: usize,
    pub routing: Routing,
    pub experts: Vec<FeedForward<D>>,
}

impl<D: ModelDevice> Decoder<D> {
    /// From tokens to normed vectors, of all rows or of the last one of each text.
    pub fn forward(&self, run: &mut impl Steps<D>, all_rows: bool) -> Result<()> {
        run.embed(&self.vocabulary)?;
        if let Some(norm) = &self.embedding_norm {
            run.norm_in_place(InPlace::Stream, norm)?;
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let narrows = i + 1 == self.layers.len() && !all_rows;
            // Nothing breaks off here: only calibration does, layer by layer.
            let _ = layer.attention(run, i, i > 0, narrows)?;
            let _ = layer.mlp(run, self.layers.get(i + 1).and_then(Layer::first_reader))?;
        }
        run.norm(!self.layers.is_empty(), &self.norm, None)
    }

    /// Every projection whose product goes to the stream, with what reads the stream next where that is alone.
    pub fn updates(&self) -> impl Iterator<Item = (&D::Projection, Behind<'_, D>)> {
        self.layers.iter().enumerate().flat_map(|(i, layer)| {
            let of_attention = layer.behind_attention().map(|behind| (&layer.attention.output, behind));
            let down = if let Mlp::Dense(mlp) = &layer.mlp { Some(&mlp.down) } else { None };
            let down = down.filter(|_| layer.mlp_post_norm.is_none());
            of_attention.into_iter().chain(down.zip(self.layers.get(i + 1).and_then(Layer::first_reader)))
        })
    }

    /// Every projection, in order.
    pub fn projections(&self) -> impl Iterator<Item = &D::Projection> {
        self.layers.iter().flat_map(Layer::projections)
    }

    /// Bytes of the experts that compute none of so many rows, where each row chooses `top_k` of them by chance. `bytes` says what a
    /// projection takes.
    pub fn idle_bytes(&self, rows: usize, bytes: impl Fn(&D::Projection) -> usize) -> usize {
        let of_layer = |layer: &Layer<D>| match &layer.mlp {
            Mlp::Dense(_) => 0,
            Mlp::Experts(Experts { experts, top_k, .. }) => {
                let all: usize = experts.iter().map(|mlp| bytes(&mlp.up) + bytes(&mlp.down)).sum();
                let idle = 1.0 - (*top_k as f64 / experts.len().max(1) as f64).min(1.0);
                (all as f64 * idle.powf(rows as f64)).round() as usize
            }
        };
        self.layers.iter().map(of_layer).sum()
    }

    /// Every norm, in order.
    pub fn norms(&self) -> impl Iterator<Item = &Norm<D>> {
        self.embedding_norm.iter().chain(self.layers.iter().flat_map(Layer::norms)).chain([&self.norm])
    }
}

impl<D: ModelDevice> Layer<D> {
    /// Attention: reads the stream, to which the update is added first if there is one, and leaves another update.
    pub fn attention(
        &self,
        run: &mut impl Steps<D>,
        layer: usize,
        add: bool,
        narrows: bool,
    ) -> Result<ControlFlow<()>> {
        let attention = &self.attention;
        run.norm(add, &attention.norm, Some(&attention.qkv))?;
        if run.reads(0, Slot::Normed, &attention.qkv)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        run.project(&attention.qkv, Slot::Normed, Slot::Qkv)?;
        run.append(layer, attention)?;
        if narrows {
            run.last_rows()?;
        }
        run.attend(layer, attention)?;
        if run.reads(1, Slot::Attended, &attention.output)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        run.update(&attention.output, Slot::Attended, self.behind_attention())?;
        if let Some(norm) = &attention.post_norm {
            run.norm_in_place(InPlace::Update, norm)?;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// What reads the stream first; None where it is not alone, since the MLP beside attention reads the same.
    fn first_reader(&self) -> Option<Behind<'_, D>> {
        let alone = self.residual == Residual::Sequential || self.mlp_norm.is_some();
        alone.then_some(Behind { norm: &self.attention.norm, reader: &self.attention.qkv })
    }

    /// What reads the sum of the stream and of what attention adds.
    fn behind_attention(&self) -> Option<Behind<'_, D>> {
        let norm = self.norm_before_mlp().filter(|_| self.attention.post_norm.is_none())?;
        Some(Behind { norm, reader: self.mlp.reader()? })
    }

    /// The norm over that sum.
    fn norm_before_mlp(&self) -> Option<&Norm<D>> {
        match self.residual {
            Residual::Sequential => Some(self.mlp_norm.as_ref().unwrap_or(&self.attention.norm)),
            Residual::Parallel => None,
        }
    }

    /// The MLP after attention: adds attention's update and leaves its own, for what is behind the layer if that is known.
    pub fn mlp(&self, run: &mut impl Steps<D>, behind: Option<Behind<'_, D>>) -> Result<ControlFlow<()>> {
        match self.norm_before_mlp() {
            Some(norm) => run.norm(true, norm, self.mlp.reader())?,
            None => {
                if let Some(norm) = &self.mlp_norm {
                    run.norm(false, norm, self.mlp.reader())?;
                }
                run.add()?;
            }
        }
        self.normed_mlp(run, behind)
    }

    /// The MLP from normed rows to the update.
    pub fn normed_mlp(&self, run: &mut impl Steps<D>, behind: Option<Behind<'_, D>>) -> Result<ControlFlow<()>> {
        let flow = self.mlp.run(run, behind.filter(|_| self.mlp_post_norm.is_none()))?;
        if let Some(norm) = self.mlp_post_norm.as_ref().filter(|_| flow.is_continue()) {
            run.norm_in_place(InPlace::Update, norm)?;
        }
        Ok(flow)
    }

    fn projections(&self) -> Vec<&D::Projection> {
        let mut all = vec![&self.attention.qkv, &self.attention.output];
        match &self.mlp {
            Mlp::Dense(mlp) => all.extend([&mlp.up, &mlp.down]),
            Mlp::Experts(experts) => {
                all.push(&experts.router);
                all.extend(experts.experts.iter().flat_map(|mlp| [&mlp.up, &mlp.down]));
            }
        }
        all
    }

    fn norms(&self) -> Vec<&Norm<D>> {
        let over_heads = self.attention.head_norms.iter().flatten();
        let post = [&self.attention.post_norm, &self.mlp_norm, &self.mlp_post_norm].into_iter().flatten();
        [&self.attention.norm].into_iter().chain(over_heads).chain(post).collect()
    }
}

impl<D: ModelDevice> Mlp<D> {
    /// From normed rows to the update.
    fn run(&self, run: &mut impl Steps<D>, behind: Option<Behind<'_, D>>) -> Result<ControlFlow<()>> {
        match self {
            Mlp::Dense(mlp) => {
                if run.reads(2, Slot::Normed, &mlp.up)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                run.project(&mlp.up, Slot::Normed, Slot::Up)?;
                run.activate(mlp)?;
                if run.reads(3, Slot::Inner, &mlp.down)?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                run.update(&mlp.down, Slot::Inner, behind)?;
            }
            Mlp::Experts(experts) => return run.experts(experts),
        }
        Ok(ControlFlow::Continue(()))
    }

    /// The one projection that reads the normed rows; None: several do.
    fn reader(&self) -> Option<&D::Projection> {
        match self {
            Mlp::Dense(mlp) => Some(&mlp.up),
            Mlp::Experts(_) => None,
        }
    }
}
