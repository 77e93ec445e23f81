//! Files that would speak to the terminal, never end, or take all memory: what the program prints of them, and when.

use crate::support::{copy_of_model, fails, halfbyte, json, model, output, repository, text};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A name that would end a line, give a verdict of its own, colour and clear the screen, and turn the text around.
const FORGED: &str = "a\nno problems found!\n\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}31m\u{202e}\u{2066}\u{200b}\u{feff}\u{7f}b";

/// Runs it; no stream may have a character that acts on a terminal, or the forged verdict on a line of its own.
fn harmless(args: &[&str]) -> Output {
    let out = output_in_time(args);
    for stream in [&out.stdout, &out.stderr] {
        let shown = text(stream);
        let acts = |c: char| {
            c != '\n' && c.is_control()
                || matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}')
        };
        assert!(!shown.contains(acts), "{args:?}: {shown:?}");
        assert!(!args.contains(&"--json") || shown.lines().count() <= 1, "{args:?}: {shown}");
        assert!(!shown.lines().any(|line| line.trim() == "no problems found!"), "{args:?}: {shown}");
    }
    out
}

/// Runs it for at most twenty seconds.
fn output_in_time(args: &[&str]) -> Output {
    let mut child = halfbyte(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let readers = [
        std::thread::spawn({
            let mut stream = child.stdout.take().unwrap();
            move || {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).map(|_| all)
            }
        }),
        std::thread::spawn({
            let mut stream = child.stderr.take().unwrap();
            move || {
                let mut all = Vec::new();
                stream.read_to_end(&mut all).map(|_| all)
            }
        }),
    ];
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("{args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().unwrap().unwrap());
    Output { status, stdout, stderr }
}

/// A safetensors file of tensors of two zeros each.
fn safetensors(path: &Path, names: &[String], shape: &[u64]) {
    let bytes = 2 * shape.iter().product::<u64>();
    let mut header = serde_json::Map::new();
    for (name, i) in names.iter().zip(0u64..) {
        header.insert(
            name.clone(),
            json!({"dtype": "F16", "shape": shape, "data_offsets": [i * bytes, (i + 1) * bytes]}),
        );
    }
    let header = Value::Object(header).to_string();
    let mut file = fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + names.len() as u64 * bytes).unwrap();
}

#[test]
fn names_in_safetensors_and_configs_are_shown_escaped() {
    let here = TempDir::new().unwrap();
    let folder = here.path().join("model");
    fs::create_dir(&folder).unwrap();
    let m = folder.display().to_string();
    let names = [
        FORGED.to_owned(),
        format!("{FORGED}.weight"),
        format!("{FORGED}.qweight"),
        format!("model.layers.0.{FORGED}.weight"),
    ];
    safetensors(&folder.join("model.safetensors"), &names, &[1, 2]);
    let config = json!({"architectures": [FORGED], "model_type": FORGED, "quantization_config":
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "dynamic": {FORGED: {}}}});
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let other = here.path().join(format!("{FORGED}.safetensors"));
    safetensors(&other, &[format!("x{FORGED}.weight")], &[1, 2]);
    let other = other.to_str().unwrap();

    let out = harmless(&["inspect", &m]);
    let shown = text(&out.stdout);
    assert!(
        shown.contains(
            r"a\nno problems found!\n\u{1b}[2J\u{1b}]0;t\u{7}\u{9b}31m\u{202e}\u{2066}\u{200b}\u{feff}\u{7f}b"
        ),
        "{shown}"
    );
    let out = harmless(&["inspect", &m, "--json"]);
    let inspected: Value = serde_json::from_slice(&out.stdout).unwrap();
    let of_json: Vec<&str> =
        inspected["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(of_json, names);
    harmless(&["inspect", other]);
    let target = here.path().join(format!("out{FORGED}")).display().to_string();
    for args in [
        &["convert", &m, "-o", &target, "--to", "awq"][..],
        &["dequantize", &m, "-o", &target],
        &["quantize", &m, "-o", &target],
        &["quantize", other, "-o", &target],
        &["verify", &m, other],
        &["verify", &m, &m],
        &["run", &m, "-p", "a"],
        &["run", &m, "-p", "a", "--json"],
        &["run", FORGED, "-p", "a"],
        &["eval", "ppl", &m, "--text", FORGED],
        &[FORGED],
    ] {
        harmless(args);
    }
    // What is written has its own lines still.
    let copy = copy_of_model(here.path()).display().to_string();
    let out = harmless(&["dequantize", &copy, "-o", &target, "--quiet"]);
    assert_eq!((out.status.code(), text(&out.stdout).lines().count()), (Some(0), 1), "{}", text(&out.stderr));

    let shards = json!({"weight_map": {FORGED: "model.safetensors", "x": FORGED}});
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    for shard in [FORGED, "one.safetensors"] {
        let shards = shards.to_string().replace("model.safetensors", shard.escape_default().to_string().as_str());
        fs::write(folder.join("model.safetensors.index.json"), shards).unwrap();
        harmless(&["inspect", &m]);
    }
}

