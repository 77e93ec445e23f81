//! Rows of a convolution's product: for each output pixel what its window sees of the input, gathered where it is needed.

use crate::conv::{Conv2dShape, Geometry};

/// What output pixels see of images that lie pixel by pixel, of one group of channels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patches<'a> {
    shape: &'a Conv2dShape,
    /// Output pixel of row 0.
    first: usize,
    /// Elements from pixel to pixel.
    stride: usize,
    /// First element of the group in each pixel.
    start: usize,
    /// Elements of the group in each pixel.
    len: usize,
}

impl<'a> Patches<'a> {
    /// From output pixel `first` on, of images with `per_channels` elements for the channels of each pixel and group: as
    /// many as there are channels, if the elements are theirs.
    pub fn new(shape: &'a Conv2dShape, group: usize, first: usize, per_channels: usize) -> Self {
        Self {
            shape,
            first,
            stride: per_channels * shape.geometry().groups,
            start: per_channels * group,
            len: per_channels,
        }
    }

    /// Calls `put` with runs of a row in their order: the first element and the length in the row, and the first element in
    /// the images, or None in the padding.
    pub fn runs(&self, row: usize, mut put: impl FnMut(usize, usize, Option<usize>)) {
        let Geometry { kernel: [rows, columns], dilation, .. } = *self.shape.geometry();
        let window = self.shape.window(self.first + row);
        let (len, line) = (self.len, self.len * columns);
        let (left, inside) = (window.columns.start * len, window.columns.end * len);
        let one_run = dilation[1] == 1 && self.stride == len;
        for ky in 0..rows {
            let at = ky * line;
            if !window.rows.contains(&ky) || window.columns.is_empty() {
                put(at, line, None);
                continue;
            }
            if left > 0 {
                put(at, left, None);
            }
            let from = |kx: usize| window.pixel([ky, kx]) * self.stride + self.start;
            if one_run {
                put(at + left, inside - left, Some(from(window.columns.start)));
            } else {
                window.columns.clone().for_each(|kx| put(at + kx * len, len, Some(from(kx))));
            }
            if inside < line {
                put(at + inside, line - inside, None);
            }
        }
    }

    /// Writes a row to `out`, `padding` where the window lies outside of the image.
    pub fn copy<T: Copy>(&self, x: &[T], row: usize, padding: T, out: &mut [T]) {
        self.runs(row, |at, len, from| match from {
            Some(from) => out[at..at + len].copy_from_slice(&x[from..from + len]),
            None => out[at..at + len].fill(padding),
        });
    }
}
