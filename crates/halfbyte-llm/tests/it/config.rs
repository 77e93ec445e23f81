//! Configurations: both spellings, and every way to be wrong.

use halfbyte::Float;
use halfbyte::kernel::Heads;
use halfbyte_llm::arch::spec::Positions;
use halfbyte_llm::{Config, Error};
use serde_json::{Value, json};
use std::path::Path;

fn base() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 320, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        "bos_token_id": 0, "eos_token_id": 1
    })
}

fn with(changes: Value) -> Value {
    let mut config = base();
    for (field, value) in changes.as_object().unwrap() {
        config[field] = value.clone();
    }
    config
}

fn frequencies(config: &Config) -> Vec<f64> {
    match &config.spec.layers[0].attention.positions {
        Positions::Rope(rope) => rope.frequencies.clone(),
        other => panic!("{other:?}"),
    }
}

fn parse(config: &Value) -> Result<Config, Error> {
    Config::parse(&config.to_string(), Path::new("config.json"))
}

#[test]
fn old_and_new_spellings_mean_the_same() {
    let old = with(json!({
        "rope_theta": 500000.0, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "linear", "factor": 4.0}
    }));
    let new = with(json!({
        "dtype": "bfloat16", "rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 4.0}
    }));
    let (old, new) = (parse(&old).unwrap(), parse(&new).unwrap());
    assert_eq!(old, new);
    assert_eq!(old.dtype, Some(Float::BF16));
    let Heads { head_size, kv_heads, .. } = old.spec.heads;
    assert_eq!((head_size, kv_heads, old.bos, &old.eos), (32, 2, Some(0), &vec![1]));
    let frequencies = frequencies(&old);
    assert_eq!(frequencies.len(), 16);
    assert_eq!(frequencies[0], 0.25);
    assert!((frequencies[8] - 0.25 / 500_000f64.sqrt()).abs() < 1e-15);
}

#[test]
fn absent_fields_have_the_defaults_of_transformers() {
    let config = json!({
        "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 320, "eos_token_id": null
    });
    let config = parse(&config).unwrap();
    let spec = &config.spec;
    assert_eq!((config.architecture, spec.heads.kv_heads, spec.max_context), ("LlamaForCausalLM", 4, 2048));
    assert_eq!((spec.norm.eps, spec.head.as_deref()), (1e-6, Some("lm_head")));
    assert!(spec.linears().all(|layer| !layer.shape.bias));
    assert_eq!((config.bos, config.dtype), (None, None));
    assert!(config.eos.is_empty());
    assert!((frequencies(&config)[1] - 10_000f64.powf(-2.0 / 32.0)).abs() < 1e-15);
    assert_eq!(parse(&with(json!({"eos_token_id": [1, 5, 7]}))).unwrap().eos, [1, 5, 7]);
    assert_eq!(parse(&with(json!({"head_dim": 64}))).unwrap().spec.heads.head_size, 64);
}

/// As transformers states it: by wavelengths, in three cases.
#[test]
fn llama3_scaling_keeps_blends_and_divides() {
    let (factor, low, high, original, theta) = (8.0, 1.0, 4.0, 8192.0, 500_000f64);
    let config = parse(&with(json!({
        "head_dim": 128, "rope_theta": theta,
        "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                         "original_max_position_embeddings": 8192}
    })));
    let got = frequencies(&config.unwrap());
    let mut cases = [0; 3];
    for (i, got) in got.iter().enumerate() {
        let plain = 1.0 / theta.powf(2.0 * i as f64 / 128.0);
        let wavelength = 2.0 * std::f64::consts::PI / plain;
        let (case, want) = if wavelength > original / low {
            (0, plain / factor)
        } else if wavelength < original / high {
            (1, plain)
        } else {
            let smooth = (original / wavelength - low) / (high - low);
            (2, (1.0 - smooth) * plain / factor + smooth * plain)
        };
        cases[case] += 1;
        assert!((got / want - 1.0).abs() < 1e-12, "pair {i}: {got} for {want}");
    }
    assert!(cases.iter().all(|&n| n > 0), "{cases:?}");
}

