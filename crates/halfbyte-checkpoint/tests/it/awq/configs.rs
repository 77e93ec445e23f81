//! Configs of AWQ: every spelling, and errors that name the field.

use crate::support::{assert_names, parse_config, text_of};
use halfbyte_checkpoint::{AwqConfig, AwqVersion, QuantizationConfig, config};

fn awq(fields: &str) -> AwqConfig {
    match parse_config(fields).unwrap() {
        Some(QuantizationConfig::Awq(config)) => config,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_spelling_of_the_config_is_read() {
    let plain = awq(r#"{"quant_method": "awq", "bits": 4}"#);
    assert_eq!((plain.bits, plain.group_size, plain.zero_point), (4, Some(128), None));
    assert_eq!((plain.version, plain.modules_to_not_convert.texts().len()), (AwqVersion::Gemm, 0));
    for bits in ["bits", "w_bit", "wbits"] {
        for group in ["group_size", "q_group_size"] {
            let config = awq(&format!(
                r#"{{"quant_method": "AWQ", "{bits}": 4, "{group}": -1, "zero_point": true, "version": "GEMV",
                "modules_to_not_convert": ["lm_head", "visual"], "backend": "autoawq"}}"#
            ));
            assert_eq!((config.group_size, config.zero_point, config.version), (None, Some(true), AwqVersion::Gemv));
            assert_eq!(config.modules_to_not_convert.texts(), ["lm_head", "visual"]);
        }
    }
    for (fields, version) in [
        (r#""version": "gemm""#, AwqVersion::Gemm),
        (r#""version": "exllama""#, AwqVersion::Gemm),
        (r#""version": "gemv_fast""#, AwqVersion::GemvFast),
        (r#""checkpoint_format": "gemv""#, AwqVersion::Gemv),
        (r#""format": "llm-awq""#, AwqVersion::GemvFast),
        (r#""version": "gemm", "backend": "llm-awq""#, AwqVersion::GemvFast),
        (r#""version": null, "modules_to_not_convert": null"#, AwqVersion::Gemm),
    ] {
        assert_eq!(awq(&format!(r#"{{"quant_method": "awq", "bits": 4, {fields}}}"#)).version, version, "{fields}");
    }
    assert_eq!(awq(r#"{"quant_method": "awq", "bits": 4, "sym": true}"#).zero_point, Some(false));
    // AutoAWQ's own file names no method.
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("quant_config.json");
    std::fs::write(&own, r#"{"zero_point": true, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}"#).unwrap();
    let Some(QuantizationConfig::Awq(config)) = config::read(dir.path()).unwrap() else { panic!() };
    assert_eq!((config.file, config.group_size, config.version), (own, Some(64), AwqVersion::Gemm));
}

#[test]
fn wrong_configs_are_errors_that_name_the_field() {
    let cases: &[(&str, &[&str])] = &[
        (r#""w_bit": 3"#, &["quantization_config.bits", "4 bits only", "got 3"]),
        (r#""bits": 8"#, &["quantization_config.bits", "4 bits only", "got 8"]),
        (r#""bits": "4""#, &["quantization_config.bits", "an integer"]),
        (r#""bits": 4, "w_bit": 3"#, &["`bits` and `w_bit`"]),
        (r#""version": "gemm""#, &["quantization_config.bits", "found none"]),
        (r#""bits": 4, "version": "marlin""#, &["quantization_config.version", "`marlin`", "gemv_fast"]),
        (r#""bits": 4, "format": "gptq""#, &["quantization_config.format", "`gptq`"]),
        (r#""bits": 4, "version": 1"#, &["quantization_config.version", "a string"]),
        (r#""bits": 4, "backend": 1"#, &["quantization_config.backend", "a string"]),
        (r#""bits": 4, "q_group_size": 0"#, &["group_size", "got 0"]),
        (r#""bits": 4, "group_size": 9007199254740992"#, &["group_size", "got 9007199254740992"]),
        (r#""bits": 4, "zero_point": "yes""#, &["quantization_config.zero_point", "true or false"]),
        (r#""bits": 4, "zero_point": true, "sym": true"#, &["`sym` and `zero_point`"]),
        (r#""bits": 4, "modules_to_not_convert": "lm_head""#, &["modules_to_not_convert", "a list of strings"]),
        (r#""bits": 4, "modules_to_not_convert": [1]"#, &["modules_to_not_convert", "a list of strings"]),
    ];
    for (fields, parts) in cases {
        let text = text_of(parse_config(&format!(r#"{{"quant_method": "awq", {fields}}}"#)));
        assert_names(&text, parts);
        assert_names(&text, &["config.json"]);
    }
}
