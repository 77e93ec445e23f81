//! Mixtures of experts, as the architectures that have them name and count them.

use super::sizes::linear;
use super::spec::{ExpertsSpec, FeedForward, GateClamp, MlpKind, Routing, Spec};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Activation;

/// Experts of all layers come nowhere near this; each takes half a kilobyte of names.
const MOST_EXPERTS: usize = 1 << 16;

/// No dimension of a matrix comes near this many elements.
const LARGEST_MATRIX: usize = 1 << 40;

/// What the experts of a layer are.
pub(super) struct Of<'a> {
    /// Field of the length of the vector inside an expert.
    pub inner: &'a str,
    /// Module of the router in a layer.
    pub router: &'a str,
    /// Module of the experts in a layer; a number follows it.
    pub experts: &'a str,
    /// Modules of gate, up and down in an expert.
    pub layers: [&'a str; 3],
    /// Whether router and experts have biases.
    pub bias: bool,
    pub routing: Routing,
    pub clamp: Option<GateClamp>,
}

/// Puts experts, gated by SiLU, into the place of the MLP of those layers that `has` them.
pub(super) fn set(fields: &Fields<'_>, spec: &mut Spec, of: &Of<'_>, has: impl Fn(usize) -> bool) -> Result<()> {
    let of_count = fields.spelling(&["num_local_experts", "num_experts"]);
    let (count, top_k) = (fields.size(of_count)?, fields.size("num_experts_per_tok")?);
    let (inner, hidden, layers) = (fields.size(of.inner)?, spec.hidden, spec.layers.len());
    if count.saturating_mul(layers) > MOST_EXPERTS {
        return Err(fields.refuse(of_count, format!("at most {MOST_EXPERTS} experts in {layers} layers"), count));
    }
    if top_k > count {
        return Err(fields.refuse("num_experts_per_tok", format!("at most {of_count}, {count}"), top_k));
    }
    if (2 * inner).saturating_mul(hidden) > LARGEST_MATRIX {
        return Err(fields.refuse(of.inner, "a matrix of at most 2^40 elements", format!("{} × {hidden}", 2 * inner)));
    }
    for (i, layer) in spec.layers.iter_mut().enumerate().filter(|(i, _)| has(*i)) {
        let expert = |e: usize| {
            let at = |module: &str| format!("model.layers.{i}.{}.{e}.{module}", of.experts);
            let [gate, up, down] = of.layers;
            FeedForward {
                up: [gate, up].map(|up| linear(at(up), [inner, hidden], of.bias)).into(),
                down: linear(at(down), [hidden, inner], of.bias),
                activation: Activation::Silu,
                clamp: of.clamp,
            }
        };
        layer.mlp.kind = MlpKind::Experts(ExpertsSpec {
            router: linear(format!("model.layers.{i}.{}", of.router), [count, hidden], of.bias),
            top_k,
            routing: of.routing,
            experts: (0..count).map(expert).collect(),
        });
    }
    Ok(())
}
