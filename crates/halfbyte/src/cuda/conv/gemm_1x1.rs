//! 1 × 1 convolution as a GEMM: with stride 1 and images in nhwc, x is the matrix of the product as it lies.

use super::weights::Kind;
use super::{Call, Kernel, Problem, implicit_gemm_sm90};
use crate::conv::Layout2d;
use crate::cuda::driver::Stream;
use crate::cuda::matmul;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::kernel::{self, Reason};
use crate::layout::cuda_wna16::STRIP;

pub(super) const KERNEL: Kernel = Kernel {
    name: "gemm_1x1",
    what: "one position, stride 1, no padding: the product of crate::cuda::matmul",
    serves: |_| true,
    instances: Vec::new,
    instances_of: |caps, problem, layout| matmul::instances_of(caps, &of(problem), layout).unwrap_or_default(),
    supports,
    bound: |caps, problem, layout| match matmul::select(caps, &of(problem), Some(layout)) {
        Ok(kernel) => kernel.bound(caps, &of(problem)),
        Err(_) => Bound::new(problem.y, problem.shape.geometry().k()),
    },
    workspace_bytes: |caps, problem, layout| matmul::workspace_bytes(caps, &of(problem), layout).unwrap_or(0),
    run,
};

/// Pixels from which tiles of one strip fill a device.
const MANY_PIXELS: usize = 4096;

/// The product with a row for each pixel.
fn of(problem: &Problem) -> kernel::Problem {
    let g = problem.shape.geometry();
    let (m, n, k) = (problem.shape.output_pixels(), g.co, g.k());
    kernel::Problem { format: problem.format, x: problem.x, y: problem.y, m, n, k }
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    if !problem.shape.is_product() {
        return Err(Reason("computes one position with stride 1, no padding and one group".into()));
    }
    if problem.layouts != [Layout2d::Nhwc; 2] {
        return Err(Reason("reads and writes images in nhwc".into()));
    }
    // Few outputs of many pixels: products have no tile of one strip.
    let narrow = problem.shape.geometry().co <= STRIP && problem.shape.output_pixels() >= MANY_PIXELS;
    if narrow && implicit_gemm_sm90::KERNEL.supports(caps, problem, layout).is_ok() {
        return Err(Reason(format!(
            "leaves up to {STRIP} outputs of {MANY_PIXELS} pixels or more to implicit_gemm_sm90"
        )));
    }
    matmul::select(caps, &of(problem), Some(layout)).map(|_| ()).map_err(|why| Reason(why.to_string()))
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let Call { x, w, epilogue, y, workspace, .. } = call;
    let Kind::Quantized(parts) = &w.kind else {
        return Err(Error::invalid("gemm_1x1", "a quantised weight", w.layout()));
    };
    let [w] = parts.as_slice() else {
        return Err(Error::invalid("gemm_1x1", "one group", parts.len().to_string()));
    };
    let m = problem.shape.output_pixels();
    matmul::run(gpu, stream, matmul::Call { x, m, w, epilogue, y, workspace, batch_invariant: false })
}
