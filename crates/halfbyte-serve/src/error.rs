//! What is told to clients where something is wrong, in OpenAI's form, and to who starts a server.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use halfbyte_llm::Error as LlmError;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Why a request is refused or has failed.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// Status of HTTP.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// For people.
    pub message: String,
    /// The field that is wrong.
    pub param: Option<String>,
    /// OpenAI's `code`.
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message)
    }

    /// A field of it is wrong.
    pub fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some(code), ..Self::invalid(message) }
    }

    /// A schema that is wrong or not served, in a field of a response's form or of a function; or one that a text could not keep to.
    pub fn schema(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let code = if param.starts_with("tools") { "invalid_function_parameters" } else { "invalid_json_schema" };
        let message = format!("Invalid schema in '{param}': {why}.");
        Self::field(param, code, message)
    }

    /// No model of this name.
    pub fn unknown_model(name: &str) -> Self {
        let message = format!("The model `{name}` does not exist or you do not have access to it.");
        Self { param: Some("model".to_owned()), ..Self::not_found(message, Some("model_not_found")) }
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>, code: Option<&'static str>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", code, message)
    }

    /// Another method.
    pub fn method(method: &str, path: &str) -> Self {
        let message = format!("Not allowed to {method} on {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", Some("method_not_supported"), message)
    }

    /// No API key, or a wrong one.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", Some("invalid_api_key"), message)
    }

    /// A request from elsewhere.
    pub fn forbidden(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", None, message)
    }

    /// More than a client may have at once.
    pub fn too_many(message: impl Into<String>) -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "requests", Some("rate_limit_exceeded"), message)
    }

    /// More than the server takes, or it ends.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", Some("server_overloaded"), message)
    }

    /// A body beyond the limit.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("The body is too large: at most {limit} bytes are taken.");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("request_too_large"), message)
    }

    /// Another type of body.
    pub fn media_type() -> Self {
        let message = "The header `Content-Type` must be `application/json`.";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", None, message)
    }

    /// It took too long.
    pub fn timeout(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", Some("timeout"), message)
    }

    /// What went wrong here is logged, and not told.
    pub fn internal(why: &dyn std::fmt::Display) -> Self {
        tracing::error!("{why}");
        let message = "The server had an error while processing your request.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", None, message)
    }

    /// What a model refuses, where `prompt` is the field that its text came in.
    pub fn of_model(error: LlmError, prompt: &str) -> Self {
        let too_long = |limit: usize, got: String| {
            let message = format!(
                "This model takes at most {limit} tokens here. However, your prompt has {got}. Please shorten it."
            );
            Self::field(prompt, "context_length_exceeded", message)
        };
        match error {
            LlmError::ContextFull { limit, got } => too_long(limit, got.to_string()),
            LlmError::TextTooLong { limit, least, .. } => too_long(limit, format!("at least {least}")),
            // Without the path, which is no business of a client.
            LlmError::Chat { what, .. } => {
                Self::field(prompt, "invalid_value", format!("The model's chat template: {what}"))
            }
            LlmError::EmptyPrompt => Self::field(prompt, "invalid_value", "The prompt must have at least one token."),
            LlmError::UnknownToken { id, vocab } => {
                let message = format!("Token {id} is unknown: ids are below {vocab}.");
                Self::field(prompt, "invalid_value", message)
            }
            LlmError::Tokenizer(what) => {
                Self::field(prompt, "invalid_value", format!("The text cannot be cut into tokens: {what}"))
            }
            LlmError::Invalid { op, expected, got } => Self::invalid(format!("{op}: expected {expected}, got {got}")),
            LlmError::Stopped => Self::unavailable("The model has ended."),
            other => Self::internal(&other),
        }
    }

    /// The object that clients know.
    pub fn json(&self) -> Value {
        let Self { kind, message, param, code, .. } = self;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.json())).into_response();
        let headers = response.headers_mut();
        if [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE].contains(&self.status) {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Why there is no server, or no more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It cannot listen there.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// Where.
        address: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file of keys or certificates cannot be used.
    #[error("{}: expected {expected}, got {got}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What it may hold.
        expected: &'static str,
        /// What it holds, or what the system said.
        got: String,
    },
    /// Settings that make no sense.
    #[error("{what}: expected {expected}, got {got}")]
    Settings {
        /// Which.
        what: &'static str,
        /// What it may be.
        expected: String,
        /// What it is.
        got: String,
    },
    /// The system gives no thread, or no more memory.
    #[error("cannot start {what}: {source}")]
    Start {
        /// What was to be started.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// A model cannot be begun, or could not go on.
    #[error("model {model}: {why}")]
    Model {
        /// Its name.
        model: String,
        /// Why.
        why: String,
    },
}

/// The crate's result.
pub type Result<T> = std::result::Result<T, Error>;
