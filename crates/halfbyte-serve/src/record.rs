//! What is known of one request: counted and logged when all that belongs to it is done.

use crate::metrics::Metrics;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// One request.
#[derive(Debug)]
pub struct Record {
    /// What it goes by in logs and answers.
    pub id: String,
    pub(crate) begun: Instant,
    method: String,
    path: &'static str,
    metrics: Arc<Metrics>,
    told: Mutex<Told>,
}

#[derive(Clone, Debug, Default)]
struct Told {
    status: u16,
    model: Option<String>,
    prompt_tokens: usize,
    new_tokens: usize,
    first_token: Option<Duration>,
    broke_off: bool,
}

impl Record {
    /// A request has come; `path` is a route, not what a client wrote.
    pub fn new(id: String, method: &str, path: &'static str, metrics: Arc<Metrics>) -> Arc<Self> {
        metrics.opened();
        Arc::new(Self { id, begun: Instant::now(), method: method.to_owned(), path, metrics, told: Mutex::default() })
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn status(&self, status: u16) {
        self.told().status = status;
    }

    /// It is for a model, with so many tokens.
    pub(crate) fn prompt(&self, model: &str, tokens: usize) {
        let mut told = self.told();
        told.model = Some(model.to_owned());
        told.prompt_tokens += tokens;
        drop(told);
        self.metrics.tokens(model, tokens, 0);
    }

    /// A text has its first token.
    pub(crate) fn first_token(&self, model: &str) {
        let took = self.begun.elapsed();
        self.told().first_token.get_or_insert(took);
        self.metrics.first_token(model, took);
    }

    /// A text has ended, or nobody wants it any more.
    pub(crate) fn text(&self, model: &str, tokens: usize, each_token: Option<Duration>, broke_off: bool) {
        let mut told = self.told();
        told.new_tokens += tokens;
        told.broke_off |= broke_off;
        drop(told);
        self.metrics.tokens(model, 0, tokens);
        each_token.into_iter().for_each(|took| self.metrics.each_token(model, took));
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        let Told { status, model, prompt_tokens, new_tokens, first_token, broke_off } = self.told().clone();
        // No answer had begun when the client went, or when a stop broke it off: 499, as nginx has it.
        let status = if status == 0 { 499 } else { status };
        self.metrics.closed(self.path, status, took);
        let Self { id, method, path, .. } = self;
        let model = model.unwrap_or_default();
        let milliseconds = |took: Duration| took.as_micros() as f64 / 1000.0;
        let (took, first) = (milliseconds(took), first_token.map(milliseconds));
        tracing::info!(
            id,
            method,
            path,
            status,
            model,
            prompt_tokens,
            new_tokens,
            first_token_ms = first,
            took_ms = took,
            broke_off,
            "request"
        );
    }
}
