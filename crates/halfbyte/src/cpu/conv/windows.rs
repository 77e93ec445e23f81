//! Rows of a convolution's product as they lie in the image: no patch is gathered.
//!
//! A window on an image that lies pixel by pixel, with its padding, is a few runs of elements, at the same distances from its
//! corner wherever it is: the rows of the kernel, if their columns lie side by side, or else its positions.

use crate::conv::{Conv2dShape, Geometry};
use crate::cpu::int8::Runs;

/// Where the windows of a group of channels begin in images with their padding.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows<'a> {
    shape: &'a Conv2dShape,
    /// First channel of the group.
    channel: usize,
}

impl<'a> Windows<'a> {
    pub fn new(shape: &'a Conv2dShape, group: usize) -> Self {
        Self { shape, channel: group * shape.geometry().channels() }
    }

    /// How every window lies, in images whose size can be told. None if its runs have no multiple of `unit` elements.
    pub fn runs(shape: &Conv2dShape, unit: usize) -> Option<Runs> {
        let Geometry { ci, kernel: [rows, columns], dilation, groups, .. } = *shape.geometry();
        let one_run = dilation[1] == 1 && groups == 1;
        let (pieces, len) = if one_run { (1, columns * ci) } else { (columns, shape.geometry().channels()) };
        let [_, width] = padded(shape);
        let piece = |ky: usize| (0..pieces).map(move |kx| (ky * dilation[0] * width + kx * dilation[1]) * ci);
        len.is_multiple_of(unit).then(|| Runs::new((0..rows).flat_map(piece).collect(), len))
    }

    /// Writes where the windows of output pixels begin, from one on as many as there is room for.
    pub fn starts(&self, first: usize, out: &mut [usize]) {
        let Geometry { ci, stride, .. } = *self.shape.geometry();
        let ([oh, ow], [height, width]) = (self.shape.output(), padded(self.shape));
        let (mut line, mut column) = (first / ow, first % ow);
        let start = |line: usize, column: usize| {
            let row = line / oh * height + line % oh * stride[0];
            (row * width + column * stride[1]) * ci + self.channel
        };
        let mut at = start(line, column);
        for out in out {
            *out = at;
            column += 1;
            if column < ow {
                at += stride[1] * ci;
            } else {
                (line, column) = (line + 1, 0);
                at = start(line, column);
            }
        }
    }
}

/// Rows and columns of an input image with its padding.
pub(super) fn padded(shape: &Conv2dShape) -> [usize; 2] {
    let [top, left, bottom, right] = shape.geometry().padding;
    let [h, w] = shape.input();
    [top + h + bottom, left + w + right]
}
