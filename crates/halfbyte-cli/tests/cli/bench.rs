//! What is measured: bench.

use crate::support::{fails, json, model, number, output, quiet, repository, text};
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
    let mut cases = 0;
    for entry in fs::read_dir(shipped).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|extension| extension == "json") {
            continue;
        }
        let case: toml::Value = toml::from_str(&fs::read_to_string(entry).unwrap()).unwrap();
        // Those of models have rows.
        let measured = case.get("shape").or(case.get("row")).and_then(toml::Value::as_array);
        assert!(measured.is_some_and(|measured| !measured.is_empty()));
        cases += 1;
    }
    assert!(cases >= 4);
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

/// A check of nothing is none, and what changes nothing is refused.
#[test]
fn bench_matmul_and_conv_refuse_what_would_count_for_nothing() {
    // The format scales 32 channels at a time, of which there are 8.
    let left_out = ["bench", "conv", "--ci", "8", "--co", "8", "--size", "8", "--format", "w4a16-g32", "--no-baseline"];
    assert!(quiet(&left_out).contains("left out: w4a16-g32"));
    let out = output(&[&left_out[..], &["--check", "--json", "--quiet"]].concat());
    let (found, error) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.code() == Some(1) && error.contains("nothing was checked"), "{error}");
    assert!(found.contains("\"passed\":false"), "{found}");
    fails(2, &["bench", "matmul", "--random", "0", "--check"]);
    for more in [&["-n", "64", "-k", "64"][..], &["-n", "64"], &["-k", "64"], &["--case", "x.toml"], &[]] {
        let error = fails(2, &[&["bench", "matmul", "--seed", "5", "-m", "1"], more].concat());
        assert!(error.contains("--seed") || more.is_empty(), "{error}");
    }
    let bench = ["bench", "conv", "--ci", "8", "--co", "8", "--size", "6", "--format"];
    let explain = ["explain", "conv"];
    for (command, more) in [
        (&bench[..], &["int8", "--x", "f16"][..]),
        (&bench, &["w8a8", "--bytes", "i8"]),
        (&bench, &["w8a8,f32", "--bytes", "u8"]),
        (&explain, &["int8", "--x", "f16"]),
        (&explain, &["int8", "--y", "f16"]),
        (&explain, &["w8a8", "--bytes", "i8"]),
    ] {
        let error = fails(2, &[command, more].concat());
        assert!(error.contains(&format!("{} changes nothing", more[1])), "{error}");
    }
    let both = json(&[&bench[..], &["int8,w8a8", "--x", "bf16", "--bytes", "i8", "--no-baseline"]].concat());
    let types: Vec<_> = both["results"].as_array().unwrap().iter().map(|line| line["x"].as_str().unwrap()).collect();
    assert_eq!(types, ["i8", "bf16"]);
    json(&[&explain[..], &["int8", "--bytes", "i8"]].concat());
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
        let start = &found["start"];
        assert!(if from.len() == 2 { start.is_null() } else { number(start, "weights") > 0.0 }, "{start}");
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

/// A configuration of a few thousand weights, with fields of its own.
fn tiny(here: &TempDir, name: &str, fields: &str) -> String {
    let path = here.path().join(name);
    let config = format!(
        r#"{{"architectures": ["LlamaForCausalLM"], "vocab_size": 200, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0{fields}}}"#
    );
    fs::write(&path, config).unwrap();
    path.display().to_string()
}

