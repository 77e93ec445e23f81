//! BLOOM: attention with linear biases (ALiBi), LayerNorms with biases, one of them over the embedding, a plain MLP with GELU, and q, k
//! and v of each head side by side in one layer.
//!
//! *Source:* Le Scao et al., "BLOOM: A 176B-Parameter Open-Access Multilingual Language Model", 2022; tensor names as in Hugging
//! Face transformers.

use super::Architecture;
use super::sizes::{Defaults, Sizes, linear};
use super::spec::{
    AttentionSpec, FeedForward, LayerSpec, MlpKind, MlpSpec, NormKind, NormSpec, Positions, Qkv, QkvOrder, Residual,
    Spec,
};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Activation;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "BloomForCausalLM", model_type: "bloom", spec };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    const POST_NORM: &str = "apply_residual_connection_post_layernorm";
    if fields.flag(POST_NORM)? {
        return Err(fields.refuse(POST_NORM, "false (the stream itself goes on)", "true"));
    }
    let defaults = Defaults { eps: ("layer_norm_epsilon", 1e-5), inner: Some(4), ..Defaults::LLAMA };
    let sizes = Sizes::read(fields, &defaults)?;
    let Sizes { vocab, hidden, inner, heads, eps, .. } = sizes;
    let norm = |name: String| NormSpec { name, kind: NormKind::Layer, eps, offset: 0.0 };
    let layer = |i: usize| {
        let at = |module: &str| format!("transformer.h.{i}.{module}");
        LayerSpec {
            attention: AttentionSpec {
                norm: norm(at("input_layernorm")),
                qkv: Qkv::Fused(
                    linear(at("self_attention.query_key_value"), [heads.row(), hidden], true),
                    QkvOrder::Groups,
                ),
                head_norms: None,
                positions: Positions::Alibi,
                window: None,
                scale: (heads.head_size as f32).sqrt().recip(),
                cap: None,
                sinks: None,
                output: linear(at("self_attention.dense"), [hidden, sizes.queries()], true),
                post_norm: None,
            },
            mlp: MlpSpec {
                norm: Some(norm(at("post_attention_layernorm"))),
                kind: MlpKind::Dense(FeedForward {
                    up: vec![linear(at("mlp.dense_h_to_4h"), [inner, hidden], true)],
                    down: linear(at("mlp.dense_4h_to_h"), [hidden, inner], true),
                    activation: Activation::GeluTanh,
                    clamp: None,
                }),
                post_norm: None,
            },
            residual: Residual::Sequential,
        }
    };
    let tied = fields.get("tie_word_embeddings").is_none() || fields.flag("tie_word_embeddings")?;
    Ok(Spec {
        vocab,
        hidden,
        heads,
        max_context: sizes.max_context,
        embedding: "transformer.word_embeddings".to_owned(),
        embedding_scale: None,
        embedding_norm: Some(norm("transformer.word_embeddings_layernorm".to_owned())),
        layers: (0..sizes.layers).map(layer).collect(),
        norm: norm("transformer.ln_f".to_owned()),
        head: (!tied).then(|| "lm_head".to_owned()),
        logit_cap: None,
    })
}
