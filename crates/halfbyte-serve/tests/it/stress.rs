//! A thousand requests, a hundred at once: good ones, some of which are cancelled, broken ones, and such that are read slowly.

use crate::support::{Running, alone, pages_are_back, send, served, try_send};
use bytes::Bytes;
use halfbyte_llm::schedule::Options;
use halfbyte_serve::{Limits, Settings, resident};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const REQUESTS: usize = 1000;
const AT_ONCE: usize = 100;
/// Different prompts: each comes many times.
const PROMPTS: usize = 25;

fn prompt(at: usize) -> (String, usize) {
    let words = ["def read(", "import ", "class A:\n    def __init__(self", "# The following ", "for line in "];
    let of = at % PROMPTS;
    (format!("{}{}", words[of % 5], "x = 1\n".repeat(of)), 4 + of % 9)
}

fn body(at: usize, stream: bool) -> String {
    let (prompt, max_tokens) = prompt(at);
    json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}).to_string()
}

/// The text of a stream.
fn joined(answer: &str) -> String {
    let data = answer.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    data.filter_map(|data| Some(serde_json::from_str::<Value>(data).ok()?["choices"][0]["text"].as_str()?.to_owned()))
        .collect()
}

async fn raw(server: std::net::SocketAddr, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + body).as_bytes()).await.unwrap();
    stream
}

/// One request of its kind; what differs from the text that its prompt has alone.
async fn one(server: std::net::SocketAddr, at: usize, want: &[String]) -> Option<String> {
    let want = &want[at % PROMPTS];
    match at % 10 {
        // Cancelled: whole answers that nobody waits for, and streams that break off.
        0 => {
            let long =
                json!({"prompt": prompt(at).0, "max_tokens": 500, "ignore_eos": true, "stream": at.is_multiple_of(20)})
                    .to_string();
            let mut stream = raw(server, &long).await;
            if at.is_multiple_of(20) {
                let _ = stream.read(&mut [0; 64]).await;
            } else {
                tokio::time::sleep(Duration::from_millis((at % 7) as u64 * 10)).await;
            }
            None
        }
        // Broken.
        1 => {
            let whole = body(at, false);
            let broken = match at % 40 {
                1 => whole[..whole.len() / 2].to_owned(),
                11 => whole.replace("max_tokens", "max_tokns"),
                21 => whole.replace("\"prompt\"", "\"promt\""),
                _ => format!("{whole}}}"),
            };
            let answer = send(server, "POST", "/v1/completions", &[], Bytes::from(broken)).await;
            (answer.error().0 != 400).then(|| format!("{at}: a broken body had {}", answer.status))
        }
        // Read a few bytes at a time.
        2 => {
            let mut stream = raw(server, &body(at, true)).await;
            let (mut answer, mut some) = (Vec::new(), [0; 200]);
            loop {
                match stream.read(&mut some).await.unwrap() {
                    0 => break,
                    n => answer.extend_from_slice(&some[..n]),
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            // Chunks of HTTP may cut lines: sizes stand on lines of their own.
            let text = joined(&String::from_utf8_lossy(&answer));
            (text != *want).then(|| format!("{at}, slowly: {text:?}, not {want:?}"))
        }
        kind => {
            let stream = kind.is_multiple_of(2);
            let answer = try_send(server, "POST", "/v1/completions", &[], Bytes::from(body(at, stream))).await;
            let answer = match answer {
                Ok(answer) => answer,
                Err(why) => return Some(format!("{at}: {why}")),
            };
            let text =
                if stream { joined(&answer.text()) } else { answer.good()["choices"][0]["text"].as_str()?.to_owned() };
            (text != *want).then(|| format!("{at}: {text:?}, not {want:?}"))
        }
    }
}

/// Requests from one to another, so many at once; those that differ.
async fn all(server: std::net::SocketAddr, range: std::ops::Range<usize>, want: Arc<Vec<String>>) -> Vec<String> {
    let next = Arc::new(AtomicUsize::new(range.start));
    let workers = (0..AT_ONCE).map(|_| {
        let (next, want, end) = (next.clone(), want.clone(), range.end);
        tokio::spawn(async move {
            let mut differing = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= end {
                    return differing;
                }
                differing.extend(one(server, at, &want).await);
            }
        })
    });
    let mut differing = Vec::new();
    for worker in workers.collect::<Vec<_>>() {
        differing.extend(worker.await.unwrap());
    }
    differing
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_requests_a_hundred_at_once() {
    let want = Arc::new(alone(&(0..PROMPTS).map(prompt).collect::<Vec<_>>()));
    // Pages for a part of them: texts wait, and some lose their pages for a while.
    let options = Options { positions: 128 * 60, texts: 48, unread: 8, batch_invariant: true, ..Options::default() };
    let server = Running::start(vec![served("m", None, options)], Settings::default()).await;
    let tenth = REQUESTS / 10;
    let warm = all(server.address, 0..tenth, want.clone()).await;
    server.idle().await;
    let before = resident();
    let differing = all(server.address, tenth..REQUESTS, want.clone()).await;
    server.idle().await;
    let differing: Vec<String> = warm.into_iter().chain(differing).collect();
    assert!(differing.is_empty(), "{} differ: {:?}", differing.len(), &differing[..differing.len().min(5)]);
    // Level: what a tenth of the requests took is what all take, but for an allocator's and a cache's slack.
    if let Some((before, after)) = before.zip(resident()) {
        assert!(after < before + (48 << 20), "from {} to {} MB", before >> 20, after >> 20);
    }
    let answered = server.metric("halfbyte_requests_total{path=\"/v1/completions\",status=\"200\"}").await;
    assert!(answered >= 0.8 * REQUESTS as f64, "{answered}");
    assert_eq!(server.metric("halfbyte_requests_open").await, 1.0);
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn told_to_end_in_the_middle() {
    let want = Arc::new(alone(&(0..PROMPTS).map(prompt).collect::<Vec<_>>()));
    let options = Options { positions: 128 * 60, texts: 48, unread: 8, batch_invariant: true, ..Options::default() };
    let limits = Limits { drain: Duration::from_secs(20), ..Limits::default() };
    let server = Running::start(vec![served("m", None, options)], Settings { limits, ..Settings::default() }).await;
    let address = server.address;
    let asks = (0..AT_ONCE).map(|at| {
        let want = want.clone();
        tokio::spawn(async move {
            // Of the kinds whose answers are whole.
            let answer = try_send(address, "POST", "/v1/completions", &[], Bytes::from(body(at, false))).await;
            match answer {
                Ok(answer) if answer.status == 200 => {
                    assert_eq!(answer.json()["choices"][0]["text"].as_str(), Some(want[at % PROMPTS].as_str()));
                    1
                }
                // Too late: refused, or not accepted any more.
                Ok(answer) => {
                    assert_eq!(answer.error().0, 503);
                    0
                }
                Err(_) => 0,
            }
        })
    });
    let asks: Vec<_> = asks.collect();
    tokio::time::sleep(Duration::from_millis(250)).await;
    pages_are_back(server.end().await.unwrap().unwrap());
    let mut answered = 0;
    for ask in asks {
        answered += ask.await.unwrap();
    }
    assert!(answered > 0, "nothing was answered");
}
