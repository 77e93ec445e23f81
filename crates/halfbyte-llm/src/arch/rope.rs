//! Rotary positions of a `config.json`, in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`; as Hugging Face
//! transformers computes them, or refused.

use super::sizes::Defaults;
use super::spec::{LongRope, RopeSpec};
use crate::config::Fields;
use crate::error::Result;
use serde_json::{Map, Value};
use std::f64::consts::TAU;
use std::sync::Arc;

/// Rotary positions of some layers.
pub(super) struct Rotary {
    pub rope: Arc<RopeSpec>,
    /// Factor of the scores: where all of a head rotates, that of cosines and sines (the attention factor of YaRN and longrope) squared.
    pub scores: f32,
}

/// How configs of an architecture say them.
#[derive(Default)]
pub(super) struct Says {
    /// Where theta stands, if not in the object: None is `rope_theta`.
    pub theta: Option<&'static str>,
    /// Where the part of each head that rotates stands, if not in the object, and what an absent one means. None: all of it.
    pub part: Option<(&'static str, f64)>,
    /// What an absent object means.
    pub absent: Map<String, Value>,
    /// The original context where a config does not say it outside of the object, of those that have no scaling but longrope.
    pub longrope: Option<usize>,
}

const THETA: &str = "rope_theta";
const PART: &str = "partial_rotary_factor";
const ORIGINAL: &str = "original_max_position_embeddings";
const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// Those of all layers, with heads of this size.
pub(super) fn read(fields: &Fields<'_>, head_size: usize, defaults: &Defaults) -> Result<Rotary> {
    read_as(fields, head_size, defaults, &Says::default())
}

/// The same, of an architecture that says them in another way. What `rope_scaling` holds goes before `rope_parameters`.
pub(super) fn read_as(fields: &Fields<'_>, head_size: usize, defaults: &Defaults, says: &Says) -> Result<Rotary> {
    let scaling = fields.inner("rope_scaling")?.filter(|scaling| !scaling.object().is_empty());
    let parameters = fields.inner("rope_parameters")?;
    let absent = || fields.within("rope_parameters", &says.absent);
    let inner = scaling.or(parameters).unwrap_or_else(absent);
    if let Some(kind) = TYPES.into_iter().find(|kind| inner.get(kind).is_some()) {
        return Err(inner.refuse(kind, "nothing: in this architecture all layers rotate alike", "an object"));
    }
    // What counts, and what says something else and does not.
    let of = |within: &'static str, outside: &'static str, absent: f64| -> Result<(Fields<'_>, &'static str, f64)> {
        let taken = match inner.number(within)? {
            Some(value) => (inner, within, value),
            None => (*fields, outside, fields.number(outside)?.unwrap_or(absent)),
        };
        let unread = if within == outside || inner.get(within).is_some() { None } else { Some(*fields) };
        for place in scaling.and(parameters).into_iter().chain(unread) {
            if let Some(other) = place.number(within)?.filter(|other| *other != taken.2) {
                let why = format!("{}: it counts in {}.{within} and {outside} only", taken.2, inner.name());
                return Err(place.refuse(within, why, other));
            }
        }
        Ok(taken)
    };
    let theta = of(THETA, says.theta.unwrap_or(THETA), defaults.theta)?;
    let (outside, absent) = says.part.unwrap_or((PART, 1.0));
    let part = of(PART, outside, absent)?;
    if says.part.is_none() && part.2 != 1.0 {
        return Err(part.0.refuse(part.1, "1: in this architecture all of a head rotates", part.2));
    }
    let original = match (fields.optional_size(ORIGINAL)?, inner.optional_size(ORIGINAL)?, says.longrope) {
        (Some(original), ..) => original,
        (None, Some(other), Some(original)) if other != original => {
            let expected = format!("{original}: another number counts outside of {} only", inner.name());
            return Err(inner.refuse(ORIGINAL, expected, other));
        }
        (None, _, Some(original)) | (None, Some(original), None) => original,
        (None, None, None) => max_context(fields, defaults)?,
    };
    rotary(&inner, theta, (head_size, part), [original, max_context(fields, defaults)?], says.longrope.is_some())
}

fn max_context(fields: &Fields<'_>, defaults: &Defaults) -> Result<usize> {
    Ok(fields.optional_size("max_position_embeddings")?.unwrap_or(defaults.max_context))
}

/// Those of the layers of a type, where types have their own: what `rope_parameters.TYPE` says, and, in layers without a window,
/// what `rope_scaling` does; theta stands there or in a field of its own.
pub(super) fn of_type(
    fields: &Fields<'_>,
    kind: &'static str,
    (of_theta, theta): (&'static str, f64),
    head_size: usize,
    defaults: &Defaults,
) -> Result<Rotary> {
    let mut said = Map::new();
    let mut name = "rope_scaling";
    if let Some(types) = fields.inner("rope_parameters")? {
        if let Some(other) = types.object().keys().find(|name| !TYPES.contains(&name.as_str())) {
            let expected = format!("{} and {} alone", TYPES[0], TYPES[1]);
            return Err(fields.refuse("rope_parameters", expected, format!("\"{other}\"")));
        }
        if let Some(own) = types.inner(kind)? {
            (said, name) = (own.object().clone(), kind);
        }
    }
    if let Some(scaling) = fields.inner("rope_scaling")?.filter(|_| kind == "full_attention") {
        // transformers takes the type by this name alone here.
        if let Some(old) = scaling.string("type")?.filter(|old| *old != "default" && scaling.get("rope_type").is_none())
        {
            return Err(scaling.refuse("type", "rope_type in its place", format!("\"{old}\"")));
        }
        said.extend(scaling.object().clone());
    }
    let inner = fields.within(name, &said);
    // It is looked for among the types there, and so never found.
    if inner.get("truncate").is_some_and(|truncate| truncate != true) || inner.is_null("truncate") {
        return Err(inner.refuse(
            "truncate",
            "true, where types of layers have parameters of their own",
            "another value",
        ));
    }
    let theta = match inner.number(THETA)? {
        Some(theta) => (inner, THETA, theta),
        None => (*fields, of_theta, fields.number(of_theta)?.unwrap_or(theta)),
    };
    for place in [inner, *fields] {
        if let Some(part) = place.number(PART)?.filter(|part| *part != 1.0) {
            return Err(place.refuse(PART, "1: in this architecture all of a head rotates", part));
        }
    }
    let most = max_context(fields, defaults)?;
    let original = inner.optional_size(ORIGINAL)?.unwrap_or(most);
    rotary(&inner, theta, (head_size, (inner, PART, 1.0)), [original, most], false)
}

/// A number, and the field that says it.
type Said<'a> = (Fields<'a>, &'static str, f64);

/// Those of an object's parameters, in a model of an original context and all that its config allows.
fn rotary(
    inner: &Fields<'_>,
    (theta_in, of_theta, theta): Said<'_>,
    (head_size, (part_in, of_part, part)): (usize, Said<'_>),
    [original, most]: [usize; 2],
    longrope_only: bool,
) -> Result<Rotary> {
    if theta < 1.0 {
        return Err(theta_in.refuse(of_theta, "a number of at least 1", theta));
    }
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
        other if longrope_only && !["default", "longrope", "su", "yarn"].contains(&other) => {
            return Err(inner.refuse(kind, "default or longrope", format!("\"{other}\"")));
        }
        "default" => (pairs.map(frequency).collect(), 1.0),
        "linear" => {
            let factor = inner.factor("factor")?;
            (pairs.map(|i| frequency(i) / factor).collect(), 1.0)
        }
        "llama3" => {
            let kept = llama3(inner, original)?;
            (pairs.map(|i| kept(frequency(i))).collect(), 1.0)
        }
        "yarn" if !longrope_only => {
            if theta <= 1.0 {
                return Err(theta_in.refuse(of_theta, "a number above 1, with rope_type \"yarn\"", theta));
            }
            let (kept, factor) = (yarn(inner, original, theta, rotated)?, inner.factor("factor")?);
            let scaled = pairs.map(|i| frequency(i) * (kept(i) + (1.0 - kept(i)) / factor));
            (scaled.collect(), attention_factor(inner, factor)?)
        }
        // An old name of longrope in Phi-3 is "yarn" too.
        "longrope" | "su" | "yarn" => {
            let factor = longrope(inner, original, most)?;
            let by = |field: &str| -> Result<Vec<f64>> {
                let factors = inner.factors(field, rotated / 2)?;
                Ok(factors.iter().enumerate().map(|(i, factor)| frequency(i) / factor).collect())
            };
            long = Some(LongRope { beyond: original, frequencies: by("long_factor")? });
            (by("short_factor")?, factor)
        }
        other => {
            return Err(inner.refuse(kind, "default, linear, llama3, yarn or longrope", format!("\"{other}\"")));
        }
    };
    let (of_scores, factor) = if rotated == head_size { (factor, 1.0) } else { (1.0, factor) };
    Ok(Rotary { rope: Arc::new(RopeSpec { frequencies, long, factor }), scores: (of_scores * of_scores) as f32 })
}

/// Longrope: what cosines and sines are multiplied by.
///
/// *Source:* Ding et al., "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", 2024; defaults of Hugging Face.
fn longrope(inner: &Fields<'_>, original: usize, most: usize) -> Result<f64> {
    if inner.get("attention_factor").is_some() {
        return inner.factor("attention_factor");
    }
    let factor = match inner.get("factor") {
        Some(_) => inner.factor("factor")?,
        None => most as f64 / original as f64,
    };
    if factor > 1.0 && original < 2 {
        return Err(inner.refuse(ORIGINAL, "more than 1", original));
    }
    Ok(if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (original as f64).ln()).sqrt() })
}

