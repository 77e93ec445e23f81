//! Who may come, with what, and what becomes of those that misbehave.

use crate::support::{Running, TEMPLATE, send, served};
use bytes::Bytes;
use halfbyte_llm::schedule::Options;
use halfbyte_serve::{Limits, Settings};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_are_told_what_is_wrong() {
    let server =
        Running::with(Settings { limits: Limits { body_bytes: 20_000, ..Limits::default() }, ..Settings::default() })
            .await;
    let with = |more: Value| {
        let mut body = json!({"model": "m", "prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    for (body, status, param, code) in [
        (json!([]), 400, None, None),
        (json!({"model": "m"}), 400, Some("prompt"), Some("missing_required_parameter")),
        (with(json!({"model": "other"})), 404, Some("model"), Some("model_not_found")),
        (with(json!({"model": 5})), 400, Some("model"), Some("invalid_type")),
        (with(json!({"temperature": 3})), 400, Some("temperature"), Some("decimal_above_max_value")),
        (with(json!({"seed": 1e20})), 400, Some("seed"), Some("integer_above_max_value")),
        (with(json!({"temperature": "1"})), 400, Some("temperature"), Some("invalid_type")),
        (with(json!({"max_tokens": -1})), 400, Some("max_tokens"), Some("integer_below_min_value")),
        (with(json!({"max_tokens": 1.5})), 400, Some("max_tokens"), Some("invalid_type")),
        (with(json!({"n": 0})), 400, Some("n"), Some("integer_below_min_value")),
        (with(json!({"n": 1000})), 400, Some("n"), Some("integer_above_max_value")),
        (with(json!({"stop": 5})), 400, Some("stop"), Some("invalid_type")),
        (with(json!({"stop": [""]})), 400, Some("stop"), Some("invalid_value")),
        (with(json!({"logit_bias": {"x": 1}})), 400, Some("logit_bias"), Some("invalid_value")),
        (with(json!({"logit_bias": {"+5": 1}})), 400, Some("logit_bias"), Some("invalid_value")),
        (with(json!({"logit_bias": {"05": 1}})), 400, Some("logit_bias"), Some("invalid_value")),
        (with(json!({"logit_bias": {"4096": 100}})), 400, Some("logit_bias"), Some("invalid_value")),
        (with(json!({"logit_bias": {"5000000000": 1}})), 400, Some("logit_bias"), Some("invalid_value")),
        (with(json!({"logit_bias": {"1": 101}})), 400, Some("logit_bias.1"), Some("invalid_value")),
        (with(json!({"best_of": 2})), 400, Some("best_of"), Some("invalid_value")),
        (with(json!({"suffix": "x"})), 400, Some("suffix"), Some("unsupported_parameter")),
        (with(json!({"stream_options": {}})), 400, Some("stream_options"), Some("invalid_value")),
        (with(json!({"stream": 1})), 400, Some("stream"), Some("invalid_type")),
        (with(json!({"prompt": []})), 400, Some("prompt"), Some("invalid_value")),
        (with(json!({"prompt": [[1], "x", 3]})), 400, Some("prompt"), Some("invalid_type")),
        (with(json!({"prompt": [-1]})), 400, Some("prompt"), Some("invalid_value")),
        (with(json!({"prompt": [[7], [-1]]})), 400, Some("prompt"), Some("invalid_value")),
        (with(json!({"prompt": [4096]})), 400, Some("prompt"), Some("invalid_value")),
        (with(json!({"prompt": vec![7; 1025]})), 400, Some("prompt"), Some("context_length_exceeded")),
        (with(json!({"prompt": "word ".repeat(2000)})), 400, Some("prompt"), Some("context_length_exceeded")),
        (with(json!({"prompt": "x".repeat(30_000)})), 413, None, Some("request_too_large")),
        (with(json!({"temprature": 1})), 400, Some("temprature"), Some("unknown_parameter")),
    ] {
        let (got, field, of_code) = server.post("/v1/completions", &body).await.error();
        let shown: String = body.to_string().chars().take(100).collect();
        assert_eq!((got, field.as_deref(), of_code.as_deref()), (status, param, code), "{shown}");
    }
    let unknown = server.post("/v1/completions", &with(json!({"logit_bias": {"5000": 100}}))).await.json();
    let message = "Invalid value for 'logit_bias': token 5000 is unknown: ids are below 4096.";
    assert_eq!(unknown["error"]["message"], message);
    server.post("/v1/completions", &with(json!({"logit_bias": {"4095": 1}, "max_tokens": 1}))).await.good();
    let conversation = json!({"messages": [{"role": "user", "content": "x"}], "logit_bias": {"4096": 1}});
    assert_eq!(server.post("/v1/chat/completions", &conversation).await.error().1.as_deref(), Some("logit_bias"));
    let nothing = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 0});
    assert_eq!(server.post("/v1/chat/completions", &nothing).await.error().1.as_deref(), Some("max_tokens"));
    let vector = server.post("/v1/embeddings", &json!({"input": [7, -1]})).await.json();
    assert_eq!(vector["error"]["message"], "Invalid value for 'input': expected token ids from 0 to 4095.");
    for (bytes, headers, status) in [
        (&b"{"[..], &[][..], 400),
        (b"", &[], 400),
        (b"\xff\xfe", &[], 400),
        (b"{\"prompt\": \"a\", \"prompt\": \"b\"}", &[], 400),
        (b"{}", &[("content-type", "text/plain")], 415),
        (b"{\"prompt\": \"x\"}", &[("host", "elsewhere.example")], 403),
    ] {
        assert_eq!(
            send(server.address, "POST", "/v1/completions", headers, Bytes::from_static(bytes)).await.error().0,
            status
        );
    }
    // Who asks before it sends a body that is too large is told so at once, and not to go on.
    let head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n";
    let (status, answer) = raw(&server, &format!("{head}content-length: 30000\r\nexpect: 100-continue\r\n\r\n")).await;
    assert!(status == 413 && answer.contains("request_too_large"), "{answer}");
    // HTTP/1.1 has one name of the host; one in the target is looked at like that of the header.
    for (head, status) in [
        ("GET /v1/models HTTP/1.1\r\n", 400),
        ("GET /health HTTP/1.1\r\n", 400),
        ("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", 400),
        ("GET /v1/models HTTP/1.0\r\n", 200),
        ("GET http://elsewhere.example/v1/models HTTP/1.1\r\nhost: localhost\r\n", 403),
        ("GET http://localhost:80/v1/models HTTP/1.1\r\nhost: elsewhere.example\r\n", 403),
        ("GET http://localhost:80/v1/models HTTP/1.1\r\nhost: localhost:80\r\n", 200),
        ("GET http://localhost:80@elsewhere.example/v1/models HTTP/1.1\r\nhost: localhost\r\n", 403),
        ("GET http://localhost@elsewhere.example/v1/models HTTP/1.1\r\nhost: localhost\r\n", 403),
    ] {
        let (got, answer) = raw(&server, &format!("{head}\r\n")).await;
        assert_eq!(got, status, "{head} {answer}");
    }
    for (method, path, status) in [
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v2/anything", 404),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/%ff", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/page.html", 404),
    ] {
        assert_eq!(send(server.address, method, path, &[], Bytes::new()).await.error().0, status, "{path}");
    }
    server.finish().await;
}

