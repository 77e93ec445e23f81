//! Where the columns of a packed weight lie, and the rows of each group of the convolution: as the convolution has them, or filled
//! up, so that positions, rows of windows, or groups begin where a kernel reads them.

use crate::conv::Geometry;
use crate::error::Result;
use crate::format::{Group, QTensor, WeightFormat, Zeros};

/// The layout of weights whose columns are filled up: `cuda_wna16` otherwise.
pub(super) const FILLED: &str = "cuda_wna16_filled";

/// Where columns lie: those of a position are neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    /// From a row of the kernel to the next.
    pub of_row: usize,
    /// From a position to the next in a row.
    pub of_position: usize,
    /// Rows of the weight from a group of the convolution to the next.
    pub of_group: usize,
}

impl Columns {
    /// Those of the convolution.
    pub fn of(geometry: &Geometry) -> Self {
        let channels = geometry.channels();
        Self {
            of_row: geometry.kernel[1].saturating_mul(channels),
            of_position: channels,
            of_group: geometry.outputs(),
        }
    }

    /// A weight with its columns there, and with the groups of a format for all of them; those between hold what stands for 0.
    /// None: it has no numbers for that, or neither one group a row nor one a position.
    pub fn fill(self, w: &QTensor, geometry: &Geometry, group: Group) -> Result<Option<QTensor>> {
        let (n, k, [kh, kw]) = (w.n(), w.k(), geometry.kernel);
        let groups = w.format().group.count(k);
        if groups != 1 && groups != geometry.positions() {
            return Ok(None);
        }
        let wide = kh * self.of_row;
        let mut codes = Vec::with_capacity(n * wide);
        for i in 0..n {
            let (first, mut zero) = (codes.len(), 0);
            for (p, position) in w.codes()[i * k..(i + 1) * k].chunks(geometry.channels()).enumerate() {
                codes.resize(first + p / kw * self.of_row + p % kw * self.of_position, zero);
                codes.extend_from_slice(position);
                let stands_for_zero = match w.zeros() {
                    Zeros::Symmetric => Some(w.format().middle()),
                    Zeros::Integer(zeros) => {
                        let zero = zeros[i * groups + if groups == 1 { 0 } else { p }];
                        Some(u32::from(zero)).filter(|&zero| zero <= w.format().max_code())
                    }
                    Zeros::Float(_) => None,
                };
                let Some(code) = stands_for_zero else { return Ok(None) };
                zero = code as u8;
            }
            codes.resize(first + wide, zero);
        }
        let format = WeightFormat { group, ..w.format() };
        Ok(Some(QTensor::new(format, [n, wide], codes, w.scales().to_vec(), w.zeros().clone(), None)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Act, Format};

    #[test]
    fn what_lies_between_stands_for_zero() {
        let format: Format = "w8a16-asym".parse().unwrap();
        assert_eq!(format.act, Act::A16);
        let geometry = Geometry::new(1, 2, [2, 2]);
        let zeros = Zeros::Integer(vec![7, 9]);
        let w = QTensor::new(format.weight, [2, 4], vec![1, 2, 3, 4, 5, 6, 7, 8], vec![1.0, 2.0], zeros, None).unwrap();
        let columns = Columns { of_row: 5, of_position: 2, of_group: 2 };
        let filled = columns.fill(&w, &geometry, format.weight.group).unwrap().unwrap();
        assert_eq!(filled.codes(), [1, 7, 2, 7, 7, 3, 7, 4, 7, 7, 5, 9, 6, 9, 9, 7, 9, 8, 9, 9]);
        assert_eq!((filled.n(), filled.k(), filled.scales()), (2, 10, &[1.0, 2.0][..]));
        // A group for each position is one for what follows it, too.
        let by_position = w.express(WeightFormat { group: Group::Size(1), ..format.weight }).unwrap();
        let columns = Columns { of_row: 6, of_position: 3, of_group: 2 };
        let filled = columns.fill(&by_position, &geometry, Group::Size(3)).unwrap().unwrap();
        assert_eq!(filled.codes()[..12], [1, 7, 7, 2, 7, 7, 3, 7, 7, 4, 7, 7]);
        assert_eq!(filled.scales(), [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]);
    }
}
