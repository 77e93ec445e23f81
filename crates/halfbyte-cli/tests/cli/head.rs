//! `halfbyte quantize --head`: an output head of 8 or 4 bits, in every form of files.

use crate::support::{self, fails, first_layers, json, model, number, quiet, validation};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

fn ppl(model: &str) -> f64 {
    number(&json(&["eval", "ppl", model, "--text", &validation(), "--max-windows", "1"]), "perplexity")
}

fn config(folder: &str) -> Value {
    serde_json::from_slice(&fs::read(Path::new(folder).join("config.json")).unwrap()).unwrap()
}

/// Format and scheme of a module, and that nothing is odd.
fn module(model: &str, name: &str) -> [String; 2] {
    let inspected = json(&["inspect", model]);
    assert_eq!(inspected["findings"].as_array().unwrap().len(), 0, "{model}: {}", inspected["findings"]);
    let modules = inspected["modules"].as_array().unwrap();
    let found = modules.iter().find(|module| module["name"] == name).unwrap_or_else(|| panic!("{model}: no {name}"));
    ["format", "scheme"].map(|field| found[field].as_str().unwrap_or("dense").to_owned())
}

#[test]
fn every_form_holds_a_head_of_its_own_bits_and_runs() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    let m = model();
    quiet(&["quantize", &m, "-o", &path("dense-head")]);
    let (of_dense_head, of_eight) = (ppl(&path("dense-head")), path("gptq-8"));
    for (form, bits, more, format) in [
        ("gptq", "8", &[][..], "w8a16-g128"),
        ("gptq", "4", &[], "w4a16-g128"),
        ("gptq_v2", "8", &["--asym"], "w8a16-g128"),
        ("compressed-tensors", "8", &[], "w8a16-g128"),
        ("compressed-tensors", "4", &[], "w4a16-g128"),
        ("awq", "4", &["--asym", "--group", "64"], "w4a16-g64-asym"),
        ("native", "8", &["--two-level"], "w8a16-g128"),
        ("native", "4", &["--bits", "8"], "w4a16-g128"),
        ("gguf", "8", &["--asym"], "w8a16-g32"),
        ("gguf", "4", &[], "w4a16-g32"),
        ("onnx", "8", &[], "w8a16-g128"),
    ] {
        let (out, what) = (path(&format!("{form}-{bits}")), format!("{form}, {bits} bits"));
        let arguments = [&["quantize", &m, "-o", &out, "--to", form, "--head", bits], more].concat();
        let planned = json(&[&arguments[..], &["--dry-run"]].concat());
        let made = json(&arguments);
        assert_eq!(
            (&made["head_format"], &made["untied"], &made["modules"]),
            (&format.into(), &true.into(), &43.into())
        );
        assert_eq!(made["bytes_after"], planned["bytes_after"], "{what}");
        assert_eq!(module(&out, "lm_head")[0], format, "{what}");
        assert_eq!(module(&out, "model.embed_tokens")[1], "dense", "{what}");
        if form != "onnx" {
            let (found, allowed) = (ppl(&out), if bits == "8" { 1.002 } else { 1.05 });
            let same_blocks = more.is_empty() && form != "gguf";
            assert!(!same_blocks || (found != of_dense_head && found < allowed * of_dense_head), "{what}: {found}");
            assert!(found < 1.3 * of_dense_head, "{what}: {found} beside {of_dense_head}");
        }
    }
    // The same codes are the same numbers, whatever the form.
    assert_eq!(ppl(&of_eight), ppl(&path("compressed-tensors-8")));
    assert_eq!(json(&["verify", &of_eight, &path("compressed-tensors-8")])["equal"], true);
    for form in ["compressed-tensors", "native", "onnx"] {
        let to = path(&format!("converted-{form}"));
        quiet(&["convert", &of_eight, "-o", &to, "--to", form]);
        assert_eq!(json(&["verify", &of_eight, &to])["equal"], true, "{form}");
        assert_eq!(module(&to, "lm_head")[0], "w8a16-g128", "{form}");
    }
    let text = quiet(&["run", &of_eight, "-p", "def ", "--max-tokens", "4", "--temperature", "0"]);
    assert!(text.len() > 4, "{text}");

    // What other programs read of it.
    let gptq = config(&of_eight);
    let quantization = &gptq["quantization_config"];
    assert_eq!((&gptq["tie_word_embeddings"], &quantization["lm_head"]), (&false.into(), &true.into()));
    assert_eq!((&quantization["bits"], &quantization["dynamic"]["+:^lm_head$"]["bits"]), (&4.into(), &8.into()));
    let four = config(&path("gptq-4"));
    assert_eq!(
        (&four["quantization_config"]["lm_head"], four["quantization_config"].get("dynamic")),
        (&true.into(), None)
    );
    for bits in [8, 4] {
        let quantization = &config(&path(&format!("compressed-tensors-{bits}")))["quantization_config"];
        let groups = quantization["config_groups"].as_object().unwrap();
        let of = |target: &str| groups.values().find(|group| group["targets"] == serde_json::json!([target])).unwrap();
        assert_eq!(of("lm_head")["weights"]["num_bits"], bits);
        assert_eq!(
            (&of("Linear")["weights"]["num_bits"], &quantization["ignore"]),
            (&4.into(), &serde_json::json!([]))
        );
    }
    assert_eq!(config(&path("awq-4"))["quantization_config"]["lm_head"], true);
    assert!(config(&path("dense-head"))["quantization_config"]["lm_head"] == false);
    assert_eq!(config(&path("dense-head"))["tie_word_embeddings"], true);

    // Back to floats the head is a matrix of its own, and can be quantised as such.
    quiet(&["dequantize", &of_eight, "-o", &path("floats")]);
    assert!((ppl(&path("floats")) / ppl(&of_eight) - 1.0).abs() < 1e-5);
    let again = json(&["quantize", &path("floats"), "-o", &path("again"), "--head", "8"]);
    assert_eq!((&again["untied"], &again["modules"]), (&false.into(), &43.into()));
    assert!(json(&["quantize", &path("floats"), "-o", &path("as-floats")])["head_format"].is_null());
    assert_eq!(module(&path("as-floats"), "lm_head")[1], "dense");
}

