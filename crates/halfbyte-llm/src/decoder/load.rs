//! From a [`Spec`] and a checkpoint to a [`Decoder`] on a device: this rank's part of every tensor, one at a time.

use super::{Attention, Decoder, Experts, FeedForward, Layer, Mlp, ModelDevice, Norm};
use crate::arch::spec::{self, LayerSpec, LinearSpec, MlpKind, NormSpec, Positions, Residual, RopeSpec, Spec};
use crate::error::{Error, Result};
use crate::load::{Embedding, Loader};
use crate::random::RandomFloats;
use crate::shard::{self, HeadsOf, Shard};
use halfbyte::Act;
use halfbyte_checkpoint::{Cut, StoredLinear};
use std::ops::Range;
use std::sync::Arc;

const OP: &str = "load a model";

/// Puts weights onto a device.
pub(crate) trait LoadDevice {
    /// The device.
    type Device: ModelDevice;

    /// Packs layers of the same k, as one product where they are stored alike. Errors name `prefix`.
    fn projection(&mut self, layers: &[StoredLinear<'_>], act: Act, prefix: &str) -> Result<Of<Self::Device>>;

    /// The first layers of an MLP as one product that leaves what the activation makes of them, `f(up)`, or `f(gate) · up` of gates and what
    /// they let through, of an MLP alone or for all experts of a layer together. None: there is no kernel for it, or a slower one, and they
    /// are packed as all others.
    fn activated(
        &mut self,
        layers: &[StoredLinear<'_>],
        act: Act,
        mlp: &spec::FeedForward,
        of: MlpOf,
    ) -> Result<Option<Of<Self::Device>>> {
        let _ = (layers, act, mlp, of);
        Ok(None)
    }

    /// Whether experts that were loaded can compute together, where products of some leave what is gated. Error: memory is short.
    fn agree(&self, experts: &[FeedForward<Self::Device>]) -> Result<bool> {
        let _ = experts;
        Ok(true)
    }

    /// A layer of random floats, with a bias `[n]`.
    fn random(&mut self, floats: &RandomFloats, bias: Option<Vec<f32>>) -> Result<Of<Self::Device>>;

    /// The weights of a norm.
    fn vector(&mut self, values: Vec<f32>) -> Result<<Self::Device as ModelDevice>::Vector>;

    /// Rotary positions up to `max_context`.
    fn rope(&mut self, rope: &RopeSpec, max_context: usize) -> Result<<Self::Device as ModelDevice>::Rope>;

    /// This rank's rows of the embedding, with a head of its own; without one the embedding multiplies activations as `act` says.
    fn vocabulary(
        &mut self,
        embedding: Embedding<'_>,
        tokens: Range<usize>,
        spec: &Spec,
        head: Option<Of<Self::Device>>,
        act: Act,
    ) -> Result<<Self::Device as ModelDevice>::Vocabulary>;

    /// Loads layers that do not depend on each other, in whatever order suits the device.
    fn layers<T: Send>(
        &mut self,
        loader: &mut Loader<'_>,
        count: usize,
        load: impl Fn(&mut Self, &mut Loader<'_>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>>;
}

type Of<D> = <D as ModelDevice>::Projection;

/// Rotary positions that layers share, by the first layer of each.
type Ropes<D> = Vec<(Arc<RopeSpec>, Arc<<D as ModelDevice>::Rope>)>;

impl<D: ModelDevice> Decoder<D> {
    /// Loads this rank's part of a model. Errors: missing or malformed tensors, other shapes than the spec's, weights that
    /// cannot be quantised, a recipe that has a part missing, more ranks than heads or groups.
    pub fn load<L: LoadDevice<Device = D>>(
        spec: &Spec,
        loader: &mut Loader<'_>,
        device: &mut L,
        shard: Shard,
    ) -> Result<Self> {
        let heads = shard.heads(spec.heads)?;
        let ropes = ropes(spec, device)?;
        let embedding_norm = optional_norm(&spec.embedding_norm, spec.hidden, loader, device)?;
        let layers = device.layers(loader, spec.layers.len(), |device, loader, i| {
            layer_of(spec, i, loader, device, (&heads, shard), &ropes)
        })?;
        let norm = norm(&spec.norm, spec.hidden, loader, device)?;
        let vocabulary = vocabulary(spec, loader, device, shard)?;
        let (hidden, vocab) = (spec.hidden, spec.vocab);
        Ok(Self { hidden, vocab, heads: heads.heads, embedding_norm, layers, norm, vocabulary })
    }
}

/// This rank's rows of embedding and head.
pub(crate) fn vocabulary<L: LoadDevice>(
    spec: &Spec,
    loader: &mut Loader<'_>,
    device: &mut L,
    shard: Shard,
) -> Result<<L::Device as ModelDevice>::Vocabulary> {
    let tokens = shard.part(spec.vocab);
    let embedding = loader.embedding(&spec.embedding, spec.vocab, spec.hidden, &tokens)?;
    let head = match loader.head(spec) {
        None => None,
        Some(name) => {
            let shape = spec::Shape { n: spec.vocab, k: spec.hidden, bias: false };
            let (head, cut) = (LinearSpec { name, shape }, shard::of_rows(vec![tokens.clone()], shape));
            Some(match loader.floats(&[(&head, cut.clone())], true) {
                Some((floats, bias)) => device.random(&floats, bias)?,
                None => {
                    let stored = loader.stored(&head.name, shape, &cut)?;
                    let packed = device.projection(&[stored], loader.act(), &head.name)?;
                    loader.release(&head.name);
                    packed
                }
            })
        }
    };
    let vocabulary = device.vocabulary(embedding, tokens, spec, head, loader.act())?;
    loader.release(&spec.embedding);
    Ok(vocabulary)
}

/// One whole layer.
pub(crate) fn layer<L: LoadDevice>(
    spec: &Spec,
    i: usize,
    loader: &mut Loader<'_>,
    device: &mut L,
) -> Result<Layer<L::Device>> {
    let ropes = ropes(spec, device)?;
    layer_of(spec, i, loader, device, (&Shard::WHOLE.heads(spec.heads)?, Shard::WHOLE), &ropes)
}

fn ropes<L: LoadDevice>(spec: &Spec, device: &mut L) -> Result<Ropes<L::Device>> {
    let mut ropes: Ropes<L::Device> = Vec::new();
    for layer in &spec.layers {
        if let Positions::Rope(rope) = &layer.attention.positions
            && !ropes.iter().any(|(known, _)| Arc::ptr_eq(known, rope))
        {
            ropes.push((rope.clone(), Arc::new(device.rope(rope, spec.max_context)?)));
        }
    }
    Ok(ropes)
}

fn norm<L: LoadDevice>(
    spec: &NormSpec,
    len: usize,
    loader: &mut Loader<'_>,
    device: &mut L,
) -> Result<Norm<L::Device>> {
    let mut vector = |part: &str, offset: f32| {
        let mut values = loader.vector(&format!("{}.{part}", spec.name), len)?;
        values.iter_mut().for_each(|value| *value += offset);
        device.vector(values)
    };
    let weight = vector("weight", spec.offset)?;
    let bias = match spec.kind {
        spec::NormKind::Rms => None,
        spec::NormKind::Layer => Some(vector("bias", 0.0)?),
    };
    Ok(Norm { kind: spec.kind, eps: spec.eps, weight, bias })
}

fn optional_norm<L: LoadDevice>(
    spec: &Option<NormSpec>,
    len: usize,
    loader: &mut Loader<'_>,
    device: &mut L,
) -> Result<Option<Norm<L::Device>>> {
    spec.as_ref().map(|spec| norm(spec, len, loader, device)).transpose()
}

/// Layers that read the same vector, as one projection. Errors name the first.
pub(crate) fn projection<L: LoadDevice>(
    layers: &[(&LinearSpec, Cut)],
    loader: &mut Loader<'_>,
    device: &mut L,
) -> Result<Of<L::Device>> {
    projection_of(layers, loader, device, None)
}

/// Whose MLP a product is of: a layer's, or an expert's, whose product is one of all experts of a layer together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MlpOf {
    Layer,
    Experts,
}

/// The same; of the first layers of an MLP as one product that activates what it leaves, if there is a kernel for it.
fn projection_of<L: LoadDevice>(
    layers: &[(&LinearSpec, Cut)],
    loader: &mut Loader<'_>,
    device: &mut L,
    of_mlp: Option<(&spec::FeedForward, MlpOf)>,
) -> Result<Of<L::Device>> {
    if let Some((floats, bias)) = loader.floats(layers, false) {
        return device.random(&floats, bias);
    }
    let loaded = layers.iter().map(|(layer, cut)| loader.layer(&layer.name, layer.shape, cut));
    let loaded = loaded.collect::<Result<Vec<_>>>()?;
    let (act, prefix) = (loader.act(), &layers[0].0.name);
    let together = match of_mlp {
        Some((mlp, of)) => device.activated(&loaded, act, mlp, of)?,
        None => None,
    };
    let packed = match together {
        Some(packed) => packed,
        None => device.projection(&loaded, act, prefix)?,
    };
    drop(loaded);
    layers.iter().for_each(|(layer, _)| loader.release(&layer.name));
    Ok(packed)
}

fn layer_of<L: LoadDevice>(
    spec: &Spec,
    i: usize,
    loader: &mut Loader<'_>,
    device: &mut L,
    (heads, shard): (&HeadsOf, Shard),
    ropes: &Ropes<L::Device>,
) -> Result<Layer<L::Device>> {
    let LayerSpec { attention, mlp, residual } = spec
        .layers
        .get(i)
        .ok_or_else(|| Error::invalid(OP, format!("a layer below {}", spec.layers.len()), i.to_string()))?;
    if mlp.norm.is_none() && *residual == Residual::Sequential {
        return Err(Error::invalid(OP, "a norm before an MLP that reads what attention adds", "none"));
    }
    if *residual == Residual::Parallel && (attention.post_norm.is_some() || mlp.post_norm.is_some()) {
        return Err(Error::invalid(OP, "no norm over what attention and an MLP beside it add", "one"));
    }
    let head_norms = match &attention.head_norms {
        None => None,
        Some([q, k]) => {
            let d = spec.heads.head_size;
            Some([norm(q, d, loader, device)?, norm(k, d, loader, device)?])
        }
    };
    let rope = match &attention.positions {
        Positions::Rope(rope) => ropes.iter().find(|(known, _)| Arc::ptr_eq(known, rope)).map(|(_, rope)| rope.clone()),
        Positions::Alibi | Positions::None => None,
    };
    let of_heads = |device: &mut L, all: Vec<f32>| device.vector(all[heads.queries.clone()].to_vec());
    let alibi = match attention.positions {
        Positions::Alibi => Some(of_heads(device, alibi_slopes(spec.heads.heads))?),
        Positions::Rope(_) | Positions::None => None,
    };
    let sinks = match &attention.sinks {
        Some(name) => Some(of_heads(device, loader.vector(name, spec.heads.heads)?)?),
        None => None,
    };
    let norm_before = norm(&attention.norm, spec.hidden, loader, device)?;
    let qkv = projection(&shard::qkv(attention, spec.heads, heads), loader, device)?;
    let output = [(&attention.output, shard::output(attention, heads, shard))];
    let output = projection(&output, loader, device)?;
    let [post_norm, mlp_norm, mlp_post_norm] =
        [&attention.post_norm, &mlp.norm, &mlp.post_norm].map(|norm| optional_norm(norm, spec.hidden, loader, device));
    let mlp = match &mlp.kind {
        MlpKind::Dense(mlp) => Mlp::Dense(feed_forward(mlp, loader, device, shard, Some(MlpOf::Layer))?),
        MlpKind::Experts(experts) => {
            let load = |loader: &mut Loader<'_>, device: &mut L, of_mlp| {
                let of = |mlp| feed_forward(mlp, loader, device, shard, of_mlp);
                experts.experts.iter().map(of).collect::<Result<Vec<_>>>()
            };
            let mut all = load(loader, device, Some(MlpOf::Experts))?;
            if !device.agree(&all)? {
                // They are stored in several forms.
                drop(all);
                all = load(loader, device, None)?;
            }
            let LinearSpec { name, shape } = &experts.router;
            let router = device.projection(&[loader.router(name, *shape)?], loader.act(), name)?;
            loader.release(name);
            Mlp::Experts(Experts { router, top_k: experts.top_k, routing: experts.routing, experts: all })
        }
    };
    Ok(Layer {
        attention: Attention {
            norm: norm_before,
            qkv,
            heads: heads.heads,
            head_norms,
            rope,
            alibi,
            window: attention.window,
            scale: attention.scale,
            cap: attention.cap,
            sinks,
            output,
            post_norm: post_norm?,
        },
        mlp_norm: mlp_norm?,
        mlp,
        mlp_post_norm: mlp_post_norm?,
        residual: *residual,
    })
}

fn feed_forward<L: LoadDevice>(
    mlp: &spec::FeedForward,
    loader: &mut Loader<'_>,
    device: &mut L,
    shard: Shard,
    of: Option<MlpOf>,
) -> Result<FeedForward<L::Device>> {
    let inner = loader.features(mlp, shard)?;
    let mut layers = shard::feed_forward(mlp, &inner, shard);
    let down = layers.split_off(mlp.up.len());
    Ok(FeedForward {
        up: projection_of(&layers, loader, device, of.map(|of| (mlp, of)))?,
        down: projection(&down, loader, device)?,
        activation: mlp.activation,
        clamp: mlp.clamp,
        gated: mlp.is_gated(),
        inner: inner.iter().map(Range::len).sum(),
    })
}

/// The slope of each head: powers of `2^(−8/n)` for the largest power of two n up to the number of heads, then, for the
/// others, every second one of twice as many.
///
/// *Source:* Press et al., "Train Short, Test Long", 2022, and its published code.
fn alibi_slopes(heads: usize) -> Vec<f32> {
    let powers = |n: usize| {
        let base = 2f64.powf(-8.0 / n as f64);
        (1..=n).map(move |i| base.powi(i as i32) as f32)
    };
    let whole = if heads.is_power_of_two() { heads } else { heads.next_power_of_two() / 2 };
    powers(whole).chain(powers(2 * whole).step_by(2)).take(heads).collect()
}
