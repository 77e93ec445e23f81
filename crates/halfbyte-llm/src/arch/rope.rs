//! Rotary positions of a `config.json`, in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

use super::spec::{LongRope, RopeSpec};
use crate::config::Fields;
use crate::error::Result;
use serde_json::Map;
use std::f64::consts::TAU;
use std::sync::Arc;

/// Rotary positions of some layers.
pub(super) struct Rotary {
    pub rope: Arc<RopeSpec>,
    /// Factor of the scores: where all of a head rotates, that of cosines and sines (the attention factor of YaRN and longrope) squared.
    pub scores: f32,
}

/// Those of all layers, with heads of this size.
pub(super) fn read(fields: &Fields<'_>, head_size: usize) -> Result<Rotary> {
    read_part(fields, head_size, 1.0)
}

/// The same, with the part of a head that rotates where the config does not say it.
pub(super) fn read_part(fields: &Fields<'_>, head_size: usize, part: f64) -> Result<Rotary> {
    let name = fields.spelling(&["rope_parameters", "rope_scaling"]);
    let (empty, inner) = (Map::new(), fields.inner(name)?);
    let inner = inner.unwrap_or_else(|| fields.within(name, &empty));
    let theta_in = if inner.get("rope_theta").is_some() { inner } else { *fields };
    let theta = (theta_in, theta_in.spelling(&["rope_theta", "rotary_emb_base"]));
    rotary(fields, &inner, theta, (head_size, part))
}

/// Those of the layers of a type, where types have their own: in `rope_parameters.TYPE`, or before with the frequencies of `theta`,
/// scaled by `rope_scaling` in layers without a window.
pub(super) fn of_type(fields: &Fields<'_>, kind: &str, theta: &str, head_size: usize) -> Result<Rotary> {
    let empty = Map::new();
    if let Some(types) = fields.inner("rope_parameters")? {
        let inner = types.inner(kind)?.ok_or_else(|| types.refuse(kind, "an object", "nothing"))?;
        return rotary(fields, &inner, (inner, "rope_theta"), (head_size, 1.0));
    }
    let scaling = if kind == "full_attention" { fields.inner("rope_scaling")? } else { None };
    let scaling = scaling.unwrap_or_else(|| fields.within("rope_scaling", &empty));
    rotary(fields, &scaling, (*fields, theta), (head_size, 1.0))
}

fn rotary(
    fields: &Fields<'_>,
    inner: &Fields<'_>,
    (theta_in, of_theta): (Fields<'_>, &str),
    (head_size, part): (usize, f64),
) -> Result<Rotary> {
    let theta = theta_in.number(of_theta)?.unwrap_or(10_000.0);
    if theta < 1.0 {
        return Err(theta_in.refuse(of_theta, "a number of at least 1", theta));
    }
    let part_in = if inner.get("partial_rotary_factor").is_some() { inner } else { fields };
    let of_part = part_in.spelling(&["partial_rotary_factor", "rotary_pct"]);
    let part = part_in.number(of_part)?.unwrap_or(part);
    let rotated = (head_size as f64 * part) as usize;
    let fits = part <= 1.0 && rotated > 0 && rotated.is_multiple_of(2);
    if !fits {
        let expected = format!("an even number of elements of a head of {head_size}, as its share");
        return Err(part_in.refuse(of_part, expected, part));
    }
    let kind = inner.spelling(&["rope_type", "type"]);
    let frequency = |i: usize| theta.powf(-2.0 * i as f64 / rotated as f64);
    let pairs = 0..rotated / 2;
    let mut long = None;
    let (frequencies, factor): (Vec<f64>, f64) = match inner.string(kind)?.unwrap_or("default") {
        "default" => (pairs.map(frequency).collect(), 1.0),
        "linear" => {
            let factor = inner.factor("factor")?;
            (pairs.map(|i| frequency(i) / factor).collect(), 1.0)
        }
        "llama3" => {
            let kept = llama3(inner)?;
            (pairs.map(|i| kept(frequency(i))).collect(), 1.0)
        }
        "yarn" => {
            let (kept, factor) = (yarn(fields, inner, theta, rotated)?, inner.factor("factor")?);
            let scaled = pairs.map(|i| frequency(i) * (kept(i) + (1.0 - kept(i)) / factor));
            (scaled.collect(), attention_factor(inner, factor)?)
        }
        "longrope" | "su" => {
            let (beyond, factor) = longrope(fields, inner)?;
            let by = |field: &str| -> Result<Vec<f64>> {
                let factors = inner.factors(field, rotated / 2)?;
                Ok(factors.iter().enumerate().map(|(i, factor)| frequency(i) / factor).collect())
            };
            long = Some(LongRope { beyond, frequencies: by("long_factor")? });
            (by("short_factor")?, factor)
        }
        other => {
            return Err(inner.refuse(kind, "default, linear, llama3, yarn or longrope", format!("\"{other}\"")));
        }
    };
    let (of_scores, factor) = if rotated == head_size { (factor, 1.0) } else { (1.0, factor) };
    Ok(Rotary { rope: Arc::new(RopeSpec { frequencies, long, factor }), scores: (of_scores * of_scores) as f32 })
}

/// Longrope: the tokens beyond which texts have the long factors, and what cosines and sines are multiplied by.
///
/// *Source:* Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024; defaults of Hugging Face.
fn longrope(fields: &Fields<'_>, inner: &Fields<'_>) -> Result<(usize, f64)> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    // Phi-3 has it outside.
    let original = match fields.optional_size(ORIGINAL)? {
        Some(original) => original,
        None => inner.size(ORIGINAL)?,
    };
    if inner.get("attention_factor").is_some() {
        return Ok((original, inner.factor("attention_factor")?));
    }
    let factor = match inner.get("factor") {
        Some(_) => inner.factor("factor")?,
        None => fields.size("max_position_embeddings")? as f64 / original as f64,
    };
    if factor > 1.0 && original < 2 {
        return Err(inner.refuse(ORIGINAL, "more than 1", original));
    }
    Ok((original, if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() }))
}