#[test]
fn every_refusal_names_the_field() {
    let llama3 = |field: &str, value: Value| {
        let mut rope = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192});
        rope[field] = value;
        json!({"rope_parameters": rope})
    };
    let longrope = |long: Value, short: Value| {
        json!({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64,
                                "long_factor": long, "short_factor": short}})
    };
    for (field, changes) in [
        ("hidden_size", json!({"hidden_size": 0})),
        ("hidden_size", json!({"hidden_size": null})),
        ("hidden_size", json!({"hidden_size": "128"})),
        ("hidden_size", json!({"hidden_size": 128.5})),
        ("hidden_size", json!({"hidden_size": -128})),
        ("hidden_size", json!({"hidden_size": 1u64 << 40})),
        ("intermediate_size", json!({"intermediate_size": u64::MAX})),
        ("vocab_size", json!({"vocab_size": 1 << 28, "hidden_size": 1 << 28, "head_dim": 32})),
        ("num_hidden_layers", json!({"num_hidden_layers": []})),
        ("num_attention_heads", json!({"num_attention_heads": 5, "num_key_value_heads": 5})),
        ("num_key_value_heads", json!({"num_key_value_heads": 3})),
        ("num_key_value_heads", json!({"num_key_value_heads": 8})),
        ("head_dim", json!({"head_dim": 31})),
        ("head_dim", json!({"head_dim": 1 << 20})),
        ("head_dim", json!({"head_dim": 65536, "num_attention_heads": 1 << 27, "num_key_value_heads": 1})),
        ("max_position_embeddings", json!({"max_position_embeddings": 0})),
        ("rms_norm_eps", json!({"rms_norm_eps": -1e-5})),
        ("rms_norm_eps", json!({"rms_norm_eps": true})),
        ("hidden_act", json!({"hidden_act": "gelu"})),
        ("hidden_act", json!({"hidden_act": 3})),
        ("architectures", json!({"architectures": ["GPT2LMHeadModel"]})),
        ("architectures", json!({"architectures": "LlamaForCausalLM"})),
        ("model_type", json!({"architectures": [], "model_type": "gpt2"})),
        ("attention_bias", json!({"attention_bias": 1})),
        ("mlp_bias", json!({"mlp_bias": "no"})),
        ("tie_word_embeddings", json!({"tie_word_embeddings": 0})),
        ("torch_dtype", json!({"torch_dtype": "int8"})),
        ("dtype", json!({"dtype": 16})),
        ("bos_token_id", json!({"bos_token_id": 320})),
        ("eos_token_id", json!({"eos_token_id": [1, -1]})),
        ("eos_token_id", json!({"eos_token_id": "</s>"})),
        ("rope_theta", json!({"rope_theta": 0.0})),
        ("rope_theta", json!({"rope_theta": "big"})),
        ("rope_scaling", json!({"rope_scaling": 2.0})),
        ("rope_scaling.type", json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"type": "yarn"}})),
        ("rope_scaling.beta_fast", json!({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 0.0}})),
        ("rope_parameters.rope_type", json!({"rope_parameters": {"rope_type": "dynamic"}})),
        ("rope_scaling.long_factor", json!({"rope_scaling": {"type": "longrope"}})),
        ("rope_scaling.long_factor", longrope(json!(null), json!(vec![1.0; 16]))),
        ("rope_scaling.long_factor", longrope(json!([1.0]), json!(vec![1.0; 16]))),
        ("rope_scaling.short_factor", longrope(json!(vec![1.0; 16]), json!(vec![0.0; 16]))),
        ("rope_parameters.rope_type", json!({"rope_parameters": {"rope_type": 1}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"type": "linear"}})),
        ("rope_scaling.factor", json!({"rope_scaling": {"type": "linear", "factor": 0.0}})),
        ("rope_parameters.rope_theta", json!({"rope_parameters": {"rope_theta": -1.0}})),
        ("rope_parameters.factor", llama3("factor", json!(-8))),
        ("rope_parameters.low_freq_factor", llama3("low_freq_factor", json!(null))),
        ("rope_parameters.high_freq_factor", llama3("high_freq_factor", json!(1.0))),
        ("rope_parameters.original_max_position_embeddings", llama3("original_max_position_embeddings", json!(0))),
        ("partial_rotary_factor", json!({"partial_rotary_factor": 1.5})),
    ] {
        match parse(&with(changes.clone())) {
            Err(Error::Config { field: got, .. }) => assert_eq!(got, field, "{changes}"),
            other => panic!("{changes}: {other:?}"),
        }
    }
}

#[test]
fn what_is_no_object_is_refused() {
    for text in ["", "[]", "{", "{\"a\": 1} x", "null"] {
        let error = Config::parse(text, Path::new("somewhere/config.json")).unwrap_err().to_string();
        assert!(error.starts_with("somewhere/config.json") && error.contains("a JSON object"), "{error}");
    }
    assert!(matches!(Config::from_folder(Path::new("no/such/folder")), Err(Error::Io { .. })));
}

#[test]
fn end_tokens_of_the_generation_config_are_added() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), base().to_string()).unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [1, 9]}"#).unwrap();
    assert_eq!(Config::from_folder(dir.path()).unwrap().eos, [1, 9]);
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": "x"}"#).unwrap();
    let error = Config::from_folder(dir.path()).unwrap_err().to_string();
    assert!(error.contains("generation_config.json") && error.contains("eos_token_id"), "{error}");
}
