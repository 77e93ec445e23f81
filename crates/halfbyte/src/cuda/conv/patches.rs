//! Convolutions as products of patches: some output pixels at a time, what they see is copied into the workspace
//! (`patches.cu`) and multiplied.
//!
//! Serves what the copy engine of Hopper does not bring, and all processors before it. A slab of patches is so small that the
//! second-level cache holds it until it is multiplied. With quantised activations a row of patches has a group for each
//! position and scale, so that each pixel has the same codes in every window.

use super::images::Images;
use super::weights::Kind;
use super::{Call, Kernel, OP, Problem};
use crate::conv::{Geometry, Layout2d};
use crate::cuda::driver::{Arg, FloatView, FloatViewMut, Launch, Stream};
use crate::cuda::matmul;
use crate::cuda::sources::{Instance, Source};
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::reference::Bound;
use crate::format::{Format, Group, QTensor, WeightFormat, Zeros};
use crate::kernel::{self, Reason};
use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use std::borrow::Cow;

static SOURCE: Source = Source { path: "conv/patches.cu", text: include_str!("patches.cu") };

const NAME: &str = "patches";

/// Of the weights that it multiplies by.
pub(super) const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel {
    name: NAME,
    what: "what pixels see is copied to the workspace, a slab at a time, and multiplied by crate::cuda::matmul",
    serves: |arch| arch.number >= 80,
    instances,
    instances_of: |caps, problem, layout| {
        let products = slabs(problem).into_iter().map(|m| matmul::instances_of(caps, &product(problem, m), layout));
        let products = products.flat_map(Result::unwrap_or_default);
        instances().into_iter().chain(products).collect()
    },
    supports,
    bound,
    workspace_bytes: |caps, problem, layout| first_of_patches(caps, problem, layout) + slab_bytes(problem),
    run,
};

/// Bytes that are written at once, where rows are a whole number of them.
const PIECE_BYTES: usize = 16;

/// Bytes that are read at once, and the type that does.
const UNITS: [(usize, &str); 4] = [(16, "uint4"), (8, "uint2"), (4, "unsigned int"), (2, "unsigned short")];

/// As in the source: threads and rows of a block, and units of a row at most.
const THREADS: u32 = 256;
const ROWS: usize = 64;
const MOST_UNITS: usize = 6144;

/// Bytes of patches at a time: half of the second-level cache of the smallest processors that this is meant for.
const SLAB_BYTES: usize = 16 << 20;

/// Columns of a row of patches begin at multiples of so many.
const PIECE: usize = 8;

const ALIGNMENT: usize = 256;

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    images: Images,
    x: u64,
    out: u64,
    first: u32,
    rows: u32,
    units: u32,
    there: u32,
    elements: u32,
    unused: u32,
}

fn instance(unit: &str, together: usize) -> Instance {
    Instance::new(&SOURCE, format!("patches<{unit}, {together}>"))
}

fn instances() -> Vec<Instance> {
    let whole = UNITS.map(|(bytes, unit)| instance(unit, PIECE_BYTES / bytes));
    let single = UNITS.into_iter().filter(|&(bytes, _)| bytes < PIECE_BYTES).map(|(_, unit)| instance(unit, 1));
    whole.into_iter().chain(single).collect()
}

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

/// Output pixels of a slab.
fn slab(problem: &Problem) -> usize {
    let (format, g) = (problem.format, problem.shape.geometry());
    let row = format.map_or(g.k(), |format| columns(format, g)).max(1) * problem.x.size_bytes();
    (SLAB_BYTES / row / ROWS).max(1) * ROWS
}

/// Output pixels that are multiplied at once: of whole slabs, and of the last.
fn slabs(problem: &Problem) -> Vec<usize> {
    let (all, slab) = (problem.shape.output_pixels(), slab(problem));
    let mut sizes = vec![slab.min(all), all % slab];
    sizes.retain(|&size| size > 0);
    sizes.dedup();
    sizes
}

fn slab_bytes(problem: &Problem) -> usize {
    let (format, g) = (problem.format, problem.shape.geometry());
    let columns = format.map_or(g.k(), |format| columns(format, g));
    slab(problem).min(problem.shape.output_pixels()) * columns * problem.x.size_bytes()
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
    slabs(problem).into_iter().map(needed).max().unwrap_or(0).next_multiple_of(ALIGNMENT)
}

fn bound(caps: &Caps, problem: &Problem, layout: &str) -> Bound {
    let bounds = slabs(problem).into_iter().filter_map(|m| {
        let product = product(problem, m);
        Some(matmul::select(caps, &product, Some(layout)).ok()?.bound(caps, &product))
    });
    let rounded_weights = bounds.filter_map(|bound| bound.rounded_weights).next();
    Bound { rounded_weights, ..Bound::new(problem.y, problem.shape.geometry().k()) }
}

