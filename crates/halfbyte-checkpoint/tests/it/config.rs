//! What checkpoints say of their quantisation: every spelling, and every way to get it wrong.

use crate::support::{assert_names, parse_config, text_of};
use halfbyte_checkpoint::config::{GptqOverride, read};
use halfbyte_checkpoint::{BitsAndBytesKind, Error, GptqConfig, GptqVersion, QuantizationConfig};

fn gptq(fields: &str) -> GptqConfig {
    match parse_config(fields).unwrap() {
        Some(QuantizationConfig::Gptq(config)) => config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_spelling_is_read() {
    let plain = gptq(r#"{"quant_method": "gptq", "bits": 4, "group_size": 128}"#);
    assert_eq!((plain.bits, plain.group_size, plain.sym, plain.desc_act), (4, Some(Some(128)), None, false));
    assert_eq!((plain.version, plain.lm_head, plain.dynamic.rules.len()), (GptqVersion::V1, false, 0));
    for bits in ["bits", "w_bit", "wbits"] {
        for group in ["group_size", "q_group_size"] {
            let config =
                gptq(&format!(r#"{{"quant_method": "GPTQ", "{bits}": 3, "{group}": -1, "zero_point": true}}"#));
            assert_eq!((config.bits, config.group_size, config.sym), (3, Some(None), Some(false)));
        }
    }
    for key in ["checkpoint_format", "format", "version"] {
        let config = gptq(&format!(r#"{{"quant_method": "gptq", "bits": 8, "{key}": "gptq_v2", "lm_head": true}}"#));
        assert_eq!((config.version, config.lm_head), (GptqVersion::V2, true));
    }
    let config = gptq(
        r#"{"quant_method": "gptq", "bits": 2, "group_size": 64, "sym": true, "zero_point": false, "desc_act": true,
        "static_groups": true, "dynamic": {"-:x": {}}, "pack_dtype": "int32", "modules_in_block_to_quantize": [["a"]],
        "is_marlin_format": false, "dataset": null, "checkpoint_format": null, "damp_percent": 0.01}"#,
    );
    assert_eq!((config.sym, config.desc_act, config.static_groups, config.marlin), (Some(true), true, true, false));
    assert_eq!((config.dynamic.modules.texts(), &config.dynamic.rules), (&["-:x".to_owned()][..], &vec![None]));
    assert_eq!(config.modules_in_block_to_quantize, ["a"]);
    assert_eq!(gptq(r#"{"quant_method": "gptq", "bits": 2, "dynamic": {}}"#).dynamic.rules, []);
}

#[test]
fn the_config_may_lie_in_a_file_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(read(dir.path()).unwrap(), None);
    std::fs::write(dir.path().join("config.json"), r#"{"quantization_config": null}"#).unwrap();
    assert_eq!(read(dir.path()).unwrap(), None);
    let own = dir.path().join("quantize_config.json");
    std::fs::write(&own, r#"{"bits": 4, "group_size": 128, "desc_act": false, "sym": true}"#).unwrap();
    let Some(QuantizationConfig::Gptq(config)) = read(dir.path()).unwrap() else { panic!() };
    assert_eq!((config.bits, config.file.as_path()), (4, own.as_path()));
    // config.json comes first.
    std::fs::write(dir.path().join("config.json"), r#"{"quantization_config": {"quant_method": "gptq", "bits": 8}}"#)
        .unwrap();
    let Some(QuantizationConfig::Gptq(config)) = read(dir.path()).unwrap() else { panic!() };
    assert_eq!(config.bits, 8);
}

#[test]
fn wrong_types_and_absurd_values_are_errors_that_name_the_field() {
    let cases: &[(&str, &[&str])] = &[
        (r#""gptq""#, &["`quantization_config`", "an object", "\"gptq\""]),
        ("[1]", &["`quantization_config`", "an object"]),
        (r#"{"quant_method": 4, "bits": 4}"#, &["quantization_config.quant_method", "a string", "got 4"]),
        (r#"{"quant_method": "gptq"}"#, &["quantization_config.bits", "found none"]),
        (r#"{"quant_method": "gptq", "bits": "4"}"#, &["quantization_config.bits", "an integer", "\"4\""]),
        (r#"{"quant_method": "gptq", "bits": 4.0}"#, &["quantization_config.bits", "an integer", "4.0"]),
        (r#"{"quant_method": "gptq", "bits": true}"#, &["quantization_config.bits", "got true"]),
        (r#"{"quant_method": "gptq", "bits": 18446744073709551615}"#, &["quantization_config.bits", "an integer"]),
        (r#"{"quant_method": "gptq", "bits": 5}"#, &["quantization_config.bits", "2, 3, 4 or 8", "got 5"]),
        (r#"{"quant_method": "gptq", "bits": -4}"#, &["quantization_config.bits", "got -4"]),
        (r#"{"quant_method": "gptq", "bits": 4, "w_bit": 8}"#, &["`bits` and `w_bit`", "4 and 8"]),
        (r#"{"quant_method": "gptq", "bits": 4, "group_size": 0}"#, &["group_size", "-1 or 1", "got 0"]),
        (r#"{"quant_method": "gptq", "bits": 4, "group_size": -2}"#, &["group_size", "got -2"]),
        (
            r#"{"quant_method": "gptq", "bits": 4, "group_size": 9007199254740992}"#,
            &["group_size", "got 9007199254740992"],
        ),
        (r#"{"quant_method": "gptq", "bits": 4, "group_size": "128"}"#, &["group_size", "an integer"]),
        (r#"{"quant_method": "gptq", "bits": 4, "sym": 1}"#, &["quantization_config.sym", "true or false", "got 1"]),
        (r#"{"quant_method": "gptq", "bits": 4, "sym": true, "zero_point": true}"#, &["`sym` and `zero_point`"]),
        (r#"{"quant_method": "gptq", "bits": 4, "desc_act": "no"}"#, &["quantization_config.desc_act", "\"no\""]),
        (r#"{"quant_method": "gptq", "bits": 4, "lm_head": {}}"#, &["quantization_config.lm_head", "{}"]),
        (r#"{"quant_method": "gptq", "bits": 4, "dynamic": [1]}"#, &["quantization_config.dynamic", "an object"]),
    ];
    for (fields, parts) in cases {
        let text = text_of(parse_config(fields));
        assert_names(&text, parts);
        assert_names(&text, &["config.json"]);
    }
    let long = format!(r#"{{"quant_method": "gptq", "bits": "{}"}}"#, "ä".repeat(100_000));
    assert!(text_of(parse_config(&long)).len() < 1000);
}

#[test]
fn methods_that_are_not_read_are_named() {
    let cases: &[(&str, &str)] = &[
        (r#"{"quant_method": "hqq", "bits": 4}"#, "`hqq`"),
        (r#"{"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "af4"}"#, "`af4`"),
        (r#"{"quant_method": "gptq", "bits": 4, "format": "gptq_p"}"#, "`gptq_p`"),
        (r#"{"quant_method": "gptq", "bits": 4, "pack_dtype": "int8"}"#, "pack_dtype"),
        (r#"{"bits": 4, "group_size": 128, "zero_point": true, "version": "marlin"}"#, "(none)"),
        (r#"{}"#, "(none)"),
    ];
    for (fields, name) in cases {
        let error = parse_config(fields).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{fields}: {error}");
        assert_names(&error.to_string(), &[name, "not read yet", "config.json"]);
    }
}

#[test]
fn settings_of_single_modules_are_read() {
    let config = gptq(
        r#"{"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "dynamic": {
        "+:.*down_proj": {"bits": 8, "group_size": -1, "sym": false, "desc_act": true}, "-:.*gate": {}, ".*up": {"bits": 3},
        "+:.*q_proj": null}, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]}"#,
    );
    let own = |bits, group_size, sym, desc_act| Some(GptqOverride { bits, group_size, sym, desc_act });
    assert_eq!(
        config.dynamic.rules,
        [
            own(Some(8), Some(None), Some(false), Some(true)),
            None,
            own(Some(3), None, None, None),
            own(None, None, None, None)
        ]
    );
    let module = |name: &str| config.dynamic.modules.first(name);
    assert_eq!(
        ["h.0.mlp.down_proj", "h.0.mlp.gate", "h.0.mlp.up_proj", "q_proj", "k_proj"].map(module),
        [Some(0), Some(1), Some(2), Some(3), None]
    );
    assert_eq!(config.modules_in_block_to_quantize, ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"]);
    let cases: &[(&str, &[&str])] = &[
        (r#""dynamic": {"+:a": 4}"#, &["quantization_config.dynamic.+:a", "an object", "got 4"]),
        (r#""dynamic": {"+:a": {"bits": 7}}"#, &["quantization_config.dynamic.+:a.bits", "2, 3, 4 or 8", "got 7"]),
        (r#""dynamic": {"a": {"group_size": 0}}"#, &["quantization_config.dynamic.a.group_size", "got 0"]),
        (r#""modules_in_block_to_quantize": "a""#, &["modules_in_block_to_quantize", "a list of names"]),
        (r#""modules_in_block_to_quantize": [["a", 1]]"#, &["modules_in_block_to_quantize", "names", "got 1"]),
        (r#""modules_in_block_to_quantize": [[["a"]]]"#, &["modules_in_block_to_quantize", "got [\"a\"]"]),
    ];
    for (fields, parts) in cases {
        assert_names(&text_of(parse_config(&format!(r#"{{"quant_method": "gptq", "bits": 4, {fields}}}"#))), parts);
    }
}

#[test]
fn marlin_is_declared_in_three_ways() {
    for fields in [
        r#""quant_method": "marlin", "group_size": 128"#,
        r#""quant_method": "gptq", "bits": 4, "group_size": 128, "is_marlin_format": true"#,
        r#""quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin""#,
    ] {
        let config = gptq(&format!("{{{fields}}}"));
        assert_eq!((config.marlin, config.bits, config.group_size), (true, 4, Some(Some(128))), "{fields}");
    }
    let text = text_of(parse_config(r#"{"quant_method": "marlin", "bits": 8}"#));
    assert_names(&text, &["quantization_config.bits", "4 bits only, got 8"]);
}

#[test]
fn bitsandbytes_is_read_with_its_defaults() {
    let parsed = |fields: &str| match parse_config(&format!("{{{fields}}}")).unwrap() {
        Some(QuantizationConfig::BitsAndBytes(config)) => config,
        other => panic!("{other:?}"),
    };
    // As transformers writes it.
    let full = parsed(
        r#""_load_in_4bit": true, "_load_in_8bit": false, "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true,
        "llm_int8_enable_fp32_cpu_offload": false, "llm_int8_has_fp16_weight": false,
        "llm_int8_skip_modules": ["lm_head", "visual"], "llm_int8_threshold": 6.0, "load_in_4bit": true,
        "load_in_8bit": false, "quant_method": "bitsandbytes""#,
    );
    assert_eq!((full.kind, full.double_quant), (BitsAndBytesKind::Nf4, Some(true)));
    assert_eq!(full.skip_modules.texts(), ["lm_head", "visual"]);
    let old = parsed(r#""load_in_8bit": true, "llm_int8_skip_modules": null"#);
    assert_eq!((old.kind, old.double_quant, old.skip_modules.texts().len()), (BitsAndBytesKind::Int8, None, 0));
    assert_eq!(parsed(r#""quant_method": "bitsandbytes", "load_in_4bit": true"#).kind, BitsAndBytesKind::Fp4);
    let json = serde_json::to_value(QuantizationConfig::BitsAndBytes(full)).unwrap();
    assert_eq!((&json["quant_method"], &json["kind"]), (&"bitsandbytes".into(), &"nf4".into()));
    assert_eq!(json["skip_modules"], serde_json::json!(["lm_head", "visual"]));
    let cases: &[(&str, &[&str])] = &[
        (r#""load_in_8bit": true, "load_in_4bit": true"#, &["either", "load_in_8bit", "load_in_4bit", "true and true"]),
        (r#""load_in_8bit": false"#, &["load_in_8bit", "false and false"]),
        (r#""load_in_4bit": "yes""#, &["quantization_config.load_in_4bit", "true or false"]),
        (r#""load_in_4bit": true, "_load_in_4bit": false"#, &["load_in_4bit", "contradict"]),
        (r#""load_in_8bit": true, "llm_int8_skip_modules": "a""#, &["llm_int8_skip_modules", "a list of strings"]),
    ];
    for (fields, parts) in cases {
        assert_names(&text_of(parse_config(&format!(r#"{{"quant_method": "bitsandbytes", {fields}}}"#))), parts);
    }
}

#[test]
fn files_that_are_no_json_objects_are_errors_that_name_the_file() {
    for (content, part) in
        [("{", "expected JSON"), ("[]", "JSON object"), ("", "expected JSON"), ("\u{feff}{}", "expected JSON")]
    {
        for file in ["config.json", "quantize_config.json"] {
            let dir = tempfile::tempdir().unwrap();
            std::fs::write(dir.path().join(file), content).unwrap();
            assert_names(&text_of(read(dir.path())), &[file, part]);
        }
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "[".repeat(200_000)).unwrap();
    assert_names(&text_of(read(dir.path())), &["config.json", "recursion"]);
}
