//! Bodies and heads that are nearly right: whatever comes, there is an answer, nothing panics, no page is lost, memory is level.
//!
//! `HALFBYTE_NOISE_SECONDS=3600 cargo test -p halfbyte-serve --test it noise` goes on for an hour.

use crate::support::{Running, TOOLS, served};
use halfbyte::random::splitmix64;
use halfbyte_llm::schedule::Options;
use halfbyte_serve::{Limits, Settings, resident};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        splitmix64(&mut self.0) as usize % n.max(1)
    }
    fn of<'a, T>(&mut self, list: &'a [T]) -> &'a T {
        &list[self.below(list.len())]
    }
}

/// Bodies that are right, with all fields that are known.
fn bodies() -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}});
    vec![
        (
            "/v1/completions",
            json!({"model": "m", "prompt": ["a", "b"], "max_tokens": 2, "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1,
            "seed": 3, "stop": ["x", "\n"], "logprobs": 2, "logit_bias": {"5": 1.5}, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.1,
            "stream": true, "stream_options": {"include_usage": true}, "user": "u"}),
        ),
        ("/v1/completions", json!({"prompt": [1, 2, 3], "echo": true, "best_of": 1})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "é中"}]}],
            "max_completion_tokens": 3, "logprobs": true, "top_logprobs": 3, "response_format": {"type": "json_schema", "json_schema":
            {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}, "b": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}}}}}),
        ),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null, "tool_calls":
            [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\":1}"}}]}, {"role": "tool", "tool_call_id": "1", "content": "2"}],
            "tools": [tool], "tool_choice": "required", "max_tokens": 4, "parallel_tool_calls": false}),
        ),
        ("/v1/embeddings", json!({"model": "m", "input": ["a", "b"], "encoding_format": "base64"})),
    ]
}

/// Another value in the place of one, somewhere.
fn change(value: &mut Value, random: &mut Random) {
    let odd = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e308),
        json!(18446744073709551615u64),
        json!(""),
        json!("\u{0}\u{ffff}"),
        json!([]),
        json!({}),
        json!([[[[[]]]]]),
        json!("x".repeat(3000)),
        json!({"type": "object", "properties": {"": {}}}),
        json!("auto"),
        json!([null]),
        json!(0.1),
        json!({"$ref": "#/nowhere"}),
        json!({"type": "string", "pattern": "(a*)*b"}),
        json!({"minLength": 1000000, "type": "string"}),
        json!("[TOOL_CALLS]"),
    ];
    match value {
        Value::Array(list) if !list.is_empty() && random.below(4) > 0 => {
            let at = random.below(list.len());
            change(&mut list[at], random);
        }
        Value::Object(fields) if !fields.is_empty() && random.below(6) > 0 => {
            let names: Vec<String> = fields.keys().cloned().collect();
            let name = random.of(&names).clone();
            match random.below(8) {
                0 => drop(fields.remove(&name)),
                1 => drop(fields.insert(format!("{name}x"), json!(1))),
                _ => change(&mut fields[&name], random),
            }
        }
        other => *other = random.of(&odd).clone(),
    }
}

/// Bytes of a request: a body that is changed as JSON or byte by byte, under a head that may be odd too.
fn request(random: &mut Random) -> Vec<u8> {
    let bodies = bodies();
    let (path, body) = random.of(&bodies);
    let mut body = body.clone();
    for _ in 0..random.below(3) {
        change(&mut body, random);
    }
    let mut body = body.to_string().into_bytes();
    for _ in 0..[0, 0, 0, 1, 4][random.below(5)] {
        let at = random.below(body.len());
        match random.below(4) {
            0 => drop(body.splice(at..at, [random.below(256) as u8; 3])),
            1 => body.truncate(at),
            2 => body[at..].iter_mut().take(1).for_each(|byte| *byte ^= 1 << random.below(8)),
            _ => {
                let copied = body[at..].to_vec();
                body.extend(copied);
            }
        }
    }
    let odd_head = random.below(6) == 0;
    let method = if odd_head { *random.of(&["GET", "PUT", "POST", "DELETE", "PO\u{1}ST", ""]) } else { "POST" };
    let path = if odd_head {
        *random.of(&[*path, "/", "/%00", "/v1//completions", "*", "http://x/v1/completions", "/v1/models/%ff"])
    } else {
        path
    };
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n").into_bytes();
    let length = match random.below(20) {
        0 => body.len() + 5,
        1 => body.len() / 2,
        2 => usize::MAX,
        _ => body.len(),
    };
    let kind = if random.below(20) == 0 { "text/plain" } else { "application/json; charset=utf-8" };
    head.extend(format!("content-type: {kind}\r\ncontent-length: {length}\r\n").into_bytes());
    if odd_head {
        let odd: [&[u8]; 6] = [
            b"x: \xff\xfe\r\n",
            b"content-length: 3\r\n",
            b"transfer-encoding: chunked\r\n",
            b": no name\r\n",
            b"authorization: Bearer \r\n",
            b"host: [\r\n",
        ];
        head.extend_from_slice(odd[random.below(odd.len())]);
    }
    [head, b"\r\n".to_vec(), body].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_comes_has_an_answer() {
    let limits = Limits { new_tokens: 6, read: Duration::from_millis(400), texts: 64, ..Limits::default() };
    let server =
        Running::start(vec![served("m", Some(TOOLS), Options::default())], Settings { limits, ..Settings::default() })
            .await;
    let seconds = std::env::var("HALFBYTE_NOISE_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(8);
    let (begun, mut statuses) = (Instant::now(), std::collections::BTreeMap::<String, usize>::new());
    let (mut random, mut count, mut before) = (Random(begun.elapsed().as_nanos() as u64 ^ 0x5eed), 0usize, None);
    let seed = std::process::id() as u64;
    random.0 ^= seed;
    while begun.elapsed() < Duration::from_secs(seconds) || count < 200 {
        let batch: Vec<Vec<u8>> = (0..8).map(|_| request(&mut random)).collect();
        let asks = batch.into_iter().map(|bytes| {
            let address = server.address;
            async move {
                let mut stream = TcpStream::connect(address).await.unwrap();
                let shown = String::from_utf8_lossy(&bytes).chars().take(1500).collect::<String>();
                // A server that has its answer may close before all is sent.
                let _ = stream.write_all(&bytes).await;
                let mut answer = Vec::new();
                let read = tokio::time::timeout(Duration::from_secs(60), stream.read_to_end(&mut answer)).await;
                assert!(read.is_ok(), "no answer: {shown}");
                (String::from_utf8_lossy(&answer).chars().take(400).collect::<String>(), shown)
            }
        });
        for (answer, shown) in futures_util::future::join_all(asks).await {
            let status = answer.get(9..12).unwrap_or("none").to_owned();
            assert!(!["500", "502", "504"].contains(&status.as_str()), "seed {seed}: {answer}\n{shown}");
            *statuses.entry(status).or_default() += 1;
            count += 1;
        }
        if before.is_none() && count >= 100 {
            before = resident();
        }
    }
    println!("{count} requests: {statuses:?}");
    assert!(
        statuses.get("200").is_some_and(|&n| n * 20 > count) && statuses.get("400").is_some_and(|&n| n * 5 > count),
        "{statuses:?}"
    );
    server.idle().await;
    if let Some((before, after)) = before.zip(resident()) {
        assert!(after < before + (96 << 20), "from {} to {} MB", before >> 20, after >> 20);
    }
    server.finish().await;
}
