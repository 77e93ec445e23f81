//! Models that processes share.

use super::support::{copy_of_model, fails, halfbyte, json, model, output, quiet, text, validation};
use halfbyte_checkpoint::Weights;
use halfbyte_checkpoint::folder::RankFolders;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const PROMPT: [&str; 7] = ["run", "-p", "def add(a, b):", "-n", "24", "--threads", "1"];

/// A rank as a launcher starts it.
fn rank_of(args: &[&str], rank: usize, size: usize, port: u16) -> Command {
    let mut command = halfbyte(args);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", size.to_string());
    command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn rank(args: &[&str], rank: usize, size: usize, port: u16) -> Child {
    rank_of(args, rank, size, port).spawn().unwrap()
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
    let document = serde_json::json!({"text": "def add(a, b):\n    return a + b\n".repeat(8)}).to_string();
    let scored = |tp: &str| {
        let args = ["eval", "ppl", &model, "--text", "-", "--window", "64", "--tp", tp, "--json"];
        let mut child = halfbyte(&args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(document.as_bytes()).unwrap();
        let told: serde_json::Value = serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap();
        told["perplexity"].as_f64().unwrap()
    };
    assert!((scored("1") / scored("2") - 1.0).abs() < 1e-3);
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

/// What decides a result must be the same for all; else each of them says what differs, and writes nothing.
#[test]
fn ranks_that_were_given_something_else_are_refused() {
    let (dir, model, validation) = (tempfile::tempdir().unwrap(), model(), validation());
    let refused = |status: i32, ranks: [&[&str]; 2], what: &str| {
        let port = port();
        let ends =
            [0, 1].map(|number| rank(&[ranks[number], &["--tp", "2", "--threads", "1"]].concat(), number, 2, port));
        for (code, out, error) in ends.map(end) {
            assert_eq!((code, out.as_str()), (Some(status), ""), "{what}: {error}");
            assert!(error.contains(what), "{what}: {error}");
        }
    };
    let run = ["run", &model, "-p", "def add(a, b):", "-n", "8", "--temperature", "1"];
    for (more, what) in [
        (&["--seed", "2"][..], "rank 1 has --seed 2, rank 0 --seed 0"),
        (&["--stop", "def"], "rank 1 has --stop def, rank 0 no --stop"),
        (&["--act", "a8", "--quantize", "w4a8-g128"], "rank 1 has --quantize w4a8-g128, rank 0 no --quantize"),
    ] {
        refused(2, [&run, &[&run[..], more].concat()], what);
    }
    let eval = ["eval", "ppl", &model, "--max-windows", "1", "--text", &validation];
    refused(2, [&run, &eval], "rank 1 runs `eval ppl`, rank 0 `run`");
    // Another file of the same name on another host: a text, a tokenizer, weights behind the first ones of a tensor.
    let calibration = format!("{model}/calibration.jsonl");
    refused(3, [&eval, &[&eval[..6], &[&calibration]].concat()], "the ranks have not the same text");
    let copy = copy_of_model(dir.path());
    let config = std::fs::read_to_string(copy.join("tokenizer.json")).unwrap();
    let path = copy.display().to_string();
    let other = [&["run", path.as_str()], &run[2..]].concat();
    let swapped = config.replace("\"self\": 273", "\"self\": 285").replace("\"Ġself\": 285", "\"Ġself\": 273");
    std::fs::write(copy.join("tokenizer.json"), swapped).unwrap();
    refused(3, [&run, &other], "the ranks have not the same tokenizer");
    // One that cannot be used: the others hear why the rank has left.
    std::fs::write(copy.join("tokenizer.json"), "{}").unwrap();
    let at = port();
    let [first, second] = [(0, &run[..]), (1, &other[..])]
        .map(|(number, args)| rank(&[args, &["--tp", "2", "--threads", "1"]].concat(), number, 2, at))
        .map(end);
    assert_eq!((first.0, second.0), (Some(4), Some(3)), "{}{}", first.2, second.2);
    assert!(first.2.contains("rank 1 cannot go on: the tokenizer cannot be used"), "{}", first.2);
    std::fs::write(copy.join("tokenizer.json"), config).unwrap();
    let weights = std::fs::read_dir(&copy).unwrap().map(|entry| entry.unwrap().path());
    for file in weights.filter(|path| path.extension().is_some_and(|of| of == "safetensors")) {
        let mut bytes = std::fs::read(&file).unwrap();
        let at = bytes.len() - 2;
        bytes[at..].iter_mut().for_each(|byte| *byte ^= 1);
        std::fs::write(file, bytes).unwrap();
    }
    refused(4, [&run, &other], "rank 1 has another model than rank 0");
    // Where they compute and what they show is each one's own.
    let port = port();
    let own = [&run[..], &["--tp", "2", "--threads", "2", "--quiet", "--seed", "00"]].concat();
    let first = [&run[..], &["--tp", "2", "--threads", "1", "--json"]].concat();
    for (code, _, error) in [rank(&first, 0, 2, port), rank(&own, 1, 2, port)].map(end) {
        assert_eq!(code, Some(0), "{error}");
    }
}

/// torchrun itself listens at the port that it names; a port that somebody else has is said to be taken.
#[test]
fn ranks_meet_beside_an_agent_and_say_whose_the_port_is() {
    let (model, agent) = (model(), TcpListener::bind("127.0.0.1:0").unwrap());
    let (args, port) = ([&PROMPT[..], &[&model, "--tp", "2", "--quiet"]].concat(), agent.local_addr().unwrap().port());
    let ranks = [0, 1].map(|number| {
        let mut command = rank_of(&args, number, 2, port);
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True").spawn().unwrap()
    });
    let [first, second] = ranks.map(end);
    assert_eq!(first, (Some(0), quiet(&[&PROMPT[..], &[&model]].concat()), String::new()));
    assert_eq!(second.0, Some(0), "{}", second.2);
    let (status, _, error) = end(rank(&args, 0, 2, port));
    assert_eq!(status, Some(4), "{error}");
    assert!(error.contains("rank 0 cannot listen at 127.0.0.1:") && error.contains("another MASTER_PORT"), "{error}");
    let mut without = rank_of(&args, 0, 2, port);
    let (status, _, error) = end(without.env("RANK", "first").spawn().unwrap());
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("RANK") && error.contains("first") && error.contains("WORLD_SIZE"), "{error}");
    // A variable that is no text is not passed over.
    #[cfg(unix)]
    {
        let nonsense: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"2\xff".as_slice());
        let (status, _, error) = end(without.env("RANK", "0").env("WORLD_SIZE", nonsense).spawn().unwrap());
        assert_eq!(status, Some(2), "{error}");
        assert!(error.contains("WORLD_SIZE") && error.contains("a whole number"), "{error}");
    }
}

/// Ctrl-C at a terminal goes to all ranks: none of them says that another has left.
#[cfg(unix)]
#[test]
fn an_interrupt_of_all_ranks_is_one() {
    let (model, validation) = (model(), validation());
    let (long, at) = (["eval", "ppl", &model, "--text", &validation, "--threads", "1", "--tp", "2"], port());
    let [first, second] = [0, 1].map(|number| rank(&long, number, 2, at));
    std::thread::sleep(Duration::from_millis(1500));
    // The other one first.
    for rank in [&second, &first] {
        Command::new("kill").args(["-INT", &rank.id().to_string()]).status().unwrap();
        std::thread::sleep(Duration::from_millis(60));
    }
    for (status, _, error) in [first, second].map(end) {
        assert_eq!(status, Some(130), "{error}");
        assert_eq!(error.lines().filter(|line| line.starts_with("error: ")).count(), 1, "{error}");
    }
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
    let (status, _, error) = end(rank(&args, 0, 3, port()));
    assert_eq!(status, Some(2));
    assert!(error.contains("--tp says 2 ranks, WORLD_SIZE 3"), "{error}");
    // More than the model has parts for are not even started.
    let more_than_heads = [&PROMPT[..], &[&model, "--tp", "13"]].concat();
    let error = fails(2, &more_than_heads);
    assert!(error.contains("for each rank") && error.contains("13 ranks"), "{error}");
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
        assert!(error.contains("2 named, 1 rank"), "{error}");
    }
    // What the first rank cannot read, the others do not wait for.
    assert!(fails(3, &["run", &model, "-f", "no-such-file", "--tp", "2"]).contains("no-such-file"));
}