#[test]
fn names_in_gguf_and_onnx_are_shown_escaped() {
    let here = TempDir::new().unwrap();
    let text_of = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    for (key, value) in [("general.architecture", FORGED), (FORGED, "llama"), ("general.architecture", "llama")] {
        let mut file = [&b"GGUF"[..], &3u32.to_le_bytes(), &1u64.to_le_bytes(), &1u64.to_le_bytes()].concat();
        for part in [text_of(key), 8u32.to_le_bytes().to_vec(), text_of(value), text_of(FORGED)] {
            file.extend(part);
        }
        file.extend([&1u32.to_le_bytes()[..], &32u64.to_le_bytes(), &0u32.to_le_bytes(), &0u64.to_le_bytes()].concat());
        file.resize(file.len().next_multiple_of(32) + 128, 0);
        let path = here.path().join("model.gguf");
        fs::write(&path, file).unwrap();
        let m = path.display().to_string();
        for verb in [&["inspect", &m][..], &["run", &m, "-p", "a"], &["verify", &m, &m]] {
            harmless(verb);
        }
        let shown = text(&harmless(&["inspect", &m]).stdout);
        assert!(value == "llama" && key != FORGED || shown.contains(r"a\nno problems found!\n"), "{shown}");
    }

    let onnx = fs::read(repository().join("crates/halfbyte-checkpoint/testdata/onnx/quantizer_w4_asym.onnx")).unwrap();
    let (known, forged) = (b"self_attn.q_proj", b"\x1b[2J\nno problems");
    let mut forged_file = onnx.clone();
    for at in 0..onnx.len() - known.len() {
        if onnx[at..].starts_with(known) {
            forged_file[at..at + known.len()].copy_from_slice(forged);
        }
    }
    let path = here.path().join("model.onnx");
    fs::write(&path, forged_file).unwrap();
    let m = path.display().to_string();
    let shown = text(&harmless(&["inspect", &m]).stdout);
    assert!(shown.contains(r"\u{1b}[2J\nno problems"), "{shown}");
    harmless(&["convert", &m, "-o", &here.path().join("out").display().to_string(), "--to", "awq"]);
}

#[test]
fn generated_text_comes_as_it_is_but_not_to_a_terminal() {
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let file = copy.join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let red = json!({"type": "Replace", "pattern": {"Regex": "[a-z]+"}, "content": "\u{1b}[31m\u{202e}x\n"});
    tokenizer["decoder"] = json!({"type": "Sequence", "decoders": [tokenizer["decoder"], red]});
    fs::write(&file, tokenizer.to_string()).unwrap();
    let m = copy.display().to_string();
    let args = ["run", &m, "-p", "def read", "-n", "8"];
    assert!(text(&output(&args).stdout).contains("\u{1b}[31m\u{202e}x\n"));
    // A terminal, where there is the tool that makes one.
    let command = format!("{} run {m} -p 'def read' -n 8 --device cpu --quiet", env!("CARGO_BIN_EXE_halfbyte"));
    if let Ok(out) = Command::new("script").args(["-qec", &command, "/dev/null"]).stdin(Stdio::null()).output() {
        let shown = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success() && shown.contains("\\u{1b}[31m\\u{202e}x\r\n"), "{shown:?}");
        assert!(!shown.contains('\u{1b}') && !shown.contains('\u{202e}'), "{shown:?}");
    }
}

