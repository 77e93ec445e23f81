//! Llama: grouped-query attention with rotary positions, a gated SiLU MLP, RMS norms before each.
//!
//! *Source:* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; tensor names and the order
//! of q, k, v as in Hugging Face transformers.

use super::rope::Rotary;
use super::sizes::{Defaults, Sizes, check_activation, linear};
use super::spec::{
    AttentionSpec, FeedForward, LayerSpec, MlpKind, MlpSpec, NormKind, NormSpec, Positions, Qkv, Residual, Spec,
};
use super::{Architecture, rope};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Activation;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "LlamaForCausalLM", model_type: "llama", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let (attention, mlp) = (fields.flag("attention_bias")?, fields.flag("mlp_bias")?);
    recipe(fields, 2048, Biases { qkv: attention, output: attention, mlp })
}

const DEFAULTS: Defaults = Defaults { max_context: 2048, eps: 1e-6, inner: None };

/// Which linear layers have biases.
pub(super) struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// The recipe that Llama's descendants share; `max_context` is what an absent `max_position_embeddings` means.
pub(super) fn recipe(fields: &Fields<'_>, max_context: usize, biases: Biases) -> Result<Spec> {
    check_activation(fields, &["silu", "swish"])?;
    let rotary = rope::read(fields, head_size(fields)?)?;
    gated(fields, max_context, biases, (Activation::Silu, rotary))
}

/// Elements of a head.
pub(super) fn head_size(fields: &Fields<'_>) -> Result<usize> {
    Ok(Sizes::read(fields, DEFAULTS)?.heads.head_size)
}

/// The same with another function at the gate, and rotary positions that were read.
pub(super) fn gated(
    fields: &Fields<'_>,
    max_context: usize,
    biases: Biases,
    (activation, Rotary { rope, scores }): (Activation, Rotary),
) -> Result<Spec> {
    let sizes = Sizes::read(fields, Defaults { max_context, ..DEFAULTS })?;
    let Sizes { vocab, hidden, inner, heads, eps, .. } = sizes;
    let norm = |name: String| NormSpec { name, kind: NormKind::Rms, eps, offset: 0.0 };
    let layer = |i: usize| {
        let at = |module: &str| format!("model.layers.{i}.{module}");
        LayerSpec {
            attention: AttentionSpec {
                norm: norm(at("input_layernorm")),
                qkv: Qkv::Split(Box::new([
                    linear(at("self_attn.q_proj"), [sizes.queries(), hidden], biases.qkv),
                    linear(at("self_attn.k_proj"), [sizes.keys(), hidden], biases.qkv),
                    linear(at("self_attn.v_proj"), [sizes.keys(), hidden], biases.qkv),
                ])),
                head_norms: None,
                positions: Positions::Rope(rope.clone()),
                window: None,
                scale: (heads.head_size as f32).sqrt().recip() * scores,
                cap: None,
                sinks: None,
                output: linear(at("self_attn.o_proj"), [hidden, sizes.queries()], biases.output),
                post_norm: None,
            },
            mlp: MlpSpec {
                norm: Some(norm(at("post_attention_layernorm"))),
                kind: MlpKind::Dense(FeedForward {
                    up: ["mlp.gate_proj", "mlp.up_proj"].map(|up| linear(at(up), [inner, hidden], biases.mlp)).into(),
                    down: linear(at("mlp.down_proj"), [hidden, inner], biases.mlp),
                    activation,
                    clamp: None,
                }),
                post_norm: None,
            },
            residual: Residual::Sequential,
        }
    };
    Ok(Spec {
        vocab,
        hidden,
        heads,
        max_context: sizes.max_context,
        embedding: "model.embed_tokens".to_owned(),
        embedding_scale: None,
        embedding_norm: None,
        layers: (0..sizes.layers).map(layer).collect(),
        norm: norm("model.norm".to_owned()),
        head: (!fields.flag("tie_word_embeddings")?).then(|| "lm_head".to_owned()),
        logit_cap: None,
    })
}
