//! Windows of few channels: images in which what a row of a window sees is the channels of one pixel, so that the copy engine
//! brings it at once.
//!
//! ```text
//! x  [h][w][ci]  →  [h][ow][columns]     kw · ci neighbours that an output column sees, filled up to boxes of the copy engine
//! ```
//!
//! The convolution is then one with a kernel one position wide, and no padding across. Rows of windows of neighbouring output rows
//! overlap, and are there once: of a 7 × 7 kernel with stride 2 the copy is a quarter of the matrix of patches. What is filled up
//! is zeros: nothing of a neighbouring pixel is multiplied, be it infinite.

use super::columns::Columns;
use super::windows;
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::Gpu;
use crate::cuda::driver::{Launch, Stream, Swizzle, Windows as Map};
use crate::cuda::parameters::{Parameters, parameters};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::{Group, QTensor};
use crate::kernel::Reason;
use std::borrow::Cow;

static SOURCE: Source =
    Source { path: "conv/window_rows.cu", text: include_str!("window_rows.cu"), parameters: &[Params::LAYOUT] };

const OP: &str = "window rows";

/// Bytes of an element, and elements of a piece of 16 bytes.
const ELEMENT: usize = 2;
const PIECE: usize = 8;

/// Columns of a box of the copy engine.
pub(super) const BOX: usize = 32;

const THREADS: usize = 256;

pub(super) fn instance() -> Instance {
    Instance::new(&SOURCE, "window_rows")
}

/// How a layer's windows lie.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WindowRows {
    /// Columns of a weight for a row of windows: `kw · ci`, filled up.
    pub columns: usize,
}

impl WindowRows {
    /// Those of a layer, or why there are none.
    pub fn of(geometry: &Geometry) -> std::result::Result<Self, Reason> {
        let Geometry { ci, kernel: [_, kw], groups, .. } = *geometry;
        if groups != 1 {
            return Err(Reason("brings rows of windows of one group".into()));
        }
        let Some(columns) = kw.checked_mul(ci).and_then(|all| all.checked_next_multiple_of(BOX)) else {
            return Err(Reason("rows of windows of more channels than memory holds".into()));
        };
        let rows = Self { columns };
        windows::taken(&rows.geometry(geometry), BOX)?;
        Ok(rows)
    }

    /// Where the columns of a weight lie.
    pub fn weight_columns(&self, geometry: &Geometry) -> Columns {
        Columns { of_row: self.columns, of_position: geometry.ci, of_group: geometry.outputs() }
    }

    /// Whether the columns of a weight are those of the convolution, in the same order.
    pub fn keeps_columns(&self, geometry: &Geometry) -> bool {
        self.weight_columns(geometry) == Columns::of(geometry)
    }

