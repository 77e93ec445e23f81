//! The fields that conversations and completions have in common.

use crate::error::ApiError;
use crate::fields::{Fields, wrong_type, wrong_value};
use crate::random;
use halfbyte_llm::Sampling;
use serde_json::Value;

/// Texts that a request may have written at once.
pub const MOST_CHOICES: usize = 128;

/// Stop strings, and bytes of each.
const MOST_STOPS: (usize, usize) = (16, 1024);

/// Tokens with a bias.
const MOST_BIASES: usize = 1024;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Common {
    pub sampling: Sampling,
    pub bias: Vec<(u32, f32)>,
    pub max_tokens: Option<usize>,
    pub n: usize,
    pub stop: Vec<String>,
    pub stream: bool,
    /// Whether a stream tells of tokens at its end.
    pub include_usage: bool,
    /// Whether the model may not end its text.
    pub ignore_eos: bool,
}

impl Common {
    /// Takes them; `names` are those of the most new tokens, the one that counts first, of which there are at least `least`; `vocab` is
    /// how many tokens the model knows.
    pub fn take(fields: &mut Fields, names: &[&str], least: usize, vocab: usize) -> Result<Self, ApiError> {
        let mut max_tokens = None;
        for name in names {
            max_tokens = max_tokens.or(fields.count(name, least..=usize::MAX)?);
        }
        let stream = fields.boolean("stream")?.unwrap_or(false);
        let mut include_usage = false;
        if let Some(mut options) = fields.object("stream_options")? {
            include_usage = options.boolean("include_usage")?.unwrap_or(false);
            options.ignore(&["include_obfuscation"]);
            options.finish()?;
            if !stream {
                let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
                return Err(ApiError::field("stream_options", "invalid_value", message));
            }
        }
        let single = |number: Option<f64>, otherwise: f32| number.map_or(otherwise, |number| number as f32);
        let sampling = Sampling {
            temperature: single(fields.number("temperature", 0.0..=2.0)?, 1.0),
            top_p: single(fields.number("top_p", 0.0..=1.0)?, 1.0),
            top_k: fields.integer("top_k", -1..=i64::MAX)?.map_or(0, |k| k.max(0) as usize),
            min_p: single(fields.number("min_p", 0.0..=1.0)?, 0.0),
            repetition_penalty: single(fields.number("repetition_penalty", 0.01..=10.0)?, 1.0),
            frequency_penalty: single(fields.number("frequency_penalty", -2.0..=2.0)?, 0.0),
            presence_penalty: single(fields.number("presence_penalty", -2.0..=2.0)?, 0.0),
            seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map_or_else(random::number, |seed| seed as u64),
        };
        // OpenAI takes 0 for the most likely token.
        let sampling =
            Sampling { top_p: if sampling.top_p == 0.0 { f32::MIN_POSITIVE } else { sampling.top_p }, ..sampling };
        let common = Self {
            sampling,
            bias: biases(fields, vocab)?,
            max_tokens,
            n: fields.count("n", 1..=MOST_CHOICES)?.unwrap_or(1),
            stop: stops(fields)?,
            stream,
            include_usage,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
        };
        // Of who asks, or of what is done with it later.
        fields.ignore(&[
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
        ]);
        Ok(common)
    }
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, ApiError> {
    let path = fields.path("stop");
    let stops = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => {
            let text = |(at, value): (usize, Value)| match value {
                Value::String(stop) => Ok(stop),
                other => Err(wrong_type(&format!("{path}[{at}]"), "a string", &other)),
            };
            list.into_iter().enumerate().map(text).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_type(&path, "a string or an array of strings", &other)),
    };
    let (count, bytes) = MOST_STOPS;
    if stops.len() > count || stops.iter().any(|stop| stop.is_empty() || stop.len() > bytes) {
        return Err(wrong_value(&path, &format!("at most {count} texts of 1 to {bytes} bytes")));
    }
    Ok(stops)
}

fn biases(fields: &mut Fields, vocab: usize) -> Result<Vec<(u32, f32)>, ApiError> {
    let path = fields.path("logit_bias");
    let Some(value) = fields.take("logit_bias") else { return Ok(Vec::new()) };
    let Value::Object(biases) = value else { return Err(wrong_type(&path, "an object", &value)) };
    if biases.len() > MOST_BIASES {
        return Err(wrong_value(&path, &format!("at most {MOST_BIASES} tokens")));
    }
    let bias = |(token, bias): (String, Value)| {
        // As JSON spells integers, so that no token has two names.
        let id = token.parse().ok().filter(|id: &u64| id.to_string() == token);
        let id = id.ok_or_else(|| wrong_value(&path, "token ids as names"))?;
        let Some(known) = u32::try_from(id).ok().filter(|&id| (id as usize) < vocab) else {
            let message = format!("Invalid value for '{path}': token {id} is unknown: ids are below {vocab}.");
            return Err(ApiError::field(&path, "invalid_value", message));
        };
        let number = bias.as_f64().ok_or_else(|| wrong_type(&format!("{path}.{id}"), "a decimal", &bias))?;
        if !(-100.0..=100.0).contains(&number) {
            return Err(wrong_value(&format!("{path}.{id}"), "a number from -100 to 100"));
        }
        Ok((known, number as f32))
    };
    biases.into_iter().map(bias).collect()
}
