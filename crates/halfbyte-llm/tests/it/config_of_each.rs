//! Configurations of the architectures beyond Llama: both spellings, what absent fields mean, and every way to be wrong.

use halfbyte_llm::arch::spec::{MlpKind, NormKind, Positions, Qkv, QkvOrder, Residual, Routing, Spec};
use halfbyte_llm::{Config, Error};
use serde_json::{Value, json};
use std::path::Path;

fn golden(name: &str) -> Value {
    let path = crate::architecture(name).join("config.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Fields set, or with null removed.
fn with(mut config: Value, changes: Value) -> Value {
    let fields = config.as_object_mut().unwrap();
    for (field, value) in changes.as_object().unwrap() {
        match value {
            Value::Null => drop(fields.remove(field)),
            value => drop(fields.insert(field.clone(), value.clone())),
        }
    }
    config
}

fn parse(config: &Value) -> Result<Spec, Error> {
    Config::parse(&config.to_string(), Path::new("config.json")).map(|config| config.spec)
}

#[test]
fn spellings_of_published_models_mean_the_same() {
    let same = |name: &str, changes: Value| {
        let config = golden(name);
        assert_eq!(parse(&with(config.clone(), changes)).unwrap(), parse(&config).unwrap(), "{name}");
    };
    same("gemma2", json!({"tie_word_embeddings": null, "layer_types": null, "hidden_act": "gelu_pytorch_tanh"}));
    same(
        "gemma3",
        json!({
            "rope_parameters": null, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "layer_types": null,
            "_sliding_window_pattern": null, "sliding_window_pattern": 2, "tie_word_embeddings": null
        }),
    );
    same("bloom", json!({"n_embed": 128, "hidden_size": null, "num_attention_heads": 4, "n_head": null}));
    same("bloom", json!({"tie_word_embeddings": null, "seq_length": 2048, "num_hidden_layers": 2, "n_layer": null}));
    same("qwen3-moe", json!({"num_experts": 8, "num_local_experts": null, "decoder_sparse_step": null}));
    let yarn = json!({
        "rope_parameters": null, "rope_theta": 150000.0, "layer_types": null, "swiglu_alpha": null, "swiglu_limit": null,
        "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": false
        }
    });
    same("gpt-oss", yarn);
    let types = json!({"full_attention": null});
    same("gemma3", json!({"rope_parameters": types, "rope_theta": 1e6, "rope_local_base_freq": 1e4}));
    same("phi3", json!({"rope_parameters": null, "rope_theta": 10000.0, "rope_scaling": null}));
    // Fields of other architectures, which transformers does not know in this one.
    same("gemma2", json!({"hidden_act": "silu"}));
    same("gpt-neox", json!({"rms_norm_eps": 0.3, "layer_norm_epsilon": 0.3}));
    same("bloom", json!({"rms_norm_eps": 0.3}));
    let rope = json!({"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.25});
    same("gpt-neox", json!({"rotary_pct": null, "rotary_emb_base": null, "rope_parameters": rope}));
    same("gpt-neox", json!({"rotary_pct": null, "use_parallel_residual": null, "attention_bias": null}));
}

#[test]
fn what_configurations_say_is_in_the_specs() {
    let spec = parse(&golden("gemma3")).unwrap();
    let ropes: Vec<_> = spec.layers.iter().map(|layer| (&layer.attention.positions, layer.attention.window)).collect();
    assert!(ropes[0] == ropes[2] && ropes[1] == ropes[3] && ropes[0].0 != ropes[1].0);
    assert_eq!((ropes[0].1, ropes[1].1), (Some(16), None));
    assert_eq!((spec.norm.offset, spec.embedding_scale, spec.logit_cap), (1.0, Some(128f32.sqrt()), None));

    let every_third = with(golden("gemma3"), json!({"layer_types": null, "sliding_window_pattern": 3}));
    let windows: Vec<_> =
        parse(&every_third).unwrap().layers.iter().map(|layer| layer.attention.window.is_some()).collect();
    assert_eq!(windows, [true, true, false, true]);

    // YaRN's factor of cosines, squared: 0.1 · ln 4 + 1.
    let spec = parse(&golden("llama-yarn")).unwrap();
    let factor = (0.1 * 4f64.ln() + 1.0).powi(2);
    assert!((f64::from(spec.layers[0].attention.scale) * 32f64.sqrt() - factor).abs() < 1e-6);
    let Positions::Rope(rope) = &spec.layers[0].attention.positions else { panic!("no rope") };
    // The first pair turns often enough in 64 tokens to be kept, the last is divided by 4.
    assert_eq!(rope.frequencies[0], 1.0);
    assert!((rope.frequencies[15] * 4.0 - 1e4f64.powf(-15.0 / 16.0)).abs() < 1e-12);
    let own = json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5, "rope_theta": 1e4});
    let spec = parse(&with(golden("llama-yarn"), json!({"rope_parameters": own}))).unwrap();
    assert!((f64::from(spec.layers[0].attention.scale) * 32f64.sqrt() - 0.25).abs() < 1e-7);

    let spec = parse(&golden("bloom")).unwrap();
    assert!(matches!(&spec.layers[0].attention.qkv, Qkv::Fused(_, QkvOrder::Groups)));
    assert_eq!(spec.embedding_norm.as_ref().map(|norm| norm.kind), Some(NormKind::Layer));
    assert_eq!((spec.head, spec.max_context), (None, 2048));

    let some = json!({"mlp_only_layers": [1], "norm_topk_prob": true});
    let spec = parse(&with(golden("qwen3-moe"), some)).unwrap();
    let MlpKind::Experts(experts) = &spec.layers[0].mlp.kind else { panic!("no experts") };
    assert_eq!((experts.experts.len(), experts.top_k, experts.routing), (8, 2, Routing::SoftmaxOfChosen));
    assert!(matches!(&spec.layers[1].mlp.kind, MlpKind::Dense(mlp) if mlp.inner() == 256));
    let every_second = parse(&with(golden("qwen3-moe"), json!({"decoder_sparse_step": 2}))).unwrap();
    let is_dense = |layer: usize| matches!(every_second.layers[layer].mlp.kind, MlpKind::Dense(_));
    assert!(is_dense(0) && !is_dense(1));

    let spec = parse(&with(golden("gpt-neox"), json!({"use_parallel_residual": false}))).unwrap();
    assert_eq!(spec.layers[0].residual, Residual::Sequential);
}

#[test]
fn every_refusal_names_the_field() {
    for (name, field, changes) in [
        (
            "bloom",
            "apply_residual_connection_post_layernorm",
            json!({"apply_residual_connection_post_layernorm": true}),
        ),
        ("bloom", "n_layer", json!({"n_layer": 0})),
        ("bloom", "n_layer", json!({"n_layer": 1 << 20})),
        ("bloom", "layer_norm_epsilon", json!({"layer_norm_epsilon": 2.0})),
        ("bloom", "hidden_size", json!({"hidden_size": null})),
        ("gemma2", "hidden_activation", json!({"hidden_activation": "silu"})),
        ("gemma2", "attn_logit_softcapping", json!({"attn_logit_softcapping": 0.0})),
        ("gemma2", "attn_logit_softcapping", json!({"attn_logit_softcapping": 3e38})),
        ("gemma2", "final_logit_softcapping", json!({"final_logit_softcapping": -1})),
        ("gemma2", "final_logit_softcapping", json!({"final_logit_softcapping": 1e-39})),
        ("gemma2", "query_pre_attn_scalar", json!({"query_pre_attn_scalar": 0})),
        ("gemma2", "layer_types", json!({"layer_types": ["full_attention"]})),
        ("gemma2", "layer_types", json!({"layer_types": ["a", "b", "c", "d"]})),
        ("gemma3", "use_bidirectional_attention", json!({"use_bidirectional_attention": true})),
        ("gemma3", "rope_parameters", json!({"rope_parameters": {"rope_type": "linear", "factor": 8.0}})),
        ("gemma3", "rope_scaling.type", json!({"rope_scaling": {"type": "linear", "factor": 8.0}})),
        ("gemma3", "full_attention.truncate", json!({"rope_parameters": {"full_attention": {"truncate": false}}})),
        ("gemma3", "partial_rotary_factor", json!({"partial_rotary_factor": 0.5})),
        ("gemma3", "attn_logit_softcapping", json!({"attn_logit_softcapping": 1.5})),
        (
            "gemma3",
            "_sliding_window_pattern",
            json!({"layer_types": null, "sliding_window_pattern": null, "_sliding_window_pattern": 3}),
        ),
        ("gemma3", "rope_parameters.full_attention", json!({"rope_parameters": {"full_attention": 1}})),
        ("gemma3", "sliding_window_pattern", json!({"sliding_window_pattern": 0})),
        ("gpt-neox", "hidden_act", json!({"hidden_act": "relu"})),
        ("gpt-neox", "rotary_pct", json!({"rope_parameters": null, "rotary_pct": 0.0})),
        ("gpt-neox", "rotary_pct", json!({"rope_parameters": null, "rotary_pct": 0.2})),
        ("gpt-neox", "rope_theta", json!({"rope_parameters": null, "rope_theta": 500.0})),
        ("gpt-neox", "partial_rotary_factor", json!({"rope_parameters": null, "partial_rotary_factor": 0.5})),
        ("gpt-oss", "swiglu_limit", json!({"swiglu_limit": -7})),
        ("gpt-oss", "num_local_experts", json!({"num_local_experts": null})),
        ("mixtral", "num_experts_per_tok", json!({"num_experts_per_tok": 5})),
        ("mixtral", "num_experts_per_tok", json!({"num_experts_per_tok": null})),
        ("mixtral", "num_local_experts", json!({"num_local_experts": 1 << 20})),
        ("phi3", "rope_scaling.type", json!({"rope_parameters": null, "rope_scaling": {"type": "dynamic"}})),
        (
            "phi3",
            "rope_scaling.type",
            json!({"rope_parameters": null, "rope_scaling": {"type": "linear", "factor": 2}}),
        ),
        ("phi3", "rope_scaling.long_factor", json!({"rope_parameters": null, "rope_scaling": {"type": "yarn"}})),
        (
            "phi3",
            "rope_scaling.original_max_position_embeddings",
            json!({
                "original_max_position_embeddings": null, "rope_parameters": null,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64}
            }),
        ),
        ("phi3", "rope_scaling.long_factor", json!({"rope_parameters": null, "rope_scaling": {"type": "longrope"}})),
        ("qwen3-moe", "moe_intermediate_size", json!({"moe_intermediate_size": 0})),
        ("qwen3-moe", "moe_intermediate_size", json!({"moe_intermediate_size": 1 << 28, "hidden_size": 1 << 14})),
        ("qwen3-moe", "mlp_only_layers", json!({"mlp_only_layers": ["1"]})),
        ("qwen3-moe", "mlp_only_layers", json!({"mlp_only_layers": 1})),
        (
            "qwen3-moe",
            "layer_types",
            json!({"use_sliding_window": true, "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}),
        ),
        ("qwen3-moe", "decoder_sparse_step", json!({"decoder_sparse_step": 0})),
    ] {
        match parse(&with(golden(name), changes.clone())) {
            Err(Error::Config { field: got, .. }) => assert_eq!(got, field, "{name} {changes}"),
            other => panic!("{name} {changes}: {other:?}"),
        }
    }
}
