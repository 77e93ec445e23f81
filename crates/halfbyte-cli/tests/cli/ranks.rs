//! Models that processes share.

use super::support::{copy_of_model, fails, halfbyte, json, model, output, quiet, text, validation};
use halfbyte_checkpoint::Weights;
use halfbyte_checkpoint::folder::RankFolders;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const PROMPT: [&str; 7] = ["run", "-p", "def add(a, b):", "-n", "24", "--threads", "1"];

/// A rank as a launcher starts it.
fn rank(args: &[&str], rank: usize, size: usize, port: u16) -> Child {
    let mut command = halfbyte(args);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Exit status, standard output and standard error of a process that ends in time.
fn end(mut child: Child) -> (Option<i32>, String, String) {
    let until = Instant::now() + Duration::from_secs(60);
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < until, "a rank hangs");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    (child.wait().unwrap().code(), out, err)
}

#[test]
fn processes_write_what_one_writes() {
    let model = model();
    let alone = quiet(&[&PROMPT[..], &[&model]].concat());
    assert!(alone.len() > 20);
    for tp in ["2", "3"] {
        assert_eq!(quiet(&[&PROMPT[..], &[&model, "--tp", tp]].concat()), alone, "{tp} ranks");
    }
    // As a launcher starts them: the first rank writes.
    let (args, port) = ([&PROMPT[..], &[&model, "--tp", "2", "--quiet"]].concat(), port());
    let [first, second] = [0, 1].map(|number| rank(&args, number, 2, port)).map(end);
    assert_eq!((first, second), ((Some(0), alone, String::new()), (Some(0), String::new(), String::new())));
}

/// What the first rank reads from standard input all have; many texts, a conversation and logits are those of one process.
#[test]
fn what_one_process_reads_and_writes_ranks_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let copy = copy_of_model(dir.path());
    let template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}def ";
    std::fs::write(copy.join("chat_template.jinja"), template).unwrap();
    let model = copy.display().to_string();
    let lines = "def add(a, b):\nclass Set:\nimport os\nfor i in range(3):\n";
    std::fs::write(path("prompts"), lines).unwrap();
    let same = |args: &[&str], input: &str| {
        let of = |tp: &str| {
            let args = [args, &[&model, "--threads", "1", "--quiet", "--tp", tp]].concat();
            let mut child = halfbyte(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{args:?}: {output:?}");
            text(&output.stdout)
        };
        let alone = of("1");
        assert!(alone.len() > 20, "{alone}");
        assert_eq!(of("2"), alone, "{args:?}");
    };
    same(&["run", "--prompts", &path("prompts"), "-n", "20", "--parallel", "3"], "");
    same(&["run", "--prompts", "-", "-n", "8"], lines);
    same(&["run", "-f", "-", "-n", "16"], "def add(a, b):");
    same(&["run", "--chat", "-n", "12"], "read a file\n\nwrite it\n");
    let ids: Vec<u8> = (0..40i32).flat_map(|i| (i * 37 + 5).to_le_bytes()).collect();
    let header = r#"{"input_ids":{"dtype":"I32","shape":[2,20],"data_offsets":[0,160]}}"#;
    let length = (header.len() as u64).to_le_bytes();
    std::fs::write(path("ids"), [&length, header.as_bytes(), &ids].concat()).unwrap();
    let logits = |name: &str, tp: &str| {
        let (ids, to) = (path("ids"), path(name));
        quiet(&["eval", "logits", &model, "--ids", &ids, "-o", &to, "--tp", tp]);
        let file = std::fs::read(to).unwrap();
        let header = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        file[8 + header..].chunks_exact(4).map(|v| f32::from_le_bytes([v[0], v[1], v[2], v[3]])).collect::<Vec<f32>>()
    };
    let (alone, shared) = (logits("alone", "1"), logits("shared", "2"));
    let off = alone.iter().zip(&shared).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(alone.len() == shared.len() && off < 1e-3, "{off}");
}

