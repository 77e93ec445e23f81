//! Llama 3's scaling of rotary frequencies: parameters in Hugging Face's config, a tensor of factors in GGUF.

use crate::error::Result;
use serde_json::{Map, Value, json};
use std::f64::consts::TAU;

/// What published models have.
const LOW_FREQ_FACTOR: f64 = 1.0;
const HIGH_FREQ_FACTOR: f64 = 4.0;
const PUBLISHED_CONTEXT: f64 = 8192.0;

/// How far a factor may lie from the formula's, relative: converters compute in singles, through several roundings.
const TOLERANCE: f64 = 1e-4;

/// Shares of a frequency that count as none and as all.
const EDGE: f64 = 1e-6;

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

/// The config's parameters that give these factors; factors that are all 1 are no scaling. None: no such parameters.
///
/// Those of published models come first. Others give the same factors with other numbers: between both bounds the inverse of a
/// factor is a line over the frequency, and a line has two numbers where a config has three.
pub(super) fn parameters_of(factors: &[f32], head_dim: usize, theta: f64) -> Option<Map<String, Value>> {
    if factors.len() != head_dim / 2 || !factors.iter().all(|f| f.is_finite() && *f > 0.0) {
        return None;
    }
    if factors.iter().all(|&f| f == 1.0) {
        return Some(Map::new());
    }
    // The lowest frequency is scaled the most.
    let factor = f64::from(*factors.last()?);
    let fits = |llama3: &Llama3| {
        factors.iter().enumerate().all(|(pair, &f)| {
            let expected = llama3.divisor(pair, head_dim, theta);
            (f64::from(f) - expected).abs() <= TOLERANCE * expected
        })
    };
    // The published context first: where several fit, they are the same to this model.
    let contexts = [PUBLISHED_CONTEXT].into_iter().chain((8..=20).map(|bits| f64::from(1u32 << bits)));
    let published = contexts.map(|original_context| Llama3 {
        factor,
        low_freq_factor: LOW_FREQ_FACTOR,
        high_freq_factor: HIGH_FREQ_FACTOR,
        original_context,
    });
    let found = published.into_iter().find(fits).or_else(|| line_of(factors, head_dim, theta).filter(fits))?;
    let Llama3 { factor, low_freq_factor, high_freq_factor, original_context } = found;
    let parameters = json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_context as u64,
    });
    if let Value::Object(map) = parameters { Some(map) } else { None }
}

/// Parameters of the line through the factors that are neither 1 nor the last one; through those beside them where there are
/// too few.
fn line_of(factors: &[f32], head_dim: usize, theta: f64) -> Option<Llama3> {
    let factor = f64::from(*factors.last()?);
    // How much of a frequency is kept, by the frequency: from the highest to the lowest.
    let points: Vec<(f64, f64)> = factors
        .iter()
        .enumerate()
        .map(|(pair, &f)| {
            let frequency = theta.powf(-2.0 * pair as f64 / head_dim as f64);
            (frequency, (1.0 / f64::from(f) - 1.0 / factor) / (1.0 - 1.0 / factor))
        })
        .collect();
    let is_between = |&&(_, kept): &&(f64, f64)| kept > EDGE && kept < 1.0 - EDGE;
    let between: Vec<(f64, f64)> = points.iter().filter(is_between).copied().collect();
    let whole = points.iter().rev().find(|(_, kept)| *kept >= 1.0 - EDGE).map(|(frequency, _)| (*frequency, 1.0));
    let none = points.iter().find(|(_, kept)| *kept <= EDGE).map(|(frequency, _)| (*frequency, 0.0));
    let through = |(f, a): (f64, f64), (g, b): (f64, f64)| (a - b) / (f - g);
    let (slope, at) = match between.as_slice() {
        [first, .., last] => (through(*first, *last), *first),
        // All frequencies are scaled alike: they lie below the lower bound.
        [] if whole.is_none() => {
            let low_freq_factor = 2.0 * PUBLISHED_CONTEXT / TAU;
            let (high_freq_factor, original_context) = (2.0 * low_freq_factor, PUBLISHED_CONTEXT);
            return Some(Llama3 { factor, low_freq_factor, high_freq_factor, original_context });
        }
        // As steep as it must be to reach both ends.
        [only] => (whole.into_iter().chain(none).map(|end| through(*only, end)).fold(0.0, f64::max), *only),
        [] => (through(whole?, none?), whole?),
    };
    if !(slope.is_finite() && slope > 0.0) {
        return None;
    }
    // kept = (context · frequency / τ − low) / (high − low)
    let original_context = PUBLISHED_CONTEXT;
    let range = original_context / (slope * TAU);
    let low_freq_factor = range * (slope * at.0 - at.1);
    Some(Llama3 { factor, low_freq_factor, high_freq_factor: low_freq_factor + range, original_context })
}

