//! Scaling of rotary positions: keys and tensors of GGUF, and what serves which text.

use super::files::*;
use halfbyte_checkpoint::Weights;
use halfbyte_checkpoint::gguf::Value;
use halfbyte_llm::{Config, Spec};
use serde_json::json;

/// A YaRN Llama with the keys that llama.cpp's converter writes is the folder's spec.
#[test]
fn yarn_is_read_by_its_keys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut tensors = tensors("llama-yarn", LLAMA_DENSE);
    let of_folder = Config::from_folder(&crate::architecture("llama-yarn")).unwrap().spec;
    paired(&mut tensors, of_folder.heads.head_size);
    let yarn = [
        ("feed_forward_length", Value::U32(256)),
        ("vocab_size", Value::U32(320)),
        ("rope.scaling.type", Value::String("yarn".into())),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", Value::U32(64)),
    ];
    let spec_of = |more: &[(&str, Value)]| {
        let keys: Vec<_> = yarn.iter().chain(more).cloned().collect();
        write(&path, &metadata("llama-yarn", "llama", &keys), &tensors.iter().collect::<Vec<_>>());
        Config::from_weights(&Weights::open(&path)?).map(|config| config.spec)
    };
    assert_eq!(spec_of(&[]).unwrap(), of_folder);
    assert_near("llama-yarn", &logits(&path), &expected("llama-yarn"));
    let scale = |spec: &Spec| spec.layers[0].attention.scale;
    let plain = scale(&of_folder) / (0.1 * 4f32.ln() + 1.0).powi(2);
    let near = |a: f32, b: f32| (a - b).abs() <= 1e-6 * b.abs();
    let said = spec_of(&[("rope.scaling.yarn_attn_factor", Value::F32(1.5))]).unwrap();
    assert!(near(scale(&said), plain * 2.25), "{}", scale(&said));
    let more = spec_of(&[("rope.scaling.attn_factor", Value::F32(0.5))]).unwrap();
    assert!(near(scale(&more), scale(&of_folder) * 0.25), "{}", scale(&more));
    assert_ne!(spec_of(&[("rope.scaling.yarn_beta_fast", Value::F32(2.0))]).unwrap(), of_folder);
    for (key, value) in [("rope.scaling.yarn_ext_factor", 0.5), ("rope.scaling.yarn_log_multiplier", 0.1)] {
        let error = spec_of(&[(key, Value::F32(value))]).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}

/// A GPT-NeoX whose heads rotate whole says so by the length of what rotates, or by nothing; in a config nothing means a quarter.
#[test]
fn heads_of_gpt_neox_that_rotate_whole_are_read() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("model.gguf");
    let tensors = tensors("gpt-neox", GPT_NEOX);
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(crate::architecture("gpt-neox").join("config.json")).unwrap()).unwrap();
    let head_size = (config["hidden_size"].as_u64().unwrap() / config["num_attention_heads"].as_u64().unwrap()) as u32;
    config["rotary_pct"] = json!(1.0);
    let whole = Config::parse(&config.to_string(), std::path::Path::new("config.json")).unwrap().spec;
    for rotated in [Some(head_size), None] {
        let rotated = rotated.map(|rotated| ("rope.dimension_count", Value::U32(rotated)));
        let keys: Vec<_> = [("feed_forward_length", Value::U32(160))].into_iter().chain(rotated).collect();
        write(&path, &metadata("gpt-neox", "gptneox", &keys), &tensors.iter().collect::<Vec<_>>());
        assert_eq!(Config::from_weights(&Weights::open(&path).unwrap()).unwrap().spec, whole, "{keys:?}");
    }
}

/// A GPT-OSS without scaling has none, where a config without means YaRN.
#[test]
fn no_scaling_of_gpt_oss_is_none() {
    let here = tempfile::tempdir().unwrap();
    let path = here.path().join("model.gguf");
    let keys = [
        ("feed_forward_length", Value::U32(256)),
        ("expert_used_count", Value::U32(2)),
        ("expert_count", Value::U32(4)),
        ("expert_feed_forward_length", Value::U32(256)),
        ("attention.key_length", Value::U32(32)),
        ("attention.value_length", Value::U32(32)),
        ("attention.sliding_window", Value::U32(16)),
    ];
    write(&path, &metadata("gpt-oss", "gpt-oss", &keys), &tensors("gpt-oss", GPT_OSS).iter().collect::<Vec<_>>());
    let spec = Config::from_weights(&Weights::open(&path).unwrap()).unwrap().spec;
    let halfbyte_llm::arch::spec::Positions::Rope(rope) = &spec.layers[0].attention.positions else {
        panic!("no rope")
    };
    assert!((rope.frequencies[15] - 1e4f64.powf(-15.0 / 16.0)).abs() < 1e-12, "{rope:?}");
}

