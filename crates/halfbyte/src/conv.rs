//! The geometry of two-dimensional convolutions: what a layer fixes, what an input makes of it, and how a convolution is a
//! product.
//!
//! ```text
//! y[b, o, oy, ox] = Σ x[b, c, oy·stride + ky·dilation − top, ox·stride + kx·dilation − left] · w[o, ky, kx, c]
//! ```
//!
//! over the positions (ky, kx) of the kernel and the channels c of o's group; x is 0 in the padding. So it is the product of
//! a weight `[co, k]` with one row for each output pixel, `k = kh · kw · (ci / groups)`, in the order of kernel row, kernel
//! column, channel: a scale that holds for a few neighbours along k then belongs to channels of one position.

use crate::error::{Error, Result};
use crate::format::Group;
use crate::memory::room;
use std::ops::Range;

const OP: &str = "conv2d";

/// The order of the elements of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout2d {
    /// `[batch, channels, h, w]`: plane by plane.
    Nchw,
    /// `[batch, h, w, channels]`: pixel by pixel.
    Nhwc,
}

impl Layout2d {
    /// The name as it is written: `nchw`, `nhwc`.
    pub fn name(self) -> &'static str {
        match self {
            Layout2d::Nchw => "nchw",
            Layout2d::Nhwc => "nhwc",
        }
    }
}

impl std::fmt::Display for Layout2d {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a convolution's layer fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Input channels.
    pub ci: usize,
    /// Output channels.
    pub co: usize,
    /// Rows and columns of the kernel.
    pub kernel: [usize; 2],
    /// Pixels from one output to the next, down and across.
    pub stride: [usize; 2],
    /// Pixels of zeros around the input: above, left of, below and right of it.
    pub padding: [usize; 4],
    /// Pixels from one position of the kernel to the next, down and across.
    pub dilation: [usize; 2],
    /// Groups of channels: the outputs of each see the inputs of the same group alone.
    pub groups: usize,
}

impl Geometry {
    /// Stride 1, no padding, dilation 1, one group.
    pub fn new(ci: usize, co: usize, kernel: [usize; 2]) -> Self {
        Self { ci, co, kernel, stride: [1; 2], padding: [0; 4], dilation: [1; 2], groups: 1 }
    }

    /// Checks that everything that counts something is at least 1, that the groups divide both numbers of channels, and that
    /// the sizes of kernel and weight can be told. Error: the first of these that does not hold.
    pub fn validate(&self) -> Result<()> {
        let Self { ci, co, kernel: [kh, kw], stride, dilation, groups, .. } = *self;
        for (what, value) in [
            ("group", groups),
            ("input channel", ci),
            ("output channel", co),
            ("kernel row", kh),
            ("kernel column", kw),
            ("pixel of stride down", stride[0]),
            ("pixel of stride across", stride[1]),
            ("pixel of dilation down", dilation[0]),
            ("pixel of dilation across", dilation[1]),
        ] {
            if value == 0 {
                return Err(Error::invalid(OP, format!("at least 1 {what}"), "0"));
            }
        }
        if ci % groups != 0 || co % groups != 0 {
            let expected = format!("groups that divide {ci} input and {co} output channels");
            return Err(Error::invalid(OP, expected, groups.to_string()));
        }
        for axis in 0..2 {
            self.padded(0, axis)?;
            self.reach(axis)?;
        }
        let elements = kh.checked_mul(kw).and_then(|p| p.checked_mul(ci / groups)).and_then(|k| k.checked_mul(co));
        match elements {
            Some(elements) if elements <= MOST_ELEMENTS => Ok(()),
            _ => Err(too_large("a weight", format!("{co} × {} × {kh} × {kw}", ci / groups))),
        }
    }

    /// Input channels of a group.
    pub fn channels(&self) -> usize {
        self.ci / self.groups.max(1)
    }

    /// Output channels of a group.
    pub fn outputs(&self) -> usize {
        self.co / self.groups.max(1)
    }

    /// Positions of the kernel, `kh · kw`.
    pub fn positions(&self) -> usize {
        self.kernel[0].saturating_mul(self.kernel[1])
    }

    /// Length of the reduction, `kh · kw · (ci / groups)`.
    pub fn k(&self) -> usize {
        self.positions().saturating_mul(self.channels())
    }

