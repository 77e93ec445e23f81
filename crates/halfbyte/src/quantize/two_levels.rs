//! Scales on two levels: the scale of a channel, and what a group may have under it.
//!
//! ```text
//! channel = the least number of its type so that each group's own scale is at most its greatest factor times it
//! of a group:  factors next to (own scale / channel), or with a search from half of that on;
//!              zero points for the own range and for that of the factor;   the pair of least error
//! ```

use super::rtn::{Params, Range};
use crate::format::Zero;
use crate::format::factors::{MOST_FACTOR, most_factor};
use crate::tensor::Float;
use half::{bf16, f16};

impl Range {
    /// The scale of the channel that has these groups; None where groups have scales of their own.
    pub fn channel<'a>(&self, groups: impl Iterator<Item = &'a [f32]>) -> Option<f32> {
        let dtype = self.format.channel_scale?;
        let needs = groups.map(|group| {
            let own = self.full(group);
            own.scale / most_factor(own.zero as u32) as f32
        });
        Some(at_least(needs.fold(0.0, f32::max), dtype))
    }

    /// What a group may have under the scale of its channel.
    pub(super) fn multiples(&self, group: &[f32], channel: f32) -> Vec<Params> {
        let own = self.full(group);
        let ratio = if channel > 0.0 { own.scale / channel } else { 0.0 };
        // Weights may have grown since the scale of the channel was found.
        let fits = most_factor(own.zero as u32);
        let most = (ratio.ceil().max(1.0) as u32).min(MOST_FACTOR);
        let least = ((ratio * if self.options.search { 0.5 } else { 1.0 }).floor().max(1.0) as u32).min(fits);
        let low = group.iter().fold(0.0f32, |a, &v| a.min(v));
        let mut found = Vec::with_capacity(2 * (most - least + 1) as usize);
        for factor in least..=most {
            let scale = channel * factor as f32;
            let of_factor = (-low / scale).round_ties_even().clamp(0.0, 15.0);
            let other = self.format.zero == Zero::Integer && scale > 0.0 && of_factor != own.zero;
            for zero in [Some(own.zero), other.then_some(of_factor)].into_iter().flatten() {
                if factor <= most_factor(zero as u32) {
                    found.push(Params { scale, zero });
                }
            }
        }
        found
    }
}

/// The least number of the type that is no smaller; v is not negative.
fn at_least(v: f32, dtype: Float) -> f32 {
    match dtype {
        Float::F16 => {
            let near = f16::from_f32(v);
            if near.to_f32() < v { f16::from_bits(near.to_bits() + 1).to_f32() } else { near.to_f32() }
        }
        Float::BF16 => {
            let near = bf16::from_f32(v);
            if near.to_f32() < v { bf16::from_bits(near.to_bits() + 1).to_f32() } else { near.to_f32() }
        }
        Float::F32 => v,
    }
}