#[test]
fn many_tensors_are_described_in_time_and_too_many_are_refused() {
    let here = TempDir::new().unwrap();
    let path = here.path().join("model.safetensors");
    let m = path.display().to_string();
    let mut names: Vec<String> = (0..50_000).map(|i| format!("model.block_{i}.weight")).collect();
    // One that would widen every row.
    names.push("x".repeat(1 << 20) + ".weight");
    safetensors(&path, &names, &[1, 2]);
    let out = output_in_time(&["inspect", &m]);
    assert_eq!(
        (out.status.code(), text(&out.stdout).lines().filter(|line| line.contains("block_")).count()),
        (Some(0), 50_000)
    );
    let names: Vec<String> = (0..1_000_000).map(|i| format!("{i}")).collect();
    safetensors(&path, &names, &[0]);
    let out = output_in_time(&["inspect", &m]);
    assert_eq!(out.status.code(), Some(3));
    assert!(text(&out.stderr).contains("expected at most 131072 names"), "{}", text(&out.stderr));

    let dimensions =
        format!("{{\"a\":{{\"dtype\":\"F16\",\"shape\":[{}0],\"data_offsets\":[0,0]}}}}", "0,".repeat(10 << 20));
    let metadata: String = (0..1 << 20).map(|i| format!("\"{i}\":\"\",")).collect();
    let metadata = format!("{{\"__metadata__\":{{{metadata}\"\":\"\"}}}}");
    for (header, expected) in
        [(dimensions, "tensor `a`: expected at most 4096 bytes"), (metadata, "at most 16384 names")]
    {
        fs::write(&path, [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat()).unwrap();
        let out = output_in_time(&["inspect", &m]);
        assert!(text(&out.stderr).contains(expected), "{}", text(&out.stderr));
    }

    let count = 1_000_000u64;
    let mut gguf = [&b"GGUF"[..], &3u32.to_le_bytes(), &count.to_le_bytes(), &0u64.to_le_bytes()].concat();
    gguf.resize(40 << 20, 0);
    let path = here.path().join("model.gguf");
    fs::write(&path, gguf).unwrap();
    let out = output_in_time(&["inspect", &path.display().to_string()]);
    assert!(text(&out.stderr).contains("expected at most 131072 tensors, got 1000000"), "{}", text(&out.stderr));
}

#[cfg(unix)]
#[test]
fn pipes_devices_and_sockets_are_refused_as_files() {
    use std::os::unix::fs::symlink;
    let here = TempDir::new().unwrap();
    let copy = copy_of_model(here.path());
    let m = copy.display().to_string();
    let pipe = here.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let fifo = pipe.display().to_string();
    let _listener = std::os::unix::net::UnixListener::bind(here.path().join("socket")).unwrap();
    let refused = |args: &[&str]| {
        let out = output_in_time(args);
        let error = text(&out.stderr);
        assert_eq!(out.status.code(), Some(3), "{args:?}: {error}");
        assert!(error.contains("expected a regular file, got"), "{args:?}: {error}");
    };
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "quantize_config.json",
        "model-00001-of-00002.safetensors",
    ] {
        let (file, kept) = (copy.join(name), copy.join("kept"));
        let was_there = file.exists();
        if was_there {
            fs::rename(&file, &kept).unwrap();
        }
        for target in [&pipe, Path::new("/dev/zero"), &here.path().join("socket")] {
            symlink(target, &file).unwrap();
            let out = output_in_time(&["run", &m, "-p", "a", "-n", "1"]);
            // A file that need not be there may be passed over; shards that are no files are not there.
            let skipped = ["generation_config.json", "model-00001-of-00002.safetensors"].contains(&name);
            if !skipped {
                refused(&["run", &m, "-p", "a", "-n", "1"]);
            }
            assert!(skipped || out.status.code() == Some(3), "{name}: {}", text(&out.stderr));
            output_in_time(&["inspect", &m]);
            fs::remove_file(&file).unwrap();
        }
        if was_there {
            fs::rename(&kept, &file).unwrap();
        }
    }
    for other in [fifo.as_str(), "/dev/zero"] {
        refused(&["inspect", other]);
        refused(&["run", &m, "-f", other]);
        refused(&["eval", "ppl", &m, "--text", other]);
        refused(&["eval", "logits", &m, "--ids", other, "-o", &here.path().join("logits").display().to_string()]);
        refused(&["bench", "matmul", "--case", other]);
    }
    refused(&["run", &m, "-f", &here.path().display().to_string()]);
}

