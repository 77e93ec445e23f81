//! Several texts of a request as they are written, as server-sent events.

use super::Job;
use crate::clients::Pass;
use crate::error::ApiError;
use crate::grammar::compile;
use crate::writing::{Ask, Piece, Writing, submit};
use async_stream::stream;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{SelectAll, Stream, StreamExt};
use halfbyte_llm::schedule::Handle;
use serde_json::Value;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Hands over all texts of a request: each of `asks` `n` times. The grammar of a form is made once for all of them, within the request's
/// time.
pub async fn submit_all(job: &Job, asks: &Arc<Vec<Ask>>, n: usize) -> Result<Vec<Handle>, ApiError> {
    let mut grammars = Vec::with_capacity(asks.len());
    for ask in asks.iter() {
        grammars.push(match &ask.form {
            Some(form) => Some(compile(&job.served, form, job.deadline).await?),
            None => None,
        });
    }
    let (served, asks) = (job.served.clone(), asks.clone());
    let all = move || {
        // No two texts of a request have the same seed, those of equal prompts neither.
        let each = asks.iter().zip(&grammars).flat_map(|both| std::iter::repeat_n(both, n)).zip(0..);
        each.map(|((ask, grammar), index)| submit(&served, ask, grammar.as_ref(), index)).collect::<Result<Vec<_>, _>>()
    };
    super::blocking(all).await
}

/// All pieces of all texts, each written to its end. Errors: the first that one has.
pub async fn whole(job: &Job, asks: &[Ask], n: usize, handles: Vec<Handle>) -> Result<Vec<Vec<Piece>>, ApiError> {
    let text = |(at, handle): (usize, Handle)| async move {
        let mut writing = Writing::new(&job.served, &job.record, &asks[at / n], handle, job.deadline);
        let mut pieces = Vec::new();
        while let Some(piece) = writing.next().await? {
            pieces.push(piece);
        }
        Ok(pieces)
    };
    futures_util::future::try_join_all(handles.into_iter().enumerate().map(text)).await
}

type Pieces = Pin<Box<dyn Stream<Item = (usize, Result<Piece, ApiError>)> + Send>>;

/// What turns the pieces of a request's texts into what clients are sent.
pub trait Chunks: Send + 'static {
    /// What comes before all texts.
    fn begin(&mut self) -> Vec<Value>;
    /// Of a piece of the text of this number.
    fn piece(&mut self, at: usize, piece: Piece) -> Vec<Value>;
    /// What comes behind all texts.
    fn end(&mut self) -> Vec<Value>;
}

/// The answer: events as pieces come, until `[DONE]`, or an error. What it holds is let go of when the client has all, or is gone.
pub fn respond(
    job: Job,
    asks: Arc<Vec<Ask>>,
    n: usize,
    handles: Vec<Handle>,
    pass: Pass,
    mut chunks: impl Chunks,
) -> Response {
    let job = Arc::new(job);
    let mut texts: SelectAll<Pieces> = SelectAll::new();
    for (at, handle) in handles.into_iter().enumerate() {
        let (job, asks) = (job.clone(), asks.clone());
        let pieces: Pieces = Box::pin(stream! {
            let mut writing = Writing::new(&job.served, &job.record, &asks[at / n], handle, job.deadline);
            loop {
                match writing.next().await {
                    Ok(Some(piece)) => yield (at, Ok(piece)),
                    Ok(None) => break,
                    Err(error) => {
                        yield (at, Err(error));
                        break;
                    }
                }
            }
        });
        texts.push(pieces);
    }
    let events = stream! {
        let _inside = (pass, job);
        for value in chunks.begin() {
            yield event(&value);
        }
        while let Some((at, piece)) = texts.next().await {
            match piece {
                Ok(piece) => {
                    for value in chunks.piece(at, piece) {
                        yield event(&value);
                    }
                }
                Err(error) => {
                    yield event(&error.json());
                    return;
                }
            }
        }
        for value in chunks.end() {
            yield event(&value);
        }
        yield Ok(Event::default().data("[DONE]"));
    };
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}

fn event(value: &Value) -> Result<Event, Infallible> {
    Ok(Event::default().data(value.to_string()))
}
