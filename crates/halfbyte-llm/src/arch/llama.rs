//! Llama: grouped-query attention with rotary positions, a gated SiLU MLP, RMS norms before each.
//!
//! *Source:* Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", 2023; tensor names and the order
//! of q, k, v as in Hugging Face transformers.

use super::sizes::{Sizes, linear};
use super::spec::{
    AttentionSpec, FeedForward, LayerSpec, MlpKind, MlpSpec, NormKind, NormSpec, Positions, Qkv, Residual, Spec,
};
use super::{Architecture, rope};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Activation;
use std::sync::Arc;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "LlamaForCausalLM", model_type: "llama", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let (attention, mlp) = (fields.flag("attention_bias")?, fields.flag("mlp_bias")?);
    recipe(fields, 2048, Biases { qkv: attention, output: attention, mlp })
}

/// Which linear layers have biases.
pub(super) struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

/// The recipe that Llama's descendants share; `max_context` is what an absent `max_position_embeddings` means.
pub(super) fn recipe(fields: &Fields<'_>, max_context: usize, biases: Biases) -> Result<Spec> {
    let sizes = Sizes::read(fields, max_context)?;
    let Sizes { vocab, hidden, inner, heads, eps, .. } = sizes;
    match fields.string("hidden_act")?.unwrap_or("silu") {
        "silu" | "swish" => {}
        other => return Err(fields.refuse("hidden_act", "\"silu\"", format!("\"{other}\""))),
    }
    let rope = Arc::new(rope::read(fields, heads.head_size)?);
    let norm = |name: String| NormSpec { name, kind: NormKind::Rms, eps };
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
                scale: (heads.head_size as f32).sqrt().recip(),
                output: linear(at("self_attn.o_proj"), [hidden, sizes.queries()], biases.output),
            },
            mlp: MlpSpec {
                norm: Some(norm(at("post_attention_layernorm"))),
                kind: MlpKind::Dense(FeedForward {
                    up: ["mlp.gate_proj", "mlp.up_proj"].map(|up| linear(at(up), [inner, hidden], biases.mlp)).into(),
                    down: linear(at("mlp.down_proj"), [hidden, inner], biases.mlp),
                    activation: Activation::Silu,
                }),
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
        layers: (0..sizes.layers).map(layer).collect(),
        norm: norm("model.norm".to_owned()),
        head: (!fields.flag("tie_word_embeddings")?).then(|| "lm_head".to_owned()),
    })
}
