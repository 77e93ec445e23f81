//! Whether a measured product is right: a sample of its elements against the f64 reference.

use crate::failure::Result;
use halfbyte::format::reference::{self, Bound, Product};
use halfbyte::{Format, QTensor, Zeros};
use serde::Serialize;

/// Rows of x and outputs that are looked at.
const ROWS: usize = 4;
const OUTPUTS: usize = 64;

/// What a check found.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Check {
    /// Elements compared.
    pub elements: usize,
    /// The largest distance from the reference, as a share of what the bound allows.
    pub worst: f64,
    /// Whether every element is within the bound.
    pub passed: bool,
}

/// A product that was computed.
#[derive(Clone, Copy, Debug)]
pub struct Computed<'a> {
    /// Activations `[m, k]`, as the kernel saw them.
    pub x: &'a [f32],
    /// Result `[m, n]`.
    pub y: &'a [f32],
    /// Rows, outputs, length of the reduction.
    pub shape: [usize; 3],
    /// How far it may lie from the reference.
    pub bound: Bound,
}

/// The weight of a product.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// Codes, and the whole format.
    Quantized(&'a QTensor, Format),
    /// Floats `[n, k]`, widened.
    Dense(&'a [f32]),
}

/// Compares rows and outputs from the beginning, the middle and the end.
pub fn check(weight: Weight<'_>, computed: Computed<'_>) -> Result<Check> {
    let [m, n, k] = computed.shape;
    let rows = rows(m);
    let pick = |values: &[f32], width: usize| -> Vec<f32> {
        rows.iter().flat_map(|&r| &values[r * width..(r + 1) * width]).copied().collect()
    };
    let (x, y) = (pick(computed.x, k), pick(computed.y, n));
    check_rows(weight, Computed { x: &x, y: &y, shape: [rows.len(), n, k], ..computed })
}

/// The rows of x that [`check`] looks at.
pub fn rows(m: usize) -> Vec<usize> {
    sample(m, ROWS)
}

/// The same of a product that consists of those rows alone.
pub fn check_rows(weight: Weight<'_>, computed: Computed<'_>) -> Result<Check> {
    let Computed { x, y, shape: [m, n, k], bound } = computed;
    let outputs = sample(n, OUTPUTS);
    let product = match weight {
        Weight::Quantized(w, format) => reference::linear(x, m, &rows_of(w, &outputs)?, format.act),
        Weight::Dense(w) => {
            let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
            let w: Vec<f64> = outputs.iter().flat_map(|&i| &w[i * k..(i + 1) * k]).map(|&v| f64::from(v)).collect();
            reference::matmul(&x, &w, [m, outputs.len(), k])
        }
    };
    let elements = (0..m).flat_map(|r| outputs.iter().map(move |&i| y[r * n + i]));
    Ok(compare(&product, elements, bound))
}

/// Compares elements in the order of the reference.
pub fn compare(product: &Product, elements: impl Iterator<Item = f32>, bound: Bound) -> Check {
    let mut worst = 0.0f64;
    let mut passed = true;
    for ((y, value), magnitude) in elements.zip(&product.value).zip(&product.magnitude) {
        let share = (f64::from(y) - value).abs() / bound.allowed(*magnitude);
        // A NaN is within no bound.
        passed &= share <= 1.0;
        worst = if share.is_nan() { f64::INFINITY } else { worst.max(share) };
    }
    Check { elements: product.value.len(), worst, passed }
}

/// At most `most` of `count` indices, the first and the last among them.
fn sample(count: usize, most: usize) -> Vec<usize> {
    let taken = count.min(most);
    (0..taken).map(|i| if taken == 1 { 0 } else { i * (count - 1) / (taken - 1) }).collect()
}

/// Some rows of a tensor.
fn rows_of(w: &QTensor, rows: &[usize]) -> Result<QTensor> {
    fn pick<T: Copy>(values: &[T], width: usize, rows: &[usize]) -> Vec<T> {
        rows.iter().flat_map(|&i| &values[i * width..(i + 1) * width]).copied().collect()
    }
    let groups = w.groups();
    let zeros = match w.zeros() {
        Zeros::Symmetric => Zeros::Symmetric,
        Zeros::Integer(z) => Zeros::Integer(pick(z, groups, rows)),
        Zeros::Float(z) => Zeros::Float(pick(z, groups, rows)),
    };
    let (codes, scales) = (pick(w.codes(), w.k(), rows), pick(w.scales(), groups, rows));
    let index = w.group_index().map(<[u32]>::to_vec);
    Ok(QTensor::new(w.format(), [rows.len(), w.k()], codes, scales, zeros, index)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;
    use halfbyte::Float;

    #[test]
    fn a_wrong_element_and_a_nan_are_found() {
        let format: Format = "w4a8-g32-asym".parse().unwrap();
        let shape = [2, 5, 64];
        let w = random::qtensor(format.weight, [5, 64], 3).unwrap();
        let x = random::normals(2 * 64, 4);
        let right: Vec<f32> = reference::linear(&x, 2, &w, format.act).value.iter().map(|&v| v as f32).collect();
        let checked = |y: &[f32]| {
            check(Weight::Quantized(&w, format), Computed { x: &x, y, shape, bound: Bound::new(Float::F32, shape[2]) })
                .unwrap()
        };
        let found = checked(&right);
        assert!(found.passed && found.worst < 0.5 && found.elements == 10, "{found:?}");
        for wrong in [right[7] + 0.01, f32::NAN] {
            let mut y = right.clone();
            y[7] = wrong;
            assert!(!checked(&y).passed, "{wrong}");
        }
    }

    #[test]
    fn samples_reach_both_ends() {
        assert_eq!(sample(3, 4), [0, 1, 2]);
        assert_eq!(sample(1, 4), [0]);
        assert_eq!(sample(512, 4), [0, 170, 340, 511]);
        assert!(sample(0, 4).is_empty());
    }
}
