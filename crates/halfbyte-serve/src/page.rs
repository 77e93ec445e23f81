//! The page at `/`: three files within the program, which ask nothing of any other server.

use axum::http::header;
use axum::response::{IntoResponse, Response};

/// What browsers let the page do: no more than it does.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

pub(crate) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(crate) async fn css() -> Response {
    file("text/css; charset=utf-8", include_str!("page/page.css"))
}

pub(crate) async fn js() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/page.js"))
}
