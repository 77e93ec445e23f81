//! A Llama model in GGUF's terms and in Hugging Face's: shape, names, order of rows.

use super::tiny;
use crate::support::{assert_names, listing, model, model_config, read_json, testdata, text_of};
use halfbyte::Float;
use halfbyte_checkpoint::gguf::{
    Array, GgmlType, Header, TensorEntry, TensorSpec, Value as Meta, config_json, create, gguf_name, gguf_row,
    has_paired_rows, hf_name, hf_row, metadata_from, parse, rope_factors,
};
use halfbyte_checkpoint::{Checkpoint, Conversion, Error, Job, Target, Weights, convert, write_dense};
use serde_json::{Map, Value, json};
use std::path::Path;

/// The header with one key set, or removed.
fn with(header: &Header, key: &str, value: Option<Meta>) -> Header {
    let mut header = header.clone();
    header.metadata.retain(|(name, _)| name != key);
    header.metadata.extend(value.map(|value| (key.to_owned(), value)));
    header
}

/// Metadata and F32 tensors, written and read.
fn written(metadata: &[(String, Meta)], tensors: &[(&str, Vec<usize>, Vec<f32>)]) -> (Vec<u8>, Header) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let spec = |name: &str, shape: &[usize]| TensorSpec {
        name: name.to_owned(),
        ggml_type: GgmlType::F32,
        shape: shape.to_vec(),
    };
    let specs: Vec<TensorSpec> = tensors.iter().map(|(name, shape, _)| spec(name, shape)).collect();
    let mut writer = create(&path, metadata, &specs).unwrap();
    for (name, _, data) in tensors {
        writer.write(name, bytemuck::cast_slice(data)).unwrap();
    }
    writer.finish().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let header = parse(&bytes, Path::new("m.gguf")).unwrap();
    (bytes, header)
}

#[test]
fn the_tiny_models_config() {
    let (bytes, header) = tiny();
    let expected = json!({
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": true,
        "bos_token_id": 1,
        "eos_token_id": [2, 679],
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 131072,
        "mlp_bias": false,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": true,
        "vocab_size": 680,
    });
    assert_eq!(Value::Object(config_json(&header, &bytes).unwrap()), expected);
}

