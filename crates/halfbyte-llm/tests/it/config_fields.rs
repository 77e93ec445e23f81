//! Configs that say less, more or something else than transformers writes: what it takes from them, by `oracles/config_fields.py`.

use halfbyte_llm::Config;
use halfbyte_llm::arch::spec::Positions;
use serde_json::Value;
use std::path::Path;

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

/// transformers computes frequencies in singles.
fn assert_near(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (got, want) in got.iter().zip(want) {
        assert!((got - want).abs() <= 2e-6 * want.abs(), "{what}: {got} for {want}");
    }
}

#[test]
fn fields_mean_what_they_mean_in_transformers() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/configs/expected.json");
    let cases: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    for case in &cases {
        let what = case["config"].to_string();
        let spec =
            Config::parse(&what, Path::new("config.json")).unwrap_or_else(|error| panic!("{what}: {error}")).spec;
        assert_eq!(spec.max_context as u64, case["max_context"].as_u64().unwrap(), "{what}");
        assert_near(&[spec.norm.eps.into()], &[case["eps"].as_f64().unwrap()], &what);
        let [of_logits, of_scores] = [0, 1].map(|i| case["caps"][i].as_f64());
        assert_eq!(spec.logit_cap.map(f64::from), of_logits, "{what}");
        let layers = case["layers"].as_array().unwrap();
        assert_eq!(spec.layers.len(), layers.len(), "{what}");
        for (i, (layer, want)) in spec.layers.iter().zip(layers).enumerate() {
            let want = &case["kinds"][want.as_u64().unwrap() as usize];
            let (attention, what) = (&layer.attention, format!("layer {i} of {what}"));
            let Positions::Rope(rope) = &attention.positions else { panic!("{what}") };
            assert_near(&rope.frequencies, &numbers(&want["frequencies"]), &what);
            assert_near(
                &[f64::from(attention.scale) * rope.factor * rope.factor],
                &[want["scale"].as_f64().unwrap()],
                &what,
            );
            assert_eq!(attention.window.map(|window| window as u64), want["window"].as_u64(), "{what}");
            assert_eq!(attention.cap.map(f64::from), of_scores, "{what}");
            assert_eq!(rope.long.is_some(), want.get("beyond").is_some(), "{what}");
            if let Some(long) = &rope.long {
                assert_eq!(Some(long.beyond as u64), want["beyond"].as_u64(), "{what}");
                assert_near(&long.frequencies, &numbers(&want["long_frequencies"]), &what);
            }
        }
    }
    assert!(cases.len() > 75, "{}", cases.len());
}

/// What would be left out of account without a word is refused, by the name of its field.
#[test]
fn what_would_not_count_is_refused() {
    let base = r#""model_type": "MODEL", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1"#;
    for (model, field, more) in [
        (
            "llama",
            "rope_parameters.rope_theta",
            r#""rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "linear", "factor": 2}"#,
        ),
        ("llama", "partial_rotary_factor", r#""partial_rotary_factor": 0.5"#),
        ("gpt_oss", "rope_scaling.partial_rotary_factor", r#""rope_scaling": {"partial_rotary_factor": 0.5}"#),
        ("qwen3", "rope_parameters.full_attention", r#""rope_parameters": {"full_attention": {"rope_theta": 500.0}}"#),
    ] {
        let config = format!("{{{}, {more}}}", base.replace("MODEL", model));
        match Config::parse(&config, Path::new("config.json")) {
            Err(halfbyte_llm::Error::Config { field: got, .. }) => assert_eq!(got, field, "{config}"),
            other => panic!("{config}: {:?}", other.map(|config| config.architecture)),
        }
    }
    let whole = format!("{{{}, \"partial_rotary_factor\": 1.0}}", base.replace("MODEL", "llama"));
    assert!(Config::parse(&whole, Path::new("config.json")).is_ok());
}
