//! `/v1/embeddings`: texts as vectors: the hidden state after the last token, behind the last norm, of length 1.

use super::sampling::MOST_CHOICES;
use super::{Job, now};
use crate::app::App;
use crate::error::ApiError;
use crate::fields::{Fields, token_ids, wrong_type, wrong_value};
use axum::Json;
use axum::extract::{Request, State};
use halfbyte_llm::schedule::VectorHandle;
use serde_json::{Value, json};
use std::future::poll_fn;
use std::sync::Arc;

/// Computes them.
pub async fn answer(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let (job, mut fields) = Job::begin(app, request).await?;
    let inputs = inputs(&mut fields, job.served.vocab())?;
    let base64 = match fields.text("encoding_format")?.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(wrong_value("encoding_format", "'float' or 'base64'")),
    };
    fields.refuse("dimensions", &[])?;
    fields.ignore(&["user"]);
    fields.finish()?;
    let pass = job.enter(inputs.len())?;
    let mut handles = Vec::with_capacity(inputs.len());
    let mut tokens = 0;
    for input in inputs {
        let ids = match input {
            Ok(text) => job.encode(text, true, "input").await?,
            Err(ids) => ids,
        };
        job.check_prompt(ids.len(), "input")?;
        tokens += ids.len();
        handles.push(job.served.queue()?.submit_vector(ids).map_err(|e| ApiError::of_model(e, "input"))?);
    }
    job.record.prompt(&job.served.name, tokens);
    let all = futures_util::future::try_join_all(handles.into_iter().map(vector));
    let vectors = tokio::time::timeout_at(job.deadline.into(), all).await;
    let vectors = vectors.map_err(|_| ApiError::timeout("The request took too long."))??;
    drop(pass);
    let data = vectors.into_iter().enumerate().map(|(index, vector)| {
        let embedding = match base64 {
            false => json!(vector),
            true => json!(self::base64(&vector.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())),
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    });
    let data: Vec<Value> = data.collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "created": now(), "model": job.served.name, "data": data, "usage": usage})))
}

/// A vector, scaled to length 1.
async fn vector(mut handle: VectorHandle) -> Result<Vec<f32>, ApiError> {
    let mut vector = poll_fn(|context| handle.poll(context)).await.map_err(|e| ApiError::of_model(e, "input"))?;
    let length = vector.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    if !length.is_finite() {
        return Err(ApiError::internal(&"a vector of a text that is not finite"));
    }
    if length > 0.0 {
        vector.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
    }
    Ok(vector)
}

/// Texts, or token ids in their place.
fn inputs(fields: &mut Fields, vocab: usize) -> Result<Vec<Result<String, Vec<u32>>>, ApiError> {
    let ids = |list: &[Value]| token_ids("input", list, vocab);
    let wrong = |value: &Value| {
        wrong_type("input", "a string, an array of strings, of token ids, or of arrays of token ids", value)
    };
    let inputs = match fields.required("input")? {
        Value::String(text) => vec![Ok(text)],
        Value::Array(list) => match ids(&list)? {
            Some(ids) if !ids.is_empty() => vec![Err(ids)],
            _ => {
                let input = |value: Value| match value {
                    Value::String(text) => Ok(Ok(text)),
                    Value::Array(list) => ids(&list)?.map(Err).ok_or_else(|| wrong(&Value::Array(list))),
                    other => Err(wrong(&other)),
                };
                list.into_iter().map(input).collect::<Result<_, _>>()?
            }
        },
        other => return Err(wrong(&other)),
    };
    let empty = |input: &Result<String, Vec<u32>>| match input {
        Ok(text) => text.is_empty(),
        Err(ids) => ids.is_empty(),
    };
    if inputs.iter().any(empty) {
        return Err(wrong_value("input", "texts of at least one character, or of at least one token"));
    }
    match inputs.len() {
        0 => Err(wrong_value("input", "at least one text")),
        count if count > MOST_CHOICES => Err(wrong_value("input", &format!("at most {MOST_CHOICES} texts"))),
        _ => Ok(inputs),
    }
}

/// RFC 4648, with padding: the form that the official clients ask for.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |word, &byte| word << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for at in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * at)) as usize & 63];
            text.push(if at <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn base64_of_the_standard() {
        let texts =
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")];
        texts.iter().for_each(|(text, encoded)| assert_eq!(super::base64(text.as_bytes()), *encoded));
    }
}
