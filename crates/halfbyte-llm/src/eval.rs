//! How good a model is: perplexity over a text, and raw logits to compare with other implementations.

use crate::engine::{Model, Session};
use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use halfbyte::cpu::{Cpu, nn};
use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

/// What [`perplexity`] found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Perplexity {
    /// Exponential of the mean negative log-likelihood over all targets.
    pub perplexity: f64,
    /// Windows scored.
    pub windows: usize,
    /// Tokens run through the model: windows times their length.
    pub tokens: usize,
    /// Tokens scored: every token of a window but the first.
    pub targets: usize,
    /// Time it took.
    pub seconds: f64,
}

impl Perplexity {
    /// Tokens run through the model in a second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }
}

/// How far an evaluation is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Windows (or rows) done.
    pub done: usize,
    /// Windows (or rows) in all.
    pub total: usize,
    /// Perplexity over what is done; NaN where none is computed.
    pub perplexity: f64,
}

/// Called after each window; may end the evaluation, which then fails with [`Error::Cancelled`].
pub type OnProgress<'a> = dyn FnMut(Progress) -> ControlFlow<()> + 'a;

/// The texts of a file of lines `{"text": ...}`, one document each. Lines of white space are passed over.
///
/// Errors, with the line's number: no UTF-8, no JSON object, no string `text`.
pub fn documents(path: &Path) -> Result<Vec<String>> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    let mut reader = BufReader::new(std::fs::File::open(path).map_err(io)?);
    let (mut documents, mut line, mut number) = (Vec::new(), Vec::new(), 0);
    loop {
        line.clear();
        if reader.read_until(b'\n', &mut line).map_err(io)? == 0 {
            return Ok(documents);
        }
        number += 1;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let refuse = |got: String| Error::Text {
            path: path.to_path_buf(),
            line: number,
            expected: "a JSON object with a string \"text\"",
            got,
        };
        match serde_json::from_slice(&line).map_err(|e| refuse(e.to_string()))? {
            serde_json::Value::Object(mut object) => match object.remove("text") {
                Some(serde_json::Value::String(text)) => documents.push(text),
                Some(_) => return Err(refuse("a \"text\" of another type".to_owned())),
                None => return Err(refuse("an object without it".to_owned())),
            },
            _ => return Err(refuse("another JSON value".to_owned())),
        }
    }
}

/// One stream of all documents: the token that begins a text, where the model has one, in front of each.
pub fn token_stream(tokenizer: &Tokenizer, documents: &[String], bos: Option<u32>) -> Result<Vec<u32>> {
    let mut stream = Vec::new();
    for document in documents {
        stream.extend(bos);
        stream.extend(tokenizer.encode(document)?);
    }
    Ok(stream)
}

/// Perplexity over a stream of tokens.
///
/// The stream is cut into consecutive windows of `window` tokens, the remainder dropped; each is scored on its own from
/// position 0; targets are positions 1 to `window` − 1. *Accuracy:* logits in f32, sums in f64. *Errors:* a window of
/// less than 2 tokens or beyond the model's context, a stream shorter than one window, ids beyond the vocabulary, logits
/// that are not finite.
pub fn perplexity(
    model: &Model,
    cpu: &Cpu,
    tokens: &[u32],
    window: usize,
    progress: &mut OnProgress<'_>,
) -> Result<Perplexity> {
    const OP: &str = "perplexity";
    if window < 2 {
        return Err(Error::invalid(OP, "a window of at least 2 tokens", window.to_string()));
    }
    let windows = tokens.len() / window;
    if windows == 0 {
        return Err(Error::invalid(OP, format!("a text of at least {window} tokens"), tokens.len().to_string()));
    }
    let begun = Instant::now();
    let mut session = Session::new(model, cpu, window)?;
    let vocab = model.config().vocab_size;
    let (mut sum, mut perplexity) = (0.0f64, f64::NAN);
    let mut normalisers = Vec::new();
    for (done, window_tokens) in tokens.chunks_exact(window).enumerate() {
        session.clear();
        let mut position = 0;
        session.logits_of_all(window_tokens, &mut |logits| {
            normalisers.resize(logits.len() / vocab, 0.0);
            nn::log_sum_exp(cpu, logits, &mut normalisers)?;
            for (row, normaliser) in logits.chunks_exact(vocab).zip(&normalisers) {
                position += 1;
                let Some(&target) = window_tokens.get(position) else { break };
                let loss = normaliser - f64::from(row[target as usize]);
                if !loss.is_finite() {
                    return Err(Error::NotFinite(loss as f32));
                }
                sum += loss;
            }
            Ok(())
        })?;
        perplexity = (sum / ((done + 1) * (window - 1)) as f64).exp();
        if progress(Progress { done: done + 1, total: windows, perplexity }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    Ok(Perplexity {
        perplexity,
        windows,
        tokens: windows * window,
        targets: windows * (window - 1),
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Logits of rows of tokens, each row on its own from position 0.
///
/// *Shapes:* ids `[rows, positions]`; `write` is handed `[some positions, vocab]` at a time, in order, so that memory
/// does not hold all of `[rows, positions, vocab]`. *Errors:* negative ids or ids beyond the vocabulary, no positions,
/// more positions than the model's context, whatever `write` returns.
pub fn logits(
    model: &Model,
    cpu: &Cpu,
    ids: &Ids<'_>,
    write: &mut dyn FnMut(&[f32]) -> Result<()>,
    progress: &mut OnProgress<'_>,
) -> Result<()> {
    const OP: &str = "logits";
    let [rows, positions] = ids.shape;
    if rows.checked_mul(positions) != Some(ids.ids.len()) {
        return Err(Error::invalid(OP, format!("{rows} × {positions} ids"), ids.ids.len().to_string()));
    }
    if positions == 0 {
        return Err(Error::EmptyPrompt);
    }
    let mut session = Session::new(model, cpu, positions)?;
    let mut tokens = Vec::with_capacity(positions);
    for (done, row) in ids.ids.chunks_exact(positions).enumerate() {
        tokens.clear();
        for &id in row {
            tokens.push(u32::try_from(id).map_err(|_| Error::invalid(OP, "token ids of at least 0", id.to_string()))?);
        }
        session.clear();
        session.logits_of_all(&tokens, write)?;
        if progress(Progress { done: done + 1, total: rows, perplexity: f64::NAN }).is_break() {
            return Err(Error::Cancelled);
        }
    }
    Ok(())
}

/// Token ids as files hold them.
#[derive(Clone, Copy, Debug)]
pub struct Ids<'a> {
    /// `[rows, positions]`.
    pub ids: &'a [i32],
    /// Rows and positions.
    pub shape: [usize; 2],
}
