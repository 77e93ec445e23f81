//! `serve` and `bench serve`: a server that is started, asked, measured and ended by a signal.

use crate::support::{fails, halfbyte, json, model, text};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, ExitStatus, Stdio};
use tempfile::TempDir;

/// A server, and where it listens.
struct Running {
    child: Child,
    address: String,
}

impl Running {
    fn start(args: &[&str]) -> Self {
        Self::start_with(args, Stdio::piped())
    }

    /// The same, with this as standard error.
    fn start_with(args: &[&str], stderr: Stdio) -> Self {
        let args = [&["serve", "--device", "cpu", "--port", "0", "--json", "--log", "json"], args].concat();
        let mut child = halfbyte(&args).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let Ok(told) = serde_json::from_str::<Value>(&line) else {
            let _ = child.kill();
            panic!("{line:?} {}", text(&child.wait_with_output().unwrap().stderr));
        };
        let address = told["address"].as_str().unwrap().trim_start_matches("http://").to_owned();
        Self { child, address }
    }

    /// The whole answer to a request.
    fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    /// Ends it by a signal; what it logged.
    #[cfg(unix)]
    fn terminate(self) -> (ExitStatus, Vec<Value>) {
        Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        let out = self.child.wait_with_output().unwrap();
        let log = text(&out.stderr)
            .lines()
            .filter(|line| line.starts_with('{'))
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        (out.status, log)
    }
}

