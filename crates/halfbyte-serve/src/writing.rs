//! A text as a model writes it: from tokens to pieces of text that are certain.

use crate::error::ApiError;
use crate::grammar::{self, Compiled, Form};
use crate::record::Record;
use crate::served::Served;
use halfbyte_llm::schedule::{Chosen, Extras, Handle, Request};
use halfbyte_llm::stop::StopFilter;
use halfbyte_llm::tokenizer::DecodeStream;
use halfbyte_llm::{Finish, LogProbs, Sampling};
use std::future::poll_fn;
use std::task::Poll;
use std::time::Instant;

/// What is to be written.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Token ids that it follows.
    pub prompt: Vec<u32>,
    /// The field of the request that they came in.
    pub prompt_field: &'static str,
    /// New tokens at most.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Added to the logits of tokens.
    pub bias: Vec<(u32, f32)>,
    /// Tokens that end it.
    pub end_tokens: Vec<u32>,
    /// Texts that end it and are not shown.
    pub stop: Vec<String>,
    /// How likely tokens were, with so many others.
    pub logprobs: Option<usize>,
    /// What it must be.
    pub form: Option<Form>,
    /// Whether the names of special tokens are text: some models write calls of tools with such.
    pub special: bool,
}

/// A piece of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Text, perhaps none.
    pub text: String,
    /// Tokens that it was made of, as far as that is known.
    pub tokens: usize,
    /// How likely they were, if that was asked for.
    pub logprobs: Vec<LogProbs>,
    /// Why the text has ended, if it has.
    pub finish: Option<Finish>,
}

/// A text that is being written. Dropped, it is cancelled.
#[derive(Debug)]
pub struct Writing<'a> {
    served: &'a Served,
    record: &'a Record,
    handle: Handle,
    decoder: Option<DecodeStream<'a>>,
    filter: StopFilter<'a>,
    /// The field that said what it must be.
    form_field: Option<&'static str>,
    deadline: tokio::time::Instant,
    tokens: usize,
    first: Option<Instant>,
    last: Option<Instant>,
    ended: bool,
}

/// Hands a text over to a model, with the grammar of its form; `index` tells the choices of a request apart.
///
/// Errors: what the model refuses of a prompt or of sampling, a server that is to end.
pub fn submit(served: &Served, ask: &Ask, grammar: Option<&Compiled>, index: u64) -> Result<Handle, ApiError> {
    let constraint = grammar.map(Compiled::constraint);
    let sampling = Sampling { seed: ask.sampling.seed.wrapping_add(index), ..ask.sampling };
    let request = Request {
        prompt: ask.prompt.clone(),
        max_tokens: ask.max_tokens,
        sampling,
        end_tokens: ask.end_tokens.clone(),
    };
    let extras = Extras { bias: ask.bias.clone(), constraint, logprobs: ask.logprobs };
    served.queue()?.submit_with(request, extras).map_err(|e| ApiError::of_model(e, ask.prompt_field))
}

impl<'a> Writing<'a> {
    /// Of what was handed over.
    pub fn new(served: &'a Served, record: &'a Record, ask: &'a Ask, handle: Handle, deadline: Instant) -> Self {
        Self {
            served,
            record,
            handle,
            decoder: Some(served.tokenizer.stream_as(ask.special)),
            filter: StopFilter::new(&ask.stop),
            form_field: ask.form.as_ref().map(Form::field),
            deadline: deadline.into(),
            tokens: 0,
            first: None,
            last: None,
            ended: false,
        }
    }

    /// The next piece, which is waited for; None behind the last, which has a finish. Errors: the model computes no numbers, or has ended;
    /// the request takes too long.
    pub async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        if self.ended {
            return Ok(None);
        }
        let waited = tokio::time::timeout_at(self.deadline, poll_fn(|context| self.handle.poll(context))).await;
        let Ok(mut event) = waited else {
            self.ended = true;
            return Err(ApiError::timeout("The request took too long."));
        };
        let mut piece = Piece::default();
        loop {
            let passed = match event {
                None => {
                    self.rest(&mut piece)?;
                    return Ok(Some(piece));
                }
                Some(chosen) => self.text_of(chosen, &mut piece)?,
            };
            if passed {
                self.handle.cancel();
                self.ended = true;
                piece.finish = Some(Finish::Stop);
                return Ok(Some(piece));
            }
            // What is there already belongs to the same piece.
            match poll_fn(|context| Poll::Ready(self.handle.poll(context))).await {
                Poll::Ready(next) => event = next,
                Poll::Pending => return Ok(Some(piece)),
            }
        }
    }

    /// Adds a token's text; true: a stop string has come.
    fn text_of(&mut self, chosen: halfbyte_llm::Result<Chosen>, piece: &mut Piece) -> Result<bool, ApiError> {
        let Chosen { token, logprobs } = chosen.map_err(|e| self.failed(e))?;
        let now = Instant::now();
        self.last = Some(now);
        if self.first.is_none() {
            self.first = Some(now);
            self.record.first_token(&self.served.name);
        }
        self.tokens += 1;
        piece.tokens += 1;
        piece.logprobs.extend(logprobs);
        let Some(decoder) = &mut self.decoder else { return Ok(false) };
        let text = decoder.push(token).map_err(|e| self.failed(e))?;
        let passed = self.filter.push(&text);
        piece.text.push_str(&passed.text);
        Ok(passed.stopped)
    }

    /// Adds what was held back, at the end.
    fn rest(&mut self, piece: &mut Piece) -> Result<(), ApiError> {
        self.ended = true;
        let held = self.decoder.take().map(DecodeStream::finish).transpose().map_err(|e| self.failed(e))?;
        let passed = self.filter.push(&held.unwrap_or_default());
        piece.text.push_str(&passed.text);
        piece.finish = Some(if passed.stopped {
            Finish::Stop
        } else {
            piece.text.push_str(&std::mem::replace(&mut self.filter, StopFilter::new(&[])).finish());
            self.handle.finish().unwrap_or(Finish::Cancelled)
        });
        Ok(())
    }

    fn failed(&self, error: halfbyte_llm::Error) -> ApiError {
        match (error, self.form_field) {
            (halfbyte_llm::Error::Invalid { op: grammar::OP, got, .. }, Some(field)) => ApiError::schema(field, &got),
            (error, _) => ApiError::of_model(error, "prompt"),
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let spans = self.tokens.saturating_sub(1) as u32;
        let each_token = self.first.zip(self.last).filter(|_| spans > 0).map(|(first, last)| (last - first) / spans);
        self.record.text(&self.served.name, self.tokens, each_token, !self.ended);
    }
}
