//! What runs a model: run, eval, demo.

use crate::support::{copy_of_model, fails, json, model, number, output, quiet, repository, text, validation};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

#[test]
fn divergence_from_a_model_is_measured() {
    let (m, text) = (model(), validation());
    let kl = |more: &[&str]| json(&[&["eval", "kl", &m, &m, "--text", &text, "--max-windows", "2"], more].concat());
    let itself = kl(&[]);
    for field in ["kl_mean", "kl_standard_error", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"] {
        assert_eq!(itself[field], 0.0, "{field}");
    }
    assert_eq!((&itself["top1_agreement"], &itself["perplexity_ratio"]), (&1.0.into(), &1.0.into()));
    assert_eq!((&itself["windows"], &itself["tokens"], &itself["positions"]), (&2.into(), &1024.into(), &1022.into()));

    let found = kl(&["--quantize", "w4a16-g32-asym", "--window", "256"]);
    let help = quiet(&["eval", "kl", "--help"]);
    for field in found.as_object().unwrap().keys().filter(|field| *field != "schema") {
        assert!(help.contains(field), "{field}");
    }
    assert_eq!((&found["format"], &found["reference_format"]), (&"w4a16-g32-asym".into(), &"f16".into()));
    assert_eq!((&found["positions"], &found["window"]), (&510.into(), &256.into()));
    let quantiles = ["kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max"].map(|field| number(&found, field));
    assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{quantiles:?}");
    assert!((0.001..0.1).contains(&number(&found, "kl_mean")), "{found}");
    assert!((0.8..1.0).contains(&number(&found, "top1_agreement")), "{found}");
    for (field, more) in [("perplexity", &["--quantize", "w4a16-g32-asym"][..]), ("reference_perplexity", &[])] {
        let options = ["eval", "ppl", &m, "--text", &text, "--max-windows", "2", "--window", "256"];
        assert_eq!(found[field], json(&[&options[..], more].concat())["perplexity"], "{field}");
    }
    let shown = quiet(&["eval", "kl", &m, &m, "--text", &text, "--max-windows", "1", "--quantize", "w8a16-g128"]);
    assert!(shown.contains(", 1 window of 512 tokens,"), "{shown}");
    assert!(shown.contains("w8a16-g128 from f16") && shown.contains("top-1 agreement"), "{shown}");

    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let (path, other) = (copy.join("tokenizer.json"), copy.display().to_string());
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (first, second) = (vocabulary["0"].clone(), vocabulary["1"].clone());
    (vocabulary["0"], vocabulary["1"]) = (second.clone(), first.clone());
    fs::write(&path, tokenizer.to_string()).unwrap();
    let error = fails(2, &["eval", "kl", &m, &other, "--text", &text]);
    for wanted in ["tokenizers", "\"0\"", &format!("id {first} in the model"), &format!("id {second} in the reference")]
    {
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
    let tiny = repository().join("crates/halfbyte-llm/testdata/architectures/llama");
    fails(3, &["eval", "kl", &m, tiny.to_str().unwrap(), "--text", &text]);
    fails(2, &["eval", "kl", &m, &m, "--text", &text, "--window", "1"]);
    fails(2, &["eval", "kl", &m, "--text", &text]);
}

#[test]
fn run_streams_the_reference_continuation() {
    let reference: Value =
        serde_json::from_str(&fs::read_to_string(format!("{}/reference.json", model())).unwrap()).unwrap();
    let case = &reference["greedy"][0];
    let (prompt, ids) = (case["prompt"].as_str().unwrap(), case["new_ids"].as_array().unwrap());
    let found = json(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(found["tokens"].as_array().unwrap(), &ids[..16]);
    assert_eq!(found["finish"], "length");
    assert_eq!(found["format"], "f16");
    assert_eq!(found["prompt_tokens"], case["prompt_ids"].as_array().unwrap().len());
    assert!(number(&found, "prefill_tokens_per_second") > 0.0 && number(&found, "decode_tokens_per_second") > 0.0);
    for part in ["files", "weights", "first_token"] {
        assert!(number(&found["start"], part) > 0.0, "{part}");
    }

    let streamed = quiet(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(streamed, format!("{}\n", found["text"].as_str().unwrap()));
    let noisy = output(&["run", &model(), "-p", prompt, "-n", "16"]);
    assert_eq!(text(&noisy.stdout), streamed);
    assert!(text(&noisy.stderr).contains("prefill 3 tokens") && text(&noisy.stderr).contains("tok/s"));
    assert!(text(&noisy.stderr).lines().any(|line| line.starts_with("start ") && line.contains("weights ")));

    let here = TempDir::new().unwrap();
    let file = here.path().join("prompt.txt");
    fs::write(&file, prompt).unwrap();
    assert_eq!(quiet(&["run", &model(), "-f", file.to_str().unwrap(), "-n", "16"]), streamed);
    let stopped = json(&["run", &model(), "-p", prompt, "-n", "16", "--stop", "return"]);
    assert_eq!(
        (stopped["finish"].as_str(), stopped["text"].as_str()),
        (Some("stop text"), streamed.split("return").next())
    );

    let sampled =
        |seed: &str| quiet(&["run", &model(), "-p", prompt, "-n", "16", "--temperature", "1", "--seed", seed]);
    assert_eq!(sampled("1"), sampled("1"));
    assert_ne!(sampled("1"), sampled("2"));
}

#[test]
fn logits_are_written_as_declared_and_agree_with_the_reference() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let reference: Value =
        serde_json::from_str(&fs::read_to_string(format!("{}/reference.json", model())).unwrap()).unwrap();
    let case = &reference["greedy"][0];
    let ids: Vec<i32> = case["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_i64().unwrap() as i32).collect();
    let positions = ids.len();
    let write = |name: &str, dtype: &str, shape: &[usize], data: &[u8]| {
        let header = format!(
            "{{\"input_ids\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[0,{}]}}}}",
            data.len()
        );
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path(name), [&length, header.as_bytes(), data].concat()).unwrap();
    };
    let rows: Vec<u8> = [&ids[..], &ids].concat().iter().flat_map(|id| id.to_le_bytes()).collect();
    write("ids", "I32", &[2, positions], &rows);
    let arguments = ["eval", "logits", &model(), "--ids", &path("ids"), "-o", &path("logits")];
    let found = json(&arguments);
    assert_eq!((&found["rows"], &found["positions"], &found["vocab"]), (&2.into(), &positions.into(), &4096.into()));

    let bytes = fs::read(path("logits")).unwrap();
    assert_eq!(found["bytes"], bytes.len());
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let declared: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    assert_eq!(declared["logits"]["shape"], serde_json::json!([2, positions, 4096]));
    assert_eq!(declared["logits"]["dtype"], "F32");
    let values: Vec<f32> =
        bytes[8 + header..].chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(values.len(), 2 * positions * 4096);
    for last in [&values[(positions - 1) * 4096..positions * 4096], &values[(2 * positions - 1) * 4096..]] {
        for top in case["last_logits_top5"].as_array().unwrap() {
            let (token, logit) = (top[0].as_u64().unwrap() as usize, top[1].as_f64().unwrap());
            assert!((f64::from(last[token]) - logit).abs() < 2e-3, "{token}: {} for {logit}", last[token]);
        }
    }

    assert!(fails(2, &arguments).contains("already exists"));
    quiet(&[&arguments[..], &["--overwrite"]].concat());
    let wide: Vec<u8> = [&ids[..], &ids].concat().iter().flat_map(|&id| i64::from(id).to_le_bytes()).collect();
    write("wide", "I64", &[2, positions], &wide);
    quiet(&["eval", "logits", &model(), "--ids", &path("wide"), "-o", &path("logits-of-wide")]);
    assert_eq!(fs::read(path("logits-of-wide")).unwrap(), bytes);
    write("huge", "I64", &[1, 1], &(1i64 << 40).to_le_bytes());
    let error = fails(3, &["eval", "logits", &model(), "--ids", &path("huge"), "-o", &path("other")]);
    assert!(error.contains("1099511627776"), "{error}");
    write("flat", "I32", &[2 * positions], &rows);
    fails(3, &["eval", "logits", &model(), "--ids", &path("flat"), "-o", &path("other")]);
    write("floats", "F32", &[2, positions], &rows);
    fails(3, &["eval", "logits", &model(), "--ids", &path("floats"), "-o", &path("other")]);
    write("unknown", "I32", &[1, 1], &5000i32.to_le_bytes());
    fails(3, &["eval", "logits", &model(), "--ids", &path("unknown"), "-o", &path("other")]);
    assert!(!Path::new(&path("other")).exists());
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 8, "no temporary file is left");
}

#[test]
fn the_demo_fits_a_screen_and_shows_what_quantising_costs() {
    let screen = quiet(&["demo", "--max-windows", "2"]);
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines.len() <= 24 && lines.iter().all(|line| line.chars().count() <= 100), "{screen}");
    for wanted in ["f16", "w4a8-g128", "weights in memory", "perplexity", "prefill", "decode", "def read_lines"] {
        assert!(screen.contains(wanted), "{wanted}: {screen}");
    }
    let demo = json(&["demo", "--max-windows", "2"]);
    let (before, after) = (&demo["before"], &demo["after"]);
    assert_eq!((&demo["windows"], &demo["windows_in_all"]), (&2.into(), &257.into()));
    assert!(number(after, "weight_bytes") < 0.4 * number(before, "weight_bytes"));
    let cost = number(after, "perplexity") / number(before, "perplexity");
    assert!(cost > 1.0 && cost < 1.15, "{cost}");
    for side in [before, after] {
        assert!(number(side, "prefill_tokens_per_second") > 0.0 && number(side, "decode_tokens_per_second") > 0.0);
        assert!(!side["sample"].as_str().unwrap().trim().is_empty());
    }
}