/// What no config can say, or what does not fit, is an error that names the key or tensor.
#[test]
fn models_that_have_no_config() {
    let (bytes, header) = tiny();
    let text = |text: &str| Some(Meta::String(text.to_owned()));
    let number = |n: u32| Some(Meta::U32(n));
    let cases = [
        ("general.architecture", text("mamba"), "\"llama\", \"qwen2\""),
        ("general.architecture", None, "got nothing"),
        ("split.count", Some(Meta::U16(2)), "open the first"),
        ("llama.logit_scale", Some(Meta::F32(0.5)), "no LlamaForCausalLM"),
        ("llama.embedding_length", None, "above 0, got nothing"),
        ("llama.embedding_length", number(0), "above 0, got U32(0)"),
        ("llama.block_count", Some(Meta::I32(-1)), "not negative"),
        ("llama.attention.head_count", text("4"), "got \"4\""),
        ("llama.attention.value_length", number(8), "16"),
        ("llama.rope.dimension_count", number(8), "16"),
        ("llama.attention.layer_norm_rms_epsilon", None, "a number"),
        ("llama.attention.layer_norm_rms_epsilon", Some(Meta::F32(f32::NAN)), "finite"),
        ("llama.vocab_size", number(681), "680"),
        ("tokenizer.ggml.tokens", Some(Meta::Array(Array::String(vec![String::new(); 681]))), "at most 680"),
        ("llama.rope.scaling.type", text("dynamic"), "\"yarn\" or \"longrope\""),
        ("llama.rope.scaling.type", text("longrope"), "rope_factors_long.weight"),
        ("llama.rope.scaling.attn_factor", Some(Meta::F32(1.5)), "without yarn"),
    ];
    for (key, value, part) in cases {
        let text = text_of(config_json(&with(&header, key, value), &bytes));
        assert_names(&text, &["tiny_llama.gguf", key, part]);
    }
    // That of another kind of model is no damage.
    let other = config_json(&with(&header, "general.architecture", text("mamba")), &bytes);
    assert!(matches!(other, Err(Error::Unsupported { .. })), "{other:?}");
    let no_factor = with(&header, "llama.rope.scaling.type", text("yarn"));
    assert_names(&text_of(config_json(&no_factor, &bytes)), &["llama.rope.scaling.factor", "got nothing"]);
    // What is missing, or no longer fits, is another key.
    let other_head = with(&header, "llama.attention.key_length", number(8));
    assert_names(&text_of(config_json(&other_head, &bytes)), &["llama.attention.value_length", "8", "U32(16)"]);
    // With experts it is Mixtral; a Qwen2 has none.
    let experts = with(&header, "llama.expert_count", number(8));
    assert_names(&text_of(config_json(&experts, &bytes)), &["llama.expert_used_count", "above 0, got nothing"]);
    let qwen2 = with(&header, "general.architecture", text("qwen2"));
    let qwen2 = with(&qwen2, "qwen2.expert_count", number(8));
    assert_names(&text_of(config_json(&qwen2, &bytes)), &["qwen2.expert_count", "mixture of experts"]);
    let no_factor = with(&header, "llama.rope.scaling.type", text("linear"));
    assert_names(&text_of(config_json(&no_factor, &bytes)), &["llama.rope.scaling.factor", "got nothing"]);
    let linear = with(&header, "llama.rope.scale_linear", Some(Meta::F32(2.0)));
    assert_names(&text_of(config_json(&linear, &bytes)), &["rope_freqs.weight", "on top of linear"]);
    let same = Meta::Array(Array::U32(vec![2, 2]));
    let listed = with(&header, "llama.attention.head_count_kv", Some(same));
    assert_eq!(config_json(&listed, &bytes).unwrap(), config_json(&header, &bytes).unwrap());
    let differing = Meta::Array(Array::I32(vec![2, 4]));
    let differing = with(&header, "llama.attention.head_count_kv", Some(differing));
    assert_names(&text_of(config_json(&differing, &bytes)), &["head_count_kv", "the same for all layers"]);

    let factors = header.tensor("rope_freqs.weight").unwrap().range.clone();
    let mut other = bytes.clone();
    other[factors.start..][..4].copy_from_slice(&3f32.to_le_bytes());
    let result = config_json(&header, &other);
    assert!(matches!(result, Err(Error::Unsupported { .. })));
    assert_names(&text_of(result), &["rope_freqs.weight", "llama3"]);
    // Factors that are all 1 scale nothing.
    other[factors].chunks_mut(4).for_each(|f| f.copy_from_slice(&1f32.to_le_bytes()));
    assert_eq!(config_json(&header, &other).unwrap()["rope_scaling"], Value::Null);
}

#[test]
fn a_config_comes_back_from_its_metadata() {
    let config = model_config();
    let tokenizer = read_json(&model().join("tokenizer.json"));
    let metadata = metadata_from(&config, &tokenizer, GgmlType::Q4_0, Some("{{ x }}")).unwrap();
    let (bytes, header) = written(&metadata, &[]);
    assert_eq!(header.get("general.file_type"), Some(&Meta::U32(2)));
    assert_eq!(header.get("tokenizer.chat_template"), Some(&Meta::String("{{ x }}".into())));
    let back = config_json(&header, &bytes).unwrap();
    for field in ["rope_theta", "rope_scaling"] {
        assert_eq!(back[field], if field == "rope_theta" { json!(10000.0) } else { Value::Null });
    }
    let mut compared = 0;
    for (field, value) in back.iter().filter(|(field, _)| !field.starts_with("rope_")) {
        assert_eq!(config.get(field), Some(value), "{field}");
        compared += 1;
    }
    assert_eq!(compared, 17);
}

