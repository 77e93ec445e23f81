//! Implicit GEMM of bytes on every processor from sm_75 on whose groups have any number of channels: `int8_mma.cu`, which copies
//! what divides them, 8, 4, 2 channels or 1 at a time.
//!
//! Stands behind the kernel that is faster where it serves: groups of few channels and as many outputs.

use super::int8_mma::{self, Implicit, PIECE};
use super::{Kernel, Problem};
use crate::conv::Geometry;
use crate::cuda::Caps;
use crate::kernel::Reason;
use crate::layout::cuda_int8::{STEP, STRIP};

pub(super) const KERNEL: Kernel = Kernel {
    name: "int8_mma_narrow",
    what: "int8_mma for groups of any number of channels, windows of images 8, 4, 2 channels or 1 at a time",
    serves: |arch| arch.number >= 75,
    instances: int8_mma::narrow_instances,
    every_instance: |_, _| Vec::new(),
    choose: |caps, problem| Ok(Box::new(choose(caps, problem)?)),
    candidates: |caps, problem| choose(caps, problem).map_or_else(|_| Vec::new(), Implicit::in_every_config),
};

/// Multiply-adds of tensor cores that take as long as one of ordinary threads, at most; as for floats.
const MOST_MULTIPLIED: usize = 128;

fn choose(caps: &Caps, problem: &Problem) -> Result<Implicit, Reason> {
    let g = problem.shape.geometry();
    problem.is_in_nhwc()?;
    if g.channels().is_multiple_of(PIECE) {
        return Err(Reason(format!("leaves a multiple of {PIECE} channels of a group to int8_mma")));
    }
    if is_wasted(g) {
        let (outputs, k) = (g.outputs(), g.k());
        let why = format!("multiplies more than {MOST_MULTIPLIED} times as much as {outputs} outputs by {k} columns");
        return Err(Reason(why));
    }
    Implicit::of_any_channels(caps, problem)
}

/// Whether so little of what tensor cores multiply is of a group that ordinary threads are as fast.
fn is_wasted(g: &Geometry) -> bool {
    let multiplied = g.outputs().next_multiple_of(STRIP).saturating_mul(g.k().next_multiple_of(STEP));
    multiplied / MOST_MULTIPLIED > g.outputs().saturating_mul(g.k())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_very_few_columns_and_outputs_are_left_to_ordinary_threads() {
        let wasted = |channels: usize, outputs: usize, kernel: usize| {
            let geometry = Geometry::new(2 * channels, 2 * outputs, [kernel; 2]);
            is_wasted(&Geometry { groups: 2, ..geometry })
        };
        assert!(wasted(1, 2, 3) && wasted(3, 1, 3) && wasted(20, 3, 1));
        assert!(!wasted(3, 3, 3) && !wasted(2, 40, 4) && !wasted(8, 16, 3) && !wasted(24, 12, 3));
    }
}
