//! Bodies that nobody has read when the answer is an error: a client that is still sending when the connection closes sees no answer.

use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::http::header;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Frame, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

/// What is left of a request's body when whoever had it is done.
#[derive(Debug, Default, Clone)]
pub(crate) struct Unread(Arc<Mutex<Option<Body>>>);

/// A body that goes back where it is dropped before its end.
struct Kept {
    body: Option<Body>,
    back: Unread,
    /// Whether the client waits to be told to go on.
    waits: bool,
}

impl Unread {
    /// The request, and what will be left of it.
    pub fn of(request: Request) -> (Request, Self) {
        let back = Self::default();
        let (parts, body) = request.into_parts();
        let expects = parts.headers.get(header::EXPECT);
        let waits = expects.is_some_and(|what| what.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let kept = Kept { body: Some(body), back: back.clone(), waits };
        (Request::from_parts(parts, Body::new(kept)), back)
    }

    /// Reads on what is left, up to a length and for a while.
    pub async fn discard(self, bytes: usize, time: Duration) {
        let Some(mut body) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let read = async {
            let mut left = bytes;
            while let Some(Ok(frame)) = body.frame().await {
                match left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                    Some(rest) => left = rest,
                    None => break,
                }
            }
        };
        // What comes later is not waited for.
        let _ = tokio::time::timeout(time, read).await;
    }
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.waits = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let polled = Pin::new(body).poll_frame(context);
        if let Poll::Ready(None | Some(Err(_))) = polled {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(|| SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Who waits to be told to go on sends nothing, unless it is read.
        if let Some(body) = self.body.take().filter(|body| !self.waits && !body.is_end_stream()) {
            *self.back.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}
