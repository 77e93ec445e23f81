//! im2col: the windows of an image as rows of a matrix, by launches of `im2col.cu`.

use super::images::Images;
use crate::conv::{Conv2dShape, Layout2d};
use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::kernel::Reason;
use std::ops::Range;

static SOURCE: Source =
    Source { path: "conv/im2col.cu", text: include_str!("im2col.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "patches";

/// Bytes that are written at once, where rows are a whole number of them.
const PIECE_BYTES: usize = 16;

/// Bytes that are read at once, and the type that does.
const UNITS: [(usize, &str); 5] =
    [(16, "uint4"), (8, "uint2"), (4, "unsigned int"), (2, "unsigned short"), (1, "unsigned char")];

/// As in the source: threads and rows of a block, and units of a row at most.
const THREADS: u32 = 256;
pub(in crate::cuda) const ROWS: usize = 64;
const MOST_UNITS: usize = 6144;

/// Bytes of patches at a time: half of the second-level cache of the smallest processors that this is meant for.
const SLAB_BYTES: usize = 16 << 20;

parameters! {
    /// As in the source.
    struct Params {
        images: Images,
        x: u64,
        out: u64,
        first: u32,
        rows: u32,
        units: u32,
        there: u32,
        elements: u32,
        fill: u32,
    }
}

fn instance(unit: &str, together: usize) -> Instance {
    Instance::new(&SOURCE, format!("patches<{unit}, {together}>"))
}

pub(in crate::cuda) fn instances() -> Vec<Instance> {
    let whole = UNITS.map(|(bytes, unit)| instance(unit, PIECE_BYTES / bytes));
    let single = UNITS.into_iter().filter(|&(bytes, _)| bytes < PIECE_BYTES).map(|(_, unit)| instance(unit, 1));
    whole.into_iter().chain(single).collect()
}

/// What is copied: for each output pixel of a shape with one group the elements that it sees, in rows of `wide` elements.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct Patches {
    pub shape: Conv2dShape,
    /// Order of the elements of x.
    pub layout: Layout2d,
    /// Bytes of an element.
    pub element: usize,
    /// Elements of a row: those of a window, and others that mean nothing.
    pub wide: usize,
}

impl Patches {
    /// Whether they can be copied, wherever x lies, or why not.
    pub fn are_copied(&self) -> std::result::Result<(), Reason> {
        let refuse = |why: String| Err(Reason(why));
        let (shape, g) = (&self.shape, self.shape.geometry());
        if g.groups != 1 {
            return refuse("multiplies patches of one group".into());
        }
        if self.unit(0).is_none_or(|(bytes, _)| self.wide * self.element / bytes > MOST_UNITS) {
            return refuse(format!("has room for {MOST_UNITS} units of a window, which has more"));
        }
        let reach = [0, 1].map(|axis| (g.kernel[axis] - 1) * g.dilation[axis]);
        let padded = [0, 1].map(|axis| shape.input()[axis] + g.padding[axis] + g.padding[axis + 2]);
        if reach[1] > i16::MAX as usize || padded[0] > i16::MAX as usize {
            return refuse(format!(
                "sees at most {} rows and positions, here are {}",
                i16::MAX,
                padded[0].max(reach[1])
            ));
        }
        let reached = padded.iter().try_fold(g.ci * shape.batch().max(1), |all, &size| all.checked_mul(size));
        if reached.is_none_or(|reached| reached > i32::MAX as usize) || shape.y_len() > i32::MAX as usize {
            return refuse("more elements than 31 bits count".into());
        }
        Ok(())
    }

    /// Output pixels of a slab.
    pub fn slab(&self) -> usize {
        let slab = (SLAB_BYTES / (self.wide * self.element).max(1) / ROWS).max(1) * ROWS;
        slab.min(self.shape.output_pixels())
    }

    /// The output pixels, slab by slab.
    pub fn slabs(&self) -> impl Iterator<Item = Range<usize>> {
        let (all, slab) = (self.shape.output_pixels(), self.slab().max(1));
        (0..all).step_by(slab).map(move |first| first..all.min(first + slab))
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> usize {
        self.slab() * self.wide * self.element
    }

    /// What is read at once from images at an address: bytes, and the type.
    fn unit(&self, address: u64) -> Option<(usize, &'static str)> {
        let pixel = self.shape.geometry().ci * self.element;
        let taken = |&(bytes, _): &(usize, &str)| match self.layout {
            Layout2d::Nhwc => {
                bytes >= self.element && pixel.is_multiple_of(bytes) && address.is_multiple_of(bytes as u64)
            }
            Layout2d::Nchw => bytes == self.element,
        };
        UNITS.into_iter().find(taken)
    }

    /// Puts the copy of some output pixels into a stream: from images to rows at addresses, with a byte that every element in the
    /// padding is made of. The caller vouches for the addresses, and that [`Patches::are_copied`].
    pub fn copy(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        [x, out]: [u64; 2],
        pixels: &Range<usize>,
        padding: u8,
    ) -> Result<()> {
        let Some((bytes, unit)) = self.unit(x) else {
            return Err(Error::invalid(OP, "elements that move", format!("{} bytes", self.element)));
        };
        let units = self.wide * self.element / bytes;
        if units > MOST_UNITS {
            return Err(Error::invalid(OP, format!("x at a multiple of more than {bytes} bytes"), format!("{x:#x}")));
        }
        let whole = (self.wide * self.element).is_multiple_of(PIECE_BYTES);
        let together = if whole { PIECE_BYTES / bytes } else { 1 };
        let function = gpu.function_once((OP, [bytes, together].map(|n| n as u32)), || instance(unit, together))?;
        let params = Params {
            images: Images::new(OP, &self.shape, [self.layout, Layout2d::Nhwc])?,
            x,
            out,
            first: pixels.start as u32,
            rows: pixels.len() as u32,
            units: units as u32,
            there: (self.shape.geometry().k() * self.element / bytes) as u32,
            elements: (bytes / self.element) as u32,
            fill: u32::from(padding) * 0x0101_0101,
        };
        let launch = Launch::linear(pixels.len().div_ceil(ROWS) as u32, THREADS);
        function.launch_typed(stream, &launch, &params, &[])
    }
}