/// Whether factors that were written are read again.
pub(crate) fn is_read(config: &Map<String, Value>, factors: &[f32]) -> Result<bool> {
    let config = super::metadata::Config(config);
    Ok(parameters_of(factors, config.head_dim()?, config.rope_theta()?).is_some())
}

/// The factors that GGUF holds as the tensor `rope_freqs.weight` (F32, `[head_dim / 2]`), for a `config.json` whose
/// rotary frequencies are scaled as Llama 3's; None for one that does without.
///
/// Errors: sizes or parameters that are missing or that are no numbers in order.
pub fn rope_factors(config: &Map<String, Value>) -> Result<Option<Vec<f32>>> {
    let config = super::metadata::Config(config);
    let Some(("llama3", scaling)) = config.rope_scaling()? else { return Ok(None) };
    let (original_context, scaling) = (config.original_context()?, super::metadata::Config(scaling));
    let llama3 = Llama3 {
        factor: scaling.float("factor")?,
        low_freq_factor: scaling.float("low_freq_factor")?,
        high_freq_factor: scaling.float("high_freq_factor")?,
        original_context,
    };
    let (head_dim, theta) = (config.head_dim()?, config.rope_theta()?);
    let Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } = llama3;
    if factor <= 0.0 || low <= 0.0 || high <= low || original_context <= 0.0 {
        let expected = "factor, low_freq_factor < high_freq_factor and original_max_position_embeddings above 0";
        let got = [factor, low, high, original_context].into_iter().collect();
        return Err(super::metadata::wrong("rope_scaling", expected, &got));
    }
    Ok(Some((0..head_dim / 2).map(|pair| llama3.divisor(pair, head_dim, theta) as f32).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every setting that is written is read, and gives the factors that were written.
    #[test]
    fn factors_of_any_parameters_are_read_back() {
        let mut tried = 0;
        for head_dim in [16, 64, 128] {
            for theta in [1e4, 5e5] {
                for factor in [2.0, 8.0, 32.0, 0.5] {
                    for (low, high) in [(1.0, 4.0), (0.5, 4.0), (1.0, 32.0), (2.0, 2.5), (0.1, 0.2), (3.0, 90.0)] {
                        for context in [256u64, 4000, 8192, 32_768, 131_072] {
                            let config = json!({
                                "hidden_size": head_dim * 4, "num_attention_heads": 4, "rope_theta": theta,
                                "rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                                    "high_freq_factor": high, "original_max_position_embeddings": context},
                            });
                            let factors = rope_factors(config.as_object().unwrap()).unwrap().unwrap();
                            let what = format!("{head_dim} {theta} {factor} {low} {high} {context}: {factors:?}");
                            let found = parameters_of(&factors, head_dim, theta).unwrap_or_else(|| panic!("{what}"));
                            tried += 1;
                            if found.is_empty() {
                                assert!(factors.iter().all(|&f| f == 1.0), "{what}");
                                continue;
                            }
                            let mut back = config.clone();
                            back["rope_scaling"] = Value::Object(found);
                            let again = rope_factors(back.as_object().unwrap()).unwrap().unwrap();
                            for (a, b) in factors.iter().zip(&again) {
                                assert!((a - b).abs() <= 2e-4 * a.abs(), "{what}: {again:?}");
                            }
                        }
                    }
                }
            }
        }
        assert_eq!(tried, 3 * 2 * 4 * 6 * 5);
    }
}
