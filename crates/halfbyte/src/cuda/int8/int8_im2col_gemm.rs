//! im2col and GEMM of bytes: for some output pixels at a time, what they see is copied into the workspace as rows of a matrix
//! ([`crate::cuda::conv`] has the copy) and multiplied by `int8_sm90` or `int8_mma`.
//!
//! Serves what none reads from images: planes of one group. The padding is copied as the zero point of x, so that the
//! product knows of none.

use super::{Call, Int8, Kernel, Layer, Place, Problem, int8_mma, int8_sm90};
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::conv::im2col::{self, Patches};
use crate::cuda::dispatch::{About, Bind, Configured};
use crate::cuda::driver::{Stream, View};
use crate::cuda::sources::Instance;
use crate::cuda::{Caps, Gpu, Workspace};
use crate::error::{Error, Result};
use crate::kernel::Reason;

const NAME: &str = "int8_im2col_gemm";

pub(super) const KERNEL: Kernel = Kernel::with_one(
    About {
        name: NAME,
        what: "what pixels see is copied to the workspace, a slab at a time, and multiplied by int8_sm90 or int8_mma",
        serves: |arch| arch.number >= 75,
        instances: im2col::instances,
    },
    choose,
);

/// Bytes that a row of patches is a multiple of: the columns behind those of a window meet zeros of the weight.
const PIECE: usize = 16;

fn choose(caps: &Caps, problem: &Problem) -> Bind<Int8> {
    let (shape, g) = (problem.shape, problem.shape.geometry());
    if problem.layouts[1] != Layout2d::Nhwc {
        return Err(Reason("writes images in nhwc".into()));
    }
    let wide = g.k().next_multiple_of(PIECE);
    let patches = Patches { shape, layout: problem.layouts[0], element: 1, wide };
    patches.are_copied()?;
    // The product of so many rows of patches: a convolution of one position on a row of pixels.
    let product = |rows: usize| {
        let shape = Conv2dShape::new(Geometry::new(wide, g.co, [1, 1]), 1, [1, rows]);
        let shape = shape.map_err(|why| Reason(why.to_string()))?;
        let problem = Problem { shape, layouts: [Layout2d::Nhwc; 2], ..*problem };
        if caps.arch.is_hopper() && problem.is_bytes_in_nhwc().is_ok() {
            return Ok(Product::Sm90(int8_sm90::Implicit::of(caps, &problem)?));
        }
        Ok(Product::Mma(int8_mma::Implicit::of(caps, &problem)?))
    };
    let mut sizes: Vec<usize> = patches.slabs().map(|pixels| pixels.len()).collect();
    sizes.dedup();
    let products = sizes.into_iter().map(product).collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(Box::new(Slabs { patches, products }))
}

/// What multiplies patches.
enum Product {
    Sm90(int8_sm90::Implicit),
    Mma(int8_mma::Implicit),
}

impl Product {
    /// Rows of patches.
    fn pixels(&self) -> usize {
        match self {
            Self::Sm90(product) => product.pixels(),
            Self::Mma(product) => product.pixels(),
        }
    }

    fn configured(&self) -> &dyn Configured<Int8> {
        match self {
            Self::Sm90(product) => product,
            Self::Mma(product) => product,
        }
    }

    fn multiply(&self, gpu: &Gpu, stream: &Stream, layer: &Layer, x: View<'_, u8>, y: Place) -> Result<()> {
        match self {
            Self::Sm90(product) => product.multiply(gpu, stream, layer, x, y.address),
            Self::Mma(product) => product.multiply(gpu, stream, layer, x, y),
        }
    }
}

/// Slabs of patches, each multiplied when it is there.
struct Slabs {
    patches: Patches,
    /// Of whole slabs, and of the last if it is smaller.
    products: Vec<Product>,
}

impl Configured<Int8> for Slabs {
    fn text(&self) -> String {
        let products =
            self.products.iter().map(|product| format!(", {} × {}", product.pixels(), product.configured().text()));
        format!("{} slabs of patches{}", self.patches.slabs().count(), products.collect::<String>())
    }

    fn instances(&self) -> Vec<Instance> {
        im2col::instances()
            .into_iter()
            .chain(self.products.iter().flat_map(|product| product.configured().instances()))
            .collect()
    }

    fn workspace_bytes(&self) -> usize {
        Workspace::COUNTER_BYTES + self.patches.slab_bytes()
    }

    fn run(&self, gpu: &Gpu, stream: &Stream, call: Call<'_>) -> Result<()> {
        let y = Place::of(&call.y);
        let Some(workspace) = call.workspace else { return Err(Error::invalid(NAME, "a workspace", "none")) };
        // The padding is the zero point of x.
        let (patches, zero) = (&self.patches, call.layer.x().zero() as u8);
        let (_, room) = workspace.split_at(Workspace::COUNTER_BYTES);
        let co = patches.shape.geometry().co;
        for pixels in patches.slabs() {
            patches.copy(gpu, stream, [call.x.pointer(), room.pointer()], &pixels, zero)?;
            let Some(product) = self.products.iter().find(|product| product.pixels() == pixels.len()) else {
                return Err(Error::invalid(NAME, "a slab that was planned", pixels.len().to_string()));
            };
            let x = room.slice(0..pixels.len() * patches.wide);
            product.multiply(gpu, stream, call.layer, x, y.at(pixels.start * co))?;
        }
        Ok(())
    }
}
