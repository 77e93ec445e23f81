//! GPT-NeoX (Pythia): LayerNorms, attention and a plain MLP side by side, positions in a part of each head, and q, k and v of each head
//! side by side in one layer.
//!
//! *Source:* Black et al., "GPT-NeoX-20B: An Open-Source Autoregressive Language Model", 2022; tensor names as in Hugging Face
//! transformers.

use super::rope::Says;
use super::sizes::{Defaults, Sizes, linear};
use super::spec::{
    AttentionSpec, FeedForward, LayerSpec, MlpKind, MlpSpec, NormKind, NormSpec, Positions, Qkv, QkvOrder, Residual,
    Spec,
};
use super::{Architecture, rope};
use crate::config::Fields;
use crate::error::Result;
use halfbyte::kernel::Activation;

pub(super) const ARCHITECTURE: Architecture =
    Architecture { architecture: "GPTNeoXForCausalLM", model_type: "gpt_neox", spec };

const DEFAULTS: Defaults = Defaults { eps: ("layer_norm_eps", 1e-5), ..Defaults::LLAMA };

fn spec(fields: &Fields<'_>) -> Result<Spec> {
    let sizes = Sizes::read(fields, &DEFAULTS)?;
    let Sizes { vocab, hidden, inner, heads, eps, .. } = sizes;
    let activation = match fields.string("hidden_act")?.unwrap_or("gelu") {
        "gelu" => Activation::Gelu,
        "gelu_new" | "gelu_fast" | "gelu_pytorch_tanh" => Activation::GeluTanh,
        other => return Err(fields.refuse("hidden_act", "\"gelu\" or \"gelu_new\"", format!("\"{other}\""))),
    };
    let on = |field: &str| if fields.get(field).is_some() { fields.flag(field) } else { Ok(true) };
    let residual = if on("use_parallel_residual")? { Residual::Parallel } else { Residual::Sequential };
    let bias = on("attention_bias")?;
    let says = Says { theta: Some("rotary_emb_base"), part: Some(("rotary_pct", 0.25)), ..Says::default() };
    let rotary = rope::read_as(fields, heads.head_size, &DEFAULTS, &says)?;
    let norm = |name: String| NormSpec { name, kind: NormKind::Layer, eps, offset: 0.0 };
    let layer = |i: usize| {
        let at = |module: &str| format!("gpt_neox.layers.{i}.{module}");
        LayerSpec {
            attention: AttentionSpec {
                norm: norm(at("input_layernorm")),
                qkv: Qkv::Fused(linear(at("attention.query_key_value"), [heads.row(), hidden], bias), QkvOrder::Groups),
                head_norms: None,
                positions: Positions::Rope(rotary.rope.clone()),
                window: None,
                scale: (heads.head_size as f32).sqrt().recip() * rotary.scores,
                cap: None,
                sinks: None,
                output: linear(at("attention.dense"), [hidden, sizes.queries()], bias),
                post_norm: None,
            },
            mlp: MlpSpec {
                norm: Some(norm(at("post_attention_layernorm"))),
                kind: MlpKind::Dense(FeedForward {
                    up: vec![linear(at("mlp.dense_h_to_4h"), [inner, hidden], true)],
                    down: linear(at("mlp.dense_4h_to_h"), [hidden, inner], true),
                    activation,
                    clamp: None,
                }),
                post_norm: None,
            },
            residual,
        }
    };
    Ok(Spec {
        vocab,
        hidden,
        heads,
        max_context: sizes.max_context,
        embedding: "gpt_neox.embed_in".to_owned(),
        embedding_scale: None,
        embedding_norm: None,
        layers: (0..sizes.layers).map(layer).collect(),
        norm: norm("gpt_neox.final_layer_norm".to_owned()),
        head: (!fields.flag("tie_word_embeddings")?).then(|| "embed_out".to_owned()),
        logit_cap: None,
    })
}