#[test]
fn rotary_scaling_goes_there_and_back() {
    let tokenizer = read_json(&model().join("tokenizer.json"));
    let cases = [
        (
            json!({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}),
            500000.0,
        ),
        (
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 2048}),
            10000.0,
        ),
        (json!({"rope_type": "linear", "factor": 4.0}), 10000.0),
    ];
    for (scaling, theta) in cases {
        let mut config = model_config();
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(theta));
        config.insert("rope_scaling".into(), scaling.clone());
        let metadata = metadata_from(&config, &tokenizer, GgmlType::F16, None).unwrap();
        let factors = rope_factors(&config).unwrap();
        assert_eq!(factors.is_some(), scaling["rope_type"] == "llama3");
        let tensors: Vec<_> = factors.into_iter().map(|f| ("rope_freqs.weight", vec![f.len()], f)).collect();
        let (bytes, header) = written(&metadata, &tensors);
        let back = config_json(&header, &bytes).unwrap();
        assert_eq!((&back["rope_scaling"], &back["rope_theta"]), (&scaling, &json!(theta)));
    }
    // The factors that llama.cpp's converter computed, in singles.
    let (bytes, header) = tiny();
    let config = config_json(&header, &bytes).unwrap();
    let want = Checkpoint::open(testdata("gguf/tiny_llama.safetensors")).unwrap();
    let want = want.floats("rope_freqs.weight").unwrap().to_f32();
    let got = rope_factors(&config).unwrap().unwrap();
    assert!(want.iter().any(|f| (1.5..7.5).contains(f)), "one of the pairs is between");
    for (got, want) in got.iter().zip(&want) {
        assert!((got - want).abs() <= 1e-5 * want, "{got} and {want}");
    }
    assert_eq!(got.len(), want.len());
    assert_eq!(rope_factors(&model_config()).unwrap(), None);
}

/// As transformers takes them: what `rope_scaling` holds before `rope_parameters`, the original context outside of it before that in it.
#[test]
fn rotary_scaling_is_taken_from_where_it_counts() {
    let tokenizer = read_json(&model().join("tokenizer.json"));
    let with = |fields: Value| {
        let mut config = model_config();
        config.extend(fields.as_object().unwrap().clone());
        config
    };
    let metadata = |config: &Map<String, Value>| metadata_from(config, &tokenizer, GgmlType::F16, None);
    let linear = json!({"rope_type": "linear", "factor": 4.0});
    let (bytes, header) = written(&metadata(&with(json!({"rope_scaling": linear}))).unwrap(), &[]);
    assert_eq!(config_json(&header, &bytes).unwrap()["rope_scaling"], linear);
    let lost = with(json!({"rope_scaling": linear, "rope_parameters": {"rope_theta": 500.0}}));
    assert_names(&text_of(metadata(&lost)), &["rope_parameters.rope_theta", "10000", "500"]);
    let llama3 = |outside: Option<u64>, within: Option<u64>| {
        let mut scaling =
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
        let within = within.map(|original| ("original_max_position_embeddings".to_owned(), json!(original)));
        scaling.as_object_mut().unwrap().extend(within);
        let mut config = with(json!({"rope_scaling": scaling}));
        outside.map(|original| config.insert("original_max_position_embeddings".into(), json!(original)));
        rope_factors(&config).unwrap().unwrap()
    };
    assert_eq!(llama3(Some(64), Some(256)), llama3(None, Some(64)));
    assert_eq!(llama3(None, None), llama3(None, model_config()["max_position_embeddings"].as_u64()));
    assert_ne!(llama3(None, None), llama3(None, Some(64)));
}

/// Windows in some layers, and fields whose absence means another number than in Llama.
#[test]
fn what_fields_mean_in_their_architecture_is_written() {
    let tokenizer = read_json(&model().join("tokenizer.json"));
    let metadata = |fields: Value| {
        let mut config = model_config();
        config.retain(|field, _| field != "head_dim" && field != "num_key_value_heads");
        config.extend(fields.as_object().unwrap().clone());
        metadata_from(&config, &tokenizer, GgmlType::F16, None)
    };
    let mistral = |types: Value| {
        metadata(json!({"model_type": "mistral", "num_attention_heads": 24, "sliding_window": 5, "layer_types": types}))
    };
    let all = mistral(json!(["sliding_attention", "sliding_attention"])).unwrap();
    assert!(all.contains(&("llama.attention.sliding_window".into(), Meta::U32(5))));
    assert!(all.contains(&("llama.attention.head_count_kv".into(), Meta::U32(8))));
    assert_names(&text_of(mistral(json!(["sliding_attention", "full_attention"]))), &["layer_types", "full_attention"]);
    let qwen3 = metadata(json!({"model_type": "qwen3"})).unwrap();
    assert!(qwen3.contains(&("qwen3.attention.key_length".into(), Meta::U32(128))));
}