/// Llama 3.1: frequencies of fewer than `low_freq_factor` turns in the original context are divided, those of more than
/// `high_freq_factor` kept, those between blended.
fn llama3(inner: &Fields<'_>, original: usize) -> Result<impl Fn(f64) -> f64 + use<>> {
    let (low, high) = (inner.factor("low_freq_factor")?, inner.factor("high_freq_factor")?);
    if low >= high {
        return Err(inner.refuse("high_freq_factor", format!("more than low_freq_factor, {low}"), high));
    }
    let factor = inner.factor("factor")?;
    Ok(move |frequency: f64| {
        let turns = original as f64 * frequency / TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        frequency * (kept + (1.0 - kept) / factor)
    })
}

/// YaRN: how much of each pair's frequency is kept. The pairs that make `beta_fast` turns in the original context and more keep all,
/// those of `beta_slow` and fewer nothing.
///
/// *Source:* Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023; defaults of Hugging Face.
fn yarn(inner: &Fields<'_>, original: usize, theta: f64, rotated: usize) -> Result<impl Fn(usize) -> f64 + use<>> {
    let turns = |field: &str, default: f64| {
        if inner.get(field).is_some() { inner.factor(field) } else { Ok(default) }
    };
    let [fast, slow] = [turns("beta_fast", 32.0)?, turns("beta_slow", 1.0)?];
    let pair_of = |turns: f64| rotated as f64 * (original as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
    let (mut first, mut last) = (pair_of(fast), pair_of(slow));
    // A null counts as false here, as in Hugging Face.
    if !inner.is_null("truncate") && (inner.get("truncate").is_none() || inner.flag("truncate")?) {
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
