//! `/v1/chat/completions`: answers in a conversation, by the model's chat template.

use super::messages::{ToolChoice, Tools, messages, tools};
use super::sampling::Common;
use super::stream::{Chunks, respond, submit_all, whole};
use super::{Job, blocking, content_logprobs, finish_reason, now, usage};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, wrong_value};
use crate::grammar::Form;
use crate::random;
use crate::served::Served;
use crate::tools::{Call, Splitter, ToolForm};
use crate::writing::{Ask, Piece};
use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use halfbyte_llm::Finish;
use halfbyte_llm::chat::Conversation;
use serde_json::{Value, json};
use std::sync::Arc;

/// Answers.
pub async fn answer(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (job, mut fields) = Job::begin(app, request).await?;
    if job.served.template.is_none() {
        let message = format!(
            "The model `{}` has no chat template, so that it takes no conversations: use /v1/completions, or put a chat_template.jinja \
             into its folder.",
            job.served.name
        );
        return Err(ApiError::field("model", "no_chat_template", message));
    }
    let turns = messages(&mut fields)?;
    let tools = tools(&mut fields)?.filter(|tools| tools.choice != ToolChoice::None);
    let common = Common::take(&mut fields, &["max_completion_tokens", "max_tokens"], 1, job.served.vocab())?;
    let logprobs = logprobs(&mut fields)?;
    let form = form(&mut fields)?;
    refuse_others(&mut fields)?;
    fields.finish()?;
    let (form, splits) = with_tools(&job.served, tools.as_ref(), form)?;
    let pass = job.enter(common.n)?;
    let parallel = tools.as_ref().is_none_or(|tools| tools.parallel);
    let names = tools.iter().flat_map(|tools| tools.functions.iter().map(|function| function.name.clone()));
    let names: Arc<[String]> = names.collect();
    let conversation = Conversation { messages: turns, tools: tools.map(|tools| tools.list), documents: None };
    let served = job.served.clone();
    let render = move || {
        let template = served.template.as_ref().ok_or_else(|| ApiError::internal(&"a template that is gone"))?;
        template.render(&conversation, true).map_err(|e| ApiError::of_model(e, "messages"))
    };
    let text = blocking(render).await?;
    // The template writes the token that begins a text, where the model wants one.
    let prompt = job.encode(text, false, "messages").await?;
    job.check_prompt(prompt.len(), "messages")?;
    let (prompt_tokens, n) = (prompt.len(), common.n);
    let ask = Ask {
        prompt,
        prompt_field: "messages",
        max_tokens: common.max_tokens.unwrap_or(usize::MAX).min(job.app.settings.limits.new_tokens),
        sampling: common.sampling,
        bias: common.bias,
        end_tokens: if common.ignore_eos { Vec::new() } else { job.served.end_tokens.clone() },
        stop: common.stop,
        logprobs,
        form,
        special: splits.is_some(),
    };
    let asks = Arc::new(vec![ask]);
    let handles = submit_all(&job, &asks, n).await?;
    job.record.prompt(&job.served.name, prompt_tokens);
    let answers = Answers {
        id: format!("chatcmpl-{}", random::letters(24)),
        created: now(),
        served: job.served.clone(),
        splitters: (0..n).map(|_| splits.map(|form| Splitter::new(form, names.clone()))).collect(),
        parallel,
        logprobs: logprobs.is_some(),
        include_usage: common.include_usage,
        prompt_tokens,
        new_tokens: 0,
    };
    if common.stream {
        return Ok(respond(job, asks, n, handles, pass, answers));
    }
    let written = whole(&job, &asks, n, handles).await?;
    drop(pass);
    Ok(Json(answers.whole(written)).into_response())
}

/// Whether tokens are told with their logarithms, and of how many others.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.count("top_logprobs", 0..=20)?;
    match (wanted, top) {
        (false, Some(_)) => Err(wrong_value("top_logprobs", "'logprobs' to be true where it is given")),
        (false, None) => Ok(None),
        (true, top) => Ok(Some(top.unwrap_or(0))),
    }
}

/// What the answer must be.
fn form(fields: &mut Fields) -> Result<Option<Form>, ApiError> {
    let Some(mut format) = fields.object("response_format")? else { return Ok(None) };
    let form = match format.required_text("type")?.as_str() {
        "text" => None,
        "json_object" => Some(Form::Schema(json!({"type": "object"}))),
        "json_schema" => {
            let path = format.path("json_schema");
            let mut schema = Fields::of(format.required("json_schema")?, path)?;
            schema.text("name")?;
            schema.text("description")?;
            schema.boolean("strict")?;
            let of = schema.required("schema")?;
            if !of.is_object() {
                return Err(crate::fields::wrong_type(&schema.path("schema"), "an object", &of));
            }
            schema.finish()?;
            Some(Form::Schema(of))
        }
        _ => return Err(wrong_value(&format.path("type"), "'text', 'json_object' or 'json_schema'")),
    };
    format.finish()?;
    Ok(form)
}