#[test]
fn a_head_that_is_stored_beside_the_embedding_it_is_tied_to_is_not_read() {
    let here = TempDir::new().unwrap();
    let path = |name: &str| here.path().join(name).display().to_string();
    quiet(&["quantize", &model(), "-o", &path("want"), "--head", "8"]);
    // A head of other numbers: that of fewer bits.
    quiet(&["quantize", &model(), "-o", &path("coarse"), "--head", "4", "--to", "native", "--bits", "8"]);
    quiet(&["dequantize", &path("coarse"), "-o", &path("stored"), "--dtype", "f16"]);
    let mut tied = config(&path("stored"));
    tied["tie_word_embeddings"] = true.into();
    fs::write(Path::new(&path("stored")).join("config.json"), tied.to_string()).unwrap();
    let made = json(&["quantize", &path("stored"), "-o", &path("got"), "--head", "8"]);
    assert_eq!((&made["untied"], &made["modules"]), (&true.into(), &43.into()));
    let verified = support::output(&["verify", &path("want"), &path("got"), "--json"]);
    let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
    // The blocks went through 8 bits; the head did not.
    let text = verified.to_string();
    assert!(!text.contains("lm_head") && text.contains("q_proj"), "{text}");
}

#[test]
fn calibration_quantises_the_head_by_its_inputs() {
    let (here, whole) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let path = |name: &str| here.path().join(name).display().to_string();
    let (cut, text) = (first_layers(whole.path(), 1), format!("{}/calibration.jsonl", model()));
    let by = |method: &str, more: &[&str]| {
        let out = path(method);
        let arguments = ["quantize", &cut, "-o", &out, "--method", method, "--calibration", &text, "--head", "4"];
        let sizes = ["--samples", "4", "--window", "64"];
        json(&[&arguments[..], &sizes, more].concat())
    };
    let planned = by("gptq", &["--dry-run"]);
    assert!(!Path::new(&path("gptq")).exists());
    let [rtn, gptq, awq] = ["rtn", "gptq", "awq"].map(|method| by(method, &[]));
    let head = |made: &Value| {
        assert_eq!(made["modules"], 8);
        let layers = made["layers"].as_array().unwrap();
        let last = layers.last().unwrap();
        assert_eq!(
            (layers.len(), &last["name"], &last["shape"]),
            (8, &"lm_head".into(), &serde_json::json!([4096, 384]))
        );
        assert!(number(&last["activations"], "error") > 0.0);
        number(last, "output_error")
    };
    assert!(head(&gptq) < 0.9 * head(&rtn), "{} {}", head(&gptq), head(&rtn));
    assert!(head(&awq) < head(&rtn), "{} {}", head(&awq), head(&rtn));
    assert_eq!(gptq["bytes_after"], planned["bytes_after"]);
    assert_eq!(module(&path("gptq"), "lm_head")[0], "w4a16-g128");
    assert!(ppl(&path("gptq")) > 1.0);
    assert!(
        fs::read_dir(here.path()).unwrap().all(|entry| !entry
            .unwrap()
            .file_name()
            .to_string_lossy()
            .ends_with(".partial"))
    );
}

#[test]
fn heads_that_no_form_holds_are_refused() {
    let here = TempDir::new().unwrap();
    let out = here.path().join("none").display().to_string();
    let m = model();
    let refused = |more: &[&str]| fails(2, &[&["quantize", &m, "-o", &out], more].concat());
    let error = refused(&["--head", "8", "--to", "awq"]);
    assert!(error.contains("`lm_head` does not fit the form awq") && error.contains("4 bits, not 8"), "{error}");
    assert!(refused(&["--head", "5"]).contains("4, 8 or 16"));
    assert!(refused(&["--head", "3"]).contains("4, 8 or 16"));
    quiet(&["quantize", &m, "-o", &out, "--head", "8"]);
    let again = here.path().join("again").display().to_string();
    assert!(fails(2, &["quantize", &out, "-o", &again, "--head", "4"]).contains("quantised already"));
}
