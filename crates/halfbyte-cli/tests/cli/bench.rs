//! What is measured: bench.

use crate::support::{json, model, number, quiet, repository};
use std::fs;
use tempfile::TempDir;

#[test]
fn bench_matmul_reports_and_checks() {
    let here = TempDir::new().unwrap();
    let case = here.path().join("small.toml");
    fs::write(
        &case,
        "origin = 'a test'\nformats = ['w4a8-g128', 'w4a16-g32-asym', 'w8a8-tensor', 'f32']\nm = [1, 3]\n\
         [[shape]]\norigin = 'one shape'\nn = 1000\nk = 1008\n",
    )
    .unwrap();
    let found = json(&["bench", "matmul", "--case", case.to_str().unwrap(), "--check", "--no-baseline"]);
    assert_eq!((&found["passed"], &found["origin"]), (&true.into(), &"a test".into()));
    for when in ["roofline_before", "roofline_after"] {
        for limit in ["read_gb_per_s", "int8_gop_per_s", "f32_gflop_per_s"] {
            assert!(number(&found[when], limit) > 0.0);
        }
    }
    let results = found["results"].as_array().unwrap();
    assert_eq!(results.len(), 8);
    for line in results {
        assert_eq!((&line["n"], &line["k"], &line["origin"]), (&1000.into(), &1008.into(), &"one shape".into()));
        for field in ["median_us", "least_us", "gflop_per_s", "weights_gb_per_s", "roofline_percent", "runs"] {
            assert!(number(line, field) > 0.0, "{field}");
        }
        assert!(number(line, "runs") >= 10.0 && number(line, "weight_bytes") * number(line, "copies") >= 1.6e8);
        assert!(line["baseline_us"].is_null() && !line["limit"].as_str().unwrap().is_empty());
        assert_eq!(
            (&line["check"]["passed"], &line["check"]["elements"]),
            (&true.into(), &(64 * line["m"].as_u64().unwrap()).into())
        );
        assert!(number(&line["check"], "worst") <= 1.0);
    }
    let table =
        quiet(&["bench", "matmul", "--format", "w4a8-g128", "-m", "2", "-n", "512", "-k", "512", "--x", "bf16"]);
    assert!(table.contains("roofline") && table.contains("GB/s") && table.contains("machine before"), "{table}");
    let shipped = repository().join("bench/cases");
    for entry in fs::read_dir(shipped).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        let case: toml::Value = toml::from_str(&text).unwrap();
        assert!(case["shape"].as_array().is_some_and(|shapes| !shapes.is_empty()));
    }
}

#[test]
fn bench_conv_reports_checks_and_says_what_it_leaves_out() {
    let here = TempDir::new().unwrap();
    let case = here.path().join("small.toml");
    fs::write(
        &case,
        "origin = 'a test'\nformats = ['w8a8', 'w4a16-g16-asym', 'f32', 'int8']\nbatch = [1, 2]\n\
         [[shape]]\norigin = 'strided'\nci = 16\nco = 24\nsize = [9, 10]\nkernel = [3, 3]\nstride = [2, 1]\npadding = [1, 1, 1, 1]\n\
         [[shape]]\norigin = 'grouped'\nci = 8\nco = 8\nsize = [9, 10]\nkernel = [3, 6]\ngroups = 8\n",
    )
    .unwrap();
    let case = case.to_str().unwrap();
    for (layout, bytes) in [("nchw", "i8"), ("nhwc", "u8")] {
        let options = ["--check", "--no-baseline", "--layout", layout, "--bytes", bytes];
        let found = json(&[&["bench", "conv", "--case", case][..], &options].concat());
        assert_eq!((&found["passed"], &found["origin"]), (&true.into(), &"a test".into()));
        let (results, left_out) = (found["results"].as_array().unwrap(), found["left_out"].as_array().unwrap());
        assert_eq!((results.len(), left_out.len()), (4 * 2 + 3 * 2, 2));
        assert!(left_out.iter().all(|left| left["format"] == "w4a16-g16-asym" && left["cause"].is_string()));
        for line in results {
            for field in ["median_us", "least_us", "gflop_per_s", "peak_percent", "runs", "weight_bytes", "copies"] {
                assert!(number(line, field) > 0.0, "{field}");
            }
            assert!(line["baseline_us"].is_null() && line["layout"] == layout);
            let pixels = line["batch"].as_u64().unwrap() * if line["groups"] == 1 { 4 * 5 * 10 } else { 8 * 7 * 5 };
            assert_eq!((&line["check"]["passed"], &line["check"]["elements"]), (&true.into(), &pixels.into()));
            let int8 = line["format"] == "int8";
            assert!(number(&line["check"], "worst") <= if int8 { 0.0 } else { 1.0 });
            assert_eq!(line["x"], if int8 { bytes } else { "f32" });
            let depthwise = line["kernel"] == if int8 { "int8_depthwise" } else { "depthwise" };
            assert_eq!(depthwise, line["groups"] == 8);
        }
    }
    let one = ["bench", "conv", "--ci", "8", "--co", "8", "--size", "6x5", "--format", "w8a16", "--x", "bf16"];
    let table = quiet(&one);
    assert!(table.contains("8→8 3×3 6×5") && table.contains("of peak") && table.contains("machine before"), "{table}");
}