#[test]
fn parts_in_folders_are_the_model() {
    let (dir, model) = (tempfile::tempdir().unwrap(), model());
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (quantized, parts) = (path("quantized"), path("parts"));
    quiet(&["quantize", &model, "-o", &quantized, "--asym", "--to", "gptq"]);
    let written = json(&["convert", &quantized, "--tp", "3", "-o", &parts]);
    let of_ranks: Vec<u64> = written["bytes_after"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect();
    let before = written["bytes_before"].as_u64().unwrap();
    // Two key heads of two ranks: the third has one of them too.
    assert!(of_ranks.len() == 3 && of_ranks.iter().all(|&bytes| bytes < before * 2 / 5), "{written}");
    assert_eq!(json(&["verify", &parts, &quantized])["equal"], true);
    let alone = quiet(&[&PROMPT[..], &[&quantized]].concat());
    assert_eq!(quiet(&[&PROMPT[..], &[&parts, "--tp", "3"]].concat()), alone);
    let inspected = json(&["inspect", &format!("{parts}/rank-2")]);
    assert_eq!((&inspected["findings"], &inspected["part"]["rank"]), (&serde_json::json!([]), &2.into()));
    // As many ranks as there are parts, of the same model, and all of them.
    for tp in ["1", "2", "4"] {
        let error = fails(2, &[&PROMPT[..], &[&parts, "--tp", tp]].concat());
        assert!(error.contains("holds the parts of 3 ranks") && error.contains("add --tp 3"), "{error}");
    }
    assert!(fails(2, &["convert", &quantized, "--tp", "2", "-o", &path("awq"), "--to", "awq"]).contains("--to awq"));
    assert!(fails(2, &["convert", &quantized, "--tp", "3", "-o", &parts]).contains("not empty"));
    quiet(&["convert", &quantized, "--tp", "3", "-o", &parts, "--overwrite"]);
    // One rank's part is no model, and a server is one process.
    let part = format!("{parts}/rank-1");
    assert!(fails(2, &[&PROMPT[..], &[&part]].concat()).contains("part of rank 1 of 3"));
    assert!(fails(2, &["serve", &parts]).contains("the parts of ranks"));
    assert!(fails(2, &["verify", &quantized, &parts]).contains("parts first"));
    // Fewer ranks leave none of the others' parts, and nothing beside.
    let fewer = path("fewer");
    for ranks in ["4", "2"] {
        quiet(&["convert", &quantized, "--tp", ranks, "-o", &fewer, "--overwrite"]);
    }
    assert_eq!(quiet(&[&PROMPT[..], &[&fewer, "--tp", "2"]].concat()), alone);
    assert!(!std::path::Path::new(&format!("{fewer}/rank-2")).exists());
    let names = || std::fs::read_dir(&fewer).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert_eq!(names().len(), 2, "{:?}", names());
    // Two runs do not write one folder at once.
    let source = Weights::open(&quantized).unwrap();
    let held = RankFolders::create(&source, std::path::Path::new(&fewer), 2, true).unwrap();
    assert!(fails(2, &["convert", &quantized, "--tp", "2", "-o", &fewer, "--overwrite"]).contains("in use"));
    drop(held);
    assert_eq!(names().len(), 2, "{:?}", names());
    let other = output(&["verify", &parts, &model]);
    assert!(other.status.code() == Some(1) && text(&other.stdout).contains("rank-0: model.layers.0"), "{other:?}");
    std::fs::remove_dir_all(format!("{parts}/rank-1")).unwrap();
    assert!(fails(3, &["verify", &parts, &quantized]).contains("rank-1"));
}

#[test]
fn ranks_have_the_perplexity_of_one() {
    let (model, validation) = (model(), validation());
    let args = ["eval", "ppl", &model, "--text", &validation, "--max-windows", "3", "--quantize", "w4a8-g128"];
    let [one, three] =
        [vec![], vec!["--tp", "3"]].map(|tp| json(&[&args[..], &tp].concat())["perplexity"].as_f64().unwrap());
    assert!((one / three - 1.0).abs() < 2e-3, "{one} {three}");
}

#[test]
fn ranks_that_fail_are_named() {
    let model = model();
    let args = [&PROMPT[..], &[&model, "--tp", "2"]].concat();
    // One is killed in the middle of what takes many seconds.
    let validation = validation();
    let (long, at) = (["eval", "ppl", &model, "--text", &validation, "--threads", "1", "--tp", "2"], port());
    let [first, mut second] = [0, 1].map(|number| rank(&long, number, 2, at));
    std::thread::sleep(Duration::from_millis(1500));
    second.kill().unwrap();
    second.wait().unwrap();
    let (status, _, error) = end(first);
    assert_eq!(status, Some(4), "{error}");
    assert!(error.contains("rank 1 has ended"), "{error}");
    // Others have another way of loading the model, or say that they are others.
    let at = port();
    let ends = [(0, vec![]), (1, vec!["--act", "a8", "--quantize", "w4a8-g128"])].map(|(number, more)| {
        let args = [&args[..], &more].concat();
        rank(&args, number, 2, at)
    });
    for (status, out, error) in ends.map(end) {
        assert_eq!((status, out.as_str()), (Some(4), ""), "{error}");
        assert!(error.contains("rank 1 has another way of loading it than rank 0"), "{error}");
    }
    let (status, _, error) = end(rank(&args, 0, 3, port()));
    assert_eq!(status, Some(2));
    assert!(error.contains("--tp says 2 ranks, WORLD_SIZE 3"), "{error}");
    let more_than_heads = [&PROMPT[..], &[&model, "--tp", "13"]].concat();
    let (status, _, error) =
        end(halfbyte(&more_than_heads).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
    assert!(status != Some(0) && error.contains("for each rank") && error.contains("13 ranks"), "{error}");
    // What is not shared says so.
    assert!(fails(2, &["explain", "model", &model, "--tp", "2"]).contains("an explanation"));
    assert!(fails(2, &["bench", "model", &model, "--device", "cpu", "--tp", "2"]).contains("a measurement on a CPU"));
    // A GPU for each rank of this machine.
    let error = fails(2, &[&args[..], &["--device", "cuda:0"]].concat());
    assert!(
        error.contains("another number of GPUs than there are ranks") && error.contains("1 named, 2 ranks"),
        "{error}"
    );
    for alone in [&["bench", "matmul", "-n", "64"][..], &["inspect", &model]] {
        let error = fails(2, &[alone, &["--device", "cuda:0,1"]].concat());
        assert!(error.contains("2 named, 1 ranks"), "{error}");
    }
    // What the first rank cannot read, the others do not wait for.
    assert!(fails(3, &["run", &model, "-f", "no-such-file", "--tp", "2"]).contains("no-such-file"));
}
