//! Windows of few channels: images in which a row of a window is one run of channels, so that the copy engine brings it at once.
//!
//! ```text
//! x  [h][w][ci]  →  [h][left + w + right][pixel]     channels filled up with zeros to `pixel`, zeros left and right
//! a row of a window is kw · pixel neighbours; from an output pixel to the next it moves by stride · pixel, a multiple of 16 bytes
//! ```
//!
//! The convolution is then one with a kernel one position wide on `columns` channels, of which those past the window's row are
//! beyond the map's last channel and come as zeros: nothing of a neighbouring pixel is multiplied, be it infinite. Pixels of that
//! map overlap.

use super::columns::Columns;
use super::windows;
use crate::conv::{Conv2dShape, Geometry, Layout2d};
use crate::cuda::Gpu;
use crate::cuda::driver::{Arg, Launch, Stream, Swizzle, Windows as Map};
use crate::cuda::sources::{Instance, Source};
use crate::error::{Error, Result};
use crate::format::QTensor;
use crate::kernel::Reason;
use bytemuck::{Pod, Zeroable};
use std::borrow::Cow;

static SOURCE: Source = Source { path: "conv/window_rows.cu", text: include_str!("window_rows.cu") };

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
    /// Channels of a pixel, filled up.
    pub pixel: usize,
    /// Columns of a weight for a row of windows: `kw · pixel`, filled up.
    pub columns: usize,
}

impl WindowRows {
    /// Those of a layer, or why there are none.
    pub fn of(geometry: &Geometry) -> std::result::Result<Self, Reason> {
        let refuse = |why: &str| Err(Reason(why.into()));
        let Geometry { ci, kernel: [_, kw], stride: [_, across], dilation, groups, .. } = *geometry;
        if groups != 1 {
            return refuse("brings rows of windows of one group");
        }
        if kw > 1 && dilation[1] != 1 {
            return refuse("brings rows of windows without gaps");
        }
        let step = (1..=PIECE).find(|step| (step * across).is_multiple_of(PIECE)).unwrap_or(PIECE);
        let pixel = ci.next_multiple_of(step);
        let Some(columns) = kw.checked_mul(pixel).and_then(|all| all.checked_next_multiple_of(BOX)) else {
            return refuse("rows of windows of more channels than memory holds");
        };
        let rows = Self { pixel, columns };
        windows::taken(&rows.geometry(geometry), BOX)?;
        Ok(rows)
    }

    /// Whether the columns of a weight are those of the convolution, in the same order.
    pub fn keeps_columns(&self, geometry: &Geometry) -> bool {
        self.weight_columns() == Columns::of(geometry)
    }

