//! What stands between the products of a language model: norms, activations, rotations, and what reads logits.
//!
//! All matrices are f32 and row-major. An output element is computed in one order whatever the number of threads, so
//! the same input gives the same bits. NaN goes in and comes out.

mod activation;
mod exp;
mod logits;
mod norm;
mod rope;
mod route;

pub use activation::{clamped_swiglu, geglu, geglu_tanh, gelu, gelu_tanh, soft_cap, swiglu};
pub use logits::{argmax, kl_divergence, log_sum_exp, softmax_in_place};
pub use norm::{add_layer_norm, add_rms_norm, head_rms_norm, layer_norm, rms_norm};
pub use rope::Rope;
pub use route::{RouteWeights, route};

pub(crate) use exp::{exp2, tanh};

use super::Cpu;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, Simd, dispatch};
use crate::checks::{rows_of, same_length};
use crate::error::Result;
use std::ops::Range;

/// Elements that a task has at least. Less is faster done than handed out.
const ELEMENTS_PER_TASK: usize = 16 * 1024;

/// `residual += delta`, element by element. *Errors:* different lengths.
pub fn add(cpu: &Cpu, residual: &mut [f32], delta: &[f32]) -> Result<()> {
    same_length("add", "delta", residual.len(), delta.len())?;
    let residual = DisjointMut::new(residual);
    in_tasks(cpu, delta.len(), 1, &|range| {
        // SAFETY: the ranges are disjoint.
        let sum = unsafe { residual.range(range.clone()) };
        dispatch(cpu, Add { sum, delta: &delta[range] });
    });
    Ok(())
}

/// Cuts `items` of `cost` each (in elements) into tasks for the team; a small job stays on this thread.
fn in_tasks(cpu: &Cpu, items: usize, cost: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
    let team = cpu.threads();
    let tasks = (items.saturating_mul(cost) / ELEMENTS_PER_TASK).min(items).min(4 * team.count());
    if tasks < 2 || team.count() == 1 {
        return task(0..items);
    }
    team.run(tasks, &|i| task(items * i / tasks..items * (i + 1) / tasks));
}

struct Add<'a> {
    sum: &'a mut [f32],
    delta: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (sum, &delta) in self.sum.iter_mut().zip(self.delta) {
            *sum += delta;
        }
    }
}
