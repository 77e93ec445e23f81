//! What keeps a server going, and how it ends.

use crate::support::{Running, TEMPLATE, pages_are_back, send, served, try_send, try_served};
use bytes::Bytes;
use halfbyte_llm::schedule::Options;
use halfbyte_serve::{Limits, Server, Settings};
use serde_json::json;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread")]
async fn health_models_metrics_and_the_page() {
    let server = Running::with(Settings::default()).await;
    assert_eq!(
        (server.get("/health").await.text(), server.get("/ready").await.text()),
        ("ok\n".to_owned(), "ready\n".to_owned())
    );
    let models = server.get("/v1/models").await.good();
    assert_eq!((models["data"][0]["id"].as_str(), models["data"][0]["object"].as_str()), (Some("m"), Some("model")));
    assert_eq!(server.get("/v1/models/m").await.good(), models["data"][0]);
    server.post("/v1/completions", &json!({"prompt": "def ", "max_tokens": 5, "ignore_eos": true})).await.good();
    server.idle().await;
    assert_eq!(server.metric("halfbyte_new_tokens_total{model=\"m\"}").await, 5.0);
    assert_eq!(server.metric("halfbyte_requests_total{path=\"/v1/completions\",status=\"200\"}").await, 1.0);
    assert_eq!(server.metric("halfbyte_time_to_first_token_seconds_count{model=\"m\"}").await, 1.0);
    assert!(server.metric("halfbyte_resident_memory_bytes").await > 1e6);
    assert!(server.get("/metrics").await.text().ends_with("# EOF\n"));

    for (path, kind) in [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")] {
        let answer = server.get(path).await;
        assert!(answer.headers["content-type"].to_str().unwrap().starts_with(kind) && answer.body.len() > 1000);
        assert!(answer.headers["content-security-policy"].to_str().unwrap().contains("default-src 'none'"));
        // Nothing is asked of any other server.
        assert!(
            !answer.text().contains("https://") && !answer.text().replace("http://www.w3.org", "").contains("http://"),
            "{path}"
        );
    }
    let named = send(server.address, "GET", "/health", &[("x-request-id", "mine-1")], Bytes::new()).await;
    assert_eq!(named.headers["x-request-id"], "mine-1");
    let odd = send(server.address, "GET", "/health", &[("x-request-id", "a b;c")], Bytes::new()).await;
    assert!(odd.headers["x-request-id"].to_str().unwrap().starts_with("req_"));
    server.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_ends_and_nothing_new_begins() {
    let server = Running::with(Settings::default()).await;
    let address = server.address;
    let body = json!({"prompt": "def ", "max_tokens": 400, "ignore_eos": true});
    let running =
        tokio::spawn(async move { send(address, "POST", "/v1/completions", &[], Bytes::from(body.to_string())).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    let ending = server.end();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(try_send(address, "GET", "/health", &[], Bytes::new()).await.is_err());
    assert_eq!(running.await.unwrap().good()["usage"]["completion_tokens"], 400);
    pages_are_back(ending.await.unwrap().unwrap());

    // What does not end in time is broken off.
    let limits = Limits { drain: Duration::from_millis(100), ..Limits::default() };
    let server = Running::with(Settings { limits, ..Settings::default() }).await;
    let address = server.address;
    let body = json!({"prompt": vec!["def "; 32], "max_tokens": 1000, "ignore_eos": true});
    let running =
        tokio::spawn(
            async move { try_send(address, "POST", "/v1/completions", &[], Bytes::from(body.to_string())).await },
        );
    tokio::time::sleep(Duration::from_millis(300)).await;
    pages_are_back(server.end().await.unwrap().unwrap());
    assert!(running.await.unwrap().is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_make_no_sense_are_refused() {
    let model = |name: &str| served(name, Some(TEMPLATE), Options { positions: 256, ..Options::default() });
    let refused = async |settings: Settings, models| Server::bind(settings, models).await.unwrap_err().to_string();
    let free = || Settings { address: ([127, 0, 0, 1], 0).into(), ..Settings::default() };
    assert!(refused(free(), vec![]).await.contains("at least one"));
    assert!(refused(free(), vec![model("a"), model("a")]).await.contains("two of the name a"));
    assert!(refused(Settings { keys: vec!["short".to_owned()], ..free() }, vec![model("a")]).await.contains("key 1"));
    let usual = Limits::default();
    for (limits, name) in [
        (Limits { body_bytes: 0, ..usual }, "body bytes"),
        (Limits { prompt_tokens: 0, ..usual }, "prompt tokens"),
        (Limits { texts: 0, ..usual }, "requests"),
        (Limits { read: Duration::ZERO, ..usual }, "stall seconds"),
        (Limits { write: Duration::ZERO, ..usual }, "stall seconds"),
        (Limits { request: Duration::ZERO, ..usual }, "request seconds"),
    ] {
        let text = refused(Settings { limits, ..free() }, vec![model("a")]).await;
        assert_eq!(text, format!("{name}: expected more than zero, got 0"));
    }
    for name in ["", "two\nlines", &"m".repeat(201)] {
        let text = try_served(name, None, Options::default()).unwrap_err().to_string();
        assert!(text.contains("expected 1 to 200 bytes, without control characters, got \""), "{text}");
    }
    let nowhere = Some(("/nowhere/cert.pem".into(), "/nowhere/key.pem".into()));
    assert!(refused(Settings { tls: nowhere, ..free() }, vec![model("a")]).await.contains("certificates"));
    let taken = Running::with(Settings::default()).await;
    assert!(
        refused(Settings { address: taken.address, ..Settings::default() }, vec![model("a")])
            .await
            .contains("cannot listen")
    );
    taken.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_where_certificates_are_given() {
    use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
    use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};
    let data = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata");
    let tls = Some((data.join("localhost.pem"), data.join("localhost.key")));
    let server = Running::with(Settings { tls, ..Settings::default() }).await;
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(data.join("ca.pem")).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(std::sync::Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let stream = tokio::net::TcpStream::connect(server.address).await.unwrap();
    let mut stream = connector.connect(ServerName::try_from("localhost").unwrap(), stream).await.unwrap();
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok\n"), "{answer}");
    // Without TLS there is no answer.
    assert!(try_send(server.address, "GET", "/health", &[], Bytes::new()).await.is_err());
    pages_are_back(server.end().await.unwrap().unwrap());
    // A key of another certificate, and no key at all.
    for (chain, key) in [("ca.pem", "localhost.key"), ("localhost.pem", "README.md"), ("README.md", "localhost.key")] {
        let tls = Some((data.join(chain), data.join(key)));
        let model = served("m", None, Options { positions: 256, ..Options::default() });
        let settings = Settings { tls, address: ([127, 0, 0, 1], 0).into(), ..Settings::default() };
        assert!(Server::bind(settings, vec![model]).await.is_err(), "{chain} {key}");
    }
}
