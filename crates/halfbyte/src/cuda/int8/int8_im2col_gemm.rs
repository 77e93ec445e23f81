//! im2col and GEMM of bytes: for some output pixels at a time, what they see is copied into the workspace as rows of a matrix
//! ([`crate::cuda::conv`] has the copy) and multiplied by `int8_sm90`.
//!
//! Serves what the copy engine does not bring: planes, and few channels. The padding is copied as the zero point of x, so that the
//! product knows of none.

use super::{Call, Kernel, Problem, Target, int8_sm90};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::conv::im2col::{self, Patches};
use crate::cuda::driver::Stream;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::Reason;

const NAME: &str = "int8_im2col_gemm";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "what pixels see is copied to the workspace, a slab at a time, and multiplied by int8_sm90",
    serves: |arch| arch.number == 90 && arch.specific,
    instances: im2col::instances,
    supports,
    workspace_bytes: |problem| Workspace::COUNTER_BYTES + patches(problem, 0).slab_bytes(),
    run,
};

/// Bytes that a row of patches is a multiple of: the columns behind those of a window meet zeros of the weight.
const PIECE: usize = 16;

fn patches(problem: &Problem, fill: u8) -> Patches {
    let wide = problem.shape.geometry().k().next_multiple_of(PIECE);
    Patches { shape: problem.shape, layout: problem.layouts[0], element: 1, wide, fill }
}

/// The product of so many rows of patches: a convolution of one position on a row of pixels.
fn product(problem: &Problem, rows: usize) -> Result<Problem> {
    let (g, wide) = (problem.shape.geometry(), patches(problem, 0).wide);
    let shape = Conv2dShape::new(Geometry::new(wide, g.co, [1, 1]), 1, [1, rows])?;
    Ok(Problem { shape, layouts: [Layout2d::Nhwc; 2], ..*problem })
}

fn supports(caps: &Caps, problem: &Problem) -> std::result::Result<(), Reason> {
    if problem.layouts[1] != Layout2d::Nhwc {
        return Err(Reason("writes images in nhwc".into()));
    }
    let patches = patches(problem, 0);
    patches.are_copied()?;
    let product = product(problem, patches.slab().max(1)).map_err(|why| Reason(why.to_string()))?;
    int8_sm90::KERNEL.supports(caps, &product)
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let Target::Bytes(y) = &call.y else { return Err(Error::invalid(NAME, "outputs in bytes", "outputs in floats")) };
    let Some(workspace) = call.workspace else { return Err(Error::invalid(NAME, "a workspace", "none")) };
    let patches = patches(problem, call.layer.x().zero() as u8);
    let (_, room) = workspace.split_at(Workspace::COUNTER_BYTES);
    let co = problem.shape.geometry().co;
    for pixels in patches.slabs() {
        patches.copy(gpu, stream, call.x.pointer(), &pixels, room.pointer())?;
        let product = product(problem, pixels.len())?;
        let x = room.slice(0..pixels.len() * patches.wide);
        int8_sm90::multiply(gpu, stream, call.layer, product.shape, x, y.pointer() + (pixels.start * co) as u64)?;
    }
    Ok(())
}
