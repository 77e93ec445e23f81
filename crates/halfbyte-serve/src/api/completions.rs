//! `/v1/completions`: texts that follow prompts.

use super::sampling::{Common, MOST_CHOICES};
use super::stream::{Chunks, respond, submit_all, whole};
use super::{Job, finish_reason, now, usage};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, token_ids, wrong_type, wrong_value};
use crate::random;
use crate::served::Served;
use crate::writing::{Ask, Piece};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use halfbyte_llm::LogProbs;
use halfbyte_llm::tokenizer::DecodeState;
use serde_json::{Value, json};
use std::sync::Arc;

/// New tokens where nobody says how many, as OpenAI has it.
const NEW_TOKENS: usize = 16;

/// A prompt, as a text or as tokens.
#[derive(Clone, Debug, PartialEq)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// Writes what follows.
pub async fn answer(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (job, mut fields) = Job::begin(app, request).await?;
    let prompts = prompts(&mut fields, job.served.vocab())?;
    let common = Common::take(&mut fields, &["max_tokens", "max_completion_tokens"], 0, job.served.vocab())?;
    let logprobs = fields.count("logprobs", 0..=20)?;
    let echo = fields.boolean("echo")?.unwrap_or(false);
    let best_of = fields.count("best_of", 1..=MOST_CHOICES)?;
    fields.refuse("suffix", &[json!("")])?;
    fields.finish()?;
    if best_of.is_some_and(|best_of| best_of != common.n) {
        return Err(wrong_value("best_of", "the same as 'n': all texts that are written are returned"));
    }
    if echo && logprobs.is_some() {
        return Err(wrong_value("echo", "false where 'logprobs' are asked for: those of prompts are not computed"));
    }
    let pass = job.enter(prompts.len() * common.n)?;
    let mut asks = Vec::with_capacity(prompts.len());
    let mut echoes = Vec::new();
    for prompt in prompts {
        let ids = match prompt.clone() {
            Prompt::Text(text) => job.encode(text, true, "prompt").await?,
            Prompt::Tokens(ids) => ids,
        };
        job.check_prompt(ids.len(), "prompt")?;
        if echo {
            echoes.push(match prompt {
                Prompt::Text(text) => text,
                Prompt::Tokens(ids) => {
                    job.served.tokenizer.decode(&ids).map_err(|e| ApiError::of_model(e, "prompt"))?
                }
            });
        }
        asks.push(Ask {
            prompt: ids,
            prompt_field: "prompt",
            max_tokens: common.max_tokens.unwrap_or(NEW_TOKENS).min(job.app.settings.limits.new_tokens),
            sampling: common.sampling,
            bias: common.bias.clone(),
            end_tokens: if common.ignore_eos { Vec::new() } else { job.served.end_tokens.clone() },
            stop: common.stop.clone(),
            logprobs,
            form: None,
            special: false,
        });
    }
    let (asks, n) = (Arc::new(asks), common.n);
    let handles = submit_all(&job, &asks, n).await?;
    let prompt_tokens = asks.iter().map(|ask| ask.prompt.len()).sum();
    job.record.prompt(&job.served.name, prompt_tokens);
    let texts = Texts {
        head: json!({
            "id": format!("cmpl-{}", random::letters(24)), "object": "text_completion", "created": now(), "model": job.served.name,
        }),
        served: job.served.clone(),
        echoes,
        n,
        logprobs: logprobs.is_some(),
        include_usage: common.include_usage,
        prompt_tokens,
        new_tokens: 0,
        told: vec![Told::default(); handles.len()],
    };
    if common.stream {
        return Ok(respond(job, asks, n, handles, pass, texts));
    }
    let written = whole(&job, &asks, n, handles).await?;
    drop(pass);
    Ok(Json(texts.whole(written)).into_response())
}

fn prompts(fields: &mut Fields, vocab: usize) -> Result<Vec<Prompt>, ApiError> {
    let ids = |list: &[Value]| token_ids("prompt", list, vocab);
    let wrong = |value: &Value| {
        wrong_type("prompt", "a string, an array of strings, of token ids, or of arrays of token ids", value)
    };
    let prompts = match fields.required("prompt")? {
        Value::String(text) => vec![Prompt::Text(text)],
        Value::Array(list) => match ids(&list)? {
            Some(ids) if !ids.is_empty() => vec![Prompt::Tokens(ids)],
            _ => {
                let prompt = |value: Value| match value {
                    Value::String(text) => Ok(Prompt::Text(text)),
                    Value::Array(list) => ids(&list)?.map(Prompt::Tokens).ok_or_else(|| wrong(&Value::Array(list))),
                    other => Err(wrong(&other)),
                };
                list.into_iter().map(prompt).collect::<Result<_, _>>()?
            }
        },
        other => return Err(wrong(&other)),
    };
    match prompts.len() {
        0 => Err(wrong_value("prompt", "at least one prompt")),
        count if count > MOST_CHOICES => Err(wrong_value("prompt", &format!("at most {MOST_CHOICES} prompts"))),
        _ => Ok(prompts),
    }
}