#[test]
fn bench_model_times_folders_and_random_weights() {
    let config = format!("{}/config.json", model());
    for from in [&["--random-weights", &config][..], &[&model()]] {
        let arguments =
            ["bench", "model", "--prompt", "8", "--generate", "2", "--repetitions", "1", "--quantize", "w4a8-g128"];
        let found = json(&[&arguments[..], from].concat());
        assert_eq!((&found["format"], &found["parameters"]), (&"w4a8-g128".into(), &11_015_040.into()));
        assert_eq!((&found["prompt_tokens"], &found["generated_tokens"]), (&8.into(), &2.into()));
        assert_eq!(found["random_weights"], from.len() == 2);
        for field in ["prefill_tokens_per_second", "decode_tokens_per_second", "weight_bytes", "kv_bytes_per_token"] {
            assert!(number(&found, field) > 0.0, "{field}");
        }
        if cfg!(target_os = "linux") {
            let (peak, weights) = (number(&found, "peak_resident_bytes"), number(&found, "weight_bytes"));
            let allowed = 1.3 * weights + 10.0 * number(&found, "kv_bytes_per_token") + 64e6;
            assert!(peak > weights && peak <= allowed, "{peak} of {allowed} bytes");
        }
    }
}

#[test]
fn bench_load_times_dense_and_random_quantized_checkpoints() {
    let config = format!("{}/config.json", model());
    let model = model();
    let cases = [
        (&[model.as_str()][..], "f16"),
        (&["--random", config.as_str(), "--to", "gptq"], "w4a16-g128"),
        (&["--random", config.as_str(), "--to", "awq", "--group", "64"], "w4a16-g64-asym"),
        (&["--random", config.as_str(), "--to", "compressed-tensors", "--bits", "8", "--group", "-1"], "w8a16"),
    ];
    for (from, format) in cases {
        let found = json(&[&["bench", "load", "--repetitions", "2"][..], from].concat());
        let formats = found["formats"].as_array().unwrap();
        assert_eq!((formats.len(), &formats[0]["format"]), (1, &format.into()));
        assert!(formats[0]["layers"].as_u64().unwrap() > 0);
        for field in ["file_bytes", "best_bytes_per_second", "median_bytes_per_second", "best_share"] {
            assert!(number(&found, field) > 0.0 && number(&formats[0], field) > 0.0, "{field}");
        }
        assert!(number(&found, "best_bytes_per_second") >= number(&found, "median_bytes_per_second"));
        assert!(number(&found, "read_bytes_per_second") > 0.0);
        assert_eq!(found["random"], from.len() > 1);
    }
}
