//! The spellings of `quantization_config`.

use super::*;

fn parse(fields: &str) -> halfbyte_checkpoint::Result<CompressedTensorsConfig> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), fields).unwrap();
    match halfbyte_checkpoint::config::read(dir.path())? {
        Some(QuantizationConfig::CompressedTensors(config)) => Ok(config),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_spelling_of_a_config_is_read() {
    let config = parse(
        r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "mixed-precision", "version": "0.13.0",
        "quantization_status": "compressed", "global_compression_ratio": 1.2, "kv_cache_scheme": null,
        "sparsity_config": {"format": "dense"}, "transform_config": {}, "ignore": ["lm_head", "re:.*gate$"],
        "config_groups": {
            "group_0": {"targets": ["Linear", "re:.*q_proj"], "format": "pack-quantized", "output_activations": null,
                "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 64,
                    "block_structure": null, "dynamic": false, "actorder": "group", "observer": "minmax"}},
            "group_1": {"targets": ["model.layers.0.mlp.down_proj"], "format": "int-quantized",
                "input_activations": {"num_bits": 8, "dynamic": true, "strategy": "token"}, "weights": {}},
            "activations": {"targets": ["Attention"], "input_activations": {"num_bits": 8}, "weights": null}
        }}}"#,
    )
    .unwrap();
    let json = serde_json::to_value(QuantizationConfig::CompressedTensors(config)).unwrap();
    assert_eq!(json["quant_method"], "compressed-tensors");
    assert_eq!(json["ignore"], serde_json::json!(["lm_head", "re:.*gate$"]));
    assert_eq!(
        json["groups"],
        serde_json::json!([
            {"name": "group_0", "targets": ["Linear", "re:.*q_proj"], "format": "pack-quantized", "bits": 4,
                "symmetric": false, "strategy": {"group": 64}, "act_order": true, "activation_bits": null},
            {"name": "group_1", "targets": ["model.layers.0.mlp.down_proj"], "format": "int-quantized", "bits": 8,
                "symmetric": true, "strategy": "tensor", "act_order": false, "activation_bits": 8},
        ])
    );
    // The method may be told by its groups, and the older name of the field.
    for fields in [
        r#"{"compression_config": {"config_groups": {"a": {"targets": [], "weights": {"group_size": -1}}}}}"#,
        r#"{"quantization_config": {"config_groups": {"a": {"targets": [], "weights": {"strategy": "channel", "actorder": "static"}}}}}"#,
    ] {
        let config = parse(fields).unwrap();
        assert_eq!(serde_json::to_value(config.groups[0].strategy).unwrap(), "channel");
        assert!(!config.groups[0].act_order);
    }
}

#[test]
fn configs_that_are_wrong_or_not_read_are_errors_that_name_the_field() {
    let of = |rest: &str| format!(r#"{{"quantization_config": {{"quant_method": "compressed-tensors", {rest}}}}}"#);
    let path = "quantization_config.config_groups.group_0.weights";
    for format in ["float-quantized", "naive-quantized", "marlin-24", "mxfp8-quantized", "sparse-24-bitmask", "pack"] {
        let error = parse(&of(&format!(r#""format": "{format}""#))).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }));
        assert_names(&error.to_string(), &["quantization_config.format", &format!("`{format}`"), "int-quantized"]);
    }
    let unread: &[(&str, &[&str])] = &[
        (r#"{"type": "float"}"#, &["type `float`", "groups of 16 or 32"]),
        (r#"{"type": "float", "num_bits": 4, "strategy": "group", "group_size": 64}"#, &["type `float`"]),
        (r#"{"type": "float", "num_bits": 8, "strategy": "group", "group_size": 32}"#, &["type `float`"]),
        (r#"{"strategy": "block", "block_structure": [128, 128]}"#, &["strategy `block`", "tensor, channel, group"]),
        (r#"{"strategy": "tensor_group", "group_size": 16}"#, &["strategy `tensor_group`"]),
        (r#"{"actorder": "mystery"}"#, &["actorder `mystery`"]),
    ];
    for (weights, parts) in unread {
        let error = parse(&config(weights)).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
        assert_names(&error.to_string(), &[path]);
        assert_names(&error.to_string(), parts);
    }
    let wrong: &[(&str, &[&str])] = &[
        (r#"{"num_bits": 0}"#, &["num_bits", "got 0"]),
        (r#"{"num_bits": "4"}"#, &["num_bits", "an integer"]),
        (r#"{"symmetric": 1}"#, &["symmetric", "true or false"]),
        (r#"{"strategy": "group"}"#, &["group_size", "none"]),
        (r#"{"strategy": "group", "group_size": -1}"#, &["group_size", "got -1"]),
        (r#"{"strategy": "channel", "group_size": 128}"#, &["group_size", "`channel`", "got 128"]),
        (r#"{"group_size": 0}"#, &["group_size", "got 0"]),
        (r#"{"actorder": 3}"#, &["actorder", "got 3"]),
        ("7", &["an object", "got 7"]),
    ];
    for (weights, parts) in wrong {
        let text = text_of(parse(&config(weights)));
        assert_names(&text, &[path, "config.json"]);
        assert_names(&text, parts);
    }
    for (rest, parts) in [
        (r#""sparsity_config": {"format": "sparse-bitmask"}"#, ["sparsity_config.format", "`sparse-bitmask`"]),
        (r#""transform_config": {"config_groups": {"R1": {}}}"#, ["transform_config.config_groups", "rotations"]),
        (r#""ignore": "lm_head""#, ["quantization_config.ignore", "a list of strings"]),
        (r#""config_groups": ["Linear"]"#, ["quantization_config.config_groups", "an object"]),
        (r#""config_groups": {"W4A16": [4]}"#, ["config_groups.W4A16", "a list of strings"]),
        (r#""config_groups": {"W4A16": "Linear"}"#, ["config_groups.W4A16", "an object"]),
        (r#""config_groups": {"a": {"targets": [1]}}"#, ["config_groups.a.targets", "a list of strings"]),
    ] {
        assert_names(&text_of(parse(&of(rest))), &parts);
    }
}
