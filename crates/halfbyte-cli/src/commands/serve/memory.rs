//! How much memory is for keys and values: one budget for all models.

use super::{Choices, Loaded, PARALLEL};
use crate::failure::{Failure, Result};
use crate::machine;
use crate::text::bytes;
use halfbyte::kv_pages::PAGE_LENGTH;
use halfbyte_llm::Device;

/// Shares of what is free that are taken where nobody says how much: memory is taken as texts come, a GPU's at once.
const SHARE: (f64, f64) = (0.8, 0.9);

/// Positions of keys and values for each model: what was said, else as many as all texts at once could have, as far as memory goes.
/// Error: a budget that does not hold the weights and a page for each.
pub(super) fn positions(loaded: &[Loaded], choices: &Choices) -> Result<Vec<usize>> {
    let of = |loaded: &Loaded| loaded.model.kv_bytes_per_token().max(1);
    let wish = |one: &Loaded| {
        let texts = one.choices.parallel.or(choices.parallel).map_or(PARALLEL, |n| n as usize);
        let context = one.model.config().spec.max_context;
        context.saturating_mul(texts).saturating_mul(of(one))
    };
    let said = |one: &Loaded| one.choices.positions.or(choices.positions).map(|n| n as usize);
    let taken: usize = loaded.iter().filter_map(|one| Some(said(one)?.saturating_mul(of(one)))).sum();
    let left = room(loaded, choices)?.saturating_sub(taken);
    let wishes: f64 = loaded.iter().filter(|one| said(one).is_none()).map(|one| wish(one) as f64).sum();
    let share = (left as f64 / wishes.max(1.0)).min(1.0);
    let positions = loaded.iter().map(|one| {
        let positions =
            said(one).unwrap_or_else(|| (wish(one) as f64 * share) as usize / of(one) / PAGE_LENGTH * PAGE_LENGTH);
        if positions == 0 {
            return Err(Failure::memory(
                format!("there is no room for keys and values of {}", one.name),
                format!("{} are left, and a page takes {}", bytes(left as u64), bytes((of(one) * PAGE_LENGTH) as u64)),
            ));
        }
        Ok(positions)
    });
    positions.collect()
}

/// Bytes for keys and values of all models.
fn room(loaded: &[Loaded], choices: &Choices) -> Result<usize> {
    let weights: usize = loaded.iter().map(|one| one.model.weight_bytes()).sum();
    if let Some(memory) = choices.memory() {
        return memory.checked_sub(weights as u64).map(|left| left as usize).ok_or_else(|| {
            Failure::usage(
                "--memory does not hold the weights",
                format!("they take {}, and it says {}", bytes(weights as u64), bytes(memory)),
                "raise it, or serve fewer or smaller models",
            )
        });
    }
    let on_gpu = loaded.iter().find_map(|one| match one.model.device() {
        Device::Cuda(gpu) => Some(gpu.gpu.context().memory()),
        Device::Cpu => None,
    });
    Ok(match on_gpu {
        Some(memory) => (memory?[0] as f64 * SHARE.1) as usize,
        None => (machine::memory_available().unwrap_or(u64::MAX) as f64 * SHARE.0) as usize,
    })
}
