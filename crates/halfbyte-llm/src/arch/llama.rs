//! Llama: grouped-query attention with rotary positions, a gated SiLU MLP, RMS norms before each.
//!
//! *Source:* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; tensor names and the order
//! of q, k, v as in Hugging Face transformers.

use super::rope::{Rotary, Says};
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
    recipe(fields, &Defaults::LLAMA, Biases { qkv: attention, output: attention, mlp })
}

/// Which linear layers have biases.
pub(super) struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// The recipe that Llama's descendants share, with what absent fields mean in each.
pub(super) fn recipe(fields: &Fields<'_>, defaults: &Defaults, biases: Biases) -> Result<Spec> {
    recipe_as(fields, defaults, &Says::default(), biases)
}

/// The same where configs say rotary positions in another way.
pub(super) fn recipe_as(fields: &Fields<'_>, defaults: &Defaults, says: &Says, biases: Biases) -> Result<Spec> {
    check_activation(fields, "hidden_act", &["silu", "swish"])?;
    let rotary = rope::read_as(fields, head_size(fields, defaults)?, defaults, says)?;
    gated(fields, defaults, biases, (Activation::Silu, rotary))
}

/// Elements of a head.
pub(super) fn head_size(fields: &Fields<'_>, defaults: &Defaults) -> Result<usize> {
    Ok(Sizes::read(fields, defaults)?.heads.head_size)
}

/// The same with another function at the gate, and rotary positions that were read.
pub(super) fn gated(
    fields: &Fields<'_>,
    defaults: &Defaults,
    biases: Biases,
    (activation, Rotary { rope, scores }): (Activation, Rotary),
) -> Result<Spec> {
    let sizes = Sizes::read(fields, defaults)?;
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