#[test]
fn bench_model_makes_random_weights_in_every_format() {
    let here = TempDir::new().unwrap();
    let tied = tiny(&here, "tied.json", r#", "tie_word_embeddings": true"#);
    let apart = tiny(&here, "apart.json", r#", "tie_word_embeddings": false, "attention_bias": true"#);
    // Blocks, embedding, norms; a head and biases of attention.
    let blocks = 2 * (96 * (64 + 32 + 32) + 64 * 96 + 3 * 96 * 160) + 5 * 96;
    let [of_tied, of_apart] = [blocks + 200 * 96, blocks + 2 * 200 * 96 + 2 * (64 + 32 + 32 + 96)];
    let work = ["--prompt", "9", "--generate", "3", "--depth", "20", "--repetitions", "1"];
    let bench = |more: &[&str]| json(&[&["bench", "model"], &work[..], more].concat());
    let mut bytes = Vec::new();
    for format in
        ["w4a16-g32", "w4a16-g32-asym", "w3a16-g32", "w2a16-g32-float", "w8a16", "w4a8-g32", "w8a8", "w4a8-g32-si8"]
    {
        let found = bench(&["--random-weights", &tied, "--format", format]);
        assert_eq!(
            (&found["format"], &found["head_bits"], &found["parameters"]),
            (&format.into(), &16.into(), &of_tied.into())
        );
        assert_eq!((&found["depth_tokens"], &found["prompt_tokens"]), (&20.into(), &9.into()));
        for field in ["first_token_seconds", "prefill_ms_per_token", "decode_ms_per_token", "weight_bytes"] {
            assert!(number(&found, field) > 0.0, "{format}: {field}");
        }
        let limits = &found["limits"];
        // All weights are read, and keys and values of 21 to 23 positions.
        assert_eq!(number(limits, "weight_bytes_per_step"), number(&found, "weight_bytes"), "{format}");
        assert_eq!(number(limits, "kv_bytes_per_step"), 22.0 * number(&found, "kv_bytes_per_token"), "{format}");
        let decode = number(limits, "read_bytes_per_second")
            / (number(limits, "weight_bytes_per_step") + number(limits, "kv_bytes_per_step"));
        assert!((number(limits, "decode_limit_tokens_per_second") / decode - 1.0).abs() < 1e-9);
        let share = number(&found, "decode_tokens_per_second") / decode;
        assert!((number(limits, "decode_share") / share - 1.0).abs() < 1e-9);
        assert_eq!(number(limits, "prefill_flop"), 2.0 * f64::from(9 * (blocks - 5 * 96) + 200 * 96));
        assert!(number(limits, "prefill_share") > 0.0);
        bytes.push(number(&found, "weight_bytes"));
    }
    let dense = bench(&["--random-weights", &tied]);
    assert_eq!((&dense["format"], &dense["device_memory_bytes"]), (&"f16".into(), &serde_json::Value::Null));
    assert!(bytes.iter().all(|&bytes| bytes < number(&dense, "weight_bytes")));
    let mut of_heads = Vec::new();
    for head in ["4", "8", "16"] {
        let found = bench(&["--random-weights", &apart, "--format", "w4a16-g32", "--head", head]);
        assert_eq!(found["parameters"], of_apart);
        // Of the embedding one row is read.
        let rest = number(&found, "weight_bytes") - number(&found["limits"], "weight_bytes_per_step");
        assert_eq!(rest, 199.0 * 96.0 * 2.0);
        of_heads.push(number(&found, "weight_bytes"));
    }
    assert!(of_heads[0] < of_heads[1] && of_heads[1] < of_heads[2]);
    let of_its_own = bench(&["--random-weights", &tied, "--head", "8"]);
    assert_eq!(of_its_own["parameters"], of_tied + 200 * 96);
    let lines = quiet(&[&["bench", "model", "--random-weights", &tied, "--head", "4"], &work[..]].concat());
    for words in [
        "random weights, head in 4 bits",
        "from the program's start",
        "of keys and values a token at",
        "after 20 tokens",
    ] {
        assert!(lines.contains(words), "{words}: {lines}");
    }
}

#[test]
fn a_profile_has_every_step_with_its_share() {
    let here = TempDir::new().unwrap();
    let tied = tiny(&here, "tied.json", r#", "tie_word_embeddings": true"#);
    let arguments = ["bench", "model", "--random-weights", &tied, "--format", "w4a16-g32", "--head", "8", "--profile"];
    let work = ["--prompt", "9", "--generate", "3", "--depth", "20", "--repetitions", "3"];
    let found = json(&[&arguments[..], &work].concat());
    let profile = &found["profile"];
    assert_eq!((&profile["weights_may_be_cached"], &profile["layers_are_one_kernel"]), (&true.into(), &false.into()));
    for (what, rows, tokens) in [("decode", 1, 1.0), ("prefill", 9, 9.0)] {
        let table = &profile[what];
        let speed = number(&found, &format!("{what}_tokens_per_second"));
        assert!((number(table, "unprofiled_us") * speed / (tokens * 1e6) - 1.0).abs() < 1e-9, "{what}");
        let (mut sum, mut seen) = (0.0, Vec::new());
        for line in table["steps"].as_array().unwrap() {
            for field in ["median_us", "total_us", "bytes", "share", "limit_us", "share_of_limit"] {
                assert!(number(line, field) > 0.0, "{what}, {field}: {line}");
            }
            assert!(
                (number(line, "limit_us") / number(line, "median_us") / number(line, "share_of_limit") - 1.0).abs()
                    < 1e-9
            );
            let (name, of_rows) = (line["step"].as_str().unwrap().to_owned(), line["rows"].as_u64().unwrap());
            assert!(!seen.contains(&(name.clone(), of_rows)), "{what}: {name} twice");
            assert!(!line["kernel"].as_str().unwrap().is_empty());
            seen.push((name, of_rows));
            sum += number(line, "total_us");
        }
        let whole = number(table, "whole_us");
        assert!(sum <= whole && (sum + number(table, "between_us") - whole).abs() < 1e-6 * whole, "{what}: {table}");
        let steps = ["embedding", "attention norm", "q k v", "rope, append"];
        let narrow = ["attention", "o", "mlp norm", "gate, up", "activation", "down"];
        let times = |name: &str, of_rows: u64| {
            let lines = table["steps"].as_array().unwrap().iter();
            let found = lines.filter(|line| line["step"] == name && line["rows"] == of_rows);
            found.map(|line| line["times"].as_u64().unwrap()).sum::<u64>()
        };
        // Of two layers the second goes on with one row.
        assert_eq!(steps.map(|name| times(name, rows)), [1, 2, 2, 2], "{what}");
        assert!(narrow.iter().all(|name| times(name, rows) + if rows > 1 { times(name, 1) } else { 0 } == 2), "{what}");
        assert_eq!(["final norm", "head", "choice"].map(|name| times(name, 1)), [1, 1, 1], "{what}");
    }
    assert!(json(&[&arguments[..8], &work].concat()).get("profile").is_none());
    let lines = quiet(&[&arguments[..], &work].concat());
    for words in
        ["a token that is written, step by step", "a prompt, step by step", "in no step", "without a profile", "q k v"]
    {
        assert!(lines.contains(words), "{words}: {lines}");
    }
    let error = fails(2, &[&arguments[..], &["--prompt", "65"]].concat());
    assert!(error.contains("--prompt 65"), "{error}");
}

#[test]
fn bench_model_refuses_what_cannot_be_timed() {
    let here = TempDir::new().unwrap();
    let fits = tiny(&here, "fits.json", "");
    let bench = |status: i32, config: &str, more: &[&str]| {
        fails(status, &[&["bench", "model", "--random-weights", config], more].concat())
    };
    let short = |more: &[&str]| bench(2, &fits, &[&["--prompt", "4", "--generate", "4"], more].concat());
    let error = bench(2, &fits, &["--prompt", "8", "--depth", "60", "--generate", "5"]);
    assert!(error.contains("context holds 64 tokens") && error.contains("--depth 60"), "{error}");
    assert!(bench(2, &fits, &["--depth", "18446744073709551615"]).contains("64 tokens"));
    assert!(bench(2, &fits, &["--prompt", "65"]).contains("--prompt 65"));
    assert!(short(&["--format", "w4a8-g32", "--act", "a16"]).contains("contradict"));
    assert!(short(&["--act", "a8"]).contains("--act changes nothing"));
    assert!(short(&["--format", "w4a16", "--group", "64"]).contains("--group changes nothing"));
    assert!(short(&["--format", "w4a16", "--search"]).contains("--search changes nothing"));
    assert!(short(&["--format", "w4a16", "--quantize", "w4a16"]).contains("--quantize"));
    assert!(short(&["--head", "5"]).contains("4, 8 or 16"));
    fails(2, &["bench", "model", &model(), "--format", "w4a16"]);
    // As large as matrices may be, and far larger than memory: refused at once.
    let changed = |name: &str, changes: &[(&str, &str)]| {
        let path = tiny(&here, name, "");
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, changes.iter().fold(text, |text, (from, to)| text.replace(from, to))).unwrap();
        path
    };
    let sizes =
        [("e\": 200,", "e\": 1000000,"), ("n_size\": 96,", "n_size\": 1000000,"), ("layers\": 2,", "layers\": 4096,")];
    let large = changed("large.json", &sizes);
    let error = bench(4, &large, &["--prompt", "8", "--generate", "5"]);
    assert!(error.contains("does not fit") && error.contains("are needed"), "{error}");
    let absurd = changed("absurd.json", &[("n_size\": 96,", "n_size\": 9000000000000000,")]);
    assert!(bench(3, &absurd, &[]).contains("field hidden_size"));
}

#[test]
fn bench_models_times_each_row_and_refuses_what_it_cannot_start() {
    let here = TempDir::new().unwrap();
    // Texts at once begin after 512 tokens.
    let config = tiny(&here, "tiny.json", "");
    let short = fs::read_to_string(&config).unwrap();
    fs::write(&config, short.replace("embeddings\": 64", "embeddings\": 1024")).unwrap();
    let case = here.path().join("case.toml").display().to_string();
    let head = "origin = 'a test'\nconfig = 'tiny.json'\nprompt = 8\ngenerate = 4\nbatch = [2]\n[[row]]\ngpus = 1\n";
    let published =
        "[[published]]\nwhat = 'fp16'\ngpus = 8\nmachine = 'A100'\ntokens_per_second = 22.7\nsource = 'x'\n";
    let write = |rows: &str| fs::write(&case, format!("{head}{rows}{published}")).unwrap();
    let bench = ["bench", "models", "--case", &case, "--repetitions", "1"];
    write("[[row]]\nformat = 'w4a16-g32'\ngpus = 1\n");
    let found = json(&bench);
    let rows = found["rows"].as_array().unwrap();
    let formats: Vec<_> = rows.iter().map(|row| row["format"].as_str().unwrap()).collect();
    assert_eq!(formats, ["f16", "w4a16-g32"]);
    for row in rows {
        assert!(row["error"].is_null() && row["gpus"] == 1, "{row}");
        for speed in ["decode_tokens_per_second", "prefill_tokens_per_second"] {
            assert!(number(&row["report"], speed) > 0.0, "{speed}");
        }
        assert!(number(&row["report"]["batches"][0], "tokens_per_second") > 0.0);
        assert_eq!((&row["report"]["format"], &row["report"]["generated_tokens"]), (&row["format"], &4.into()));
    }
    assert_eq!((found["published"].as_array().unwrap().len(), &found["origin"]), (1, &"a test".into()));
    // Rows that fail stand in the table, and the others are measured.
    fs::write(&config, short).unwrap();
    let out = output(&[&bench[..], &["--quiet"]].concat());
    let (table, error) = (text(&out.stdout), text(&out.stderr));
    assert!(out.status.code() == Some(4) && error.contains("2 of 2 rows failed"), "{error}");
    assert_eq!(table.matches("the model's context holds 64 tokens: 2 texts").count(), 2, "{table}");
    assert!(table.contains("published") && table.contains("22.7"), "{table}");
    write("[[row]]\ngpus = 2\n");
    let error = fails(2, &bench);
    assert!(error.contains("gpus = 2") && error.contains("--device says cpu"), "{error}");
    let error = fails(2, &[&bench[..], &["--device", "cuda:0"]].concat());
    assert!(error.contains("fewer GPUs than a row needs"), "{error}");
}

#[test]
fn the_configurations_that_are_shipped_have_the_parameters_of_their_models() {
    let cases = [("llama-3.2-1b", 1_235_814_400), ("llama-3-8b", 8_030_261_248), ("llama-3-70b", 70_553_706_496)];
    for (name, parameters) in cases {
        let path = repository().join(format!("bench/cases/{name}.json"));
        let config = halfbyte_llm::Config::parse(&fs::read_to_string(&path).unwrap(), &path).unwrap();
        let counts = config.spec.tensors().into_iter().map(|(_, shape)| shape.iter().product::<usize>());
        assert_eq!(counts.sum::<usize>(), parameters, "{name}");
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
