//! Images as one row of slots, in which every output sees the same distances.
//!
//! ```text
//! . . . . .        a grid of rows × pitch slots an image: its pixels (x), and padding (.) above and left of them;
//! . x x x x        what lies right of a row's end, or below the last row, is the padding of the next row or image,
//! . x x x x        or of both
//! . . . . .
//! . x x x x        output (r, c) is computed at slot (r, c), and sees slot (r + ky · dilation, c + kx · dilation)
//! ```
//!
//! Where x has few channels and stride 2, a slot is a *square* of 2 × 2 pixels, so that neighbours are one square apart.

use crate::conv::{Conv2dShape, Geometry};
use crate::format::int8::{Bytes, Int8Weight};
use crate::layout::cuda_int8::CudaInt8;

/// Bytes of a square.
pub(super) const SQUARE: usize = 16;

/// Slots of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Grid {
    /// Of a slot.
    pub channels: usize,
    /// Channels of x if slots are squares, else 0.
    pub fold: usize,
    /// Positions of the window.
    pub kernel: [usize; 2],
    /// Slots from position to position.
    pub dilation: [usize; 2],
    /// Slots of padding above and left of an image.
    pub before: [usize; 2],
    /// Slots of an image that hold pixels.
    pub input: [usize; 2],
    /// Outputs of an image.
    pub output: [usize; 2],
    /// Rows and columns of an image's slots.
    pub size: [usize; 2],
    /// Images.
    pub images: usize,
}

impl Grid {
    /// The slots of a shape; none if its windows are not the same distances everywhere.
    pub fn new(shape: &Conv2dShape) -> Option<Self> {
        let (g, input) = (shape.geometry(), shape.input());
        let before = [g.padding[0], g.padding[1]];
        if g.groups != 1 {
            return None;
        }
        let (channels, fold, kernel, before, input) = match squares(g) {
            Some((kernel, before)) if input[1].is_multiple_of(2) => {
                (SQUARE, g.ci, kernel, before, [input[0].div_ceil(2), input[1] / 2])
            }
            _ if g.stride == [1, 1] => (g.ci, 0, g.kernel, before, input),
            _ => return None,
        };
        let output = shape.output();
        let size = [0, 1].map(|axis| {
            let reach = (kernel[axis] - 1) * g.dilation[axis];
            let after = (output[axis] + reach).saturating_sub(before[axis] + input[axis]);
            (input[axis] + before[axis].max(after)).max(output[axis])
        });
        let (dilation, images) = (g.dilation, shape.batch());
        Some(Self { channels, fold, kernel, dilation, before, input, output, size, images })
    }

    /// Slots of all images; none if no number counts them.
    pub fn slots(&self) -> Option<usize> {
        self.size[0].checked_mul(self.size[1]).and_then(|slots| slots.checked_mul(self.images))
    }

    /// Slots from the first that an output sees to the last.
    pub fn reach(&self) -> usize {
        let [down, across] = [0, 1].map(|axis| (self.kernel[axis] - 1) * self.dilation[axis]);
        down * self.size[1] + across
    }

    /// Columns of the weight.
    pub fn k(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.channels
    }
}

/// The window in squares of a window of stride 2 on few channels, and the squares of padding above and left: an even number of
/// columns, of which two are read at once.
fn squares(g: &Geometry) -> Option<([usize; 2], [usize; 2])> {
    if g.stride != [2, 2] || g.dilation != [1, 1] || g.groups != 1 || 4 * g.ci > SQUARE {
        return None;
    }
    let [rows, columns] = [0, 1].map(|axis| (g.kernel[axis] + g.padding[axis] % 2).div_ceil(2));
    Some(([rows, columns.next_multiple_of(2)], [0, 1].map(|axis| g.padding[axis].div_ceil(2))))
}

