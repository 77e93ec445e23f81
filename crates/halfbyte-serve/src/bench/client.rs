//! A client that streams: HTTP/1.1, connections kept for the next request.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::sync::{Mutex, PoisonError};
use tokio::net::TcpStream;

/// Bytes of an answer that is no stream, at most: what an error says.
const LONGEST_ERROR: usize = 1 << 16;

/// A server.
#[derive(Debug)]
pub struct Target {
    authority: String,
    base: String,
    key: Option<String>,
    /// What requests name, if anything.
    pub model: Option<String>,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
}

impl Target {
    /// Of a URL as `http://127.0.0.1:8080`, with an API key if there is one. Error, as a text: another URL.
    pub fn new(url: &str, key: Option<String>, model: Option<String>) -> Result<Self, String> {
        let rest = url.strip_prefix("http://").ok_or("expected a URL that begins with http:// (no TLS)")?;
        let (authority, base) = rest.split_once('/').map_or((rest, ""), |(authority, base)| (authority, base));
        if authority.is_empty() {
            return Err("expected a host in the URL".to_owned());
        }
        let authority = match authority.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => authority.to_owned(),
            _ => format!("{authority}:80"),
        };
        let base = base.trim_end_matches('/').trim_end_matches("v1").trim_end_matches('/');
        let base = if base.is_empty() { String::new() } else { format!("/{base}") };
        Ok(Self { authority, base, key, model, idle: Mutex::default() })
    }

    async fn connection(&self) -> Result<SendRequest<Full<Bytes>>, String> {
        loop {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some(mut idle) = idle else { break };
            if !idle.is_closed() && idle.ready().await.is_ok() {
                return Ok(idle);
            }
        }
        let stream = TcpStream::connect(&self.authority).await.map_err(|e| format!("cannot connect: {e}"))?;
        let _ = stream.set_nodelay(true);
        let (sender, connection) = handshake(TokioIo::new(stream)).await.map_err(|e| e.to_string())?;
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn send(
        &self,
        request: Request<Full<Bytes>>,
    ) -> Result<(hyper::Response<Incoming>, SendRequest<Full<Bytes>>), String> {
        let mut connection = self.connection().await?;
        let response = connection.send_request(request).await.map_err(|e| e.to_string())?;
        Ok((response, connection))
    }

    fn request(&self, method: &str, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
        let mut request =
            Request::builder().method(method).uri(format!("{}{path}", self.base)).header(HOST, &self.authority);
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        request.header(CONTENT_TYPE, "application/json").body(Full::new(body)).map_err(|e| e.to_string())
    }

    /// Posts a body and hands on each event's data, up to `[DONE]`. Errors, as a text: no connection, another status than 200, a stream
    /// that breaks off.
    pub async fn stream(&self, path: &str, body: &Value, mut take: impl FnMut(&Value)) -> Result<(), String> {
        let request = self.request("POST", path, Bytes::from(body.to_string()))?;
        let (response, connection) = self.send(request).await?;
        let status = response.status();
        let mut body = response.into_body();
        let mut rest: Vec<u8> = Vec::new();
        let mut done = false;
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| format!("the answer broke off: {e}"))?;
            let Ok(data) = frame.into_data() else { continue };
            rest.extend_from_slice(&data);
            if !status.is_success() {
                rest.truncate(LONGEST_ERROR);
                continue;
            }
            while let Some(at) = rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=at).collect();
                let Some(data) = line.strip_prefix(b"data:") else { continue };
                match data.trim_ascii() {
                    b"[DONE]" => done = true,
                    data => take(&serde_json::from_slice(data).map_err(|e| format!("an event is no JSON: {e}"))?),
                }
            }
        }
        if !status.is_success() {
            let told = serde_json::from_slice::<Value>(&rest).ok();
            let message = told.as_ref().and_then(|told| told.pointer("/error/message")).and_then(Value::as_str);
            return Err(format!("{status}: {}", message.unwrap_or("(no more is told)")));
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        if done { Ok(()) } else { Err("the answer ended without [DONE]".to_owned()) }
    }

    /// The names of its models. Errors, as a text: no connection, another answer than OpenAI's.
    pub async fn models(&self) -> Result<Vec<String>, String> {
        let (response, _) = self.send(self.request("GET", "/v1/models", Bytes::new())?).await?;
        let (status, body) =
            (response.status(), response.into_body().collect().await.map_err(|e| e.to_string())?.to_bytes());
        let models: Value = serde_json::from_slice(&body).map_err(|e| format!("{status}, no JSON: {e}"))?;
        let list =
            models.get("data").and_then(Value::as_array).ok_or_else(|| format!("{status}: no list of models"))?;
        Ok(list.iter().filter_map(|model| Some(model.get("id")?.as_str()?.to_owned())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        for (url, authority, base) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080", ""),
            ("http://[::1]:8080/v1/", "[::1]:8080", ""),
            ("http://host/some/v1", "host:80", "/some"),
        ] {
            let target = Target::new(url, None, None).unwrap();
            assert_eq!((target.authority.as_str(), target.base.as_str()), (authority, base), "{url}");
        }
        assert!(Target::new("https://a", None, None).is_err() && Target::new("http:///v1", None, None).is_err());
    }
}