fn post(path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

/// Words that never come again are not kept: of texts that are too long, which are cut into tokens and nothing else.
#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_words_of_clients() {
    let server = Running::start(&["-q", "--positions", "1024", &model()]);
    let resident = || {
        let status = fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() >> 10
    };
    let mut state = 1u64;
    let mut word = || -> String {
        let mut letter = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            char::from(b'a' + (state >> 33) as u8 % 26)
        };
        (0..230).map(|_| letter()).collect()
    };
    let mut ask = |requests: usize| {
        for _ in 0..requests {
            let prompt = (0..40).map(|_| word()).collect::<Vec<_>>().join(" ");
            let answer = server.ask(&post("/v1/completions", &format!(r#"{{"prompt": "{prompt}", "max_tokens": 1}}"#)));
            assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("context"), "{answer}");
        }
    };
    ask(50);
    let before = resident();
    ask(300);
    let after = resident();
    // 12,000 words, of which 10,000 would take some 5 kB each; the rest is an allocator's slack.
    assert!(after < before + 24, "from {before} to {after} MB");
    server.terminate();
}

#[cfg(unix)]
#[test]
fn a_server_answers_is_measured_and_ends_by_a_signal() {
    let here = TempDir::new().unwrap();
    let config = here.path().join("serve.toml");
    let path = model();
    fs::write(&config, format!("max-new-tokens = 50\n[[model]]\nname = \"a\"\npath = {path:?}\n[[model]]\nname = \"b\"\npath = {path:?}\nquantize = \"w4a8-g128\"\n")).unwrap();
    let server = Running::start(&["--config", config.to_str().unwrap(), "--memory", "300MB"]);
    let answer = server
        .ask(&post("/v1/completions", r#"{"model": "a", "prompt": "def ", "max_tokens": 900, "ignore_eos": true}"#));
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"completion_tokens\":50"), "{answer}");
    assert!(server.ask(&post("/v1/completions", r#"{"prompt": "def "}"#)).starts_with("HTTP/1.1 400"));

    let url = format!("http://{}", server.address);
    let plot = here.path().join("plot.svg").display().to_string();
    for arrivals in [["--at-once", "4"], ["--rate", "40"]] {
        let args = [
            &[
                "bench",
                "serve",
                "--url",
                &url,
                "--model",
                "b",
                "--requests",
                "12",
                "--prompt",
                "5..20",
                "--generate",
                "8",
                "--plot",
                &plot,
                "--overwrite",
            ],
            &arrivals[..],
        ];
        let told = json(&args.concat());
        assert_eq!(
            (told["answered"].as_u64(), told["failed"].as_u64(), told["new_tokens"].as_u64()),
            (Some(12), Some(0), Some(96)),
            "{told}"
        );
        assert!(told["first_token"]["p99"].as_f64().unwrap() >= told["first_token"]["p50"].as_f64().unwrap());
        assert!(
            told["each_token"]["p50"].as_f64().unwrap() > 0.0 && told["new_tokens_per_second"].as_f64().unwrap() > 1.0
        );
        assert!(fs::read_to_string(&plot).unwrap().contains("12 answers, 0 failed"));
    }
    let prompts = here.path().join("prompts.jsonl");
    fs::write(&prompts, "\u{feff}{\"prompt\": \"def \", \"max_tokens\": 5}\n{\"prompt\": [7, 8]}\n").unwrap();
    let of_file =
        ["bench", "serve", "--url", &url, "--model", "b", "--at-once", "1", "--prompts", prompts.to_str().unwrap()];
    for (more, new_tokens) in [(&["--generate", "3"][..], 6), (&["--requests", "1"], 5)] {
        assert_eq!(json(&[&of_file[..], more].concat())["new_tokens"], new_tokens);
    }
    let refused =
        json_of_failure(&["bench", "serve", "--url", &url, "--model", "c", "--requests", "2", "--at-once", "1"]);
    assert!(refused.contains("2 failed: 404"), "{refused}");
    fs::write(&prompts, "{\"prompt\": \"def \"}\n{\"prompt\": [99999]}\n").unwrap();
    let half = json_of_failure(&[&of_file[..], &["--generate", "2"]].concat());
    assert!(half.contains("1 answered, 1 failed"), "{half}");

    // In the middle of an answer.
    let address = server.address.clone();
    let running = std::thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream
            .write_all(
                post(
                    "/v1/completions",
                    r#"{"model": "a", "prompt": "def ", "max_tokens": 50, "ignore_eos": true, "n": 8}"#,
                )
                .as_bytes(),
            )
            .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    });
    std::thread::sleep(std::time::Duration::from_millis(200));
    let (status, log) = server.terminate();
    assert_eq!(status.code(), Some(0));
    assert!(running.join().unwrap().contains("\"completion_tokens\":400"));
    let ended: Vec<&Value> = log.iter().filter(|line| line["message"] == "ended").collect();
    assert!(ended.len() == 2 && ended.iter().all(|line| line["pages"] == line["free_pages"]), "{ended:?}");
    let request = log.iter().find(|line| line["message"] == "request" && line["new_tokens"] == 400).unwrap();
    assert!(
        request["status"] == 200 && request["model"] == "a" && request["first_token_ms"].as_f64().unwrap() > 0.0,
        "{request}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_server_answers_where_nobody_takes_its_log() {
    let full = || Stdio::from(fs::File::options().write(true).open("/dev/full").unwrap());
    for (stderr, closed) in [(full(), false), (Stdio::piped(), true)] {
        let mut server = Running::start_with(&[&model(), "--positions", "1024"], stderr);
        if closed {
            drop(server.child.stderr.take());
        }
        for _ in 0..2 {
            let answer = server.ask(&post("/v1/completions", r#"{"prompt": "def ", "max_tokens": 2}"#));
            assert!(answer.starts_with("HTTP/1.1 200"), "{closed} {answer}");
        }
        assert_eq!(server.terminate().0.code(), Some(0), "{closed}");
    }
}

fn json_of_failure(args: &[&str]) -> String {
    let out = halfbyte(args).output().unwrap();
    assert_eq!(out.status.code(), Some(1), "{}", text(&out.stderr));
    text(&out.stdout)
}

#[test]
fn what_cannot_be_served_is_refused() {
    let m = model();
    let here = TempDir::new().unwrap();
    let file = |name: &str, content: &str| {
        let path = here.path().join(name);
        fs::write(&path, content).unwrap();
        path.display().to_string()
    };
    fails(2, &["serve"]);
    fails(2, &["serve", &m, "--tls-cert", "x.pem"]);
    fails(2, &["serve", &m, "--port", "0", "--memory", "1MB"]);
    fails(2, &["serve", &m, "--stall-seconds", "-1"]);
    fails(2, &["serve", &m, "--max-requests", "0"]);
    fails(2, &["serve", &m, "--tp", "2"]);
    fails(2, &["serve", &m, "--api-key-file", &file("short", "abc")]);
    fails(3, &["serve", &m, "--api-key-file", &file("empty", "\n")]);
    for keys in ["", " ", ",", " , "] {
        let out = halfbyte(&["serve", &m]).env("HALFBYTE_API_KEYS", keys).output().unwrap();
        assert_eq!(out.status.code(), Some(3), "{keys:?}");
        assert!(text(&out.stderr).contains("HALFBYTE_API_KEYS is set and holds no key"), "{keys:?}");
    }
    fails(3, &["serve", &m, "--config", &file("bad.toml", "porte = 1")]);
    fails(3, &["serve", "/nowhere", "--port", "0"]);
    // A port that is taken is told before models are looked at.
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    assert!(fails(4, &["serve", "/nowhere", "--port", &port]).contains("--port"));
    fails(2, &["bench", "serve", "--url", "https://x", "--at-once", "1"]);
    fails(2, &["bench", "serve"]);
    for rate in ["1e-300", "1e-20", "0", "inf"] {
        let error = fails(2, &["bench", "serve", "--rate", rate, "--requests", "2"]);
        assert!(error.contains("--rate") && error.contains("one in a day"), "{error}");
    }
    let plot = here.path().join("missing/plot.svg").display().to_string();
    assert!(fails(4, &["bench", "serve", "--at-once", "1", "--plot", &plot]).contains("there is no folder"));
    assert!(!here.path().join("missing").exists());
    fails(4, &["bench", "serve", "--url", "http://127.0.0.1:1", "--at-once", "1"]);
    fails(3, &["bench", "serve", "--at-once", "1", "--prompts", &file("prompts", "{\"prompt\": 5}")]);
}