/// The weight of a window in squares, if a layer has one: its codes where the window's are, and zeros.
pub(in super::super) fn fold(g: &Geometry, w: &CudaInt8) -> Option<crate::error::Result<CudaInt8>> {
    let ([rows, columns], _) = squares(g)?;
    let k = rows * columns * SQUARE;
    let mut codes = vec![0i8; g.co * k];
    for o in 0..g.co {
        for (position, c) in (0..g.positions()).flat_map(|position| (0..g.ci).map(move |c| (position, c))) {
            let [y, x] = [position / g.kernel[1] + g.padding[0] % 2, position % g.kernel[1] + g.padding[1] % 2];
            let at = (y / 2 * columns + x / 2) * SQUARE + (y % 2 * 2 + x % 2) * g.ci + c;
            codes[o * k + at] = w.code(o, position * g.ci + c);
        }
    }
    let weight = Int8Weight::new(Bytes::I8(&codes), [g.co, k], w.scales(), &[]);
    Some(weight.and_then(|weight| CudaInt8::pack(&weight, 1)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// That what an output sees at its distances is the pixel, or padding, that the definition says.
    fn check(g: Geometry, size: [usize; 2]) {
        let shape = Conv2dShape::new(g, 2, size).unwrap();
        let grid = Grid::new(&shape).unwrap();
        assert_eq!(grid.fold, 0);
        let all = grid.size[0] * grid.size[1];
        for image in 0..2 {
            for (r, c) in (0..grid.output[0]).flat_map(|r| (0..grid.output[1]).map(move |c| (r, c))) {
                for (ky, kx) in (0..g.kernel[0]).flat_map(|ky| (0..g.kernel[1]).map(move |kx| (ky, kx))) {
                    let distance = ky * g.dilation[0] * grid.size[1] + kx * g.dilation[1];
                    assert!(distance <= grid.reach());
                    let slot = image * all + r * grid.size[1] + c + distance;
                    let (there, row, column) = (slot / all, slot % all / grid.size[1], slot % grid.size[1]);
                    let inside = |at: usize, axis: usize| {
                        (at >= grid.before[axis] && at < grid.before[axis] + size[axis]).then(|| at - grid.before[axis])
                    };
                    let got = inside(row, 0).zip(inside(column, 1)).filter(|_| there < 2).map(|at| (there, at));
                    let want = inside(r + ky * g.dilation[0], 0).zip(inside(c + kx * g.dilation[1], 1));
                    assert_eq!(got, want.map(|at| (image, at)), "{g:?} ({r}, {c}) under ({ky}, {kx})");
                }
            }
        }
    }

    #[test]
    fn an_output_sees_the_same_distances_everywhere() {
        let new = |kernel| Geometry::new(32, 8, kernel);
        check(Geometry { padding: [1; 4], ..new([3, 3]) }, [7, 7]);
        check(new([3, 3]), [5, 4]);
        check(new([1, 1]), [3, 4]);
        check(Geometry { padding: [3, 0, 1, 2], ..new([2, 4]) }, [4, 5]);
        check(Geometry { padding: [0, 3, 2, 0], dilation: [2, 3], ..new([3, 2]) }, [6, 5]);
        check(Geometry { padding: [5, 4, 3, 2], ..new([2, 2]) }, [3, 4]);
    }

    #[test]
    fn seven_by_seven_of_stride_two_is_four_by_four_of_squares() {
        let g = Geometry { stride: [2, 2], padding: [3; 4], ..Geometry::new(3, 64, [7, 7]) };
        let grid = Grid::new(&Conv2dShape::new(g, 32, [224, 224]).unwrap()).unwrap();
        assert_eq!((grid.kernel, grid.before, grid.channels, grid.k()), ([4, 4], [2, 2], 16, 256));
        assert_eq!((grid.size, grid.reach()), ([114, 114], 3 * 114 + 3));
        // Rows of an odd number of pixels cannot be read in pairs.
        assert_eq!(Grid::new(&Conv2dShape::new(g, 32, [224, 223]).unwrap()), None);
    }
}
