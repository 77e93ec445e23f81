//! im2col and GEMM: for some output pixels at a time, what they see is copied into the workspace as rows of a matrix
//! ([`super::im2col`]) and multiplied.
//!
//! Serves what the copy engine of Hopper does not bring, and all processors before it. A slab of patches is so small that the
//! second-level cache holds it until it is multiplied. With quantised activations a row of patches has a group for each
//! position and scale, so that each pixel has the same codes in every window.

use super::im2col::{self, Patches};
use super::weights::Kind;
use super::{Call, Kernel, Problem};
use crate::conv::{Geometry, Layout2d};
use crate::cuda::driver::{FloatView, FloatViewMut, Stream};
use crate::cuda::matmul;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Format, Group, QTensor, WeightFormat, Zeros};
use crate::kernel::{self, Reason};
use half::{bf16, f16};
use std::borrow::Cow;

const NAME: &str = "im2col_gemm";

/// Of the weights that it multiplies by.
pub(super) const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "what pixels see is copied to the workspace, a slab at a time, and multiplied by crate::cuda::matmul",
    serves: |arch| arch.number >= 80,
    instances: im2col::instances,
    instances_of: |caps, problem, layout| {
        let products = sizes(problem).into_iter().map(|m| matmul::instances_of(caps, &product(problem, m), layout));
        let products = products.flat_map(Result::unwrap_or_default);
        im2col::instances().into_iter().chain(products).collect()
    },
    supports,
    bound,
    workspace_bytes: |caps, problem, layout| first_of_patches(caps, problem, layout) + patches(problem).slab_bytes(),
    run,
};

/// Columns of a row of patches begin at multiples of so many.
const PIECE: usize = 8;

const ALIGNMENT: usize = 256;

/// The format in which a weight is multiplied by patches: with quantised activations, a scale for each position, since each has
/// the scale of x that its pixel has.
fn format_of(format: Format, geometry: &Geometry) -> Format {
    match geometry.scale_channels(format.weight.group) {
        Ok(share) if format.act.is_quantized() && geometry.positions() > 1 => {
            Format { weight: WeightFormat { group: Group::Size(share), ..format.weight }, ..format }
        }
        _ => format,
    }
}

/// Columns of patches: those of windows, and zeros that fill pieces up where all columns of a row have one scale.
fn columns(format: Format, geometry: &Geometry) -> usize {
    let k = geometry.k();
    // What is quantised on the fly needs no pieces, and zeros would count as elements of x.
    let fills = !format.act.is_quantized() && format.weight.group.count(k) == 1;
    if fills { k.next_multiple_of(PIECE) } else { k }
}

/// A weight as patches are multiplied by it. None: it has no numbers that stand for what is filled up.
pub(super) fn weight<'a>(w: &'a QTensor, format: Format, geometry: &Geometry) -> Result<Option<Cow<'a, QTensor>>> {
    let by_position = w.express(format_of(format, geometry).weight)?;
    let (n, k, wide) = (w.n(), w.k(), columns(format, geometry));
    if wide == k {
        return Ok(Some(by_position));
    }
    let zero = |i: usize| match w.zeros() {
        Zeros::Symmetric => Some(w.format().middle()),
        Zeros::Integer(zeros) => Some(u32::from(zeros[i])).filter(|&zero| zero <= w.format().max_code()),
        Zeros::Float(_) => None,
    };
    let mut codes = Vec::with_capacity(n * wide);
    for i in 0..n {
        let Some(zero) = zero(i) else { return Ok(None) };
        codes.extend_from_slice(&w.codes()[i * k..(i + 1) * k]);
        codes.resize((i + 1) * wide, zero as u8);
    }
    let wider = QTensor::new(w.format(), [n, wide], codes, w.scales().to_vec(), w.zeros().clone(), None)?;
    Ok(Some(Cow::Owned(wider)))
}

/// Whether a convolution's weights may be packed for products of patches.
pub(super) fn is_served(geometry: &Geometry) -> bool {
    geometry.groups == 1
}

/// What is copied.
fn patches(problem: &Problem) -> Patches {
    let g = problem.shape.geometry();
    let wide = problem.format.map_or(g.k(), |format| columns(format, g));
    let (shape, layout, element) = (problem.shape, problem.layouts[0], problem.x.size_bytes());
    Patches { shape, layout, element, wide, fill: 0 }
}