#[test]
fn prompts_that_cannot_fit_and_tokenizers_that_panic_are_errors() {
    let here = TempDir::new().unwrap();
    let prompt = here.path().join("prompt");
    fs::write(&prompt, "word ".repeat(12 << 18)).unwrap();
    let error = fails(2, &["run", &model(), "-f", &prompt.display().to_string()]);
    assert!(error.contains("more tokens than the model's context") && error.contains("which has at least"), "{error}");
    for (bytes, status) in [(&b"ab\xffc"[..], Some(3)), (b"def ", Some(0))] {
        let mut run = halfbyte(&["run", &model(), "-f", "-", "-n", "1"]);
        let mut child = run.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), status);
        assert_eq!(text(&out.stderr).contains("expected UTF-8"), status == Some(3), "{}", text(&out.stderr));
    }
    let short = here.path().join("short.jsonl");
    fs::write(&short, "{\"text\": \"a b\"}").unwrap();
    let error = fails(3, &["eval", "ppl", &model(), "--text", short.to_str().unwrap()]);
    assert!(error.contains("expected a text of at least 512 tokens"), "{error}");
    let error = fails(2, &["run", &model(), "-p", "a", "-n", "-1"]);
    assert!(error.contains("expected a whole number, 0 or more"), "{error}");

    let copy = copy_of_model(here.path());
    let cases = repository().join("crates/halfbyte-llm/testdata/malicious");
    for case in ["tokenizer-characters-empty", "tokenizer-merge-beyond-vocabulary"] {
        fs::copy(cases.join(case).join("tokenizer.json"), copy.join("tokenizer.json")).unwrap();
        let error = fails(3, &["run", &copy.display().to_string(), "-p", "a b"]);
        assert!(error.contains("contradicts itself") && !error.contains("panicked"), "{error}");
        assert_eq!(error.lines().count(), 3, "{error}");
    }
}

#[test]
fn errors_are_json_where_results_are() {
    let error = |args: &[&str], status: i32| -> Value {
        let out = output(&[args, &["--json"]].concat());
        assert_eq!((out.status.code(), out.stdout.len()), (Some(status), 0));
        serde_json::from_slice(&out.stderr).unwrap_or_else(|e| panic!("{e}: {}", text(&out.stderr)))
    };
    let repository = error(&["inspect", "meta-llama/Llama-3.1-8B"], 3);
    assert_eq!((&repository["schema"], &repository["exit"]), (&1.into(), &3.into()));
    assert!(repository["help"].as_str().unwrap().contains("hf download meta-llama/Llama-3.1-8B"), "{repository}");
    assert_eq!(error(&["inspect", "none"], 3)["error"], "cannot open none");
    assert_eq!(error(&["fly"], 2)["exit"], 2);
    let shown = halfbyte(&["doctor", "--threads", "1024"]).env("HALFBYTE_ISA", "").output().unwrap();
    assert_eq!(shown.status.code(), Some(0));
    assert!(text(&shown.stderr).contains("note: --threads 1024 is more than the"), "{}", text(&shown.stderr));
    assert_eq!(json(&["doctor"])["schema"], 1);
}
