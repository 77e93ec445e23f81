//! Which path does what, and what every request goes through: who it is from, what is noted of it.

use crate::api::{Asked, chat, completions, embeddings, models};
use crate::app::App;
use crate::clients::Client;
use crate::error::ApiError;
use crate::page;
use crate::random;
use crate::record::Record;
use crate::unread::Unread;
use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, Version, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The address that a connection comes from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer(pub SocketAddr);

/// All paths.
pub(crate) fn router(app: Arc<App>) -> Router {
    let open = Router::new()
        .route("/", get(page::html))
        .route("/page.css", get(page::css))
        .route("/page.js", get(page::js))
        .route("/health", get(health))
        .route("/ready", get(ready));
    let keyed = Router::new()
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/v1/chat/completions", post(chat::answer))
        .route("/v1/completions", post(completions::answer))
        .route("/v1/embeddings", post(embeddings::answer))
        .layer(from_fn_with_state(app.clone(), let_in));
    open.merge(keyed)
        .fallback(|uri: Uri| async move {
            let path: String = uri.path().chars().take(200).collect();
            ApiError::not_found(
                format!("Unknown request URL: {path}. Please check the URL for typos."),
                Some("unknown_url"),
            )
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let path: String = request.uri().path().chars().take(200).collect();
            ApiError::method(request.method().as_str(), &path)
        })
        .layer(from_fn_with_state(app.clone(), note))
        .with_state(app)
}

/// Notes a request, and gives it a name.
async fn note(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let given = request.headers().get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let plain = |id: &&str| {
        !id.is_empty() && id.len() <= 64 && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
    };
    let id = given.filter(plain).map_or_else(|| format!("req_{}", random::letters(24)), str::to_owned);
    let path = request.extensions().get::<MatchedPath>().map_or("", |path| known(path.as_str()));
    let record = Record::new(id, request.method().as_str(), path, app.metrics.clone());
    request.extensions_mut().insert(record.clone());
    let (request, unread) = Unread::of(request);
    let mut response = match check_host(&app, &request) {
        Ok(()) => next.run(request).await,
        Err(error) => {
            drop(request);
            error.into_response()
        }
    };
    // A body that did not come in time is not waited for again.
    if !response.status().is_success() && response.status() != StatusCode::REQUEST_TIMEOUT {
        let limits = &app.settings.limits;
        unread.discard(limits.body_bytes.saturating_mul(4), limits.read).await;
    }
    record.status(response.status().as_u16());
    let headers = response.headers_mut();
    if let Ok(id) = HeaderValue::from_str(&record.id) {
        headers.insert(REQUEST_ID, id);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A route's name for as long as the program lives; what is no route is one of all others.
fn known(path: &str) -> &'static str {
    const KNOWN: [&str; 11] = [
        "/",
        "/page.css",
        "/page.js",
        "/health",
        "/ready",
        "/metrics",
        "/v1/models",
        "/v1/models/{*name}",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
    ];
    KNOWN.into_iter().find(|known| *known == path).unwrap_or("")
}

/// Lets in who may come.
async fn let_in(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Result<Response, ApiError> {
    let address = request.extensions().get::<Peer>().map_or(IpAddr::from([0, 0, 0, 0]), |peer| peer.0.ip());
    let client: Client = app.keys.client(request.headers(), address)?;
    if app.is_ending() && request.method() == axum::http::Method::POST {
        return Err(ApiError::unavailable("The server is shutting down."));
    }
    let Some(record) = request.extensions().get::<Arc<Record>>().cloned() else {
        return Err(ApiError::internal(&"a request that was not noted"));
    };
    request.extensions_mut().insert(Asked { client, record });
    Ok(next.run(request).await)
}

/// Without keys, a name of this server's own choosing: a page from elsewhere could make its name mean this machine, and ask what it
/// likes.
fn check_host(app: &App, request: &Request) -> Result<(), ApiError> {
    let hosts: Vec<&HeaderValue> = request.headers().get_all(header::HOST).iter().collect();
    if hosts.len() > 1 || (hosts.is_empty() && request.version() == Version::HTTP_11) {
        return Err(ApiError::invalid("The header `Host` must be there once."));
    }
    if !app.keys.is_empty() {
        return Ok(());
    }
    // A target may name the host too, and counts before the header then.
    let of_target = request.uri().authority().map(|authority| authority.host());
    let of_header = hosts.iter().map(|host| host.to_str().unwrap_or_default());
    of_target.into_iter().chain(of_header).try_for_each(|host| check_name(app, host))
}

/// Refuses the name of another host, with or without a port.
fn check_name(app: &App, host: &str) -> Result<(), ApiError> {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    // Nobody can make an address mean another machine.
    let fine = name.parse::<IpAddr>().is_ok()
        || name.eq_ignore_ascii_case("localhost")
        || app.settings.allowed_hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name));
    match fine {
        true => Ok(()),
        false => Err(ApiError::forbidden(
            "This host is not one that the server answers for: see its allowed hosts, or give it API keys.",
        )),
    }
}

/// It lives.
async fn health() -> &'static str {
    "ok\n"
}

/// Whether it takes requests.
async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.is_ending() {
        return (StatusCode::SERVICE_UNAVAILABLE, "ending\n").into_response();
    }
    match app.failed() {
        Some(_) => (StatusCode::SERVICE_UNAVAILABLE, "a model has failed\n").into_response(),
        None => "ready\n".into_response(),
    }
}

/// What is counted.
async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.metrics.text().map_err(|e| ApiError::internal(&e))?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}