#[test]
fn configs_that_gguf_cannot_say() {
    let tokenizer = read_json(&model().join("tokenizer.json"));
    let refused = |field: &str, value: Value, part: &str| {
        let mut config = model_config();
        config.insert(field.into(), value);
        let error = metadata_from(&config, &tokenizer, GgmlType::Q8_0, None).unwrap_err();
        assert_names(&error.to_string(), &[field, part]);
        error
    };
    for (field, value, part) in [
        ("model_type", json!("gemma"), "\"gemma\""),
        ("hidden_act", json!("gelu"), "\"gelu\""),
        ("eos_token_id", json!([0, 1, 2, 3]), "at most 3"),
        ("partial_rotary_factor", json!(0.5), "all of a head"),
        ("vocab_size", json!(100), "below vocab_size, 100"),
        ("vocab_size", json!(u32::MAX), "at most 524288"),
    ] {
        assert!(matches!(refused(field, value, part), Error::Invalid { .. }), "{field}");
    }
    // What no config may say.
    for (field, value, part) in [
        ("hidden_size", Value::Null, "whole number"),
        ("hidden_size", json!(u64::MAX), "2^32"),
        ("num_attention_heads", json!(0), "from 1"),
        ("head_dim", json!(33), "even"),
        ("rms_norm_eps", json!("x"), "a number"),
        ("rms_norm_eps", json!(1e300), "f32"),
        ("eos_token_id", json!(4096), "below 4096"),
        ("rope_parameters", json!(5), "an object"),
    ] {
        assert!(matches!(refused(field, value, part), Error::Malformed { .. }), "{field}");
    }
    let scaled = |scaling: Value| {
        let mut config = model_config();
        config.insert("rope_parameters".into(), scaling);
        config
    };
    let yarn = scaled(json!({"rope_type": "yarn", "factor": 2.0}));
    assert_names(&text_of(metadata_from(&yarn, &tokenizer, GgmlType::F16, None)), &["rope_type", "yarn"]);
    assert_names(&text_of(rope_factors(&scaled(json!({"rope_type": "llama3"})))), &["factor"]);
    let wrong = json!({"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                       "original_max_position_embeddings": 8192});
    assert_names(&text_of(rope_factors(&scaled(wrong))), &["low_freq_factor < high_freq_factor"]);
    assert_names(&text_of(metadata_from(&model_config(), &tokenizer, GgmlType::Q6_K, None)), &["Q6_K"]);
}

#[test]
fn names_go_there_and_back() {
    let pairs = [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("output.weight", "lm_head.weight"),
        ("blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.3.attn_k.bias", "model.layers.3.self_attn.k_proj.bias"),
        ("blk.3.attn_v.bias", "model.layers.3.self_attn.v_proj.bias"),
        ("blk.3.attn_output.weight", "model.layers.3.self_attn.o_proj.weight"),
        ("blk.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight"),
        ("blk.7.ffn_gate.weight", "model.layers.7.mlp.gate_proj.weight"),
        ("blk.7.ffn_up.weight", "model.layers.7.mlp.up_proj.weight"),
        ("blk.7.ffn_down.bias", "model.layers.7.mlp.down_proj.bias"),
    ];
    for (gguf, hf) in pairs {
        assert_eq!(hf_name(gguf).as_deref(), Some(hf));
        assert_eq!(gguf_name(hf).as_deref(), Some(gguf));
    }
    for name in Checkpoint::open(model()).unwrap().tensor_names() {
        assert_eq!(hf_name(&gguf_name(name).unwrap()).as_deref(), Some(name));
    }
    let (_, header) = tiny();
    for tensor in &header.tensors {
        let expected = (tensor.name != "rope_freqs.weight").then_some(&tensor.name);
        assert_eq!(hf_name(&tensor.name).and_then(|hf| gguf_name(&hf)).as_ref(), expected);
    }
    for name in [
        "rope_freqs.weight",
        "blk.01.attn_q.weight",
        "blk.+1.attn_q.weight",
        "blk.99999999999.attn_q.weight",
        "blk.0.attn_norm.bias",
        "blk.0.attn_qkv.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.0.attn_q",
        "blk.0",
        "output.bias",
        "",
    ] {
        assert_eq!(hf_name(name), None, "{name}");
    }
    for name in ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.00.mlp.up_proj.weight", "lm_head.bias"] {
        assert_eq!(gguf_name(name), None, "{name}");
    }
}

/// In the tiny model, q's weights and biases and k's weights hold the number of their row in Hugging Face's order,
/// brought into GGUF's as llama.cpp's converter does.
#[test]
fn rows_of_q_and_k_are_where_llama_cpp_puts_them() {
    let (_, header) = tiny();
    let expected = Checkpoint::open(testdata("gguf/tiny_llama.safetensors")).unwrap();
    let mut checked = 0;
    for name in ["blk.0.attn_q.weight", "blk.1.attn_q.bias", "blk.1.attn_k.weight"] {
        assert!(has_paired_rows(name));
        let tensor = header.tensor(name).unwrap();
        let values = expected.floats(name).unwrap().to_f32();
        let columns = tensor.shape.get(1).copied().unwrap_or(1);
        for row in 0..tensor.shape[0] {
            let hf = hf_row(row, 16);
            assert_eq!(values[row * columns], hf as f32, "{name}, row {row}");
            assert_eq!(gguf_row(hf, 16), row);
            checked += 1;
        }
    }
    assert_eq!(checked, 64 + 64 + 32);
    assert_eq!((0..8).map(|row| hf_row(row, 4)).collect::<Vec<_>>(), [0, 2, 1, 3, 4, 6, 5, 7]);
    for name in ["blk.0.attn_v.weight", "blk.0.attn_output.weight", "blk.0.attn_q_norm.weight", "attn_q.weight"] {
        assert!(!has_paired_rows(name), "{name}");
    }
}

/// A file of the tiny model with these keys besides, and no other templates.
fn tiny_with(path: &Path, keys: &[(&str, Meta)]) -> Weights {
    let (bytes, mut header) = tiny();
    header.metadata.retain(|(name, _)| !name.starts_with("tokenizer.chat_template") && name != "general.alignment");
    header.metadata.extend(keys.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    let spec = |t: &TensorEntry| TensorSpec { name: t.name.clone(), ggml_type: t.ggml_type, shape: t.shape.clone() };
    let mut writer = create(path, &header.metadata, &header.tensors.iter().map(spec).collect::<Vec<_>>()).unwrap();
    for tensor in &header.tensors {
        writer.write(&tensor.name, &bytes[tensor.range.clone()]).unwrap();
    }
    writer.finish().unwrap();
    Weights::open(path).unwrap()
}

#[test]
fn templates_of_a_file_are_files_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let text = |text: &str| Meta::String(text.to_owned());
    let keys = [
        ("tokenizer.chat_template", text("{{ a }}")),
        ("tokenizer.chat_template.tool_use", text("{{ b }}")),
        ("tokenizer.chat_template.rag", text("{{ c }}")),
    ];
    let source = tiny_with(&path("m.gguf"), &keys);
    write_dense(Job::new(&source, &path("dense")), Float::F32).unwrap();
    let conversion =
        Conversion { target: Target::Native, bits: None, group: None, channel_scale: None, requantize: false };
    convert(Job::new(&source, &path("native")), conversion).unwrap();
    for name in ["dense", "native"] {
        let read = Weights::open(path(name)).unwrap();
        assert_eq!(read.chat_template().unwrap().as_deref(), Some("{{ a }}"), "{name}");
        assert_eq!(read.tool_template().unwrap().as_deref(), Some("{{ b }}"), "{name}");
        let rag = std::fs::read(path(name).join("additional_chat_templates/rag.jinja")).unwrap();
        assert_eq!(rag, b"{{ c }}", "{name}");
    }
    // From file to file, and from a folder to a file.
    let conversion = Conversion { target: Target::Gguf, ..conversion };
    convert(Job::new(&source, &path("same.gguf")), Conversion { requantize: true, ..conversion }).unwrap();
    for name in listing(&model()).iter().filter(|name| name.contains("model") || name.contains("tokenizer")) {
        std::fs::copy(model().join(name), path("dense").join(name)).unwrap();
    }
    std::fs::copy(model().join("config.json"), path("dense/config.json")).unwrap();
    std::fs::remove_file(path("dense/model.safetensors")).unwrap();
    let named = json!([{"name": "tool_use", "template": "older"}, {"name": "more", "template": "{{ e }}"}]);
    std::fs::write(path("dense/tokenizer_config.json"), json!({"chat_template": named}).to_string()).unwrap();
    convert(Job::new(&Weights::open(path("dense")).unwrap(), &path("again.gguf")), conversion).unwrap();
    for (name, names) in [("same.gguf", &["tool_use", "rag"][..]), ("again.gguf", &["rag", "tool_use", "more"])] {
        let header = parse(&std::fs::read(path(name)).unwrap(), Path::new(name)).unwrap();
        let names = Meta::Array(Array::String(names.iter().map(|name| (*name).to_owned()).collect()));
        assert_eq!(header.get("tokenizer.chat_templates"), Some(&names), "{name}");
        for (key, value) in &keys {
            assert_eq!(header.get(key), Some(value), "{name}");
        }
        let more = (name == "again.gguf").then(|| text("{{ e }}"));
        assert_eq!(header.get("tokenizer.chat_template.more"), more.as_ref());
    }
    // One alone, and none.
    for (name, keys, files) in [("one", &keys[..1], 4), ("none", &[], 3)] {
        let source = tiny_with(&path(&format!("{name}.gguf")), keys);
        write_dense(Job::new(&source, &path(name)), Float::F32).unwrap();
        let found = listing(&path(name));
        assert_eq!((found.len(), found.contains(&"chat_template.jinja".to_owned())), (files, files == 4), "{found:?}");
    }
    // A name that leads elsewhere.
    let source = tiny_with(&path("odd.gguf"), &[("tokenizer.chat_template.../../x", text("{{ d }}"))]);
    let refused = text_of(write_dense(Job::new(&source, &path("odd")), Float::F32));
    assert_names(&refused, &["odd.gguf", "`../../x`", "letters, digits"]);
    assert!(!path("odd").exists());
}

/// What a file's tokenizer makes of a text: so many tokens before it, and itself.
fn before_and_text(path: &Path) -> usize {
    Weights::open(path).unwrap().own_tokenizer().unwrap().unwrap()["post_processor"]["single"].as_array().unwrap().len()
}

#[test]
fn end_tokens_in_settings_of_generation_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    std::fs::create_dir(path("in")).unwrap();
    for name in listing(&model()).iter().filter(|name| name.contains("model") || name.contains("tokenizer")) {
        std::fs::copy(model().join(name), path("in").join(name)).unwrap();
    }
    // Those of config.json, of generation_config.json, and of the file.
    let change = |name: &str, ids: Value, settings: Value| {
        let mut config = model_config();
        config.insert("eos_token_id".into(), ids);
        config.remove("bos_token_id");
        std::fs::write(path("in/config.json"), Value::Object(config).to_string()).unwrap();
        std::fs::write(path("in/generation_config.json"), settings.to_string()).unwrap();
        let conversion =
            Conversion { target: Target::Gguf, bits: None, group: None, channel_scale: None, requantize: false };
        convert(Job::new(&Weights::open(path("in")).unwrap(), &path(name)), conversion)
    };
    let cases = [
        (json!(0), json!({"eos_token_id": [1, 0, 2], "bos_token_id": 3}), json!([0, 1, 2]), json!(3)),
        (json!(0), json!({"eos_token_id": 1}), json!([0, 1]), Value::Null),
        (Value::Null, json!({"eos_token_id": 2, "bos_token_id": [4]}), json!(2), json!(4)),
        (json!([2, 1]), json!({"eos_token_id": null}), json!([2, 1]), Value::Null),
    ];
    for (i, (ids, settings, ends, begin)) in cases.into_iter().enumerate() {
        let name = format!("{i}.gguf");
        change(&name, ids, settings).unwrap();
        let config = Weights::open(path(&name)).unwrap().own_config().unwrap().unwrap();
        assert_eq!(config["eos_token_id"], ends, "{name}");
        assert_eq!(config.get("bos_token_id").unwrap_or(&Value::Null), &begin, "{name}");
        assert_eq!(before_and_text(&path(&name)), if begin.is_null() { 1 } else { 2 }, "{name}");
    }
    std::fs::write(path("in/tokenizer_config.json"), "{\"add_bos_token\": false}").unwrap();
    change("none.gguf", json!(0), json!({"bos_token_id": 3})).unwrap();
    assert_eq!(before_and_text(&path("none.gguf")), 1);
    // More than the format has places for, what is no token, and what is no object.
    let refused = |settings: Value| text_of(change("refused.gguf", json!(0), settings));
    assert_names(
        &refused(json!({"eos_token_id": [1, 2, 3]})),
        &["eos_token_id", "at most 3", "generation_config.json", "[0,1,2,3]"],
    );
    assert_names(&refused(json!({"eos_token_id": [4096]})), &["eos_token_id", "below 4096"]);
    assert_names(&refused(json!({"eos_token_id": "end"})), &["eos_token_id", "end"]);
    assert_names(&refused(json!([])), &["generation_config.json", "expected a JSON object"]);
    assert!(!path("refused.gguf").exists());
}
