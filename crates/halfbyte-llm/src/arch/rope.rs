//! Rotary positions of a `config.json`, in either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

use super::spec::RopeSpec;
use crate::config::Fields;
use crate::error::Result;
use serde_json::Map;

/// The frequencies of heads of this size, scaled.
pub(super) fn read(fields: &Fields<'_>, head_size: usize) -> Result<RopeSpec> {
    let (theta, scaling) = parameters(fields)?;
    let of_pair = |i: usize| scaling.apply(theta.powf(-2.0 * i as f64 / head_size as f64));
    Ok(RopeSpec { frequencies: (0..head_size / 2).map(of_pair).collect() })
}

fn parameters(fields: &Fields<'_>) -> Result<(f64, RopeScaling)> {
    let name = if fields.get("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let (empty, inner) = (Map::new(), fields.inner(name)?);
    let inner = inner.unwrap_or_else(|| fields.within(name, &empty));
    let theta_in = if inner.get("rope_theta").is_some() { &inner } else { fields };
    let theta = theta_in.number("rope_theta")?.unwrap_or(10_000.0);
    if theta < 1.0 {
        return Err(theta_in.refuse("rope_theta", "a number of at least 1", theta));
    }
    for place in [&inner, fields] {
        match place.number("partial_rotary_factor")? {
            None | Some(1.0) => {}
            Some(other) => return Err(place.refuse("partial_rotary_factor", "1 (all of a head rotates)", other)),
        }
    }
    let kind = if inner.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match inner.string(kind)?.unwrap_or("default") {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear { factor: inner.factor("factor")? },
        "llama3" => {
            let (low, high) = (inner.factor("low_freq_factor")?, inner.factor("high_freq_factor")?);
            if low >= high {
                return Err(inner.refuse("high_freq_factor", format!("more than low_freq_factor, {low}"), high));
            }
            RopeScaling::Llama3 {
                factor: inner.factor("factor")?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: inner.size("original_max_position_embeddings")?,
            }
        }
        other => return Err(inner.refuse(kind, "default, linear or llama3", format!("\"{other}\""))),
    };
    Ok((theta, scaling))
}

/// How positions beyond the trained context are brought back into it.
#[derive(Clone, Copy, Debug)]
enum RopeScaling {
    /// Not at all.
    Default,
    /// Every frequency divided.
    Linear { factor: f64 },
    /// Frequencies of fewer than `low_freq_factor` turns in the original context divided, those of more than
    /// `high_freq_factor` kept, those between blended (Llama 3.1).
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original_context: usize },
}

impl RopeScaling {
    /// A frequency, in radians a position, scaled.
    fn apply(self, frequency: f64) -> f64 {
        match self {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = original_context as f64 * frequency / std::f64::consts::TAU;
                let kept = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                frequency * (kept + (1.0 - kept) / factor)
            }
        }
    }
}
