//! Llama 3's scaling of rotary frequencies: parameters in Hugging Face's config, a tensor of factors in GGUF.

use crate::error::{Error, Result};
use serde_json::{Map, Value, json};
use std::f64::consts::TAU;

/// What published models have; only factor and context are looked for.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;

/// How far a factor may lie from the formula's, relative: converters compute in singles, through several roundings.
const TOLERANCE: f64 = 1e-4;

/// The parameters of Hugging Face's `rope_type` "llama3".
#[derive(Clone, Copy)]
struct Llama3 {
    factor: f64,
    low_freq_factor: f64,
    high_freq_factor: f64,
    original_context: f64,
}

impl Llama3 {
    /// What the frequency of pair `pair` is divided by.
    fn divisor(&self, pair: usize, head_dim: usize, theta: f64) -> f64 {
        let frequency = theta.powf(-2.0 * pair as f64 / head_dim as f64);
        let turns = self.original_context * frequency / TAU;
        let kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0);
        1.0 / (kept + (1.0 - kept) / self.factor)
    }
}

/// The config's parameters that give these factors, with the published bounds of 1 and 4 turns and an original context
/// that is a power of two; factors that are all 1 are no scaling. None: no such parameters.
pub(super) fn parameters_of(factors: &[f32], head_dim: usize, theta: f64) -> Option<Map<String, Value>> {
    if factors.len() != head_dim / 2 || !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
        return None;
    }
    if factors.iter().all(|&f| f == 1.0) {
        return Some(Map::new());
    }
    let factor = factors.iter().fold(0f32, |most, &f| most.max(f));
    let fits = |llama3: &Llama3| {
        factors.iter().enumerate().all(|(pair, &f)| {
            let expected = llama3.divisor(pair, head_dim, theta);
            (f64::from(f) - expected).abs() <= TOLERANCE * expected
        })
    };
    // The published context first: where several fit, they are the same to this model.
    let contexts = [8192.0].into_iter().chain((8..=20).map(|bits| f64::from(1u32 << bits)));
    let candidates = contexts.map(|original_context| Llama3 {
        factor: f64::from(factor),
        low_freq_factor: LOW_FREQ_FACTOR,
        high_freq_factor: HIGH_FREQ_FACTOR,
        original_context,
    });
    let Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = candidates.into_iter().find(fits)?;
    let parameters = json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_context as u64,
    });
    if let Value::Object(map) = parameters { Some(map) } else { None }
}

/// The factors that GGUF holds as the tensor `rope_freqs.weight` (F32, `[head_dim / 2]`), for a `config.json` whose
/// rotary frequencies are scaled as Llama 3's; None for one that does without.
///
/// Errors: sizes or parameters that are missing or that are no numbers in order.
pub fn rope_factors(config: &Map<String, Value>) -> Result<Option<Vec<f32>>> {
    let config = super::metadata::Config(config);
    let Some(("llama3", scaling)) = config.rope_scaling()? else { return Ok(None) };
    let scaling = super::metadata::Config(scaling);
    let llama3 = Llama3 {
        factor: scaling.float("factor")?,
        low_freq_factor: scaling.float("low_freq_factor")?,
        high_freq_factor: scaling.float("high_freq_factor")?,
        original_context: scaling.float("original_max_position_embeddings")?,
    };
    let (head_dim, theta) = (config.head_dim()?, config.rope_theta()?);
    let Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } = llama3;
    if factor <= 0.0 || low <= 0.0 || high <= low || original_context <= 0.0 {
        let got = format!("{factor}, {low}, {high}, {original_context}");
        let expected = "factor, low_freq_factor < high_freq_factor and original_max_position_embeddings above 0";
        return Err(Error::invalid("factors of rotary frequencies", expected, got));
    }
    Ok(Some((0..head_dim / 2).map(|pair| llama3.divisor(pair, head_dim, theta) as f32).collect()))
}
