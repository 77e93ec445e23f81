//! A mixture of experts on a CPU: each expert multiplies the rows that chose it, together.

use super::OnCpu;
use super::run::activate;
use crate::arch::spec::Routing;
use crate::decoder::Experts;
use crate::device::room;
use crate::error::Result;
use halfbyte::cpu::Cpu;

/// From normed rows `[m, hidden]` to what the experts of each row add up to, in the order of experts: a row's bits do not
/// depend on the other rows.
pub(super) fn forward(
    cpu: &Cpu,
    experts: &Experts<OnCpu>,
    x: &[f32],
    m: usize,
    out: &mut [f32],
    part: &mut Vec<f32>,
) -> Result<()> {
    let (hidden, count) = (x.len() / m.max(1), experts.experts.len());
    let mut logits = vec![0.0; m * count];
    experts.router.forward(cpu, x, m, &mut logits, part)?;
    let chosen = route(&mut logits, count, experts.top_k, experts.routing);
    out.fill(0.0);
    let (mut rows, mut up, mut inner, mut down) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (expert, mlp) in experts.experts.iter().enumerate() {
        let of: Vec<(usize, f32)> = (0..m)
            .flat_map(|row| chosen[row].iter().filter(|(e, _)| *e == expert).map(move |(_, w)| (row, *w)))
            .collect();
        if of.is_empty() {
            continue;
        }
        rows.clear();
        of.iter().for_each(|&(row, _)| rows.extend_from_slice(&x[row * hidden..(row + 1) * hidden]));
        let m = of.len();
        let up = room(&mut up, m * mlp.up.n());
        mlp.up.forward(cpu, &rows, m, up, part)?;
        let inner = room(&mut inner, m * mlp.inner);
        activate(cpu, mlp, up, inner)?;
        let down = room(&mut down, m * hidden);
        mlp.down.forward(cpu, inner, m, down, part)?;
        for (&(row, weight), down) in of.iter().zip(down.chunks_exact(hidden)) {
            let out = &mut out[row * hidden..(row + 1) * hidden];
            out.iter_mut().zip(down).for_each(|(out, down)| *out += weight * down);
        }
    }
    Ok(())
}

fn route(logits: &mut [f32], count: usize, top_k: usize, routing: Routing) -> Vec<Vec<(usize, f32)>> {
    logits
        .chunks_exact_mut(count)
        .map(|row| {
            let mut order: Vec<usize> = (0..count).collect();
            order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
            order.truncate(top_k);
            let most = row[order[0]];
            let exp = |i: usize| (row[i] - most).exp();
            let sum: f32 = match routing {
                Routing::Softmax => (0..count).map(exp).sum(),
                Routing::SoftmaxOfChosen => order.iter().map(|&i| exp(i)).sum(),
            };
            order.iter().map(|&i| (i, exp(i) / sum)).collect()
        })
        .collect()
}