    /// Where the columns of a weight lie.
    pub fn weight_columns(&self) -> Columns {
        Columns { of_row: self.columns, of_position: self.pixel }
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

    /// A weight with the columns that are filled up. None: it has no numbers that stand for them.
    pub fn weight<'a>(&self, w: &'a QTensor, geometry: &Geometry) -> Result<Option<Cow<'a, QTensor>>> {
        if self.keeps_columns(geometry) {
            return Ok(Some(Cow::Borrowed(w)));
        }
        if w.format().group.count(w.k()) != 1 {
            return Ok(None);
        }
        Ok(self.weight_columns().fill(w, geometry, w.format().group)?.map(Cow::Owned))
    }

    /// Output pixels that a row of an image holds, each the stride across wide: those that there are, and what the last one sees.
    fn steps(&self, shape: &Conv2dShape) -> usize {
        let g = shape.geometry();
        shape.output()[1] - 1 + g.kernel[1].div_ceil(g.stride[1])
    }

    /// Elements from an output pixel to the next.
    fn step(&self, shape: &Conv2dShape) -> usize {
        shape.geometry().stride[1] * self.pixel
    }

    /// Bytes of the images. The last pixels of the map overlap what comes behind them.
    pub fn bytes(&self, shape: &Conv2dShape) -> usize {
        let rows = shape.batch() * shape.input()[0];
        (rows * self.steps(shape) * self.step(shape) + self.columns) * ELEMENT
    }

    /// Windows of so many output pixels on the images.
    pub fn map(&self, shape: &Conv2dShape, pixels: usize) -> Result<Map> {
        let row = shape.geometry().kernel[1] * self.pixel;
        Ok(Map {
            shape: [shape.batch(), shape.input()[0], self.steps(shape), row],
            pixel: self.step(shape),
            ..windows::map(&self.shape(shape)?, [pixels, BOX], Swizzle::Bytes64)
        })
    }

    /// Whether images of a shape can be made, or why not.
    pub fn are_made(&self, shape: &Conv2dShape) -> std::result::Result<(), Reason> {
        if self.bytes(shape) > i32::MAX as usize || shape.x_len() > i32::MAX as usize {
            return Err(Reason("more bytes of windows than 31 bits count".into()));
        }
        let map = self.map(shape, 64).map_err(|why| Reason(why.to_string()))?;
        match map.are_taken() {
            true => Ok(()),
            false => Err(Reason("brings windows that begin at most 128 steps from the end of a row".into())),
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
        let (g, [h, w]) = (shape.geometry(), shape.input());
        let (rows, pieces) = (shape.batch() * h, self.steps(shape) * self.step(shape) / PIECE);
        let nhwc = layout == Layout2d::Nhwc;
        let whole = nhwc && g.ci == self.pixel && g.ci.is_multiple_of(PIECE) && x.is_multiple_of(16);
        if !out.is_multiple_of(16) {
            return Err(Error::invalid(OP, "room at a multiple of 16 bytes", format!("{out:#x}")));
        }
        let params = Params {
            x,
            out,
            rows: rows as u32,
            pieces: pieces as u32,
            height: h as u32,
            width: w as u32,
            channels: g.ci as u32,
            pixel: self.pixel as u32,
            left: g.padding[1] as u32,
            nhwc: nhwc.into(),
            whole: whole.into(),
            unused: 0,
        };
        let blocks = (rows * pieces).div_ceil(THREADS);
        let launch = Launch { programmatic: true, ..Launch::linear(blocks as u32, THREADS as u32) };
        let function = gpu.function(&instance())?;
        // SAFETY: the one parameter is the source's `Params`; the caller vouches for the addresses.
        unsafe { function.launch(stream, &launch, &[Arg::new(&params)]) }
    }
}

/// As in the source.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Params {
    x: u64,
    out: u64,
    rows: u32,
    pieces: u32,
    height: u32,
    width: u32,
    channels: u32,
    pixel: u32,
    left: u32,
    nhwc: u32,
    whole: u32,
    unused: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_begin_at_multiples_of_16_bytes_and_rows_at_multiples_of_boxes() {
        let of = |ci, kernel: [usize; 2], stride: [usize; 2]| {
            WindowRows::of(&Geometry { stride, ..Geometry::new(ci, 8, kernel) }).map(|rows| [rows.pixel, rows.columns])
        };
        assert_eq!(of(3, [7, 7], [2, 2]), Ok([4, 32]));
        assert_eq!(of(3, [3, 3], [1, 1]), Ok([8, 32]));
        assert_eq!(of(3, [16, 16], [16, 16]).map_err(|_| ()), Err(()), "strides up to 8");
        assert_eq!(of(3, [8, 8], [8, 8]), Ok([3, 32]));
        assert_eq!(of(1, [5, 5], [1, 1]), Ok([8, 64]));
        assert_eq!(of(32, [3, 3], [2, 2]), Ok([32, 96]));
        assert_eq!(of(17, [1, 1], [3, 3]), Ok([24, 32]));
    }

    #[test]
    fn maps_hold_the_windows_of_every_output_pixel() {
        let geometry = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
        let shape = Conv2dShape::new(geometry, 32, [224, 224]).unwrap();
        let rows = WindowRows::of(&geometry).unwrap();
        let map = rows.map(&shape, 128).unwrap();
        // 111 steps of two pixels, and seven pixels in four of them.
        assert_eq!(map.shape, [32, 224, 115, 28]);
        assert_eq!((map.pixel, map.stride, map.padding, map.extent), (8, [2, 1], [3, 0], [224, 112]));
        let inner = rows.shape(&shape).unwrap();
        assert_eq!((inner.output(), inner.geometry().k()), ([112, 112], 224));
        assert_eq!(rows.bytes(&shape), 2 * (32 * 224 * 115 * 8 + 32));
        assert!(rows.are_made(&shape).is_ok());
    }
}