/// Llama 3.1: frequencies of fewer than `low_freq_factor` turns in the original context are divided, those of more than
/// `high_freq_factor` kept, those between blended.
fn llama3(inner: &Fields<'_>) -> Result<impl Fn(f64) -> f64 + use<>> {
    let (low, high) = (inner.factor("low_freq_factor")?, inner.factor("high_freq_factor")?);
    if low >= high {
        return Err(inner.refuse("high_freq_factor", format!("more than low_freq_factor, {low}"), high));
    }
    let (factor, context) = (inner.factor("factor")?, inner.size("original_max_position_embeddings")?);
    Ok(move |frequency: f64| {
        let turns = context as f64 * frequency / TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / factor)
    })
}

/// YaRN: how much of each pair's frequency is kept. The pairs that make `beta_fast` turns in the original context and more keep all,
/// those of `beta_slow` and fewer nothing.
///
/// *Source:* Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023; defaults of Hugging Face.
fn yarn(fields: &Fields<'_>, inner: &Fields<'_>, theta: f64, rotated: usize) -> Result<impl Fn(usize) -> f64 + use<>> {
    if theta <= 1.0 {
        return Err(fields.refuse("rope_theta", "a number above 1, with rope_type \"yarn\"", theta));
    }
    let context = match inner.optional_size("original_max_position_embeddings")? {
        Some(context) => context,
        None => fields.size("max_position_embeddings")?,
    };
    let turns = |field: &str, default: f64| {
        if inner.get(field).is_some() { inner.factor(field) } else { Ok(default) }
    };
    let [fast, slow] = [turns("beta_fast", 32.0)?, turns("beta_slow", 1.0)?];
    let pair_of = |turns: f64| rotated as f64 * (context as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut first, mut last) = (pair_of(fast), pair_of(slow));
    if inner.get("truncate").is_none() || inner.flag("truncate")? {
        (first, last) = (first.floor(), last.ceil());
    }
    let (first, last) = (first.max(0.0), last.min(rotated as f64 - 1.0));
    let width = if first == last { 0.001 } else { last - first };
    Ok(move |pair: usize| 1.0 - ((pair as f64 - first) / width).clamp(0.0, 1.0))
}

/// What YaRN multiplies cosines and sines by.
fn attention_factor(inner: &Fields<'_>, factor: f64) -> Result<f64> {
    if inner.get("attention_factor").is_some() {
        return inner.factor("attention_factor");
    }
    let of = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    match (inner.number("mscale")?, inner.number("mscale_all_dim")?) {
        (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => Ok(of(scale) / of(all)),
        _ => Ok(of(1.0)),
    }
}