fn supports(caps: &Caps, problem: &Problem, layout: &str) -> std::result::Result<(), Reason> {
    let refuse = |why: String| Err(Reason(why));
    let (shape, g) = (&problem.shape, problem.shape.geometry());
    let Some(format) = problem.format else { return refuse("multiplies codes, the weights are dense".into()) };
    if layout != LAYOUT {
        return refuse(format!("multiplies weights in layout {LAYOUT}, they lie in {layout}"));
    }
    if !is_served(g) {
        return refuse("multiplies patches of one group".into());
    }
    if shape.is_product() {
        return refuse("copies nothing where pixels are the product's rows".into());
    }
    if problem.layouts[1] != Layout2d::Nhwc {
        return refuse("writes images in nhwc".into());
    }
    // However x lies: with the smallest unit that it may need.
    let units = columns(format, g);
    let reach = [0, 1].map(|axis| (g.kernel[axis] - 1) * g.dilation[axis]);
    if units > MOST_UNITS * PIECE || reach.iter().any(|&reach| reach > i16::MAX as usize) {
        return refuse(format!("has room for windows of {} columns in units of 16 bytes", MOST_UNITS * PIECE));
    }
    if unit(problem, 0).is_none_or(|(bytes, _)| units * problem.x.size_bytes() / bytes > MOST_UNITS) {
        return refuse(format!("has room for {MOST_UNITS} units of a window, which has more"));
    }
    let padded = [0, 1].map(|axis| shape.input()[axis] + g.padding[axis] + g.padding[axis + 2]);
    let reached = padded.iter().try_fold(g.ci * shape.batch().max(1), |all, &size| all.checked_mul(size));
    if padded[0] > i16::MAX as usize {
        return refuse(format!("images of up to {} rows with their padding, these have {}", i16::MAX, padded[0]));
    }
    if reached.is_none_or(|reached| reached > i32::MAX as usize) || shape.y_len() > i32::MAX as usize {
        return refuse("more elements than 31 bits count".into());
    }
    slabs(problem).into_iter().try_for_each(|m| match matmul::select(caps, &product(problem, m), Some(layout)) {
        Ok(_) => Ok(()),
        Err(why) => refuse(why.to_string()),
    })
}

/// What is moved at once from images at an address: bytes, and the type.
fn unit(problem: &Problem, address: u64) -> Option<(usize, &'static str)> {
    let element = problem.x.size_bytes();
    let pixel = problem.shape.geometry().ci * element;
    let taken = |&(bytes, _): &(usize, &str)| match problem.layouts[0] {
        Layout2d::Nhwc => bytes >= element && pixel.is_multiple_of(bytes) && address.is_multiple_of(bytes as u64),
        Layout2d::Nchw => bytes == element,
    };
    UNITS.into_iter().find(taken)
}

fn run(gpu: &Gpu, stream: &Stream, problem: &Problem, call: Call<'_>) -> Result<()> {
    let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
    let Kind::Quantized(parts) = &call.w.kind else { return refuse("a quantised weight", call.w.layout().into()) };
    let ([w], Some(format)) = (parts.as_slice(), problem.format) else {
        return refuse("one group", parts.len().to_string());
    };
    let Some(workspace) = call.workspace else { return refuse("a workspace", "none".into()) };
    let g = problem.shape.geometry();
    let (k, wide, element) = (g.k(), columns(format, g), problem.x.size_bytes());
    if w.shape() != [g.co, wide] {
        return refuse(&format!("a weight of {} × {wide}", g.co), format!("{:?}", w.shape()));
    }
    let Some((bytes, unit)) = unit(problem, call.x.pointer()) else {
        return refuse("elements that move", problem.x.to_string());
    };
    let units = wide * element / bytes;
    if units > MOST_UNITS {
        return refuse(&format!("x at a multiple of more than {bytes} bytes"), format!("{:#x}", call.x.pointer()));
    }
    let together = if (wide * element).is_multiple_of(PIECE_BYTES) { PIECE_BYTES / bytes } else { 1 };
    let function = gpu.function(&instance(unit, together))?;
    let images = Images::new(OP, &problem.shape, problem.layouts)?;
    let first_of_patches = first_of_patches(&gpu.caps(), problem, w.layout());
    let (mut workspace, patches) = workspace.split_at(first_of_patches);
    let (all, slab) = (problem.shape.output_pixels(), slab(problem));
    let mut left = call.y;
    for first in (0..all).step_by(slab) {
        let rows = slab.min(all - first);
        let params = Params {
            images,
            x: call.x.pointer(),
            out: patches.pointer(),
            first: first as u32,
            rows: rows as u32,
            units: units as u32,
            there: (k * element / bytes) as u32,
            elements: (bytes / element) as u32,
            unused: 0,
        };
        let launch = Launch::linear(rows.div_ceil(ROWS) as u32, THREADS);
        // SAFETY: the one parameter is the source's `Params`; the length of x was checked by `run_with`, that of the workspace
        // too, and patches lie in it.
        unsafe { function.launch(stream, &launch, &[Arg::new(&params)]) }?;
        let rows_of_patches = patches.slice(0..rows * wide * element);
        let x = match call.x {
            FloatView::F16(_) => FloatView::F16(rows_of_patches.cast::<f16>()),
            FloatView::BF16(_) => FloatView::BF16(rows_of_patches.cast::<bf16>()),
            FloatView::F32(_) => FloatView::F32(rows_of_patches.cast::<f32>()),
        };
        let (y, later) = split(left, rows * g.co);
        left = later;
        let (epilogue, workspace) = (call.epilogue, Some(workspace.get()));
        matmul::run(gpu, stream, matmul::Call { x, m: rows, w, epilogue, y, workspace, batch_invariant: false })?;
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