    /// A weight with the columns that are filled up. None: it has no numbers that stand for them.
    pub fn weight<'a>(&self, w: &'a QTensor, geometry: &Geometry) -> Result<Option<Cow<'a, QTensor>>> {
        if self.keeps_columns(geometry) {
            return Ok(Some(Cow::Borrowed(w)));
        }
        if w.format().group.count(w.k()) != 1 {
            return Ok(None);
        }
        // A group that was longer than a row would be one of several in more columns.
        let group = match w.format().group {
            Group::Size(_) => Group::Channel,
            whole => whole,
        };
        Ok(self.weight_columns(geometry).fill(w, geometry, group)?.map(Cow::Owned))
    }

    /// The layer on images in which a row of a window is one pixel.
    fn geometry(&self, geometry: &Geometry) -> Geometry {
        let Geometry { co, kernel: [kh, _], stride: [down, _], padding: [top, _, bottom, _], dilation, .. } = *geometry;
        Geometry {
            kernel: [kh, 1],
            stride: [down, 1],
            padding: [top, 0, bottom, 0],
            dilation: [dilation[0], 1],
            ..Geometry::new(self.columns, co, [1, 1])
        }
    }

    /// The same of a shape: an image has as many columns as the output.
    pub fn shape(&self, shape: &Conv2dShape) -> Result<Conv2dShape> {
        Conv2dShape::new(self.geometry(shape.geometry()), shape.batch(), [shape.input()[0], shape.output()[1]])
    }

    /// Elements of the images.
    fn elements(&self, shape: &Conv2dShape) -> usize {
        let pixels = shape.batch().saturating_mul(shape.input()[0]).saturating_mul(shape.output()[1]);
        pixels.saturating_mul(self.columns)
    }

    /// Bytes of the images.
    pub fn bytes(&self, shape: &Conv2dShape) -> usize {
        self.elements(shape).saturating_mul(ELEMENT)
    }

    /// Windows of so many output pixels on the images.
    pub fn map(&self, shape: &Conv2dShape, pixels: usize) -> Result<Map> {
        Ok(windows::map(&self.shape(shape)?, [pixels, BOX], Swizzle::Bytes64))
    }

    /// Whether images of a shape can be made, or why not.
    pub fn are_made(&self, shape: &Conv2dShape) -> std::result::Result<(), Reason> {
        if self.elements(shape) > i32::MAX as usize || shape.x_len() > i32::MAX as usize {
            return Err(Reason("more elements than 31 bits count".into()));
        }
        let map = self.map(shape, 64).map_err(|why| Reason(why.to_string()))?;
        match map.are_taken() {
            true => Ok(()),
            false => Err(Reason(
                "brings windows of strides up to 8 that begin at most 128 pixels outside of an image".into(),
            )),
        }
    }

    /// Puts the images into a stream: from x in 2-byte elements, an address, to an address of [`WindowRows::bytes`]. The caller
    /// vouches for both, and that they [are made](WindowRows::are_made).
    pub fn make(
        &self,
        gpu: &Gpu,
        stream: &Stream,
        shape: &Conv2dShape,
        (x, layout): (u64, Layout2d),
        out: u64,
    ) -> Result<()> {
        if !out.is_multiple_of(16) {
            return Err(Error::invalid(OP, "room at a multiple of 16 bytes", format!("{out:#x}")));
        }
        let (g, [h, w]) = (shape.geometry(), shape.input());
        let pieces = self.elements(shape) / PIECE;
        let params = Params {
            x,
            out,
            pieces: pieces as u32,
            of_pixel: (self.columns / PIECE) as u32,
            outputs: shape.output()[1] as u32,
            height: h as u32,
            width: w as u32,
            channels: g.ci as u32,
            there: (g.kernel[1] * g.ci) as u32,
            across: g.stride[1] as u32,
            dilation: g.dilation[1] as u32,
            left: g.padding[1] as u32,
            nhwc: (layout == Layout2d::Nhwc).into(),
            unused: 0,
        };
        let blocks = pieces.div_ceil(THREADS);
        let launch = gpu.overlapping(Launch::linear(blocks as u32, THREADS as u32));
        gpu.function_once((OP, [0; 2]), instance)?.launch_typed(stream, &launch, &params, &[])
    }
}

parameters! {
    /// As in the source.
    struct Params {
        x: u64,
        out: u64,
        pieces: u32,
        of_pixel: u32,
        outputs: u32,
        height: u32,
        width: u32,
        channels: u32,
        there: u32,
        across: u32,
        dilation: u32,
        left: u32,
        nhwc: u32,
        unused: u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_windows_are_whole_boxes() {
        let of = |ci, kernel| WindowRows::of(&Geometry::new(ci, 8, kernel)).map(|rows| rows.columns);
        assert_eq!(of(3, [7, 7]), Ok(32));
        assert_eq!(of(1, [5, 5]), Ok(32));
        assert_eq!(of(32, [3, 3]), Ok(96));
        assert_eq!(of(17, [1, 2]), Ok(64));
        assert!(WindowRows::of(&Geometry { stride: [9, 1], ..Geometry::new(3, 8, [3, 3]) }).is_err());
        assert!(WindowRows::of(&Geometry { groups: 2, ..Geometry::new(4, 8, [3, 3]) }).is_err());
    }

    #[test]
    fn a_row_of_a_window_is_a_pixel_of_the_map() {
        let geometry = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
        let shape = Conv2dShape::new(geometry, 32, [224, 224]).unwrap();
        let rows = WindowRows::of(&geometry).unwrap();
        let map = rows.map(&shape, 128).unwrap();
        assert_eq!((map.shape, map.pixel), ([32, 224, 112, 32], 32));
        assert_eq!((map.stride, map.padding, map.extent), ([2, 1], [3, 0], [224, 112]));
        let inner = rows.shape(&shape).unwrap();
        assert_eq!((inner.output(), inner.geometry().k()), ([112, 112], 224));
        assert_eq!(rows.bytes(&shape), 2 * 32 * 224 * 112 * 32);
        assert!(rows.are_made(&shape).is_ok() && !rows.keeps_columns(&geometry));
    }
}