/// Longrope on a Phi-3 that rotates three quarters of each head: a text with room for more than the original context has the long
/// factors, as in llama.cpp, which computed `testdata/longrope.json` from this file in f32.
#[test]
fn longrope_serves_by_the_room_of_a_text() {
    let here = tempfile::tempdir().unwrap();
    let short: Vec<f64> = (0..12).map(|i| 1.0 + 0.05 * f64::from(i)).collect();
    let long: Vec<f64> = (0..12).map(|i| 1.0 + 0.125 * f64::from(i * i)).collect();
    // Twice: as a folder, and as a file.
    let in_folder = here.path().join("folder");
    std::fs::create_dir(&in_folder).unwrap();
    std::fs::copy(crate::architecture("phi3").join("model.safetensors"), in_folder.join("model.safetensors")).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(crate::architecture("phi3").join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(2048);
    config["original_max_position_embeddings"] = json!(256);
    config["rope_parameters"] = json!({
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": short, "long_factor": long,
    });
    let write_config = |config: &serde_json::Value| {
        std::fs::write(in_folder.join("config.json"), config.to_string()).unwrap();
    };
    write_config(&config);

    let in_file = here.path().join("model.gguf");
    let (mut tensors, pairs) = (tensors("phi3", PHI3), [("long", &long), ("short", &short)]);
    tensors.extend(pairs.map(|(name, factors)| Tensor {
        name: format!("rope_factors_{name}.weight"),
        shape: vec![12],
        values: factors.iter().map(|&factor| factor as f32).collect(),
    }));
    let factor = (1.0 + 8f64.ln() / 256f64.ln()).sqrt() as f32;
    let keys = [
        ("feed_forward_length", Value::U32(256)),
        ("rope.dimension_count", Value::U32(24)),
        ("rope.scaling.original_context_length", Value::U32(256)),
        ("rope.scaling.attn_factor", Value::F32(factor)),
    ];
    let mut metadata = metadata("phi3", "phi3", &keys);
    metadata.iter_mut().find(|(key, _)| key.ends_with(".context_length")).unwrap().1 = Value::U32(2048);
    write(&in_file, &metadata, &tensors.iter().collect::<Vec<_>>());

    let spec = Config::from_weights(&Weights::open(&in_file).unwrap()).unwrap().spec;
    assert_eq!((spec.max_context, spec.short_context()), (2048, 256));
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/longrope.json");
    let expected: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for path in [&in_folder, &in_file] {
        for (room, name) in [(40, "short"), (256, "short"), (257, "long"), (2048, "long")] {
            let want: Vec<f32> =
                expected[name].as_array().unwrap().iter().map(|l| l.as_f64().unwrap() as f32).collect();
            assert_near(&format!("{name} {room}"), &logits_with_room(path, room), &want);
        }
    }
    // Older folders call it su, and may say the factor.
    config["rope_parameters"]["rope_type"] = json!("su");
    config["rope_parameters"]["attention_factor"] = json!(f64::from(factor));
    write_config(&config);
    assert_near("su", &logits_with_room(&in_folder, 40), &logits_with_room(&in_file, 40));

    // One of both without the other, or of another length.
    for kept in ["long", "short"] {
        let tensors = tensors.iter().filter(|t| !t.name.starts_with("rope_") || t.name.contains(kept));
        write(&in_file, &metadata, &tensors.collect::<Vec<_>>());
        let error = Weights::open(&in_file).unwrap_err().to_string();
        assert!(error.contains("rope_factors_long") && error.contains("expected both"), "{error}");
    }
    tensors.iter_mut().filter(|t| t.name.starts_with("rope_")).for_each(|t| {
        t.values.pop();
        t.shape = vec![11];
    });
    write(&in_file, &metadata, &tensors.iter().collect::<Vec<_>>());
    let error = Weights::open(&in_file).unwrap_err().to_string();
    assert!(error.contains("expected 12 numbers above 0"), "{error}");
}