/// What tools make of the form, and in which form calls are looked for. Errors: calls that must come, where no grammar can say so; a
/// form beside them.
fn with_tools(
    served: &Served,
    tools: Option<&Tools>,
    form: Option<Form>,
) -> Result<(Option<Form>, Option<ToolForm>), ApiError> {
    let Some(tools) = tools else { return Ok((form, None)) };
    let functions = match &tools.choice {
        // A text that must keep to a schema is the answer, whatever it looks like.
        ToolChoice::None | ToolChoice::Auto => {
            let splits = served.tool_form.filter(|_| form.is_none());
            return Ok((form, splits));
        }
        ToolChoice::Required => tools.functions.clone(),
        ToolChoice::Named(name) => tools.functions.iter().filter(|known| known.name == *name).cloned().collect(),
    };
    if form.is_some() {
        return Err(wrong_value("response_format", "none where a tool must be called"));
    }
    match served.tool_form.filter(|form| form.can_be_forced()) {
        Some(form) => Ok((Some(Form::Call(form, functions)), Some(form))),
        None => {
            let message = "This model's chat template has no form of calls that could be forced: 'tool_choice' must be 'auto' or 'none'.";
            Err(ApiError::field("tool_choice", "unsupported_value", message))
        }
    }
}

/// What would change the answer, and is not served.
fn refuse_others(fields: &mut Fields) -> Result<(), ApiError> {
    for (name, neutral) in [
        ("modalities", json!(["text"])),
        ("prediction", Value::Null),
        ("audio", Value::Null),
        ("web_search_options", Value::Null),
        ("reasoning_effort", json!("none")),
        ("verbosity", json!("medium")),
    ] {
        fields.refuse(name, &[neutral])?;
    }
    Ok(())
}

/// What becomes of the answers.
struct Answers {
    id: String,
    created: u64,
    served: Arc<Served>,
    /// Of each, where calls are looked for.
    splitters: Vec<Option<Splitter>>,
    parallel: bool,
    logprobs: bool,
    include_usage: bool,
    prompt_tokens: usize,
    new_tokens: usize,
}

impl Answers {
    fn head(&self, object: &str, choices: Value) -> Value {
        let mut value = json!({"id": self.id, "object": object, "created": self.created, "model": self.served.name, "choices": choices});
        if self.include_usage {
            value["usage"] = Value::Null;
        }
        value
    }

    /// What of a piece is said, and, at the end, what is called.
    fn split(&mut self, at: usize, piece: &Piece) -> (String, Vec<Call>) {
        let Some(splitter) = &mut self.splitters[at] else { return (piece.text.clone(), Vec::new()) };
        let mut said = splitter.push(&piece.text);
        if piece.finish.is_none() {
            return (said, Vec::new());
        }
        let (rest, mut calls) = self.splitters[at].take().map(Splitter::finish).unwrap_or_default();
        said.push_str(&rest);
        if !self.parallel {
            calls.truncate(1);
        }
        (said, calls)
    }

    fn whole(mut self, written: Vec<Vec<Piece>>) -> Value {
        let mut choices = Vec::new();
        let mut new_tokens = 0;
        for (at, pieces) in written.into_iter().enumerate() {
            let mut whole = Piece::default();
            for piece in pieces {
                whole.text.push_str(&piece.text);
                whole.logprobs.extend(piece.logprobs);
                whole.finish = piece.finish.or(whole.finish);
                new_tokens += piece.tokens;
            }
            let (said, calls) = self.split(at, &whole);
            let mut message = json!({"role": "assistant", "content": said, "refusal": null});
            if !calls.is_empty() {
                message["tool_calls"] = calls.iter().map(call).collect();
                if said.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            let reason = reason(whole.finish.unwrap_or(Finish::Cancelled), !calls.is_empty());
            let logprobs = self.logprobs.then(|| told(&self.served, &whole));
            choices.push(json!({"index": at, "message": message, "logprobs": logprobs, "finish_reason": reason}));
        }
        let mut value = self.head("chat.completion", Value::Array(choices));
        value["usage"] = usage(self.prompt_tokens, new_tokens);
        value
    }

    fn chunk(&self, at: usize, delta: Value, logprobs: Option<Value>, reason: Option<&str>) -> Value {
        let choice = json!({"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": reason});
        self.head("chat.completion.chunk", json!([choice]))
    }
}

impl Chunks for Answers {
    fn begin(&mut self) -> Vec<Value> {
        let role = || json!({"role": "assistant", "content": "", "refusal": null});
        (0..self.splitters.len()).map(|at| self.chunk(at, role(), None, None)).collect()
    }

    fn piece(&mut self, at: usize, piece: Piece) -> Vec<Value> {
        self.new_tokens += piece.tokens;
        let (said, calls) = self.split(at, &piece);
        let logprobs = (self.logprobs && !piece.logprobs.is_empty()).then(|| told(&self.served, &piece));
        let mut chunks = Vec::new();
        if !said.is_empty() || logprobs.is_some() {
            chunks.push(self.chunk(at, json!({"content": said}), logprobs, None));
        }
        for (index, of) in calls.iter().enumerate() {
            let mut of = call(of);
            of["index"] = json!(index);
            chunks.push(self.chunk(at, json!({"tool_calls": [of]}), None, None));
        }
        if let Some(finish) = piece.finish {
            chunks.push(self.chunk(at, json!({}), None, Some(reason(finish, !calls.is_empty()))));
        }
        chunks
    }

    fn end(&mut self) -> Vec<Value> {
        if !self.include_usage {
            return Vec::new();
        }
        let mut value = self.head("chat.completion.chunk", json!([]));
        value["usage"] = usage(self.prompt_tokens, self.new_tokens);
        vec![value]
    }
}

fn told(served: &Served, piece: &Piece) -> Value {
    json!({"content": content_logprobs(served, &piece.logprobs), "refusal": null})
}

fn call(call: &Call) -> Value {
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}

fn reason(finish: Finish, calls: bool) -> &'static str {
    if calls { "tool_calls" } else { finish_reason(finish) }
}
