//! What `run` tells of a text.

use crate::start::Start;
use crate::text::{rate, several};
use halfbyte_llm::tokenizer::TokenBytes;
use halfbyte_llm::{Finish, LogProb, LogProbs, Piece, Tokenizer};
use serde::Serialize;
use std::sync::OnceLock;
use std::time::Duration;

/// A text and how it came.
#[derive(Serialize)]
pub struct Continuation {
    pub text: String,
    pub tokens: Vec<u32>,
    pub finish: &'static str,
    pub prompt_tokens: usize,
    /// Of these, the ones whose keys and values were there: what a conversation has in common with its last turn.
    pub kept_tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<Token>>,
    pub format: String,
    pub device: String,
    pub prefill_tokens_per_second: f64,
    /// None where no token was decoded after the prompt.
    pub decode_tokens_per_second: Option<f64>,
    /// Where the time went until the first token, in seconds.
    pub start: Start,
}

impl Continuation {
    /// A line for people.
    pub fn line(&self, decoded: usize) -> String {
        let kept = if self.kept_tokens > 0 { format!(" and {} kept", self.kept_tokens) } else { String::new() };
        let decode = |speed| format!("; decode {}, {} tok/s", several(decoded, "token"), rate(speed));
        format!(
            "prefill {}{kept}, {} tok/s{}; ended: {}",
            several(self.prompt_tokens - self.kept_tokens, "token"),
            rate(self.prefill_tokens_per_second),
            self.decode_tokens_per_second.map_or_else(String::new, decode),
            self.finish
        )
    }
}

/// A token as it came.
#[derive(Serialize)]
pub struct Token {
    /// None for text that was held back until the end.
    token: Option<u32>,
    text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top: Option<Vec<Likely>>,
}

#[derive(Serialize)]
struct Likely {
    token: u32,
    /// What it is in a text; of a special token its name.
    text: String,
    logprob: f32,
}

impl Token {
    pub fn of(piece: Piece<'_>, texts: &Texts<'_>) -> Self {
        let likely = |&LogProb { token, logprob }: &LogProb| Likely { token, text: texts.of(token), logprob };
        Self {
            token: piece.token,
            text: piece.text.to_owned(),
            logprob: piece.logprobs.map(|LogProbs { chosen, .. }| chosen.logprob),
            top: piece.logprobs.map(|LogProbs { top, .. }| top.iter().map(likely).collect()),
        }
    }
}

/// What each token is in a text.
#[derive(Debug)]
pub struct Texts<'a> {
    tokenizer: &'a Tokenizer,
    bytes: OnceLock<Vec<TokenBytes>>,
}

impl<'a> Texts<'a> {
    pub fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, bytes: OnceLock::new() }
    }

    fn of(&self, token: u32) -> String {
        // Where tokens are no texts of their own, they are told as they stand in the vocabulary.
        let bytes = self.bytes.get_or_init(|| self.tokenizer.bytes_of_tokens().unwrap_or_default());
        match bytes.get(token as usize) {
            Some(TokenBytes { bytes, .. }) => String::from_utf8_lossy(bytes).into_owned(),
            None => self.tokenizer.token(token).unwrap_or_default(),
        }
    }
}

/// Tokens a second.
pub fn speed(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

/// Why a text ended.
pub fn name(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::End => "end of text",
        Finish::Stop => "stop text",
        Finish::Context => "context full",
        Finish::Cancelled => "cancelled",
    }
}
