//! OpenAI's interface: a file for each thing that clients ask for.

pub mod chat;
pub mod completions;
pub mod embeddings;
mod messages;
pub mod models;
mod sampling;
mod stream;

use crate::app::App;
use crate::clients::{Client, Pass};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::record::Record;
use crate::served::Served;
use axum::extract::Request;
use axum::http::{HeaderMap, header};
use halfbyte_llm::{Finish, LogProb, LogProbs};
use http_body_util::{BodyExt, Limited};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A request that was let in: who asks, and what is noted of it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Who.
    pub client: Client,
    /// What is noted.
    pub record: Arc<Record>,
}

/// What a request works with, from its body on.
#[derive(Debug)]
pub(crate) struct Job {
    pub app: Arc<App>,
    pub served: Arc<Served>,
    pub record: Arc<Record>,
    pub deadline: Instant,
    client: Client,
}

impl Job {
    /// Reads a body, and finds the model that it names. Errors: no JSON, one beyond the limit, one that does not come in time, no such
    /// model.
    pub async fn begin(app: Arc<App>, request: Request) -> Result<(Self, Fields), ApiError> {
        let (parts, body) = request.into_parts();
        let Some(Asked { client, record }) = parts.extensions.get::<Asked>().cloned() else {
            return Err(ApiError::internal(&"a request that was not let in"));
        };
        check_type(&parts.headers)?;
        let limits = app.settings.limits;
        let limit = limits.body_bytes;
        let announced = parts.headers.get(header::CONTENT_LENGTH).and_then(|n| n.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|bytes| bytes > limit as u64) {
            return Err(ApiError::too_large(limit));
        }
        let read = tokio::time::timeout(limits.read, Limited::new(body, limit).collect()).await;
        let read = read.map_err(|_| ApiError::timeout("The body did not come in time."))?;
        let body = read.map_err(|e| match e.is::<http_body_util::LengthLimitError>() {
            true => ApiError::too_large(limit),
            false => ApiError::invalid("The body broke off."),
        })?;
        let mut fields = Fields::parse(&body.to_bytes())?;
        let served = app.model(fields.text("model")?.as_deref())?;
        let deadline = record.begun + limits.request;
        Ok((Self { app, served, record, deadline, client }, fields))
    }

    /// Lets so many texts in. Errors: as [`crate::clients::Gate::enter`].
    pub fn enter(&self, texts: usize) -> Result<Pass, ApiError> {
        self.app.gate.enter(self.client, texts)
    }

    /// Ids of a text that came in a field; `begun`: behind what begins a text. Done where it may take its time.
    pub async fn encode(&self, text: String, begun: bool, field: &'static str) -> Result<Vec<u32>, ApiError> {
        let (served, limit) = (self.served.clone(), self.longest_prompt());
        blocking(move || {
            let ids = match begun {
                true => served.tokenizer.encode_prompt_within(&text, served.bos, limit),
                false => served.tokenizer.encode_within(&text, limit),
            };
            ids.map_err(|e| ApiError::of_model(e, field))
        })
        .await
    }

    /// Tokens that a prompt may have.
    pub fn longest_prompt(&self) -> usize {
        self.served.context().min(self.app.settings.limits.prompt_tokens)
    }

    /// Refuses a prompt that is too long.
    pub fn check_prompt(&self, tokens: usize, field: &'static str) -> Result<(), ApiError> {
        let limit = self.longest_prompt();
        if tokens > limit {
            return Err(ApiError::of_model(halfbyte_llm::Error::ContextFull { limit, got: tokens }, field));
        }
        Ok(())
    }
}

/// Runs what computes for long on a thread for such. Error: it panicked.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(panic) => Err(ApiError::internal(&panic)),
    }
}

/// A page from elsewhere may send what it likes as text or a form, not as JSON.
fn check_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let essence = given.split(';').next().unwrap_or_default().trim();
    match essence.eq_ignore_ascii_case("application/json") {
        true => Ok(()),
        false => Err(ApiError::media_type()),
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// OpenAI's reason for an end.
pub(crate) fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Length | Finish::Context => "length",
        Finish::End | Finish::Stop | Finish::Cancelled => "stop",
    }
}

/// What was read and written.
pub(crate) fn usage(prompt: usize, new: usize) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new})
}

/// A token, as conversations tell of it.
fn told(served: &Served, of: &LogProb) -> Value {
    let (token, bytes) = served.token(of.token);
    json!({"token": token, "logprob": of.logprob, "bytes": bytes})
}

/// The tokens of a piece, as conversations tell of them.
pub(crate) fn content_logprobs(served: &Served, of: &[LogProbs]) -> Vec<Value> {
    let each = |LogProbs { chosen, top }: &LogProbs| {
        let mut value = told(served, chosen);
        value["top_logprobs"] = top.iter().map(|one| told(served, one)).collect();
        value
    };
    of.iter().map(each).collect()
}