/// What becomes of the texts.
struct Texts {
    head: Value,
    served: Arc<Served>,
    echoes: Vec<String>,
    n: usize,
    logprobs: bool,
    include_usage: bool,
    prompt_tokens: usize,
    new_tokens: usize,
    /// Of each text, what was told with logarithms.
    told: Vec<Told>,
}

/// The tokens of a text that were told with their logarithms, as a text.
#[derive(Clone, Debug, Default)]
struct Told {
    decoded: DecodeState,
    characters: usize,
}

impl Told {
    /// The character of the text that a token begins at, or that its bytes are a part of.
    fn offset(&mut self, served: &Served, token: u32) -> usize {
        // What cannot be decoded has failed the text itself.
        let new = self.decoded.push(&served.tokenizer, token).unwrap_or_default().chars().count();
        self.characters += new;
        // Bytes before it that are no character may have been held back until now.
        self.characters - new.min(served.token(token).0.chars().count())
    }
}

/// What a token is called: its text, or its bytes where these are no whole characters.
fn name(served: &Served, token: u32) -> String {
    match served.token(token) {
        (_, Some(bytes)) => String::from_utf8(bytes).unwrap_or_else(|e| {
            let bytes = e.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", bytes.collect::<String>())
        }),
        (name, None) => name,
    }
}

impl Texts {
    fn choice(&mut self, at: usize, piece: &Piece) -> Value {
        let logprobs = self.logprobs.then(|| self.logprobs_of(at, &piece.logprobs));
        json!({"text": piece.text, "index": at, "logprobs": logprobs, "finish_reason": piece.finish.map(finish_reason)})
    }

    /// The form of completions: lists, one beside the other.
    fn logprobs_of(&mut self, at: usize, of: &[LogProbs]) -> Value {
        let (mut tokens, mut chosen, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for LogProbs { chosen: one, top } in of {
            let token = name(&self.served, one.token);
            offsets.push(self.told[at].offset(&self.served, one.token));
            chosen.push(one.logprob);
            // The likeliest of a name, and the chosen one, which may be none of them.
            let mut all = serde_json::Map::new();
            for one in top {
                all.entry(name(&self.served, one.token)).or_insert(json!(one.logprob));
            }
            all.entry(token.clone()).or_insert(json!(one.logprob));
            tokens.push(token);
            tops.push(all);
        }
        json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
    }

    fn with(&self, choices: Value) -> Value {
        let mut value = self.head.clone();
        value["choices"] = choices;
        if self.include_usage {
            value["usage"] = Value::Null;
        }
        value
    }

    fn whole(mut self, written: Vec<Vec<Piece>>) -> Value {
        let mut choices = Vec::new();
        let mut new_tokens = 0;
        for (at, pieces) in written.into_iter().enumerate() {
            let mut whole =
                Piece { text: self.echoes.get(at / self.n).cloned().unwrap_or_default(), ..Piece::default() };
            for piece in pieces {
                whole.text.push_str(&piece.text);
                whole.logprobs.extend(piece.logprobs);
                whole.finish = piece.finish.or(whole.finish);
                new_tokens += piece.tokens;
            }
            choices.push(self.choice(at, &whole));
        }
        let mut value = self.with(Value::Array(choices));
        value["usage"] = usage(self.prompt_tokens, new_tokens);
        value
    }
}

impl Chunks for Texts {
    fn begin(&mut self) -> Vec<Value> {
        let texts = self.told.len();
        let echo = |at: usize| Some((at, self.echoes.get(at / self.n)?.clone()));
        let echoes: Vec<(usize, String)> = (0..texts).filter_map(echo).collect();
        let piece = |(at, text)| {
            let choice = self.choice(at, &Piece { text, ..Piece::default() });
            self.with(json!([choice]))
        };
        echoes.into_iter().map(piece).collect()
    }

    fn piece(&mut self, at: usize, piece: Piece) -> Vec<Value> {
        self.new_tokens += piece.tokens;
        if piece.text.is_empty() && piece.finish.is_none() && piece.logprobs.is_empty() {
            return Vec::new();
        }
        let choice = self.choice(at, &piece);
        vec![self.with(json!([choice]))]
    }

    fn end(&mut self) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut value = self.with(json!([]));
        value["usage"] = usage(self.prompt_tokens, self.new_tokens);
        vec![value]
    }
}
