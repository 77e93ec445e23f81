//! Rotary frequencies that a checkpoint holds as tensors, `inv_freq`, though they follow from its config.

use super::metadata::Config;
use super::rope::rope_factors;
use halfbyte::{Float, Floats};
use serde_json::{Map, Value};

/// How far frequencies in f32 may lie from the formula's, relative: powers are computed in singles.
const TOLERANCE: f64 = 1e-5;

/// Whether a tensor of this name holds the frequencies of a layer.
pub(crate) fn is_frequencies(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

/// Whether these are the frequencies that a config gives, as far as their type holds them: before scaling, as older versions of
/// transformers keep them, or scaled. False also for configs that do not give them by themselves.
pub(crate) fn follow_from(config: &Map<String, Value>, frequencies: Floats<'_>) -> bool {
    let given = || {
        let config = Config(config);
        let (head_dim, theta) = (config.head_dim().ok()?, config.rope_theta().ok()?);
        let share = ["partial_rotary_factor", "rotary_pct"].into_iter().find_map(|field| config.float(field).ok());
        let rotated = (head_dim as f64 * share.unwrap_or(1.0)) as usize;
        let plain: Vec<f64> = (0..rotated / 2).map(|i| theta.powf(-2.0 * i as f64 / rotated as f64)).collect();
        let scaled: Option<Vec<f64>> = match config.rope_scaling().ok()? {
            Some(("linear", scaling)) => {
                let factor = Config(scaling).float("factor").ok()?;
                Some(plain.iter().map(|f| f / factor).collect())
            }
            Some(("llama3", _)) => {
                let factors = rope_factors(config.0).ok()??;
                Some(plain.iter().zip(factors).map(|(f, by)| f / f64::from(by)).collect())
            }
            _ => None,
        };
        Some([Some(plain), scaled])
    };
    let of_type = match frequencies.dtype() {
        Float::F32 => 0.0,
        Float::F16 => 2f64.powi(-11),
        Float::BF16 => 2f64.powi(-8),
    };
    // The smallest steps of f16 lie further apart than its precision says.
    let step = if frequencies.dtype() == Float::F16 { 2f64.powi(-24) } else { 0.0 };
    let is_near = |(i, &expected): (usize, &f64)| {
        (f64::from(frequencies.get(i)) - expected).abs() <= (TOLERANCE + of_type) * expected + step
    };
    let are = |expected: Vec<f64>| expected.len() == frequencies.len() && expected.iter().enumerate().all(is_near);
    given().is_some_and(|given| given.into_iter().flatten().any(are))
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use serde_json::json;

    fn plain(rotated: usize, theta: f64) -> Vec<f32> {
        // In singles, as torch does it.
        (0..rotated / 2).map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / rotated as f32)).collect()
    }

    #[test]
    fn frequencies_of_a_config_are_told_from_others() {
        let config = |fields: Value| {
            let mut config = json!({"hidden_size": 256, "num_attention_heads": 4, "rope_theta": 1e6});
            config.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            config.as_object().unwrap().clone()
        };
        let own = config(json!({}));
        let of_theta = plain(64, 1e6);
        assert!(follow_from(&own, Floats::F32(&of_theta)));
        let halves: Vec<f16> = of_theta.iter().map(|&f| f16::from_f32(f)).collect();
        assert!(follow_from(&own, Floats::F16(&halves)));
        // Of another base, length or scale, or with one that is off.
        for other in [plain(64, 1e4), plain(32, 1e6), plain(128, 1e6), of_theta.iter().map(|f| f / 2.0).collect()] {
            assert!(!follow_from(&own, Floats::F32(&other)));
        }
        for (at, by) in [(0, 1.0001), (31, 1.0001), (31, 0.0), (7, f32::NAN)] {
            let mut other = of_theta.clone();
            other[at] *= by;
            assert!(!follow_from(&own, Floats::F32(&other)), "{at}");
        }
        // A part of the head; a head of its own length; another base.
        assert!(follow_from(&config(json!({"rotary_pct": 0.25})), Floats::F32(&plain(16, 1e6))));
        assert!(follow_from(&config(json!({"head_dim": 32})), Floats::F32(&plain(32, 1e6))));
        assert!(follow_from(&config(json!({"rope_theta": null})), Floats::F32(&plain(64, 1e4))));
        let linear = config(json!({"rope_scaling": {"type": "linear", "factor": 4.0}}));
        let scaled: Vec<f32> = of_theta.iter().map(|f| f / 4.0).collect();
        assert!(follow_from(&linear, Floats::F32(&of_theta)) && follow_from(&linear, Floats::F32(&scaled)));
        assert!(!follow_from(&own, Floats::F32(&scaled)));
        let llama3 = config(json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}));
        let factors = rope_factors(&llama3).unwrap().unwrap();
        let scaled: Vec<f32> = of_theta.iter().zip(&factors).map(|(f, by)| f / by).collect();
        assert!(factors.iter().any(|&by| by != 1.0) && follow_from(&llama3, Floats::F32(&scaled)));
        assert!(!follow_from(&Map::new(), Floats::F32(&of_theta)));
    }
}
