//! A mixture of experts on a CPU: each expert multiplies the rows that chose it, together.

use super::OnCpu;
use super::run::{Tap, activate};
use crate::arch::spec::Routing;
use crate::decoder::Experts;
use crate::device::room;
use crate::error::Result;
use halfbyte::cpu::Cpu;
use halfbyte::cpu::nn::{self, RouteWeights};
use std::ops::ControlFlow;

/// From normed rows `[m, hidden]` to what the experts of each row add up to, in the order of experts: a row's bits do not
/// depend on the other rows. `tap` sees the inputs of gate and up and of down of each expert that has rows, as groups from 2 on: first
/// those of all experts' gate and up, then of down; a break ends it there.
pub(super) fn forward(
    cpu: &Cpu,
    experts: &Experts<OnCpu>,
    x: &[f32],
    m: usize,
    out: &mut [f32],
    part: &mut Vec<f32>,
    tap: &mut Tap<'_>,
) -> Result<ControlFlow<()>> {
    let (hidden, count) = (x.len() / m.max(1), experts.experts.len());
    let mut logits = vec![0.0; m * count];
    experts.router.forward(cpu, x, m, &mut logits, part)?;
    let (mut ids, mut shares) = (vec![0u32; m * experts.top_k], vec![0.0; m * experts.top_k]);
    let of = match experts.routing {
        Routing::Softmax => RouteWeights::OfAll,
        Routing::SoftmaxOfChosen => RouteWeights::OfChosen,
    };
    nn::route(cpu, &logits, count, experts.top_k, of, &mut ids, &mut shares)?;
    out.fill(0.0);
    let (mut rows, mut up, mut inner, mut down) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (expert, mlp) in experts.experts.iter().enumerate() {
        let chosen = ids.iter().zip(&shares).enumerate().filter(|(_, (id, _))| **id as usize == expert);
        let of: Vec<(usize, f32)> = chosen.map(|(at, (_, share))| (at / experts.top_k, *share)).collect();
        if of.is_empty() {
            continue;
        }
        rows.clear();
        of.iter().for_each(|&(row, _)| rows.extend_from_slice(&x[row * hidden..(row + 1) * hidden]));
        let m = of.len();
        if tap(2 + expert, &rows)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let up = room(&mut up, m * mlp.up.n());
        mlp.up.forward(cpu, &rows, m, up, part)?;
        let inner = room(&mut inner, m * mlp.inner);
        activate(cpu, mlp, up, inner)?;
        if tap(2 + count + expert, inner)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
        let down = room(&mut down, m * hidden);
        mlp.down.forward(cpu, inner, m, down, part)?;
        for (&(row, weight), down) in of.iter().zip(down.chunks_exact(hidden)) {
            let out = &mut out[row * hidden..(row + 1) * hidden];
            out.iter_mut().zip(down).for_each(|(out, down)| *out += weight * down);
        }
    }
    Ok(ControlFlow::Continue(()))
}
