//! Which experts a token goes to.

use super::exp::exp_f64;
use super::{in_tasks, rows_of, same_length};
use crate::cpu::Cpu;
use crate::cpu::disjoint::DisjointMut;
use crate::error::{Error, Result};

/// What the weights of the chosen experts add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RouteWeights {
    /// Softmax over all experts: the chosen keep their shares, less than 1 together.
    OfAll,
    /// Softmax over the chosen, 1 together: what a softmax over all comes to when the chosen are renormalised.
    OfChosen,
}

/// The `top_k` experts with the greatest logits of each row, the greatest first, of equals the lower id; and their weights.
///
/// *Shapes:* `logits` `[m, experts]`, `ids` and `weights` `[m, top_k]`. *Accuracy:* relative error ≤ 2⁻²³ for weights above
/// 2⁻¹²⁶: sums are f64, rounded once. *Errors:* lengths that do not fit, more experts chosen than there are or none, logits
/// that are not finite. *Source:* Shazeer et al., "Outrageously Large Neural Networks", 2017.
pub fn route(
    cpu: &Cpu,
    logits: &[f32],
    experts: usize,
    top_k: usize,
    normalise: RouteWeights,
    ids: &mut [u32],
    weights: &mut [f32],
) -> Result<()> {
    const OP: &str = "route";
    let m = rows_of(OP, logits.len(), experts)?;
    if top_k == 0 || top_k > experts || u32::try_from(experts).is_err() {
        let expected = format!("from 1 to {experts} experts chosen, of fewer than 2³²");
        return Err(Error::invalid(OP, expected, top_k.to_string()));
    }
    same_length(OP, "ids", m * top_k, ids.len())?;
    same_length(OP, "weights", m * top_k, weights.len())?;
    if let Some(at) = logits.iter().position(|logit| !logit.is_finite()) {
        let (value, row, column) = (logits[at].to_string(), at / experts, at % experts);
        return Err(Error::NotFinite { op: OP, value, row, column });
    }
    let (ids, weights) = (DisjointMut::new(ids), DisjointMut::new(weights));
    in_tasks(cpu, m, 4 * experts, &|range| {
        let chosen = range.start * top_k..range.end * top_k;
        // SAFETY: ranges of rows are disjoint.
        let (ids, weights) = unsafe { (ids.range(chosen.clone()), weights.range(chosen)) };
        let rows = logits[range.start * experts..range.end * experts].chunks_exact(experts);
        for ((row, ids), weights) in rows.zip(ids.chunks_exact_mut(top_k)).zip(weights.chunks_exact_mut(top_k)) {
            choose(row, ids);
            weigh(row, ids, normalise, weights);
        }
    });
    Ok(())
}

/// The greatest logits in descending order, by insertion: a logit goes behind its equals, whose ids are lower.
fn choose(logits: &[f32], ids: &mut [u32]) {
    let mut count = 0;
    for (id, &logit) in logits.iter().enumerate() {
        let place = ids[..count].iter().rposition(|&other| logits[other as usize] >= logit).map_or(0, |i| i + 1);
        if place == ids.len() {
            continue;
        }
        count = (count + 1).min(ids.len());
        ids.copy_within(place..count - 1, place + 1);
        ids[place] = id as u32;
    }
}

fn weigh(logits: &[f32], ids: &[u32], normalise: RouteWeights, weights: &mut [f32]) {
    let greatest = f64::from(logits[ids[0] as usize]);
    let exp_of = |logit: f32| exp_f64([f64::from(logit) - greatest])[0];
    let chosen = || ids.iter().map(|&id| exp_of(logits[id as usize]));
    let total: f64 = match normalise {
        RouteWeights::OfAll => logits.iter().map(|&logit| exp_of(logit)).sum(),
        RouteWeights::OfChosen => chosen().sum(),
    };
    weights.iter_mut().zip(chosen()).for_each(|(weight, e)| *weight = (e / total) as f32);
}
