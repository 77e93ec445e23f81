//! The numbers that codes stand for, without rounding.

use halfbyte::{QTensor, Zeros};

/// Element `i` of a tensor, row-major, as the nearest f64 and what is left of it: a product of a float and a code has
/// 33 bits at most, its sum with an offset any number of them.
pub(crate) fn element(q: &QTensor, i: usize) -> [f64; 2] {
    let (row, column) = (i / q.k(), i % q.k());
    let g = row * q.groups() + q.group_of(column);
    let (scale, code) = (f64::from(q.scales()[g]), f64::from(q.codes()[i]));
    match q.zeros() {
        Zeros::Symmetric => [scale * (code - f64::from(q.format().middle())), 0.0],
        Zeros::Integer(zeros) => [scale * (code - f64::from(zeros[g])), 0.0],
        Zeros::Float(offsets) => sum(scale * code, f64::from(offsets[g])),
    }
}

/// The sum of two numbers, as the nearest f64 and what is left of it, which is one too (Knuth's two-sum).
fn sum(a: f64, b: f64) -> [f64; 2] {
    let nearest = a + b;
    if !nearest.is_finite() {
        return [nearest, 0.0];
    }
    let of_b = nearest - a;
    [nearest, (a - (nearest - of_b)) + (b - of_b)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use halfbyte::Format;

    #[test]
    fn sums_keep_what_does_not_fit() {
        let tiny = 2f64.powi(-80);
        assert_eq!([sum(1e20, 1.0), sum(1.0, 1e20)], [[1e20, 1.0]; 2]);
        assert_eq!([sum(-3.0, tiny), sum(1.5, -1.5)], [[-3.0, tiny], [0.0, 0.0]]);
        assert_eq!(sum(f64::INFINITY, 1.0), [f64::INFINITY, 0.0]);
        assert!(sum(f64::INFINITY, f64::NEG_INFINITY)[0].is_nan());
    }

    #[test]
    fn offsets_below_the_last_bit_of_a_product_count() {
        let format = "w4a16-float-sf32".parse::<Format>().unwrap().weight;
        let tensor =
            |offset| QTensor::new(format, [1, 2], vec![0, 3], vec![1e30], Zeros::Float(vec![offset]), None).unwrap();
        let (a, b) = (tensor(1.0), tensor(1.5));
        assert_eq!([element(&a, 0), element(&b, 0)], [[1.0, 0.0], [1.5, 0.0]]);
        assert_eq!(element(&a, 1)[0], element(&b, 1)[0]);
        assert_eq!([element(&a, 1)[1], element(&b, 1)[1]], [1.0, 1.5]);
    }
}