/// Output pixels that are multiplied at once: of whole slabs, and of the last.
fn sizes(problem: &Problem) -> Vec<usize> {
    let mut sizes: Vec<usize> = patches(problem).slabs().map(|pixels| pixels.len()).collect();
    sizes.dedup();
    sizes
}

/// The product of so many rows of patches.
fn product(problem: &Problem, m: usize) -> kernel::Problem {
    let g = problem.shape.geometry();
    let format = problem.format.map(|format| format_of(format, g));
    let k = problem.format.map_or(g.k(), |format| columns(format, g));
    kernel::Problem { format, x: problem.x, y: problem.y, m, n: g.co, k }
}

/// Where patches begin in the workspace.
fn first_of_patches(caps: &Caps, problem: &Problem, layout: &str) -> usize {
    let needed = |m| matmul::workspace_bytes(caps, &product(problem, m), layout).unwrap_or(0);
    sizes(problem).into_iter().map(needed).max().unwrap_or(0).next_multiple_of(ALIGNMENT)
}

fn bound(caps: &Caps, problem: &Problem, layout: &str) -> Bound {
    let bounds = sizes(problem).into_iter().filter_map(|m| {
        let product = product(problem, m);
        Some(matmul::select(caps, &product, Some(layout)).ok()?.bound(caps, &product))
    });
    let rounded_weights = bounds.filter_map(|bound| bound.rounded_weights).next();
    Bound { rounded_weights, ..Bound::new(problem.y, problem.shape.geometry().k()) }
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    if problem.format.is_none() {
        return refuse("multiplies codes, the weights are dense".into());
    }
    if layout != LAYOUT {
        return refuse(format!("multiplies weights in layout {LAYOUT}, they lie in {layout}"));
    }
    if problem.shape.is_product() {
        return refuse("copies nothing where pixels are the product's rows".into());
    }
    if problem.layouts[1] != Layout2d::Nhwc {
        return refuse("writes images in nhwc".into());
    }
    patches(problem).are_copied()?;
    sizes(problem).into_iter().try_for_each(|m| match matmul::select(caps, &product(problem, m), Some(layout)) {
        Ok(_) => Ok(()),
        Err(why) => refuse(why.to_string()),
    })
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let Kind::Quantized(parts) = &call.w.kind else { return refuse("a quantised weight", call.w.layout().into()) };
    let [w] = parts.as_slice() else { return refuse("one group", parts.len().to_string()) };
    let Some(workspace) = call.workspace else { return refuse("a workspace", "none".into()) };
    let (patches, co) = (patches(problem), problem.shape.geometry().co);
    if w.shape() != [co, patches.wide] {
        return refuse(&format!("a weight of {co} × {}", patches.wide), format!("{:?}", w.shape()));
    }
    let first_of_patches = first_of_patches(&gpu.caps(), problem, w.layout());
    let (mut workspace, room) = workspace.split_at(first_of_patches);
    let mut left = call.y;
    for pixels in patches.slabs() {
        patches.copy(gpu, stream, call.x.pointer(), &pixels, room.pointer())?;
        let m = pixels.len();
        let rows = room.slice(0..m * patches.wide * patches.element);
        let x = match call.x {
            FloatView::F16(_) => FloatView::F16(rows.cast::<f16>()),
            FloatView::BF16(_) => FloatView::BF16(rows.cast::<bf16>()),
            FloatView::F32(_) => FloatView::F32(rows.cast::<f32>()),
        };
        let (y, later) = split(left, m * co);
        left = later;
        let (epilogue, workspace) = (call.epilogue, Some(workspace.get()));
        matmul::run(gpu, stream, matmul::Call { x, m, w, epilogue, y, workspace, batch_invariant: false })?;
    }
    Ok(())
}

/// The elements before one, and the others.
fn split(y: FloatViewMut<'_>, at: usize) -> (FloatViewMut<'_>, FloatViewMut<'_>) {
    match y {
        FloatViewMut::F16(y) => {
            let (a, b) = y.split_at(at);
            (FloatViewMut::F16(a), FloatViewMut::F16(b))
        }
        FloatViewMut::BF16(y) => {
            let (a, b) = y.split_at(at);
            (FloatViewMut::BF16(a), FloatViewMut::BF16(b))
        }
        FloatViewMut::F32(y) => {
            let (a, b) = y.split_at(at);
            (FloatViewMut::F32(a), FloatViewMut::F32(b))
        }
    }
}