/// An error that is known before a long body has come is sent when that has come.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_still_sending_sees_the_error() {
    let keys = vec!["the-first-key-of-all".to_owned()];
    let server = Running::with(Settings { keys, ..Settings::default() }).await;
    let (right, json) = ("authorization: Bearer the-first-key-of-all\r\n", "content-type: application/json\r\n");
    for (path, headers, status) in [
        ("/v1/completions", json.to_owned(), 401),
        ("/v1/completions", format!("{right}content-type: text/plain\r\n"), 415),
        ("/v2/anything", format!("{right}{json}"), 404),
        ("/v1/models", format!("{right}{json}"), 405),
        ("/v1/completions", format!("{right}{json}"), 400),
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\n{headers}content-length: 3000000\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..30 {
            stream.write_all(&[b'a'; 100_000]).await.unwrap();
        }
        let mut answer = [0; 12];
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_exact(&mut answer)).await.unwrap();
        assert!(read.is_ok() && answer == *format!("HTTP/1.1 {status}").as_bytes(), "{path} {status}");
    }
    server.finish().await;
}

/// The status and text of what comes for a head, long before the time for a body is over.
async fn raw(server: &Running, head: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut answer)).await.unwrap().unwrap();
    let answer = String::from_utf8(answer[..read].to_vec()).unwrap();
    (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_let_in_and_limits_keep_out() {
    let keys = vec!["the-first-key-of-all".to_owned(), "the-second-key-of-all".to_owned()];
    let limits = Limits { texts: 6, texts_of_client: 4, ..Limits::default() };
    let server = Running::start(
        vec![served("m", Some(TEMPLATE), Options::default())],
        Settings { keys, limits, ..Settings::default() },
    )
    .await;
    let ask = async |key: &str, n: usize| {
        let body = json!({"prompt": "x", "max_tokens": 2, "n": n});
        send(
            server.address,
            "POST",
            "/v1/completions",
            &[("authorization", &format!("Bearer {key}"))],
            Bytes::from(body.to_string()),
        )
        .await
    };
    assert_eq!(ask("the-second-key-of-all", 4).await.status, 200);
    assert_eq!(ask("the-second-key-of-al", 1).await.error().0, 401);
    let never = ask("the-second-key-of-all", 5).await;
    assert!(never.error() == (400, None, None) && !never.headers.contains_key("retry-after"), "{never:?}");
    for (path, status) in [("/v1/models", 401), ("/metrics", 401), ("/health", 200), ("/ready", 200), ("/", 200)] {
        assert_eq!(server.get(path).await.status, status, "{path}");
    }
    let answer = server.get("/metrics").await;
    assert_eq!(answer.headers["www-authenticate"], "Bearer");
    // Three and three of two clients, and one of them more: too much for all.
    let long = |key: &'static str| {
        let body = json!({"prompt": "x", "max_tokens": 900, "n": 3, "ignore_eos": true}).to_string();
        let address = server.address;
        tokio::spawn(async move {
            send(address, "POST", "/v1/completions", &[("authorization", &format!("Bearer {key}"))], Bytes::from(body))
                .await
        })
    };
    let (first, second) = (long("the-first-key-of-all"), long("the-second-key-of-all"));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(ask("the-first-key-of-all", 2).await.error().2.as_deref(), Some("rate_limit_exceeded"));
    let answer = ask("the-first-key-of-all", 1).await;
    assert_eq!((answer.status.as_u16(), answer.headers["retry-after"].to_str().unwrap()), (503, "1"));
    first.abort();
    second.abort();
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_vanishes_or_reads_nothing_is_cancelled_and_pages_come_back() {
    let limits = Limits { write: Duration::from_millis(500), read: Duration::from_millis(700), ..Limits::default() };
    let server = Running::with(Settings { limits, ..Settings::default() }).await;
    let request = |body: &str| {
        format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let long = json!({"prompt": "def ", "max_tokens": 1000, "ignore_eos": true}).to_string();
    let streamed = json!({"prompt": "def ", "max_tokens": 1000, "ignore_eos": true, "stream": true}).to_string();
    // Who waits for an answer, or reads its beginning, and is gone then.
    for body in [&long, &streamed] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(request(body).as_bytes()).await.unwrap();
        if body == &streamed {
            assert!(stream.read(&mut [0; 100]).await.unwrap() > 0);
        } else {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        drop(stream);
        server.idle().await;
    }
    let chosen = server.metric("halfbyte_chosen_tokens_total{model=\"m\"}").await;
    assert!(chosen < 1900.0, "{chosen} tokens were written for nobody");
    // Who sends half a request loses its connection.
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(&request(&long).as_bytes()[..150]).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // Who takes nothing: its own text waits, and others are written.
    let many =
        json!({"prompt": vec!["def "; 64], "max_tokens": 1000, "ignore_eos": true, "stream": true, "logprobs": 20})
            .to_string();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    stream.write_all(request(&many).as_bytes()).await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let other = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2})).await;
    assert_eq!(other.status, 200);
    server.idle().await;
    let read = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut Vec::new())).await;
    assert!(read.is_ok(), "the connection is still open");
    server.finish().await;
}