    /// Channels that share a scale in a weight `[co, k]`: all of a position if there is one scale a row.
    ///
    /// *Errors:* groups of a scale that do not divide the channels of a position.
    pub fn scale_channels(&self, group: Group) -> Result<usize> {
        let channels = self.channels();
        match group {
            Group::Size(size) if size < self.k() => {
                if !channels.is_multiple_of(size) {
                    let expected = format!("one scale a row, or groups that divide {channels} channels");
                    return Err(Error::invalid(OP, expected, format!("groups of {size}")));
                }
                Ok(size)
            }
            _ => Ok(channels),
        }
    }

    /// Weights `[co, ci / groups, kh, kw]`, as frameworks hold them, in the order `[co, kh, kw, ci / groups]`.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, another length, memory that is short.
    pub fn weight_rows<T: Copy>(&self, w: &[T]) -> Result<Vec<T>> {
        self.validate()?;
        let (channels, positions) = (self.channels(), self.positions());
        if w.len() != self.co * self.k() {
            let expected = format!("{} × {channels} × {} × {} weights", self.co, self.kernel[0], self.kernel[1]);
            return Err(Error::invalid(OP, expected, w.len().to_string()));
        }
        let mut rows = room(OP, w.len())?;
        for planes in w.chunks_exact(self.k()) {
            (0..positions).for_each(|p| rows.extend(planes[p..].iter().step_by(positions)));
        }
        Ok(rows)
    }

    /// Rows or columns (axis 0 or 1) of an input of this size with its padding.
    fn padded(&self, size: usize, axis: usize) -> Result<usize> {
        let [before, after] = [self.padding[axis], self.padding[axis + 2]];
        size.checked_add(before)
            .and_then(|sum| sum.checked_add(after))
            .filter(|&sum| sum <= MOST_ELEMENTS)
            .ok_or_else(|| too_large("a padded input", format!("{size} + {before} + {after} pixels")))
    }

    /// Rows or columns that the kernel spans.
    fn reach(&self, axis: usize) -> Result<usize> {
        let [size, dilation] = [self.kernel[axis], self.dilation[axis]];
        (size.saturating_sub(1))
            .checked_mul(dilation)
            .and_then(|most| most.checked_add(1))
            .filter(|&reach| reach <= MOST_ELEMENTS)
            .ok_or_else(|| too_large("a kernel", format!("{size} positions, {dilation} apart")))
    }

    fn output(&self, size: usize, axis: usize) -> Result<usize> {
        let (padded, reach) = (self.padded(size, axis)?, self.reach(axis)?);
        if padded < reach {
            let (down, what) = (["down", "across"][axis], "an input with padding no smaller than the kernel's reach");
            return Err(Error::invalid(
                OP,
                format!("{what} of {reach} {down}"),
                format!("{size} with {} and {} of padding", self.padding[axis], self.padding[axis + 2]),
            ));
        }
        Ok((padded - reach) / self.stride[axis] + 1)
    }
}

/// Sizes up to this are computed with: bytes of it can be told, whatever the element, and signs.
const MOST_ELEMENTS: usize = isize::MAX as usize / 32;

fn too_large(what: &str, got: String) -> Error {
    Error::invalid(OP, format!("{what} that fits memory"), got)
}

/// A convolution of one input: every size, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv2dShape {
    geometry: Geometry,
    batch: usize,
    input: [usize; 2],
    output: [usize; 2],
}

impl Conv2dShape {
    /// Of images `[batch, ci, h, w]`. Padding larger than the kernel, strides larger than the kernel and a batch of none
    /// are all right.
    ///
    /// *Errors:* a geometry that [`Geometry::validate`] refuses, an input without pixels, one that is smaller with its padding
    /// than the kernel's reach (as PyTorch has it), sizes beyond memory.
    pub fn new(geometry: Geometry, batch: usize, [h, w]: [usize; 2]) -> Result<Self> {
        geometry.validate()?;
        if h == 0 || w == 0 {
            return Err(Error::invalid(OP, "an input of at least 1 × 1 pixels", format!("{h} × {w}")));
        }
        let output = [geometry.output(h, 0)?, geometry.output(w, 1)?];
        let size = |what: &str, [h, w]: [usize; 2], channels: usize| {
            // The batch last: it may be 0.
            let elements = [h, w, batch].iter().try_fold(channels, |all, &size| all.checked_mul(size));
            match elements {
                Some(elements) if elements <= MOST_ELEMENTS => Ok(()),
                _ => Err(too_large(what, format!("{batch} × {channels} × {h} × {w}"))),
            }
        };
        size("an input", [h, w], geometry.ci)?;
        size("an output", output, geometry.co)?;
        Ok(Self { geometry, batch, input: [h, w], output })
    }

