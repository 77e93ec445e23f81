//! A server to be asked, and who asks.

use bytes::Bytes;
use halfbyte::cpu::Cpu;
use halfbyte_llm::chat::{ChatTemplate, SpecialTokens};
use halfbyte_llm::schedule::Options;
use halfbyte_llm::{LoadOptions, Model, Request as TextRequest, Sampling, Session, Tokenizer};
use halfbyte_serve::{Ended, Served, Server, Settings};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::handshake;
use hyper::{HeaderMap, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Turns as lines, which the model that ships has never seen: what it answers is of no matter.
pub const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('I will not') }}{% endif %}\
    # {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}";

/// The same with tools and calls in tags.
pub const TOOLS: &str = "{{ bos_token }}{% for t in tools %}# {{ t | tojson }}\n{% endfor %}{% for m in messages %}# {{ m.role }}: \
    {{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}";

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m")
}

/// The model under a name, with a chat template if it is to have one.
pub fn served(name: &str, template: Option<&str>, options: Options) -> Served {
    try_served(name, template, options).unwrap()
}

/// The same, or why not.
pub fn try_served(name: &str, template: Option<&str>, options: Options) -> halfbyte_serve::Result<Served> {
    let model = Model::load(&folder(), &LoadOptions::default()).unwrap();
    let tokenizer = Tokenizer::from_folder(&folder()).unwrap();
    let token = tokenizer.token(0);
    let tokens = SpecialTokens { bos: token.clone(), eos: token, ..SpecialTokens::default() };
    let template = template.map(|source| ChatTemplate::parse(source.to_owned(), tokens, &folder()).unwrap());
    Served::start(name, model, tokenizer, template, Arc::new(Cpu::all_threads().unwrap()), options)
}

/// What the model writes alone, without a server.
pub fn alone(prompts: &[(String, usize)]) -> Vec<String> {
    let model = Model::load(&folder(), &LoadOptions::default()).unwrap();
    let (cpu, tokenizer) = (Cpu::all_threads().unwrap(), Tokenizer::from_folder(&folder()).unwrap());
    let mut session = Session::new(&model, &cpu, 1024).unwrap();
    let mut write = |(prompt, max_tokens): &(String, usize)| {
        session.clear().unwrap();
        let prompt = tokenizer.encode_prompt(prompt, model.config().bos).unwrap();
        let (sampling, end_tokens) = (Sampling::default(), &model.config().eos);
        let request =
            TextRequest { prompt: &prompt, max_tokens: *max_tokens, sampling, end_tokens, stop: &[], cancel: None };
        let mut text = String::new();
        let show = &mut |piece: &str| {
            text.push_str(piece);
            ControlFlow::Continue(())
        };
        session.generate(&tokenizer, &request, show).unwrap();
        text
    };
    prompts.iter().map(&mut write).collect()
}

/// A server that answers until it is told to end.
pub struct Running {
    pub address: SocketAddr,
    stop: oneshot::Sender<()>,
    task: JoinHandle<halfbyte_serve::Result<Vec<(String, Ended)>>>,
}

impl Running {
    pub async fn start(models: Vec<Served>, settings: Settings) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = Server::bind(Settings { address, ..settings }, models).await.unwrap();
        let address = server.address().unwrap();
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server.run(async { drop(stopped.await) }));
        Self { address, stop, task }
    }

    /// One model with a template, and what settings say.
    pub async fn with(settings: Settings) -> Self {
        Self::start(vec![served("m", Some(TEMPLATE), Options::default())], settings).await
    }

    /// Tells it to end.
    pub fn end(self) -> JoinHandle<halfbyte_serve::Result<Vec<(String, Ended)>>> {
        self.stop.send(()).unwrap();
        self.task
    }

    /// Ends it, and makes sure that no page is lost.
    pub async fn finish(self) {
        pages_are_back(self.end().await.unwrap().unwrap());
    }

    pub async fn get(&self, path: &str) -> Answer {
        send(self.address, "GET", path, &[], Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        send(self.address, "POST", path, &[], Bytes::from(body.to_string())).await
    }

    /// What a gauge or counter says.
    pub async fn metric(&self, name: &str) -> f64 {
        metric_in(&self.get("/metrics").await.text(), name)
    }

    /// Waits until nothing runs and nothing waits.
    pub async fn idle(&self) {
        for _ in 0..600 {
            // Of one answer: between two a text that waits may begin to run.
            let metrics = self.get("/metrics").await.text();
            let texts = |state: &str| metric_in(&metrics, &format!("halfbyte_texts{{model=\"m\",state=\"{state}\"}}"));
            if texts("running") + texts("waiting") == 0.0 {
                assert_eq!(metric_in(&metrics, "halfbyte_kv_pages{model=\"m\",state=\"used\"}"), 0.0);
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("texts do not end");
    }
}

/// What a gauge or counter says in an answer.
fn metric_in(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().unwrap()
}

pub fn pages_are_back(ended: Vec<(String, Ended)>) {
    for (name, Ended { counts, failure }) in ended {
        assert_eq!((counts.free_pages, counts.running, counts.waiting, failure), (counts.pages, 0, 0, None), "{name}");
        assert!(counts.pages > 0);
    }
}

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn text(&self) -> String {
        String::from_utf8(self.body.to_vec()).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The object of an answer that must be good.
    pub fn good(&self) -> Value {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        self.json()
    }

    /// Status, field and code of an error, which has OpenAI's form.
    pub fn error(&self) -> (u16, Option<String>, Option<String>) {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()) && error["type"].is_string(), "{error}");
        let field = |name: &str| error[name].as_str().map(str::to_owned);
        (self.status.as_u16(), field("param"), field("code"))
    }

    /// The data of all events; the last is `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, StatusCode::OK, "{}", self.text());
        assert_eq!(self.headers["content-type"], "text/event-stream");
        let text = self.text();
        let mut data: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|data| serde_json::from_str(data).unwrap()).collect()
    }
}

/// Asks, on a connection of its own.
pub async fn send(address: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: Bytes) -> Answer {
    try_send(address, method, path, headers, body).await.unwrap()
}

pub async fn try_send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Bytes,
) -> Result<Answer, String> {
    let stream = TcpStream::connect(address).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
    let connection = tokio::spawn(connection);
    let mut request = Request::builder().method(method).uri(path);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", address.to_string());
    }
    if method == "POST" && !headers.iter().any(|(name, _)| *name == "content-type") {
        request = request.header("content-type", "application/json");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = sender.send_request(request.body(Full::new(body)).unwrap()).await.map_err(|e| e.to_string())?;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.map_err(|e| e.to_string())?.to_bytes();
    connection.abort();
    Ok(Answer { status: parts.status, headers: parts.headers, body })
}
