//! im2col and GEMM: for some output pixels at a time, what they see is copied into the workspace as rows of a matrix
//! ([`super::im2col`]) and multiplied.
//!
//! Serves what the copy engine of Hopper does not bring, and all processors before it. A slab of patches is so small that the
//! second-level cache holds it until it is multiplied. With quantised activations a row of patches has a group for each
//! position and scale, so that each pixel has the same codes in every window.

use super::gemm_1x1::{Gemm, one_part};
use super::im2col::{self, Patches};
use super::{Call, Convolution, Kernel, Problem};
use crate::conv::{Geometry, Layout2d};
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{FloatView, FloatViewMut, Stream};
use crate::cuda::matmul;
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu};
use crate::error::{Error, Result};
use crate::format::{Format, Group, QTensor, WeightFormat, Zeros};
use crate::kernel::{self, Reason};
use half::{bf16, f16};
use std::borrow::Cow;

const NAME: &str = "im2col_gemm";

/// Of the weights that it multiplies by.
pub(super) const LAYOUT: &str = "cuda_wna16";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "what pixels see is copied to the workspace, a slab at a time, and multiplied by crate::cuda::matmul",
        serves: |arch| arch.number >= 75,
        instances: im2col::instances,
    },
    choose,
);

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

fn choose(caps: &Caps, problem: &Problem) -> Bind<Convolution> {
    let refuse = |why: String| Err(Reason(why));
    let Problem { format: Some(format), shape, x, y, layouts: [x_layout, y_layout], packed } = *problem else {
        return refuse("multiplies codes, the weights are dense".into());
    };
    if packed != LAYOUT {
        return refuse(format!("multiplies weights in layout {LAYOUT}, they lie in {packed}"));
    }
    if shape.is_product() {
        return refuse("copies nothing where pixels are the product's rows".into());
    }
    if y_layout != Layout2d::Nhwc {
        return refuse("writes images in nhwc".into());
    }
    let g = shape.geometry();
    let patches = Patches { shape, layout: x_layout, element: x.size_bytes(), wide: columns(format, g) };
    patches.are_copied()?;
    let format = Some(format_of(format, g));
    let product = |m| Gemm::of(caps, kernel::Problem { format, x, y, m, n: g.co, k: patches.wide }, packed);
    let mut sizes: Vec<usize> = patches.slabs().map(|pixels| pixels.len()).collect();
    sizes.dedup();
    let products = sizes.into_iter().map(product).collect::<std::result::Result<Vec<_>, _>>()?;
    let needed = products.iter().map(Gemm::workspace_bytes).max().unwrap_or(0);
    Ok(Box::new(Slabs { patches, products, patches_at: needed.next_multiple_of(ALIGNMENT) }))
}

/// Slabs of patches, each multiplied when it is there.
struct Slabs {
    patches: Patches,
    /// Of whole slabs, and of the last if it is smaller.
    products: Vec<Gemm>,
    /// Where patches begin in the workspace.
    patches_at: usize,
}

impl Configured<Convolution> for Slabs {
    fn text(&self) -> String {
        let products = self.products.iter().map(|product| format!(", {}", product.text())).collect::<String>();
        format!("{} slabs of patches{products}", self.patches.slabs().count())
    }

    fn instances(&self) -> Vec<Instance> {
        im2col::instances().into_iter().chain(self.products.iter().flat_map(Gemm::instances)).collect()
    }

    fn workspace_bytes(&self) -> usize {
        self.patches_at + self.patches.slab_bytes()
    }

    fn rounds_weights(&self) -> bool {
        self.products.iter().any(Gemm::rounds_weights)
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let refuse = |expected: &str, got: String| Err(Error::invalid(NAME, expected, got));
        let (patches, co) = (&self.patches, self.patches.shape.geometry().co);
        let w = one_part(NAME, &call.w.kind)?;
        if w.shape() != [co, patches.wide] {
            return refuse(&format!("a weight of {co} × {}", patches.wide), format!("{:?}", w.shape()));
        }
        let Some(workspace) = call.workspace else { return refuse("a workspace", "none".into()) };
        let (mut workspace, room) = workspace.split_at(self.patches_at);
        let mut left = call.y;
        for pixels in patches.slabs() {
            patches.copy(gpu, stream, [call.x.pointer(), room.pointer()], &pixels, 0)?;
            let m = pixels.len();
            let Some(product) = self.products.iter().find(|product| product.problem.m == m) else {
                return refuse("a slab that was planned", m.to_string());
            };
            let rows = room.slice(0..m * patches.wide * patches.element);
            let x = match call.x {
                FloatView::F16(_) => FloatView::F16(rows.cast::<f16>()),
                FloatView::BF16(_) => FloatView::BF16(rows.cast::<bf16>()),
                FloatView::F32(_) => FloatView::F32(rows.cast::<f32>()),
            };
            let (y, later) = split(left, m * co);
            left = later;
            let (epilogue, workspace) = (call.epilogue, Some(workspace.get()));
            product.run(gpu, stream, matmul::Call { x, m, w, epilogue, y, workspace, batch_invariant: false })?;
        }
        Ok(())
    }
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