    /// What the layer fixes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Images.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Rows and columns of an input image.
    pub fn input(&self) -> [usize; 2] {
        self.input
    }

    /// Rows and columns of an output image.
    pub fn output(&self) -> [usize; 2] {
        self.output
    }

    /// Input pixels of all images.
    pub fn input_pixels(&self) -> usize {
        self.batch * self.input[0] * self.input[1]
    }

    /// Output pixels of all images: the rows of the product.
    pub fn output_pixels(&self) -> usize {
        self.batch * self.output[0] * self.output[1]
    }

    /// Elements of x.
    pub fn x_len(&self) -> usize {
        self.input_pixels() * self.geometry.ci
    }

    /// Elements of y.
    pub fn y_len(&self) -> usize {
        self.output_pixels() * self.geometry.co
    }

    /// Checks the numbers of elements of x and of y.
    pub(crate) fn check_lengths(&self, op: &'static str, [x, y]: [usize; 2]) -> Result<()> {
        let fits = |what: &str, expected: usize, [h, w]: [usize; 2], channels: usize, len: usize| {
            if expected == len {
                return Ok(());
            }
            let expected = format!("{what} of {} × {channels} × {h} × {w}", self.batch);
            Err(Error::invalid(op, expected, format!("{len} elements")))
        };
        fits("x", self.x_len(), self.input, self.geometry.ci, x)?;
        fits("y", self.y_len(), self.output, self.geometry.co, y)
    }

    /// Multiplications of the product, twice: with additions, padding counted.
    pub fn operations(&self) -> f64 {
        2.0 * self.output_pixels() as f64 * self.geometry.co as f64 * self.geometry.k() as f64
    }

    /// Whether each output pixel sees just the input pixel of the same number, so that x in [`Layout2d::Nhwc`] is the
    /// product's matrix as it lies.
    pub fn is_product(&self) -> bool {
        let Geometry { kernel, stride, padding, groups, .. } = self.geometry;
        kernel == [1, 1] && stride == [1, 1] && padding == [0; 4] && groups == 1
    }

    /// The window of output pixel `pixel`, counted through the batch.
    pub(crate) fn window(&self, pixel: usize) -> Window {
        let ([h, w], [oh, ow]) = (self.input, self.output);
        let Geometry { kernel, stride, padding, dilation, .. } = self.geometry;
        let (image, row, column) = (pixel / (oh * ow), pixel / ow % oh, pixel % ow);
        // Where the window begins, from the corner of the padding on.
        let [top, left] = [row * stride[0], column * stride[1]];
        Window {
            image: image * h * w,
            width: w,
            first: [top as isize - padding[0] as isize, left as isize - padding[1] as isize],
            dilation,
            rows: inside([top, padding[0], h], kernel[0], dilation[0]),
            columns: inside([left, padding[1], w], kernel[1], dilation[1]),
        }
    }
}

/// Positions of a kernel's axis that lie in the input, for a window that begins at `start` from the padding's edge on.
fn inside([start, padding, size]: [usize; 3], positions: usize, dilation: usize) -> Range<usize> {
    // Most windows lie inside with all their positions, and need no division.
    if start >= padding && start + (positions - 1) * dilation < padding + size {
        return 0..positions;
    }
    let first = padding.saturating_sub(start).div_ceil(dilation).min(positions);
    let end = (padding + size).saturating_sub(start).div_ceil(dilation).min(positions);
    first..end.max(first)
}

/// The input pixels that an output pixel sees.
#[derive(Clone, Debug)]
pub(crate) struct Window {
    /// First pixel of its image.
    image: usize,
    width: usize,
    /// Row and column of the first position, in the input or before it.
    first: [isize; 2],
    dilation: [usize; 2],
    /// Rows of the kernel that lie in the input.
    pub rows: Range<usize>,
    /// Columns of the kernel that lie in the input.
    pub columns: Range<usize>,
}

impl Window {
    /// The input pixel under a position whose row and column lie in the input, counted through the batch.
    pub fn pixel(&self, [row, column]: [usize; 2]) -> usize {
        let at = |axis: usize, position: usize| (self.first[axis] + (position * self.dilation[axis]) as isize) as usize;
        self.image + at(0, row) * self.width + at(1, column)
    }
}
